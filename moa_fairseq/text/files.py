"""Text files that keep their line count, and files that are either whole or not there."""

from __future__ import annotations

import hashlib
import os
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Iterator, List, Union

from ..errors import UsageError

PathLike = Union[str, Path]


def read_lines(path: PathLike) -> List[str]:
    """The lines of a UTF-8 file, without line ends.

    Only a line feed ends a line, so that other characters which Unicode counts as line breaks
    (U+2028, U+0085, a stray carriage return) never shift the rest against its translation.

    Raises:
        UsageError: when the file is missing, empty or not UTF-8.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; give the path of a text file") from error
    if not data:
        raise UsageError(f"{path} is empty; it must hold one sentence a line")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}: line {line} is not UTF-8 (byte 0x{data[error.start]:02x}); convert the file, "
            "for instance with: iconv -f LATIN1 -t UTF-8"
        ) from error
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [line[:-1] if line.endswith("\r") else line for line in lines]


def read_parallel(source: PathLike, target: PathLike) -> List[tuple[str, str]]:
    """Pairs of lines of two files.

    Raises:
        UsageError: as :func:`read_lines`, and when the files differ in length.
    """
    source_lines, target_lines = read_lines(source), read_lines(target)
    if len(source_lines) != len(target_lines):
        raise UsageError(
            f"{source} has {len(source_lines)} lines but {target} has {len(target_lines)}; "
            "line n of the one must translate line n of the other"
        )
    return list(zip(source_lines, target_lines))


@contextmanager
def atomic_writer(path: PathLike, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a file that appears under its name only once it is whole and on disk.

    If the block raises, an earlier file of that name stays as it was.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial.{os.getpid()}")
    keywords = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with open(partial, mode, **keywords) as stream:  # type: ignore[call-overload]
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_lines(path: PathLike, lines: List[str]) -> None:
    """Write one line each, atomically."""
    with atomic_writer(path) as stream:
        stream.writelines(line + "\n" for line in lines)


def sha256(path: PathLike) -> str:
    """Hex digest of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for block in iter(lambda: stream.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()
