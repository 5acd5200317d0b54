"""The real command on small models: its numbers against a slow count, its page in a browser."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from fairseq import checkpoint_utils

from moa_fairseq.cli import head_report
from moa_fairseq.modules.recording import record_routings
from moa_fairseq.text.files import sha256

from .chromium import look, screenshot
from .in_process import call, train

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)
MODELS = {"selects": [], "whole": ["--num-experts", "4"]}  # 4 of 8, and 4 of 4
SECTIONS = [
    *("overview", "experts", "load", "decides", "words", "position", "frequency", "together"),
    "agreement",
]


@pytest.fixture(scope="module")
def made(toy, tmp_path_factory):
    """Checkpoints of two models, and a report on both of them."""
    folder = tmp_path_factory.mktemp("heads")
    paths = []
    for name, options in MODELS.items():
        train(toy, folder / name, "--max-update", "30", *options)
        paths.append(folder / name / "checkpoint_last.pt")
    result = report(toy, folder / "report", *paths)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == str(folder / "report/index.html")
    return toy, paths, folder / "report"


def report(toy, out, *paths, options=("--min-count", "5")):
    words = [word for path in paths for word in ("--path", path)]
    data = toy / "prepared/data"
    return call(
        head_report.main, "moa-head-report", [*words, data, "--cpu", "--out", out, *options]
    )


def numbers(out):
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def rows(path):
    with open(path, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def slow_count(toy, path):
    """Selections of each expert, and tokens: one sentence after another, token by token."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(path)], arg_overrides={"data": str(toy / "prepared/data")}
    )
    task.load_dataset("test")
    dataset = task.dataset("test")
    counts: dict[str, list[int]] = {}
    for index in range(len(dataset)):
        sample = dataset.collater([dataset[index]])
        with torch.no_grad(), record_routings(model.eval()) as recorded:
            model(**sample["net_input"])
        for name, _, _, routing in recorded:
            known = counts.setdefault(name, [0] * routing.probabilities.shape[-1])
            for expert in routing.indices.flatten().tolist():
                known[expert] += 1
    return counts, dataset


def test_loads_are_those_of_a_slow_count(made):
    toy, paths, out = made
    for path, name in zip(paths, MODELS):
        counts, dataset = slow_count(toy, path)
        modules = numbers(out)["sections"]["load"]["modules"][name]
        assert {key: value["trained"]["selections"] for key, value in modules.items()} == counts
        source = sum(len(dataset[index]["source"]) for index in range(len(dataset)))
        assert modules["encoder.layers.0.self_attn"]["tokens"] == source
        assert modules["encoder.layers.0.self_attn"]["sentences"] == len(dataset) == 45


def test_the_record_says_what_was_done(made):
    _, paths, out = made
    found = numbers(out)
    assert sorted(found["files"]) == sorted(path.name for path in out.iterdir())
    assert found["command"].startswith("moa-head-report --path ")
    assert [model["sha256"] for model in found["models"]] == [sha256(path) for path in paths]
    assert [model["name"] for model in found["models"]] == list(MODELS)
    assert found["subset"] == "test" and found["versions"]["torch"]
    assert found["models"][0]["streams"]["target"]["sentences"] == 45
    assert list(found["sections"]) == SECTIONS
    assert "NaN" not in (out / "report.json").read_text(encoding="utf-8")


def test_tables_hold_what_the_record_holds(made):
    _, _, out = made
    with open(out / "load.csv", encoding="utf-8", newline="") as stream:
        rows = list(csv.DictReader(stream))
    modules = numbers(out)["sections"]["load"]["modules"]
    for row in rows:
        # The toy models have a layer a side, so that kinds are names enough.
        kind = row["module"].split()[0]
        (module,) = (each for each in modules[row["model"]].values() if each["kind"] == kind)
        count = module["trained"]["selections"][int(row["expert"])]
        assert int(row["tokens that select it"]) == count
        assert float(row["share of tokens"]) == pytest.approx(count / module["tokens"], abs=1e-6)
    assert len(rows) == 3 * (8 + 4)
    words = (out / "top_words.csv").read_text(encoding="utf-8")
    assert ",house," in words and ",Haus," in words  # whole words
    assert ",▁" in (out / "top_pieces.csv").read_text(encoding="utf-8")


