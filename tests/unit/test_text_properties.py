"""Any Unicode text keeps its lines, side by side, from preparation to score."""

from __future__ import annotations

import io
import unicodedata
from contextlib import redirect_stdout

import pytest
import sentencepiece
from hypothesis import event, given
from hypothesis import strategies as st

from moa_fairseq.cli.score import main as score_main
from moa_fairseq.errors import UsageError
from moa_fairseq.text.cleaning import clean_pairs
from moa_fairseq.text.files import read_lines, read_parallel, write_lines
from moa_fairseq.text.prepare import PrepareOptions, encode_pairs, prepare, train_sentencepiece
from moa_fairseq.text.scoring import read_generate_output, score

# Of every kind that has been taken for the end of a line, or for nothing, by some program.
AWKWARD = [
    *("\r", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f", "\x00", "\t", "\u0085"),
    *("\u2028", "\u2029", "\u00a0", "\u3000", "\u200b", "\u200d", "\u2060", "\ufeff"),
    *("\u0301", "\u202e", "\u05d0", "\u0627", "\ufdfa", "\U0001f469\u200d\U0001f4bb", "\ufffe"),
    *("\U0003fffd", "\U000e0041", "\ue000", "\u2581", "@@ ", "<s>", "</s>", "<unk>", "D-0\t1\tx"),
    *("H-1\t", "&apos;", " .", "a", "Haus", " ", "3"),
]
CHARACTER = st.characters(exclude_categories=["Cs"], exclude_characters="\n")
LINE = st.lists(st.sampled_from(AWKWARD) | st.text(CHARACTER, max_size=8), max_size=8).map("".join)
LINES = st.lists(LINE | LINE.map(lambda line: line * 60), min_size=1, max_size=8)
PAIRS = st.lists(st.tuples(LINE, LINE), min_size=1, max_size=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A SentencePiece model of plain text, and 80 pairs of that text."""
    folder = tmp_path_factory.mktemp("model")
    pairs = [(f"red house {n} and a tree", f"rotes Haus {n} und ein Baum") for n in range(80)]
    write_lines(folder / "text", [side for pair in pairs for side in pair])
    train_sentencepiece([folder / "text"], 38, folder / "model")
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "model")), pairs


def as_bytes(lines, end="\n"):
    return "".join(line + end for line in lines).encode("utf-8")


def count(path):
    """Lines as `wc -l` counts them, and as Python's own files and fairseq's do."""
    data = path.read_bytes()
    with open(path, encoding="utf-8") as stream:
        assert sum(1 for _ in stream) == data.count(b"\n")
    return data.count(b"\n")


@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.booleans())
def test_reading_and_writing_keep_lines(tmp_path_factory, lines, end, mark, last_end):
    path = tmp_path_factory.mktemp("text") / "text"
    data = as_bytes(lines, end)
    if not last_end and lines[-1]:
        data = data[: -len(end)]
    path.write_bytes(b"\xef\xbb\xbf" * mark + data)
    read = read_lines(path)
    assert len(read) == len(lines)
    write_lines(path, read)
    assert path.read_bytes().count(b"\n") == len(lines)
    assert len(read_lines(path)) == len(lines)


@given(PAIRS)
def test_cleaning_keeps_the_sides_together_and_counts(pairs):
    marked = [(f"{n} {source}", f"{n} {target}") for n, (source, target) in enumerate(pairs)]
    kept, dropped = clean_pairs(marked)
    assert len(kept) == len(pairs) and not dropped["empty side"]
    for n, sides in enumerate(kept):
        for side in sides:
            assert side.split()[0] == str(n)
            assert len(side.splitlines()) == 1 and side == side.strip()
    kept, dropped = clean_pairs(pairs)
    assert len(kept) + dropped["empty side"] == len(pairs)
    blank = {"Cc", "Zs", "Zl", "Zp"}

    def empty(line):
        return all(unicodedata.category(c) in blank or c == "\ufeff" for c in line)

    assert dropped["empty side"] == sum(empty(source) or empty(target) for source, target in pairs)


@given(PAIRS)
def test_pieces_keep_lines_on_both_sides(model, tmp_path_factory, pairs):
    processor, _ = model
    folder = tmp_path_factory.mktemp("pieces")
    encoded = encode_pairs(processor, pairs)
    assert len(encoded) == len(pairs)
    for side, language in enumerate(("en", "de")):
        write_lines(folder / language, [pair[side] for pair in encoded])
        assert count(folder / language) == len(pairs)
    decoded = [processor.decode(source.split(" ")) for source, _ in encoded]
    assert not any(end in text for text in decoded for end in "\n\r")


@given(PAIRS)
def test_preparation_keeps_every_test_line_and_aligns_training(model, tmp_path_factory, pairs):
    _, plain = model
    folder = tmp_path_factory.mktemp("prepare")
    for name, text in (("train", [*plain, *pairs]), ("valid", plain[:3]), ("test", pairs)):
        for side, language in enumerate(("en", "de")):
            (folder / f"{name}.{language}").write_bytes(as_bytes([pair[side] for pair in text]))

    def files(name):
        return str(folder / f"{name}.en"), str(folder / f"{name}.de")

    out = folder / "out"
    options = PrepareOptions(
        *("en", "de", files("train"), files("valid"), (files("test"),), None),
        *(len({*str(plain), *str(pairs)}) + 8, 250, 9.0, 1),
    )
    try:
        prepare(options, out)
    except UsageError as error:
        # The one thing that may not go: a vocabulary that this text does not have.
        assert str(error).startswith("--vocab-size")
        assert not out.exists() or {path.name for path in out.iterdir()} <= {".lock"}
        event("refused")
        return
    event("prepared")
    for name in ("train", "test"):
        lines = {count(out / "pieces" / f"{name}.{language}") for language in ("en", "de")}
        assert len(lines) == 1
        assert name == "train" or lines == {len(pairs)}
    assert len(read_parallel(out / "raw/test.en", out / "raw/test.de")) == len(pairs)


@given(LINES)
def test_output_of_generation_is_read_line_by_line(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("output") / "generate.txt"
    kinds = "".join(
        f"S-{n}\t{line}\nT-{n}\t{line}\nH-{n}\t-0.5\t{line}\nD-{n}\t-0.5\t{line}\nP-{n}\t-0.5\n"
        for n, line in reversed(list(enumerate(lines)))
    )
    path.write_bytes(kinds.encode("utf-8"))
    read = read_generate_output(path)
    assert read == [line[:-1] if line.endswith("\r") else line for line in lines]


@given(LINES)
def test_a_text_against_itself_scores_100(tmp_path_factory, lines):
    text = [*lines, "one two three four five six"]
    folder = tmp_path_factory.mktemp("score")
    (folder / "text").write_bytes(as_bytes(text))
    output = "".join(f"D-{n}\t-0.5\t{line}\n" for n, line in enumerate(text))
    (folder / "output").write_bytes(output.encode("utf-8"))
    reference, report = str(folder / "text"), folder / "report"
    arguments = ["--generate-output", str(folder / "output"), "--reference", reference]
    try:
        with redirect_stdout(io.StringIO()):
            score_main([*arguments, "--report", str(report), "--resamples", "0"])
    except UsageError as error:
        assert "subword marks" in str(error) or "look tokenised" in str(error)
        return
    read = read_lines(folder / "report.hypotheses.txt")
    assert len(read) == len(text)
    result = score(read_lines(folder / "text"), read_lines(folder / "text"))
    assert result["sentences"] == len(text)
    assert result["bleu"]["score"] == pytest.approx(100)
    assert result["chrf"]["score"] == pytest.approx(100)
