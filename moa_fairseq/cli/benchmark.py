"""Speed and memory of models, side by side, as ratios to the first of them.

Measures one attention module (forward and backward), training (updates of fairseq's trainer),
beam search, and the peak memory of training, with an untrained model on random tokens.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
from pathlib import Path
from typing import Optional, Sequence

import torch

from ..analysis.benchmark import MEASURES, Plan, parse_model, run, table
from ..analysis.benchmark_subject import PRECISIONS, Setting
from ..errors import UsageError
from ..text.files import write_lines
from .common import command

logger = logging.getLogger("benchmark")


def add_conditions(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")


def check_device(args: argparse.Namespace) -> None:
    """Refuse a device that is not there."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no GPU; use --device cpu")


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmark.py", description=__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["stock", "8K8E128D", "8K32E128D"],
        help="stock, stock@WIDTH, a MoA such as 8K32E128D, or NAME='--arch ARCH OPTIONS'; the "
        "others are compared to the first (default: %(default)s)",
    )
    parser.add_argument(
        "--options", default="", help="options of fairseq-train that every model gets, in one text"
    )
    parser.add_argument("--measures", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument(
        "--batch-sizes", nargs="+", type=int, default=[16], help="sentences, in beam search"
    )
    add_conditions(parser)
    for name, text in (
        ("vocab-size", "types in the joint dictionary"),
        ("tokens", "target tokens in a batch of training"),
        ("length", "mean length of a sentence in tokens"),
        ("beam", "hypotheses of a sentence"),
        ("module-batch", "sentences that the attention module gets"),
        ("module-length", "tokens of each of them"),
    ):
        default = getattr(Setting, name.replace("-", "_"))
        parser.add_argument(
            f"--{name}", type=int, default=default, help=f"{text} (default: {default})"
        )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="put models through torch.compile first; the first round, which does not count, then "
        "takes minutes. Not with generate",
    )
    parser.add_argument("--json", type=Path, help="write every round and all conditions here")
    args = parser.parse_args(arguments)
    for flag in ("repeats", "threads", "vocab_size", "tokens", "length", "beam", "module_batch"):
        if getattr(args, flag) < 1:
            value = getattr(args, flag)
            raise UsageError(f"--{flag.replace('_', '-')} {value}: it must be at least 1")
    if min(args.batch_sizes) < 1 or args.module_length < 1:
        raise UsageError("--batch-sizes and --module-length must be at least 1")
    if args.compile and "generate" in args.measures:
        raise UsageError("--compile: leave generate out of --measures; lengths change at each step")
    if args.compile and not hasattr(torch, "compile"):
        raise UsageError("--compile needs torch 2.0 or later; leave it out")
    check_device(args)
    if args.json is not None and not args.json.parent.is_dir():
        raise UsageError(f"--json {args.json}: its folder does not exist; make it first")
    common = shlex.split(args.options)
    models = tuple(parse_model(text, common) for text in args.models)
    if len({model.name for model in models}) < len(models):
        raise UsageError("--models: a name stands twice; give each model a name of its own")
    setting = Setting(
        device=args.device,
        precision=args.precision,
        vocab_size=args.vocab_size,
        tokens=args.tokens,
        length=args.length,
        beam=args.beam,
        module_batch=args.module_batch,
        module_length=args.module_length,
        compiled=args.compile,
    )
    plan = Plan(
        models, tuple(args.measures), tuple(args.batch_sizes), args.repeats, args.threads, setting
    )
    outcome = run(plan, logger.info)
    if args.json is not None:
        write_lines(args.json, [json.dumps(outcome, indent=2)])
    print(table(outcome))
