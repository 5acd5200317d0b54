"""fairseq's engine options with MoA: layers dropped and pruned, EMA, accumulation, sharding."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from fairseq.checkpoint_utils import save_ema_as_checkpoint
from fairseq_cli import train as train_command

from moa_fairseq.checkpoints import load_checkpoint
from moa_fairseq.errors import UsageError

from .commands import hypotheses
from .in_process import generate, logged, train

LAYERS = ["--encoder-layers", "3", "--decoder-layers", "3"]


@pytest.fixture(scope="module")
def three_layers(toy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layers")
    dropped = ["--encoder-layerdrop", "0.3", "--decoder-layerdrop", "0.3"]
    train(toy, folder, *LAYERS, *dropped, "--max-update", "3", "--update-freq", "2")
    return folder / "checkpoint_last.pt"


def translations(toy, path, capsys, *arguments):
    capsys.readouterr()
    generate(toy, path, "--beam", "2", *arguments)
    found = hypotheses(capsys.readouterr().out)
    assert found.keys() == set(range(45))
    return found


def test_layerdrop_with_accumulation_trains_and_averages_over_what_ran(toy, tmp_path, caplog):
    caplog.set_level("INFO")
    # Every expert is selected, so the balance loss of each module that runs is 1.
    every = ["--encoder-attention-heads", "8", "--decoder-attention-heads", "8"]
    dropped = ["--encoder-layerdrop", "0.3", "--decoder-layerdrop", "0.3", "--update-freq", "2"]
    train(toy, tmp_path, *LAYERS, *every, *dropped, "--max-update", "6")
    assert logged(caplog.records, "load_balance_loss") == [1.0] * 6
    losses = logged(caplog.records, "loss")
    assert len(losses) == 6
    assert all(map(math.isfinite, losses))


PRUNING = [
    (["0,2", "1"], {"encoder": [0, 2], "decoder": [1]}),
    (["1", None], {"encoder": [1], "decoder": [0, 1, 2]}),
    ([None, "2,0"], {"encoder": [0, 1, 2], "decoder": [0, 2]}),
]


@pytest.mark.parametrize(("keep", "kept"), PRUNING, ids=str)
def test_layers_to_keep_train_save_resume_and_translate(
    toy, three_layers, tmp_path, capsys, keep, kept
):
    options, overrides = [*LAYERS, "--finetune-from-model", three_layers], {}
    for side, text in zip(("encoder", "decoder"), keep):
        if text:
            options += [f"--{side}-layers-to-keep", text]
            overrides[f"{side}_layers_to_keep"] = text
    # A learning rate of nothing: what is saved is what was loaded.
    train(toy, tmp_path, *options, "--max-update", "1", "--lr", "1e-30")
    last = tmp_path / "checkpoint_last.pt"
    state, whole = load_checkpoint(last), load_checkpoint(three_layers)
    for side, numbers in kept.items():
        assert state["cfg"]["model"][f"{side}_layers"] == len(numbers)
        prefix = f"{side}.layers."
        found = {name.split(".")[2] for name in state["model"] if name.startswith(prefix)}
        assert found == {str(number) for number in range(len(numbers))}
    for name, parameter in state["model"].items():
        side, *rest = name.split(".")
        if rest[0] == "layers":
            rest[1] = str(kept[side][int(rest[1])])
        torch.testing.assert_close(parameter, whole["model"][".".join([side, *rest])])
    # The same pruning of the whole checkpoint, at translation, gives the same model.
    pruned = translations(toy, last, capsys)
    assert pruned == translations(toy, three_layers, capsys, "--model-overrides", str(overrides))
    train(toy, tmp_path, *options, "--max-update", "2")
    assert load_checkpoint(last)["optimizer_history"][-1]["num_updates"] == 2


@pytest.mark.parametrize("text", ["0,3", "1,1", "first", "-1"])
def test_layers_to_keep_that_are_not_there_are_refused(toy, tmp_path, text):
    option = f"--decoder-layers-to-keep={text}"
    with pytest.raises(UsageError, match=f"--decoder-layers-to-keep {text}: .* from 0 to 2"):
        train(toy, tmp_path, *LAYERS, option, "--max-update", "1")


def test_ema_is_the_moving_average_and_translates(toy, tmp_path, capsys):
    options = ["--store-ema", "--ema-decay", "0.5", "--save-interval-updates", "1"]
    train(toy, tmp_path, *options, "--max-update", "2")
    # It resumes with the average that it had.
    train(toy, tmp_path, *options, "--max-update", "3")
    states = [load_checkpoint(tmp_path / f"checkpoint_1_{update}.pt") for update in (1, 2, 3)]
    name = "encoder.layers.0.self_attn.router.weight"
    for before, after in zip(states, states[1:]):
        expected = 0.5 * before["extra_state"]["ema"][name] + 0.5 * after["model"][name]
        torch.testing.assert_close(after["extra_state"]["ema"][name], expected)
    save_ema_as_checkpoint(str(tmp_path / "checkpoint_last.pt"), str(tmp_path / "ema.pt"))
    average = load_checkpoint(tmp_path / "ema.pt")["model"][name]
    assert torch.equal(average, states[-1]["extra_state"]["ema"][name])
    translations(toy, tmp_path / "ema.pt", capsys)


def test_fully_sharded_training_is_refused(toy, tmp_path, monkeypatch):
    options = ["--ddp-backend", "fully_sharded", "--max-update", "1"]
    with pytest.raises(UsageError, match=r"--ddp-backend fully_sharded .* pytorch_ddp"):
        train(toy, tmp_path, *options)
    # Nor is it tried where fairscale is there.
    monkeypatch.setattr(train_command, "fsdp_enable_wrap", lambda _: nullcontext())
    monkeypatch.setattr(train_command, "fsdp_wrap", lambda model: model)
    with pytest.raises(UsageError, match=r"--ddp-backend fully_sharded .* pytorch_ddp"):
        train(toy, tmp_path, *options)
    assert not list(tmp_path.glob("*.pt"))
