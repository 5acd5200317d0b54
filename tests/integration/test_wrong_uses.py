"""Every row of the tables: a non-zero status, one clear line, nothing overwritten."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import zipfile

import pytest
import torch
from fairseq_cli import generate, hydra_train, interactive
from fairseq_cli import train as train_command

from moa_fairseq.cli import (
    average_checkpoints,
    benchmark,
    benchmark_growth,
    head_report,
    import_official,
    interface_texts,
    masked_perplexity,
    prepare,
    prepare_wikitext103,
    prepare_wmt14,
    profile,
    score,
    sweep,
    sweep_report,
    user_dir,
    wmt14_estimate,
    wmt14_miniature,
    wmt14_train_command,
)
from moa_fairseq.sweep.grid import Point, Size
from moa_fairseq.sweep.records import Settings, Sweep, write_sweep

from ..paths import PACKAGE, ROOT
from .commands import last_line, run, script, write_manifest
from .conftest import sentences, write_pairs
from .in_process import RECIPE, call, train
from .wrong_uses import USAGE, WRONG_USES, WrongUse
from .wrong_uses_of_fairseq import HYDRA_ITSELF, WRONG_USES_OF_FAIRSEQ
from .wrong_uses_of_masked_lm import WRONG_USES_OF_MASKED_LM

TRAIN = ["--user-dir", str(PACKAGE), "--save-dir", "{out}/run", "--max-update", "1", *RECIPE]
WITHOUT_BATCH_SIZE = [word for word in TRAIN if word not in ("--max-tokens", "1024")]
DENSE = ["--arch", "dense_transformer", "--criterion", "label_smoothed_cross_entropy"]
MASKED = [
    *("--user-dir", str(PACKAGE), "--task", "masked_lm", "--save-dir", "{out}/run", "--cpu"),
    *("--arch", "moa_masked_lm", "--criterion", "masked_lm_with_router_loss"),
    *("--tokens-per-sample", "64", "--encoder-layers", "1", "--encoder-embed-dim", "32"),
    *("--encoder-ffn-embed-dim", "32", "--encoder-attention-heads", "4", "--head-dim", "8"),
    *("--optimizer", "adam", "--lr", "1e-3", "--max-tokens", "512", "--max-update", "1"),
    *("--num-workers", "0"),
]
TRANSLATE = ["--user-dir", str(PACKAGE), "--cpu"]
HYDRA = [
    *("--config-dir", str(ROOT / "configs"), "--config-name", "moa_transformer_tiny"),
    *("task.data={data}", "common.cpu=true", "checkpoint.save_dir={out}/run"),
    *("++optimization.max_update=1", f"common.user_dir={PACKAGE}"),
]
PAIR = ["--pair", "en-de", "--size", "base"]

# What runs, in this process, and the arguments that come before those of a row.
COMMANDS = {
    "moa-prepare": (
        prepare.main,
        ["--source-lang", "en", "--target-lang", "de", "--out", "{out}/prepared"],
    ),
    "moa-prepare-wikitext103": (
        prepare_wikitext103.main,
        ["--out", "{out}/wikitext103", "--workers", "1"],
    ),
    "moa-masked-perplexity": (masked_perplexity.main, ["{masked}", "--cpu"]),
    "moa-masked-perplexity on": (masked_perplexity.main, ["--cpu"]),
    "moa-average-checkpoints": (average_checkpoints.main, ["--output", "{out}/average.pt"]),
    "moa-import-official": (import_official.main, []),
    "moa-score": (score.main, ["--report", "{out}/report"]),
    "moa-profile": (profile.main, ["--arch", "moa_transformer", "--vocab-size", "99"]),
    "moa-head-report": (head_report.main, ["--cpu", "--out", "{out}/heads"]),
    "benchmark.py": (benchmark.main, []),
    "benchmark_growth.py": (benchmark_growth.main, []),
    "moa-user-dir": (user_dir.main, []),
    "moa-prepare-wmt14": (
        prepare_wmt14.main,
        [
            *("--pair", "en-de", "--out", "{out}/wmt14", "--vocab-size", "60", "--workers", "1"),
            *("--checksums", "{archives}/SHA256SUMS"),
        ],
    ),
    "interface_texts": (
        interface_texts.main,
        ["--source-lang", "en", "--target-lang", "de", "--out", "{out}/texts"],
    ),
    "wmt14_miniature": (wmt14_miniature.main, ["--pair", "en-de", "--out", "{out}/miniature"]),
    "wmt14_estimate": (wmt14_estimate.main, PAIR),
    "wmt14_train_command": (
        wmt14_train_command.main,
        ["--prepared", "{prepared}", "--save-dir", "{out}/run", *PAIR],
    ),
    "sweep": (
        sweep.main,
        ["--root", str(ROOT), "--prepared", "{prepared}", "--out", "{out}/sweep"],
    ),
    "moa-sweep-report": (sweep_report.main, []),
    "fairseq-train": (train_command.cli_main, ["{data}", *TRAIN]),
    "fairseq-train on": (train_command.cli_main, TRAIN),
    "fairseq-train without a batch size": (
        train_command.cli_main,
        ["{data}", *WITHOUT_BATCH_SIZE],
    ),
    "fairseq-train a dense model": (train_command.cli_main, ["{data}", *TRAIN, *DENSE]),
    "fairseq-train a masked model": (train_command.cli_main, ["{masked}", *MASKED]),
    "fairseq-train a masked model on": (train_command.cli_main, MASKED),
    "fairseq-generate": (generate.cli_main, ["{data}", *TRANSLATE]),
    "fairseq-generate on": (generate.cli_main, TRANSLATE),
    "fairseq-interactive": (interactive.cli_main, ["{data}", *TRANSLATE]),
    "fairseq-hydra-train": (hydra_train.cli_main, HYDRA),
    "hydra": (hydra_train.cli_main, HYDRA),
}
# The scripts that need more than the row says.
SCRIPTS = {
    "evaluate.sh on prepared data": [
        *("--prepared", "{prepared}", "--save-dir", "{runs}/moa", "--out", "{out}"),
    ],
    "evaluate_masked_lm.sh on prepared data": [
        *("--prepared", "{masked}/prepared", "--save-dir", "{runs}/masked", "--out", "{out}"),
    ],
}


@pytest.fixture(scope="module")
def ground(toy, tmp_path_factory):
    """Folders of input, good and bad, and of output that is there already, by their names."""
    root = tmp_path_factory.mktemp("ground")
    folders = {
        name: root / name for name in ("texts", "runs", "datasets", "archives", "yaml", "out")
    }
    for folder in folders.values():
        folder.mkdir()
    write_texts(folders["texts"])
    write_yaml(folders["yaml"])
    write_output(folders["out"])
    write_archives(folders["archives"])
    prepared = root / "prepared"
    shutil.copytree(toy / "prepared", prepared)
    write_datasets(prepared / "data", folders["datasets"])
    train(toy, folders["runs"] / "moa", "--max-update", "1")
    train(toy, folders["runs"] / "dense", *DENSE, "--max-update", "1")
    masked = write_masked_data(prepared / "data", root / "masked")
    names = {"masked": masked, "root": root, "out": root, "texts": root}
    arguments = [word.format(**names) for word in MASKED]
    arguments += ["--save-dir", str(folders["runs"] / "masked")]
    assert call(train_command.cli_main, "fairseq-train", [masked, *arguments]).returncode == 0
    torch.save({"weights": torch.ones(3)}, folders["runs"] / "foreign.pt")
    (folders["runs"] / "other-data").mkdir()
    (folders["runs"] / "other-data/.data-checksum").write_text("1234 5")
    write_sweeps(folders["runs"])
    models = {name: folders["runs"] / name / "checkpoint_last.pt" for name in ("moa", "dense")}
    models["masked_moa"] = folders["runs"] / "masked/checkpoint_last.pt"
    data = {"prepared": prepared, "data": prepared / "data", "masked": masked}
    return root, {**folders, **models, **data}


def write_masked_data(data, folder):
    """Data for masked language models, of the English side: binarised, raw, and prepared."""
    prepared = folder / "prepared"
    (prepared / "data").mkdir(parents=True)
    (folder / "other").mkdir()
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").write_text("a cat sat on the mat\n" * 9)
        for suffix in ("bin", "idx"):
            source = data / f"{split}.en-de.en.{suffix}"
            for target in (folder, prepared / "data", folder / "other"):
                shutil.copy(source, target / f"{split}.{suffix}")
    for target in (folder, prepared / "data", folder / "other"):
        shutil.copy(data / "dict.en.txt", target / "dict.txt")
    with open(folder / "other/dict.txt", "a") as dictionary:
        dictionary.write("more 2\n")
    write_manifest(prepared, {"task": "masked_lm"})
    return folder


def write_texts(folder):
    write_pairs(folder / "good", sentences(200, 1))
    for name, text in (
        ("short.en", "one\ntwo\n"),
        ("short.de", "eins\n"),
        ("empty.en", ""),
        ("empty.de", ""),
        ("latin.en", "one\n" * 20),
        ("two", "a\nb\n"),
        ("three", "a\nb\nc\n"),
        ("pieces", "▁a\n▁b\n"),
        ("tokenised", "a .\nb .\n"),
        ("incomplete", "D-1\t-0.5\tb\n"),
    ):
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin.de").write_bytes("f\xfcnf\n".encode("latin-1") * 20)
    zipfile.ZipFile(folder / "empty.whl", "w").close()


def write_yaml(folder):
    good = (ROOT / "configs/moa_transformer_tiny.yaml").read_text()
    for name, old, new in (
        ("model_key", "  dropout: 0.2", "  dropout: 0.2\n  num_expertz: 3"),
        ("optimizer_key", "  adam_betas:", "  adam_betaz:"),
        ("dataset_key", "  max_tokens: 4096", "  max_tokens: 4096\n  max_tokenz: 3"),
        ("section", "checkpoint:", "extra:\n  key: 1\n\ncheckpoint:"),
    ):
        assert old in good
        (folder / f"{name}.yaml").write_text(good.replace(old, new))


def write_sweeps(folder):
    for name in ("sweep", "broken-sweep"):
        (folder / name).mkdir()
    settings = Settings([], "1 2", 5)
    write_sweep(folder / "sweep", Sweep(settings, [Point(Size(2, 4, 8), 1)], [], []))
    (folder / "broken-sweep/sweep.json").write_text("[]")


def write_output(folder):
    for name in ("prepared/raw", "prepared/pieces", "wmt14/raw", "data", "broken"):
        (folder / name).mkdir(parents=True)
    for name in (
        *("file", "average.pt", "report.txt", "report.md", "report.json", "data/precious"),
        *("report.hypotheses.txt", "prepared/manifest.json", "prepared/sentencepiece.model"),
        *("prepared/raw/train.en", "prepared/raw/train.de", "prepared/pieces/train.en"),
        *("wmt14/manifest.json", "wmt14/raw/test.en", "broken/manifest.json"),
    ):
        (folder / name).write_text("one\ntwo\n")


def write_archives(folder):
    wmt14_miniature.main(["--pair", "en-de", "--out", str(folder), "--train-lines", "200"])
    archives = sorted(path for path in folder.iterdir() if path.suffix in (".tgz", ".tar"))
    sums = (folder / "SHA256SUMS").read_text()
    (folder / "few").write_text(sums.split("\n")[0] + "\n")
    for name, content in (
        ("changed", lambda data: data[:-9]),
        ("page", lambda _: b"<!DOCTYPE html><p>moved"),
    ):
        (folder / name).mkdir()
        for path in archives:
            data = path.read_bytes()
            wrong = path.name == "test-full.tgz" or name == "page"
            (folder / name / path.name).write_bytes(content(data) if wrong else data)
        (folder / name / "SHA256SUMS").write_text(sums)


def write_datasets(data, folder):
    for name in ("nodict", "notrain", "novalid", "otherdict", "twodicts", "empty"):
        shutil.copytree(data, folder / name)
    (folder / "nodict/dict.de.txt").unlink()
    for name in ("train", "valid"):
        for path in (folder / f"no{name}").glob(f"{name}.*"):
            path.unlink()
    for language in ("en", "de"):
        with open(folder / f"otherdict/dict.{language}.txt", "a") as dictionary:
            dictionary.write("more 2\nmost 1\n")
    with open(folder / "twodicts/dict.de.txt", "a") as dictionary:
        dictionary.write("more 2\n")
    (folder / "none.en").touch()
    (folder / "none.de").touch()
    run(
        *("fairseq-preprocess", "--source-lang", "en", "--target-lang", "de"),
        *("--trainpref", folder / "none", "--destdir", folder / "nothing"),
        *("--srcdict", data / "dict.en.txt", "--tgtdict", data / "dict.de.txt"),
    )
    for path in (folder / "nothing").glob("train.*"):
        shutil.copy(path, folder / "empty" / path.name)


def contents(root):
    """Digest of every file, by its path; less what a run notes for itself, and its log."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix != ".log"
        # Of moa-prepare-wmt14, which goes on from there.
        and "work" not in path.parts
        and path.name != "verified.json"
    }


