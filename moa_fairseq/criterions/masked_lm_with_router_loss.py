"""fairseq's loss of masked language models plus the losses of the routers.

No `from __future__ import annotations` here: fairseq reads the types of the fields.
"""

from dataclasses import dataclass
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss

from .load_heat_map_option import checked_interval
from .with_router_loss import RouterLossConfig, WithRouterLoss, checked_weights


@dataclass
class MaskedLMWithRouterLossConfig(RouterLossConfig, MaskedLmConfig):
    """fairseq's options, and the weights of the router losses."""


@register_criterion("masked_lm_with_router_loss", dataclass=MaskedLMWithRouterLossConfig)
class MaskedLMWithRouterLoss(WithRouterLoss, MaskedLmLoss):
    """Cross entropy of masked tokens with router losses.

    The sample size is the number of masked tokens; routers see, and their losses count, every
    token but padding.
    """

    def __init__(self, cfg: MaskedLMWithRouterLossConfig, task: Any) -> None:
        super().__init__(cfg, task)
        self.weights = checked_weights(
            cfg.load_balance_weight, cfg.router_z_weight, cfg.load_cv_squared_weight
        )
        self.load_heat_map_interval = checked_interval(cfg.load_heat_map_interval)
