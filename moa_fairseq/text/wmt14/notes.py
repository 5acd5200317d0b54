"""Notes on what is done, so that an interrupted run goes on and a finished one does nothing."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Sequence

from ...errors import UsageError
from ..files import atomic_writer

logger = logging.getLogger(__name__)


def key_of(value: Any) -> str:
    """A digest of what a step depends on."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def once(
    note: Path, key: str, outputs: Sequence[Path], work: Callable[..., Any], *arguments: Any
) -> None:
    """`work(*arguments)`, unless `note` says that it made these `outputs` from the same key."""
    if not is_current(note, key):
        work(*arguments)
        write_note(note, key, outputs)


def write_note(note: Path, key: str, outputs: Sequence[Path]) -> None:
    """Note that `outputs` were made from `key`, with their sizes and times."""
    note.parent.mkdir(parents=True, exist_ok=True)
    files = {str(path): _state(path) for path in outputs}
    with atomic_writer(note) as stream:
        json.dump({"key": key, "files": files}, stream)


def is_current(note: Path, key: str) -> bool:
    """Whether the files that `note` names were made from `key` and are untouched since."""
    try:
        noted: Dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return noted["key"] == key and all(
        Path(path).exists() and _state(Path(path)) == state
        for path, state in noted["files"].items()
    )


def _state(path: Path) -> Any:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


@contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Keep a second run from working in the same folder.

    Raises:
        UsageError: while another run is at work there.
    """
    with open(out / ".lock", "w") as lock:
        for attempt in range(10):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                # The workers of a run that was killed hold the lock a moment longer.
                if attempt == 9:
                    raise UsageError(
                        f"--out {out}: another run is at work there; wait for it, or choose "
                        "another folder"
                    ) from error
                time.sleep(0.5)
        yield


@contextmanager
def timed(step: str, pairs: int) -> Iterator[None]:
    """Log how long a step took."""
    start = time.monotonic()
    yield
    seconds = time.monotonic() - start
    logger.info("%s: %.0f s, %.0f pairs/s", step, seconds, pairs / max(seconds, 1e-9))
