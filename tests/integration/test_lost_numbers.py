"""A drafter that dies inside a collective on GPUs, as control sees it: numbers of a step that never arrive.

The stream of every other drafter is stuck behind its sum, so the events of later steps never happen; whoever waits for
one of them waits for ever, and nobody would abort the sum.
"""

import time

import pytest
import torch

from blockdraft.runtime import reports
from blockdraft.runtime.workers import WorkerError
from integration.tiny_run import Files, make_files, metrics, run_control, tiny_config, worker_threads

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("lost"))


class Event:
    """Happens `after_s` seconds from now."""

    def __init__(self, after_s: float) -> None:
        self.at = time.monotonic() + after_s

    def query(self) -> bool:
        return time.monotonic() >= self.at

    def synchronize(self) -> None:
        assert self.query(), "control waits for a GPU"


def send_behind(monkeypatch, seconds) -> None:
    """Numbers of the n-th report arrive `seconds(n)` after it."""
    count = [0]

    def sent(flat: torch.Tensor) -> tuple[torch.Tensor, Event]:
        count[0] += 1
        return flat, Event(seconds(count[0]))

    monkeypatch.setattr(reports, "_sent", sent)


def test_a_run_ends_though_the_numbers_of_its_last_steps_never_come(files, tmp_path, monkeypatch):
    send_behind(monkeypatch, lambda number: 0.0 if number < 12 else 1e6)

    def delay(worker: str, number: int) -> None:
        if worker == "target 0" and number == 20:
            time.sleep(0.3)
            raise RuntimeError("gone")

    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"target 0 on cpu died in step 21:[\s\S]*RuntimeError: gone"):
        run_control(tiny_config(files, tmp_path, steps=400, save_every=400), delay=delay)
    assert time.monotonic() - started < 10
    assert worker_threads() == []
    lines = metrics(tmp_path)
    # What had arrived is on file, and nothing else.
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert 0 < len(lines) < 12


def test_numbers_that_arrive_late_are_all_logged_in_order(files, tmp_path, monkeypatch):
    send_behind(monkeypatch, lambda number: 0.05 * (number % 3))
    ran = run_control(tiny_config(files, tmp_path))
    assert [line["step"] for line in metrics(ran.run_dir)] == list(range(1, 11))
