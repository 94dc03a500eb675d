"""The order in which GPUs would work: their streams and events stand still while work is queued, which then runs later.

Every copy and addition becomes a job behind what its streams held; jobs then run in any order that these allow. A wait
that is missing lets one overtake another, and some order shows it.
"""

import contextlib
import random
from types import SimpleNamespace

import peer_streams
import pytest
import torch
from peer_streams import CudaStreams
from peer_sums import NUM_LANES, PeerGroup, PeerSum
from torch.utils._python_dispatch import TorchDispatchMode

ATEN = torch.ops.aten
LATER = (ATEN.copy_.default, ATEN._foreach_add_.List, ATEN._foreach_copy_.default, ATEN.zero_.default)
SHAPES = (((4, 40), (3,)), ((1,),), ((7, 31), (64,), (2, 70)))


class Machine:
    """GPUs that do what they are told when `run` is called. Its tensors lie on a CPU."""

    def __init__(self, devices):
        self.jobs, self.device_of, self.alive, self.moves = [], {}, [], []
        self.device = 0
        self.current = {device.index: Stream(self, device) for device in devices}

    def tensor(self, value, index):
        self.device_of[value.untyped_storage().data_ptr()] = index
        self.alive.append(value)
        return value

    def put(self, streams, work):
        """Behind all that these streams hold; they go on behind it."""
        self.moves.append(tuple(stream.device.index for stream in streams))
        self.jobs.append((work, set().union(*(stream.held for stream in streams))))
        for stream in streams:
            stream.held = {len(self.jobs) - 1}

    def where(self, tensor):
        return self.current[self.device_of[tensor.untyped_storage().data_ptr()]]

    def run(self, seed):
        """Every job once, whichever of those that may run comes first."""
        order, left, done = random.Random(seed), dict(enumerate(self.jobs)), set()
        while left:
            number = order.choice([number for number, (_, before) in left.items() if before <= done])
            left.pop(number)[0]()
            done.add(number)
        self.jobs.clear()
        for stream in self.current.values():
            stream.held = set()

    def torch(self):
        """What stands for torch where streams are."""
        cuda = SimpleNamespace(
            Stream=lambda device, priority: Stream(self, device),
            Event=Event,
            current_device=lambda: self.device,
            current_stream=lambda device: self.current[device.index],
            set_device=lambda index: setattr(self, "device", index),
            set_stream=self.set_stream,
            stream=lambda _stream: contextlib.nullcontext(),
        )
        return SimpleNamespace(cuda=cuda, uint8=torch.uint8, device=torch.device, empty=self.empty)

    def empty(self, num_bytes, dtype, device):
        # 0xff is no number: what is read before it arrives shows.
        return self.tensor(torch.full((num_bytes,), 255, dtype=dtype), device.index)

    def set_stream(self, stream):
        self.device = stream.device.index
        self.current[self.device] = stream


class Stream:
    """The jobs that have to be over before what comes next."""

    def __init__(self, machine, device):
        self.machine, self.device, self.held = machine, device, set()

    def wait_event(self, event):
        self.held = self.held | event.held


class Event:
    """What a stream held."""

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
        first = [one[0] if isinstance(one, list) else one for one in args if isinstance(one, list | torch.Tensor)]
        streams = [self.machine.where(tensor) for tensor in first]
        if func is not ATEN.copy_.default:
            assert len(set(streams)) == 1, "an addition over two devices"
        self.machine.put(streams, lambda: func(*args, **(kwargs or {})))
        return args[0] if isinstance(args[0], torch.Tensor) else None


