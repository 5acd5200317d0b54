"""Cleaning of parallel text: what a pair must be to be trained on."""

from __future__ import annotations

import random
import unicodedata
from typing import Dict, List, Sequence, Tuple

Pair = Tuple[str, str]


def clean_line(line: str) -> str:
    """Turn every separator and control character into a space, and runs of spaces into one."""
    spaced = "".join(
        " " if unicodedata.category(character) in ("Cc", "Zs", "Zl", "Zp") else character
        for character in line.replace("\ufeff", "")
    )
    return " ".join(spaced.split())


def clean_pairs(pairs: Sequence[Pair]) -> Tuple[List[Pair], Dict[str, int]]:
    """Clean both sides of each pair and drop pairs with an empty side.

    Returns:
        the pairs that are left, in order, and how many were dropped for each reason.
    """
    cleaned = [(clean_line(source), clean_line(target)) for source, target in pairs]
    kept = [pair for pair in cleaned if pair[0] and pair[1]]
    return kept, {"empty side": len(cleaned) - len(kept)}


def filter_lengths(
    pairs: Sequence[Pair], max_length: int, max_ratio: float
) -> Tuple[List[Pair], Dict[str, int]]:
    """Drop pairs of piece sequences that are too long or too unequal.

    Args:
        pairs: space-separated pieces.
        max_length: most pieces on either side.
        max_ratio: most pieces on one side for each piece on the other.
    """
    kept = []
    dropped = {"too long": 0, "length ratio": 0}
    for source, target in pairs:
        lengths = source.count(" ") + 1, target.count(" ") + 1
        if max(lengths) > max_length:
            dropped["too long"] += 1
        elif max(lengths) > max_ratio * min(lengths):
            dropped["length ratio"] += 1
        else:
            kept.append((source, target))
    return kept, dropped


def hold_out(
    pairs: Sequence[Pair], sizes: Sequence[int], seed: int
) -> Tuple[List[Pair], List[List[Pair]], Dict[str, int]]:
    """Take held-out sets from `pairs`, and out of the rest whatever shares a side with them.

    Args:
        pairs: cleaned pairs.
        sizes: how many pairs each held-out set gets, drawn from distinct pairs.
        seed: for the draw.

    Returns:
        the remaining pairs in order, the held-out sets, and how many pairs were dropped from
        the rest because they repeat a held-out source or target.
    """
    distinct = list(dict.fromkeys(pairs))
    chosen = random.Random(seed).sample(distinct, sum(sizes))
    sets, start = [], 0
    for size in sizes:
        sets.append(chosen[start : start + size])
        start += size
    taken = set(chosen)
    remaining, dropped = drop_overlap([pair for pair in pairs if pair not in taken], chosen)
    return remaining, sets, {"shared with held-out text": dropped}


def drop_overlap(pairs: Sequence[Pair], held_out: Sequence[Pair]) -> Tuple[List[Pair], int]:
    """Drop pairs whose source or target also stands in `held_out`; returns how many."""
    sources = {source for source, _ in held_out}
    targets = {target for _, target in held_out}
    kept = [pair for pair in pairs if pair[0] not in sources and pair[1] not in targets]
    return kept, len(pairs) - len(kept)
