"""What a criterion adds to its loss, and logs, for the routings of one forward pass."""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Sequence

import torch
from fairseq.logging import metrics
from torch import Tensor, nn

from ..modules.moa_attention import ENCODER_SELF
from ..modules.moe_feed_forward import ENCODER_FFN
from ..modules.recording import ROUTED_KINDS, RecordedRouting, routed_modules
from ..modules.router_losses import (
    cv_squared_loss,
    expert_counts,
    load_balancing_loss,
    load_coefficient_of_variation,
    router_z_loss,
    routing_entropy,
)

ENCODER_KINDS = (ENCODER_SELF, ENCODER_FFN)
LOSS_NAMES = ("load_balance_loss", "router_z_loss", "load_cv_squared_loss")


class RouterLossWeights(NamedTuple):
    """α, β and γ of equation 7 and of the authors' cv² loss."""

    load_balance: float
    z: float
    cv_squared: float


def router_loss(
    model: nn.Module,
    recorded: Sequence[RecordedRouting],
    padding_masks: Dict[str, Tensor],
    weights: RouterLossWeights,
    padding_in_z: bool = False,
) -> tuple[Tensor, Dict[str, Any]]:
    """Σ over MoA modules of (α·load balance + β·z + γ·cv²), equation 7, for one batch.

    Args:
        model: the model that ran.
        recorded: the routings of one forward pass.
        padding_masks: `[batch, length]` bool by kind of module, true where a query is padding.
        weights: α, β, γ.
        padding_in_z: count padding in the z-loss too, as the authors' code does.

    Returns:
        the weighted sum (a scalar with gradient), and what to log: each loss as its mean over
        modules, and the sums from which :func:`log_router_metrics` derives statistics. All of
        the latter are detached and can be summed over batches and workers, once the losses
        are multiplied by the sample size.
    """
    losses: List[Tensor] = []
    statistics = _zero_statistics(model)
    for _, kind, position, routing in recorded:
        padding = padding_masks[kind]
        losses.append(
            torch.stack(
                (
                    load_balancing_loss(routing, padding),
                    router_z_loss(routing, None if padding_in_z else padding),
                    cv_squared_loss(routing, padding),
                )
            )
        )
        with torch.no_grad():
            # Leading underscores keep these sums off the console and out of TensorBoard.
            counts = expert_counts(routing, padding)
            tokens = (~padding).sum().float()
            statistics[f"_load_{kind}_{position}"] += counts
            statistics[f"_entropy_{kind}"] += routing_entropy(routing, padding)
            statistics[f"_tokens_{kind}"] += tokens
    # Without a single module (LayerDrop may drop them all) every loss is zero.
    none = next(iter(statistics.values())).new_zeros(1, len(LOSS_NAMES))
    stacked = torch.stack(losses) if losses else none  # [modules, 3]
    total = (stacked.sum(dim=0) * stacked.new_tensor(weights)).sum()
    means = dict(zip(LOSS_NAMES, stacked.detach().mean(dim=0).unbind()))
    return total, {"router_loss": total.detach(), **means, **statistics}


def _zero_statistics(model: nn.Module) -> Dict[str, Tensor]:
    """A zero for every sum, since workers whose layers were dropped must send the same names."""
    zeros: Dict[str, Tensor] = {}
    for _, position, module in routed_modules(model):
        weight = module.router.weight
        scalar = torch.zeros((), device=weight.device)
        zeros[f"_load_{module.kind}_{position}"] = scalar.new_zeros(module.num_experts)
        zeros[f"_entropy_{module.kind}"] = scalar.clone()
        zeros[f"_tokens_{module.kind}"] = scalar.clone()
    return zeros


def log_router_metrics(logging_outputs: Sequence[Dict[str, Any]]) -> None:
    """Log router losses and, for each kind of attention and feed-forward, load and entropy.

    Losses are averaged with the sample size as weight. Statistics are derived from sums over
    the whole logging interval (or validation set): the coefficient of variation of expert load
    and the share of experts that got no token, both averaged over layers, and the entropy of
    the router's probabilities in nats.
    """
    names = sorted({name for output in logging_outputs for name in output})
    sample_size = sum(output.get("sample_size", 0) for output in logging_outputs)

    def total(name: str) -> Any:
        return sum(output[name] for output in logging_outputs if name in output)

    for name in ("router_loss", *LOSS_NAMES):
        if name in names:
            metrics.log_scalar(name, total(name) / sample_size, sample_size, round=4)
    for kind in ROUTED_KINDS:
        loads = [name for name in names if name.startswith(f"_load_{kind}_")]
        if not loads:
            continue
        for name in (*loads, f"_entropy_{kind}", f"_tokens_{kind}"):
            # Weight 1 makes the meter's sum the sum of the values.
            metrics.log_scalar(name, total(name), weight=1)
        label = kind.replace("-", "_")
        # Layers without a single token (LayerDrop) count for nothing.
        metrics.log_derived(
            f"load_cv_{label}", _load_statistic(kind, load_coefficient_of_variation)
        )
        metrics.log_derived(f"unused_experts_{label}", _load_statistic(kind, _share_unused))
        metrics.log_derived(f"routing_entropy_{label}", _mean_entropy(kind))


def _load_statistic(kind: str, statistic: Any) -> Any:
    def derive(meters: Dict[str, Any]) -> float:
        names = [name for name in meters if name.startswith(f"_load_{kind}_")]
        counts = [torch.as_tensor(meters[name].sum).float() for name in names]
        values = [statistic(count) for count in counts if count.any()]
        return round(float(torch.stack(values).mean()), 4) if values else math.nan

    return derive


def _share_unused(counts: Tensor) -> Tensor:
    return (counts == 0).float().mean()


def _mean_entropy(kind: str) -> Any:
    def derive(meters: Dict[str, Any]) -> float:
        tokens = float(meters[f"_tokens_{kind}"].sum)
        return round(float(meters[f"_entropy_{kind}"].sum) / tokens, 4) if tokens else math.nan

    return derive


def padding_masks(sample: Dict[str, Any], padding_index: int) -> Dict[str, Tensor]:
    """Which query tokens are padding, by kind of module, decided once from the tokens of a batch.

    Of a batch without a target side (masked language models), only kinds of the encoder.
    """
    inputs = sample["net_input"]
    source = inputs["src_tokens"].eq(padding_index)  # [batch, S]
    masks = dict.fromkeys(ENCODER_KINDS, source)
    if "prev_output_tokens" in inputs:
        target = inputs["prev_output_tokens"].eq(padding_index)  # [batch, T]
        masks.update({kind: target for kind in ROUTED_KINDS if kind not in ENCODER_KINDS})
    return masks
