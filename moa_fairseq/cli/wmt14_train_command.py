"""The command of `scripts/train_wmt14.sh`: fairseq-train with a recipe, for these devices."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from pathlib import Path
from typing import List, Optional, Sequence

from ..errors import UsageError
from ..recipes.launch import Devices, Launch, choose_launch, visible_devices
from ..recipes.wmt14 import (
    MODELS,
    PAIRS,
    PRECISIONS,
    SIZES,
    STEP_TOKENS,
    fairseq_train_options,
    provenance,
    tokens_that_fit,
    training_recipe,
    update_frequency,
)
from .common import command

logger = logging.getLogger("train_wmt14.sh")


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    """Print the command's words, each ended by a NUL; with --dry-run a line for each node."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    args, extra = _parser().parse_args(words[:end]), words[end + 1 :]
    recipe = training_recipe(args.pair, args.size)
    if not args.dry_run or args.prepared.exists():
        check_manifest(args.prepared, args.pair)
    devices = visible_devices()
    launch = choose_launch(devices, args.gpus, args.nodes, args.master, args.dry_run)
    ranks = node_ranks(launch, args.node_rank, args.dry_run)
    precision = choose_precision(args.precision, devices, launch)
    if args.max_tokens is None:
        max_tokens = tokens_that_fit(recipe, devices.memory_gib, launch.num_workers)
    else:
        max_tokens = args.max_tokens
    other_step = check_overrides(extra)
    train_options = [
        *(str(args.prepared / "data"), "--user-dir", str(Path(__file__).resolve().parent.parent)),
        *("--save-dir", str(args.save_dir)),
        *fairseq_train_options(recipe, args.model, launch.num_workers, max_tokens, precision),
        *(("--cpu",) if launch.gpus == 0 else ()),
        *extra,
    ]
    logger.info("%s", provenance(recipe, args.model))
    if not other_step:
        frequency = update_frequency(launch.num_workers, max_tokens)
        logger.info(
            "%d × %d tokens × --update-freq %d = %d tokens a step, %s",
            *(launch.num_workers, max_tokens, frequency, STEP_TOKENS, precision),
        )
    if args.dry_run:
        for rank in ranks:
            print(shlex.join(launch.command(train_options, rank)))
    else:
        for word in launch.command(train_options, ranks[0]):
            sys.stdout.write(f"{word}\0")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_wmt14.sh", description=__doc__, allow_abbrev=False, add_help=False
    )
    parser.add_argument("--prepared", required=True, type=Path, metavar="DIR")
    parser.add_argument("--save-dir", required=True, type=Path, metavar="DIR")
    parser.add_argument("--pair", required=True, choices=PAIRS)
    parser.add_argument("--size", required=True, choices=SIZES)
    parser.add_argument("--model", default=MODELS[0], choices=MODELS)
    parser.add_argument("--gpus", type=int, metavar="N")
    parser.add_argument("--nodes", type=int, default=1, metavar="M")
    parser.add_argument("--node-rank", type=int, metavar="R")
    parser.add_argument("--master", metavar="HOST[:PORT]")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument("--precision", choices=PRECISIONS)
    parser.add_argument("--dry-run", action="store_true")
    return parser


def check_manifest(prepared: Path, pair: str) -> None:
    """Refuse a folder that is not prepared data of `pair`.

    Raises:
        UsageError: where the manifest is missing or broken, or tells of another pair.
    """
    path = prepared / "manifest.json"
    try:
        options = json.loads(path.read_text(encoding="utf-8"))["options"]
        found = options.get("pair") or f"{options['source_lang']}-{options['target_lang']}"
    except FileNotFoundError:
        raise UsageError(
            f"--prepared {prepared}: it holds no manifest.json, so it was not prepared to the end; "
            "run scripts/prepare_wmt14.sh"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"{path} does not say which languages were prepared") from None
    if found != pair:
        raise UsageError(f"--pair {pair}: --prepared {prepared} holds {found}")
    if not list((prepared / "data").glob("dict.*.txt")):
        raise UsageError(f"--prepared {prepared}: its data folder holds no dictionary")


def node_ranks(launch: Launch, node_rank: Optional[int], dry_run: bool) -> List[int]:
    """The nodes to give commands for: this one; in a dry run all, where none is named.

    Raises:
        UsageError: for a missing or impossible --node-rank.
    """
    if node_rank is not None:
        if not 0 <= node_rank < launch.nodes:
            raise UsageError(
                f"--node-rank {node_rank}: with --nodes {launch.nodes} it lies between 0 and "
                f"{launch.nodes - 1}"
            )
        return [node_rank]
    if launch.nodes > 1 and not dry_run:
        raise UsageError(
            f"--nodes {launch.nodes} needs --node-rank, from 0 to {launch.nodes - 1}, on each node"
        )
    return list(range(launch.nodes))


def choose_precision(asked: Optional[str], devices: Devices, launch: Launch) -> str:
    """Mixed precision where the devices support it.

    Raises:
        UsageError: for fp16 on a CPU.
    """
    if launch.gpus == 0:
        if asked == "fp16":
            raise UsageError("--precision fp16 needs a GPU, and torch sees none; use fp32")
        return "fp32"
    if asked is not None:
        return asked
    if launch.gpus > devices.count:
        # A dry run for GPUs that are not here.
        logger.info("taking the GPUs to have 32 GB or more and mixed precision")
        return "fp16"
    return "fp16" if devices.mixed_precision else "fp32"


def check_overrides(extra: Sequence[str]) -> bool:
    """Whether options after -- set --update-freq, and with it another number of tokens a step.

    Raises:
        UsageError: for --max-tokens alone, which would change that number unnoticed.
    """
    given = {word.split("=")[0] for word in extra}
    if "--max-tokens" in given and "--update-freq" not in given:
        raise UsageError(
            f"--max-tokens after -- changes the {STEP_TOKENS:,} tokens of a step; give it before "
            "--, or --update-freq after -- too"
        )
    return "--update-freq" in given


if __name__ == "__main__":
    main()
