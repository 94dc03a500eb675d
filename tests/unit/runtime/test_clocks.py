"""What counts to what, with a clock of the test's own; on a GPU with stubs for its events."""

import pytest
import torch

from blockdraft.runtime import clocks
from blockdraft.runtime.clocks import BOUNDARY, BUSY, HANDING_OVER, OTHERS, Clock


class Time:
    """The wall clock, or a GPU's queue: an event happens when the device has come to it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch) -> Time:
    found = Time()
    monkeypatch.setattr(clocks, "time", found)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = -1.0

        def record(self) -> None:
            self.at = found.now

        def query(self) -> bool:
            return self.at <= found.reached

        def elapsed_time(self, end: "Event") -> float:
            assert end.query(), "asked before it happened"
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    return found


def test_saving_and_waiting_inside_a_piece_of_work_are_not_work(time):
    clock = Clock(torch.device("cpu"))
    with clock.spend(BUSY):
        time.now += 3
        with clock.spend(OTHERS):
            time.now += 2
        time.now += 1
        with clock.spend(BOUNDARY):
            time.now += 10
    with clock.spend(HANDING_OVER):
        time.now += 0.5
    assert clock.seconds == {BUSY: 4, OTHERS: 2, BOUNDARY: 10, HANDING_OVER: 0.5}


def test_a_piece_of_work_that_fails_counts_and_leaves_the_clock_usable(time):
    clock = Clock(torch.device("cpu"))
    with pytest.raises(KeyError), clock.spend(BUSY):
        time.now += 2
        raise KeyError
    with clock.spend(OTHERS):
        time.now += 1
    assert (clock.seconds[BUSY], clock.seconds[OTHERS]) == (2, 1)


def test_a_gpus_time_is_read_when_it_has_happened(time):
    clock = Clock(torch.device("cuda", 0))
    for _ in range(3):
        with clock.spend(BUSY):
            time.now += 2
    assert clock.seconds[BUSY] == 0, "the device has done nothing yet"
    time.reached = 4
    with clock.spend(HANDING_OVER):
        time.now += 1
    assert clock.seconds[BUSY] == 4
    time.reached = 7
    clock.restart()
    assert set(clock.seconds.values()) == {0.0}


def test_a_clock_does_not_restart_while_its_device_works(time):
    clock = Clock(torch.device("cuda", 0))
    with clock.spend(BUSY):
        time.now += 2
    with pytest.raises(AssertionError, match="still running"):
        clock.restart()
