"""`moa-prepare-wikitext103`: text to subwords; `scripts/prepare_wikitext103.sh` goes on."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Optional, Sequence

from ..errors import UsageError
from ..text.wikitext103.prepare import RECIPES, Options, prepare_wikitext103
from .common import command


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        prog="moa-prepare-wikitext103", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument(
        "--recipe",
        choices=RECIPES,
        default=RECIPES[0],
        help="gpt2: the subwords of GPT-2, as in fairseq's RoBERTa (default; with its 50,265 types "
        "the paper's parameter counts come out); sentencepiece: pieces learned from the text",
    )
    parser.add_argument(
        "--from-dir",
        type=Path,
        metavar="DIR",
        help="use the archive, or texts wiki.SPLIT.raw, wiki.SPLIT.tokens or SPLIT.txt (train, "
        "valid, test; any text), in this folder, and for gpt2 encoder.json and vocab.bpe; "
        "downloads nothing",
    )
    parser.add_argument(
        "--base-url", metavar="URL", help="download URL/NAME instead of the addresses on record"
    )
    parser.add_argument(
        "--checksums",
        type=Path,
        metavar="FILE",
        help="digests as sha256sum prints them, instead of those on record",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="pieces of the recipe sentencepiece (default: 32000)",
    )
    parser.add_argument(
        "--character-coverage",
        type=float,
        metavar="X",
        help="share of the text's characters that have pieces (default: 0.9998)",
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
    coverage = args.character_coverage
    if coverage is not None and not 0 < coverage <= 1:
        raise UsageError(f"--character-coverage {coverage}: it must be above 0 and at most 1")
    for flag, value in (("--vocab-size", args.vocab_size), ("--character-coverage", coverage)):
        if value is not None and args.recipe != "sentencepiece":
            raise UsageError(
                f"{flag} {value}: --recipe {args.recipe} learns nothing from the text; leave it "
                "out, or add --recipe sentencepiece"
            )
    if args.from_dir is not None and not args.from_dir.is_dir():
        raise UsageError(f"--from-dir {args.from_dir}: no such folder; give another")
    options = Options(
        recipe=args.recipe,
        vocab_size=args.vocab_size or 32000,
        character_coverage=0.9998 if coverage is None else coverage,
        from_dir=args.from_dir,
        base_url=args.base_url,
        checksums=args.checksums,
        workers=args.workers,
        shard_lines=args.shard_lines,
        keep_work=args.keep_work,
    )
    prepare_wikitext103(options, args.out)
