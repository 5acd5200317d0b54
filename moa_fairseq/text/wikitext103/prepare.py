"""WikiText-103, or any text, to subwords for masked language models: the chain of steps."""

from __future__ import annotations

import json
import logging
import platform
import shutil
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import sentencepiece
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import get_encoder
from tqdm import tqdm

from ...errors import UsageError
from ...versions import installed_versions
from ..files import atomic_writer, only_run, sha256
from ..wmt14 import shards
from ..wmt14.notes import is_current, key_of, once, timed, write_note
from ..wmt14.steps import SENTENCEPIECE_LINES, train_pieces
from .sources import CORPUS, PUBLISHED_LINES, SPLITS, find_sources, unpack_texts

logger = logging.getLogger(__name__)

RECIPES = ("gpt2", "sentencepiece")
MANIFEST = "manifest.json"
MODEL = "sentencepiece.model"
# Fixed, because the trainer's sums depend on how the text is split among threads.
TRAINER_THREADS = 2
# fairseq's dictionary for GPT-2's subwords is filled up to a multiple of this, as its files are.
PADDING_FACTOR = 8


@dataclass(frozen=True)
class Options:
    """What to prepare, and how.

    Attributes:
        recipe: `gpt2`, the subwords of RoBERTa, or `sentencepiece`, pieces learned from the text.
        vocab_size: pieces of SentencePiece.
        character_coverage: share of the text's characters that have pieces, 0 to 1.
        from_dir: the user's folder of archives or texts; None downloads.
        base_url: where to download from instead of the addresses on record.
        checksums: file with the archives' digests instead of those on record.
        workers: processes.
        shard_lines: lines that one worker takes at a time.
        keep_work: leave the intermediate files.
    """

    recipe: str
    vocab_size: int
    character_coverage: float
    from_dir: Optional[Path]
    base_url: Optional[str]
    checksums: Optional[Path]
    workers: int
    shard_lines: int
    keep_work: bool

    def subwords(self) -> Dict[str, Any]:
        """What the subwords depend on, beside the text."""
        if self.recipe == "gpt2":
            return {"recipe": self.recipe}
        return {
            "recipe": self.recipe,
            "vocab_size": self.vocab_size,
            "character_coverage": self.character_coverage,
        }


@dataclass(frozen=True)
class TextShard:
    """A run of lines of one split.

    Attributes:
        name: names its files.
        split: one of `SPLITS`.
        first: number of its first line, from 1.
        lines: how many lines it has.
        file, offset: its text, and the byte at which the run starts.
    """

    name: str
    split: str
    first: int
    lines: int
    file: str
    offset: int

    def read(self) -> Iterator[str]:
        """Its lines, without line ends and blanks around them.

        Raises:
            UsageError: for a line that is not UTF-8.
        """
        with open(self.file, "rb") as stream:
            stream.seek(self.offset)
            for number, line in enumerate(islice(stream, self.lines), start=self.first):
                try:
                    yield line.decode("utf-8").strip()
                except UnicodeDecodeError as error:
                    raise UsageError(
                        f"{self.file}: line {number} is not UTF-8 (byte "
                        f"0x{line[error.start]:02x}); convert the file, for instance with: iconv "
                        "-f LATIN1 -t UTF-8"
                    ) from error


