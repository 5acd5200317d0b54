"""Importing a model module registers it with fairseq."""

from . import dense_transformer, moa_masked_lm, moa_transformer  # noqa: F401
