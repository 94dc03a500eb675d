"""What a worker's time goes into: measured on its GPU by events, on a CPU by the wall clock.

A GPU's thread runs ahead of it: how long a call takes there says nothing. Two events around the work do, and nothing
waits for them: they are read when they have happened.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

import torch

BUSY: Final = "busy"
HANDING_OVER: Final = "waiting to hand over"
OTHERS: Final = "waiting for other drafters"
BOUNDARY: Final = "saving and evaluating"

Mark = float | torch.cuda.Event


class _Interval(NamedTuple):
    kind: str
    inside: str | None
    """The kind of the interval around it, from which this one is taken off."""
    began: Mark
    ended: Mark


class Clock:
    """One worker's. `spend` is called in its thread, anybody may read `seconds`."""

    def __init__(self, device: torch.device) -> None:
        """The device that the worker computes on."""
        self.is_gpu = device.type == "cuda"
        self.seconds = dict.fromkeys((BUSY, HANDING_OVER, OTHERS, BOUNDARY), 0.0)
        self._inside: str | None = None
        self._pending: deque[_Interval] = deque()

    def restart(self) -> None:
        """Forgets what was counted; the device has to be idle."""
        self._settle()
        assert not self._pending, "work of before is still running"
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    @contextlib.contextmanager
    def spend(self, kind: str) -> Iterator[None]:
        """Counts what runs inside to `kind`, and not to what runs around it."""
        outer, self._inside = self._inside, kind
        began = self._mark()
        try:
            yield
        finally:
            self._inside = outer
            self._pending.append(_Interval(kind, outer, began, self._mark()))
            self._settle()

    def _mark(self) -> Mark:
        if not self.is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _settle(self) -> None:
        """Adds up what is over; a GPU's work ends in the order in which it was queued."""
        while self._pending:
            kind, inside, began, ended = self._pending[0]
            if isinstance(began, torch.cuda.Event):
                assert isinstance(ended, torch.cuda.Event)
                if not ended.query():
                    return
                seconds = began.elapsed_time(ended) / 1e3
            else:
                assert isinstance(ended, float)
                seconds = ended - began
            self._pending.popleft()
            self.seconds[kind] += seconds
            if inside is not None:
                self.seconds[inside] -= seconds
