"""From raw parallel text to SentencePiece pieces, ready for `fairseq-preprocess`."""

from __future__ import annotations

import io
import json
import logging
import os
import platform
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import sentencepiece

from ..errors import UsageError
from .cleaning import Pair, clean_line, clean_pairs, drop_overlap, filter_lengths, hold_out
from .files import atomic_writer, only_run, read_parallel, sha256, write_lines

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
MODEL = "sentencepiece.model"
# Fixed, because the trainer's sums depend on how the text is split among threads.
TRAINER_THREADS = 2


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare, and how.

    Attributes:
        source_lang, target_lang: language codes, which name the files.
        train: the two files of the training text.
        valid: the two files of the validation text; None holds it out of the training text.
        tests: the two files of each test set; empty holds one out of the training text.
        hold_out: pairs in a held-out set; None means a twentieth of the text, at most 1,000.
        vocab_size: pieces of the joint SentencePiece model.
        max_length: most pieces on either side of a training pair.
        max_ratio: most pieces on one side for each piece on the other.
        seed: for the held-out sets.
    """

    source_lang: str
    target_lang: str
    train: Tuple[str, str]
    valid: Optional[Tuple[str, str]]
    tests: Tuple[Tuple[str, str], ...]
    hold_out: Optional[int]
    vocab_size: int
    max_length: int
    max_ratio: float
    seed: int


def prepare(options: PrepareOptions, out: Path) -> bool:
    """Write cleaned raw references, the SentencePiece model, pieces and a manifest to `out`.

    Files: `raw/SPLIT.LANG` (text as it is scored), `pieces/SPLIT.LANG`, `sentencepiece.model`
    and `manifest.json` (counts, options, hashes, versions), which is written last. Splits are
    train, valid, test, test1, …

    Returns:
        False where `out` already holds just this, and nothing was done.

    Raises:
        UsageError: for input that cannot be used.
    """
    for flag, language in zip(
        ("--source-lang", "--target-lang"), (options.source_lang, options.target_lang)
    ):
        if not re.fullmatch(r"[A-Za-z0-9_]+", language):
            raise UsageError(
                f"{flag} {language}: fairseq takes a language from the names of files, so give "
                "letters, digits and _ alone, such as zh_CN"
            )
    if options.source_lang == options.target_lang:
        raise UsageError(
            f"--source-lang and --target-lang are both {options.source_lang}; the languages must "
            "have different names"
        )
    inputs = {
        path: sha256(path)
        for pair in (options.train, options.valid, *options.tests)
        if pair is not None
        for path in map(_existing, pair)
    }
    wanted = {"options": json.loads(json.dumps(asdict(options))), "inputs": inputs}
    if _is_current(out, wanted):
        logger.info("%s is up to date", out)
        return False

    staged = out / "partial"
    folders = (out / "raw", out / "pieces", staged)
    for path in inputs:
        if any(folder.resolve() in Path(path).resolve().parents for folder in folders):
            raise UsageError(f"{path} lies in a folder that --out {out} replaces; choose another")
    splits, counts = _split(options)
    out.mkdir(parents=True, exist_ok=True)
    with only_run(out):
        shutil.rmtree(staged, ignore_errors=True)
        try:
            outputs = _write(options, splits, counts, staged)
            manifest = {
                **wanted,
                "pairs": counts,
                "outputs": {str(path.relative_to(staged)): sha256(path) for path in outputs},
                "versions": {
                    "python": platform.python_version(),
                    "sentencepiece": sentencepiece.__version__,
                },
            }
            with atomic_writer(staged / MANIFEST) as stream:
                json.dump(manifest, stream, indent=2, ensure_ascii=False)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)  # it may be what fills the disk
            raise
        # Only now does an earlier preparation go, and its manifest first: where there is one, the
        # folder is whole.
        (out / MANIFEST).unlink(missing_ok=True)
        for name in ("raw", "pieces", MODEL, MANIFEST):
            if (out / name).is_dir():
                shutil.rmtree(out / name)
            os.replace(staged / name, out / name)
        staged.rmdir()
    for name, numbers in counts.items():
        logger.info("%s: %s", name, _reasons(numbers))
    return True


def _write(
    options: PrepareOptions,
    splits: Dict[str, List[Pair]],
    counts: Dict[str, Dict[str, int]],
    out: Path,
) -> List[Path]:
    """Write text, model and pieces to `out`; what was written. Adds to the training counts."""
    languages = (options.source_lang, options.target_lang)
    for folder in ("raw", "pieces"):
        (out / folder).mkdir(parents=True)
    for name, pairs in splits.items():
        for side, language in enumerate(languages):
            write_lines(out / "raw" / f"{name}.{language}", [pair[side] for pair in pairs])
    model = out / MODEL
    logger.info("training SentencePiece on %d pairs", len(splits["train"]))
    train_sentencepiece(
        [out / "raw" / f"train.{language}" for language in languages], options.vocab_size, model
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    for name, pairs in splits.items():
        logger.info("encoding %s: %d pairs", name, len(pairs))
        encoded = encode_pairs(processor, pairs)
        if name == "train":
            encoded, dropped = filter_lengths(encoded, options.max_length, options.max_ratio)
            counts["train"].update(dropped)
            if not encoded:
                raise _nothing_left(counts["train"])
            counts["train"]["kept"] = len(encoded)
        for side, language in enumerate(languages):
            write_lines(out / "pieces" / f"{name}.{language}", [pair[side] for pair in encoded])
    return [model, *sorted(out.glob("*/*"))]


def _split(options: PrepareOptions) -> Tuple[Dict[str, List[Pair]], Dict[str, Dict[str, int]]]:
    """The pairs of every split as they are scored or trained on, and what became of them."""
    raw = read_parallel(*options.train)
    train, dropped = clean_pairs(raw)
    counts = {"train": {"read": len(raw), **dropped}}
    splits: Dict[str, List[Pair]] = {"train": []}
    given = {} if options.valid is None else {"valid": options.valid}
    for number, files in enumerate(options.tests):
        given[f"test{number or ''}"] = files
    held_out_names = [name for name in ("valid", "test") if name not in given]
    if held_out_names:
        size = options.hold_out or min(1000, len(train) // 20)
        distinct = len(set(train))
        if size < 1 or size * len(held_out_names) * 2 > distinct:
            raise UsageError(
                f"{options.train[0]}: {distinct} distinct pairs are too few to hold out "
                f"{size} for {' and '.join(held_out_names)}; lower --hold-out, or give --valid "
                "and --test"
            )
        train, sets, overlap = hold_out(train, [size] * len(held_out_names), options.seed)
        counts["train"].update(overlap)
        splits.update(zip(held_out_names, sets))
    for name, files in given.items():
        # Never dropped or changed: a score is over every line of a set, as it came.
        splits[name] = read_parallel(*files)
    for name in (*held_out_names, *given):
        counts[name] = {"kept": len(splits[name])}
        if name in given:
            cleaned = [(clean_line(source), clean_line(target)) for source, target in splits[name]]
            counts[name]["pairs of train that share a side"] = drop_overlap(train, cleaned)[1]
    if not train:
        raise _nothing_left(counts["train"])
    splits["train"] = train
    return dict(sorted(splits.items(), key=lambda item: item[0] != "train")), counts


def train_sentencepiece(files: Sequence[Path], vocab_size: int, model: Path) -> None:
    """Train one unigram model on all `files` and write it to `model`, atomically.

    Raises:
        UsageError: when the text cannot give that many pieces.
    """
    trained = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            input=[str(path) for path in files],
            model_writer=trained,
            vocab_size=vocab_size,
            character_coverage=1.0,
            num_threads=TRAINER_THREADS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise untrainable(vocab_size, error) from error
    with atomic_writer(model, "wb") as stream:
        stream.write(trained.getvalue())


def untrainable(vocab_size: int, error: Exception) -> UsageError:
    """What to say where SentencePiece's trainer refuses a text, from what it raised."""
    reason = str(error).splitlines()[0].split("] ")[-1].strip()
    return UsageError(
        f"--vocab-size {vocab_size}: SentencePiece cannot be trained on this text ({reason}); "
        "lower it, or give more text"
    )


