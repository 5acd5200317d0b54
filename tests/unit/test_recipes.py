"""The WMT14 recipes: their figures, the step of 262,144 tokens, and where they run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from types import SimpleNamespace

import pytest
import torch

from moa_fairseq.cli.wmt14_train_command import choose_precision, main, node_ranks
from moa_fairseq.errors import UsageError
from moa_fairseq.recipes import launch, wmt14
from moa_fairseq.recipes.launch import Devices, Launch, choose_launch, visible_devices
from moa_fairseq.recipes.wmt14 import (
    fairseq_train_options,
    tokens_that_fit,
    training_recipe,
    update_frequency,
)

from ..paths import ROOT

# tokens × update-freq on one device, lr, warm-up, dropout / attention / activation, epochs, read
TABLE = {
    ("en-de", "base"): (8192, 32, 7e-4, 4000, 0.2, 0.2, 0.1, 100, True),
    ("en-de", "big"): (4096, 64, 7e-4, 4000, 0.2, 0.2, 0.1, 100, False),
    ("en-fr", "base"): (8192, 32, 7e-4, 8000, 0.1, 0.0, 0.0, 50, False),
    ("en-fr", "big"): (4096, 64, 7e-4, 8000, 0.1, 0.1, 0.1, 100, False),
}


@pytest.mark.parametrize("pair,size", TABLE)
def test_figures_of_the_paper(pair, size):
    tokens, frequency, rate, warmup, *rest = TABLE[pair, size]
    *dropouts, epochs, was_read = rest
    recipe = training_recipe(pair, size)
    words = fairseq_train_options(recipe, "moa_transformer", 1, recipe.max_tokens, "fp16")
    value = {flag: word for flag, word in zip(words, words[1:]) if flag.startswith("--")}
    assert value["--arch"] == f"moa_transformer_{size}"
    assert (int(value["--max-tokens"]), int(value["--update-freq"])) == (tokens, frequency)
    assert (float(value["--lr"]), int(value["--warmup-updates"])) == (rate, warmup)
    flags = ("--dropout", "--attention-dropout", "--activation-dropout")
    assert [float(value[flag]) for flag in flags] == dropouts
    assert int(value["--max-epoch"]) == epochs
    assert value["--adam-betas"] == "(0.9,0.98)" and float(value["--adam-eps"]) == 1e-9
    assert value["--lr-scheduler"] == "inverse_sqrt" and value["--warmup-init-lr"] == "1e-7"
    assert (value["--label-smoothing"], value["--keep-last-epochs"]) == ("0.1", "10")
    assert (value["--clip-norm"], value["--weight-decay"]) == ("0", "0")
    assert (value["--load-balance-weight"], value["--router-z-weight"]) == ("0.01", "0.001")
    assert "--fp16" in words
    # No sentence may be left out of a validation score.
    assert "--skip-invalid-size-inputs-valid-test" not in words
    assert (recipe.source == wmt14.READ) == was_read
    assert ("recalled" in wmt14.provenance(recipe, "moa_transformer")) != was_read


def test_evaluation_settings():
    assert {pair: dataclasses.astuple(it) for pair, it in wmt14.EVALUATION.items()} == {
        "en-de": (10, 4, 0.6),
        "en-fr": (10, 5, 0.8),
    }


def test_recipes_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        training_recipe("en-de", "base").max_epoch = 1
    with pytest.raises(TypeError):
        wmt14.TRAINING["en-de", "base"] = None


def test_the_dense_baseline_differs_in_model_and_criterion_alone():
    recipe = training_recipe("en-fr", "big")
    moa, dense = (
        set(fairseq_train_options(recipe, model, 8, 4096, "fp16")) for model in wmt14.MODELS
    )
    assert dense - moa == {"transformer_wmt_en_de_big", "label_smoothed_cross_entropy"}
    assert moa - dense == {
        *("moa_transformer_big", "label_smoothed_cross_entropy_with_router_loss"),
        *("--load-balance-weight", "0.01", "--router-z-weight", "0.001"),
    }


@pytest.mark.parametrize("workers", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize("memory", [None, 139.0, 31.7, 23.6, 15.8, 7.9, 2.0])
@pytest.mark.parametrize("pair,size", TABLE)
def test_a_step_has_262144_tokens_whatever_the_devices(pair, size, memory, workers):
    tokens = tokens_that_fit(training_recipe(pair, size), memory, workers)
    assert workers * tokens * update_frequency(workers, tokens) == 262144
    assert 1024 <= tokens <= TABLE[pair, size][0]


@pytest.mark.parametrize(
    "memory,workers,base,big",
    [
        *((None, 1, 8192, 4096), (139.8, 1, 8192, 4096), (31.7, 8, 8192, 4096)),
        *((23.6, 1, 4096, 2048), (15.8, 1, 4096, 2048), (14.6, 1, 2048, 1024)),
        *((2.0, 1, 1024, 1024), (79.0, 64, 4096, 4096), (79.0, 128, 2048, 2048)),
    ],
)
def test_tokens_that_fit(memory, workers, base, big):
    for size, tokens in (("base", base), ("big", big)):
        assert tokens_that_fit(training_recipe("en-de", size), memory, workers) == tokens


WRONG = [
    ((3, 8192), "gives 3 workers", "use 2 or 4 workers"),
    ((12, 8192), "gives 12 workers", "use 8 or 16 workers"),
    ((0, 8192), "gives 0 workers", "at least 1"),
    ((1, 5000), "--max-tokens 5000", "use 4096 or 8192"),
    ((8, 40000), "--max-tokens 40000", "use 32768"),
    ((1, 0), "--max-tokens 0", "at least 1"),
]


@pytest.mark.parametrize("arguments,problem,remedy", WRONG)
def test_what_does_not_divide_a_step_is_named_with_the_nearest_that_does(
    arguments, problem, remedy
):
    with pytest.raises(UsageError) as error:
        update_frequency(*arguments)
    assert problem in str(error.value) and remedy in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: training_recipe("de-en", "base"), "--pair de-en"),
        (lambda: training_recipe("en-de", "huge"), "--size huge"),
        (lambda: _options(model="moa"), "--model moa: give moa_transformer or transformer"),
        (lambda: _options(precision="bf16"), "--precision bf16: give fp16 or fp32"),
        (lambda: choose_launch(Devices(2), 0, 1, None, False), "--gpus 0"),
        (lambda: choose_launch(Devices(2), 3, 1, None, False), "--gpus 3: torch sees 2"),
        (lambda: choose_launch(Devices(2), None, 0, None, False), "--nodes 0"),
        (lambda: choose_launch(Devices(0), None, 2, "a", False), "--nodes 2: torch sees no GPU"),
        (lambda: choose_launch(Devices(2), None, 2, None, False), "--nodes 2 needs --master"),
        (lambda: choose_launch(Devices(2), None, 2, "a:b", False), "--master a:b"),
        (lambda: choose_launch(Devices(2), None, 2, ":1", False), "--master :1"),
        (lambda: choose_launch(Devices(2), None, 2, "a:70000", False), "--master a:70000"),
        (lambda: node_ranks(Launch(8, 2, "a"), None, False), "--nodes 2 needs --node-rank"),
        (lambda: node_ranks(Launch(8, 2, "a"), 2, False), "--node-rank 2"),
        (lambda: choose_precision("fp16", Devices(0), Launch(0)), "--precision fp16 needs a GPU"),
    ],
)
def test_what_cannot_run_is_named(call, message):
    with pytest.raises(UsageError) as error:
        call()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def _options(model="transformer", precision="fp32"):
    return fairseq_train_options(training_recipe("en-de", "base"), model, 1, 8192, precision)


@pytest.fixture
def prepared(tmp_path):
    """Arguments that name prepared English-German data."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dict.en.txt").touch()
    write_manifest(tmp_path, source_lang="en", target_lang="de")
    return ["--prepared", str(tmp_path), "--save-dir", "save", "--pair", "en-de", "--size", "base"]


