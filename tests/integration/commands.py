"""Running the real commands, as a user would."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

from moa_fairseq.checkpoints import load_checkpoint

from ..paths import PACKAGE, ROOT

BIN = Path(sys.executable).parent


def run(
    *command: Any,
    cwd: Path = ROOT,
    check: bool = True,
    stdin: Optional[str] = None,
    variables: Optional[dict[str, str]] = None,
    timeout: float = 1200,
) -> Any:
    """Run a command of this environment, for `timeout` seconds at most.

    On failure the error shows what it printed.
    """
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    environment.update(OMP_NUM_THREADS="1", MOA_USER_DIR=str(PACKAGE))
    environment.pop("MOA_VENV", None)
    environment.update(variables or {})
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    if check and result.returncode != 0:
        raise AssertionError(f"{command} failed:\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")
    return result


def script(name: str, *arguments: Any, **keywords: Any) -> Any:
    return run("bash", ROOT / "scripts" / name, *arguments, **keywords)


def train_losses(log: str) -> list[str]:
    """The training loss at each logged update, as printed."""
    return re.findall(r"train_inner \| .*? loss=([0-9.]+),", log)


def hypotheses(log: str) -> dict[int, tuple[str, str]]:
    """Sentence number to (score, pieces) of the best hypothesis in fairseq-generate's output."""
    found: dict[int, tuple[str, str]] = {}
    for number, score, pieces in re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", log, re.M):
        found.setdefault(int(number), (score, pieces))
    return found


def last_line(result: Any) -> str:
    """What a failed command says last; no traceback may come before it."""
    assert result.returncode != 0
    text = result.stderr + result.stdout
    assert "Traceback" not in text, text[-2000:]
    return (result.stderr.strip() or result.stdout.strip()).splitlines()[-1]


def trained_parameters(save_dir):
    """The last checkpoint's parameters by name."""
    model = load_checkpoint(save_dir / "checkpoint_last.pt")["model"]
    # fairseq 0.12.2 saves a buffer that it never fills: whatever was in that place of memory.
    return {name: value for name, value in model.items() if not name.endswith("._float_tensor")}


def write_manifest(prepared, manifest, checkpoints=None):
    """Write manifest.json; let `data` be made of it, and `checkpoints` be trained on that."""
    path = prepared / "manifest.json"
    path.write_text(json.dumps(manifest), encoding="utf-8")
    with path.open("rb") as stream:
        checksum = subprocess.run(["cksum"], stdin=stream, capture_output=True, check=True).stdout
    (prepared / "data/.manifest-checksum").write_bytes(checksum)
    if checkpoints is not None:
        (checkpoints / ".data-checksum").write_bytes(checksum)
