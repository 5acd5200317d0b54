"""A score's report for people: text, and a row of a Markdown table."""

from __future__ import annotations

from typing import Any, Dict


def report_text(report: Dict[str, Any]) -> str:
    """The lines that a person reads, each with its signature or what else it is."""
    metrics = (report["bleu"], report["chrf"])
    lines = [metric["text"] for metric in metrics]
    if report.get("settings"):
        settings = ", ".join(f"{name} {value}" for name, value in report["settings"].items())
        lines.insert(0, f"translated with {settings}")
    lines += [
        f"with 95 % interval: {metric['confidence']['text']}"
        for metric in metrics
        if "confidence" in metric
    ]
    lines += [
        f"{figure['label']} ({figure['note']}): {figure['text']}"
        for figure in report.get("tokenised", [])
    ]
    significance = report.get("significance")
    if significance:
        lines.append(
            f"against the baseline {report['files']['baseline']['file']}, "
            f"{significance['test']}, {significance['resamples']} resamples, "
            f"seed {significance['seed']}:"
        )
        lines += [
            f"{test['name']}|{test['signature']} = {test['system']['score']:.2f}, "
            f"baseline {test['baseline']['score']:.2f}, p = {test['p_value']:.4f}"
            for test in (significance["bleu"], significance["chrf"])
        ]
    comet = report.get("comet")
    if comet:
        lines.append(
            f"COMET ({comet['model']}, unbabel-comet {comet['version']}) = {comet['score']:.4f}"
        )
    return "\n".join(lines) + "\n"


def report_markdown(report: Dict[str, Any], name: str) -> str:
    """A Markdown table of one row, with the columns of what was computed.

    Args:
        report: as `moa-score` writes it.
        name: what the row is called.
    """
    cells = {"output": name, **report.get("settings", {})}
    for key, label in (("bleu", "BLEU"), ("chrf", "chrF++")):
        metric = report[key]
        cells[label] = f"{metric['score']:.2f}"
        if "confidence" in metric:
            interval = metric["confidence"]
            cells[f"{label}, 95 %"] = f"{interval['mean']:.2f} ± {interval['half_width']:.2f}"
    for figure in report.get("tokenised", []):
        cells[f"{figure['label']} ({figure['note']})"] = f"{figure['score']:.2f}"
    significance = report.get("significance")
    if significance:
        for key, label in (("bleu", "BLEU"), ("chrf", "chrF++")):
            test = significance[key]
            difference = test["system"]["score"] - test["baseline"]["score"]
            cells[f"{label} − baseline"] = f"{difference:+.2f} (p = {test['p_value']:.4f})"
    if "comet" in report:
        cells[f"COMET ({report['comet']['model']})"] = f"{report['comet']['score']:.4f}"
    for key, label in (("bleu", "BLEU"), ("chrf", "chrF++")):
        cells[f"{label} signature"] = f"`{report[key]['signature']}`"
    rows = (list(cells), ["---"] * len(cells), list(cells.values()))
    return "".join("| " + " | ".join(map(_cell, row)) + " |\n" for row in rows)


def _cell(text: str) -> str:
    # A bar parts cells even within a code span.
    return text.replace("|", r"\|")
