"""The folder and page of a head report, and figures whose text can be read."""

from __future__ import annotations

import importlib.util
import itertools
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from moa_fairseq.analysis.heads import pipeline, writing
from moa_fairseq.analysis.heads.page import merged_numbers, page
from moa_fairseq.analysis.heads.pipeline import make_sections
from moa_fairseq.analysis.heads.survey import survey
from moa_fairseq.analysis.heads.surveyed import Surveyed, of_model
from moa_fairseq.analysis.report_sections import ReportFigure, ReportSection, ReportTable
from moa_fairseq.errors import UsageError

from ..toy import toy_model, toy_sample, toy_task
from .test_head_counts import context_of

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib"
)
TABLE = ReportTable("t", "About <T>.", ("word", "n"), [("a,b", 1), ("<i>", None), ("ü", 0.5)], 2)


def section(name="s", *tables):
    figure = ReportFigure("f", "See & believe.", 'A "figure".', None)
    return ReportSection(name, "A < B", ("One.",), (figure,), tables, {"n": 1})


class Reader(HTMLParser):
    """Tags that are open, and all that were."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_well_formed_and_says_what_it_was_given():
    text = page(
        "A & B", ["Hello <you>."], {"command": "x --y 'z'"}, [section("s", TABLE)], {"f": b"PNG"}
    )
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    image = next(attributes for tag, attributes in reader.seen if tag == "img")
    assert image == {"src": "data:image/png;base64,UE5H", "alt": 'A "figure".'}
    words = "".join(reader.text)
    for expected in (
        "Hello <you>.",
        "A < B",
        "See & believe.",
        "About <T>.",
        "a,b",
        "<i>",
        "x --y",
    ):
        assert expected in words
    assert "ü" not in words and "2 of 3 rows" in words
    assert ("a", {"href": "#s"}) in reader.seen and ("a", {"href": "t.csv"}) in reader.seen


def test_a_table_is_a_file_with_all_of_its_rows(tmp_path):
    writing.write_table(tmp_path, TABLE)
    assert (tmp_path / "t.csv").read_text(encoding="utf-8") == 'word,n\n"a,b",1\n<i>,\nü,0.5\n'


def test_sections_of_several_models_have_names_of_their_own():
    sections = [of_model(section("s", TABLE), name) for name in ("runs/a b", "c")]
    assert merged_numbers(sections) == {"s_runs-a-b": {"n": 1}, "s_c": {"n": 1}}
    assert sections[0].figures[0].name == "f_runs-a-b" and sections[1].tables[0].name == "t_c"
    with pytest.raises(ValueError, match="share the name"):
        merged_numbers([section("s"), section("r")])


def write(out, fail=False):
    with writing.whole_folder(out) as folder:
        (folder / "index.html").write_text("new")
        if fail:
            raise OSError("the disk is full")
        writing.write_report(folder, {"subset": "test"})


def test_a_report_is_whole_or_not_there(tmp_path):
    out = tmp_path / "deep/report"
    with pytest.raises(OSError, match="full"):
        write(out, fail=True)
    assert list(out.parent.iterdir()) == []
    write(out)
    assert sorted(path.name for path in out.iterdir()) == ["index.html", "report.json"]
    assert json.loads((out / "report.json").read_text())["files"] == ["index.html", "report.json"]
    (out / "index.html").write_text("old")
    with pytest.raises(OSError, match="full"):
        write(out, fail=True)
    assert (out / "index.html").read_text() == "old"
    write(out)
    assert (out / "index.html").read_text() == "new"
    assert list(out.parent.iterdir()) == [out]


def test_only_a_report_or_nothing_is_replaced(tmp_path):
    out = tmp_path / "report"
    writing.check_out(out)
    out.mkdir()
    writing.check_out(out)
    for content in ("{}", "[1]", "no JSON", '{"kind": "other", "files": ["report.json"]}'):
        (out / "report.json").write_text(content)
        with pytest.raises(UsageError, match=r"holds report\.json"):
            writing.check_out(out)
    (out / "report.json").unlink()
    write(out)
    writing.check_out(out)
    # What came while the report was made is not lost either.
    with pytest.raises(UsageError, match="holds mine"), writing.whole_folder(out):
        (out / "mine").touch()
    assert (out / "mine").exists()


def texts_of(figure, monkeypatch):
    """Every text that is drawn, with its box in pixels; and the size of the figure."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    drawn = []
    draw = Text.draw

    def note(self, renderer):
        if self.get_visible() and self.get_text().strip():
            drawn.append((self.get_text(), self.get_window_extent(renderer)))
        draw(self, renderer)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", note)
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
    return drawn, canvas.get_width_height()


def faults(figure, monkeypatch):
    """Texts that cover each other by more than a pixel each way, and texts that are cut off."""
    drawn, (width, height) = texts_of(figure, monkeypatch)
    assert len(drawn) > 5
    found = []
    for (one, a), (other, b) in itertools.combinations(drawn, 2):
        across = min(a.x1, b.x1) - max(a.x0, b.x0)
        along = min(a.y1, b.y1) - max(a.y0, b.y0)
        if across > 1 and along > 1:
            found.append((one, other))
    cut = [
        text
        for text, box in drawn
        if box.x0 < -1 or box.y0 < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]
    return [*found, *cut]


@needs_matplotlib
@pytest.mark.parametrize("experts, layers", [(32, 4), pytest.param(8, 6, marks=pytest.mark.slow)])
def test_no_text_of_a_figure_covers_another(monkeypatch, experts, layers):
    task = toy_task(60)
    model = toy_model(
        task,
        num_experts=experts,
        **{"encoder_layers": layers, "decoder_layers": layers},
        **{"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    ).eval()
    samples = [toy_sample(task, [30, 9, 60, 6, 24, 12] * 4, [5, 22, 8, 50, 17, 33] * 4)]
    models = [Surveyed(context_of(task, model, samples), survey(context_of(task, model, samples)))]
    for figure in (figure for each in make_sections(models) for figure in each.figures):
        assert not faults(figure.figure, monkeypatch), figure.name


@needs_matplotlib
def test_texts_that_cover_each_other_are_found(monkeypatch):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 3))
    axis = figure.subplots()
    axis.set_xticks([0, 0.01, 1], ["first", "second", "third"])
    assert ("first", "second") in faults(figure, monkeypatch)


def test_a_section_of_one_model_is_made_for_each(monkeypatch):
    task = toy_task()
    model = toy_model(task).eval()
    samples = [toy_sample(task, [3, 4], [2, 3])]
    context = context_of(task, model, samples)
    models = [
        Surveyed(replace(context, name=name), survey(context)) for name in ("one", "the other")
    ]
    monkeypatch.setattr(pipeline, "COMPARING_SECTIONS", ())
    monkeypatch.setattr(
        pipeline, "MODEL_SECTIONS", (lambda context: section(f"about {context.name}", TABLE),)
    )
    (alone,) = make_sections(models[:1])
    assert (alone.name, alone.tables[0].name) == ("about one", "t")
    sections = make_sections(models)
    assert [each.name for each in sections] == ["about one_one", "about the other_the-other"]
    assert [each.figures[0].name for each in sections] == ["f_one", "f_the-other"]
