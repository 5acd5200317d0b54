"""Several workers without GPUs, and workers whose layers are dropped.

Importing this module mends, in the running process, what fairseq 0.12 assumes of them:

* that torchrun's workers see a GPU each: without one it divides by their number;
* that a worker which sees at most one GPU trains alone: every one of torchrun's workers would then
  train by itself and overwrite the checkpoints of the others;
* that it can start a process for each GPU: without one it starts none and ends as if all were well;
* that `pytorch_ddp` has a GPU, and that every layer takes part in every update.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model
from fairseq.modules import LayerDropModuleList
from fairseq.trainer import Trainer
from torch import nn

from .errors import UsageError

logger = logging.getLogger(__name__)


def join_workers() -> None:
    """Let the workers of torchrun find each other, with GPUs and without."""
    original = distributed_utils.call_main
    if getattr(original, "joins_workers", False):
        return

    @functools.wraps(original)
    def call_main(cfg: Any, main: Any, **kwargs: Any) -> Any:
        settings = cfg.distributed_training
        on_cpu = cfg.common.cpu or torch.cuda.device_count() == 0
        if settings.distributed_init_method is None and _started_by_torchrun():
            settings.distributed_world_size = int(os.environ["WORLD_SIZE"])
            if on_cpu and settings.distributed_world_size > 1:
                settings.distributed_init_method = "env://"
                settings.distributed_rank = int(os.environ["RANK"])
                settings.distributed_no_spawn = True
        if on_cpu and settings.distributed_world_size > 1 and not cfg.common.tpu:
            _check_workers_on_cpu(settings)
        return original(cfg, main, **kwargs)

    call_main.joins_workers = True  # type: ignore[attr-defined]
    distributed_utils.call_main = call_main


def _started_by_torchrun() -> bool:
    return all(name in os.environ for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"))


def _check_workers_on_cpu(settings: Any) -> None:
    workers = settings.distributed_world_size
    if not settings.distributed_no_spawn:
        raise UsageError(
            f"--distributed-world-size {workers}: fairseq starts workers for GPUs only; without "
            f"them use torchrun --standalone --nproc-per-node {workers} --no-python fairseq-train …"
        )
    if settings.distributed_backend == "nccl":
        logger.info("--distributed-backend gloo, since nccl needs GPUs")
        settings.distributed_backend = "gloo"


def refuse_to_train_side_by_side() -> None:
    """Stop a worker of torchrun that would train alone.

    Through hydra, fairseq loads this plugin only once it has settled how many workers there are.
    """
    original = Trainer.__init__
    if getattr(original, "refuses_to_train_side_by_side", False):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        workers = int(os.environ["WORLD_SIZE"]) if _started_by_torchrun() else 1
        if workers > 1 and not torch.distributed.is_initialized():
            raise UsageError(
                f"torchrun started {workers} workers, and each would train alone and overwrite the "
                f"checkpoints of the others: add --distributed-world-size {workers} (hydra: "
                f"distributed_training.distributed_world_size={workers})"
            )
        original(self, *args, **kwargs)

    init.refuses_to_train_side_by_side = True  # type: ignore[attr-defined]
    Trainer.__init__ = init


def wrap_for_any_device() -> None:
    """Let `--ddp-backend pytorch_ddp` work on a CPU and with LayerDrop."""
    original = distributed_fairseq_model.DistributedDataParallel
    if getattr(original, "wraps_for_any_device", False):
        return

    @functools.wraps(original, updated=())
    def distributed_data_parallel(module: nn.Module, **kwargs: Any) -> nn.Module:
        if next(module.parameters()).device.type == "cpu":
            kwargs["device_ids"] = kwargs["output_device"] = None
        if any(isinstance(part, LayerDropModuleList) for part in module.modules()):
            # A dropped layer has no gradient to wait for.
            kwargs["find_unused_parameters"] = True
        return original(module=module, **kwargs)

    distributed_data_parallel.wraps_for_any_device = True  # type: ignore[attr-defined]
    distributed_fairseq_model.DistributedDataParallel = distributed_data_parallel


join_workers()
refuse_to_train_side_by_side()
wrap_for_any_device()
