"""`--encoder-layers-to-keep` and `--decoder-layers-to-keep`: a smaller model from a larger one.

fairseq prunes a checkpoint's layers while it loads it. What is here mends what it leaves: one
option alone loses all layers of the other side; a pruned model's checkpoint says that it has the
layers that it lost, so that nothing can load it; and a run that resumes prunes a second time.
"""

from __future__ import annotations

import re
from contextlib import nullcontext
from typing import Any, Dict, Iterable, List

from omegaconf import OmegaConf, open_dict

from ..errors import UsageError

SIDES = ("encoder", "decoder")


def check_layers_to_keep(options: Dict[str, Any]) -> None:
    """Refuse layers to keep that the model does not have.

    Args:
        options: fairseq's flat options by name.

    Raises:
        UsageError: naming flag, value and remedy.
    """
    for side in SIDES:
        text, layers = options[f"{side}_layers_to_keep"], options[f"{side}_layers"]
        if not text:
            continue
        parts = [part.strip() for part in str(text).split(",")]
        kept = [int(part) for part in parts if part.isdecimal()]
        if len(set(kept)) < len(parts) or max(kept) >= layers:
            raise UsageError(
                f"--{side}-layers-to-keep {text}: give different numbers from 0 to {layers - 1}, "
                f"separated by commas; --{side}-layers is {layers}"
            )


def settle_layers_to_keep(names: Iterable[str], model_cfg: Any) -> None:
    """Make a model's options fit the parameters of a checkpoint, before fairseq prunes these.

    Args:
        names: the parameters in the checkpoint.
        model_cfg: the model's options, changed in place: as many layers as are kept, and which
            of the checkpoint's to keep, if it has more.
    """
    asked = {side: getattr(model_cfg, f"{side}_layers_to_keep", None) for side in SIDES}
    if not any(asked.values()):
        return
    names = list(names)
    pruned: List[bool] = []
    with open_dict(model_cfg) if OmegaConf.is_config(model_cfg) else nullcontext():
        for side in SIDES:
            found = {
                match[1] for name in names if (match := re.match(rf"{side}\.layers\.(\d+)\.", name))
            }
            kept = len(str(asked[side]).split(",")) if asked[side] else len(found)
            pruned.append(kept == len(found))
            if pruned[-1]:
                setattr(model_cfg, f"{side}_layers_to_keep", ",".join(map(str, range(kept))))
            setattr(model_cfg, f"{side}_layers", kept)
        if all(pruned):
            for side in SIDES:
                setattr(model_cfg, f"{side}_layers_to_keep", None)
