"""Building a drafter whose first loss lies near ln V (docs/algorithm.md, section 2).

N probe slots, D width, V ids of the head.
"""

import math

import torch
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.models.ends import Ends

TOLERANCE = 0.01
"""Share of ln V by which the calibrated loss may differ from it."""


def new_drafter(shape: DrafterShape, ends: Ends, head: Ends, seed: int) -> Drafter:
    """A float32 drafter on the CPU with drawn weights and a calibrated final norm."""
    drafter = Drafter(shape).float()
    drafter.initialise(torch.Generator().manual_seed(seed))
    calibrate(drafter, ends.copy_to("cpu", torch.float32), head.copy_to("cpu", torch.float32), seed)
    return drafter


@torch.no_grad()
def calibrate(drafter: Drafter, ends: Ends, head: Ends, seed: int) -> float:
    """Sets the final norm's weight to the largest constant at which the expected loss is ln V to 1%; returns it.

    Logits are linear in that weight. The expectation is over uniform labels, for blocks behind random context
    features: a drafter that knows nothing.
    """
    hidden_ND = _probe(drafter, ends, seed)
    uniform = math.log(head.vocab_size)

    def excess(scale: float) -> float:
        logits_NV = head.logits(hidden_ND * scale)
        loss = float((logits_NV.logsumexp(-1) - logits_NV.mean(-1)).mean())
        return loss / uniform - 1

    low, high = 0.0, 1.0
    # Written so that a loss that is not a number counts as too large.
    if not excess(high) <= TOLERANCE:
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) <= TOLERANCE else (low, middle)
        scale = low
    else:
        scale = high
    if scale <= 0:
        raise ConfigError("the target's head gives no finite logits for a new drafter; check the target's weights")
    drafter.norm.weight.fill_(scale)
    return scale


def _probe(drafter: Drafter, ends: Ends, seed: int) -> Tensor:
    """Hidden states of drafted slots for random tokens and features, final norm 1, [N, D]."""
    shape, generator = drafter.shape, torch.Generator().manual_seed(seed + 1)
    num_anchors, num_tokens = 8, 32
    drafter.norm.weight.fill_(1.0)
    features = torch.randn(1, num_tokens, drafter.fc.in_features, generator=generator)
    token_AL = torch.full((num_anchors, shape.block_size), shape.mask_token_id)
    token_AL[:, 0] = torch.randint(0, shape.vocab_size, (num_anchors,), generator=generator)
    anchor_1A = torch.arange(num_anchors)[None] * 3 + 4
    position_1T = torch.arange(num_tokens)[None]
    block_position = (anchor_1A[..., None] + torch.arange(shape.block_size)).flatten(1)
    attend = sdpa_attend(shape, torch.zeros(1, num_tokens, dtype=torch.long), position_1T, anchor_1A)
    embedded = ends.embed(token_AL.flatten()[None])
    hidden_1QD = drafter(drafter.project(features), position_1T, embedded, block_position, attend)
    return hidden_1QD.view(num_anchors, shape.block_size, -1)[:, 1:].flatten(0, 1)  # type: ignore[no-any-return]
