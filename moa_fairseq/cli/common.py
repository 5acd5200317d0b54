"""What the console commands share."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Callable, Optional, Sequence

from ..errors import refused_file

Main = Callable[..., None]


def command(main: Main) -> Main:
    """Log to standard error, and end with one line where the system refuses a file."""

    @functools.wraps(main)
    def wrapped(arguments: Optional[Sequence[str]] = None) -> None:
        logging.basicConfig(
            level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr, force=True
        )
        try:
            main(arguments)
        except BrokenPipeError:
            sys.exit(1)  # the reader of a pipe went away; nothing to say
        except OSError as error:
            sys.exit(refused_file(error))

    return wrapped
