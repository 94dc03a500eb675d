"""Slots: the buffers that carry context features from a target's device to a drafter's.

R rows, T tokens of a row, D width, C captured layers. A slot is [R * T + 1, C * D]; its last row takes padding. Slots
are allocated once, owned by the ring and never freed. On one device the hooks' column writes are the only copy; from
another device they go into a staging buffer, and one contiguous copy on a side stream follows.

Ordering on GPUs is by two events a slot, `filled` and `drained`; no tensor's life depends on `record_stream`.
"""

import threading

import torch
from torch import Tensor

from blockdraft.data.loader import Fill
from blockdraft.models.target import Target
from blockdraft.runtime.clocks import BUSY, HANDING_OVER, Clock
from blockdraft.runtime.spans import HAND_OVER, Lane


class Slot:
    """One buffer on a drafter's device, with its two events (None on a CPU)."""

    def __init__(self, num_rows: int, row_length: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_rows, self.row_length = num_rows, row_length
        self.buffer = torch.zeros(num_rows * row_length + 1, width, dtype=dtype, device=device)
        self.device = device
        self.filled: torch.cuda.Event | None = None
        """Of the last fill; None when that was finished before it was published."""
        self.drained = torch.cuda.Event() if device.type == "cuda" else None
        self._filled_on: dict[torch.device, torch.cuda.Event] = {}

    @property
    def features_RTC(self) -> Tensor:
        """What the drafter reads, [R, T, C * D]; behind it the final hidden states, where the objective needs them."""
        return self.buffer[:-1].view(self.num_rows, self.row_length, -1)

    def mark_filled(self, stream: torch.cuda.Stream) -> None:
        """Called by a target after its last write; an event belongs to the device that it is recorded on."""
        event = self._filled_on.setdefault(stream.device, torch.cuda.Event())
        event.record(stream)
        self.filled = event

    def await_filled(self) -> None:
        """Makes the drafter's stream wait for the features."""
        if self.filled is not None and self.device.type == "cuda":
            self.filled.wait(torch.cuda.current_stream(self.device))

    def mark_drained(self, poison: bool) -> None:
        """Called by the drafter after its last use; `poison` overwrites the features with NaN first."""
        if poison:
            self.buffer.fill_(float("nan"))
        if self.drained is not None:
            self.drained.record(torch.cuda.current_stream(self.device))


class KeptFeatures:
    """Slot contents kept in host memory, by content number; shared by all target workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, Tensor] = {}
        self._room: list[Tensor] = []

    def take(self, number: int, like: Tensor) -> None:
        """Takes page-locked memory for so many slots.

        To take it later waits until every GPU of the process is idle, which must not happen while one waits for another
        in a collective.
        """
        self._room = [torch.empty(like.shape, dtype=like.dtype, pin_memory=True) for _ in range(number)]

    def find(self, content: int) -> Tensor | None:
        """The features [R * T + 1, C * D] of this content, if some worker has computed them."""
        with self._lock:
            return self._kept.get(content)

    def keep(self, content: int, buffer: Tensor) -> None:
        """Copies a slot's features to the host. Waits for them: this happens once per content."""
        with self._lock:
            copied = self._room.pop() if self._room else None
        if copied is None:
            copied = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=buffer.device.type == "cuda")
        copied.copy_(buffer)
        with self._lock:
            if content in self._kept:
                # Another worker has computed it meanwhile.
                self._room.append(copied)
            else:
                self._kept[content] = copied


class Filler:
    """A target worker's way of writing slots."""

    def __init__(
        self,
        target: Target,
        num_rows: int,
        row_length: int,
        kept: KeptFeatures | None = None,
        *,
        with_final: bool = False,
        clock: Clock | None = None,
        lane: Lane | None = None,
    ) -> None:
        """`with_final`: slots have D columns more, for the target's final hidden states.

        `clock` and `lane`: the worker's, which learn what its time goes into.
        """
        self.clock = Clock(target.device) if clock is None else clock
        self.lane = Lane("target", target.device) if lane is None else lane
        self.kept = kept
        self.capture = target.capture_with_final if with_final else target.capture
        self.device = target.device
        self.num_rows, self.row_length = num_rows, row_length
        self.width = target.hidden_size
        self.staging: _Staging | None = None

    def fill(self, slot: Slot, fill: Fill) -> None:
        """Runs the target over the fill's documents and leaves their features in the slot."""
        step = step_of(fill)
        if slot.device == self.device:
            if slot.drained is not None:
                with self.clock.spend(HANDING_OVER):
                    slot.drained.wait(torch.cuda.current_stream(self.device))
                self.lane.idle_on_device(HAND_OVER, step)
            with self.clock.spend(BUSY):
                self._write(slot.buffer, fill)
            if self.device.type == "cuda":
                slot.mark_filled(torch.cuda.current_stream(self.device))
            return
        if self.staging is None:
            self.staging = _Staging(slot, self.device)
        with self.clock.spend(HANDING_OVER):
            buffer = self.staging.ready()
        self.lane.idle_on_device(HAND_OVER, step)
        with self.clock.spend(BUSY):
            self._write(buffer, fill)
        self.staging.send(slot, self.lane, step)

    def _write(self, buffer: Tensor, fill: Fill) -> None:
        if self.kept is None or fill.content < 0:
            self._compute(buffer, fill)
            return
        features = self.kept.find(fill.content)
        if features is not None:
            buffer.copy_(features, non_blocking=True)
        else:
            self._compute(buffer, fill)
            self.kept.keep(fill.content, buffer)

    def _compute(self, buffer: Tensor, fill: Fill) -> None:
        for row, used in enumerate(fill.used_R):
            buffer[row * self.row_length + used : (row + 1) * self.row_length].zero_()
        for batch in fill.batches:
            ids_BP = batch.input_ids_BP.to(self.device, non_blocking=True)
            index_N = batch.slot_index_BP.to(self.device, non_blocking=True).flatten()

            def put(column: int, hidden_BPD: Tensor, index_N: Tensor = index_N) -> None:
                columns = buffer[:, column * self.width : (column + 1) * self.width]
                columns.index_copy_(0, index_N, hidden_BPD.flatten(0, 1).to(columns.dtype))

            with self.lane.both("forward", step_of(fill)):
                self.capture(ids_BP, put)
        buffer[-1].zero_()


