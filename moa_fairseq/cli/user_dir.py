"""`moa-user-dir`: print the folder for fairseq's `--user-dir`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence


def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        prog="moa-user-dir", description='Use as: fairseq-train --user-dir "$(moa-user-dir)" …'
    )
    parser.parse_args(arguments)
    print(Path(__file__).resolve().parent.parent)
