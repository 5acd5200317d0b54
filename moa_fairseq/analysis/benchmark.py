"""Measures models side by side: one process for each, which take turns.

Rounds are interleaved, so that a slow moment of the machine meets every model, and figures are
ratios to the first model within a round.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ..errors import UsageError
from ..versions import installed_versions
from .benchmark_subject import Setting

MEASURES = ("module", "train", "generate", "memory")
PACKAGES = ("moa-fairseq", "torch", "ve-fairseq", "fairseq", "fairseq-fixed", "numpy")


class Model(NamedTuple):
    """A name in the table, and the options of fairseq-train that make the model."""

    name: str
    words: Tuple[str, ...]


class Spread(NamedTuple):
    """Median, least and greatest of the rounds."""

    median: float
    least: float
    greatest: float


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        models: the first is what the others are compared to.
        measures: some of `MEASURES`.
        batch_sizes: sentences in a batch of generation, one measurement for each.
        repeats: rounds that count; one more comes before them.
        threads: of torch on a CPU.
        setting: the conditions.
    """

    models: Tuple[Model, ...]
    measures: Tuple[str, ...]
    batch_sizes: Tuple[int, ...]
    repeats: int
    threads: int
    setting: Setting


def parse_model(text: str, common: Sequence[str] = ()) -> Model:
    """A model from `stock`, `stock@WIDTH`, `KKEEDD` such as 8K32E128D, or `NAME=OPTIONS`.

    Raises:
        UsageError: for anything else.
    """
    if "=" in text:
        name, _, given = text.partition("=")
        words = shlex.split(given)
        if name and words[:1] == ["--arch"] and len(words) > 1:
            return Model(name, (*words, *common))
    moa = re.fullmatch(r"(\d+)K(\d+)E(\d+)D", text)
    if moa:
        heads = (
            f"--encoder-attention-heads {moa[1]} --decoder-attention-heads {moa[1]} "
            f"--num-experts {moa[2]} --head-dim {moa[3]}"
        )
        return Model(text, ("--arch", "moa_transformer", *heads.split(), *common))
    stock = re.fullmatch(r"stock(?:@(\d+))?", text)
    if stock:
        width = int(stock[1] or 512)
        size = " ".join(
            f"--{side}-embed-dim {width} --{side}-ffn-embed-dim {4 * width} "
            f"--{side}-attention-heads {max(1, width // 64)}"
            for side in ("encoder", "decoder")
        )
        return Model(text, ("--arch", "transformer", *size.split(), *common))
    raise UsageError(
        f"model {text!r}: give stock, stock@WIDTH, a MoA such as 8K32E128D, or "
        "NAME='--arch ARCH OPTIONS'"
    )


class Process:
    """A worker that holds one model and measures when it is asked."""

    def __init__(self, model: Model, plan: Plan) -> None:
        self.model = model
        settings = {
            "words": list(model.words),
            "setting": asdict(plan.setting),
            "threads": plan.threads,
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moa_fairseq.analysis.benchmark_worker", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(plan.threads)},
        )

    def ask(self, **request: Any) -> Dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            UsageError: where the worker fails, with the last line of what it said.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has failed, and says why
        line = self.process.stdout.readline()
        answer = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise UsageError(f"{self.model.name}: {answer['error']}")
        return dict(answer)

    def _last_words(self) -> str:
        assert self.process.stderr is not None
        lines = self.process.stderr.read().strip().splitlines()
        return lines[-1] if lines else f"its process ended with status {self.process.wait()}"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def run(plan: Plan, progress: Any) -> Dict[str, Any]:
    """Measure everything; what :func:`table` prints and the JSON file holds.

    Args:
        plan: what to measure.
        progress: called with a text before each round.
    """
    processes: List[Process] = []
    try:
        processes = [Process(model, plan) for model in plan.models]
        facts = {process.model.name: process.ask(measure="facts") for process in processes}
        results: Dict[str, Dict[str, Any]] = {}
        for label, request in _requests(plan):
            rounds = []
            for number in range(plan.repeats + 1):
                progress(f"{label}, round {number} of {plan.repeats}")
                rounds.append([process.ask(**request) for process in processes])
            results[label] = _compare(plan.models, rounds[1:])
    finally:
        for process in processes:
            process.close()
    if "memory" in plan.measures:
        progress("memory")
        results["memory"] = _memory(plan)
    return {"conditions": conditions(plan), "models": facts, "results": results}


