"""A point that threads pass together."""

import threading
import time
from collections import deque

import pytest
import torch

from blockdraft.runtime.channel import Stopped
from blockdraft.runtime.distributed import GradientSum
from blockdraft.runtime.meeting import Meeting


def nothing():
    pass


def test_nobody_passes_before_all_have_come_turn_after_turn():
    number, turns = 5, 200
    meeting, lock, arrived = Meeting(number, nothing), threading.Lock(), [0] * turns
    early = []

    def work():
        for turn in range(turns):
            with lock:
                arrived[turn] += 1
            meeting.meet()
            if arrived[turn] != number:
                early.append(turn)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert early == []


def test_one_alone_never_waits():
    meeting = Meeting(1, nothing)
    for _ in range(3):
        meeting.meet()


def test_whoever_waits_leaves_when_the_run_ends():
    is_over = threading.Event()

    def check():
        if is_over.is_set():
            raise Stopped

    meeting, raised = Meeting(2, check), []

    def work():
        try:
            meeting.meet()
        except Stopped:
            raised.append(True)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    time.sleep(0.05)
    assert thread.is_alive()
    is_over.set()
    thread.join(5)
    assert raised == [True]
    with pytest.raises(Stopped):
        meeting.meet()


class StubGroup:
    """Notes when a collective is launched, and takes a while over it."""

    def __init__(self, log, name, seconds):
        self.log, self.name, self.seconds = log, name, seconds

    def allreduce_coalesced(self, _bucket, _options):
        self.log.append(f"{self.name} launches")
        time.sleep(self.seconds)
        self.log.append(f"{self.name} has launched")
        return threading.Event()

    def _start_coalescing(self):
        pass

    def _end_coalescing(self):
        return self.allreduce_coalesced([], None)


@pytest.mark.parametrize("what", ["start", "hand_out"])
@pytest.mark.parametrize("meets", [True, False])
def test_on_gpus_no_drafter_launches_anything_before_the_others_come_to_it(meets, what):
    log, meeting = [], Meeting(2, nothing)

    def work(name, before, seconds):
        total = GradientSum.__new__(GradientSum)
        total.device, total._launch, total._running = torch.device("cuda"), meeting if meets else None, deque()
        total.group = total.near = StubGroup(log, name, seconds)
        total._options = None
        time.sleep(before)
        log.append(f"{name} comes")
        total.start([]) if what == "start" else total.hand_out([])
        log.append(f"{name} goes on")

    threads = [threading.Thread(target=work, args=args) for args in (("early", 0.0, 0.0), ("late", 0.2, 0.2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    # Without the meeting the early one launches, and goes on, while the late one may be held up by it.
    assert (log.index("early launches") > log.index("late comes")) == meets
    assert (log.index("early goes on") > log.index("late has launched")) == meets
