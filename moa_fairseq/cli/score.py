"""`moa-score`: one report on translations, as text, Markdown and JSON.

sacreBLEU and chrF++ of detokenised text with signatures and bootstrap intervals; with
--language-pair the paper's tokenised BLEU; with --baseline a paired test; with --comet COMET.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from ..errors import UsageError
from ..text.checks import (
    check_detokenised,
    check_length,
    check_subwords,
    check_tokenised,
)
from ..text.comet_score import comet_score, load_comet
from ..text.files import read_lines, write_together
from ..text.moses import MosesText
from ..text.report import report_markdown, report_text
from ..text.scoring import (
    RESAMPLES,
    SEED,
    check_hypotheses,
    compare,
    join_subwords,
    provenance,
    read_generate_output,
    read_hypotheses,
    samples,
    score,
    versions,
)
from ..text.tokenised_bleu import (
    TokenisedFigure,
    figures_of_detokenised,
    figures_of_tokenised,
    parse_language_pair,
)
from .common import command


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument(
        "--source", type=Path, metavar="FILE", help="shown with --samples, and read by --comet"
    )
    parser.add_argument(
        "--samples", type=int, default=0, metavar="N", help="print N translations (default: 0)"
    )
    parser.add_argument(
        "--language-pair",
        metavar="SOURCE-TARGET",
        help="such as en-de: add the paper's measure, Moses' multi-bleu of tokenised text, "
        "compounds split for en-de and no other pair",
    )
    parser.add_argument(
        "--tokenised-reference",
        type=Path,
        metavar="FILE",
        help="the reference through tokenizer.perl -a, before BPE: the paper's measure then reads "
        "it and the H- lines of --generate-output, with @@ joined, instead of tokenising",
    )
    parser.add_argument(
        "--resamples",
        type=int,
        default=RESAMPLES,
        metavar="N",
        help="of the bootstrap behind intervals and --baseline, as sacreBLEU's --confidence-n and "
        f"--paired-bs-n; 0 for no intervals (default: {RESAMPLES})",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=SEED,
        metavar="N",
        help=f"of the bootstrap, as SACREBLEU_SEED (default: {SEED})",
    )
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        help="another output for the same set, of fairseq-generate or one a line, such as another "
        "report's PREFIX.hypotheses.txt: a paired bootstrap test, as sacreBLEU's --paired-bs",
    )
    parser.add_argument(
        "--comet",
        metavar="MODEL",
        help="add COMET by this checkpoint or name, such as Unbabel/wmt22-comet-da, which is "
        "downloaded; needs --source and the package unbabel-comet",
    )
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="how the translations were made, such as beam=4, for the report; may be repeated",
    )
    parser.add_argument(
        "--report",
        type=Path,
        metavar="PREFIX",
        help="write PREFIX.txt, PREFIX.md, PREFIX.json and the scored text, PREFIX.hypotheses.txt",
    )
    return parser


def _check_options(args: argparse.Namespace) -> None:
    if args.samples < 0:
        raise UsageError(f"--samples {args.samples}: it must not be negative; 0 prints none")
    if args.resamples < 0 or args.resamples == 1:
        raise UsageError(f"--resamples {args.resamples}: give 2 or more, or 0 for no intervals")
    if args.seed < 1:
        raise UsageError(f"--seed {args.seed}: it must be at least 1; sacreBLEU takes 0 for none")
    if args.baseline and not args.resamples:
        raise UsageError(
            f"--baseline {args.baseline} needs resamples; leave --resamples 0 out or raise it"
        )
    for setting in args.setting:
        if not setting.partition("=")[0] or "=" not in setting:
            raise UsageError(f"--setting {setting}: give a name and a value, such as beam=4")
    if args.language_pair is not None:
        parse_language_pair(args.language_pair)
    if args.tokenised_reference:
        for flag, given in (
            ("--language-pair, such as en-de", args.language_pair),
            ("--generate-output, whose H- lines are tokenised", args.generate_output),
        ):
            if not given:
                raise UsageError(f"--tokenised-reference {args.tokenised_reference} needs {flag}")
    if args.comet is not None:
        if not args.source:
            raise UsageError(f"--comet {args.comet} needs --source FILE")
        load_comet(args.comet)
    inputs = (
        *(args.generate_output, args.hypotheses, args.reference, args.source),
        *(args.tokenised_reference, args.baseline),
    )
    outputs = [path.resolve() for path in _outputs(args.report)]
    for path in inputs:
        if path and path.resolve() in outputs:
            raise UsageError(f"--report {args.report} would overwrite {path}; choose another")


def _outputs(prefix: Optional[Path]) -> List[Path]:
    suffixes = (".hypotheses.txt", ".txt", ".md", ".json")
    return [Path(f"{prefix}{suffix}") for suffix in suffixes] if prefix else []


def _figures(
    args: argparse.Namespace, hypotheses: Sequence[str], references: Sequence[str]
) -> List[TokenisedFigure]:
    if args.language_pair is None:
        return []
    if not args.tokenised_reference:
        return figures_of_detokenised(hypotheses, references, args.language_pair)
    source, target = parse_language_pair(args.language_pair)
    name = f"--tokenised-reference {args.tokenised_reference}"
    tokenised_references = read_lines(args.tokenised_reference)
    check_length(tokenised_references, references, name, "lines")
    check_subwords(tokenised_references, name, "lines")
    check_tokenised(tokenised_references, name)
    name = f"--generate-output {args.generate_output}"
    tokenised = [join_subwords(line) for line in read_generate_output(args.generate_output, "H")]
    check_subwords(tokenised, name, "H- lines")
    moses = MosesText(target)
    for number, (line, detokenised) in enumerate(zip(tokenised, hypotheses)):
        # The detokeniser of another language costs BLEU and is easily overlooked.
        if moses.detokenize(line) != detokenised:
            raise UsageError(
                f"{name}: D-{number} is not what Moses' detokeniser for {target} makes of "
                f"H-{number}; generate with --tokenizer moses --source-lang {source} "
                f"--target-lang {target}"
            )
    return figures_of_tokenised(tokenised, tokenised_references, args.language_pair)


def _as_json(figure: TokenisedFigure) -> Dict[str, Any]:
    entry = dataclasses.asdict(figure)
    return {**entry, **entry.pop("result"), "text": figure.result.text}


@command
def main(arguments: Optional[Sequence[str]] = None) -> None:
    args = _parser().parse_args(arguments)
    _check_options(args)
    hypotheses = (
        read_generate_output(args.generate_output)
        if args.generate_output
        else read_lines(args.hypotheses)
    )
    references = read_lines(args.reference)
    sources = read_lines(args.source) if args.source else None
    if sources is not None and len(sources) != len(references):
        raise UsageError(
            f"{args.source} has {len(sources)} lines but {args.reference} has {len(references)}; "
            "line n of the one must translate line n of the other"
        )
    check_detokenised(references, f"--reference {args.reference}")
    flag = "--generate-output" if args.generate_output else "--hypotheses"
    scored = args.generate_output or args.hypotheses
    check_hypotheses(hypotheses, references, f"{flag} {scored}")
    baseline = read_hypotheses(args.baseline) if args.baseline else None
    if baseline is not None:
        check_hypotheses(baseline, references, f"--baseline {args.baseline}")
    figures = _figures(args, hypotheses, references)

    report = score(hypotheses, references, args.resamples, args.seed)
    report["settings"] = dict(setting.split("=", 1) for setting in args.setting)
    report["versions"] = versions()
    if figures:
        report["language_pair"] = args.language_pair
        report["tokenised"] = [_as_json(figure) for figure in figures]
    if baseline is not None:
        report["significance"] = compare(
            hypotheses, baseline, references, args.resamples, args.seed
        )
    if args.comet is not None:
        report["comet"] = comet_score(args.comet, sources or [], hypotheses, references)
    report["files"] = provenance(
        {
            "hypotheses": scored,
            "reference": args.reference,
            "tokenised_reference": args.tokenised_reference,
            "baseline": args.baseline,
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
            report_markdown(report, str(args.report)),
            json.dumps(report, indent=2, ensure_ascii=False) + "\n",
        )
        write_together(dict(zip(_outputs(args.report), contents)))
    sys.stdout.write(text)
