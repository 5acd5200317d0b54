"""The paper's BLEU and its relatives: tokenised, and each labelled as what it is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Callable, List, Sequence, Tuple

from ..errors import UsageError
from .moses import MosesText
from .multi_bleu import MultiBleu, multi_bleu, split_compounds

# The only pair whose compounds are split in the literature. Not German-English, whose target
# is English; and the paper's English-French is not split either.
SPLIT_PAIR = "en-de"
_PAPERS_PAIRS = ("en-de", "en-fr")


@dataclass(frozen=True)
class TokenisedFigure:
    """One BLEU of tokenised text.

    Attributes:
        label: what it is, in a few words.
        note: where its tokens come from, and what to keep in mind.
        compound_split: whether :func:`split_compounds` went before.
        result: the numbers.
    """

    label: str
    note: str
    compound_split: bool
    result: MultiBleu


def parse_language_pair(pair: str) -> Tuple[str, str]:
    """Source and target language of, say, `en-de`.

    Raises:
        UsageError: when it is not two different codes.
    """
    match = re.fullmatch(r"([a-z]{2,3})-([a-z]{2,3})", pair)
    if not match or match[1] == match[2]:
        raise UsageError(
            f"--language-pair {pair}: give the codes of two languages, such as en-de or en-fr"
        )
    return match[1], match[2]


def figures_of_tokenised(
    hypotheses: Sequence[str], references: Sequence[str], pair: str
) -> List[TokenisedFigure]:
    """Of text that Moses' tokenizer `-a` tokenised before training: the authors' script.

    Unicode punctuation is replaced on both sides, then, for `en-de`, compounds are split. `-a`
    has made hyphens ` @-@ ` by then, which the split matches again: three tokens where
    one was, and most of them match. So `en-de` also gets the figure without it.

    Args:
        hypotheses: tokenised, subwords joined.
        references: tokenised by `tokenizer.perl -a`.
        pair: such as `en-de`.
    """
    replace = MosesText(parse_language_pair(pair)[1]).replace_unicode_punctuation
    sides = [[replace(line) for line in side] for side in (hypotheses, references)]
    if pair == SPLIT_PAIR:
        note = "the paper's figure: Moses tokenizer -a, its hyphens split again, which inflates it"
        return [_figure(sides, note, True), _figure(sides, "Moses tokenizer -a", False)]
    paper = "the paper's figure: " if pair in _PAPERS_PAIRS else ""
    return [_figure(sides, f"{paper}Moses tokenizer -a", False)]


def figures_of_detokenised(
    hypotheses: Sequence[str], references: Sequence[str], pair: str
) -> List[TokenisedFigure]:
    """Of text that was never tokenised, such as SentencePiece's: the paper's measure on it.

    Both sides are tokenised by Moses' tokenizer and their Unicode punctuation is replaced.
    Hyphens are parted once: for `en-de` by the split of compounds, for other pairs by `-a`, as
    in the paper's English-French text.

    Args:
        hypotheses: detokenised.
        references: raw.
        pair: such as `en-de`.
    """
    moses = MosesText(parse_language_pair(pair)[1])
    split = pair == SPLIT_PAIR

    def tokens(line: str) -> str:
        return moses.replace_unicode_punctuation(moses.tokenize(line, aggressive=not split))

    sides = [[tokens(line) for line in side] for side in (hypotheses, references)]
    note = f"detokenised text through Moses tokenizer{'' if split else ' -a'}"
    return [_figure(sides, note, split)]


def _figure(sides: List[List[str]], note: str, split: bool) -> TokenisedFigure:
    prepare: Callable[[str], str] = split_compounds if split else str
    hypotheses, references = ([prepare(line) for line in side] for side in sides)
    return TokenisedFigure(
        label=f"tokenised BLEU{', compound-split' if split else ''}",
        note=note,
        compound_split=split,
        result=multi_bleu(hypotheses, references),
    )
