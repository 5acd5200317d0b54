"""Text to score through the real commands, and what must hold on the way."""

from __future__ import annotations

import json
import re
import shutil
import struct

import hydra
import pytest
import torch

from moa_fairseq.checkpoints import load_checkpoint
from moa_fairseq.models.moa_transformer import MoATransformerModel

from ..paths import PACKAGE
from ..slow_multi_bleu import slow_multi_bleu
from .commands import (
    hypotheses,
    last_line,
    run,
    script,
    train_losses,
    trained_parameters,
    write_manifest,
)
from .conftest import SMALL


def generate(folder, path, *options):
    return run(
        *("fairseq-generate", folder / "prepared/data", "--user-dir", PACKAGE, "--cpu"),
        *("--path", path, "--beam", "4", "--gen-subset", "test", *options),
    ).stdout


def test_preparing_again_does_nothing(toy):
    data = toy / "prepared/data/train.en-de.en.bin"
    before = data.stat().st_mtime_ns
    result = script(
        "prepare.sh",
        *("--source-lang", "en", "--target-lang", "de", "--vocab-size", "60"),
        *("--train", toy / "train", "--valid", toy / "valid", "--test", toy / "test"),
        *("--out", toy / "prepared"),
    )
    assert "up to date" in result.stderr
    assert data.stat().st_mtime_ns == before


METRICS = [
    "router_loss",
    "load_balance_loss",
    "router_z_loss",
    "load_cv_squared_loss",
    *(
        f"{statistic}_{kind}"
        for statistic in ("load_cv", "unused_experts", "routing_entropy")
        for kind in ("encoder_self", "decoder_self", "cross")
    ),
]


def test_training_learns_and_logs_router_metrics_on_the_console(trained):
    log = (trained / "train1.log").read_text(encoding="utf-8")
    losses = re.findall(r"valid on 'valid' subset \| loss ([0-9.]+)", log)
    assert len(losses) == 16
    assert float(losses[-1]) < 0.5 * float(losses[0])
    for line in ("train_inner |", "| train | epoch 016", "valid on 'valid' subset"):
        shown = next(text for text in reversed(log.splitlines()) if line in text)
        missing = [name for name in METRICS if not re.search(rf"\b{name}[ =][0-9.]", shown)]
        assert not missing, f"{missing} not in {shown}"


def tensorboard_tags(folder):
    from tensorboardX.proto.event_pb2 import Event

    tags = set()
    for path in folder.rglob("events*"):
        data, position = path.read_bytes(), 0
        while position < len(data):
            (length,) = struct.unpack_from("<Q", data, position)
            event = Event.FromString(data[position + 12 : position + 12 + length])
            tags.update(value.tag for value in event.summary.value)
            position += 12 + length + 4
    return tags


def test_tensorboard_has_the_router_metrics_and_no_hidden_ones(trained):
    for split in ("train", "train_inner", "valid"):
        tags = tensorboard_tags(trained / "tensorboard1" / split)
        assert set(METRICS) <= tags
        assert not [tag for tag in tags if tag.startswith("_")]


def test_evaluate_scores_the_whole_set_with_signatures(trained):
    result = script(
        "evaluate.sh",
        *("--prepared", trained / "prepared", "--save-dir", trained / "checkpoints1"),
        *("--out", trained / "scores", "--average", "2", "--samples", "3"),
    )
    report = json.loads((trained / "scores/test.json").read_text())
    assert report["sentences"] == 45
    assert report["bleu"]["score"] > 60
    assert report["bleu"]["signature"].startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp")
    assert report["chrf"]["signature"].startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:2|space:no")
    assert result.stdout.count("translation ") == result.stdout.count("reference ") == 3
    scored = (trained / "scores/test.hypotheses.txt").read_text(encoding="utf-8").splitlines()
    assert len(scored) == 45
    assert not any("▁" in line for line in scored)
    # prepare.sh names no pair: nothing is added that nobody asked for.
    assert "tokenised" not in report


