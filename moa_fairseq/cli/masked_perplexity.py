"""`moa-masked-perplexity`: masked perplexity of a masked language model, and how it came about."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import numpy as np

from ..analysis.masked_perplexity import (
    BlockSums,
    Masking,
    block_sums,
    difference,
    load_masked_lm,
    perplexity_report,
    provenance,
    report_text,
)
from ..errors import UsageError
from ..text.files import read_lines, write_together
from ..text.scoring import RESAMPLES
from .common import command

COLUMNS = ("block", *BlockSums.__dataclass_fields__)


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    defaults = Masking()
    parser = argparse.ArgumentParser(
        prog="moa-masked-perplexity", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("data", help="binarised text: the data/ of prepare_wikitext103.sh")
    parser.add_argument(
        "--path", required=True, type=Path, metavar="FILE", help="checkpoint of the model"
    )
    parser.add_argument("--subset", default="test", help="split (default: test)")
    parser.add_argument(
        "--seed",
        type=int,
        default=defaults.seed,
        help=f"of the masks (default: {defaults.seed}, and that of training does not matter)",
    )
    for name in ("mask_prob", "leave_unmasked_prob", "random_token_prob"):
        value = getattr(defaults, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=float,
            default=value,
            metavar="P",
            help=f"as in fairseq's masked_lm (default: {value})",
        )
    parser.add_argument(
        "--max-tokens", type=int, default=8192, help="tokens of a batch (default: 8192)"
    )
    parser.add_argument(
        "--resamples",
        type=int,
        default=RESAMPLES,
        metavar="N",
        help=f"of the bootstrap behind the interval (default: {RESAMPLES})",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="PREFIX.blocks.tsv of another model's --report on the same masks: adds the ratio of "
        "the perplexities with its interval",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="PREFIX",
        help="write PREFIX.txt, PREFIX.json and PREFIX.blocks.tsv, the sums of each block",
    )
    parser.add_argument("--cpu", action="store_true", help="leave a GPU alone")
    args = parser.parse_args(arguments)
    for flag, number, least in (
        ("--max-tokens", args.max_tokens, 1),
        ("--resamples", args.resamples, 2),
    ):
        if number < least:
            raise UsageError(f"{flag} {number}: it must be at least {least}")
    masking = Masking(args.seed, args.mask_prob, args.leave_unmasked_prob, args.random_token_prob)
    baseline = read_blocks(args.baseline) if args.baseline else None
    model, task = load_masked_lm(args.path, args.data, masking, args.cpu)
    sums = block_sums(model, task, args.subset, args.max_tokens)
    report: Dict[str, Any] = {
        **provenance(args.path, args.data, args.subset, task, model),
        **perplexity_report(sums, args.resamples),
    }
    if baseline is not None:
        report["difference"] = {
            "baseline": str(args.baseline),
            **difference(sums, baseline, args.resamples),
        }
    text = report_text(report)
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        contents = (
            text,
            json.dumps(report, indent=2, ensure_ascii=False) + "\n",
            blocks_text(sums),
        )
        write_together(
            {
                Path(f"{args.report}{suffix}"): content
                for suffix, content in zip((".txt", ".json", ".blocks.tsv"), contents)
            }
        )
    sys.stdout.write(text)


def blocks_text(sums: BlockSums) -> str:
    """A table of every block's sums, with all digits."""
    columns = [getattr(sums, name).tolist() for name in COLUMNS[1:]]
    rows = [COLUMNS, *([number, *values] for number, values in enumerate(zip(*columns)))]
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def read_blocks(path: Path) -> BlockSums:
    """What :func:`blocks_text` wrote.

    Raises:
        UsageError: for another file.
    """
    rows: List[List[str]] = [line.split("\t") for line in read_lines(path)]
    try:
        if tuple(rows[0]) != COLUMNS:
            raise ValueError
        columns = np.array([list(map(float, row)) for row in rows[1:]], dtype=float).T
        return BlockSums(*columns[1:])
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"--baseline {path}: it is no PREFIX.blocks.tsv of moa-masked-perplexity; give one"
        ) from error
