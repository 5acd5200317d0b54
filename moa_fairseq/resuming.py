"""A run goes on only with the model that its checkpoint was trained with.

Some options change what a model computes and no parameter: K, the gates, how an expert's width
is split into heads. fairseq compares parameters alone, and would go on with another model.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Dict, Mapping

from omegaconf import OmegaConf

from .compat import resumption_checks
from .errors import UsageError
from .models.config import FlatTransformerConfig, MoATransformerConfig
from .models.masked_lm_config import DenseMaskedLMConfig

# What a MoA model computes, beside its parameters. Options that only shape training, or name
# files and limits, may change from run to run.
COMPUTING_OPTIONS = (
    *("encoder_attention_heads", "decoder_attention_heads", "num_experts", "head_dim"),
    *("heads_per_expert", "gate_normalization", "moa_modules", "router_noise", "projection_bias"),
    *("ffn_type", "ffn_num_experts", "ffn_num_selected", "activation_fn", "no_scale_embedding"),
    *("encoder_normalize_before", "decoder_normalize_before", "layernorm_embedding"),
    *("no_token_positional_embeddings", "encoder_learned_pos", "decoder_learned_pos"),
    "positions",
)
# What fairseq's own models have of them.
_DENSE = {
    field.name
    for config in (FlatTransformerConfig, DenseMaskedLMConfig)
    for field in fields(config)
}
DENSE_OPTIONS = tuple(name for name in COMPUTING_OPTIONS if name in _DENSE)


def refuse_another_model(path: str, state: Mapping[str, Any], cfg: Any) -> None:
    """Refuse to resume from a checkpoint of a model of this package with other options.

    Args:
        path: the checkpoint.
        state: what fairseq read from it.
        cfg: the trainer's config.

    Raises:
        UsageError: naming the first option that differs, both values and the remedy.
    """
    ours, theirs = options_of(cfg.model), options_of((state.get("cfg") or {}).get("model"))
    with_moa = "num_experts" in ours
    if not theirs or not (with_moa or str(ours.get("arch")).startswith("dense_")):
        return  # a checkpoint that does not say what it is; or a model that is not of this package
    if with_moa != ("num_experts" in theirs):
        arch, which = theirs.get("arch"), "no " if with_moa else ""
        raise UsageError(
            f"{path}: the checkpoint is not of this model, but of --arch {arch}, which has {which}"
            "MoA attention; train with that --arch, or choose another --save-dir"
        )
    defaults = vars(MoATransformerConfig())
    for name in COMPUTING_OPTIONS if with_moa else DENSE_OPTIONS:
        # An option that came with a later version has its default in a checkpoint without it.
        values = [_value(name, options.get(name, defaults.get(name))) for options in (theirs, ours)]
        if values[0] != values[1]:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{path}: the checkpoint is not of this model: it was trained with {flag} "
                f"{values[0]}, and this run has {flag} {values[1]}; give {flag} {values[0]} or "
                "choose another --save-dir, or use --finetune-from-model or --reset-optimizer to "
                "change the model on purpose"
            )


def options_of(model: Any) -> Dict[str, Any]:
    """A model's options by name, from what fairseq keeps them in (nothing where it is None)."""
    if OmegaConf.is_config(model):
        model = OmegaConf.to_container(model)
    options = dict(model or {}) if isinstance(model, (Mapping, type(None))) else vars(model)
    return {"arch": options.get("_name"), **options} if options else {}


def _value(name: str, value: Any) -> Any:
    if name == "moa_modules":
        return ",".join(sorted(part.strip() for part in str(value).split(",")))
    return getattr(value, "value", value)


resumption_checks.append(refuse_another_model)
