"""Importing a model module registers it with fairseq."""

from . import moa_transformer  # noqa: F401
