"""`moa-prepare`: raw parallel text to SentencePiece pieces; `scripts/prepare.sh` goes on."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence, Tuple

from ..errors import UsageError
from ..text.prepare import PrepareOptions, prepare
from .common import command


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="moa-prepare", description=__doc__, allow_abbrev=False)
    parser.add_argument("--source-lang", required=True, help="code of the source language")
    parser.add_argument("--target-lang", required=True, help="code of the target language")
    parser.add_argument(
        "--train", metavar="PREFIX", help="training text: PREFIX.SOURCE_LANG and PREFIX.TARGET_LANG"
    )
    parser.add_argument("--train-source", metavar="FILE", help="training text, source side")
    parser.add_argument("--train-target", metavar="FILE", help="training text, target side")
    parser.add_argument(
        "--valid", metavar="PREFIX", help="validation text (default: held out of the training text)"
    )
    parser.add_argument(
        "--test",
        metavar="PREFIX",
        action="append",
        default=[],
        help="test set; may be repeated (default: held out of the training text)",
    )
    parser.add_argument(
        "--hold-out",
        type=int,
        metavar="N",
        help="pairs in a held-out set (default: a twentieth of the text, at most 1000)",
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument(
        "--vocab-size", type=int, default=8000, help="pieces of the joint model (default: 8000)"
    )
    parser.add_argument(
        "--max-length", type=int, default=250, help="most pieces in a training line (default: 250)"
    )
    parser.add_argument(
        "--max-ratio",
        type=float,
        default=9.0,
        help="most pieces on one side of a training pair for each on the other (default: 9)",
    )
    parser.add_argument("--seed", type=int, default=1, help="for held-out sets (default: 1)")
    args = parser.parse_args(arguments)
    languages = (args.source_lang, args.target_lang)

    def files(prefix: str) -> Tuple[str, str]:
        return f"{prefix}.{languages[0]}", f"{prefix}.{languages[1]}"

    sides = (args.train_source, args.train_target)
    if any(sides) != all(sides) or bool(args.train) == all(sides):
        raise UsageError("give either --train PREFIX or both --train-source and --train-target")
    for flag, value, least in (
        ("--hold-out", args.hold_out, 1),
        ("--vocab-size", args.vocab_size, 1),
        ("--max-length", args.max_length, 1),
        ("--max-ratio", args.max_ratio, 1),
    ):
        if value is not None and not value >= least:
            raise UsageError(f"{flag} {value}: it must be at least {least}")
    options = PrepareOptions(
        *languages,
        train=files(args.train) if args.train else (args.train_source, args.train_target),
        valid=files(args.valid) if args.valid else None,
        tests=tuple(files(prefix) for prefix in args.test),
        hold_out=args.hold_out,
        vocab_size=args.vocab_size,
        max_length=args.max_length,
        max_ratio=args.max_ratio,
        seed=args.seed,
    )
    prepare(options, args.out)
