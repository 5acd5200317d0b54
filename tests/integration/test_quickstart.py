"""The quickstart itself, which downloads its text and trains for some minutes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..paths import ROOT
from .commands import script
from .conftest import sentences, write_pairs


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["en-de", "en-fr"])
def test_quickstart_scores_and_a_second_run_reuses(pair, tmp_path):
    arguments = ("--pair", pair, "--out", tmp_path / "out", "--epochs", "5")
    first = script("quickstart.sh", *arguments)
    report = json.loads((tmp_path / "out/scores/test.json").read_text())
    assert report["bleu"]["score"] > 3
    assert "tok:13a" in first.stdout
    assert first.stdout.count("translation ") == 10
    generated = tmp_path / "out/scores/test.generate.txt"
    before = generated.stat().st_mtime_ns
    second = script("quickstart.sh", *arguments)
    assert generated.stat().st_mtime_ns == before
    assert second.stdout == first.stdout


@pytest.mark.slow
def test_killed_at_any_moment_the_next_run_goes_on(tmp_path):
    write_pairs(tmp_path / "text", sentences(3000, 1))
    arguments = [
        *("bash", str(ROOT / "scripts/quickstart.sh"), "--out", str(tmp_path / "out")),
        *("--src", str(tmp_path / "text.en"), "--tgt", str(tmp_path / "text.de")),
        *("--epochs", "6", "--vocab-size", "60"),
    ]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    for seconds in (4, 9, 14, 19, 24, 29):
        process = subprocess.Popen(
            arguments,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    result = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads((tmp_path / "out/scores/test.json").read_text())
    assert report["sentences"] == 150
    assert "tok:13a" in result.stdout
