"""Small masked language models and batches for tests, made without files."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

SMALL = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "num_experts": 4,
    "head_dim": 8,
    "dropout": 0.0,
    # Far enough from ties for tests that compare routings.
    "router_init_std": 0.5,
}
POSITIONS = 12


def toy_masked_task(words: int = 20) -> Any:
    """What a model and a criterion need of a task `masked_lm`."""
    dictionary = Dictionary()
    for word in range(words):
        dictionary.add_symbol(f"w{word}")
    dictionary.add_symbol("<mask>")
    return SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        max_positions=lambda: POSITIONS,
    )


def toy_masked_lm(arch: str = "moa_masked_lm", seed: int = 0, **options: Any) -> Any:
    """A model of 25 types; options that the architecture does not have are left out."""
    torch.manual_seed(seed)
    config = MODEL_DATACLASS_REGISTRY[arch]()
    for name, value in {**SMALL, **options}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return ARCH_MODEL_REGISTRY[arch].build_model(config, toy_masked_task())


def toy_masked_sample(lengths: list[int], masked: int = 2, extra_padding: int = 0) -> dict:
    """A batch as fairseq collates it, padded right; the first `masked` words of each are masked."""
    dictionary = toy_masked_task().source_dictionary
    width = max(lengths) + 2 + extra_padding
    source = torch.full((len(lengths), width), dictionary.pad())
    target = source.clone()
    generator = torch.Generator().manual_seed(0)
    for row, length in enumerate(lengths):
        words = torch.randint(4, 24, (length,), generator=generator)
        source[row, 0], source[row, length + 1] = dictionary.bos(), dictionary.eos()
        source[row, 1 : length + 1] = words
        target[row, 1 : masked + 1] = words[:masked]
        source[row, 1 : masked + 1] = dictionary.index("<mask>")
    return {
        "net_input": {"src_tokens": source, "src_lengths": source.ne(dictionary.pad()).sum(1)},
        "target": target,
        "ntokens": int(source.ne(dictionary.pad()).sum()),
        "nsentences": len(lengths),
    }
