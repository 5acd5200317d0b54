from __future__ import annotations

import importlib.util
import struct

import pytest

from moa_fairseq.analysis.benchmark import Spread, parse_model
from moa_fairseq.analysis.benchmark_subject import Setting
from moa_fairseq.analysis.growth import SWEEPS, Point, page, plot

CONDITIONS = {
    **{"versions": {"torch": "2"}, "hardware": "abacus", "threads": 1, "precision": "float32"},
    "repeats": 5,
}


def points(sweep):
    return [
        Point(curve, value, Spread(2.0 * value, value, 3.0 * value), 10.0 + value)
        for value in sweep.values
        for curve in sweep.models(value)
    ]


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: sweep.name)
def test_every_point_is_a_model_and_a_setting_of_its_own(sweep):
    measured = {
        (tuple(map(parse_model, sweep.models(value).values())), sweep.setting(value, Setting()))
        for value in sweep.values
    }
    assert len(measured) == len(sweep.values)
    # The curves are the same at every point.
    assert len({tuple(sweep.models(value)) for value in sweep.values}) == 1


def test_the_page_has_a_row_for_every_value():
    sweep = SWEEPS[2]
    lines = page({sweep.name: points(sweep)}, CONDITIONS, "command").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert len(rows) == 2 + len(sweep.values)
    assert rows[2] == "| 16 | 32 | 26 | 32 | 26 | 32 | 26 |"
    assert "![tokens in each of 4 sentences](length.png)" in lines


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_the_plot_is_a_picture_with_two_panels(tmp_path):
    plot(SWEEPS[0], points(SWEEPS[0]), tmp_path / "experts.png")
    data = (tmp_path / "experts.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 2 * height
