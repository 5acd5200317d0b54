"""A toy language pair that a small model learns in half a minute."""

from __future__ import annotations

import random
import socket

import pytest

from .commands import run, script

WORDS = {
    "zero": "null",
    "one": "eins",
    "two": "zwei",
    "three": "drei",
    "four": "vier",
    "five": "fünf",
    "six": "sechs",
    "seven": "sieben",
    "eight": "acht",
    "nine": "neun",
    "ten": "zehn",
    "red": "rot",
    "green": "grün",
    "blue": "blau",
    "house": "Haus",
    "tree": "Baum",
}

SMALL = [
    *("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128", "--encoder-layers", "1"),
    *("--decoder-layers", "1", "--dropout", "0", "--log-format", "simple"),
]


def sentences(number, seed):
    """Sentences of two to seven words, the translation word by word with the first word last."""
    generator = random.Random(seed)
    pairs = []
    for _ in range(number):
        words = generator.choices(list(WORDS), k=generator.randint(2, 7))
        german = [WORDS[word] for word in [*words[1:], words[0]]]
        pairs.append((" ".join(words), " ".join(german)))
    return pairs


def write_pairs(prefix, pairs):
    for side, language in enumerate(("en", "de")):
        text = "".join(pair[side] + "\n" for pair in pairs)
        prefix.with_name(f"{prefix.name}.{language}").write_text(text, encoding="utf-8")


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A prepared toy corpus: 3,000 training, 61 validation and 45 test pairs."""
    folder = tmp_path_factory.mktemp("toy")
    for name, number in (("train", 3000), ("valid", 61), ("test", 45)):
        write_pairs(folder / name, sentences(number, name))
    script(
        "prepare.sh",
        *("--source-lang", "en", "--target-lang", "de", "--vocab-size", "60"),
        *("--train", folder / "train", "--valid", folder / "valid", "--test", folder / "test"),
        *("--out", folder / "prepared"),
    )
    return folder


@pytest.fixture(scope="session")
def trained(toy):
    """Two models trained on the toy corpus by train.sh; the log of the first."""
    for seed in (1, 2):
        save_dir = toy / f"checkpoints{seed}"
        result = script(
            "train.sh",
            *("--data", toy / "prepared/data", "--save-dir", save_dir, "--", *SMALL),
            *("--max-epoch", "16", "--warmup-updates", "100", "--lr", "5e-3", "--seed", seed),
            *("--max-tokens", "1024", "--keep-last-epochs", "2", "--log-interval", "20"),
            *("--tensorboard-logdir", toy / f"tensorboard{seed}"),
        )
        (toy / f"train{seed}.log").write_text(result.stdout + result.stderr, encoding="utf-8")
    run(
        "moa-average-checkpoints",
        *("--inputs", toy / "checkpoints1", "--num-epoch-checkpoints", "2"),
        *("--output", toy / "average.pt"),
    )
    return toy


@pytest.fixture
def unused_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]
