"""The WMT14 preparation through its real commands, on archives of the real names and layout."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fairseq.data import Dictionary
from fairseq.data.data_utils import load_indexed_dataset

from moa_fairseq.text.wmt14 import miniature
from moa_fairseq.text.wmt14.archives import PAIRS

from ..paths import ROOT, SHARED
from .commands import BIN, last_line, run, script

SYLLABLES = {"en": "thowrngstea", "de": "schreiungbt", "fr": "oueaitlnsqé"}


def write_text(folder, pair, sizes):
    for language in PAIRS[pair].languages:
        generator = random.Random(language)
        letters = SYLLABLES[language]
        words = ["".join(generator.choices(letters, k=4)) for _ in range(99)]
        for split, lines in sizes.items():
            sentences = [
                " ".join(generator.choices(words, k=2 + number % 6)) + ", it's well-done."
                for number in range(lines)
            ]
            text = "".join(line + "\n" for line in sentences)
            (folder / f"{split}.{language}").write_text(text, encoding="utf-8")


def make_archives(pair, folder):
    """A pair's name, a text, and the miniature archives made of it."""
    write_text(folder, pair, {"train": 4000, "valid": 31, "test": 23})
    miniature.build(pair, folder, folder / "archives")
    return pair, folder, folder / "archives"


