"""WMT14 from the shared tasks' archives to subwords: the chain of steps."""

from __future__ import annotations

import json
import logging
import platform
import shutil
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Dict, List, Mapping, Optional, Tuple

from ...errors import UsageError
from ...recipes.wmt14 import EVALUATION
from ..files import atomic_writer, only_run, sha256
from . import archives, fetching, shards, steps
from .archives import PAIRS, Archive, Pair
from .estimates import BYTES_PER_PAIR, check_disk
from .notes import is_current, key_of, once, timed, write_note
from .shards import Lengths

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FOLDERS = ("raw", "tokenised", "pieces")
# Subwords in the joint vocabulary: merges of subword-nmt, pieces of SentencePiece.
VOCAB_SIZES: Mapping[Tuple[str, str], int] = {
    ("en-de", "clinic"): 32764,
    ("en-fr", "clinic"): 40000,
    ("en-de", "sentencepiece"): 32000,
    ("en-fr", "sentencepiece"): 40000,
}


@dataclass(frozen=True)
class Filters:
    """Length filters of a recipe; None keeps all.

    Attributes:
        words: on training text before subwords.
        train, valid: on subwords.
    """

    words: Optional[Lengths]
    train: Optional[Lengths]
    valid: Optional[Lengths]


FILTERS: Mapping[Tuple[str, str], Filters] = {
    ("en-de", "clinic"): Filters(Lengths(80, 9.0), None, None),
    ("en-fr", "clinic"): Filters(None, Lengths(250, 1.5), Lengths(250, 1.5)),
    ("en-de", "sentencepiece"): Filters(None, Lengths(250, 9.0), None),
    ("en-fr", "sentencepiece"): Filters(None, Lengths(250, 1.5), None),
}


@dataclass(frozen=True)
class Options:
    """What to prepare, and how.

    Attributes:
        pair: `en-de` or `en-fr`.
        recipe: `sentencepiece`, or `clinic` for the authors' data.
        vocab_size: merges or pieces.
        from_dir: folder of archives or unpacked texts; None downloads.
        base_url: where to download from instead of the shared tasks' addresses.
        checksums: file with the archives' digests instead of those on record.
        workers: processes.
        shard_lines: lines that one worker takes at a time.
        keep_work: leave the intermediate files.
    """

    pair: str
    recipe: str
    vocab_size: int
    from_dir: Optional[Path]
    base_url: Optional[str]
    checksums: Optional[Path]
    workers: int
    shard_lines: int
    keep_work: bool


@dataclass(frozen=True)
class Sources:
    """Where the texts are.

    Attributes:
        files: a path for each archive, and for each member that lies unpacked.
        identity: what identifies each of them, whatever its path.
    """

    files: Mapping[str, Path]
    identity: Mapping[str, Tuple[str, str]]


def prepare_wmt14(options: Options, out: Path) -> bool:
    """Write raw text, subwords, the subword model and a manifest to `out`.

    Files: `raw/SPLIT.LANG` (valid and test, text as it is scored), `tokenised/SPLIT.LANG` (clinic
    recipe), `pieces/SPLIT.LANG`, `sentencepiece.model` or `bpe.codes`, and `manifest.json`, which
    comes last. Intermediate files are in `work/`, downloads in `archives/`.

    Returns:
        False where `out` already holds just this, and nothing was done.

    Raises:
        UsageError: for input that cannot be used.
    """
    out.mkdir(parents=True, exist_ok=True)
    with only_run(out):
        sources = find_sources(options, out)
        key = key_of([sources.identity, options.pair, options.recipe, options.vocab_size])
        if is_current(out / ".prepared.json", key):
            logger.info("%s is up to date", out)
            return False
        for left_over in (*out.glob(".*.partial.*"), *(out / "work").rglob(".*.partial.*")):
            left_over.unlink()
        counts, result = _run_steps(options, sources, key, out)
        # The manifest goes first and comes last: where it is, the folder is whole. What was there
        # stays until all of the new is: what cannot be prepared replaces nothing.
        (out / MANIFEST).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(out / name, ignore_errors=True)
        outputs: List[Path] = []
        for path in sorted(result.iterdir()):
            target = path.replace(out / path.name)
            outputs += [target] if target.is_file() else target.glob("*.*")
        with atomic_writer(out / MANIFEST) as stream:
            json.dump(_manifest(options, sources, counts, outputs, out), stream, indent=2)
        write_note(out / ".prepared.json", key, [out / MANIFEST, *outputs])
        for name, numbers in counts.items():
            logger.info("%s: %s", name, ", ".join(f"{n:,} {what}" for what, n in numbers.items()))
        if not options.keep_work:
            shutil.rmtree(out / "work", ignore_errors=True)
    return True


def find_sources(options: Options, out: Path) -> Sources:
    """Where each archive, or each unpacked text, is; downloads what is not there.

    Raises:
        UsageError: for what is missing or is not what it should be, and for a full disk.
    """
    pair = PAIRS[options.pair]
    digests = fetching.read_checksums(options.checksums) if options.checksums else None
    if options.from_dir is None and digests is None:
        left = [a for a in pair.archives() if not (out / "archives" / a.name).exists()]
        check_disk(out, sum(a.size or 0 for a in left), pair.pairs * BYTES_PER_PAIR)
    files: Dict[str, Path] = {}
    identity: Dict[str, Tuple[str, str]] = {}
    for known in pair.archives():
        archive = known
        if digests is not None:
            if archive.name not in digests:
                raise UsageError(
                    f"--checksums {options.checksums} does not name {archive.name}; add its line"
                )
            archive = replace(archive, size=None, digest=digests[archive.name])
        unpacked = _unpacked(options.from_dir, pair, archive)
        if unpacked is not None:
            files.update(unpacked)
            identity.update({name: ("sha256", sha256(path)) for name, path in unpacked.items()})
            continue
        if options.from_dir is None:
            path = fetching.download(archive, options.base_url, out / "archives")
        else:
            path = options.from_dir / archive.name
        memory = out / "archives" / "verified.json"
        fetching.verify_once(path, archive, memory, downloaded=options.from_dir is None)
        files[archive.name] = path
        identity[archive.name] = ("archive", archive.digest)
    return Sources(files, identity)