def write_manifest(folder, **options):
    (folder / "manifest.json").write_text(json.dumps({"options": options}))


def test_data_that_is_not_whole_is_refused(prepared, tmp_path):
    def message():
        with pytest.raises(UsageError) as error:
            main(prepared)
        return str(error.value)

    # The manifest of a recipe names the pair itself.
    write_manifest(tmp_path, pair="en-fr", source_lang="en", target_lang="de")
    assert "holds en-fr" in message()
    write_manifest(tmp_path)
    assert "does not say which languages" in message()
    (tmp_path / "manifest.json").write_text("{")
    assert "does not say which languages" in message()
    write_manifest(tmp_path, pair="en-de")
    (tmp_path / "data/dict.en.txt").unlink()
    assert "holds no dictionary" in message()


def test_words_are_ended_by_nul_and_overrides_come_last(prepared, capsys):
    main([*prepared, "--", "--dropout", "0.3", "--update-freq", "1", "a\nb"])
    words = capsys.readouterr().out.split("\0")
    assert words[0] == "fairseq-train"
    assert words[-6:] == ["--dropout", "0.3", "--update-freq", "1", "a\nb", ""]


def test_commands_of_one_device_one_node_and_several():
    assert Launch(0).command(["data"]) == Launch(1).command(["data"]) == ["fairseq-train", "data"]
    assert " ".join(Launch(4).command(["data"])) == (
        "torchrun --standalone --nproc-per-node 4 --no-python fairseq-train data"
    )
    # One GPU a node is several workers all the same.
    for rank, port in ((0, 29500), (2, 1234)):
        master = "first" if port == 29500 else "first:1234"
        assert " ".join(Launch(1, 3, master).command(["data"], rank)) == (
            f"torchrun --nnodes 3 --node-rank {rank} --master-addr first --master-port {port} "
            "--nproc-per-node 1 --no-python fairseq-train data"
        )


