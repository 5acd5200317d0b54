"""What a model costs: parameters and multiply-adds, by formula and as torch counts them."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Iterator, Tuple

import torch
from fairseq.models import FairseqEncoderModel
from fairseq.models.roberta import RobertaLMHead
from fairseq.modules import MultiheadAttention
from torch import nn

from ..modules.expert_linear import ExpertLinear
from ..modules.expert_products import LOOP
from ..modules.moa_attention import MixtureOfAttentionHeads
from ..modules.moe_feed_forward import MixtureOfFeedForwards
from ..modules.recording import routed_modules

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

    A masked language model has no target; its head is counted for every token, although in
    training and evaluation only masked tokens reach it.
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
        elif isinstance(module, RobertaLMHead):
            per_token += module.weight.numel()  # its output projection is no nn.Linear
    return length * per_token


def head_macs(model: nn.Module, length: int = PAPER_LENGTH) -> int:
    """Of :func:`linear_macs`, those of a masked language model's head; 0 for other models."""
    heads = [module for module in model.modules() if isinstance(module, RobertaLMHead)]
    return length * sum(head.dense.weight.numel() + head.weight.numel() for head in heads)


def _size_of_one(experts: ExpertLinear) -> int:
    return experts.weight[0].numel()


def all_macs(model: Any, length: int = PAPER_LENGTH) -> int:
    """Multiply-adds of every matrix product for a source and a target of `length` tokens each.

    To :func:`linear_macs` it adds E·d a token for each router, as much where the experts' output
    biases are weighted by their gates, and the products of queries with keys and of weights with
    values: 2·K·H·D for each pair of tokens in a MoA attention, 2·d in fairseq's.
    """
    routers = 0
    for _, _, module in routed_modules(model):
        routers += module.router.weight.numel()
        if isinstance(module, MixtureOfAttentionHeads):
            output = module.o_experts
        else:
            output = module.out_experts
        routers += 0 if output.bias is None else output.bias.numel()
    width = sum(width for _, width in _attention_widths(model))
    return linear_macs(model, length) + length * routers + length * length * 2 * width


def _attention_widths(model: nn.Module) -> Iterator[Tuple[nn.Module, int]]:
    """Each attention, and how wide the heads of a query are together."""
    for module in model.modules():
        if isinstance(module, MixtureOfAttentionHeads):
            yield module, module.num_heads * module.head_dim
        elif isinstance(module, MultiheadAttention):
            yield module, module.embed_dim


def torch_can_count() -> bool:
    """Whether this torch has what :func:`counted_macs` needs: 2.3 and later."""
    return importlib.util.find_spec("torch.nn.attention") is not None


def counted_macs(model: Any, length: int = PAPER_LENGTH) -> int:
    """What :func:`all_macs` gives, counted by torch while the model runs once on a CPU.

    Args:
        model: an encoder-decoder or a masked language model with its weights in memory.
        length: tokens of the source and of the target.
    """
    attention = importlib.import_module("torch.nn.attention")
    counter = importlib.import_module("torch.utils.flop_counter").FlopCounterMode(display=False)
    for _, _, module in routed_modules(model):
        if module.num_selected < module.num_experts:
            module.expert_backend = LOOP  # torch does not count its grouped product
    tokens = torch.full((1, length), 5)  # any word
    # A fused attention would not be counted.
    with torch.no_grad(), attention.sdpa_kernel(attention.SDPBackend.MATH), counter:
        model.eval()
        if isinstance(model, FairseqEncoderModel):
            model(tokens)
        else:
            model(tokens, torch.tensor([length]), tokens)
    return int(counter.get_total_flops()) // 2
