from __future__ import annotations

import hashlib
import json
import zipfile

import pytest
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode, get_encoder

from moa_fairseq.cli.prepare_wikitext103 import main
from moa_fairseq.errors import UsageError
from moa_fairseq.text.wikitext103.prepare import MODEL, cut_text

TEXT = {
    "train": [" = Title = ", "", *(f"the cat {number} sat on the mat , " for number in range(60))],
    "valid": ["the mat sat", "", "a cat été"],
    "test": ["the cat", "sat\u2028on\rthe mat"],
}


def write_texts(folder, name="wiki.{split}.raw", text=TEXT):
    folder.mkdir(parents=True, exist_ok=True)
    for split, lines in text.items():
        content = "".join(line + "\n" for line in lines)
        (folder / name.format(split=split)).write_bytes(content.encode())


def write_gpt2(folder):
    """Subwords of GPT-2's kind: all bytes, and a few merges."""
    merges = [("t", "h"), ("th", "e"), ("a", "t"), ("c", "at"), ("Ġ", "the")]
    types = [*bytes_to_unicode().values(), *("".join(merge) for merge in merges)]
    encoder = {piece: number for number, piece in enumerate(types)}
    (folder / "encoder.json").write_text(json.dumps(encoder))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "vocab.bpe").write_text("\n".join(lines) + "\n")


def write_archive(folder):
    folder.mkdir(exist_ok=True)
    write_gpt2(folder)
    with zipfile.ZipFile(folder / "wikitext-103-raw-v1.zip", "w") as archive:
        for split, lines in TEXT.items():
            content = "".join(line + "\n" for line in lines)
            archive.writestr(f"wikitext-103-raw/wiki.{split}.raw", content)
    write_checksums(folder)


def write_checksums(folder):
    names = ("wikitext-103-raw-v1.zip", "encoder.json", "vocab.bpe")
    (folder / "SHA256SUMS").write_text(
        "".join(
            f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
            for name in names
        )
    )


def prepare(folder, out, *options):
    sums = ["--checksums", str(folder / "SHA256SUMS")] if (folder / "SHA256SUMS").exists() else []
    main(["--from-dir", str(folder), "--out", str(out), "--workers", "1", *sums, *options])
    return json.loads((out / "manifest.json").read_text())


PIECES = ("--recipe", "sentencepiece", "--vocab-size", "30", "--character-coverage", "1.0")


def test_the_archive_becomes_gpt2s_subwords_line_for_line(tmp_path):
    write_archive(tmp_path / "in")
    manifest = prepare(tmp_path / "in", tmp_path / "out")
    bpe = get_encoder(str(tmp_path / "in/encoder.json"), str(tmp_path / "in/vocab.bpe"))
    for split, lines in TEXT.items():
        written = (tmp_path / f"out/pieces/{split}").read_text(encoding="utf-8").split("\n")[:-1]
        assert [bpe.decode(map(int, line.split())) for line in written] == [
            line.strip() for line in lines
        ]
        assert written == [" ".join(map(str, bpe.encode(line.strip()))) for line in lines]
    counts = manifest["splits"]["valid"]
    assert (counts["lines"], counts["blank"], counts["words"]) == (3, 1, 6)
    assert manifest["lines are WikiText-103's"] == {"train": False, "valid": False, "test": False}


def test_the_dictionary_has_all_of_gpt2s_subwords(tmp_path):
    write_archive(tmp_path / "in")
    prepare(tmp_path / "in", tmp_path / "out")
    dictionary = Dictionary.load(str(tmp_path / "out/dict.txt"))
    known = json.loads((tmp_path / "in/encoder.json").read_text())
    assert all(str(number) in dictionary for number in known.values())
    assert len(dictionary) % 8 == 0 and len(dictionary) - len(known) - 4 < 8
    # The most frequent first: " the" stands twice in each of sixty lines, at their begin without
    # the blank.
    counts = (tmp_path / "out/pieces/train").read_text().split()
    assert dictionary.symbols[4] == max(set(counts), key=counts.count)


def test_all_of_openais_subwords_would_make_robertas_50265_types():
    types = 50257 + 4  # fairseq's own
    assert types + -types % 8 + 1 == 50265  # <mask>


@pytest.mark.parametrize(
    "name", ["wiki.{split}.tokens", "wikitext-103/wiki.{split}.tokens", "{split}.txt", "{split}.en"]
)
def test_texts_of_ones_own_are_taken(tmp_path, name):
    (tmp_path / "in/wikitext-103").mkdir(parents=True)
    write_texts(tmp_path / "in", name)
    manifest = prepare(tmp_path / "in", tmp_path / "out", *PIECES)
    assert manifest["splits"]["train"]["lines"] == 62
    assert manifest["options"]["vocab_size"] == 30
    written = (tmp_path / "out/pieces/test").read_text(encoding="utf-8")
    assert written.count("\n") == 2


