"""Text files that keep their line count, and files that are either whole or not there."""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import os
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Iterator, List, Mapping, Optional, Union

from ..errors import UsageError

PathLike = Union[str, Path]

# What a write is refused with; unlike opening a file, it does not say which one.
WRITE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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

    If the block raises, an earlier file of that name stays as it was. What an earlier writer of
    that name left behind when it was killed is removed.

    Raises:
        OSError: with `path` as its file name, where the system refuses to write.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial.{os.getpid()}")
    keywords = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        remove_abandoned(path.parent, path.name)
        with open(partial, mode, **keywords) as stream:  # type: ignore[call-overload]
            with suppress(OSError):  # without locks, nothing counts as abandoned
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            os.replace(partial, path)
    except Exception as error:
        refused = _refusal(error, partial)
        if refused is None:
            raise
        raise OSError(refused.errno, refused.strerror, str(path)) from error
    finally:
        with suppress(OSError):  # a folder that may not be written to has none
            partial.unlink()


def remove_abandoned(folder: Path, name: Optional[str] = None) -> None:
    """Remove what writers that were killed left in a folder: of one file, or of all of them.

    A writer holds a lock on its file, which goes with it.
    """
    for left_over in folder.glob(f".{'*' if name is None else glob.escape(name)}.partial.*"):
        with suppress(OSError), open(left_over, "rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left_over.unlink()


def _refusal(error: Optional[BaseException], partial: Path) -> Optional[OSError]:
    """The system's refusal of a partial file behind an error, of which torch makes another."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            unnamed = error.filename is None and error.errno in WRITE_ERRORS
            return error if unnamed or error.filename == str(partial) else None
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def only_run(out: Path) -> Iterator[IO[str]]:
    """Keep a second run from working in the same folder.

    Yields:
        the lock: processes that inherit it keep a second run out for as long as they live.

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
        yield lock


def write_together(contents: Mapping[Path, str]) -> None:
    """Write texts that belong together: all of them, or none where the system refuses one."""
    with ExitStack() as stack:
        streams = [stack.enter_context(atomic_writer(path)) for path in contents]
        for stream, content in zip(streams, contents.values()):
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())


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
