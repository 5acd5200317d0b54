"""fairseq 0.12.2's way around the attention of an encoder layer, closed for our layers.

That build keeps a copy of an encoder layer's weights and, in evaluation, gives the copy to a
function of torch's (its "BetterTransformer") instead of calling the layer's attention and
feed-forward. Where fairseq has no such path, nothing here does anything.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import nn

# The path is taken once the layer's own reader of checkpoints has made the copy.
HAS_FAST_PATH = "_load_from_state_dict" in vars(TransformerEncoderLayerBase)

_COPIES = (
    *("in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias"),
    *("fc1_weight", "fc1_bias", "fc2_weight", "fc2_bias"),
)


class EncoderLayerWithoutFastPath(TransformerEncoderLayerBase):
    """fairseq's encoder layer, which always calls its attention and its feed-forward.

    Its parameters, and so its checkpoints, are those of the builds that have no fast path.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if HAS_FAST_PATH:
            self.can_use_fastpath = False
            for name in _COPIES:
                delattr(self, name)
            for name in ("q_proj", "out_proj"):
                if not isinstance(getattr(self.self_attn, name), nn.Module):
                    delattr(self.self_attn, name)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        nn.Module._load_from_state_dict(self, *args, **kwargs)


def close_fast_path(model: nn.Module) -> None:
    """Let fairseq's own encoder layers compute in evaluation what they compute in training.

    Their fast path ends in an error for batches that are padded on the left, as fairseq's are.
    """
    for module in model.modules():
        if isinstance(module, TransformerEncoderLayerBase):
            module.can_use_fastpath = False


def measurable(attention: nn.Module) -> nn.Module:
    """An attention whose projections the layer can measure for the copy that it makes of them.

    :class:`EncoderLayerWithoutFastPath` takes copy and measure away again.
    """
    if HAS_FAST_PATH:
        for name in ("q_proj", "out_proj"):
            setattr(attention, name, SimpleNamespace(weight=torch.empty(0, 0), bias=torch.empty(0)))
    return attention
