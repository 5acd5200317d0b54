"""fairseq's translation task over sentences that are made here, without files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.tasks.translation import TranslationConfig, TranslationTask
from torch import Tensor

from .toy import toy_task


def translation_task() -> TranslationTask:
    """The task of the toy dictionary, without data."""
    dictionary = toy_task().source_dictionary
    config = TranslationConfig(source_lang="a", target_lang="b")
    return TranslationTask(config, dictionary, dictionary)


def random_sentences(dictionary: Dictionary, lengths: Sequence[int], seed: int) -> list[Tensor]:
    """Random words, `lengths` of them and the end of the sentence."""
    generator = torch.Generator().manual_seed(seed)
    end = torch.tensor([dictionary.eos()])
    return [
        torch.cat(
            (
                torch.randint(dictionary.nspecial, len(dictionary), (length,), generator=generator),
                end,
            )
        )
        for length in lengths
    ]


def with_data(task: Any, sources: list[Tensor], targets: list[Tensor], subset: str = "test") -> Any:
    """The task with these pairs as one of its splits."""
    dictionary = task.source_dictionary
    task.datasets[subset] = LanguagePairDataset(
        sources,
        [len(source) for source in sources],
        dictionary,
        targets,
        [len(target) for target in targets],
        dictionary,
        shuffle=False,
    )
    return task
