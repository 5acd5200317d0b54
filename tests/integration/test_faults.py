"""Killed at every moment of a save, out of disk, or without permission: nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from moa_fairseq.checkpoints import load_checkpoint
from moa_fairseq.cli import average_checkpoints, import_official, prepare, prepare_wmt14, score
from moa_fairseq.text.wmt14 import miniature

from ..faults import SmallDisk, small_files
from ..official import their_checkpoint
from ..paths import ROOT
from . import in_process
from .commands import BIN, last_line, run, script

# Trains in a child that dies just before or after the Nth time that a file gets its name, or is
# removed, and then in one that is left alone; prints what that one went on from.
KILLER = """
import logging, os, signal, sys
from pathlib import Path
import moa_fairseq
from tests.integration.in_process import train

toy, runs, both, OPTIONS = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "both", sys.argv[4:]

def child(folder, moment=None, after=False):
    pid = os.fork()
    if pid == 0:
        if moment is not None:
            os.replace, os.remove = counted(os.replace), counted(os.remove)
            Path.unlink = counted(Path.unlink)
            seen.update(moment=moment, after=after)
        train(toy, folder, *OPTIONS)
        os._exit(0)
    return os.waitpid(pid, 0)[1]

seen = {"number": 0}
def counted(original):
    def call(path, *arguments, **keywords):
        # Not the end of a writer's block, which finds nothing left to remove.
        happens = os.path.exists(path)
        seen["number"] += happens
        last = happens and seen["number"] == seen["moment"]
        if last and not seen["after"]:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(path, *arguments, **keywords)
        if last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return call

logging.disable(logging.CRITICAL)
assert child(runs / "whole") == 0
moment = 0
while True:
    moment += 1
    sides = (False, True) if both else (moment % 2 == 0,)
    killed = [child(runs / f"{moment}-{after}", moment, after) for after in sides]
    if not any(map(os.WIFSIGNALED, killed)):
        break
    print(moment, flush=True)
"""


def newest(folder):
    """Updates of the newest whole checkpoint, all of which are whole."""
    found = [load_checkpoint(path) for path in folder.glob("*.pt")]
    return max((s["optimizer_history"][-1]["num_updates"] for s in found), default=0)


def state_of(path):
    state = load_checkpoint(path)
    optimizer = state["last_optimizer_state"]["state"]
    tensors = [*state["model"].values(), *(t for e in optimizer.values() for t in e.values())]
    iterator = state["extra_state"]["train_iterator"]
    return tensors, iterator["iterations_in_epoch"], state["extra_state"]["best"]


@pytest.mark.parametrize("sides", ["either", pytest.param("both", marks=pytest.mark.slow)])
def test_killed_at_every_moment_of_a_save_training_goes_on_from_the_newest(
    toy, tmp_path, caplog, sides
):
    caplog.set_level("INFO")
    runs = tmp_path / "runs"
    options = ["--max-update", "4", "--save-interval-updates", "2", "--keep-interval-updates", "1"]
    options += ["--dropout", "0.2"]
    killer = run(sys.executable, "-c", KILLER, toy, runs, sides, *options)
    # Each of the two saves writes a journal, a checkpoint, the best and the last, and removes the
    # journal; the second removes the checkpoint of the first.
    assert len(killer.stdout.split()) >= 11
    wanted = sorted(path.name for path in (runs / "whole").iterdir())
    assert wanted == ["checkpoint_1_4.pt", "checkpoint_best.pt", "checkpoint_last.pt"]
    for folder in sorted(runs.glob("*-*")):
        saved = newest(folder)
        caplog.clear()
        in_process.train(toy, folder, *options)
        assert in_process.logged_updates(caplog.records) == saved, folder.name
        for name in wanted:
            found, whole = (state_of(place / name) for place in (folder, runs / "whole"))
            assert found[1:] == whole[1:], (folder.name, name)
            for left, right in zip(found[0], whole[0]):
                assert torch.equal(torch.as_tensor(left), torch.as_tensor(right)), folder.name
        left = {path.name for path in folder.iterdir()} - set(wanted)
        # A kill before the removal of an old checkpoint leaves it, if no save comes after.
        assert left <= {"checkpoint_1_2.pt"}, folder.name


PREPARE = ("--source-lang", "en", "--target-lang", "de", "--vocab-size", "60")
TIGHT = "No space left on device; free some space and run this again"
LIMIT = "File too large; raise the limit on the size of files (ulimit -f) and run this again"
READ_ONLY = "Read-only file system; choose a place that you have access to"
NO_FOLDER = "Not a directory; choose a place that you have access to"


@pytest.fixture(scope="module")
def material(toy, tmp_path_factory):
    """What the commands read: checkpoints, archives, a checkpoint of the authors', long texts."""
    folder = tmp_path_factory.mktemp("material")
    in_process.train(toy, folder / "run", "--max-epoch", "2", "--max-tokens", "4096")
    shutil.copy(toy / "prepared/data/.manifest-checksum", folder / "run/.data-checksum")
    miniature.build("en-de", toy, folder / "archives", 400)
    torch.save(their_checkpoint()[0], folder / "theirs.pt")
    references = (toy / "test.de").read_text(encoding="utf-8")
    (folder / "hypotheses").write_text(references * 50, encoding="utf-8")
    (folder / "references").write_text(references * 50, encoding="utf-8")
    return folder


