from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import types
from importlib import metadata

import pytest

from moa_fairseq.cli.score import main
from moa_fairseq.errors import UsageError
from moa_fairseq.text.checks import check_detokenised, check_tokenised, tokenised_share
from moa_fairseq.text.moses import MosesText
from moa_fairseq.text.report import report_markdown
from moa_fairseq.text.scoring import (
    compare,
    join_subwords,
    read_generate_output,
    read_hypotheses,
    samples,
    score,
)

from ..paths import SHARED
from ..slow_multi_bleu import slow_multi_bleu

REFERENCES = [
    "The cat sat on the mat, as it often does.",
    "It's raining – take an umbrella!",
    "Nothing beats a well-kept library.",
    "Forty-two is the answer; what was the question?",
]
HYPOTHESES = [
    "The cat sat on a mat, as it often did.",
    "It's raining, take the umbrella!",
    "Nothing beats a library.",
    "Forty two is the answer; what is the question?",
]


def test_equals_sacrebleus_own_command(tmp_path):
    reference, hypothesis = tmp_path / "reference", tmp_path / "hypothesis"
    reference.write_text("\n".join(REFERENCES) + "\n")
    hypothesis.write_text("\n".join(HYPOTHESES) + "\n")
    command = [sys.executable, "-m", "sacrebleu", str(reference), "-i", str(hypothesis), "-w", "6"]
    command += ["-m", "bleu", "chrf", "--chrf-word-order", "2"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    bleu, chrf = json.loads(result.stdout)
    ours = score(HYPOTHESES, REFERENCES)
    assert ours["bleu"]["score"] == pytest.approx(bleu["score"], abs=1e-6)
    assert ours["chrf"]["score"] == pytest.approx(chrf["score"], abs=1e-6)
    assert ours["bleu"]["signature"] == bleu["signature"]
    assert ours["chrf"]["signature"] == chrf["signature"]
    assert ours["sentences"] == 4


def test_refuses_what_would_give_a_wrong_score():
    with pytest.raises(UsageError, match="3 hypotheses but 4 references"):
        score(HYPOTHESES[:3], REFERENCES)
    for marked in ("▁The ▁cat", "rain@@ ing", "rain@@"):
        with pytest.raises(UsageError, match=r"1 hypotheses hold subword marks \(line 2\)"):
            score([HYPOTHESES[0], marked, *HYPOTHESES[2:]], REFERENCES)


GENERATED = (
    "S-1\t▁two\nT-1\t▁zwei\nH-1\t-0.5\t▁zwo\nD-1\t-0.5\tzwo\nP-1\t-0.5 -0.5\n"
    "H-1\t-0.9\t▁zwei\nD-1\t-0.9\tzwei\n"
    "S-0\t▁one\nH-0\t-0.25\t▁eins\nD-0\t-0.25\teins\n"
    "S-2\t\nH-2\t-0.25\t\nD-2\t-0.25\t\nGenerate test with beam=5: BLEU4 = 1.00\n"
)


def test_reads_the_best_hypothesis_of_each_sentence_in_corpus_order(tmp_path):
    (tmp_path / "generate.txt").write_text(GENERATED)
    assert read_generate_output(tmp_path / "generate.txt") == ["eins", "zwo", ""]


def test_an_incomplete_output_is_refused(tmp_path):
    path = tmp_path / "generate.txt"
    path.write_text(GENERATED.replace("D-0", "X-0"))
    with pytest.raises(UsageError, match=r"incomplete: 1 of 3 sentences are missing.* number 0"):
        read_generate_output(path)
    path.write_text("nothing here\n")
    with pytest.raises(UsageError, match="no D- lines"):
        read_generate_output(path)


def test_command_writes_text_json_and_hypotheses(tmp_path, capsys):
    (tmp_path / "reference").write_text("\n".join(REFERENCES) + "\n")
    (tmp_path / "hypotheses").write_text("\n".join(HYPOTHESES) + "\n")
    arguments = ["--hypotheses", str(tmp_path / "hypotheses")]
    arguments += ["--reference", str(tmp_path / "reference"), "--samples", "2"]
    main([*arguments, "--report", str(tmp_path / "scores" / "test")])
    printed = capsys.readouterr().out
    assert (tmp_path / "scores/test.txt").read_text() == printed
    assert "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:" in printed
    assert f"translation {HYPOTHESES[2]}\nreference   {REFERENCES[2]}" in printed
    report = json.loads((tmp_path / "scores/test.json").read_text())
    assert report["bleu"]["score"] == pytest.approx(score(HYPOTHESES, REFERENCES)["bleu"]["score"])
    assert (tmp_path / "scores/test.hypotheses.txt").read_text().splitlines() == HYPOTHESES


@pytest.mark.parametrize(
    "changes,message",
    [
        (["--source", "{}/short"], "short has 1 lines but"),
        (["--report", "{}/reference"], "would overwrite"),
        (["--samples", "-1"], "--samples -1"),
    ],
)
def test_command_refuses_and_overwrites_nothing(tmp_path, changes, message):
    for name in ("reference.txt", "hypotheses"):
        (tmp_path / name).write_text("\n".join(REFERENCES) + "\n")
    (tmp_path / "short").write_text("one\n")
    arguments = ["--hypotheses", str(tmp_path / "hypotheses")]
    arguments += ["--reference", str(tmp_path / "reference.txt")]
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
    with pytest.raises(UsageError, match=message):
        main([*arguments, *(change.format(tmp_path) for change in changes)])
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before


def test_samples_are_spread_over_the_set():
    text = samples(list("abcdef"), list("ABCDEF"), list("uvwxyz"), 3)
    assert [block.split()[1] for block in text.split("\n\n")] == ["a", "c", "e"]
    assert samples(None, ["A"], ["x"], 10) == "translation A\nreference   x\n"


def corpus(seed, noise):
    """Forty sentences and two outputs for them, the second with more words replaced."""
    generator = random.Random(seed)
    vocabulary = [f"wort{number}" for number in range(30)]
    references = [generator.choices(vocabulary, k=generator.randint(4, 14)) for _ in range(40)]
    outputs = [
        [
            " ".join(word if generator.random() > share else "falsch" for word in words) + "."
            for words in references
        ]
        for share in (noise, noise + 0.2)
    ]
    return [" ".join(words) + "." for words in references], *outputs


def sacrebleu_command(folder, names, *options, seed):
    """What sacreBLEU's own command prints."""
    command = [sys.executable, "-m", "sacrebleu", "reference", "-i", *names, "-w", "6"]
    command += ["-m", "bleu", "chrf", "--chrf-word-order", "2", *options]
    environment = {**os.environ, "SACREBLEU_SEED": str(seed)}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=folder, env=environment
    )


