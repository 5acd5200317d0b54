"""fairseq's label-smoothed cross entropy plus the losses of the routers.

No `from __future__ import annotations` here: fairseq reads the types of the fields.
"""

from dataclasses import dataclass
from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)

from .load_heat_map_option import checked_interval
from .with_router_loss import RouterLossConfig, WithRouterLoss, checked_weights


@dataclass
class LabelSmoothedCrossEntropyWithRouterLossConfig(
    RouterLossConfig, LabelSmoothedCrossEntropyCriterionConfig
):
    """fairseq's options, and the weights of the router losses."""


@register_criterion(
    "label_smoothed_cross_entropy_with_router_loss",
    dataclass=LabelSmoothedCrossEntropyWithRouterLossConfig,
)
class LabelSmoothedCrossEntropyWithRouterLoss(WithRouterLoss, LabelSmoothedCrossEntropyCriterion):
    """Label-smoothed cross entropy with router losses, for translation."""

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
        load_balance_weight: float = 0.01,
        router_z_weight: float = 0.001,
        load_cv_squared_weight: float = 0.0,
        load_heat_map_interval: int = 0,
    ) -> None:
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.weights = checked_weights(load_balance_weight, router_z_weight, load_cv_squared_weight)
        self.load_heat_map_interval = checked_interval(load_heat_map_interval)
