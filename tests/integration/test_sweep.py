"""A real sweep of small models: killed and resumed, it is the sweep that was left alone."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import time

import hydra
import pytest
from fairseq import checkpoint_utils
from fairseq_cli import hydra_train, validate
from fairseq_cli import train as train_command

from moa_fairseq.cli import profile, sweep, sweep_report
from moa_fairseq.sweep.grid import Point, Size
from moa_fairseq.sweep.records import read_record

from ..paths import PACKAGE, ROOT
from .commands import BIN, last_line, run, script, trained_parameters
from .in_process import call

pytestmark = [
    pytest.mark.skipif(
        not hasattr(hydra, "compose"), reason="fairseq 0.12.2 pins hydra 1.0, the YAML needs 1.1"
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("matplotlib") is None, reason="the report needs matplotlib"
    ),
]

MODEL = {"encoder-layers": 1, "decoder-layers": 1, "encoder-embed-dim": 32}
GRID = ["--num-experts", "4,2", "--heads", "4", "--head-dim", "8", "--average", "1", "--dense"]
SETTINGS = [
    *("--", "optimization.max_epoch=2", "dataset.max_tokens=2048"),
    *(f"model.{name.replace('-', '_')}={value}" for name, value in MODEL.items()),
    "+model.gate_normalization=none",
]
DENSE, MOA = Point(Size(4), 1), Point(Size(4, 4, 8), 1)


class Killed(BaseException):
    """What ends this process in place of SIGKILL."""


class InThisProcess:
    """Commands of a sweep, without processes of their own."""

    def __init__(self, monkeypatch, kill_after_epoch=None):
        self.monkeypatch, self.kill_after_epoch, self.ran = monkeypatch, kill_after_epoch, []
        monkeypatch.setattr(sweep, "Processes", lambda inherited: self)

    def stop(self):
        pass

    def __call__(self, command, log, variables):
        self.ran.append((log.parent.name, command[0]))
        main = {"fairseq-hydra-train": hydra_train, "fairseq-validate": validate}[command[0]]
        for name, value in variables.items():
            self.monkeypatch.setenv(name, value)
        # What a process remembers of an earlier run.
        for function in (checkpoint_utils.save_checkpoint, train_command.should_stop_early):
            vars(function).pop("best", None)
        words = list(command[1:])
        killed = self.kill_after_epoch is not None and log.parent.name == MOA.name
        if killed:
            words += [f"optimization.max_epoch={self.kill_after_epoch}"]
        result = call(main.cli_main, command[0], words)
        log.write_text(result.stdout + result.stderr, encoding="utf-8")
        if killed:
            raise Killed
        return result.returncode


def arguments(toy, out, *more):
    return [
        *("--root", str(ROOT), "--prepared", str(toy / "prepared"), "--out", str(out)),
        *(*more, *GRID, "--jobs", "1", *SETTINGS),
    ]


@pytest.fixture(scope="module")
def undisturbed(toy, tmp_path_factory):
    out = tmp_path_factory.mktemp("sweep")
    with pytest.MonkeyPatch.context() as monkeypatch:
        commands = InThisProcess(monkeypatch)
        sweep.main(arguments(toy, out))
    return out, commands.ran


def test_every_point_is_trained_and_measured(undisturbed, toy, capsys):
    out, ran = undisturbed
    commands = ["fairseq-hydra-train", "fairseq-validate"]
    assert ran == [(point.name, command) for point in (DENSE, MOA) for command in commands]
    types = len((toy / "prepared/data/dict.en.txt").read_text(encoding="utf-8").splitlines()) + 4
    shape = [word for name, value in MODEL.items() for word in (f"--{name}", str(value))]
    for point, arch in (
        (
            DENSE,
            ["transformer", "--encoder-attention-heads", "4", "--encoder-ffn-embed-dim", "256"],
        ),
        (MOA, ["moa_transformer", "--encoder-attention-heads", "4"]),
    ):
        record = read_record(out, point)
        words = ["--arch", *arch, *shape, "--vocab-size", str(types), "--share-all-embeddings"]
        words += ["--decoder-attention-heads", "4", "--decoder-ffn-embed-dim", "256"]
        if point is MOA:
            words += ["--num-experts", "4", "--head-dim", "8", "--encoder-ffn-embed-dim", "256"]
        profile.main(words)
        text = capsys.readouterr().out
        assert f"({record['parameters']:,})" in text
        assert f"linear MACs  {record['linear_macs'] / 1e6:.1f}M" in text
        assert f"all MACs     {record['all_macs'] / 1e6:.1f}M" in text
        # fairseq's own validation of the last epoch, which an average of one epoch is.
        log = (out / point.name / "train.log").read_text(encoding="utf-8")
        line = [text for text in log.splitlines() if "| valid |" in text][-1]
        assert f"valid on 'valid' subset | loss {record['loss']['loss']:g} " in line
        assert f"| nll_loss {record['loss']['nll_loss']:g} " in line
        assert f"| num_updates {record['updates']}" in line
    sweep_report.main([str(out)])
    page = capsys.readouterr().out
    assert "Skipped, since K is more than E: 4K2E8D." in page and "Incomplete" not in page
    assert f"| {read_record(out, MOA)['loss']['loss']:.3f} |" in page


def test_a_sweep_that_was_killed_goes_on(undisturbed, toy, tmp_path, monkeypatch, capsys):
    InThisProcess(monkeypatch, kill_after_epoch=1)
    with pytest.raises(Killed):
        sweep.main(arguments(toy, tmp_path))
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / DENSE.name).rglob("*")}
    sweep_report.main([str(tmp_path)])
    assert "Incomplete: 1 of 2 points are finished." in capsys.readouterr().out
    again = InThisProcess(monkeypatch)
    sweep.main(arguments(toy, tmp_path))
    assert again.ran == [(MOA.name, "fairseq-hydra-train"), (MOA.name, "fairseq-validate")]
    assert done == {path: path.stat().st_mtime_ns for path in (tmp_path / DENSE.name).rglob("*")}
    log = (tmp_path / MOA.name / "train.log").read_text(encoding="utf-8")
    assert "begin training epoch 2" in log and "begin training epoch 1" not in log
    for point in (DENSE, MOA):
        assert read_record(tmp_path, point) == read_record(undisturbed[0], point)
    ours = trained_parameters(tmp_path / MOA.name)
    theirs = trained_parameters(undisturbed[0] / MOA.name)
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    # Nothing is left to do, and other settings would not compare.
    sweep.main(arguments(toy, tmp_path))
    assert len(again.ran) == 2
    with pytest.raises(SystemExit, match="other settings after --"):
        sweep.main([*arguments(toy, tmp_path), "+model.router_noise=true"])


@pytest.mark.slow
def test_the_script_killed_at_any_moment_goes_on(undisturbed, toy, tmp_path):
    words = [
        *("bash", str(ROOT / "scripts/sweep.sh"), "--prepared", str(toy / "prepared")),
        *("--out", str(tmp_path / "sweep"), *GRID, "--jobs", "1", *SETTINGS),
    ]
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment.update(OMP_NUM_THREADS="1", MOA_USER_DIR=str(PACKAGE))
    first_epoch = tmp_path / "sweep" / MOA.name / "checkpoint1.pt"
    process = subprocess.Popen(words, env=environment, start_new_session=True)
    try:
        until = time.monotonic() + 900
        while not first_epoch.exists():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "sweep" / DENSE.name).rglob("*")}
    result = run(*words)
    assert f"{DENSE.name}: finished already" in result.stderr
    assert done == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "sweep" / DENSE.name).rglob("*")
    }
    for point in (DENSE, MOA):
        assert read_record(tmp_path / "sweep", point) == read_record(undisturbed[0], point)
    log = (tmp_path / "sweep" / MOA.name / "train.log").read_text(encoding="utf-8")
    assert "Loaded checkpoint" in log


@pytest.mark.slow
def test_bleu_of_each_point_and_a_failure_that_stops_no_other(toy, tmp_path):
    given = [
        *("--prepared", toy / "prepared", "--out", tmp_path / "sweep", "--num-experts", "4"),
        *("--heads", "4", "--head-dim", "8", "--average", "1", "--bleu", "valid,test", "--dense"),
    ]
    # A folder in place of the checkpoint, which fairseq cannot read.
    (tmp_path / "sweep" / DENSE.name / "checkpoint_last.pt").mkdir(parents=True)
    result = script("sweep.sh", *given, *SETTINGS, check=False)
    assert f"1 of 2 points failed: {DENSE.name}" in last_line(result)
    assert "--bleu valid,test: test scores are to report; choose no size by them" in result.stderr
    scores = read_record(tmp_path / "sweep", MOA)["bleu"]
    for subset in ("valid", "test"):
        path = tmp_path / "sweep" / MOA.name / f"scores/{subset}.json"
        bleu = json.loads(path.read_text(encoding="utf-8"))["bleu"]
        assert scores[subset] == {"score": bleu["score"], "signature": bleu["signature"]}
    sweep_report.main([str(tmp_path / "sweep"), "--quality", "bleu"])
    page = (tmp_path / "sweep/report/sweep.md").read_text(encoding="utf-8")
    assert "test is a test set: sizes are not to be chosen by it." in page
    assert "failed: fairseq-hydra-train failed: " in page
