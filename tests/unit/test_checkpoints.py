from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from moa_fairseq.checkpoints import average_checkpoints, find_checkpoints, load_checkpoint
from moa_fairseq.cli.average_checkpoints import main
from moa_fairseq.errors import UsageError


def save(path, value, dtype=torch.float32, maximize=False, **changes):
    shared = torch.full((3,), float(value), dtype=dtype)
    model = {
        "encoder.weight": shared,
        "decoder.weight": shared,
        "half": torch.full((2,), float(value), dtype=torch.float16),
        "count": torch.tensor(int(value)),
    }
    model.update(changes.pop("model", {}))
    options = {"_name": "moa_transformer", "num_experts": 8, **changes}
    state = {
        "cfg": {
            "model": Namespace(**options),
            "checkpoint": {"maximize_best_checkpoint_metric": maximize},
        },
        "model": model,
        "last_optimizer_state": {"exp_avg": torch.zeros(1000)},
        "extra_state": {"epoch": value},
    }
    torch.save(state, path)
    return path


def test_average_is_the_mean_and_keeps_types_and_sharing(tmp_path):
    paths = [save(tmp_path / f"{value}.pt", value) for value in (1, 2, 6)]
    average_checkpoints(paths, tmp_path / "average.pt")
    state = load_checkpoint(tmp_path / "average.pt")
    model = state["model"]
    assert model["encoder.weight"].tolist() == [3.0, 3.0, 3.0]
    assert model["half"].dtype == torch.float16
    assert model["half"].tolist() == [3.0, 3.0]
    assert model["count"].item() == 6
    assert model["encoder.weight"].data_ptr() == model["decoder.weight"].data_ptr()
    assert "last_optimizer_state" not in state
    assert state["extra_state"]["epoch"] == 6


def test_an_option_of_a_later_version_counts_as_its_default(tmp_path):
    old = save(tmp_path / "old.pt", 1)
    new = save(tmp_path / "new.pt", 3, ffn_type="normal")
    average_checkpoints([old, new], tmp_path / "average.pt")
    other = save(tmp_path / "other.pt", 3, ffn_type="moe")
    with pytest.raises(UsageError, match="option ffn_type is moe instead of normal"):
        average_checkpoints([old, other], tmp_path / "average.pt")


def test_sums_do_not_round_to_half_precision(tmp_path):
    # 2048 + 1 is not representable in float16; the mean of 2048, 2048, 2051 is 2049.
    values = {2048: 2048, 2049: 2048, 2051: 2051}
    paths = [
        save(tmp_path / f"{name}.pt", 1, model={"half": torch.tensor([value]).half()})
        for name, value in values.items()
    ]
    average_checkpoints(paths, tmp_path / "average.pt")
    expected = torch.tensor([(2048.0 + 2048 + 2052) / 3]).half()  # 2051 itself rounds to 2052
    assert torch.equal(load_checkpoint(tmp_path / "average.pt")["model"]["half"], expected)


