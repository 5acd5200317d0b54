"""The steps of the WMT14 preparation: slow references, other tools, and the recipe's rules."""

from __future__ import annotations

import gzip
import io
import random
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from sacrebleu.dataset import DATASETS

from moa_fairseq.cli.prepare_wmt14 import main
from moa_fairseq.errors import UsageError
from moa_fairseq.text.wmt14 import archives, estimates, fetching, shards, steps
from moa_fairseq.text.wmt14.archives import ARCHIVES, PAIRS, Archive
from moa_fairseq.text.wmt14.prepare import FILTERS
from moa_fairseq.text.wmt14.shards import Lengths, Shard, clean_shard, line_offsets


def test_the_text_sets_are_those_of_sacrebleu():
    for pair in PAIRS.values():
        name = "-".join(pair.languages)
        assert list(archives.members(pair, pair.test)) == DATASETS["wmt14/full"].langpairs[name]
    recorded = ARCHIVES["test-full.tgz"].digest
    assert recorded == f"md5:{DATASETS['wmt14/full'].md5[0]}"


def test_segments_are_read_as_sacrebleu_does(tmp_path):
    content = (
        '<refset setid="newstest2014" srclang="any" trglang="de">\n<doc docid="1">\n<hl>\n'
        '<seg id="1">Zwei  Anlagen &amp; mehr </seg>\n</hl>\n<p>\n'
        '<seg id="2"> A < B, "x" & y\u00a0z</seg>\n<seg id="3"></seg>\n</p>\n</doc>\n</refset>\n'
    )
    (tmp_path / "set.sgm").write_text(content, encoding="utf-8")
    DATASETS["wmt14/full"]._convert_format(str(tmp_path / "set.sgm"), str(tmp_path / "set.txt"))
    expected = (tmp_path / "set.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert archives.sgm_segments(content.split("\n")) == expected
    assert len(expected) == 3


@pytest.mark.parametrize("every", [1, 2, 3, 7])
def test_shards_start_where_lines_start(tmp_path, every):
    generator = random.Random(every)
    for case in range(30):
        path = tmp_path / f"{case}.txt"
        content = b"".join(
            bytes(generator.choices(b"ab\r\x00\xe2", k=generator.randint(0, 5))) + b"\n"
            for _ in range(generator.randint(0, 12))
        )
        content += b"" if case % 2 else b"no line feed"
        path.write_bytes(content)
        offsets, lines = line_offsets(path, every)
        starts = [0, *(index + 1 for index, byte in enumerate(content) if byte == 10)]
        starts = [start for start in starts if start < len(content)]
        assert lines == len(starts)
        assert offsets == starts[::every]


def shard_of(tmp_path, source, target, **changes):
    (tmp_path / "source").write_bytes(source)
    (tmp_path / "target").write_bytes(target)
    settings = {
        "languages": ("en", "de"),
        "recipe": "sentencepiece",
        "valid_every": None,
        "lengths": None,
        **changes,
    }
    files = (tmp_path / "source", tmp_path / "target")
    (shard,) = shards.cut([("corpus", files)], 1000, **settings)
    return shard


def text_of(shard, folder, split):
    return [
        shard.path(folder, split, language).read_bytes().decode().split("\n")[:-1]
        for language in shard.languages
    ]


@pytest.mark.parametrize("recipe", ["sentencepiece", "clinic"])
def test_what_breaks_lines_never_shifts_the_rest(tmp_path, recipe):
    lines = [
        (b"a 1", b"A 1"),
        (b"stray\rreturn 2", b"B 2\r"),
        (b"line\xe2\x80\xa8separator 3", b"C\xc2\x85 3"),
        (b"nul\x00 4", b"D\x0c 4"),
        (b"latin \xe4 5", b"E 5"),
        (b"", b"F 6"),
        (b"G 7", b" \t "),
        (b"\xef\xbb\xbflast 8", b"H 8"),
    ]
    shard = shard_of(
        tmp_path,
        b"\n".join(source for source, _ in lines) + b"\n",
        b"\n".join(target for _, target in lines),
        recipe=recipe,
    )
    assert clean_shard(shard, tmp_path) == {
        "read": 8,
        "not UTF-8": 1,
        "empty side": 2,
        "held out for validation": 0,
    }
    source, target = text_of(shard, tmp_path, "train")
    # Moses takes a carriage return away; the others make it a space.
    joined = "strayreturn 2" if recipe == "clinic" else "stray return 2"
    assert source == ["a 1", joined, "line separator 3", "nul 4", "last 8"]
    assert target == ["A 1", "B 2", "C 3", "D 4", "H 8"]


def test_sides_of_unequal_length_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"has 2 lines but .* has 1; line n of the one"):
        shard_of(tmp_path, b"a\nb\n", b"A\n")


