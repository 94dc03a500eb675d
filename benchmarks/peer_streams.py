"""In which order devices copy from each other and add: GPUs by streams and events, CPUs at once.

A copy is three numbers: two addresses and a count of bytes. torch's own copy between two devices puts events of its own
around each, and changes devices and streams; a sum of gradients has hundreds, while every other thread wants the
interpreter too.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.config import ConfigError

Mark = Any
"""What a stream can be made to wait for: an event on GPUs, nothing on CPUs."""
LIBRARY: Final = "libcuda.so.1"
"""CUDA's driver, which torch has loaded: the same name whatever CUDA torch was built for."""


class Streams(Protocol):
    """Where the work of several drafters is queued. What is queued on one lane of one device runs in that order.

    A drafter is a number. Beside the stream that it computes on, its device has one stream in each lane. One thread
    at a time queues there.
    """

    def empty(self, lane: int, drafter: int, num_bytes: int) -> Tensor:
        """Bytes on a drafter's device, for what arrives."""
        ...

    def mark(self, drafter: int) -> Mark:
        """What this drafter has queued to compute so far; called in its thread."""
        ...

    def queueing(self) -> contextlib.AbstractContextManager[None]:
        """Around `begin`, `copy` and `end`, and what is computed between them; leaves the thread as it was."""
        ...

    def begin(self, lane: int, drafter: int, marks: Iterable[Mark]) -> None:
        """From now on copies, and what this thread computes, go to this lane of this device, behind these marks."""
        ...

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        """Copies between addresses of any devices."""
        ...

    def end(self, drafter: int) -> Mark:
        """The end of what went to the lane of that drafter's device that was begun last."""
        ...

    def hold(self, drafter: int, marks: Iterable[Mark]) -> None:
        """Has what this drafter computes from now on wait for these; called in its thread, which goes on."""
        ...

    def give_back(self, drafter: int, mark: Mark) -> None:
        """A mark of this drafter's device that nobody will wait for any more; who waits already is not concerned."""
        ...


class AtOnce:
    """On CPUs everything is done when its call returns."""

    def empty(self, _lane: int, _drafter: int, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def mark(self, _drafter: int) -> Mark:
        return None

    def queueing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def begin(self, _lane: int, _drafter: int, _marks: Iterable[Mark]) -> None: ...

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(to, source, num_bytes)

    def end(self, _drafter: int) -> Mark:
        return None

    def hold(self, _drafter: int, _marks: Iterable[Mark]) -> None: ...

    def give_back(self, _drafter: int, _mark: Mark) -> None: ...


class Driver(Protocol):
    """What streams ask of CUDA; streams and events are handles. None of it waits for a device."""

    def record(self, event: int, stream: int) -> None:
        """The event is now what this stream, of the current device, holds so far."""
        ...

    def wait(self, stream: int, event: int) -> None:
        """What comes next in this stream waits for what the event is now."""
        ...

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """Copies behind what the stream holds; the addresses tell the devices."""
        ...


class CudaDriver:
    """CUDA's own calls. Each takes a few microseconds."""

    def __init__(self) -> None:
        # Each call lets go of the interpreter's lock: one that CUDA holds up must not hold up every other thread.
        library = ctypes.CDLL(LIBRARY)
        number, address = ctypes.c_void_p, ctypes.c_void_p
        self._record = _function(library.cuEventRecord, number, number)
        self._wait = _function(library.cuStreamWaitEvent, number, number, ctypes.c_uint)
        self._copy = _function(library.cuMemcpyAsync, address, address, ctypes.c_size_t, number)
        self._name = _function(library.cuGetErrorName, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))

    def record(self, event: int, stream: int) -> None:
        if status := self._record(event, stream):
            raise self._failed("cuEventRecord", status)

    def wait(self, stream: int, event: int) -> None:
        if status := self._wait(stream, event, 0):
            raise self._failed("cuStreamWaitEvent", status)

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        if status := self._copy(to, source, num_bytes, stream):
            raise self._failed(f"cuMemcpyAsync of {num_bytes} bytes", status)

    def _failed(self, what: str, status: int) -> RuntimeError:
        name = ctypes.c_char_p()
        is_known = self._name(status, ctypes.byref(name)) == 0 and name.value is not None
        spelled = name.value.decode() if is_known and name.value is not None else "unknown to the driver"
        return RuntimeError(f"sums by copies between GPUs: {what} ended with error {status} ({spelled})")


def _function(function: Any, *kinds: Any) -> Callable[..., int]:
    function.argtypes, function.restype = kinds, ctypes.c_int
    found: Callable[..., int] = function
    return found


class Event(NamedTuple):
    """An event and its handle; it lives as long as this."""

    handle: int
    kept: torch.cuda.Event


class CudaStreams:
    """On GPUs. A copy between two of them takes a copy engine and no multiprocessor, and nothing waits on the host."""

    def __init__(self, devices: Sequence[torch.device], num_lanes: int, driver: Driver | None = None) -> None:
        """`devices`: one a drafter, each another. `driver`: CUDA's unless told otherwise."""
        self._devices = devices
        self._driver = CudaDriver() if driver is None else driver
        # The addition gets in as soon as one of the backward's blocks ends.
        self._lanes = [[torch.cuda.Stream(device, priority=-1) for device in devices] for _ in range(num_lanes)]
        self._handles = [[int(stream.cuda_stream) for stream in lane] for lane in self._lanes]
        self._free: list[list[Event]] = [[] for _ in devices]
        """Of each device: events that nobody will wait for any more. No more are made than are needed at a time."""
        self._handle = 0
        """The stream that was begun last."""
        with self.queueing():
            self._reach_all()

    def _reach_all(self) -> None:
        # torch lets a device reach another's memory before its first copy between the two.
        for source in self._devices:
            here = torch.zeros(1, device=source)
            for to in self._devices:
                torch.zeros(1, device=to).copy_(here)

    def empty(self, lane: int, drafter: int, num_bytes: int) -> Tensor:
        # It belongs to the stream that uses it, also when it is given back.
        with torch.cuda.stream(self._lanes[lane][drafter]):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._devices[drafter])

    def mark(self, drafter: int) -> Mark:
        return self._recorded(drafter, torch.cuda.current_stream(self._devices[drafter]).cuda_stream)

    def _recorded(self, drafter: int, stream: int) -> Event:
        try:
            # In one call: its drafter and whoever queues a sum may both want one now.
            event = self._free[drafter].pop()
        except IndexError:
            event = self._make_event(drafter)
        self._driver.record(event.handle, stream)
        return event

    def _make_event(self, drafter: int) -> Event:
        kept = torch.cuda.Event()
        # torch makes it where it is recorded first.
        kept.record(self._lanes[0][drafter])
        return Event(int(kept.cuda_event), kept)

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

    def begin(self, lane: int, drafter: int, marks: Iterable[Mark]) -> None:
        torch.cuda.set_stream(self._lanes[lane][drafter])
        self._handle = self._handles[lane][drafter]
        for mark in marks:
            self._driver.wait(self._handle, mark.handle)

    def copy(self, to: int, source: int, num_bytes: int) -> None:
        self._driver.copy(to, source, num_bytes, self._handle)

    def end(self, drafter: int) -> Mark:
        return self._recorded(drafter, self._handle)

    def hold(self, drafter: int, marks: Iterable[Mark]) -> None:
        stream = torch.cuda.current_stream(self._devices[drafter]).cuda_stream
        for mark in marks:
            self._driver.wait(stream, mark.handle)

    def give_back(self, drafter: int, mark: Mark) -> None:
        self._free[drafter].append(mark)


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
