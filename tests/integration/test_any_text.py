"""Awkward Unicode text through fairseq-preprocess, fairseq-generate and moa-score."""

from __future__ import annotations

import io
import json
import logging
import re
from contextlib import redirect_stdout

import sentencepiece

from moa_fairseq.cli.score import main as score
from moa_fairseq.text.files import read_lines, write_lines
from moa_fairseq.text.prepare import encode_pairs
from moa_fairseq.text.scoring import read_generate_output

from ..unit.test_text_properties import AWKWARD
from .commands import run
from .in_process import generate, train


def test_as_many_lines_come_out_as_went_in(toy, tmp_path):
    """Empty, long and awkward lines, each of which some program takes for two or for none."""
    lines = ["", "red house", *AWKWARD, *(f"red{text}house {text}" for text in AWKWARD)]
    lines += ["tree " * 300, "red house three", ""]
    # Of references that look like pieces or tokens, no score is given.
    refused = re.compile(r"\u2581|@@ |&apos;| \.")
    references = [refused.sub("", line) for line in lines]
    folder = toy / "prepared"
    (tmp_path / "raw").write_bytes("".join(f"{line}\n" for line in references).encode())
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "sentencepiece.model"))
    for side, language in enumerate(("en", "de")):
        pairs = encode_pairs(model, list(zip(lines, references)))
        write_lines(tmp_path / f"test.{language}", [pair[side] for pair in pairs])
    data = folder / "data"
    run(
        *("fairseq-preprocess", "--source-lang", "en", "--target-lang", "de"),
        *("--testpref", tmp_path / "test", "--destdir", tmp_path / "data"),
        *("--srcdict", data / "dict.en.txt", "--tgtdict", data / "dict.de.txt"),
    )
    train(toy, tmp_path / "run", "--max-update", "1")
    # A model that has learnt nothing translates as many lines as any other.
    printed = io.StringIO()
    logging.disable()
    try:
        with redirect_stdout(printed):
            generate(
                *(toy, tmp_path / "run/checkpoint_last.pt", "--beam", "1", "--max-len-a", "0"),
                *("--max-len-b", "5", "--bpe", "sentencepiece"),
                *("--sentencepiece-model", folder / "sentencepiece.model"),
                data=tmp_path / "data",
            )
    finally:
        logging.disable(logging.NOTSET)
    output = tmp_path / "generate.txt"
    output.write_bytes(printed.getvalue().encode())
    assert len(read_generate_output(output)) == len(lines) == len(read_lines(tmp_path / "raw"))
    arguments = ["--reference", str(tmp_path / "raw"), "--report", str(tmp_path / "report")]
    with redirect_stdout(io.StringIO()):
        score(["--generate-output", str(output), *arguments, "--resamples", "0"])
    assert json.loads((tmp_path / "report.json").read_text())["sentences"] == len(lines)
    assert (tmp_path / "report.hypotheses.txt").read_bytes().count(b"\n") == len(lines)
