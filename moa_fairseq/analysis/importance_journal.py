"""Results of a long measurement, one a line, so that it goes on where it was interrupted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional

from ..errors import UsageError


class Journal:
    """A JSONL file whose first line says what the others are results of.

    A last line that a kill cut short is taken away.

    Args:
        path: of the file; None keeps results in memory only.
        fingerprint: what results depend on, of types that JSON has.

    Attributes:
        records: what the file held, then what was added.

    Raises:
        UsageError: for a file with another fingerprint, or one that is not such a journal.
        OSError: with `path` as its file name, where the system refuses the file.
    """

    def __init__(self, path: Optional[Path], fingerprint: Mapping[str, Any]) -> None:
        self.path = path
        self.records: List[Dict[str, Any]] = []
        if path is None:
            return
        whole = b""
        if path.exists():
            data = path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(path, len(whole))
        if whole:
            first, *self.records = _parse(path, whole)
            _check(path, first.get("fingerprint"), dict(fingerprint))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write({"fingerprint": dict(fingerprint)})

    def add(self, record: Dict[str, Any]) -> None:
        """Append a result; it is on disk when this returns."""
        if self.path is not None:
            self._write(record)
        self.records.append(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self.path is not None
        try:
            with open(self.path, "ab") as stream:
                stream.write((json.dumps(record) + "\n").encode())
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def _parse(path: Path, whole: bytes) -> List[Dict[str, Any]]:
    records = []
    for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise UsageError(
                f"{path}: line {number} is no result of a measurement; remove the file, and it is "
                "measured again"
            )
        records.append(record)
    return records


def _check(path: Path, found: Any, wanted: Dict[str, Any]) -> None:
    if found == wanted:
        return
    found = found if isinstance(found, dict) else {}
    name = next(name for name in (*wanted, *found) if found.get(name) != wanted.get(name))
    raise UsageError(
        f"{path} holds results of another measurement: {name} is {found.get(name)}, and "
        f"{wanted.get(name)} here; give another folder, or remove the file to measure again"
    )