def write_corpus(folder, texts):
    for name, lines in zip(("reference", "system", "baseline"), texts):
        (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


@pytest.mark.parametrize(("resamples", "seed"), [(1000, 12345), (200, 7)])
def test_intervals_equal_sacrebleus_own_command(tmp_path, monkeypatch, resamples, seed):
    monkeypatch.setenv("SACREBLEU_SEED", "99")
    texts = corpus(seed, 0.2)
    write_corpus(tmp_path, texts)
    options = ["--confidence", "--confidence-n", str(resamples)]
    expected = json.loads(sacrebleu_command(tmp_path, ["system"], *options, seed=seed).stdout)
    report = score(texts[1], texts[0], resamples, seed)
    for name, theirs in zip(("bleu", "chrf"), expected):
        ours = report[name]["confidence"]
        assert ours["mean"] == theirs["confidence_mean"] > 0
        assert ours["half_width"] == theirs["confidence_var"] > 0
        assert ours["signature"] == theirs["signature"]
        assert report[name]["score"] == pytest.approx(theirs["score"], abs=1e-6)
        # The score's own signature is the one that others print.
        assert "bs:" not in report[name]["signature"]
    assert os.environ["SACREBLEU_SEED"] == "99"


@pytest.mark.parametrize(("resamples", "seed"), [(1000, 12345), (200, 7)])
def test_paired_test_equals_sacrebleus_own_command(tmp_path, resamples, seed):
    references, system, baseline = texts = corpus(seed, 0.2)
    write_corpus(tmp_path, texts)
    # LaTeX has one row a system; the JSON of sacreBLEU 2.6.0 fails with numpy 2.
    options = ["--paired-bs", "--paired-bs-n", str(resamples), "-f", "latex"]
    result = sacrebleu_command(tmp_path, ["baseline", "system"], *options, seed=seed)
    number = r"(\d+\.\d+)"
    cell = rf"{number} \({number} ± {number}\)"
    rows = [
        re.search(f"^ *{name} & *{between.join([cell, cell])}{end}", result.stdout, re.M)
        for name, between, end in (
            ("Baseline: baseline", " *& *", ""),
            ("system", rf" \(p = {number}\)\*? & ", rf" \(p = {number}\)"),
        )
    ]
    baseline_numbers, system_numbers = (list(map(float, row.groups())) for row in rows)
    ours = compare(system, baseline, references, resamples, seed)
    fields = ("score", "mean", "half_width")
    for position, key in enumerate(("bleu", "chrf")):
        theirs = baseline_numbers[3 * position :][:3]
        assert [ours[key]["baseline"][field] for field in fields] == pytest.approx(theirs, abs=1e-6)
        theirs = system_numbers[4 * position :][:4]
        assert [ours[key]["system"][field] for field in fields] == pytest.approx(
            theirs[:3], abs=1e-6
        )
        assert f"{ours[key]['p_value']:.4f}" == f"{theirs[3]:.4f}"
        assert ours[key]["signature"] in result.stdout + result.stderr
        assert f"bs:{resamples}|seed:{seed}" in ours[key]["signature"]
    assert (ours["bleu"]["name"], ours["chrf"]["name"]) == ("BLEU", "chrF2++")
    assert ours["bleu"]["p_value"] < 0.05
    # sacreBLEU calls no difference at all significant.
    same = compare(system, list(system), references, resamples, seed)
    assert same["bleu"]["p_value"] == 1


def test_raw_text_is_never_taken_for_tokenised_and_tokenised_text_always():
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}; MOA_SHARED names the folder of corpora and references")
    raw = sorted(SHARED.glob("data/*/*.[def][enr]"))
    raw += sorted(SHARED.glob("reference/moses/*.normalised*"))
    tokenised = [path for path in raw if path.name.endswith(".tok")]
    tokenised += sorted(SHARED.glob("reference/moses/*.raw.tok*"))
    raw = [path for path in raw if path not in tokenised]
    assert len(raw) > 20 and len(tokenised) == 12
    for paths, low, high in ((raw, 0, 0.02), (tokenised, 0.98, 1)):
        for path in paths:
            lines = path.read_text(encoding="utf-8").split("\n")[:-1]
            assert low <= tokenised_share(lines) <= high, path
            # Parts of a hundred lines too, as small test sets are.
            for start in range(0, min(len(lines), 3000), 100):
                part = lines[start : start + 100]
                if high == 1:
                    with pytest.raises(UsageError, match="look tokenised"):
                        check_detokenised(part, "--hypotheses x")
                    check_tokenised(part, "--tokenised-reference x")
                else:
                    check_detokenised(part, "--hypotheses x")
                    with pytest.raises(UsageError, match="does not look tokenised"):
                        check_tokenised(part, "--tokenised-reference x")