def test_average_of_one_is_itself(tmp_path):
    average_checkpoints([save(tmp_path / "a.pt", 5)], tmp_path / "average.pt")
    before, after = (load_checkpoint(tmp_path / name)["model"] for name in ("a.pt", "average.pt"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_resumed_with_other_dropout_is_the_same_model(tmp_path):
    paths = [
        save(tmp_path / f"{value}.pt", value, dropout=dropout, checkpoint_activations=value > 1)
        for value, dropout in ((1, 0.1), (3, 0.3))
    ]
    average_checkpoints(paths, tmp_path / "average.pt")
    assert load_checkpoint(tmp_path / "average.pt")["model"]["half"].tolist() == [2.0, 2.0]


def test_other_models_are_refused_and_nothing_is_written(tmp_path):
    good = save(tmp_path / "good.pt", 1)
    others = {
        "num_experts is 16 instead of 8": save(tmp_path / "e.pt", 1, num_experts=16),
        "head_dim is 4 instead of 128": save(tmp_path / "d.pt", 1, head_dim=4),
        "parameter count is": save(tmp_path / "s.pt", 1, model={"count": torch.zeros(2)}),
    }
    for message, other in others.items():
        with pytest.raises(UsageError) as error:
            average_checkpoints([good, other], tmp_path / "average.pt")
        assert message in str(error.value)
        assert "not of the same model" in str(error.value)
    assert not (tmp_path / "average.pt").exists()


@pytest.fixture
def folder(tmp_path):
    for epoch in (1, 2, 3, 10):
        save(tmp_path / f"checkpoint{epoch}.pt", epoch)
    for update in (50, 100, 900):
        save(tmp_path / f"checkpoint_1_{update}.pt", update)
    for loss in ("3.2500", "2.5", "10.0"):
        save(tmp_path / f"checkpoint.best_loss_{loss}.pt", float(loss))
    save(tmp_path / "checkpoint_last.pt", 0)
    save(tmp_path / "checkpoint_best.pt", 0)
    return tmp_path


def names(paths):
    return [path.name for path in paths]


def test_finds_the_last_by_number_not_by_name(folder):
    assert names(find_checkpoints(folder, epochs=2)) == ["checkpoint3.pt", "checkpoint10.pt"]
    assert names(find_checkpoints(folder, epochs=2, upper_bound=3)) == [
        "checkpoint2.pt",
        "checkpoint3.pt",
    ]
    assert names(find_checkpoints(folder, updates=2)) == [
        "checkpoint_1_100.pt",
        "checkpoint_1_900.pt",
    ]


def test_finds_the_best_of_a_loss_and_of_a_score(folder, tmp_path):
    assert names(find_checkpoints(folder, best=2)) == [
        "checkpoint.best_loss_3.2500.pt",
        "checkpoint.best_loss_2.5.pt",
    ]
    scores = tmp_path / "scores"
    scores.mkdir()
    for bleu in ("9.5", "27.25", "30.0"):
        save(scores / f"checkpoint.best_bleu_{bleu}.pt", float(bleu), maximize=True)
    assert names(find_checkpoints(scores, best=1)) == ["checkpoint.best_bleu_30.0.pt"]


def test_command_averages_the_last_epochs(folder):
    output = folder / "new" / "average.pt"
    main(["--inputs", str(folder), "--num-epoch-checkpoints", "2", "--output", str(output)])
    assert load_checkpoint(output)["model"]["encoder.weight"].tolist() == [6.5] * 3
    listed = [str(folder / f"checkpoint{n}.pt") for n in (1, 10)]
    main(["--inputs", *listed, "--output", str(output)])
    assert load_checkpoint(output)["model"]["encoder.weight"].tolist() == [5.5] * 3


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["{}", "--num-epoch-checkpoints", "9"], "has 4 epoch checkpoints, 9 were asked for"),
        (["{}", "--num-epoch-checkpoints", "0"], "at least 1"),
        (["{}"], "is a folder: say how many"),
        (["{}/none", "--num-epoch-checkpoints", "1"], "no such folder"),
        (["{}/none.pt"], "no such checkpoint"),
        (["{}/checkpoint1.pt", "--checkpoint-upper-bound", "3"], "--checkpoint-upper-bound needs"),
        (["{}", "{}", "--num-best-checkpoints", "1"], "must be one folder"),
        (["{}/truncated.pt"], "truncated.pt"),
        (["{}/text.pt"], "text.pt"),
        (["{}/other.pt"], "not a fairseq checkpoint"),
    ],
)
def test_command_names_what_is_wrong(folder, arguments, message):
    whole = (folder / "checkpoint1.pt").read_bytes()
    (folder / "truncated.pt").write_bytes(whole[: len(whole) // 2])
    (folder / "text.pt").write_text("not a checkpoint")
    torch.save({"weights": torch.ones(2)}, folder / "other.pt")
    output = folder / "average.pt"
    with pytest.raises(SystemExit) as error:
        main(["--inputs", *(a.format(folder) for a in arguments), "--output", str(output)])
    assert message in str(error.value.code)
    assert "\n" not in str(error.value.code)
    assert not output.exists()
