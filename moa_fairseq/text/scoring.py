"""From translations to scores that say how they came about."""

from __future__ import annotations

import json
import os
import platform
import re
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

import sacrebleu
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.metrics.base import Metric
from sacrebleu.significance import PairedTest

from ..errors import UsageError
from ..versions import installed_versions
from .checks import check_detokenised, check_length, check_subwords
from .files import PathLike, read_lines, sha256

#: sacreBLEU's own defaults.
RESAMPLES = 1000
SEED = 12345

# Digits in JSON; the text has two.
_DIGITS = 6


def read_generate_output(path: PathLike, kind: str = "D") -> List[str]:
    """The best hypothesis of each sentence in the output of `fairseq-generate`, in corpus order.

    The first hypothesis of each sentence is the best.

    Args:
        path: what `fairseq-generate` printed.
        kind: `D` reads the detokenised lines, `H` those before detokenisation.

    Raises:
        UsageError: when there are none, or a sentence is missing.
    """
    found: Dict[int, str] = {}
    for line in read_lines(path):
        match = re.match(rf"{kind}-(\d+)\t[^\t]*\t(.*)", line)
        if match:
            found.setdefault(int(match[1]), match[2])
    if not found:
        raise UsageError(f"{path} has no {kind}- lines; it must be the output of fairseq-generate")
    missing = sorted(set(range(max(found) + 1)) - found.keys())
    if missing:
        raise UsageError(
            f"{path} is incomplete: {len(missing)} of {max(found) + 1} sentences are missing, "
            f"the first is number {missing[0]}; generate again"
        )
    return [found[index] for index in range(len(found))]


def read_hypotheses(path: PathLike) -> List[str]:
    """Translations from either kind of file: output of `fairseq-generate`, or one a line.

    Raises:
        UsageError: see :func:`read_generate_output`.
    """
    lines = read_lines(path)
    if any(re.match(r"D-\d+\t[^\t]*\t", line) for line in lines):
        return read_generate_output(path)
    return lines


def join_subwords(line: str) -> str:
    """Undo subword-nmt's BPE: remove `@@ `."""
    return re.sub(r"@@( |$)", "", line)


def check_hypotheses(
    hypotheses: Sequence[str], references: Sequence[str], name: str = "hypotheses"
) -> None:
    """Refuse what would give a wrong score.

    Args:
        hypotheses: detokenised, one a sentence.
        references: raw.
        name: what messages call the hypotheses: the flag and its value.

    Raises:
        UsageError: for another number of lines than the references, for leftover subwords, or for
            tokenised text.
    """
    check_length(hypotheses, references, name, "hypotheses")
    check_subwords(hypotheses, name)
    check_detokenised(hypotheses, name)


def score(
    hypotheses: Sequence[str],
    references: Sequence[str],
    resamples: int = 0,
    seed: int = SEED,
) -> Dict[str, Any]:
    """sacreBLEU and chrF++ of detokenised text, with signatures.

    Args:
        hypotheses: detokenised, one a sentence.
        references: raw.
        resamples: with 2 or more, each metric gets a `confidence`: mean and half width of the
            95 % interval of sacreBLEU's bootstrap, equal to `sacrebleu --confidence`'s.
        seed: of the bootstrap.

    Raises:
        UsageError: see :func:`check_hypotheses`.
    """
    check_hypotheses(hypotheses, references)
    report: Dict[str, Any] = {"sentences": len(references)}
    for name, metric in _metrics(references).items():
        result = metric.corpus_score(list(hypotheses), None)
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
        if resamples > 1:
            report[name]["confidence"] = _confidence(metric, hypotheses, resamples, seed)
    report["sacrebleu"] = sacrebleu.__version__
    return report


def compare(
    hypotheses: Sequence[str],
    baseline: Sequence[str],
    references: Sequence[str],
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> Dict[str, Any]:
    """Whether two outputs differ: sacreBLEU's paired bootstrap test, as `sacrebleu --paired-bs`.

    Args:
        hypotheses: detokenised, one a sentence.
        baseline: the other output.
        references: raw.
        resamples: of the set.
        seed: of the bootstrap; at least 1, since sacreBLEU takes 0 for none.

    Returns:
        for each metric, both scores with mean and half width of their 95 % intervals, and the
        p-value of their difference: sacreBLEU's, but 1 for identical outputs, for which sacreBLEU
        gives its smallest.

    Raises:
        UsageError: see :func:`check_hypotheses`.
    """
    check_hypotheses(hypotheses, references)
    check_hypotheses(baseline, references, "baseline")
    with _sacrebleu_seed(seed):
        test = PairedTest(
            [("baseline", list(baseline)), ("system", list(hypotheses))],
            _metrics(references),
            references=None,
            test_type="bs",
            n_samples=resamples,
        )
        signatures, results = test()
    report: Dict[str, Any] = {"test": "paired bootstrap", "resamples": resamples, "seed": seed}
    for key, name in zip(("bleu", "chrf"), signatures):
        other: Any
        own: Any
        other, own = results[name]
        report[key] = {
            "name": name,
            "baseline": _interval(other),
            "system": _interval(own),
            "p_value": 1.0 if list(hypotheses) == list(baseline) else own.p_value,
            "signature": str(signatures[name]),
        }
    return report


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


def provenance(files: Mapping[str, Any]) -> Dict[str, Dict[str, str]]:
    """Names and digests of the files behind a score; `None` is left out."""
    return {
        role: {"file": str(path), "sha256": sha256(path)} for role, path in files.items() if path
    }


def versions() -> Dict[str, str]:
    """Versions of what translates and scores, as far as they are installed."""
    packages = ("moa-fairseq", "torch", "ve-fairseq", "fairseq-fixed", "fairseq", "sacrebleu")
    return {"python": platform.python_version(), **installed_versions(packages)}


def _metrics(references: Sequence[str]) -> Dict[str, Metric]:
    held = [list(references)]
    return {"bleu": BLEU(references=held), "chrf": CHRF(word_order=2, references=held)}


def _confidence(
    metric: Metric, hypotheses: Sequence[str], resamples: int, seed: int
) -> Dict[str, Any]:
    with _sacrebleu_seed(seed):
        result = metric.corpus_score(list(hypotheses), None, n_bootstrap=resamples)
    signature = metric.get_signature().format()
    # The only public way to the numbers. Where the mean is 0, sacreBLEU leaves them out.
    numbers = json.loads(result.format(width=_DIGITS, signature=signature, is_json=True))
    return {
        "level": 0.95,
        "mean": numbers.get("confidence_mean", 0.0),
        "half_width": numbers.get("confidence_var", 0.0),
        "signature": signature,
        "text": result.format(width=2, signature=signature),
    }


def _interval(result: Any) -> Dict[str, float]:
    return {
        "score": float(result.score),
        "mean": float(result.mean),
        "half_width": float(result.ci),
    }


@contextmanager
def _sacrebleu_seed(seed: int) -> Iterator[None]:
    """sacreBLEU takes the seed of its bootstrap from the environment only."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        if before is None:
            del os.environ["SACREBLEU_SEED"]
        else:
            os.environ["SACREBLEU_SEED"] = before
