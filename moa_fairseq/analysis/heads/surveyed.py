"""A surveyed model, and what several sections ask of one."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Sequence, Tuple

from torch import Tensor

from ...modules.recording import ROUTED_KINDS
from ..report_sections import ReportSection
from . import statistics
from .context import ModelContext
from .counts import RouterTotals, StreamTotals, Survey
from .statistics import Estimate
from .streams import frequency_labels, position_labels, stream_of

PIECE, WORD, POSITION, FREQUENCY = "piece", "word", "position", "frequency"


@dataclass(frozen=True)
class Surveyed:
    """A model and what was counted of it."""

    context: ModelContext
    survey: Survey

    @property
    def name(self) -> str:
        return self.context.name

    def modules(self) -> List[str]:
        """Names of routed modules, kind after kind and layer after layer."""
        kinds = self.survey.modules
        return sorted(kinds, key=lambda name: ROUTED_KINDS.index(kinds[name]))

    def label(self, module: str) -> str:
        """What pages and plots call a module: its kind and the number of its layer."""
        layer = re.search(r"layers\.(\d+)", module)
        kind = self.survey.modules[module]
        return f"{kind} {layer[1]}" if layer else f"{kind} {module}"

    def stream(self, module: str) -> StreamTotals:
        return self.survey.streams[stream_of(self.survey.modules[module])]

    def across(self) -> int:
        """Panels beside each other in a grid of modules: a row for each kind, where they fit."""
        kinds = list(self.survey.modules.values())
        most = max(kinds.count(kind) for kind in kinds)
        return most if most <= 6 else min(6, math.ceil(most / 2))

    def row_names(self, module: str, what: str) -> List[str]:
        """Names of the rows of a module's table of pieces, words, positions or frequencies."""
        stream = stream_of(self.survey.modules[module])
        if what == WORD:
            return self.survey.words[stream]
        if what == PIECE:
            task = self.context.task
            dictionary = task.source_dictionary if stream == "source" else task.target_dictionary
            return [dictionary[index] for index in range(len(dictionary))]
        return position_labels() if what == POSITION else frequency_labels()

    def row_counts(self, module: str, what: str) -> Tensor:
        """`[R]`: tokens (for words, occurrences) of each row."""
        stream = self.stream(module)
        counts = {
            PIECE: stream.pieces,
            WORD: stream.words,
            POSITION: stream.positions,
            FREQUENCY: stream.frequencies,
        }
        return counts[what][: len(self.row_names(module, what))]


def table_of(totals: RouterTotals, what: str) -> Tensor:
    """`[R, E]` mass of a router by piece, word, position or frequency."""
    tables = {
        PIECE: totals.pieces,
        WORD: totals.words,
        POSITION: totals.positions,
        FREQUENCY: totals.frequencies,
    }
    return tables[what]


def relative_load(totals: RouterTotals) -> Estimate:
    """`[E]`: each expert's share of the mass over that under uniform routing."""
    sums = totals.selected if totals.selects else totals.gates
    value, half_width = statistics.ratio(sums)
    scale = totals.num_experts / totals.mass_of_token
    return Estimate(value * scale, half_width * scale)


def preferences(model: Surveyed, module: str, what: str, totals: RouterTotals) -> Tensor:
    """`[R, E]` PMI in bits; NaN where a row has fewer tokens than `min_count`."""
    counts = model.row_counts(module, what)
    table = table_of(totals, what)[: len(counts)]
    values = statistics.pmi(table, counts, totals.mass_of_token, table.sum(0) / table.sum())
    enough = counts >= model.context.options.min_count
    return values.masked_fill(~enough.unsqueeze(1), math.nan)


def finite(value: Any, digits: int = 6) -> Any:
    """A number for JSON and tables, None where there is none."""
    number = float(value)
    return round(number, digits) if math.isfinite(number) else None


def finite_list(values: Tensor, digits: int = 6) -> Any:
    """As :func:`finite`, for a tensor of any shape."""
    if values.dim() == 0:
        return finite(values, digits)
    return [finite_list(value, digits) for value in values]


def slug(name: str) -> str:
    """A name that a file may have."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-.")


def of_model(section: ReportSection, name: str) -> ReportSection:
    """The section with names that say which model it is of, where a report has several."""
    mark = slug(name)
    return replace(
        section,
        name=f"{section.name}_{mark}",
        title=f"{section.title} — {name}",
        figures=tuple(replace(each, name=f"{each.name}_{mark}") for each in section.figures),
        tables=tuple(replace(each, name=f"{each.name}_{mark}") for each in section.tables),
    )


def suffix(models: Sequence[Surveyed], model: Surveyed) -> Tuple[str, str]:
    """What to add to file names and to captions of one of several models; nothing for one."""
    return ("", "") if len(models) == 1 else (f"_{slug(model.name)}", f" Model {model.name}.")


def by_model(models: Sequence[Surveyed], numbers: Any) -> Dict[str, Any]:
    """`{model: {module: numbers(model, module)}}`."""
    return {
        model.name: {module: numbers(model, module) for module in model.modules()}
        for model in models
    }
