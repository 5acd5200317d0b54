"""A sweep's grid, what it remembers, how it runs and what its report says."""

from __future__ import annotations

import csv
import fcntl
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import hydra
import pytest
import torch

from moa_fairseq.cli import sweep, sweep_report
from moa_fairseq.errors import UsageError
from moa_fairseq.sweep import records
from moa_fairseq.sweep.configs import Plan
from moa_fairseq.sweep.grid import Point, Size, check_overrides, grid, hydra_overrides, quoted
from moa_fairseq.sweep.records import Settings, Sweep, read_record, write_record, write_sweep
from moa_fairseq.sweep.running import Processes, Stopped, Workshop, run_points

from ..paths import ROOT

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)

DENSE, SMALL, LARGE = Size(4), Size(4, 8, 16), Size(8, 32, 64)


def test_the_grid_is_every_combination_less_those_with_k_above_e():
    points, skipped = grid([8, 4], [4, 8], [16], [2, 1], dense_heads=4)
    names = ["dense4", "4K8E16D", "4K4E16D", "8K8E16D"]
    assert [point.name for point in points] == [
        f"{name}-seed{seed}" for name in names for seed in (2, 1)
    ]
    assert [size.name for size in skipped] == ["8K4E16D"]
    with pytest.raises(UsageError, match="every K is more than every E"):
        grid([4], [8, 16], [16], [1])


def test_a_dense_point_takes_no_setting_of_moa():
    extra = ["+model.gate_normalization=none", "~model.dropout", "optimization.max_epoch=3"]
    assert hydra_overrides(Point(LARGE, 3), "data", "out", extra)[-3:] == extra
    words = hydra_overrides(Point(DENSE, 3), "data", "out", extra)
    assert words[-2:] == extra[1:]
    assert "~model.num_experts" in words and "+model.gate_normalization=none" not in words


@pytest.mark.parametrize(
    "text", ["plain", "a b,c=d", "it's", "back\\slash", "end\\", "q\\'", "[x]"]
)
def test_hydra_reads_a_quoted_path_as_it_is(text):
    if not hasattr(hydra, "compose"):
        pytest.skip("fairseq 0.12.2 pins hydra 1.0")
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (override,) = OverridesParser.create().parse_overrides([f"key={quoted(text)}"])
    assert override.value() == text


@pytest.mark.parametrize(
    "override", ["--max-epoch", "max_epoch", "common.seed=3", "+model.num_experts=4", "hydra.x=1"]
)
def test_settings_that_are_not_for_all_points_are_refused(override):
    with pytest.raises(UsageError, match=re.escape(override)):
        check_overrides(["optimization.max_epoch=3", override])


def a_sweep(points, bleu=(), overrides=("optimization.max_epoch=3",)):
    return Sweep(Settings(list(overrides), "1 2", 2), points, [Size(8, 4, 16)], list(bleu))


def test_what_is_written_is_read_and_more_points_are_added(tmp_path):
    first = a_sweep([Point(DENSE, 1), Point(SMALL, 1)])
    write_sweep(tmp_path, first)
    assert records.read_sweep(tmp_path) == first
    more = a_sweep([Point(SMALL, 1), Point(LARGE, 1)], bleu=["valid"])
    both = records.extended(records.read_sweep(tmp_path), more, tmp_path)
    assert [point.size for point in both.points] == [DENSE, SMALL, LARGE]
    assert both.bleu == ["valid"] and len(both.skipped) == 1
    with pytest.raises(UsageError, match="other settings after --"):
        records.extended(first, a_sweep([], overrides=["optimization.max_epoch=4"]), tmp_path)


def finished(parameters, macs, loss, nll, bleu=None, updates=100):
    return {
        **{"parameters": parameters, "linear_macs": macs, "all_macs": macs + 1},
        **{"updates": updates, "loss": {"loss": loss, "nll_loss": nll, "checkpoint": "x.pt"}},
        "bleu": {} if bleu is None else {"valid": {"score": bleu, "signature": "nrefs:1|v"}},
    }


