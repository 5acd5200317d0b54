"""What a model costs: parameters, and multiply-adds of its linear layers."""

from __future__ import annotations

from torch import nn

from ..modules.expert_linear import ExpertLinear
from ..modules.moa_attention import MixtureOfAttentionHeads
from ..modules.moe_feed_forward import MixtureOfFeedForwards

# The paper's Table 1 counts a source and a target of this many tokens.
PAPER_LENGTH = 10


def count_parameters(model: nn.Module) -> int:
    """Trained numbers; a tensor under several names (shared embeddings) counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def linear_macs(model: nn.Module, length: int = PAPER_LENGTH) -> int:
    """Multiply-adds of the linear layers for a source and a target of `length` tokens each.

    As in the paper's Table 1: projections, feed-forward and output layer, but neither routers
    nor the products of queries, keys and values. A MoA attention uses K of its E experts for
    every token, (2K + 2)·d·H·D in all; fairseq's attention costs 4·d². A mixture of feed-forwards
    costs as many times fairseq's feed-forward as a token uses experts.
    """
    per_token = sum(
        module.in_features * module.out_features
        for module in model.modules()
        if isinstance(module, nn.Linear)
    )
    for module in model.modules():
        if isinstance(module, MixtureOfAttentionHeads):
            experts = (module.q_experts, module.o_experts)
            per_token += module.num_selected * sum(map(_size_of_one, experts))
        elif isinstance(module, MixtureOfFeedForwards):
            experts = (module.in_experts, module.out_experts)
            per_token += module.num_selected * sum(map(_size_of_one, experts))
    return length * per_token


def _size_of_one(experts: ExpertLinear) -> int:
    return experts.weight[0].numel()
