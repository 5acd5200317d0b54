"""`python -m moa_fairseq.cli.wmt14_miniature`: small archives with the real ones' names."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from ..errors import UsageError
from ..text.wmt14.archives import PAIRS
from ..text.wmt14.miniature import build, write_toy_text
from .common import command


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="wmt14_miniature", description=__doc__)
    parser.add_argument("--pair", required=True, choices=sorted(PAIRS))
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument(
        "--text",
        type=Path,
        metavar="DIR",
        help="folder of train.LANG, valid.LANG and test.LANG (default: a toy language is made)",
    )
    parser.add_argument(
        "--train-lines",
        type=int,
        metavar="N",
        help="take at most the first N training pairs (default: all)",
    )
    args = parser.parse_args(arguments)
    if args.train_lines is not None and args.train_lines < 1:
        raise UsageError(f"--train-lines {args.train_lines}: it must be at least 1")
    text = args.text
    if text is None:
        text = args.out / "toy"
        write_toy_text(PAIRS[args.pair].languages, text)
    build(args.pair, text, args.out, args.train_lines)


if __name__ == "__main__":
    main()
