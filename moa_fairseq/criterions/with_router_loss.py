"""What a criterion of fairseq's needs to have the losses of the routers.

No `from __future__ import annotations` here: fairseq reads the types of the fields.
"""

from dataclasses import dataclass, field
from typing import Any, Dict, List, Tuple

from torch import Tensor, nn

from ..errors import UsageError
from ..modules.recording import record_routings, routed_modules
from ..spellings import LOSS_SPELLINGS, SpellingParser
from .load_heat_map_option import LoadHeatMapConfig
from .router_terms import RouterLossWeights, log_router_metrics, padding_masks, router_loss


@dataclass
class RouterLossConfig(LoadHeatMapConfig):
    """The weights of equation 7, with the paper's values, and what is drawn of the load."""

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


def checked_weights(load_balance: float, z: float, cv_squared: float) -> RouterLossWeights:
    """α, β and γ.

    Raises:
        UsageError: for a negative one.
    """
    weights = RouterLossWeights(load_balance, z, cv_squared)
    flags = ("--load-balance-weight", "--router-z-weight", "--load-cv-squared-weight")
    for flag, weight in zip(flags, weights):
        if not weight >= 0:
            raise UsageError(f"{flag} {weight}: it must not be negative; 0 turns the loss off")
    return weights


class WithRouterLoss:
    """Put before a criterion's class: L = L_model + Σ of (α·L_a + β·L_z + γ·cv²) (equation 7).

    The sum is over routed modules. fairseq sums L_model over the batch and divides gradients by
    the sample size, so the router terms are multiplied by the sample size: then α means the same
    at any batch size, `--update-freq` and number of workers. They act in training only; what the
    criterion logs of its own (`loss`, `nll_loss`, `ppl`) is without them.
    """

    weights: RouterLossWeights
    padding_idx: int
    padding_in_z = False  # the z-loss is over real tokens

    @classmethod
    def add_args(cls, parser: Any) -> None:
        super().add_args(SpellingParser(parser, LOSS_SPELLINGS))  # type: ignore[misc]

    def forward(
        self, model: nn.Module, sample: Dict[str, Any], reduce: bool = True
    ) -> Tuple[Tensor, Any, Dict[str, Any]]:
        """Loss, sample size and logging output of a batch, as every fairseq criterion."""
        with record_routings(model) as recorded:
            loss, sample_size, logging_output = super().forward(  # type: ignore[misc]
                model, sample, reduce=reduce
            )
        if any(True for _ in routed_modules(model)):
            masks = padding_masks(sample, self.padding_idx)
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
        sample_size: Any,
        model: nn.Module,
        logging_output: Dict[str, Any],
    ) -> Tensor:
        """The loss of a batch with its router term; may change what is logged."""
        return loss + sample_size * router_term if model.training else loss

    @classmethod
    def reduce_metrics(cls, logging_outputs: List[Dict[str, Any]]) -> None:
        """Aggregate logging outputs over batches and workers."""
        super().reduce_metrics(logging_outputs)  # type: ignore[misc]
        log_router_metrics(logging_outputs)
