"""Run a model over a split, and count what its routers and random ones do."""

from __future__ import annotations

import copy
import inspect
import logging
from itertools import combinations
from typing import Any, Dict, List, Tuple

import torch
from torch import Tensor

from ...errors import UsageError
from ...modules.recording import RoutedModule, routed_modules
from ...modules.routing import Router, Routing
from ...router_watch import hooked_routers
from .context import ModelContext
from .counts import RouterTotals, StreamTotals, Survey, on_cpu
from .streams import make_streams, read_batch, stream_of, tokens_of

logger = logging.getLogger(__name__)


def random_router(router: Router, seed: int) -> Router:
    """A router like `router` with weights that learned nothing.

    They are normal, with the standard deviation of the trained weights, so that gates are as
    uneven as weights of that size make them.
    """
    untrained = copy.deepcopy(router)
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(router.weight.shape, generator=generator)
    untrained.weight.data.copy_(weight * router.weight.detach().float().std().cpu())
    return untrained


def random_routers(modules: Dict[str, RoutedModule], seed: int) -> Dict[str, Router]:
    """One for each module, each with weights of its own."""
    return {
        name: random_router(module.router, seed * len(modules) + place)
        for place, (name, module) in enumerate(modules.items())
    }


def survey(context: ModelContext) -> Survey:
    """What the routers of a model do on its split.

    A random router sees what the trained one of the same module sees. What it does changes
    nothing in the model.

    Raises:
        UsageError: where a router's probabilities are not finite.
    """
    modules = {name: module for name, _, module in routed_modules(context.model)}
    streams = make_streams(context)
    untrained = random_routers(modules, context.options.seed)
    found = Survey(modules={name: module.kind for name, module in modules.items()})
    for name, stream in streams.items():
        found.streams[name] = StreamTotals(len(stream.dictionary))
    for name, module in modules.items():
        types = len(streams[stream_of(module.kind)].dictionary)
        size = (module.num_experts, module.num_selected, types)
        found.trained[name], found.random[name] = RouterTotals(*size), RouterTotals(*size)
    routings: Dict[str, List[Tuple[Routing, Routing]]] = {name: [] for name in modules}

    def note(name: str, _: Router, tokens: Tensor, routing: Routing) -> None:
        routings[name].append((routing, untrained[name](tokens)))

    keywords = _only_features(context.model)
    with torch.no_grad(), hooked_routers(context.model, note):
        for number, sample in enumerate(context.batches(), 1):
            context.model(**sample["net_input"], **keywords)
            batches = {
                name: read_batch(stream, tokens_of(sample, name))
                for name, stream in streams.items()
            }
            for name, batch in batches.items():
                found.streams[name].add(batch)
            masses: Dict[str, Tuple[Tensor, Tensor]] = {}
            for name, kind in found.modules.items():
                batch = batches[stream_of(kind)]
                for routing, other in routings[name]:
                    ours = on_cpu(routing, batch.real)
                    if not bool(ours.probabilities.isfinite().all()):
                        raise UsageError(
                            f"--path {context.path}: the router of {name} gives probabilities that "
                            "are not finite; give a checkpoint from before training broke down"
                        )
                    masses[name] = (
                        found.trained[name].add(ours, batch),
                        found.random[name].add(on_cpu(other, batch.real), batch),
                    )
                routings[name].clear()
            _add_joint(found, masses)
            if number % 10 == 0:
                logger.info("%s: %d batches", context.name, number)
    for name, stream in streams.items():
        found.words[name] = list(stream.words.words)
        found.left_out[name], found.cut[name] = stream.words.left_out, stream.words.cut
    return found


def _add_joint(found: Survey, masses: Dict[str, Tuple[Tensor, Tensor]]) -> None:
    for first, second in combinations(masses, 2):
        if stream_of(found.modules[first]) != stream_of(found.modules[second]):
            continue
        for joint, which in ((found.joint, 0), (found.random_joint, 1)):
            product = masses[first][which].T @ masses[second][which]  # [E, E']
            known = joint.get((first, second))
            joint[first, second] = product if known is None else known + product


def _only_features(model: Any) -> Dict[str, Any]:
    """Spares the product with the vocabulary, where a model can do without it."""
    takes = inspect.signature(model.forward).parameters
    return {"features_only": True} if "features_only" in takes else {}
