"""Several workers over gloo, as torchrun starts them, against one worker with the same batches."""

from __future__ import annotations

import math
import re

import pytest
import torch

from moa_fairseq.checkpoints import load_checkpoint
from moa_fairseq.errors import UsageError

from ..paths import PACKAGE
from .commands import last_line, run, trained_parameters
from .in_process import RECIPE, train

# Plain gradient descent: what changes is the gradient. The router terms are heavy, so that a wrong
# scale of them shows.
GRADIENTS = [
    *("--optimizer", "sgd", "--lr", "0.1", "--lr-scheduler", "fixed", "--warmup-updates", "0"),
    *("--load-balance-weight", "0.5", "--router-z-weight", "0.1"),
]


TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"]


def two_workers(toy, save_dir, *options, **keywords):
    """What two workers of `fairseq-train` print."""
    result = run(
        *(*TORCHRUN, "fairseq-train", toy / "prepared/data", "--user-dir", PACKAGE),
        *("--save-dir", save_dir, *RECIPE, *options),
        **{"timeout": 300, **keywords},
    )
    return result.stdout + result.stderr


INNER, VALID = r"train_inner \|", r"valid on 'valid'"


def metric(log, name, line):
    return [float(v) for v in re.findall(rf"{line}.*?\b{name}[= ](-?[0-9.]+)", log)]


METRICS = [
    *("loss", "router_loss", "load_balance_loss", "router_z_loss", "load_cv_squared_loss", "gnorm"),
    *("load_cv_encoder_self", "unused_experts_encoder_self", "routing_entropy_cross"),
]


@pytest.mark.parametrize(
    ("backend", "batches", "update_freq", "updates"),
    [
        ("pytorch_ddp", ("--max-tokens", "1024", "--max-update", "4"), 1, 4),
        # An epoch of 23 batches: in the last update one worker has one and the other two.
        ("pytorch_ddp", ("--batch-size", "136", "--max-tokens", "9999", "--max-epoch", "1"), 2, 6),
        ("legacy_ddp", ("--batch-size", "136", "--max-tokens", "9999", "--max-epoch", "1"), 2, 6),
    ],
)
def test_two_workers_train_as_one_with_twice_the_batches(
    toy, tmp_path, caplog, backend, batches, update_freq, updates
):
    caplog.set_level("INFO")
    # 2 of 64 experts, so that some of them have no token.
    experts = ["--encoder-attention-heads", "2", "--decoder-attention-heads", "2"]
    options = [*batches, *GRADIENTS, *experts, "--num-experts", "64"]
    train(toy, tmp_path / "one", *options, "--update-freq", 2 * update_freq)
    one = "\n".join(f"{r.name} | {r.getMessage()}" for r in caplog.records)
    two = two_workers(
        *(toy, tmp_path / "two", *options, "--update-freq", update_freq),
        *("--ddp-backend", backend),
    )
    logs = [one, two]
    assert min(metric(logs[1], "unused_experts_encoder_self", INNER)) > 0
    for name in METRICS:
        for line in (INNER, VALID)[: 1 if name == "gnorm" else 2]:
            values = [metric(log, name, line) for log in logs]
            assert len(values[0]) == len(values[1]) == (updates if line == INNER else 1)
            assert values[1] == pytest.approx(values[0], rel=1e-3, abs=0.002), (name, line)
    ends = [trained_parameters(tmp_path / name) for name in ("one", "two")]
    for name, parameter in ends[0].items():
        torch.testing.assert_close(ends[1][name], parameter, atol=2e-6, rtol=1e-5)


