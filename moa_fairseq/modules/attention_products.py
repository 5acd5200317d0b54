"""Attention of the selected experts' queries to the keys that all experts share. Plain PyTorch.

All K queries of all T tokens meet the shared keys in one product. Where several neighbours of the
batch share their keys (hypotheses of a sentence in beam search), these stand side by side like
tokens: `n` sentences of `batch / n` hypotheses.
"""

from __future__ import annotations

from typing import Callable, Optional, Tuple

import torch
from torch import Tensor
from torch.nn import functional as F

# From so many keys on torch's fused attention needs less memory and no more time (measured).
FUSED_FROM = 256

# A finite score keeps a row of nothing but padding from becoming NaN.
HIDDEN = torch.finfo(torch.float32).min


def merge_masks(
    attn_mask: Optional[Tensor], key_padding_mask: Optional[Tensor], num_selected: int, groups: int
) -> Optional[Tensor]:
    """What is added to the scores of T·K queries: `[n, 1, T*K, S]` or what broadcasts to it.

    Args:
        attn_mask: `[T, S]`, minus infinity where a key is hidden.
        key_padding_mask: `[n, S]` bool.
        num_selected: K.
        groups: n.
    """
    mask = None
    if attn_mask is not None:
        # One row for each of the K queries of a token.
        mask = attn_mask.float().clamp(min=HIDDEN).repeat_interleave(num_selected, 0)  # [T*K, S]
    if key_padding_mask is not None:
        padding = key_padding_mask.view(groups, 1, 1, -1)  # [n, 1, 1, S]
        if mask is None:
            return torch.zeros_like(padding, dtype=torch.float32).masked_fill(padding, HIDDEN)
        return mask.masked_fill(padding, HIDDEN)
    return mask


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Optional[Tensor],
    dropout: Callable[[Tensor], Tensor],
    gates: Optional[Tensor] = None,
) -> Tuple[Tensor, Tensor]:
    """o_{i,t} = softmax(q_t·W_i^q·(k·W^k)ᵀ / √D + mask)·(v·W^v) (equation 3).

    Args:
        queries: `[batch, T, K, H·D]`.
        keys, values: `[n, H, S, D]`; values of padding are zero.
        mask: of :func:`merge_masks`.
        dropout: what is done to the weights before they meet the values.
        gates: `[batch, T, K]` by which heads are multiplied; None multiplies by nothing.

    Returns:
        heads `[batch, T, K, H·D]` and attention weights `[batch, T, K·H, S]` in float32,
        before dropout and gates.
    """
    groups, _, source_length, head_dim = keys.shape
    rows = _side_by_side(queries, keys)
    # 1/√D goes where there is less to multiply.
    if rows.shape[2] < source_length:
        rows = rows * head_dim**-0.5  # [n, H, T*K, D]
    else:
        keys = keys * head_dim**-0.5
    scores = (rows @ keys.transpose(2, 3)).float()  # [n, H, T*K, S]
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1)
    mixing = dropout(weights)
    if gates is not None:
        mixing = mixing * gates.reshape(groups, 1, -1, 1)  # [n, 1, T*K, 1]
    heads = _as_queries(mixing.to(values.dtype) @ values, queries)
    weights = weights.transpose(1, 2)  # [n, T*K, H, S]
    return heads, weights.reshape(*queries.shape[:2], -1, source_length)


def worth_fusing(keys: Tensor, dropout: float) -> bool:
    """Whether :func:`attend_fused` is faster for `keys` `[n, H, S, D]` than :func:`attend`.

    On a CPU torch fuses nothing that drops weights.
    """
    can = hasattr(F, "scaled_dot_product_attention")  # torch 2.0
    return can and keys.shape[2] >= FUSED_FROM and (dropout == 0 or keys.device.type != "cpu")


def attend_fused(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Optional[Tensor], dropout: float
) -> Tensor:
    """The heads of :func:`attend`, without its weights, by torch's fused attention.

    The gradient that it gives to values of padding is of no use where a query sees nothing else.

    Args:
        queries, keys, values, mask: see :func:`attend`.
        dropout: probability of dropping a weight.
    """
    rows = _side_by_side(queries, keys)
    if mask is not None:
        mask = mask.clamp(min=max(HIDDEN, torch.finfo(rows.dtype).min)).to(rows.dtype)
    heads = F.scaled_dot_product_attention(rows, keys, values, mask, dropout)
    return _as_queries(heads, queries)


def _side_by_side(queries: Tensor, keys: Tensor) -> Tensor:
    """`[batch, T, K, H*D]` -> `[n, H, T*K, D]`, tokens of a sentence's hypotheses together."""
    groups, num_heads, _, head_dim = keys.shape
    return queries.reshape(groups, -1, num_heads, head_dim).transpose(1, 2)


def _as_queries(heads: Tensor, queries: Tensor) -> Tensor:
    """`[n, H, T*K, D]` -> `[batch, T, K, H*D]`."""
    return heads.transpose(1, 2).reshape(queries.shape)
