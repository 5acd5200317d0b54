"""Training that can be killed, run out of disk or lack permission at any moment, and loses nothing.

Importing this module mends, in the running process, what fairseq does with checkpoints:

* a checkpoint, or a copy of one, that a kill or a full disk cut short is never under its name;
* a full disk or a read-only folder ends training in one line;
* a run that ended between a checkpoint and its copies, of which `checkpoint_last.pt` is where the
  next run goes on, goes on from the checkpoint;
* what a killed run left half written is removed by the next;
* a run that has reached `--max-update` trains no further when it is started again.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from .checkpoints import write_checkpoint
from .errors import UsageError, refused_file
from .text.files import atomic_writer, remove_abandoned

logger = logging.getLogger(__name__)

LAST, BEST = "checkpoint_last.pt", "checkpoint_best.pt"
# What a save under way will have made: the checkpoint, and the copies that follow.
JOURNAL = ".saving.json"


def write_whole_files() -> None:
    """Let a checkpoint and its copies appear under their names only once whole and on disk."""
    original_save = checkpoint_utils.torch_persistent_save
    original_copy = PathManager.copy
    if getattr(original_save, "writes_whole_files", False):
        return

    @functools.wraps(original_save)
    def torch_persistent_save(obj: Any, filename: str, async_write: bool = False) -> None:
        if async_write or not PathManager.supports_rename(filename):
            original_save(obj, filename, async_write)
            return
        write_checkpoint(obj, filename)

    def copy(src_path: str, dst_path: str, overwrite: bool = False) -> bool:
        local = all(map(PathManager.supports_rename, (src_path, dst_path)))
        if not local or (os.path.exists(dst_path) and not overwrite):
            return bool(original_copy(src_path, dst_path, overwrite))
        with open(src_path, "rb") as source, atomic_writer(dst_path, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 24)
        return True

    torch_persistent_save.writes_whole_files = True  # type: ignore[attr-defined]
    checkpoint_utils.torch_persistent_save = torch_persistent_save
    PathManager.copy = staticmethod(copy)


def lose_no_whole_checkpoint() -> None:
    """Let a run finish what an earlier one was saving when it ended, and refuse in one line."""
    original_save, original_load = (
        checkpoint_utils.save_checkpoint,
        checkpoint_utils.load_checkpoint,
    )
    original_verify = checkpoint_utils.verify_checkpoint_directory
    if getattr(original_save, "loses_no_whole_checkpoint", False):
        return

    @functools.wraps(original_save)
    def save_checkpoint(cfg: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        original_write = trainer.save_checkpoint
        folder = Path(cfg.save_dir)

        def write(filename: str, extra_state: Dict[str, Any]) -> Any:
            if trainer.data_parallel_rank == 0 and not trainer.checkpoint_suffix:
                _open_journal(cfg, Path(filename), extra_state)
            return original_write(filename, extra_state)

        with _one_line("; what was saved before is whole, and the same command goes on from it"):
            trainer.save_checkpoint = write
            try:
                saved = original_save(cfg, trainer, *args, **kwargs)
            finally:
                del trainer.save_checkpoint
            if saved:
                (folder / JOURNAL).unlink(missing_ok=True)
        return saved

    @functools.wraps(original_load)
    def load_checkpoint(cfg: Any, trainer: Any, **kwargs: Any) -> Any:
        folder = Path(cfg.save_dir)
        if trainer.data_parallel_rank == 0 and folder.is_dir() and not cfg.no_save:
            with _one_line(""):
                remove_abandoned(folder)
                if cfg.restore_file == LAST:
                    finish_interrupted_save(folder)
        if trainer.data_parallel_world_size > 1:
            torch.distributed.barrier()  # the others ask whether there is a last checkpoint
        return original_load(cfg, trainer, **kwargs)

    @functools.wraps(original_verify)
    def verify_checkpoint_directory(save_dir: str) -> None:
        with _one_line("", f"--save-dir {save_dir}"):
            original_verify(save_dir)

    save_checkpoint.loses_no_whole_checkpoint = True  # type: ignore[attr-defined]
    checkpoint_utils.save_checkpoint = save_checkpoint
    checkpoint_utils.load_checkpoint = load_checkpoint
    checkpoint_utils.verify_checkpoint_directory = verify_checkpoint_directory


def _open_journal(cfg: Any, checkpoint: Path, extra_state: Dict[str, Any]) -> None:
    value = extra_state.get("val_loss")
    if cfg.no_last_checkpoints or (value is not None and cfg.keep_best_checkpoints > 0):
        # Without a last checkpoint nothing resumes, and the names of the best N are fairseq's to
        # choose: there the last checkpoint is the one before, and training repeats from it.
        (checkpoint.parent / JOURNAL).unlink(missing_ok=True)
        return
    copies = [BEST] if value is not None and value == extra_state.get("best") else []
    with atomic_writer(checkpoint.parent / JOURNAL) as stream:
        json.dump(
            {
                "checkpoint": checkpoint.name,
                "before": _identity(checkpoint),
                "copies": [name for name in (*copies, LAST) if name != checkpoint.name],
            },
            stream,
        )


def finish_interrupted_save(folder: Path) -> None:
    """Make the copies of a checkpoint that a run was saving in `folder` when it was killed.

    Does nothing where no save was interrupted, or where the checkpoint itself did not get whole.
    """
    journal = folder / JOURNAL
    if not journal.exists():
        return
    noted = json.loads(journal.read_text(encoding="utf-8"))
    checkpoint = folder / noted["checkpoint"]
    if _identity(checkpoint) not in (None, noted["before"]):
        logger.warning(
            "%s was saved when an earlier run ended; training goes on from it", checkpoint
        )
        for name in noted["copies"]:
            PathManager.copy(str(checkpoint), str(folder / name), overwrite=True)
    journal.unlink()


def _identity(path: Path) -> Optional[List[int]]:
    """What another file of this name would differ in; None where there is none."""
    if not path.exists():
        return None
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns]


def train_no_further_than_asked() -> None:
    """Let a run that resumes at `--max-update` end there, not an update later."""
    train_command = importlib.import_module("fairseq_cli.train")
    original = train_command.train
    if getattr(original, "trains_no_further_than_asked", False):
        return

    @functools.wraps(original)
    def train(cfg: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        limit = cfg.optimization.max_update
        if limit > 0 and trainer.get_num_updates() >= limit:
            logger.info("--max-update %d is reached; there is nothing to train", limit)
            return [None], True
        return original(cfg, trainer, *args, **kwargs)

    train.trains_no_further_than_asked = True  # type: ignore[attr-defined]
    vars(train_command)["train"] = train


@contextmanager
def _one_line(reassurance: str, name: Optional[str] = None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        named = OSError(error.errno, error.strerror, name or error.filename)
        raise UsageError(refused_file(named) + reassurance) from error


write_whole_files()
lose_no_whole_checkpoint()
train_no_further_than_asked()
