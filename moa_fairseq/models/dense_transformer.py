"""fairseq's own Transformer under a name that a hydra YAML can use.

fairseq registers its `transformer` without a config class, so that only the command line can
choose it. Sizes, defaults, parameters and training are those of `--arch transformer`; nothing of
MoA is in here.
"""

from __future__ import annotations

from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer import TransformerModelBase

from ..fast_path import close_fast_path
from .config import FlatTransformerConfig, dense_transformer_config, named_variant


@register_model("dense_transformer", dataclass=FlatTransformerConfig)
class DenseTransformerModel(TransformerModelBase):
    """fairseq's Transformer (d = 512, FFN 2048, 8 heads, 6+6 layers) with a flat config."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        # Without defaults: they come from the config class of the chosen architecture.
        config_class = getattr(cls, "__dataclass")
        gen_parser_from_dataclass(parser, config_class(), delete_default=True)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> DenseTransformerModel:
        """Build the model for `task` from flat options."""
        model = super().build_model(dense_transformer_config(cfg), task)
        close_fast_path(model)
        return model


# As for MoA's variants: a config class with other defaults, which hydra can use too.
@register_model(
    "dense_transformer_big",
    dataclass=named_variant(
        "DenseTransformerBigConfig",
        "The usual big Transformer: d = 1024, FFN 4096, 16 heads, as transformer_wmt_en_de_big.",
        base=FlatTransformerConfig,
        encoder_embed_dim=1024,
        encoder_ffn_embed_dim=4096,
        encoder_attention_heads=16,
        decoder_attention_heads=16,
    ),
)
class DenseTransformerBigModel(DenseTransformerModel):
    """The usual big Transformer (d = 1024, FFN 4096, 16 heads, 6+6 layers)."""
