"""`python -m moa_fairseq.cli.wmt14_estimate`: what a WMT14 experiment takes."""

from __future__ import annotations

import argparse
from typing import Optional, Sequence

from ..analysis.costs import count_parameters, linear_macs
from ..recipes.estimates import SUSTAINED_FLOPS, estimate
from ..recipes.wmt14 import ARCHITECTURES, MODELS, training_recipe
from ..text.wmt14.prepare import VOCAB_SIZES
from ..text.wmt14.shards import RECIPES
from .common import command
from .profile import build


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="wmt14_estimate", description=__doc__)
    parser.add_argument("--pair", required=True)
    parser.add_argument("--size", required=True)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0])
    args = parser.parse_args(arguments)
    recipe = training_recipe(args.pair, args.size)
    vocabulary = VOCAB_SIZES[args.pair, args.recipe]
    model = build(ARCHITECTURES[args.model, args.size], vocabulary, ["--share-all-embeddings"])
    needs = estimate(recipe, count_parameters(model), linear_macs(model, length=1))
    memory = f"{needs.host_memory / 1e9:.0f} GB or so while SentencePiece is trained"
    lines = (
        ("download", f"{needs.download / 1e9:.1f} GB"),
        ("disk", f"{needs.disk / 1e9:.0f} GB at most at one time, checkpoints not counted"),
        *([("memory", memory)] if args.recipe == "sentencepiece" else []),
        (
            "GPU memory",
            f"{needs.gpu_memory / 1e9:.1f} GB on each GPU for weights and optimiser, and "
            "activations besides",
        ),
        (
            "GPU hours",
            f"{needs.gpu_hours:,.0f} for {recipe.max_epoch} epochs at "
            f"{SUSTAINED_FLOPS / 1e12:.0f} TFLOP/s a GPU, which is a guess, not a measurement",
        ),
    )
    for what, value in lines:
        print(f"{what:<11} {value}")


if __name__ == "__main__":
    main()
