"""Write parallel interface texts from the wheel of `homeassistant`; the quickstart's text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from ..text.interface_texts import extract
from .common import command


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m moa_fairseq.cli.interface_texts", description=__doc__
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--source-lang", required=True)
    parser.add_argument("--target-lang", required=True)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    args = parser.parse_args(arguments)
    counts = extract(args.wheel, args.source_lang, args.target_lang, args.out)
    print(", ".join(f"{number} {name}" for name, number in counts.items()), "pairs")


if __name__ == "__main__":
    main()
