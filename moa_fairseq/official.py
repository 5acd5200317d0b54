"""Checkpoints of the authors' code (arXiv 2210.05144), turned into ones of this package.

Both compute the same function; names, a scale and options differ:

* each layer's feed-forward stands in their checkpoints twice, as `fc1`, `fc2` and as `ffd`;
* their output projections are W_i^o itself, ours are divided by the `output_scale` of
  :class:`~moa_fairseq.modules.moa_attention.MixtureOfAttentionHeads`;
* their gates are the selected probabilities as they are: `--gate-normalization none`;
* their weights of the router losses are options of the model, ours of the criterion.
"""

from __future__ import annotations

import re
import warnings
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Mapping, Tuple

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

from .compat import without_memory
from .errors import UsageError, first_line
from .models.config import MoATransformerConfig
from .models.moa_transformer import MoATransformerModel

ARCHITECTURE = "moa_transformer"
CRITERION = "moa_ce_loss"

# Weights of the router losses, by our name.
LOSS_WEIGHTS = {
    "load_balance_weight": "switchloss",
    "router_z_weight": "zloss",
    "load_cv_squared_weight": "cvloss",
}

_ATTENTION = r"((?:encoder|decoder)\.layers\.\d+\.(?:self_attn|encoder_attn))"
_RENAMED = (
    (re.compile(_ATTENTION + r"\.q_proj\.w_gate"), r"\1.router.weight"),
    (re.compile(_ATTENTION + r"\.q_proj\.w_noise"), r"\1.router.noise_weight"),
    (re.compile(_ATTENTION + r"\.q_proj\.experts\.w"), r"\1.q_experts.weight"),
    (re.compile(_ATTENTION + r"\.q_proj\.output_experts\.w"), r"\1.o_experts.weight"),
)
# The second name of a feed-forward's parameters, by the place in their sequence of modules.
_REPEATED = re.compile(r"((encoder|decoder)\.layers\.\d+)\.ffd\.([\d.]+)\.(weight|bias)")
_SEQUENCE = {
    "encoder": {"0": "fc1", "3": "fc2"},
    "decoder": {"0": "fc1", "1.2": "ffn_layernorm", "2": "fc2"},
}


def import_state(state: Mapping[str, Any], path: Path) -> Dict[str, Any]:
    """Turn a checkpoint of the authors' code into one that fairseq loads with this package.

    The optimizer's state is left out: it belongs to other parameters. All else that fairseq
    keeps (task, number of updates, position in the data, meters) stays as it was.

    Args:
        state: the checkpoint as read from the file.
        path: the file, for messages.

    Raises:
        UsageError: when it is not of the authors' code, or not wholly understood.
    """
    theirs = state["model"]
    _check_origin(theirs, path)
    options = _flat_options(state, path)
    model = convert_options(options, path)
    parameters = convert_parameters(theirs, model["num_experts"], path)
    _check_fits(parameters, model, path)
    imported = {name: value for name, value in state.items() if name != "args"}
    imported.update(
        args=None,
        cfg=_convert_config(state, options, model),
        model=parameters,
        last_optimizer_state=None,
        extra_state={**(state.get("extra_state") or {}), "imported_from": path.name},
    )
    return imported


def convert_parameters(
    theirs: Mapping[str, Tensor], output_scale: float, path: Path
) -> Dict[str, Tensor]:
    """The authors' parameters under our names and in our scale.

    Args:
        theirs: their model's state dict.
        output_scale: what output projections `[E, D, d]` are divided by: E, their gates being
            plain probabilities.
        path: the file, for messages.

    Returns:
        parameters by our name; tensors that were shared (embeddings) still are.

    Raises:
        UsageError: when two copies of a feed-forward's parameter differ.
    """
    ours: Dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        repeated = _REPEATED.fullmatch(name)
        if repeated and repeated[3] in _SEQUENCE[repeated[2]]:
            kept = f"{repeated[1]}.{_SEQUENCE[repeated[2]][repeated[3]]}.{repeated[4]}"
            if kept not in theirs or not torch.equal(theirs[kept], tensor):
                raise UsageError(
                    f"{path}: {name} should be a second copy of {kept} but is not equal to it, so "
                    "that it is not sure which of them the model used; save the checkpoint again "
                    "from the model itself"
                )
            continue
        renamed = _rename(name)
        ours[renamed] = tensor / output_scale if renamed.endswith(".o_experts.weight") else tensor
    return ours


def convert_options(options: Mapping[str, Any], path: Path) -> Dict[str, Any]:
    """Our model's options, all of them, for the authors' flat options.

    Raises:
        UsageError: for a mechanism of theirs that the import does not know.
    """
    for name in ("num_expert", "head_dim", "encoder_attention_heads", "decoder_attention_heads"):
        if options.get(name) is None:
            raise UsageError(
                f"{path} does not say its {name}, which the authors' code always stores; is the "
                "checkpoint complete?"
            )
        if not isinstance(options[name], int):
            raise UsageError(f"{path}: its {name} is {options[name]!r}, which is not a number")
    if (options.get("ffd_type") or "normal") != "normal":
        raise UsageError(
            f"{path} was trained with --ffd-type {options['ffd_type']}: only checkpoints with "
            "--ffd-type normal can be imported"
        )
    model: Dict[str, Any] = {"_name": ARCHITECTURE}
    for name, default in vars(MoATransformerConfig()).items():
        if not name.startswith("_"):
            value = options.get(name, default)
            model[name] = getattr(value, "value", value)  # an enumeration as its text
    model["num_experts"] = options["num_expert"]
    model["gate_normalization"] = "none"
    model["router_noise"] = "noisy" in str(options.get("gating") or "")
    return model


