"""Pictures of one sentence: its tokens' experts, and what the heads of these attend to."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Sequence, Set, Tuple

import numpy as np

from .sentence import ModuleView

COLOURS = "viridis"
NOT_SELECTED = "#eeeeee"
#: matplotlib's font that has a box for every character.
PLACEHOLDERS = "Last Resort"
#: Points.
FONT_SIZE = 7.5
#: Inches: of a token's row or column, which a line of text must fit into, and around panels.
CELL, GAP, TITLE = 0.155, 0.2, 0.25
#: Inches: pictures of attention are about as wide.
WIDTH = 13.0
LONGEST_LABEL = 14
#: Up to as many experts, a cell of the routing grid holds its gate as a number.
EXPERTS_WITH_NUMBERS = 16


class Fonts(NamedTuple):
    """What a text is drawn with.

    Attributes:
        families: of which the first that has a character draws it.
        missing: the text's characters that no installed font has.
    """

    families: Tuple[str, ...]
    missing: Set[str]


def fonts_for(text: str) -> Fonts:
    """matplotlib's own font, then installed ones that have the characters which it lacks."""
    from matplotlib import font_manager

    own = "DejaVu Sans"
    path = font_manager.findfont(own)
    missing = _lacking(path, {character for character in text if not character.isspace()})
    families = [own]
    for entry in sorted(font_manager.fontManager.ttflist, key=lambda entry: entry.fname):
        if not missing:
            break
        if entry.name.startswith(PLACEHOLDERS):
            continue
        left = _lacking(entry.fname, missing)
        if len(left) < len(missing):
            families.append(entry.name)
            missing = left
    return Fonts(tuple(families), missing)


def _lacking(path: str, characters: Set[str]) -> Set[str]:
    from matplotlib import font_manager

    known = font_manager.get_font(path).get_charmap()
    return {character for character in characters if ord(character) not in known}


def numbered(tokens: Sequence[str], fonts: Fonts) -> List[str]:
    """Labels of tokens: place in the sentence and text, the place alone where no font has it."""
    labels = []
    for place, token in enumerate(tokens):
        parts = [_shortened(part) for part in token.split(" → ")]
        drawable = not fonts.missing.intersection(token)
        labels.append(f"{place} {' → '.join(parts)}" if drawable else str(place))
    return labels


def _shortened(token: str) -> str:
    return token if len(token) <= LONGEST_LABEL else token[: LONGEST_LABEL - 1] + "…"


def routing_figure(view: ModuleView, fonts: Fonts) -> Any:
    """Tokens × experts, coloured by gate; grey where a token does not select an expert.

    Returns:
        a `matplotlib.figure.Figure`.
    """
    from matplotlib.figure import Figure

    tokens, experts = len(view.queries), view.experts
    gates = np.full((tokens, experts), np.nan)
    np.put_along_axis(gates, view.indices.numpy(), view.gates.float().numpy(), axis=1)
    numbers = experts <= EXPERTS_WITH_NUMBERS
    width = experts * (0.4 if numbers else 0.24)
    labels = numbered(view.queries, fonts)
    left, top, bottom, right = _longest(labels, fonts) + 0.3, 0.4, 0.65, 1.1
    size = (left + width + right, top + tokens * CELL * 1.1 + bottom)
    figure = Figure(figsize=size)
    panel = figure.add_axes(_box(size, left, bottom, width, size[1] - top - bottom))
    largest = float(np.nanmax(gates))
    image = panel.imshow(
        np.ma.masked_invalid(gates),
        cmap=_colours(),
        vmin=0,
        vmax=largest,
        aspect="auto",
        interpolation="nearest",
    )
    panel.set_xticks(range(experts))
    panel.tick_params(axis="x", labelsize=FONT_SIZE)
    panel.set_yticks(range(tokens))
    panel.set_yticklabels(labels, **_text(fonts))
    panel.set_xlabel("expert", fontsize=FONT_SIZE + 1)
    panel.set_title(f"{view.label}: gates", fontsize=FONT_SIZE + 2, loc="left")
    _lines_between(panel, tokens, experts)
    if numbers:
        for row, column in zip(*np.nonzero(~np.isnan(gates))):
            gate = gates[row, column]
            panel.text(
                *(column, row, f"{gate:.2f}"),
                ha="center",
                va="center",
                fontsize=FONT_SIZE - 1,
                color="white" if gate < 0.6 * largest else "black",
            )
    bar = figure.add_axes(_box(size, left + width + 0.2, bottom, 0.15, size[1] - top - bottom))
    figure.colorbar(image, cax=bar, label="gate")
    bar.tick_params(labelsize=FONT_SIZE)
    return figure


