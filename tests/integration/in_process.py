"""fairseq's commands called in this process: most of a command's time is its imports."""

from __future__ import annotations

import io
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Optional

from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import generate as generate_command
from fairseq_cli import train as train_command

from .conftest import SMALL

RECIPE = [
    *("--arch", "moa_transformer_tiny", "--share-all-embeddings", "--optimizer", "adam"),
    *("--lr", "5e-3", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "100", "--cpu"),
    *("--criterion", "label_smoothed_cross_entropy_with_router_loss", "--label-smoothing", "0.1"),
    *("--max-tokens", "1024", "--log-interval", "1", *SMALL),
    # A process that loads data outlives the run that it was forked for, and holds up a later one.
    *("--num-workers", "0"),
]


def train(toy: Path, save_dir: Path, *arguments: Any) -> None:
    """`fairseq-train` on the toy corpus, as its command line would run it."""
    parser = options.get_training_parser()
    words = [toy / "prepared/data", "--save-dir", save_dir, *RECIPE, *arguments]
    args = options.parse_args_and_arch(parser, input_args=[str(word) for word in words])
    # What a process remembers of an earlier run.
    for function in (checkpoint_utils.save_checkpoint, train_command.should_stop_early):
        vars(function).pop("best", None)
    train_command.main(convert_namespace_to_omegaconf(args))


def generate(toy: Path, path: Any, *arguments: Any, data: Optional[Path] = None) -> None:
    """`fairseq-generate` of a test set, the toy one's; what it says goes to standard output."""
    parser = options.get_generation_parser()
    data = data or toy / "prepared/data"
    words = [data, "--path", path, "--cpu", "--gen-subset", "test", *arguments]
    args = options.parse_args_and_arch(parser, input_args=[str(word) for word in words])
    generate_command.main(convert_namespace_to_omegaconf(args))


def logged(records: Any, name: str, line: str = "train_inner") -> list[float]:
    """Values of a metric, from the log records of lines of one kind."""
    text = "\n".join(r.getMessage() for r in records if r.name == line)
    return [float(value) for value in re.findall(rf"\b{name}[= ](-?[0-9.]+)", text)]


def call(main: Callable[[], Any], name: str, arguments: Sequence[Any], stdin: str = "") -> Any:
    """A command's `main` with these arguments, and what a shell would see of it.

    Returns:
        an object with `returncode`, `stdout` and `stderr`, as of `subprocess.run`.
    """
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv, sys.stdin
    sys.argv, sys.stdin = [name, *map(str, arguments)], io.StringIO(stdin)
    status = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            try:
                main()
            except SystemExit as end:  # as Python itself ends
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
                if isinstance(end.code, str):
                    print(end.code, file=err)
            except BaseException:
                status = 1
                traceback.print_exc(file=err)
    finally:
        sys.argv, sys.stdin = before
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())


def logged_updates(records: Any) -> int:
    """The updates that a run began with: those of the checkpoint it resumed from, or none."""
    text = "\n".join(record.getMessage() for record in records)
    loaded = re.findall(r"Loaded checkpoint .* @ (\d+) updates", text)
    return int(loaded[-1]) if loaded else 0
