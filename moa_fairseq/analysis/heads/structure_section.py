"""Which experts are used together, and how far layers agree."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import Tensor

from ..report_sections import ReportFigure, ReportSection, ReportTable
from . import statistics
from .counts import RouterTotals
from .figures import Axes, Panel, heat_maps, panel_height
from .streams import SOURCE, TARGET, stream_of
from .surveyed import Surveyed, by_model, finite, suffix

STREAM_TEXT = {SOURCE: "source tokens", TARGET: "target tokens"}


def together(totals: RouterTotals) -> Tensor:
    """`[E, E]`, NaN on the diagonal: how much experts go together.

    Log2 of how often they are selected together over how often they would be by their loads
    alone, or the correlation of their gate shares where nothing is selected. With K = 1 experts
    are never together, and all of it is NaN.
    """
    if not totals.selects:
        values = statistics.gate_correlations(totals)
    elif totals.num_selected == 1:
        values = torch.full_like(totals.pairs, math.nan)
    else:
        values = torch.log2(totals.pairs / statistics.independent_pairs(totals.pairs))
    return values.masked_fill(torch.eye(totals.num_experts, dtype=torch.bool), math.nan)


def spread(totals: RouterTotals) -> float:
    """Mean size of :func:`together` over pairs of experts, never-together pairs left out."""
    values = together(totals)
    values = values[values.isfinite()]
    return float(values.abs().mean()) if values.numel() else math.nan


def together_section(models: Sequence[Surveyed]) -> ReportSection:
    """Co-selection of experts in every module."""
    return ReportSection(
        "together",
        "Which experts go together",
        (
            "For K < E: log2 of how often two experts are selected for the same token over how "
            "often they would be if only their loads mattered (given that each token has exactly K "
            "experts): 1 is twice as often. For K = E, where all are always together: the "
            "correlation over tokens of their gates, which is −1/(E − 1) on average by itself. The "
            "table has counts, and its summary says how large values are for a random router.",
        ),
        tuple(_together_map(models, model) for model in models),
        (_together_summary(models), _together_table(models)),
        {"modules": by_model(models, _together_numbers)},
    )


def _together_map(models: Sequence[Surveyed], model: Surveyed) -> ReportFigure:
    panels = []
    most = 0
    for name in model.modules():
        totals = model.survey.trained[name]
        most = max(most, totals.num_experts)
        experts = [str(expert) for expert in range(totals.num_experts)]
        values = together(totals)
        values = values.masked_fill(values == -math.inf, -9.0)
        panels.append(Panel(model.label(name), values.numpy(), experts, experts))
    selects = any(totals.selects for totals in model.survey.trained.values())
    unit = "log2 of observed over expected" if selects else "correlation of gates"
    axes = Axes("expert", "expert", unit, signed=True, limit=2.0 if selects else 1.0)
    mark, of = suffix(models, model)
    return ReportFigure(
        f"together{mark}",
        "Purple: experts that are used for the same tokens; orange: experts that avoid each "
        "other." + of,
        "Heat map of pairs of experts for every module. " + _strongest_pair(model),
        heat_maps(panels, axes, model.across(), 2.6, max(2.3, panel_height(most) - 0.6)),
    )


def strongest_pair(model: Surveyed) -> Tuple[float, str, int, int]:
    """The largest value of :func:`together`, its module and the two experts; NaN without pairs."""
    found: List[Tuple[float, str, int, int]] = []
    for name in model.modules():
        values = together(model.survey.trained[name]).nan_to_num(
            nan=-math.inf, posinf=-math.inf, neginf=-math.inf
        )
        place = int(values.argmax())
        first, second = divmod(place, values.shape[1])
        if math.isfinite(float(values[first, second])):
            found.append((float(values[first, second]), name, first, second))
    return max(found, default=(math.nan, "", 0, 0))


def _strongest_pair(model: Surveyed) -> str:
    value, name, first, second = strongest_pair(model)
    if math.isnan(value):
        return "No two experts are ever used together."
    return f"Most together: experts {first} and {second} of {model.label(name)} ({value:.2f})."


def _together_numbers(model: Surveyed, name: str) -> Dict[str, Any]:
    trained, other = model.survey.trained[name], model.survey.random[name]
    return {
        "measure": "log2_ratio" if trained.selects else "gate_correlation",
        "mean_size": finite(spread(trained)),
        "random_mean_size": finite(spread(other)),
        "values": [[finite(value, 4) for value in row] for row in together(trained)],
    }


def _together_summary(models: Sequence[Surveyed]) -> ReportTable:
    rows = []
    for model in models:
        for name in model.modules():
            numbers = _together_numbers(model, name)
            rows.append(
                (
                    *(model.name, model.label(name), numbers["measure"].replace("_", " ")),
                    *(numbers["mean_size"], numbers["random_mean_size"]),
                )
            )
    header = ("model", "module", "measure", "mean size", "of the random router")
    return ReportTable(
        *("together_summary", "How far from independent pairs of experts are.", header, rows),
        shown=len(rows),
    )


def _together_table(models: Sequence[Surveyed]) -> ReportTable:
    rows = []
    for model in models:
        for name in model.modules():
            totals = model.survey.trained[name]
            values = together(totals)
            counted = totals.selects and totals.num_selected > 1
            expected = statistics.independent_pairs(totals.pairs) if counted else None
            for first in range(totals.num_experts):
                for second in range(first + 1, totals.num_experts):
                    rows.append(
                        (
                            *(model.name, model.label(name), first, second),
                            int(totals.pairs[first, second]) if counted else None,
                            None if expected is None else finite(expected[first, second], 2),
                            finite(values[first, second], 4),
                        )
                    )
    rows.sort(key=lambda row: -abs(row[-1]) if row[-1] is not None else 0.0)
    header = (
        *("model", "module", "expert", "other expert", "tokens that select both"),
        *("expected from their loads", "log2 of the ratio, or correlation of gates"),
    )
    return ReportTable(
        "together", "Pairs of experts, the farthest from independent first.", header, rows
    )


def agreements(model: Surveyed, stream: str, random: bool = False) -> Tuple[List[str], Tensor]:
    """Modules of a stream, and `[M, M]` how far each two agree (NaN on the diagonal)."""
    survey = model.survey
    names = [name for name in model.modules() if stream_of(survey.modules[name]) == stream]
    routers = survey.random if random else survey.trained
    values = torch.full((len(names), len(names)), math.nan, dtype=torch.float64)
    for (first, second), joint in (survey.random_joint if random else survey.joint).items():
        if first in names and second in names:
            row, column = names.index(first), names.index(second)
            value = statistics.agreement(joint, routers[first].pairs, routers[second].pairs)
            values[row, column] = values[column, row] = value
    return names, values


def agreement_section(models: Sequence[Surveyed]) -> ReportSection:
    """How far the choices of two modules for the same token determine each other."""
    figures = []
    for stream in (SOURCE, TARGET):
        panels = []
        for model in models:
            for which, random in (("trained", False), ("random routers", True)):
                names, values = agreements(model, stream, random)
                if len(names) < 2:
                    continue
                labels = [model.label(name) for name in names]
                title = which if len(models) == 1 else f"{model.name}: {which}"
                panels.append(Panel(title, values.numpy(), labels, labels))
        if not panels:
            continue
        size = max(2.6, 0.32 * max(len(panel.rows) for panel in panels) + 1.0)
        axes = Axes("module", "module", "agreement (1: the same choices)", False, 1.0, "{:.2f}")
        figures.append(
            ReportFigure(
                f"agreement_{stream}",
                f"Agreement of modules on {STREAM_TEXT[stream]}, trained and random.",
                f"Heat map of agreement between modules. {_most_agreeing(models, stream)}",
                heat_maps(panels, axes, 2, size + 0.8, size),
            )
        )
    return ReportSection(
        "agreement",
        "How far layers agree",
        (
            "Experts of two modules have no common numbers, so agreement is mutual information: "
            "how well the choice in one module predicts that in the other, for the same token, as "
            "a share of what two draws from the same module share. 0 is none, 1 the same choice "
            "under other names. Random routers see hidden states that the layers pass on to each "
            "other, and so agree too; compare with them.",
        ),
        tuple(figures),
        (_agreement_table(models),),
        {
            model.name: {
                stream: {
                    "modules": agreements(model, stream)[0],
                    "trained": [[finite(v) for v in row] for row in agreements(model, stream)[1]],
                    "random": [
                        [finite(v) for v in row] for row in agreements(model, stream, True)[1]
                    ],
                }
                for stream in model.survey.streams
            }
            for model in models
        },
    )


def _most_agreeing(models: Sequence[Surveyed], stream: str) -> str:
    texts = []
    for model in models:
        names, values = agreements(model, stream)
        known = values.nan_to_num(nan=-1.0)
        if len(names) > 1 and bool((known >= 0).any()):
            row, column = divmod(int(known.argmax()), len(names))
            texts.append(
                f"{model.name}: {model.label(names[row])} and {model.label(names[column])} agree "
                f"most ({float(values[row, column]):.2f})."
            )
    return " ".join(texts)


def _agreement_table(models: Sequence[Surveyed]) -> ReportTable:
    rows = []
    for model in models:
        survey = model.survey
        for (first, second), joint in survey.joint.items():
            trained, other = survey.trained, survey.random
            other_joint = survey.random_joint[first, second]
            rows.append(
                (
                    *(model.name, STREAM_TEXT[stream_of(survey.modules[first])]),
                    *(model.label(first), model.label(second), int(trained[first].selected.n)),
                    finite(statistics.information(joint)),
                    finite(statistics.noise_agreement(trained[first], trained[second])),
                    finite(
                        statistics.agreement(joint, trained[first].pairs, trained[second].pairs)
                    ),
                    finite(
                        statistics.agreement(other_joint, other[first].pairs, other[second].pairs)
                    ),
                )
            )
    header = (
        *("model", "tokens of", "module", "other module", "tokens", "mutual information, bits"),
        *("by chance, bits", "agreement", "random routers' agreement"),
    )
    return ReportTable("agreement", "Agreement of every two modules.", header, rows)
