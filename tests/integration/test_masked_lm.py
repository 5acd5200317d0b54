"""Masked language models through the real commands, on text that is made here."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re

import pytest
import torch
from fairseq import checkpoint_utils, options
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import train as train_command
from fairseq_cli import validate as validate_command

from moa_fairseq.checkpoints import load_checkpoint
from moa_fairseq.cli import average_checkpoints, head_report, masked_perplexity

from ..paths import PACKAGE
from .commands import last_line, script, trained_parameters
from .in_process import call, logged

MODELS = {
    "moa": [
        *("--arch", "moa_masked_lm", "--criterion", "masked_lm_with_router_loss"),
        *("--encoder-attention-heads", "2", "--num-experts", "4", "--head-dim", "16"),
    ],
    "dense": ["--arch", "dense_masked_lm", "--criterion", "masked_lm"],
}
RECIPE = [
    *("--user-dir", str(PACKAGE), "--task", "masked_lm", "--sample-break-mode", "eos", "--cpu"),
    *("--tokens-per-sample", "40", "--encoder-layers", "2", "--encoder-embed-dim", "32"),
    *("--encoder-ffn-embed-dim", "64", "--encoder-attention-heads", "2", "--dropout", "0"),
    *("--optimizer", "adam", "--lr", "5e-3", "--lr-scheduler", "inverse_sqrt"),
    *("--warmup-updates", "40", "--max-tokens", "1000", "--num-workers", "0", "--seed", "7"),
    *("--log-format", "simple", "--log-interval", "1"),
]


def sentences(number, seed):
    """Sentences in which a masked word follows from the others: three runs of neighbours."""
    generator = random.Random(seed)
    words = [f"{letter}{vowel}" for letter in "bdfgklmn" for vowel in "aeiou"]
    lines = []
    for _ in range(number):
        starts = [generator.randrange(len(words)) for _ in range(3)]
        runs = [words[(start + step) % len(words)] for start in starts for step in range(5)]
        lines.append(" ".join(runs))
    return lines


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked lm")  # a blank in every path
    for name, number in (("train", 600), ("valid", 30), ("test", 45)):
        lines = "".join(line + "\n" for line in sentences(number, name))
        (folder / f"{name}.txt").write_text(lines, encoding="utf-8")
    script(
        "prepare_wikitext103.sh",
        *("--from-dir", folder, "--out", folder / "out", "--recipe", "sentencepiece"),
        *("--vocab-size", "56", "--workers", "1"),
    )
    return folder / "out"


def train(prepared, save_dir, model, *arguments):
    parser = options.get_training_parser()
    words = [prepared / "data", "--save-dir", save_dir, *RECIPE, *MODELS[model], *arguments]
    args = options.parse_args_and_arch(parser, input_args=[str(word) for word in words])
    for function in (checkpoint_utils.save_checkpoint, train_command.should_stop_early):
        vars(function).pop("best", None)
    train_command.main(convert_namespace_to_omegaconf(args))


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    """A model of each kind after three epochs."""
    folder = tmp_path_factory.mktemp("trained")
    for model in MODELS:
        train(prepared, folder / model, model, "--max-epoch", "3")
    return folder


def perplexity(prepared, path, *arguments):
    words = [prepared / "data", "--path", path, "--cpu", *arguments]
    return call(
        lambda: masked_perplexity.main([str(word) for word in words]), "moa-masked-perplexity", []
    )


def brute_force(prepared, path, seed):
    """Sum of −ln p and number of masked tokens: one sentence and one token at a time."""
    overrides = {"data": str(prepared / "data"), "seed": seed}
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], overrides)
    task.cfg.seed = seed
    task.load_dataset("test")
    dataset = task.dataset("test")
    dataset.set_epoch(1)
    nats, number = 0.0, 0
    model.eval()
    for index in range(len(dataset)):
        item = dataset[index]
        with torch.no_grad():
            logits, _ = model(item["net_input.src_tokens"].unsqueeze(0))
        for position, word in enumerate(item["target"].tolist()):
            if word != task.source_dictionary.pad():
                scores = logits[0, position].double().tolist()
                nats += math.log(sum(map(math.exp, scores))) - scores[word]
                number += 1
    return nats, number


@pytest.mark.parametrize("model", MODELS)
def test_masked_perplexity_is_the_brute_force_one(prepared, trained, tmp_path, model):
    path = trained / model / "checkpoint_best.pt"
    result = perplexity(prepared, path, "--seed", 3, "--report", tmp_path / "a b")
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "a b.json").read_text())
    nats, number = brute_force(prepared, path, 3)
    assert report["all"]["masked_tokens"] == number > 50
    assert report["all"]["perplexity"] == pytest.approx(math.exp(nats / number), rel=1e-5)
    assert report["blocks"] == 45 and report["masks"]["seed"] == 3
    # It has learned since the first epoch.
    earlier, _ = brute_force(prepared, trained / model / "checkpoint1.pt", 3)
    assert nats < earlier
    text = (tmp_path / "a b.txt").read_text()
    assert text == result.stdout and f"{number} masked tokens" in text and "seed 3" in text
    other = perplexity(prepared, path, "--seed", 3, "--max-tokens", 50)  # smaller batches
    assert other.stdout == result.stdout


def test_models_are_compared_on_the_same_masked_tokens(prepared, trained, tmp_path):
    for model in MODELS:
        path = trained / model / "checkpoint_best.pt"
        perplexity(prepared, path, "--report", tmp_path / model)
    result = perplexity(
        *(prepared, trained / "moa/checkpoint_best.pt"),
        *("--baseline", tmp_path / "dense.blocks.tsv", "--report", tmp_path / "both"),
    )
    reports = [json.loads((tmp_path / f"{name}.json").read_text()) for name in MODELS]
    ratio = reports[0]["all"]["perplexity"] / reports[1]["all"]["perplexity"]
    assert f"perplexity times {ratio:.4f}" in result.stdout
    paired = json.loads((tmp_path / "both.json").read_text())["difference"]
    assert paired["interval"]["low"] <= paired["perplexity_ratio"] <= paired["interval"]["high"]
    refused = perplexity(
        *(prepared, trained / "moa/checkpoint_best.pt", "--seed", 2),
        *("--baseline", tmp_path / "dense.blocks.tsv"),
    )
    assert "its masked tokens are others" in last_line(refused)


def test_it_agrees_with_fairseq_validate(prepared, trained, caplog, tmp_path):
    """fairseq masks with the seed of training, and logs bits with three digits."""
    path = trained / "moa/checkpoint_best.pt"
    words = [prepared / "data", "--user-dir", PACKAGE, "--task", "masked_lm", "--path", path]
    words += ["--valid-subset", "test", "--max-tokens", "500", "--num-workers", "0", "--cpu"]
    with caplog.at_level("INFO"):
        result = call(validate_command.cli_main, "fairseq-validate", words)
    assert result.returncode == 0, result.stderr[-2000:]
    perplexity(prepared, path, "--seed", 7, "--report", tmp_path / "x")
    report = json.loads((tmp_path / "x.json").read_text())
    lines = "\n".join(record.getMessage() for record in caplog.records)
    found = re.findall(r"\bloss ([0-9.]+)", lines)
    assert float(found[-1]) == pytest.approx(report["all"]["bits_per_token"], abs=6e-4)


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(prepared, tmp_path):
    train(prepared, tmp_path / "whole", "moa", "--max-update", "12")
    train(prepared, tmp_path / "parts", "moa", "--max-update", "5")
    train(prepared, tmp_path / "parts", "moa", "--max-update", "12")
    whole, parts = (trained_parameters(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, rtol=0, atol=0, msg=name)


def test_another_model_does_not_go_on(prepared, trained):
    for given, line in (
        (["--gate-normalization", "none"], "was trained with --gate-normalization detached"),
        (["--encoder-attention-heads", "1"], "was trained with --encoder-attention-heads 2"),
    ):
        with pytest.raises(SystemExit, match=line):
            train(prepared, trained / "moa", "moa", "--max-epoch", "5", *given)
    with pytest.raises(SystemExit, match="which has MoA attention"):
        train(prepared, trained / "moa", "dense", "--max-epoch", "5")


def test_an_average_is_the_mean_of_its_checkpoints(prepared, trained, tmp_path):
    average_checkpoints.main(
        [
            *("--inputs", str(trained / "moa"), "--num-epoch-checkpoints", "2"),
            *("--output", str(tmp_path / "average.pt")),
        ]
    )
    average = load_checkpoint(tmp_path / "average.pt")["model"]
    states = [load_checkpoint(trained / f"moa/checkpoint{n}.pt")["model"] for n in (2, 3)]
    for name in ("encoder.lm_head.weight", "encoder.sentence_encoder.layers.0.fc1.weight"):
        torch.testing.assert_close(average[name], (states[0][name] + states[1][name]) / 2)
    assert perplexity(prepared, tmp_path / "average.pt").returncode == 0


def test_router_statistics_are_logged(prepared, tmp_path, caplog):
    with caplog.at_level("INFO"):
        train(prepared, tmp_path, "moa", "--max-update", "3", "--amp")
    for name in ("load_balance_loss", "load_cv_encoder_self", "routing_entropy_encoder_self"):
        assert len(logged(caplog.records, name)) == 3
    assert all(value >= 1 for value in logged(caplog.records, "load_balance_loss"))


def test_the_script_evaluates(prepared, trained, tmp_path):
    result = script(
        "evaluate_masked_lm.sh",
        *("--prepared", prepared, "--save-dir", trained / "dense", "--out", tmp_path / "a b"),
        *("--", "--cpu", "--resamples", "50"),
    )
    path = trained / "dense/checkpoint_best.pt"
    expected = perplexity(prepared, path, "--resamples", 50).stdout
    assert result.stdout.splitlines()[0] == expected.splitlines()[0]
    assert (tmp_path / "a b/test.json").exists() and (tmp_path / "a b/test.blocks.tsv").exists()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_what_its_heads_learned(prepared, trained, tmp_path):
    path = trained / "moa/checkpoint_last.pt"
    sentence = " ".join(["<mask>", *sentences(1, "one")[0].split()[1:]])
    result = call(
        head_report.main,
        "moa-head-report",
        [
            *(prepared / "data", "--path", path, "--cpu", "--out", tmp_path / "heads"),
            *("--min-count", "5", "--importance", "8", "--sentence", sentence),
            *("--bpe", "sentencepiece"),
            *("--sentencepiece-model", prepared / "sentencepiece.model"),
        ],
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads((tmp_path / "heads/report.json").read_text(encoding="utf-8"))
    (model,) = found["models"]
    # The text has 45 sentences of 15 words; what the report counts is what the model reads.
    dictionary = Dictionary.load(str(prepared / "data/dict.txt"))
    pieces = load_indexed_dataset(str(prepared / "data/test"), dictionary)
    assert model["streams"]["source"]["sentences"] == 45
    assert model["streams"]["source"]["tokens"] == sum(len(item) + 1 for item in pieces)  # and <s>
    assert {"importance", "sentence"} <= set(found["sections"])
    tokens = (tmp_path / "heads/sentence-tokens.csv").read_text(encoding="utf-8")
    assert tokens.count("<mask>") == 1 and "<unk>" not in tokens
