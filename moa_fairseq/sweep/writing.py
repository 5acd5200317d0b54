"""A sweep's report as files: Markdown for people, CSV and JSON for programs, and its picture."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Optional, Sequence

from ..analysis.report_sections import ReportSection
from ..text.files import atomic_writer, write_together
from .summary import Row, Spread, status_in_words


def write_report(
    section: ReportSection, rows: Sequence[Row], bleu: Sequence[str], out: Path
) -> Path:
    """Write `sweep.md`, `sweep.csv`, `sweep.json` and, where there is one, the picture.

    Args:
        section: of the sweep.
        rows: of the sweep, for people to read.
        bleu: the subsets that were translated.
        out: folder; made where it is missing.

    Returns:
        the Markdown file.
    """
    out.mkdir(parents=True, exist_ok=True)
    for figure in section.figures:
        for ending in ("png", "svg"):
            with atomic_writer(out / f"{figure.name}.{ending}", "wb") as stream:
                figure.figure.savefig(stream, format=ending, dpi=130)
    (table,) = section.tables
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([table.header, *table.rows])
    write_together(
        {
            out / "sweep.md": markdown(section, rows, bleu),
            out / "sweep.csv": text.getvalue(),
            out / "sweep.json": json.dumps(section.numbers, indent=2, ensure_ascii=False) + "\n",
        }
    )
    return out / "sweep.md"


def markdown(section: ReportSection, rows: Sequence[Row], bleu: Sequence[str]) -> str:
    """The page of a sweep, in Markdown."""
    header = ["model", "seeds", "parameters", "MACs", "updates", "valid loss", "valid nll"]
    header += [*(f"BLEU {subset}" for subset in bleu), "status"]
    lines = [f"# {section.title}", ""]
    for paragraph in section.paragraphs:
        lines += [_escaped(paragraph), ""]
    lines += [f"| {' | '.join(header)} |", "| " + "--- | " * len(header)]
    for row in rows:
        cells = [
            row.size.name,
            ", ".join(map(str, row.seeds)),
            _millions(row.parameters, 2),
            _millions(row.linear_macs, 1),
            ", ".join(map(str, sorted(set(row.updates)))) or "–",
            _spread(row.measured.get("loss"), 3),
            _spread(row.measured.get("nll_loss"), 3),
            *(_spread(row.measured.get(f"bleu {subset}"), 2) for subset in bleu),
            _escaped(status_in_words(row)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    for figure in section.figures:
        lines += ["", f"![{figure.alternative}]({figure.name}.png)", "", figure.caption]
    return "\n".join(lines).rstrip() + "\n"


def _millions(number: Optional[int], digits: int) -> str:
    return "–" if number is None else f"{number / 1e6:.{digits}f}M"


def _spread(spread: Optional[Spread], digits: int) -> str:
    if spread is None:
        return "–"
    text = f"{spread.mean:.{digits}f}"
    if len(spread.values) > 1:
        text += f" ({spread.least:.{digits}f} to {spread.greatest:.{digits}f})"
    return text


def _escaped(text: str) -> str:
    # A bar parts the cells of a table.
    return text.replace("|", r"\|")
