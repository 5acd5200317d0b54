"""`moa-sweep-report`: the points of a sweep in one table and one picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from ..sweep.summary import QUALITIES, read_rows, section
from ..sweep.writing import write_report
from .common import command


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        prog="moa-sweep-report",
        description=__doc__,
        epilog="Writes sweep.md, sweep.csv, sweep.json, quality.png and quality.svg. A sweep that "
        "is not at its end is reported as far as it is.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the --out of sweep.sh")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: DIR/report)")
    parser.add_argument(
        "--quality",
        choices=list(QUALITIES),
        default="loss",
        help="what the picture shows, on the validation set (default: loss)",
    )
    args = parser.parse_args(arguments)
    sweep, rows = read_rows(args.folder)
    found = section(sweep, rows, args.quality)
    path = write_report(found, rows, sweep.bleu, args.out or args.folder / "report")
    print(path.read_text(encoding="utf-8"), end="")
