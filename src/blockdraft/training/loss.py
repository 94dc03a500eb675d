"""Losses of block slots, chunk by chunk, in float32 whatever the weights' type.

N slots (slot 0 left out), D width, V ids of the head, R rows, A anchors, L block positions, S = L - 1 drafted slots.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from blockdraft.models.ends import Ends

DPACE_ALPHA: Final = 0.5
"""Share of a slot's acceptance that is taken for granted; keeps weights of late slots alive."""


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


class SlotKL(NamedTuple):
    """Per-slot results against the target's distribution."""

    kl_N: Tensor
    """KL(target || drafter), float32, differentiable."""
    drafted_N: Tensor
    """The drafter's most likely token."""
    target_N: Tensor
    """The target's most likely token."""


def slot_kl(hidden_ND: Tensor, final_ND: Tensor, ends: Ends, chunk_rows: int) -> SlotKL:
    """Divergence of every slot from the target's distribution, which is its final hidden state through the same head.

    Over a draft vocabulary both distributions are over its ids alone. As in `slot_loss`, no [N, V] tensor outlives its
    chunk.
    """
    parts = [
        checkpoint(_kl_chunk, hidden, final, ends, use_reentrant=False)
        for hidden, final in zip(hidden_ND.split(chunk_rows), final_ND.split(chunk_rows), strict=True)
    ]
    return SlotKL(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _kl_chunk(hidden_ND: Tensor, final_ND: Tensor, ends: Ends) -> tuple[Tensor, Tensor, Tensor]:
    target_NV = ends.logits(final_ND).float().log_softmax(-1)
    drafter_NV = ends.logits(hidden_ND).float().log_softmax(-1)
    kl_N = (target_NV.exp() * (target_NV - drafter_NV)).sum(-1)
    return kl_N, drafter_NV.detach().argmax(-1), target_NV.argmax(-1)


@torch.no_grad()
def target_choice(final_ND: Tensor, ends: Ends, chunk_rows: int) -> Tensor:
    """The target's most likely token at each final hidden state, int64 [N]."""
    return torch.cat([ends.logits(final).float().argmax(-1) for final in final_ND.split(chunk_rows)])


@torch.no_grad()
def dpace_weights(ce_RAS: Tensor, supervised_RAS: Tensor) -> Tensor:
    """Weights of the objective `dpace`, float32 [R, A, S] (docs/algorithm.md, section 5).

    With q the drafter's probability of the label, q~ = (1 - alpha) q + alpha, and 1 at unsupervised slots; P_k is the
    product of q~ up to slot k, how likely a draft is accepted that far. A slot weighs the sum of P over itself and all
    later supervised slots: what is accepted beyond it hangs on it. Weights are constants to the gradient.
    """
    accepted_RAS = torch.where(supervised_RAS, (1 - DPACE_ALPHA) * torch.exp(-ce_RAS.float()) + DPACE_ALPHA, 1.0)
    reached_RAS = accepted_RAS.cumprod(-1) * supervised_RAS
    return reached_RAS.flip(-1).cumsum(-1).flip(-1) * supervised_RAS
