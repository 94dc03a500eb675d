"""Summing gradients between the drafters of one process by copies between devices: no kernel waits for another GPU.

Each drafter owns a share of every bucket. The others' pieces of it are copied to its device and added there, and the
sums are copied back. N drafters. docs/decisions/0005-gradient-sums.md says why this exists beside process groups.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import torch
from peer_streams import Mark, Streams, streams_between
from torch import Tensor, nn

from blockdraft.runtime.distributed import SUM, NodeLost
from blockdraft.runtime.meeting import CHECK_SECONDS

NUM_LANES: Final = 2
"""Loads on their way at a time: one is copied while another is added."""
LOAD_BYTES: Final = 96 * 2**20
"""Most bytes of a bucket that are summed in one lane; the rest of a larger bucket goes to the next ones."""
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


def share_bytes(most_bytes: int, num_drafters: int) -> int:
    """Room for one share of a load, a multiple of 512.

    Each device has room for N - 1 of them in each lane, with N > 2 drafters for two more.
    """
    # A share is larger than an even one by less than ALIGNMENT elements.
    return (min(most_bytes, LOAD_BYTES) // num_drafters + ALIGNMENT * MOST_BYTES_OF_ELEMENT + 511) // 512 * 512


class Deposit(NamedTuple):
    """One drafter's tensors of a bucket, and what its device has to compute before they are there."""

    bucket: list[Tensor]
    made: Mark


class Queued(NamedTuple):
    """A bucket whose sum is queued; kept until what everybody computes waits for `ends`."""

    buckets: list[list[Tensor]]
    """Of each drafter."""
    ends: list[tuple[int, Mark]]
    """Each with the drafter on whose device it is."""
    missing: set[int]
    """Drafters that have not taken it."""


Kinds = tuple[tuple[int, torch.dtype], ...]
"""Elements and type of each tensor of a bucket."""


class Part(NamedTuple):
    """A piece of a bucket as copies need it."""

    piece: Piece
    offset: int
    """Bytes in front of it, of its tensor."""
    num_bytes: int


class Share(NamedTuple):
    """What one drafter owns of a load, and where it is added up."""

    parts: list[Part]
    rooms: list[list[Tensor]]
    """Of each source: where its pieces arrive; none for the owner's own."""
    arrivals: list[list[int]]
    """The rooms' addresses."""
    totals: list[Tensor]
    """Where 16-bit elements of more than two drafters are added up."""


Plan = list[list[Share]]
"""Of each load of a bucket, of each drafter."""


