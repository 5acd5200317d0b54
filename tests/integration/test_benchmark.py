"""The benchmark's real command; what it measures has tests of its own."""

from __future__ import annotations

import dataclasses
import importlib.util
import json

import pytest
import torch

from moa_fairseq.analysis import growth
from moa_fairseq.cli import benchmark_growth

from ..paths import ROOT
from .commands import BIN, run
from .in_process import call


def test_models_side_by_side(tmp_path):
    small = "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 128"
    result = run(
        *(BIN / "python", ROOT / "scripts/benchmark.py", "--models", "4K4E64D", "4K200E64D"),
        *("--options", small, "--repeats", "2", "--vocab-size", "100", "--tokens", "256"),
        *("--length", "8", "--beam", "2", "--batch-sizes", "1", "3", "--json", tmp_path / "x.json"),
    )
    found = json.loads((tmp_path / "x.json").read_text())
    assert list(found["results"]) == [
        *("module", "train", "generate, beam 2, batch 1", "generate, beam 2, batch 3", "memory")
    ]
    for label, measured in found["results"].items():
        if label == "memory":
            # 50 times the experts: what they take is in the figure.
            more = found["models"]["4K200E64D"]["state_bytes"]
            more -= found["models"]["4K4E64D"]["state_bytes"]
            assert measured["4K200E64D"]["bytes"] - measured["4K4E64D"]["bytes"] > 0.5 * more
            continue
        assert measured["4K4E64D"]["speed"] == {"median": 1, "least": 1, "greatest": 1}
        seconds = [measured[name]["seconds"] for name in found["models"]]
        assert [len(rounds) for rounds in seconds] == [2, 2]
        assert all(value > 0 for rounds in seconds for value in rounds)
    assert found["conditions"]["versions"]["torch"]
    lines = result.stdout.splitlines()
    assert lines[0] == "| | 4K4E64D | 4K200E64D |"
    assert sum(line.startswith("| generate, beam 2") for line in lines) == 2


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_growth_is_a_page_with_a_plot(tmp_path, monkeypatch):
    sweep = next(sweep for sweep in growth.SWEEPS if sweep.name == "batch")
    short = dataclasses.replace(sweep, values=(1, 40))
    for module in (growth, benchmark_growth):
        monkeypatch.setattr(module, "SWEEPS", (short,))
    # What this process had is not counted as theirs.
    torch.ones(2**30, dtype=torch.uint8)
    call(benchmark_growth.main, "growth", ["--out", tmp_path, "--repeats", "1"])
    points = json.loads((tmp_path / "growth.json").read_text())["points"]["batch"]
    assert len(points) == 6
    for few, many in zip(points[:3], points[3:]):
        assert few["model"] == many["model"]
        # Forty times the sentences: what they take is at least the kept float32 inputs.
        assert many["mebibytes"] - few["mebibytes"] > 39 * 30 * 512 * 4 / 2**20
    assert (tmp_path / "batch.png").stat().st_size > 0
    assert "![sentences of 30 tokens](batch.png)" in (tmp_path / "README.md").read_text()
