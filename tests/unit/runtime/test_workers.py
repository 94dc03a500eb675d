"""Threads that die, stop, hang; and the watchdog."""

import contextvars
import threading
import time
from pathlib import Path

import pytest
import torch

from blockdraft.runtime.channel import Channel
from blockdraft.runtime.workers import Crew, Stalled, Watchdog, Worker, WorkerError

pytestmark = pytest.mark.alone

DEVICE = torch.device("cpu")
SETTING = contextvars.ContextVar("SETTING", default="default")


def channel() -> Channel:
    return Channel(num_targets=1, num_drafters=1, depth=1, pairs=False)


def crew_of(*bodies, **options) -> Crew:
    crew = Crew(channel())
    crew.start([Worker(f"worker {i}", DEVICE, body, **options) for i, body in enumerate(bodies)])
    return crew


def wait_for_stop(crew_channel: Channel):
    return lambda _worker: crew_channel.take(0, 99)


def test_workers_that_end_are_joined():
    done = []
    crew = crew_of(lambda worker: done.append(worker.name), lambda worker: done.append(worker.name))
    crew.join()
    assert sorted(done) == ["worker 0", "worker 1"]
    assert not crew.is_alive()
    assert crew.first_error is None


def test_the_systems_threads_are_gone_when_workers_are_joined():
    def compute(_worker: Worker) -> None:
        weight = torch.ones(64, 64, requires_grad=True)
        (weight @ weight).sum().backward()

    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("only Linux says which threads exist")
    for _ in range(40):
        crew = crew_of(*[compute] * 4)
        crew.join()
        left = {int(task.name) for task in tasks.iterdir()}
        assert not left & {worker.thread.native_id for worker in crew.workers}


def test_the_first_error_releases_everyone_and_is_raised_with_its_traceback():
    crew = Crew(channel())

    def die(worker: Worker) -> None:
        worker.step = 6
        raise KeyError("missing layer")

    crew.start([Worker("waiting", DEVICE, wait_for_stop(crew.channel)), Worker("target 3", DEVICE, die)])
    with pytest.raises(WorkerError) as caught:
        crew.join()
    message = str(caught.value)
    assert message.startswith("target 3 on cpu died in step 7:\nTraceback (most recent call last)")
    assert "KeyError: 'missing layer'" in message
    assert "in die" in message
    assert not crew.is_alive()


def test_exits_count_as_deaths():
    def leave(_worker: Worker) -> None:
        raise SystemExit(3)

    with pytest.raises(WorkerError, match=r"worker 0 on cpu died before its first step:[\s\S]*SystemExit: 3"):
        crew_of(leave).join()


def test_a_stopped_channel_is_no_error():
    crew = Crew(channel())
    crew.start([Worker("waiting", DEVICE, wait_for_stop(crew.channel))])
    crew.channel.stop()
    crew.join()


def test_only_the_first_error_is_kept():
    crew = Crew(channel())
    crew.fail("one")
    crew.fail("two")
    assert crew.first_error == "one"


def test_a_thread_that_does_not_end_is_named():
    release = threading.Event()

    def hang(_worker: Worker) -> None:
        release.wait(20)

    crew = crew_of(hang, lambda _worker: None)
    assert crew.wait(0.1) == ["worker 0"]
    with pytest.raises(Stalled, match=r"did not end within 0 s: worker 0"):
        crew.join(0.1)
    crew.fail("something else")
    with pytest.raises(WorkerError, match=r"something else\nstill running after 0 s: worker 0"):
        crew.join(0.1)
    release.set()
    assert crew.wait(10) == []


def test_each_worker_has_the_callers_context_and_modes_of_its_own():
    found = {}

    def look(worker: Worker) -> None:
        found[worker.name] = (
            SETTING.get(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
            torch.autograd.is_multithreading_enabled(),
        )
        SETTING.set(worker.name)
        torch.set_grad_enabled(False)

    before = torch.get_num_threads()
    SETTING.set("of the caller")
    try:
        with torch.no_grad():
            crew_of(look, look, cpu_threads=1).join()
        assert found == {name: ("of the caller", 1, True, False) for name in ("worker 0", "worker 1")}
        assert SETTING.get() == "of the caller"
        assert torch.autograd.is_multithreading_enabled()
    finally:
        SETTING.set("default")
        torch.set_num_threads(before)


def test_the_watchdog_raises_when_nothing_moves(capfd):
    one = channel()
    dog = Watchdog(one, 0.15)
    dog.check()
    for _ in range(4):
        time.sleep(0.08)
        one.release(0)
        dog.check()
    for _ in range(4):
        time.sleep(0.08)
        dog.beat()
        dog.check()
    time.sleep(0.2)
    with pytest.raises(Stalled, match=r"raise runtime\.stall_seconds"):
        dog.check()
    assert "test_the_watchdog_raises_when_nothing_moves" in capfd.readouterr().err


def test_an_error_of_leaving_is_an_error_of_the_run():
    def leave() -> None:
        raise KeyError("the group is gone")

    crew = crew_of(lambda _worker: None, at_end=leave)
    with pytest.raises(WorkerError, match=r"^worker 0 on cpu died before its first step:[\s\S]*the group is gone"):
        crew.join()


def test_an_error_of_leaving_does_not_hide_the_first_one():
    def die(_worker: Worker) -> None:
        raise KeyError("first")

    def leave() -> None:
        raise KeyError("second")

    with pytest.raises(WorkerError, match="first") as caught:
        crew_of(die, at_end=leave).join()
    assert "second" not in str(caught.value)


def test_stacks_are_printed_where_stderr_is_no_file(capsys):
    one = channel()
    dog = Watchdog(one, 0.05)
    dog.check()
    time.sleep(0.1)
    # Under capsys, as in some notebooks, it has no descriptor.
    with pytest.raises(Stalled):
        dog.check()
    assert capsys.readouterr().err == ""
