"""Masking experts out of a model that is not changed otherwise."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterable, Iterator

import torch
from torch import nn

from .recording import RoutedModule
from .routing import Routing


@contextmanager
def without_experts(module: RoutedModule, experts: Iterable[int]) -> Iterator[None]:
    """Let a module compute without some of its experts inside the `with` block.

    As heads are masked by Michel et al. (2019, arXiv 1905.10650): the gate of these experts is
    zero wherever the router selects them. Nothing takes their place; what the router selects and
    the gates of all other experts stay as they are, and are not normalised again.

    Args:
        module: a MoA attention or a mixture of feed-forwards.
        experts: their numbers; all of them leave the module's output zero.

    Raises:
        ValueError: for an expert that the module does not have.
    """
    masked = sorted(set(experts))
    for expert in masked:
        if not 0 <= expert < module.num_experts:
            raise ValueError(f"no expert {expert} among {module.num_experts}")

    def hook(_: nn.Module, __: Any, routing: Routing) -> Routing:
        chosen = routing.indices.new_tensor(masked)
        hidden = torch.isin(routing.indices, chosen)  # [..., K]
        return routing._replace(gates=routing.gates.masked_fill(hidden, 0.0))

    handle = module.router.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
