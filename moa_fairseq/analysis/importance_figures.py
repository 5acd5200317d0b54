"""Pictures of what masking experts does."""

from __future__ import annotations

from typing import Any, List, Sequence

import numpy as np

SIGNED_COLOURS = "PuOr_r"
LAYER_COLOURS = "viridis"
LAYER_MARKERS = "os^Dv<>P"


def change_figure(results: Sequence[Any]) -> Any:
    """Modules × experts, coloured by the change of loss; beside it, each whole module masked.

    Args:
        results: `ExpertImportance`s of one model.

    Returns:
        a `matplotlib.figure.Figure`.
    """
    from matplotlib.colors import FuncNorm
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(result.label for result in results))
    experts = 1 + max(result.expert for result in results if result.expert is not None)
    values = np.full((len(labels), experts), np.nan)
    marked = []
    whole: List[Any] = [None] * len(labels)
    for result in results:
        row = labels.index(result.label)
        if result.expert is None:
            whole[row] = result.loss
        else:
            values[row, result.expert] = result.loss.value
            if result.loss.excludes_zero:
                marked.append((result.expert, row))
    cells = max(0.27 * experts, 3.0)
    figure = Figure(figsize=(cells + 5.4, max(0.33 * len(labels) + 1.7, 3.2)), layout="constrained")
    heat, bars = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": (cells, 2.6)})
    largest = float(np.nanmax(np.abs(values))) or 1.0
    image = heat.imshow(
        np.ma.masked_invalid(values),
        cmap=SIGNED_COLOURS,
        # Linear, the strongest expert would leave no colour to the others.
        norm=FuncNorm((_signed_root, _signed_square), -largest, largest),
        aspect="auto",
        interpolation="nearest",
    )
    for expert, row in marked:
        heat.plot(expert, row, ".", color="black", markersize=4)
    heat.set_xticks(range(0, experts, 1 if experts <= 16 else 2))
    heat.set_yticks(range(len(labels)), labels)
    heat.set_xlabel("expert (dot: 95 % interval without 0)")
    heat.set_title("one expert masked", fontsize="medium")
    bar = figure.colorbar(image, ax=heat, location="left", pad=0.02)
    bar.set_label("change of loss,\nnats per token (root scale)")
    ticks = _ticks(-largest, largest)
    bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
    bar.ax.minorticks_off()
    rows = np.arange(len(labels))
    changes = np.array([estimate.value for estimate in whole])
    errors = np.abs([[e.value - e.low, e.high - e.value] for e in whole]).T
    bars.barh(rows, changes, xerr=errors, color="#999999", ecolor="black", capsize=2)
    bars.axvline(0, color="black", linewidth=0.8)
    bars.set_xlabel("change of loss, nats per token")
    bars.set_title("whole module masked", fontsize="medium")
    bars.tick_params(labelleft=False)
    bars.grid(axis="x", alpha=0.3)
    return figure


def _signed_root(values: Any) -> Any:
    return np.sign(values) * np.sqrt(np.abs(values))


def _signed_square(values: Any) -> Any:
    return np.sign(values) * np.square(values)


def _ticks(low: float, high: float) -> List[float]:
    """Ticks of a root scale that lie well apart."""
    largest = max(abs(low), abs(high))
    ticks = [sign * largest * part for sign in (-1, 1) for part in (1, 0.5, 0.2, 0.05)]
    return [0.0, *(tick for tick in ticks if low <= tick <= high)]


def load_figure(results: Sequence[Any]) -> Any:
    """Change of loss over share of the gates, one panel for each kind of module.

    Args:
        results: `ExpertImportance`s of one model.

    Returns:
        a `matplotlib.figure.Figure`.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    single = [result for result in results if result.expert is not None]
    kinds = list(dict.fromkeys(result.kind for result in single))
    layers = 1 + max(result.position for result in single)
    styles = [
        {
            # The end of the scale is too pale on white.
            "color": colormaps[LAYER_COLOURS](0.8 * layer / max(layers - 1, 1)),
            "marker": LAYER_MARKERS[layer % len(LAYER_MARKERS)],
            "linestyle": "none",
            "markersize": 4,
        }
        for layer in range(layers)
    ]
    figure = Figure(figsize=(3.6 * len(kinds) + 1.3, 3.4), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for panel, kind in zip(panels, kinds):
        for result in single:
            if result.kind == kind:
                panel.plot(100 * result.gate_share, result.loss.value, **styles[result.position])
        panel.axhline(0, color="black", linewidth=0.8)
        changes = [result.loss.value for result in single if result.kind == kind]
        # As in the other picture: one expert may matter much more than all others.
        panel.set_yscale("function", functions=(_signed_root, _signed_square))
        ticks = _ticks(min(*changes, 0.0), max(*changes, 0.0))
        panel.set_yticks(ticks, [f"{tick:.2g}" for tick in ticks])
        panel.set_title(kind, fontsize="medium")
        panel.set_xlabel("share of the module's gates, %")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("change of loss when masked,\nnats per token (root scale)")
    handles = [
        Line2D([], [], label=f"layer {layer}", **style) for layer, style in enumerate(styles)
    ]
    figure.legend(handles=handles, loc="outside right center")
    return figure


def bleu_figure(results: Sequence[Any]) -> Any:
    """Change of BLEU of the experts for which it was measured, with intervals."""
    from matplotlib.figure import Figure

    measured = [
        result for result in results if result.bleu is not None and result.expert is not None
    ]
    measured.sort(key=lambda result: result.bleu.value, reverse=True)
    figure = Figure(figsize=(6.5, 0.24 * len(measured) + 1.0), layout="constrained")
    panel = figure.subplots()
    for row, result in enumerate(measured):
        estimate = result.bleu
        colour = "#D55E00" if estimate.excludes_zero else "#999999"
        panel.plot([estimate.low, estimate.high], [row, row], color=colour)
        panel.plot(estimate.value, row, "o", color=colour, markersize=5)
    panel.axvline(0, color="black", linewidth=0.8)
    panel.set_yticks(
        range(len(measured)), [f"{result.label}, expert {result.expert}" for result in measured]
    )
    panel.set_ylim(-0.7, len(measured) - 0.3)
    panel.set_xlabel("change of BLEU when masked, with 95 % interval")
    panel.grid(axis="x", alpha=0.3)
    return figure
