"""Spans of workers: bounded, on the host's clock for devices too, and readable as a Chrome trace."""

import json
import time

import pytest
import torch

from blockdraft.runtime import spans
from blockdraft.runtime.chrome_trace import chrome_trace, last_steps, window
from blockdraft.runtime.spans import HAND_OVER, INPUT, DeviceTrack, Lane, Record, Span

CPU = torch.device("cpu")


class FakeEvent:
    """An event of a device whose clock began elsewhere; `now_ms` is when the next one happens."""

    now_ms = 0.0
    done_ms = float("inf")

    def __init__(self) -> None:
        self.at_ms = FakeEvent.now_ms

    def query(self) -> bool:
        return self.at_ms <= FakeEvent.done_ms

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "FakeEvent") -> float:
        return other.at_ms - self.at_ms


@pytest.fixture
def lane(monkeypatch) -> Lane:
    """A GPU's lane with fake events; host time stands at 100 s when the device's clock shows 5 ms."""
    monkeypatch.setattr(DeviceTrack, "mark", lambda _track: FakeEvent())
    monkeypatch.setattr(spans.time, "perf_counter", lambda: clock[0])
    clock = [100.0]
    FakeEvent.now_ms, FakeEvent.done_ms = 5.0, float("inf")
    found = Lane("drafter 0", torch.device("cuda", 0))
    found.begin()
    found.clock = clock
    return found


def test_a_lane_keeps_the_newest_spans_only():
    lane = Lane("target 0", CPU, keep=3)
    for step in range(10):
        with lane.span("fill", step):
            pass
    assert [span.step for span in lane.spans] == [7, 8, 9]
    assert all(span.end_s >= span.start_s for span in lane.spans)


def test_a_span_ends_when_an_error_passes_through():
    lane = Lane("target 0", CPU)
    with pytest.raises(RuntimeError), lane.span("fill", 1):
        raise RuntimeError
    assert [span.what for span in lane.spans] == ["fill"]


def test_waits_of_two_kinds_follow_each_other():
    lane = Lane("target 0", CPU)
    lane.waited(10.0, 0.5, 0.25, 3)
    lane.waited(11.0, 0.0, 0.0, 3)
    assert list(lane.spans) == [Span(INPUT, 10.0, 10.5, 3), Span(HAND_OVER, 10.5, 10.75, 3)]


def test_a_cpu_has_no_device_spans():
    lane = Lane("target 0", CPU)
    with lane.on_device("forward", 0), lane.on_copies("copy", 0):
        lane.idle_on_device(INPUT, 0)
    lane.begin()
    assert lane.work is None and lane.copies is None


def test_device_spans_are_on_the_hosts_clock(lane):
    FakeEvent.now_ms = 7.0
    lane.idle_on_device(INPUT, 4)
    with lane.on_device("micro-batch", 4):
        FakeEvent.now_ms = 17.0
    lane.clock[0] = 100.5
    lane.work.read()
    assert [(span.what, span.step) for span in lane.work.spans] == [(INPUT, 4), ("micro-batch", 4)]
    waiting, work = lane.work.spans
    assert waiting.start_s == pytest.approx(100.0) and waiting.end_s == pytest.approx(100.002)
    assert work.start_s == pytest.approx(100.002) and work.end_s == pytest.approx(100.012)


def test_reading_does_not_wait_for_what_has_not_happened(lane):
    FakeEvent.done_ms = 10.0
    for _ in range(2):
        with lane.on_device("micro-batch", 0):
            FakeEvent.now_ms += 4.0
    lane.clock[0] = 101.0
    lane.work.read()
    assert len(lane.work.spans) == 1
    FakeEvent.done_ms = 13.0
    lane.work.read()
    assert len(lane.work.spans) == 2


