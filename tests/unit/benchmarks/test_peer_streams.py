"""The order in which GPUs would work: their streams and events stand still while work is queued, which then runs later.

Every copy and addition becomes a job behind what its stream held; jobs then run in any order that these allow. A wait
that is missing lets one overtake another, and some order shows it.
"""

import contextlib
import ctypes
import random
from types import SimpleNamespace

import peer_streams
import peer_sums
import pytest
import torch
from peer_streams import CudaDriver, CudaStreams
from peer_sums import PeerGroup, PeerSum
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
LATER = (
    *(ATEN.copy_.default, ATEN.zero_.default, ATEN.add_.Tensor),
    *(ATEN._foreach_add_.List, ATEN._foreach_copy_.default),
)
SHAPES = (((4, 40), (3,)), ((1,),), ((7, 31), (64,), (2, 70)), ((65,),), ((1,), (129,)))
LOAD_BYTES = 4 * 250
"""The third bucket is summed in two loads."""


class Machine:
    """GPUs that do what they are told when `run` is called. Its tensors lie on a CPU. It is the driver, too."""

    def __init__(self, devices):
        self.jobs, self.spans, self.alive, self.moves = [], [], [], []
        self.device, self.streams, self.events = 0, {}, {}
        self.current = {device.index: self.stream(device) for device in devices}

    def stream(self, device, **_):
        made = Stream(len(self.streams) + 1, device)
        self.streams[made.cuda_stream] = made
        return made

    def event(self):
        made = Event(len(self.events) + 1)
        self.events[made.cuda_event] = made
        return made

    def tensor(self, value, index):
        storage = value.untyped_storage()
        self.spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), index))
        self.alive.append(value)
        return value

    def device_of(self, address):
        return next(index for first, last, index in self.spans if first <= address < last)

    # What CudaStreams asks the driver for

    def record(self, event, stream):
        assert self.streams[stream].device.index == self.device
        self.events[event].held = set(self.streams[stream].held)

    def wait(self, stream, event):
        self.streams[stream].held = self.streams[stream].held | self.events[event].held

    def copy(self, to, source, num_bytes, stream):
        way = self.device_of(source), self.device_of(to)
        assert self.device_of(to + num_bytes - 1) == way[1], "a copy beyond its room"
        self.put(self.streams[stream], lambda: ctypes.memmove(to, source, num_bytes), way)

    def put(self, stream, work, way):
        """Behind all that this stream holds; it goes on behind it."""
        self.moves.append(way)
        self.jobs.append((work, set(stream.held)))
        stream.held = {len(self.jobs) - 1}

    def run(self, seed):
        """Every job once, whichever of those that may run comes first."""
        order, left, done = random.Random(seed), dict(enumerate(self.jobs)), set()
        while left:
            number = order.choice([number for number, (_, before) in left.items() if before <= done])
            left.pop(number)[0]()
            done.add(number)
        self.jobs.clear()
        for stream in self.streams.values():
            stream.held = set()

    def torch(self):
        """What stands for torch where streams are."""
        cuda = SimpleNamespace(
            Stream=self.stream,
            Event=self.event,
            current_device=lambda: self.device,
            current_stream=lambda device: self.current[device.index],
            set_device=lambda index: setattr(self, "device", index),
            set_stream=self.set_stream,
            stream=lambda _stream: contextlib.nullcontext(),
        )
        return SimpleNamespace(
            cuda=cuda,
            uint8=torch.uint8,
            device=torch.device,
            empty=self.empty,
            zeros=lambda size, **_: torch.zeros(size),
        )

    def empty(self, num_bytes, dtype, device):
        # 0xff is no number: what is read before it arrives shows.
        return self.tensor(torch.full((num_bytes,), 255, dtype=dtype), device.index)

    def set_stream(self, stream):
        self.device = stream.device.index
        self.current[self.device] = stream


class Stream:
    """The jobs that have to be over before what comes next."""

    def __init__(self, handle, device):
        self.cuda_stream, self.device, self.held = handle, device, set()


class Event:
    """What a stream held."""

    def __init__(self, handle):
        self.cuda_event = handle

    def record(self, stream):
        self.held = set(stream.held)


