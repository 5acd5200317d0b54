"""Training stops where a router's logits are infinite or NaN, and says which router and why.

Importing this module makes fairseq's trainer watch the routers of the model that it trains,
whatever the criterion.

What it costs: one sum for each router and forward pass, read once an update, right after
fairseq itself has waited for the norm of the gradients. Everything that the message says is
computed afterwards, by running the update's forward passes once more.

Loss scaling (`--fp16`, `--amp`) makes no difference. It multiplies the loss, and skips updates
whose gradients overflow. Logits are computed in the forward pass, before any scale, and in
float32: at a lower scale the same tokens give the same logits, and fairseq would halve the scale
to its minimum, or with `--amp` repeat the update for ever.
"""

from __future__ import annotations

import functools
import queue
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Callable, Iterator, List, NamedTuple

import torch
from fairseq.data.iterators import BackgroundConsumer
from fairseq.trainer import Trainer
from torch import Tensor, nn

from .errors import NonFiniteRouter
from .modules.recording import routed_modules
from .modules.routing import Router, Routing

RouterHook = Callable[[str, Router, Tensor, Routing], None]


class Extent(NamedTuple):
    """The finite range of a tensor's values, and how many of them are NaN or infinite.

    Attributes:
        smallest, largest: of the finite values; NaN where there are none.
        nan, infinite: counts.
        size: how many values there are in all.
    """

    smallest: float
    largest: float
    nan: int
    infinite: int
    size: int

    @property
    def is_finite(self) -> bool:
        return self.nan == self.infinite == 0

    def __str__(self) -> str:
        text = f"{self.smallest:.3g} to {self.largest:.3g}"
        if self.is_finite:
            return text
        return f"{text}, {self.nan} NaN and {self.infinite} infinite of {self.size}"


def extent(values: Tensor) -> Extent:
    """The :class:`Extent` of a tensor of any shape and floating type."""
    values = values.detach().float()
    finite = values[values.isfinite()]
    smallest, largest = finite.aminmax() if finite.numel() else (torch.tensor(torch.nan),) * 2
    return Extent(
        float(smallest),
        float(largest),
        int(values.isnan().sum()),
        int(values.isinf().sum()),
        values.numel(),
    )


def describe(name: str, tokens: Tensor, logits: Tensor, weight: Tensor) -> str:
    """One line on a router whose logits are not finite: statistics, and what to try.

    Args:
        name: the routed module's name in the model.
        tokens: `[..., d]`, the router's input.
        logits: `[..., E]`.
        weight: `[d, E]`, the router's weights.
    """
    source, weights = extent(tokens), extent(weight)
    if not weights.is_finite:
        remedy = (
            "its weights are broken already; restart from an earlier checkpoint with a lower --lr, "
            "more --warmup-updates or --clip-norm 1"
        )
    elif not source.is_finite:
        remedy = (
            "what goes in is not finite already: activations overflowed before this router; train "
            "in bfloat16 (hydra: common.bf16=true) or float32, with a lower --lr or --clip-norm 1"
        )
    else:
        remedy = (
            "restart from an earlier checkpoint with a higher --router-z-weight, a lower --lr or "
            "--clip-norm 1"
        )
    return (
        f"the router of {name} has logits that are not finite ({extent(logits)}; its input: "
        f"{source}; its weights: {weights}): {remedy}"
    )


