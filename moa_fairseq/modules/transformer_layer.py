"""fairseq's Transformer layers with MoA attention in the places that `--moa-modules` names."""

from __future__ import annotations

from typing import Any, Optional

from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import (
    TransformerDecoderLayerBase,
    TransformerEncoderLayerBase,
)
from torch import nn

from ..compat import recompute
from .moa_attention import CROSS, DECODER_SELF, ENCODER_SELF, MixtureOfAttentionHeads


class RecomputedLayer(nn.Module):
    """Put before a layer's class: `recompute_activations` and `offload_activations` act on it."""

    recompute_activations = False
    offload_activations = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recompute_activations:
            return super().forward(*args, **kwargs)
        return recompute(super().forward, self.offload_activations, *args, **kwargs)


class MoATransformerEncoderLayer(RecomputedLayer, TransformerEncoderLayerBase):
    """An encoder layer; `cfg.moa` holds a :class:`~moa_fairseq.models.config.MoAOptions`."""

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        if ENCODER_SELF not in cfg.moa.modules:
            return super().build_self_attention(embed_dim, cfg)
        return build_moa_attention(ENCODER_SELF, embed_dim, cfg.encoder.attention_heads, cfg)


class MoATransformerDecoderLayer(RecomputedLayer, TransformerDecoderLayerBase):
    """A decoder layer; `cfg.moa` holds a :class:`~moa_fairseq.models.config.MoAOptions`."""

    def build_self_attention(
        self,
        embed_dim: int,
        cfg: TransformerConfig,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
    ) -> nn.Module:
        if DECODER_SELF not in cfg.moa.modules:
            return super().build_self_attention(embed_dim, cfg, add_bias_kv, add_zero_attn)
        if add_bias_kv or add_zero_attn:
            raise NotImplementedError("MoA attention has neither add_bias_kv nor add_zero_attn")
        return build_moa_attention(DECODER_SELF, embed_dim, cfg.decoder.attention_heads, cfg)

    def build_encoder_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        if CROSS not in cfg.moa.modules:
            return super().build_encoder_attention(embed_dim, cfg)
        return build_moa_attention(
            CROSS, embed_dim, cfg.decoder.attention_heads, cfg, key_dim=cfg.encoder.embed_dim
        )


def build_moa_attention(
    kind: str,
    embed_dim: int,
    num_selected: int,
    cfg: TransformerConfig,
    key_dim: Optional[int] = None,
) -> MixtureOfAttentionHeads:
    """The MoA attention of one layer, as `cfg` and its `cfg.moa` describe it."""
    return MixtureOfAttentionHeads(
        embed_dim,
        num_selected,
        cfg.moa.num_experts,
        cfg.moa.head_dim,
        heads_per_expert=cfg.moa.heads_per_expert,
        key_dim=key_dim,
        kind=kind,
        dropout=cfg.attention_dropout,
        bias=cfg.moa.projection_bias,
        gate_normalization=cfg.moa.gate_normalization,
        router_noise=cfg.moa.router_noise,
        sample_topk=cfg.moa.sample_topk,
        router_init_std=cfg.moa.router_init_std,
        output_init_gain=cfg.moa.output_init_gain,
        quant_noise_pq=cfg.quant_noise.pq,
        quant_noise_block_size=cfg.quant_noise.pq_block_size,
    )
