"""What a WMT14 experiment takes: disk, memory and GPU hours, each with what it rests on."""

from __future__ import annotations

from dataclasses import dataclass

from ..text.wmt14.archives import PAIRS
from ..text.wmt14.estimates import BYTES_PER_PAIR, disk_needed
from ..text.wmt14.steps import SENTENCEPIECE_LINES
from .wmt14 import TrainingRecipe

#: Subwords of a pair's longer side: 29.8 in English-German and 32.3 in English-French newstest2013,
#: by 20,000 joint pieces of the other years' sets.
TOKENS_PER_PAIR = 31
#: Floating-point operations a second that one GPU keeps up in training: a guess for a data-centre
#: GPU of 2020 in mixed precision, not a measurement. GPU hours go down as it goes up.
SUSTAINED_FLOPS = 30e12
#: Mixed precision: weights, gradients, float32 weights and Adam's two moments.
BYTES_PER_PARAMETER = 2 + 2 + 4 + 4 + 4
#: Peak memory of SentencePiece's trainer grew by 105 MB from 40,000 to 80,000 lines of news.
SENTENCEPIECE_BYTES_PER_LINE = 2600


@dataclass(frozen=True)
class Estimate:
    """An experiment's needs.

    Attributes:
        download: bytes of archives.
        disk: bytes of disk at most at one time, archives included.
        host_memory: bytes at most while subwords are learned.
        gpu_memory: bytes of weights, gradients and optimiser on each GPU, without activations.
        training_flops: floating-point operations of the whole training, linear layers only.
        gpu_hours: at `SUSTAINED_FLOPS`, over all GPUs.
    """

    download: int
    disk: int
    host_memory: int
    gpu_memory: int
    training_flops: float
    gpu_hours: float


def estimate(recipe: TrainingRecipe, parameters: int, macs_per_token: float) -> Estimate:
    """What an experiment takes with the real archives.

    Args:
        parameters: of the model.
        macs_per_token: multiply-adds of the linear layers for one source and one target token.
    """
    pair = PAIRS[recipe.pair]
    download = sum(archive.size or 0 for archive in pair.archives())
    # A multiply-add is two operations, and the backward pass takes twice the forward pass.
    flops = 6.0 * macs_per_token * TOKENS_PER_PAIR * pair.pairs * recipe.max_epoch
    return Estimate(
        download=download,
        disk=disk_needed(download, pair.pairs * BYTES_PER_PAIR),
        host_memory=min(2 * pair.pairs, SENTENCEPIECE_LINES) * SENTENCEPIECE_BYTES_PER_LINE,
        gpu_memory=parameters * BYTES_PER_PARAMETER,
        training_flops=flops,
        gpu_hours=flops / SUSTAINED_FLOPS / 3600,
    )
