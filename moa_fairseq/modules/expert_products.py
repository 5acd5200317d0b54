"""The matrix products of experts: (token, expert) pairs sorted once, multiplied group by group.

Plain PyTorch. Three backends compute the same:

* `dense`: one product with the matrices of all experts. Where every token uses every expert
  (K = E) this is all there is to do; otherwise it wastes E/K of the work, but waits for nothing.
* `loop`: one product for each expert, on the rows of its tokens. Padding is left out. Rows are
  gathered expert by expert, in the backward pass again, so that nothing of size N·K·d exists.
* `grouped`: torch's grouped product for all experts at once, without waiting for the device.
  Padding is computed, and has gates of zero.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

DENSE = "dense"
LOOP = "loop"
GROUPED = "grouped"
AUTO = "auto"
BACKENDS = (AUTO, DENSE, LOOP, GROUPED)

# grouped_mm wants rows that begin at multiples of 16 bytes: of 8 numbers in half precision, which
# autocast may turn to.
ROW_ALIGNMENT = 8
# Up to here the grouped product is faster on a CPU (measured with 8 to 32 experts).
FEW_TOKENS = 128


class Dispatch(NamedTuple):
    """The (token, expert) pairs of a routing, grouped by expert, and how to compute them.

    Pairs are numbered as in `indices.flatten()`.

    Attributes:
        indices: `[N, K]` int64, the expert of each pair.
        backend: `dense`, `loop` or `grouped`.
        order: `[M]` int64, pairs sorted by expert; with `loop`, padding is left out. None where
            nothing needs sorting.
        tokens: `[M]` int64, the token of each pair in that order.
        counts: with `loop`, how many pairs each expert has.
        offsets: `[E]` int32, with `grouped`, where the pairs of each expert end.
    """

    indices: Tensor
    backend: str
    order: Optional[Tensor] = None
    tokens: Optional[Tensor] = None
    counts: Optional[List[int]] = None
    offsets: Optional[Tensor] = None


def choose_backend(
    wanted: str, num_selected: int, num_experts: int, tokens: Tensor, widths: List[int]
) -> str:
    """`dense`, `loop` or `grouped`, for K of E experts.

    Args:
        wanted: one of `BACKENDS`; `auto` leaves the choice to a rule.
        num_selected, num_experts: K and E.
        tokens: what is multiplied; its device and type count.
        widths: sizes of the experts' inputs and outputs.

    Raises:
        ValueError: where torch cannot do what is wanted, naming the flag.
    """
    aligned = all(width % ROW_ALIGNMENT == 0 for width in widths)
    can_group = hasattr(F, "grouped_mm") and tokens.dtype != torch.float64 and aligned
    if wanted == GROUPED and not can_group:
        raise ValueError(
            f"--expert-backend grouped needs torch 2.10 or later, no float64, and multiples of "
            f"{ROW_ALIGNMENT} for {' and '.join(map(str, widths))}; use --expert-backend loop"
        )
    if wanted != AUTO:
        return wanted
    if num_selected == num_experts:
        return DENSE
    # On a CPU the loop needs no copy of all rows, and nothing is waited for; with few of them the
    # calls of the loop cost more.
    few = tokens.shape[:-1].numel() <= FEW_TOKENS and not torch.is_grad_enabled()
    return GROUPED if can_group and (tokens.device.type != "cpu" or few) else LOOP


def dispatch(
    indices: Tensor, num_experts: int, padding_mask: Optional[Tensor], backend: str
) -> Dispatch:
    """Group the pairs of `indices` `[N, K]` by expert.

    Args:
        indices: `[N, K]` int64, the experts that each token selected.
        num_experts: E.
        padding_mask: `[N]` bool, True for tokens that no expert needs to see.
        backend: one of `dense`, `loop` and `grouped`.
    """
    if backend == DENSE:
        return Dispatch(indices, backend)
    num_selected = indices.shape[1]
    experts = indices.flatten()  # [N*K]
    if backend == GROUPED:
        experts, order = torch.sort(experts, stable=True)
        ends = torch.arange(1, num_experts + 1, device=experts.device)
        offsets = torch.searchsorted(experts, ends).to(torch.int32)
        return Dispatch(indices, backend, order, order // num_selected, offsets=offsets)
    if padding_mask is not None:
        # Padding goes to an expert past the last one, which is then cut off.
        padding = padding_mask.unsqueeze(1).expand(indices.shape).flatten()  # [N*K]
        experts = experts.masked_fill(padding, num_experts)
    counts = torch.bincount(experts, minlength=num_experts)[:num_experts].tolist()
    order = torch.argsort(experts, stable=True)[: sum(counts)]
    return Dispatch(indices, backend, order, order // num_selected, counts)


def project_pairs(tokens: Tensor, weight: Tensor, plan: Dispatch) -> Tensor:
    """Each token times the matrix of each of its experts.

    Args:
        tokens: `[N, in]`.
        weight: `[E, in, out]`.
        plan: of `[N, K]` pairs.

    Returns:
        `[N, K, out]`; with `loop`, rows of padding are zero.
    """
    tokens, weight = _as_autocast(tokens, weight)
    num_experts, _, out_features = weight.shape
    num_tokens, num_selected = plan.indices.shape
    if plan.backend == DENSE:
        projected = _project_all(tokens, weight)  # [N, E, out]
        if num_selected == num_experts:
            return projected
        chosen = plan.indices.unsqueeze(-1).expand(-1, -1, out_features)  # [N, K, out]
        return projected.gather(1, chosen)
    pairs = _ProjectPairs.apply(tokens, weight, plan)  # [N*K, out]
    return pairs.view(num_tokens, num_selected, out_features)


def combine_pairs(heads: Tensor, gates: Optional[Tensor], weight: Tensor, plan: Dispatch) -> Tensor:
    """Σ_i w_{i,t}·o_{i,t}·W_i over each token's experts.

    Args:
        heads: `[N, K, in]`.
        gates: `[N, K]`; None where `heads` have been multiplied by their gates already.
        weight: `[E, in, out]`.
        plan: of the same pairs.

    Returns:
        `[N, out]`; padding that has gates of zero is zero.
    """
    heads, weight = _as_autocast(heads, weight)
    num_experts, in_features, out_features = weight.shape
    num_tokens, num_selected = plan.indices.shape
    if gates is not None:
        gates = gates.to(heads.dtype)
    if plan.backend == DENSE:
        if gates is not None:
            # Scaling the narrow side of the product is cheaper, and equal: (w·o)·W = w·(o·W).
            heads = heads * gates.unsqueeze(-1)
        if num_selected < num_experts:
            chosen = plan.indices.unsqueeze(-1).expand(-1, -1, in_features)  # [N, K, in]
            nothing = heads.new_zeros(num_tokens, num_experts, in_features)
            heads = nothing.scatter(1, chosen, heads)  # [N, E, in]
        stacked = weight.view(num_experts * in_features, out_features)  # [E*in, out]
        return heads.reshape(num_tokens, -1) @ stacked  # [N, E*in] -> [N, out]
    flat_gates = None if gates is None else gates.reshape(-1)  # [N*K]
    return _CombinePairs.apply(heads.reshape(-1, in_features), flat_gates, weight, plan)


def _project_all(tokens: Tensor, weight: Tensor) -> Tensor:
    """Each token times the matrices of all experts: `[N, in]` -> `[N, E, out]`."""
    num_experts, in_features, out_features = weight.shape
    if tokens.shape[0] < in_features and not torch.is_grad_enabled():
        # Few tokens, as in decoding: turning the result around is cheaper than the weights.
        repeated = tokens.expand(num_experts, -1, -1)  # [E, N, in]
        return torch.bmm(repeated, weight).transpose(0, 1)  # [E, N, out] -> [N, E, out]
    stacked = weight.transpose(0, 1).reshape(in_features, -1)  # [in, E*out]
    return (tokens @ stacked).view(-1, num_experts, out_features)


class _Group(NamedTuple):
    """Pairs that are multiplied together: of one expert, or of all of them.

    Attributes:
        pairs, tokens: `[m]` int64, numbers of the pairs and of their tokens.
        experts: which experts' matrices.
        offsets: None for a single expert.
    """

    pairs: Tensor
    tokens: Tensor
    experts: Any
    offsets: Optional[Tensor]


def _groups(plan: Dispatch) -> List[_Group]:
    assert plan.order is not None and plan.tokens is not None
    if plan.counts is None:
        return [_Group(plan.order, plan.tokens, slice(None), plan.offsets)]
    parts = zip(plan.order.split(plan.counts), plan.tokens.split(plan.counts))
    return [_Group(*part, expert, None) for expert, part in enumerate(parts)]


def _times(rows: Tensor, weight: Tensor, group: _Group) -> Tensor:
    """`[m, in]` times the matrices of a group, `[in, out]` or `[E, in, out]`."""
    if group.offsets is None:
        return rows @ weight
    return F.grouped_mm(rows, weight, offs=group.offsets)


def _gradient_of_weight(
    gradient: Tensor, rows: Tensor, gradient_of_rows: Tensor, group: _Group
) -> None:
    """Write rowsᵀ · gradient, `[m, in]` and `[m, out]`, into the group's part of `[E, in, out]`."""
    if group.offsets is None:
        torch.mm(rows.t(), gradient_of_rows, out=gradient[group.experts])
    else:
        gradient.copy_(F.grouped_mm(rows.t(), gradient_of_rows, offs=group.offsets))


