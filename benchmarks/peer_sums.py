"""Summing gradients between the drafters of one process by copies between devices: no kernel waits for another GPU.

Each drafter owns a share of every bucket. The others' pieces of it are copied to its device and added there, and the
sums are copied back. N drafters. docs/decisions/0005-gradient-sums.md says why this exists beside process groups.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from peer_streams import Copy, Mark, Streams, streams_between
from torch import Tensor, nn

from blockdraft.runtime.distributed import SUM, NodeLost
from blockdraft.runtime.meeting import CHECK_SECONDS

NUM_LANES: Final = 2
"""Buckets on their way at a time: one is copied while another is added."""
ALIGNMENT: Final = 64
"""A tensor is cut at multiples of this many elements, so that what is added is read 16 bytes at a time."""
MOST_BYTES_OF_ELEMENT: Final = 8


class Piece(NamedTuple):
    """Elements `start` to `stop` of one tensor of a bucket."""

    tensor: int
    start: int
    stop: int


def cut_shares(sizes: Sequence[int], num_shares: int) -> list[list[Piece]]:
    """Pieces of each share of tensors of these sizes: shares are even but for less than ALIGNMENT elements."""
    total, first = sum(sizes), 0
    shares: list[list[Piece]] = [[] for _ in range(num_shares)]
    for tensor, size in enumerate(sizes):
        cuts = [min(max(total * number // num_shares - first, 0), size) for number in range(num_shares + 1)]
        cuts = [cut if cut == size else cut - cut % ALIGNMENT for cut in cuts]
        for share, start, stop in zip(shares, cuts, cuts[1:], strict=False):
            if start < stop:
                share.append(Piece(tensor, start, stop))
        first += size
    return shares


def largest_bucket(layout: Iterable[Iterable[str]], weights: dict[str, nn.Parameter], bytes_of_element: int) -> int:
    """Bytes of the largest bucket of gradients of these weights."""
    return max(bytes_of_element * sum(weights[name].numel() for name in bucket) for bucket in layout)


class Deposit(NamedTuple):
    """One drafter's tensors of a bucket, and what its device has to compute before they are there."""

    bucket: list[Tensor]
    made: Mark


class Queued(NamedTuple):
    """One drafter's tensors of a bucket whose sum is queued; kept until what it computes waits for `ends`."""

    bucket: list[Tensor]
    ends: tuple[Mark, ...]


Kinds = tuple[tuple[int, torch.dtype], ...]
"""Elements and type of each tensor of a bucket."""


class Plan(NamedTuple):
    """How buckets of one kind are summed in one lane; all of it lists by drafter."""

    shares: list[list[Piece]]
    rooms: list[list[list[Tensor]]]
    """Of each owner: where each other drafter's pieces arrive."""
    totals: list[list[Tensor]]
    """Of each owner: where its share is added up; of two drafters nowhere."""


