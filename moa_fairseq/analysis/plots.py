"""What everything that draws needs."""

from __future__ import annotations

import importlib.util

from ..errors import UsageError


def require_matplotlib(what: str) -> None:
    """Refuse to draw where matplotlib is not installed.

    Args:
        what: needs it; an option, or a phrase in the singular.

    Raises:
        UsageError: naming the remedy.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f'{what} needs matplotlib; install it: pip install -e ".[plots]"')