def test_evaluate_refuses_another_subset_and_too_few_checkpoints(trained, tmp_path):
    arguments = ["--prepared", trained / "prepared", "--save-dir", trained / "checkpoints1"]
    result = script("evaluate.sh", *arguments, "--out", tmp_path, "--subset", "test9", check=False)
    assert "--subset test9" in last_line(result)
    result = script("evaluate.sh", *arguments, "--out", tmp_path, "--average", "50", check=False)
    assert "has 2 epoch checkpoints, 50 were asked for" in last_line(result)


def test_a_manifest_with_a_pair_adds_the_papers_measure(trained, tmp_path):
    prepared = tmp_path / "prepared"
    shutil.copytree(trained / "prepared", prepared)
    manifest = json.loads((prepared / "manifest.json").read_text(encoding="utf-8"))
    manifest["options"].update(pair="en-de", recipe="sentencepiece")
    manifest["evaluation"] = {"average": 2, "beam": 3, "lenpen": 0.6}
    shutil.copytree(trained / "checkpoints1", tmp_path / "checkpoints")
    write_manifest(prepared, manifest, tmp_path / "checkpoints")
    script(
        "evaluate.sh",
        *("--prepared", prepared, "--save-dir", tmp_path / "checkpoints"),
        *("--out", tmp_path / "scores"),
    )
    assert "--beam 3 --lenpen 0.6 " in (tmp_path / "scores/test.generate.txt.key").read_text()
    report = json.loads((tmp_path / "scores/test.json").read_text(encoding="utf-8"))
    (figure,) = report["tokenised"]
    # Toy text has nothing to tokenise or to split.
    sides = [
        path.read_text(encoding="utf-8").splitlines()
        for path in (tmp_path / "scores/test.hypotheses.txt", prepared / "raw/test.de")
    ]
    assert figure["text"] == slow_multi_bleu(*sides)
    assert "the paper's figure" not in figure["note"]


def test_translation_depends_on_neither_batch_size_nor_order(trained):
    batched = hypotheses(generate(trained, trained / "average.pt", "--batch-size", "32"))
    single = hypotheses(generate(trained, trained / "average.pt", "--batch-size", "1"))
    assert batched.keys() == single.keys() == set(range(45))
    for number, (score, pieces) in batched.items():
        assert single[number][1] == pieces
        assert float(single[number][0]) == pytest.approx(float(score), abs=2e-4)


@pytest.mark.parametrize("batch_size", [14, 16, 44])
def test_no_sentence_is_lost_whatever_the_batch_size(trained, batch_size):
    output = generate(trained, trained / "average.pt", "--batch-size", batch_size)
    assert hypotheses(output).keys() == set(range(45))


def test_ensemble_alignment_and_prefix(trained):
    one = hypotheses(generate(trained, trained / "average.pt"))
    both = f"{trained / 'average.pt'}:{trained / 'checkpoints2/checkpoint_best.pt'}"
    ensemble = hypotheses(generate(trained, both))
    assert ensemble.keys() == one.keys()
    assert ensemble != one

    output = generate(trained, trained / "average.pt", "--print-alignment", "--prefix-size", "2")
    sources = dict(re.findall(r"^S-(\d+)\t(.*)$", output, re.M))
    targets = dict(re.findall(r"^T-(\d+)\t(.*)$", output, re.M))
    alignments = dict(re.findall(r"^A-(\d+)\t(.*)$", output, re.M))
    forced = hypotheses(output)
    assert alignments.keys() == {str(number) for number in range(45)}
    for number, (_, pieces) in forced.items():
        # The hypothesis starts as the reference does, and every piece has a source position.
        assert pieces.split()[:2] == targets[str(number)].split()[:2]
        pairs = [tuple(map(int, pair.split("-"))) for pair in alignments[str(number)].split()]
        length = len(sources[str(number)].split()) + 1
        assert all(0 <= source < length for source, _ in pairs)
        assert {target for _, target in pairs} >= set(range(len(pieces.split())))