def test_every_so_manieth_line_of_all_corpora_is_held_out_by_its_number(tmp_path):
    files = []
    for name, numbers in (("one", range(1, 11)), ("two", range(11, 16))):
        for side in "sc":
            path = tmp_path / f"{name}.{side}"
            # Line 4 is empty, and still counts.
            path.write_text("".join(f"{side} {n}\n" if n != 4 else "\n" for n in numbers))
            files.append(path)
    cut = shards.cut(
        [("one", tuple(files[:2])), ("two", tuple(files[2:]))],
        3,
        languages=("s", "c"),
        recipe="sentencepiece",
        valid_every=5,
        lengths=None,
    )
    assert [(shard.first, shard.lines) for shard in cut] == [
        (1, 3),
        (4, 3),
        (7, 3),
        (10, 1),
        (11, 3),
        (14, 2),
    ]
    counts = [clean_shard(shard, tmp_path) for shard in cut]
    assert sum(count["held out for validation"] for count in counts) == 3
    valid = [line for shard in cut for line in text_of(shard, tmp_path, "valid")[0]]
    train = [line for shard in cut for line in text_of(shard, tmp_path, "train")[1]]
    assert valid == ["s 5", "s 10", "s 15"]
    assert train == [f"c {n}" for n in range(1, 16) if n % 5 and n != 4]


@pytest.mark.parametrize(
    ("lengths", "source", "target", "reason"),
    [
        (FILTERS["en-de", "clinic"].words, 80, 80, None),
        (FILTERS["en-de", "clinic"].words, 81, 80, "too long"),
        (FILTERS["en-de", "clinic"].words, 9, 1, None),
        (FILTERS["en-de", "clinic"].words, 1, 10, "length ratio"),
        (FILTERS["en-fr", "clinic"].train, 250, 250, None),
        (FILTERS["en-fr", "clinic"].valid, 240, 251, "too long"),
        (FILTERS["en-fr", "clinic"].train, 30, 20, None),
        (FILTERS["en-fr", "clinic"].valid, 20, 31, "length ratio"),
    ],
)
def test_length_filters_of_the_recipes(lengths, source, target, reason):
    # The last blank is Moses' own, and no token.
    assert lengths.reason_to_drop("w " * source, " ".join(["w"] * target)) == reason


def test_where_each_recipe_filters():
    assert FILTERS["en-de", "clinic"].train is None
    assert FILTERS["en-fr", "clinic"].words is None
    assert FILTERS["en-de", "sentencepiece"].valid is None
    assert FILTERS["en-fr", "sentencepiece"].valid is None


@pytest.mark.parametrize(
    ("split", "line", "expected"),
    [
        # Training and validation text is normalised, then tokenised with hyphens parted.
        ("train", "Well-known: It’s “good”…", "Well @-@ known : It &apos;s &quot; good ... &quot;"),
        ("valid", "Well-known: It’s “good”…", "Well @-@ known : It &apos;s &quot; good ... &quot;"),
        # Test text has its right single quotes made straight, and nothing else.
        ("test", "Well-known: It’s “good”…", "Well @-@ known : It &apos;s “ good ” …"),
        ("test", "a|b [c] http://x.org/y-z 1,000.5", None),
    ],
)
def test_text_of_the_clinic_recipe(split, line, expected):
    if expected is None:
        expected = "a &#124; b &#91; c &#93; http : / / x.org / y @-@ z 1,000.5"
    made = (
        shards.text_line("clinic", "en")(line)
        if split == "train"
        else steps.set_line("clinic", "en", split, line)
    )
    assert made == expected


