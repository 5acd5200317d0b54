"""The recipes of the paper's WMT14 experiments, as data, and fairseq's options for them.

Where the figures come from:

* `READ`: read in the authors' published code. That holds for the recipe of English-German base,
  for the settings that all four experiments share, and for those of evaluation.
* `RECALLED`: remembered from the paper, no source reached. That holds for batch, learning rate,
  warm-up, dropout and epochs of the other three experiments: pointers, not facts.

The dense baselines train with the recipe of the MoA of their size. That is a choice made here, so
that a comparison changes the model alone; it is not the paper's.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import List, Mapping, Optional, Tuple

from ..errors import UsageError

READ = "read in the authors' code"
RECALLED = "recalled from the paper, not read in a source"

PAIRS = ("en-de", "en-fr")
SIZES = ("base", "big")
MODELS = ("moa_transformer", "transformer")
PRECISIONS = ("fp16", "fp32")

#: Tokens of one optimiser step, over all workers: 8192 × 32 = 4096 × 64.
STEP_TOKENS = 262_144
#: Device memory, as torch reports it, that the recipe's own batch is taken to need. A device that
#: is sold with 32 GB reports a little less than 32 GiB.
FULL_BATCH_MEMORY_GIB = 30.0
#: No rule of this module goes below it: fairseq accepts sentences of up to 1024 tokens.
LEAST_TOKENS = 1024


@dataclass(frozen=True)
class TrainingRecipe:
    """What differs between the experiments.

    Attributes:
        pair: `en-de` or `en-fr`.
        size: `base` or `big`.
        max_tokens: tokens of a batch on one device: of its longer side, padding included.
        learning_rate: peak, reached after `warmup_updates` steps.
        warmup_updates: steps in which the learning rate rises from 1e-7.
        dropout: of embeddings and of each sublayer's output.
        attention_dropout: of attention weights.
        activation_dropout: inside the feed-forward layer.
        max_epoch: epochs to train.
        source: `READ` or `RECALLED`, for all of these figures together.
    """

    pair: str
    size: str
    max_tokens: int
    learning_rate: float
    warmup_updates: int
    dropout: float
    attention_dropout: float
    activation_dropout: float
    max_epoch: int
    source: str


@dataclass(frozen=True)
class EvaluationSettings:
    """How a trained model is scored: epochs averaged, beam size, length penalty."""

    average_epochs: int
    beam: int
    length_penalty: float


def _by_experiment(*recipes: TrainingRecipe) -> Mapping[Tuple[str, str], TrainingRecipe]:
    return MappingProxyType({(recipe.pair, recipe.size): recipe for recipe in recipes})


TRAINING = _by_experiment(
    TrainingRecipe("en-de", "base", 8192, 7e-4, 4000, 0.2, 0.2, 0.1, 100, READ),
    TrainingRecipe("en-de", "big", 4096, 7e-4, 4000, 0.2, 0.2, 0.1, 100, RECALLED),
    TrainingRecipe("en-fr", "base", 8192, 7e-4, 8000, 0.1, 0.0, 0.0, 50, RECALLED),
    TrainingRecipe("en-fr", "big", 4096, 7e-4, 8000, 0.1, 0.1, 0.1, 100, RECALLED),
)

#: Of Transformer-Clinic's recipe, which the authors used; `READ`.
EVALUATION: Mapping[str, EvaluationSettings] = MappingProxyType(
    {
        "en-de": EvaluationSettings(average_epochs=10, beam=4, length_penalty=0.6),
        "en-fr": EvaluationSettings(average_epochs=10, beam=5, length_penalty=0.8),
    }
)

#: fairseq's names. The dense ones are its own models, so that the baseline owes nothing to MoA.
ARCHITECTURES: Mapping[Tuple[str, str], str] = MappingProxyType(
    {
        ("moa_transformer", "base"): "moa_transformer_base",
        ("moa_transformer", "big"): "moa_transformer_big",
        ("transformer", "base"): "transformer_wmt_en_de",
        ("transformer", "big"): "transformer_wmt_en_de_big",
    }
)

#: Shared by all experiments; `READ`, but that all embeddings are shared was computed from the
#: paper's parameter counts.
SHARED_OPTIONS = (
    *("--share-all-embeddings", "--label-smoothing", "0.1"),
    *("--optimizer", "adam", "--adam-betas", "(0.9,0.98)", "--adam-eps", "1e-9"),
    *("--weight-decay", "0", "--clip-norm", "0"),
    *("--lr-scheduler", "inverse_sqrt", "--warmup-init-lr", "1e-7"),
    *("--keep-last-epochs", "10"),
)

#: Equation 7, with the weights of the authors' code. `READ`.
ROUTER_LOSS_OPTIONS = ("--load-balance-weight", "0.01", "--router-z-weight", "0.001")

#: Not the paper's: what makes a long run dependable.
HOUSEKEEPING_OPTIONS = (
    # The best checkpoint by likelihood, which label smoothing and router losses leave alone.
    *("--best-checkpoint-metric", "nll_loss"),
    # A run that is cut short loses at most this many steps, also where an epoch takes a day.
    *("--save-interval-updates", "1000", "--keep-interval-updates", "1"),
    # The same on every device. No sentence is too long for it (see LEAST_TOKENS), and validation
    # keeps no activations. Without --skip-invalid-size-inputs-valid-test: a sentence that cannot
    # be scored ends the run; it is not left out in silence.
    *("--max-tokens-valid", "4096"),
    *("--log-format", "simple", "--log-interval", "100", "--seed", "1"),
)


def training_recipe(pair: str, size: str) -> TrainingRecipe:
    """The recipe of an experiment.

    Raises:
        UsageError: where there is none.
    """
    if pair not in PAIRS:
        raise UsageError(f"--pair {pair}: there is a recipe for {' and for '.join(PAIRS)}")
    if size not in SIZES:
        raise UsageError(f"--size {size}: give {' or '.join(SIZES)}")
    return TRAINING[pair, size]


def update_frequency(num_workers: int, max_tokens: int) -> int:
    """Batches that each worker gathers for a step of `STEP_TOKENS` tokens: --update-freq.

    Args:
        num_workers: devices that train together, over all nodes.
        max_tokens: tokens of a batch on one of them.

    Raises:
        UsageError: where workers × tokens does not divide a step, with the nearest that do.
    """
    workers = f"--gpus times --nodes gives {num_workers} workers"
    if num_workers < 1:
        raise UsageError(f"{workers}: there must be at least 1")
    if max_tokens < 1:
        raise UsageError(f"--max-tokens {max_tokens}: it must be at least 1")
    if STEP_TOKENS % num_workers:
        raise UsageError(
            f"{workers}, among which a step of {STEP_TOKENS:,} tokens cannot be divided; use "
            f"{_nearest_divisors(STEP_TOKENS, num_workers)} workers"
        )
    share = STEP_TOKENS // num_workers
    if share % max_tokens:
        raise UsageError(
            f"--max-tokens {max_tokens} does not divide {share:,}, the tokens of a step for each "
            f"worker; use {_nearest_divisors(share, max_tokens)}"
        )
    return share // max_tokens


def _nearest_divisors(number: int, near: int) -> str:
    divisors = [candidate for candidate in range(1, number + 1) if number % candidate == 0]
    below = [divisor for divisor in divisors if divisor < near][-1:]
    above = [divisor for divisor in divisors if divisor > near][:1]
    return " or ".join(str(divisor) for divisor in (*below, *above))


def tokens_that_fit(
    recipe: TrainingRecipe, memory_gib: Optional[float], num_workers: int = 1
) -> int:
    """Tokens of a batch on one device: a rule, not a measurement.

    The recipe's own number on a device of `FULL_BATCH_MEMORY_GIB` or more, half of it on one of
    half that memory, and so on down to `LEAST_TOKENS`. It was not tried on a GPU; a batch that
    does not fit is made smaller with --max-tokens. So many workers that a step would have more
    than `STEP_TOKENS` tokens also halve it.

    Args:
        recipe: the experiment.
        memory_gib: memory of the device, as torch reports it, in GiB; None where there is none
            to ask, which leaves the recipe's number.
        num_workers: devices that train together, over all nodes.
    """
    tokens = recipe.max_tokens
    while tokens > LEAST_TOKENS and (
        tokens * num_workers > STEP_TOKENS
        or (
            memory_gib is not None
            and memory_gib < FULL_BATCH_MEMORY_GIB * tokens / recipe.max_tokens
        )
    ):
        tokens //= 2
    return tokens


def fairseq_train_options(
    recipe: TrainingRecipe, model: str, num_workers: int, max_tokens: int, precision: str
) -> List[str]:
    """Options of fairseq-train for an experiment; data and --save-dir are the caller's.

    Args:
        recipe: the experiment.
        model: `moa_transformer`, or `transformer` for the dense baseline.
        num_workers: devices that train together, over all nodes.
        max_tokens: tokens of a batch on one of them.
        precision: `fp16` (mixed) or `fp32`. bf16 is missing, since fairseq's --bf16 asks for a
            TPU on the command line.

    Raises:
        UsageError: for values that cannot work, naming flag, value and remedy.
    """
    for flag, value, known in (("--model", model, MODELS), ("--precision", precision, PRECISIONS)):
        if value not in known:
            raise UsageError(f"{flag} {value}: give {' or '.join(known)}")
    criterion = ["--criterion", "label_smoothed_cross_entropy"]
    if model == "moa_transformer":
        criterion = [
            *("--criterion", "label_smoothed_cross_entropy_with_router_loss"),
            *ROUTER_LOSS_OPTIONS,
        ]
    source_lang, target_lang = recipe.pair.split("-")
    return [
        *("--source-lang", source_lang, "--target-lang", target_lang),
        *("--arch", ARCHITECTURES[model, recipe.size], *criterion, *SHARED_OPTIONS),
        *("--lr", str(recipe.learning_rate), "--warmup-updates", str(recipe.warmup_updates)),
        *("--dropout", str(recipe.dropout), "--attention-dropout", str(recipe.attention_dropout)),
        *("--activation-dropout", str(recipe.activation_dropout)),
        *("--max-epoch", str(recipe.max_epoch)),
        *("--max-tokens", str(max_tokens)),
        *("--update-freq", str(update_frequency(num_workers, max_tokens))),
        *("--distributed-world-size", str(num_workers)),
        *HOUSEKEEPING_OPTIONS,
        *(("--fp16",) if precision == "fp16" else ()),
    ]


def provenance(recipe: TrainingRecipe, model: str) -> str:
    """One line on how sure the figures of an experiment are."""
    line = (
        f"{recipe.pair} {recipe.size}: batch, learning rate, warm-up, dropout and epochs are "
        f"{recipe.source}"
    )
    if model == "transformer":
        line += "; that the dense baseline trains with them too is a choice made here"
    return line