def test_a_clock_that_drifts_is_set_right(lane):
    # The device's clock runs behind: by it the work began before the thread queued it.
    lane.clock[0] = 100.010
    FakeEvent.now_ms = 9.0
    with lane.on_device("update", 1):
        FakeEvent.now_ms = 11.0
    # And ahead: by it the work ended after it was seen to be over.
    lane.clock[0] = 100.013
    lane.work.read()
    FakeEvent.now_ms = 14.0
    with lane.on_device("update", 2):
        FakeEvent.now_ms = 34.0
    lane.clock[0] = 100.034
    lane.work.read()
    first, second = lane.work.spans
    assert first.start_s == pytest.approx(100.010, rel=1e-9)
    assert second.end_s == pytest.approx(100.034, rel=1e-9)
    assert second.end_s - second.start_s == pytest.approx(0.020)


def test_device_spans_are_bounded_and_counted(lane, monkeypatch):
    monkeypatch.setattr(spans, "UNREAD", 4)
    FakeEvent.done_ms = 0.0
    for step in range(10):
        with lane.on_device("update", step):
            pass
    assert len(lane.work._unread) == 4
    assert Record([lane]).left_out() == 6


def test_nothing_is_timed_in_warm_up(monkeypatch):
    monkeypatch.setattr(DeviceTrack, "mark", lambda _track: FakeEvent())
    lane = Lane("target 0", torch.device("cuda", 0))
    with lane.on_device("forward", -1):
        pass
    lane.idle_on_device(HAND_OVER, -1)
    lane.work.read()
    assert not lane.work.spans and not lane.work._unread


def two_lanes(keep: int = 100) -> Record:
    """Three steps of 10 ms; the target works one step ahead."""
    target, drafter = Lane("target 0", CPU, keep), Lane("drafter 0", CPU, keep)
    for step in range(3):
        start_s = 50.0 + step / 100
        target.spans.append(Span("fill", start_s - 0.01, start_s - 0.002, step))
        drafter.spans.append(Span("micro-batch", start_s, start_s + 0.006, step))
        drafter.spans.append(Span("update", start_s + 0.006, start_s + 0.01, step))
    return Record([target, drafter])


def test_a_window_is_the_drafters_time_for_the_steps():
    record = two_lanes()
    found = window(record, 1, 2)
    assert found is not None
    assert (found.first_step, found.last_step) == (1, 2)
    assert (found.start_s, found.end_s) == (pytest.approx(50.01), pytest.approx(50.03))
    assert window(record, 7, 9) is None


def test_the_last_steps_are_whole():
    assert last_steps(two_lanes(), 2).first_step == 1
    assert last_steps(two_lanes(), 20).first_step == 0
    # The ring has dropped the micro-batch of step 1.
    assert last_steps(two_lanes(keep=3), 20).first_step == 2
    assert last_steps(Record([Lane("drafter 0", CPU)]), 20) is None


def test_a_trace_has_lanes_spans_and_a_counter():
    record = two_lanes()
    record.lanes[1].work = DeviceTrack(CPU, 10)
    record.lanes[1].work.spans.append(Span("micro-batch", 50.011, 50.016, 1))
    shown = window(record, 1, 1)
    record._depths += [spans.Depth(49.0, (1,)), spans.Depth(50.012, (2,)), spans.Depth(51.0, (0,))]
    trace = json.loads(json.dumps(chrome_trace(record, shown)))
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["target 0", "drafter 0", "drafter 0 on cpu", "writer", "control"]
    drawn = {(names[e["pid"], e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    # Of the targets whatever overlaps the time of step 1: the fill of step 2.
    assert ("target 0", "fill", 0.0, 8000.0) in drawn
    assert ("drafter 0", "micro-batch", 0.0, 6000.0) in drawn
    assert ("drafter 0 on cpu", "micro-batch", 1000.0, 5000.0) in drawn
    assert not any(what == "fill" and start > 0 for _, what, start, _ in drawn)
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"drafter 0": 2}]
    assert trace["otherData"] == {"first_step": 2, "last_step": 2}


def test_a_span_costs_microseconds_and_no_memory_when_the_ring_is_full():
    import tracemalloc

    lane = Lane("drafter 0", CPU, keep=64)
    for step in range(200):
        with lane.span("micro-batch", step):
            pass
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for step in range(10_000):
        with lane.span("micro-batch", step):
            pass
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 64 * 300
    assert time.perf_counter() > lane.spans[-1].end_s
