"""Spans of a GPU: its own times on the host's clock, without a wait, at a cost that is printed."""

import itertools
import sys
import time

import pytest
import torch

from blockdraft.runtime.spans import INPUT, Lane

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(120)]
SLEEP_CYCLES = 20_000_000


def settle_clock() -> None:
    """Sleeps count cycles: the first loads its kernel, and those after it take long while an idle GPU's clock rises."""
    lengths: list[float] = []
    for _ in range(50):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.cuda._sleep(SLEEP_CYCLES)
        end.record()
        end.synchronize()
        lengths.append(start.elapsed_time(end))
        if len(lengths) >= 4 and max(lengths[-3:]) < 1.05 * min(lengths[-3:]):
            return
    raise AssertionError(f"expected three sleeps of one length in a row, found {lengths} ms")


@pytest.fixture
def lane():
    settle_clock()
    found = Lane("drafter 0", torch.device("cuda", 0))
    found.begin()
    return found


def wait_and_read(lane):
    torch.cuda.synchronize()
    lane.work.read()
    lane.copies.read()


def test_device_spans_follow_each_other_while_the_thread_runs_ahead(lane):
    began = time.perf_counter()
    for step in range(4):
        with lane.both("micro-batch", step):
            torch.cuda._sleep(SLEEP_CYCLES)
    queued = time.perf_counter()
    wait_and_read(lane)
    ended = time.perf_counter()
    device, host = list(lane.work.spans), list(lane.spans)
    assert [span.step for span in device] == [span.step for span in host] == [0, 1, 2, 3]
    # The thread was through before the device had done the second.
    assert queued < device[1].end_s
    assert all(before.end_s <= after.start_s + 1e-4 for before, after in itertools.pairwise(device))
    assert began <= device[0].start_s and device[-1].end_s <= ended
    lengths = [span.end_s - span.start_s for span in device]
    assert max(lengths) < 1.5 * min(lengths)
    assert sum(lengths) == pytest.approx(device[-1].end_s - device[0].start_s, rel=0.05)


def test_idle_time_of_a_device_is_the_time_since_its_last_work(lane):
    with lane.both("micro-batch", 0):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
    torch.cuda.synchronize()
    time.sleep(0.05)
    lane.idle_on_device(INPUT, 1)
    with lane.both("micro-batch", 1):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
    wait_and_read(lane)
    waiting = lane.work.spans[1]
    assert waiting.what == INPUT
    assert 0.05 <= waiting.end_s - waiting.start_s < 0.2


def test_a_side_stream_has_a_track_of_its_own(lane):
    side = torch.cuda.Stream()
    with lane.both("forward", 0):
        torch.cuda._sleep(SLEEP_CYCLES)
    with torch.cuda.stream(side), lane.on_copies("copy", 0):
        torch.cuda._sleep(SLEEP_CYCLES // 4)
    wait_and_read(lane)
    (forward,), (copy,) = lane.work.spans, lane.copies.spans
    # Beside each other, not one after the other.
    assert copy.start_s < forward.end_s


def test_no_call_waits_for_the_device(lane):
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(10):
            with lane.both("micro-batch", step):
                torch.cuda._sleep(SLEEP_CYCLES // 10)
            lane.idle_on_device(INPUT, step)
            lane.work.read()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    began = time.perf_counter()
    torch.cuda._sleep(20 * SLEEP_CYCLES)
    with lane.both("update", 11):
        pass
    lane.work.read()
    assert time.perf_counter() - began < 0.05


def test_the_cost_of_a_span_is_printed(lane):
    costs = {}
    for name, make in (("thread", lane.span), ("thread and device", lane.both)):
        began = time.perf_counter()
        for step in range(1000):
            with make("x", step):
                pass
        costs[name] = (time.perf_counter() - began) / 1000
    torch.cuda.synchronize()
    began = time.perf_counter()
    lane.work.read()
    costs["reading one"] = (time.perf_counter() - began) / 1000
    assert len(lane.work.spans) == 1000
    sys.stdout.write("\n" + ", ".join(f"{name} {cost * 1e6:.1f} us" for name, cost in costs.items()) + "\n")
