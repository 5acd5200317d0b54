"""The option of a criterion that asks for heat maps of expert load during training.

No `from __future__ import annotations` here: fairseq reads the types of the fields.
"""

from dataclasses import dataclass, field

from fairseq.dataclass import FairseqDataclass

from ..errors import UsageError


@dataclass
class LoadHeatMapConfig(FairseqDataclass):
    load_heat_map_interval: int = field(
        default=0,
        metadata={
            "help": "draw the load of every expert each N updates, summed over them and over all "
            "workers: into --save-dir, and TensorBoard and W&B where they are on; 0 draws none"
        },
    )


def checked_interval(interval: int) -> int:
    """`interval`, for a criterion that takes the option.

    A criterion keeps it as its attribute `load_heat_map_interval`, and logs the sums that
    :func:`~moa_fairseq.criterions.router_terms.router_loss` gives.

    Raises:
        UsageError: where it is negative.
    """
    if interval < 0:
        raise UsageError(
            f"--load-heat-map-interval {interval}: it must not be negative; 0 draws none"
        )
    return interval
