"""A model, its task and the batches of a split: what every section of a head report starts from."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch
from fairseq import checkpoint_utils, utils
from torch import nn

from ...errors import UsageError
from ...mistakes import one_line_for_mistakes
from ...modules.recording import routed_modules
from ..importance import ImportanceOptions
from ..sentence import SentenceOptions

logger = logging.getLogger(__name__)

Sample = Dict[str, Any]


@dataclass(frozen=True)
class TextOptions:
    """How raw text becomes pieces, as fairseq's options of the same names say."""

    tokenizer: Optional[str] = None
    bpe: Optional[str] = None
    sentencepiece_model: Optional[Path] = None
    bpe_codes: Optional[Path] = None


@dataclass(frozen=True)
class ReportOptions:
    """What a head report is asked for.

    Attributes:
        subset: split of the data, `test` say.
        max_tokens: tokens of a batch, padding included; None where only `max_sentences` bounds it.
        max_sentences: sentences of a batch; None where only `max_tokens` bounds it.
        num_sentences: how many sentences to take, evenly spaced over the split; None takes all.
        skip_invalid_size_inputs: leave out sentences that are longer than the model allows.
        min_count: tokens of a word (or piece) below which it gets no PMI.
        top: words that tables name for each expert.
        max_words: different words that are counted; those that come first in the split.
        post_process: how pieces make words, `sentencepiece`, `subword_nmt` or `none`; None is
            found from the dictionary.
        seed: of the random routers.
        cpu: use no GPU.
        text: how the sentence becomes pieces, and pieces text.
        sentence: to show token by token; None for none.
        importance: how to mask experts; None does not. Its journal's name gets the model's added.
    """

    subset: str = "test"
    max_tokens: Optional[int] = 4096
    max_sentences: Optional[int] = None
    num_sentences: Optional[int] = None
    skip_invalid_size_inputs: bool = False
    min_count: int = 20
    top: int = 10
    max_words: int = 20000
    post_process: Optional[str] = None
    seed: int = 1
    cpu: bool = False
    text: TextOptions = TextOptions()
    sentence: Optional[SentenceOptions] = None
    importance: Optional[ImportanceOptions] = None


@dataclass(frozen=True)
class ModelContext:
    """A model and what it is run on.

    Attributes:
        name: what the report calls it.
        path: its checkpoint.
        model: in evaluation mode, on `device`.
        task: fairseq's, with the split loaded.
        device: where the model and its batches are.
        options: of the report.
        batches: makes an iterator over the batches, as fairseq collates them, each time anew and
            each time the same.
    """

    name: str
    path: Path
    model: nn.Module
    task: Any
    device: torch.device
    options: ReportOptions
    batches: Callable[[], Iterator[Sample]]


def load_contexts(
    paths: Sequence[Path], data: str, options: ReportOptions
) -> Tuple[ModelContext, ...]:
    """Load each checkpoint with its own task, on one folder of data.

    Raises:
        UsageError: for a checkpoint that cannot be read, is of no MoA model or does not fit the
            data, and for a split that is not there.
    """
    names = model_names(paths)
    return tuple(load_context(path, name, data, options) for path, name in zip(paths, names))


def load_context(path: Path, name: str, data: str, options: ReportOptions) -> ModelContext:
    """As :func:`load_contexts`, for one checkpoint."""
    logger.info("loading %s", path)
    with one_line_for_mistakes():
        (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
            [str(path)], arg_overrides={"data": data, "eval_bleu": False}
        )
    if next(routed_modules(model), None) is None:
        raise UsageError(
            f"--path {path}: the model has no routed experts, so there are no heads to report on; "
            "give a checkpoint of an architecture with MoA modules, such as moa_transformer"
        )
    try:
        task.load_dataset(options.subset)
    except (FileNotFoundError, KeyError) as error:
        raise UsageError(
            f"--subset {options.subset}: {data} has no such split; binarise one with "
            "fairseq-preprocess, or name another"
        ) from error
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    model.eval().to(device)
    with one_line_for_mistakes():
        batches = _chosen(_batches(model, task, options), options.num_sentences)
    if not batches:
        raise UsageError(f"--subset {options.subset}: no sentence is left; give another split")
    dataset = task.dataset(options.subset)

    def iterate() -> Iterator[Sample]:
        for batch in batches:
            sample = dataset.collater([dataset[index] for index in batch])
            yield utils.move_to_cuda(sample) if device.type == "cuda" else sample

    return ModelContext(name, path, model, task, device, options, iterate)


def model_names(paths: Sequence[Path]) -> List[str]:
    """What tells checkpoints apart: their folders, or their files, or both.

    Raises:
        UsageError: where one is given twice.
    """
    resolved = [path.resolve() for path in paths]
    candidates = (
        [path.parent.name for path in resolved],
        [path.stem for path in resolved],
        [f"{path.parent.name}/{path.stem}" for path in resolved],
        [str(path) for path in paths],
    )
    for names in candidates:
        if len(set(names)) == len(paths) and all(names):
            return names
    raise UsageError("--path: a checkpoint is given twice; give each of them once")


def _batches(model: Any, task: Any, options: ReportOptions) -> List[Sequence[int]]:
    """fairseq's batches: indices of sentences."""
    iterator = task.get_batch_iterator(
        dataset=task.dataset(options.subset),
        max_tokens=options.max_tokens,
        max_sentences=options.max_sentences,
        max_positions=utils.resolve_max_positions(task.max_positions(), model.max_positions()),
        ignore_invalid_inputs=options.skip_invalid_size_inputs,
        disable_iterator_cache=True,
    )
    return [[int(index) for index in batch] for batch in iterator.frozen_batches]


def _chosen(batches: List[Sequence[int]], number: Optional[int]) -> List[Sequence[int]]:
    """Batches of `number` sentences, evenly spaced: fairseq's order is by length."""
    indices = sorted(index for batch in batches for index in batch)
    if number is None or number >= len(indices):
        return batches
    places = np.linspace(0, len(indices) - 1, number).round().astype(int)
    kept = {indices[place] for place in places}
    chosen = [[index for index in batch if index in kept] for batch in batches]
    return [batch for batch in chosen if batch]
