"""Whether the texts of a figure can be read."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np


def overlapping_texts(figure: Any, slack: float = 1.0) -> list[tuple[str, str]]:
    """Pairs of texts of a matplotlib figure that overlap, and texts beyond its edge.

    Args:
        figure: it is drawn here.
        slack: pixels by which boxes may overlap, for what is around the letters.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    drawn: list[Any] = []

    def draw(text: Any, renderer: Any) -> None:
        drawn.append(text)
        original(text, renderer)

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # settles the layout
    original = Text.draw
    with mock.patch.object(Text, "draw", draw):
        canvas.draw()
    renderer = canvas.get_renderer()
    texts = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    assert texts
    boxes = np.array([text.get_window_extent(renderer).extents for text in texts])
    width, height = canvas.get_width_height()
    found = [
        (text.get_text(), "edge of the figure")
        for text, (left, bottom, right, top) in zip(texts, boxes)
        if min(left, bottom) < -slack or right > width + slack or top > height + slack
    ]
    left, bottom, right, top = (boxes + np.array([slack, slack, -slack, -slack])).T
    across = (left[:, None] < right[None]) & (left[None] < right[:, None])
    along = (bottom[:, None] < top[None]) & (bottom[None] < top[:, None])
    for first, second in zip(*np.nonzero(np.triu(across & along, 1))):
        found.append((texts[first].get_text(), texts[second].get_text()))
    return found