class Later(TorchDispatchMode):
    """Queues what changes tensors, as torch does on GPUs; views are made at once."""

    def __init__(self, machine):
        super().__init__()
        self.machine = machine

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        if func not in LATER:
            return func(*args, **(kwargs or {}))
        given = [tensor for one in args for tensor in (one if isinstance(one, list) else [one])]
        devices = {self.machine.device_of(one.data_ptr()) for one in given if isinstance(one, torch.Tensor)}
        assert len(devices) == 1, "a kernel over two devices"
        (device,) = devices
        self.machine.put(self.machine.current[device], lambda: func(*args, **(kwargs or {})), (device, device))
        return args[0] if isinstance(args[0], torch.Tensor) else None


class Drafters:
    """Several, driven by one thread; each fills tensors, sums them, keeps what it got and empties them."""

    def __init__(self, size, monkeypatch, rounds=4, num_lanes=2):
        devices = [torch.device("cuda", index) for index in range(size)]
        self.size, self.rounds, self.machine = size, rounds, Machine(devices)
        monkeypatch.setattr(peer_streams, "torch", self.machine.torch())
        monkeypatch.setattr(peer_sums, "LOAD_BYTES", LOAD_BYTES)
        streams = CudaStreams(devices, num_lanes, self.machine)
        self.group = PeerGroup(devices, 4 * 500, lambda: None, streams, num_lanes)
        self.sums = [PeerSum(self.group, drafter) for drafter in range(size)]
        self.own = [[self._zeros(drafter, shapes) for shapes in SHAPES] for drafter in range(size)]
        self.kept = []

    def _zeros(self, drafter, shapes):
        return [self.machine.tensor(torch.zeros(shape), drafter) for shape in shapes]

    def value(self, drafter, turn, bucket):
        """Whole numbers, so that sums are exact in any order."""
        return float(1 + drafter + 10 * turn + 100 * bucket)

    def queue(self):
        """All rounds of everybody."""
        with Later(self.machine):
            for turn in range(self.rounds):
                for bucket in range(len(SHAPES)):
                    # Whoever is last queues the sum: each in turn.
                    for drafter in self._order(turn):
                        for tensor in self.own[drafter][bucket]:
                            tensor.copy_(self._full(tensor, drafter, self.value(drafter, turn, bucket)))
                        self._call(drafter, lambda total, bucket=bucket: total.start(self.own[total.drafter][bucket]))
                for bucket in range(len(SHAPES)):
                    for drafter in range(self.size):
                        self._call(drafter, PeerSum.wait)
                        expected = sum(self.value(other, turn, bucket) for other in range(self.size))
                        self._keep(drafter, self.own[drafter][bucket], expected)

    def _order(self, turn):
        return sorted(range(self.size), key=lambda one: (one + turn) % self.size)

    def _call(self, drafter, work):
        self.machine.device = drafter
        before = dict(self.machine.current), self.machine.device
        work(self.sums[drafter])
        assert (self.machine.current, self.machine.device) == before

    def _full(self, like, drafter, value):
        return self.machine.tensor(torch.full(like.shape, value), drafter)

    def _keep(self, drafter, tensors, expected):
        for tensor in tensors:
            kept = self._full(tensor, drafter, -1.0)
            kept.copy_(tensor)
            self.kept.append((kept, expected))
            # Its memory is something else's now.
            tensor.zero_()

    def wrong(self, seed):
        self.machine.run(seed)
        return sum(not bool((kept == expected).all()) for kept, expected in self.kept)


@pytest.mark.parametrize(("size", "num_lanes"), [(2, 2), (2, 3), (3, 2), (4, 1), (4, 3)])
def test_whatever_comes_first_every_drafter_has_the_sums(size, num_lanes, monkeypatch):
    for seed in range(4):
        drafters = Drafters(size, monkeypatch, num_lanes=num_lanes)
        drafters.queue()
        assert drafters.wrong(seed) == 0
        assert len(drafters.kept) == size * 4 * sum(map(len, SHAPES))


BEGIN, HOLD, RECORDED = CudaStreams.begin, CudaStreams.hold, CudaStreams._recorded


def begin_at_once(self, lane, drafter, _marks):
    """Copies start before the gradients are made."""
    BEGIN(self, lane, drafter, [])


