"""What fairseq's task `masked_lm` is given by mistake, refused in one line before it stumbles."""

from __future__ import annotations

import inspect
from typing import Any

from fairseq.tasks.masked_lm import MaskedLMTask

from .errors import UsageError


def check_mask_probabilities(
    mask_prob: float, leave_unmasked_prob: float, random_token_prob: float
) -> None:
    """Refuse probabilities on which fairseq would end in a bare assertion.

    Raises:
        UsageError: naming flag, value and remedy.
    """
    if not 0 < mask_prob < 1:
        raise UsageError(f"--mask-prob {mask_prob}: it must lie between 0 and 1, both excluded")
    for flag, value in (
        ("--leave-unmasked-prob", leave_unmasked_prob),
        ("--random-token-prob", random_token_prob),
    ):
        if not 0 <= value <= 1:
            raise UsageError(f"{flag} {value}: it must lie between 0 and 1")
    if leave_unmasked_prob + random_token_prob > 1:
        raise UsageError(
            f"--leave-unmasked-prob {leave_unmasked_prob} and --random-token-prob "
            f"{random_token_prob} are shares of the masked tokens, and more than 1 together; lower "
            "one"
        )


def check_masked_lm(task: Any) -> None:
    """Refuse options of `masked_lm` that cannot work.

    Args:
        task: the options of any task; those of others are left alone.

    Raises:
        UsageError: naming flag, value and remedy.
    """
    if getattr(task, "_name", None) != "masked_lm":
        return
    check_mask_probabilities(task.mask_prob, task.leave_unmasked_prob, task.random_token_prob)
    if task.tokens_per_sample < 2:
        raise UsageError(
            f"--tokens-per-sample {task.tokens_per_sample}: it must be at least 2, <s> and a token"
        )
    if task.mask_multiple_length < 1:
        raise UsageError(
            f"--mask-multiple-length {task.mask_multiple_length}: it must be at least 1"
        )
    if not task.mask_stdev >= 0:
        raise UsageError(f"--mask-stdev {task.mask_stdev}: it must not be negative")
    if task.mask_whole_words and not _can_mask_whole_words():
        raise UsageError(
            "--mask-whole-words: this build of fairseq asks its task for options that it does not "
            "keep, and fails; leave it out"
        )


def _can_mask_whole_words() -> bool:
    """Builds whose task reads `self.args` there, but is made of `cfg` alone, cannot."""
    source = inspect.getsource(MaskedLMTask.load_dataset)
    return "get_whole_word_mask(self.args" not in source
