"""Everything that differs between builds of fairseq and torch, found by trying, not by version.

Importing this module mends, in the running process:

* checkpoints that fairseq writes and torch >= 2.6 refuses to read (their few classes are
  allowed by name; the check that a checkpoint runs no code is on in every version of torch);
* batching that drops the last sentences of a split (fairseq#5036, #5094, #5351);
* `np.compat`, which numpy 2 dropped and fairseq still asks for: in `--sample-break-mode eos` of
  language models, and in `--num-batch-buckets` of translation;
* batching that differs between a run and its resumption after the first epoch;
* checkpoints that would run code, or that end in a traceback where they are damaged;
* a run that several workers resume, with torch >= 2.6;
* options that are code, and `--ddp-backend fully_sharded` without fairscale;
* a gradient that is too large in the last update of an epoch, where batches do not divide among
  workers and `--update-freq`.
"""

from __future__ import annotations

import argparse
import ast
import codecs
import functools
import importlib
import importlib.util
import os
import sys
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any, Callable, ContextManager, Iterator, List, Mapping, Optional, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if importlib.util.find_spec("fairseq") is None:
    raise ImportError(
        'moa_fairseq needs fairseq: pip install "moa-fairseq[fairseq]", '
        "or any build of fairseq 0.12.2 or 0.12.3 (see the README)"
    )
if not hasattr(torch.serialization, "_weights_only_unpickler"):
    raise ImportError(
        f"moa_fairseq needs torch 1.13 or later, and this is {torch.__version__}: earlier ones "
        "cannot read a checkpoint without running what it holds"
    )

import numpy as np
from fairseq import checkpoint_utils
from fairseq.data import data_utils
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from omegaconf.errors import OmegaConfBaseException

from .errors import UsageError, unreadable_checkpoint
from .safe_unpickling import read_only

# Whether a checkpoint may be trained further: called with its path, its state, and the
# trainer's config.
resumption_checks: List[Callable[[str, Mapping[str, Any], Any], None]] = []

# The config of the trainer that is resuming, and whether what it resumes must be the same model.
_resuming: ContextVar[Optional[Any]] = ContextVar("resuming", default=None)


def allow_fairseq_checkpoints() -> None:
    """Let `torch.load(weights_only=True)` read what fairseq puts into a checkpoint.

    That is argparse's namespace, and with `--eval-bleu` numpy scalars among the metrics.
    """
    multiarray = importlib.import_module(
        "numpy._core.multiarray"
        if importlib.util.find_spec("numpy._core")
        else "numpy.core.multiarray"
    )
    numpy_dtypes = [type(np.dtype(name)) for name in ("float32", "float64", "int32", "int64")]
    # What stands for a tensor where one worker sends the others what it has read.
    placeholder = getattr(distributed_utils, "_TensorPlaceholder", None)
    safe = [
        argparse.Namespace,
        codecs.encode,
        multiarray._reconstruct,
        multiarray.scalar,
        np.ndarray,
        np.dtype,
        *numpy_dtypes,
        *([] if placeholder is None else [placeholder]),
    ]
    if hasattr(torch.serialization, "add_safe_globals"):
        torch.serialization.add_safe_globals(safe)
    else:
        read_only(safe)  # torch < 2.4


def keep_every_sentence() -> None:
    """Undo the loss of the last batch in builds of fairseq that have it.

    Their `batch_by_size` drops the last batch of a split when its size is not a multiple of
    `--required-batch-size-multiple`, in training, validation and generation.
    """
    original = data_utils.batch_by_size
    if getattr(original, "keeps_every_sentence", False) or _keeps_last_batch(original):
        return

    @functools.wraps(original)
    def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> List[Sequence[int]]:
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)
        if len(indices) == 0:
            return []
        batches = list(original(indices, *args, **kwargs))
        # Batches follow the order of the indices, so what is missing is the end. With fixed
        # shapes nothing was dropped, and nothing is missing.
        missing = indices[sum(len(batch) for batch in batches) :]
        return [*batches, missing] if len(missing) > 0 else batches

    batch_by_size.keeps_every_sentence = True  # type: ignore[attr-defined]
    data_utils.batch_by_size = batch_by_size


def _keeps_last_batch(batch_by_size: Callable[..., Any]) -> bool:
    """Try it: three sentences, batches of a multiple of two, room for all three."""
    lengths = np.ones(3, dtype=np.int64)
    batches = batch_by_size(
        np.arange(3),
        num_tokens_fn=lambda index: lengths[index],
        num_tokens_vec=lengths,
        max_sentences=2,
        required_batch_size_multiple=2,
    )
    return sum(len(batch) for batch in batches) == 3


