"""What a point trains, settled before anything runs: its config and what its model costs."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Sequence

import hydra
from fairseq.data import Dictionary
from fairseq.dataclass.initialize import add_defaults, hydra_init
from fairseq.dataclass.utils import omegaconf_no_object_check
from fairseq.models import ARCH_MODEL_REGISTRY
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf

from ..analysis.costs import all_macs, count_parameters, linear_macs
from ..compat import without_memory
from ..errors import UsageError, first_line
from ..mistakes import line_of

#: Of `configs/`.
CONFIG_NAME = "sweep_experts"


@dataclass(frozen=True)
class Plan:
    """What is known of a point before it runs.

    Attributes:
        parameters: trained numbers of its model.
        linear_macs: multiply-adds as the paper counts them, for 10 source and 10 target tokens.
        all_macs: those of every matrix product.
        max_tokens: of a batch in validation.
        max_epoch: where training ends; 0 where epochs do not end it.
        kept_epochs: how many epochs' checkpoints stay; -1 for all.
    """

    parameters: int
    linear_macs: int
    all_macs: int
    max_tokens: int
    max_epoch: int
    kept_epochs: int


def plan(config_dir: Path, overrides: Sequence[str], dictionaries: Sequence[Dictionary]) -> Plan:
    """What `fairseq-hydra-train --config-name sweep_experts` with these overrides would train.

    Args:
        config_dir: the folder `configs` of this project.
        overrides: as that command takes them.
        dictionaries: of source and target.

    Raises:
        UsageError: where hydra, fairseq or the model refuses the settings.
    """
    if not hasattr(hydra, "compose"):
        raise UsageError(
            "the sweep's YAML needs hydra 1.1 or later, and fairseq 0.12.2 pins 1.0; use a build "
            "of fairseq 0.12.3"
        )
    try:
        cfg = _compose(config_dir, overrides)
        costs = _costs(cfg.model, dictionaries)
    except UsageError:
        raise
    except HydraException as error:
        raise UsageError(
            f"settings after --: {first_line(error)}; mend the spelling, or put a + before an "
            f"option that configs/{CONFIG_NAME}.yaml does not name"
        ) from error
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        raise UsageError(line) from error
    return Plan(
        **costs,
        max_tokens=cfg.dataset.max_tokens_valid or cfg.dataset.max_tokens,
        max_epoch=cfg.optimization.max_epoch,
        kept_epochs=cfg.checkpoint.keep_last_epochs,
    )


def _compose(config_dir: Path, overrides: Sequence[str]) -> Any:
    GlobalHydra.instance().clear()
    hydra_init(CONFIG_NAME)
    with warnings.catch_warnings(), ExitStack() as stack:
        # Of hydra's older ways, which fairseq's configs need.
        warnings.simplefilter("ignore", UserWarning)
        folder = str(config_dir.resolve())
        stack.enter_context(hydra.initialize_config_dir(folder, version_base="1.1"))
        cfg = hydra.compose(CONFIG_NAME, overrides=list(overrides))
    add_defaults(cfg)
    with omegaconf_no_object_check():
        return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


def _costs(model_config: Any, dictionaries: Sequence[Dictionary]) -> Dict[str, int]:
    source, target = dictionaries
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target)
    with without_memory():
        model = ARCH_MODEL_REGISTRY[model_config._name].build_model(model_config, task)
    return {
        "parameters": count_parameters(model),
        "linear_macs": linear_macs(model),
        "all_macs": all_macs(model),
    }
