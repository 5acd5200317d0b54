"""The points of a sweep: sizes of the attention, and seeds."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, fields
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..errors import UsageError
from ..models.config import FlatTransformerConfig, MoATransformerConfig

#: The options of MoA that fairseq's Transformer does not have.
MOA_OPTIONS = frozenset(field.name for field in fields(MoATransformerConfig)) - frozenset(
    field.name for field in fields(FlatTransformerConfig)
)
#: What a point says itself.
OWN_SETTINGS = (
    *("model._name", "model.num_experts", "model.head_dim"),
    *("model.encoder_attention_heads", "model.decoder_attention_heads"),
    *("common.seed", "common.cpu", "common.user_dir", "checkpoint.save_dir", "task.data"),
)


@dataclass(frozen=True)
class Size:
    """The attention of a model.

    Attributes:
        heads: K, experts that a token uses; of a dense model its heads.
        num_experts: E; None for a dense model.
        head_dim: D; None for a dense model, whose heads share its width.
    """

    heads: int
    num_experts: Optional[int] = None
    head_dim: Optional[int] = None

    @property
    def dense(self) -> bool:
        """Whether this is fairseq's own Transformer."""
        return self.num_experts is None

    @property
    def name(self) -> str:
        """`8K32E64D`, or `dense8`."""
        if self.dense:
            return f"dense{self.heads}"
        return f"{self.heads}K{self.num_experts}E{self.head_dim}D"


@dataclass(frozen=True)
class Point:
    """One training run of a sweep."""

    size: Size
    seed: int

    @property
    def name(self) -> str:
        """Of the point's folder: `8K32E64D-seed1`, as `configs/sweep_experts.yaml` names it."""
        return f"{self.size.name}-seed{self.seed}"

    def as_json(self) -> Dict[str, Any]:
        """For :func:`point_from_json`."""
        return {
            **{"name": self.name, "heads": self.size.heads, "num_experts": self.size.num_experts},
            **{"head_dim": self.size.head_dim, "seed": self.seed},
        }


def point_from_json(point: Dict[str, Any]) -> Point:
    """The point that was written with `as_json`."""
    size = Size(point["heads"], point["num_experts"], point["head_dim"])
    return Point(size, point["seed"])


def grid(
    num_experts: Sequence[int],
    heads: Sequence[int],
    head_dims: Sequence[int],
    seeds: Sequence[int],
    dense_heads: Optional[int] = None,
) -> Tuple[List[Point], List[Size]]:
    """Every combination, the dense baseline first; and the sizes with K > E, which cannot be.

    Raises:
        UsageError: where no combination is left.
    """
    combinations = itertools.product(heads, num_experts, head_dims)
    sizes = [Size(*combination) for combination in combinations]
    skipped = [size for size in sizes if size.heads > (size.num_experts or 0)]
    kept = [size for size in sizes if size not in skipped]
    if not kept:
        raise UsageError(
            f"--heads {','.join(map(str, heads))}: every K is more than every E of --num-experts "
            f"{','.join(map(str, num_experts))}; raise the one or lower the other"
        )
    if dense_heads is not None:
        kept.insert(0, Size(dense_heads))
    return [Point(size, seed) for size in kept for seed in seeds], skipped


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse settings that are not hydra's, or that the points of a sweep say themselves.

    Raises:
        UsageError: naming the first one.
    """
    for override in overrides:
        name = _name_of(override)
        if override.startswith("-") or ("=" not in override and not override.startswith("~")):
            raise UsageError(
                f"{override} after --: fairseq's options have hydra's form here, such as "
                "optimization.max_epoch=10 or +model.gate_normalization=none"
            )
        if name in OWN_SETTINGS or name.startswith("hydra."):
            raise UsageError(
                f"{override} after --: every point has its own {name}; leave it out (see --help)"
            )


def hydra_overrides(point: Point, data: str, save_dir: str, extra: Sequence[str]) -> List[str]:
    """The words after `fairseq-hydra-train --config-name sweep_experts` for one point.

    Args:
        point: what to train.
        data: folder of binarised data.
        save_dir: folder for checkpoints.
        extra: other settings, in hydra's form. Those of MoA do not go to a dense model.
    """
    size = point.size
    words = [
        # Not the grid in the file: this is one point.
        *("hydra.mode=RUN", "hydra.run.dir=."),
        f"task.data={quoted(data)}",
        f"checkpoint.save_dir={quoted(save_dir)}",
        f"common.seed={point.seed}",
        f"model.encoder_attention_heads={size.heads}",
    ]
    if size.dense:
        words += ["model._name=dense_transformer", "~model.num_experts", "~model.head_dim"]
        extra = [word for word in extra if not _is_of_moa(word)]
    else:
        words += [f"model.num_experts={size.num_experts}", f"model.head_dim={size.head_dim}"]
    return [*words, *extra]


def quoted(text: str) -> str:
    """A text as hydra's grammar takes it for a value, whatever characters it has."""
    # A backslash means itself there, except before a quotation mark.
    return "'" + re.sub(r"(\\*)('|$)", _escape, text) + "'"


def _escape(found: re.Match[str]) -> str:
    return found[1] * 2 + ("\\'" if found[2] else "")


def _name_of(override: str) -> str:
    return override.lstrip("+~").split("=")[0]


def _is_of_moa(override: str) -> bool:
    section, _, name = _name_of(override).partition(".")
    return section == "model" and name in MOA_OPTIONS
