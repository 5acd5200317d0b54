"""Heat maps of expert load in training, against counts made by hand."""

from __future__ import annotations

import json
import math

import pytest
import torch

from moa_fairseq.analysis.load_heat_map import load_figure, relative_load
from moa_fairseq.load_heat_maps import LoadHeatMaps

pytest.importorskip("matplotlib")

MODULES = {"encoder-self 0": 4, "cross 0": 4, "cross 1": 2}


def output(*counts):
    names = ("_load_encoder-self_0", "_load_cross_0", "_load_cross_1")
    return {"loss": 1.0, **{name: torch.tensor(row) for name, row in zip(names, counts)}}


def written(folder):
    path = folder / "load_heat_maps/load.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def pictures(folder):
    return sorted(path.name for path in (folder / "load_heat_maps").glob("*.png"))


def test_load_is_relative_to_uniform():
    assert relative_load([6, 2, 0, 0]) == [3.0, 1.0, 0.0, 0.0]
    assert relative_load([0, 0]) is None


def test_the_picture_has_the_load_of_each_expert():
    counts = {"encoder-self 0": [6, 2, 0, 0], "cross 0": [0, 0, 0, 0], "cross 1": [5, 5]}
    axis, bar = load_figure(counts, "a title").axes
    cells = axis.images[0].get_array().filled(math.nan)
    torch.testing.assert_close(
        torch.as_tensor(cells, dtype=torch.float32),
        # Missing, not zero: a module without tokens, and experts that a module does not have.
        torch.tensor([[3, 1, 1e-9, 1e-9], [math.nan] * 4, [1, 1, math.nan, math.nan]]),
        equal_nan=True,
    )
    assert [label.get_text() for label in axis.get_yticklabels()] == list(counts)
    assert [(text.get_text(), text.get_position()) for text in axis.texts] == [
        ("no tokens", (1.5, 1))
    ]
    (marks,) = axis.lines  # of the experts that nobody selected
    assert [tuple(place) for place in marks.get_xydata()] == [(2, 0), (3, 0)]
    assert bar.get_ylabel() == "selections, relative to uniform"
    assert [label.get_text() for label in bar.get_yticklabels()] == ["¼", "½", "1", "2", "4"]


def test_sums_are_over_the_interval_and_all_batches(tmp_path):
    drawn = []
    maps = LoadHeatMaps(2, MODULES, tmp_path, [lambda figure, update: drawn.append(update)])
    ones = output([1.0, 2, 3, 4], [0.0, 0, 0, 0], [1.0, 1])
    maps.add([ones, output([1.0, 0, 0, 0], [0.0, 0, 0, 0], [0.0, 5])], 1)
    assert not (tmp_path / "load_heat_maps").exists()
    maps.add([ones], 2)
    for update in (3, 4, 5):
        maps.add([ones], update)
    assert pictures(tmp_path) == ["000002.png", "000004.png"] and drawn == [2, 4]
    first, second = written(tmp_path)
    assert first == {
        **{"from_update": 1, "to_update": 2},
        "modules": {"encoder-self 0": [3, 4, 6, 8], "cross 0": None, "cross 1": [2, 7]},
    }
    assert second["modules"]["encoder-self 0"] == [2, 4, 6, 8]


def test_counts_stay_exact_where_float32_does_not(tmp_path):
    maps = LoadHeatMaps(3, {"cross 0": 2}, tmp_path)
    for update in (1, 2, 3):
        maps.add([{"_load_cross_0": torch.tensor([2.0**24, 1.0])}], update)
    assert written(tmp_path)[0]["modules"]["cross 0"] == [3 * 2**24, 3]
    maps = LoadHeatMaps(2, {"cross 0": 1}, tmp_path / "other")
    for update, count in ((1, 2.0**24), (2, 1.0)):
        maps.add([{"_load_cross_0": torch.tensor([count])}], update)
    assert written(tmp_path / "other")[0]["modules"]["cross 0"] == [2**24 + 1]


def test_a_resumed_run_replaces_what_it_trains_again(tmp_path):
    ones = output([1.0, 2, 3, 4], [1.0, 1, 1, 1], [1.0, 1])
    maps = LoadHeatMaps(2, MODULES, tmp_path)
    for update in range(1, 7):
        maps.add([ones], update)
    with open(tmp_path / "load_heat_maps/load.jsonl", "a", encoding="utf-8") as lines:
        lines.write('{"from_update": 7, "to_u')  # killed in the middle of it
    resumed = LoadHeatMaps(2, MODULES, tmp_path)
    resumed.add([ones], 4)  # the checkpoint was of update 3
    lines = [(line["from_update"], line["to_update"]) for line in written(tmp_path)]
    assert lines == [(1, 2), (4, 4)]
    assert pictures(tmp_path) == ["000002.png", "000004.png"]


@pytest.mark.parametrize("experts", [1, 2, 64])
def test_any_number_of_experts_can_be_drawn(tmp_path, experts):
    figure = load_figure({"cross 0": list(range(1, experts + 1))}, "a title")
    figure.savefig(tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
