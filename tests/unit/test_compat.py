from __future__ import annotations

import argparse
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from fairseq.data import TokenBlockDataset, data_utils, token_block_dataset

from moa_fairseq.checkpoints import load_checkpoint
from moa_fairseq.compat import (
    _keeps_last_batch,
    give_numpy_what_fairseq_asks_for,
    keep_every_sentence,
)
from moa_fairseq.errors import UsageError

from ..paths import ROOT


@pytest.mark.parametrize("number", [0, 1, 7, 8, 14, 20, 33])
@pytest.mark.parametrize("limits", [{"max_sentences": 6}, {"max_tokens": 40}, {}])
@pytest.mark.parametrize("multiple", [1, 8])
def test_every_sentence_is_in_exactly_one_batch(number, limits, multiple):
    lengths = np.random.RandomState(0).randint(1, 12, size=number)
    order = np.argsort(lengths, kind="stable")
    batches = data_utils.batch_by_size(
        order,
        num_tokens_fn=lambda index: lengths[index],
        num_tokens_vec=lengths[order],
        required_batch_size_multiple=multiple,
        **limits,
    )
    assert [index for batch in batches for index in batch] == order.tolist()


def test_the_mend_finds_the_fault_and_is_applied_once(monkeypatch):
    mended = data_utils.batch_by_size
    assert _keeps_last_batch(mended)

    def drops_the_last(indices, **_):
        return [indices[:2]]

    monkeypatch.setattr(data_utils, "batch_by_size", drops_the_last)
    assert not _keeps_last_batch(drops_the_last)
    keep_every_sentence()
    once = data_utils.batch_by_size
    assert [list(batch) for batch in once(np.arange(3))] == [[0, 1], [2]]
    keep_every_sentence()
    assert data_utils.batch_by_size is once


def test_reads_what_fairseq_writes(tmp_path):
    state = {
        "args": argparse.Namespace(arch="transformer"),
        "model": {"weight": torch.ones(2)},
        # Metrics that --eval-bleu leaves in a checkpoint.
        "extra_state": {"bleu": np.float64(27.3), "counts": np.array([1, 2]), "n": np.int64(3)},
    }
    torch.save(state, tmp_path / "checkpoint.pt")
    loaded = load_checkpoint(tmp_path / "checkpoint.pt")
    assert loaded["args"].arch == "transformer"
    assert loaded["extra_state"]["bleu"] == 27.3
    assert loaded["extra_state"]["counts"].tolist() == [1, 2]


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_a_checkpoint_that_would_run_code_is_refused_unrun(tmp_path):
    victim = tmp_path / "written-by-the-checkpoint"
    torch.save({"model": {}, "extra_state": RunsCode(str(victim))}, tmp_path / "hostile.pt")
    with pytest.raises(UsageError, match="not safe to load"):
        load_checkpoint(tmp_path / "hostile.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(RunsCode(str(victim))))
    with pytest.raises(UsageError, match=r"plain\.pt"):
        load_checkpoint(tmp_path / "plain.pt")
    assert not victim.exists()


@pytest.mark.parametrize("mode", ["eos", "none", "complete"])
def test_language_models_break_text_with_any_numpy(mode):
    """fairseq asks numpy 2 for `np.compat`, which it dropped, where sentences are samples."""
    tokens = [torch.tensor([5, 6, 2]), torch.tensor([7, 2]), torch.tensor([8, 9, 10, 2])]
    blocks = TokenBlockDataset(tokens, np.array([3, 2, 4]), 5, pad=1, eos=2, break_mode=mode)
    expected = {
        "eos": [[5, 6, 2], [7, 2], [8, 9, 10, 2]],
        "none": [[5, 6, 2, 7, 2], [8, 9, 10, 2]],
        "complete": [[5, 6, 2, 7, 2], [8, 9, 10, 2]],
    }
    assert [blocks[index].tolist() for index in range(len(blocks))] == expected[mode]


def test_numpy_itself_is_left_alone():
    before = hasattr(np, "compat")
    give_numpy_what_fairseq_asks_for()
    assert hasattr(np, "compat") == before
    seen = token_block_dataset.np
    assert seen.compat.long is int and seen.arange is np.arange


def test_without_fairseq_the_import_says_what_to_install(tmp_path):
    # A finder that hides fairseq stands for an environment that lacks it.
    script = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'fairseq': raise ModuleNotFoundError(name)\n"
        "import importlib.util as u\n"
        "real = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'fairseq' else real(name, *a)\n"
        "import moa_fairseq\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert 'pip install "moa-fairseq[fairseq]"' in result.stderr.splitlines()[-1]
