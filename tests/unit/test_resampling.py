from __future__ import annotations

import numpy as np
import pytest
from sacrebleu.metrics import BLEU

from moa_fairseq.analysis.resampling import (
    Estimate,
    bleu_signature,
    bleu_statistics,
    corpus_bleu,
    ratio_of_sums,
    resampled_bleu,
    resampled_counts,
    spearman,
)

HYPOTHESES = [
    "A small dog runs across the green grass.",
    "Two men are playing chess in a park.",
    "The woman is reading.",
    "A child",
]
REFERENCES = [
    "A little dog runs over the green grass.",
    "Two men play chess in the park.",
    "The woman is reading a book on the train.",
    "A child eats an apple.",
]


def test_draws_are_of_n_sentences_and_follow_the_seed():
    counts = resampled_counts(7, 50, seed=3)
    assert counts.shape == (50, 7)
    assert (counts.sum(axis=1) == 7).all()
    assert (counts == resampled_counts(7, 50, seed=3)).all()
    assert (counts != resampled_counts(7, 50, seed=4)).any()


def test_a_ratio_and_its_interval_equal_a_slow_bootstrap():
    numerators, denominators = [3.0, -1.0, 2.5, 0.0], [2, 5, 3, 4]
    counts = resampled_counts(4, 200, seed=1)
    ratios = []
    for row in counts:
        drawn = [sentence for sentence, times in enumerate(row) for _ in range(times)]
        above = sum(numerators[sentence] for sentence in drawn)
        ratios.append(above / sum(denominators[sentence] for sentence in drawn))
    estimate = ratio_of_sums(numerators, denominators, counts)
    assert estimate.value == pytest.approx(4.5 / 14)
    assert (estimate.low, estimate.high) == pytest.approx(np.percentile(ratios, [2.5, 97.5]))


def test_no_change_at_all_does_not_exclude_zero():
    estimate = ratio_of_sums([0.0] * 5, [3] * 5, resampled_counts(5, 100, seed=1))
    assert estimate == (0.0, 0.0, 0.0)
    assert not estimate.excludes_zero
    assert Estimate(1.0, 0.5, 2.0).excludes_zero
    assert Estimate(-1.0, -2.0, -0.5).excludes_zero


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    generator = np.random.default_rng(0)
    held = 0
    for trial in range(200):
        tokens = generator.integers(5, 30, size=100)
        changes = tokens * 0.02 + generator.normal(size=100)
        estimate = ratio_of_sums(changes, tokens, resampled_counts(100, 300, seed=trial))
        held += estimate.low <= 0.02 <= estimate.high
    assert 0.90 <= held / 200 <= 0.99


def test_sums_over_sentences_score_as_sacrebleu_does():
    statistics = bleu_statistics(HYPOTHESES, REFERENCES)
    metric = BLEU()
    score = metric.corpus_score(HYPOTHESES, [REFERENCES]).score
    assert 0 < score < 100
    assert corpus_bleu(statistics.sum(axis=0)) == pytest.approx(score, abs=1e-9)
    assert bleu_signature() == str(metric.get_signature())


def test_a_resample_scores_as_the_text_that_was_drawn():
    counts = resampled_counts(4, 5, seed=2)
    scores = resampled_bleu(bleu_statistics(HYPOTHESES, REFERENCES), counts)
    for row, score in zip(counts, scores):
        drawn = [sentence for sentence, times in enumerate(row) for _ in range(times)]
        expected = BLEU().corpus_score(
            [HYPOTHESES[sentence] for sentence in drawn],
            [[REFERENCES[sentence] for sentence in drawn]],
        )
        assert score == pytest.approx(expected.score, abs=1e-9)


def test_rank_correlation():
    assert spearman([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert spearman([1.0, 1.0, 1.0], [1, 2, 3]) is None
    assert spearman([1.0], [2.0]) is None
    scipy_stats = pytest.importorskip("scipy.stats")
    left, right = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]
    assert spearman(left, right) == pytest.approx(scipy_stats.spearmanr(left, right).statistic)