def attention_figure(view: ModuleView, fonts: Fonts) -> Any:
    """One map for each head that the sentence uses: tokens that selected it × keys.

    Returns:
        a `matplotlib.figure.Figure`.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    assert view.weights is not None
    queries, keys = numbered(view.queries, fonts), numbered(view.keys, fonts)
    left, below = _longest(queries, fonts) + 0.1, _longest(keys, fonts) + 0.1
    maps = _maps(view)
    # Short sentences: a title must fit too.
    width = max(
        len(keys) * CELL, _longest([title for title, _, _ in maps], fonts, bold=True) - left
    )
    heights = [TITLE + len(rows) * CELL + below + GAP for _, rows, _ in maps]
    columns = max(1, min(len(maps), int((WIDTH + GAP) / (left + width + GAP))))
    # Maps side by side begin at the same height, so that an expert is found by its number.
    rows_of_maps = [heights[first : first + columns] for first in range(0, len(maps), columns)]
    depths = np.concatenate(([0.0], np.cumsum([max(row) for row in rows_of_maps])))
    places = [(number % columns, depths[number // columns]) for number in range(len(maps))]
    top = 0.8
    title = f"{view.label}: attention of each expert that the sentence uses"
    size = (
        max(columns * (left + width + GAP) + GAP, 0.09 * len(title) + 0.4),
        top + depths[-1] + 0.1,
    )
    figure = Figure(figsize=size)
    # Most weights are small, and far from each other as shares of what a head sees.
    norm = PowerNorm(0.5, 0, 1)
    figure.text(
        *(GAP / size[0], 1 - 0.22 / size[1], title), fontsize=FONT_SIZE + 2, ha="left", va="center"
    )
    for (name, rows, weights), (column, depth) in zip(maps, places):
        x = GAP + column * (left + width + GAP) + left
        y = size[1] - top - depth - TITLE - len(rows) * CELL
        panel = figure.add_axes(_box(size, x, y, len(keys) * CELL, len(rows) * CELL))
        panel.imshow(weights, cmap=COLOURS, norm=norm, aspect="auto", interpolation="nearest")
        panel.set_xticks(range(len(keys)))
        panel.set_xticklabels(keys, rotation=90, **_text(fonts))
        panel.set_yticks(range(len(rows)))
        panel.set_yticklabels([queries[row] for row in rows], **_text(fonts))
        panel.tick_params(length=1.5, pad=1.5)
        figure.text(
            (x - left) / size[0],
            (y + len(rows) * CELL + 0.05) / size[1],
            name,
            fontsize=FONT_SIZE,
            fontweight="bold",
        )
    bar = figure.add_axes(_box(size, GAP + 1.7, size[1] - 0.5, 1.8, 0.1))
    figure.colorbar(ScalarMappable(norm, COLOURS), cax=bar, orientation="horizontal")
    bar.set_xticks([0, 0.05, 0.2, 0.5, 1], ["0", "0.05", "0.2", "0.5", "1"])
    bar.tick_params(labelsize=FONT_SIZE, length=2, pad=1)
    figure.text(
        *(GAP / size[0], 1 - 0.45 / size[1], "weight of a key (root scale)"),
        fontsize=FONT_SIZE,
        va="center",
    )
    return figure


def _maps(view: ModuleView) -> List[Tuple[str, List[int], np.ndarray]]:
    """Title, tokens and weights `[tokens, S]` of each head that some token uses."""
    assert view.weights is not None
    found = []
    for expert in range(view.experts):
        rows, ranks = (view.indices == expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        for head in range(view.heads):
            tokens = f"{len(rows)} token{'s' if len(rows) > 1 else ''}"
            title = f"expert {expert}" + (f", head {head}" if view.heads > 1 else "")
            weights = view.weights[rows, ranks, head].float().numpy()
            found.append((f"{title} ({tokens})", rows.tolist(), weights))
    return found


def _colours() -> Any:
    from matplotlib import colormaps

    return colormaps[COLOURS].with_extremes(bad=NOT_SELECTED)


def _lines_between(panel: Any, rows: int, columns: int) -> None:
    panel.set_xticks(np.arange(columns + 1) - 0.5, minor=True)
    panel.set_yticks(np.arange(rows + 1) - 0.5, minor=True)
    panel.grid(which="minor", color="white", linewidth=0.7)
    panel.tick_params(which="minor", length=0)


def _text(fonts: Fonts) -> Dict[str, Any]:
    # Dollar signs in a text are no formula.
    return {"fontsize": FONT_SIZE, "fontfamily": list(fonts.families), "parse_math": False}


def _longest(labels: Sequence[str], fonts: Fonts, bold: bool = False) -> float:
    """Inches that the longest of some labels takes."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    properties = FontProperties(
        family=list(fonts.families), size=FONT_SIZE, weight="bold" if bold else "normal"
    )
    measure = TextToPath().get_text_width_height_descent
    return max(measure(label, properties, False)[0] for label in labels) / 72


def _box(
    size: Tuple[float, float], left: float, bottom: float, width: float, height: float
) -> Tuple[float, float, float, float]:
    """Inches as matplotlib's shares of a figure."""
    return left / size[0], bottom / size[1], width / size[0], height / size[1]
