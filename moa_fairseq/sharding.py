"""`--ddp-backend fully_sharded` is refused for models with routers: it has not been tried."""

from __future__ import annotations

import functools
from typing import Any

from fairseq.trainer import Trainer

from .errors import UsageError
from .modules.recording import routed_modules


def refuse_sharded_routers() -> None:
    """Let fairseq's trainer refuse to shard a MoA model, before it does anything."""
    original = Trainer.__init__
    if getattr(original, "refuses_sharded_routers", False):
        return

    @functools.wraps(original)
    def __init__(self: Any, cfg: Any, task: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        backend = getattr(getattr(cfg, "distributed_training", None), "ddp_backend", None)
        if backend == "fully_sharded" and any(True for _ in routed_modules(model)):
            raise UsageError(
                "--ddp-backend fully_sharded is not available for MoA models; use --ddp-backend "
                "pytorch_ddp or legacy_ddp"
            )
        original(self, cfg, task, model, *args, **kwargs)

    __init__.refuses_sharded_routers = True  # type: ignore[attr-defined]
    Trainer.__init__ = __init__


refuse_sharded_routers()
