"""`moa-profile`: parameters and multiply-adds of a translation Transformer."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Optional, Sequence

from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.transformer import TransformerModelBase
from omegaconf import OmegaConf
from torch import nn

from ..analysis.costs import PAPER_LENGTH, count_parameters, linear_macs
from ..compat import without_memory
from ..errors import UsageError
from .common import command


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        prog="moa-profile",
        description=__doc__,
        epilog="Options of the architecture follow as for fairseq-train, for instance "
        "--num-experts 32 --share-all-embeddings.",
    )
    parser.add_argument("--arch", required=True, help="a translation Transformer of fairseq or MoA")
    parser.add_argument("--vocab-size", type=int, required=True, help="types in the dictionary")
    parser.add_argument(
        "--length",
        type=int,
        default=PAPER_LENGTH,
        help=f"tokens in the source and in the target (default: {PAPER_LENGTH}, as in the paper)",
    )
    args, rest = parser.parse_known_args(arguments)
    model_class = ARCH_MODEL_REGISTRY.get(args.arch)
    if model_class is None or not issubclass(model_class, TransformerModelBase):
        raise UsageError(
            f"--arch {args.arch} is not a translation Transformer; moa-profile knows, "
            "among others, transformer, moa_transformer, moa_transformer_big and _tiny"
        )
    for flag, value in (("--vocab-size", args.vocab_size), ("--length", args.length)):
        if value < 1:
            raise UsageError(f"{flag} {value}: it must be at least 1")
    model = build(args.arch, args.vocab_size, rest)
    print(f"parameters  {count_parameters(model) / 1e6:.2f}M  ({count_parameters(model):,})")
    print(
        f"linear MACs {linear_macs(model, args.length) / 1e6:.1f}M  "
        f"(source and target of {args.length} tokens)"
    )


def build(arch: str, vocab_size: int, options: Sequence[str]) -> nn.Module:
    """The model of an architecture with options of the command line, without memory for it."""
    parser = argparse.ArgumentParser(
        prog=f"moa-profile --arch {arch}",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        add_help=False,
    )
    model_class = ARCH_MODEL_REGISTRY[arch]
    model_class.add_args(parser)
    flat = parser.parse_args(list(options))
    ARCH_CONFIG_REGISTRY[arch](flat)
    dictionary = Dictionary()
    for number in range(vocab_size - len(dictionary)):
        dictionary.add_symbol(str(number))
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    if arch in MODEL_DATACLASS_REGISTRY:
        flat = OmegaConf.merge(OmegaConf.structured(MODEL_DATACLASS_REGISTRY[arch]), vars(flat))
    with without_memory():
        return model_class.build_model(flat, task)
