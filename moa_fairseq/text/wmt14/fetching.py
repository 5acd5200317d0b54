"""Archives that are fetched, checked and unpacked, each file whole or not there."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import re
import shutil
import tarfile
import time
import zlib
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, Dict, Mapping, Optional
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tqdm import tqdm

from ...errors import UsageError
from ..files import atomic_writer
from .archives import Archive

logger = logging.getLogger(__name__)

ATTEMPTS = 5


def read_checksums(path: Path) -> Dict[str, str]:
    """Digests by file name from a file that `sha256sum` wrote.

    Raises:
        UsageError: for a file that is not of that form.
    """
    digests = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--checksums {path}: {error.strerror}; give another file") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"--checksums {path} is not UTF-8; give what sha256sum printed, not an archive"
        ) from error
    for number, line in enumerate(lines, start=1):
        match = re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)
        if match is None:
            raise UsageError(
                f"--checksums {path}: line {number} is not of the form that sha256sum writes; "
                "make it with: sha256sum FILES"
            )
        digests[Path(match[2]).name] = f"sha256:{match[1]}"
    return digests


def download(archive: Archive, base_url: Optional[str], folder: Path) -> Path:
    """Fetch an archive into `folder`, going on where an earlier run stopped.

    The file has its name only once it has been verified.

    Args:
        base_url: fetch `base_url/NAME` instead of the shared task's address.

    Raises:
        UsageError: when it cannot be fetched, or is not the file that was meant.
    """
    target = folder / archive.name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{archive.name}.partial"
    url = archive.url if base_url is None else f"{base_url.rstrip('/')}/{archive.name}"
    logger.info("downloading %s", url)
    for attempt in range(ATTEMPTS):
        try:
            if _fetch(url, partial):
                break
        except (HTTPError, ValueError) as error:
            raise UsageError(
                f"{url} cannot be downloaded ({error}); give another address with --base-url, or "
                "files that you have with --from-dir"
            ) from error
        except (OSError, HTTPException) as error:
            logger.warning("%s: %s", url, error)
        if attempt + 1 == ATTEMPTS:
            raise UsageError(
                f"{url}: the download broke off {ATTEMPTS} times; run again to go on, or give "
                "another address with --base-url"
            )
        time.sleep(attempt)
    try:
        verify(partial, archive)
    except UsageError:
        partial.unlink()
        raise
    partial.rename(target)
    return target


def _fetch(url: str, partial: Path) -> bool:
    """Append what is missing to `partial`; whether all of it is there now."""
    start = partial.stat().st_size if partial.exists() else 0
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(request, timeout=60)
    except HTTPError as error:
        if error.code == 416 and start:
            return True  # no byte is left to fetch; whether these are the right ones, digests tell
        raise
    with response:
        if response.status != 206:
            start = 0  # the server knows no ranges, so all of it comes again
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        with (
            open(partial, "ab" if start else "wb") as output,
            tqdm(initial=start, total=total, unit="B", unit_scale=True, desc=partial.stem) as bar,
        ):
            for block in iter(lambda: response.read(1 << 20), b""):
                output.write(block)
                bar.update(len(block))
    return total is None or partial.stat().st_size == total


def verify(path: Path, archive: Archive, downloaded: bool = True) -> None:
    """Whether a file is the archive that is meant.

    Args:
        downloaded: whether this program fetched the file; otherwise it is the user's own.

    Raises:
        UsageError: for an HTML page, a truncated file, or another file.
    """
    again = "delete it and run again" if downloaded else "put the whole file there"
    remedy = f"{again}, or name the digests of the files that are meant with --checksums FILE"
    with open(path, "rb") as stream:
        start = stream.read(512).lstrip().lower()
        if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
            raise UsageError(
                f"{path} is a web page, not an archive: the address may have moved; give another "
                f"with --base-url{'' if downloaded else ', or put the archive there'}"
            )
        size = path.stat().st_size
        if archive.size is not None and size != archive.size:
            raise UsageError(f"{path} has {size:,} bytes instead of {archive.size:,}; {remedy}")
        algorithm, expected = archive.digest.split(":")
        digest = hashlib.new(algorithm)
        stream.seek(0)
        with tqdm(
            total=size, unit="B", unit_scale=True, desc=f"verifying {archive.name}", leave=False
        ) as bar:
            for block in iter(lambda: stream.read(1 << 22), b""):
                digest.update(block)
                bar.update(len(block))
    if digest.hexdigest() != expected:
        raise UsageError(
            f"{path} is not the expected file: its {algorithm} is {digest.hexdigest()} instead of "
            f"{expected}; {remedy}"
        )


def verify_once(path: Path, archive: Archive, memory: Path, downloaded: bool = True) -> None:
    """:func:`verify`, unless `memory` says that the same file has been verified."""
    known: Dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a memory that is not there, or not whole
        known = dict(json.loads(memory.read_text(encoding="utf-8")))
    status = path.stat()
    seen = [status.st_size, status.st_mtime_ns, archive.digest]
    if known.get(str(path.resolve())) == seen:
        return
    verify(path, archive, downloaded)
    known[str(path.resolve())] = seen
    memory.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(memory) as stream:
        json.dump(known, stream, indent=1)


def find_unpacked(folder: Path, member: str) -> Optional[Path]:
    """A text that the user has unpacked already, in `folder`, with or without its path."""
    plain = member[:-3] if member.endswith(".gz") else member
    for name in (plain, Path(plain).name, member, Path(member).name):
        if (folder / name).is_file():
            return folder / name
    return None


def unpack(path: Path, wanted: Mapping[str, Path]) -> None:
    """Extract members of an archive, `.gz` members decompressed, each atomically.

    Args:
        path: the archive.
        wanted: where each member goes.

    Raises:
        UsageError: for a damaged archive or one without a member.
    """
    left = dict(wanted)
    try:
        with (
            open(path, "rb") as raw,
            tqdm.wrapattr(
                raw, "read", total=path.stat().st_size, unit="B", unit_scale=True, desc=path.name
            ) as stream,
            tarfile.open(fileobj=stream, mode="r|*") as archive,
        ):
            for entry in archive:
                name = entry.name[2:] if entry.name.startswith("./") else entry.name
                target = left.pop(name, None)
                content = archive.extractfile(entry) if target is not None else None
                if target is None or content is None:
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with atomic_writer(target, "wb") as output:
                    shutil.copyfileobj(open_member(content, name), output, 1 << 20)
                if not left:
                    break
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is damaged ({error}); replace it and run again") from error
    if left:
        raise UsageError(
            f"{path} holds no {', '.join(sorted(left))}; it is another archive, so give the one "
            "that is meant"
        )


def open_member(content: IO[bytes], name: str) -> IO[bytes]:
    """A member's bytes, decompressed where its name ends in .gz."""
    return gzip.GzipFile(fileobj=content) if name.endswith(".gz") else content  # type: ignore


def decompress(path: Path, target: Path) -> None:
    """Write what is in a `.gz` file to `target`, atomically.

    Raises:
        UsageError: for a damaged file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with gzip.open(path) as content, atomic_writer(target, "wb") as output:
            shutil.copyfileobj(content, output, 1 << 20)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{path} is damaged ({error}); replace it and run again") from error
