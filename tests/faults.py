"""Disks and folders that refuse to be written to."""

from __future__ import annotations

import io
import resource
import subprocess
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Iterator

import pytest


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes; more is refused as on a full disk.

    Where pytest keeps what is printed is such a file, so it is kept in memory meanwhile.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class SmallDisk:
    """A disk of its own, where the system lets this user mount one."""

    def __init__(self, folder: Path, kilobytes: int) -> None:
        self.folder = folder
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
        if mounted.returncode != 0:
            pytest.skip(f"no disk can be mounted here: {mounted.stderr.strip()}")

    def leave(self, kilobytes: int) -> None:
        """Fill it but for so much."""
        filler = self.folder / "filler"
        filler.unlink(missing_ok=True)
        filler.write_bytes(b"")
        free = self.free()
        with open(filler, "wb") as stream:
            stream.write(bytes(max(0, free - kilobytes * 1024)))

    def free(self) -> int:
        command = ["df", "--output=avail", "-B1", str(self.folder)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return int(shown.split()[-1])

    def empty(self) -> None:
        (self.folder / "filler").unlink()

    def make_read_only(self) -> None:
        self._run("mount", "-o", "remount,ro", str(self.folder))

    def make_writable(self) -> None:
        self._run("mount", "-o", "remount,rw", str(self.folder))

    def unmount(self) -> None:
        self._run("umount", "--lazy", str(self.folder))

    def _run(self, *command: str) -> None:
        subprocess.run(command, check=True)
