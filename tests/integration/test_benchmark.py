"""The benchmark's real command; what it measures has tests of its own."""

from __future__ import annotations

import json

from ..paths import ROOT
from .commands import BIN, run


def test_models_side_by_side(tmp_path):
    small = "--encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 64"
    result = run(
        *(BIN / "python", ROOT / "scripts/benchmark.py", "--models", "4K4E16D", "4K64E16D"),
        *("--options", small, "--repeats", "2", "--vocab-size", "100", "--tokens", "256"),
        *("--length", "8", "--beam", "2", "--batch-sizes", "1", "3", "--json", tmp_path / "x.json"),
    )
    found = json.loads((tmp_path / "x.json").read_text())
    assert list(found["results"]) == [
        *("module", "train", "generate, beam 2, batch 1", "generate, beam 2, batch 3", "memory")
    ]
    for label, measured in found["results"].items():
        if label == "memory":
            # 15 times the experts: what they take is in the figure.
            more = found["models"]["4K64E16D"]["state_bytes"]
            more -= found["models"]["4K4E16D"]["state_bytes"]
            assert measured["4K64E16D"]["bytes"] - measured["4K4E16D"]["bytes"] > 0.5 * more
            continue
        assert measured["4K4E16D"]["speed"] == {"median": 1, "least": 1, "greatest": 1}
        seconds = [measured[name]["seconds"] for name in found["models"]]
        assert [len(rounds) for rounds in seconds] == [2, 2]
        assert all(value > 0 for rounds in seconds for value in rounds)
    assert found["conditions"]["versions"]["torch"]
    lines = result.stdout.splitlines()
    assert lines[0] == "| | 4K4E16D | 4K64E16D |"
    assert sum(line.startswith("| generate, beam 2") for line in lines) == 2
