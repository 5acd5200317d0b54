"""What decides routing, and which words and pieces each expert prefers."""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
from torch import Tensor

from ..report_sections import ReportFigure, ReportSection, ReportTable
from . import statistics
from .counts import RouterTotals
from .figures import Axes, Panel, heat_maps
from .surveyed import (
    FREQUENCY,
    PIECE,
    POSITION,
    WORD,
    Surveyed,
    by_model,
    finite,
    finite_list,
    preferences,
    relative_load,
    suffix,
    table_of,
)

#: Of an expert with less of its uniform load, nothing is said: it differs from others by chance.
LEAST_LOAD = 0.1
FACTORS = ((PIECE, "the piece itself"), (POSITION, "its position"), (FREQUENCY, "its frequency"))


class Decided(NamedTuple):
    """How far something decides a router's choices.

    Attributes:
        bits: mutual information, less what chance alone gives.
        chance: bits that chance alone gives, with uniform routing.
        share: of all information that the choices carry; NaN where they carry none.
    """

    bits: float
    chance: float
    share: float


def decided(model: Surveyed, module: str, what: str, totals: RouterTotals) -> Decided:
    """How far the piece, its position or its frequency decides the choices of a router."""
    table, counts = table_of(totals, what), model.row_counts(module, what)
    chance = statistics.noise_information(int((counts > 0).sum()), totals)
    bits = max(0.0, statistics.information(table) - chance)
    whole = statistics.choice_information(totals)
    return Decided(bits, chance, bits / whole if whole > 1e-9 else math.nan)


def decision_section(models: Sequence[Surveyed]) -> ReportSection:
    """How much of each module's routing is decided by piece, position and frequency."""
    panels = []
    for model in models:
        rows = [model.label(name) for name in model.modules()]
        for which, routers in (
            ("trained", model.survey.trained),
            ("random router", model.survey.random),
        ):
            values = [
                [100 * decided(model, name, what, routers[name]).share for what, _ in FACTORS]
                for name in model.modules()
            ]
            title = which if len(models) == 1 else f"{model.name}: {which}"
            panels.append(Panel(title, values, rows, [label for _, label in FACTORS]))
    unit = "% of the routing that it decides"
    axes = Axes("module", "known of the token", unit, signed=False, limit=100.0, numbers="{:.0f}")
    height = max(2.6, 0.26 * max(len(panel.rows) for panel in panels) + 1.5)
    figure = ReportFigure(
        "decides",
        "How much of the information in a module's choices is explained by the piece alone, by "
        "its position in the sentence, and by how frequent it is. What is left comes from the "
        "context. A module whose trained figures equal those of its random router has not "
        "learned to look at that.",
        "Heat map of three factors for every module, trained and random side by side. "
        + " ".join(_strongest(model) for model in models),
        heat_maps(panels, axes, 2, 2.9, height),
    )
    return ReportSection(
        "decides",
        "What decides where a token goes",
        (
            "A choice of K of E experts carries at most log2(E/K) bits. Of these, the mutual "
            "information with the token's piece, position or frequency is what that explains; "
            "factors overlap, so the shares do not add up. What uniform routing would show by "
            "chance on as many tokens is subtracted.",
            "The random router is no straw man: it sees the same hidden states, in which pieces "
            "and positions differ already, so it too sends like tokens to like experts. Only what "
            "goes beyond it was learned by routing.",
        ),
        (figure,),
        (_decision_table(models),),
        {"modules": by_model(models, _decision_numbers)},
    )


def _strongest(model: Surveyed) -> str:
    shares = {
        name: decided(model, name, PIECE, model.survey.trained[name]).share
        for name in model.modules()
    }
    known = {name: share for name, share in shares.items() if not math.isnan(share)}
    if not known:
        return f"{model.name}: nothing is decided."
    best = max(known, key=lambda name: known[name])
    return f"{model.name}: {model.label(best)} follows the piece most, {100 * known[best]:.0f} %."


def _decision_numbers(model: Surveyed, name: str) -> Dict[str, Any]:
    numbers: Dict[str, Any] = {}
    for which, totals in (
        ("trained", model.survey.trained[name]),
        ("random", model.survey.random[name]),
    ):
        numbers[which] = {"choice_bits": finite(statistics.choice_information(totals))}
        for what, _ in FACTORS:
            bits, chance, share = decided(model, name, what, totals)
            numbers[which][what] = {
                "bits": finite(bits),
                "chance_bits": finite(chance),
                "share": finite(share),
            }
    return numbers