def give_numpy_what_fairseq_asks_for() -> None:
    """Let fairseq find `np.compat.long`, which is `int`, where numpy has it no longer.

    Only the two modules of fairseq that name it see it; numpy itself is left as it is.
    """
    if not hasattr(np, "compat"):
        for name in ("token_block_dataset", "language_pair_dataset"):
            vars(importlib.import_module(f"fairseq.data.{name}"))["np"] = _NumpyWithCompat("numpy")


class _NumpyWithCompat(ModuleType):
    """numpy, with the one name of its former module `compat` that fairseq uses."""

    compat = SimpleNamespace(long=int)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def resume_with_the_same_batches() -> None:
    """Make a run that resumes in a later epoch go on with the batches that it began with.

    Builds that seed the batching with the epoch in which the iterator is made put sentences into
    other batches after a resumption, and so train on some of them twice in that epoch and on
    others not at all. Where batching does not depend on the epoch this changes nothing.
    """
    original = FairseqTask.get_batch_iterator
    if getattr(original, "resumes_with_the_same_batches", False):
        return

    @functools.wraps(original)
    def get_batch_iterator(self: Any, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        epoch = kwargs.get("epoch", 1)
        reused = self.can_reuse_epoch_itr(dataset) and not (
            kwargs.get("disable_iterator_cache") or kwargs.get("update_epoch_batch_itr")
        )
        if epoch <= 1 or not reused or dataset in self.dataset_to_epoch_iter:
            return original(self, dataset, *args, **kwargs)
        iterator = original(self, dataset, *args, **{**kwargs, "epoch": 1})
        iterator.epoch = epoch
        return iterator

    get_batch_iterator.resumes_with_the_same_batches = True  # type: ignore[attr-defined]
    FairseqTask.get_batch_iterator = get_batch_iterator


def count_batches_that_fill_up_as_nothing() -> None:
    """Let a worker that has fewer batches than others in an update count what it has.

    fairseq fills up with batches whose loss it multiplies by 0. Where the last one of a worker
    is such a batch it takes the worker's whole sample size and metrics for nothing, though the
    gradient of the batches before is in the sum: the update is divided by too little.
    """
    original_step, original_task_step = Trainer.train_step, FairseqTask.train_step
    if getattr(original_step, "counts_batches_that_fill_up_as_nothing", False):
        return

    @functools.wraps(original_step)
    def train_step(self: Any, samples: Any, *args: Any, **kwargs: Any) -> Any:
        # Those that fill up come first, so that the last one says whether there is any other.
        ordered = sorted(samples, key=lambda sample: sample is not None and len(sample) > 0)
        return original_step(self, ordered, *args, **kwargs)

    @functools.wraps(original_task_step)
    def task_train_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss, sample_size, logged = original_task_step(self, *args, **kwargs)
        ignored = kwargs.get("ignore_grad", args[5] if len(args) > 5 else False)
        if ignored:
            sample_size = sample_size * 0
            logged = {
                name: value * 0 if isinstance(value, (int, float, Tensor, np.ndarray)) else value
                for name, value in logged.items()
            }
        return loss, sample_size, logged

    train_step.counts_batches_that_fill_up_as_nothing = True  # type: ignore[attr-defined]
    Trainer.train_step = train_step
    FairseqTask.train_step = task_train_step


def read_checkpoints_safely() -> None:
    """Let fairseq read a checkpoint without running anything, or refuse it in one line.

    All of fairseq's commands and `from_pretrained` read checkpoints by the one function that is
    wrapped here. Only torch's own switch, TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1 in the environment,
    lets a checkpoint run what it holds.
    """
    original, original_resume = checkpoint_utils.load_checkpoint_to_cpu, Trainer.load_checkpoint
    if getattr(original, "reads_safely", False):
        return

    @functools.wraps(original)
    def load_checkpoint_to_cpu(path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            with _nothing_run():
                state = original(path, *args, **kwargs)
            if not isinstance(state.get("model"), Mapping):
                raise KeyError("model")
        except (UsageError, OmegaConfBaseException):
            raise  # options given beside the checkpoint
        except Exception as error:
            raise unreadable_checkpoint(path, error) from error
        resumed_by = _resuming.get()
        if resumed_by is not None:
            for check in resumption_checks:
                check(path, state, resumed_by)
            # The trainer does not look at it, and other workers could not be sent it.
            state["cfg"] = state["args"] = None
        return state

    @functools.wraps(original_resume)
    def load_checkpoint(
        self: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        # With --reset-optimizer and --finetune-from-model another model is meant.
        token = _resuming.set(None if reset_optimizer else self.cfg)
        try:
            return original_resume(self, filename, reset_optimizer, *args, **kwargs)
        finally:
            _resuming.reset(token)

    load_checkpoint_to_cpu.reads_safely = True  # type: ignore[attr-defined]
    checkpoint_utils.load_checkpoint_to_cpu = load_checkpoint_to_cpu
    Trainer.load_checkpoint = load_checkpoint


@contextmanager
def _nothing_run() -> Iterator[None]:
    """torch.load runs nothing in this block, whatever its default is in this version."""
    if "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" in os.environ:
        yield
        return
    name = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def refuse_fully_sharded() -> None:
    """Let `--ddp-backend fully_sharded` end in one line where fairscale is missing."""
    train_command = importlib.import_module("fairseq_cli.train")
    original = train_command.fsdp_enable_wrap
    if getattr(original, "says_what_is_missing", False):
        return

    @contextmanager
    def fsdp_enable_wrap(cfg: Any) -> Iterator[None]:
        try:
            importlib.import_module("fairscale")
        except ImportError as error:
            raise UsageError(
                "--ddp-backend fully_sharded needs fairscale, which is not installed; use "
                "--ddp-backend pytorch_ddp or legacy_ddp"
            ) from error
        with original(cfg):
            yield

    fsdp_enable_wrap.says_what_is_missing = True  # type: ignore[attr-defined]
    vars(train_command)["fsdp_enable_wrap"] = fsdp_enable_wrap


def take_no_code_for_an_option() -> None:
    """Let no option be a program.

    Some of fairseq's models and tasks pass options to `eval`, and those of a checkpoint come from
    whoever made it. Their modules get an `eval` of their own, for numbers and texts.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("fairseq.") and module is not None:
            vars(module).setdefault("eval", value_of_option)


_VALUES = (
    *(ast.Expression, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Set, ast.Load),
    *(ast.UnaryOp, ast.USub, ast.UAdd, ast.BinOp, ast.Add, ast.Sub, ast.Mult, ast.Div),
)


def value_of_option(text: Any, *_: Any) -> Any:
    """The value of an option that is an expression of constants, `[(512, 3)] * 20`, say.

    Raises:
        TypeError: for anything but a text, as `eval` does.
        UsageError: for a name, a call or anything else that is more than a value.
    """
    if not isinstance(text, str):
        raise TypeError(f"{text!r} is not a text")
    tree = ast.parse(text.strip(), mode="eval")
    if not all(isinstance(node, _VALUES) for node in ast.walk(tree)):
        raise UsageError(
            f"the option {text!r} is code and not a value; it was not run; write the value itself, "
            "and do not use a checkpoint that has such an option"
        )
    return eval(compile(tree, "<option>", "eval"), {"__builtins__": {}})


def recompute(function: Callable[..., Any], offload: bool, *args: Any, **kwargs: Any) -> Any:
    """Call `function` and compute its activations again in the backward pass, not keep them.

    fairseq's own wrapper is re-entrant and silently drops the gradient of whatever leaves a
    layer other than by its return value, the router's logits among it. This one keeps it.

    Args:
        function: a layer's forward pass; the first argument is a tensor.
        offload: keep the inputs in main memory rather than on the device.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if not offload:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    device = args[0].device

    def function_from_host(*host_args: Any, **host_kwargs: Any) -> Any:
        return function(
            *(_to_device(value, device) for value in host_args),
            **{name: _to_device(value, device) for name, value in host_kwargs.items()},
        )

    return checkpoint(
        function_from_host,
        *(_to_device(value, "cpu") for value in args),
        use_reentrant=False,
        **{name: _to_device(value, "cpu") for name, value in kwargs.items()},
    )


def without_memory() -> ContextManager[Any]:
    """A block in which modules are made without memory for their parameters.

    torch before 2.0 cannot: there they are made as always, which only costs the memory.
    """
    return torch.device("meta") if hasattr(torch.device, "__enter__") else nullcontext()


def _to_device(value: Any, device: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


allow_fairseq_checkpoints()
keep_every_sentence()
give_numpy_what_fairseq_asks_for()
resume_with_the_same_batches()
count_batches_that_fill_up_as_nothing()
read_checkpoints_safely()
take_no_code_for_an_option()
refuse_fully_sharded()
