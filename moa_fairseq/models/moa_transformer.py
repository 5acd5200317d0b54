"""The MoA Transformer: fairseq's encoder-decoder with MoA attention, and its named variants."""

from __future__ import annotations

from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModelBase,
)
from torch import nn

from ..modules.recording import moa_attentions
from ..modules.transformer_layer import (
    MoATransformerDecoderLayer,
    MoATransformerEncoderLayer,
    RecomputedLayer,
)
from ..spellings import MODEL_SPELLINGS, SpellingParser
from .config import MoATransformerConfig, named_variant, transformer_config
from .loading import OneLineForAnotherModel


class MoATransformerEncoder(TransformerEncoderBase):
    """fairseq's Transformer encoder with MoA layers."""

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        return wrap_layer(MoATransformerEncoderLayer(cfg, return_fc=self.return_fc), cfg)


class MoATransformerDecoder(TransformerDecoderBase):
    """fairseq's Transformer decoder with MoA layers."""

    def build_decoder_layer(
        self, cfg: TransformerConfig, no_encoder_attn: bool = False
    ) -> nn.Module:
        return wrap_layer(MoATransformerDecoderLayer(cfg, no_encoder_attn), cfg)


def wrap_layer(layer: RecomputedLayer, cfg: TransformerConfig) -> nn.Module:
    """Activation checkpointing and fairscale's sharding, where `cfg` asks for them."""
    layer.recompute_activations = cfg.checkpoint_activations
    layer.offload_activations = cfg.offload_activations
    # A checkpointed layer is always wrapped for sharding, whatever its size, as in fairseq.
    return fsdp_wrap(
        layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap
    )


@register_model("moa_transformer", dataclass=MoATransformerConfig)
class MoATransformerModel(OneLineForAnotherModel, TransformerModelBase):
    """Transformer whose attention heads are routed experts (arXiv 2210.05144)."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        # Without defaults: they come from the config class of the chosen architecture.
        config_class = getattr(cls, "__dataclass")
        gen_parser_from_dataclass(
            SpellingParser(parser, MODEL_SPELLINGS), config_class(), delete_default=True
        )

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> MoATransformerModel:
        """Build the model for `task` from flat options.

        Raises:
            UsageError: for options that cannot work, naming flag, value and remedy.
        """
        return super().build_model(transformer_config(cfg), task)

    def set_beam_size(self, beam_size: int) -> None:
        """How many hypotheses of a sentence stand side by side; from fairseq's beam search.

        Only MoA's attentions are told. fairseq's own would take neighbours for hypotheses in a
        later search without a beam, of which fairseq says nothing.
        """
        for _, _, attention in moa_attentions(self):
            attention.set_beam_size(beam_size)

    @classmethod
    def build_encoder(
        cls, cfg: TransformerConfig, src_dict: Any, embed_tokens: nn.Embedding
    ) -> MoATransformerEncoder:
        return MoATransformerEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(
        cls, cfg: TransformerConfig, tgt_dict: Any, embed_tokens: nn.Embedding
    ) -> MoATransformerDecoder:
        return MoATransformerDecoder(
            cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention
        )


# A named architecture is a config class with other defaults. fairseq's architecture functions
# would not do: from a hydra YAML they run after the defaults are filled in, and change nothing.
NAMED_VARIANTS = {
    "moa_transformer_base": named_variant(
        "MoATransformerBaseConfig", "The paper's base model, 8K8E128D."
    ),
    "moa_transformer_big": named_variant(
        "MoATransformerBigConfig",
        "The paper's big model, 16K32E256D; like the base, d = 512 and FFN 2048.",
        encoder_attention_heads=16,
        decoder_attention_heads=16,
        num_experts=32,
        head_dim=256,
    ),
    "moa_transformer_iwslt_de_en": named_variant(
        "MoATransformerIwsltDeEnConfig",
        "4K8E128D in the size of fairseq's transformer_iwslt_de_en.",
        encoder_ffn_embed_dim=1024,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
    ),
    "moa_transformer_tiny": named_variant(
        "MoATransformerTinyConfig",
        "4K8E32D, two layers a side, d = 128: trains on a laptop.",
        encoder_embed_dim=128,
        encoder_ffn_embed_dim=256,
        encoder_layers=2,
        encoder_attention_heads=4,
        decoder_layers=2,
        decoder_attention_heads=4,
        head_dim=32,
    ),
}
for _name, _config in NAMED_VARIANTS.items():
    _class = type(_config.__name__.replace("Config", "Model"), (MoATransformerModel,), {})
    _class.__module__ = __name__
    _class.__doc__ = _config.__doc__
    globals()[_class.__name__] = register_model(_name, dataclass=_config)(_class)
