"""Saving beside training: drafter 0 copies its tensors into host memory, a thread of its own writes them.

On a GPU the copy runs on a side stream into page-locked memory, and only the next update of the masters waits for it.
Where the drafters of a node divide the optimizer's state, drafter 0 copies theirs too, each on its own GPU. There is
room for one copy: a save that comes while the one before is still being written waits for it.
"""

import errno
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.runtime.spans import Lane
from blockdraft.training.best import BEST, Best, Yardstick, read_best
from blockdraft.training.checkpoint import Contents, free_bytes, record_best, write_checkpoint

BLOCK_BYTES = 2**30
"""torch rounds page-locked memory up to powers of two; so it is taken in blocks of one."""
ALIGN_BYTES = 256
SMALL_BYTES = 4096
"""A block of a file system, which the smallest file takes."""
POLL_SECONDS = 0.05
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a file system says that takes no more: of the disk, of the user, of the file."""


class Abandoned(RuntimeError):
    """The run ended in a way that leaves this checkpoint without its metrics."""


def is_full(error: OSError) -> bool:
    """Whether a file system took no more."""
    return error.errno in FULL


def _spell_full(root: Path, what: str, num_bytes: int, error: OSError) -> str:
    """What was to be written, where, what it needs and what is there; what was half-written is gone by now."""
    return (
        f"{root}: {what} could not be written: {error.strerror}; it needs {num_bytes:,} bytes, {free_bytes(root):,} "
        "are free there without it; free more, or lower --keep-last, and go on with --resume auto. Complete "
        "checkpoints stay as they are"
    )


class Side(NamedTuple):
    """What a GPU's tensors are copied on, and when they are there."""

    stream: torch.cuda.Stream
    copied: torch.cuda.Event


class Snapshot:
    """Room in host memory for one checkpoint's tensors."""

    def __init__(self, contents: Contents) -> None:
        """Takes the memory for tensors like these; those that share their memory share their room."""
        self.device = contents.skipped.device
        devices = sorted({tensor.device for tensor in _named(contents).values()}, key=str)
        self.sides = {
            device: Side(torch.cuda.Stream(device), torch.cuda.Event(blocking=True))
            for device in devices
            if device.type == "cuda"
        }
        owners = {_place(tensor): (name, tensor) for name, tensor in reversed(_named(contents).items())}
        room = _room([tensor for _, tensor in owners.values()], is_pinned=bool(self.sides))
        self.room = dict(zip((name for name, _ in owners.values()), room, strict=True))

    def take(self, contents: Contents) -> Contents:
        """The same contents in this room, once all `copied` have happened; on a CPU, when this returns.

        Drafter 0's stream is behind the weights that the others handed out, and those came behind the others' updates:
        who is behind the one is behind the other. On a CPU its thread is.
        """
        for side in self.sides.values():
            side.stream.wait_stream(torch.cuda.current_stream(self.device))
        found = self._copy(contents)
        for side in self.sides.values():
            side.copied.record(side.stream)
        return found

    @torch.no_grad()
    def _copy(self, contents: Contents) -> Contents:
        taken: dict[tuple[torch.device, int, torch.Size], str] = {}
        views: dict[str, Tensor] = {}
        for name, tensor in _named(contents).items():
            owner = taken.setdefault(_place(tensor), name)
            if owner == name:
                with self._beside(tensor.device):
                    self.room[name].copy_(tensor, non_blocking=True)
            views[name] = self.room[owner]
        return contents._replace(
            weights={name: views[f"w.{name}"] for name in contents.weights},
            moments={name: views[f"m.{name}"] for name in contents.moments},
            skipped=views["s"],
        )

    def _beside(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.sides[device].stream) if device in self.sides else nullcontext()


def _named(contents: Contents) -> dict[str, Tensor]:
    named = {f"w.{name}": tensor for name, tensor in contents.weights.items()}
    named |= {f"m.{name}": tensor for name, tensor in contents.moments.items()}
    return named | {"s": contents.skipped}


def _place(tensor: Tensor) -> tuple[torch.device, int, torch.Size]:
    return tensor.device, tensor.data_ptr(), tensor.shape


def _room(tensors: Iterable[Tensor], *, is_pinned: bool) -> list[Tensor]:
    """Host tensors like these, page-locked ones cut out of large blocks."""
    if not is_pinned:
        return [torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format) for tensor in tensors]
    found, block, used = [], torch.empty(0, dtype=torch.uint8), 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if used + num_bytes > len(block):
            block, used = torch.empty(max(BLOCK_BYTES, num_bytes), dtype=torch.uint8, pin_memory=True), 0
        found.append(block[used : used + num_bytes].view(tensor.dtype).view(tensor.shape))
        used += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
    return found