def begin_behind_own(self, lane, drafter, marks):
    """Copies start before the others' gradients are made."""
    BEGIN(self, lane, drafter, marks[drafter : drafter + 1])


def hold_nothing(_self, _drafter, _marks):
    """The update starts before the sums are there."""


def hold_first(self, drafter, marks):
    """Of two drafters one waits for its own lane only, one for the other's."""
    HOLD(self, drafter, marks[:1])


def hold_last(self, drafter, marks):
    HOLD(self, drafter, marks[-1:])


def one_event(self, drafter, stream):
    """An event is recorded again while somebody still has to wait for what it was."""
    if not self._free[drafter]:
        return RECORDED(self, drafter, stream)
    self._driver.record(self._free[drafter][-1].handle, stream)
    return self._free[drafter][-1]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("begin", begin_at_once),
        ("begin", begin_behind_own),
        ("hold", hold_nothing),
        ("hold", hold_first),
        ("hold", hold_last),
        ("_recorded", one_event),
    ],
)
def test_each_wait_is_needed(name, instead, monkeypatch):
    monkeypatch.setattr(CudaStreams, name, instead)
    wrong = 0
    for seed in range(6):
        drafters = Drafters(2, monkeypatch, num_lanes=3)
        drafters.queue()
        wrong += drafters.wrong(seed)
    assert wrong > 0


def test_events_are_used_again(monkeypatch):
    drafters = Drafters(3, monkeypatch, rounds=2)
    drafters.queue()
    made = len(drafters.machine.events)
    for _ in range(3):
        drafters.queue()
    assert len(drafters.machine.events) == made
    assert (drafters.group._deposits, drafters.group._queued) == ({}, {})


def test_the_two_directions_of_a_link_do_not_wait_for_each_other(monkeypatch):
    drafters = Drafters(2, monkeypatch, rounds=1)
    drafters.queue()
    moves, jobs = drafters.machine.moves, drafters.machine.jobs
    copies = {number for number, way in enumerate(moves) if way in ((0, 1), (1, 0))}
    at_once = [moves[number] for number in sorted(copies) if not all_before(jobs, number) & copies]
    # Of each of the three loads that there is a lane for, one each way, or of both tensors of a share.
    assert at_once[:2] == [(1, 0), (0, 1)]


def test_the_next_loads_are_copied_while_one_is_added_and_the_one_after_waits_for_room(monkeypatch):
    drafters = Drafters(2, monkeypatch, rounds=1)
    drafters.queue()
    # What arrives at GPU 0 from GPU 1 by GPU 0's own lanes: one of every pair of copies that differ in direction.
    moves = drafters.machine.moves
    copies = [number for number, way in enumerate(moves) if way in ((0, 1), (1, 0))]
    # The first bucket has 3 pieces, the second 1, the third 4 loads' worth; each goes there and back.
    first, second = copies[:6], copies[6]
    assert not all_before(drafters.machine.jobs, second) & set(first)
    behind = [number for number in copies[8:] if all_before(drafters.machine.jobs, number) & set(first)]
    assert behind, "a room is used again before it is empty"


def all_before(jobs, number):
    seen, left = set(), [number]
    while left:
        for one in jobs[left.pop()][1] - seen:
            seen.add(one)
            left.append(one)
    return seen


def test_an_error_of_the_driver_says_which_call_and_what():
    driver = CudaDriver.__new__(CudaDriver)

    def name_of(_status, pointer):
        pointer._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    driver._record = driver._wait = driver._copy = lambda *_: 1
    driver._name = name_of
    for call, what in (
        (lambda: driver.copy(1, 2, 3, 4), "cuMemcpyAsync of 3 bytes"),
        (lambda: driver.record(1, 2), "cuEventRecord"),
        (lambda: driver.wait(1, 2), "cuStreamWaitEvent"),
    ):
        with pytest.raises(RuntimeError, match=rf"{what} ended with error 1 \(CUDA_ERROR_INVALID_VALUE\)"):
            call()
    driver._name = lambda *_: 1
    with pytest.raises(RuntimeError, match="unknown to the driver"):
        driver.wait(1, 2)