def commands(toy, material, out):
    """Each command that writes, with what it writes to in `out`."""
    checkpoints = ("--inputs", material / "run", "--num-epoch-checkpoints", "2")
    archives = ("--from-dir", material / "archives", "--workers", "1", "--vocab-size", "60")
    sums = material / "archives" / miniature.CHECKSUMS
    scored = ("--hypotheses", material / "hypotheses", "--reference", material / "references")
    texts = ("--train", toy / "train", "--valid", toy / "valid", "--test", toy / "test")
    return {
        "average": (average_checkpoints.main, [*checkpoints, "--output", out / "average.pt"]),
        "import": (import_official.main, [material / "theirs.pt", out / "imported.pt"]),
        "prepare": (prepare.main, [*PREPARE, *texts, "--out", out / "prepared"]),
        "wmt14": (
            prepare_wmt14.main,
            [*("--pair", "en-de", "--out", out / "wmt14", *archives, "--checksums", sums)],
        ),
        "score": (score.main, [*scored, "--resamples", "0", "--report", out / "scores/report"]),
        "train": (
            # Workers that read data would hand it over in files, which are limited too.
            lambda words: in_process.train(toy, words[0], *words[1:], "--num-workers", "0"),
            [out / "run", "--max-update", "1", "--dropout", "0.2"],
        ),
    }


def refused(command, cause):
    """The one line that a command ends with, which names the cause."""
    main, arguments = command
    with pytest.raises(SystemExit) as end:
        main([str(argument) for argument in arguments])
    line = str(end.value.code)
    assert cause in line and "\n" not in line
    return line


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


NAMES = ["average", "import", "prepare", "wmt14", "score", "train"]


@pytest.mark.parametrize("name", NAMES)
def test_out_of_room_each_command_ends_in_one_line_and_the_next_run_is_whole(
    toy, material, tmp_path, name
):
    command = commands(toy, material, tmp_path)[name]
    with small_files(1000):
        line = refused(command, LIMIT)
    assert str(tmp_path) in line
    whole = [path for path in files(tmp_path) if not path.name.startswith(".")]
    assert [path for path in whole if path.stat().st_size >= 1000] == []
    command[0]([str(argument) for argument in command[1]])
    before = {path: data for path, data in files(tmp_path).items() if path.name[0] != "."}
    assert before
    if name == "train":
        command[1][2] = "2"
        refused_again = command
    elif name in ("prepare", "wmt14"):
        command[1][command[1].index("--vocab-size") + 1] = "58"
        refused_again = command if name == "prepare" else None
    else:
        refused_again = command if name != "import" else None
    if refused_again is not None:
        with small_files(1000):
            refused(refused_again, LIMIT)
        after = {path: data for path, data in files(tmp_path).items() if path.name[0] != "."}
        assert after == before


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_under_a_file_is_named(toy, material, tmp_path, name):
    (tmp_path / "file").write_text("mine")
    line = refused(commands(toy, material, tmp_path / "file")[name], NO_FOLDER)
    assert str(tmp_path / "file") in line
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def disk(tmp_path):
    disk = SmallDisk(tmp_path / "disk", 4096)
    yield disk
    disk.unmount()


