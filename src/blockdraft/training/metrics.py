"""What a training step counts, kept on the device until the log step.

R rows, A anchors, S = L - 1 supervised slots of a block.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class StepSums(NamedTuple):
    """Sums over the micro-batches of a step, on the device; added up over replicas at its end."""

    loss: Tensor
    """The step's loss, or a replica's share of it, float32."""
    correct_S: Tensor
    """Correct supervised slots by slot, float32."""
    supervised_S: Tensor
    """Supervised slots by slot, float32."""
    accepted: Tensor
    """Accepted draft tokens, summed over blocks that have slot 1 supervised."""
    blocks: Tensor
    """Blocks that have slot 1 supervised."""


def zero_sums(num_slots: int, device: torch.device) -> StepSums:
    """Sums of nothing."""
    scalar = torch.zeros((), device=device)
    per_slot = torch.zeros(num_slots, device=device)
    return StepSums(scalar, per_slot, per_slot.clone(), scalar.clone(), scalar.clone())


def add_sums(left: StepSums, right: StepSums) -> StepSums:
    """Field by field."""
    return StepSums(*(a + b for a, b in zip(left, right, strict=True)))


def accepted_tokens(correct_RAS: Tensor, supervised_RAS: Tensor) -> Tensor:
    """Length of each block's leading run of correct supervised slots, [R, A].

    An unscored slot neither breaks nor extends the run (docs/algorithm.md, section 6).
    """
    running_RAS = (correct_RAS | ~supervised_RAS).int().cumprod(-1)
    return (running_RAS * supervised_RAS).sum(-1)


def slot_sums(loss: Tensor, correct_RAS: Tensor, supervised_RAS: Tensor) -> StepSums:
    """Sums of one micro-batch."""
    counts_RA = supervised_RAS[..., 0]
    accepted_RA = accepted_tokens(correct_RAS, supervised_RAS)
    return StepSums(
        loss.detach().float(),
        (correct_RAS & supervised_RAS).sum((0, 1)).float(),
        supervised_RAS.sum((0, 1)).float(),
        (accepted_RA * counts_RA).sum().float(),
        counts_RA.sum().float(),
    )


def flatten_sums(sums: StepSums) -> Tensor:
    """All fields in one vector."""
    return torch.cat([part.reshape(-1) for part in sums])


def unflatten_sums(flat: Tensor, num_slots: int) -> StepSums:
    """Undoes `flatten_sums`."""
    loss, correct_S, supervised_S, accepted, blocks = flat.split([1, num_slots, num_slots, 1, 1])
    return StepSums(loss[0], correct_S, supervised_S, accepted[0], blocks[0])


class StepReport(NamedTuple):
    """A step's metrics as plain numbers."""

    loss: float
    acceptance_length: float
    accuracy: float
    accuracy_per_slot: list[float]
    blocks: int


def report(sums: StepSums) -> StepReport:
    """Reads the sums back: the one host sync of a logged step."""
    flat = torch.cat([part.reshape(-1) for part in sums]).tolist()
    num_slots = len(sums.correct_S)
    correct, supervised = flat[1 : 1 + num_slots], flat[1 + num_slots : 1 + 2 * num_slots]
    accepted, blocks = flat[-2], flat[-1]
    return StepReport(
        loss=flat[0],
        acceptance_length=1.0 + accepted / blocks if blocks else 1.0,
        accuracy=sum(correct) / max(sum(supervised), 1.0),
        accuracy_per_slot=[hit / count if count else 0.0 for hit, count in zip(correct, supervised, strict=True)],
        blocks=int(blocks),
    )