class Drafters:
    """Several, driven by one thread; each fills tensors, sums them, keeps what it got and empties them."""

    def __init__(self, size, monkeypatch, rounds=4):
        devices = [torch.device("cuda", index) for index in range(size)]
        self.size, self.rounds, self.machine = size, rounds, Machine(devices)
        monkeypatch.setattr(peer_streams, "torch", self.machine.torch())
        self.group = PeerGroup(devices, 4 * 500, lambda: None, CudaStreams(devices, NUM_LANES))
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
                    for drafter in sorted(range(self.size), key=lambda one: (one + turn) % self.size):
                        for tensor in self.own[drafter][bucket]:
                            tensor.copy_(self._full(tensor, drafter, self.value(drafter, turn, bucket)))
                        before = dict(self.machine.current), self.machine.device
                        self.sums[drafter].start(self.own[drafter][bucket])
                        assert (self.machine.current, self.machine.device) == before
                for bucket in range(len(SHAPES)):
                    for drafter in range(self.size):
                        self.sums[drafter].wait()
                        self._keep(drafter, turn, bucket)

    def _full(self, like, drafter, value):
        return self.machine.tensor(torch.full(like.shape, value), drafter)

    def _keep(self, drafter, turn, bucket):
        expected = sum(self.value(other, turn, bucket) for other in range(self.size))
        for tensor in self.own[drafter][bucket]:
            kept = self._full(tensor, drafter, -1.0)
            kept.copy_(tensor)
            self.kept.append((kept, expected))
            # Its memory is something else's now.
            tensor.zero_()

    def wrong(self, seed):
        self.machine.run(seed)
        return sum(not bool((kept == expected).all()) for kept, expected in self.kept)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_whatever_comes_first_every_drafter_has_the_sums(size, monkeypatch):
    for seed in range(4):
        drafters = Drafters(size, monkeypatch)
        drafters.queue()
        assert drafters.wrong(seed) == 0
        assert len(drafters.kept) == size * 4 * 6


def leave_out_begin(_self, _lane, _marks):
    """Copies start before the gradients are made."""


def leave_out_hold(_self, _drafter, _marks):
    """The update starts before the sums are there."""


def add_without_event(self, lane, drafter, work):
    """Sums are sent before they are made."""
    peer_streams.torch.cuda.set_stream(self._arriving[lane][drafter])
    work()


def end_of_arriving(self, lane, drafter):
    """Tensors are used for something else while others still copy from them."""
    return (peer_streams._recorded(self._arriving[lane][drafter]),)


def end_of_leaving(self, lane, drafter):
    """The update starts before the others' sums are there."""
    return (peer_streams._recorded(self._leaving[lane][drafter]),)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("begin", leave_out_begin),
        ("hold", leave_out_hold),
        ("add", add_without_event),
        ("end", end_of_arriving),
        ("end", end_of_leaving),
    ],
)
def test_each_wait_is_needed(name, instead, monkeypatch):
    monkeypatch.setattr(CudaStreams, name, instead)
    wrong = 0
    for seed in range(6):
        drafters = Drafters(3, monkeypatch)
        drafters.queue()
        wrong += drafters.wrong(seed)
    assert wrong > 0


def test_the_two_directions_of_a_link_do_not_wait_for_each_other(monkeypatch):
    drafters = Drafters(2, monkeypatch, rounds=1)
    drafters.queue()
    there, back = (drafters.machine.moves.index(way) for way in ((1, 0), (0, 1)))
    assert there not in all_before(drafters.machine.jobs, back)
    assert back not in all_before(drafters.machine.jobs, there)


def test_the_next_bucket_is_copied_while_one_is_added_and_the_one_after_waits_for_room(monkeypatch):
    drafters = Drafters(2, monkeypatch, rounds=1)
    drafters.queue()
    copies = [number for number, way in enumerate(drafters.machine.moves) if way in ((0, 1), (1, 0))]
    # The first bucket has 3 pieces, the second 1; each goes there and back.
    first, second, third = copies[:6], copies[6], copies[8]
    assert not all_before(drafters.machine.jobs, second) & set(first)
    assert all_before(drafters.machine.jobs, third) & set(first)


def all_before(jobs, number):
    before = jobs[number][1]
    return before.union(*(all_before(jobs, one) for one in before))
