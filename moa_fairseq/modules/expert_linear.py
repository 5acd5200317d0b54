"""Linear maps of which each token uses only those of its selected experts. Plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .expert_products import Dispatch, combine_pairs, project_pairs


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

        Rows of padding that the dispatch left out hold nothing of use.
        """
        projected = project_pairs(tokens, self._weight(), plan)
        if self.bias is None:
            return projected
        return projected + self.bias.to(projected.dtype)[plan.indices]  # [N, K, out]

    def combine_heads(
        self, heads: Tensor, gates: Tensor, plan: Dispatch, gated: bool = False
    ) -> Tensor:
        """Gated sum over each token's experts: Σ_i w_{i,t}·(o_{i,t}·W_i^o + b_i) (equation 3).

        Args:
            heads: `[N, K, in]`.
            gates: `[N, K]`; zero for padding.
            plan: the dispatch that made `heads`.
            gated: `heads` have been multiplied by their gates already.

        Returns:
            `[N, out]`; zero for padding.
        """
        weight = self._weight()
        combined = combine_pairs(heads, None if gated else gates, weight, plan)
        if self.bias is None:
            return combined
        gate_of_expert = gates.new_zeros(len(gates), weight.shape[0])  # [N, E]
        gate_of_expert = gate_of_expert.scatter(1, plan.indices, gates)
        return combined + gate_of_expert.to(combined.dtype) @ self.bias.to(combined.dtype)

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
