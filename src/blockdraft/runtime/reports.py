"""What workers tell control, through a queue."""

from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.training.metrics import StepSums, flatten_sums, unflatten_sums
from blockdraft.training.step import DrafterStep


class StepDone(NamedTuple):
    """Counts of one step over all drafters; `flat` is on the host once `ready` has happened."""

    step: int
    flat: Tensor
    ready: torch.cuda.Event | None
    lr_scale: float
    tokens: int
    """Document tokens that all drafters together have trained on since the run began or was resumed."""

    def read(self, num_slots: int) -> tuple[StepSums, float]:
        """Counts and gradient norm."""
        if self.ready is not None:
            self.ready.synchronize()
        return unflatten_sums(self.flat[:-1], num_slots), float(self.flat[-1])


class SetAcceptance(NamedTuple):
    """Of one held-out set."""

    acceptance_length: float
    rounds: int


class Evaluated(NamedTuple):
    """Held-out acceptance after some steps."""

    step: int
    sets: dict[str, SetAcceptance]
    seconds: float


class WarmedUp(NamedTuple):
    """A worker has finished one part of its warm-up."""

    worker: str
    what: str
    seconds: float


def report_step(step_number: int, sums: StepSums, step: DrafterStep, tokens: int) -> StepDone:
    """The counts of a step that this drafter has just finished, on their way to the host."""
    flat = torch.cat([flatten_sums(sums), step.grad_norm.reshape(-1).float()])
    scale = step.last_scale
    if flat.device.type != "cuda":
        return StepDone(step_number, flat, None, scale, tokens)
    # Copied behind the step without waiting for it: control waits instead, so the worker never syncs.
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return StepDone(step_number, host, ready, scale, tokens)