def prepare_wikitext103(options: Options, out: Path) -> bool:
    """Write subwords, what they were made with, and a manifest to `out`.

    Files: `pieces/SPLIT`, where every line of the text is one, blank ones too; and
    `sentencepiece.model`, or for the recipe gpt2 `encoder.json`, `vocab.bpe` and `dict.txt`, the
    dictionary of all its subwords. `manifest.json` comes last. Intermediate files are in `work/`,
    downloads in `archives/`.

    Returns:
        False where `out` already holds just this, and nothing was done.

    Raises:
        UsageError: for input that cannot be used.
    """
    out.mkdir(parents=True, exist_ok=True)
    with only_run(out):
        files, identity = find_sources(
            out, options.recipe == "gpt2", options.from_dir, options.base_url, options.checksums
        )
        key = key_of([identity, options.subwords()])
        if is_current(out / ".prepared.json", key):
            logger.info("%s is up to date", out)
            return False
        for left_over in (*out.glob(".*.partial.*"), *(out / "work").rglob(".*.partial.*")):
            left_over.unlink()
        counts, result = _run_steps(options, files, identity, key, out)
        # The manifest goes first and comes last: where it is, the folder is whole.
        (out / MANIFEST).unlink(missing_ok=True)
        for name in ("pieces", MODEL, "encoder.json", "vocab.bpe", "dict.txt"):
            if (out / name).is_dir():
                shutil.rmtree(out / name)
            else:
                (out / name).unlink(missing_ok=True)
        outputs: List[Path] = []
        for path in sorted(result.iterdir()):
            target = path.replace(out / path.name)
            outputs += [target] if target.is_file() else sorted(target.iterdir())
        manifest = {
            "task": "masked_lm",
            "options": options.subwords(),
            "inputs": identity,
            "splits": counts,
            "lines are WikiText-103's": {
                split: counts[split]["lines"] == PUBLISHED_LINES[split] for split in SPLITS
            },
            "outputs": {str(path.relative_to(out)): sha256(path) for path in outputs},
            "versions": {
                "python": platform.python_version(),
                **installed_versions(("fairseq", "ve-fairseq", "fairseq-fixed", "sentencepiece")),
            },
        }
        with atomic_writer(out / MANIFEST) as stream:
            json.dump(manifest, stream, indent=2, ensure_ascii=False)
        write_note(out / ".prepared.json", key, [out / MANIFEST, *outputs])
        for name, numbers in counts.items():
            logger.info("%s: %s", name, ", ".join(f"{n:,} {what}" for what, n in numbers.items()))
        if not options.keep_work:
            shutil.rmtree(out / "work", ignore_errors=True)
    return True


def _run_steps(
    options: Options, files: Mapping[str, Path], identity: Any, key: str, out: Path
) -> Tuple[Dict[str, Dict[str, int]], Path]:
    """Everything from the archive to joined subwords; counts, and the folder of what was made."""
    work = out / "work"
    texts = (
        unpack_texts(files[CORPUS.name], work / f"unpacked-{key_of(identity)[:16]}")
        if CORPUS.name in files
        else {split: files[split] for split in SPLITS}
    )
    cut = [
        shard for split in SPLITS for shard in cut_text(split, texts[split], options.shard_lines)
    ]
    if options.recipe == "gpt2":
        models = [files["encoder.json"], files["vocab.bpe"]]
    else:
        work.mkdir(exist_ok=True)
        models = [work / MODEL]
        arguments = (cut, options, models[0])
        once(work / "subwords.json", key, models, _learn_pieces, *arguments)
    pieces = work / "pieces"
    lines = sum(shard.lines for shard in cut)
    with shards.workers(options.workers) as pool, timed("encoding", lines):
        encoded = shards.run_on_shards(
            pool, cut, pieces, key, encode_shard, [models, pieces], "encoding", unit=" lines"
        )
    counts = {split: Counter[str]() for split in SPLITS}
    for shard, numbers in zip(cut, encoded):
        counts[shard.split].update(numbers)
    if counts["train"]["marked unknown"]:
        logger.warning(
            "the training text has %s words <unk>; the raw corpus has none, and its subwords need "
            "none",
            f"{counts['train']['marked unknown']:,}",
        )
    result = work / "result"
    shutil.rmtree(result, ignore_errors=True)
    (result / "pieces").mkdir(parents=True)
    for split in SPLITS:
        with atomic_writer(result / "pieces" / split, "wb") as output:
            for shard in cut:
                if shard.split == split:
                    with open(pieces / shard.name, "rb") as stream:
                        shutil.copyfileobj(stream, output, 1 << 20)
    for model in models:
        shutil.copyfile(model, result / model.name)
    if options.recipe == "gpt2":
        train = [pieces / shard.name for shard in cut if shard.split == "train"]
        write_gpt2_dictionary(files["encoder.json"], train, result / "dict.txt")
    return {split: dict(numbers) for split, numbers in counts.items()}, result


