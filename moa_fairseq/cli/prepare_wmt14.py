"""`moa-prepare-wmt14`: the WMT14 archives to subwords; `scripts/prepare_wmt14.sh` goes on."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Optional, Sequence

from ..errors import UsageError
from ..text.wmt14.archives import PAIRS
from ..text.wmt14.prepare import VOCAB_SIZES, Options, prepare_wmt14
from ..text.wmt14.shards import RECIPES
from .common import command


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        prog="moa-prepare-wmt14", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--pair", required=True, choices=sorted(PAIRS))
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default=RECIPES[0],
        help="sentencepiece keeps raw text (default); clinic is the authors' data: Moses "
        "normalisation and tokenisation, then joint byte-pair encoding",
    )
    parser.add_argument(
        "--from-dir",
        type=Path,
        metavar="DIR",
        help="use the archives, or the texts unpacked from them, in this folder; downloads nothing",
    )
    parser.add_argument(
        "--base-url",
        metavar="URL",
        default=os.environ.get("MOA_WMT14_BASE_URL"),
        help="download URL/NAME instead of the shared tasks' addresses "
        "(default: $MOA_WMT14_BASE_URL)",
    )
    parser.add_argument(
        "--checksums",
        type=Path,
        metavar="FILE",
        default=os.environ.get("MOA_WMT14_CHECKSUMS"),
        help="the archives' digests, as sha256sum prints them, instead of those on record "
        "(default: $MOA_WMT14_CHECKSUMS)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="joint merges or pieces (default: the recipe's, "
        + ", ".join(f"{pair} {recipe} {size}" for (pair, recipe), size in VOCAB_SIZES.items())
        + ")",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        default=len(os.sched_getaffinity(0)),
        help="processes; they change nothing in what comes out (default: the number of cores)",
    )
    parser.add_argument(
        "--shard-lines",
        type=int,
        metavar="N",
        default=50_000,
        help="lines that a worker takes at a time, and loses when it is killed (default: 50000)",
    )
    parser.add_argument(
        "--keep-work", action="store_true", help="leave the intermediate files in DIR/work"
    )
    args = parser.parse_args(arguments)
    for flag, value in (
        ("--vocab-size", args.vocab_size),
        ("--workers", args.workers),
        ("--shard-lines", args.shard_lines),
    ):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: it must be at least 1")
    if args.from_dir is not None and not args.from_dir.is_dir():
        raise UsageError(f"--from-dir {args.from_dir}: no such folder")
    options = Options(
        pair=args.pair,
        recipe=args.recipe,
        vocab_size=args.vocab_size or VOCAB_SIZES[args.pair, args.recipe],
        from_dir=args.from_dir,
        base_url=args.base_url,
        checksums=args.checksums,
        workers=args.workers,
        shard_lines=args.shard_lines,
        keep_work=args.keep_work,
    )
    prepare_wmt14(options, args.out)
