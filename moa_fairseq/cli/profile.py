"""`moa-profile`: parameters and multiply-adds of a Transformer for translation or masked LM."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Optional, Sequence

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.roberta import RobertaModel
from fairseq.models.transformer import TransformerModelBase
from omegaconf import OmegaConf
from torch import nn

from ..analysis.costs import (
    PAPER_LENGTH,
    all_macs,
    count_parameters,
    counted_macs,
    head_macs,
    linear_macs,
    torch_can_count,
)
from ..analysis.dictionaries import numbered_dictionary
from ..compat import without_memory
from ..errors import UsageError
from .common import command

# Table 1 counts parameters with the dictionary of En-Fr, and MACs with another.
PAPER_PARAMETER_TYPES = 44512
PAPER_MAC_TYPES = 32000
PAPER_MODELS = (
    ("Transformer base", "transformer"),
    ("Transformer big", "transformer_vaswani_wmt_en_de_big"),
    ("MoA base, 8K8E128D", "moa_transformer_base"),
    ("MoA big, 16K32E256D", "moa_transformer_big"),
)


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        prog="moa-profile",
        description=__doc__,
        epilog="Options of the architecture follow as for fairseq-train, for instance "
        "--num-experts 32 --share-all-embeddings.",
    )
    parser.add_argument("--arch", help="a Transformer of fairseq or MoA")
    parser.add_argument(
        "--vocab-size",
        type=int,
        help="types in the joint dictionary, <mask> of a masked language model among them",
    )
    parser.add_argument(
        "--length",
        type=int,
        default=PAPER_LENGTH,
        help=f"tokens in the source and in the target (default: {PAPER_LENGTH}, as in the paper); "
        "a masked language model has no target, and as many --max-positions as tokens unless told",
    )
    parser.add_argument(
        "--paper-table",
        action="store_true",
        help="print the costs of the models in the paper's Table 1 instead: parameters with "
        "its En-Fr dictionary of 44,512 types, linear MACs with 32,000 types",
    )
    args, rest = parser.parse_known_args(arguments)
    if args.paper_table:
        if args.arch or args.vocab_size or rest:
            raise UsageError("--paper-table stands alone; leave out the other options")
        print(paper_table())
        return
    for flag, given in (("--arch", args.arch), ("--vocab-size", args.vocab_size)):
        if given is None:
            raise UsageError(f"{flag} is missing; give it, or --paper-table alone")
    model_class = ARCH_MODEL_REGISTRY.get(args.arch)
    if model_class is None or not issubclass(model_class, (TransformerModelBase, RobertaModel)):
        raise UsageError(
            f"--arch {args.arch} is not a translation Transformer or masked language model; "
            "moa-profile knows, among others, transformer, moa_transformer, moa_masked_lm and "
            "dense_masked_lm"
        )
    for flag, value in (("--vocab-size", args.vocab_size), ("--length", args.length)):
        if value < 1:
            raise UsageError(f"{flag} {value}: it must be at least 1")
    model = build(args.arch, args.vocab_size, rest, args.length)
    linear, everything = linear_macs(model, args.length), all_macs(model, args.length)
    check = "torch before 2.3 cannot count them"
    if torch_can_count():
        in_memory = build(args.arch, args.vocab_size, rest, args.length, "cpu")
        counted = counted_macs(in_memory, args.length)
        check = f"torch counts {counted / 1e6:.1f}M"
    print(f"parameters   {count_parameters(model) / 1e6:.2f}M  ({count_parameters(model):,})")
    what = f"source and target of {args.length} tokens"
    if issubclass(model_class, RobertaModel):
        head = head_macs(model, args.length) / 1e6
        what = (
            f"{args.length} tokens; {head:.1f}M of them the head, which masked tokens alone reach"
        )
    print(f"linear MACs  {linear / 1e6:.1f}M  ({what}; as the paper counts)")
    print(
        f"all MACs     {everything / 1e6:.1f}M  (with routers and the products of queries, keys "
        f"and values; {check})"
    )


def paper_table() -> str:
    """Parameters and linear MACs of the models in the paper's Table 1, as Markdown."""
    lines = ["| model | parameters | MACs |", "| --- | --- | --- |"]
    for name, arch in PAPER_MODELS:
        shared = ["--share-all-embeddings"]
        parameters = count_parameters(build(arch, PAPER_PARAMETER_TYPES, shared)) / 1e6
        macs = linear_macs(build(arch, PAPER_MAC_TYPES, shared)) / 1e6
        lines.append(f"| {name} | {parameters:.1f}M | {macs:.1f}M |")
    return "\n".join(lines)


def build(
    arch: str,
    vocab_size: int,
    options: Sequence[str],
    max_positions: int = PAPER_LENGTH,
    device: str = "meta",
) -> nn.Module:
    """The model of an architecture with options of the command line.

    On the `meta` device it has shapes and no numbers, and takes no memory, unless it is a masked
    language model.

    Args:
        max_positions: of a masked language model, where the options do not say.
    """
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
    dictionary = numbered_dictionary(vocab_size)
    task = SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        max_positions=lambda: max_positions,
    )
    if arch in MODEL_DATACLASS_REGISTRY:
        flat = OmegaConf.merge(OmegaConf.structured(MODEL_DATACLASS_REGISTRY[arch]), vars(flat))
    # BERT's initialisation copies numbers, of which there are none on the `meta` device.
    no_memory = device == "meta" and not issubclass(model_class, RobertaModel)
    with without_memory() if no_memory else nullcontext():
        return model_class.build_model(flat, task)
