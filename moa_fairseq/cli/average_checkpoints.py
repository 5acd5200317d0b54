"""`moa-average-checkpoints`: average the parameters of several checkpoints of one training run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Optional, Sequence

from ..checkpoints import average_checkpoints, find_checkpoints
from ..errors import UsageError
from .common import command


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="moa-average-checkpoints", description=__doc__)
    parser.add_argument(
        "--inputs",
        required=True,
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a folder of checkpoints with one of the --num options, or the files themselves",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--num-epoch-checkpoints", type=int, metavar="N", help="the last N epochs")
    group.add_argument("--num-update-checkpoints", type=int, metavar="N", help="the last N updates")
    group.add_argument("--num-best-checkpoints", type=int, metavar="N", help="the best N")
    parser.add_argument(
        "--checkpoint-upper-bound",
        type=int,
        metavar="M",
        help="leave out epochs (or updates) after M",
    )
    args = parser.parse_args(arguments)
    numbers = (args.num_epoch_checkpoints, args.num_update_checkpoints, args.num_best_checkpoints)
    counted = any(number is not None for number in numbers)
    if any(number is not None and number < 1 for number in numbers):
        raise UsageError("the number of checkpoints to average must be at least 1; raise it")
    if counted and len(args.inputs) != 1:
        raise UsageError(
            "--inputs must be one folder when a number of checkpoints is given; give one"
        )
    if args.checkpoint_upper_bound is not None and (
        args.num_epoch_checkpoints is None and args.num_update_checkpoints is None
    ):
        raise UsageError(
            "--checkpoint-upper-bound needs --num-epoch-checkpoints or --num-update-checkpoints"
        )
    if not counted and args.inputs[0].is_dir():
        raise UsageError(
            f"{args.inputs[0]} is a folder: say how many of its checkpoints to average, for "
            "instance with --num-epoch-checkpoints 5"
        )
    paths = (
        find_checkpoints(args.inputs[0], *numbers, upper_bound=args.checkpoint_upper_bound)
        if counted
        else args.inputs
    )
    if args.output.resolve() in [path.resolve() for path in paths]:
        raise UsageError(f"--output {args.output} is one of the inputs; choose another name")
    average_checkpoints(paths, args.output)
