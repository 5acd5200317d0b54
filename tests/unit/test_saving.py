"""Files that are whole or not there, whatever kills or refuses their writing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from moa_fairseq import saving
from moa_fairseq.errors import UsageError
from moa_fairseq.text.files import atomic_writer, remove_abandoned, write_together

from ..faults import small_files


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_copy_cut_short_is_not_taken_for_whole(tmp_path, monkeypatch):
    source, last = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new" * 1000)
    last.write_bytes(b"old")

    def cut_short(_, target, size):
        target.write(b"new")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfileobj", cut_short)
        with pytest.raises(KeyboardInterrupt):
            PathManager.copy(str(source), str(last), overwrite=True)
    assert last.read_bytes() == b"old"
    assert PathManager.copy(str(source), str(last), overwrite=True)
    assert last.read_bytes() == source.read_bytes()
    assert names(tmp_path) == ["checkpoint1.pt", "checkpoint_last.pt"]


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    checkpoint_utils.torch_persistent_save({"model": {"w": torch.ones(3)}}, str(path))
    before = path.read_bytes()
    with small_files(2000), pytest.raises(OSError, match="File too large") as refused:
        checkpoint_utils.torch_persistent_save({"model": {"w": torch.ones(9999)}}, str(path))
    assert refused.value.filename == str(path)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["checkpoint_last.pt"]


def test_texts_that_belong_together_are_written_together_or_not_at_all(tmp_path):
    first, second = tmp_path / "report.txt", tmp_path / "report.json"
    write_together({first: "old", second: "old"})
    with small_files(2000), pytest.raises(OSError, match=r"File too large.*report\.json"):
        write_together({first: "new", second: "new" * 9999})
    assert [first.read_text(), second.read_text()] == ["old", "old"]
    assert len(names(tmp_path)) == 2


def test_what_a_killed_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from moa_fairseq.text.files import atomic_writer\n"
        "with atomic_writer(sys.argv[1]) as stream:\n"
        "    stream.write('half'); stream.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for name in ("one", "one", "two"):
        command = [sys.executable, "-c", script, str(tmp_path / name)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    # The second writer of `one` removed what the first left.
    assert len(names(tmp_path)) == 2
    with atomic_writer(tmp_path / "three") as stream:
        stream.write("whole")
        remove_abandoned(tmp_path)
        assert names(tmp_path) == [f".three.partial.{os.getpid()}"]
    assert (tmp_path / "three").read_text() == "whole"
    assert names(tmp_path) == ["three"]


def configuration(**changes):
    return SimpleNamespace(**{"no_last_checkpoints": False, "keep_best_checkpoints": 0, **changes})


@pytest.mark.parametrize("best", [True, False])
def test_a_save_that_ended_before_its_copies_is_finished(tmp_path, best):
    checkpoint = tmp_path / "checkpoint3.pt"
    for name in ("checkpoint3.pt", "checkpoint_last.pt", "checkpoint_best.pt"):
        (tmp_path / name).write_text("old")
    state = {"val_loss": 2.0, "best": 2.0 if best else 1.0}
    saving._open_journal(configuration(), checkpoint, state)
    saving.finish_interrupted_save(tmp_path)  # the checkpoint was not written
    assert (tmp_path / "checkpoint_last.pt").read_text() == "old"
    saving._open_journal(configuration(), checkpoint, state)
    with atomic_writer(checkpoint) as stream:
        stream.write("new")
    saving.finish_interrupted_save(tmp_path)
    assert (tmp_path / "checkpoint_last.pt").read_text() == "new"
    assert (tmp_path / "checkpoint_best.pt").read_text() == ("new" if best else "old")
    assert not (tmp_path / saving.JOURNAL).exists()


def test_where_the_copies_are_not_known_training_repeats(tmp_path):
    for changes in ({"keep_best_checkpoints": 2}, {"no_last_checkpoints": True}):
        (tmp_path / saving.JOURNAL).write_text(json.dumps({"checkpoint": "checkpoint1.pt"}))
        state = {"val_loss": 2.0, "best": 2.0}
        saving._open_journal(configuration(**changes), tmp_path / "checkpoint2.pt", state)
        assert names(tmp_path) == []


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--save-dir .*file/run: Not a directory; choose"):
        checkpoint_utils.verify_checkpoint_directory(str(tmp_path / "file/run"))