def test_text_of_the_sentencepiece_recipe_stays_raw():
    for split in ("valid", "test"):
        line = "Well-known: It’s\u00a0“good”…"
        assert steps.set_line("sentencepiece", "en", split, line) == "Well-known: It’s “good”…"


WORDS = [f"{a}{b}{c}" for a in "abcde" for b in "aeiou" for c in ("", "st", "ng", "ren")]


def some_text(seed, lines=300):
    generator = random.Random(seed)
    return [" ".join(generator.choices(WORDS, k=generator.randint(1, 12))) for _ in range(lines)]


def test_byte_pair_encoding_is_that_of_the_subword_nmt_command(tmp_path):
    source, target = some_text(1), some_text(2)
    (tmp_path / "text").write_text("".join(line + "\n" for line in source + target))
    command = [Path(sys.executable).parent / "subword-nmt"]
    with open(tmp_path / "text") as text, open(tmp_path / "codes", "w") as codes:
        subprocess.run([*command, "learn-bpe", "-s", "60"], stdin=text, stdout=codes, check=True)
    with open(tmp_path / "text") as text:
        applied = subprocess.run(
            [*command, "apply-bpe", "-c", tmp_path / "codes"],
            stdin=text,
            capture_output=True,
            check=True,
        ).stdout.decode()
    words = {}
    for line in source + target:
        for word in line.split():
            words[word] = words.get(word, 0) + 1
    steps.learn_codes(words, 60, tmp_path / "ours")
    assert (tmp_path / "ours").read_text() == (tmp_path / "codes").read_text()
    encode = shards.encoder("clinic", tmp_path / "ours")
    assert encode(source + target) == applied.split("\n")[:-1]


def test_encoding_drops_by_subwords_and_keeps_validation_text_in_line(tmp_path):
    text = some_text(3, 40)
    shard = shard_of(
        tmp_path,
        "".join(line + "\n" for line in text).encode(),
        "".join(
            f"{line} {line}\n" if n % 4 == 0 else f"{line}\n" for n, line in enumerate(text)
        ).encode(),
        recipe="clinic",
        valid_every=2,
    )
    clean_shard(shard, tmp_path)
    words = shards.count_words(shard, tmp_path)
    assert sum(words.values()) == sum(
        len(line.split()) for side in text_of(shard, tmp_path, "train") for line in side
    )
    steps.learn_codes(words, 20, tmp_path / "codes")
    out = tmp_path / "pieces"
    out.mkdir()
    limits = Lengths(1000, 1.5)
    counts = shards.encode_shard(shard, tmp_path, out, tmp_path / "codes", limits, limits)
    assert counts["train"] == {"kept": 10, "length ratio": 10} or counts["train"]["kept"] == 20
    for split in ("train", "valid"):
        assert sum(counts[split].values()) == 20
    pieces, tokenised, raw = (
        text_of(shard, out, split) for split in ("valid", "valid-text", "valid-raw")
    )
    assert [line.replace("@@ ", "") for line in pieces[1]] == tokenised[1] == raw[1]
    assert len(raw[0]) == counts["valid"]["kept"]


def archive_of(tmp_path, name, files):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz" if name.endswith("gz") else "w") as archive:
        for member, content in files.items():
            entry = tarfile.TarInfo(member)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    (tmp_path / name).write_bytes(packed.getvalue())
    return tmp_path / name