def test_interactive_and_hub_translate_as_generate_does(trained):
    expected = dict(
        re.findall(
            r"^D-(\d+)\t\S+\t(.*)$",
            generate(
                trained,
                trained / "average.pt",
                *("--bpe", "sentencepiece"),
                *("--sentencepiece-model", trained / "prepared/sentencepiece.model"),
            ),
            re.M,
        )
    )
    lines = (trained / "test.en").read_text(encoding="utf-8").splitlines()[:8]
    output = run(
        *("fairseq-interactive", trained / "prepared/data", "--user-dir", PACKAGE, "--cpu"),
        *("--path", trained / "average.pt", "--beam", "4", "--buffer-size", "8"),
        *("--bpe", "sentencepiece"),
        *("--sentencepiece-model", trained / "prepared/sentencepiece.model"),
        stdin="".join(line + "\n" for line in lines),
    ).stdout
    typed = dict(re.findall(r"^D-(\d+)\t\S+\t(.*)$", output, re.M))
    assert typed == {str(number): expected[str(number)] for number in range(8)}

    hub = MoATransformerModel.from_pretrained(
        str(trained),
        "average.pt",
        data_name_or_path=str(trained / "prepared/data"),
        bpe="sentencepiece",
        sentencepiece_model=str(trained / "prepared/sentencepiece.model"),
    )
    assert hub.translate(lines, beam=4) == [expected[str(number)] for number in range(8)]


def short_run(toy, save_dir, *options):
    result = script(
        "train.sh",
        *("--data", toy / "prepared/data", "--save-dir", save_dir, "--", *SMALL),
        *("--max-tokens", "1024", "--log-interval", "1", "--dropout", "0.1", *options),
    )
    return train_losses(result.stdout + result.stderr)


@pytest.fixture(scope="module")
def whole_run(toy, tmp_path_factory):
    """Losses and folder of an uninterrupted run of forty updates, a little over two epochs."""
    save_dir = tmp_path_factory.mktemp("whole")
    losses = short_run(toy, save_dir, "--max-update", "40")
    assert len(losses) == 40
    return losses, save_dir


def test_stopping_and_resuming_changes_nothing(toy, whole_run, tmp_path):
    whole, whole_dir = whole_run
    # Stopped within the second epoch, where the order of batches has changed once.
    first = short_run(toy, tmp_path, "--max-update", "25")
    second = short_run(toy, tmp_path, "--max-update", "40")
    assert first + second == whole
    ends = [trained_parameters(folder) for folder in (whole_dir, tmp_path)]
    for name, parameter in ends[0].items():
        assert torch.equal(parameter, ends[1][name]), name


@pytest.mark.skipif(
    not hasattr(hydra, "compose"),
    reason="the files in configs/ need hydra 1.1 or later; fairseq 0.12.2 pins 1.0",
)
def test_hydra_and_argparse_give_the_same_losses(toy, whole_run, tmp_path):
    result = run(
        *("fairseq-hydra-train", "--config-dir", "configs"),
        *("--config-name", "moa_transformer_tiny", "common.cpu=true", "common.log_interval=1"),
        *(f"task.data={toy / 'prepared/data'}", f"checkpoint.save_dir={tmp_path}"),
        # A plus before options of the model that the file does not name.
        *("+model.encoder_embed_dim=64", "+model.encoder_ffn_embed_dim=128"),
        *("+model.encoder_layers=1", "+model.decoder_layers=1", "model.dropout=0.1"),
        *("dataset.max_tokens=1024", "optimization.max_update=6"),
    )
    assert train_losses(result.stdout + result.stderr) == whole_run[0][:6]
    state = load_checkpoint(tmp_path / "checkpoint_last.pt")
    assert state["cfg"]["model"]["_name"] == "moa_transformer_tiny"
    assert state["cfg"]["model"]["head_dim"] == 32


def test_seed_and_router_weights_decide_the_losses(toy, whole_run, tmp_path):
    whole, _ = whole_run
    again = short_run(toy, tmp_path / "again", "--max-update", "12")
    other_seed = short_run(toy, tmp_path / "seed", "--max-update", "2", "--seed", "2")
    heavy = short_run(toy, tmp_path / "heavy", "--max-update", "12", "--load-balance-weight", "5")
    assert again == whole[:12]
    assert other_seed != whole[:2]
    # The loss that is shown is without router terms, so the first one does not change.
    assert heavy[0] == whole[0]
    assert heavy != whole[:12]
