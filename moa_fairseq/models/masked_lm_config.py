"""Options of masked language models: fairseq's RoBERTa's, flat, and MoA's own.

No `from __future__ import annotations` here: fairseq reads the types of the fields.
"""

from argparse import Namespace
from contextlib import nullcontext
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Any, Dict, List, Optional, Tuple, Type

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import TransformerConfig
from fairseq.utils import get_available_activation_fns
from omegaconf import OmegaConf, open_dict

from ..errors import UsageError
from ..modules.moa_attention import ENCODER_SELF
from .config import (
    FlatTransformerConfig,
    MoATransformerConfig,
    dense_transformer_config,
    transformer_config,
)

POSITIONS = ("learned", "sinusoidal", "none")

# What a masked language model has of the Transformer's options, with the defaults of the paper's
# models where they differ from the Transformer's.
_FROM_TRANSFORMER: Dict[str, Dict[str, Any]] = {
    "activation_fn": {"default": "gelu"},
    "dropout": {},
    "attention_dropout": {},
    "activation_dropout": {},
    "encoder_embed_dim": {},
    "encoder_ffn_embed_dim": {},
    "encoder_layers": {"default": 8},
    "encoder_attention_heads": {},
    "encoder_normalize_before": {
        "help": "layer norm before each block instead of after it, and none on the embeddings, "
        "as in fairseq's roberta_prenorm"
    },
    "encoder_layerdrop": {},
    "checkpoint_activations": {},
    "offload_activations": {},
    "min_params_to_wrap": {},
    "quant_noise_pq": {},
    "quant_noise_pq_block_size": {},
    "quant_noise_scalar": {},
}


def _fields_like(
    source: Type[Any], wanted: Dict[str, Dict[str, Any]]
) -> List[Tuple[str, Any, Field]]:
    """Fields of a config class under their names; `wanted` may change a default or a help."""
    known = {each.name: each for each in fields(source)}
    chosen = []
    for name, changes in wanted.items():
        metadata = dict(known[name].metadata)
        if "help" in changes:
            metadata["help"] = changes["help"]
        default = changes.get("default", known[name].default)
        chosen.append((name, known[name].type, field(default=default, metadata=metadata)))
    return chosen


_EncoderOptions = make_dataclass(
    "_EncoderOptions",
    _fields_like(FlatTransformerConfig, _FROM_TRANSFORMER),
    bases=(FairseqDataclass,),
    namespace={"__module__": __name__},
)


@dataclass
class DenseMaskedLMConfig(_EncoderOptions):  # type: ignore[misc, valid-type]
    """fairseq's RoBERTa in the size of the paper's masked language models: 8 layers, d = 512."""

    positions: ChoiceEnum(POSITIONS) = field(  # type: ignore[valid-type]
        default="learned",
        metadata={"help": "embeddings of positions: learned, as in RoBERTa, sinusoidal, or none"},
    )
    max_positions: Optional[int] = field(
        default=None,
        metadata={"help": "positions of a model (default: that of --tokens-per-sample)"},
    )
    untie_weights_roberta: bool = field(
        default=False,
        metadata={"help": "give the output layer weights of its own, not the embeddings'"},
    )
    pooler_activation_fn: ChoiceEnum(get_available_activation_fns()) = field(  # type: ignore
        default="tanh",
        metadata={"help": "activation of classification heads, for fine-tuning"},
    )
    pooler_dropout: float = field(
        default=0.0, metadata={"help": "dropout in classification heads, for fine-tuning"}
    )
    spectral_norm_classification_head: bool = field(
        default=False, metadata={"help": "spectral normalization of classification heads"}
    )
    load_checkpoint_heads: bool = field(
        default=False, metadata={"help": "load the classification heads that a checkpoint has"}
    )


_MOA_NAMES = [
    each.name
    for each in fields(MoATransformerConfig)
    if each.name not in {known.name for known in fields(FlatTransformerConfig)}
    # An encoder has one kind of attention. Without MoA in it a model is the dense one.
    and each.name != "moa_modules"
]
_MoAOptions = make_dataclass(
    "_MoAOptions",
    _fields_like(MoATransformerConfig, {name: {} for name in _MOA_NAMES}),
    bases=(DenseMaskedLMConfig,),
    namespace={"__module__": __name__},
)


@dataclass
class MoAMaskedLMConfig(_MoAOptions):  # type: ignore[misc, valid-type]
    """RoBERTa's options and MoA's. Defaults are the paper's smallest, 8K8E128D.

    K, the number of experts that a token uses, is `--encoder-attention-heads`.
    """


def masked_lm_transformer_config(options: Namespace) -> TransformerConfig:
    """fairseq's nested config of the encoder in a masked language model.

    Args:
        options: the fields of a :class:`DenseMaskedLMConfig` or :class:`MoAMaskedLMConfig`, with
            `max_positions` settled.

    Raises:
        UsageError: for options that cannot work, naming flag, value and remedy.
    """
    positions = str(getattr(options.positions, "value", options.positions))
    if positions not in POSITIONS:
        raise UsageError(f"--positions {positions}: give one of {', '.join(POSITIONS)}")
    if not 0 <= options.pooler_dropout <= 1:
        raise UsageError(f"--pooler-dropout {options.pooler_dropout}: it must lie between 0 and 1")
    flat = Namespace(**vars(options))
    # What BERT has otherwise than the Transformer, as in fairseq's architecture `roberta`.
    flat.layernorm_embedding = not options.encoder_normalize_before
    flat.no_scale_embedding = True
    flat.encoder_learned_pos = positions == "learned"
    flat.no_token_positional_embeddings = positions == "none"
    flat.max_source_positions = options.max_positions
    # There is no decoder; its sizes follow the encoder's.
    flat.decoder_attention_heads, flat.decoder_layers = 1, 0
    if not hasattr(options, "num_experts"):
        return dense_transformer_config(flat)
    flat.moa_modules = ENCODER_SELF
    return transformer_config(flat)


def settle_max_positions(flat: Any, tokens_per_sample: int) -> None:
    """Give a model as many positions as a sample has tokens, unless it is told how many.

    Args:
        flat: the options of a model, changed in place, so that a checkpoint says how many.
        tokens_per_sample: most tokens of a sample, `<s>` among them.

    Raises:
        UsageError: where a sample would be longer than the model has positions for.
    """
    if getattr(flat, "max_positions", None) is None:
        with open_dict(flat) if OmegaConf.is_config(flat) else nullcontext():
            flat.max_positions = tokens_per_sample
    if flat.max_positions < tokens_per_sample:
        raise UsageError(
            f"--tokens-per-sample {tokens_per_sample} is more than --max-positions "
            f"{flat.max_positions}; lower the one, or train with the other raised"
        )
