"""The archives of the WMT14 shared tasks: where they are, whether they are whole, what is in them.

Addresses and members are those of the Transformer-Clinic recipe, which the authors used; sizes
and digests are the ones that tensorflow_datasets (sha256) and sacreBLEU (md5 of the test sets)
have on record.
"""

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
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, Dict, Iterable, List, Mapping, Optional, Tuple
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from tqdm import tqdm

from ...errors import UsageError
from ..files import atomic_writer

logger = logging.getLogger(__name__)

ATTEMPTS = 5


@dataclass(frozen=True)
class Archive:
    """One downloadable file.

    Attributes:
        name: its file name.
        url: where the shared task keeps it.
        size: bytes.
        digest: `sha256:…` or `md5:…`.
    """

    name: str
    url: str
    size: Optional[int]
    digest: str


@dataclass(frozen=True)
class TextFile:
    """A text in an archive; `{lang}` in `path` stands for the language."""

    name: str
    archive: str
    path: str

    def member(self, language: str, side: str = "") -> str:
        return self.path.format(lang=language, side=side)


@dataclass(frozen=True)
class Pair:
    """What a language pair is made of.

    Attributes:
        source_lang, target_lang: language codes.
        corpora: the training corpora in order.
        valid: the validation set; None where every `valid_every`-th training line is one.
        test: the test set; `{side}` in its path is src or ref.
        pairs: training pairs in the real corpora, for estimates.
    """

    source_lang: str
    target_lang: str
    corpora: Tuple[TextFile, ...]
    valid: Optional[TextFile]
    valid_every: Optional[int]
    test: TextFile
    pairs: int

    @property
    def languages(self) -> Tuple[str, str]:
        return self.source_lang, self.target_lang

    def files(self) -> Tuple[TextFile, ...]:
        return (*self.corpora, *([self.valid] if self.valid else []), self.test)

    def archives(self) -> List[Archive]:
        """The archives that hold the pair's texts, each once."""
        return [ARCHIVES[name] for name in dict.fromkeys(file.archive for file in self.files())]


ARCHIVES: Mapping[str, Archive] = {
    archive.name: archive
    for archive in (
        Archive(
            "training-parallel-europarl-v7.tgz",
            "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
            657632379,
            "sha256:0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
        ),
        Archive(
            "training-parallel-commoncrawl.tgz",
            "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
            918311367,
            "sha256:c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
        ),
        Archive(
            "training-parallel-nc-v12.tgz",
            "https://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
            168591139,
            "sha256:2b45f30ef1d550d302fd17dd3a5cbe19134ccc4c2cf50c2dae534aee600101a2",
        ),
        Archive(
            "training-parallel-un.tgz",
            "https://www.statmt.org/wmt13/training-parallel-un.tgz",
            2365634246,
            "sha256:29141b5c1eba149a94f7a59d3b1a834b2e47fe0f8758d68dcd77a3d3f497ee47",
        ),
        Archive(
            "training-parallel-nc-v9.tgz",
            "https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
            80418416,
            "sha256:cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
        ),
        Archive(
            "training-giga-fren.tar",
            "https://www.statmt.org/wmt10/training-giga-fren.tar",
            2595102720,
            "sha256:3ff8319f6919393520559bfbc7ad6a747ec81b3abc7be9993b338d4b017b4d9a",
        ),
        Archive(
            "dev.tgz",
            "https://data.statmt.org/wmt19/translation-task/dev.tgz",
            38654961,
            "sha256:7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
        ),
        Archive(
            "test-full.tgz",
            "https://www.statmt.org/wmt14/test-full.tgz",
            None,
            "md5:a8cd784e006feb32ac6f3d9ec7eb389a",
        ),
    )
}

