"""COMET, where it is installed."""

from __future__ import annotations

import importlib
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Sequence

import torch

from ..errors import UsageError


def load_comet(model: str) -> Any:
    """The package `comet`.

    Raises:
        UsageError: when it cannot be imported.
    """
    try:
        return importlib.import_module("comet")
    except ImportError as error:
        raise UsageError(
            f"--comet {model}: the package comet cannot be imported ({error}); install it with: "
            'pip install "unbabel-comet>=2.2" "setuptools<81"'
        ) from error


def comet_score(
    model: str,
    sources: Sequence[str],
    hypotheses: Sequence[str],
    references: Sequence[str],
    batch_size: int = 8,
) -> Dict[str, Any]:
    """COMET of detokenised text.

    Args:
        model: a checkpoint's path, or a name that COMET downloads, such as
            `Unbabel/wmt22-comet-da`.
        sources: raw source sentences.
        hypotheses: detokenised.
        references: raw.
        batch_size: sentences a batch.

    Raises:
        UsageError: when the package is missing.
    """
    comet = load_comet(model)
    path = model if Path(model).is_file() else comet.download_model(model)
    prediction = comet.load_from_checkpoint(path).predict(
        [
            {"src": source, "mt": hypothesis, "ref": reference}
            for source, hypothesis, reference in zip(sources, hypotheses, references)
        ],
        batch_size=batch_size,
        gpus=int(torch.cuda.is_available()),
    )
    return {
        "model": model,
        "version": metadata.version("unbabel-comet"),
        "score": float(prediction.system_score),
    }
