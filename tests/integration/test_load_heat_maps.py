"""`--load-heat-map-interval` in real training: what it counts, where it writes, when it is off."""

from __future__ import annotations

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch
from fairseq.logging import progress_bar
from fairseq.tasks.fairseq_task import FairseqTask

from moa_fairseq.errors import UsageError
from moa_fairseq.modules.recording import record_routings

from .in_process import train
from .test_distributed import two_workers

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)

OPTION = "--load-heat-map-interval"
# 2 of 64 experts, so that some of them have no token; layers that are dropped.
OPTIONS = [
    *("--encoder-attention-heads", "2", "--decoder-attention-heads", "2", "--num-experts", "64"),
    *("--encoder-layers", "2", "--encoder-layerdrop", "0.5", "--update-freq", "2"),
]


def written(save_dir):
    path = save_dir / "load_heat_maps/load.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def intervals(save_dir):
    return [(line["from_update"], line["to_update"]) for line in written(save_dir)]


@pytest.fixture
def counted(monkeypatch):
    """Counts of selections by module, one dictionary for each batch in training, one by one."""
    batches = []
    original = FairseqTask.train_step

    def train_step(self, sample, model, *args, **kwargs):
        with record_routings(model) as recorded:
            result = original(self, sample, model, *args, **kwargs)
        counts = {}
        net_input = sample["net_input"]
        for _, kind, position, routing in recorded:
            tokens = net_input["src_tokens" if kind == "encoder-self" else "prev_output_tokens"]
            row = counts.setdefault(f"{kind} {position}", [0] * routing.logits.size(-1))
            for sentence, selected in zip(tokens.tolist(), routing.indices.tolist()):
                for token, experts in zip(sentence, selected):
                    for expert in experts if token != self.target_dictionary.pad() else []:
                        row[expert] += 1
        batches.append(counts)
        return result

    monkeypatch.setattr(FairseqTask, "train_step", train_step)
    return batches


def test_the_numbers_are_those_of_the_routings(toy, tmp_path, counted):
    tensorboard = tmp_path / "tensorboard"
    train(
        *(toy, tmp_path / "run", *OPTIONS, OPTION, "2", "--max-update", "5"),
        *("--validate-interval-updates", "1", "--tensorboard-logdir", tensorboard),
    )
    assert intervals(tmp_path / "run") == [(1, 2), (3, 4)]
    names = sorted(path.name for path in (tmp_path / "run/load_heat_maps").iterdir())
    assert names == ["000002.png", "000004.png", "load.jsonl"]
    for place, line in enumerate(written(tmp_path / "run")):
        expected = dict.fromkeys(line["modules"])
        for batch in counted[4 * place : 4 * place + 4]:  # two updates of two batches
            for name, row in batch.items():
                before = expected[name] or [0] * 64
                expected[name] = [old + new for old, new in zip(before, row)]
        assert line["modules"] == expected
        assert list(expected) == ["encoder-self 0", "encoder-self 1", "decoder-self 0", "cross 0"]
    assert images(tensorboard / "train_inner") == [("load_heat_map", 2), ("load_heat_map", 4)]


def images(folder):
    proto = pytest.importorskip("tensorboardX.proto.event_pb2")
    struct = __import__("struct")
    found = []
    for path in folder.iterdir():
        data = path.read_bytes()
        while data:  # length, checksum, event, checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = proto.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            found += [(v.tag, event.step) for v in event.summary.value if v.HasField("image")]
    return found


def test_a_resumed_run_goes_on_at_the_right_update(toy, tmp_path, counted):
    options = [*OPTIONS, OPTION, "3"]
    train(toy, tmp_path / "one", *options, "--max-update", "6")
    train(toy, tmp_path / "two", *options, "--max-update", "4")
    train(toy, tmp_path / "two", *options, "--max-update", "6")
    assert intervals(tmp_path / "one") == [(1, 3), (4, 6)]
    assert intervals(tmp_path / "two") == [(1, 3), (5, 6)]
    assert written(tmp_path / "one")[0] == written(tmp_path / "two")[0]


def test_without_the_option_nothing_is_written(toy, tmp_path):
    train(toy, tmp_path / "run", "--max-update", "2")
    assert not (tmp_path / "run/load_heat_maps").exists()


def test_wandb_gets_the_picture(toy, tmp_path, monkeypatch):
    logged = []
    wandb = SimpleNamespace(
        init=lambda **_: None,
        config=SimpleNamespace(update=lambda _: None),
        log=lambda values, step: logged.append((step, values)),
        Image=lambda pixels: pixels,
    )
    monkeypatch.setattr(progress_bar, "wandb", wandb)
    options = ["--wandb-project", "p", "--no-save", OPTION, "2", "--max-update", "3"]
    train(toy, tmp_path / "run", *options)
    ((step, values),) = [entry for entry in logged if "load_heat_map" in entry[1]]
    assert step == 2 and values["load_heat_map"].shape[2] == 3
    scalars = {"train_inner/load_cv_encoder_self", "train_inner/router_loss"}
    assert scalars <= {name for _, v in logged for name in v}
    assert not (tmp_path / "run/load_heat_maps").exists()


def test_nowhere_to_draw_nothing_to_draw_with(toy, tmp_path, monkeypatch):
    for options, message in (
        ([OPTION, "-1"], "must not be negative; 0 draws none"),
        ([OPTION, "2", "--no-save"], "no place to draw to"),
        ([OPTION, "2", "--arch", "dense_transformer"], "the model has no experts"),
    ):
        with pytest.raises(UsageError, match=message):
            train(toy, tmp_path / "run", "--max-update", "1", *options)
    original = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else original(name, *rest),
    )
    with pytest.raises(UsageError, match="needs matplotlib; install it"):
        train(toy, tmp_path / "run", "--max-update", "1", OPTION, "2")
    assert not (tmp_path / "run/load_heat_maps").exists()


@pytest.mark.slow
def test_two_workers_draw_what_one_would(toy, tmp_path):
    # Dropout would differ.
    options = [*OPTIONS[:6], "--batch-size", "136", "--max-tokens", "9999", "--max-epoch", "1"]
    options += [OPTION, "2"]
    train(toy, tmp_path / "one", *options, "--update-freq", "4")
    two_workers(toy, tmp_path / "two", *options, "--update-freq", "2")
    assert intervals(tmp_path / "one") == intervals(tmp_path / "two") == [(1, 2), (3, 4), (5, 6)]
    for one, two in zip(written(tmp_path / "one"), written(tmp_path / "two")):
        for name in one["modules"]:
            ours, theirs = (torch.tensor(line["modules"][name]) for line in (two, one))
            assert ours.sum() == theirs.sum()
            # Rounding in another order may tip a tie.
            assert (ours - theirs).abs().sum() <= 0.002 * theirs.sum()
