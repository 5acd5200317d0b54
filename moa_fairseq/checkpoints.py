"""Reading, writing and averaging fairseq checkpoints."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import IO, Any, Dict, List, Optional, Sequence, Tuple, Union, cast

import torch
from torch import Tensor

from .errors import UsageError, unreadable_checkpoint
from .models.config import MoATransformerConfig
from .models.masked_lm_config import MoAMaskedLMConfig
from .text.files import atomic_writer

logger = logging.getLogger(__name__)

EPOCH_NAME = re.compile(r"checkpoint(\d+)\.pt")
UPDATE_NAME = re.compile(r"checkpoint_\d+_(\d+)\.pt")
BEST_NAME = re.compile(r"checkpoint\.best_.+?_(-?\d+(?:\.\d+)?)(?:_\d+)?\.pt")

# Options of a model that change how it trains but not what it computes afterwards.
TRAINING_OPTIONS = {
    *("dropout", "attention_dropout", "activation_dropout", "relu_dropout"),
    *("adaptive_softmax_dropout", "encoder_layerdrop", "decoder_layerdrop"),
    *("quant_noise_pq", "quant_noise_pq_block_size", "quant_noise_scalar"),
    *("checkpoint_activations", "offload_activations", "min_params_to_wrap"),
    "expert_backend",
    *("sample_topk", "router_init_std", "output_init_gain"),
    *("pooler_dropout", "load_checkpoint_heads"),
}


def write_checkpoint(state: Any, path: Union[str, Path]) -> None:
    """Write a checkpoint that appears under its name only once it is whole and on disk.

    Raises:
        OSError: where the system refuses to write it.
    """
    with atomic_writer(path, "wb") as stream:
        guarded = _GuardedStream(stream)
        torch.save(state, cast(IO[bytes], guarded))
        if guarded.error is not None:
            raise guarded.error


class _GuardedStream:
    """Keeps the first error of writing for later.

    torch 1.13 aborts the process where writing fails while it ends an archive.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.error: Optional[OSError] = None

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self.stream.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        pass  # closing the stream does


def load_checkpoint(path: Path) -> Dict[str, Any]:
    """Read a fairseq checkpoint to main memory without running any code that it may hold.

    Raises:
        UsageError: when it is missing, damaged, or not a fairseq checkpoint.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise unreadable_checkpoint(path, error) from error
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise UsageError(f"{path} is not a fairseq checkpoint: it has no model; give another")
    return state


def find_checkpoints(
    folder: Path,
    epochs: Optional[int] = None,
    updates: Optional[int] = None,
    best: Optional[int] = None,
    upper_bound: Optional[int] = None,
) -> List[Path]:
    """The last N epoch or update checkpoints of a folder, or its best N.

    Args:
        folder: fairseq's `--save-dir`.
        epochs, updates, best: N; exactly one of them is given.
        upper_bound: leave out epochs (or updates) after this one.

    Raises:
        UsageError: when there are fewer than N.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder of checkpoints; give a --save-dir")
    if best is not None:
        pattern, wanted, kind, saving = BEST_NAME, best, "best", f"--keep-best-checkpoints {best}"
    elif epochs is not None:
        pattern, wanted, kind, saving = EPOCH_NAME, epochs, "epoch", f"--keep-last-epochs {epochs}"
    else:
        assert updates is not None
        pattern, wanted, kind, saving = UPDATE_NAME, updates, "update", "--save-interval-updates"
    found: List[Tuple[float, Path]] = []
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match and (upper_bound is None or float(match[1]) <= upper_bound):
            found.append((float(match[1]), path))
    if len(found) < wanted:
        raise UsageError(
            f"{folder} has {len(found)} {kind} checkpoints, {wanted} were asked for; lower that "
            f"number, or train with {saving}"
        )
    found.sort()
    if best is not None and not _maximizes(load_checkpoint(found[0][1])):
        found.reverse()  # the smallest value of a loss is the best, and goes last
    return [path for _, path in found[-wanted:]]


def _maximizes(state: Dict[str, Any]) -> bool:
    checkpoint = (state.get("cfg") or {}).get("checkpoint") or {}
    return bool(checkpoint.get("maximize_best_checkpoint_metric"))


def average_checkpoints(paths: Sequence[Path], output: Path) -> None:
    """Average the parameters of checkpoints of one model and write the result.

    Sums are in float32 (float64 for float64 parameters). Everything but the parameters comes
    from the last checkpoint, less the optimizer's state, which an average does not have.
    Tensors that the model shares stay shared.

    Raises:
        UsageError: when a checkpoint cannot be read or belongs to another model.
    """
    sums: Dict[str, Tensor] = {}
    first: Dict[str, Any] = {}
    state: Dict[str, Any] = {}
    for path in paths:
        logger.info("reading %s", path)
        state = load_checkpoint(path)
        first = first or state
        _check_same_model(paths[0], first, path, state)
        for name, owner in _owners(state["model"]).items():
            parameter = state["model"][name]
            if name != owner or not parameter.is_floating_point():
                continue
            if name in sums:
                sums[name] += parameter
            else:
                dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
                sums[name] = parameter.detach().clone().to(dtype)
    averaged: Dict[str, Tensor] = {}
    for name, owner in _owners(state["model"]).items():
        parameter = state["model"][name]
        if name != owner:
            averaged[name] = averaged[owner]
        elif parameter.is_floating_point():
            averaged[name] = (sums[name] / len(paths)).to(parameter.dtype)
        else:
            averaged[name] = parameter  # a counter: the last one
    state["model"] = averaged
    state.pop("last_optimizer_state", None)
    state.setdefault("extra_state", {})["averaged_checkpoints"] = [path.name for path in paths]
    output.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(state, output)
    logger.info("wrote %s, the average of %d checkpoints", output, len(paths))


def _owners(model: Dict[str, Tensor]) -> Dict[str, str]:
    """For each name the first name of the same tensor (shared embeddings have three)."""
    firsts: Dict[Tuple[int, torch.Size, Tuple[int, ...]], str] = {}
    return {
        name: firsts.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if tensor.numel()
        else name
        for name, tensor in model.items()
    }


def _check_same_model(
    first_path: Path, first: Dict[str, Any], path: Path, state: Dict[str, Any]
) -> None:
    """Same parameters, shapes and options: with other K or gates, an average means nothing."""
    shapes = [
        {name: tuple(parameter.shape) for name, parameter in each["model"].items()}
        for each in (first, state)
    ]
    options = [_model_options(each) for each in (first, state)]
    for what, (left, right) in (("option", options), ("parameter", shapes)):
        for name in sorted(left.keys() | right.keys()):
            if left.get(name) != right.get(name):
                raise UsageError(
                    f"{path} is not of the same model as {first_path}: {what} {name} is "
                    f"{right.get(name)} instead of {left.get(name)}; give checkpoints of one run"
                )


def _model_options(state: Dict[str, Any]) -> Dict[str, Any]:
    model = (state.get("cfg") or {}).get("model") or state.get("args") or {}
    options = dict(model) if isinstance(model, dict) else vars(model)
    # An option that came with a later version has its default in a checkpoint without it.
    options = {**vars(MoATransformerConfig()), **options}
    known = {*MoATransformerConfig.__dataclass_fields__, *MoAMaskedLMConfig.__dataclass_fields__}
    names = {*known, "_name", "arch"} - TRAINING_OPTIONS
    return {name: value for name, value in options.items() if name in names}
