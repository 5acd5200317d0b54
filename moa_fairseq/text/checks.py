"""What would give a wrong score, refused."""

from __future__ import annotations

import re
from typing import Sequence

from ..errors import UsageError

# The first few offenders are enough to see what is wrong.
_SHOWN = 5

# What only tokenised text has: Moses' escapes and its hyphen, and a blank before a full stop or a
# comma. Other marks do not count: French has a blank before them in raw text, too.
_MOSES = re.compile(r"&(?:amp|apos|quot|lt|gt|bar|bra|ket|#124|#91|#93);|(?<!\S)@-@(?!\S)")
_PARTED_STOP = re.compile(r"\S\s[.,](?!\S)")
_STOP = re.compile(r"\S\s?[.,](?!\S)")

# Of the lines that can tell, the share above which a text counts as tokenised. In the news test
# sets of 2008 to 2014, Multi30k and News Commentary it is at most 0.013 in raw text (English,
# German and French), and at least 0.997 in what tokenizer.perl makes of newstest2013.
_TOKENISED_SHARE = 0.5


def tokenised_share(lines: Sequence[str]) -> float:
    """How much of a text looks tokenised, 0 to 1, among the lines that can tell.

    A line can tell when it has a full stop or a comma that ends a word, or a mark of Moses'.
    """
    marked = sum(bool(_MOSES.search(line) or _PARTED_STOP.search(line)) for line in lines)
    telling = sum(bool(_MOSES.search(line) or _STOP.search(line)) for line in lines)
    return marked / telling if telling else 0.0


def check_length(lines: Sequence[str], references: Sequence[str], name: str, kind: str) -> None:
    """Refuse another number of lines than the references.

    Raises:
        UsageError: with `name`, the flag and its value, and `kind`, what the lines are.
    """
    if len(lines) != len(references):
        raise UsageError(
            f"{name}: {len(lines)} {kind} but {len(references)} references; a score over a part "
            "of a set is not its score, so give the whole set"
        )


def check_subwords(lines: Sequence[str], name: str, kind: str = "hypotheses") -> None:
    """Refuse the marks of SentencePiece and of subword-nmt.

    Raises:
        UsageError: with the numbers of the first lines.
    """
    marked = [
        number
        for number, line in enumerate(lines, start=1)
        if "\u2581" in line or re.search(r"@@( |$)", line)
    ]
    if marked:
        numbers = ", ".join(map(str, marked[:_SHOWN]))
        raise UsageError(
            f"{name}: {len(marked)} {kind} hold subword marks (line {numbers}); generate with "
            "--bpe sentencepiece --sentencepiece-model FILE, with --bpe subword_nmt --bpe-codes "
            "FILE, or with --remove-bpe"
        )


def check_detokenised(lines: Sequence[str], name: str) -> None:
    """Refuse tokenised text where detokenised text is scored.

    Raises:
        UsageError: when more than half of the lines that can tell look tokenised.
    """
    share = tokenised_share(lines)
    if share > _TOKENISED_SHARE:
        raise UsageError(
            f"{name}: {share:.0%} of the lines with punctuation look tokenised (a blank before a "
            "full stop or comma, &apos;, @-@), but detokenised text is scored; generate with "
            "--tokenizer moses, or detokenise the file, for instance with: sacremoses -l CODE "
            "detokenize"
        )


def check_tokenised(lines: Sequence[str], name: str) -> None:
    """Refuse detokenised text where tokenised text is scored.

    Raises:
        UsageError: when fewer than half of the lines that can tell look tokenised.
    """
    if any(_STOP.search(line) for line in lines) and tokenised_share(lines) < _TOKENISED_SHARE:
        raise UsageError(
            f"{name}: the text does not look tokenised; give what tokenizer.perl -a makes of the "
            "reference, before BPE"
        )
