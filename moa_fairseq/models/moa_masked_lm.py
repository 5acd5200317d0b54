"""Masked language models: fairseq's RoBERTa with MoA in its encoder, and its dense twin.

Head, embeddings, initialisation and training are RoBERTa's; the encoder of the one is the
translation model's :class:`~moa_fairseq.models.moa_transformer.MoATransformerEncoder`.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from typing import Any, ClassVar, Type

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.roberta import RobertaEncoder, RobertaModel
from fairseq.models.transformer import TransformerEncoderBase
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import nn

from ..fast_path import close_fast_path
from ..modules.recording import moa_attentions
from ..spellings import MODEL_SPELLINGS, SpellingParser
from .loading import OneLineForAnotherModel
from .masked_lm_config import (
    DenseMaskedLMConfig,
    MoAMaskedLMConfig,
    masked_lm_transformer_config,
    settle_max_positions,
)
from .moa_transformer import MoATransformerEncoder


class DenseMaskedLMEncoder(RobertaEncoder):
    """RoBERTa's encoder and head, from flat options."""

    transformer_class: ClassVar[Type[TransformerEncoderBase]] = TransformerEncoderBase

    def build_encoder(
        self, args: Namespace, dictionary: Any, embed_tokens: nn.Embedding
    ) -> TransformerEncoderBase:
        cfg = masked_lm_transformer_config(args)
        encoder = self.transformer_class(cfg, dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder


class MoAMaskedLMEncoder(DenseMaskedLMEncoder):
    """RoBERTa's head on the translation model's encoder of MoA layers."""

    transformer_class = MoATransformerEncoder


@register_model("dense_masked_lm", dataclass=DenseMaskedLMConfig)
class DenseMaskedLMModel(OneLineForAnotherModel, RobertaModel):
    """fairseq's RoBERTa (8 layers, d = 512, FFN 2048, 8 heads) with a flat config.

    With the options of `--arch roberta` it has that model's parameters and computes the same;
    fairseq registers that one without a config class, so that a hydra YAML cannot choose it.
    """

    encoder_class: ClassVar[Type[DenseMaskedLMEncoder]] = DenseMaskedLMEncoder

    @classmethod
    def add_args(cls, parser: Any) -> None:
        # Without defaults: they come from the config class of the chosen architecture.
        config_class = getattr(cls, "__dataclass")
        gen_parser_from_dataclass(
            SpellingParser(parser, MODEL_SPELLINGS), config_class(), delete_default=True
        )

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> DenseMaskedLMModel:
        """Build the model for `task` from flat options.

        Raises:
            UsageError: for options that cannot work, naming flag, value and remedy.
        """
        settle_max_positions(cfg, task.max_positions())
        names = [each.name for each in fields(getattr(cls, "__dataclass")) if each.name[0] != "_"]
        options = Namespace(**{name: getattr(cfg, name) for name in names})
        masked_lm_transformer_config(options)
        # RoBERTa's encoder asks for it; here a smaller model comes from a smaller one's training.
        options.encoder_layers_to_keep = None
        model = cls(options, cls.encoder_class(options, task.source_dictionary))
        close_fast_path(model)
        return model


@register_model("moa_masked_lm", dataclass=MoAMaskedLMConfig)
class MoAMaskedLMModel(DenseMaskedLMModel):
    """RoBERTa whose attention heads are routed experts (arXiv 2210.05144)."""

    encoder_class = MoAMaskedLMEncoder

    def __init__(self, args: Namespace, encoder: MoAMaskedLMEncoder) -> None:
        super().__init__(args, encoder)
        # BERT's initialisation is of all that is linear, and so of MoA's keys and values too.
        for _, _, attention in moa_attentions(self):
            attention.reset_parameters()
