"""How often the workers wait for a GPU, counted in a profiler's trace between two steps.

`torch.cuda.set_sync_debug_mode` belongs to the process and would count what control does as well; a trace names the
thread of every call into the driver.
"""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch

from blockdraft.runtime.workers import Worker

WAITING = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMemcpy", "cudaMemset")
"""Calls that hold their thread until the device has come to it. Their asynchronous forms end in Async."""
FIRST_STEP = 20
"""Steps that are left out: the allocators of pinned memory settle in them."""


class Waits(NamedTuple):
    """Calls of workers that waited, by worker and call, over some steps."""

    steps: int
    calls: dict[str, int]
    unseen: tuple[str, ...] = ()
    """Workers with a GPU of which the trace names no call at all: nothing is known of them."""

    def __str__(self) -> str:
        if self.unseen:
            return (
                f"waits for a GPU in {self.steps} steps: not known, the trace names no call of {', '.join(self.unseen)}"
            )
        found = ", ".join(f"{name} {count}" for name, count in self.calls.items()) if self.calls else "none"
        return f"waits for a GPU in {self.steps} steps: {found}"


class WaitCount:
    """Profiles the steps from FIRST_STEP on. Control calls it with every step that it hears of.

    What it hears of lies behind: a profiler takes seconds to start, and the workers go on meanwhile. So the steps that
    are counted are those in which the workers are, and not those that are reported.
    """

    def __init__(self, num_steps: int, *, is_on_gpu: bool = True) -> None:
        """0 counts nothing; where no worker has a GPU there is nothing to count, which is said."""
        self.num_steps, self._is_on_gpu = num_steps, is_on_gpu
        self.found: Waits | None = None
        self._first = -1
        self._profiler: Any = None

    def step(self, number: int, workers: list[Worker]) -> None:
        """A step was reported; `number` counts from the run's own first one."""
        if not self.num_steps or not self._is_on_gpu or self.found is not None:
            return
        if self._profiler is None:
            if number >= FIRST_STEP:
                self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._profiler.start()
                self._first = max(_steps(workers))
        elif min(_steps(workers)) >= self._first + self.num_steps:
            self._finish(workers)

    def end(self, workers: list[Worker]) -> None:
        """The run is over; a profiler that still runs is stopped, and what it saw counts, if it saw a step."""
        if self._profiler is None or self.found is not None:
            return
        if min(_steps(workers)) > self._first:
            self._finish(workers)
        else:
            self.stop()

    def stop(self) -> None:
        """A profiler must not outlive a run, also one that has failed."""
        if self._profiler is not None and self.found is None:
            self._profiler.stop()
            self._profiler = None

    def _finish(self, workers: list[Worker]) -> None:
        self._profiler.stop()
        steps = min(_steps(workers)) - self._first
        events, names = self._events(), thread_numbers(workers)
        seen = {names[event["tid"]] for event in events if _is_call(event) and event.get("tid") in names}
        unseen = tuple(worker.name for worker in workers if worker.device.type == "cuda" and worker.name not in seen)
        self.found = Waits(steps, count_waits(events, names), unseen)

    def _events(self) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
            return events

    def describe(self) -> list[str]:
        """A line for the log."""
        if not self.num_steps:
            return []
        if self.found is not None:
            return [str(self.found)]
        why = f"fewer than {FIRST_STEP + self.num_steps} steps"
        if not self._is_on_gpu:
            why = "no worker has one"
        elif self._first >= 0 and self._profiler is None:
            why = "the run was over before the profiler had seen a step; give it more steps"
        return [f"waits for a GPU: not counted, {why}"]


def _steps(workers: list[Worker]) -> list[int]:
    """In which step each of them is that has a GPU."""
    return [worker.step for worker in workers if worker.device.type == "cuda"]


def thread_numbers(workers: list[Worker]) -> dict[int, str]:
    """Names of the workers by every number that a trace may give to their thread.

    That is the system's number where the profiler has asked for it, and else the lower half of the thread's address,
    signed or not; the profiler writes a negative number without its sign.
    """
    names = {}
    for worker in workers:
        thread = worker.thread
        if thread is None or thread.ident is None or thread.native_id is None:
            continue
        low = thread.ident & 0xFFFFFFFF
        for number in (thread.native_id, low, low - 2**32, 2**32 - low, thread.ident):
            names[number] = worker.name
    return names


def count_waits(events: list[dict[str, Any]], names: dict[int, str]) -> dict[str, int]:
    """Calls into the driver that wait, of these threads, out of a Chrome trace's events."""
    found: Counter[str] = Counter()
    for event in events:
        name = str(event.get("name", ""))
        if _is_call(event) and event.get("tid") in names and _waits(name):
            found[f"{names[event['tid']]} {name}"] += 1
    return dict(found.most_common())


def _is_call(event: dict[str, Any]) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver")


def _waits(name: str) -> bool:
    return any(part in name for part in WAITING) and not name.split("_v")[0].endswith("Async")