class PeerGroup:
    """What the drafters of one process share; each calls it by its number, through its own PeerSum."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        most_bytes: int,
        check: Callable[[], None],
        streams: Streams | None = None,
    ) -> None:
        """`devices`: of each drafter. `most_bytes`: of the largest bucket; what arrives needs room.

        `check` raises when the run is ending; it is asked again and again by whoever waits.
        `streams`: None chooses by the devices.

        Raises:
            ConfigError: devices that cannot copy from each other directly.
        """
        assert len(devices) >= 2, "one drafter has nothing to sum"
        self.size = len(devices)
        self._streams = streams_between(devices, NUM_LANES) if streams is None else streams
        self._check = check
        self._changed = threading.Condition()
        self._deposits: dict[int, dict[int, Deposit]] = {}
        self._queued: dict[int, dict[int, Queued]] = {}
        self._is_broken = False
        self._plans: dict[tuple[int, Kinds], Plan] = {}
        # A share is larger than an even one by less than ALIGNMENT elements. Everything in it is a multiple of 512
        # bytes, so each drafter's part of a room begins at one.
        self._room_bytes = (most_bytes // self.size + ALIGNMENT * MOST_BYTES_OF_ELEMENT + 511) // 512 * 512
        self._rooms = [self._make_rooms(lane, self.size - 1) for lane in range(NUM_LANES)]
        # 16-bit elements of more than two drafters are added up in float32 elsewhere.
        self._totals = [self._make_rooms(lane, 2) if self.size > 2 else [] for lane in range(NUM_LANES)]

    def _make_rooms(self, lane: int, parts: int) -> list[Tensor]:
        return [
            self._streams.empty(lane, drafter, parts * self._room_bytes).view(parts, -1) for drafter in range(self.size)
        ]

    def deposit(self, drafter: int, number: int, bucket: list[Tensor]) -> None:
        """Brings a drafter's tensors of a bucket; whoever is last queues the sum, for everybody. Does not wait.

        Raises:
            NodeLost: another drafter left.
        """
        made = self._streams.mark(drafter)
        with self._changed:
            if self._is_broken:
                raise self._lost(drafter)
            deposits = self._deposits.setdefault(number, {})
            deposits[drafter] = Deposit(bucket, made)
            if len(deposits) < self.size:
                return
            del self._deposits[number]
        # Without the lock: the others go on. Nobody can be last at the next bucket before this call returns, so sums
        # are queued one after the other.
        buckets = [deposits[other].bucket for other in range(self.size)]
        ends = self._queue(number % NUM_LANES, buckets, [deposits[other].made for other in range(self.size)])
        with self._changed:
            self._queued[number] = {other: Queued(buckets[other], ends[other]) for other in range(self.size)}
            self._changed.notify_all()

    def take(self, drafter: int, number: int) -> None:
        """Waits until a bucket's sum is queued, and has what this drafter computes from now on wait for it.

        Raises:
            NodeLost: another drafter left without it.
            Whatever `check` raises.
        """
        with self._changed:
            while number not in self._queued:
                if self._is_broken:
                    raise self._lost(drafter)
                self._changed.wait(CHECK_SECONDS)
                if number not in self._queued:
                    self._check()
            queued = self._queued[number].pop(drafter)
            if not self._queued[number]:
                del self._queued[number]
        self._streams.hold(drafter, queued.ends)

    def leave(self) -> None:
        """Ends the waits of those whose bucket will not be summed any more."""
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()

    def _lost(self, drafter: int) -> NodeLost:
        return NodeLost(f"the {SUM} over {self.size} drafters failed at drafter {drafter}: another one ended")

    def _queue(self, lane: int, buckets: list[list[Tensor]], made: list[Mark]) -> list[tuple[Mark, ...]]:
        """Queues one bucket's sum; the ends of what is done with each drafter's tensors."""
        kinds = [tuple((tensor.numel(), tensor.dtype) for tensor in bucket) for bucket in buckets]
        assert all(kind == kinds[0] for kind in kinds), "drafters sum buckets of different tensors"
        if (lane, kinds[0]) not in self._plans:
            self._plans[lane, kinds[0]] = self._plan(lane, kinds[0])
        shares, rooms, totals = self._plans[lane, kinds[0]]
        # Pieces of each drafter's tensors, by whose share they are.
        own = [_pieces(bucket, shares) for bucket in buckets]
        streams = self._streams
        with streams.queueing():
            streams.begin(lane, made)
            for source, owner in turns(self.size):
                streams.move(lane, source, owner, map(Copy, rooms[owner][source], own[source][owner]))
            for owner in range(self.size):
                parts = [own[owner][owner] if source == owner else rooms[owner][source] for source in range(self.size)]
                streams.add(lane, owner, partial(_add, owner, parts, totals[owner]))
            for owner, to in turns(self.size):
                streams.move(lane, owner, to, map(Copy, own[to][owner], own[owner][owner]))
            return [streams.end(lane, drafter) for drafter in range(self.size)]

    def _plan(self, lane: int, kinds: Kinds) -> Plan:
        assert len({dtype for _, dtype in kinds}) == 1, "a bucket of several types"
        dtype = kinds[0][1]
        shares = cut_shares([size for size, _ in kinds], self.size)
        sizes = [[stop - start for _, start, stop in share] for share in shares]
        rooms, totals = [], []
        for owner in range(self.size):
            parts = [_parts_of(part, sizes[owner], dtype) for part in self._rooms[lane][owner]]
            rooms.append([*parts[:owner], [], *parts[owner:]])
            room = self._totals[lane][owner].view(-1) if self._totals[lane] else None
            kind = torch.float32 if dtype.itemsize == 2 else dtype
            totals.append([] if room is None else _parts_of(room, sizes[owner], kind))
        return Plan(shares, rooms, totals)


def _add(owner: int, parts: list[list[Tensor]], totals: list[Tensor]) -> None:
    """Adds parts up, of each drafter one, in the order of drafters, and leaves the sums in the owner's.

    Elements of 16 bits are added in float32 and rounded once.
    """
    own = parts[owner]
    if not own:
        return
    if len(parts) == 2:
        # One launch for all pieces, which adds in float32 by itself; which of two comes first changes nothing.
        torch._foreach_add_(own, parts[1 - owner])
        return
    torch._foreach_copy_(totals, parts[0])
    for part in parts[1:]:
        torch._foreach_add_(totals, part)
    torch._foreach_copy_(own, totals)


def turns(size: int) -> Iterator[tuple[int, int]]:
    """All pairs of different drafters; in each turn everybody sends to one and receives from one."""
    for turn in range(1, size):
        for source in range(size):
            yield source, (source + turn) % size


def _pieces(bucket: list[Tensor], shares: list[list[Piece]]) -> list[list[Tensor]]:
    # A view fails where elements do not lie one behind the other, instead of copying them.
    flats = [tensor.view(-1) for tensor in bucket]
    return [[flats[index][start:stop] for index, start, stop in share] for share in shares]


def _parts_of(room: Tensor, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Parts of these bytes, one behind the other, of so many elements."""
    needed = sum(sizes) * dtype.itemsize
    assert needed <= len(room), f"a bucket is larger than said: its share needs {needed} bytes, there are {len(room)}"
    return list(room[:needed].view(dtype).split(sizes)) if sizes else []


