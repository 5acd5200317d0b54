"""Checkpoints that are damaged, foreign, hostile or of another model, given to every command."""

from __future__ import annotations

import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from fairseq_cli import interactive

from moa_fairseq.cli.average_checkpoints import main as average
from moa_fairseq.cli.import_official import main as import_official
from moa_fairseq.errors import CheckpointMismatch, UsageError
from moa_fairseq.models.moa_transformer import MoATransformerModel

from ..paths import PACKAGE
from .commands import last_line, run, script
from .conftest import SMALL
from .in_process import generate, train


class RunsCode:
    """Unpickled by Python itself, it makes a file."""

    def __init__(self, victim):
        self.victim = victim

    def __reduce__(self):
        return os.mkdir, (str(self.victim),)


@pytest.fixture(scope="module")
def good(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    train(toy, folder, "--max-update", "2")
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def bad(good, tmp_path_factory):
    """A folder of bad checkpoints, and the path that the hostile ones would make."""
    folder = tmp_path_factory.mktemp("bad")
    victim = folder / "made-by-a-checkpoint"
    state = torch.load(good, weights_only=True)
    state["extra_state"]["more"] = RunsCode(victim)
    torch.save(state, folder / "hostile.pt")
    (folder / "pickle.pt").write_bytes(pickle.dumps(RunsCode(victim), protocol=2))
    (folder / "truncated.pt").write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    (folder / "empty.pt").write_bytes(b"")
    (folder / "random.pt").write_bytes(torch.arange(4000).numpy().tobytes())
    torch.save({"weights": torch.ones(3)}, folder / "foreign.pt")
    torch.save([torch.ones(3)], folder / "list.pt")
    return SimpleNamespace(folder=folder, victim=victim)


REASONS = {
    "hostile": "not safe to load: it names posix.mkdir",
    "pickle": "not safe to load: it names posix.mkdir",
    "truncated": "is not a readable checkpoint: ",
    "empty": "is not a readable checkpoint: ",
    "random": "is damaged",
    "foreign": "is not a fairseq checkpoint",
    "list": "is not a fairseq checkpoint",
}


@pytest.mark.parametrize("name", REASONS)
def test_every_reader_refuses_it_in_one_line(toy, good, bad, tmp_path, monkeypatch, name):
    path = bad.folder / f"{name}.pt"
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    last = run_dir / "checkpoint_last.pt"
    last.write_bytes(path.read_bytes())
    before = last.read_bytes()

    def translate_interactively():
        monkeypatch.setattr("fairseq_cli.generate.main", interactive.main)
        generate(toy, path)

    readers = {
        "resume": lambda: train(toy, run_dir, "--max-update", "3"),
        "restore": lambda: train(toy, tmp_path, "--restore-file", path),
        "reset": lambda: train(toy, tmp_path, "--restore-file", path, "--reset-optimizer"),
        "finetune": lambda: train(toy, tmp_path, "--finetune-from-model", path),
        "generate": lambda: generate(toy, path),
        "ensemble": lambda: generate(toy, f"{good}:{path}"),
        "interactive": translate_interactively,
        "hub": lambda: MoATransformerModel.from_pretrained(
            str(bad.folder), path.name, data_name_or_path=str(toy / "prepared/data")
        ),
        "average": lambda: average(
            ["--inputs", str(good), str(path), "--output", str(tmp_path / "average.pt")]
        ),
        "import": lambda: import_official([str(path), str(tmp_path / "imported.pt")]),
    }
    for reader, read in readers.items():
        with pytest.raises(UsageError) as error:
            read()
        line = str(error.value)
        assert REASONS[name] in line or reader in ("average", "import"), (reader, line)
        assert path.name in line or last.name in line, (reader, line)
        assert "\n" not in line, reader
        assert not bad.victim.exists(), reader
    assert last.read_bytes() == before
    assert [p.name for p in tmp_path.rglob("*.pt")] == [last.name]


def test_on_the_command_line_it_is_the_last_line(toy, good, bad, tmp_path):
    hostile = bad.folder / "hostile.pt"
    save_dir = tmp_path / "checkpoints"
    save_dir.mkdir()
    (save_dir / "checkpoint1.pt").write_bytes(hostile.read_bytes())
    data = toy / "prepared/data"
    plugin = ("--user-dir", PACKAGE, "--cpu")
    for result in (
        script(
            *("train.sh", "--data", data, "--save-dir", tmp_path / "new", "--", *SMALL),
            *("--restore-file", hostile),
            check=False,
        ),
        run("fairseq-generate", data, "--path", hostile, *plugin, check=False),
        run("fairseq-interactive", data, "--path", hostile, *plugin, stdin="one", check=False),
        script(
            *("evaluate.sh", "--prepared", toy / "prepared", "--save-dir", save_dir),
            *("--out", tmp_path / "scores", "--average", "1"),
            check=False,
        ),
    ):
        assert "not safe to load: it names posix.mkdir" in last_line(result)
    assert not bad.victim.exists()
    assert not list((tmp_path / "scores").glob("*.txt"))


def test_an_option_of_a_checkpoint_is_never_run(toy, good, bad, tmp_path):
    state = torch.load(good, weights_only=True)
    code = f"__import__('os').mkdir({str(bad.victim)!r})"
    # fairseq evaluates this option of its convolutional model.
    state["cfg"]["model"] = {
        **{"_name": "fconv", "encoder_layers": code, "decoder_layers": "[(512, 3)]"},
        **{"encoder_embed_dim": 8, "decoder_embed_dim": 8, "encoder_embed_path": None},
        **{"decoder_embed_path": None, "decoder_out_embed_dim": 8, "decoder_attention": "True"},
        **{"dropout": 0.1, "max_source_positions": 10, "max_target_positions": 10},
        **{"share_input_output_embed": False},
    }
    torch.save(state, tmp_path / "options.pt")
    with pytest.raises(UsageError, match="is code and not a value; it was not run"):
        generate(toy, tmp_path / "options.pt")
    assert not bad.victim.exists()


# Options that leave every parameter's shape as it is.
OTHERS = [
    (["--encoder-attention-heads", "2"], "--encoder-attention-heads 4", 2),
    (["--gate-normalization", "none"], "--gate-normalization detached", "none"),
    (["--heads-per-expert", "2", "--head-dim", "16"], "--head-dim 32", 16),
    (["--activation-fn", "gelu"], "--activation-fn relu", "gelu"),
    (["--moa-modules", "cross"], "--moa-modules cross,decoder-self,encoder-self", "cross"),
]


@pytest.mark.parametrize(("options", "theirs", "ours"), OTHERS, ids=[row[1] for row in OTHERS])
def test_another_model_of_the_same_shapes_is_not_trained_further(
    toy, good, tmp_path, options, theirs, ours
):
    last = tmp_path / "checkpoint_last.pt"
    last.write_bytes(good.read_bytes())
    with pytest.raises(UsageError, match="the checkpoint is not of this model") as error:
        train(toy, tmp_path, "--max-update", "3", *options)
    flag, value = theirs.split()
    line = str(error.value)
    assert f"{last}: " in line
    assert f"was trained with {flag} {value}, and this run has {flag} {ours}; give" in line
    assert last.read_bytes() == good.read_bytes()


def test_a_change_on_purpose_goes_through(toy, good, tmp_path):
    other = ["--gate-normalization", "none", "--max-update", "3"]
    train(toy, tmp_path / "finetuned", "--finetune-from-model", good, *other)
    train(toy, tmp_path / "reset", "--restore-file", good, "--reset-optimizer", *other)
    for name in ("finetuned", "reset"):
        state = torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)
        assert state["cfg"]["model"]["gate_normalization"] == "none"
    # What only shapes training may change from run to run.
    train(toy, tmp_path / "dropout", "--restore-file", good, "--dropout", "0.3", "--max-update", 3)
    assert (tmp_path / "dropout/checkpoint_last.pt").exists()


def test_a_dense_checkpoint_is_not_trained_as_moa(toy, tmp_path):
    train(toy, tmp_path, "--arch", "dense_transformer", "--max-update", "1")
    dense = tmp_path / "checkpoint_last.pt"
    before = dense.read_bytes()
    with pytest.raises(UsageError, match="but of --arch dense_transformer"):
        train(toy, tmp_path, "--max-update", "2")
    with pytest.raises(CheckpointMismatch, match="the checkpoint is not of this model"):
        train(toy, tmp_path / "new", "--finetune-from-model", dense)
    assert dense.read_bytes() == before
