"""A drafter that dies while others wait for it: the run ends soon, with its error, and no thread stays."""

import time

import pytest

from blockdraft.runtime import pipeline
from blockdraft.runtime.distributed import GradientSum, NodeLost
from blockdraft.runtime.workers import WorkerError
from blockdraft.training import buckets
from blockdraft.training.buckets import GradientBuckets
from integration.tiny_run import Files, make_files, run_control, tiny_config, worker_threads

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("drafter_failures"))


class Broken(RuntimeError):
    """Raised on purpose."""


def three_drafters(files: Files, run_dir, **changes):
    runtime = {"drafters": ("cpu",) * 3}
    return tiny_config(files, run_dir, steps=200, optim={"accumulation": 3}, runtime=runtime, **changes)


def assert_ends(config, message: str, *, delay=pipeline.no_delay) -> str:
    """The run raises the first error within ten seconds of its start-up; returns its text."""
    began: list[float] = []

    def listen(_control, line: str) -> None:
        if line.startswith("step 1/"):
            began.append(time.monotonic())

    with pytest.raises(WorkerError, match=message) as caught:
        run_control(config, say=listen, delay=delay)
    assert time.monotonic() - began[0] < 10, str(caught.value)
    assert worker_threads() == []
    text = str(caught.value)
    assert "still running" not in text
    assert "Traceback (most recent call last)" in text
    return text


def in_third_step(monkeypatch, rank: int, bucket: int, act) -> None:
    """Calls `act` in that drafter's third step, where it would start that bucket: in the middle of its backward."""
    meet, start = GradientBuckets.begin, GradientSum.start
    steps: list[int] = []
    started: list[int] = []

    def begin(self, total) -> None:
        meet(self, total)
        if total.rank == rank:
            steps.append(1)
            started.clear()

    def counted(self, values) -> None:
        if self.rank == rank:
            started.append(1)
            # The first of all sums belongs to no step.
            if len(steps) == 4 and len(started) == bucket + 1:
                act()
        start(self, values)

    monkeypatch.setattr(GradientBuckets, "begin", begin)
    monkeypatch.setattr(GradientSum, "start", counted)


@pytest.mark.parametrize("bucket", [0, 2], ids=["first", "a later one"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_drafter_that_dies_inside_the_sum(files, tmp_path, monkeypatch, rank, bucket):
    def act() -> None:
        # By now the others wait in the collective.
        time.sleep(0.5)
        raise Broken("out of memory")

    monkeypatch.setattr(buckets, "BUCKET_BYTES", 2_000)
    in_third_step(monkeypatch, rank, bucket, act)
    text = assert_ends(three_drafters(files, tmp_path), rf"^drafter {rank} on cpu died in step 3:")
    assert "Broken: out of memory" in text
    assert "NodeLost" not in text


def test_a_drafter_that_dies_before_the_sum(files, tmp_path):
    def delay(worker: str, number: int) -> None:
        if worker == "drafter 2" and number > 10:
            time.sleep(0.3)
            raise Broken("bad batch")

    text = assert_ends(three_drafters(files, tmp_path), r"^drafter 2 on cpu died in step 4:", delay=delay)
    assert "Broken: bad batch" in text


def test_an_error_while_drafter_0_saves_and_the_others_wait_for_it(files, tmp_path, monkeypatch):
    def full(*_arguments: object) -> None:
        time.sleep(0.3)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blockdraft.runtime.saver.Saver.save", full)
    assert_ends(three_drafters(files, tmp_path, save_every=2), r"^drafter 0 on cpu died in step 2:[\s\S]*No space left")


def test_a_target_that_dies_while_drafters_wait(files, tmp_path):
    def delay(worker: str, number: int) -> None:
        if worker == "target 0" and number == 10:
            time.sleep(0.3)
            raise Broken("no such layer")

    assert_ends(three_drafters(files, tmp_path), r"^target 0 on cpu died in step 4:[\s\S]*no such layer", delay=delay)


def test_a_drafter_that_does_not_come_ends_the_sum_in_its_own_time(files, tmp_path, monkeypatch):
    # Stuck between meeting and collective; the sum's time-out is not the watchdog's.
    def act() -> None:
        time.sleep(4)
        raise Broken("woke up late")

    in_third_step(monkeypatch, 1, 0, act)
    monkeypatch.setattr("blockdraft.commands.control.SUM_SECONDS", 1.0)
    text = assert_ends(three_drafters(files, tmp_path), r"^drafter [02] on cpu died in step 3:")
    assert "the sum of gradients over 3 drafters failed at drafter" in text
    assert "did not come within 1 s" in text
    assert NodeLost.__name__ in text


def test_an_evaluation_may_take_longer_than_a_sum(files, tmp_path, monkeypatch):
    monkeypatch.setattr("blockdraft.commands.control.SUM_SECONDS", 1.0)
    saved: list[int] = []

    def slow(_saver, steps_done: int) -> None:
        saved.append(steps_done)
        time.sleep(2.0)

    monkeypatch.setattr("blockdraft.runtime.saver.Saver.save", slow)
    runtime = {"drafters": ("cpu", "cpu")}
    run_control(tiny_config(files, tmp_path, steps=4, save_every=2, optim={"accumulation": 2}, runtime=runtime))
    assert saved == [2, 4]
