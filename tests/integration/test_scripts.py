"""What the scripts do themselves: help, environments, notes of what was trained on what."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ..paths import PACKAGE, ROOT
from .commands import last_line, run, script
from .conftest import SMALL


def test_what_a_command_says_is_what_its_script_says(toy, tmp_path):
    """The tables of wrong uses call the commands; the scripts hand on what those say."""
    result = script(
        *("prepare.sh", "--source-lang", "en", "--target-lang", "de", "--out", tmp_path / "out"),
        *("--train", tmp_path / "missing"),
        check=False,
    )
    assert "missing.en: no such file" in last_line(result)
    assert not (tmp_path / "out/data").exists()
    arguments = ["--data", toy / "prepared/data", "--save-dir", tmp_path, "--", *SMALL]
    result = script("train.sh", *arguments, "--num-experts", "2", check=False)
    assert "--num-experts 2 is fewer than" in last_line(result)
    result = script(
        *("train_wmt14.sh", "--prepared", toy / "prepared", "--save-dir", tmp_path / "save"),
        *("--pair", "en-fr", "--size", "base"),
        check=False,
    )
    assert "--pair en-fr: --prepared" in last_line(result)
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "scripts").glob("*.sh"))])
def test_every_script_has_help(name):
    if name == "environment.sh":
        pytest.skip("sourced by the others")
    result = script(name, "--help")
    assert result.stdout.startswith(f"usage: {name}")


def test_user_dir_is_the_package_and_works_as_one(toy):
    folder = run("moa-user-dir").stdout.strip()
    assert folder == str(PACKAGE)


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


def test_an_environment_of_the_users_is_not_replaced(tmp_path):
    (tmp_path / "precious.txt").write_text("mine")
    result = script("test.sh", check=False, variables={"MOA_VENV": str(tmp_path)})
    assert "was not made by these scripts" in last_line(result)
    assert (tmp_path / "precious.txt").read_text() == "mine"