def test_neither_shards_nor_workers_change_what_comes_out(tmp_path):
    write_texts(tmp_path / "in")
    for name, options in (("one", ()), ("many", ("--shard-lines", "7", "--workers", "2"))):
        prepare(tmp_path / "in", tmp_path / name, *PIECES, *options)
    for name in ("pieces/train", "pieces/valid", "pieces/test", "sentencepiece.model"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()


def test_a_second_run_does_nothing_and_another_text_makes_other_pieces(tmp_path):
    write_texts(tmp_path / "in")
    prepare(tmp_path / "in", tmp_path / "out", *PIECES)
    made = [tmp_path / "out" / name for name in ("manifest.json", "pieces/train", MODEL)]
    before = [path.stat().st_mtime_ns for path in made]
    prepare(tmp_path / "in", tmp_path / "out", *PIECES)
    assert [path.stat().st_mtime_ns for path in made] == before
    write_texts(tmp_path / "in", text={**TEXT, "test": ["a mat"]})
    manifest = prepare(tmp_path / "in", tmp_path / "out", *PIECES)
    assert manifest["splits"]["test"]["lines"] == 1


def test_an_interrupted_run_goes_on(tmp_path, monkeypatch):
    write_texts(tmp_path / "in")
    prepare(tmp_path / "in", tmp_path / "whole", *PIECES, "--shard-lines", "7", "--keep-work")
    out = tmp_path / "whole"
    done = sorted((out / "work/pieces").glob("train.*"))
    # As if it had been killed after its first shard.
    for path in done[1:]:
        path.unlink()
        (out / "work/pieces/notes" / f"{path.name}.json").unlink()
    first = done[0].stat().st_mtime_ns
    wanted = (out / "pieces/train").read_bytes()
    for name in (".prepared.json", "manifest.json", "pieces/train"):
        (out / name).unlink()
    prepare(tmp_path / "in", out, *PIECES, "--shard-lines", "7", "--keep-work")
    assert (out / "pieces/train").read_bytes() == wanted
    assert (out / "work/pieces" / done[0].name).stat().st_mtime_ns == first


def test_the_download_is_what_is_on_record_or_refused(tmp_path, monkeypatch):
    """From an address of one's own, here a folder: GPT-2's files and the archive."""
    write_archive(tmp_path / "in")
    base = ["--base-url", (tmp_path / "in").as_uri(), "--out", str(tmp_path / "out")]
    with pytest.raises(UsageError, match=r"has [0-9,]+ bytes instead of 191,984,949"):
        main(base)
    assert not list((tmp_path / "out/archives").glob("*.zip*"))
    main([*base, "--checksums", str(tmp_path / "in/SHA256SUMS"), "--workers", "1"])
    assert (tmp_path / "out/archives/wikitext-103-raw-v1.zip").exists()
    assert (tmp_path / "out/pieces/train").read_text().count("\n") == 62
    usage = type("usage", (), {"free": 10**9})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(UsageError, match=r"about 3\.2 GB of disk are needed and 1\.0 GB are free"):
        main(["--out", str(tmp_path / "full")])


def damage(folder, how):
    path = folder / "wikitext-103-raw-v1.zip"
    if how == "cut":
        path.write_bytes(path.read_bytes()[:300])
        write_checksums(folder)
    elif how == "other":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("readme", "nothing")
        write_checksums(folder)
    elif how == "changed":
        path.write_bytes(path.read_bytes() + b"x")
    elif how == "page":
        path.write_bytes(b"<!DOCTYPE html><p>moved")
    elif how == "no subwords":
        (folder / "vocab.bpe").unlink()
    elif how == "bad subwords":
        (folder / "encoder.json").write_text("[")
        write_checksums(folder)


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("cut", "is damaged"),
        ("other", "is another archive"),
        ("changed", "is not the expected file"),
        ("page", "is a web page"),
        ("no subwords", "has no vocab.bpe, which --recipe gpt2 needs"),
        ("bad subwords", "are not GPT-2's subwords"),
    ],
)
def test_a_wrong_archive_is_refused(tmp_path, how, line):
    write_archive(tmp_path / "in")
    damage(tmp_path / "in", how)
    with pytest.raises(UsageError, match=line):
        prepare(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out/manifest.json").exists()


def test_the_line_that_is_not_utf8_is_named(tmp_path):
    write_texts(tmp_path / "in")
    with open(tmp_path / "in/wiki.valid.raw", "ab") as stream:
        stream.write(b"caf\xe9\n")
    with pytest.raises(UsageError, match=r"wiki.valid.raw: line 4 is not UTF-8 \(byte 0xe9\)"):
        prepare(tmp_path / "in", tmp_path / "out", *PIECES)


def test_shards_hold_each_line_once(tmp_path):
    (tmp_path / "x").write_text("".join(f"{number}\n" for number in range(10)) + "last")
    shards = cut_text("train", tmp_path / "x", 4)
    assert [line for shard in shards for line in shard.read()] == [*map(str, range(10)), "last"]
    assert [(shard.first, shard.lines) for shard in shards] == [(1, 4), (5, 4), (9, 3)]