FRENCH = [
    "Vraiment ? Oui ! C’est « bien » : 10 % ; voilà…",
    "L’homme, dit-il, part demain.",
    "Est-ce que vous venez ?",
    "Rien à dire . Sauf cela.",
    "R&D, AT&T et 1,2.",
]


def test_what_looks_tokenised():
    check_detokenised(FRENCH, "--hypotheses x")
    assert tokenised_share(["Ja", "Nein !", ""]) == 0
    check_tokenised(["Ja", "Nein"], "nothing can tell")
    for language, lines in (("fr", FRENCH), ("en", REFERENCES)):
        for aggressive in (False, True):
            tokenised = [MosesText(language).tokenize(line, aggressive) for line in lines]
            with pytest.raises(UsageError, match=r"--hypotheses x: \d+% of the lines"):
                check_detokenised(tokenised, "--hypotheses x")
    # One line copied as it should not be is a bad model's, not a wrong file.
    check_detokenised([*REFERENCES, "It &apos;s a @-@ copy ."], "--hypotheses x")


def tokenised_case(folder, pair="en-de", target="de"):
    """Files of a set whose text Moses tokenised; the generated lines are in BPE."""
    references = ["Das ‘Haus’ ist blau-rot.", "Der U-Bahn-Plan, sagt er, ist gut.", "Nein, danke."]
    translated = ["Das 'Haus' ist rot-blau.", "Der U-Bahn-Plan, sagt sie, war gut.", "Nein, danke."]
    moses = MosesText(target)
    tokens = [moses.tokenize(line, True) for line in translated]
    tokenised = [moses.tokenize(line, True) for line in references]
    generated = "".join(
        f"H-{number}\t-0.5\t{line.replace('sagt', 'sa@@ gt')}\n"
        f"D-{number}\t-0.5\t{moses.detokenize(line)}\n"
        for number, line in enumerate(tokens)
    )
    (folder / "generate.txt").write_text(generated, encoding="utf-8")
    for name, lines in (("reference", references), ("tokenised", tokenised)):
        (folder / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    arguments = ["--generate-output", folder / "generate.txt", "--reference", folder / "reference"]
    arguments += ["--language-pair", pair, "--tokenised-reference", folder / "tokenised"]
    return [str(argument) for argument in arguments], tokens, tokenised


def test_one_report_has_every_figure_and_its_label(tmp_path, capsys):
    arguments, tokens, references = tokenised_case(tmp_path)
    (tmp_path / "baseline").write_text("Das Haus.\nDer Plan ist gut.\nNein, danke.\n")
    arguments += ["--baseline", str(tmp_path / "baseline"), "--resamples", "50", "--seed", "3"]
    main([*arguments, "--report", str(tmp_path / "out|put")])
    printed = capsys.readouterr().out
    assert (tmp_path / "out|put.txt").read_text(encoding="utf-8") == printed
    report = json.loads((tmp_path / "out|put.json").read_text(encoding="utf-8"))
    replaced = [
        [line.replace("‘", "'").replace("’", "'") for line in side] for side in (tokens, references)
    ]
    twice = [[line.replace("@-@", "@ ##AT##-##AT## @") for line in side] for side in replaced]
    expected = [slow_multi_bleu(*twice), slow_multi_bleu(*replaced)]
    assert [figure["text"] for figure in report["tokenised"]] == expected
    assert [figure["compound_split"] for figure in report["tokenised"]] == [True, False]
    assert f"{report['tokenised'][0]['score']:.2f}" == expected[0].split()[2].rstrip(",")
    first, second = (line for line in printed.splitlines() if line.startswith("tokenised BLEU"))
    assert first.startswith("tokenised BLEU, compound-split (the paper's figure: ")
    assert first.endswith(f": {expected[0]}")
    assert second == f"tokenised BLEU (Moses tokenizer -a): {expected[1]}"
    # sacreBLEU comes first, and the paper's figure never without its label.
    assert printed.startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert "|bs:50|seed:3|" in printed and f"baseline {tmp_path / 'baseline'}" in printed
    header, rule, row = (tmp_path / "out|put.md").read_text(encoding="utf-8").splitlines()
    # Bars within cells are escaped.
    cells = [line.replace(r"\|", "/").strip("|").split(" | ") for line in (header, rule, row)]
    assert len(cells[0]) == len(cells[1]) == len(cells[2])
    shown = dict(zip((cell.strip() for cell in cells[0]), (cell.strip() for cell in cells[2])))
    assert shown["output"] == str(tmp_path / "out/put")
    assert shown["BLEU"] == f"{report['bleu']['score']:.2f}"
    half_width = report["chrf"]["confidence"]["half_width"]
    assert shown["chrF++, 95 %"].endswith(f" ± {half_width:.2f}")
    assert f"(p = {report['significance']['bleu']['p_value']:.4f})" in shown["BLEU − baseline"]
    assert shown[f"tokenised BLEU, compound-split ({report['tokenised'][0]['note']})"]
    assert shown["BLEU signature"] == f"`{report['bleu']['signature'].replace('|', '/')}`"
    roles = {"hypotheses", "reference", "tokenised_reference", "baseline"}
    assert report["files"].keys() == roles


def test_without_tokenised_text_the_hypotheses_are_tokenised(tmp_path, capsys):
    arguments, tokens, references = tokenised_case(tmp_path)
    main([*arguments[:-2], "--resamples", "0"])
    (line,) = (x for x in capsys.readouterr().out.splitlines() if x.startswith("tokenised BLEU"))
    sides = [
        [
            line.replace(" @-@ ", "-").replace("‘", "'").replace("’", "'") for line in side
        ]
        for side in (tokens, references)
    ]  # fmt: skip
    # A match takes the characters beside the hyphen, so of U-Bahn-Plan both are split.
    split = [[line.replace("-", " ##AT##-##AT## ") for line in side] for side in sides]
    assert line.endswith(f": {slow_multi_bleu(*split)}")
    assert "the paper's figure" not in line


def test_baseline_may_be_any_output(tmp_path):
    (tmp_path / "generate.txt").write_text(GENERATED)
    (tmp_path / "lines").write_text("eins\nzwo\n\n")
    for name in ("generate.txt", "lines"):
        assert read_hypotheses(tmp_path / name) == ["eins", "zwo", ""]


def test_subwords_are_joined_as_subword_nmt_does():
    assert join_subwords("U@@ -@@ Bahn fährt@@") == "U-Bahn fährt"
    assert join_subwords("ein@@word @@ x") == "ein@@word x"


def refuse(arguments, message):
    with pytest.raises(UsageError, match=message) as raised:
        main(arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--language-pair", "german"], "--language-pair german: give the codes of two"),
        (["--resamples", "1"], "--resamples 1: give 2 or more"),
        (["--resamples", "-5"], "--resamples -5"),
        (["--seed", "0"], "--seed 0: it must be at least 1"),
        (["--baseline", "{}/reference", "--resamples", "0"], "needs resamples"),
        (["--baseline", "{}/short"], "--baseline .*short: 1 hypotheses but 3 references"),
        (["--baseline", "{}/pieces"], "--baseline .*pieces: 3 hypotheses hold subword marks"),
        (["--baseline", "{}/tokenised"], "--baseline .*tokenised: 100% of the lines"),
        (["--baseline", "{}/none"], "none: No such file"),
        (["--tokenised-reference", "{}/short"], "short: 1 lines but 3 references"),
        (["--tokenised-reference", "{}/reference"], "reference: the text does not look tokenised"),
        (["--tokenised-reference", "{}/pieces"], "pieces: 3 lines hold subword marks"),
        (["--reference", "{}/tokenised"], "--reference .*tokenised: 100% of the lines"),
        (["--language-pair", "fr-en"], "D-0 is not what Moses' detokeniser for en makes of H-0"),
        (["--comet", "m"], "--comet m needs --source"),
        (
            ["--comet", "m", "--source", "{}/reference"],
            r'--comet m: .* install it with: pip install "unbabel-comet',
        ),
        (["--report", "{}/over"], "would overwrite .*over.md"),
    ],
)
def test_wrong_uses_of_the_new_options(tmp_path, monkeypatch, changes, message):
    monkeypatch.setitem(sys.modules, "comet", None)
    arguments, _, _ = tokenised_case(tmp_path)
    (tmp_path / "short").write_text("eins\n")
    (tmp_path / "pieces").write_text("ei@@ ns\nei@@ ns\n▁eins\n")
    (tmp_path / "over.md").write_text((tmp_path / "reference").read_text(encoding="utf-8"))
    if "--report" in changes:
        arguments += ["--baseline", str(tmp_path / "over.md")]
    before = sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir())
    refuse([*arguments, *(change.format(tmp_path) for change in changes)], message)
    assert sorted((path.name, path.read_bytes()) for path in tmp_path.iterdir()) == before


