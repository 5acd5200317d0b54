"""`moa-head-report`: what the experts of MoA models do on a split, as a page that opens anywhere.

It runs the models over the split and writes a folder: index.html, which needs no network, its
plots as PNG and SVG, its tables as CSV, and report.json with the numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Optional, Sequence

from ..analysis.heads.context import ReportOptions
from ..analysis.heads.pipeline import head_report
from ..analysis.heads.words import POST_PROCESSES
from ..analysis.heads.writing import check_out
from ..errors import UsageError
from .common import command


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
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError('the plots need matplotlib; install it: pip install -e ".[plots]"')
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
        ("seed", "of the random routers"),
    ):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    parser.add_argument(
        *("--post-process", "--remove-bpe"),
        choices=POST_PROCESSES,
        help="how pieces make words (default: as the dictionary looks)",
    )
    parser.add_argument("--cpu", action="store_true", help="use no GPU where there is one")
    return parser