def _decision_table(models: Sequence[Surveyed]) -> ReportTable:
    rows = []
    for model in models:
        for name in model.modules():
            numbers = _decision_numbers(model, name)
            for what, label in FACTORS:
                trained, other = numbers["trained"], numbers["random"]
                rows.append(
                    (
                        *(model.name, model.label(name), label, trained["choice_bits"]),
                        *(trained[what][key] for key in ("bits", "chance_bits", "share")),
                        *(other[what][key] for key in ("bits", "share")),
                    )
                )
    header = (
        *("model", "module", "known of the token", "bits in the choice"),
        *("bits explained", "bits by chance (subtracted)", "share"),
        *("random router: bits", "share"),
    )
    return ReportTable("decides", "What decides routing, in bits.", header, rows)


class Favourite(NamedTuple):
    """A word and an expert that prefers it.

    Attributes:
        text: the word or piece.
        bits: PMI.
        tokens: how many it has.
        share: of its tokens that select the expert, or of their gates where K = E.
    """

    text: str
    bits: float
    tokens: int
    share: float


def favourites(model: Surveyed, module: str, what: str, number: int) -> List[List[Favourite]]:
    """For each expert the words (or pieces) with the highest PMI above 0, at most `number`."""
    totals = model.survey.trained[module]
    values = preferences(model, module, what, totals)
    names, counts = model.row_names(module, what), model.row_counts(module, what)
    shares = table_of(totals, what)[: len(counts)] / counts.clamp(min=1).unsqueeze(1)
    found: List[List[Favourite]] = []
    for expert in range(totals.num_experts):
        column = values[:, expert].nan_to_num(nan=-math.inf)
        best = torch.topk(column, min(number, len(column)))
        found.append(
            [
                Favourite(names[row], bits, int(counts[row]), float(shares[row, expert]))
                for bits, row in zip(best.values.tolist(), best.indices.tolist())
                if bits > 0
            ]
        )
    return found


def largest_random(model: Surveyed, module: str, what: str) -> float:
    """The largest PMI that the random router reaches with the same tokens and least count."""
    values = preferences(model, module, what, model.survey.random[module])
    values = values[values.isfinite()]
    return float(values.max()) if values.numel() else math.nan


def counted_rows(model: Surveyed, module: str, what: str) -> Tensor:
    """`[R]` bool: which words (or pieces) have tokens enough."""
    counts: Tensor = model.row_counts(module, what) >= model.context.options.min_count
    return counts


class Differences(NamedTuple):
    """How much what experts are used for differs from all tokens, in bits.

    Attributes:
        experts: `[E]`; NaN for those with less than `LEAST_LOAD`.
        random_mean, random_largest: of the random router's experts, the mean weighted by load.
    """

    experts: Tensor
    random_mean: float
    random_largest: float


def differences(model: Surveyed, module: str, what: str) -> Differences:
    """How much the words (pieces, positions, frequencies) of each expert differ from all."""
    experts, _ = _differences(model, module, what, model.survey.trained[module])
    random, load = _differences(model, module, what, model.survey.random[module])
    known = random.isfinite()
    if not bool(known.any()):
        return Differences(experts, math.nan, math.nan)
    mean = (random * load)[known].sum() / load[known].sum()
    return Differences(experts, float(mean), float(random[known].max()))


def _differences(
    model: Surveyed, module: str, what: str, totals: RouterTotals
) -> Tuple[Tensor, Tensor]:
    rows = counted_rows(model, module, what)
    values = statistics.specialisation(table_of(totals, what)[: len(rows)], rows)
    load = relative_load(totals).value
    return values.masked_fill(load < LEAST_LOAD, math.nan), load


def word_section(models: Sequence[Surveyed]) -> ReportSection:
    """Top words and pieces of every expert, and PMI of the most frequent words."""
    options = models[0].context.options
    return ReportSection(
        "words",
        "Which words each expert prefers",
        (
            "PMI is log2 of how many times likelier a word's tokens use the expert than tokens "
            f"do on average: 1 is twice as likely. Words with fewer than {options.min_count} "
            "tokens get none. A word of "
            "several pieces counts once, with the mean of its pieces; </s> is the sign that ends "
            "a source and starts a target.",
            *(_not_counted(model) for model in models),
        ),
        tuple(_word_map(models, model) for model in models),
        (
            *(_top_table(models, what) for what in (WORD, PIECE)),
            *(_whole_table(models, model, what) for model in models for what in (WORD, PIECE)),
        ),
        {"modules": by_model(models, _word_numbers)},
    )


def _not_counted(model: Surveyed) -> str:
    parts = [
        f"{name}: {len(words):,} words, {model.survey.left_out[name]:,} occurrences beyond the "
        f"first {model.context.options.max_words:,} words left out, "
        f"{model.survey.cut[name]:,} beside an unknown piece or a mask left out"
        for name, words in model.survey.words.items()
    ]
    return f"Words of {model.name} that are counted: {'; '.join(parts)}."


