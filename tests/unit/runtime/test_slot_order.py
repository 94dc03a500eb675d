"""What orders targets and drafters on GPUs, without one: streams that know what came before, buffers that object.

The host runs far ahead of the devices, so the order of calls says nothing; only events and waits do. Every buffer keeps
who wrote and read it, and an access that is not ordered behind those before it is a race.
"""

import contextlib
import itertools
from types import SimpleNamespace

import pytest

from blockdraft.data.loader import Fill
from blockdraft.runtime import slots as module
from blockdraft.runtime.slots import Filler, KeptFeatures, Slot

NUMBERS = itertools.count()
FILL = Fill(0, -1, (), (0,), ())


class Device(str):
    """`cuda:0` or `cpu`."""

    @property
    def type(self) -> str:
        return self.split(":")[0]


class Stream:
    """A queue of a device; `seen` is all that has happened when its next work begins."""

    def __init__(self, device: Device) -> None:
        self.device, self.seen = device, set[int]()

    def work(self) -> int:
        number = next(NUMBERS)
        self.seen.add(number)
        return number

    def wait_stream(self, other: "Stream") -> None:
        self.seen |= other.seen


class Event:
    def __init__(self) -> None:
        self.seen = set[int]()

    def record(self, stream: Stream) -> None:
        self.seen = set(stream.seen)

    def wait(self, stream: Stream) -> None:
        stream.seen |= self.seen


class Deaf(Event):
    """An event that nobody waits for."""

    def wait(self, _stream: Stream) -> None:
        """Nothing."""


class Machine:
    """Stands in for torch in runtime/slots.py."""

    def __init__(self, *, can_reach: bool) -> None:
        self.races: list[str] = []
        self.current: dict[str, Stream] = {}
        self.cuda = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            current_stream=self.current_stream,
            stream=self.stream,
            can_device_access_peer=lambda *_devices: can_reach,
        )

    def current_stream(self, device: Device) -> Stream:
        return self.current.setdefault(device, Stream(device))

    @contextlib.contextmanager
    def stream(self, stream: Stream):
        before = self.current_stream(stream.device)
        self.current[stream.device] = stream
        yield
        self.current[stream.device] = before

    def zeros(self, *_shape: int, device: Device, **_options: object) -> "Buffer":
        return Buffer(self, device)

    def zeros_like(self, _like: object, device: Device) -> "Buffer":
        return Buffer(self, device)

    def empty(self, _shape: object, **_options: object) -> "Buffer":
        return Buffer(self, Device("cpu"))


class Buffer:
    shape = dtype = None

    def __init__(self, machine: Machine, device: Device) -> None:
        self.machine, self.device = machine, device
        self.reads: list[int] = []
        self.writes: list[int] = []

    def read(self, stream: Stream) -> None:
        self._behind(stream, self.writes, "read")
        self.reads.append(stream.work())

    def write(self, stream: Stream) -> None:
        self._behind(stream, self.writes + self.reads, "write")
        self.writes.append(stream.work())

    def fill_(self, _value: float) -> None:
        self.write(self.machine.current_stream(self.device))

    def _behind(self, stream: Stream, before: list[int], what: str) -> None:
        if not stream.seen.issuperset(before):
            self.machine.races.append(f"{what} of a buffer of {self.device} on {stream.device}")

    def copy_(self, source: "Buffer", non_blocking: bool = False) -> None:
        # As torch does it: on the source's stream between GPUs, and ordered with both current streams.
        ends = [self.machine.current_stream(one.device) for one in (source, self) if one.device.type == "cuda"]
        for one in ends[1:]:
            ends[0].seen |= one.seen
        source.read(ends[0])
        self.write(ends[0])
        for one in ends[1:]:
            one.seen |= ends[0].seen
        if not non_blocking and "cpu" in (source.device.type, self.device.type):
            # The host has waited for this copy, so whatever it starts from now on is behind it.
            source.reads.pop()
            self.writes.clear()


