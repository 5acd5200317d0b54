"""`moa-head-report`: what the experts of MoA models do on a split, as a page that opens anywhere.

It runs the models over the split and writes a folder: index.html, which needs no network, its
plots as PNG and SVG, its tables as CSV, and report.json with the numbers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Optional, Sequence

from ..analysis.heads.context import ReportOptions, TextOptions
from ..analysis.heads.pipeline import head_report
from ..analysis.heads.words import POST_PROCESSES
from ..analysis.heads.writing import check_out
from ..analysis.importance import ImportanceOptions
from ..analysis.plots import require_matplotlib
from ..analysis.sentence import SentenceOptions
from ..errors import UsageError
from .common import command

SUBWORDS = ("sentencepiece", "subword_nmt")


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    args = _parser().parse_args(arguments)
    if args.max_tokens is None and args.batch_size is None:
        args.max_tokens = ReportOptions.max_tokens
    for flag in ("max_tokens", "batch_size", "num_sentences", "min_count", "top", "max_words"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            raise UsageError(f"--{flag.replace('_', '-')} {value}: it must be at least 1")
    for path in args.path:
        if not path.is_file():
            raise UsageError(
                f"--path {path}: no such checkpoint; give one that fairseq-train or "
                "moa-average-checkpoints wrote"
            )
    if not args.data.is_dir():
        raise UsageError(
            f"{args.data}: no such folder of data; give fairseq-preprocess's --destdir"
        )
    require_matplotlib("the report")
    check_out(args.out)
    options = ReportOptions(
        subset=args.subset,
        max_tokens=args.max_tokens,
        max_sentences=args.batch_size,
        num_sentences=args.num_sentences,
        skip_invalid_size_inputs=args.skip_invalid_size_inputs_valid_test,
        min_count=args.min_count,
        top=args.top,
        max_words=args.max_words,
        post_process=args.post_process,
        seed=args.seed,
        cpu=args.cpu,
        text=_text_options(args),
        sentence=_sentence_options(args),
        importance=_importance_options(args),
    )
    given = sys.argv[1:] if arguments is None else list(arguments)
    print(head_report(args.path, str(args.data), args.out, options, ["moa-head-report", *given]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moa-head-report", description=__doc__)
    default = ReportOptions()
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of binarised data")
    parser.add_argument(
        "--path",
        type=Path,
        action="append",
        required=True,
        metavar="CHECKPOINT",
        help="a checkpoint, averaged or not; several are set side by side",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument(
        "--subset", default=default.subset, help=f"split of the data (default: {default.subset})"
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        help=f"tokens in a batch (default: {default.max_tokens}, or no bound with --batch-size)",
    )
    parser.add_argument(*("--batch-size", "--max-sentences"), type=int, help="sentences in a batch")
    parser.add_argument(
        "--num-sentences", type=int, help="take so many, evenly spaced over the split"
    )
    parser.add_argument(
        "--skip-invalid-size-inputs-valid-test",
        action="store_true",
        help="leave out sentences that are longer than the model allows",
    )
    for name, text in (
        ("min-count", "tokens of a word or piece below which it gets no PMI"),
        ("top", "words and pieces that tables name for each expert"),
        ("max-words", "different words that are counted, those that come first"),
        ("seed", "of the random routers and of samples"),
    ):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument(
        *("--post-process", "--remove-bpe"),
        choices=POST_PROCESSES,
        help="how pieces make words (default: as the dictionary looks)",
    )
    parser.add_argument("--cpu", action="store_true", help="use no GPU where there is one")
    _add_sentence(parser)
    _add_importance(parser)
    return parser


def _add_sentence(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("one sentence, token by token")
    group.add_argument("--sentence", metavar="TEXT", help="in the source language, as raw text")
    group.add_argument(
        "--sentence-target", metavar="TEXT", help="its target (default: the model's translation)"
    )
    group.add_argument(
        "--sentence-maps",
        default=SentenceOptions.maps,
        metavar="WHICH",
        help="modules whose attention is drawn: last (layers), all, or names with commas between "
        f"them (default: {SentenceOptions.maps})",
    )
    group.add_argument("--bpe", choices=SUBWORDS, help="the data's subwords")
    group.add_argument("--sentencepiece-model", type=Path, metavar="FILE")
    group.add_argument("--bpe-codes", type=Path, metavar="FILE")
    group.add_argument("--tokenizer", choices=("moses",), help="of the text before subwords")


def _add_importance(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "importance: the loss without one expert at a time",
        "It goes on where it was interrupted, with OUT.importance-MODEL.jsonl beside the report.",
    )
    group.add_argument(
        "--importance",
        type=int,
        metavar="N",
        help="mask each expert in turn, on N sentences drawn from the split",
    )
    for name, metavar, text in (
        (
            "bleu-experts",
            "M",
            "measure BLEU too for the M experts with the greatest change of loss",
        ),
        ("bleu-sentences", "N", "of those sentences, for BLEU"),
        ("resamples", "R", "of the bootstrap that gives the intervals"),
    ):
        default = getattr(ImportanceOptions, name.replace("-", "_"))
        group.add_argument(
            f"--importance-{name}",
            type=int,
            default=default,
            metavar=metavar,
            help=f"{text} (default: {default})",
        )
    group.add_argument("--beam", type=int, default=ImportanceOptions.beam, help="of translations")
    group.add_argument("--lenpen", type=float, default=ImportanceOptions.lenpen)


def _text_options(args: argparse.Namespace) -> TextOptions:
    """What `--bpe` and its files say.

    Raises:
        UsageError: for a file that is not there, or a flag without the other that it needs.
    """
    files = {
        "sentencepiece": ("--sentencepiece-model", args.sentencepiece_model),
        "subword_nmt": ("--bpe-codes", args.bpe_codes),
    }
    for bpe, (flag, path) in files.items():
        if path is None and args.bpe == bpe:
            raise UsageError(f"--bpe {bpe} needs {flag} FILE; give the one that made the data")
        if path is not None and args.bpe != bpe:
            raise UsageError(f"{flag} {path}: it is read with --bpe {bpe} only; give that too")
        if path is not None and not path.is_file():
            raise UsageError(f"{flag} {path}: no such file; give the one that made the data")
    return TextOptions(args.tokenizer, args.bpe, args.sentencepiece_model, args.bpe_codes)


def _sentence_options(args: argparse.Namespace) -> Optional[SentenceOptions]:
    if args.sentence is None:
        if args.sentence_target is not None or args.sentence_maps != SentenceOptions.maps:
            raise UsageError("--sentence is missing; give it, or none of the --sentence options")
        return None
    return SentenceOptions(
        args.sentence, args.sentence_target, args.sentence_maps, args.beam, args.lenpen
    )


def _importance_options(args: argparse.Namespace) -> Optional[ImportanceOptions]:
    if args.importance is None:
        for name in ("bleu_experts", "bleu_sentences", "resamples"):
            if getattr(args, f"importance_{name}") != getattr(ImportanceOptions, name):
                flag = f"--importance-{name.replace('_', '-')}"
                raise UsageError(f"{flag} goes with --importance N only; give that too")
        return None
    return ImportanceOptions(
        subset=args.subset,
        sentences=args.importance,
        seed=args.seed,
        max_tokens=args.max_tokens or ImportanceOptions.max_tokens,
        resamples=args.importance_resamples,
        bleu_experts=args.importance_bleu_experts,
        bleu_sentences=args.importance_bleu_sentences,
        beam=args.beam,
        lenpen=args.lenpen,
        journal=args.out.absolute(),
    )
