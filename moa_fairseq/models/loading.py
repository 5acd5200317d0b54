"""What the models of this package do where fairseq loads a checkpoint."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import CheckpointMismatch, describe_mismatch
from .layers_to_keep import settle_layers_to_keep


class OneLineForAnotherModel(nn.Module):
    """Put before a model's class: a checkpoint of another model ends the command with one line."""

    def load_state_dict(
        self, state_dict: Any, strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> Any:
        """As in fairseq, but for what a checkpoint of another model ends in.

        Raises:
            CheckpointMismatch: when fairseq loads (`model_cfg` is given) and a parameter is
                missing, left over or of another shape.
        """
        if model_cfg is not None:
            settle_layers_to_keep(state_dict, model_cfg)
        try:
            return super().load_state_dict(state_dict, strict, model_cfg, args)  # type: ignore[call-arg]
        except RuntimeError as error:
            if model_cfg is None:
                raise
            raise CheckpointMismatch(describe_mismatch(error)) from error