class Run:
    """Targets that feed one drafter through a ring of slots; all their threads' calls, far ahead of the devices."""

    def __init__(
        self,
        monkeypatch,
        targets: list[str],
        depth: int,
        *,
        can_reach: bool = True,
        kept: KeptFeatures | None = None,
        poison: bool = False,
    ) -> None:
        self.machine = Machine(can_reach=can_reach)
        monkeypatch.setattr(module, "torch", self.machine)
        self.kept, self.poison = kept, poison
        here = Device("cuda:9")
        self.slots = [Slot(1, 1, 1, None, here) for _ in range(depth)]  # type: ignore[arg-type]
        self.drafter = Stream(here)
        self.streams = [Stream(Device(name)) for name in targets]
        self.fillers = [self._filler(stream.device) for stream in self.streams]

    def _filler(self, device: Device) -> Filler:
        target = SimpleNamespace(device=device, hidden_size=1, capture=None)
        quiet = SimpleNamespace(spend=lambda _kind: contextlib.nullcontext())
        lane = SimpleNamespace(
            idle_on_device=lambda *_arguments: None, on_copies=lambda *_arguments: contextlib.nullcontext()
        )
        filler = Filler(target, 1, 1, self.kept, clock=quiet, lane=lane)  # type: ignore[arg-type]
        filler._compute = lambda buffer, _fill: buffer.write(self.machine.current_stream(device))  # type: ignore
        return filler

    def go(self, rounds: int = 12) -> list[str]:
        """Trains on so many fills; the races that there were."""
        for number in range(rounds):
            slot, index = self.slots[number % len(self.slots)], number % len(self.fillers)
            # Each thread has streams of its own, on the drafter's device as well.
            with self.machine.stream(self.streams[index]):
                # Where features are kept, every target meets each content, and another one is its first.
                content = number // len(self.fillers) % (len(self.fillers) + 1)
                self.fillers[index].fill(slot, FILL._replace(content=content))
            with self.machine.stream(self.drafter):
                slot.await_filled()
                slot.buffer.read(self.drafter)  # type: ignore[attr-defined]
                slot.mark_drained(self.poison)
        return self.machine.races


KINDS = {
    "one device": {"targets": ["cuda:9"]},
    "peer access": {"targets": ["cuda:1"]},
    "no peer access": {"targets": ["cuda:1"], "can_reach": False},
    "several targets": {"targets": ["cuda:1", "cuda:2", "cuda:9", "cuda:2"]},
    "several targets, no peer access": {"targets": ["cuda:1", "cuda:2", "cuda:1"], "can_reach": False},
}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_before_it_was_read_nor_read_before_it_is_written(monkeypatch, kind, depth):
    assert Run(monkeypatch, depth=depth, **KINDS[kind]).go() == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_is_not_filled_before_its_poison_is_in(monkeypatch, kind):
    run = Run(monkeypatch, depth=2, poison=True, **KINDS[kind])
    assert run.go() == []
    poison = [slot.buffer.writes[-1] for slot in run.slots]  # type: ignore[attr-defined]
    assert all(number in slot.drained.seen for slot, number in zip(run.slots, poison, strict=True))  # type: ignore


@pytest.mark.parametrize("kind", KINDS)
def test_kept_features_are_whole_before_another_target_reads_them(monkeypatch, kind):
    kept = KeptFeatures()
    run = Run(monkeypatch, depth=2, kept=kept, **KINDS[kind])
    assert run.go(24) == []
    assert len(kept._kept) == len(run.fillers) + 1
    assert all(found.reads for found in kept._kept.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["several targets", "several targets, no peer access"])
def test_if_nobody_waited_for_kept_features_there_would_be_a_race(monkeypatch, kind):
    copy = Buffer.copy_
    monkeypatch.setattr(Buffer, "copy_", lambda self, source, non_blocking=False: copy(self, source, True))
    assert Run(monkeypatch, depth=2, kept=KeptFeatures(), **KINDS[kind]).go(24)


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_event_of_a_drained_slot_there_is_a_race(monkeypatch, kind):
    run = Run(monkeypatch, depth=2, **KINDS[kind])
    for slot in run.slots:
        slot.drained = Deaf()  # type: ignore[assignment]
    assert run.go()


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_event_of_a_filled_slot_there_is_a_race(monkeypatch, kind):
    run = Run(monkeypatch, depth=2, **KINDS[kind])
    monkeypatch.setattr(Slot, "await_filled", lambda _self: None)
    assert run.go()


@pytest.mark.parametrize("can_reach", [True, False])
def test_without_the_events_of_staging_there_is_a_race(monkeypatch, can_reach):
    run = Run(monkeypatch, ["cuda:1"], 4, can_reach=can_reach)
    run.go(1)
    staging = run.fillers[0].staging
    assert staging is not None
    staging.sent = [Deaf(), Deaf()]  # type: ignore[list-item]
    assert run.go()


def test_without_the_event_of_host_memory_there_is_a_race(monkeypatch):
    run = Run(monkeypatch, ["cuda:1"], 4, can_reach=False)
    run.go(1)
    staging = run.fillers[0].staging
    assert staging is not None
    (arrival,) = staging.arrivals.values()
    arrival.landed = Deaf()  # type: ignore[assignment]
    assert run.go()


def test_without_the_side_streams_wait_for_the_target_there_is_a_race(monkeypatch):
    run = Run(monkeypatch, ["cuda:1"], 4)
    monkeypatch.setattr(Stream, "wait_stream", lambda _self, _other: None)
    assert run.go()