@contextmanager
def hooked_routers(model: nn.Module, hook: RouterHook) -> Iterator[None]:
    """Call `hook(name, router, tokens, routing)` after each forward pass of a router of `model`."""

    def forward_hook(name: str) -> Callable[[nn.Module, Any, Routing], None]:
        def call(router: Any, inputs: Any, routing: Routing) -> None:
            hook(name, router, inputs[0].detach(), routing)

        return call

    handles = [
        module.router.register_forward_hook(forward_hook(name))
        for name, _, module in routed_modules(model)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def watch_routers() -> None:
    """Let fairseq's trainer stop at the first update in which a router is not finite."""
    original_step, original_clip = Trainer.train_step, Trainer.clip_grad_norm
    if getattr(original_step, "watches_routers", False):
        return

    @functools.wraps(original_step)
    def train_step(self: Any, samples: Any, *args: Any, **kwargs: Any) -> Any:
        sums: List[Tensor] = []

        def note(_: str, __: Router, ___: Tensor, routing: Routing) -> None:
            # The sum is NaN or infinite where a logit is. Nothing waits for it here.
            sums.append(routing.logits.detach().sum())

        # With --amp this calls itself, to repeat an update.
        outer = getattr(self, "_router_sums", None)
        self._router_sums = sums
        try:
            with hooked_routers(self.get_model(), note):
                return original_step(self, samples, *args, **kwargs)
        except _BrokenRouter as broken:
            line = _diagnose(self, samples) if broken.here else ""
            if broken.together:
                line = _first_line(self, line)
            _stop_reading_ahead()
            raise NonFiniteRouter(line) from None
        finally:
            self._router_sums = outer

    @functools.wraps(original_clip)
    def clip_grad_norm(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            norm = original_clip(self, *args, **kwargs)
        except Exception:  # of an overflow, in various ways
            _check(self, overflow=True)
            raise
        _check(self, overflow=not bool(torch.isfinite(torch.as_tensor(norm)).all()))
        return norm

    train_step.watches_routers = True  # type: ignore[attr-defined]
    Trainer.train_step = train_step
    Trainer.clip_grad_norm = clip_grad_norm


class _BrokenRouter(BaseException):
    """From the norm of the gradients up to the training step, past fairseq's own handlers."""

    def __init__(self, here: bool, together: bool) -> None:
        self.here = here  # in this worker
        self.together = together  # every worker has raised it


def _check(trainer: Any, overflow: bool) -> None:
    sums: List[Tensor] = getattr(trainer, "_router_sums", None) or []
    here = bool(sums) and not bool(torch.stack(sums).isfinite().all())
    anywhere = here
    # The norm is that of all workers' gradients, so all of them come here. They have to stop
    # together, or the others wait for the one that did.
    together = overflow and trainer.data_parallel_world_size > 1
    if together:
        count = torch.tensor([float(here)], device=trainer.device)
        torch.distributed.all_reduce(count, group=trainer.data_parallel_process_group)
        anywhere = bool(count > 0)
    if anywhere:
        raise _BrokenRouter(here, together)


def _first_line(trainer: Any, line: str) -> str:
    """What the first worker with a broken router has to say, in every worker."""
    lines: List[Any] = [None] * trainer.data_parallel_world_size
    torch.distributed.all_gather_object(lines, line, group=trainer.data_parallel_process_group)
    return next(found for found in lines if found)


def _diagnose(trainer: Any, samples: Any) -> str:
    """Run the update's forward passes once more, and describe the first router that breaks."""
    found: List[str] = []

    def look(name: str, router: Router, tokens: Tensor, routing: Routing) -> None:
        if not found and not bool(routing.logits.isfinite().all()):
            found.append(describe(name, tokens, routing.logits, router.weight))

    trainer._set_seed()  # the same dropout
    model, autocast = trainer.get_model(), trainer.cuda and trainer.cfg.common.amp
    with torch.no_grad(), hooked_routers(model, look):
        for sample in samples:
            prepared, _ = trainer._prepare_sample(sample)
            with torch.autocast("cuda", dtype=torch.float16) if autocast else nullcontext():
                trainer.criterion(model, prepared)
            if found:
                return found[0]
    return (
        "a router had logits that are not finite, but not when the update was repeated; restart "
        "from an earlier checkpoint with a lower --lr or --clip-norm 1"
    )


def _stop_reading_ahead() -> None:
    """End fairseq's threads that read batches ahead.

    One that is at work when Python ends makes the process abort, with a line of its own after the
    one that says why.
    """
    deadline = time.monotonic() + 10
    for thread in threading.enumerate():
        if not isinstance(thread, BackgroundConsumer):
            continue
        thread._max_len = 0  # it ends after the next batch
        while thread.is_alive() and time.monotonic() < deadline:
            with suppress(queue.Empty):
                thread._queue.get(timeout=0.05)  # room for that batch


watch_routers()
