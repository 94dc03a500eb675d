"""Which calls in a trace make a worker wait."""

import json
import threading
from pathlib import Path

import pytest
import torch

from blockdraft.runtime import waits
from blockdraft.runtime.waits import WaitCount, count_waits, thread_numbers
from blockdraft.runtime.workers import Worker

NAMES = {7: "target 0", 8: "drafter 0"}


def call(name, tid, cat="cuda_runtime"):
    return {"name": name, "tid": tid, "cat": cat, "ph": "X"}


def test_waiting_calls_of_workers_count_and_no_others():
    events = [
        call("cudaStreamSynchronize", 8),
        call("cudaStreamSynchronize", 8),
        call("cudaMemcpyAsync", 8),
        call("cuMemcpyHtoDAsync_v2", 8, "cuda_driver"),
        call("cudaLaunchKernel", 7),
        call("cudaMalloc", 7),
        call("cudaEventSynchronize", 1),  # control
        call("cudaDeviceSynchronize", 7, "kernel"),
        {"ph": "M", "name": "process_name"},
    ]
    assert count_waits(events, NAMES) == {"drafter 0 cudaStreamSynchronize": 2, "target 0 cudaMalloc": 1}


def test_workers_are_known_by_every_number_of_their_thread():
    worker = Worker("loader", torch.device("cpu"), lambda _worker: None)
    assert thread_numbers([worker]) == {}
    worker.thread = threading.current_thread()
    numbers = thread_numbers([worker])
    low = threading.get_ident() & 0xFFFFFFFF
    # A trace has the address's lower half as a signed number without its sign, so half of all threads under the last.
    assert {threading.get_native_id(), threading.get_ident(), low, low - 2**32, 2**32 - low} == set(numbers)
    assert set(numbers.values()) == {"loader"}


class StubProfiler:
    """Writes one call of this thread."""

    def __init__(self, activities):
        self.running = False

    def start(self):
        self.running = True

    def stop(self):
        self.running = False

    def export_chrome_trace(self, path):
        assert not self.running
        events = [call("cudaStreamSynchronize", threading.get_native_id())]
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def gpu_worker(name):
    worker = Worker(name, torch.device("cuda"), lambda _worker: None)
    worker.thread = threading.current_thread()
    return worker


def test_steps_behind_the_twentieth_are_profiled_once(monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", StubProfiler)
    worker, count = gpu_worker("target 0"), WaitCount(5)
    for worker.step in range(24):
        count.step(worker.step + 1, [worker])
    assert count.describe() == ["waits for a GPU: not counted, fewer than 25 steps"]
    for worker.step in range(24, 40):
        count.step(worker.step + 1, [worker])
    assert count.found == waits.Waits(5, {"target 0 cudaStreamSynchronize": 1})
    assert count.describe() == ["waits for a GPU in 5 steps: target 0 cudaStreamSynchronize 1"]


def test_steps_that_were_done_while_the_profiler_started_do_not_count(monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", StubProfiler)
    worker, count = gpu_worker("drafter 0"), WaitCount(5)
    # It is heard of the twentieth step when the workers are in the 300th already, and of all others at once.
    worker.step = 300
    for number in range(20, 300):
        count.step(number, [worker])
    assert count.found is None
    worker.step = 305
    count.step(300, [worker])
    assert count.found is not None
    assert count.found.steps == 5


def test_only_steps_that_every_worker_is_in_count(monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", StubProfiler)
    ahead, behind, count = gpu_worker("target 0"), gpu_worker("drafter 0"), WaitCount(5)
    for step in range(20, 40):
        ahead.step, behind.step = step + 3, step
        count.step(step, [ahead, behind])
        # The profiler begins when the one is in step 23 already: the other's come behind that.
        assert (count.found is None) is (step < 28)
    assert count.found is not None
    assert count.found.steps == 5


def test_a_worker_whose_calls_the_trace_does_not_name_is_not_said_to_wait_for_nothing(monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", StubProfiler)
    seen, other = gpu_worker("target 0"), gpu_worker("drafter 0")
    other.thread = None
    count = WaitCount(5)
    for step in range(30):
        seen.step = other.step = step
        count.step(step + 1, [seen, other])
    assert count.found is not None
    assert count.found.unseen == ("drafter 0",)
    line = "waits for a GPU in 5 steps: not known, the trace names no call of drafter 0"
    assert count.describe() == [line]


def test_nothing_is_profiled_unless_asked(monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", None)
    count = WaitCount(0)
    for step in range(50):
        count.step(step, [])
    assert count.describe() == []


def test_a_run_without_a_gpu_says_that_nothing_was_counted(monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", None)
    worker, count = Worker("drafter 0", torch.device("cpu"), lambda _worker: None), WaitCount(5, is_on_gpu=False)
    for worker.step in range(50):
        count.step(worker.step + 1, [worker])
    count.end([worker])
    assert count.describe() == ["waits for a GPU: not counted, no worker has one"]


def test_a_profiler_that_saw_no_step_has_not_seen_a_run_without_waits(monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", StubProfiler)
    early, late, count = gpu_worker("target 0"), gpu_worker("drafter 0"), WaitCount(5)
    # All that control hears of it, it hears when the workers are at the run's end.
    early.step, late.step = 300, 299
    for number in range(300):
        count.step(number, [early, late])
    count.end([early, late])
    assert count.found is None
    (line,) = count.describe()
    assert (
        line == "waits for a GPU: not counted, the run was over before the profiler had seen a step; give it more steps"
    )


@pytest.mark.parametrize("how", ["end", "stop"])
def test_a_profiler_does_not_outlive_a_run_that_is_shorter(monkeypatch, how):
    made: list[StubProfiler] = []

    def make(activities):
        made.append(StubProfiler(activities))
        return made[-1]

    monkeypatch.setattr(torch.profiler, "profile", make)
    worker, count = gpu_worker("target 0"), WaitCount(5)
    for worker.step in range(22):
        count.step(worker.step + 1, [worker])
    assert made[0].running
    if how == "end":
        count.end([worker])
        assert count.found == waits.Waits(2, {"target 0 cudaStreamSynchronize": 1})
    else:
        count.stop()
        assert count.found is None
    assert not made[0].running
    count.end([worker])
    count.stop()
