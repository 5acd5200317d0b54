from __future__ import annotations

import json
import os
import zipfile

import pytest

from moa_fairseq.errors import UsageError
from moa_fairseq.text.cleaning import clean_line, clean_pairs, filter_lengths, hold_out
from moa_fairseq.text.files import atomic_writer, read_lines, read_parallel
from moa_fairseq.text.interface_texts import extract
from moa_fairseq.text.prepare import PrepareOptions, prepare


@pytest.mark.parametrize(
    "raw,clean",
    [
        ("  two   words ", "two words"),
        ("non\u00a0breaking\u202fspace", "non breaking space"),
        ("line\u2028and\u2029paragraph\u0085separators", "line and paragraph separators"),
        ("stray\rreturn\tand\x00nul", "stray return and nul"),
        ("\ufeffmark", "mark"),
        ("soft\u00adhyphen stays", "soft\u00adhyphen stays"),
        (
            "\u00e4\u00f6\u00fc \u4f60\u597d \U0001f600",
            "\u00e4\u00f6\u00fc \u4f60\u597d \U0001f600",
        ),
        ("\x1f\u2028", ""),
    ],
)
def test_clean_line(raw, clean):
    assert clean_line(raw) == clean


def test_only_a_line_feed_ends_a_line(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffone\r\ntwo\u2028still two\rtwo\n\nfour".encode())
    assert read_lines(path) == ["one", "two\u2028still two\rtwo", "", "four"]


def test_bad_files_are_named_with_line_and_remedy(tmp_path):
    latin = tmp_path / "latin"
    latin.write_bytes(b"fine\nGr\xfc\xdfe\n")
    with pytest.raises(UsageError, match=r"latin: line 2 is not UTF-8 \(byte 0xfc\).*iconv"):
        read_lines(latin)
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(UsageError, match="empty"):
        read_lines(tmp_path / "empty")
    with pytest.raises(UsageError, match="No such file"):
        read_lines(tmp_path / "missing")
    (tmp_path / "two").write_text("a\nb\n")
    (tmp_path / "three").write_text("a\nb\nc\n")
    with pytest.raises(UsageError, match=r"two has 2 lines but .*three has 3"):
        read_parallel(tmp_path / "two", tmp_path / "three")


def test_a_failed_write_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("earlier")
    with pytest.raises(RuntimeError), atomic_writer(path) as stream:
        stream.write("half")
        raise RuntimeError
    assert path.read_text() == "earlier"
    assert os.listdir(tmp_path) == ["file"]


def test_cleaning_drops_and_counts_pairs_without_text():
    pairs = [("a", "b"), (" ", "b"), ("a", "\u2028"), ("c ", " d")]
    assert clean_pairs(pairs) == ([("a", "b"), ("c", "d")], {"empty side": 2})


def test_length_filter_by_hand():
    pairs = [("a " * 4 + "a", "b"), ("a a", "b"), ("a", "b b b"), ("a a a", "b b")]
    kept, dropped = filter_lengths(pairs, max_length=4, max_ratio=2)
    assert kept == [("a a", "b"), ("a a a", "b b")]
    assert dropped == {"too long": 1, "length ratio": 1}


def test_held_out_text_is_nowhere_in_the_rest():
    pairs = [(f"s{i % 40}", f"t{i % 37}") for i in range(300)]
    rest, (valid, test), dropped = hold_out(pairs, [5, 7], seed=3)
    assert (len(valid), len(test), len(set(valid + test))) == (5, 7, 12)
    held = valid + test
    assert not {s for s, _ in rest} & {s for s, _ in held}
    assert not {t for _, t in rest} & {t for _, t in held}
    repeats = sum(pair in held for pair in pairs)
    assert len(rest) + dropped["shared with held-out text"] + repeats == len(pairs)
    assert hold_out(pairs, [5, 7], seed=3) == (rest, [valid, test], dropped)
    assert hold_out(pairs, [5, 7], seed=4)[1] != [valid, test]


def options(folder, **changes):
    defaults = {
        "source_lang": "en",
        "target_lang": "de",
        "train": (str(folder / "text.en"), str(folder / "text.de")),
        "valid": None,
        "tests": (),
        "hold_out": 5,
        "vocab_size": 40,
        "max_length": 100,
        "max_ratio": 9.0,
        "seed": 1,
    }
    return PrepareOptions(**{**defaults, **changes})


@pytest.fixture
def corpus(tmp_path):
    words = ["red", "green", "blue", "old", "new", "house", "tree", "river"]
    lines = [f"{a} {b} {c}" for a in words for b in words for c in words[:2]]
    (tmp_path / "text.en").write_text("".join(line + "\n" for line in lines))
    (tmp_path / "text.de").write_text("".join(line.upper() + "\n" for line in lines))
    return tmp_path


def test_prepare_writes_whole_aligned_splits_and_a_manifest(corpus):
    out = corpus / "out"
    assert prepare(options(corpus), out)
    manifest = json.loads((out / "manifest.json").read_text())
    counts = manifest["pairs"]
    assert counts["train"]["read"] == 128
    assert counts["valid"]["kept"] == counts["test"]["kept"] == 5
    assert counts["train"]["kept"] == 118
    for split, number in (("train", 118), ("valid", 5), ("test", 5)):
        for folder in ("raw", "pieces"):
            english = read_lines(out / folder / f"{split}.en")
            german = read_lines(out / folder / f"{split}.de")
            assert len(english) == len(german) == number
    assert all(e.upper() == g for e, g in read_parallel(out / "raw/test.en", out / "raw/test.de"))
    assert manifest["inputs"].keys() == {str(corpus / "text.en"), str(corpus / "text.de")}


def test_prepare_does_nothing_twice_and_notices_changes(corpus):
    out = corpus / "out"
    prepare(options(corpus), out)
    first = (out / "pieces/train.en").read_bytes()
    assert not prepare(options(corpus), out)
    (out / "pieces/train.en").write_text("damaged")
    assert prepare(options(corpus), out)
    assert (out / "pieces/train.en").read_bytes() == first
    assert prepare(options(corpus, vocab_size=38), out)
    (corpus / "text.en").write_text((corpus / "text.en").read_text().replace("red", "gold"))
    assert prepare(options(corpus, vocab_size=38), out)


def test_given_test_sets_keep_every_line_as_it_is(corpus):
    (corpus / "t.en").write_text("red  house\n\n\u00a0\nred tree\n")
    (corpus / "t.de").write_text("ROT\n\nX\nBAUM \n")
    files = (str(corpus / "t.en"), str(corpus / "t.de"))
    prepare(options(corpus, tests=(files, files), valid=files), corpus / "out")
    for name in ("valid", "test", "test1"):
        assert (corpus / f"out/raw/{name}.de").read_text() == "ROT\n\nX\nBAUM \n"
        assert len(read_lines(corpus / f"out/pieces/{name}.en")) == 4


def test_a_test_set_that_is_not_wanted_any_more_goes(corpus):
    files = (str(corpus / "text.en"), str(corpus / "text.de"))
    prepare(options(corpus, tests=(files, files)), corpus / "out")
    assert (corpus / "out/pieces/test1.en").exists()
    prepare(options(corpus, tests=(files,)), corpus / "out")
    assert not (corpus / "out/pieces/test1.en").exists()
    manifest = json.loads((corpus / "out/manifest.json").read_text())
    assert not [name for name in manifest["outputs"] if "test1" in name]


def test_input_in_a_folder_that_would_be_replaced_is_refused(corpus):
    raw = corpus / "out/raw"
    raw.mkdir(parents=True)
    for language in ("en", "de"):
        (raw / f"train.{language}").write_bytes((corpus / f"text.{language}").read_bytes())
    before = (raw / "train.en").read_bytes()
    with pytest.raises(UsageError, match="lies in a folder that --out"):
        prepare(
            options(corpus, train=(str(raw / "train.en"), str(raw / "train.de"))), corpus / "out"
        )
    assert (raw / "train.en").read_bytes() == before


def test_repetitive_text_is_too_little_to_hold_out(tmp_path):
    (tmp_path / "text.en").write_text("one\n" * 1000)
    (tmp_path / "text.de").write_text("eins\n" * 1000)
    with pytest.raises(UsageError, match="1 distinct pairs are too few"):
        prepare(options(tmp_path), tmp_path / "out")


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"vocab_size": 100000}, "--vocab-size 100000"),
        ({"vocab_size": 3}, "--vocab-size 3"),
        ({"hold_out": 1000}, "lower --hold-out"),
        ({"target_lang": "en"}, "--target-lang are both en"),
        ({"max_length": 1}, "no training pair is left"),
        ({"valid": ("missing.en", "missing.de")}, "missing.en: no such file"),
    ],
)
def test_prepare_names_what_is_wrong(corpus, changes, message):
    with pytest.raises(UsageError) as error:
        prepare(options(corpus, **changes), corpus / "out")
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (corpus / "out/manifest.json").exists()


