"""The ordered channel, with threads that sleep at random: order exact, bounds kept, every wait ends with stop()."""

import random
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockdraft.data.loader import Fill
from blockdraft.runtime.channel import Channel, Stopped, Work


def fill(number: int) -> Fill:
    return Fill(number, -1, (), (), ())


def start(body: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a wait never ended"


class Ring:
    """Slots as plain lists, so that a slot written while it is in use is noticed."""

    def __init__(self, num_drafters: int, depth: int) -> None:
        self.owner: list[list[int | None]] = [[None] * depth for _ in range(num_drafters)]
        self.faults: list[str] = []

    def write(self, work: Work) -> None:
        if self.owner[work.drafter][work.slot] is not None:
            self.faults.append(f"slot {work.slot} of drafter {work.drafter} overwritten by {work.fill.number}")
        self.owner[work.drafter][work.slot] = work.fill.number

    def read(self, work: Work) -> None:
        if self.owner[work.drafter][work.slot] != work.fill.number:
            self.faults.append(f"slot {work.slot} holds {self.owner[work.drafter][work.slot]}, not {work.fill.number}")

    def clear(self, work: Work) -> None:
        self.owner[work.drafter][work.slot] = None


@given(
    num_targets=st.integers(1, 4),
    num_drafters=st.integers(1, 3),
    depth=st.integers(1, 3),
    groups=st.integers(1, 6),
    queue_limit=st.integers(1, 8),
    is_pairs=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40)
def test_numbers_arrive_in_order_whatever_the_delays(
    num_targets, num_drafters, depth, groups, queue_limit, is_pairs, seed
):
    num_targets = num_drafters if is_pairs else num_targets
    channel = Channel(
        num_targets=num_targets, num_drafters=num_drafters, depth=depth, pairs=is_pairs, queue_limit=queue_limit
    )
    total, ring, draw = groups * num_drafters, Ring(num_drafters, depth), random.Random(seed)
    taken: list[list[int]] = [[] for _ in range(num_drafters)]
    made: list[list[int]] = [[] for _ in range(num_targets)]
    waits = [draw.random() * 0.002 for _ in range(997)]

    def target(index: int) -> None:
        while (work := channel.next_work(index)) is not None:
            time.sleep(waits[(work.fill.number * 31 + index) % 997])
            ring.write(work)
            made[index].append(work.fill.number)
            channel.publish(work)

    def drafter(index: int) -> None:
        for number in range(index, total, num_drafters):
            work = channel.take(index, number)
            ring.read(work)
            time.sleep(waits[(number * 17 + index) % 997])
            ring.read(work)
            taken[index].append(work.fill.number)
            ring.clear(work)
            channel.release(index)

    threads = [start(lambda: channel.feed(map(fill, range(total))))]
    threads += [start(lambda i=i: target(i)) for i in range(num_targets)]
    threads += [start(lambda i=i: drafter(i)) for i in range(num_drafters)]
    join(threads)
    assert ring.faults == []
    assert taken == [list(range(i, total, num_drafters)) for i in range(num_drafters)]
    assert sorted(number for numbers in made for number in numbers) == list(range(total))
    assert all(numbers == sorted(numbers) for numbers in made)
    if is_pairs:
        assert made == taken
    assert channel.in_flight() == 0


def test_a_number_that_is_done_first_is_not_delivered_first():
    channel = Channel(num_targets=2, num_drafters=1, depth=2, pairs=False)
    channel.feed(map(fill, range(2)))
    first, second = channel.next_work(0), channel.next_work(1)
    assert first is not None and second is not None
    assert (first.fill.number, first.slot, second.fill.number, second.slot) == (0, 0, 1, 1)
    channel.publish(second)
    got: list[int] = []
    thread = start(lambda: got.append(channel.take(0, 0).fill.number))
    time.sleep(0.05)
    assert got == []
    channel.publish(first)
    join([thread])
    assert got == [0]
    assert channel.take(0, 1).slot == 1


def test_no_work_is_handed_out_without_a_free_slot():
    channel = Channel(num_targets=3, num_drafters=1, depth=2, pairs=False)
    channel.feed(map(fill, range(4)))
    works = [channel.next_work(0), channel.next_work(1)]
    got: list[Work | None] = []
    took: list[float] = []

    def ask() -> None:
        began = time.monotonic()
        got.append(channel.next_work(2))
        took.append(time.monotonic() - began)

    thread = start(ask)
    time.sleep(0.05)
    assert got == []
    for work in works:
        assert work is not None
        channel.publish(work)
    channel.take(0, 0)
    time.sleep(0.05)
    # Taken is not released: the drafter still reads the slot.
    assert got == []
    channel.release(0)
    join([thread])
    assert got[0] is not None
    assert (got[0].fill.number, got[0].slot) == (2, 0)
    # How much of it the thread saw depends on when it came to run.
    assert 0.0 < channel.target_waits[2].to_hand_over_s <= took[0]
    assert channel.target_waits[2].for_input_s == 0.0


def test_the_loader_stays_within_its_limit():
    channel = Channel(num_targets=1, num_drafters=1, depth=1, pairs=False, queue_limit=3)
    read: list[int] = []

    def numbers():
        for number in range(20):
            read.append(number)
            yield fill(number)

    thread = start(lambda: channel.feed(numbers()))
    end = time.monotonic() + 20
    while len(read) < 4 and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.05)
    # Three queued and one in hand.
    assert read == [0, 1, 2, 3]
    for number in range(20):
        work = channel.next_work(0)
        assert work is not None and work.fill.number == number
        channel.publish(work)
        channel.take(0, number)
        channel.release(0)
    assert channel.next_work(0) is None
    join([thread])


