"""Checkpoints and commands of the authors' code, through the real commands."""

from __future__ import annotations

import re
import shutil

import pytest
import torch

from moa_fairseq.checkpoints import load_checkpoint
from moa_fairseq.models.moa_transformer import MoATransformerModel

from ..official import THEIR_OPTIONS, their_parameters
from ..paths import PACKAGE, SHARED
from .commands import hypotheses, last_line, run, train_losses

OFFICIAL = SHARED / "reference/official_tiny"


def generate(data, path, *options):
    return run(
        *("fairseq-generate", data, "--user-dir", PACKAGE, "--cpu", "--path", path),
        *("--beam", "4", "--lenpen", "0.6", *options),
    ).stdout


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The authors' tiny checkpoint, imported, and its test set, binarised."""
    if not OFFICIAL.exists():
        pytest.skip(f"needs {OFFICIAL}")
    folder = tmp_path_factory.mktemp("official")
    run(
        *("fairseq-preprocess", "--source-lang", "en", "--target-lang", "de"),
        *("--testpref", OFFICIAL / "test.spm", "--destdir", folder / "data"),
        *("--srcdict", OFFICIAL / "dict.en.txt", "--tgtdict", OFFICIAL / "dict.de.txt"),
    )
    for split in ("train", "valid"):
        for path in (folder / "data").glob("test.*"):
            shutil.copy(path, path.with_name(path.name.replace("test", split, 1)))
    run("moa-import-official", OFFICIAL / "checkpoint.pt", folder / "checkpoint.pt")
    return folder


def assert_as_expected(output):
    expected = hypotheses((OFFICIAL / "expected_beam4_lenpen0.6.txt").read_text(encoding="utf-8"))
    found = hypotheses(output)
    assert found.keys() == expected.keys() == set(range(20))
    for number, (score, pieces) in expected.items():
        assert found[number][1] == pieces
        assert float(found[number][0]) == pytest.approx(float(score), abs=1e-3)


def test_the_authors_checkpoint_decodes_as_it_did(imported):
    assert_as_expected(generate(imported / "data", imported / "checkpoint.pt"))


def test_it_averages_and_translates_from_python(imported):
    run(
        *("moa-average-checkpoints", "--output", imported / "average.pt"),
        *("--inputs", imported / "checkpoint.pt", imported / "checkpoint.pt"),
    )
    assert_as_expected(generate(imported / "data", imported / "average.pt", "--batch-size", "1"))
    hub = MoATransformerModel.from_pretrained(
        str(imported), "checkpoint.pt", data_name_or_path=str(imported / "data")
    )
    source = (OFFICIAL / "test.spm.en").read_text(encoding="utf-8").splitlines()[0]
    expected = (OFFICIAL / "expected_beam4_lenpen0.6.txt").read_text(encoding="utf-8")
    assert hub.translate(source, beam=4, lenpen=0.6) == hypotheses(expected)[0][1]


# The model and the criterion of the authors' run.sh, as they stand there but for sizes.
RUN_SH = [
    *("--arch", "moa_transformer_base", "--share-all-embeddings"),
    *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--adam-eps", "1e-9"),
    *("--clip-norm", "0.0", "--warmup-init-lr", "1e-07", "--lr", "7e-4"),
    *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", "4000", "--weight-decay", "0"),
    *("--dropout", "0.2", "--attention-dropout", "0.2", "--activation-dropout", "0.1"),
    *("--sample-topk", "0", "--cvloss", "0", "--switchloss", "0.01", "--zloss", "0.001"),
    *("--gating", "normal", "--criterion", "moa_ce_loss", "--label-smoothing", "0.1"),
    *("--amp", "--ffd-type", "normal", "--update-freq", "2", "--log-interval", "1"),
]
SIZES = [
    *("--encoder-embed-dim", "32", "--encoder-ffn-embed-dim", "64", "--encoder-layers", "2"),
    *("--decoder-layers", "2", "--num-expert", "8", "--encoder-attention-heads", "4"),
    *("--decoder-attention-heads", "4", "--head-dim", "8", "--max-tokens", "1024"),
]


def train(data, save_dir, *options, **keywords):
    return run(
        *("fairseq-train", data, "--user-dir", PACKAGE, "--cpu", "--save-dir", save_dir),
        *(*RUN_SH, *SIZES, "--log-format", "simple", *options),
        **keywords,
    )