_EUROPARL, _CRAWL = "training-parallel-europarl-v7.tgz", "training-parallel-commoncrawl.tgz"
PAIRS: Mapping[str, Pair] = {
    "en-de": Pair(
        "en",
        "de",
        (
            TextFile("europarl-v7", _EUROPARL, "training/europarl-v7.de-en.{lang}"),
            TextFile("commoncrawl", _CRAWL, "commoncrawl.de-en.{lang}"),
            TextFile(
                "news-commentary-v12",
                "training-parallel-nc-v12.tgz",
                "training/news-commentary-v12.de-en.{lang}",
            ),
        ),
        valid=TextFile("newstest2013", "dev.tgz", "dev/newstest2013.{lang}"),
        valid_every=None,
        test=TextFile(
            "newstest2014", "test-full.tgz", "test-full/newstest2014-deen-{side}.{lang}.sgm"
        ),
        pairs=4_590_000,
    ),
    "en-fr": Pair(
        "en",
        "fr",
        (
            TextFile("europarl-v7", _EUROPARL, "training/europarl-v7.fr-en.{lang}"),
            TextFile("commoncrawl", _CRAWL, "commoncrawl.fr-en.{lang}"),
            TextFile("undoc.2000", "training-parallel-un.tgz", "un/undoc.2000.fr-en.{lang}"),
            TextFile(
                "news-commentary-v9",
                "training-parallel-nc-v9.tgz",
                "training/news-commentary-v9.fr-en.{lang}",
            ),
            TextFile(
                "giga-fren.release2",
                "training-giga-fren.tar",
                "giga-fren.release2.fixed.{lang}.gz",
            ),
        ),
        valid=None,
        valid_every=1333,
        test=TextFile(
            "newstest2014", "test-full.tgz", "test-full/newstest2014-fren-{side}.{lang}.sgm"
        ),
        pairs=40_800_000,
    ),
}


def members(pair: Pair, file: TextFile) -> Tuple[str, str]:
    """The paths of a text's two sides in its archive."""
    return (
        file.member(pair.source_lang, "src"),
        file.member(pair.target_lang, "ref"),
    )


def read_checksums(path: Path) -> Dict[str, str]:
    """Digests by file name from a file that `sha256sum` wrote.

    Raises:
        UsageError: for a file that is not of that form.
    """
    digests = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(f"--checksums {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        match = re.fullmatch(r"([0-9a-f]{64}) [ *](.+)", line)
        if match is None:
            raise UsageError(
                f"--checksums {path}: line {number} is not of the form that sha256sum writes"
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


def verify(path: Path, archive: Archive) -> None:
    """Whether a file is the archive that is meant.

    Raises:
        UsageError: for an HTML page, a truncated file, or another file.
    """
    with open(path, "rb") as stream:
        start = stream.read(512).lstrip().lower()
        if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
            raise UsageError(
                f"{path} is a web page, not an archive: the address may have moved; give another "
                "with --base-url"
            )
        size = path.stat().st_size
        if archive.size is not None and size != archive.size:
            raise UsageError(
                f"{path} has {size:,} bytes instead of {archive.size:,}; delete it and run again"
            )
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
            f"{expected}; delete it and run again, or name its digests with --checksums FILE"
        )


def verify_once(path: Path, archive: Archive, memory: Path) -> None:
    """:func:`verify`, unless `memory` says that the same file has been verified."""
    known: Dict[str, Any] = {}
    if memory.exists():
        known = json.loads(memory.read_text(encoding="utf-8"))
    status = path.stat()
    seen = [status.st_size, status.st_mtime_ns, archive.digest]
    if known.get(str(path.resolve())) == seen:
        return
    verify(path, archive)
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
        raise UsageError(f"{path} is damaged ({error}); delete it and run again") from error
    if left:
        raise UsageError(f"{path} holds no {', '.join(sorted(left))}; is it another archive?")


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


def sgm_segments(lines: Iterable[str]) -> List[str]:
    """The segments of an SGM test set in order, as sacreBLEU reads them: entities stay."""
    found = []
    for line in lines:
        match = re.match(r"\s*<seg\b[^>]*>(.*)</seg>", line)
        if match is not None:
            found.append(" ".join(match[1].split()))
    return found
