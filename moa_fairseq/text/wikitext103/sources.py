"""Where the text of WikiText-103 and GPT-2's subwords come from, and whether they are whole.

The archive's first address (s3.amazonaws.com/research.metamind.io) refuses access since 2024; the
one below is by an author of the corpus. Its size and sha256, and those of OpenAI's two files, are
on record in many places, among them the downloaders of other libraries.
"""

from __future__ import annotations

import shutil
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Dict, Mapping, Optional, Tuple

from ...errors import UsageError
from ..files import atomic_writer, sha256
from ..wmt14 import fetching
from ..wmt14.archives import Archive
from ..wmt14.estimates import check_disk

SPLITS = ("train", "valid", "test")
CORPUS = Archive(
    "wikitext-103-raw-v1.zip",
    "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
    191984949,
    "sha256:91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
)
# Of the training text, unpacked.
TEXT_BYTES = 546_500_949
# The lines of each split as published, blank ones among them.
PUBLISHED_LINES: Mapping[str, int] = {"train": 1801350, "valid": 3760, "test": 4358}
_OPENAI = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = (
    Archive(
        "encoder.json",
        f"{_OPENAI}encoder.json",
        1042301,
        "sha256:196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    ),
    Archive(
        "vocab.bpe",
        f"{_OPENAI}vocab.bpe",
        456318,
        "sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    ),
)
# Names of a split's text in the user's own folder; the first that is there counts.
_FOLDERS = ("", "wikitext-103-raw", "wikitext-103")
_NAMES = (
    *("wiki.{split}.raw", "wiki.{split}.tokens", "{split}.raw", "{split}.txt"),
    *("{split}.tokens", "{split}.en", "{split}"),
)


def find_sources(
    out: Path,
    gpt2: bool,
    from_dir: Optional[Path],
    base_url: Optional[str],
    checksums: Optional[Path],
) -> Tuple[Dict[str, Path], Dict[str, Tuple[str, str]]]:
    """Where the archive, or the text of each split, is, and GPT-2's files; downloads what is not.

    Args:
        out: what is downloaded goes to its `archives/`.
        gpt2: whether GPT-2's files are wanted.
        from_dir: the user's folder; None downloads.
        base_url: download `base_url/NAME` instead of the addresses on record.
        checksums: file with digests instead of those on record.

    Returns:
        paths, and what identifies each of them whatever its path, by name.

    Raises:
        UsageError: for what is missing or is not what it should be, and for a full disk.
    """
    files: Dict[str, Path] = {}
    identity: Dict[str, Tuple[str, str]] = {}
    digests = fetching.read_checksums(checksums) if checksums else None
    if from_dir is None and digests is None:
        there = (out / "archives" / CORPUS.name).exists()
        check_disk(out, 0 if there else CORPUS.size or 0, TEXT_BYTES)
    for known in (CORPUS, *(GPT2_FILES if gpt2 else ())):
        if known is CORPUS and from_dir is not None and not (from_dir / known.name).is_file():
            texts = {split: _own_text(from_dir, split) for split in SPLITS}
            files.update(texts)
            identity.update({split: ("sha256", sha256(path)) for split, path in texts.items()})
            continue
        archive = known
        if digests is not None:
            if known.name not in digests:
                raise UsageError(f"--checksums {checksums} does not name {known.name}; add it")
            archive = replace(known, size=None, digest=digests[known.name])
        if from_dir is None:
            path = fetching.download(archive, base_url, out / "archives")
        else:
            path = from_dir / archive.name
            if not path.is_file():
                raise UsageError(
                    f"--from-dir {from_dir} has no {archive.name}, which --recipe gpt2 needs; put "
                    "it there, or use --recipe sentencepiece"
                )
        memory = out / "archives" / "verified.json"
        fetching.verify_once(path, archive, memory, downloaded=from_dir is None)
        files[archive.name] = path
        identity[archive.name] = ("archive", archive.digest)
    return files, identity


def _own_text(folder: Path, split: str) -> Path:
    for name in _NAMES:
        for sub_folder in _FOLDERS:
            path = folder / sub_folder / name.format(split=split)
            if path.is_file():
                return path
    raise UsageError(
        f"--from-dir {folder} has neither {CORPUS.name} nor a text of {split}, such as "
        f"wiki.{split}.raw or {split}.txt; put one there, or leave --from-dir out to download"
    )


def unpack_texts(archive: Path, folder: Path) -> Dict[str, Path]:
    """The text of each split out of the archive, each file atomically.

    Raises:
        UsageError: for a damaged archive, or one without them.
    """
    texts = {split: folder / f"wiki.{split}.raw" for split in SPLITS}
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(archive) as opened:
            for split, target in texts.items():
                if target.exists():
                    continue
                with (
                    opened.open(f"wikitext-103-raw/wiki.{split}.raw") as content,
                    atomic_writer(target, "wb") as output,
                ):
                    shutil.copyfileobj(content, output, 1 << 20)
    except KeyError as error:
        raise UsageError(
            f"{archive} is another archive ({error.args[0]}); give the one that is meant"
        ) from error
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UsageError(f"{archive} is damaged ({error}); replace it and run again") from error
    return texts
