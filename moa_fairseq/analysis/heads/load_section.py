"""How evenly experts are used."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence

import torch

from ..report_sections import ReportFigure, ReportSection, ReportTable
from . import statistics
from .counts import RouterTotals
from .figures import RANDOM, TRAINED, UNIFORM, Axes, Panel, heat_maps, panel_grid
from .surveyed import Surveyed, by_model, finite, finite_list, relative_load, suffix

TEXT = (
    "Load is the share of tokens that select an expert, divided by K/E, its share under uniform "
    "routing: 1 is uniform, 2 twice as much. Where K = E nothing is selected, and load is the "
    "expert's share of the gates, divided by 1/E. Intervals are 95 % and are made of sentences, "
    "not of tokens, since tokens of one sentence are not independent.",
    "CV is the coefficient of variation over experts: of how many tokens select each, and of their "
    "shares of the gates; 0 is perfect balance. Chance alone gives the former as much as the "
    "column after it says. Entropy is that of the router's probabilities over all "
    "E experts, in nats a token: 0 is a router that is sure of one expert, ln E one that does "
    "not care. A random router saw the same tokens with weights drawn anew.",
)


def load_section(models: Sequence[Surveyed]) -> ReportSection:
    """Load, gate mass and entropy of every module, beside uniform routing and a random router."""
    figures = [_load_map(models)]
    figures += [_interval_figure(models, model) for model in models]
    return ReportSection(
        "load",
        "Load: how much each expert is used",
        TEXT,
        tuple(figures),
        (_summary(models), _loads(models)),
        {"modules": by_model(models, _numbers)},
    )


def _load_map(models: Sequence[Surveyed]) -> ReportFigure:
    panels = []
    for model in models:
        loads = [relative_load(model.survey.trained[name]).value for name in model.modules()]
        widest = max(map(len, loads))
        values = [
            torch.nn.functional.pad(torch.log2(load), (0, widest - len(load)), value=math.nan)
            for load in loads
        ]
        values = [value.masked_fill(value.isinf(), math.nan) for value in values]
        panels.append(
            Panel(
                model.name,
                torch.stack(values).numpy(),
                [model.label(name) for name in model.modules()],
                [str(expert) for expert in range(widest)],
            )
        )
    most, least = _extremes(models)
    few = max(len(panel.columns) for panel in panels) <= 16
    numbers = "{:+.1f}" if few else None
    unit = "log2 of load (0: uniform, 1: double)"
    axes = Axes("module", "expert", unit, signed=True, limit=1.5, numbers=numbers)
    rows = max(len(panel.rows) for panel in panels)
    width = 8.0 if len(panels) == 1 else 5.2
    figure = heat_maps(panels, axes, len(panels), width, max(3.0, 0.3 * rows + 0.6))
    return ReportFigure(
        "load",
        "Load of every expert (columns) in every module (rows). Orange: used less than uniform "
        "routing would; purple: more. Grey: never used.",
        f"Heat map of load by module and expert. Most used: {most}. Least used: {least}.",
        figure,
    )


def _extremes(models: Sequence[Surveyed]) -> List[str]:
    found = [
        (float(load), f"{model.label(name)} expert {expert} of {model.name} ({float(load):.2f})")
        for model in models
        for name in model.modules()
        for expert, load in enumerate(relative_load(model.survey.trained[name]).value)
    ]
    return [max(found)[1], min(found)[1]]


def _interval_figure(models: Sequence[Surveyed], model: Surveyed) -> ReportFigure:
    names = model.modules()
    routers = [*model.survey.trained.values(), *model.survey.random.values()]
    top = 1.05 * max(float(relative_load(totals).value.max()) for totals in routers)

    def draw(axis: Any, number: int) -> None:
        trained = relative_load(model.survey.trained[names[number]])
        other = relative_load(model.survey.random[names[number]])
        experts = range(len(trained.value))
        axis.axhline(1, color=UNIFORM, linewidth=0.8, label="uniform")
        axis.plot(
            *(experts, other.value),
            **{"color": RANDOM, "marker": "D", "markersize": 3, "linestyle": "none"},
            label="random router",
        )
        axis.errorbar(
            *(experts, trained.value, trained.half_width.nan_to_num(nan=0.0)),
            **{"color": TRAINED, "marker": "o", "markersize": 3, "linestyle": "none"},
            label="trained, 95 % interval",
        )
        axis.set_ylim(0, top)
        axis.grid(axis="y", alpha=0.3)

    worst = max(
        names,
        key=lambda name: statistics.coefficient_of_variation(
            relative_load(model.survey.trained[name]).value
        ),
    )
    mark, of = suffix(models, model)
    return ReportFigure(
        f"load_intervals{mark}",
        "Load of each expert with its interval, and that which a random router gives it. A point "
        "whose interval leaves out the line differs from uniform." + of,
        f"Points with error bars for every module; the most uneven is {model.label(worst)}.",
        panel_grid(
            [model.label(name) for name in names],
            draw,
            model.across(),
            ("expert", "load (1: uniform)"),
        ),
    )


def _numbers(model: Surveyed, name: str) -> Dict[str, Any]:
    trained, other = model.survey.trained[name], model.survey.random[name]
    return {
        "kind": model.survey.modules[name],
        "experts": trained.num_experts,
        "selected": trained.num_selected,
        "tokens": int(trained.selected.n),
        "sentences": trained.selected.sentences,
        "trained": _of_router(trained),
        "random": _of_router(other),
        "uniform": {
            "share": trained.num_selected / trained.num_experts,
            "load_cv": finite(_chance_variation(trained)),
            "entropy_nats": finite(math.log(trained.num_experts)),
        },
    }


def _of_router(totals: RouterTotals) -> Dict[str, Any]:
    share, gates = statistics.ratio(totals.selected), statistics.ratio(totals.gates)
    entropy = statistics.ratio(totals.entropy)
    return {
        "selections": [int(count) for count in totals.selected.y],
        "share": finite_list(share.value),
        "share_half_width": finite_list(share.half_width),
        "gate_share": finite_list(gates.value),
        "gate_share_half_width": finite_list(gates.half_width),
        "load_cv": finite(statistics.coefficient_of_variation(totals.selected.y)),
        "gate_cv": finite(statistics.coefficient_of_variation(totals.gates.y)),
        "unused": int((totals.selected.y == 0).sum()),
        "entropy_nats": finite(entropy.value[0]),
        "entropy_half_width": finite(entropy.half_width[0]),
    }


def _chance_variation(totals: RouterTotals) -> float:
    return statistics.uniform_variation(totals.selected.n, totals.num_selected, totals.num_experts)


def _summary(models: Sequence[Surveyed]) -> ReportTable:
    rows = []
    for model in models:
        for name in model.modules():
            numbers = _numbers(model, name)
            trained, other, uniform = (numbers[key] for key in ("trained", "random", "uniform"))
            rows.append(
                (
                    *(model.name, model.label(name), numbers["selected"], numbers["experts"]),
                    *(numbers["tokens"], trained["load_cv"], uniform["load_cv"]),
                    *(other["load_cv"], trained["gate_cv"], other["gate_cv"], trained["unused"]),
                    *(trained["entropy_nats"], trained["entropy_half_width"]),
                    *(other["entropy_nats"], uniform["entropy_nats"]),
                )
            )
    header = (
        *("model", "module", "K", "E", "tokens", "CV of selections", "by chance", "random router"),
        *(
            "CV of gates",
            "random router",
            "unused experts",
            "entropy, nats",
            "± (95 %)",
            "random router",
            "ln E",
        ),
    )
    return ReportTable(
        "load_summary", "Balance and entropy of every module.", header, rows, shown=len(rows)
    )


def _loads(models: Sequence[Surveyed]) -> ReportTable:
    rows = []
    for model in models:
        for name in model.modules():
            numbers = _numbers(model, name)
            trained, other = numbers["trained"], numbers["random"]
            loads = relative_load(model.survey.trained[name]).value
            for expert in range(numbers["experts"]):
                rows.append(
                    (
                        *(model.name, model.label(name), expert, trained["selections"][expert]),
                        *(trained["share"][expert], trained["share_half_width"][expert]),
                        finite(loads[expert], 4),
                        *(trained["gate_share"][expert], trained["gate_share_half_width"][expert]),
                        *(other["share"][expert], other["gate_share"][expert]),
                    )
                )
    header = (
        *("model", "module", "expert", "tokens that select it", "share of tokens", "± (95 %)"),
        *("load", "share of gates", "± (95 %)", "random router's share", "and of gates"),
    )
    return ReportTable("load", "Load of every expert.", header, rows)
