"""Wrong uses of the commands: a non-zero status, one clear line, nothing overwritten."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ..paths import PACKAGE, ROOT
from .commands import last_line, run, script
from .conftest import SMALL, sentences, write_pairs


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_pairs(folder / "good", sentences(200, 1))
    (folder / "short.en").write_text("one\ntwo\n")
    (folder / "short.de").write_text("eins\n")
    (folder / "empty.en").write_text("")
    (folder / "empty.de").write_text("")
    (folder / "latin.en").write_text("one\n" * 20)
    (folder / "latin.de").write_bytes("f\xfcnf\n".encode("latin-1") * 20)
    return folder


PREPARE = [
    (["--train", "{}/missing"], "missing.en: no such file"),
    (["--train", "{}/short"], "has 2 lines but"),
    (["--train", "{}/empty"], "is empty"),
    (["--train", "{}/latin"], "line 1 is not UTF-8 (byte 0xfc)"),
    (["--train", "{}/good", "--vocab-size", "999999"], "--vocab-size 999999"),
    (["--train", "{}/good", "--vocab-size", "many"], "invalid int value: 'many'"),
    (["--train", "{}/good", "--vocab-size", "-1"], "--vocab-size -1"),
    (["--train", "{}/good", "--valid", "{}/none"], "none.en: no such file"),
    (["--train", "{}/good", "--hold-out", "5000"], "lower --hold-out"),
    (["--train-source", "{}/good.en"], "both --train-source and --train-target"),
    (["--trian", "{}/good"], "unrecognized arguments: --trian"),
]


@pytest.mark.parametrize("arguments,message", PREPARE, ids=[m for _, m in PREPARE])
def test_prepare(texts, tmp_path, arguments, message):
    result = script(
        "prepare.sh",
        *("--source-lang", "en", "--target-lang", "de", "--out", tmp_path / "out"),
        *(argument.format(texts) for argument in arguments),
        check=False,
    )
    assert message in last_line(result)
    assert not (tmp_path / "out/data").exists()


TRAIN = [
    (["--num-experts", "2"], "--num-experts 2 is fewer than --encoder-attention-heads 4"),
    (["--head-dim", "0"], "--head-dim 0"),
    (["--moa-modules", "self"], "--moa-modules 'self'"),
    (["--load-balance-weight", "-1"], "--load-balance-weight -1"),
    (["--gate-normalization", "sum"], "invalid choice: 'sum'"),
    (["--num-expertz", "2"], "unrecognized arguments: --num-expertz"),
    (["--sample-topk", "7"], "--sample-topk 7"),
]


@pytest.mark.parametrize("arguments,message", TRAIN, ids=[m for _, m in TRAIN])
def test_train(toy, tmp_path, arguments, message):
    result = script(
        "train.sh",
        *("--data", toy / "prepared/data", "--save-dir", tmp_path, "--", *SMALL),
        *("--max-update", "1", *arguments),
        check=False,
    )
    assert message in last_line(result)
    assert not list(tmp_path.glob("*.pt"))


def test_scripts_name_what_is_missing(tmp_path):
    for name, arguments, message in (
        ("train.sh", ["--data", tmp_path, "--save-dir", tmp_path], "holds no dictionary"),
        ("train.sh", ["--dta", tmp_path], "unknown option --dta"),
        ("train.sh", ["--data"], "needs a value"),
        (
            "evaluate.sh",
            ["--prepared", tmp_path, "--save-dir", tmp_path, "--out", tmp_path],
            "was not made by prepare.sh",
        ),
        ("average_checkpoints.sh", [tmp_path / "none"], "no such folder"),
        ("quickstart.sh", ["--pair", "en-xx"], "--pair en-xx"),
        ("quickstart.sh", ["--src", "a"], "--src and --tgt go together"),
        ("quickstart.sh", ["--epochs", "0"], "--epochs 0"),
    ):
        result = script(name, *arguments, check=False)
        assert message in last_line(result), (name, arguments)


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "scripts").glob("*.sh"))])
def test_every_script_has_help(name):
    if name == "environment.sh":
        pytest.skip("sourced by the others")
    result = script(name, "--help")
    assert result.stdout.startswith(f"usage: {name}")


def test_score_refuses_another_length(tmp_path):
    (tmp_path / "two").write_text("a\nb\n")
    (tmp_path / "three").write_text("a\nb\nc\n")
    result = run(
        "moa-score",
        *("--hypotheses", tmp_path / "two", "--reference", tmp_path / "three"),
        *("--report", tmp_path / "report"),
        check=False,
    )
    assert "2 hypotheses but 3 references" in last_line(result)
    assert not (tmp_path / "report.txt").exists()


def test_user_dir_is_the_package_and_works_as_one(toy):
    folder = run("moa-user-dir").stdout.strip()
    assert folder == str(PACKAGE)


def test_checkpoints_of_other_data_are_not_trained_on(toy, tmp_path):
    (tmp_path / ".data-checksum").write_text("1234 5")
    result = script(
        "train.sh", "--data", toy / "prepared/data", "--save-dir", tmp_path, check=False
    )
    assert "trained on other data" in last_line(result)
    arguments = ["--prepared", toy / "prepared", "--save-dir", tmp_path, "--out", tmp_path]
    assert "trained on other data" in last_line(script("evaluate.sh", *arguments, check=False))


def test_workers_that_start_together_all_note_the_data(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/.manifest-checksum").write_text("1234 5")
    # Each worker is a shell of its own, as under torchrun; a plain copy failed in 4 % of rounds.
    worker = (
        f'source "{ROOT}/scripts/environment.sh"\nfor round in $(seq 200); do\n'
        f'check_same_data "{tmp_path}/data" "{tmp_path}/run$round"\n'
        f'record_data "{tmp_path}/data" "{tmp_path}/run$round"\ndone'
    )
    with ThreadPoolExecutor() as pool:
        shells = [pool.submit(run, "bash", "-euo", "pipefail", "-c", worker) for _ in range(2)]
        for shell in shells:
            shell.result()
    notes = {path.read_text() for path in tmp_path.glob("run*/.data-checksum")}
    assert notes == {"1234 5"}
    assert len(list(tmp_path.glob("run*/.data-checksum*"))) == 200


def test_folders_of_the_users_are_not_replaced(toy, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/precious.txt").write_text("mine")
    arguments = ["--source-lang", "en", "--target-lang", "de", "--train", toy / "train"]
    result = script("prepare.sh", *arguments, "--out", tmp_path, check=False)
    assert "was not made by this script" in last_line(result)
    variables = {"MOA_VENV": str(tmp_path)}
    result = script("test.sh", check=False, variables=variables)
    assert "was not made by these scripts" in last_line(result)
    assert (tmp_path / "data/precious.txt").read_text() == "mine"


def test_a_checkpoint_of_another_model_is_refused(toy, tmp_path):
    arguments = ["--data", toy / "prepared/data", "--save-dir", tmp_path, "--", *SMALL]
    script("train.sh", *arguments, "--max-update", "1")
    before = (tmp_path / "checkpoint_last.pt").read_bytes()
    result = script("train.sh", *arguments, "--num-experts", "16", check=False)
    assert "the checkpoint is not of this model" in last_line(result)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == before
