"""Checkpoints in the form of the authors' code, made of small models."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

from torch import Tensor

from moa_fairseq.models.moa_transformer import MoATransformerModel

from .toy import SMALL, toy_model, toy_task

# Options of the authors' model, as their training command stores them.
THEIR_OPTIONS = {
    "arch": "moa_transformer_base",
    "task": "translation",
    "criterion": "moa_ce_loss",
    "label_smoothing": 0.1,
    "num_expert": 4,
    "head_dim": 8,
    "sample_topk": 0,
    "cvloss": 0,
    "switchloss": 0.02,
    "zloss": 0.003,
    "gating": "normal",
    "ffd_type": "normal",
}

NAMES = {
    ".router.weight": ".q_proj.w_gate",
    ".router.noise_weight": ".q_proj.w_noise",
    ".q_experts.weight": ".q_proj.experts.w",
    ".o_experts.weight": ".q_proj.output_experts.w",
}


def their_parameters(model: MoATransformerModel) -> dict[str, Tensor]:
    """The parameters of our model (with gates `none`) with the authors' names and scale."""
    theirs: dict[str, Tensor] = {}
    experts = model.cfg.moa.num_experts
    for name, tensor in model.state_dict().items():
        for ours, their_name in NAMES.items():
            if name.endswith(ours):
                theirs[name.replace(ours, their_name)] = (
                    tensor * experts if "o_experts" in ours else tensor.clone()
                )
                break
        else:
            theirs[name] = tensor
        place = re.sub(r"\.fc1\.", ".ffd.0.", name)
        second = ".ffd.3." if name.startswith("encoder") else ".ffd.2."
        place = re.sub(r"\.fc2\.", second, place)
        if place != name:
            theirs[place] = tensor
    return theirs


def their_checkpoint(old: bool = False, **changes: Any) -> tuple[dict[str, Any], Any]:
    """A checkpoint of the authors' code, and our model that computes the same.

    Args:
        old: options in `args`, as before fairseq had `cfg`.
        changes: options of the authors' model.
    """
    options = {**SMALL, **THEIR_OPTIONS, **changes}
    model = toy_model(
        toy_task(),
        gate_normalization="none",
        router_noise="noisy" in options["gating"],
        encoder_layers=options["encoder_layers"],
        num_experts=options["num_expert"],
        encoder_normalize_before=options.get("encoder_normalize_before", False),
    )
    flat = Namespace(**options)
    cfg = {
        "common": {"seed": 7, "user_dir": "somewhere/else"},
        "model": Namespace(**options, _name=options["arch"]),
        "task": {"_name": "translation"},
        "criterion": {"_name": "moa_ce_loss", "label_smoothing": 0.1, "sentence_avg": False},
    }
    state = {
        "args": flat if old else None,
        "cfg": None if old else cfg,
        "model": their_parameters(model),
        "optimizer_history": [
            {
                "criterion_name": "MoALabelSmoothedCrossEntropyCriterion",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {"best": 6.0},
                "num_updates": 12,
            }
        ],
        "extra_state": {"train_iterator": {"epoch": 3}},
        "last_optimizer_state": {"state": {}},
    }
    return state, model
