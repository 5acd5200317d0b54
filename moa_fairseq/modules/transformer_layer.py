"""fairseq's Transformer layers with MoA attention in the places that `--moa-modules` names.

With `--ffn-type moe` their feed-forward is a mixture of experts too.
"""

from __future__ import annotations

from typing import Any, Optional

from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from ..compat import recompute
from ..fast_path import EncoderLayerWithoutFastPath, measurable
from .moa_attention import CROSS, DECODER_SELF, ENCODER_SELF, MixtureOfAttentionHeads
from .moe_feed_forward import (
    DECODER_FFN,
    ENCODER_FFN,
    MixtureOfFeedForwards,
    padding_of_tokens,
)


class RecomputedLayer(nn.Module):
    """Put before a layer's class: `recompute_activations` and `offload_activations` act on it."""

    recompute_activations = False
    offload_activations = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.recompute_activations:
            return super().forward(*args, **kwargs)
        return recompute(super().forward, self.offload_activations, *args, **kwargs)


class FeedForwardEncoderLayer(EncoderLayerWithoutFastPath):
    """An encoder layer whose feed-forward is what `cfg.moa.ffn_type` says."""

    def __init__(self, cfg: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if cfg.moa.ffn_type == "moe":
            replace_feed_forward(self, ENCODER_FFN, cfg.encoder, cfg)

    def forward(
        self, x: Tensor, encoder_padding_mask: Optional[Tensor], *args: Any, **kwargs: Any
    ) -> Any:
        with padding_of_tokens(encoder_padding_mask):
            return super().forward(x, encoder_padding_mask, *args, **kwargs)


class FeedForwardDecoderLayer(TransformerDecoderLayerBase):
    """A decoder layer whose feed-forward is what `cfg.moa.ffn_type` says."""

    def __init__(self, cfg: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if cfg.moa.ffn_type == "moe":
            replace_feed_forward(self, DECODER_FFN, cfg.decoder, cfg)

    def forward(
        self, x: Tensor, *args: Any, self_attn_padding_mask: Optional[Tensor] = None, **kwargs: Any
    ) -> Any:
        with padding_of_tokens(self_attn_padding_mask):
            return super().forward(
                x, *args, self_attn_padding_mask=self_attn_padding_mask, **kwargs
            )


class MoATransformerEncoderLayer(RecomputedLayer, FeedForwardEncoderLayer):
    """An encoder layer; `cfg.moa` holds a :class:`~moa_fairseq.models.config.MoAOptions`."""

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        if ENCODER_SELF not in cfg.moa.modules:
            return super().build_self_attention(embed_dim, cfg)
        return measurable(
            build_moa_attention(ENCODER_SELF, embed_dim, cfg.encoder.attention_heads, cfg)
        )


class MoATransformerDecoderLayer(RecomputedLayer, FeedForwardDecoderLayer):
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
        expert_backend=cfg.moa.expert_backend,
    )


def replace_feed_forward(layer: Any, kind: str, side: Any, cfg: TransformerConfig) -> None:
    """Put a mixture of feed-forwards in the place of fairseq's.

    fairseq's layers compute `fc2(dropout(activation_fn(fc1(x))))`. The first of them becomes the
    whole mixture, with the activation and the dropout inside, the others do nothing.
    """
    layer.fc1 = MixtureOfFeedForwards(
        side.embed_dim,
        side.ffn_embed_dim,
        cfg.moa.ffn_num_selected,
        cfg.moa.ffn_num_experts,
        layer.activation_fn,
        layer.activation_dropout_module.p,
        kind=kind,
        gate_normalization=cfg.moa.gate_normalization,
        router_noise=cfg.moa.router_noise,
        router_init_std=cfg.moa.router_init_std,
        quant_noise_pq=cfg.quant_noise.pq,
        quant_noise_block_size=cfg.quant_noise.pq_block_size,
        expert_backend=cfg.moa.expert_backend,
    )
    layer.activation_fn = nn.Identity()
    layer.activation_dropout_module = nn.Identity()
    layer.fc2 = nn.Identity()
