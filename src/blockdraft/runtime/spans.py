"""What every worker does, and when: a bounded record in memory, a lane per worker.

Each worker writes its own lane, in its own thread; control reads them all. On a GPU a thread runs ahead of its device,
so there the device's own times are kept too: events recorded around each piece of work, and read by control when they
have happened. No worker ever waits for one.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Final, NamedTuple

import torch

INPUT: Final = "waiting for input"
HAND_OVER: Final = "waiting to hand over"
KEPT: Final = 1024
"""Spans of a lane that are kept: the last steps, whatever a run's length."""
TRACED: Final = 65_536
"""The same of a run that is traced: about 10 MB of a lane at most."""
UNREAD: Final = 4096
"""Events of a device that may wait to be read; behind that many, spans are left out and counted."""


class Span(NamedTuple):
    """One thing done by one worker, in seconds of `time.perf_counter`."""

    what: str
    start_s: float
    end_s: float
    step: int
    """Counted from 0."""


class Depth(NamedTuple):
    """Filled slots of each drafter's ring at some moment."""

    at_s: float
    filled: tuple[int, ...]


class _Open:
    """A span that has begun: a context, so that its end is recorded when an error passes through as well."""

    def __init__(self, lane: "Lane", what: str, step: int) -> None:
        self.lane, self.what, self.step = lane, what, step

    def __enter__(self) -> None:
        self.start_s = time.perf_counter()

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        self.lane.spans.append(Span(self.what, self.start_s, time.perf_counter(), self.step))


class _Nothing:
    """Where there is no device to time."""

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        return None


NOTHING: Final = _Nothing()


class Lane:
    """One worker's spans: its thread's and, on a GPU, its device's."""

    def __init__(self, name: str, device: torch.device, keep: int = KEPT) -> None:
        self.name, self.device = name, device
        self.spans: deque[Span] = deque(maxlen=keep)
        is_gpu = device.type == "cuda"
        self.work = DeviceTrack(device, keep) if is_gpu else None
        self.copies = DeviceTrack(device, keep) if is_gpu else None
        """What a target's side stream sends to drafters, beside its work."""

    def begin(self) -> None:
        """In the worker's thread, before steady state: sets the device's clock beside the host's."""
        for track in (self.work, self.copies):
            if track is not None:
                track.begin()

    def span(self, what: str, step: int) -> _Open:
        """Around what the thread does; spans may be nested."""
        return _Open(self, what, step)

    def both(self, what: str, step: int) -> "_Both":
        """Around what the thread does and queues."""
        return _Both(self, what, step)

    def add(self, what: str, start_s: float, step: int) -> None:
        """A span that ends now."""
        self.spans.append(Span(what, start_s, time.perf_counter(), step))

    def waited(self, start_s: float, for_input_s: float, to_hand_over_s: float, step: int) -> None:
        """Waits of one kind and then the other."""
        between_s = start_s + for_input_s
        if for_input_s:
            self.spans.append(Span(INPUT, start_s, between_s, step))
        if to_hand_over_s:
            self.spans.append(Span(HAND_OVER, between_s, between_s + to_hand_over_s, step))

    def on_device(self, what: str, step: int) -> "_Nothing | _Timed":
        """Around what the thread queues on its device's current stream."""
        return NOTHING if self.work is None else _Timed(self.work, what, step)

    def on_copies(self, what: str, step: int) -> "_Nothing | _Timed":
        """The same on the side stream."""
        return NOTHING if self.copies is None else _Timed(self.copies, what, step)

    def idle_on_device(self, what: str, step: int) -> None:
        """Says why the current stream had nothing to do between its last timed work and what is queued next."""
        if self.work is not None:
            self.work.idle(what, step)


class _Mark(NamedTuple):
    """A pair of events on their way through a stream."""

    what: str
    step: int
    start: torch.cuda.Event
    end: torch.cuda.Event
    queued_s: float
    """When the thread queued the first of the two."""


