"""Archives with the names and the inner layout of the shared tasks', out of a small text.

They stand in for the real ones where the whole chain is tried without a download.
"""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple

from ..files import atomic_writer, read_parallel, sha256, write_lines
from .archives import PAIRS, Pair, members

CHECKSUMS = "SHA256SUMS"


# Words of the toy language and their translations.
_TOY_WORDS = {
    "en": "zero one two three four five six seven eight nine ten red green blue house tree",
    "de": "null eins zwei drei vier fünf sechs sieben acht neun zehn rot grün blau Haus Baum",
    "fr": "zéro un deux trois quatre cinq six sept huit neuf dix rouge vert bleu maison arbre",
}
_TOY_SIZES = {"train": 5000, "valid": 100, "test": 150}


def write_toy_text(languages: Tuple[str, str], folder: Path) -> None:
    """Write `train`, `valid` and `test` of a toy language, the same each time.

    Sentences of two to eight words are translated word by word with the first word last, which a
    small model learns in a minute.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source_words, target_words = (_TOY_WORDS[language].split() for language in languages)
    for split, number in _TOY_SIZES.items():
        generator = random.Random(split)
        lines: Tuple[List[str], List[str]] = ([], [])
        for _ in range(number):
            words = generator.choices(range(len(source_words)), k=generator.randint(2, 8))
            lines[0].append(" ".join(source_words[word] for word in words) + ".")
            moved = [*words[1:], words[0]]
            lines[1].append(" ".join(target_words[word] for word in moved) + ".")
        for language, side in zip(languages, lines):
            write_lines(folder / f"{split}.{language}", side)


def build(pair_name: str, text: Path, out: Path, train_lines: Optional[int] = None) -> None:
    """Write the archives of a pair, and their digests, to `out`.

    Args:
        text: folder of `train.LANG`, `valid.LANG` and `test.LANG`; the training text is dealt out
            to the pair's corpora.
        train_lines: how many of its pairs at most, from the first on; None takes all.

    Raises:
        UsageError: when a file is missing, or the sides of a set differ in length.
    """
    pair = PAIRS[pair_name]
    splits = {
        split: read_parallel(*(text / f"{split}.{language}" for language in pair.languages))
        for split in ("train", "valid", "test")
    }
    contents: Dict[str, Dict[str, bytes]] = {archive.name: {} for archive in pair.archives()}
    splits["train"] = splits["train"][:train_lines]
    share = -(-len(splits["train"]) // len(pair.corpora))
    for number, file in enumerate(pair.corpora):
        part = splits["train"][number * share : (number + 1) * share]
        contents[file.archive].update(_plain(members(pair, file), part))
    if pair.valid is not None:
        contents[pair.valid.archive].update(_plain(members(pair, pair.valid), splits["valid"]))
    contents[pair.test.archive].update(_sgm(pair, splits["test"]))
    out.mkdir(parents=True, exist_ok=True)
    for name, files in contents.items():
        with atomic_writer(out / name, "wb") as stream:
            stream.write(_archive(files, compressed=name.endswith(".tgz")))
    with atomic_writer(out / CHECKSUMS) as stream:
        stream.writelines(f"{sha256(out / name)}  {name}\n" for name in sorted(contents))


def _plain(names: Tuple[str, str], pairs: Sequence[Tuple[str, str]]) -> Dict[str, bytes]:
    files = {}
    for side, name in enumerate(names):
        content = "".join(pair[side] + "\n" for pair in pairs).encode()
        files[name] = gzip.compress(content, mtime=0) if name.endswith(".gz") else content
    return files


def _sgm(pair: Pair, pairs: Sequence[Tuple[str, str]]) -> Dict[str, bytes]:
    files = {}
    for side, (name, kind) in enumerate(zip(members(pair, pair.test), ("srcset", "refset"))):
        lines: List[str] = [f'<{kind} setid="newstest2014" srclang="any" trglang="any">', "<doc>"]
        # As it is, without entities: the shared tasks' files are no XML.
        lines += [f'<seg id="{n}">{text[side]}</seg>' for n, text in enumerate(pairs, start=1)]
        lines += ["</doc>", f"</{kind}>"]
        files[name] = ("\n".join(lines) + "\n").encode()
    return files


def _archive(files: Dict[str, bytes], compressed: bool) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    data = packed.getvalue()
    return gzip.compress(data, mtime=0) if compressed else data