class Saver:
    """The writer's thread and what drafter 0 and control ask of it."""

    def __init__(
        self,
        root: Path,
        keep_last: int,
        *,
        contents_at: Callable[[int], Contents],
        fail: Callable[[str], None],
        tick: Callable[[], None],
        check: Callable[[], None],
        await_metrics: Callable[[int, Callable[[], bool]], bool],
        say: Callable[[str], None],
        lane: Lane,
    ) -> None:
        """Takes calls into the run.

        `contents_at(steps_done)`: what is to be saved, as it lies on the drafter's device.
        `fail(message)` ends the run; `tick()` says that something moved; `check()` raises when the run is stopped.
        `lane`: the writer's.
        `await_metrics(steps_done, is_over)`: whether the metrics up to that step are on disk; waits unless it is over.
        """
        self.root, self.keep_last = root, keep_last
        self.contents_at, self.fail, self.tick, self.check = contents_at, fail, tick, check
        self.await_metrics, self.say, self.lane = await_metrics, say, lane
        self.error = ""
        self._snapshot: Snapshot | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_room = threading.Semaphore(1)
        self._is_abandoned = threading.Event()
        self._must_wait: set[torch.device] = set()
        self._thread = threading.Thread(target=self._run, name="writer", daemon=True)

    # In drafter 0's thread

    def prepare(self) -> None:
        """Takes the host memory and starts the writer; after warm-up, so that nothing is allocated in a step."""
        self._snapshot = Snapshot(self.contents_at(0))
        self._thread.start()

    def save(self, steps_done: int) -> None:
        """Copies what belongs to a checkpoint and lets it be written; waits while the last one is still written."""
        assert self._snapshot is not None
        started = time.monotonic()
        while not self._has_room.acquire(timeout=POLL_SECONDS):
            self.check()
        waited = time.monotonic() - started
        if waited > 1.0:
            self.say(f"saving step {steps_done} waited {waited:.1f} s for the save before it; raise save_every")
        copy = self._snapshot.take(self.contents_at(steps_done))
        # The drafters meet before their next update, so each of them sees it.
        self._must_wait.update(self._snapshot.sides)
        self._jobs.put(lambda: self._write(copy))

    def evaluated(self, steps_done: int, acceptance_length: float, measured_on: Yardstick) -> None:
        """Offers a step's checkpoint, if there is one, as the best; behind all saves asked for before."""
        candidate = Best(steps_done, acceptance_length, measured_on)
        self._jobs.put(lambda: self._record(candidate))

    # In each drafter's thread

    def before_update(self, device: torch.device) -> None:
        """Makes the update that comes on this device wait for the copy of what it changes, on the device."""
        if device in self._must_wait:
            assert self._snapshot is not None
            self._snapshot.sides[device].copied.wait(torch.cuda.current_stream(device))
            self._must_wait.discard(device)

    # In control's thread

    def abandon(self) -> None:
        """No more metrics will be written: checkpoints that wait for theirs are given up."""
        self._is_abandoned.set()

    def finish(self, while_waiting: Callable[[], None], seconds: float | None = None) -> None:
        """Waits for everything asked for, at most `seconds`; `error` then says what went wrong."""
        self._jobs.put(None)
        deadline = None if seconds is None else time.monotonic() + seconds
        while self._thread.is_alive() and (deadline is None or time.monotonic() < deadline):
            self._thread.join(POLL_SECONDS)
            while_waiting()

    def is_alive(self) -> bool:
        """Whether the writer still runs."""
        return self._thread.is_alive()

    # In the writer's thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self.error:
                    job()
            except Abandoned:
                pass
            except ConfigError as error:
                self._give_up(f"saving failed: {error}")
            except BaseException:
                self._give_up(f"saving failed in the writer:\n{traceback.format_exc()}")

    def _give_up(self, message: str) -> None:
        self.error = message
        self.fail(message)

    def _write(self, copy: Contents) -> None:
        assert self._snapshot is not None
        try:
            for side in self._snapshot.sides.values():
                side.copied.synchronize()
            with self.lane.span("write", copy.steps_done - 1):
                write_checkpoint(
                    self.root,
                    copy,
                    self.keep_last,
                    tick=self.tick,
                    before_rename=lambda: self._await_metrics(copy.steps_done),
                )
        except OSError as error:
            if not is_full(error):
                raise
            what = f"the checkpoint of step {copy.steps_done}"
            raise ConfigError(_spell_full(self.root, what, copy.num_bytes(), error)) from error
        finally:
            self._has_room.release()

    def _await_metrics(self, steps_done: int) -> None:
        # A checkpoint must never be ahead of metrics.jsonl: whoever resumes from it would leave a gap there.
        if not self.await_metrics(steps_done, self._is_abandoned.is_set):
            raise Abandoned

    def _record(self, candidate: Best) -> None:
        former = read_best(self.root)
        try:
            is_best = record_best(self.root, candidate, self.keep_last)
        except OSError as error:
            if not is_full(error):
                raise
            raise ConfigError(_spell_full(self.root, BEST, SMALL_BYTES, error)) from error
        if is_best:
            if former is not None and not former.is_comparable(candidate):
                self.say(former.spell_change(candidate))
            self.say(
                f"best checkpoint so far: step {candidate.steps_done}, acceptance length "
                f"{candidate.acceptance_length:.2f}"
            )
