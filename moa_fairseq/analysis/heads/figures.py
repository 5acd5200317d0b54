"""Pictures of matrices and of values with intervals, in colours that everybody can tell apart."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Sequence

import numpy as np

# Okabe and Ito's.
TRAINED, RANDOM, UNIFORM = "#0072B2", "#E69F00", "#000000"
SIGNED, MAGNITUDE = "PuOr", "cividis"
NO_VALUE = "#D9D9D9"
#: Inches of a panel in a grid.
PANEL_WIDTH, LEAST_PANEL_HEIGHT = 2.9, 2.2


class Panel(NamedTuple):
    """A matrix to draw.

    Attributes:
        title: above it.
        values: `[R, C]`; NaN is drawn grey.
        rows, columns: names.
    """

    title: str
    values: Any
    rows: Sequence[str]
    columns: Sequence[str]


class Axes(NamedTuple):
    """What the axes and colours of panels mean.

    Attributes:
        rows, columns, colours: labels with units.
        signed: whether values lie on both sides of zero, and colours too.
        limit: largest size that has a colour of its own.
        numbers: format of the values written into cells; None writes none.
    """

    rows: str
    columns: str
    colours: str
    signed: bool
    limit: float
    numbers: Optional[str] = None


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches whose parts keep clear of each other."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def heat_maps(panels: Sequence[Panel], axes: Axes, across: int, width: float, height: float) -> Any:
    """A figure of matrices that share their colours.

    Args:
        panels: in reading order.
        axes: what they show.
        across: panels beside each other.
        width, height: of one panel, in inches.
    """
    import matplotlib.colors

    down = -(-len(panels) // across)
    figure = new_figure(across * width + 1.2, down * height + 0.4)
    grid = figure.subplots(down, across, squeeze=False)
    colours = matplotlib.colormaps[MAGNITUDE]
    if axes.signed:
        # Both ends are nearly black, and could not be told apart.
        shades = matplotlib.colormaps[SIGNED](np.linspace(0.1, 0.9, 256))
        colours = matplotlib.colors.ListedColormap(shades)
    colours = colours.with_extremes(bad=NO_VALUE)
    low = -axes.limit if axes.signed else 0.0
    image = None
    for axis, panel in zip(grid.flat, panels):
        values = np.asarray(panel.values, dtype=float)
        image = axis.imshow(
            np.ma.masked_invalid(values),
            **{"cmap": colours, "vmin": low, "vmax": axes.limit, "aspect": "auto"},
            interpolation="nearest",
        )
        axis.set_title(panel.title, fontsize=10)
        _ticks(axis.xaxis, panel.columns, width)
        _ticks(axis.yaxis, panel.rows, height)
        if any(len(name) > 2 for name in panel.columns):
            axis.tick_params(axis="x", rotation=90)
        if axes.numbers is not None:
            _write_numbers(axis, values, axes, low)
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    figure.supxlabel(axes.columns, fontsize=10)
    figure.supylabel(axes.rows, fontsize=10)
    bar = figure.colorbar(image, ax=grid, shrink=min(1.0, 3.5 / (down * height)), pad=0.02)
    bar.set_label(axes.colours, fontsize=9)
    return figure


def _ticks(axis: Any, names: Sequence[str], inches: float) -> None:
    """As many names as there is room for."""
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64) if len(names) / step <= inches * 5.5)
    places = range(0, len(names), step)
    axis.set_ticks(list(places), [names[place] for place in places], fontsize=7)


def _write_numbers(axis: Any, values: Any, axes: Axes, low: float) -> None:
    for (row, column), value in np.ndenumerate(values):
        if np.isnan(value):
            continue
        place = (min(max(value, low), axes.limit) - low) / (axes.limit - low)
        # Both ends of the signed colours are dark, one end of the others.
        dark = abs(place - 0.5) > 0.32 if axes.signed else place < 0.5
        axis.text(
            *(column, row, axes.numbers.format(value) if axes.numbers else ""),
            **{"ha": "center", "va": "center", "fontsize": 7},
            color="white" if dark else "black",
        )


def panel_grid(
    titles: Sequence[str],
    draw: Callable[[Any, int], None],
    across: int,
    labels: Sequence[str],
    height: float = LEAST_PANEL_HEIGHT,
) -> Any:
    """A figure of panels with common axes; `draw` gets an axis and the number of its panel.

    Args:
        titles: of the panels.
        draw: fills one.
        across: panels beside each other.
        labels: of the horizontal and of the vertical axis.
        height: of one panel, in inches.
    """
    down = -(-len(titles) // across)
    figure = new_figure(across * PANEL_WIDTH + 0.6, down * height + 0.8)
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for number, (axis, title) in enumerate(zip(grid.flat, titles)):
        draw(axis, number)
        axis.set_title(title, fontsize=10)
        axis.tick_params(labelsize=7)
    for axis in grid.flat[len(titles) :]:
        axis.set_visible(False)
    figure.supxlabel(labels[0], fontsize=10)
    figure.supylabel(labels[1], fontsize=10)
    handles, names = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), fontsize=9)
    return figure


def panel_height(rows: int) -> float:
    """Inches for a panel of so many rows."""
    return max(LEAST_PANEL_HEIGHT, 0.9 + 0.085 * rows)
