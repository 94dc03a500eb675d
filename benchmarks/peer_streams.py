"""In which order devices copy from each other and add: GPUs by streams and events, CPUs at once."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.config import ConfigError

Mark = Any
"""What a stream can be made to wait for: an event on GPUs, nothing on CPUs."""


class Copy(NamedTuple):
    """One copy between two devices."""

    to: Tensor
    source: Tensor


class Streams(Protocol):
    """Where the work of several drafters is queued. What is queued on one lane of one device runs in that order.

    A drafter is a number. Beside the stream that it computes on, its device has two streams in each lane: one for what
    leaves, and one for what arrives and is added there.
    """

    def empty(self, lane: int, drafter: int, num_bytes: int) -> Tensor:
        """Bytes on a drafter's device, for what arrives."""
        ...

    def mark(self, drafter: int) -> Mark:
        """What this drafter has queued to compute so far; called in its thread."""
        ...

    def queueing(self) -> contextlib.AbstractContextManager[None]:
        """Around `begin`, `move`, `add` and `end`; leaves the thread's streams and device as they were."""
        ...

    def begin(self, lane: int, marks: Sequence[Mark]) -> None:
        """Has a lane wait, on each drafter's device, for that drafter's mark."""
        ...

    def move(self, lane: int, source: int, to: int, copies: Iterable[Copy]) -> None:
        """Copies what leaves one device and arrives at another."""
        ...

    def add(self, lane: int, drafter: int, work: Callable[[], None]) -> None:
        """Works on what has arrived; what leaves this device in this lane from now on leaves behind it."""
        ...

    def end(self, lane: int, drafter: int) -> tuple[Mark, ...]:
        """The end of all that a lane does so far with this drafter's tensors."""
        ...

    def hold(self, drafter: int, marks: Iterable[Mark]) -> None:
        """Has what this drafter computes from now on wait for these; called in its thread, which goes on."""
        ...


class AtOnce:
    """On CPUs everything is done when its call returns."""

    def empty(self, _lane: int, _drafter: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self, _drafter: int) -> Mark:
        return None

    def queueing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin(self, _lane: int, _marks: Sequence[Mark]) -> None: ...

    def move(self, _lane: int, _source: int, _to: int, copies: Iterable[Copy]) -> None:
        for to, source in copies:
            to.copy_(source)

    def add(self, _lane: int, _drafter: int, work: Callable[[], None]) -> None:
        work()

    def end(self, _lane: int, _drafter: int) -> tuple[Mark, ...]:
        return ()

    def hold(self, _drafter: int, _marks: Iterable[Mark]) -> None: ...


class CudaStreams:
    """On GPUs. A copy between two of them takes a copy engine and no multiprocessor, and nothing waits on the host."""

    def __init__(self, devices: Sequence[torch.device], num_lanes: int) -> None:
        """`devices`: one a drafter, each another."""
        self._devices = devices
        # The addition gets in as soon as one of the backward's blocks ends. What leaves and what arrives are apart:
        # torch has a copy wait for the current stream of both its devices, and both wait for the copy, so with one
        # stream a device the two directions of a link would take turns.
        self._leaving, self._arriving = (
            [[torch.cuda.Stream(device, priority=-1) for device in devices] for _ in range(num_lanes)] for _ in range(2)
        )

    def empty(self, lane: int, drafter: int, num_bytes: int) -> Tensor:
        # It belongs to the stream that uses it, also when it is given back.
        with torch.cuda.stream(self._arriving[lane][drafter]):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._devices[drafter])

    def mark(self, drafter: int) -> Mark:
        return _recorded(torch.cuda.current_stream(self._devices[drafter]))

    @contextlib.contextmanager
    def queueing(self) -> Iterator[None]:
        device = torch.cuda.current_device()
        streams = [torch.cuda.current_stream(device) for device in self._devices]
        try:
            yield
        finally:
            for stream in streams:
                torch.cuda.set_stream(stream)
            torch.cuda.set_device(device)

    def begin(self, lane: int, marks: Sequence[Mark]) -> None:
        for leaving, arriving, mark in zip(self._leaving[lane], self._arriving[lane], marks, strict=True):
            leaving.wait_event(mark)
            arriving.wait_event(mark)

    def move(self, lane: int, source: int, to: int, copies: Iterable[Copy]) -> None:
        # torch queues the copy on the source's current stream, behind what the other device's current stream holds,
        # and has that stream wait for it.
        torch.cuda.set_stream(self._leaving[lane][source])
        torch.cuda.set_stream(self._arriving[lane][to])
        for there, here in copies:
            there.copy_(here, non_blocking=True)

    def add(self, lane: int, drafter: int, work: Callable[[], None]) -> None:
        torch.cuda.set_stream(self._arriving[lane][drafter])
        work()
        self._leaving[lane][drafter].wait_event(_recorded(self._arriving[lane][drafter]))

    def end(self, lane: int, drafter: int) -> tuple[Mark, ...]:
        return _recorded(self._leaving[lane][drafter]), _recorded(self._arriving[lane][drafter])

    def hold(self, drafter: int, marks: Iterable[Mark]) -> None:
        stream = torch.cuda.current_stream(self._devices[drafter])
        for mark in marks:
            stream.wait_event(mark)


def _recorded(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def streams_between(devices: Sequence[torch.device], num_lanes: int) -> Streams:
    """For drafters on these devices.

    Raises:
        ConfigError: devices that cannot copy from each other directly.
    """
    if {device.type for device in devices} == {"cpu"}:
        return AtOnce()
    names = " ".join(str(device) for device in devices)
    if {device.type for device in devices} != {"cuda"} or len({device.index for device in devices}) < len(devices):
        raise ConfigError(
            f"sums by copies between devices: expected CPUs only, or a GPU for each drafter (cuda:0 cuda:1), found "
            f"{names}; let a process group sum"
        )
    for device in devices:
        for other in devices:
            if device != other and not torch.cuda.can_device_access_peer(device, other):
                raise ConfigError(
                    f"sums by copies between devices: expected GPUs that reach each other's memory, but {device} does "
                    f"not reach {other}'s; let a process group sum"
                )
    return CudaStreams(devices, num_lanes)
