"""Real parallel text, where a folder of it is at hand (`MOA_SHARED`)."""

from __future__ import annotations

import json

import pytest

from moa_fairseq.text.files import read_lines
from moa_fairseq.text.prepare import PrepareOptions, prepare

from ..paths import SHARED

CORPORA = [
    ("multi30k", "en", "de", "valid", "test", 1014, 1000),
    ("nc5k-en-fr", "en", "fr", "train", "test", 3987, 500),
    ("newstest-en-de", "en", "de", "valid", "test", 3000, 3003),
]


@pytest.mark.parametrize("corpus", CORPORA, ids=lambda corpus: corpus[0])
def test_preparing_real_text_loses_no_line_of_a_test_set(corpus, tmp_path):
    name, source, target, train, test, train_lines, test_lines = corpus
    folder = SHARED / "data" / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; MOA_SHARED names another place")

    def files(split):
        return (str(folder / f"{split}.{source}"), str(folder / f"{split}.{target}"))

    options = PrepareOptions(
        source_lang=source,
        target_lang=target,
        train=files(train),
        valid=None,
        tests=(files(test),),
        hold_out=50,
        vocab_size=1500,
        max_length=250,
        max_ratio=9.0,
        seed=1,
    )
    prepare(options, tmp_path)
    counts = json.loads((tmp_path / "manifest.json").read_text())["pairs"]
    # Every line read is kept, held out, or counted as dropped.
    numbers = counts["train"]
    assert numbers["read"] == train_lines
    assert sum(numbers.values()) - numbers["read"] + 50 == train_lines
    assert counts["test"]["kept"] == test_lines
    for language in (source, target):
        raw = (folder / f"{test}.{language}").read_bytes()
        assert (tmp_path / "raw" / f"test.{language}").read_bytes() == raw
        pieces = read_lines(tmp_path / "pieces" / f"test.{language}")
        assert len(pieces) == test_lines
