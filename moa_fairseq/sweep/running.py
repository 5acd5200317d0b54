"""Training and evaluating the points of a sweep, several at a time."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import re
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Set

from ..checkpoints import average_checkpoints, find_checkpoints, load_checkpoint
from ..errors import UsageError
from .configs import CONFIG_NAME, Plan
from .grid import Point, hydra_overrides
from .records import FAILED, FINISHED, Sweep, read_record, status_of, write_record

logger = logging.getLogger("sweep.sh")

#: Runs a command with a file for all that it says and variables of its own; the exit status.
Execute = Callable[[Sequence[str], Path, Mapping[str, str]], int]


class Stopped(Exception):
    """The sweep is to end."""


class PointFailed(Exception):
    """A point that cannot go on; its message says why, in one line."""


class Processes:
    """Runs commands, and ends those that are at work when the sweep ends.

    Args:
        inherited: open files that every command gets too.
    """

    def __init__(self, inherited: Sequence[int] = ()) -> None:
        self._inherited = tuple(inherited)
        self._lock = threading.Lock()
        self._running: Set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def __call__(self, command: Sequence[str], log: Path, variables: Mapping[str, str]) -> int:
        """Run a command; what it says is added to `log`. The exit status.

        Raises:
            Stopped: where the sweep ended meanwhile.
        """
        with open(log, "ab") as output:
            with self._lock:
                if self._stopped:
                    raise Stopped
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **variables},
                    pass_fds=self._inherited,
                )
                self._running.add(process)
            status = process.wait()
        with self._lock:
            self._running.discard(process)
            if self._stopped:
                raise Stopped
        return status

    def stop(self) -> None:
        """End what is at work, and start nothing more."""
        with self._lock:
            self._stopped = True
            for process in self._running:
                process.terminate()


@dataclass(frozen=True)
class Workshop:
    """Where a sweep works, and with what.

    Attributes:
        folder: of the sweep.
        prepared: what prepare.sh or prepare_wmt14.sh made.
        root: of the project, with `configs` and `scripts`.
        user_dir: of the package.
        sweep: what is asked for.
        plans: by point.
        devices: the variables of each place where a point can run.
        cpu: whether these are cores, and not GPUs.
        execute: how commands run.
    """

    folder: Path
    prepared: Path
    root: Path
    user_dir: Path
    sweep: Sweep
    plans: Mapping[Point, Plan]
    devices: Sequence[Mapping[str, str]]
    cpu: bool
    execute: Execute


def run_points(shop: Workshop, points: Sequence[Point], stop: Callable[[], None]) -> List[Point]:
    """Bring every point to its end, one on each device at a time.

    Args:
        shop: where and with what.
        points: what to run; those that are finished are left as they are.
        stop: ends the commands that are at work, where the sweep is interrupted.

    Returns:
        the points that failed.
    """
    devices: queue.Queue[Mapping[str, str]] = queue.Queue()
    for device in shop.devices:
        devices.put(device)

    def work(point: Point) -> str:
        device = devices.get()
        try:
            return _run_point(shop, point, device)
        finally:
            devices.put(device)

    failed = []
    with ThreadPoolExecutor(len(shop.devices)) as pool:
        futures = {pool.submit(work, point): point for point in points}
        try:
            for number, future in enumerate(as_completed(futures), 1):
                point = futures[future]
                logger.info("%s: %s (%d of %d)", point.name, future.result(), number, len(points))
                if read_record(shop.folder, point).get("failure"):
                    failed.append(point)
        except BaseException:
            stop()
            for future in futures:
                future.cancel()
            raise
    return failed


def _run_point(shop: Workshop, point: Point, device: Mapping[str, str]) -> str:
    """What came of a point, in a few words."""
    record = read_record(shop.folder, point)
    if status_of(record, shop.sweep.bleu, running=True) == FINISHED:
        return "finished already"
    record.pop("failure", None)
    save_dir = shop.folder / point.name
    save_dir.mkdir(exist_ok=True)
    plan = shop.plans[point]
    costs = ("parameters", "linear_macs", "all_macs")
    record.update({name: getattr(plan, name) for name in costs})
    write_record(shop.folder, point, record)
    try:
        for step in (_train, _measure_loss, _measure_bleu):
            step(shop, point, device, record)
            write_record(shop.folder, point, record)
    except (PointFailed, UsageError) as error:
        record["failure"] = str(error)
        write_record(shop.folder, point, record)
        return f"{FAILED}: {error}"
    scores = "".join(
        f", BLEU on {subset} {score['score']:.2f}" for subset, score in record["bleu"].items()
    )
    return f"{FINISHED}: valid loss {record['loss']['loss']:.3f}{scores}"


def _train(shop: Workshop, point: Point, device: Mapping[str, str], record: Dict[str, Any]) -> None:
    """Train to the end; fairseq goes on from a point's last checkpoint by itself."""
    if "updates" in record:
        return
    save_dir = shop.folder / point.name
    data = shop.prepared / "data"
    logger.info("%s: training; %s", point.name, save_dir / "train.log")
    overrides = hydra_overrides(point, str(data), str(save_dir), shop.sweep.settings.overrides)
    _run(
        shop,
        [
            *("fairseq-hydra-train", "--config-dir", str(shop.root / "configs")),
            *("--config-name", CONFIG_NAME, *overrides),
            *(["common.cpu=true"] if shop.cpu else []),
        ],
        save_dir / "train.log",
        device,
    )
    state = load_checkpoint(save_dir / "checkpoint_last.pt")
    record["updates"] = state["optimizer_history"][-1]["num_updates"]