def waiters(channel: Channel) -> dict[str, Callable[[], object]]:
    return {
        "feed": lambda: channel.feed(map(fill, range(100))),
        "next_work": lambda: channel.next_work(0),
        "take": lambda: channel.take(0, 50),
        "meet": channel.meet,
    }


@pytest.mark.parametrize("who", ["feed", "next_work", "take", "meet"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_stop_ends_every_wait(who, when):
    # A drafter meets nobody alone.
    channel = Channel(num_targets=1, num_drafters=2 if who == "meet" else 1, depth=1, pairs=False)
    if who in ("next_work", "take"):
        # Work is queued, but the only slot is taken.
        channel.feed(map(fill, range(3)))
        channel.next_work(0)
    ended: list[type] = []

    def wait() -> None:
        try:
            waiters(channel)[who]()
        except Stopped:
            ended.append(Stopped)

    channel.check()
    if when == "before":
        channel.stop()
    thread = start(wait)
    time.sleep(0.05)
    channel.stop()
    join([thread])
    assert ended == [Stopped]
    with pytest.raises(Stopped):
        channel.check()


def test_a_target_that_waits_hears_that_the_loader_is_done():
    channel, got = Channel(num_targets=1, num_drafters=1, depth=1, pairs=False), list[Work | None]()

    def fills():
        # The target is waiting for its first fill by now, and none comes.
        time.sleep(0.05)
        yield from ()

    thread = start(lambda: got.append(channel.next_work(0)))
    channel.feed(fills())
    join([thread])
    assert got == [None]


def test_stop_wins_over_work_that_is_there():
    channel = Channel(num_targets=1, num_drafters=1, depth=2, pairs=False)
    channel.feed(map(fill, range(2)))
    channel.stop()
    with pytest.raises(Stopped):
        channel.next_work(0)


def test_drafters_that_meet_go_on_together_turn_after_turn():
    channel, turns, log = Channel(num_targets=1, num_drafters=3, depth=1, pairs=False), 20, list[int]()

    def drafter() -> None:
        for turn in range(turns):
            log.append(turn)
            channel.meet()

    join([start(drafter) for _ in range(3)])
    assert log == [turn for turn in range(turns) for _ in range(3)]


@pytest.mark.parametrize("pairs", [False, True])
def test_a_nodes_fills_go_to_its_own_drafters(pairs):
    # The second of two nodes, behind one with a single drafter.
    channel = Channel(num_targets=2, num_drafters=2, depth=2, pairs=pairs, first_drafter=1, all_drafters=3)
    channel.feed(map(fill, (1, 2, 4, 5)))
    works = [channel.next_work(target) for target in (0, 1, 0, 1)]
    assert [(work.fill.number, work.drafter, work.slot) for work in works if work is not None] == [
        (1, 0, 0), (2, 1, 0), (4, 0, 1), (5, 1, 1),
    ]  # fmt: skip


def test_the_mean_depth_counts_the_slot_that_is_taken():
    channel = Channel(num_targets=1, num_drafters=1, depth=3, pairs=False)
    channel.feed(map(fill, range(3)))
    for _ in range(3):
        work = channel.next_work(0)
        assert work is not None
        channel.publish(work)
    assert (channel.filled(), channel.mean_depth()) == ((3,), 0.0)
    for number, mean in enumerate((3.0, 2.5, 2.0)):
        channel.take(0, number)
        assert channel.mean_depth() == mean


def test_every_move_is_a_pulse():
    channel = Channel(num_targets=1, num_drafters=1, depth=1, pairs=False)
    seen = [channel.moves]
    channel.feed(map(fill, range(1)))
    seen.append(channel.moves)
    work = channel.next_work(0)
    assert work is not None
    seen.append(channel.moves)
    channel.publish(work)
    seen.append(channel.moves)
    assert channel.in_flight() == 1
    channel.take(0, 0)
    seen.append(channel.moves)
    channel.release(0)
    seen.append(channel.moves)
    assert seen == sorted(set(seen))
