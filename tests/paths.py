"""Where the tests find their data."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "moa_fairseq"
REFERENCE = Path(os.environ.get("MOA_REFERENCE_DIR", ROOT / "tests" / "reference"))
SHARED = Path(os.environ.get("MOA_SHARED", ROOT.parent / "shared"))


def reference_files() -> list[Path]:
    """Files computed by the authors' code; `MOA_REFERENCE_DIR` points to others of the form."""
    found = sorted(REFERENCE.glob("*.npz"))
    if not found:
        raise FileNotFoundError(f"no reference files (*.npz) in {REFERENCE}")
    return found
