"""Worker threads: started in copied contexts, one device each, and joined whatever happens.

The first error wins: it stops the channel, so every other worker's wait ends, and control raises it again with the
worker's name, device, step and whole traceback.
"""

import contextvars
import faulthandler
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from blockdraft.runtime.channel import Channel, Stopped
from blockdraft.runtime.clocks import Clock
from blockdraft.runtime.spans import KEPT, Lane


class WorkerError(RuntimeError):
    """A worker died; the message holds its name, device, step and traceback."""


class Stalled(RuntimeError):
    """Nothing moved for the set time; all stacks were printed."""


@dataclass
class Worker:
    """One thread. `body` gets the worker, and says where it is by setting `step` (counted from 0, -1 in warm-up)."""

    name: str
    device: torch.device
    body: Callable[["Worker"], None]
    cpu_threads: int | None = None
    step: int = -1
    warm: bool = False
    """Whether its warm-up is over."""
    at_end: Callable[[], None] = lambda: None
    """Called in the thread when the body is over and an error of its own is recorded."""
    thread: threading.Thread | None = field(default=None, repr=False)
    keep_spans: int = KEPT
    clock: Clock = field(init=False, repr=False)
    lane: Lane = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)
        self.lane = Lane(self.name, self.device, self.keep_spans)


class Crew:
    """All workers of a run, and the first error among them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.workers: list[Worker] = []
        self._lock = threading.Lock()
        self._first_error: str | None = None

    def start(self, workers: list[Worker]) -> None:
        """Starts each worker's thread in a copy of the caller's context."""
        self.workers = workers
        for worker in workers:
            run = contextvars.copy_context().run
            thread = threading.Thread(target=run, args=(self._run, worker), name=worker.name, daemon=True)
            thread.start()
            worker.thread = thread

    def _run(self, worker: Worker) -> None:
        def work() -> None:
            _prepare_thread(worker)
            worker.body(worker)
            if worker.device.type == "cuda":
                # Whoever reads what this worker made knows nothing of its stream.
                torch.cuda.current_stream(worker.device).synchronize()

        self._call(worker, work)
        self._call(worker, worker.at_end)

    def _call(self, worker: Worker, what: Callable[[], None]) -> None:
        try:
            what()
        except Stopped:
            pass
        except BaseException:
            when = f"in step {worker.step + 1}" if worker.step >= 0 else "before its first step"
            self.fail(f"{worker.name} on {worker.device} died {when}:\n{traceback.format_exc()}")

    def fail(self, message: str) -> None:
        """Records the first error and stops everyone."""
        with self._lock:
            if self._first_error is None:
                self._first_error = message
        self.channel.stop()

    @property
    def first_error(self) -> str | None:
        """What the first worker to die said."""
        with self._lock:
            return self._first_error

    def is_alive(self) -> bool:
        """Whether any thread still runs."""
        return any(worker.thread is not None and worker.thread.is_alive() for worker in self.workers)

    def wait(self, seconds: float = 10.0) -> list[str]:
        """Waits for every thread; returns the names of those still running after `seconds`."""
        deadline = time.monotonic() + seconds
        for worker in self.workers:
            if worker.thread is not None:
                worker.thread.join(max(0.0, deadline - time.monotonic()))
        self._await_system_threads(deadline)
        return [worker.name for worker in self.workers if worker.thread is not None and worker.thread.is_alive()]

    def _await_system_threads(self, deadline: float) -> None:
        """Waits until joined threads have also freed what torch keeps for each of them.

        Before Python 3.13 a join returns while the system's thread still does so; a process that ends then is aborted,
        and its exit code is lost. Only Linux says which of its threads exist.
        """
        for worker in self.workers:
            thread = worker.thread
            if thread is not None and not thread.is_alive() and thread.native_id is not None:
                while Path(f"/proc/self/task/{thread.native_id}").exists() and time.monotonic() < deadline:
                    time.sleep(0.001)

    def join(self, seconds: float = 10.0) -> None:
        """Waits for every thread.

        Raises:
            WorkerError: a worker died.
            Stalled: a thread did not end within `seconds` of being told to.
        """
        stuck = self.wait(seconds)
        if self.first_error is not None:
            after = f"\nstill running after {seconds:.0f} s: {', '.join(stuck)}" if stuck else ""
            raise WorkerError(self.first_error + after)
        if stuck:
            raise Stalled(f"threads that did not end within {seconds:.0f} s: {', '.join(stuck)}")


def _prepare_thread(worker: Worker) -> None:
    # Current device, autograd modes and intra-op threads all belong to the thread.
    if worker.device.type == "cuda":
        torch.cuda.set_device(worker.device)
        # A stream of its own, and with it a pool of memory: two workers on one device overlap, and what one of them
        # allocates does not depend on where the other just is. What the main thread made must be there first.
        torch.cuda.synchronize(worker.device)
        torch.cuda.set_stream(torch.cuda.Stream(worker.device))
    if worker.cpu_threads is not None:
        torch.set_num_threads(worker.cpu_threads)
    # The engine's own device threads would run lazy compiles behind a lock that this thread may hold.
    torch.autograd.set_multithreading_enabled(False)


class Watchdog:
    """Prints every thread's stack when the channel has not moved for a set time; start-up has a time of its own."""

    def __init__(self, channel: Channel, seconds: float, warm_up_seconds: float | None = None) -> None:
        """Without `warm_up_seconds` the steady state is there from the beginning."""
        self.channel, self.steady_seconds = channel, seconds
        self.seconds = seconds if warm_up_seconds is None else max(seconds, warm_up_seconds)
        self._seen, self._since = -1, time.monotonic()

    def begin_steady(self) -> None:
        """Says that start-up, compiling included, is over."""
        self.seconds, self._since = self.steady_seconds, time.monotonic()

    def beat(self) -> None:
        """Says that something else moved: a step, an evaluation, a warm-up."""
        self._since = time.monotonic()

    def check(self) -> None:
        """Raises Stalled, after printing all stacks to stderr, when nothing moved in time."""
        if self.channel.moves != self._seen:
            self._seen, self._since = self.channel.moves, time.monotonic()
        elif time.monotonic() - self._since > self.seconds:
            _print_stacks()
            raise Stalled(
                f"nothing moved for {self.seconds:.0f} s; the stacks of all threads are above. "
                "If a step really takes longer, raise runtime.stall_seconds"
            )


def _print_stacks() -> None:
    try:
        faulthandler.dump_traceback(file=sys.stderr)
    except (OSError, ValueError):
        # In a notebook stderr is no file; what the process was started with is.
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