def _requests(plan: Plan) -> List[Tuple[str, Dict[str, Any]]]:
    requests: List[Tuple[str, Dict[str, Any]]] = []
    for measure in plan.measures:
        if measure == "generate":
            for size in plan.batch_sizes:
                label = f"generate, beam {plan.setting.beam}, batch {size}"
                requests.append((label, {"measure": measure, "batch_size": size}))
        elif measure != "memory":
            requests.append((measure, {"measure": measure}))
    return requests


def _compare(models: Sequence[Model], rounds: List[List[Dict[str, Any]]]) -> Dict[str, Any]:
    """For each model the seconds of a round, tokens/s, and how much faster than the first."""
    compared = {}
    for place, model in enumerate(models):
        rates = [answers[place]["tokens"] / answers[place]["seconds"] for answers in rounds]
        base = [answers[0]["tokens"] / answers[0]["seconds"] for answers in rounds]
        compared[model.name] = {
            "seconds": [answers[place]["seconds"] for answers in rounds],
            "tokens_per_second": spread(rates)._asdict(),
            "speed": spread([rate / first for rate, first in zip(rates, base)])._asdict(),
        }
    return compared


def _memory(plan: Plan) -> Dict[str, Any]:
    """Peak memory of a few updates, each model in a process of its own."""
    peaks = {}
    for model in plan.models:
        process = Process(model, plan)
        try:
            peaks[model.name] = process.ask(measure="memory")["bytes"]
        finally:
            process.close()
    first = peaks[plan.models[0].name]
    return {name: {"bytes": peak, "ratio": peak / first} for name, peak in peaks.items()}


def spread(values: Sequence[float]) -> Spread:
    """Median and range of the rounds."""
    return Spread(statistics.median(values), min(values), max(values))


def conditions(plan: Plan) -> Dict[str, Any]:
    """Versions, device, threads and sizes: what a figure depends on."""
    hardware = _processor()
    if plan.setting.device == "cuda":
        hardware = torch.cuda.get_device_name()
    return {
        "versions": installed_versions(PACKAGES),
        "python": platform.python_version(),
        "hardware": hardware,
        "threads": plan.threads,
        "repeats": plan.repeats,
        **asdict(plan.setting),
    }


def _processor() -> str:
    """The CPU's name, where the system tells it."""
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    named = re.search(r"^model name\s*:\s*(.+)$", described, re.M)
    return named[1] if named else platform.machine()


def table(outcome: Dict[str, Any]) -> str:
    """The outcome as a Markdown table of ratios, with what the machine can do below."""
    names = list(outcome["models"])
    lines = ["| | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for label, result in outcome["results"].items():
        cells = [_cell(label, result[name]) for name in names]
        unit = "peak memory, ratio" if label == "memory" else f"{label}, speed"
        lines.append(f"| {unit} | " + " | ".join(cells) + " |")
    for label, bound in _bounds(outcome):
        lines.append(f"| {label} | " + " | ".join(bound) + " |")
    facts = [outcome["models"][name] for name in names]
    lines.append("| parameters | " + " | ".join(f"{f['parameters']:,}" for f in facts) + " |")
    best = max(f["flops_per_second"] for f in facts)
    copies = max(f["bytes_per_second"] for f in facts)
    seen = outcome["conditions"]
    versions = ", ".join(f"{name} {version}" for name, version in seen["versions"].items())
    lines += [
        "",
        f"Speed: tokens/s relative to {names[0]}, median of {seen['repeats']} interleaved rounds "
        "(least to greatest).",
        f"{seen['hardware']}, threads: {seen['threads']}, {seen['precision']}: matrix products "
        f"{best / 1e9:.0f} GFLOP/s, copies {copies / 1e9:.0f} GB/s. {versions}, Python "
        f"{seen['python']}.",
    ]
    return "\n".join(lines)


def _cell(label: str, result: Dict[str, Any]) -> str:
    if label == "memory":
        return f"{result['ratio']:.2f} ({result['bytes'] / 2**20:.0f} MiB)"
    speed = result["speed"]
    return f"{speed['median']:.2f} ({speed['least']:.2f} to {speed['greatest']:.2f})"


def _bounds(outcome: Dict[str, Any]) -> List[Tuple[str, List[str]]]:
    """How near training is to what its matrix products alone would take at the best rate."""
    training: Optional[Dict[str, Any]] = outcome["results"].get("train")
    if training is None:
        return []
    best = max(facts["flops_per_second"] for facts in outcome["models"].values())
    shares = []
    for name, facts in outcome["models"].items():
        # A multiply-add is two operations; the backward pass has two products for each one.
        flops = 6 * facts["macs_per_token"] * training[name]["tokens_per_second"]["median"]
        shares.append(f"{flops / best:.0%}")
    return [("of that, products at the best rate", shares)]
