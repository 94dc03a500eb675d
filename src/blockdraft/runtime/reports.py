"""What workers tell control, through a queue."""

import queue
import time
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.training.health import Health
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


class MicroBatches(NamedTuple):
    """What one drafter measured of each micro-batch of a step; `flat` is on the host once `ready` has happened."""

    step: int
    drafter: int
    """Rank among the drafters of all nodes."""
    flat: Tensor
    ready: torch.cuda.Event | None

    def read(self) -> list[Health]:
        """In the order in which it trained on them."""
        if self.ready is not None:
            self.ready.synchronize()
        return [Health(*values) for values in self.flat.tolist()]


class SetAcceptance(NamedTuple):
    """Of one held-out set."""

    acceptance_length: float
    rounds: int
    per_slot: list[float]
    """Share of the rounds that accept slot k's draft token, for k = 1 .. L - 1."""


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


Report = StepDone | MicroBatches | WarmedUp | Evaluated
POLL_SECONDS = 0.002


class Inbox:
    """Reports in order. Control takes only what has arrived: it never waits for a GPU.

    Workers run ahead of their GPU, so the newest numbers are always still on their way; and if a sum between GPUs never
    ends, because another drafter died in it, they never come.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._first: Report | None = None

    def put(self, report: Report) -> None:
        """By any worker."""
        self._queue.put(report)

    def get(self, timeout: float) -> Report:
        """By control: the oldest report, if its numbers arrive in time.

        Raises:
            queue.Empty: there is none, or its numbers are still on their way.
        """
        deadline = time.monotonic() + timeout
        if self._first is None:
            self._first = self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
        while not _is_ready(self._first):
            if time.monotonic() >= deadline:
                raise queue.Empty
            time.sleep(POLL_SECONDS)
        first, self._first = self._first, None
        return first

    def get_nowait(self) -> Report:
        """What is there already."""
        return self.get(0.0)

    def qsize(self) -> int:
        """Reports that control has not taken."""
        return self._queue.qsize() + (self._first is not None)


def _is_ready(report: Report) -> bool:
    if isinstance(report, WarmedUp | Evaluated):
        return True
    return report.ready is None or report.ready.query()


def report_step(step_number: int, sums: StepSums, step: DrafterStep, tokens: int) -> StepDone:
    """The counts of a step that this drafter has just finished, on their way to the host."""
    flat = torch.cat([flatten_sums(sums), step.grad_norm.reshape(-1).float()])
    return StepDone(step_number, *_sent(flat), step.last_scale, tokens)


def report_micro_batches(step_number: int, drafter: int, step: DrafterStep) -> MicroBatches:
    """What this drafter measured in the step that it has just finished, on its way to the host."""
    return MicroBatches(step_number, drafter, *_sent(step.health))


def _sent(flat: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if flat.device.type != "cuda":
        return flat, None
    # Copied behind the step without waiting for it: control waits instead, so the worker never syncs.
    host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
    host.copy_(flat, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready
