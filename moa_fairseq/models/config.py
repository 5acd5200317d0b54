"""Options of the MoA Transformer: fairseq's, flattened, and MoA's own.

No `from __future__ import annotations` here: fairseq reads the types of the fields.
"""

from argparse import Namespace
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, make_dataclass
from typing import Any, Dict, List, Optional, Tuple, Type

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import TransformerConfig

from ..errors import UsageError
from ..modules.expert_products import AUTO, BACKENDS
from ..modules.moa_attention import ATTENTION_KINDS, CROSS, DECODER_SELF, ENCODER_SELF
from ..modules.routing import GATE_NORMALIZATIONS
from .layers_to_keep import check_layers_to_keep
from .option_checks import check_transformer_options, flag


@dataclass(frozen=True)
class MoAOptions:
    """What the layers of a model need to know of MoA, validated."""

    modules: Tuple[str, ...]
    num_experts: int
    head_dim: int
    heads_per_expert: int
    gate_normalization: str
    router_noise: bool
    sample_topk: int
    router_init_std: float
    output_init_gain: float
    projection_bias: bool
    expert_backend: str
    ffn_type: str
    ffn_num_experts: int
    ffn_num_selected: int


FFN_TYPES = ("normal", "moe")

# Decoder sizes that follow the encoder's when they are not given, as in fairseq's own
# architectures, and the decoder's input and output that follow its inner size.
_FOLLOWS = (
    ("decoder_embed_dim", "encoder_embed_dim"),
    ("decoder_ffn_embed_dim", "encoder_ffn_embed_dim"),
    ("decoder_input_dim", "decoder_embed_dim"),
    ("decoder_output_dim", "decoder_embed_dim"),
)


def _flat_transformer_fields() -> List[Tuple[str, Any, Any]]:
    """The fields of fairseq's nested TransformerConfig under their command-line names.

    Taken from the installed fairseq, so that a build with more options has them here too.
    """
    flat: List[Tuple[str, Any, Any]] = []
    for outer in fields(TransformerConfig):
        if outer.name.startswith("_"):
            continue
        if is_dataclass(outer.type):
            for inner in fields(outer.type):
                if not inner.name.startswith("_"):
                    flat.append(_flat_field(f"{outer.name}_{inner.name}", inner))
        else:
            flat.append(_flat_field(outer.name, outer))
    return flat


def _flat_field(name: str, source: Field) -> Tuple[str, Any, Any]:
    metadata = dict(source.metadata)
    if name in dict(_FOLLOWS):
        metadata.setdefault("help", name.replace("_", " "))
        metadata["help"] += f" (default: that of --{dict(_FOLLOWS)[name].replace('_', '-')})"
        return name, Optional[int], field(default=None, metadata=metadata)
    if name.endswith("_layers_to_keep"):
        # fairseq declares a list and then splits a string at its commas.
        return name, Optional[str], field(default=None, metadata=metadata)
    if source.default_factory is not MISSING:
        return name, source.type, field(default_factory=source.default_factory, metadata=metadata)
    return name, source.type, field(default=source.default, metadata=metadata)


FlatTransformerConfig = make_dataclass(
    "FlatTransformerConfig",
    _flat_transformer_fields(),
    bases=(FairseqDataclass,),
    namespace={"__module__": __name__, "__doc__": "fairseq's Transformer options, flat."},
)


