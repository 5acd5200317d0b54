"""`moa-score`: sacreBLEU and chrF++ of translations, with signatures, as text and JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Optional, Sequence

from ..errors import UsageError
from ..text.files import atomic_writer, read_lines
from ..text.scoring import provenance, read_generate_output, report_text, samples, score
from .common import command


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(prog="moa-score", description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "--generate-output",
        type=Path,
        metavar="FILE",
        help="what fairseq-generate printed; its detokenised D- lines are scored",
    )
    group.add_argument(
        "--hypotheses", type=Path, metavar="FILE", help="detokenised translations, one a line"
    )
    parser.add_argument(
        "--reference", required=True, type=Path, metavar="FILE", help="raw text, one a line"
    )
    parser.add_argument("--source", type=Path, metavar="FILE", help="shown with --samples")
    parser.add_argument(
        "--samples", type=int, default=0, metavar="N", help="print N translations (default: 0)"
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="PREFIX",
        help="write PREFIX.txt, PREFIX.json and the scored text, PREFIX.hypotheses.txt",
    )
    args = parser.parse_args(arguments)
    if args.samples < 0:
        raise UsageError(f"--samples {args.samples}: it must not be negative")
    hypotheses = (
        read_generate_output(args.generate_output)
        if args.generate_output
        else read_lines(args.hypotheses)
    )
    references = read_lines(args.reference)
    sources = read_lines(args.source) if args.source else None
    if sources is not None and len(sources) != len(references):
        raise UsageError(
            f"{args.source} has {len(sources)} lines but {args.reference} has {len(references)}"
        )
    outputs = [Path(f"{args.report}{suffix}") for suffix in (".hypotheses.txt", ".txt", ".json")]
    inputs = (args.generate_output, args.hypotheses, args.reference, args.source)
    for path in inputs:
        if args.report and path and path.resolve() in [output.resolve() for output in outputs]:
            raise UsageError(f"--report {args.report} would overwrite {path}; choose another")
    report = score(hypotheses, references)
    report["files"] = provenance(
        {
            "hypotheses": args.generate_output or args.hypotheses,
            "reference": args.reference,
        }
    )
    text = report_text(report)
    if args.samples:
        text = samples(sources, hypotheses, references, args.samples) + "\n" + text
    if args.report:
        args.report.parent.mkdir(parents=True, exist_ok=True)
        contents = (
            "".join(line + "\n" for line in hypotheses),
            text,
            json.dumps(report, indent=2, ensure_ascii=False) + "\n",
        )
        for output, content in zip(outputs, contents):
            with atomic_writer(output) as stream:
                stream.write(content)
    sys.stdout.write(text)
