from __future__ import annotations

import json
import subprocess
import sys

import pytest

from moa_fairseq.cli.score import main
from moa_fairseq.errors import UsageError
from moa_fairseq.text.scoring import read_generate_output, samples, score

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
