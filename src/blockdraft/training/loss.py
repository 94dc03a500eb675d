"""Cross-entropy of block slots, chunk by chunk, in float32 whatever the weights' type.

N slots (slot 0 left out), D width, V ids of the head, R rows, A anchors, L block positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blockdraft.models.ends import Ends


class SlotLoss(NamedTuple):
    """Per-slot results."""

    ce_N: Tensor
    """Cross-entropy, float32, differentiable."""
    correct_N: Tensor
    """Whether the label is the largest logit, bool."""


def slot_loss(hidden_ND: Tensor, label_N: Tensor, ends: Ends, chunk_rows: int) -> SlotLoss:
    """Cross-entropy and correctness of every slot through the frozen head.

    A label of -1 (outside a draft vocabulary) gives cross-entropy 0 and is never correct. No [N, V] tensor outlives its
    chunk: each chunk's logits are made again in the backward pass (non-reentrant checkpointing).
    """
    parts = [
        checkpoint(_chunk, hidden, label, ends, use_reentrant=False)
        for hidden, label in zip(hidden_ND.split(chunk_rows), label_N.split(chunk_rows), strict=True)
    ]
    return SlotLoss(torch.cat([ce for ce, _ in parts]), torch.cat([correct for _, correct in parts]))


def _chunk(hidden_ND: Tensor, label_N: Tensor, ends: Ends) -> tuple[Tensor, Tensor]:
    # The product stays in the weights' type, as the target's own head has it; from there on everything is float32.
    logits_NV = ends.logits(hidden_ND).float()
    ce_N = torch.nn.functional.cross_entropy(logits_NV, label_N, reduction="none", ignore_index=-1)
    return ce_N, logits_NV.detach().argmax(-1) == label_N


def weighted_loss(ce_RAS: Tensor, weight_RAS: Tensor, denominator: float) -> Tensor:
    """This micro-batch's share of the step's loss: sum(w * CE) over its slots / the whole step's sum(w)."""
    return (ce_RAS * weight_RAS).sum() / denominator
