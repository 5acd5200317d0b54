"""Training in each precision, and a router that breaks, through fairseq's own training command."""

from __future__ import annotations

import math

import pytest
import torch

from moa_fairseq.checkpoints import load_checkpoint
from moa_fairseq.errors import NonFiniteRouter

from .commands import last_line, run, script, train_losses
from .conftest import SMALL
from .in_process import logged, train

ROUTER = "encoder.layers.0.self_attn.router.weight"
# On a CPU --amp is float32 with the optimizer of mixed precision. fairseq's flat gradients of
# --fp16 need a GPU, and so does its answer to an overflow, hence the small scale.
PRECISIONS = {
    "float32": [],
    "amp": ["--amp"],
    "fp16": ["--fp16", "--fp16-no-flatten-grads", "--fp16-init-scale", "2"],
    "memory-efficient-fp16": ["--memory-efficient-fp16", "--fp16-init-scale", "2"],
}


def has_values_of(save_dir, dtype):
    """Whether the trained parameters are of that type; fairseq saves them as float32."""
    state = load_checkpoint(save_dir / "checkpoint_last.pt")
    return all(torch.equal(value, value.to(dtype).float()) for value in state["model"].values())


@pytest.mark.parametrize("precision", list(PRECISIONS)[1:])
def test_half_precision_trains_as_float32_does(toy, tmp_path, caplog, precision):
    caplog.set_level("INFO")
    train(toy, tmp_path / "float32", "--max-update", "8")
    expected = {name: logged(caplog.records, name) for name in ("loss", "router_loss", "gnorm")}
    caplog.clear()
    train(toy, tmp_path / precision, "--max-update", "8", *PRECISIONS[precision])
    assert len(expected["loss"]) == 8
    for name, values in expected.items():
        assert logged(caplog.records, name) == pytest.approx(values, rel=0.02)
    assert has_values_of(tmp_path / precision, torch.float16) == ("fp16" in precision)


def test_bfloat16_trains_through_hydra(toy, tmp_path):
    losses = {}
    for bf16 in ("true", "false"):
        result = run(
            *("fairseq-hydra-train", "--config-dir", "configs"),
            *("--config-name", "moa_transformer_tiny", "common.cpu=true", "common.log_interval=1"),
            *(f"task.data={toy / 'prepared/data'}", f"checkpoint.save_dir={tmp_path / bf16}"),
            *("+model.encoder_layers=1", "+model.decoder_layers=1", f"common.bf16={bf16}"),
            *("dataset.max_tokens=1024", "optimization.max_update=6", "model.dropout=0"),
        )
        losses[bf16] = [float(loss) for loss in train_losses(result.stdout + result.stderr)]
    assert has_values_of(tmp_path / "true", torch.bfloat16)
    assert not has_values_of(tmp_path / "false", torch.bfloat16)
    assert len(losses["true"]) == 6
    assert losses["true"] == pytest.approx(losses["false"], rel=0.02)


def break_router(path, value):
    state = torch.load(path, weights_only=True)
    state["model"][ROUTER][3, 1] = value
    torch.save(state, path)


@pytest.mark.parametrize(
    ("value", "precision"),
    [*((math.nan, name) for name in PRECISIONS), (-math.inf, "float32"), (3e38, "float32")],
)
def test_a_broken_router_stops_training_with_its_name(toy, tmp_path, value, precision):
    options = PRECISIONS[precision]
    train(toy, tmp_path, "--max-update", "2", *options)
    last = tmp_path / "checkpoint_last.pt"
    break_router(last, value)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")}
    with pytest.raises(NonFiniteRouter) as error:
        train(toy, tmp_path, "--max-update", "6", *options)
    line = str(error.value)
    assert line.startswith("the router of encoder.layers.0.self_attn has logits that are not")
    assert "\n" not in line
    if math.isfinite(value):
        assert "higher --router-z-weight" in line
        assert "3e+38)" in line
    else:
        counts = "1 NaN and 0 infinite" if math.isnan(value) else "0 NaN and 1 infinite"
        assert f"{counts} of 512)" in line  # 64 × 8 weights
        assert "its weights are broken already" in line
    # Nothing was written, and above all no checkpoint of the broken model.
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.pt")} == before


def test_on_the_command_line_it_is_the_last_line(toy, tmp_path):
    train(toy, tmp_path, "--max-update", "2")
    break_router(tmp_path / "checkpoint_last.pt", math.inf)
    result = script(
        "train.sh",
        *("--data", toy / "prepared/data", "--save-dir", tmp_path, "--", *SMALL),
        *("--max-tokens", "1024", "--max-update", "6"),
        check=False,
    )
    assert "the router of encoder.layers.0.self_attn" in last_line(result)
