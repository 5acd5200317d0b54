"""What scripts/inject_faults.py kills: commands on a toy corpus, and what they must make.

A reference holds what undisturbed runs made, and a stage compares with it what is there after a
kill, and after the run that follows.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from sentencepiece import SentencePieceProcessor

from moa_fairseq.checkpoints import load_checkpoint
from moa_fairseq.text.prepare import MANIFEST, MODEL

SCRIPTS = Path(__file__).resolve().parent
EPOCHS = 6
TRAIN_OPTIONS = [
    *("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128", "--encoder-layers", "1"),
    *("--decoder-layers", "1", "--max-tokens", "256", "--max-epoch", str(EPOCHS)),
    *("--warmup-updates", "20", "--lr", "5e-3", "--log-format", "simple", "--log-interval", "10"),
    *("--save-interval-updates", "7"),
]
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
TEXTS = (MANIFEST, MODEL, "raw/*", "pieces/*", "data/*.bin", "data/*.idx")
TEXTS += ("data/dict.*",)


@dataclass(frozen=True)
class Stage:
    """A command to kill.

    Attributes:
        command: what to run in a folder.
        set_up: make the folder of a round; its argument is the round's number.
        starts: True once the part of the command that is to be hit is under way.
        seconds: how long that part takes.
        aimed: what to wait for in addition, in rounds that aim at a write.
        whole: what is wrong with the files after a kill.
        same: what is wrong with the result, from the folder and the log of the last run.
    """

    command: Callable[[Path], List[Any]]
    set_up: Callable[[Path, int], None]
    starts: Callable[[Path, str], bool]
    seconds: float
    aimed: Optional[str]
    whole: Callable[[Path], Iterator[str]]
    same: Callable[[Path, str], Iterator[str]]


def start(command: List[Any], log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with open(log, "wb") as stream:
        return subprocess.Popen(
            [str(part) for part in command],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


def run(command: List[Any], log: Path) -> Tuple[int, str, float]:
    """Exit status, output and seconds."""
    begin = time.monotonic()
    status = start(command, log).wait()
    return status, log.read_text(encoding="utf-8", errors="replace"), time.monotonic() - begin


def parameters(path: Path) -> Tuple[int, str]:
    """Updates, and a digest of the parameters and the optimizer's state, of a whole checkpoint."""
    state = load_checkpoint(path)
    digest = hashlib.sha256()
    for name, tensor in state["model"].items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    for entry in state.get("last_optimizer_state", {}).get("state", {}).values():
        for name in ("exp_avg", "exp_avg_sq"):
            digest.update(entry[name].numpy().tobytes())
    digest.update(str(state["extra_state"].get("best")).encode())
    return state["optimizer_history"][-1]["num_updates"], digest.hexdigest()


