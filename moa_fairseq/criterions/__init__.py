"""Importing a criterion module registers it with fairseq."""

from . import label_smoothed_cross_entropy_with_router_loss, moa_ce_loss  # noqa: F401
