"""evaluate.sh on data as prepare_wmt14.sh lays it out: pair, recipe and settings of a manifest."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import shutil

import pytest
import torch
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from moa_fairseq.text.moses import MosesText

from ..slow_multi_bleu import slow_multi_bleu
from .commands import last_line, run, script, write_manifest
from .conftest import SMALL, WORDS


def punctuated(number, seed):
    """Sentences with what Moses escapes and what differs between its languages.

    A quotation mark after an s is drawn to the word by the English detokeniser alone.
    """
    generator = random.Random(seed)
    pairs = []
    for _ in range(number):
        first, second, third = generator.choices(list(WORDS), k=3)
        form = "{}-{}, Haus '{}'." if generator.random() < 0.7 else "{}, {} & {}."
        english = form.replace("Haus", "house").format(first, second, third)
        pairs.append((english, form.format(WORDS[first], WORDS[second], WORDS[third])))
    return pairs


def lines(path):
    return path.read_text(encoding="utf-8").split("\n")[:-1]


def write(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")


def write_options(folder, checkpoints=None, **options):
    evaluation = options.pop("evaluation", {"average": 2, "beam": 3, "lenpen": 0.6})
    options = {"source_lang": "en", "target_lang": "de", "pair": "en-de", **options}
    write_manifest(folder, {"options": options, "evaluation": evaluation}, checkpoints)


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """A prepared folder of the clinic recipe and a model trained on it."""
    folder = tmp_path_factory.mktemp("clinic")
    prepared = folder / "prepared"
    for name, number in (("train", 1500), ("valid", 40), ("test", 50)):
        pairs = punctuated(number, name)
        for side, language in enumerate(("en", "de")):
            moses = MosesText(language)
            raw = [pair[side] for pair in pairs]
            if name == "test" and language == "de":
                # Punctuation of the raw references is not normalised.
                raw = [re.sub(r"'(\w+)'", "‘\\1’", text) for text in raw]
            write(prepared / f"raw/{name}.{language}", raw)
            tokenised = [moses.tokenize(line, True) for line in raw]
            write(prepared / f"tokenised/{name}.{language}", tokenised)
    with open(prepared / "bpe.codes", "w", encoding="utf-8") as codes:
        text = lines(prepared / "tokenised/train.en") + lines(prepared / "tokenised/train.de")
        learn_bpe(text, codes, 60)
    for path in sorted(prepared.glob("tokenised/*")):
        with open(prepared / "bpe.codes", encoding="utf-8") as codes:
            bpe = BPE(codes)
        write(folder / "bpe" / path.name, [bpe.process_line(line) for line in lines(path)])
    run(
        *("fairseq-preprocess", "--source-lang", "en", "--target-lang", "de"),
        *("--joined-dictionary", "--destdir", prepared / "data"),
        *("--trainpref", folder / "bpe/train", "--validpref", folder / "bpe/valid"),
        *("--testpref", folder / "bpe/test"),
    )
    write_options(prepared, recipe="clinic")
    script(
        "train.sh",
        *("--data", prepared / "data", "--save-dir", folder / "checkpoints", "--", *SMALL),
        *("--max-epoch", "8", "--warmup-updates", "100", "--lr", "5e-3", "--seed", "1"),
        *("--max-tokens", "1024", "--keep-last-epochs", "3"),
    )
    return folder


def evaluate(folder, out, *options, check=True):
    return script(
        "evaluate.sh",
        *("--prepared", folder / "prepared", "--save-dir", folder / "checkpoints"),
        *("--out", out, *options),
        check=check,
    )


def generated(path, kind):
    """The first line of each sentence in the output of fairseq-generate, in corpus order."""
    found = {}
    for number, text in re.findall(
        rf"^{kind}-(\d+)\t\S+\t(.*)$", path.read_text(encoding="utf-8"), re.M
    ):
        found.setdefault(int(number), text)
    return [found[number] for number in sorted(found)]


@pytest.fixture(scope="module")
def scored(clinic):
    evaluate(clinic, clinic / "scores")
    return clinic


def test_defaults_are_the_recipes(scored):
    assert (scored / "checkpoints/checkpoint.avg2.pt").exists()
    key = (scored / "scores/test.generate.txt.key").read_text()
    assert "--beam 3 --lenpen 0.6 " in key
    report = json.loads((scored / "scores/test.json").read_text(encoding="utf-8"))
    expected = {"checkpoint": "checkpoint.avg2.pt", "average": "2", "beam": "3", "lenpen": "0.6"}
    assert {name: report["settings"][name] for name in expected} == expected
    assert report["versions"]["torch"] == torch.__version__
    text = (scored / "scores/test.txt").read_text(encoding="utf-8")
    assert "checkpoint checkpoint.avg2.pt, average 2, beam 3, lenpen 0.6" in text


def test_detokenised_as_moses_does_for_the_target_language(scored):
    pieces = generated(scored / "scores/test.generate.txt", "H")
    assert any("@@" in line for line in pieces)
    tokens = [re.sub("@@( |$)", "", line) for line in pieces]
    moses = {language: MosesText(language) for language in ("en", "de")}
    made = {name: [text.detokenize(line) for line in tokens] for name, text in moses.items()}
    assert made["de"] != made["en"]
    assert lines(scored / "scores/test.hypotheses.txt") == made["de"]
    assert generated(scored / "scores/test.generate.txt", "D") == made["de"]
    assert not re.search(r"&\w+;|@-@", "".join(made["de"]))


def test_the_papers_figure_is_that_of_the_authors_script(scored):
    pieces = generated(scored / "scores/test.generate.txt", "H")
    hypotheses = [re.sub("@@( |$)", "", line) for line in pieces]
    references = lines(scored / "prepared/tokenised/test.de")
    replaced = [line.replace("‘", "'").replace("’", "'") for line in references]
    assert replaced != references
    split = [
        [line.replace(" @-@ ", " @ ##AT##-##AT## @ ") for line in side]
        for side in (hypotheses, replaced)
    ]
    report = json.loads((scored / "scores/test.json").read_text(encoding="utf-8"))
    texts = [figure["text"] for figure in report["tokenised"]]
    assert texts == [slow_multi_bleu(*split), slow_multi_bleu(hypotheses, replaced)]
    assert report["tokenised"][0]["score"] > 10
    assert report["language_pair"] == "en-de"
    for suffix in (".txt", ".md"):
        assert "the paper's figure" in (scored / f"scores/test{suffix}").read_text(encoding="utf-8")


def test_sacrebleu_equals_its_own_command(scored):
    result = run(
        *("sacrebleu", scored / "prepared/raw/test.de", "--confidence", "-w", "2"),
        *("-i", scored / "scores/test.hypotheses.txt"),
    )
    theirs = json.loads(result.stdout)
    text = (scored / "scores/test.txt").read_text(encoding="utf-8")
    assert f"BLEU|{theirs['signature']} = {theirs['score']:.2f} ({theirs['confidence']})" in text


def test_options_win_and_a_baseline_is_tested(scored, tmp_path):
    options = ["--average", "1", "--beam", "1", "--lenpen", "1.5"]
    made = set()
    for baseline in (scored / "scores", scored / "scores/test.generate.txt"):
        evaluate(scored, tmp_path / "out", *options, "--baseline", baseline)
        report = json.loads((tmp_path / "out/test.json").read_text(encoding="utf-8"))
        assert (report["settings"]["beam"], report["settings"]["lenpen"]) == ("1", "1.5")
        assert "--beam 1 --lenpen 1.5 " in (tmp_path / "out/test.generate.txt.key").read_text()
        report = json.loads((tmp_path / "out/test.json").read_text(encoding="utf-8"))
        first = json.loads((scored / "scores/test.json").read_text(encoding="utf-8"))
        test = report["significance"]["bleu"]
        assert test["baseline"]["score"] == pytest.approx(first["bleu"]["score"])
        assert test["system"]["score"] == pytest.approx(report["bleu"]["score"])
        assert 0 < test["p_value"] <= 1
        made.add((tmp_path / "out/test.generate.txt").stat().st_mtime_ns)
    assert (scored / "checkpoints/checkpoint.avg1.pt").exists()
    assert len(made) == 1  # translations are reused


def test_english_french_is_never_split(clinic, tmp_path):
    prepared = tmp_path / "prepared"
    shutil.copytree(clinic / "prepared", prepared)
    shutil.copytree(clinic / "checkpoints", tmp_path / "checkpoints")
    for name in ("raw/test", "tokenised/test"):
        (prepared / f"{name}.de").rename(prepared / f"{name}.fr")
    for path in list((prepared / "data").iterdir()):
        path.rename(path.with_name(path.name.replace("en-de", "en-fr").replace(".de", ".fr")))
    french = {"recipe": "clinic", "target_lang": "fr", "pair": "en-fr"}
    write_options(prepared, tmp_path / "checkpoints", **french)
    evaluate(tmp_path, tmp_path / "scores")
    report = json.loads((tmp_path / "scores/test.json").read_text(encoding="utf-8"))
    (figure,) = report["tokenised"]
    assert not figure["compound_split"] and "@-@" in "".join(lines(prepared / "tokenised/test.fr"))
    pieces = generated(tmp_path / "scores/test.generate.txt", "H")
    hypotheses = [re.sub("@@( |$)", "", line) for line in pieces]
    references = lines(prepared / "tokenised/test.fr")
    replaced = [line.replace("‘", "'").replace("’", "'") for line in references]
    assert figure["text"] == slow_multi_bleu(hypotheses, replaced)
    moses = MosesText("fr")
    scored = lines(tmp_path / "scores/test.hypotheses.txt")
    assert scored == [moses.detokenize(line) for line in hypotheses]


def test_wrong_uses(scored, tmp_path):
    out = scored / "scores"
    before = (out / "test.json").read_bytes()
    cases = [
        (["--baseline", tmp_path / "none"], f"--baseline: no file {tmp_path / 'none'}"),
        (["--baseline", tmp_path], f"--baseline: no file {tmp_path / 'test.hypotheses.txt'}"),
        (["--baseline", out], f"would overwrite {out / 'test.hypotheses.txt'}"),
    ]
    if importlib.util.find_spec("comet") is None:
        cases.append((["--comet", "some-model"], "--comet some-model: the package comet"))
    for options, message in cases:
        assert message in last_line(evaluate(scored, out, *options, check=False))
    assert (out / "test.json").read_bytes() == before


def test_an_unknown_recipe_and_lost_tokenised_text_are_named(scored, tmp_path):
    prepared = tmp_path / "prepared"
    shutil.copytree(scored / "prepared", prepared)
    (prepared / "tokenised/test.de").unlink()
    result = evaluate(tmp_path, tmp_path / "out", check=False)
    assert f"no file {prepared / 'tokenised/test.de'}" in last_line(result)
    write_options(prepared, recipe="other")
    result = evaluate(tmp_path, tmp_path / "out", check=False)
    assert "names the recipe other; clinic and sentencepiece are known" in last_line(result)