def step_of(fill: Fill) -> int:
    """The step that a fill is first trained on; -1 in warm-up."""
    return fill.passes[0].step if fill.passes else -1


class _Staging:
    """Two buffers on the target's device, used in turn, and the side streams that empty them."""

    def __init__(self, like: Slot, device: torch.device) -> None:
        self.device = device
        self.buffers = [torch.zeros_like(like.buffer, device=device) for _ in range(2)]
        self.turn = 0
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.sent = [torch.cuda.Event() for _ in range(2)] if self.stream is not None else None
        self.arrivals: dict[torch.device, _Arrival] = {}

    def ready(self) -> Tensor:
        self.turn = 1 - self.turn
        if self.sent is not None:
            self.sent[self.turn].wait(torch.cuda.current_stream(self.device))
        return self.buffers[self.turn]

    def send(self, slot: Slot, lane: Lane, step: int) -> None:
        source = self.buffers[self.turn]
        if self.stream is None or self.sent is None:
            # From a CPU: a plain copy, finished when it returns.
            if slot.drained is not None:
                slot.drained.synchronize()
            slot.buffer.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        if slot.device.type != "cuda":
            with torch.cuda.stream(self.stream):
                slot.buffer.copy_(source)
                self.sent[self.turn].record(self.stream)
            self.stream.synchronize()
            return
        arrival = self.arrivals.get(slot.device)
        if arrival is None:
            arrival = self.arrivals[slot.device] = _Arrival(source, self.device, slot.device)
        arrival.copy(source, self.stream, self.sent[self.turn], slot, lane, step)


class _Arrival:
    """Copies from one GPU to another: directly, or through page-locked host memory where they cannot reach each other.

    The receiving device has a side stream too: torch makes a copy wait for the current stream of both devices, and the
    drafter's own one has its next step queued.
    """

    def __init__(self, like: Tensor, source: torch.device, to: torch.device) -> None:
        self.stream = torch.cuda.Stream(to)
        self.host: Tensor | None = None
        if not can_reach(source, to):
            self.host = torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
        self.landed = torch.cuda.Event()

    def copy(
        self, source: Tensor, stream: torch.cuda.Stream, sent: torch.cuda.Event, slot: Slot, lane: Lane, step: int
    ) -> None:
        assert slot.drained is not None
        with torch.cuda.stream(self.stream), torch.cuda.stream(stream):
            if self.host is None:
                slot.drained.wait(stream)
                with lane.on_copies("copy", step):
                    slot.buffer.copy_(source, non_blocking=True)
                sent.record(stream)
                slot.mark_filled(stream)
                return
            self.landed.wait(stream)
            with lane.on_copies("copy", step):
                self.host.copy_(source, non_blocking=True)
            sent.record(stream)
        with torch.cuda.stream(self.stream):
            sent.wait(self.stream)
            slot.drained.wait(self.stream)
            slot.buffer.copy_(self.host, non_blocking=True)
            self.landed.record(self.stream)
            slot.mark_filled(self.stream)


def can_reach(source: torch.device, to: torch.device) -> bool:
    """Whether one GPU may write into another's memory."""
    return torch.cuda.can_device_access_peer(source, to)


def describe_link(source: torch.device, to: torch.device) -> str:
    """How features travel from a target's device to a drafter's, for the log."""
    if source.type != "cuda" or to.type != "cuda":
        return f"{source} to {to}: copied through host memory"
    if can_reach(source, to):
        return f"{source} to {to}: peer access, copied directly"
    return f"{source} to {to}: no peer access, copied through page-locked host memory"
