"""What a report is made of: sections of text, figures, tables and the numbers behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, Sequence, Tuple


@dataclass(frozen=True)
class ReportTable:
    """A table: shown on the page, and written as `<name>.csv`.

    Attributes:
        name: stem of the file, unique in a report.
        caption: what it shows, one sentence.
        header: names of the columns, with units.
        rows: cells; None is a value that there is none of.
        shown: how many rows the page shows; the file has all of them.
    """

    name: str
    caption: str
    header: Tuple[str, ...]
    rows: Sequence[Tuple[Any, ...]]
    shown: int = 20


@dataclass(frozen=True)
class ReportFigure:
    """A picture: shown on the page, and written as `<name>.png` and `<name>.svg`.

    Attributes:
        name: stem of the files, unique in a report.
        caption: what it shows and how to read it.
        alternative: what it shows, in words, for those who cannot see it.
        figure: a `matplotlib.figure.Figure` with labelled axes.
    """

    name: str
    caption: str
    alternative: str
    figure: Any


@dataclass(frozen=True)
class ReportSection:
    """A section of a report.

    Attributes:
        name: key of its numbers in the report's JSON, unique in a report.
        title: its heading.
        paragraphs: plain text.
        figures, tables: in the order in which the page shows them.
        numbers: everything behind them, of types that JSON has.
    """

    name: str
    title: str
    paragraphs: Tuple[str, ...]
    figures: Tuple[ReportFigure, ...] = ()
    tables: Tuple[ReportTable, ...] = ()
    numbers: Dict[str, Any] = field(default_factory=dict)
