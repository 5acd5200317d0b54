"""Long parallel texts in pieces that are worked on side by side, each whole or not there.

A shard is a fixed run of lines of one corpus, so that what comes out depends on neither the number
of workers nor on when a run was interrupted.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy
import sentencepiece
from subword_nmt.apply_bpe import BPE
from tqdm import tqdm

from ...errors import UsageError
from ..cleaning import clean_line
from ..files import atomic_writer
from ..moses import MosesText

RECIPES = ("sentencepiece", "clinic")


@dataclass(frozen=True)
class Lengths:
    """Which pairs are kept: at most `longest` tokens a side, at most `ratio` to 1."""

    longest: int
    ratio: float

    def reason_to_drop(self, source: str, target: str) -> Optional[str]:
        lengths = len(tokens(source)), len(tokens(target))
        if max(lengths) > self.longest:
            return "too long"
        if max(lengths) > self.ratio * min(lengths):
            return "length ratio"
        return None


@dataclass(frozen=True)
class Shard:
    """A run of lines of one corpus.

    Attributes:
        name: names its files.
        first: number of its first line, from 1, counted over all corpora.
        lines: how many lines it has.
        files, offsets: the two sides, and the byte at which the run starts in each.
        languages: of the two sides.
        recipe: one of `RECIPES`.
        valid_every: every so many-th line, counted as `first` is, is held out for validation.
        lengths: filter on tokens before subwords, or None.
    """

    name: str
    first: int
    lines: int
    files: Tuple[str, str]
    offsets: Tuple[int, int]
    languages: Tuple[str, str]
    recipe: str
    valid_every: Optional[int]
    lengths: Optional[Lengths]

    def path(self, folder: Path, split: str, language: str) -> Path:
        return folder / f"{self.name}.{split}.{language}"

    def splits(self) -> Tuple[str, ...]:
        return ("train",) if self.valid_every is None else ("train", "valid", "valid-raw")


def tokens(line: str) -> List[str]:
    """The tokens of a line. Moses' tokenizer leaves a blank at the end after `.'`."""
    return [token for token in line.split(" ") if token]


def line_offsets(path: Path, every: int) -> Tuple[List[int], int]:
    """The byte at which each `every`-th line starts, from the first on, and the number of lines.

    Only a line feed ends a line. A last line need not have one.
    """
    offsets, lines, position = [0], 0, 0
    with open(path, "rb") as stream:
        last = b"\n"
        for block in iter(lambda: stream.read(1 << 24), b""):
            ends = numpy.flatnonzero(numpy.frombuffer(block, numpy.uint8) == 10)
            # The ends of lines number lines+1, lines+2, …; shards start after multiples of every.
            for index in range(every - 1 - lines % every, len(ends), every):
                offsets.append(position + int(ends[index]) + 1)
            lines += len(ends)
            position += len(block)
            last = block[-1:]
    if last != b"\n":
        lines += 1
    if offsets[-1] == position:
        offsets.pop()  # no line starts at the end of the file
    return offsets, lines


def cut(
    corpora: Sequence[Tuple[str, Tuple[Path, Path]]], lines_in_shard: int, **common: Any
) -> List[Shard]:
    """The shards of all corpora in order.

    Raises:
        UsageError: when the sides of a corpus differ in length, or there is no line at all.
    """
    shards = []
    first = 1
    for name, files in corpora:
        (offsets, lines), (other_offsets, other_lines) = (
            line_offsets(file, lines_in_shard) for file in files
        )
        if lines != other_lines:
            raise UsageError(
                f"{files[0]} has {lines:,} lines but {files[1]} has {other_lines:,}; line n of the "
                "one must translate line n of the other"
            )
        for number, position in enumerate(zip(offsets, other_offsets)):
            shards.append(
                Shard(
                    name=f"{name}.{number:05}",
                    first=first + number * lines_in_shard,
                    lines=min(lines_in_shard, lines - number * lines_in_shard),
                    files=(str(files[0]), str(files[1])),
                    offsets=position,
                    **common,
                )
            )
        first += lines
    if not shards:
        raise UsageError(f"{corpora[0][1][0]} is empty; it must hold one sentence a line")
    return shards


def text_line(recipe: str, language: str) -> Callable[[str], str]:
    """What a recipe makes of a line of training or validation text, before subwords."""
    if recipe == "sentencepiece":
        return clean_line
    moses = moses_text(language)
    return lambda line: moses.tokenize(moses.normalize(line), aggressive=True)


def clean_shard(shard: Shard, out: Path) -> Dict[str, int]:
    """Clean, and for the clinic recipe normalise and tokenise, a shard; count what is dropped.

    Writes `NAME.train.LANG` and, where lines are held out, `NAME.valid.LANG` and
    `NAME.valid-raw.LANG` to `out`.
    """
    makers = [text_line(shard.recipe, language) for language in shard.languages]
    counts: Counter[str] = Counter(read=shard.lines)
    kept: Dict[str, List[Tuple[str, str]]] = {split: [] for split in shard.splits()}
    for number, raw in enumerate(_read(shard), start=shard.first):
        try:
            decoded = [side.decode("utf-8") for side in raw]
        except UnicodeDecodeError:
            counts["not UTF-8"] += 1
            continue
        source, target = (make(side) for make, side in zip(makers, decoded))
        held_out = shard.valid_every is not None and number % shard.valid_every == 0
        if not source or not target:
            counts["empty side"] += 1
            continue
        reason = shard.lengths.reason_to_drop(source, target) if shard.lengths else None
        if reason is not None:
            counts[reason] += 1
        elif held_out:
            kept["valid"].append((source, target))
            kept["valid-raw"].append((clean_line(decoded[0]), clean_line(decoded[1])))
        else:
            kept["train"].append((source, target))
    for split, pairs in kept.items():
        _write(shard, out, split, pairs)
    counts["held out for validation"] = len(kept.get("valid", []))
    return dict(counts)


def encode_shard(
    shard: Shard, text: Path, out: Path, model: Path, train: Lengths, valid: Optional[Lengths]
) -> Dict[str, Dict[str, int]]:
    """Cut a shard's text into subwords and drop pairs by length; counts for each split.

    Args:
        text: folder of what :func:`clean_shard` wrote.
        model: of :func:`encoder`.
        train, valid: filters on subwords; None keeps all.
    """
    encode = encoder(shard.recipe, model)
    counts: Dict[str, Dict[str, int]] = {}
    for split, lengths in (("train", train), ("valid", valid)):
        if split not in shard.splits():
            continue
        pairs = _lines(shard, text, split)
        encoded = list(zip(*(encode(side) for side in zip(*pairs))))
        reasons = [lengths.reason_to_drop(*pair) if lengths else None for pair in encoded]
        kept = [index for index, reason in enumerate(reasons) if reason is None]
        _write(shard, out, split, [encoded[index] for index in kept])
        if split == "valid":
            # The raw and the tokenised text must stay line for line with the subwords.
            _write(shard, out, "valid-text", [pairs[index] for index in kept])
            raw = _lines(shard, text, "valid-raw")
            _write(shard, out, "valid-raw", [raw[index] for index in kept])
        counts[split] = {**Counter(reason for reason in reasons if reason), "kept": len(kept)}
    return counts


def encoder(recipe: str, model: Path) -> Callable[[Sequence[str]], List[str]]:
    """Lines to space-separated subwords. Made anew for each shard: subword-nmt's keeps all it saw.

    Args:
        model: a SentencePiece model, or the codes of subword-nmt for the clinic recipe.
    """
    if recipe == "sentencepiece":
        processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        return lambda lines: [
            " ".join(pieces) for pieces in processor.encode(list(lines), out_type=str)
        ]
    with open(model, encoding="utf-8") as codes:
        bpe = BPE(codes)
    return lambda lines: [bpe.process_line(line) for line in lines]


def count_words(shard: Shard, text: Path) -> Counter[str]:
    """How often each word stands in a shard's training text, both sides."""
    words: Counter[str] = Counter()
    for pair in _lines(shard, text, "train"):
        for side in pair:
            words.update(tokens(side))
    return words


def train_lines(shards: Sequence[Shard], text: Path) -> Iterator[str]:
    """The lines of the training text, source then target of each shard."""
    for shard in shards:
        for language in shard.languages:
            with open(shard.path(text, "train", language), encoding="utf-8", newline="\n") as file:
                for line in file:
                    yield line[:-1]


def run_on_shards(
    pool: Executor,
    shards: Sequence[Any],
    folder: Path,
    key: str,
    work: Callable[..., Any],
    arguments: Sequence[Any],
    description: str,
    unit: str = " pairs",
) -> List[Any]:
    """`work(shard, *arguments)` for every shard, in parallel; what is done already is kept.

    Args:
        shards: :class:`Shard` or other dataclasses with a `name` and a number of `lines`.
        folder: where `work` writes; in `notes/` goes what it returned for each finished shard.
        key: notes of another key are void.

    Returns:
        what `work` returned, in the order of the shards.

    Raises:
        UsageError: when the system has killed a worker.
    """
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    futures = {
        pool.submit(_remembered, notes / f"{shard.name}.json", key, work, shard, arguments): shard
        for shard in shards
    }
    results = {}
    with tqdm(total=sum(shard.lines for shard in shards), unit=unit, desc=description) as bar:
        try:
            for future in as_completed(futures):
                shard = futures[future]
                results[shard.name] = future.result()
                bar.update(shard.lines)
        except BrokenProcessPool as error:
            raise UsageError(
                "the system killed a worker, most likely for its memory; run again with fewer "
                "--workers to go on"
            ) from error
        finally:
            for future in futures:
                future.cancel()
    return [results[shard.name] for shard in shards]


def workers(number: int) -> ProcessPoolExecutor:
    """A pool whose processes end with this one, however it ends."""
    return ProcessPoolExecutor(number, initializer=_end_with_parent, initargs=(os.getpid(),))


def _end_with_parent(parent: int) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _remembered(
    note: Path, key: str, work: Callable[..., Any], shard: Any, arguments: Sequence[Any]
) -> Any:
    wanted = json.loads(json.dumps([key, asdict(shard)]))
    if note.exists():
        noted = json.loads(note.read_text(encoding="utf-8"))
        if noted["key"] == wanted:
            return noted["result"]
    result = work(shard, *arguments)
    with atomic_writer(note) as stream:
        json.dump({"key": wanted, "result": result}, stream)
    return result


@cache
def moses_text(language: str) -> MosesText:
    """Moses' steps for a language, made once in each process."""
    return MosesText(language)


def _read(shard: Shard) -> Iterator[Tuple[bytes, bytes]]:
    with open(shard.files[0], "rb") as source, open(shard.files[1], "rb") as target:
        source.seek(shard.offsets[0])
        target.seek(shard.offsets[1])
        for _ in range(shard.lines):
            yield source.readline().rstrip(b"\r\n"), target.readline().rstrip(b"\r\n")


def _lines(shard: Shard, folder: Path, split: str) -> List[Tuple[str, str]]:
    sides = []
    for language in shard.languages:
        text = shard.path(folder, split, language).read_bytes().decode("utf-8")
        sides.append(text.split("\n")[:-1])
    return list(zip(*sides))


def _write(shard: Shard, folder: Path, split: str, pairs: Sequence[Tuple[str, str]]) -> None:
    for side, language in enumerate(shard.languages):
        with atomic_writer(shard.path(folder, split, language)) as stream:
            stream.writelines(pair[side] + "\n" for pair in pairs)
