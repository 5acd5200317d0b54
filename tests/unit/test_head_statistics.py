"""The figures of a head report against slow references, identities and simulated chance."""

from __future__ import annotations

import math

import pytest
import torch

from moa_fairseq.analysis.heads import statistics
from moa_fairseq.analysis.heads.counts import RouterTotals
from moa_fairseq.analysis.heads.token_section import chain

EXPERTS, SELECTED, TOKENS = 8, 3, 4000


def uniform_choices(generator, tokens=TOKENS):
    """`[N, E]`: K of E experts for each token, any K alike."""
    ranks = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)
    return (ranks < SELECTED).double()


def totals_of(choices):
    totals = RouterTotals(EXPERTS, SELECTED, 1)
    totals.selected.y += choices.sum(0)
    totals.selected.n = float(len(choices))
    totals.pairs += choices.T @ choices
    totals.token_entropy = len(choices) * math.log(SELECTED)
    return totals


def test_information_is_the_sum_of_its_definition():
    table = torch.rand(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    joint = table / table.sum()
    expected = sum(
        float(joint[r, c] * torch.log2(joint[r, c] / joint[r].sum() / joint[:, c].sum()))
        for r in range(5)
        for c in range(4)
    )
    assert statistics.information(table) == pytest.approx(expected)
    assert statistics.information(torch.outer(table[0], table[1])[:, :3]) == pytest.approx(0)
    assert statistics.information(torch.eye(8)) == pytest.approx(3)
    assert statistics.information(torch.zeros(2, 2)) == 0


def test_chance_alone_gives_what_it_is_said_to():
    generator = torch.Generator().manual_seed(1)
    rows = 20
    found, agreeing, variation = [], [], []
    for _ in range(60):
        choices, others = uniform_choices(generator), uniform_choices(generator)
        which = torch.randint(rows, (TOKENS,), generator=generator)
        table = torch.zeros(rows, EXPERTS, dtype=torch.float64).index_add_(0, which, choices)
        found.append(statistics.information(table))
        agreeing.append(statistics.information(choices.T @ others))
        variation.append(statistics.coefficient_of_variation(choices.sum(0)))
    totals = totals_of(choices)
    mean = sum(found) / 60
    assert mean == pytest.approx(statistics.noise_information(rows, totals), rel=0.05)
    mean = sum(agreeing) / 60
    assert mean == pytest.approx(statistics.noise_agreement(totals, totals), rel=0.1)
    squared = sum(value**2 for value in variation) / 60
    expected = statistics.uniform_variation(TOKENS, SELECTED, EXPERTS) ** 2
    assert squared == pytest.approx(expected, rel=0.2)
    assert statistics.choice_information(totals) == pytest.approx(
        math.log2(EXPERTS / SELECTED), abs=1e-3
    )


def test_independent_pairs_of_even_loads_are_all_alike():
    pairs = torch.full((6, 6), 10.0, dtype=torch.float64)
    expected = statistics.independent_pairs(pairs)
    torch.testing.assert_close(expected, 10.0 - torch.eye(6, dtype=torch.float64) * 10)


def test_independent_pairs_have_the_loads_that_were_seen_and_no_interaction():
    generator = torch.Generator().manual_seed(2)
    pairs = torch.rand(7, 7, generator=generator, dtype=torch.float64) + 0.1
    pairs = pairs + pairs.T
    expected = statistics.independent_pairs(pairs)
    assert expected.diagonal().tolist() == [0] * 7
    torch.testing.assert_close(expected, expected.T)
    off = 1 - torch.eye(7, dtype=torch.float64)
    torch.testing.assert_close(expected.sum(1), (pairs * off).sum(1), rtol=1e-6, atol=0)
    # Four different experts: the odds ratio of a table without interaction is 1.
    odds = expected[0, 2] * expected[1, 3] / expected[0, 3] / expected[1, 2]
    assert float(odds) == pytest.approx(1)


def test_independent_pairs_of_experts_that_are_never_or_always_used():
    pairs = torch.tensor([[4.0, 2, 2, 0], [2, 2, 0, 0], [2, 0, 2, 0], [0, 0, 0, 0]])
    expected = statistics.independent_pairs(pairs.double())
    assert expected.isfinite().all()
    torch.testing.assert_close(
        expected.sum(1), torch.tensor([4.0, 2, 2, 0]).double(), atol=0.02, rtol=0
    )


def test_agreement_lies_between_none_and_the_same():
    generator = torch.Generator().manual_seed(3)
    choices, others = uniform_choices(generator), uniform_choices(generator)
    own, theirs = choices.T @ choices, others.T @ others
    assert statistics.agreement(own, own, own) == pytest.approx(1)
    assert statistics.agreement(choices.T @ others, own, theirs) < 0.05
    half = torch.where(torch.arange(TOKENS).unsqueeze(1) % 2 == 0, choices, others)
    between = statistics.agreement(choices.T @ half, own, half.T @ half)
    assert 0.1 < between < 0.9
    constant = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    constant[:, :SELECTED] = 1
    same = constant.T @ constant
    assert math.isnan(statistics.agreement(constant.T @ choices, same, own))


def test_with_one_expert_selected_agreement_is_normalised_information():
    first = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    second = torch.tensor([0, 1, 1, 1, 0, 2, 2, 0])
    one, two = (torch.nn.functional.one_hot(x, 3).double() for x in (first, second))
    joint = one.T @ two

    def entropy(counts):
        shares = counts / counts.sum()
        return float(-(shares * torch.log2(shares)).sum())

    expected = statistics.information(joint) / math.sqrt(entropy(one.sum(0)) * entropy(two.sum(0)))
    assert statistics.agreement(joint, one.T @ one, two.T @ two) == pytest.approx(expected)


def test_specialisation_weighted_by_load_is_information():
    generator = torch.Generator().manual_seed(4)
    table = torch.rand(9, EXPERTS, generator=generator, dtype=torch.float64)
    table[3, 2] = 0
    rows = torch.ones(9, dtype=torch.bool)
    load = table.sum(0) / table.sum()
    mean = float((load * statistics.specialisation(table, rows)).sum())
    assert mean == pytest.approx(statistics.information(table))
    # Rows that are left out count as one.
    rows[5:] = False
    grouped = torch.cat((table[:5], table[5:].sum(0, keepdim=True)))
    mean = float((load * statistics.specialisation(table, rows)).sum())
    assert mean == pytest.approx(statistics.information(grouped))


def test_pmi_is_the_log_of_a_ratio_of_shares():
    table = torch.tensor([[3.0, 1.0], [1.0, 3.0], [0.0, 0.0]])
    counts = torch.tensor([4.0, 4.0, 2.0])
    values = statistics.pmi(table, counts, 1.0, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(values[0], torch.log2(torch.tensor([1.5, 0.5])))
    assert values[2].tolist() == [-math.inf, -math.inf]


def test_gate_correlations_are_those_of_numpy():
    gates = torch.softmax(torch.randn(50, 4, generator=torch.Generator().manual_seed(5)), 1)
    gates = gates.double()
    totals = RouterTotals(4, 4, 1)
    totals.gates.y += gates.sum(0)
    totals.gates.n = 50.0
    totals.pairs += gates.T @ gates
    torch.testing.assert_close(statistics.gate_correlations(totals), torch.corrcoef(gates.T))


def test_a_chain_puts_like_rows_beside_each_other():
    values = torch.tensor([[0.0], [5.0], [0.1], [5.1], [0.2]])
    assert chain(values).tolist() == [0, 2, 4, 1, 3]
    assert chain(values[:0]).tolist() == []
