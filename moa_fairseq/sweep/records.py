"""What a sweep's folder says of itself: `sweep.json`, and a `point.json` for each point."""

from __future__ import annotations

import fcntl
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Sequence

from ..errors import UsageError
from ..text.files import write_lines
from .grid import Point, Size, point_from_json

FINISHED, RUNNING, INTERRUPTED = "finished", "running", "interrupted"
FAILED, NOT_STARTED = "failed", "not started"


@dataclass(frozen=True)
class Settings:
    """What is the same for all points of a sweep.

    Attributes:
        overrides: settings after --, in hydra's form.
        data_checksum: of what the data were made of, as prepare.sh notes it.
        average: epochs that are averaged before a model is evaluated.
    """

    overrides: Sequence[str]
    data_checksum: str
    average: int


@dataclass(frozen=True)
class Sweep:
    """The contents of `sweep.json`.

    Attributes:
        settings: what is the same for all points.
        points: what was asked for, in this run of sweep.sh and in earlier ones.
        skipped: sizes that were asked for and cannot be.
        bleu: subsets whose BLEU was asked for.
    """

    settings: Settings
    points: Sequence[Point]
    skipped: Sequence[Size]
    bleu: Sequence[str]


def write_sweep(folder: Path, sweep: Sweep) -> None:
    """Write a folder's `sweep.json`."""
    settings = sweep.settings
    _write(
        folder / "sweep.json",
        {
            "overrides": list(settings.overrides),
            "data_checksum": settings.data_checksum,
            "average": settings.average,
            "bleu": list(sweep.bleu),
            "points": [point.as_json() for point in sweep.points],
            "skipped": [vars(size) for size in sweep.skipped],
        },
    )


def read_sweep(folder: Path) -> Sweep:
    """Read a folder's `sweep.json`.

    Raises:
        UsageError: where there is none, or it is something else.
    """
    path = folder / "sweep.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        settings = Settings(found["overrides"], found["data_checksum"], found["average"])
        points = [point_from_json(point) for point in found["points"]]
        skipped = [Size(**size) for size in found["skipped"]]
        return Sweep(settings, points, skipped, found["bleu"])
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{folder} holds no sweep.json; give the --out of sweep.sh") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(f"{path} was not written by sweep.sh; give the --out of a sweep") from None


def extended(earlier: Sweep, asked: Sweep, folder: Path) -> Sweep:
    """A sweep with what is now asked for beside what was before.

    Raises:
        UsageError: where its points would not be comparable.
    """
    before, now = earlier.settings, asked.settings
    for what, first, second in (
        ("settings after --", " ".join(before.overrides), " ".join(now.overrides)),
        ("--average", before.average, now.average),
        ("data", before.data_checksum, now.data_checksum),
    ):
        if first != second:
            shown = "others" if what == "data" else f"{first or 'none'}, not {second or 'none'}"
            raise UsageError(
                f"--out {folder} holds a sweep with other {what} ({shown}), and its points could "
                "not be compared; give the same again, or choose another --out"
            )
    return Sweep(
        now,
        _union(earlier.points, asked.points),
        _union(earlier.skipped, asked.skipped),
        _union(earlier.bleu, asked.bleu),
    )


def _union(first: Sequence[Any], second: Sequence[Any]) -> List[Any]:
    return list(dict.fromkeys([*first, *second]))


def read_record(folder: Path, point: Point) -> Dict[str, Any]:
    """A point's `point.json`: what was measured of it so far; empty where nothing was.

    Raises:
        UsageError: where the file is something else.
    """
    path = folder / point.name / "point.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise UsageError(f"{path} was not written by sweep.sh; remove it, and run sweep.sh again")
    return record


def write_record(folder: Path, point: Point, record: Dict[str, Any]) -> None:
    """Write a point's `point.json`."""
    _write(folder / point.name / "point.json", record)


def status_of(record: Dict[str, Any], bleu: Sequence[str], running: bool) -> str:
    """Where a point stands.

    Args:
        record: its `point.json`.
        bleu: subsets whose BLEU was asked for.
        running: whether a sweep is at work in the folder.
    """
    if record.get("failure"):
        return FAILED
    if "loss" in record and all(subset in record.get("bleu", {}) for subset in bleu):
        return FINISHED
    if not record:
        return NOT_STARTED
    return RUNNING if running else INTERRUPTED


def at_work(folder: Path) -> bool:
    """Whether a sweep, or a command that it started, is at work in a folder."""
    path = folder / ".lock"
    if not path.exists():
        return False
    with open(path, "rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _write(path: Path, content: Any) -> None:
    write_lines(path, [json.dumps(content, indent=2, ensure_ascii=False)])