def test_tokenised_text_needs_a_pair_and_generated_lines(tmp_path):
    arguments, _, _ = tokenised_case(tmp_path)
    refuse([*arguments[:4], *arguments[6:]], "--tokenised-reference .* needs --language-pair")
    refuse(
        ["--hypotheses", str(tmp_path / "reference"), *arguments[2:]],
        "--tokenised-reference .* needs --generate-output",
    )
    generated = (tmp_path / "generate.txt").read_text(encoding="utf-8")
    (tmp_path / "generate.txt").write_text(generated.replace("H-1", "X-1"), encoding="utf-8")
    refuse(arguments, "incomplete: 1 of 3 sentences are missing")
    undone = generated.replace("D-", "X-").replace("H-", "D-").replace("@@ ", "")
    (tmp_path / "generate.txt").write_text(undone, encoding="utf-8")
    refuse(arguments, "--generate-output .*: 100% of the lines .* --tokenizer moses")
    pieces = generated.replace("-0.5\tNein", "-0.5\t▁Nein", 1)
    (tmp_path / "generate.txt").write_text(pieces, encoding="utf-8")
    refuse(arguments, r"1 H- lines hold subword marks \(line 3\)")


def test_comet_where_it_is_installed(tmp_path, monkeypatch, capsys):
    """The calls that its documentation names; a stand-in for the package itself."""
    calls = []

    class Model:
        def predict(self, samples, batch_size, gpus):
            calls.append(samples)
            return types.SimpleNamespace(system_score=0.8125)

    comet = types.ModuleType("comet")
    comet.download_model = lambda name: f"downloaded {name}"
    comet.load_from_checkpoint = lambda path: calls.append(path) or Model()
    monkeypatch.setitem(sys.modules, "comet", comet)
    version = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "2.2.7" if name == "unbabel-comet" else version(name)
    )
    arguments, _, _ = tokenised_case(tmp_path)
    (tmp_path / "source").write_text("a\nb\nc\n")
    arguments += ["--source", str(tmp_path / "source"), "--comet", "Unbabel/some-model"]
    main([*arguments, "--report", str(tmp_path / "out")])
    assert calls[0] == "downloaded Unbabel/some-model"
    reference = (tmp_path / "reference").read_text(encoding="utf-8").splitlines()
    assert calls[1][2] == {"src": "c", "mt": "Nein, danke.", "ref": reference[2]}
    assert "COMET (Unbabel/some-model, unbabel-comet 2.2.7) = 0.8125" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["comet"]["score"] == 0.8125
    assert "| COMET (Unbabel/some-model) |" in (tmp_path / "out.md").read_text()


def test_settings_are_reported_and_a_nameless_one_is_refused(tmp_path, capsys):
    for name, lines in (("hypotheses", HYPOTHESES), ("reference", REFERENCES)):
        (tmp_path / name).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    command = ["--hypotheses", str(tmp_path / "hypotheses")]
    command += ["--reference", str(tmp_path / "reference"), "--report", str(tmp_path / "out")]
    main([*command, "--setting", "beam=4", "--setting", "options=--prefix-size=2"])
    printed = capsys.readouterr().out
    assert printed.startswith("translated with beam 4, options --prefix-size=2\n")
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["settings"] == {"beam": "4", "options": "--prefix-size=2"}
    assert (tmp_path / "out.md").read_text(encoding="utf-8").startswith("| output | beam |")
    for wrong in ("beam", "=4"):
        with pytest.raises(SystemExit, match=f"--setting {wrong}: give a name and a value"):
            main([*command, "--setting", wrong])


def test_markdown_has_only_what_was_computed():
    header = report_markdown(score(HYPOTHESES, REFERENCES), "mine").splitlines()[0]
    assert header == "| output | BLEU | chrF++ | BLEU signature | chrF++ signature |"
