"""What tells the micro-batch that made a step's gradients not finite, measured on the device without waiting for it.

R rows, T tokens, C captured layers times width.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Health(NamedTuple):
    """Of one micro-batch; a number that is not finite carries through all three."""

    features_min: float
    features_max: float
    loss: float

    @property
    def is_finite(self) -> bool:
        """Whether all are."""
        return all(abs(value) < float("inf") for value in self)


def measure_health(features_RTC: Tensor, loss: Tensor) -> Tensor:
    """Extremes of the context features and the loss, float32 [3], on the device; one pass over the features."""
    low, high = torch.aminmax(features_RTC.detach())
    return torch.stack([low.float(), high.float(), loss.detach().float()])
