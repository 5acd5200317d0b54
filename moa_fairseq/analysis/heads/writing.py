"""A folder that is a whole report, or not there."""

from __future__ import annotations

import csv
import json
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Dict, Iterator, Sequence

from ...errors import UsageError
from ...text.files import atomic_writer
from ..report_sections import ReportFigure, ReportSection, ReportTable

KIND = "moa-head-report"
REPORT, PAGE = "report.json", "index.html"
#: Dots per inch of PNG files.
RESOLUTION = 110


def check_out(out: Path) -> None:
    """Refuse to put a report where something else is.

    Raises:
        UsageError: where `out` is a file, or a folder that holds what no earlier report put there.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"--out {out}: Not a directory; choose another")
    present = {path.name for path in out.iterdir()}
    if present - _files_of_report(out):
        other = sorted(present - _files_of_report(out))[0]
        raise UsageError(
            f"--out {out} holds {other}, which is not of a report; choose a new folder, or an "
            "earlier report to replace"
        )


def _files_of_report(out: Path) -> set[str]:
    try:
        noted = json.loads((out / REPORT).read_text(encoding="utf-8"))
        return {*noted["files"]} if noted["kind"] == KIND else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `out` when the block ends without an error.

    An earlier report there stays until then, and goes.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.partial.{os.getpid()}")
    old = out.with_name(f".{out.name}.old.{os.getpid()}")
    with suppress(FileNotFoundError):
        shutil.rmtree(partial)
    partial.mkdir()
    try:
        yield partial
        check_out(out)
        if out.exists():
            os.replace(out, old)
        os.replace(partial, out)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_figures(folder: Path, sections: Sequence[ReportSection]) -> Dict[str, bytes]:
    """Write every figure as PNG and SVG; returns the PNG files by name."""
    import matplotlib

    pictures = {}
    # Text stays text in SVG, and files do not differ from run to run.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": KIND}):
        for figure in (figure for section in sections for figure in section.figures):
            pictures[figure.name] = _write_figure(folder, figure)
    return pictures


def _write_figure(folder: Path, figure: ReportFigure) -> bytes:
    png = folder / f"{figure.name}.png"
    figure.figure.savefig(png, dpi=RESOLUTION, metadata={"Software": None})
    figure.figure.set_layout_engine("none")  # the layout is found, and takes long to find
    figure.figure.savefig(folder / f"{figure.name}.svg", metadata={"Date": None})
    return png.read_bytes()


def write_table(folder: Path, table: ReportTable) -> None:
    """Write a table as CSV, all of its rows."""
    with atomic_writer(folder / f"{table.name}.csv") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(table.header)
        writer.writerows(table.rows)


def write_report(folder: Path, report: Dict[str, Any]) -> None:
    """Write report.json, with the names of all files of the folder, itself among them."""
    files = sorted({path.name for path in folder.iterdir()} | {REPORT})
    with atomic_writer(folder / REPORT) as stream:
        json.dump({"kind": KIND, "files": files, **report}, stream, indent=1, ensure_ascii=False)
        stream.write("\n")