def _rename(name: str) -> str:
    for pattern, replacement in _RENAMED:
        if pattern.fullmatch(name):
            return pattern.sub(replacement, name)
    return name


def _check_origin(model: Mapping[str, Tensor], path: Path) -> None:
    if any(name.endswith(".router.weight") for name in model):
        raise UsageError(f"{path} is a checkpoint of moa_fairseq already; use it as it is")
    if not any(name.endswith(".q_proj.w_gate") for name in model):
        raise UsageError(
            f"{path} is not a checkpoint of the authors' code: it has no router (parameter "
            "*.q_proj.w_gate); a model without MoA needs no import"
        )


def _flat_options(state: Mapping[str, Any], path: Path) -> Dict[str, Any]:
    """The options of the model by name, from a new (`cfg`) or old (`args`) checkpoint."""
    cfg = state.get("cfg") or {}
    options = cfg.get("model") or state.get("args")
    if isinstance(options, Namespace):
        options = vars(options)
    if not isinstance(options, dict):
        raise UsageError(f"{path} holds no options of its model, so it cannot be rebuilt")
    return options


def _convert_config(
    state: Mapping[str, Any], options: Mapping[str, Any], model: Dict[str, Any]
) -> Dict[str, Any]:
    weights = {ours: float(options.get(theirs) or 0) for ours, theirs in LOSS_WEIGHTS.items()}
    cfg = state.get("cfg")
    if not cfg:
        old = {"criterion": "cross_entropy", **options, "user_dir": None}
        if old["criterion"] == CRITERION:
            old.update(weights)
        flat = Namespace(**{**old, **model, "arch": ARCHITECTURE})
        return OmegaConf.to_container(convert_namespace_to_omegaconf(flat), enum_to_str=True)
    converted = {**cfg, "model": model}
    if isinstance(cfg.get("common"), dict):
        converted["common"] = {**cfg["common"], "user_dir": None}  # a folder of their code
    criterion = cfg.get("criterion")
    if isinstance(criterion, Namespace):
        criterion = vars(criterion)
    if isinstance(criterion, dict) and criterion.get("_name") == CRITERION:
        names = ("_name", "label_smoothing", "report_accuracy", "ignore_prefix_size")
        known = {name: criterion[name] for name in (*names, "sentence_avg") if name in criterion}
        converted["criterion"] = {**known, **weights}
    return converted


def _check_fits(parameters: Mapping[str, Tensor], options: Dict[str, Any], path: Path) -> None:
    """Nothing missing, nothing left over, every shape as the options say.

    Raises:
        UsageError: naming the first parameter that does not fit.
    """
    try:
        model = _empty_model(parameters, options, path)
    except UsageError:
        raise
    except Exception as error:  # whatever fairseq raises for options that make no sense
        raise UsageError(
            f"{path}: no model can be built from its options: {first_line(error)}"
        ) from error
    try:
        with warnings.catch_warnings():
            # The model has no memory, so that nothing is copied: only names and shapes matter.
            warnings.simplefilter("ignore")
            missing, unexpected = model.load_state_dict(dict(parameters), strict=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UsageError(f"{path} does not fit its own options: {reason}") from error
    if missing:
        raise UsageError(
            f"{path} lacks {len(missing)} parameters of its model, {missing[0]} among them; is "
            "the checkpoint complete?"
        )
    if unexpected:
        raise UsageError(
            f"{path} has {len(unexpected)} parameters that are not known, {unexpected[0]} among "
            "them; nothing is dropped in silence, so it cannot be imported"
        )


def _empty_model(
    parameters: Mapping[str, Tensor], options: Dict[str, Any], path: Path
) -> MoATransformerModel:
    source, target = (_dictionary(parameters, side, path) for side in ("encoder", "decoder"))
    if options["share_all_embeddings"]:
        target = source
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target)
    embeddings = {"encoder_embed_path": None, "decoder_embed_path": None}  # files to start from
    with without_memory():
        return MoATransformerModel.build_model(Namespace(**{**options, **embeddings}), task)


def _dictionary(parameters: Mapping[str, Tensor], side: str, path: Path) -> Dictionary:
    """A dictionary of the size of a side's embeddings."""
    name = f"{side}.embed_tokens.weight"
    if name not in parameters:
        raise UsageError(f"{path} lacks {name}; is the checkpoint complete?")
    dictionary = Dictionary()
    for number in range(len(parameters[name]) - len(dictionary)):
        dictionary.add_symbol(str(number))
    return dictionary


def summary(imported: Mapping[str, Any]) -> Tuple[str, int]:
    """The size of an imported model in the paper's notation, as 8K8E128D, and its updates."""
    model = imported["cfg"]["model"]
    size = f"{model['encoder_attention_heads']}K{model['num_experts']}E{model['head_dim']}D"
    history = imported.get("optimizer_history") or [{}]
    return size, int(history[-1].get("num_updates", 0))
