"""The load of every expert in every module, as a heat map."""

from __future__ import annotations

import math
from typing import Any, Mapping, Optional, Sequence

#: Loads beyond so many times the uniform one, or below its inverse, look the same.
WIDEST = 4.0


def relative_load(counts: Sequence[float]) -> Optional[Sequence[float]]:
    """Each expert's share of the selections, as a multiple of 1/E; None without a selection."""
    total = sum(counts)
    if total == 0:
        return None
    return [count * len(counts) / total for count in counts]


def load_figure(counts: Mapping[str, Sequence[float]], title: str) -> Any:
    """A `matplotlib.figure.Figure` with a row for each module and a column for each expert.

    Args:
        counts: selections of each expert, by module. A module without any is marked as having
            had no token.
        title: above it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    widest = max(len(row) for row in counts.values())
    figure = Figure(
        figsize=(3.4 + 0.22 * max(widest, 12), 1.5 + 0.26 * max(len(counts), 3)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    cells, marks = [], []
    for place, row in enumerate(counts.values()):
        load = relative_load(row)
        blank = [math.nan] * (widest - len(row))
        if load is None:
            cells.append([math.nan] * widest)
            centre = (len(row) - 1) / 2
            axis.text(centre, place, "no tokens", ha="center", va="center", color="dimgrey")
            continue
        # A logarithm has no zero: an expert without a token has the least load, and a mark.
        cells.append([*(max(value, 1e-9) for value in load), *blank])
        marks += [(column, place) for column, value in enumerate(load) if value == 0]
    image = axis.imshow(
        cells,
        cmap="PuOr",
        norm=LogNorm(1 / WIDEST, WIDEST),
        aspect="auto",
        interpolation="none",
    )
    if marks:
        columns, places = zip(*marks)
        axis.plot(columns, places, linestyle="none", marker="x", color="white", markersize=5)
    axis.set_yticks(range(len(counts)), list(counts))
    step = max(1, widest // 16)
    axis.set_xticks(range(0, widest, step))
    axis.set_xlabel("expert" + (" (×: never selected)" if marks else ""))
    axis.set_title(title, fontsize="medium")
    bar = figure.colorbar(image, ax=axis, extend="both")
    ticks = {1 / WIDEST: "¼", 0.5: "½", 1: "1", 2: "2", WIDEST: "4"}
    bar.set_ticks(list(ticks), labels=list(ticks.values()), minor=False)
    bar.minorticks_off()
    bar.set_label("selections, relative to uniform")
    return figure
