"""BLEU of tokenised text: Moses' multi-bleu.perl, and the split of compounds before it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Sequence, Tuple

from sacrebleu.metrics import BLEU

# multi-bleu.perl reads bytes, so only ASCII white space parts words; to Python's str.split, by
# which sacreBLEU parts them, these do as well. Each gets a stand-in that no text holds.
_NOT_BLANKS = {
    code: 0xF0000 + code
    for code in range(0x3001)
    if chr(code).isspace() and chr(code) not in " \t\n\r\f\v"
}

# What multi-bleu.perl takes for the logarithm of zero.
_LOG_OF_ZERO = -9999999999.0


@dataclass(frozen=True)
class MultiBleu:
    """What multi-bleu.perl computes for one reference.

    Attributes:
        score: BLEU, 0 to 100.
        precisions: of 1- to 4-grams, 0 to 100.
        brevity_penalty: 0 to 1.
        hypothesis_length: words in the hypotheses.
        reference_length: words in the references.
    """

    score: float
    precisions: Tuple[float, float, float, float]
    brevity_penalty: float
    hypothesis_length: int
    reference_length: int

    @property
    def ratio(self) -> float:
        """Length of the hypotheses relative to the references'."""
        return self.hypothesis_length / self.reference_length

    @property
    def text(self) -> str:
        """The line that multi-bleu.perl prints."""
        if self.reference_length == 0:
            return "BLEU = 0, 0/0/0/0 (BP=0, ratio=0, hyp_len=0, ref_len=0)"
        precisions = "/".join(f"{precision:.1f}" for precision in self.precisions)
        return (
            f"BLEU = {self.score:.2f}, {precisions} (BP={self.brevity_penalty:.3f}, "
            f"ratio={self.ratio:.3f}, hyp_len={self.hypothesis_length}, "
            f"ref_len={self.reference_length})"
        )


def split_compounds(line: str) -> str:
    """Make each hyphen between two other characters a token, ` ##AT##-##AT## `.

    The customary treatment of English-German (arXiv 1706.03762 and what followed). It matches
    the hyphen of Moses' ` @-@ ` as well.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)


def multi_bleu(hypotheses: Sequence[str], references: Sequence[str]) -> MultiBleu:
    """Case-sensitive BLEU of tokenised text as multi-bleu.perl computes it.

    sacreBLEU counts; the arithmetic is in Perl's order, so that no last digit is rounded
    otherwise.

    Args:
        hypotheses: tokens between blanks, one sentence each; at least one.
        references: as many.

    Raises:
        ValueError: for another number of references than hypotheses.
    """
    if len(hypotheses) != len(references):
        raise ValueError(f"{len(hypotheses)} hypotheses but {len(references)} references")
    counted = BLEU(tokenize="none", smooth_method="none", force=True).corpus_score(
        [line.translate(_NOT_BLANKS) for line in hypotheses],
        [[line.translate(_NOT_BLANKS) for line in references]],
    )
    shares = [
        correct / total if total else 0.0 for correct, total in zip(counted.counts, counted.totals)
    ]
    penalty = 1.0
    if counted.sys_len < counted.ref_len:
        # Perl divides by zero where there is no word at all.
        penalty = math.exp(1 - counted.ref_len / counted.sys_len) if counted.sys_len else 0.0
    logarithms = [math.log(share) if share else _LOG_OF_ZERO for share in shares]
    return MultiBleu(
        score=100 * (penalty * math.exp(sum(logarithms) / 4)),
        precisions=(100 * shares[0], 100 * shares[1], 100 * shares[2], 100 * shares[3]),
        brevity_penalty=penalty,
        hypothesis_length=counted.sys_len,
        reference_length=counted.ref_len,
    )