def test_precision_follows_the_devices():
    fast, slow = Devices(2, 31.7, True), Devices(2, 15.9, False)
    assert choose_precision(None, fast, Launch(2)) == "fp16"
    assert choose_precision(None, slow, Launch(2)) == "fp32"
    assert choose_precision("fp32", fast, Launch(2)) == "fp32"
    assert choose_precision(None, Devices(0), Launch(0)) == "fp32"
    # A dry run for GPUs that are not here.
    assert choose_precision(None, Devices(0), Launch(8)) == "fp16"


@pytest.mark.parametrize(
    "capabilities,mixed", [([(7, 0), (9, 0)], True), ([(9, 0), (6, 1)], False)]
)
def test_devices_are_the_least_of_what_torch_reports(monkeypatch, capabilities, mixed):
    reported = [
        SimpleNamespace(total_memory=(16 + 8 * number) * 2**30, major=major, minor=minor)
        for number, (major, minor) in enumerate(capabilities)
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(reported))
    monkeypatch.setattr(torch.cuda, "get_device_properties", reported.__getitem__)
    assert visible_devices() == Devices(2, 16.0, mixed)


def test_the_scripts_help_says_what_is_recalled_and_the_defaults():
    path = ROOT / "scripts/train_wmt14.sh"
    text = subprocess.run(["bash", path, "--help"], capture_output=True, text=True).stdout
    read = [key for key, recipe in wmt14.TRAINING.items() if recipe.source == wmt14.READ]
    assert [" ".join(key) for key in read] == ["en-de base"]
    assert "Read in the authors' code: the recipe of en-de base." in text
    assert "other three are recalled" in text
    assert f"A step has {wmt14.STEP_TOKENS:,} tokens" in text.replace("\n", " ")
    assert f"port: {launch.DEFAULT_PORT}" in text
