"""How time and memory of one attention module grow with E, K, length and batch; as plots.

Each point is measured in processes of its own, MoA and fairseq's attention in turns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Sequence, Tuple

from .benchmark import Model, Plan, Process, Spread, parse_model, spread
from .benchmark_subject import Setting

#: The smallest model that has the module.
ONE_LAYER = ("--encoder-layers", "1", "--decoder-layers", "1")
STOCK = "stock"
MIB = 2**20


class Point(NamedTuple):
    """One measurement.

    Attributes:
        model: its name.
        value: where on the axis.
        milliseconds: forward and backward.
        mebibytes: the most that these took, beside the module's parameters.
    """

    model: str
    value: int
    milliseconds: Spread
    mebibytes: float


@dataclass(frozen=True)
class Sweep:
    """A quantity that grows.

    Attributes:
        name: of its files.
        label: of its axis.
        values: where to measure.
        models: for a value, the names of the curves and of the models that are measured.
        setting: for a value, the conditions.
    """

    name: str
    label: str
    values: Tuple[int, ...]
    models: Callable[[int], Dict[str, str]]
    setting: Callable[[int, Setting], Setting]


def _same_setting(_: int, setting: Setting) -> Setting:
    return setting


def _both(_: int) -> Dict[str, str]:
    return {STOCK: STOCK, "8K8E128D": "8K8E128D", "8K32E128D": "8K32E128D"}


SWEEPS = (
    Sweep(
        "experts",
        "experts E (8 of them selected, 128 wide)",
        (8, 16, 32, 64, 128, 256),
        lambda value: {STOCK: STOCK, "MoA": f"8K{value}E128D"},
        _same_setting,
    ),
    Sweep(
        "selected",
        "selected experts K (of 32, 128 wide)",
        (1, 2, 4, 8, 16, 32),
        lambda value: {STOCK: STOCK, "MoA": f"{value}K32E128D"},
        _same_setting,
    ),
    Sweep(
        "length",
        "tokens in each of 4 sentences",
        (16, 32, 64, 128, 256, 512, 1024),
        _both,
        lambda value, setting: replace(setting, module_length=value, module_batch=4),
    ),
    Sweep(
        "batch",
        "sentences of 30 tokens",
        (1, 4, 16, 64, 256),
        _both,
        lambda value, setting: replace(setting, module_length=30, module_batch=value),
    ),
)


def measure(sweep: Sweep, plan: Plan, progress: Callable[[str], None]) -> List[Point]:
    """Every point of a sweep.

    Args:
        sweep: what grows.
        plan: repeats, threads and the setting; its models and measures do not matter.
        progress: called with a text before each point.
    """
    points = []
    for value in sweep.values:
        progress(f"{sweep.name} {value}")
        here = replace(plan, setting=sweep.setting(value, plan.setting))
        named = {curve: _one_layer(name) for curve, name in sweep.models(value).items()}
        processes = {curve: Process(model, here) for curve, model in named.items()}
        try:
            memory = {
                curve: process.ask(measure="module memory")["bytes"]
                for curve, process in processes.items()
            }
            rounds: Dict[str, List[float]] = {curve: [] for curve in processes}
            for _ in range(plan.repeats + 1):
                for curve, process in processes.items():
                    rounds[curve].append(1000 * process.ask(measure="module")["seconds"])
        finally:
            for process in processes.values():
                process.close()
        points += [
            Point(curve, value, spread(rounds[curve][1:]), memory[curve] / MIB) for curve in named
        ]
    return points


def _one_layer(name: str) -> Model:
    # One MoA module, and not three: with 256 experts each takes 134 MB.
    alone = () if name.startswith(STOCK) else ("--moa-modules", "encoder-self")
    return parse_model(name, (*ONE_LAYER, *alone))


def plot(sweep: Sweep, points: Sequence[Point], path: Path) -> None:
    """Time and memory of every model over the quantity that grows, side by side, as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    curves = list(dict.fromkeys(point.model for point in points))
    # Okabe and Ito's colours differ for everybody; markers too.
    styles = zip(curves, ("#000000", "#E69F00", "#0072B2", "#009E73"), "os^D")
    for curve, colour, marker in styles:
        own = [point for point in points if point.model == curve]
        values = [point.value for point in own]
        times = [point.milliseconds for point in own]
        errors = [
            [time.median - time.least for time in times],
            [time.greatest - time.median for time in times],
        ]
        style: Dict[str, Any] = {"color": colour, "marker": marker, "label": curve}
        axes[0].errorbar(values, [time.median for time in times], errors, capsize=3, **style)
        axes[1].plot(values, [point.mebibytes for point in own], **style)
    for axis, label in zip(axes, ("forward and backward, ms", "memory, MiB")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(list(sweep.values), [str(value) for value in sweep.values])
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel(sweep.label)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def page(results: Dict[str, List[Point]], conditions: Dict[str, Any], command: str) -> str:
    """A Markdown page with a plot and a table for each sweep."""
    versions = ", ".join(f"{name} {version}" for name, version in conditions["versions"].items())
    lines = [
        "# How time and memory grow",
        "",
        "One attention module of width 512, forward and backward: fairseq's with 8 heads (stock) "
        f"and MoA's. {conditions['hardware']}, threads: {conditions['threads']}, "
        f"{conditions['precision']}; median of {conditions['repeats']} rounds, bars from least to "
        f"greatest. Memory is what one pass adds to the process. {versions}.",
        "",
        f"Made by `{command}`.",
    ]
    for sweep in SWEEPS:
        if sweep.name not in results:
            continue
        points = results[sweep.name]
        curves = list(dict.fromkeys(point.model for point in points))
        lines += ["", f"## {sweep.label}", "", f"![{sweep.label}]({sweep.name}.png)", ""]
        heads = [f"{curve}, {unit}" for curve in curves for unit in ("ms", "MiB")]
        lines += ["| | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
        for value in sweep.values:
            here = {point.model: point for point in points if point.value == value}
            cells = []
            for curve in curves:
                cells += [
                    f"{here[curve].milliseconds.median:.3g}",
                    f"{here[curve].mebibytes:.0f}",
                ]
            lines.append(f"| {value} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
