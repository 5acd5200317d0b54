"""Small models and batches for unit tests, made without files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from fairseq.data import Dictionary
from torch import Tensor

from moa_fairseq.models.config import MoATransformerConfig
from moa_fairseq.models.moa_transformer import MoATransformerModel

SMALL = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "num_experts": 4,
    "head_dim": 8,
    "dropout": 0.0,
    "share_all_embeddings": True,
    # Far enough from ties for tests that compare routings.
    "router_init_std": 0.5,
}


def toy_task(words: int = 20) -> Any:
    """What a model and a criterion need of a translation task."""
    dictionary = Dictionary()
    for word in range(words):
        dictionary.add_symbol(f"w{word}")
    return SimpleNamespace(
        source_dictionary=dictionary, target_dictionary=dictionary, src_dict=dictionary
    )


def half_precision(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, where this torch computes with it on a CPU; the test is skipped where not."""
    try:
        torch.ones(2, 2, dtype=dtype) @ torch.ones(2, 2, dtype=dtype)
    except RuntimeError as error:
        pytest.skip(f"torch {torch.__version__} on a CPU: {error}")
    return dtype


def toy_model(task: Optional[Any] = None, seed: int = 0, **options: Any) -> MoATransformerModel:
    torch.manual_seed(seed)
    config = MoATransformerConfig(**{**SMALL, **options})
    return MoATransformerModel.build_model(config, task or toy_task())


def toy_sample(
    task: Any,
    source_lengths: list[int],
    target_lengths: list[int],
    seed: int = 0,
    extra_padding: int = 0,
) -> dict[str, Any]:
    """A batch as fairseq collates it: sources padded left, targets right, eos moved first.

    The first lengths draw the same tokens whatever `extra_padding` is.
    """
    dictionary = task.source_dictionary
    pad, eos = dictionary.pad(), dictionary.eos()
    generator = torch.Generator().manual_seed(seed)

    def words(length: int) -> Tensor:
        return torch.randint(dictionary.nspecial, len(dictionary), (length,), generator=generator)

    source = torch.full((len(source_lengths), max(source_lengths) + 1 + extra_padding), pad)
    target = torch.full((len(target_lengths), max(target_lengths) + 1 + extra_padding), pad)
    previous = target.clone()
    for row, (source_length, target_length) in enumerate(zip(source_lengths, target_lengths)):
        source[row, -source_length - 1 :] = torch.cat((words(source_length), torch.tensor([eos])))
        sentence = words(target_length)
        target[row, : target_length + 1] = torch.cat((sentence, torch.tensor([eos])))
        previous[row, : target_length + 1] = torch.cat((torch.tensor([eos]), sentence))
    lengths = source.ne(pad).sum(1)
    return {
        "net_input": {
            "src_tokens": source,
            "src_lengths": lengths,
            "prev_output_tokens": previous,
        },
        "target": target,
        "ntokens": int(target.ne(pad).sum()),
        "nsentences": len(source_lengths),
    }