def test_layers_that_workers_drop_are_no_obstacle_and_a_seed_repeats_all(toy, tmp_path):
    # Every expert is selected, so the balance loss of each module that runs is 1.
    options = [
        *("--encoder-layers", "3", "--decoder-layers", "3", "--encoder-layerdrop", "0.4"),
        *("--decoder-layerdrop", "0.4", "--dropout", "0.1", "--encoder-attention-heads", "8"),
        *("--decoder-attention-heads", "8", "--max-update", "6"),
    ]
    logs = [two_workers(toy, tmp_path / name, *options) for name in ("first", "second")]
    assert metric(logs[0], "load_balance_loss", INNER) == [1.0] * 6
    assert all(map(math.isfinite, metric(logs[0], "loss", INNER)))
    first, second = (
        load_checkpoint(tmp_path / name / "checkpoint_last.pt") for name in ("first", "second")
    )
    assert same(trained_parameters(tmp_path / "first"), trained_parameters(tmp_path / "second"))
    assert same(first["last_optimizer_state"], second["last_optimizer_state"])


def same(first, second):
    """Whether two nested states are equal, bit for bit."""
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[k], second[k]) for k in first)
    return first == second


def test_workers_resume_in_both_ways(toy, tmp_path):
    two_workers(toy, tmp_path, "--max-update", "2")
    assert "(epoch 1 @ 2 updates)" in two_workers(toy, tmp_path, "--max-update", "3")
    everywhere = ["--max-update", "4", "--load-checkpoint-on-all-dp-ranks"]
    log = two_workers(toy, tmp_path, *everywhere, "--ddp-backend", "legacy_ddp")
    assert "(epoch 1 @ 3 updates)" in log
    state = load_checkpoint(tmp_path / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["num_updates"] == 4


def test_workers_stop_together_at_a_router_that_breaks_in_one_of_them(toy, tmp_path):
    train(toy, tmp_path, "--max-update", "1")
    last = tmp_path / "checkpoint_last.pt"
    state = torch.load(last, weights_only=True)
    # One piece that some sentences have breaks the router of whoever sees it first.
    pieces = (toy / "prepared/data/dict.en.txt").read_text(encoding="utf-8").splitlines()
    number = next(i for i, line in enumerate(pieces) if line.startswith("▁house ")) + 4
    state["model"]["encoder.embed_tokens.weight"][number] = math.nan
    state["model"]["decoder.embed_tokens.weight"][number] = math.nan
    torch.save(state, last)
    before = last.read_bytes()
    # Each worker writes what it says to a file; torchrun adds what it has to say itself.
    logs = tmp_path / "logs"
    result = run(
        *(*TORCHRUN[:-1], "--log-dir", logs, "--redirects", "3", "--no-python"),
        *("fairseq-train", toy / "prepared/data", "--user-dir", PACKAGE, "--save-dir", tmp_path),
        *(*RECIPE, "--batch-size", "2", "--max-update", "50"),
        check=False,
        timeout=300,
    )
    assert result.returncode != 0
    said = [path.read_text(encoding="utf-8") for path in sorted(logs.glob("*/*/*/stderr.log"))]
    assert len(said) == 2
    lines = [text.strip().splitlines()[-1] for text in said]
    # Both say what the one found.
    assert "the router of encoder.layers.0.self_attn has logits that are not finite" in lines[0]
    assert lines[0].partition("the router")[2] == lines[1].partition("the router")[2]
    assert not any("Traceback" in text for text in said)
    assert last.read_bytes() == before


def test_workers_without_torchrun_or_gpus_are_refused(toy, tmp_path, unused_port):
    message = r"--distributed-world-size 2: .* use torchrun --standalone --nproc-per-node 2"
    for where in ([], ["--distributed-init-method", f"tcp://127.0.0.1:{unused_port}"]):
        result = run(
            *("fairseq-train", toy / "prepared/data", "--user-dir", PACKAGE, *RECIPE, *where),
            *("--save-dir", tmp_path / "none", "--distributed-world-size", "2"),
            check=False,
        )
        assert re.search(message, last_line(result))
        assert not (tmp_path / "none").exists()


def test_workers_that_would_train_side_by_side_are_refused(toy, tmp_path, monkeypatch):
    for name, value in zip(("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"), ("a", 1, 2, 0)):
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UsageError, match=r"2 workers, .* add --distributed-world-size 2 \(hydra"):
        train(toy, tmp_path, "--max-update", "1")
    assert not list(tmp_path.glob("*.pt"))