class PeerSum:
    """One drafter's end of the sums over the drafters of its process; used in its thread.

    Every drafter has to start the same buckets in the same order.
    """

    def __init__(self, group: PeerGroup, drafter: int, meet: Callable[[], None] = lambda: None) -> None:
        """`meet`: called before a step's first sum; returns when all drafters are there, or raises."""
        self.group, self.drafter, self.meet = group, drafter, meet
        self._running: deque[int] = deque()
        self._num_started = 0

    def start(self, bucket: list[Tensor]) -> None:
        """Begins to replace these tensors, all of one type, by their sums over all drafters; never waits.

        On a GPU the sum comes behind what the current stream holds now. Nobody may touch the tensors before `wait`.

        Raises:
            NodeLost: another drafter left.
        """
        self.group.deposit(self.drafter, self._num_started, bucket)
        self._running.append(self._num_started)
        self._num_started += 1

    def wait(self) -> None:
        """Ends the oldest sum that was started. The thread waits until all drafters have started it.

        On a GPU the current stream then waits for the sum, not this thread.

        Raises:
            NodeLost: another drafter left without it.
            Whatever the group's check raises.
        """
        self.group.take(self.drafter, self._running[0])
        self._running.popleft()

    def drop(self) -> None:
        """Leaves the group, which ends the waits of the others with an error."""
        self._running.clear()
        self.group.leave()

    def abort(self) -> list[threading.Thread]:
        """Ends the wait of this drafter and of the others; called by control. No device waits for what is not queued.

        Returns no thread: nothing is left to be done.
        """
        self.group.leave()
        return []
