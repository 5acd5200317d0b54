"""Linear maps of which each token uses only those of its selected experts.

Plain PyTorch. Two ways to compute the same thing: where every token uses every expert (K = E)
one matrix product in and one out does it all; otherwise (token, expert) pairs are sorted by
expert once, and the order serves the projection in and the projection out.
"""

from __future__ import annotations

from typing import List, NamedTuple, Optional

import torch
from torch import Tensor, nn


class Dispatch(NamedTuple):
    """The (token, expert) pairs of a routing, grouped by expert.

    Attributes:
        indices: `[N, K]` int64, the expert of each pair.
        order: `[M]` int64, positions in `indices.flatten()` sorted by expert, padding left
            out; None where all experts are used (K = E) and nothing needs sorting.
        counts: how many pairs each expert has; None likewise.
    """

    indices: Tensor
    order: Optional[Tensor]
    counts: Optional[List[int]]


def dispatch(indices: Tensor, num_experts: int, padding_mask: Optional[Tensor] = None) -> Dispatch:
    """Group the pairs of `indices` `[N, K]` by expert.

    Args:
        indices: `[N, K]` int64, the experts that each token selected.
        num_experts: E.
        padding_mask: `[N]` bool, True for tokens that no expert shall see.
    """
    if indices.shape[1] == num_experts:
        return Dispatch(indices, None, None)
    experts = indices.flatten()  # [N*K]
    if padding_mask is not None:
        # Padding goes to an expert past the last one, which is then cut off.
        padding = padding_mask.unsqueeze(1).expand(indices.shape).flatten()  # [N*K]
        experts = experts.masked_fill(padding, num_experts)
    counts = torch.bincount(experts, minlength=num_experts)[:num_experts].tolist()
    order = torch.argsort(experts, stable=True)[: sum(counts)]
    return Dispatch(indices, order, counts)


class ExpertLinear(nn.Module):
    """E linear maps in one parameter of shape `[E, in, out]`.

    Stacked weights give an expert that no token chose a gradient of zero, not a missing one,
    which data-parallel training relies on.

    Args:
        num_experts: E.
        in_features, out_features: sizes of each map.
        bias: adds a bias of shape `[E, out]`.
        init_std: standard deviation of the initial weights; biases start at zero.
        quant_noise: probability with which fairseq's quantization noise drops a block of
            weights in training; 0 drops none.
        quant_noise_block_size: input features in one such block.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        bias: bool = False,
        init_std: float = 0.02,
        quant_noise: float = 0.0,
        quant_noise_block_size: int = 8,
    ) -> None:
        super().__init__()
        if quant_noise > 0 and in_features % quant_noise_block_size != 0:
            raise ValueError(
                f"--quant-noise-pq-block-size {quant_noise_block_size} does not divide the "
                f"{in_features} input features of an expert; choose a divisor"
            )
        self.init_std = init_std
        self.quant_noise = quant_noise
        self.quant_noise_block_size = quant_noise_block_size
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, out_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def project_tokens(self, tokens: Tensor, plan: Dispatch) -> Tensor:
        """Each token through each of its experts: `[N, in]` -> `[N, K, out]` (q_t·W_i^q).

        Rows of padding that the dispatch left out are zero.
        """
        weight = self._weight()
        num_experts, in_features, out_features = weight.shape
        num_tokens, num_selected = plan.indices.shape
        if plan.order is None or plan.counts is None:
            stacked = weight.transpose(0, 1).reshape(in_features, -1)  # [in, E*out]
            projected = (tokens @ stacked).view(
                num_tokens, num_experts, out_features
            )  # [N, E, out]
            return projected if self.bias is None else projected + self.bias
        grouped = tokens.index_select(0, plan.order // num_selected)  # [M, in]
        projected = _multiply_groups(grouped, weight, self.bias, plan.counts)  # [M, out]
        result = projected.new_zeros(num_tokens * num_selected, out_features)
        result = result.index_copy(0, plan.order, projected)
        return result.view(num_tokens, num_selected, out_features)  # [N, K, out]

    def combine_heads(self, heads: Tensor, gates: Tensor, plan: Dispatch) -> Tensor:
        """Gated sum over each token's experts: Σ_i w_{i,t}·(o_{i,t}·W_i^o + b_i) (equation 3).

        Args:
            heads: `[N, K, in]`.
            gates: `[N, K]`.
            plan: the dispatch that made `heads`.

        Returns:
            `[N, out]`; zero for padding that the dispatch left out.
        """
        weight = self._weight()
        num_experts, in_features, out_features = weight.shape
        num_tokens, num_selected = plan.indices.shape
        gates = gates.to(heads.dtype)
        # Scaling the narrow side of the product is cheaper, and equal: (w·o)·W = w·(o·W).
        scaled = heads * gates.unsqueeze(-1)  # [N, K, in]
        if plan.order is None or plan.counts is None:
            stacked = weight.view(num_experts * in_features, out_features)  # [E*in, out]
            combined = scaled.reshape(num_tokens, -1) @ stacked  # [N, E*in] -> [N, out]
            return combined if self.bias is None else combined + gates @ self.bias.to(gates.dtype)
        grouped = scaled.reshape(-1, in_features).index_select(
            0, plan.order
        )  # [N*K, in] -> [M, in]
        outputs = _multiply_groups(grouped, weight, None, plan.counts)  # [M, out]
        if self.bias is not None:
            pair_gates = gates.flatten().index_select(0, plan.order)  # [N*K] -> [M]
            pair_experts = plan.indices.flatten().index_select(0, plan.order)  # [N*K] -> [M]
            outputs = outputs + pair_gates.unsqueeze(-1) * self.bias[pair_experts].to(gates.dtype)
        result = outputs.new_zeros(num_tokens, out_features)
        return result.index_add(0, plan.order // num_selected, outputs)

    def _weight(self) -> Tensor:
        """The weights, with quantization noise in training (Stock et al., 2020)."""
        if self.quant_noise == 0 or not self.training:
            return self.weight
        num_experts, in_features, out_features = self.weight.shape
        blocks = in_features // self.quant_noise_block_size
        keep = torch.rand(num_experts, blocks, 1, out_features, device=self.weight.device)
        keep = (keep >= self.quant_noise).to(self.weight.dtype) / (1 - self.quant_noise)
        blocked = self.weight.view(num_experts, blocks, -1, out_features)  # [E, blocks, size, out]
        return (blocked * keep).view_as(self.weight)  # [E, in, out]

    def extra_repr(self) -> str:
        num_experts, in_features, out_features = self.weight.shape
        return f"{num_experts}, {in_features}, {out_features}, bias={self.bias is not None}"


def _multiply_groups(
    rows: Tensor, weight: Tensor, bias: Optional[Tensor], counts: List[int]
) -> Tensor:
    """Rows of each group times the group's matrix: `[M, in]`, `[E, in, out]` -> `[M, out]`."""
    groups = rows.split(counts)
    if bias is None:
        return torch.cat([group @ matrix for group, matrix in zip(groups, weight)])
    return torch.cat(
        [torch.addmm(b, group, matrix) for group, matrix, b in zip(groups, weight, bias)]
    )
