"""The errors that a user can mend."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Union


class UsageError(ValueError, SystemExit):
    """A wrong option or input, with the flag, the value and the remedy in one line.

    To Python callers it is a `ValueError`. Uncaught on a command line it is a `SystemExit`:
    the message goes to standard error without a traceback, and the exit status is 1.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.code = message


class CheckpointMismatch(SystemExit):
    """A checkpoint of another model, where fairseq loads it.

    Only a `SystemExit`: fairseq replaces every `Exception` there by one that does not say why.
    """


class NonFiniteRouter(SystemExit):
    """A router whose logits are infinite or NaN, in training.

    Only a `SystemExit`: fairseq answers an `Exception` in a training step with a checkpoint of
    the broken model, and takes an overflow for one of the gradients, which a lower loss scale
    would mend.
    """


def refused_file(error: OSError) -> str:
    """One line on a file that the system refuses: its name, why, and what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some space and run this again"
    elif error.errno == errno.EFBIG:
        remedy = "raise the limit on the size of files (ulimit -f) and run this again"
    elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR):
        remedy = "choose a place that you have access to"
    elif error.errno == errno.EEXIST:  # of a folder that is to be made
        return f"{error.filename}: Not a directory; choose a place that you have access to"
    elif error.filename and error.strerror:
        remedy = "give another path, or mend this one"
    else:
        return str(error)
    return f"{error.filename or 'output'}: {error.strerror}; {remedy}"


def unreadable_checkpoint(path: Union[str, Path], error: BaseException) -> UsageError:
    """What to say of a checkpoint that could not be read, from what reading it raised."""
    if isinstance(error, FileNotFoundError):
        return UsageError(f"{path}: no such checkpoint; give one that fairseq-train wrote")
    if type(error).__name__ == "UnpicklingError":  # for damage and for code alike
        # torch's first lines advise to run what the file holds; the cause comes after.
        refused = re.search(r"unsupported global:? (?:GLOBAL )?(\S+)", str(error), re.IGNORECASE)
        other = re.search(r"WeightsUnpickler error:\s+(.+)", str(error))
        cause = f"it names {refused[1]}" if refused else other[1] if other else "it is no pickle"
        return UsageError(
            f"{path} is damaged, or holds objects that a fairseq checkpoint does not hold and that "
            f"are not safe to load: {cause.strip()[:300]}; nothing in it was run; use another "
            "checkpoint, or save this one again without them"
        )
    if isinstance(error, (KeyError, TypeError, AttributeError, IndexError)):
        return UsageError(
            f"{path} is not a fairseq checkpoint ({type(error).__name__}: {first_line(error)}); "
            "give a file that fairseq-train or moa-average-checkpoints wrote"
        )
    return UsageError(
        f"{path} is not a readable checkpoint: {first_line(error).split('. ')[0][:300]}; it may "
        "have been cut short: copy it again, or use another checkpoint"
    )


def describe_mismatch(error: BaseException) -> str:
    """What to say of a checkpoint whose parameters do not fit, from what torch raised."""
    vocabulary = re.search(
        r"embed_tokens\.weight: .*?torch\.Size\(\[(\d+), (\d+)\]\).*?torch\.Size\(\[(\d+), \2\]\)",
        str(error),
    )
    if vocabulary:
        return (
            f"the checkpoint is not of this model: its vocabulary has {vocabulary[1]} types, and "
            f"the dictionary here {vocabulary[3]}; give the data that it was trained with, or "
            "another --save-dir"
        )
    reason = " ".join(line.strip() for line in str(error).splitlines()[1:3])
    return (
        f"the checkpoint is not of this model ({reason[:300]}); train with the options of the "
        "checkpoint, or with another --save-dir"
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