class _Timed:
    """A span of a device that has begun."""

    def __init__(self, track: "DeviceTrack", what: str, step: int) -> None:
        self.track, self.what, self.step = track, what, step

    def __enter__(self) -> None:
        self.queued_s = time.perf_counter()
        self.start = self.track.mark()

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _where: TracebackType | None
    ) -> None:
        if kind is None:
            self.track.put(_Mark(self.what, self.step, self.start, self.track.mark(), self.queued_s))


class _Both:
    """A span of the thread and the same of its device."""

    def __init__(self, lane: Lane, what: str, step: int) -> None:
        self.host, self.device = lane.span(what, step), lane.on_device(what, step)

    def __enter__(self) -> None:
        self.host.__enter__()
        self.device.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.device.__exit__(kind, error, where)
        self.host.__exit__(kind, error, where)


class DeviceTrack:
    """Spans of one stream of a GPU. Workers put events in, control takes times out; neither waits for the device."""

    def __init__(self, device: torch.device, keep: int) -> None:
        self.device = device
        self.spans: deque[Span] = deque(maxlen=keep)
        self.left_out = 0
        self._unread: deque[_Mark] = deque()
        self._last: torch.cuda.Event | None = None
        self._base: torch.cuda.Event | None = None
        self._base_s = 0.0

    def begin(self) -> None:
        """Waits for the device once, so that one of its events has a time on the host's clock."""
        self._base = self._last = self.mark()
        self._base.synchronize()
        self._base_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """An event at the end of what the current stream holds."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def put(self, mark: _Mark) -> None:
        """Keeps a pair until it can be read. Before `begin`, in warm-up, nothing is kept."""
        if self._base is None:
            return
        if len(self._unread) >= UNREAD:
            self.left_out += 1
            return
        self._last = mark.end
        self._unread.append(mark)

    def idle(self, what: str, step: int) -> None:
        """The time since the last span of this stream, which was spent waiting."""
        if self._last is not None:
            self.put(_Mark(what, step, self._last, self.mark(), 0.0))

    def read(self) -> None:
        """In control's thread: turns every pair that has happened into a span."""
        while self._unread and self._unread[0].end.query():
            mark = self._unread.popleft()
            assert self._base is not None
            start_s = self._base_s + self._base.elapsed_time(mark.start) / 1e3
            end_s = start_s + mark.start.elapsed_time(mark.end) / 1e3
            # Two clocks drift apart: nothing runs before it is queued, nor ends after it was seen to be over.
            shift_s = max(0.0, mark.queued_s - start_s) or min(0.0, time.perf_counter() - end_s)
            self.spans.append(Span(mark.what, start_s + shift_s, end_s + shift_s, mark.step))
            # From the newest event on, because a difference of hours is rounded to milliseconds.
            self._base, self._base_s = mark.end, end_s + shift_s


class Record:
    """All lanes of a run, those of the writer of checkpoints and of control as well; and the channel's depth."""

    def __init__(self, lanes: Sequence[Lane], keep: int = KEPT) -> None:
        self.writer, self.control = (Lane(name, torch.device("cpu"), keep) for name in ("writer", "control"))
        self.lanes = [*lanes, self.writer, self.control]
        self._depths: deque[Depth] = deque(maxlen=keep)
        self._lock = threading.Lock()

    def depth(self, filled: Sequence[int]) -> None:
        """Called by whoever has just changed the channel."""
        with self._lock:
            self._depths.append(Depth(time.perf_counter(), tuple(filled)))

    def depths(self, since_s: float = 0.0) -> list[Depth]:
        """Those since then, in order of time."""
        with self._lock:
            newest = list(itertools.takewhile(lambda one: one.at_s >= since_s, reversed(self._depths)))
        return newest[::-1]

    def read_devices(self) -> None:
        """In control's thread, now and then."""
        for lane in self.lanes:
            for track in (lane.work, lane.copies):
                if track is not None:
                    track.read()

    def left_out(self) -> int:
        """Spans of devices that came faster than they were read."""
        tracks = [track for lane in self.lanes for track in (lane.work, lane.copies) if track is not None]
        return sum(track.left_out for track in tracks)
