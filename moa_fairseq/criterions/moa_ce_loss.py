"""The loss of the authors' code under its name there, to compare runs of old and new.

No `from __future__ import annotations` here: fairseq reads the types of the fields.
"""

from dataclasses import dataclass, field, fields
from typing import Any, Dict

from fairseq.criterions import register_criterion
from torch import Tensor, nn

from .label_smoothed_cross_entropy_with_router_loss import (
    LabelSmoothedCrossEntropyWithRouterLoss,
    LabelSmoothedCrossEntropyWithRouterLossConfig,
)

_HELP = {f.name: f.metadata for f in fields(LabelSmoothedCrossEntropyWithRouterLossConfig)}


@dataclass
class MoACrossEntropyLossConfig(LabelSmoothedCrossEntropyWithRouterLossConfig):
    # As in the authors' code, nothing is on by default.
    load_balance_weight: float = field(default=0.0, metadata=_HELP["load_balance_weight"])
    router_z_weight: float = field(default=0.0, metadata=_HELP["router_z_weight"])


@register_criterion("moa_ce_loss", dataclass=MoACrossEntropyLossConfig)
class MoACrossEntropyLoss(LabelSmoothedCrossEntropyWithRouterLoss):
    """L_model + Σ over MoA modules of (α·L_a + β·L_z + γ·cv²), as the authors' code adds it.

    It differs from `label_smoothed_cross_entropy_with_router_loss` in four ways, none of them
    to be wished for: router terms are not multiplied by the sample size, so that they weigh the
    less the more tokens a batch has (about 1e-6 of the gradient's scale in the paper's runs);
    they are in the validation loss and in the `loss` that is logged; the z-loss counts padding;
    and all weights are 0 by default. `nll_loss` and `ppl` are without router terms here too.
    """

    padding_in_z = True

    def add_router_term(
        self,
        loss: Tensor,
        router_term: Tensor,
        sample_size: int,
        model: nn.Module,
        logging_output: Dict[str, Any],
    ) -> Tensor:
        """The router term as it is, in training and validation, and in the logged `loss`."""
        loss = loss + router_term
        logging_output["loss"] = loss.detach()
        return loss
