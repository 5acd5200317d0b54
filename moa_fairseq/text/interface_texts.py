"""Real parallel text from the Python package index: the interface texts of Home Assistant.

The wheel of `homeassistant` (Apache-2.0) carries one JSON file for each component and language.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from ..errors import UsageError
from .cleaning import Pair, clean_line, drop_overlap
from .files import write_lines

# Shares of the components, in percent, that are held out whole.
VALID_PERCENT = 4
TEST_PERCENT = 7


def extract(wheel: Path, source_lang: str, target_lang: str, out: Path) -> Dict[str, int]:
    """Write `train`, `valid` and `test` pairs of interface texts to `out`.

    Texts are paired by component and key; each distinct source text gets its most frequent
    translation. Validation and test are whole components, chosen by a hash of their names, less
    the texts that other components share with them. Training pairs that share a side with a
    held-out pair are dropped: no test text is in train.

    Returns:
        pairs in each split.

    Raises:
        UsageError: when `wheel` does not hold such texts.
    """
    splits = split_by_component(component_texts(wheel, source_lang, target_lang))
    if not splits["train"]:
        raise UsageError(
            f"{wheel} holds no texts for {source_lang}-{target_lang}; give a wheel of homeassistant"
        )
    out.mkdir(parents=True, exist_ok=True)
    for name, pairs in splits.items():
        for side, language in enumerate((source_lang, target_lang)):
            write_lines(out / f"{name}.{language}", [pair[side] for pair in pairs])
    return {name: len(pairs) for name, pairs in splits.items()}


def component_texts(
    wheel: Path, source_lang: str, target_lang: str
) -> Dict[str, List[Tuple[str, str]]]:
    """Pairs of texts of each component, in the order of the files."""
    try:
        archive = zipfile.ZipFile(wheel)
    except (OSError, zipfile.BadZipFile) as error:
        raise UsageError(f"{wheel} is not a readable wheel: {error}; download it again") from error
    texts: Dict[str, List[Tuple[str, str]]] = {}
    with archive:
        names = set(archive.namelist())
        for name in sorted(names):
            folder, _, file = name.rpartition("/")
            target_name = f"{folder}/{target_lang}.json"
            if file != f"{source_lang}.json" or target_name not in names:
                continue
            if not folder.endswith("/translations"):
                continue
            source = dict(_leaves(json.loads(archive.read(name))))
            target = dict(_leaves(json.loads(archive.read(target_name))))
            pairs = [
                (clean_line(source[key]), clean_line(target[key]))
                for key in source.keys() & target.keys()
            ]
            component = folder.split("/")[-2]
            texts[component] = sorted(pair for pair in pairs if all(pair))
    return texts


def split_by_component(texts: Dict[str, List[Tuple[str, str]]]) -> Dict[str, List[Pair]]:
    """Distinct source texts with their most frequent translation, split by component."""
    translations: Dict[str, Counter] = defaultdict(Counter)
    first_split: Dict[str, str] = {}
    order = ("train", "valid", "test")
    for component in texts:
        split = component_split(component)
        for source, target in texts[component]:
            translations[source][target] += 1
            # A text of several components belongs to the earliest of train, valid, test.
            known = first_split.get(source, split)
            first_split[source] = min(known, split, key=order.index)
    splits: Dict[str, List[Pair]] = {name: [] for name in order}
    for source, split in first_split.items():
        target, _ = min(translations[source].items(), key=lambda item: (-item[1], item[0]))
        splits[split].append((source, target))
    held_out = splits["valid"] + splits["test"]
    splits["train"], _ = drop_overlap(splits["train"], held_out)
    return splits


def component_split(component: str) -> str:
    """Which split a component belongs to: the same on every machine."""
    percent = int(hashlib.sha256(component.encode()).hexdigest(), 16) % 100
    if percent < TEST_PERCENT:
        return "test"
    return "valid" if percent < TEST_PERCENT + VALID_PERCENT else "train"


def _leaves(tree: Any, path: str = "") -> Iterator[Tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}/{key}")
        elif isinstance(value, str):
            yield f"{path}/{key}", value
