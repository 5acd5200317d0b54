"""A sweep in one table and one picture: what each size cost, and how good it became."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ..analysis.plots import require_matplotlib
from ..analysis.report_sections import ReportFigure, ReportSection, ReportTable
from ..errors import UsageError
from .grid import Point, Size
from .records import FAILED, FINISHED, Sweep, at_work, read_record, read_sweep, status_of

#: What a model's quality can be read from, with its axis.
QUALITIES = {
    "loss": "label-smoothed loss on valid,\nbits a token (lower is better)",
    "nll_loss": "negative log-likelihood on valid,\nbits a token (lower is better)",
    "bleu": "BLEU on valid (higher is better)",
}


class Spread(NamedTuple):
    """A measurement over seeds."""

    mean: float
    least: float
    greatest: float
    values: Tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One size of a sweep, over its seeds.

    Attributes:
        size: of the model.
        seeds: that were asked for, in order.
        finished: those of them that are finished.
        status: of each seed, with the reason where it failed.
        parameters, linear_macs, all_macs: of the model; None where no seed was started.
        updates: of each finished seed.
        measured: by name (`loss`, `nll_loss`, `bleu valid`, …), over the finished seeds.
        signatures: of BLEU, by subset.
    """

    size: Size
    seeds: Tuple[int, ...]
    finished: Tuple[int, ...]
    status: Dict[int, str]
    parameters: Optional[int]
    linear_macs: Optional[int]
    all_macs: Optional[int]
    updates: Tuple[int, ...]
    measured: Dict[str, Spread]
    signatures: Dict[str, str]


def read_rows(folder: Path) -> Tuple[Sweep, List[Row]]:
    """What the folder of a sweep holds.

    Args:
        folder: the `--out` of sweep.sh.

    Raises:
        UsageError: where it is none, or its scores do not compare.
    """
    sweep, running = read_sweep(folder), at_work(folder)
    signatures: Dict[str, str] = {}
    by_size: Dict[Size, List[Point]] = {}
    for point in sweep.points:
        by_size.setdefault(point.size, []).append(point)
    rows = [_row(folder, sweep, points, running, signatures) for points in by_size.values()]
    return sweep, rows


def _row(
    folder: Path,
    sweep: Sweep,
    points: Sequence[Point],
    running: bool,
    signatures: Dict[str, str],
) -> Row:
    points = sorted(points, key=lambda point: point.seed)
    records = {point.seed: read_record(folder, point) for point in points}
    states = {seed: status_of(record, sweep.bleu, running) for seed, record in records.items()}
    finished = [seed for seed, state in states.items() if state == FINISHED]
    measured: Dict[str, List[float]] = {}
    for seed in finished:
        record = records[seed]
        for name in ("loss", "nll_loss"):
            measured.setdefault(name, []).append(record["loss"][name])
        for subset, score in record["bleu"].items():
            measured.setdefault(f"bleu {subset}", []).append(score["score"])
            known = signatures.setdefault(subset, score["signature"])
            if known != score["signature"]:
                raise UsageError(
                    f"{folder}: BLEU on {subset} has two signatures, {known} and "
                    f"{score['signature']}, which do not compare; remove the point.json of the "
                    "points with the older one, and run sweep.sh again"
                )
    costs = next((record for record in records.values() if "parameters" in record), {})
    return Row(
        size=points[0].size,
        seeds=tuple(records),
        finished=tuple(finished),
        status={
            seed: f"{FAILED}: {records[seed]['failure']}" if state == FAILED else state
            for seed, state in states.items()
        },
        parameters=costs.get("parameters"),
        linear_macs=costs.get("linear_macs"),
        all_macs=costs.get("all_macs"),
        updates=tuple(records[seed]["updates"] for seed in finished),
        measured={name: _spread(values) for name, values in measured.items()},
        signatures={subset: signatures[subset] for subset in sweep.bleu if subset in signatures},
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), min(values), max(values), tuple(values))


