"""Sections that a report has of each model when they are asked for."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from ...errors import UsageError
from ...mistakes import one_line_for_mistakes
from ..importance_section import importance_section
from ..report_sections import ReportSection
from ..sentence_section import sentence_section
from ..text_codec import TextCodec
from .context import ModelContext, TextOptions
from .surveyed import slug
from .words import NONE, find_post_process


def sentence_of(context: ModelContext) -> Optional[ReportSection]:
    """Who routes where in the sentence of the options, if there is one."""
    asked = context.options.sentence
    if asked is None:
        return None
    pieces = _post_process(context)
    if context.options.text.bpe is None and pieces is not None:
        raise UsageError(
            f"--sentence needs --bpe {pieces} and its file: the data is of such pieces; give both"
        )
    return sentence_section(context.model, context.task, asked, codec_of(context))


def importance_of(context: ModelContext) -> Optional[ReportSection]:
    """What masking each expert costs, where the options ask for it."""
    asked = context.options.importance
    if asked is None:
        return None
    journal = asked.journal
    if journal is not None:
        # Each model has a file of its own.
        journal = journal.with_name(f"{journal.name}.importance-{slug(context.name)}.jsonl")
    return importance_section(
        context.model,
        context.task,
        context.path,
        replace(asked, journal=journal),
        codec_of(context),
    )


def codec_of(context: ModelContext) -> TextCodec:
    """Raw text to pieces and back, as fairseq's commands do with the same options.

    Raises:
        UsageError: for a file of subwords that cannot be read.
    """
    task, text = context.task, context.options.text
    with one_line_for_mistakes():
        return TextCodec(
            task.build_tokenizer(_tokenizer(task, text)),
            task.build_bpe(_subwords(text)),
            None if text.bpe is not None else _post_process(context),
        )


def _post_process(context: ModelContext) -> Optional[str]:
    """How pieces make words, as fairseq's `--post-process` says it; None where they are words."""
    dictionary = context.task.target_dictionary or context.task.source_dictionary
    found = context.options.post_process or find_post_process(dictionary)
    return None if found == NONE else found


def _tokenizer(task: Any, text: TextOptions) -> Namespace:
    if text.tokenizer is None:
        return Namespace(tokenizer=None)
    languages = getattr(task, "cfg", None) or getattr(task, "args", None)
    return Namespace(
        tokenizer=text.tokenizer,
        source_lang=getattr(languages, "source_lang", None),
        target_lang=getattr(languages, "target_lang", None),
        moses_no_dash_splits=False,
        moses_no_escape=False,
    )


def _subwords(text: TextOptions) -> Namespace:
    return Namespace(
        bpe=text.bpe,
        sentencepiece_model=_given(text.sentencepiece_model),
        sentencepiece_enable_sampling=False,
        sentencepiece_alpha=None,
        bpe_codes=_given(text.bpe_codes),
        bpe_separator="@@",
    )


def _given(path: Optional[Path]) -> Optional[str]:
    return None if path is None else str(path)
