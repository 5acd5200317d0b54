"""The one way in which routings leave a model: open `record_routings` around a forward pass."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import Iterator, List, Union

from torch import nn

from .moa_attention import ATTENTION_KINDS, MixtureOfAttentionHeads
from .moe_feed_forward import FEED_FORWARD_KINDS, MixtureOfFeedForwards
from .routing import RecordedRouting, Recording

ROUTED_KINDS = (*ATTENTION_KINDS, *FEED_FORWARD_KINDS)
RoutedModule = Union[MixtureOfAttentionHeads, MixtureOfFeedForwards]


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
