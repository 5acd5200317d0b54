"""A report as one page that needs nothing beside it."""

from __future__ import annotations

import base64
from html import escape
from typing import Any, Dict, List, Mapping, Sequence

from ..report_sections import ReportFigure, ReportSection, ReportTable

#: A table with more rows is folded, and so are all of a section that has more tables.
UNFOLDED_ROWS, UNFOLDED_TABLES = 14, 4

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
  max-width: 76rem; padding: 1rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; } h2 { margin-top: 3rem; border-top: 1px solid #bbb; padding-top: 1rem; }
p, li, figcaption { max-width: 52rem; }
nav { background: #f4f4f4; padding: .6rem 1rem; } nav ul { columns: 2; margin: .3rem 0; }
figure { margin: 1.5rem 0; } figure img { max-width: 100%; height: auto; }
figcaption, caption, summary { color: #333; font-size: .92rem; } caption { text-align: left; }
summary { cursor: pointer; padding: .2rem 0; } summary:hover { text-decoration: underline; }
.table { overflow-x: auto; margin: .6rem 0 1.2rem; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { white-space: nowrap; padding: .2rem .6rem; border-bottom: 1px solid #ddd;
  vertical-align: top; text-align: left; }
th { background: #f4f4f4; } td.number { text-align: right; } th { white-space: normal; }
td.long { white-space: normal; min-width: 22rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; }
dt { color: #555; } dd { margin: 0; overflow-wrap: anywhere; }
a { color: #004c8c; } code { font-size: .9em; overflow-wrap: anywhere; }
"""
# Whatever a page is made to hold, it loads nothing and runs nothing.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(
    title: str,
    introduction: Sequence[str],
    facts: Mapping[str, str],
    sections: Sequence[ReportSection],
    pictures: Mapping[str, bytes],
) -> str:
    """The page's HTML.

    Args:
        title: its heading.
        introduction: paragraphs before the table of contents.
        facts: what it was made of, by name.
        sections: in order.
        pictures: PNG files of the figures, by their names.
    """
    contents = "".join(
        f'<li><a href="#{escape(section.name)}">{escape(section.title)}</a></li>'
        for section in sections
    )
    body = "".join(_section(section, pictures) for section in sections)
    listed = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{_paragraphs(introduction)}\n"
        f'<nav aria-label="Contents"><strong>Contents</strong><ul>{contents}'
        f'<li><a href="#about">How this was made</a></li></ul></nav>\n{body}\n'
        f'<section id="about"><h2>How this was made</h2><dl>{listed}</dl></section>\n'
        "</body>\n</html>\n"
    )


def _section(section: ReportSection, pictures: Mapping[str, bytes]) -> str:
    figures = "".join(_figure(figure, pictures[figure.name]) for figure in section.figures)
    many = len(section.tables) > UNFOLDED_TABLES
    tables = "".join(_table(table, many) for table in section.tables)
    return (
        f'<section id="{escape(section.name)}"><h2>{escape(section.title)}</h2>\n'
        f"{_paragraphs(section.paragraphs)}\n{figures}\n{tables}</section>\n"
    )


def _paragraphs(texts: Sequence[str]) -> str:
    return "\n".join(f"<p>{escape(text)}</p>" for text in texts)


def _figure(figure: ReportFigure, picture: bytes) -> str:
    data = base64.b64encode(picture).decode("ascii")
    name = escape(figure.name)
    return (
        f'<figure id="figure-{name}"><img src="data:image/png;base64,{data}" '
        f'alt="{escape(figure.alternative)}"><figcaption>{escape(figure.caption)} '
        f'Files: <a href="{name}.png">{name}.png</a>, <a href="{name}.svg">{name}.svg</a>.'
        "</figcaption></figure>\n"
    )


def _table(table: ReportTable, folded: bool) -> str:
    name = escape(table.name)
    number = len(table.rows)
    shown = table.rows[: table.shown]
    count = "" if len(shown) == number else f" ({len(shown):,} of {number:,} rows here)"
    caption = f'{escape(table.caption)} <a href="{name}.csv">{name}.csv</a>{count}.'
    if len(shown) == 0:
        return (
            f'<p>{escape(table.caption)} <a href="{name}.csv">{name}.csv</a> ({number:,} rows).</p>'
        )
    head = "".join(f'<th scope="col">{escape(label)}</th>' for label in table.header)
    rows = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in shown)
    inner = f"<thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>"
    if folded or len(shown) > UNFOLDED_ROWS:
        return (
            f'<details id="table-{name}"><summary>{caption}</summary>'
            f'<div class="table"><table>{inner}</details>\n'
        )
    return f'<div class="table" id="table-{name}"><table><caption>{caption}</caption>{inner}\n'


def _cell(value: Any) -> str:
    if value is None:
        return '<td class="number">–</td>'
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = str(value)
        return (
            f'<td class="long">{escape(text)}</td>'
            if len(text) > 40
            else f"<td>{escape(text)}</td>"
        )
    text = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
    return f'<td class="number">{text}</td>'


def merged_numbers(sections: Sequence[ReportSection]) -> Dict[str, Any]:
    """The numbers of each section by its name.

    Raises:
        ValueError: where two sections, figures or tables have one name.
    """
    names = [section.name for section in sections]
    figures = [figure.name for section in sections for figure in section.figures]
    tables = [table.name for section in sections for table in section.tables]
    files: List[str] = figures + tables
    for what in (names, figures, tables):
        twice = sorted({name for name in what if what.count(name) > 1})
        if twice:
            raise ValueError(f"sections of a report share the name {twice[0]}")
    if any("/" in name or name in ("", ".", "..", "index", "report") for name in files):
        raise ValueError("the figures and tables of a report need names that files may have")
    return {section.name: section.numbers for section in sections}
