"""Control takes what has arrived, in order, and never waits for a GPU."""

import queue
import threading
import time

import pytest
import torch

from blockdraft.runtime.reports import Inbox, MicroBatches, StepDone, WarmedUp

WARM = WarmedUp("target 0", "2 x 8 tokens", 0.1)


class Event:
    """Happens when the test says so; waiting for it is what control must not do."""

    def __init__(self, is_over: bool = False) -> None:
        self.is_over = is_over

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        assert self.is_over, "control waits for a GPU"


def step_done(number: int, ready: Event | None) -> StepDone:
    return StepDone(number, torch.zeros(3), ready, 1.0, 8)  # type: ignore[arg-type]


def test_reports_come_in_order_and_wait_for_their_numbers():
    inbox, event = Inbox(), Event()
    for report in (WARM, step_done(0, None), step_done(1, event), MicroBatches(1, 0, torch.zeros(1, 3), None), WARM):
        inbox.put(report)
    assert inbox.get_nowait() is WARM
    assert inbox.get_nowait().step == 0
    # Those behind it are ready, and keep their place.
    for _ in range(2):
        with pytest.raises(queue.Empty):
            inbox.get(0.01)
    assert inbox.qsize() == 3
    event.is_over = True
    assert [type(inbox.get_nowait()) for _ in range(3)] == [StepDone, MicroBatches, WarmedUp]
    with pytest.raises(queue.Empty):
        inbox.get_nowait()
    assert inbox.qsize() == 0


def test_numbers_that_arrive_while_control_waits_are_taken():
    inbox, event = Inbox(), Event()
    inbox.put(step_done(4, event))

    def finish() -> None:
        time.sleep(0.05)
        event.is_over = True

    thread = threading.Thread(target=finish)
    thread.start()
    assert inbox.get(20.0).step == 4
    thread.join()


def test_a_report_that_is_put_while_control_waits_is_taken():
    inbox = Inbox()
    thread = threading.Timer(0.05, inbox.put, (WARM,))
    thread.start()
    assert inbox.get(20.0) is WARM
    thread.join()
