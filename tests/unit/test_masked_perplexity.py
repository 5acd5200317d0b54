from __future__ import annotations

import math

import numpy as np
import pytest

from moa_fairseq.analysis.masked_perplexity import (
    BlockSums,
    Masking,
    difference,
    interval,
    perplexity_report,
)
from moa_fairseq.cli.masked_perplexity import blocks_text, read_blocks
from moa_fairseq.errors import UsageError


def sums(nats, tokens, special_nats=None, special_tokens=None):
    zeros = [0.0] * len(nats)
    columns = (nats, tokens, special_nats or zeros, special_tokens or zeros, [9.0] * len(nats))
    return BlockSums(*(np.array(column, dtype=float) for column in columns))


def test_perplexity_is_exp_of_the_mean_over_tokens_not_over_blocks():
    report = perplexity_report(sums([2.0, 9.0], [1, 4]))
    assert report["all"]["perplexity"] == pytest.approx(math.exp(11 / 5))
    assert report["all"]["bits_per_token"] == pytest.approx(11 / 5 / math.log(2))
    assert (report["all"]["masked_tokens"], report["blocks"], report["tokens"]) == (5, 2, 18)


def test_sentence_marks_are_left_out_where_said():
    report = perplexity_report(sums([2.0, 9.0], [1, 4], [0.0, 1.0], [0, 2]))
    assert report["without_special"]["perplexity"] == pytest.approx(math.exp(10 / 3))
    assert report["without_special"]["masked_tokens"] == 3


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    """Blocks of one token each with nats of mean 2 and deviation 1: 95 % of 200 intervals."""
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        low, high = interval(generator.normal(2, 1, 100), np.ones(100), resamples=300)
        covered += low <= math.exp(2) <= high
    assert 0.90 <= covered / 200 <= 0.985


def test_the_interval_of_equal_blocks_is_a_point():
    assert interval(np.full(7, 6.0), np.full(7, 3.0)) == pytest.approx((math.exp(2),) * 2)


def test_paired_models_are_told_apart_where_their_intervals_overlap():
    generator = np.random.default_rng(0)
    nats, tokens = generator.normal(30, 8, 200), np.full(200, 10.0)
    ours, theirs = sums(nats - generator.normal(0.5, 0.2, 200), tokens), sums(nats, tokens)
    first, second = (perplexity_report(each)["all"]["interval"] for each in (ours, theirs))
    assert first["high"] > second["low"]
    paired = difference(ours, theirs)
    assert paired["interval"]["high"] < 1
    expected = math.exp((ours.nats.sum() - theirs.nats.sum()) / 2000)
    assert paired["perplexity_ratio"] == pytest.approx(expected)


@pytest.mark.parametrize("other", [([1.0, 1.0], [1, 2]), ([1.0], [1])], ids=str)
def test_other_masks_cannot_be_compared(other):
    with pytest.raises(UsageError, match="its masked tokens are others"):
        difference(sums([1.0, 1.0], [1, 1]), sums(*other))


def test_the_table_of_blocks_goes_round(tmp_path):
    first = sums([1 / 3, 2e-17], [1, 4], [0.1, 0.0], [1, 0])
    (tmp_path / "x.blocks.tsv").write_text(blocks_text(first))
    second = read_blocks(tmp_path / "x.blocks.tsv")
    for name in BlockSums.__dataclass_fields__:
        assert np.array_equal(getattr(first, name), getattr(second, name))


@pytest.mark.parametrize("text", ["block\n1\n", "a b\n", blocks_text(sums([1.0], [1])) + "x\n"])
def test_another_table_is_refused(tmp_path, text):
    (tmp_path / "x").write_text(text)
    with pytest.raises(UsageError, match=r"--baseline .*x: it is no PREFIX.blocks.tsv"):
        read_blocks(tmp_path / "x")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"mask_prob": 0.0}, "--mask-prob 0.0"),
        ({"mask_prob": float("nan")}, "--mask-prob nan"),
        ({"random_token_prob": -0.1}, "--random-token-prob -0.1"),
        ({"leave_unmasked_prob": 0.6, "random_token_prob": 0.6}, "more than 1 together"),
        ({"seed": -1}, "--seed -1"),
    ],
    ids=str,
)
def test_masks_that_cannot_be_are_refused(options, line):
    with pytest.raises(UsageError, match=line):
        Masking(**options)