def test_the_page_in_a_browser(made, tmp_path):
    _, _, out = made
    seen = look(out / "index.html", tmp_path)
    pictures = sorted(path.stem for path in out.glob("*.png"))
    assert len(seen["images"]) == len(pictures) >= 12
    for image in seen["images"]:
        assert image["width"] > 300 and image["height"] > 150 and image["shown"] > 300
        assert len(image["alternative"]) > 40
        assert image["source"] == "data:image/png;base64,"
    assert all(name.startswith("data:") for name in seen["resources"])
    # Links lead to places on the page, and to files beside it.
    for link in seen["links"]:
        assert link[1:] in seen["targets"] if link[0] == "#" else (out / link).is_file()
    assert {f"#{name}" for name in [*SECTIONS, "about"]} <= set(seen["links"])
    assert seen["page"] <= seen["window"]  # wide tables scroll by themselves
    picture = screenshot(out / "index.html", tmp_path, 3000)
    from matplotlib import image

    pixels = image.imread(picture)[..., :3]
    assert pixels.shape[:2] == (3000, 1300)
    assert len({tuple(row) for row in (pixels[::20, ::20].reshape(-1, 3) * 255).astype(int)}) > 20


def test_figures_are_files_too(made):
    _, _, out = made
    for path in out.glob("*.png"):
        svg = ElementTree.parse(path.with_suffix(".svg")).getroot()
        texts = "".join(svg.itertext())
        assert "expert" in texts or "module" in texts  # labelled axes, as text


def test_nothing_is_fetched_or_run(made):
    text = (made[2] / "index.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "<script" not in text
    assert not re.findall(r'(?:src|href)="(?:[a-z]+:)?//', text)


def test_some_sentences_in_small_batches_and_again(made, tmp_path):
    toy, paths, _ = made
    few = ("--num-sentences", "10", "--min-count", "2")
    out = tmp_path / "report"
    assert report(toy, out, paths[0], options=(*few, "--max-tokens", "40")).returncode == 0
    first = numbers(out)["sections"]
    assert first["load"]["modules"]["selects"]["encoder.layers.0.self_attn"]["sentences"] == 10
    # Another report takes its place.
    assert report(toy, out, paths[0], options=(*few, "--batch-size", "10")).returncode == 0
    assert numbers(out)["sections"]["position"] == first["position"]
    (out / "notes.txt").write_text("mine")
    refused = report(toy, out, paths[0])
    assert refused.returncode == 1 and "holds notes.txt" in refused.stderr
    assert (out / "index.html").is_file()


def test_importance_and_one_sentence_on_the_page(made, tmp_path):
    toy, (path, whole), _ = made
    model = toy / "prepared/sentencepiece.model"
    source = (toy / "prepared/raw/test.en").read_text(encoding="utf-8").splitlines()[0]
    asked = ["--sentence", source, "--bpe", "sentencepiece", "--sentencepiece-model", model]
    asked += ["--importance", "6", "--importance-bleu-experts", "1"]
    result = report(toy, tmp_path / "x", path, whole, options=["--min-count", "5", *asked])
    assert result.returncode == 0, result.stderr[-2000:]
    found = numbers(tmp_path / "x")["sections"]
    for name, kept in (("selects", 8), ("whole", 4)):
        experts = rows(tmp_path / f"x/importance-experts_{name}.csv")
        journal = tmp_path / f"x.importance-{name}.jsonl"
        measured = [json.loads(line) for line in journal.read_text().splitlines()]
        assert len(experts) == 3 * kept  # of three attentions
        assert len(measured) > len(experts) + 3
        assert f"importance_{name}" in found
        tokens = rows(tmp_path / f"x/sentence-tokens_{name}.csv")
        text = "".join(row["token"] for row in tokens if row["side"] == "source")
        assert text.replace("▁", " ").strip() == source + "</s>"
    page = (tmp_path / "x/index.html").read_text(encoding="utf-8")
    assert page.count("Importance: what is lost without an expert") >= 2
    # Without the pieces' model the sentence would be nothing but unknown words.
    result = report(toy, tmp_path / "y", path, options=["--sentence", source])
    assert result.returncode != 0
    assert "--sentence needs --bpe sentencepiece and its file" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "y").exists()