def make_wheel(path, texts):
    with zipfile.ZipFile(path, "w") as archive:
        for component, languages in texts.items():
            for language, tree in languages.items():
                name = f"app/components/{component}/translations/{language}.json"
                archive.writestr(name, json.dumps(tree))


def test_interface_texts_hold_out_whole_components(tmp_path):
    texts = {
        f"component{number}": {
            "en": {"title": {"name": f"Name {number}"}, "shared": "Connect", "only": "English"},
            "de": {
                "title": {"name": f"Bezeichnung {number}"},
                "shared": "Verbinden" if number % 3 else "Anschliessen",
            },
        }
        for number in range(200)
    }
    make_wheel(tmp_path / "app.whl", texts)
    counts = extract(tmp_path / "app.whl", "en", "de", tmp_path)
    assert sum(counts.values()) == 201
    assert all(counts.values())
    splits = {
        name: read_parallel(tmp_path / f"{name}.en", tmp_path / f"{name}.de") for name in counts
    }
    sources = {name: {source for source, _ in pairs} for name, pairs in splits.items()}
    assert not sources["train"] & (sources["valid"] | sources["test"])
    # The more frequent translation of the text that all components share, which is in train.
    assert ("Connect", "Verbinden") in splits["train"]
    assert all(s.split()[-1] == t.split()[-1] for s, t in splits["test"])


def test_a_file_that_is_no_wheel_is_named(tmp_path):
    (tmp_path / "page.whl").write_text("<html>")
    with pytest.raises(UsageError, match=r"page\.whl is not a readable wheel"):
        extract(tmp_path / "page.whl", "en", "de", tmp_path)