def test_a_full_or_read_only_disk(toy, material, disk):
    for name, command in commands(toy, material, disk.folder).items():
        disk.leave(8)
        assert str(disk.folder) in refused(command, TIGHT), name
        disk.empty()
        assert {path.suffix for path in files(disk.folder)} <= {".lock", "", ".en", ".de", ".json"}
        shutil.rmtree(disk.folder / "wmt14", ignore_errors=True)
    disk.make_read_only()
    before = files(disk.folder)
    for name, command in commands(toy, material, disk.folder).items():
        assert str(disk.folder) in refused(command, READ_ONLY), name
    assert files(disk.folder) == before


SCRIPTS = {
    "train.sh": ["--data", "{toy}/prepared/data", "--save-dir", "{disk}/run"],
    "evaluate.sh": [
        *("--prepared", "{toy}/prepared", "--save-dir", "{material}/run", "--out", "{disk}/x"),
        *("--average", "2"),
    ],
    "prepare.sh": [*PREPARE, "--train", "{toy}/train", "--out", "{disk}/prepared"],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_on_a_full_or_read_only_disk(toy, material, disk, name):
    words = [word.format(toy=toy, material=material, disk=disk.folder) for word in SCRIPTS[name]]
    for cause in (TIGHT, READ_ONLY):
        if cause == TIGHT:
            disk.leave(4)
        else:
            disk.make_read_only()
        before = {path: data for path, data in files(disk.folder).items() if data}
        result = script(name, *words, check=False)
        line = last_line(result)
        assert str(disk.folder) in line and cause in line
        assert {path: data for path, data in files(disk.folder).items() if data} == before


def test_translations_of_a_shell_that_was_killed_do_not_mix_with_the_next(toy, material, tmp_path):
    # A stand-in that goes on writing after its shell is gone, as fairseq-generate does.
    stand_in = tmp_path / "bin/fairseq-generate"
    stand_in.parent.mkdir()
    stand_in.write_text(
        "#!/bin/sh\nfor part in 0 1 2 3 4 5 6 7; do printf 'D-%s\\t0\\t%s\\n' $part \"$TEXT\";"
        " sleep 0.2; done\n",
        encoding="utf-8",
    )
    stand_in.chmod(0o755)
    (tmp_path / "prepared").mkdir()
    for name in ("manifest.json", "sentencepiece.model", "data"):
        (tmp_path / "prepared" / name).symlink_to(toy / "prepared" / name)
    (tmp_path / "prepared/raw").mkdir()
    for language in ("en", "de"):
        (tmp_path / f"prepared/raw/test.{language}").write_text("one two\n" * 8)
    arguments = ["--prepared", tmp_path / "prepared", "--save-dir", material / "run"]
    arguments += ["--out", tmp_path / "scores", "--average", "2"]
    command = ["bash", ROOT / "scripts/evaluate.sh", *arguments]
    path = f"{stand_in.parent}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TEXT": "a longer line of the first run"}
    shell = subprocess.Popen(
        [str(word) for word in command], env=environment, stderr=subprocess.DEVNULL
    )
    partial = tmp_path / "scores/test.generate.txt.partial"
    deadline = time.monotonic() + 120
    while not (partial.exists() and partial.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shell.send_signal(signal.SIGKILL)
    shell.wait()
    run(*command, variables={"PATH": path, "TEXT": "one two"})
    lines = (tmp_path / "scores/test.generate.txt").read_text().splitlines()
    assert lines == [f"D-{number}\t0\tone two" for number in range(8)]
    assert not partial.exists()


@pytest.mark.slow
def test_the_script_that_injects_faults_finds_no_loss(tmp_path):
    command = [sys.executable, ROOT / "scripts/inject_faults.py", "--work", tmp_path]
    run(*command, "--rounds", "12", "--seed", "2", timeout=3600)
    stages = json.loads((tmp_path / "faults.json").read_text())["stages"]
    assert sum(stage["faults"] for stage in stages.values()) >= 12
    assert all(not stage["losses"] for stage in stages.values())
