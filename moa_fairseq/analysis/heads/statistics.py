"""Figures from the sums of a split: pure functions, each with the value that noise alone gives.

Mass is what a router gives the experts of a token (counts.py): 1 to each of K selected ones, or
the shares of the gates where nothing is selected. Information and PMI are in bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .counts import RatioSums, RouterTotals

#: Half-widths of 95 % intervals are this many standard errors.
NORMAL_95 = 1.959964


class Estimate(NamedTuple):
    """A value and the half-width of its 95 % interval; tensors of one shape."""

    value: Tensor
    half_width: Tensor


def ratio(sums: RatioSums) -> Estimate:
    """Σy/Σn, the mean over tokens, with the interval of the ratio estimator.

    Sentences are drawn, not tokens: the variance is S/(S−1)·Σ(y_s − R·n_s)²/(Σn)². With one
    sentence there is no interval (NaN).
    """
    value = sums.y / sums.n
    squares = (sums.yy - 2 * value * sums.yn + value.square() * sums.nn).clamp(min=0)
    if sums.sentences < 2:
        return Estimate(value, torch.full_like(value, math.nan))
    variance = sums.sentences / (sums.sentences - 1) * squares / sums.n**2
    return Estimate(value, NORMAL_95 * variance.sqrt())


def coefficient_of_variation(load: Tensor) -> float:
    """Standard deviation over mean of the experts' `[E]` load."""
    return float(load.std(unbiased=False) / load.mean())


def uniform_variation(tokens: float, num_selected: int, num_experts: int) -> float:
    """The coefficient of variation of `tokens` tokens that K experts are drawn for at random."""
    share = num_selected / num_experts
    return math.sqrt((1 - share) / (tokens * share)) if tokens else math.nan


def information(table: Tensor) -> float:
    """Mutual information, in bits, of row and column of a table `[R, C]` of mass."""
    total = table.sum()
    if total == 0:
        return 0.0
    joint = table / total
    entropy = torch.special.entr(joint).sum()
    rows, columns = (torch.special.entr(joint.sum(axis)).sum() for axis in (1, 0))
    return max(0.0, float((rows + columns - entropy) / math.log(2)))


def choice_information(totals: RouterTotals) -> float:
    """Bits that a token's choice of experts carries, at most, about anything.

    The entropy of the experts' mean mass less the mean entropy of a token's: 0 where every token
    is treated alike, log2(E/K) where K experts are selected evenly.
    """
    tokens = totals.selected.n
    mean = (totals.selected if totals.selects else totals.gates).y
    overall = torch.special.entr(mean / mean.sum()).sum()
    return max(0.0, (float(overall) - totals.token_entropy / tokens) / math.log(2))


def noise_information(rows: int, totals: RouterTotals) -> float:
    """Bits that :func:`information` of `rows` rows and the experts has by chance alone.

    That is with uniform routing, which knows nothing of rows: (rows − 1)·(E − K)/(2·K·N·ln 2) to
    first order. Without selection there is no such noise.
    """
    if not totals.selects or totals.selected.n == 0:
        return 0.0
    spread = (totals.num_experts - totals.num_selected) / totals.num_selected
    return max(0, rows - 1) * spread / (2 * totals.selected.n * math.log(2))


def noise_agreement(first: RouterTotals, second: RouterTotals) -> float:
    """Bits that two modules' choices have in common by chance alone, with uniform routing."""
    if not (first.selects and second.selects) or first.selected.n == 0:
        return 0.0
    spreads = [
        (totals.num_experts - totals.num_selected) / totals.num_selected
        for totals in (first, second)
    ]
    return spreads[0] * spreads[1] / (2 * first.selected.n * math.log(2))


def agreement(joint: Tensor, first: Tensor, second: Tensor) -> float:
    """How far two modules' choices determine each other, whatever their experts are called.

    Mutual information of an expert drawn from a token's choice in the one and one in the other,
    over the geometric mean of what two draws from the same module share. It is 0 for independent
    choices and 1 for the same choices; with K = 1 it is I(X;Y)/√(H(X)·H(Y)).

    Args:
        joint: `[E, E']` Σ mass·mass'ᵀ over tokens.
        first, second: `[E, E]`, `[E', E']`, the same of each module with itself.

    Returns:
        NaN where a module treats every token alike.
    """
    own = information(first) * information(second)
    return information(joint) / math.sqrt(own) if own > 1e-18 else math.nan


def pmi(table: Tensor, counts: Tensor, mass_of_token: float, background: Tensor) -> Tensor:
    """log2 of how many times likelier than on average a row's tokens use an expert.

    Args:
        table: `[R, E]` mass.
        counts: `[R]` tokens.
        mass_of_token: of all experts of one token.
        background: `[E]`, each expert's share of all mass.

    Returns:
        `[R, E]`; minus infinity for an expert that a row never uses, NaN for one never used.
    """
    shares = table / (counts.unsqueeze(1) * mass_of_token)
    return torch.log2(shares / background)


def specialisation(table: Tensor, rows: Tensor) -> Tensor:
    """`[E]`, bits: how much the tokens of each expert differ from all tokens.

    The divergence of the rows' distribution among an expert's tokens from that among all.

    Args:
        table: `[R, E]` mass.
        rows: `[R]` bool; the others are taken together as one row.
    """
    rest = table[~rows].sum(0, keepdim=True)
    grouped = torch.cat((table[rows], rest))
    of_expert = grouped / grouped.sum(0)  # [R, E]
    overall = grouped.sum(1, keepdim=True) / grouped.sum()  # [R, 1]
    terms = of_expert * torch.log2(of_expert / overall)
    return terms.nan_to_num(nan=0.0).sum(0)  # 0·log 0 is 0


def independent_pairs(pairs: Tensor, rounds: int = 1000) -> Tensor:
    """How often two experts would be selected together, if only by their loads.

    An expert never meets itself, and each token has exactly K, so the product of loads is too
    much. This is quasi-independence: a_i·a_j off the diagonal, with the row sums observed, by
    iterative scaling (Goodman, 1968).

    Args:
        pairs: `[E, E]` symmetric counts; the diagonal does not matter.

    Returns:
        `[E, E]` with a zero diagonal.
    """
    observed = pairs - torch.diag(pairs.diagonal())
    sums = observed.sum(1)
    total = sums.sum()
    factors = sums / total.clamp(min=1).sqrt()
    for _ in range(rounds):
        others = factors.sum() - factors
        updated = torch.where(sums > 0, sums / others.clamp(min=1e-300), sums)
        change = (updated - factors).abs().max()
        factors = (factors * updated).sqrt()  # the plain step swings to and fro
        if change <= 1e-12 * factors.max():
            break
    expected = torch.outer(factors, factors)
    return expected - torch.diag(expected.diagonal())


def gate_correlations(totals: RouterTotals) -> Tensor:
    """`[E, E]`: correlation over tokens of the experts' gate shares, where nothing is selected."""
    tokens = totals.gates.n
    mean = totals.gates.y / tokens
    covariance = totals.pairs / tokens - torch.outer(mean, mean)
    deviation = covariance.diagonal().clamp(min=0).sqrt()
    return covariance / torch.outer(deviation, deviation)
