"""Importing a criterion module registers it with fairseq."""

from . import (  # noqa: F401
    label_smoothed_cross_entropy_with_router_loss,
    masked_lm_with_router_loss,
    moa_ce_loss,
)
