"""Intervals and rank correlations for differences that are measured on the same sentences."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence

import numpy as np
from sacrebleu.metrics import BLEU

#: In percent, the ends of the middle 95 %.
ENDS = (2.5, 97.5)
_ORDERS = 4
_PER_SENTENCE = BLEU(effective_order=True)  # which changes scores of sentences, not their counts


class Estimate(NamedTuple):
    """A value with its 95 % interval.

    Attributes:
        value: of the sample.
        low, high: the ends of the interval.
    """

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


def resampled_counts(sentences: int, resamples: int, seed: int) -> np.ndarray:
    """How often each sentence is drawn when as many are drawn with replacement.

    The same draws for all quantities make their comparison a paired one.

    Args:
        sentences: n.
        resamples: R.
        seed: of numpy's default generator.

    Returns:
        `[R, n]` int64; each row sums to n.
    """
    generator = np.random.default_rng(seed)
    return generator.multinomial(sentences, [1 / sentences] * sentences, size=resamples)


def ratio_of_sums(numerators: Any, denominators: Any, counts: np.ndarray) -> Estimate:
    """Σ numerators / Σ denominators over sentences: nats per token, from sums and token counts.

    The interval is the percentile bootstrap's.

    Args:
        numerators, denominators: n values each; the denominators are positive.
        counts: `[R, n]`, see :func:`resampled_counts`.
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    low, high = np.percentile((counts @ above) / (counts @ below), ENDS)
    return Estimate(float(above.sum() / below.sum()), float(low), float(high))


def bleu_statistics(hypotheses: Sequence[str], references: Sequence[str]) -> np.ndarray:
    """What corpus BLEU is made of, for each sentence; sums over sentences are the corpus'.

    Args:
        hypotheses: detokenised, n.
        references: one for each.

    Returns:
        `[n, 10]` int64: matches and n-grams of orders 1 to 4, then both lengths, by sacreBLEU.
    """
    rows = []
    for hypothesis, reference in zip(hypotheses, references):
        score = _PER_SENTENCE.sentence_score(hypothesis, [reference])
        rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
    return np.asarray(rows, dtype=np.int64).reshape(-1, 2 * _ORDERS + 2)


def corpus_bleu(sums: np.ndarray) -> float:
    """sacreBLEU's corpus score from the sums `[10]` of :func:`bleu_statistics`."""
    numbers = [int(number) for number in sums]
    return BLEU.compute_bleu(
        numbers[:_ORDERS],
        numbers[_ORDERS : 2 * _ORDERS],
        numbers[-2],
        numbers[-1],
        smooth_method="exp",
    ).score


def bleu_signature() -> str:
    """What sacreBLEU says of how :func:`corpus_bleu` scores."""
    return str(BLEU(references=[["one"]]).get_signature())


def resampled_bleu(statistics: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Corpus BLEU of each resample, `[R]`, from `[n, 10]` and `[R, n]`."""
    return np.asarray([corpus_bleu(sums) for sums in counts @ statistics])


def spearman(left: Sequence[float], right: Sequence[float]) -> Optional[float]:
    """Spearman's rank correlation, ties at their mean rank; None where one side does not vary."""
    ranks = [_ranks(np.asarray(values, float)) for values in (left, right)]
    if len(ranks[0]) < 2 or any(np.ptp(values) == 0 for values in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, sizes = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(sizes)
    return (ends - (sizes - 1) / 2)[inverse]