def perform(row, names):
    """What came of the command line of a row."""
    arguments = [part.format(**names) for part in shlex.split(row.arguments)]
    if row.command not in COMMANDS:
        base = [part.format(**names) for part in SCRIPTS.get(row.command, [])]
        return script(row.command.split()[0], *base, *arguments, check=False)
    main, base = COMMANDS[row.command]
    if "--config-dir" in arguments:
        base = base[4:]  # these options of hydra's may stand but once
    before = [part.format(**names) for part in base]
    # The row says which data; of what stands twice, the last counts.
    first, rest = (arguments[:1], arguments[1:]) if row.command.endswith(" on") else ([], arguments)
    return call(main, row.command.split()[0], [*first, *before, *rest], stdin="one\n")


@pytest.mark.parametrize(
    "row",
    [*WRONG_USES, *WRONG_USES_OF_FAIRSEQ, *WRONG_USES_OF_MASKED_LM],
    ids=lambda row: f"{row.command}-{row.arguments}",
)
def test_a_wrong_use_ends_in_one_line(ground, tmp_path, monkeypatch, row: WrongUse):
    root, names = ground
    monkeypatch.chdir(tmp_path)
    before = contents(root)
    result = perform(row, names)
    line = last_line(result)
    assert row.cause in line
    assert row.remedy in (result.stderr if row.remedy == USAGE else line)
    assert contents(root) == before


