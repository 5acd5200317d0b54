"""What `scripts/sweep.sh` runs: a grid of experts E, selected experts K and head dimension D."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
from fairseq.data import Dictionary

from ..errors import UsageError
from ..sweep.configs import Plan, plan
from ..sweep.grid import Point, Size, check_overrides, grid, hydra_overrides
from ..sweep.records import Settings, Sweep, extended, read_sweep, write_sweep
from ..sweep.running import Processes, Workshop, run_points
from ..text.files import only_run
from .common import command

logger = logging.getLogger("sweep.sh")

#: Heads of the dense baseline: those of configs/sweep_experts.yaml.
DENSE_HEADS = 4


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    words = list(sys.argv[1:] if arguments is None else arguments)
    end = words.index("--") if "--" in words else len(words)
    args, overrides = _parser().parse_args(words[:end]), words[end + 1 :]
    _at_least_one("--average", args.average)
    check_overrides(overrides)
    points, skipped = grid(
        _numbers("--num-experts", args.num_experts),
        _numbers("--heads", args.heads),
        _numbers("--head-dim", args.head_dim),
        _numbers("--seeds", args.seeds),
        None if args.dense is None else _at_least_one("--dense", args.dense),
    )
    bleu = _subsets(args.bleu, args.prepared)
    dictionaries, checksum = _read_prepared(args.prepared)
    settings = Settings(overrides, checksum, args.average)
    asked = Sweep(settings, points, skipped, bleu)
    if (args.out / "sweep.json").exists():
        asked = extended(read_sweep(args.out), asked, args.out)
    plans = _plans(args, asked, dictionaries)
    devices, on_cpu = _devices(args.jobs, len(points))
    for size in skipped:
        logger.info("%s: skipped, since K = %d is more than E", size.name, size.heads)
    if any(subset.startswith("test") for subset in bleu):
        logger.warning("--bleu %s: test scores are to report; choose no size by them", args.bleu)
    logger.info(
        "%d points, %d at a time, each on %s; %s",
        *(len(points), len(devices), _where(devices[0], on_cpu), args.out),
    )
    args.out.mkdir(parents=True, exist_ok=True)
    with only_run(args.out) as lock, _ended_by_signals():
        write_sweep(args.out, asked)
        processes = Processes([lock.fileno()])
        shop = Workshop(
            folder=args.out,
            prepared=args.prepared,
            root=args.root,
            user_dir=Path(__file__).resolve().parent.parent,
            sweep=asked,
            plans=plans,
            devices=devices,
            cpu=on_cpu,
            execute=processes,
        )
        failed = run_points(shop, points, processes.stop)
    logger.info("a table and a picture: moa-sweep-report %s", args.out)
    if failed:
        raise UsageError(
            f"{len(failed)} of {len(points)} points failed: "
            f"{', '.join(point.name for point in failed)}; the lines above say why, and the same "
            "command tries them again"
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sweep.sh", description=__doc__, allow_abbrev=False, add_help=False
    )
    parser.add_argument("--root", required=True, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--prepared", required=True, type=Path, metavar="DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--num-experts", default="8,32", metavar="E,E,…")
    parser.add_argument("--heads", default="4,8", metavar="K,K,…")
    parser.add_argument("--head-dim", default="16,32", metavar="D,D,…")
    parser.add_argument("--dense", nargs="?", type=int, const=DENSE_HEADS, metavar="HEADS")
    parser.add_argument("--seeds", default="1", metavar="S,S,…")
    parser.add_argument("--average", type=int, default=5, metavar="N")
    parser.add_argument("--bleu", default="", metavar="SUBSET,…")
    parser.add_argument("--jobs", type=int, metavar="N")
    return parser


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise UsageError(f"{flag} {value}: it must be at least 1")
    return value


def _numbers(flag: str, text: str) -> List[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise UsageError(f"{flag} {text}: give whole numbers from 1 on, such as {flag} 4,8")
    return list(dict.fromkeys(numbers))


def _subsets(text: str, prepared: Path) -> List[str]:
    subsets = [word for word in text.split(",") if word]
    for subset in subsets:
        if not list((prepared / "raw").glob(f"{subset}.*")):
            raise UsageError(
                f"--bleu {subset} is not in {prepared / 'raw'}; give for instance valid"
            )
    return list(dict.fromkeys(subsets))


def _read_prepared(prepared: Path) -> Tuple[List[Dictionary], str]:
    """The dictionaries of prepared data, and the checksum of what they were made of."""
    try:
        options = json.loads((prepared / "manifest.json").read_text(encoding="utf-8"))["options"]
        languages = [options["source_lang"], options["target_lang"]]
        checksum = (prepared / "data/.manifest-checksum").read_text(encoding="utf-8")
        found = [Dictionary.load(str(prepared / f"data/dict.{name}.txt")) for name in languages]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"--prepared {prepared} was not made by prepare.sh or prepare_wmt14.sh, or not to the "
            "end; make it with one of them"
        ) from error
    return found, checksum.strip()


def _plans(
    args: argparse.Namespace, asked: Sweep, dictionaries: Sequence[Dictionary]
) -> Dict[Point, Plan]:
    """What each point would train; refuses what none could.

    Raises:
        UsageError: where settings do not fit each other.
    """
    data, settings = str(args.prepared / "data"), asked.settings
    by_size: Dict[Size, Plan] = {}
    for point in asked.points:
        if point.size in by_size:
            continue
        words = hydra_overrides(point, data, str(args.out / point.name), settings.overrides)
        found = plan(args.root / "configs", words, dictionaries)
        by_size[point.size] = found
        if 0 < found.max_epoch < settings.average or 0 <= found.kept_epochs < settings.average:
            epochs = f"optimization.max_epoch={found.max_epoch}"
            if not 0 < found.max_epoch < settings.average:
                epochs = f"checkpoint.keep_last_epochs={found.kept_epochs}"
            raise UsageError(
                f"--average {settings.average}: with {epochs} there are not as many epochs to "
                "average; lower it, or raise that"
            )
    return {point: by_size[point.size] for point in asked.points}


def _devices(jobs: Optional[int], num_points: int) -> Tuple[List[Dict[str, str]], bool]:
    """The variables of each place where a point can run, and whether these are cores.

    Raises:
        UsageError: for --jobs that cannot be.
    """
    if jobs is not None:
        _at_least_one("--jobs", jobs)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        if jobs is not None and jobs > gpus:
            raise UsageError(
                f"--jobs {jobs}: torch sees {gpus} GPUs, and a point takes one; lower it"
            )
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = visible.split(",") if visible else list(map(str, range(gpus)))
        wanted = min(jobs or gpus, num_points)
        return [{"CUDA_VISIBLE_DEVICES": name} for name in names[:wanted]], False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    wanted = min(jobs or cores or 1, num_points)
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (cores or 1) // wanted))
    return [{"OMP_NUM_THREADS": threads}] * wanted, True


def _where(device: Dict[str, str], on_cpu: bool) -> str:
    return f"{device['OMP_NUM_THREADS']} threads" if on_cpu else "one GPU"


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """End in one line when the user or the system asks for it."""

    def end(number: int, _: Any) -> None:
        logger.error("interrupted; the same command goes on from here")
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