@pytest.mark.parametrize("way", ["finetune", "restore"])
def test_it_trains_on(imported, tmp_path, way):
    path = imported / "checkpoint.pt"
    options = {
        "finetune": ["--finetune-from-model", path],
        "restore": ["--restore-file", path, "--reset-optimizer", "--reset-dataloader"],
    }[way]
    result = train(
        *(imported / "data", tmp_path, *options, "--gate-normalization", "none"),
        *("--max-update", "2", "--lr", "1e-9"),
    )
    log = result.stdout + result.stderr
    assert len(train_losses(log)) == 2
    # At next to no learning rate the model is still the authors'.
    assert_as_expected(generate(imported / "data", tmp_path / "checkpoint_last.pt"))


def test_the_authors_training_command_runs(toy, tmp_path):
    data = toy / "prepared/data"
    result = train(data, tmp_path, "--max-update", "4", "--seed", "3")
    losses = train_losses(result.stdout + result.stderr)
    assert len(losses) == 4
    state = load_checkpoint(tmp_path / "checkpoint_last.pt")
    assert state["cfg"]["model"]["num_experts"] == 8
    assert state["cfg"]["criterion"]["_name"] == "moa_ce_loss"
    weights = [
        state["cfg"]["criterion"][name]
        for name in ("load_balance_weight", "router_z_weight", "load_cv_squared_weight")
    ]
    assert weights == [0.01, 0.001, 0]
    assert re.search(
        r"valid on 'valid' subset .* router_loss [0-9.]+", result.stdout + result.stderr
    )


def test_the_authors_training_command_with_experts_in_the_feed_forward(toy, tmp_path):
    data = toy / "prepared/data"
    result = train(
        *(data, tmp_path, "--ffd-type", "moe", "--max-update", "8", "--lr", "5e-3"),
        *("--ffn-num-experts", "4", "--checkpoint-activations", "--warmup-updates", "4"),
    )
    log = result.stdout + result.stderr
    losses = [float(loss) for loss in train_losses(log)]
    assert losses[-1] < losses[0]
    for line in ("train_inner |", "valid on 'valid' subset"):
        shown = next(text for text in reversed(log.splitlines()) if line in text)
        for kind in ("encoder_ffn", "decoder_ffn"):
            for statistic in ("load_cv", "unused_experts", "routing_entropy"):
                assert re.search(rf"\b{statistic}_{kind}[ =][0-9.]", shown), shown
    path = tmp_path / "checkpoint_last.pt"
    one, many = (hypotheses(generate(data, path, "--batch-size", size)) for size in (1, 32))
    assert one.keys() == many.keys() == set(range(45))
    for number, (score, pieces) in many.items():
        assert one[number][1] == pieces
        assert float(one[number][0]) == pytest.approx(float(score), abs=2e-4)


def test_other_spellings_with_other_values_are_refused(toy, tmp_path):
    data = toy / "prepared/data"
    result = train(data, tmp_path, "--num-experts", "16", check=False)
    assert "--num-expert 8 and --num-experts 16" in last_line(result)
    result = train(data, tmp_path, "--router-z-weight", "1", check=False)
    assert "--zloss 0.001 and --router-z-weight 1" in last_line(result)


def test_a_checkpoint_made_here_in_their_form_decodes_the_same(toy, tmp_path):
    """Needs no file of the authors': a trained model of ours in their form, imported again."""
    data = toy / "prepared/data"
    train(
        *(data, tmp_path / "ours", "--gate-normalization", "none", "--max-update", "40"),
        *("--lr", "5e-3", "--warmup-updates", "10", "--dropout", "0", "--attention-dropout", "0"),
    )
    ours = tmp_path / "ours/checkpoint_last.pt"
    hub = MoATransformerModel.from_pretrained(
        str(ours.parent), ours.name, data_name_or_path=str(data)
    )
    state = load_checkpoint(ours)
    options = {**state["cfg"]["model"], **THEIR_OPTIONS, "num_expert": 8}
    options["_name"] = options["arch"]
    for name in ("num_experts", "gate_normalization", "router_noise", "moa_modules"):
        del options[name]
    state["cfg"]["model"] = options
    state["model"] = their_parameters(hub.models[0])
    torch.save(state, tmp_path / "theirs.pt")
    run("moa-import-official", tmp_path / "theirs.pt", tmp_path / "again.pt")
    refused = run("moa-import-official", ours, tmp_path / "no.pt", check=False)
    assert "is a checkpoint of moa_fairseq already" in last_line(refused)
    outputs = [hypotheses(generate(data, path)) for path in (ours, tmp_path / "again.pt")]
    assert len(outputs[0]) == 45
    assert outputs[0] == outputs[1]
