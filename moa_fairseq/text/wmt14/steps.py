"""Steps of the preparation that see a whole text: learning subwords, given sets, joining shards."""

from __future__ import annotations

import io
import logging
import shutil
from collections import Counter
from concurrent.futures import Executor
from itertools import islice
from pathlib import Path
from typing import Any, Dict, Iterator, Mapping, Sequence, Tuple

import sentencepiece
from subword_nmt.learn_bpe import learn_bpe
from tqdm import tqdm

from ...errors import UsageError
from ..files import atomic_writer, read_lines, write_lines
from ..prepare import untrainable
from . import archives, shards
from .archives import Pair
from .shards import Shard

logger = logging.getLogger(__name__)

# SentencePiece trains on at most so many lines, which take it about 10 GB of memory.
SENTENCEPIECE_LINES = 4_000_000
# Fixed, because the trainer's sums depend on how the text is split among threads.
SENTENCEPIECE_THREADS = 16


def learn_subwords(
    pool: Executor, recipe: str, vocab_size: int, cut: Sequence[Shard], text: Path, model: Path
) -> None:
    """Learn a recipe's joint subwords from the training text of the shards.

    Args:
        text: folder of what :func:`shards.clean_shard` wrote.
        model: where the codes or the model go.

    Raises:
        UsageError: when the text does not give such a vocabulary.
    """
    if recipe == "clinic":
        words: Counter[str] = Counter()
        with tqdm(total=len(cut), unit=" shards", desc="counting words") as bar:
            # In order, so that every run sees the words alike.
            for counted in pool.map(shards.count_words, cut, [text] * len(cut)):
                words.update(counted)
                bar.update()
        learn_codes(words, vocab_size, model)
        return
    total = sum(len(shard.languages) * shard.lines for shard in cut)
    step = -(-total // SENTENCEPIECE_LINES)
    logger.info("training SentencePiece on %s", f"1 line in {step}" if step > 1 else "all lines")
    train_pieces(islice(shards.train_lines(cut, text), 0, None, step), vocab_size, model)


def learn_codes(words: Mapping[str, int], merges: int, model: Path) -> None:
    """Joint byte-pair encoding of subword-nmt from word counts, written atomically.

    Raises:
        UsageError: when there is nothing to merge.
    """
    if all(len(word) < 2 for word in words):
        raise UsageError(
            "the training text has no word of two characters, so that nothing can be merged; give "
            "other text"
        )
    dictionary = io.StringIO("".join(f"{word} {count}\n" for word, count in words.items()))
    with atomic_writer(model) as stream:
        learn_bpe(dictionary, stream, merges, is_dict=True)


def train_pieces(
    lines: Iterator[str],
    vocab_size: int,
    model: Path,
    character_coverage: float = 0.9998,
    threads: int = SENTENCEPIECE_THREADS,
) -> None:
    """A joint unigram model of SentencePiece, written atomically.

    Args:
        character_coverage: share of the text's characters that have pieces, 0 to 1.
        threads: another number gives slightly other pieces.

    Raises:
        UsageError: when the text cannot give that many pieces.
    """
    trained = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=trained,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise untrainable(vocab_size, error) from error
    with atomic_writer(model, "wb") as stream:
        stream.write(trained.getvalue())


def write_given_sets(
    pair: Pair, recipe: str, files: Mapping[str, Tuple[Path, Path]], model: Path, out: Path
) -> Dict[str, int]:
    """Write `raw/`, `pieces/` and, for the clinic recipe, `tokenised/` of the sets that are files.

    No line of them is dropped: a score is over every line of a set.

    Args:
        files: the two sides of each text by its name.

    Returns:
        the number of pairs in each.

    Raises:
        UsageError: when the sides of a set differ in length.
    """
    encode = shards.encoder(recipe, model)
    counts = {}
    for split, file in (("test", pair.test), ("valid", pair.valid)):
        if file is None:
            continue
        lengths = []
        for language, path in zip(pair.languages, files[file.name]):
            raw = read_lines(path)
            if path.name.endswith(".sgm"):
                raw = archives.sgm_segments(raw)
            text = [set_line(recipe, language, split, line) for line in raw]
            lines = {"raw": raw, "pieces": encode(text)}
            if recipe == "clinic":
                lines["tokenised"] = text
            for folder, content in lines.items():
                (out / folder).mkdir(parents=True, exist_ok=True)
                write_lines(out / folder / f"{split}.{language}", content)
            lengths.append(len(raw))
        if lengths[0] != lengths[1] or not lengths[0]:
            raise UsageError(
                f"{file.name} has {lengths[0]} {pair.source_lang} lines and {lengths[1]} "
                f"{pair.target_lang} lines; the archive is not what it should be, so give another"
            )
        counts[split] = lengths[0]
    return counts


def set_line(recipe: str, language: str, split: str, line: str) -> str:
    """A line of a given validation or test set before subwords.

    Test text of the clinic recipe is tokenised with its right single quotes made straight, but
    its punctuation is not normalised; neither was the authors'.
    """
    if recipe == "clinic" and split == "test":
        return shards.moses_text(language).tokenize(line.replace("\u2019", "'"), aggressive=True)
    return shards.text_line(recipe, language)(line)


def join_shards(pair: Pair, recipe: str, cut: Sequence[Shard], pieces: Path, out: Path) -> None:
    """Put the shards' subwords, and held-out text beside them, together in `out`, in order."""
    joins = [("train", "pieces", "train")]
    if pair.valid is None:
        joins += [("valid", "pieces", "valid"), ("valid-raw", "raw", "valid")]
        if recipe == "clinic":
            joins.append(("valid-text", "tokenised", "valid"))
    for part, folder, split in joins:
        for language in pair.languages:
            (out / folder).mkdir(parents=True, exist_ok=True)
            with atomic_writer(out / folder / f"{split}.{language}", "wb") as output:
                for shard in cut:
                    with open(shard.path(pieces, part, language), "rb") as stream:
                        shutil.copyfileobj(stream, output, 1 << 20)


def count_pairs(
    pair: Pair,
    cut: Sequence[Shard],
    cleaned: Sequence[Dict[str, int]],
    encoded: Sequence[Dict[str, Dict[str, int]]],
) -> Dict[str, Dict[str, int]]:
    """What became of the pairs of each corpus, and of the training and validation sets."""
    counts: Dict[str, Counter[str]] = {file.name: Counter() for file in pair.corpora}
    splits: Dict[str, Counter[str]] = {"train": Counter(kept=0)}
    for shard, text, subwords in zip(cut, cleaned, encoded):
        counts[shard.name.rsplit(".", 1)[0]].update(text)
        for split, numbers in subwords.items():
            named: Dict[str, Any] = {
                what if what == "kept" else f"{what} in subwords": number
                for what, number in numbers.items()
            }
            splits.setdefault(split, Counter()).update(named)
    return {name: dict(numbers) for name, numbers in {**counts, **splits}.items()}
