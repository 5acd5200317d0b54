"""Which pieces make a word."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional

import torch
from torch import Tensor

SENTENCEPIECE, SUBWORD_NMT, NONE = "sentencepiece", "subword_nmt", "none"
POST_PROCESSES = (SENTENCEPIECE, SUBWORD_NMT, NONE)
SPACE = "\u2581"  # ▁, which SentencePiece puts before a word
CONTINUES = "@@"  # which subword-nmt puts after a piece that is not the word's last

#: The row of a word that is not counted.
NO_ROW = -1


def find_post_process(dictionary: Any) -> str:
    """How the pieces of a fairseq dictionary make words: one of `POST_PROCESSES`."""
    symbols = [dictionary[index] for index in range(dictionary.nspecial, len(dictionary))]
    if any(symbol.startswith(SPACE) for symbol in symbols):
        return SENTENCEPIECE
    if any(symbol.endswith(CONTINUES) for symbol in symbols):
        return SUBWORD_NMT
    return NONE


@dataclass(frozen=True)
class Spelling:
    """How the pieces of a dictionary make words.

    Attributes:
        symbols: `[V]` texts of pieces.
        joins_previous, joins_next: `[V]` bool, whether a piece is of one word with its neighbour.
        special: `[V]` bool: fairseq's symbols and `<mask>`, each a word of its own.
        opaque: `[V]` bool: symbols that stand for text, so that what of a word is beside them is
            not the whole of it.
    """

    symbols: List[str]
    joins_previous: Tensor
    joins_next: Tensor
    special: Tensor
    opaque: Tensor

    def text(self, pieces: List[int]) -> str:
        """The word of these pieces."""
        if len(pieces) == 1 and bool(self.special[pieces[0]]):
            return self.symbols[pieces[0]]
        joined = "".join(
            self.symbols[piece][: -len(CONTINUES)]
            if self.joins_next[piece]
            else self.symbols[piece]
            for piece in pieces
        )
        return joined.replace(SPACE, "") or SPACE


def spelling(dictionary: Any, post_process: Optional[str]) -> Spelling:
    """The :class:`Spelling` of a fairseq dictionary; `post_process` as in `ReportOptions`."""
    way = post_process or find_post_process(dictionary)
    symbols = [dictionary[index] for index in range(len(dictionary))]
    special = torch.tensor(
        [index < dictionary.nspecial or text == "<mask>" for index, text in enumerate(symbols)]
    )
    opaque = torch.zeros_like(special)
    nothing = torch.zeros_like(special)
    previous = following = nothing
    if way == SENTENCEPIECE:
        previous = torch.tensor([not text.startswith(SPACE) for text in symbols]) & ~special
    elif way == SUBWORD_NMT:
        following = torch.tensor([text.endswith(CONTINUES) for text in symbols]) & ~special
    if way != NONE:
        opaque = torch.tensor(
            [index == dictionary.unk() or text == "<mask>" for index, text in enumerate(symbols)]
        )
    return Spelling(symbols, previous, following, special, opaque)


class WordTable:
    """Rows for words, in the order in which they come, up to a number of them.

    Attributes:
        limit: rows there are at most.
        words: text of each row.
        left_out: occurrences of words that found no row.
        cut: occurrences beside an unknown piece or a mask, which are not whole.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.words: List[str] = []
        self.left_out = 0
        self.cut = 0
        self._rows: Dict[tuple, int] = {}
        self._texts: Dict[str, int] = {}

    def row(self, pieces: tuple, spell: Spelling) -> int:
        """The row of a word, a new one where there is room; `NO_ROW` where there is none."""
        found = self._rows.get(pieces)
        if found is not None:
            return found
        text = spell.text(list(pieces))
        row = self._texts.get(text)
        if row is None:
            if len(self.words) >= self.limit:
                self.left_out += 1
                return NO_ROW
            row = self._texts[text] = len(self.words)
            self.words.append(text)
        if len(self._rows) < 4 * self.limit:  # a word may be spelt in many ways
            self._rows[pieces] = row
        return row


@dataclass(frozen=True)
class WordsOfTokens:
    """The words of a batch's tokens.

    Attributes:
        occurrence: `[N]` int64, which occurrence of a word each token is a piece of.
        rows: `[W]` int64, the row of each occurrence's word, or `NO_ROW`.
    """

    occurrence: Tensor
    rows: Tensor


def group_words(
    tokens: Tensor, sentences: Tensor, spell: Spelling, table: WordTable
) -> WordsOfTokens:
    """Find the words in tokens.

    Args:
        tokens: `[N]` int64, sentence after sentence.
        sentences: `[N]` int64, the sentence of each.
        spell: how pieces make words.
        table: gets what is new.
    """
    if tokens.numel() == 0:
        return WordsOfTokens(tokens, tokens)
    first = torch.ones_like(tokens, dtype=torch.bool)
    first[1:] = sentences[1:] != sentences[:-1]
    begins = first.clone()
    joined = spell.joins_previous[tokens[1:]] | spell.joins_next[tokens[:-1]]
    apart = spell.special[tokens[1:]] | spell.special[tokens[:-1]]
    begins[1:] |= apart | ~joined
    occurrence = begins.cumsum(0) - 1
    # What is beside an unknown piece, unless a new word begins there.
    cut = torch.zeros_like(begins)
    opaque = spell.opaque[tokens]
    cut[1:] |= opaque[:-1] & ~first[1:] & spell.joins_previous[tokens[1:]]
    before = opaque[1:] & ~first[1:]
    # A mask may go on with any word before it; after subword-nmt's mark it certainly does.
    cut[:-1] |= before & ~spell.special[tokens[:-1]]
    cut &= ~opaque
    cut_words = torch.zeros(int(occurrence[-1]) + 1, dtype=torch.bool)
    cut_words[occurrence[cut]] = True
    starts = [*begins.nonzero().flatten().tolist(), tokens.numel()]
    ids = tokens.tolist()
    rows = []
    for start, end, is_cut in zip(starts, starts[1:], cut_words.tolist()):
        if is_cut:
            table.cut += 1
            rows.append(NO_ROW)
        else:
            rows.append(table.row(tuple(ids[start:end]), spell))
    return WordsOfTokens(occurrence, torch.tensor(rows))
