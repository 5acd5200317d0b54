"""Losses and statistics of a routing: pure functions of a `Routing` and a padding mask.

A padding mask is `[...]` bool, True where a token is padding and counts for nothing, or None.
Equations are numbered as in the paper (arXiv 2210.05144, section 3).
"""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from .routing import Routing


def expert_counts(routing: Routing, padding_mask: Optional[Tensor] = None) -> Tensor:
    """f_i, unnormalised: how many real tokens selected each expert. `[E]` float32, no gradient."""
    num_experts = routing.probabilities.shape[-1]
    real = _real_tokens(routing, padding_mask)
    selections = real.unsqueeze(-1).expand(routing.indices.shape)  # [..., K]
    counts = torch.zeros(num_experts, dtype=torch.float32, device=real.device)
    return counts.index_add_(0, routing.indices.reshape(-1), selections.reshape(-1))  # [N*K]


def expert_importance(routing: Routing, padding_mask: Optional[Tensor] = None) -> Tensor:
    """P_i, unnormalised: the probability mass of each expert over real tokens. `[E]`."""
    weighted = routing.probabilities * _real_tokens(routing, padding_mask).unsqueeze(-1)
    return weighted.flatten(0, -2).sum(dim=0)  # [N, E] -> [E]


def load_balancing_loss(routing: Routing, padding_mask: Optional[Tensor] = None) -> Tensor:
    """L_a = E · Σ_i f̂_i · P̂_i (equation 5), the Switch Transformer's balance loss.

    Its minimum is 1, at uniform load. With K = E it is 1 and has no gradient.
    """
    counts = expert_counts(routing, padding_mask)
    importance = expert_importance(routing, padding_mask)
    # With K = E, counts are uniform and Σ P̂ = 1: say so exactly, not up to rounding.
    if routing.indices.shape[-1] == counts.numel():
        return importance.new_ones(())
    return counts.numel() * (_normalize(counts) * _normalize(importance)).sum()


def router_z_loss(routing: Routing, padding_mask: Optional[Tensor] = None) -> Tensor:
    """L_z = mean over real tokens of (logsumexp_i x_{i,t})² (equation 6; ST-MoE)."""
    squared = torch.logsumexp(routing.logits, dim=-1).square()
    real = _real_tokens(routing, padding_mask)
    return (squared * real).sum() / real.sum().clamp(min=1)


def cv_squared_loss(routing: Routing, padding_mask: Optional[Tensor] = None) -> Tensor:
    """Squared coefficient of variation of the experts' share of the selected probability.

    From the authors' code, off by default: var/mean² (unbiased variance) of the per-expert
    sum of the selected experts' probabilities, normalised to sum 1.
    """
    num_experts = routing.probabilities.shape[-1]
    if num_experts == 1:
        return routing.probabilities.new_zeros(())
    selected = routing.probabilities.gather(-1, routing.indices)
    selected = selected * _real_tokens(routing, padding_mask).unsqueeze(-1)
    sums = selected.new_zeros(num_experts)
    sums = sums.index_add(0, routing.indices.reshape(-1), selected.reshape(-1))  # [N*K] -> [E]
    share = _normalize(sums)
    return share.var() / (share.mean().square() + 1e-10)


def routing_entropy(routing: Routing, padding_mask: Optional[Tensor] = None) -> Tensor:
    """Sum over real tokens of the entropy of p_t, in nats; at most log E a token."""
    entropy = torch.special.entr(routing.probabilities).sum(dim=-1)
    return (entropy * _real_tokens(routing, padding_mask)).sum()


def load_coefficient_of_variation(counts: Tensor) -> Tensor:
    """Standard deviation over mean of the experts' load; 0 is perfect balance.

    Args:
        counts: `[..., E]`, how many tokens selected each expert.

    Returns:
        `[...]`; 0 where no token was routed.
    """
    mean = counts.mean(dim=-1)
    return counts.std(dim=-1, correction=0) / mean.clamp(min=torch.finfo(mean.dtype).tiny)


def _real_tokens(routing: Routing, padding_mask: Optional[Tensor]) -> Tensor:
    """1.0 for a real token, 0.0 for padding; `[...]` float32."""
    tokens = routing.probabilities.shape[:-1]
    if padding_mask is None:
        return torch.ones(tokens, device=routing.probabilities.device)
    if padding_mask.shape != tokens:
        raise ValueError(
            f"padding mask has shape {tuple(padding_mask.shape)}, "
            f"but the routed tokens have {tuple(tokens)}"
        )
    return (~padding_mask.bool()).float()


def _normalize(values: Tensor) -> Tensor:
    """Divide by the sum; all zeros stay zeros."""
    return values / values.sum().clamp(min=torch.finfo(values.dtype).tiny)