def contents(folder: Path, *patterns: str) -> Dict[str, str]:
    """Digests of files by name; of a SentencePiece model, which names its folder, of its pieces."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(content(path)).hexdigest()
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
    }


def content(path: Path) -> bytes:
    if path.name == MODEL:
        model = SentencePieceProcessor(model_file=str(path))
        pieces = [(model.id_to_piece(i), model.get_score(i)) for i in range(len(model))]
        return json.dumps(pieces).encode()
    if path.name == MANIFEST:
        manifest = json.loads(path.read_bytes())
        del manifest["outputs"][MODEL]
        return json.dumps(manifest).encode()
    return path.read_bytes()


def differences(found: Dict[str, Any], wanted: Dict[str, Any], what: str) -> Iterator[str]:
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            yield f"{what}: {name} is {'missing' if name not in found else 'not the same'}"


def temporaries(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if re.search(r"\.partial|\.tmp$|\.saving", path.name):
            yield f"left behind: {path.name}"


def write_corpus(folder: Path) -> None:
    for name, number in (("train", 500), ("valid", 20), ("test", 200)):
        generator = random.Random(name)
        lines = [generator.choices(WORDS, k=generator.randint(2, 7)) for _ in range(number)]
        for language, text in (("en", lines), ("de", [line[::-1] for line in lines])):
            rows = "".join(" ".join(line) + "\n" for line in text)
            (folder / f"{name}.{language}").write_text(rows, encoding="utf-8")


def prepare_command(corpus: Path, out: Path, pieces: int = 30) -> List[Any]:
    return [
        *("bash", SCRIPTS / "prepare.sh", "--source-lang", "en", "--target-lang", "de"),
        *("--train", corpus / "train", "--valid", corpus / "valid", "--test", corpus / "test"),
        *("--vocab-size", pieces, "--out", out),
    ]


class Reference:
    """What undisturbed runs of each command make, and how long they take."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.folder = work / "reference"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        write_corpus(self.folder)
        self.other_text = self._prepare("other", 26)
        self.text = self._prepare("prepared", 30)
        self.prepare_seconds = self.seconds
        self._must(self.train_command(self.folder))
        trained = re.search(r"done training in ([0-9.]+) seconds", self.output)
        assert trained is not None
        self.train_seconds = float(trained[1])
        self.trajectory = dict(map(parameters, (self.folder / "run").glob("*.pt")))
        self.checkpoints = sorted(path.name for path in (self.folder / "run").glob("*.pt"))
        self.last = max(self.trajectory)
        self._must(self.average_command(self.folder))
        self.average_seconds = self.seconds
        self.average = parameters(self.folder / "average/average.pt")[1]
        self._must(self.evaluate_command(self.folder))
        self.scores = self.score_texts(self.folder)
        made = [self.folder / f"scores/test.{end}" for end in ("generate.txt", "json")]
        average = self.folder / f"run/checkpoint.avg{EPOCHS}.pt"
        moments = [path.stat().st_mtime for path in (average, *made)]
        self.generate_seconds = moments[1] - moments[0]
        self.score_seconds = moments[2] - moments[1]
        average.unlink()

    def _must(self, command: List[Any]) -> None:
        status, self.output, self.seconds = run(command, self.folder / "log")
        if status != 0:
            sys.exit(f"{command[1]} fails without any fault: {self.output[-2000:]}")

    def _prepare(self, name: str, pieces: int) -> Dict[str, str]:
        self._must(prepare_command(self.folder, self.folder / name, pieces))
        return contents(self.folder / name, *TEXTS)

    def train_command(self, folder: Path) -> List[Any]:
        return [
            *("bash", SCRIPTS / "train.sh", "--data", self.folder / "prepared/data"),
            *("--save-dir", folder / "run", "--", *TRAIN_OPTIONS, "--keep-last-epochs", EPOCHS),
        ]

    def average_command(self, folder: Path) -> List[Any]:
        return [
            *("moa-average-checkpoints", "--inputs", self.folder / "run"),
            *("--num-epoch-checkpoints", EPOCHS, "--output", folder / "average/average.pt"),
        ]

    def evaluate_command(self, folder: Path) -> List[Any]:
        return [
            *("bash", SCRIPTS / "evaluate.sh", "--prepared", self.folder / "prepared"),
            *("--save-dir", folder / "run", "--out", folder / "scores", "--average", EPOCHS),
        ]

    def score_texts(self, folder: Path) -> Dict[str, Any]:
        """Everything in a folder of scores that does not name the folder or the time it took."""
        scores = folder / "scores"
        found: Dict[str, Any] = contents(scores, "test.hypotheses.txt", "test.txt")
        if (scores / "test.json").exists():
            report = json.loads((scores / "test.json").read_text(encoding="utf-8"))
            found["test.json"] = {key: report[key] for key in ("bleu", "chrf", "settings")}
        generated = scores / "test.generate.txt"
        if generated.exists():
            lines = generated.read_text(encoding="utf-8").splitlines()
            found["test.generate.txt"] = [line for line in lines if line[:2] in ("D-", "H-", "P-")]
        return found

    def wrong_checkpoints(self, folder: Path) -> Iterator[str]:
        for path in (folder / "run").glob("*.pt"):
            if path.name.startswith("checkpoint.avg"):
                continue
            try:
                updates, digest = parameters(path)
            except SystemExit as error:
                yield f"half written: {error}"
                continue
            if self.trajectory.get(updates) != digest:
                yield f"{path.name}: other parameters after {updates} updates"

    def newest(self, folder: Path) -> int:
        return max((parameters(path)[0] for path in (folder / "run").glob("*.pt")), default=0)

    def wrong_training(self, folder: Path, log: str) -> Iterator[str]:
        yield from self.wrong_checkpoints(folder)
        yield from temporaries(folder)
        have = {path.name for path in (folder / "run").glob("*.pt")}
        yield from (f"{name} is missing" for name in set(self.checkpoints) - have)
        for name in ("checkpoint_last.pt", "checkpoint_best.pt"):
            if name in have:
                wanted = parameters(self.folder / "run" / name)
                if parameters(folder / "run" / name) != wanted:
                    yield f"{name} is not that of the undisturbed run"

    def stages(self) -> Dict[str, Stage]:
        def empty(folder: Path, number: int) -> None:
            folder.mkdir(parents=True)

        def trained(folder: Path, number: int) -> None:
            folder.mkdir(parents=True)
            shutil.copytree(self.folder / "run", folder / "run")

        def prepared_before(folder: Path, number: int) -> None:
            folder.mkdir(parents=True)
            if number % 2:
                shutil.copytree(self.folder / "other", folder / "prepared")

        def generated(folder: Path, number: int) -> None:
            trained(folder, number)
            if number % 2 == 0:  # only the scores are left to make
                shutil.copytree(self.folder / "scores", folder / "scores")
                for end in ("txt", "md", "json", "hypotheses.txt"):
                    (folder / f"scores/test.{end}").unlink()

        def training(folder: Path, log: str) -> bool:
            return "begin training epoch" in log or "Start iterating" in log

        def translated(folder: Path, log: str) -> bool:
            return (folder / "scores/test.generate.txt.key").exists()

        def whole_average(folder: Path) -> Iterator[str]:
            path = folder / "average/average.pt"
            if path.exists() and parameters(path)[1] != self.average:
                yield "average.pt is not whole"

        def whole_scores(folder: Path) -> Iterator[str]:
            found = self.score_texts(folder)
            yield from differences(found, {n: self.scores[n] for n in found}, "after the kill")

        def whole_text(folder: Path) -> Iterator[str]:
            out = folder / "prepared"
            if (out / MANIFEST).exists():
                found = contents(out, MANIFEST, MODEL, "raw/*", "pieces/*")
                wanted = [
                    {name: text[name] for name in text if not name.startswith("data/")}
                    for text in (self.text, self.other_text)
                ]
                if found not in wanted:
                    yield "there is a manifest, but the text is not whole"
            if (out / "data").exists():
                found = contents(out, "data/*.bin", "data/*.idx", "data/dict.*")
                wanted = [
                    {name: text[name] for name in text if name.startswith("data/")}
                    for text in (self.text, self.other_text)
                ]
                if found not in wanted:
                    yield "data/ is not whole"

        def same_average(folder: Path, log: str) -> Iterator[str]:
            yield from whole_average(folder)
            yield from temporaries(folder)

        def same_scores(folder: Path, log: str) -> Iterator[str]:
            yield from differences(self.score_texts(folder), self.scores, "scores")
            yield from temporaries(folder)

        def same_text(folder: Path, log: str) -> Iterator[str]:
            found = contents(folder / "prepared", *TEXTS)
            yield from differences(found, self.text, "prepared")
            yield from temporaries(folder)

        def always(folder: Path, log: str) -> bool:
            return True

        def averaged(folder: Path, log: str) -> bool:
            return (folder / f"run/checkpoint.avg{EPOCHS}.pt").exists()

        def prepare(folder: Path) -> List[Any]:
            return prepare_command(self.folder, folder / "prepared")

        train = (self.train_command, empty, training)
        checks = (self.wrong_checkpoints, self.wrong_training)
        return {
            "training": Stage(*train, self.train_seconds, None, *checks),
            "saving": Stage(*train, self.train_seconds, "run/.*partial*", *checks),
            "averaging": Stage(
                *(self.average_command, empty, always, self.average_seconds),
                *("average/.*partial*", whole_average, same_average),
            ),
            "generating": Stage(
                *(self.evaluate_command, trained, averaged, self.generate_seconds),
                *("scores/*.partial", whole_scores, same_scores),
            ),
            "scoring": Stage(
                *(self.evaluate_command, generated, translated, self.score_seconds),
                *("scores/.*partial*", whole_scores, same_scores),
            ),
            "preparing": Stage(
                *(prepare, prepared_before, always, self.prepare_seconds),
                *("prepared/data.partial*/*", whole_text, same_text),
            ),
        }