def cut_text(split: str, path: Path, lines_in_shard: int) -> List[TextShard]:
    """The shards of a split's text in order.

    Raises:
        UsageError: for an empty text.
    """
    offsets, lines = shards.line_offsets(path, lines_in_shard)
    if not lines:
        raise UsageError(f"{path} is empty; it must hold one sentence or paragraph a line")
    return [
        TextShard(
            name=f"{split}.{number:05}",
            split=split,
            first=number * lines_in_shard + 1,
            lines=min(lines_in_shard, lines - number * lines_in_shard),
            file=str(path),
            offset=offset,
        )
        for number, offset in enumerate(offsets)
    ]


def encode_shard(shard: TextShard, models: Sequence[Path], out: Path) -> Dict[str, int]:
    """Cut a shard's lines into subwords, in `out`; counts.

    Args:
        models: see :func:`encoder`.
    """
    encode = encoder(tuple(map(str, models)))
    counts: Counter[str] = Counter()
    with atomic_writer(out / shard.name) as stream:
        for line in shard.read():
            subwords = encode(line)
            stream.write(f"{subwords}\n")
            words = line.split()
            counts["lines"] += 1
            counts["blank"] += not words
            counts["words"] += len(words)
            counts["marked unknown"] += words.count("<unk>")
            counts["subwords"] += subwords.count(" ") + bool(subwords)
    return dict(counts)


@lru_cache(maxsize=1)
def encoder(models: Tuple[str, ...]) -> Callable[[str], str]:
    """A line to space-separated subwords, made once in each process.

    Args:
        models: GPT-2's `encoder.json` and `vocab.bpe`, or one model of SentencePiece.

    Raises:
        UsageError: for files that are not these.
    """
    if len(models) == 1:
        processor = sentencepiece.SentencePieceProcessor(model_file=models[0])
        return lambda line: " ".join(processor.encode(line, out_type=str))
    try:
        bpe = get_encoder(*models)
    except (ValueError, AttributeError) as error:
        raise UsageError(
            f"{models[0]} and {models[1]} are not GPT-2's subwords ({error}); give its files"
        ) from error
    return lambda line: " ".join(map(str, bpe.encode(line)))


def _learn_pieces(cut: Sequence[TextShard], options: Options, model: Path) -> None:
    train = [shard for shard in cut if shard.split == "train"]
    step = -(-sum(shard.lines for shard in train) // SENTENCEPIECE_LINES)
    logger.info("training SentencePiece on %s", f"1 line in {step}" if step > 1 else "all lines")
    lines = (line for shard in train for line in shard.read())
    train_pieces(
        islice(lines, 0, None, step),
        options.vocab_size,
        model,
        options.character_coverage,
        TRAINER_THREADS,
    )


def write_gpt2_dictionary(encoder_json: Path, train: Sequence[Path], target: Path) -> None:
    """fairseq's dictionary of all of GPT-2's subwords, the most frequent in the text first.

    With fairseq's own types and `<mask>` it has 50,265 of them, as RoBERTa's: subwords that the
    training text lacks are in it too.
    """
    dictionary = Dictionary()
    counts: Counter[str] = Counter()
    for path in tqdm(train, desc="counting subwords", unit=" shards", leave=False):
        with open(path, encoding="utf-8", newline="\n") as stream:
            for line in stream:
                counts.update(line.split())
    for number in json.loads(encoder_json.read_text(encoding="utf-8")).values():
        dictionary.add_symbol(str(number), n=counts[str(number)])
    dictionary.finalize(threshold=-1, nwords=-1, padding_factor=PADDING_FACTOR)
    with atomic_writer(target) as stream:
        dictionary.save(stream)