class PeerGroup:
    """What the drafters of one process share; each calls it by its number, through its own PeerSum."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        most_bytes: int,
        check: Callable[[], None],
        streams: Streams | None = None,
        num_lanes: int = NUM_LANES,
    ) -> None:
        """`devices`: of each drafter. `most_bytes`: of the largest bucket; what arrives needs room.

        `check` raises when the run is ending; it is asked again and again by whoever waits.
        `streams`: of that many lanes; None chooses by the devices.

        Raises:
            ConfigError: devices that cannot copy from each other directly.
        """
        assert len(devices) >= 2, "one drafter has nothing to sum"
        self.size, self._most_bytes, self._num_lanes = len(devices), most_bytes, num_lanes
        self._streams = streams_between(devices, num_lanes) if streams is None else streams
        self._check = check
        self._changed = threading.Condition()
        self._deposits: dict[int, dict[int, Deposit]] = {}
        self._queued: dict[int, Queued] = {}
        self._is_broken = False
        self._plans: dict[tuple[int, Kinds], Plan] = {}
        self._lane = 0
        """The next load's."""
        self._share_bytes = share_bytes(most_bytes, self.size)
        self._rooms = [self._make_rooms(lane, self.size - 1) for lane in range(num_lanes)]
        # 16-bit elements of more than two drafters are added up in float32 elsewhere.
        self._totals = [self._make_rooms(lane, 2) if self.size > 2 else [] for lane in range(num_lanes)]

    def _make_rooms(self, lane: int, parts: int) -> list[Tensor]:
        rooms = [self._streams.empty(lane, drafter, parts * self._share_bytes) for drafter in range(self.size)]
        return [room.view(parts, -1) for room in rooms]

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
        marks = [deposits[other].made for other in range(self.size)]
        with self._streams.queueing():
            ends = self._queue(buckets, marks)
        for other, mark in enumerate(marks):
            self._streams.give_back(other, mark)
        with self._changed:
            self._queued[number] = Queued(buckets, ends, set(range(self.size)))
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
            queued = self._queued[number]
        self._streams.hold(drafter, [mark for _, mark in queued.ends])
        with self._changed:
            queued.missing.remove(drafter)
            if queued.missing:
                return
            del self._queued[number]
        for owner, mark in queued.ends:
            self._streams.give_back(owner, mark)

    def leave(self) -> None:
        """Ends the waits of those whose bucket will not be summed any more."""
        with self._changed:
            self._is_broken = True
            self._changed.notify_all()

    def _lost(self, drafter: int) -> NodeLost:
        return NodeLost(f"the {SUM} over {self.size} drafters failed at drafter {drafter}: another one ended")

    def _next_lane(self) -> int:
        lane = self._lane
        self._lane = (lane + 1) % self._num_lanes
        return lane

    def _queue(self, buckets: list[list[Tensor]], marks: list[Mark]) -> list[tuple[int, Mark]]:
        """Queues one bucket's sum; the ends of what is done with it."""
        kinds = [tuple((tensor.numel(), tensor.dtype) for tensor in bucket) for bucket in buckets]
        assert all(kind == kinds[0] for kind in kinds), "drafters sum buckets of different tensors"
        # A view fails where elements do not lie one behind the other.
        flats = [[tensor.view(-1) for tensor in bucket] for bucket in buckets]
        address = [[tensor.data_ptr() for tensor in bucket] for bucket in buckets]
        first = self._lane
        if (first, kinds[0]) not in self._plans:
            self._plans[first, kinds[0]] = self._plan(first, kinds[0])
        ends = []
        for shares in self._plans[first, kinds[0]]:
            lane = self._next_lane()
            for owner, share in enumerate(shares):
                # Also of the lane whose share is empty: the next bucket must not come earlier than this one.
                self._streams.begin(lane, owner, marks)
                self._sum_share(owner, share, flats[owner], address)
                ends.append((owner, self._streams.end(owner)))
        return ends

    def _sum_share(self, owner: int, share: Share, flat: list[Tensor], address: list[list[int]]) -> None:
        """In the owner's lane: copies what arrives, adds, and copies the sums to the others. Nothing else waits."""
        copy = self._streams.copy
        others = [(owner + turn) % self.size for turn in range(1, self.size)]
        for source in others:
            of_source = address[source]
            for (piece, offset, num_bytes), arrives in zip(share.parts, share.arrivals[source], strict=True):
                copy(arrives, of_source[piece.tensor] + offset, num_bytes)
        if share.parts:
            own = [flat[piece.tensor][piece.start : piece.stop] for piece, _, _ in share.parts]
            add([own if source == owner else room for source, room in enumerate(share.rooms)], owner, share.totals)
        of_owner = address[owner]
        for to in others:
            of_other = address[to]
            for piece, offset, num_bytes in share.parts:
                copy(of_other[piece.tensor] + offset, of_owner[piece.tensor] + offset, num_bytes)

    def _plan(self, first_lane: int, kinds: Kinds) -> Plan:
        """Of a bucket whose first load goes to that lane."""
        assert len({dtype for _, dtype in kinds}) == 1, "a bucket of several types"
        dtype, sizes = kinds[0][1], [size for size, _ in kinds]
        total = sum(sizes) * dtype.itemsize
        assert total <= self._most_bytes, f"a bucket is larger than said: {total} bytes, not {self._most_bytes}"
        num_loads = max(1, -(-total // LOAD_BYTES))
        shares = cut_shares(sizes, num_loads * self.size)
        return [
            [
                self._plan_share((first_lane + load) % self._num_lanes, owner, shares[load * self.size + owner], dtype)
                for owner in range(self.size)
            ]
            for load in range(num_loads)
        ]

    def _plan_share(self, lane: int, owner: int, pieces: list[Piece], dtype: torch.dtype) -> Share:
        sizes = [piece.stop - piece.start for piece in pieces]
        rooms = [_parts_of(room, sizes, dtype) for room in self._rooms[lane][owner]]
        rooms = [*rooms[:owner], [], *rooms[owner:]]
        totals = self._totals[lane][owner].view(-1) if self._totals[lane] else None
        kind = torch.float32 if dtype.itemsize == 2 else dtype
        return Share(
            parts=[
                Part(piece, piece.start * dtype.itemsize, size * dtype.itemsize)
                for piece, size in zip(pieces, sizes, strict=True)
            ],
            rooms=rooms,
            arrivals=[[part.data_ptr() for part in room] for room in rooms],
            totals=[] if totals is None else _parts_of(totals, sizes, kind),
        )


def add(parts: list[list[Tensor]], owner: int, totals: list[Tensor]) -> None:
    """Adds parts up, of each drafter one, in the order of drafters, and leaves the sums in the owner's.

    Elements of 16 bits are added in float32 and rounded once.
    """
    own = parts[owner]
    if len(parts) == 2:
        # One launch for all pieces, which adds in float32 by itself; which of two comes first changes nothing.
        if len(own) == 1:
            own[0].add_(parts[1 - owner][0])
        else:
            torch._foreach_add_(own, parts[1 - owner])
        return
    torch._foreach_copy_(totals, parts[0])
    for part in parts[1:]:
        torch._foreach_add_(totals, part)
    torch._foreach_copy_(own, totals)


def _parts_of(room: Tensor, sizes: list[int], dtype: torch.dtype) -> list[Tensor]:
    """Parts of these bytes, one behind the other, of so many elements."""
    return list(room[: sum(sizes) * dtype.itemsize].view(dtype).split(sizes)) if sizes else []


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
