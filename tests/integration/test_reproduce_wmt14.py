"""The whole WMT14 chain on a CPU, and what it says before it starts."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from moa_fairseq.recipes.estimates import SUSTAINED_FLOPS, TOKENS_PER_PAIR, estimate
from moa_fairseq.recipes.wmt14 import training_recipe

from ..paths import SHARED
from .commands import script


def valid_losses(result):
    log = result.stdout + result.stderr
    return [float(loss) for loss in re.findall(r"valid on 'valid' subset \| loss ([0-9.]+)", log)]


@pytest.mark.parametrize(
    ("pair", "recipe", "size", "model"),
    [
        pytest.param(
            *("en-de", "sentencepiece", "base", "transformer"),
            marks=pytest.mark.slow,
            id="en-de-sentencepiece-base-transformer",
        ),
        ("en-fr", "clinic", "big", "moa_transformer"),
    ],
)
def test_smoke(pair, recipe, size, model, tmp_path):
    command = ["--pair", pair, "--recipe", recipe, "--size", size, "--model", model]
    command += ["--smoke", "--out", tmp_path]
    result = script("reproduce_wmt14.sh", *command)
    losses = valid_losses(result)
    assert len(losses) == 16
    assert losses[-1] < 0.5 * losses[0]
    run = tmp_path / f"{pair}.{recipe}.{model}-{size}"
    report = json.loads((run / "scores/test.json").read_text(encoding="utf-8"))
    assert report["sentences"] == 150
    assert report["bleu"]["score"] > 30
    assert report["bleu"]["confidence"]["half_width"] > 0
    labels = [figure["label"] for figure in report["tokenised"]]
    split = "tokenised BLEU, compound-split"
    assert labels == ([split] if pair == "en-de" else ["tokenised BLEU"])
    assert len(list(run.glob("checkpoint[0-9]*.pt"))) == 10
    assert (run / "scores/test.md").read_text(encoding="utf-8").startswith("|")

    before = (run / "checkpoint_last.pt").stat().st_mtime_ns
    shutil.copytree(run / "scores", tmp_path / "before")
    again = script("reproduce_wmt14.sh", *command, "--baseline", tmp_path / "before")
    assert "is up to date" in again.stderr
    assert valid_losses(again) == []
    assert (run / "checkpoint_last.pt").stat().st_mtime_ns == before
    report = json.loads((run / "scores/test.json").read_text(encoding="utf-8"))
    assert report["significance"]["bleu"]["p_value"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sentencepiece", "clinic"])
def test_smoke_on_real_text(recipe, tmp_path):
    text = SHARED / "data/newstest-en-de"
    if not text.is_dir():
        pytest.skip(f"no {text}; MOA_SHARED names the folder of corpora and references")
    result = script(
        "reproduce_wmt14.sh",
        *("--pair", "en-de", "--size", "base", "--recipe", recipe),
        *("--smoke-text", text, "--out", tmp_path),
    )
    losses = valid_losses(result)
    assert len(losses) == 10
    assert all(later < earlier + 0.02 for earlier, later in zip(losses, losses[1:]))
    assert losses[-1] < losses[0] - 1
    report = json.loads(
        (tmp_path / f"en-de.{recipe}.moa_transformer-base/scores/test.json").read_text()
    )
    assert report["sentences"] == 3003
    assert len(report["tokenised"]) == (2 if recipe == "clinic" else 1)


def test_a_dry_run_prints_everything_and_does_nothing(tmp_path):
    result = script(
        "reproduce_wmt14.sh",
        *("--pair", "en-fr", "--size", "big", "--gpus", "8", "--out", tmp_path / "out"),
        *("--dry-run", "--from-dir", tmp_path, "--baseline", tmp_path),
    )
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines[:3]] == [
        "scripts/prepare_wmt14.sh",
        "scripts/train_wmt14.sh",
        "scripts/evaluate.sh",
    ]
    assert f"--from-dir {tmp_path}" in lines[0]
    assert f"--baseline {tmp_path}" in lines[2]
    assert "torchrun --standalone --nproc-per-node 8" in result.stdout
    assert "--update-freq 8" in result.stdout
    assert re.search(r"^download +6\.6 GB$", result.stdout, re.M)
    assert re.search(r"^GPU hours +[0-9,]+ for 100 epochs", result.stdout, re.M)
    assert list(tmp_path.iterdir()) == []


def test_the_estimate_by_hand():
    needs = estimate(training_recipe("en-de", "base"), 65_000_000, 62.8e6)
    assert needs.download == 657632379 + 918311367 + 168591139 + 38654961
    assert needs.disk == needs.download + 4_590_000 * 300 * 11 // 2
    assert needs.gpu_memory == 65_000_000 * 16
    assert needs.training_flops == pytest.approx(100 * 4_590_000 * TOKENS_PER_PAIR * 62.8e6 * 2 * 3)
    assert needs.gpu_hours * 3600 * SUSTAINED_FLOPS == pytest.approx(needs.training_flops)
