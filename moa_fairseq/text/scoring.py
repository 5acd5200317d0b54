"""From translations to scores that say how they came about."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import sacrebleu
from sacrebleu.metrics import BLEU, CHRF

from ..errors import UsageError
from .files import PathLike, read_lines, sha256

# The first few offenders are enough to see what is wrong.
_SHOWN = 5


def read_generate_output(path: PathLike) -> List[str]:
    """The best hypothesis of each sentence in the output of `fairseq-generate`, in corpus order.

    Reads the detokenised `D-` lines; the first of each sentence is the best.

    Raises:
        UsageError: when there are none, or a sentence is missing.
    """
    found: Dict[int, str] = {}
    for line in read_lines(path):
        match = re.match(r"D-(\d+)\t[^\t]*\t(.*)", line)
        if match:
            found.setdefault(int(match[1]), match[2])
    if not found:
        raise UsageError(f"{path} has no D- lines; it must be the output of fairseq-generate")
    missing = sorted(set(range(max(found) + 1)) - found.keys())
    if missing:
        raise UsageError(
            f"{path} is incomplete: {len(missing)} of {max(found) + 1} sentences are missing, "
            f"the first is number {missing[0]}; generate again"
        )
    return [found[index] for index in range(len(found))]


def check_hypotheses(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    """Refuse what would give a wrong score.

    Raises:
        UsageError: for another number of lines than the references, or for leftover subwords.
    """
    if len(hypotheses) != len(references):
        raise UsageError(
            f"{len(hypotheses)} hypotheses but {len(references)} references; a score over a part "
            "of a set is not its score, so translate the whole set again"
        )
    marked = [
        number
        for number, line in enumerate(hypotheses, start=1)
        if "\u2581" in line or re.search(r"@@( |$)", line)
    ]
    if marked:
        lines = ", ".join(map(str, marked[:_SHOWN]))
        raise UsageError(
            f"{len(marked)} hypotheses hold subword marks (line {lines}); generate with --bpe "
            "sentencepiece --sentencepiece-model FILE, or with --remove-bpe"
        )


def score(hypotheses: Sequence[str], references: Sequence[str]) -> Dict[str, Any]:
    """sacreBLEU and chrF++ of detokenised text, with signatures.

    Raises:
        UsageError: see :func:`check_hypotheses`.
    """
    check_hypotheses(hypotheses, references)
    metrics = {"bleu": BLEU(), "chrf": CHRF(word_order=2)}
    report: Dict[str, Any] = {"sentences": len(references)}
    for name, metric in metrics.items():
        result = metric.corpus_score(list(hypotheses), [list(references)])
        report[name] = {
            "name": result.name,
            "score": result.score,
            "signature": str(metric.get_signature()),
            "text": result.format(width=2, signature=metric.get_signature().format()),
        }
        if name == "bleu":
            report[name].update(
                precisions=result.precisions,
                brevity_penalty=result.bp,
                hypothesis_length=result.sys_len,
                reference_length=result.ref_len,
            )
    report["sacrebleu"] = sacrebleu.__version__
    return report


def report_text(report: Dict[str, Any]) -> str:
    """The lines that a person reads: one a metric, each with its signature."""
    return "\n".join([report["bleu"]["text"], report["chrf"]["text"]]) + "\n"


def samples(
    sources: Optional[Sequence[str]],
    hypotheses: Sequence[str],
    references: Sequence[str],
    number: int,
) -> str:
    """`number` translations spread evenly over the set, beside their references."""
    number = min(number, len(hypotheses))
    blocks = []
    for position in range(number):
        index = position * len(hypotheses) // number
        lines = [] if sources is None else [f"source      {sources[index]}"]
        lines += [f"translation {hypotheses[index]}", f"reference   {references[index]}"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def provenance(files: Dict[str, Path]) -> Dict[str, Dict[str, str]]:
    """Names and digests of the files behind a score."""
    return {
        role: {"file": str(path), "sha256": sha256(path)} for role, path in files.items() if path
    }