def _measure_loss(
    shop: Workshop, point: Point, device: Mapping[str, str], record: Dict[str, Any]
) -> None:
    """The loss of the averaged model on the validation set."""
    if "loss" in record:
        return
    save_dir, average = shop.folder / point.name, shop.sweep.settings.average
    averaged = save_dir / f"checkpoint.avg{average}.pt"
    average_checkpoints(find_checkpoints(save_dir, epochs=average), averaged)
    log = save_dir / "validate.log"
    log.unlink(missing_ok=True)
    _run(
        shop,
        [
            *("fairseq-validate", str(shop.prepared / "data"), "--user-dir", str(shop.user_dir)),
            *("--task", "translation"),
            *("--path", str(averaged), "--valid-subset", "valid", "--num-workers", "0"),
            *("--max-tokens", str(shop.plans[point].max_tokens), "--log-format", "json"),
            *(["--cpu"] if shop.cpu else []),
        ],
        log,
        device,
    )
    found = re.findall(r"\| valid \| (\{.*\})$", log.read_text(encoding="utf-8"), re.M)
    if not found:
        raise PointFailed(f"{log} does not say what the loss is; read there why")
    values = json.loads(found[-1])
    if not math.isfinite(float(values["valid_loss"])):
        raise PointFailed(f"the loss on valid is {values['valid_loss']}: training diverged")
    record["loss"] = {
        "loss": float(values["valid_loss"]),
        "nll_loss": float(values["valid_nll_loss"]),
        "checkpoint": averaged.name,
    }


def _measure_bleu(
    shop: Workshop, point: Point, device: Mapping[str, str], record: Dict[str, Any]
) -> None:
    """BLEU of the averaged model on the subsets that were asked for."""
    scores = record.setdefault("bleu", {})
    save_dir, average = shop.folder / point.name, shop.sweep.settings.average
    for subset in shop.sweep.bleu:
        if subset in scores:
            continue
        logger.info("%s: translating %s", point.name, subset)
        _run(
            shop,
            [
                *("bash", str(shop.root / "scripts/evaluate.sh")),
                *("--prepared", str(shop.prepared), "--save-dir", str(save_dir)),
                *("--out", str(save_dir / "scores"), "--subset", subset),
                *("--average", str(average)),
            ],
            save_dir / f"evaluate.{subset}.log",
            device,
        )
        report = save_dir / f"scores/{subset}.json"
        bleu = json.loads(report.read_text(encoding="utf-8"))["bleu"]
        scores[subset] = {"score": bleu["score"], "signature": bleu["signature"]}
        write_record(shop.folder, point, record)


def _run(shop: Workshop, command: Sequence[str], log: Path, device: Mapping[str, str]) -> None:
    """Run a command to its end.

    Raises:
        PointFailed: with the last line of its log, where it fails.
    """
    variables = {**device, "MOA_USER_DIR": str(shop.user_dir)}
    status = shop.execute(command, log, variables)
    if status != 0:
        name = Path(command[1]).name if command[0] == "bash" else command[0]
        raise PointFailed(f"{name} {_last_line(log) or f'ended with {status}'}")


def _last_line(log: Path) -> Optional[str]:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said: Sequence[str] = [line.strip() for line in lines if line.strip()]
    return f"failed: {said[-1][:300]} ({log})" if said else None