def section(sweep: Sweep, rows: Sequence[Row], quality: str) -> ReportSection:
    """The table, the picture where a point is finished, and the numbers of a sweep.

    Args:
        sweep, rows: as :func:`read_rows` gives them.
        quality: one of `QUALITIES`, for the picture.

    Raises:
        UsageError: where no point has that quality, or there is a picture to draw and no
            matplotlib.
    """
    name = "bleu valid" if quality == "bleu" else quality
    shown = [row for row in rows if name in row.measured]
    if quality == "bleu" and not shown:
        raise UsageError(
            "--quality bleu: no finished point has it; run sweep.sh with --bleu valid, or use loss"
        )
    figures = (_figure(shown, name, QUALITIES[quality]),) if shown else ()
    return ReportSection(
        name="sweep",
        title="Sweep over experts E, selected experts K and head dimension D",
        paragraphs=_paragraphs(sweep, rows),
        figures=figures,
        tables=(_table(sweep, rows),),
        numbers={
            "overrides": list(sweep.settings.overrides),
            "average": sweep.settings.average,
            "complete": all(row.finished == row.seeds for row in rows),
            "sizes": [_numbers(row) for row in rows],
            "skipped": [size.name for size in sweep.skipped],
        },
    )


def _paragraphs(sweep: Sweep, rows: Sequence[Row]) -> Tuple[str, ...]:
    finished = sum(len(row.finished) for row in rows)
    asked = sum(len(row.seeds) for row in rows)
    lines = []
    if finished < asked:
        lines.append(f"Incomplete: {finished} of {asked} points are finished.")
    average = sweep.settings.average
    epochs = (
        "that of its last epoch" if average == 1 else f"the average of its last {average} epochs"
    )
    lines.append(
        f"Every model is {epochs}. Losses are on "
        "the validation set, in bits a token, without router terms. MACs are those of the linear "
        "layers for 10 source and 10 target tokens, as the paper counts. Over several seeds: the "
        "mean, from the least to the greatest."
    )
    if sweep.settings.overrides:
        lines.append(f"All points with: {' '.join(sweep.settings.overrides)}.")
    for subset in sweep.bleu:
        signatures = {row.signatures[subset] for row in rows if subset in row.signatures}
        lines += [f"BLEU on {subset}: {signature}." for signature in sorted(signatures)]
        if subset.startswith("test"):
            lines.append(f"{subset} is a test set: sizes are not to be chosen by it.")
    if sweep.skipped:
        names = ", ".join(size.name for size in sweep.skipped)
        lines.append(f"Skipped, since K is more than E: {names}.")
    return tuple(lines)


_LABELS = {"loss": "valid loss", "nll_loss": "valid nll"}


def _table(sweep: Sweep, rows: Sequence[Row]) -> ReportTable:
    names = ["loss", "nll_loss", *(f"bleu {subset}" for subset in sweep.bleu)]
    header = ["model", "E", "K", "D", "seeds", "parameters", "MACs", "all MACs", "updates"]
    for name in names:
        label = _LABELS.get(name, name.replace("bleu ", "BLEU "))
        header += [label, f"{label}, least", f"{label}, greatest"]
    cells = []
    for row in rows:
        size = row.size
        line: List[Any] = [
            *(size.name, size.num_experts, size.heads, size.head_dim),
            " ".join(map(str, row.seeds)),
            *(row.parameters, row.linear_macs, row.all_macs),
            " ".join(map(str, sorted(set(row.updates)))) or None,
        ]
        for name in names:
            spread = row.measured.get(name)
            line += [None] * 3 if spread is None else [spread.mean, spread.least, spread.greatest]
        cells.append((*line, status_in_words(row)))
    return ReportTable(
        name="sweep",
        caption="Sizes, costs and quality.",
        header=(*header, "status"),
        rows=cells,
        shown=len(cells),
    )


def status_in_words(row: Row) -> str:
    """`finished`, or what became of each seed."""
    if row.finished == row.seeds:
        return FINISHED
    words = [f"seed {seed} {state}" for seed, state in row.status.items() if state != FINISHED]
    return f"{len(row.finished)} of {len(row.seeds)} finished; " + "; ".join(words)


