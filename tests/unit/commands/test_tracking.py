"""metrics.jsonl, as the writer of checkpoints relies on it."""

import os
import threading
from pathlib import Path

import pytest

from blockdraft.commands.tracking import MetricsFile


@pytest.fixture
def synced(monkeypatch) -> list[str]:
    """What the file held each time it was synced."""
    found: list[str] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        sync(descriptor)
        found.append(Path(f"/proc/self/fd/{descriptor}").readlink().read_text())

    monkeypatch.setattr("blockdraft.commands.tracking.os.fsync", note)
    return found


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="only Linux names what a descriptor is of")
def test_a_step_that_was_waited_for_is_on_disk(tmp_path, synced):
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(file.await_step(2, lambda: False)))
    thread.start()
    file.write({"step": 1, "loss": float("nan")})
    thread.join(0.2)
    assert answers == []
    file.write({"step": 2})
    thread.join(20)
    assert answers == [True]
    assert synced == ['{"step": 1, "loss": null}\n{"step": 2}\n']
    file.close()


def test_nobody_waits_for_a_step_that_never_comes(tmp_path, synced):
    file = MetricsFile(tmp_path / "metrics.jsonl", 3)
    assert file.await_step(4, lambda: True) is False
    assert synced == []
    file.close()


def test_lines_that_are_written_again_and_half_ones_go_first(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "eval_seconds": 0.1}\n{"step": 3}\n{"step": 4, "lo')
    file = MetricsFile(path, 2)
    assert file.is_evaluated
    file.write({"step": 3})
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2, "eval_seconds": 0.1}\n{"step": 3}\n'