@dataclass
class MoATransformerConfig(FlatTransformerConfig):  # type: ignore[misc, valid-type]
    """fairseq's Transformer options and MoA's. Defaults are the paper's base, 8K8E128D.

    K, the number of experts that a token uses, is `--encoder-attention-heads` and
    `--decoder-attention-heads`.
    """

    num_experts: int = field(
        default=8,
        metadata={"help": "E: experts in each MoA attention; at least the number of heads K"},
    )
    head_dim: int = field(
        default=128, metadata={"help": "D: dimension of one attention head of an expert"}
    )
    heads_per_expert: int = field(
        default=1,
        metadata={"help": "H: attention heads in each expert; the experts share H key/value heads"},
    )
    gate_normalization: ChoiceEnum(GATE_NORMALIZATIONS) = field(  # type: ignore[valid-type]
        default="detached",
        metadata={
            "help": "how the probabilities of the selected experts become gates: divided by "
            "their detached sum (the paper), left as they are (the authors' code), or a softmax "
            "over the selected logits alone (JetMoE)"
        },
    )
    router_noise: bool = field(
        default=False,
        metadata={"help": "add learned Gaussian noise to the router's logits in training"},
    )
    sample_topk: int = field(
        default=0,
        metadata={
            "help": "how many of the K experts are sampled from the router's probabilities in "
            "training instead of taken by rank"
        },
    )
    router_init_std: float = field(
        default=0.02,
        metadata={"help": "standard deviation of the router's initial weights; positive"},
    )
    output_init_gain: float = field(
        default=0.4,
        metadata={
            "help": "initial size of the output of MoA attention, relative to that of fairseq's "
            "attention; positive. Below 1 a post-norm Transformer learns faster at first"
        },
    )
    moa_modules: str = field(
        default=",".join(ATTENTION_KINDS),
        metadata={
            "help": "comma-separated attentions that are MoA, of encoder-self, decoder-self and "
            "cross; the others are fairseq's own"
        },
    )
    projection_bias: bool = field(
        default=False,
        metadata={"help": "add biases to the query, key, value and output projections of MoA"},
    )
    expert_backend: ChoiceEnum(BACKENDS) = field(  # type: ignore[valid-type]
        default=AUTO,
        metadata={
            "help": "how products with experts are computed: all experts at once (dense), expert "
            "by expert (loop), torch's grouped product (grouped), or what suits K, E and the "
            "device (auto). The results are the same"
        },
    )
    ffn_type: ChoiceEnum(FFN_TYPES) = field(  # type: ignore[valid-type]
        default="normal",
        metadata={
            "help": "feed-forward of each layer: fairseq's (normal) or a mixture of experts (moe), "
            "each of them with the hidden size of --encoder-ffn-embed-dim or "
            "--decoder-ffn-embed-dim, with the router of the attentions but no --sample-topk"
        },
    )
    ffn_num_experts: int = field(
        default=8, metadata={"help": "experts in each feed-forward with --ffn-type moe"}
    )
    ffn_num_selected: int = field(
        default=2,
        metadata={"help": "experts of a feed-forward that a token uses with --ffn-type moe"},
    )


def named_variant(
    class_name: str, description: str, base: Type[Any] = MoATransformerConfig, **defaults: Any
) -> Type[Any]:
    """A config class with other defaults: what a named architecture is, for argparse and hydra.

    Args:
        class_name: name of the new class.
        description: its docstring.
        base: the config class whose defaults change.
        defaults: the new defaults by the name of the option.

    Raises:
        TypeError: for a default of an option that `base` does not have.
    """
    changed = []
    for known in fields(base):
        if known.name in defaults:
            default = field(default=defaults.pop(known.name), metadata=known.metadata)
            changed.append((known.name, known.type, default))
    if defaults:
        raise TypeError(f"no such options: {', '.join(defaults)}")
    return make_dataclass(
        class_name,
        changed,
        bases=(base,),
        namespace={"__module__": __name__, "__doc__": description},
    )


def transformer_config(flat: Any) -> TransformerConfig:
    """Turn flat options into fairseq's nested config, with MoA's validated as `.moa`.

    Args:
        flat: a :class:`MoATransformerConfig`, or a `DictConfig` or `Namespace` of its fields.

    Raises:
        UsageError: for options that cannot work, naming flag, value and remedy.
    """
    values = _resolved(flat)
    moa = moa_options(flat, values)
    check_transformer_options(values, moa.modules, moa.heads_per_expert * moa.head_dim)
    check_layers_to_keep(values)
    cfg = TransformerConfig.from_namespace(Namespace(**values))
    cfg.moa = moa
    return cfg


def dense_transformer_config(flat: Any) -> TransformerConfig:
    """Turn flat options into fairseq's nested config, without MoA's.

    Args:
        flat: a :class:`FlatTransformerConfig`, or a `DictConfig` or `Namespace` of its fields.

    Raises:
        UsageError: for options that cannot work, naming flag, value and remedy.
    """
    values = _resolved(flat)
    check_transformer_options(values)
    return TransformerConfig.from_namespace(Namespace(**values))