def _numbers(row: Row) -> Dict[str, Any]:
    return {
        **{"model": row.size.name, **vars(row.size)},
        **{"seeds": list(row.seeds), "finished": list(row.finished)},
        "status": {str(seed): state for seed, state in row.status.items()},
        **{"parameters": row.parameters, "linear_macs": row.linear_macs},
        **{"all_macs": row.all_macs, "updates": list(row.updates)},
        "measured": {name: spread._asdict() for name, spread in row.measured.items()},
        "bleu_signatures": row.signatures,
    }


_MARKERS = "os^DvPX<>ph"


def _figure(rows: Sequence[Row], name: str, label: str) -> ReportFigure:
    """Quality against parameters and against MACs, side by side with one axis of quality."""
    require_matplotlib("the picture of a sweep")
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    moa = [row.size for row in rows if not row.size.dense]
    experts = sorted({size.num_experts or 0 for size in moa})
    heads = sorted({size.heads for size in moa})
    dims = sorted({size.head_dim or 0 for size in moa})
    # Without the palest yellows, which a white page swallows.
    ramp = colormaps["viridis"]
    colours = {
        number: ramp(0.85 * place / max(1, len(experts) - 1))
        for place, number in enumerate(experts)
    }
    markers = {number: _MARKERS[place % len(_MARKERS)] for place, number in enumerate(heads)}
    sizes = {number: 6 + 7 * place / max(1, len(dims) - 1) for place, number in enumerate(dims)}

    def style(size: Size) -> Dict[str, Any]:
        if size.dense:
            return {"color": "black", "marker": "*", "markersize": 13}
        return {
            **{"color": colours[size.num_experts or 0], "marker": markers[size.heads]},
            **{"markersize": sizes[size.head_dim or 0], "markerfacecolor": "none"},
            "markeredgewidth": 2,
        }

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, cost, title in (
        (axes[0], "parameters", "parameters, millions"),
        (axes[1], "linear_macs", "MACs of the linear layers, millions"),
    ):
        for row in rows:
            spread, value = row.measured[name], getattr(row, cost) / 1e6
            error = [[spread.mean - spread.least], [spread.greatest - spread.mean]]
            bars = {"yerr": error, "capsize": 3} if len(spread.values) > 1 else {}
            axis.errorbar([value], [spread.mean], linestyle="none", **bars, **style(row.size))
        axis.set_xlabel(title)
        axis.margins(0.12)
        axis.xaxis.set_major_locator(MaxNLocator(6))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(label)

    def entry(text: str, **look: Any) -> Line2D:
        return Line2D([], [], linestyle="none", label=text, **look)

    hollow: Dict[str, Any] = {"markerfacecolor": "none", "markeredgewidth": 2}
    grey = {"color": "dimgrey", **hollow}
    entries = [
        entry(f"E = {number}", marker="o", color=colours[number], **hollow) for number in experts
    ]
    entries += [entry(f"K = {number}", marker=markers[number], **grey) for number in heads]
    entries += [
        entry(f"D = {number}", marker="o", markersize=sizes[number], **grey) for number in dims
    ]
    entries += [
        entry(f"dense, {row.size.heads} heads", **style(row.size)) for row in rows if row.size.dense
    ]
    figure.legend(handles=entries, loc="outside right upper", frameon=False)
    return ReportFigure(
        name="quality",
        caption="Quality against size and against computation. Colour is E, shape K, and size D; "
        "bars go from the least to the greatest over seeds.",
        alternative=f"Two scatter plots with one vertical axis, {' '.join(label.split())}: over "
        f"parameters and over MACs. {_extremes(rows, name)}",
        figure=figure,
    )


def _extremes(rows: Sequence[Row], name: str) -> str:
    ordered = sorted(rows, key=lambda row: row.measured[name].mean)
    least, greatest = ordered[0], ordered[-1]
    return (
        f"Least: {least.size.name}, {least.measured[name].mean:.3f}; "
        f"greatest: {greatest.size.name}, {greatest.measured[name].mean:.3f}."
    )