def test_unpacking_takes_what_is_wanted_and_names_what_is_missing(tmp_path):
    path = archive_of(
        tmp_path,
        "a.tgz",
        {"./x/one.en": b"1", "other": b"0" * 5000, "two.fr.gz": gzip.compress(b"2\n")},
    )
    wanted = {"x/one.en": tmp_path / "out/one.en", "two.fr.gz": tmp_path / "out/two.fr"}
    fetching.unpack(path, wanted)
    assert [target.read_bytes() for target in wanted.values()] == [b"1", b"2\n"]
    with pytest.raises(UsageError, match=r"a\.tgz holds no three\.de; it is another archive"):
        fetching.unpack(path, {"three.de": tmp_path / "three"})
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UsageError, match="is damaged"):
        fetching.unpack(path, {"other": tmp_path / "other"})
    assert not (tmp_path / "other").exists()


def test_a_wrong_file_is_named(tmp_path):
    path = tmp_path / "a.tgz"
    path.write_bytes(b"good")
    digest = "sha256:770e607624d689265ca6c44884d0807d9b054d23c473c106c72be9de08b7376c"
    fetching.verify(path, Archive("a.tgz", "", 4, digest))
    with pytest.raises(UsageError, match=r"a\.tgz has 4 bytes instead of 1,000"):
        fetching.verify(path, Archive("a.tgz", "", 1000, digest))
    path.write_bytes(b"evil")
    with pytest.raises(UsageError, match=r"a\.tgz is not the expected file: its sha256 is"):
        fetching.verify(path, Archive("a.tgz", "", 4, digest))
    path.write_bytes(b"\n<!DOCTYPE html><p>moved")
    with pytest.raises(UsageError, match=r"a\.tgz is a web page, not an archive"):
        fetching.verify(path, Archive("a.tgz", "", 4, digest))


def test_a_checksum_file_of_another_form_is_refused(tmp_path):
    good = tmp_path / "sums"
    good.write_text("a" * 64 + "  x/one.tgz\n" + "b" * 64 + " *two.tgz\n")
    assert fetching.read_checksums(good) == {
        "one.tgz": "sha256:" + "a" * 64,
        "two.tgz": "sha256:" + "b" * 64,
    }
    good.write_text("a" * 32 + "  one.tgz\n")
    with pytest.raises(UsageError, match=r"--checksums .*: line 1 is not of the form"):
        fetching.read_checksums(good)
    with pytest.raises(UsageError, match="No such file"):
        fetching.read_checksums(Path(tmp_path / "none"))


def test_the_disk_is_checked_before_the_start(tmp_path, monkeypatch, caplog):
    free = SimpleNamespace(total=0, used=0, free=76_000_000_000)
    monkeypatch.setattr(estimates.shutil, "disk_usage", lambda folder: free)
    caplog.set_level("INFO")
    for pair, needed in (("en-de", "9.4"), ("en-fr", "73.9")):
        download = sum(archive.size or 0 for archive in PAIRS[pair].archives())
        estimates.check_disk(tmp_path, download, PAIRS[pair].pairs * 300)
        assert f"needs about {needed} GB of disk; 76.0 GB are free" in caplog.text
    free.free = 73_800_000_000
    with pytest.raises(
        UsageError, match=r"about 73\.9 GB of disk are needed and 73\.8 GB are free"
    ):
        estimates.check_disk(tmp_path, download, PAIRS[pair].pairs * 300)


def test_a_full_disk_ends_the_preparation_before_any_download(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(estimates.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    monkeypatch.delenv("MOA_WMT14_CHECKSUMS", raising=False)
    with pytest.raises(SystemExit, match="GB of disk are needed"):
        main(["--pair", "en-fr", "--out", str(tmp_path)])
    assert not (tmp_path / "archives").exists()


def test_a_shard_is_not_trusted_when_what_it_depends_on_has_changed(tmp_path):
    shard = shard_of(tmp_path, b"a\nb\n", b"A\nB\n")
    calls = []

    def work(given: Shard, word: str) -> str:
        calls.append(word)
        return word

    note = tmp_path / "note"
    for key, word in (("k", "one"), ("k", "two"), ("other", "three")):
        result = shards._remembered(note, key, work, shard, [word])
    assert (calls, result) == (["one", "three"], "three")
