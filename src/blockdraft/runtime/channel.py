"""The ordered channel: a bounded ring of slots per drafter that delivers by number, whatever order targets finish in.

Nothing here knows a tensor: a slot is an index. Numbers are handed out in order and the number's slot is reserved in
the same critical section, so a late number can never take the slot that an early one waits for.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from blockdraft.data.loader import Fill

QUEUE_LIMIT: Final = 8
"""Fills that wait for a target."""


class Stopped(Exception):
    """The run is ending; every wait in the channel ends with this."""


class Work(NamedTuple):
    """A number and the slot reserved for it."""

    fill: Fill
    drafter: int
    slot: int


class Waited(NamedTuple):
    """Seconds a worker has spent waiting."""

    for_input_s: float
    to_hand_over_s: float


class Channel:
    """Connects the loader, M targets and N drafters. `pairs` ties target i to drafter i."""

    def __init__(
        self,
        *,
        num_targets: int,
        num_drafters: int,
        depth: int,
        pairs: bool,
        queue_limit: int = QUEUE_LIMIT,
        first_drafter: int = 0,
        all_drafters: int | None = None,
    ) -> None:
        """With several nodes: this one's first drafter among `all_drafters`."""
        self.num_drafters, self.depth, self.pairs = num_drafters, depth, pairs
        self.first_drafter, self.all_drafters = first_drafter, all_drafters or num_drafters
        self._changed = threading.Condition()
        lanes = num_drafters if pairs else 1
        self._queued: list[deque[Fill]] = [deque() for _ in range(lanes)]
        self._queue_limit = queue_limit
        self._loader_done = False
        self._stopped = False
        self._released = [0] * num_drafters
        self._filled: list[dict[int, Fill]] = [{} for _ in range(num_drafters)]
        self._handed_out = [0] * num_drafters
        self._taken = [0] * num_drafters
        self._waiting_to_meet, self._meetings = 0, 0
        self._takes, self._depths = 0, 0
        self.target_waits = [Waited(0.0, 0.0)] * num_targets
        self.drafter_waits = [Waited(0.0, 0.0)] * num_drafters
        self.moves = 0
        """Grows with every hand-over: the watchdog's pulse."""

    def stop(self) -> None:
        """Ends every wait, now and later, with Stopped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _wait(self) -> None:
        self._changed.wait()
        if self._stopped:
            raise Stopped

    def drafter_of(self, number: int) -> int:
        """The drafter of this node that a fill goes to."""
        return number % self.all_drafters - self.first_drafter

    # Loader side

    def feed(self, fills: Iterator[Fill]) -> None:
        """Queues every fill, in order; blocks while the queue is full."""
        for fill in fills:
            with self._changed:
                lane = self._queued[self.drafter_of(fill.number) if self.pairs else 0]
                while len(lane) >= self._queue_limit and not self._stopped:
                    self._wait()
                if self._stopped:
                    raise Stopped
                lane.append(fill)
                self._moved()
        with self._changed:
            self._loader_done = True
            self._moved()

    def _moved(self) -> None:
        self.moves += 1
        self._changed.notify_all()

    # Target side

    def next_work(self, target: int) -> Work | None:
        """The next fill and its reserved slot; None when the loader has ended and nothing is queued."""
        lane = self._queued[target if self.pairs else 0]
        started, for_input, handing = time.perf_counter(), 0.0, 0.0
        with self._changed:
            while True:
                if self._stopped:
                    raise Stopped
                if not lane and self._loader_done:
                    return None
                if not lane:
                    self._wait()
                    for_input += time.perf_counter() - started
                elif not self._has_room(self.drafter_of(lane[0].number)):
                    self._wait()
                    handing += time.perf_counter() - started
                else:
                    break
                started = time.perf_counter()
            fill = lane.popleft()
            drafter = self.drafter_of(fill.number)
            slot = self._handed_out[drafter] % self.depth
            self._handed_out[drafter] += 1
            waited = self.target_waits[target]
            self.target_waits[target] = Waited(waited.for_input_s + for_input, waited.to_hand_over_s + handing)
            self._moved()
            return Work(fill, drafter, slot)

    def _has_room(self, drafter: int) -> bool:
        return self._handed_out[drafter] - self._released[drafter] < self.depth

    def publish(self, work: Work) -> None:
        """Says that the slot reserved for this number is filled."""
        with self._changed:
            self._filled[work.drafter][work.fill.number] = work.fill
            self._moved()

    # Drafter side

    def take(self, drafter: int, number: int) -> Work:
        """Waits for this number's slot to be filled; a drafter asks for its numbers in order."""
        started = time.perf_counter()
        with self._changed:
            while number not in self._filled[drafter]:
                if self._stopped:
                    raise Stopped
                self._wait()
            waited = self.drafter_waits[drafter]
            self.drafter_waits[drafter] = waited._replace(
                for_input_s=waited.for_input_s + time.perf_counter() - started
            )
            self._takes, self._depths = self._takes + 1, self._depths + sum(map(len, self._filled))
            fill = self._filled[drafter].pop(number)
            slot = self._taken[drafter] % self.depth
            self._taken[drafter] += 1
            self._moved()
            return Work(fill, drafter, slot)

    def release(self, drafter: int) -> None:
        """Gives the oldest slot taken by this drafter back to the targets."""
        with self._changed:
            self._released[drafter] += 1
            self._moved()

    def meet(self) -> None:
        """Returns when every drafter of this process has come here: none then waits for another in a collective."""
        with self._changed:
            if self._stopped:
                raise Stopped
            meeting = self._meetings
            self._waiting_to_meet += 1
            if self._waiting_to_meet == self.num_drafters:
                self._waiting_to_meet = 0
                self._meetings += 1
                self._moved()
            while self._meetings == meeting:
                if self._stopped:
                    raise Stopped
                self._changed.wait()

    def check(self) -> None:
        """Raises Stopped when the run is ending."""
        with self._changed:
            if self._stopped:
                raise Stopped

    def mean_depth(self) -> float:
        """Filled slots at the moments when a drafter took one, on average."""
        with self._changed:
            return self._depths / max(1, self._takes)

    def filled(self) -> tuple[int, ...]:
        """Slots of each drafter that are filled and not yet taken."""
        with self._changed:
            return tuple(len(filled) for filled in self._filled)

    def in_flight(self) -> int:
        """Slots that are filled and not yet taken."""
        return sum(self.filled())
