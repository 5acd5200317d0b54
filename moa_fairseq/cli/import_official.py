"""`moa-import-official`: turn a checkpoint of the authors' code into one of this package."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Optional, Sequence

from ..checkpoints import load_checkpoint, write_checkpoint
from ..errors import UsageError
from ..official import import_state, summary
from .common import command

logger = logging.getLogger(__name__)


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        prog="moa-import-official",
        description=__doc__,
        epilog="The result computes what the authors' code computed. It works with fairseq's "
        "commands, moa-average-checkpoints and from_pretrained; to train it further, use "
        "--finetune-from-model, or --restore-file with --reset-optimizer. Nothing that the input "
        "may hold is run.",
    )
    parser.add_argument("input", type=Path, help="checkpoint of the authors' code")
    parser.add_argument("output", type=Path, help="checkpoint to write; it must not exist")
    args = parser.parse_args(arguments)
    if args.output.exists():
        raise UsageError(f"{args.output} exists already; remove it or choose another name")
    imported = import_state(load_checkpoint(args.input), args.input)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(imported, args.output)
    size, updates = summary(imported)
    logger.info("wrote %s: %s, trained for %d updates", args.output, size, updates)