def _word_map(models: Sequence[Surveyed], model: Surveyed) -> ReportFigure:
    chosen: Dict[str, Tuple[float, str]] = {}
    for name in model.modules():
        share = decided(model, name, PIECE, model.survey.trained[name]).share
        kind = model.survey.modules[name]
        chosen[kind] = max(
            chosen.get(kind, (-1.0, name)), (0.0 if math.isnan(share) else share, name)
        )
    panels = []
    for _, name in chosen.values():
        totals = model.survey.trained[name]
        counts = model.row_counts(name, WORD)
        most = torch.topk(counts, min(30, len(counts))).indices
        values = table_of(totals, WORD)[most] / counts[most].unsqueeze(1)
        if not totals.selects:
            values = values * totals.num_experts
        order = chain(values)
        words = model.row_names(name, WORD)
        panels.append(
            Panel(
                model.label(name),
                values[order].numpy(),
                [f"{words[row]} ({int(counts[row]):,})" for row in most[order].tolist()],
                [str(expert) for expert in range(values.shape[1])],
            )
        )
    selects = all(totals.selects for totals in model.survey.trained.values())
    unit = "share of the word's tokens that use it" if selects else "gate (1: uniform)"
    limit = 1.0 if selects else max(float(panel.values.max()) for panel in panels)
    axes = Axes("word (tokens)", "expert", unit, signed=False, limit=limit)
    mark, of = suffix(models, model)
    return ReportFigure(
        f"words{mark}",
        "The 30 most frequent words and the experts that they use, in that module of each kind "
        "which follows the piece most. Words that use like experts stand together. A row of "
        "nothing but very bright and very dark cells is a word that is always routed alike." + of,
        "Heat map of frequent words and experts for "
        + ", ".join(panel.title for panel in panels)
        + "; the table of top words says the same in words.",
        heat_maps(panels, axes, len(panels), 4.0, 5.6),
    )


def chain(values: Tensor) -> Tensor:
    """An order of rows in which each is followed by the nearest of those that are left."""
    left = list(range(1, len(values)))
    order = [0] if len(values) else []
    while left:
        distances = (values[left] - values[order[-1]]).square().sum(1)
        order.append(left.pop(int(distances.argmin())))
    return torch.tensor(order, dtype=torch.long)


def _top_table(models: Sequence[Surveyed], what: str) -> ReportTable:
    rows = []
    for model in models:
        for name in model.modules():
            chance = finite(largest_random(model, name, what), 3)
            best = favourites(model, name, what, model.context.options.top)
            for expert, found in enumerate(best):
                for rank, (text, bits, tokens, share) in enumerate(found, 1):
                    rows.append(
                        (
                            *(model.name, model.label(name), expert, rank, text, round(bits, 3)),
                            *(tokens, round(share, 4), chance),
                        )
                    )
    header = (
        *("model", "module", "expert", "rank", what, "PMI, bits", "tokens"),
        *("share that uses the expert", "largest PMI of the random router"),
    )
    return ReportTable(f"top_{what}s", f"Top {what}s of every expert.", header, rows)


def _whole_table(models: Sequence[Surveyed], model: Surveyed, what: str) -> ReportTable:
    rows: List[Tuple[Any, ...]] = []
    most = max(totals.num_experts for totals in model.survey.trained.values())
    for name in model.modules():
        values = preferences(model, name, what, model.survey.trained[name])
        names, counts = model.row_names(name, what), model.row_counts(name, what)
        for row in counted_rows(model, name, what).nonzero().flatten().tolist():
            cells = [finite(value, 3) for value in values[row]]
            cells += [None] * (most - len(cells))
            rows.append((model.label(name), names[row], int(counts[row]), *cells))
    mark, of = suffix(models, model)
    return ReportTable(
        f"pmi_{what}s{mark}",
        f"PMI, in bits, of every {what} with tokens enough and every expert; empty where it never "
        f"uses the expert.{of}",
        ("module", what, "tokens", *(f"expert {expert}" for expert in range(most))),
        rows,
        shown=0,
    )


def _word_numbers(model: Surveyed, name: str) -> Dict[str, Any]:
    numbers: Dict[str, Any] = {}
    for what in (WORD, PIECE):
        best = favourites(model, name, what, model.context.options.top)
        differs = differences(model, name, what)
        numbers[what] = {
            "counted": int(counted_rows(model, name, what).sum()),
            "largest_random_pmi_bits": finite(largest_random(model, name, what)),
            "difference_bits": finite_list(differs.experts),
            "random_mean_difference_bits": finite(differs.random_mean),
            "random_largest_difference_bits": finite(differs.random_largest),
            "top": [[_noted(favourite) for favourite in found] for found in best],
        }
    return numbers


def _noted(favourite: Favourite) -> Dict[str, Any]:
    text, bits, tokens, share = favourite
    return {"text": text, "pmi_bits": finite(bits), "tokens": tokens, "share": finite(share)}