class _SumOfPairs:
    """Adds rows of pairs up to rows of their tokens, `[N, width]`.

    Group after group, in float32 where rows are of half precision; all at once, in the order of
    the pairs, so that a device that adds in any order gives the same sum every time.
    """

    def __init__(self, like: Tensor, plan: Dispatch, width: int) -> None:
        self.plan = plan
        self.dtype = like.dtype
        wide = torch.promote_types(like.dtype, torch.float32)
        shape = (plan.indices.shape[0], width)
        self.total = like.new_zeros(shape, dtype=wide) if plan.counts is not None else None

    def add(self, group: _Group, rows: Tensor) -> None:
        if self.total is not None:
            # No token is in a group twice.
            self.total.index_add_(0, group.tokens, rows.to(self.total.dtype))
            return
        unsorted = torch.empty_like(rows).index_copy_(0, group.pairs, rows)
        self.total = unsorted.view(*self.plan.indices.shape, -1).sum(dim=1)  # [N, K, width]

    def result(self) -> Tensor:
        assert self.total is not None
        return self.total.to(self.dtype)


class _ProjectPairs(torch.autograd.Function):
    """Gathers the rows of tokens anew in the backward pass instead of keeping K of them."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, plan: Dispatch) -> Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.plan = plan
        projected = _rows_of_pairs(tokens, plan, weight.shape[2])
        with torch.autocast(tokens.device.type, enabled=False):
            for group in _groups(plan):
                rows = tokens.index_select(0, group.tokens)
                projected.index_copy_(0, group.pairs, _times(rows, weight[group.experts], group))
        return projected

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
        tokens, weight = ctx.saved_tensors
        of_tokens = _SumOfPairs(tokens, ctx.plan, tokens.shape[1])
        of_weight = torch.empty_like(weight)  # every expert is written
        with torch.autocast(tokens.device.type, enabled=False):
            for group in _groups(ctx.plan):
                rows = tokens.index_select(0, group.tokens)
                of_rows = gradient.index_select(0, group.pairs)
                _gradient_of_weight(of_weight, rows, of_rows, group)
                of_tokens.add(group, _times(of_rows, weight[group.experts].mT, group))
        return of_tokens.result(), of_weight, None


class _CombinePairs(torch.autograd.Function):
    """Multiplies by the gates on the way, and adds up group by group."""

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, gates: Optional[Tensor], weight: Tensor, plan: Dispatch
    ) -> Tensor:
        ctx.save_for_backward(heads, weight, gates)
        ctx.plan = plan
        combined = _SumOfPairs(heads, plan, weight.shape[2])
        with torch.autocast(heads.device.type, enabled=False):
            for group in _groups(plan):
                rows = heads.index_select(0, group.pairs)
                if gates is not None:
                    rows = rows * gates.index_select(0, group.pairs).unsqueeze(-1)
                combined.add(group, _times(rows, weight[group.experts], group))
        return combined.result()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tuple[Optional[Tensor], ...]:
        heads, weight, gates = ctx.saved_tensors
        plan = ctx.plan
        of_heads = _rows_of_pairs(heads, plan, heads.shape[1])
        of_gates = None if gates is None else torch.zeros_like(gates)
        of_weight = torch.empty_like(weight)  # every expert is written
        with torch.autocast(heads.device.type, enabled=False):
            for group in _groups(plan):
                of_rows = gradient.index_select(0, group.tokens)
                rows = heads.index_select(0, group.pairs)
                back = _times(of_rows, weight[group.experts].mT, group)  # [m, in]
                if gates is not None and of_gates is not None:
                    scale = gates.index_select(0, group.pairs).unsqueeze(-1)
                    of_gates.index_copy_(0, group.pairs, (back * rows).sum(dim=-1))
                    back, rows = back * scale, rows * scale
                of_heads.index_copy_(0, group.pairs, back)
                _gradient_of_weight(of_weight, rows, of_rows, group)
        return of_heads, of_gates, of_weight, None


def _rows_of_pairs(like: Tensor, plan: Dispatch, width: int) -> Tensor:
    """Room for a row of every pair, `[N*K, width]`; zeros where padding is left out."""
    assert plan.order is not None
    pairs = plan.indices.numel()
    make = like.new_empty if plan.order.numel() == pairs else like.new_zeros
    return make((pairs, width))


def _as_autocast(rows: Tensor, weight: Tensor) -> Tuple[Tensor, Tensor]:
    """Both in the type that autocast asks for; torch's own products do that by themselves."""
    device = rows.device.type
    if hasattr(torch, "get_autocast_dtype"):
        active, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    elif device == "cpu":  # torch < 2.4
        active, dtype = torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype()
    else:
        active, dtype = torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype()
    if not active or rows.dtype == torch.float64:
        return rows, weight
    return rows.to(dtype), weight.to(dtype)
