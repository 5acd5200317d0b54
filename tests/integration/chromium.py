"""Looking at a page as a browser does."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
# What the browser made of the page, as text in the page.
SCRIPT = """<script>addEventListener("load", () => {
  const seen = document.createElement("pre");
  seen.id = "seen";
  seen.textContent = JSON.stringify({
    images: [...document.images].map((each) => ({
      width: each.naturalWidth, height: each.naturalHeight, shown: each.clientWidth,
      alternative: each.alt, source: each.src.slice(0, 22),
    })),
    resources: performance.getEntriesByType("resource").map((each) => each.name.slice(0, 60)),
    links: [...document.links].map((each) => each.getAttribute("href")),
    targets: [...document.querySelectorAll("[id]")].map((each) => each.id),
    page: document.documentElement.scrollWidth,
    window: innerWidth,
  });
  document.body.append(seen);
});</script>"""


def browser() -> str:
    """Chromium's command; the test is skipped where there is none."""
    for name in NAMES:
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("needs Chromium or Chrome")


def _run(folder: Path, page: Path, *flags: str) -> str:
    result = subprocess.run(
        [browser(), *FLAGS, f"--user-data-dir={folder / 'profile'}", *flags, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout


def look(page: Path, folder: Path) -> dict[str, Any]:
    """Open a page, and return what the browser says of its pictures, links and width.

    Args:
        page: the file.
        folder: for copies and the browser's own files.
    """
    text = page.read_text(encoding="utf-8")
    # The page's own policy would let no script run.
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    copy = folder / "copy.html"
    copy.write_text(text.replace("</body>", SCRIPT + "</body>"), encoding="utf-8")
    shown = _run(folder, copy, "--window-size=1300,900", "--dump-dom")
    found = re.search(r'<pre id="seen">(.*?)</pre>', shown, re.S)
    assert found, shown[:500]
    return json.loads(html.unescape(found[1]))


def screenshot(page: Path, folder: Path, height: int) -> Path:
    """A picture of the page's first `height` pixels, as PNG."""
    picture = folder / "screenshot.png"
    _run(folder, page, f"--window-size=1300,{height}", f"--screenshot={picture}")
    return picture
