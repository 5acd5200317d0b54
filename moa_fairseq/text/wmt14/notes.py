"""Notes on what is done, so that an interrupted run goes on and a finished one does nothing."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Sequence

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
def timed(step: str, pairs: int) -> Iterator[None]:
    """Log how long a step took."""
    start = time.monotonic()
    yield
    seconds = time.monotonic() - start
    logger.info("%s: %.0f s, %.0f pairs/s", step, seconds, pairs / max(seconds, 1e-9))
