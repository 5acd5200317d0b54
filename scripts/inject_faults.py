#!/usr/bin/env python3
"""Kill the real commands at random moments, again and again, and count what is lost.

Each round starts a command on a toy corpus, kills it (SIGKILL), looks at every file that is there,
and starts the command again, which must end well and give what an undisturbed run gave: the same
parameters bit for bit, the same text, the same scores, the same bytes. Anything else is a loss.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Dict, List

from fault_stages import Reference, Stage, run, start

from moa_fairseq.text.files import write_together

WEIGHTS = {
    "training": 14,
    "saving": 16,
    "averaging": 8,
    "generating": 8,
    "scoring": 6,
    "preparing": 10,
}


@dataclass
class Counts:
    """Of one stage."""

    rounds: int = 0
    faults: int = 0
    how: Dict[str, int] = field(default_factory=dict)
    losses: List[str] = field(default_factory=list)


def kill(process: subprocess.Popen[bytes], how: str) -> bool:
    """Whether there was anything to kill: the whole group, its shell, or what the shell runs."""
    if process.poll() is not None:
        return False
    if how == "worker":
        workers = [pid for pid in members(process.pid) if pid != process.pid]
        for pid in workers:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return bool(workers)
    (os.killpg if how == "group" else os.kill)(process.pid, signal.SIGKILL)
    return True


def members(group: int) -> List[int]:
    """The processes of a group that have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, their_group = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(their_group) == group and state != "Z":
            found.append(int(entry.name))
    return found


def wait_for_moment(
    stage: Stage,
    process: subprocess.Popen[bytes],
    folder: Path,
    log: Path,
    rng: random.Random,
    aimed: bool,
) -> None:
    """Return at a random moment of the part that is to be hit, or once the command has ended."""

    def until(condition: Callable[[], bool], every: float = 0.001) -> None:
        while process.poll() is None and not condition():
            time.sleep(every)

    until(lambda: stage.starts(folder, log.read_text(encoding="utf-8", errors="replace")), 0.02)
    end = time.monotonic() + rng.uniform(0, stage.seconds)
    if not aimed:
        until(lambda: time.monotonic() > end)
        return
    assert stage.aimed is not None
    pattern = stage.aimed
    if pattern.startswith("run/"):
        until(lambda: time.monotonic() > end)  # not always the first save
    until(lambda: any(True for _ in folder.glob(pattern)))
    end = time.monotonic() + rng.choice((0, rng.uniform(0, 0.02), rng.uniform(0, 0.2)))
    until(lambda: time.monotonic() > end)


def one_round(
    reference: Reference, name: str, stage: Stage, number: int, rng: random.Random, counts: Counts
) -> None:
    folder, log = reference.work / f"{name}-{number}", reference.work / f"{name}-{number}.log"
    shutil.rmtree(folder, ignore_errors=True)
    stage.set_up(folder, number)
    training = name in ("training", "saving")
    kinds = ["group"] if training or name == "averaging" else ["group", "shell", "worker"]
    groups, problems, faults = [], [], 0
    for _ in range(rng.choice((1, 1, 2)) if training else 1):
        how = rng.choice(kinds)
        process = start(stage.command(folder), log)
        groups.append(process.pid)
        aimed = name == "saving" or (stage.aimed is not None and rng.random() < 0.5)
        wait_for_moment(stage, process, folder, log, rng, aimed)
        if kill(process, how):
            faults += 1
            counts.how[how] = counts.how.get(how, 0) + 1
        status = process.wait()
        if status == 0 and how != "worker":
            break
        problems += list(stage.whole(folder))
    saved = reference.newest(folder) if training and not problems else 0
    status, output, _ = run(stage.command(folder), log)
    for group in groups:
        deadline = time.monotonic() + 60
        while members(group):
            if time.monotonic() > deadline:
                problems.append("a process of the killed run never ends")
                os.killpg(group, signal.SIGKILL)
            time.sleep(0.05)
    if status != 0:
        problems.append(f"the next run ended with {status}: {output.strip()[-300:]}")
    elif training and saved:
        resumed = re.search(r"Loaded checkpoint .* @ (\d+) updates", output)
        if resumed is None or int(resumed[1]) != saved:
            problems.append(f"{saved} updates were saved, but the next run went on from {resumed}")
    problems += list(stage.same(folder, output))
    if faults:
        counts.rounds += 1
    counts.faults += faults
    counts.losses += [f"{name} {number}: {problem}" for problem in problems]
    if not problems:
        shutil.rmtree(folder)


def table(found: Dict[str, Counts]) -> str:
    rows = ["| stage | rounds | faults | losses |", "| --- | --- | --- | --- |"]
    total = Counts()
    for name, counts in found.items():
        rows.append(f"| {name} | {counts.rounds} | {counts.faults} | {len(counts.losses)} |")
        total.rounds += counts.rounds
        total.faults += counts.faults
        total.losses += counts.losses
    rows.append(f"| all | {total.rounds} | {total.faults} | {len(total.losses)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=62, help="of all stages (default: 62)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: 1)")
    parser.add_argument("--work", type=Path, required=True, help="an empty folder to work in")
    parser.add_argument(
        "--stages", default=",".join(WEIGHTS), help="some of the default, %(default)s"
    )
    parser.add_argument("--report", type=Path, help="JSON (default: faults.json in --work)")
    args = parser.parse_args()
    names = args.stages.split(",")
    unknown = set(names) - set(WEIGHTS)
    if unknown:
        parser.error(f"--stages: {', '.join(unknown)} is none of {', '.join(WEIGHTS)}")
    weight = sum(WEIGHTS[name] for name in names)
    reference = Reference(args.work.resolve())
    stages = reference.stages()
    rng = random.Random(args.seed)
    found = {name: Counts() for name in names}
    report = {name: vars(counts) for name, counts in found.items()}
    path = args.report or args.work / "faults.json"
    for name in names:
        wanted = max(1, round(args.rounds * WEIGHTS[name] / weight))
        number = 0
        # A round whose command ended before its moment came is not one.
        while found[name].rounds < wanted and number < 3 * wanted:
            one_round(reference, name, stages[name], number, rng, found[name])
            number += 1
            write_together({path: json.dumps({"seed": args.seed, "stages": report}, indent=2)})
            print(f"{name}: {found[name].rounds} of {wanted} rounds", file=sys.stderr)
            for loss in found[name].losses:
                print(f"  {loss}", file=sys.stderr)
    print(table(found))
    sys.exit(any(counts.losses for counts in found.values()))


if __name__ == "__main__":
    main()