def _resolved(flat: Any) -> Dict[str, Any]:
    """fairseq's flat options by name, where decoder sizes that are not given follow."""
    values = {f.name: getattr(flat, f.name, f.default) for f in fields(FlatTransformerConfig)}
    for name, source in _FOLLOWS:
        if values[name] is None:
            values[name] = values[source]
    return values


def moa_options(flat: Any, transformer: dict) -> MoAOptions:
    """Read and validate MoA's options; `transformer` are fairseq's, resolved."""
    modules = parse_moa_modules(str(flat.moa_modules))
    for name, least in (("num_experts", 1), ("head_dim", 1), ("heads_per_expert", 1)):
        if int(getattr(flat, name)) < least:
            raise UsageError(f"{flag(name)} {getattr(flat, name)}: it must be at least {least}")
    if not flat.router_init_std > 0:
        raise UsageError(
            f"--router-init-std {flat.router_init_std}: it must be positive, since equal router "
            "weights send every token to the same experts; the default is 0.02"
        )
    if not flat.output_init_gain > 0:
        raise UsageError(
            f"--output-init-gain {flat.output_init_gain}: it must be positive; the default is 0.4"
        )
    if not 1 <= flat.ffn_num_selected <= flat.ffn_num_experts:
        raise UsageError(
            f"--ffn-num-selected {flat.ffn_num_selected}: it must lie between 1 and "
            f"--ffn-num-experts {flat.ffn_num_experts}"
        )
    for side, kinds in (("encoder", {ENCODER_SELF}), ("decoder", {DECODER_SELF, CROSS})):
        if kinds.isdisjoint(modules):
            continue
        heads = transformer[f"{side}_attention_heads"]
        if heads < 1:
            raise UsageError(f"--{side}-attention-heads {heads}: it must be at least 1")
        if heads > flat.num_experts:
            raise UsageError(
                f"--num-experts {flat.num_experts} is fewer than --{side}-attention-heads {heads}, "
                "the number of experts that each token selects; raise the one or lower the other"
            )
        if not 0 <= flat.sample_topk <= heads:
            raise UsageError(
                f"--sample-topk {flat.sample_topk}: it must lie between 0 and "
                f"--{side}-attention-heads {heads}"
            )
        if transformer.get(f"{side}_xformers_att_config"):
            raise UsageError(
                f"--{side}-xformers-att-config does not work with MoA attention; leave it out, or "
                f"take {' and '.join(sorted(kinds))} out of --moa-modules"
            )
    return MoAOptions(
        modules=modules,
        num_experts=int(flat.num_experts),
        head_dim=int(flat.head_dim),
        heads_per_expert=int(flat.heads_per_expert),
        gate_normalization=_choice(flat.gate_normalization),
        router_noise=bool(flat.router_noise),
        sample_topk=int(flat.sample_topk),
        router_init_std=float(flat.router_init_std),
        output_init_gain=float(flat.output_init_gain),
        projection_bias=bool(flat.projection_bias),
        expert_backend=_choice(flat.expert_backend),
        ffn_type=_choice(flat.ffn_type),
        ffn_num_experts=int(flat.ffn_num_experts),
        ffn_num_selected=int(flat.ffn_num_selected),
    )


def parse_moa_modules(text: str) -> Tuple[str, ...]:
    """The attentions that `--moa-modules` names, in the order of `ATTENTION_KINDS`."""
    named = [part.strip() for part in text.split(",") if part.strip()]
    unknown = [part for part in named if part not in ATTENTION_KINDS]
    if unknown or not named:
        raise UsageError(
            f"--moa-modules {text!r}: give one or more of {', '.join(ATTENTION_KINDS)}, separated "
            "by commas; for none of them use --arch transformer"
        )
    return tuple(kind for kind in ATTENTION_KINDS if kind in named)


def _choice(value: Any) -> str:
    """The text of a member of an enumeration, or the text itself."""
    return str(getattr(value, "value", value))