@pytest.mark.parametrize("row", HYDRA_ITSELF, ids=lambda row: row.arguments)
def test_what_hydra_refuses_itself(ground, tmp_path, monkeypatch, row: WrongUse):
    root, names = ground
    monkeypatch.chdir(tmp_path)
    before = contents(root)
    result = perform(row, names)
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    assert row.cause in result.stderr and row.remedy in result.stderr
    assert contents(root) == before


def test_hydra_in_a_process_of_its_own(ground, tmp_path):
    """There this package is loaded after hydra and fairseq have begun their work."""
    _, names = ground
    base = [part.format(**names) for part in HYDRA]
    for override, message in (
        ("+model.num_experts=2", "--num-experts 2 is fewer than"),
        ("task.data=/none", "/none: No such file or directory"),
    ):
        result = run("fairseq-hydra-train", *base, override, check=False, cwd=tmp_path)
        assert message in last_line(result)
        assert result.returncode == 1


# Of those who work on this package.
TOOLS = {"test.sh", "test_matrix.sh", "inject_faults.py"}
# What scripts source or import.
PARTS = {"environment.sh", "fault_stages.py"}


def test_every_command_and_script_is_in_the_tables():
    scripts = {path.name for path in (ROOT / "scripts").iterdir() if path.is_file()}
    commands = set(re.findall(r'"(moa-\S+) = ', (ROOT / "setup.py").read_text()))
    tables = [*WRONG_USES, *WRONG_USES_OF_FAIRSEQ, *WRONG_USES_OF_MASKED_LM]
    covered = {row.command.split()[0] for row in tables}
    assert (scripts - TOOLS - PARTS) | commands <= covered