def encode_pairs(processor: Any, pairs: Sequence[Pair]) -> List[Pair]:
    """Both sides as space-separated pieces; line n stays line n."""
    sides = [
        [" ".join(pieces) for pieces in processor.encode(list(map(clean_line, side)), out_type=str)]
        for side in zip(*pairs)
    ]
    return list(zip(*sides))


def _existing(path: str) -> str:
    if not Path(path).is_file():
        raise UsageError(
            f"{path}: no such file; --train, --valid and --test name PREFIX.LANGUAGE by its PREFIX"
        )
    return path


def _is_current(out: Path, wanted: Dict[str, Any]) -> bool:
    """Whether `out` holds a whole result of the same options and input, unchanged since."""
    try:
        manifest = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        same = all(manifest[key] == value for key, value in wanted.items())
        return same and all(
            sha256(out / name) == digest for name, digest in manifest["outputs"].items()
        )
    except (OSError, ValueError, KeyError):
        return False


def _nothing_left(counts: Dict[str, int]) -> UsageError:
    return UsageError(
        f"no training pair is left after cleaning: {_reasons(counts)}; give other text, or raise "
        "--max-length and --max-ratio"
    )


def _reasons(counts: Dict[str, int]) -> str:
    return ", ".join(f"{number} {reason}" for reason, number in counts.items())