@pytest.fixture
def constructed(tmp_path):
    """Four seeds finished; one that failed, one that was interrupted, one that was not begun."""
    points = [Point(DENSE, seed) for seed in (1, 2, 3)] + [Point(SMALL, 1), Point(SMALL, 2)]
    points += [Point(LARGE, 1), Point(LARGE, 2)]
    write_sweep(tmp_path, a_sweep(points, bleu=["valid"]))
    for point, record in (
        (points[0], finished(1_840_000, 18_200_000, 4.0, 2.5, 30.0)),
        (points[1], finished(1_840_000, 18_200_000, 4.3, 2.75, 31.5)),
        (points[2], finished(1_840_000, 18_200_000, 4.6, 3.0, 33.0)),
        (points[3], finished(1_940_000, 19_200_000, 3.5, 2.0, 40.25)),
        (points[4], {"parameters": 1_940_000, "failure": "fairseq-hydra-train failed: boom"}),
        (points[5], {"parameters": 4_340_000, "linear_macs": 7, "all_macs": 8, "updates": 5}),
    ):
        (tmp_path / point.name).mkdir()
        write_record(tmp_path, point, record)
    return tmp_path


@needs_matplotlib
def test_the_report_has_the_numbers_of_the_points(constructed, capsys):
    sweep_report.main([str(constructed)])
    with open(constructed / "report/sweep.csv", encoding="utf-8", newline="") as stream:
        dense, small, large = csv.DictReader(stream)
    assert (dense["model"], dense["E"], dense["K"], dense["D"]) == ("dense4", "", "4", "")
    assert (small["model"], small["E"], small["K"], small["D"]) == ("4K8E16D", "8", "4", "16")
    assert (dense["seeds"], dense["parameters"], dense["MACs"]) == ("1 2 3", "1840000", "18200000")
    for column, values in (
        ("valid loss", (4.3, 4.0, 4.6)),
        ("valid nll", (2.75, 2.5, 3.0)),
        ("BLEU valid", (31.5, 30.0, 33.0)),
    ):
        found = [dense[column], dense[f"{column}, least"], dense[f"{column}, greatest"]]
        assert [float(value) for value in found] == pytest.approx(values)
    assert float(small["BLEU valid"]) == float(small["BLEU valid, least"]) == 40.25
    assert dense["status"] == "finished"
    assert small["status"] == "1 of 2 finished; seed 2 failed: fairseq-hydra-train failed: boom"
    assert large["status"] == "0 of 2 finished; seed 1 interrupted; seed 2 not started"
    assert large["valid loss"] == "" and large["parameters"] == "4340000"
    numbers = json.loads((constructed / "report/sweep.json").read_text(encoding="utf-8"))
    assert not numbers["complete"] and numbers["skipped"] == ["8K4E16D"]
    assert numbers["sizes"][0]["measured"]["loss"]["values"] == [4.0, 4.3, 4.6]
    page = (constructed / "report/sweep.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page
    assert "Incomplete: 4 of 7 points are finished." in page
    assert "| 4.300 (4.000 to 4.600) | 2.750 (2.500 to 3.000) | 31.50 (30.00 to 33.00) |" in page
    assert "| 4K8E16D | 1, 2 | 1.94M | 19.2M | 100 | 3.500 | 2.000 | 40.25 | 1 of 2" in page
    assert r"BLEU on valid: nrefs:1\|v." in page
    assert {"quality.png", "quality.svg"} < {p.name for p in (constructed / "report").iterdir()}


@needs_matplotlib
def test_the_picture_has_a_point_for_each_size_where_it_belongs(constructed):
    from moa_fairseq.sweep.summary import read_rows, section

    sweep, rows = read_rows(constructed)
    for quality, means in (("loss", [4.3, 3.5]), ("bleu", [31.5, 40.25])):
        (picture,) = section(sweep, rows, quality).figures
        left, right = picture.figure.axes
        for axis, costs in ((left, [1.84, 1.94]), (right, [18.2, 19.2])):
            places = [container.lines[0].get_xydata()[0] for container in axis.containers]
            assert [tuple(place) for place in places] == [
                (pytest.approx(cost), pytest.approx(mean)) for cost, mean in zip(costs, means)
            ]
    ((lower, upper),) = left.containers[0].lines[2][0].get_segments()
    assert (lower[1], upper[1]) == (30.0, 33.0)
    assert len(left.containers[1].lines[2]) == 0  # one seed has no spread


@pytest.mark.parametrize("point", [Point(DENSE, 2), Point(SMALL, 1)])
def test_scores_with_other_signatures_do_not_compare(constructed, point):
    record = read_record(constructed, point)
    record["bleu"]["valid"]["signature"] = "other"
    write_record(constructed, point, record)
    with pytest.raises(UsageError, match="two signatures"):
        sweep_report.main([str(constructed)])


def test_a_point_runs_while_the_folder_is_held(constructed):
    point = Point(LARGE, 1)
    with open(constructed / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert records.at_work(constructed)
        record = read_record(constructed, point)
        assert records.status_of(record, [], True) == records.RUNNING
    assert not records.at_work(constructed)


class FakeCommands:
    """What the commands of a point leave behind, without what they compute."""

    def __init__(self, fail=(), losses=None):
        self.ran, self.fail, self.losses = [], fail, losses or {}
        self.at_once, self.most, self.lock = 0, 0, threading.Lock()

    def __call__(self, command, log, variables):
        point = log.parent.name
        with self.lock:
            self.ran.append((point, command[0], dict(variables)))
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        time.sleep(0.05)
        with self.lock:
            self.at_once -= 1
        if (point, command[0]) in self.fail:
            log.write_text("first\nit broke\n")
            return 1
        if command[0] == "fairseq-hydra-train":
            state = {"model": {"w": torch.ones(1)}, "optimizer_history": [{"num_updates": 7}]}
            for name in ("checkpoint1.pt", "checkpoint2.pt", "checkpoint_last.pt"):
                torch.save(state, log.parent / name)
        elif command[0] == "fairseq-validate":
            values = {"valid_loss": self.losses.get(point, "4.25"), "valid_nll_loss": "2.5"}
            log.write_text(f"x | INFO | valid | {json.dumps(values)}\n")
        else:
            (log.parent / "scores").mkdir(exist_ok=True)
            text = json.dumps({"bleu": {"score": 12.5, "signature": "s"}})
            (log.parent / "scores/valid.json").write_text(text)
        return 0

    def of(self, name):
        return [point for point, command, _ in self.ran if command == name]


POINTS = [Point(DENSE, 1), Point(SMALL, 1), Point(LARGE, 1)]


def workshop(folder, execute, bleu=(), devices=({"OMP_NUM_THREADS": "1"},) * 2):
    plans = dict.fromkeys(POINTS, Plan(10, 20, 30, 4096, 3, 5))
    sweep = a_sweep(POINTS, bleu)
    return Workshop(folder, folder, folder, folder, sweep, plans, devices, True, execute)


def test_one_point_on_each_device_and_what_is_done_is_not_done_again(tmp_path):
    devices = [{"CUDA_VISIBLE_DEVICES": name} for name in ("3", "5")]
    commands = FakeCommands()
    assert run_points(workshop(tmp_path, commands, devices=devices), POINTS, lambda: None) == []
    assert commands.most == 2
    seen = {variables["CUDA_VISIBLE_DEVICES"] for _, _, variables in commands.ran}
    assert seen == {"3", "5"}
    record = read_record(tmp_path, POINTS[1])
    assert (record["updates"], record["loss"]["loss"], record["parameters"]) == (7, 4.25, 10)
    assert torch.load(tmp_path / POINTS[0].name / "checkpoint.avg2.pt", weights_only=True)
    again = FakeCommands()
    assert run_points(workshop(tmp_path, again), POINTS, lambda: None) == []
    assert again.ran == []
    # BLEU is added without training again.
    assert run_points(workshop(tmp_path, again, bleu=["valid"]), POINTS, lambda: None) == []
    assert {command for _, command, _ in again.ran} == {"bash"}
    assert read_record(tmp_path, POINTS[2])["bleu"] == {"valid": {"score": 12.5, "signature": "s"}}


def test_a_point_that_fails_stops_no_other_and_is_tried_again(tmp_path):
    name = POINTS[1].name
    failing = FakeCommands(fail=[(name, "fairseq-hydra-train")])
    assert run_points(workshop(tmp_path, failing), POINTS, lambda: None) == [POINTS[1]]
    assert read_record(tmp_path, POINTS[1])["failure"].startswith(
        "fairseq-hydra-train failed: it broke"
    )
    assert "loss" in read_record(tmp_path, POINTS[2])
    again = FakeCommands()
    assert run_points(workshop(tmp_path, again), POINTS, lambda: None) == []
    assert again.of("fairseq-hydra-train") == [name]
    assert "failure" not in read_record(tmp_path, POINTS[1])


def test_a_model_that_diverged_has_no_loss(tmp_path):
    commands = FakeCommands(losses={POINTS[1].name: "nan"})
    assert run_points(workshop(tmp_path, commands), POINTS, lambda: None) == [POINTS[1]]
    record = read_record(tmp_path, POINTS[1])
    assert "diverged" in record["failure"] and "loss" not in record


def test_what_is_at_work_ends_with_the_sweep(tmp_path):
    processes, ended = Processes(), []

    def run():
        command = [sys.executable, "-c", "print('here', flush=True); import time; time.sleep(99)"]
        with pytest.raises(Stopped):
            processes(command, tmp_path / "log", {})
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    while not (tmp_path / "log").exists() or not (tmp_path / "log").read_text():
        time.sleep(0.01)
    processes.stop()
    thread.join(timeout=20)
    assert ended
    with pytest.raises(Stopped):
        processes(["true"], tmp_path / "log", {})


def test_an_interruption_ends_the_other_points(tmp_path):
    stopped = threading.Event()

    def commands(command, log, variables):
        if log.parent.name == POINTS[0].name:
            raise KeyboardInterrupt
        assert stopped.wait(timeout=20)
        raise Stopped

    with pytest.raises(KeyboardInterrupt):
        run_points(workshop(tmp_path, commands), POINTS, stopped.set)
    for point in POINTS[:2]:  # the third may have begun
        assert records.status_of(read_record(tmp_path, point), [], False) == records.INTERRUPTED


def test_a_signal_ends_the_sweep_in_one_line(caplog):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, sweep._ended_by_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert end.value.code == 128 + signal.SIGTERM
    assert caplog.messages == ["interrupted; the same command goes on from here"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_commands_hold_the_folder_while_they_live(tmp_path):
    """A sweep that is killed alone leaves a training behind, which no second one may meet."""
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        processes = Processes([lock.fileno()])
        command = ["sh", "-c", "sleep 1 & echo started"]
        assert processes(command, tmp_path / "log", {}) == 0
    assert records.at_work(tmp_path)
    started = time.monotonic()
    while records.at_work(tmp_path):
        assert time.monotonic() - started < 20
        time.sleep(0.05)


def test_help_names_every_option():
    text = subprocess.run(
        ["bash", str(ROOT / "scripts/sweep.sh"), "--help"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    options = {flag for action in sweep._parser()._actions for flag in action.option_strings}
    assert options - {"--root"} == set(re.findall(r"^  (--[a-z-]+)", text, re.M))
