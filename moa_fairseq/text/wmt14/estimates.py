"""How much disk the preparation takes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from ...errors import UsageError

logger = logging.getLogger(__name__)

# Both sides of a training pair, unpacked: newstest2013 has 239 bytes in English-German and 242 in
# English-French; the training corpora's sentences are somewhat longer.
BYTES_PER_PAIR = 300
# Disk taken at most at one time for each byte of unpacked training text.
WORK_FACTOR = 5.5


def disk_needed(download: int, text: int) -> int:
    """Bytes that a run takes at most at one time.

    Args:
        download: bytes of archives that are still to come.
        text: bytes of the unpacked training text, both sides.
    """
    return download + int(text * WORK_FACTOR)


def check_disk(folder: Path, download: int, text: int) -> None:
    """Log the estimate.

    Raises:
        UsageError: where the disk of `folder` has less free.
    """
    needed, free = disk_needed(download, text), shutil.disk_usage(folder).free
    logger.info("needs about %.1f GB of disk; %.1f GB are free", needed / 1e9, free / 1e9)
    if needed > free:
        raise UsageError(
            f"--out {folder}: about {needed / 1e9:.1f} GB of disk are needed and "
            f"{free / 1e9:.1f} GB are free; free some, or choose a folder on another disk"
        )
