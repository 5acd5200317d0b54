"""Attention whose query and output projections are multiplied into the keys and values.

Where many tokens meet the same few keys, as the hypotheses of a sentence do in cross-attention,
q_t·(W_i^q·kᵀ) and w·(v·W_i^o) cost less than (q_t·W_i^q)·kᵀ and (w·v)·W_i^o: S instead of D numbers
for each head and token. All experts are computed, those that a token did not select with a gate of
zero. Plain PyTorch; one head an expert.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

import torch
from torch import Tensor

# Numbers in the absorbed keys of one attention: 32 MiB, and as much for the values.
MOST_NUMBERS = 2**23


class AbsorbedProjections(NamedTuple):
    """What takes the place of keys and values.

    Attributes:
        keys: `[n, E*S, d]`, k·W_i^q / √D.
        values: `[n, d, E*S]`, v·W_i^o.
        key_bias: `[n, 1, E*S]`, what biases of queries add to the scores; None without.
    """

    keys: Tensor
    values: Tensor
    key_bias: Optional[Tensor]


def worth_absorbing(
    sharers: int, keys: Tensor, num_selected: int, num_experts: int, embed_dim: int
) -> bool:
    """Whether absorbing saves time on a CPU.

    It takes 2·E·d·D·S multiply-adds for a sentence. A token of a hypothesis then needs 2·E·d·S
    instead of 2·K·(d·D + S·D). The products that remain have a few rows each, for which they are
    slow unless keys and values stay in the cache: the bounds are measured ones.

    Args:
        sharers: hypotheses that share their keys.
        keys: `[n, 1, S, D]`.
        num_selected, num_experts, embed_dim: K, E and d.
    """
    groups, _, source_length, head_dim = keys.shape
    if groups == 1:
        few = 4 * source_length <= 3 * head_dim and num_experts == num_selected
        few = few or (3 * source_length <= head_dim and num_experts <= 4 * num_selected)
        return sharers > 1 and few
    small = groups * num_experts * source_length * embed_dim <= MOST_NUMBERS
    few = 3 * source_length <= head_dim and num_experts == num_selected
    return small and sharers > 3 and few


def absorb(
    keys: Tensor,
    values: Tensor,
    q_weight: Tensor,
    o_weight: Tensor,
    q_bias: Optional[Tensor] = None,
) -> AbsorbedProjections:
    """Multiply projections into keys and values.

    Args:
        keys, values: `[n, 1, S, D]`.
        q_weight: `[E, d, D]`.
        o_weight: `[E, D, d]`.
        q_bias: `[E, D]`.
    """
    groups, _, source_length, head_dim = keys.shape
    num_experts, embed_dim, _ = q_weight.shape
    keys = keys.reshape(-1, head_dim) * head_dim**-0.5  # [n*S, D]
    absorbed_keys = keys @ q_weight.reshape(-1, head_dim).t()  # [n*S, E*d]
    absorbed_keys = absorbed_keys.view(groups, source_length, num_experts, embed_dim)
    stacked = o_weight.permute(2, 0, 1).reshape(-1, head_dim)  # [E, D, d] -> [d*E, D]
    absorbed_values = stacked @ values.squeeze(1).mT  # [n, d*E, S]
    key_bias = None
    if q_bias is not None:
        key_bias = (keys @ q_bias.t()).view(groups, source_length, -1)  # [n, S, E]
        key_bias = key_bias.mT.reshape(groups, 1, -1)  # [n, 1, E*S]
    return AbsorbedProjections(
        absorbed_keys.transpose(1, 2).reshape(groups, -1, embed_dim),  # [n, E*S, d]
        absorbed_values.view(groups, embed_dim, -1),  # [n, d, E*S]
        key_bias,
    )


def attend_absorbed(
    tokens: Tensor,
    gates: Tensor,
    absorbed: AbsorbedProjections,
    key_padding_mask: Optional[Tensor],
    o_bias: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """Σ_i w_{i,t}·(o_{i,t}·W_i^o + b_i) over all experts (equation 3).

    Args:
        tokens: `[n, R, d]`, all tokens that meet a sentence's keys.
        gates: `[n, R, E]`; zero for experts that a token did not select.
        absorbed: of the same sentences.
        key_padding_mask: `[n, S]` bool.
        o_bias: `[E, d]`, b_i.

    Returns:
        output `[n, R, d]` and attention weights `[n, R, E, S]`.
    """
    # A product with few rows is fastest where they stand transposed on its right.
    scores = torch.bmm(absorbed.keys, tokens.mT).mT  # [n, R, E*S]
    if absorbed.key_bias is not None:
        scores = scores + absorbed.key_bias
    scores = scores.reshape(*gates.shape, -1)  # [n, R, E, S]
    if key_padding_mask is not None:
        padding = key_padding_mask[:, None, None]  # [n, 1, 1, S]
        scores = scores.masked_fill(padding, torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, dim=-1)
    mixing = (weights * gates.unsqueeze(-1)).flatten(2)  # [n, R, E*S]
    output = torch.bmm(absorbed.values, mixing.mT).mT  # [n, R, d]
    return output if o_bias is None else output + gates @ o_bias, weights
