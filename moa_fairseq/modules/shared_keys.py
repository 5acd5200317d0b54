"""Which hypotheses of a beam share their keys, and whether a reordering changes anything."""

from __future__ import annotations

import torch
from torch import Tensor


def count_sharers(key: Tensor, beam_size: int) -> int:
    """How many neighbours in the batch of `key` `[S, batch, d]` are hypotheses of a sentence.

    fairseq says once how wide its beam is, but not when it searches without one.
    """
    source_length, batch, _ = key.shape
    if beam_size == 1 or batch % beam_size != 0:
        return 1
    sentences = key.view(source_length, -1, beam_size, key.shape[2])  # [S, n, beam, d]
    return beam_size if bool((sentences == sentences[:, :, :1]).all()) else 1


def is_identity(order: Tensor, length: int) -> bool:
    """Whether `order` leaves `length` rows as they are.

    Asked of a CPU only; elsewhere the answer would have to be waited for.
    """
    if order.device.type != "cpu" or len(order) != length:
        return False
    return torch.equal(order, torch.arange(length))