@pytest.fixture(scope="module", params=["en-de", "en-fr"])
def both_pairs(request, tmp_path_factory):
    return make_archives(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return make_archives("en-de", tmp_path_factory.mktemp("one-pair"))


def arguments(archives, out, recipe="clinic", *more):
    pair, _, folder = archives
    return [
        *("--pair", pair, "--recipe", recipe, "--out", out, "--vocab-size", "60"),
        *("--checksums", folder / miniature.CHECKSUMS, *more),
    ]


def digests(out):
    """What the preparation made, without what only this run needs."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
        and path.parts[len(out.parts)] not in ("archives", "data", "work")
        and path.name not in (".lock", ".prepared.json", "preprocess.log")
    }


@pytest.mark.parametrize("recipe", ["sentencepiece", "clinic"])
def test_archives_become_data(both_pairs, tmp_path, recipe):
    pair, text, folder = both_pairs
    source_lang, target_lang = pair.split("-")
    command = arguments(both_pairs, tmp_path / "out", recipe, "--from-dir", folder)
    script("prepare_wmt14.sh", *command)
    out = tmp_path / "out"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["options"]["recipe"] == recipe
    held_out = 3 if pair == "en-fr" else 0
    assert sum(manifest["pairs"]["train"].values()) == 4000 - held_out
    assert manifest["pairs"]["train"]["kept"] > 3900
    assert manifest["pairs"]["test"]["kept"] == 23
    for language in (source_lang, target_lang):
        assert (out / f"raw/test.{language}").read_bytes() == (
            text / f"test.{language}"
        ).read_bytes()
        if recipe == "clinic":
            tokenised = (out / f"tokenised/test.{language}").read_text(encoding="utf-8")
            assert tokenised.count(" well @-@ done .") == 23
            pieces = (out / f"pieces/test.{language}").read_text(encoding="utf-8")
            assert pieces.replace("@@ ", "") == tokenised
    if pair == "en-fr":
        # Every 1333rd line is held out.
        lines = (text / "train.fr").read_text(encoding="utf-8").splitlines()
        valid = (out / "raw/valid.fr").read_text(encoding="utf-8").splitlines()
        assert valid == lines[1332::1333]
    assert not (out / "work").exists()
    dictionary = Dictionary.load(str(out / f"data/dict.{target_lang}.txt"))
    binarised = load_indexed_dataset(str(out / f"data/train.{pair}.{target_lang}"), dictionary)
    pieces = (out / f"pieces/train.{target_lang}").read_text(encoding="utf-8").splitlines()
    assert len(binarised) == len(pieces)
    for number in (0, 1777, len(pieces) - 1):
        assert dictionary.string(binarised[number]) == pieces[number]

    data = out / f"data/train.{pair}.{source_lang}.bin"
    before = data.stat().st_mtime_ns
    again = script("prepare_wmt14.sh", *command)
    assert "is up to date" in again.stderr
    assert data.stat().st_mtime_ns == before


def prepare(archives, out, *more, **keywords):
    return run("moa-prepare-wmt14", *arguments(archives, out), *more, **keywords)


def test_neither_workers_nor_shards_nor_the_way_in_change_what_comes_out(both_pairs, tmp_path):
    folder = both_pairs[2]
    prepare(both_pairs, tmp_path / "one", "--from-dir", folder, "--workers", "1")
    prepare(both_pairs, tmp_path / "two", "--from-dir", folder, "--shard-lines", "170")
    expected = digests(tmp_path / "one")
    assert len(expected) > 8
    assert digests(tmp_path / "two") == expected
    # Texts that lie unpacked, as the archives' paths have them or side by side.
    flat = tmp_path / "flat"
    flat.mkdir()
    for name in folder.glob("training-*"):
        subprocess.run(["tar", "-C", flat, "-xf", name], check=True)
    for path in [path for path in flat.rglob("*") if path.is_file()]:
        if "news" in path.name:
            path.rename(flat / path.name)
    for name in ("dev.tgz", "test-full.tgz"):
        if (folder / name).exists():
            shutil.copy(folder / name, flat)
    prepare(both_pairs, tmp_path / "three", "--from-dir", flat)
    found = digests(tmp_path / "three")
    manifests = [
        json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "three")
    ]
    assert manifests[0].pop("inputs") != manifests[1].pop("inputs")
    assert manifests[0] == manifests[1]
    assert {**found, "manifest.json": expected["manifest.json"]} == expected


# Runs the preparation in a child again and again, each time killed just before or after another
# of the moments at which a file gets its name, until a run comes through.
KILLER = """
import multiprocessing, os, signal, sys
from pathlib import Path
from moa_fairseq.cli.prepare_wmt14 import main

replace, moments = os.replace, multiprocessing.Value("i", 0)

def child(moment, after, arguments):
    os.setsid()
    def counted(source, target):
        with moments.get_lock():
            moments.value += 1
            last = moments.value == moment
        if last and not after:
            os.killpg(0, signal.SIGKILL)
        replace(source, target)
        if last:
            os.killpg(0, signal.SIGKILL)
    os.replace = counted
    main(arguments)
    os._exit(0)

out, stride, arguments = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
early = []
for moment in range(1, 500, stride):
    for after in (False, True) if stride == 1 else (moment % 2 == 0,):
        moments.value = 0
        pid = os.fork()
        if pid == 0:
            child(moment, after, [*arguments, "--out", f"{out}/{moment}-{after}"])
        killed = os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        if killed and not after and Path(f"{out}/{moment}-{after}/manifest.json").exists():
            early.append(moment)
        if killed:
            pid = os.fork()
            if pid == 0:
                child(0, after, [*arguments, "--out", f"{out}/{moment}-{after}"])
            if os.waitpid(pid, 0)[1] != 0:
                print("second run failed", moment, after)
    if not killed:
        print("moments", moment - stride, *early)
        break
"""


@pytest.mark.parametrize(
    ("pair", "stride"),
    [
        ("en-fr", 7),
        pytest.param("en-de", 1, marks=pytest.mark.slow),
        pytest.param("en-fr", 1, marks=pytest.mark.slow),
    ],
)
def test_killed_at_any_moment_a_second_run_makes_the_same(pair, stride, tmp_path):
    write_text(tmp_path, pair, {"train": 1400, "valid": 5, "test": 4})
    miniature.build(pair, tmp_path, tmp_path / "archives")
    small = (pair, tmp_path, tmp_path / "archives")
    prepare(small, tmp_path / "expected", "--from-dir", small[2])
    command = [
        *("--pair", pair, "--recipe", "clinic", "--vocab-size", "60", "--from-dir", small[2]),
        *("--checksums", small[2] / miniature.CHECKSUMS),
    ]
    (tmp_path / "runs").mkdir()
    result = run(sys.executable, "-c", KILLER, tmp_path / "runs", stride, *command)
    assert result.stdout.startswith("moments "), result.stdout
    moments, *early = map(int, result.stdout.split()[1:])
    assert moments > 25
    # The manifest says that the folder is whole; after it comes one note for the next run.
    assert set(early) <= {moments}
    runs = sorted((tmp_path / "runs").iterdir())
    expected = digests(tmp_path / "expected")
    for out in runs:
        assert digests(out) == expected, out.name


def test_killed_while_binarising_a_second_run_makes_the_same(archives, tmp_path):
    command = ["--from-dir", archives[2]]
    script("prepare_wmt14.sh", *arguments(archives, tmp_path / "whole", "clinic", *command))
    # A stand-in that leaves half of its output and has its shell killed, as by a lost machine.
    (tmp_path / "bin").mkdir()
    stub = tmp_path / "bin/fairseq-preprocess"
    stub.write_text(
        'for last; do [[ "$before" == --destdir ]] && folder="$last"; before="$last"; done\n'
        'mkdir -p "$folder"; echo half >"$folder/dict.en.txt"; kill -9 "$PPID"; sleep 1\n'
    )
    stub.write_text("#!/usr/bin/env bash\n" + stub.read_text())
    stub.chmod(0o755)
    command = arguments(archives, tmp_path / "cut", "clinic", *command)
    path = f"{tmp_path / 'bin'}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
    cut = script("prepare_wmt14.sh", *command, check=False, variables={"PATH": path})
    assert cut.returncode == -signal.SIGKILL
    assert list((tmp_path / "cut").glob("data.partial*")) and not (tmp_path / "cut/data").exists()
    script("prepare_wmt14.sh", *command)
    assert not list((tmp_path / "cut").glob("data.partial*"))
    whole = sorted((tmp_path / "whole/data").iterdir())
    for file in whole:
        if file.name != "preprocess.log":
            assert (tmp_path / "cut/data" / file.name).read_bytes() == file.read_bytes()
    assert len(whole) > 10


class Server(BaseHTTPRequestHandler):
    """Serves a folder with ranges; `trouble` says what goes wrong the first time."""

    folder: Path
    trouble = ""
    requests: list

    def do_GET(self):
        self.requests.append((self.path, self.headers.get("Range")))
        path = self.folder / Path(self.path).name
        if not path.exists():
            self.send_error(404)
            return
        content = path.read_bytes()
        first = self.trouble and [r for r, _ in self.requests].count(self.path) == 1
        if first and self.trouble == "page":
            content = b"<html><body>This site has moved</body></html>"
        start = 0
        asked = self.headers.get("Range")
        if asked and self.trouble != "no ranges":
            start = int(asked[len("bytes=") : -1])
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if first and self.trouble in ("broken", "no ranges"):
            self.wfile.write(content[start : len(content) // 2])
            return
        for position in range(start, len(content), 2000):
            self.wfile.write(content[position : position + 2000])
            if self.trouble == "slow":
                time.sleep(0.01)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(archives):
    handler = type("Handler", (Server,), {"folder": archives[2], "requests": []})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    handler.address = f"http://127.0.0.1:{running.server_address[1]}/files"
    yield handler
    running.shutdown()


@pytest.mark.parametrize("trouble", ["", "broken", "no ranges"])
def test_downloads_go_on_where_they_broke_off(archives, server, tmp_path, trouble):
    server.trouble = trouble
    prepare(archives, tmp_path, variables={"MOA_WMT14_BASE_URL": server.address})
    names = sorted(path.name for path in archives[2].iterdir() if path.suffix in (".tgz", ".tar"))
    assert sorted({Path(path).name for path, _ in server.requests}) == names
    ranges = [asked for _, asked in server.requests]
    halves = [f"bytes={(archives[2] / name).stat().st_size // 2}-" for name in names]
    assert sorted(filter(None, ranges)) == (sorted(halves) if trouble else [])
    for name in names:
        assert (tmp_path / "archives" / name).read_bytes() == (archives[2] / name).read_bytes()


def test_a_killed_download_goes_on(archives, server, tmp_path):
    server.trouble = "slow"
    command = [BIN / "moa-prepare-wmt14", *arguments(archives, tmp_path)]
    command = [str(part) for part in [*command, "--base-url", server.address]]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "archives").glob("*.partial")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    server.trouble = ""
    server.requests.clear()
    prepare(archives, tmp_path, "--base-url", server.address)
    assert len([asked for _, asked in server.requests if asked]) <= 1
    assert (tmp_path / "manifest.json").exists()
    assert not list((tmp_path / "archives").glob("*.partial"))


def test_what_cannot_be_downloaded_is_named(archives, server, tmp_path):
    server.trouble = "page"
    result = prepare(archives, tmp_path, "--base-url", server.address, check=False)
    assert "is a web page, not an archive" in last_line(result)
    result = prepare(archives, tmp_path, "--base-url", server.address + "/../x?", check=False)
    assert "training-parallel-europarl-v7.tgz" in last_line(result)
    assert not (tmp_path / "work").exists()
    sums = (archives[2] / miniature.CHECKSUMS).read_text()
    (tmp_path / "sums").write_text(sums.replace("0", "1"))
    command = ["--checksums", tmp_path / "sums", "--base-url", server.address]
    server.trouble = ""
    result = prepare(archives, tmp_path, *command, check=False)
    assert "is not the expected file" in last_line(result)
    assert not list((tmp_path / "archives").glob("*.tgz*"))


def test_two_runs_in_one_folder_do_not_mix(archives, server, tmp_path):
    server.trouble = "slow"
    command = [BIN / "moa-prepare-wmt14", *arguments(archives, tmp_path)]
    command = [str(part) for part in [*command, "--base-url", server.address]]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT)
    try:
        while not list((tmp_path / "archives").glob("*.partial")):
            time.sleep(0.05)
        os.kill(first.pid, signal.SIGSTOP)
        result = prepare(archives, tmp_path, "--from-dir", archives[2], check=False)
        assert "another run is at work there" in last_line(result)
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize(("pair", "recipe"), [("en-de", "sentencepiece"), ("en-fr", "clinic")])
def test_real_text(pair, recipe, tmp_path):
    text = SHARED / f"data/newstest-{pair}"
    if not text.is_dir():
        pytest.skip(f"no {text}; MOA_SHARED names the folder of corpora and references")
    miniature.build(pair, text, tmp_path / "archives", 9000)
    out = tmp_path / "out"
    run(
        "moa-prepare-wmt14",
        *("--pair", pair, "--recipe", recipe, "--out", out, "--vocab-size", "3000"),
        *("--from-dir", tmp_path / "archives"),
        *("--checksums", tmp_path / "archives" / miniature.CHECKSUMS),
    )
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["pairs"]["test"]["kept"] == 3003
    assert sum(manifest["pairs"][file.name]["read"] for file in PAIRS[pair].corpora) == 9000
    for language in pair.split("-"):
        given = (text / f"test.{language}").read_text(encoding="utf-8").split("\n")[:-1]
        raw = (out / f"raw/test.{language}").read_text(encoding="utf-8").split("\n")[:-1]
        assert raw == [" ".join(line.split()) for line in given]
    reference = SHARED / "reference/moses" / f"{pair}.{pair[-2:]}.normalised.tok"
    if recipe == "clinic" and pair == "en-de":
        assert (out / "tokenised/valid.de").read_bytes() == reference.read_bytes()
