"""The one way in which routings leave a model: open `record_routings` around a forward pass."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, NamedTuple, Union

from torch import Tensor, nn

from .moa_attention import ATTENTION_KINDS, MixtureOfAttentionHeads
from .moe_feed_forward import FEED_FORWARD_KINDS, MixtureOfFeedForwards
from .routing import Routing

ROUTED_KINDS = (*ATTENTION_KINDS, *FEED_FORWARD_KINDS)
RoutedModule = Union[MixtureOfAttentionHeads, MixtureOfFeedForwards]


class RecordedRouting(NamedTuple):
    """A routing and where it came from.

    Attributes:
        name: the module's name in the model, `decoder.layers.0.encoder_attn`, say.
        kind: which attention or feed-forward it is, one of `ROUTED_KINDS`.
        position: its place among the model's modules of that kind, counted from 0.
        routing: tensors of shape `[batch, length, ...]`, attached to the graph.
    """

    name: str
    kind: str
    position: int
    routing: Routing


class RecordedHeadWeights(NamedTuple):
    """Attention weights and where they came from.

    Attributes:
        name, kind, position: as in :class:`RecordedRouting`.
        weights: `[K·H, batch, T, S]` float32, heads in the order of the module's routing.
    """

    name: str
    kind: str
    position: int
    weights: Tensor


@contextmanager
def record_routings(model: nn.Module) -> Iterator[List[RecordedRouting]]:
    """Collect the routing of every MoA attention and mixture of feed-forwards that runs.

    That is, of those that run inside the `with` block.

    Layers that do not run (LayerDrop) leave no entry; a module that runs twice leaves two.
    Outside such a block nothing is kept and nothing is paid.

    Yields:
        a list that grows with each forward pass, in the order in which modules ran.
    """
    recorded: List[RecordedRouting] = []

    def hook_for(name: str, kind: str, position: int) -> Callable[[nn.Module, Any, Routing], None]:
        def hook(_: nn.Module, __: Any, routing: Routing) -> None:
            recorded.append(RecordedRouting(name, kind, position, routing))

        return hook

    handles = [
        module.router.register_forward_hook(hook_for(name, module.kind, position))
        for name, position, module in routed_modules(model)
    ]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_head_weights(model: nn.Module) -> Iterator[List[RecordedHeadWeights]]:
    """Collect the weights of every head of the MoA attentions that run inside the `with` block.

    The model computes and returns what it would without the block.

    Yields:
        a list that grows with each forward pass, in the order in which attentions ran.
    """
    recorded: List[RecordedHeadWeights] = []

    def recorder(
        name: str, position: int, attention: MixtureOfAttentionHeads
    ) -> Callable[..., Any]:
        original = attention.forward

        def forward(
            *args: Any, need_weights: bool = True, need_head_weights: bool = False, **kwargs: Any
        ) -> Any:
            kwargs["need_head_weights"] = True
            output, weights = original(*args, **kwargs)
            assert weights is not None
            recorded.append(RecordedHeadWeights(name, attention.kind, position, weights))
            if need_head_weights:
                return output, weights
            return output, weights.mean(dim=0) if need_weights else None

        return forward

    attentions = list(moa_attentions(model))
    # fairseq's layers do not ask for the weights of heads, and hooks of torch before 2.0 do not
    # see named arguments.
    for name, position, attention in attentions:
        vars(attention)["forward"] = recorder(name, position, attention)
    try:
        yield recorded
    finally:
        for _, _, attention in attentions:
            del vars(attention)["forward"]


def routed_modules(model: nn.Module) -> Iterator[tuple[str, int, RoutedModule]]:
    """Every routed module of a model with its name and its place among those of its kind."""
    seen: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, (MixtureOfAttentionHeads, MixtureOfFeedForwards)):
            position = seen.get(module.kind, 0)
            seen[module.kind] = position + 1
            # Data-parallel wrappers put their own prefix before the model's names.
            yield re.sub(r"^(module\.)+", "", name), position, module


def moa_attentions(model: nn.Module) -> Iterator[tuple[str, int, MixtureOfAttentionHeads]]:
    """Every MoA attention of a model with its name and its place among those of its kind."""
    for name, position, module in routed_modules(model):
        if isinstance(module, MixtureOfAttentionHeads):
            yield name, position, module
