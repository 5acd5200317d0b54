"""Selection against position in the sentence, and against frequency."""

from __future__ import annotations

import math
from typing import Any, Dict, Sequence, Tuple

from torch import Tensor

from ..report_sections import ReportFigure, ReportSection, ReportTable
from .figures import Axes, Panel, heat_maps, panel_height
from .surveyed import (
    FREQUENCY,
    POSITION,
    Surveyed,
    by_model,
    finite,
    finite_list,
    preferences,
    suffix,
)
from .token_section import differences

TITLES = {
    POSITION: "Position in the sentence",
    FREQUENCY: "Frequency of the piece",
}
TEXT = {
    POSITION: (
        "How much likelier tokens at a position use an expert than tokens do on average, in bits "
        "(1: twice as likely). Positions count from 1, the first token of the router's input; "
        "“end” is the sign that ends a sentence. In a target, position 1 is the sign that starts "
        "it."
    ),
    FREQUENCY: (
        "How much likelier tokens of pieces of some frequency use an expert than tokens do on "
        "average, in bits. Frequency is the piece's count in the training data, from the "
        "dictionary; special symbols have a column of their own."
    ),
}
COLUMNS = {POSITION: "position", FREQUENCY: "count in the training data"}


def place_section(what: str, models: Sequence[Surveyed]) -> ReportSection:
    """The section on positions or on frequencies; `what` is `POSITION` or `FREQUENCY`."""
    return ReportSection(
        what,
        TITLES[what],
        (
            TEXT[what] + " Columns with fewer tokens than --min-count are left out. “Effect” "
            "below is how much an expert's tokens differ from all tokens in this, in bits.",
        ),
        tuple(_map(what, models, model) for model in models),
        (_table(what, models),),
        {"modules": by_model(models, lambda model, name: _numbers(what, model, name))},
    )


def place_section_of_position(models: Sequence[Surveyed]) -> ReportSection:
    """Selection against position."""
    return place_section(POSITION, models)


def place_section_of_frequency(models: Sequence[Surveyed]) -> ReportSection:
    """Selection against frequency."""
    return place_section(FREQUENCY, models)


def _filled(what: str, model: Surveyed, name: str) -> Tensor:
    return model.row_counts(name, what) >= model.context.options.min_count


def _map(what: str, models: Sequence[Surveyed], model: Surveyed) -> ReportFigure:
    panels = []
    most = 0
    for name in model.modules():
        rows = _filled(what, model, name)
        values = preferences(model, name, what, model.survey.trained[name])[rows].T  # [E, R]
        labels = [label for label, kept in zip(model.row_names(name, what), rows.tolist()) if kept]
        experts = [str(expert) for expert in range(len(values))]
        most = max(most, len(experts))
        panels.append(
            Panel(
                model.label(name),
                values.masked_fill(values == -math.inf, -9.0).numpy(),
                experts,
                labels,
            )
        )
    axes = Axes("expert", COLUMNS[what], "PMI, bits", signed=True, limit=2.0)
    mark, of = suffix(models, model)
    effect, name, expert = strongest(what, model)
    return ReportFigure(
        f"{what}{mark}",
        f"Purple: experts (rows) that tokens of a column use more than others; orange: less.{of}",
        f"Heat map of experts and {COLUMNS[what]} for every module. The strongest effect is that "
        f"of {model.label(name)} expert {expert}, {effect:.2f} bits.",
        heat_maps(panels, axes, model.across(), 2.7, panel_height(most) + 0.35),
    )


def strongest(what: str, model: Surveyed) -> Tuple[float, str, int]:
    """The strongest effect in bits, with its module and expert."""
    found = [
        (float(value), name, expert)
        for name in model.modules()
        for expert, value in enumerate(differences(model, name, what).experts)
        if math.isfinite(float(value))
    ]
    return max(found, default=(math.nan, model.modules()[0], 0))


def _numbers(what: str, model: Surveyed, name: str) -> Dict[str, Any]:
    trained = preferences(model, name, what, model.survey.trained[name])
    other = preferences(model, name, what, model.survey.random[name])
    effects = differences(model, name, what)
    return {
        "bins": model.row_names(name, what),
        "tokens": [int(count) for count in model.row_counts(name, what)],
        "pmi_bits": finite_list(trained, 4),
        "random_pmi_bits": finite_list(other, 4),
        "effect_bits": finite_list(effects.experts),
        "random_mean_effect_bits": finite(effects.random_mean),
        "random_largest_effect_bits": finite(effects.random_largest),
    }


def _table(what: str, models: Sequence[Surveyed]) -> ReportTable:
    rows = []
    for model in models:
        for name in model.modules():
            numbers = _numbers(what, model, name)
            random = [numbers[f"random_{key}_effect_bits"] for key in ("mean", "largest")]
            for expert, effect in enumerate(numbers["effect_bits"]):
                column = [row[expert] for row in numbers["pmi_bits"]]
                known = [(bits, row) for row, bits in enumerate(column) if bits is not None]
                best = max(known, default=(None, 0))
                rows.append(
                    (
                        *(model.name, model.label(name), expert, effect, *random),
                        numbers["bins"][best[1]] if known else None,
                        best[0],
                        numbers["tokens"][best[1]] if known else None,
                    )
                )
    rows.sort(key=lambda row: -(row[3] or 0.0))
    header = (
        *("model", "module", "expert", "effect, bits", "random router: mean", "largest"),
        *(f"preferred {COLUMNS[what]}", "PMI there, bits", "tokens there"),
    )
    return ReportTable(
        what,
        f"Experts by how much {TITLES[what].lower()} matters to them; report.json has every bin.",
        header,
        rows,
        shown=12,
    )


def preferred(what: str, model: Surveyed, name: str) -> Sequence[Any]:
    """For each expert the bin with the highest PMI and its bits; None where there is none."""
    values = preferences(model, name, what, model.survey.trained[name])
    labels = model.row_names(name, what)
    found = []
    for expert in range(values.shape[1]):
        column = values[:, expert].nan_to_num(nan=-math.inf)
        row = int(column.argmax())
        bits = finite(column[row], 2)
        found.append(None if bits is None else (labels[row], bits))
    return found
