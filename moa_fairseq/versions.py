"""Versions of packages, for whatever states a number."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Dict, Iterable


def installed_versions(packages: Iterable[str]) -> Dict[str, str]:
    """The version of each of `packages` that is installed, by name."""
    found = {}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
