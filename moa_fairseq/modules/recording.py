"""The one way in which routings leave a model: open `record_routings` around a forward pass."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, NamedTuple, Union

from torch import Tensor, nn

from .moa_attention import ATTENTION_KINDS, MixtureOfAttentionHeads
from .moe_feed_forward import FEED_FORWARD_KINDS, MixtureOfFeedForwards
from .routing import RecordedRouting, Recording

ROUTED_KINDS = (*ATTENTION_KINDS, *FEED_FORWARD_KINDS)
RoutedModule = Union[MixtureOfAttentionHeads, MixtureOfFeedForwards]


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

    found = list(routed_modules(model))
    for name, position, module in found:
        recording = Recording(recorded, name, module.kind, position)
        module.router.recordings += (recording,)
    try:
        yield recorded
    finally:
        for _, _, module in found:
            router = module.router
            router.recordings = tuple(r for r in router.recordings if r.recorded is not recorded)
            if not router.recordings:
                del router.recordings  # back to the class's own


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
            # Data-parallel and compiled wrappers put their own prefix before the model's names.
            yield re.sub(r"^((module|_orig_mod)\.)+", "", name), position, module


def moa_attentions(model: nn.Module) -> Iterator[tuple[str, int, MixtureOfAttentionHeads]]:
    """Every MoA attention of a model with its name and its place among those of its kind."""
    for name, position, module in routed_modules(model):
        if isinstance(module, MixtureOfAttentionHeads):
            yield name, position, module
