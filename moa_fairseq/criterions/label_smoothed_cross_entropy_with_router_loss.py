"""fairseq's label-smoothed cross entropy plus the losses of the routers.

No `from __future__ import annotations` here: fairseq reads the types of the fields.
"""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from torch import Tensor, nn

from ..errors import UsageError
from ..modules.recording import record_routings, routed_modules
from ..spellings import LOSS_SPELLINGS, SpellingParser
from .load_heat_map_option import LoadHeatMapConfig, checked_interval
from .router_terms import (
    RouterLossWeights,
    log_router_metrics,
    router_loss,
    translation_padding_masks,
)


@dataclass
class LabelSmoothedCrossEntropyWithRouterLossConfig(
    LoadHeatMapConfig, LabelSmoothedCrossEntropyCriterionConfig
):
    load_balance_weight: float = field(
        default=0.01,
        metadata={"help": "alpha: weight of the load balancing loss, summed over MoA modules"},
    )
    router_z_weight: float = field(
        default=0.001,
        metadata={"help": "beta: weight of the router z-loss, summed over MoA modules"},
    )
    load_cv_squared_weight: float = field(
        default=0.0,
        metadata={
            "help": "gamma: weight of the squared coefficient of variation of expert load, "
            "summed over MoA modules"
        },
    )


@register_criterion(
    "label_smoothed_cross_entropy_with_router_loss",
    dataclass=LabelSmoothedCrossEntropyWithRouterLossConfig,
)
class LabelSmoothedCrossEntropyWithRouterLoss(LabelSmoothedCrossEntropyCriterion):
    """L = L_model + Σ over MoA modules of (α·L_a + β·L_z + γ·cv²) (equation 7).

    fairseq sums L_model over the batch and divides gradients by the sample size, so the router
    terms are multiplied by the sample size: then α means the same at any batch size,
    `--update-freq` and number of workers. They act in training only; `loss`, `nll_loss` and
    `ppl` are logged without them.
    """

    padding_in_z = False  # the z-loss is over real tokens

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
        self.weights = RouterLossWeights(
            load_balance_weight, router_z_weight, load_cv_squared_weight
        )
        flags = ("--load-balance-weight", "--router-z-weight", "--load-cv-squared-weight")
        for flag, weight in zip(flags, self.weights):
            if not weight >= 0:
                raise UsageError(f"{flag} {weight}: it must not be negative; 0 turns the loss off")

        self.load_heat_map_interval = checked_interval(load_heat_map_interval)

    @classmethod
    def add_args(cls, parser: Any) -> None:
        super().add_args(SpellingParser(parser, LOSS_SPELLINGS))

    def forward(
        self, model: nn.Module, sample: Dict[str, Any], reduce: bool = True
    ) -> Tuple[Tensor, int, Dict[str, Any]]:
        """Loss, sample size and logging output of a batch, as every fairseq criterion."""
        with record_routings(model) as recorded:
            loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
        if any(True for _ in routed_modules(model)):
            masks = translation_padding_masks(sample, self.padding_idx)
            router_term, statistics = router_loss(
                model, recorded, masks, self.weights, self.padding_in_z
            )
            loss = self.add_router_term(loss, router_term, sample_size, model, logging_output)
            for name, value in statistics.items():
                logging_output[name] = value if name.startswith("_") else value * sample_size
        return loss, sample_size, logging_output

    def add_router_term(
        self,
        loss: Tensor,
        router_term: Tensor,
        sample_size: int,
        model: nn.Module,
        logging_output: Dict[str, Any],
    ) -> Tensor:
        """The loss of a batch with its router term; may change what is logged."""
        return loss + sample_size * router_term if model.training else loss

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """Aggregate logging outputs over batches and workers."""
        super().reduce_metrics(logging_outputs)
        log_router_metrics(logging_outputs)
