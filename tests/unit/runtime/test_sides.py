"""Where a worker's time went, from its clock and its waits."""

import pytest
import torch

from blockdraft.runtime.channel import Channel, Waited
from blockdraft.runtime.clocks import BOUNDARY, BUSY, HANDING_OVER
from blockdraft.runtime.sides import busy_shares, describe_sides, spent
from blockdraft.runtime.workers import Worker


def make_worker(name: str, **seconds: float) -> Worker:
    worker = Worker(name, torch.device("cpu"), lambda _worker: None)
    kinds = {"busy": BUSY, "handing": HANDING_OVER, "boundary": BOUNDARY}
    worker.clock.seconds |= {kinds[kind]: value for kind, value in seconds.items()}
    return worker


@pytest.fixture
def channel() -> Channel:
    return Channel(num_targets=1, num_drafters=1, depth=2, pairs=False)


def test_the_loader_is_on_no_side(channel):
    workers = [make_worker("loader"), make_worker("target 0", busy=2.0), make_worker("drafter 0", busy=5.0)]
    assert list(spent(workers, channel, 10.0)) == ["target 0", "drafter 0"]
    assert busy_shares(workers, 10.0) == (0.2, 0.5)
    lines = describe_sides(workers, channel, 10.0)
    assert lines[1].startswith("drafter 0: busy 50%, waiting for input 0%")
    assert lines[-1] == "the drafter side limits this run"


def test_waits_of_a_thread_count_only_while_its_device_is_idle(channel):
    # The thread waited for 8 s of 10, the device worked for 9 of them.
    channel.target_waits[0] = Waited(6.0, 2.0)
    found = spent([make_worker("target 0", busy=9.0)], channel, 10.0)["target 0"]
    assert found.for_input_s == pytest.approx(0.75)
    assert found.to_hand_over_s == pytest.approx(0.25)
    assert sum(found) == pytest.approx(10.0)


def test_waits_of_a_device_and_its_thread_add_up(channel):
    channel.target_waits[0] = Waited(0.0, 1.0)
    found = spent([make_worker("target 0", busy=4.0, handing=3.0)], channel, 10.0)["target 0"]
    assert found.to_hand_over_s == pytest.approx(4.0)


def test_saving_and_evaluating_is_no_time_in_which_a_drafter_could_have_worked(channel):
    workers = [make_worker("target 0"), make_worker("drafter 0", busy=4.0, boundary=5.0)]
    assert busy_shares(workers, 10.0).drafter == pytest.approx(0.8)
    assert "saving and evaluating 50%" in describe_sides(workers, channel, 10.0)[1]
    # In the middle of a step: the evaluation is off already, the step itself not counted yet.
    workers = [make_worker("target 0"), make_worker("drafter 0", busy=-5.0, boundary=5.0)]
    assert f"{busy_shares(workers, 10.0).drafter:.0%}" == "0%"