def _unpacked(folder: Optional[Path], pair: Pair, archive: Archive) -> Optional[Dict[str, Path]]:
    """The texts of an archive that lie unpacked in `folder`; None where the archive is there."""
    if folder is None or (folder / archive.name).is_file():
        return None
    found = {}
    for file in pair.files():
        if file.archive != archive.name:
            continue
        for member in archives.members(pair, file):
            path = fetching.find_unpacked(folder, member)
            if path is None:
                raise UsageError(
                    f"--from-dir {folder} has neither {archive.name} nor {member}; put one there, "
                    "or leave --from-dir out to download"
                )
            found[member] = path
    return found


def _run_steps(
    options: Options, sources: Sources, key: str, out: Path
) -> Tuple[Dict[str, Dict[str, int]], Path]:
    """Everything from archives to joined subwords; counts, and the folder of what was made."""
    pair, filters = PAIRS[options.pair], FILTERS[options.pair, options.recipe]
    work = out / "work"
    text, pieces = work / "text", work / "pieces"
    model = work / ("bpe.codes" if options.recipe == "clinic" else "sentencepiece.model")
    text_key = key_of([sources.identity, options.pair, options.recipe])
    with shards.workers(options.workers) as pool:
        files = _unpack(pool, pair, sources, work / f"unpacked-{key_of(sources.identity)[:16]}")
        sides = [path for file in pair.corpora for path in files[file.name]]
        check_disk(out, 0, sum(path.stat().st_size for path in sides))
        cut = shards.cut(
            [(file.name, files[file.name]) for file in pair.corpora],
            options.shard_lines,
            languages=pair.languages,
            recipe=options.recipe,
            valid_every=pair.valid_every,
            lengths=filters.words,
        )
        lines = sum(shard.lines for shard in cut)
        with timed("cleaning", lines):
            cleaned = shards.run_on_shards(
                pool, cut, text, text_key, shards.clean_shard, [text], "cleaning"
            )
        with timed("learning subwords", lines):
            arguments = (pool, options.recipe, options.vocab_size, cut, text, model)
            once(work / "subwords.json", key, [model], steps.learn_subwords, *arguments)
        with timed("encoding", lines):
            limits = [text, pieces, model, filters.train, filters.valid]
            encoded = shards.run_on_shards(
                pool, cut, pieces, key, shards.encode_shard, limits, "encoding"
            )
    counts = steps.count_pairs(pair, cut, cleaned, encoded)
    if not counts["train"]["kept"]:
        raise UsageError(f"no training pair is left after cleaning: {counts}; give other text")
    result = work / "result"
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    given = steps.write_given_sets(pair, options.recipe, files, model, result)
    counts.update({split: {"kept": number} for split, number in given.items()})
    steps.join_shards(pair, options.recipe, cut, pieces, result)
    shutil.copyfile(model, result / model.name)
    return counts, result


def _unpack(
    pool: Executor, pair: Pair, sources: Sources, folder: Path
) -> Dict[str, Tuple[Path, Path]]:
    """The two sides of each text by its name; archives are unpacked side by side."""
    places: Dict[str, Path] = {}
    wanted: Dict[str, Dict[str, Path]] = {}
    futures = []
    for file in pair.files():
        for member in archives.members(pair, file):
            places[member] = folder / (member[:-3] if member.endswith(".gz") else member)
            source = sources.files.get(member)
            if source is not None and source.suffix != ".gz":
                places[member] = source
            elif places[member].exists():
                continue
            elif source is not None:
                futures.append(pool.submit(fetching.decompress, source, places[member]))
            else:
                wanted.setdefault(file.archive, {})[member] = places[member]
    for name, targets in wanted.items():
        logger.info("unpacking %s", name)
        futures.append(pool.submit(fetching.unpack, sources.files[name], targets))
    for future in futures:
        future.result()
    unpacked: Dict[str, Tuple[Path, Path]] = {}
    for file in pair.files():
        source_side, target_side = archives.members(pair, file)
        unpacked[file.name] = places[source_side], places[target_side]
    return unpacked


def _manifest(
    options: Options,
    sources: Sources,
    counts: Dict[str, Dict[str, int]],
    outputs: List[Path],
    out: Path,
) -> Dict[str, object]:
    pair, evaluation = PAIRS[options.pair], EVALUATION[options.pair]
    logger.info("hashing what was made")
    return {
        "options": {
            "source_lang": pair.source_lang,
            "target_lang": pair.target_lang,
            "pair": options.pair,
            "recipe": options.recipe,
            "vocab_size": options.vocab_size,
        },
        "evaluation": {
            "average": evaluation.average_epochs,
            "beam": evaluation.beam,
            "lenpen": evaluation.length_penalty,
        },
        "filters": asdict(FILTERS[options.pair, options.recipe]),
        "inputs": sources.identity,
        "pairs": counts,
        "outputs": {str(path.relative_to(out)): sha256(path) for path in sorted(outputs)},
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("sacremoses", "sentencepiece", "subword-nmt")},
        },
    }
