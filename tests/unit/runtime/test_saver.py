"""Saving beside training: what is written is what was there when it was asked for."""

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from blockdraft.config import ConfigError, OptimConfig, RunConfig
from blockdraft.runtime import saver as module
from blockdraft.runtime.saver import Saver, Snapshot
from blockdraft.runtime.spans import Lane
from blockdraft.training import checkpoint
from blockdraft.training.best import Best, Yardstick, read_best
from blockdraft.training.checkpoint import contents_of, list_checkpoints, verify
from blockdraft.training.optim import MasterOptimizer
from integration.tiny import tiny_drafter, tiny_target

EASY = Yardstick.of({"easy": [[1, 2], [3]]}, 16)


class Bench:
    """A drafter that can be trained, and its saver."""

    def __init__(self, root: Path, keep_last: int = 9) -> None:
        self.drafter = tiny_drafter(tiny_target("llama"), 4, 1).bfloat16()
        self.optimizer = MasterOptimizer(self.drafter, OptimConfig(lr=0.01))
        self.errors: list[str] = []
        self.lines: list[str] = []
        self.is_stopped = False
        self.metrics_step = 10**9
        self.root = root
        self.train()
        self.saver = Saver(
            root,
            keep_last,
            contents_at=lambda done: contents_of(done, self.drafter, self.optimizer, RunConfig()),
            fail=self.errors.append,
            tick=lambda: None,
            check=self.check,
            await_metrics=self.await_metrics,
            say=self.lines.append,
            lane=Lane("writer", torch.device("cpu")),
        )
        self.saver.prepare()

    def train(self) -> None:
        sum((weight.float() ** 2).sum() for weight in self.drafter.parameters()).backward()
        self.optimizer.step(1.0)

    def check(self) -> None:
        if self.is_stopped:
            raise ConfigError("stopped")

    def await_metrics(self, steps_done: int, is_over) -> bool:
        while self.metrics_step < steps_done and not is_over():
            time.sleep(0.01)
        return self.metrics_step >= steps_done

    def finish(self) -> None:
        self.saver.finish(lambda: None)
        assert not self.saver._thread.is_alive()


@pytest.fixture
def gate(monkeypatch):
    """Holds the writer back until it is opened."""
    opened, whole = threading.Event(), module.write_checkpoint

    def write(*arguments, **options):
        assert opened.wait(10)
        return whole(*arguments, **options)

    monkeypatch.setattr(module, "write_checkpoint", write)
    return opened


def test_training_goes_on_while_the_state_of_the_save_is_written(tmp_path, gate):
    bench = Bench(tmp_path)
    bench.optimizer.skipped += 2
    expected = {name: value.clone() for name, value in bench.optimizer.state_tensors().items()}
    weights = {name: value.clone() for name, value in bench.drafter.state_dict().items()}
    bench.saver.save(1)
    bench.train()
    bench.optimizer.skipped += 1
    gate.set()
    bench.finish()
    (directory,) = list_checkpoints(tmp_path)
    assert verify(directory)["skipped_steps"] == 2
    found = load_file(directory / "optimizer.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    found = load_file(directory / "drafter.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in found.items())
    assert not all(torch.equal(value, bench.drafter.state_dict()[name]) for name, value in found.items())


def test_a_second_save_waits_for_the_first(tmp_path, gate):
    bench, order = Bench(tmp_path), []
    bench.saver.save(1)
    second = threading.Thread(target=lambda: (bench.saver.save(2), order.append("second")))
    second.start()
    time.sleep(0.2)
    order.append("opened")
    gate.set()
    second.join()
    bench.finish()
    assert order == ["opened", "second"]
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["1", "2"]


def test_waiting_ends_when_the_run_does(tmp_path, gate):
    bench = Bench(tmp_path)
    bench.saver.save(1)
    bench.is_stopped = True
    with pytest.raises(ConfigError, match="stopped"):
        bench.saver.save(2)
    gate.set()
    bench.finish()


def test_an_error_ends_the_run_and_every_later_save(tmp_path, monkeypatch):
    bench = Bench(tmp_path)

    def broken(*_arguments: object, **_options: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module, "write_checkpoint", broken)
    bench.saver.save(1)
    bench.saver.save(2)
    bench.finish()
    assert len(bench.errors) == 1
    assert bench.errors == [bench.saver.error]
    assert "saving failed in the writer:\nTraceback" in bench.saver.error
    assert "Input/output error" in bench.saver.error


@pytest.mark.parametrize("number", [28, 122, 27])
def test_a_disk_that_fills_up_in_a_save_is_said_with_numbers_and_without_a_traceback(tmp_path, monkeypatch, number):
    bench, whole, reason = Bench(tmp_path), checkpoint.write_text, os.strerror(number)

    def full(path: Path, text: str) -> object:
        if path.parent.name == ".step_00000002.partial":
            raise OSError(number, reason)
        return whole(path, text)

    monkeypatch.setattr(checkpoint, "write_text", full)
    bench.saver.save(1)
    bench.saver.save(2)
    bench.finish()
    (message,) = bench.errors
    needed = bench.saver.contents_at(2).num_bytes()
    assert message.startswith(
        f"saving failed: {tmp_path}: the checkpoint of step 2 could not be written: {reason}; it needs {needed:,} "
    )
    assert " are free there without it; " in message and "--resume auto" in message and "Traceback" not in message
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_disk_that_does_not_even_take_the_directory_is_said_alike(tmp_path, monkeypatch):
    bench, make = Bench(tmp_path / "checkpoints"), Path.mkdir

    def full(self: Path, *arguments: object, **options: object) -> None:
        if self.name == "checkpoints":
            raise OSError(28, "No space left on device")
        make(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", full)
    bench.saver.save(1)
    bench.finish()
    (message,) = bench.errors
    assert message.startswith(
        f"saving failed: {tmp_path}/checkpoints: the checkpoint of step 1 could not be written: No space left on device"
    )
    assert "Traceback" not in message


@pytest.mark.parametrize(("number", "is_full"), [(28, True), (5, False)])
def test_a_best_that_the_disk_does_not_take_is_said_alike(tmp_path, monkeypatch, number, is_full):
    bench = Bench(tmp_path)

    def broken(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, "record_best", broken)
    bench.saver.save(1)
    bench.saver.evaluated(1, 2.0, EASY)
    bench.finish()
    (message,) = bench.errors
    said = f"saving failed: {tmp_path}: best.json could not be written: No space left on device; "
    assert message.startswith(said) == is_full
    # What nobody can free space for comes with where it happened.
    assert ("Traceback" in message) != is_full


def test_a_full_disk_is_said_without_a_traceback(tmp_path, monkeypatch):
    bench = Bench(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=1000))
    bench.saver.save(7)
    bench.finish()
    (message,) = bench.errors
    assert message.startswith(f"saving failed: {tmp_path}: the checkpoint of step 7 needs 0.")
    assert "Traceback" not in message


def test_no_checkpoint_is_ahead_of_its_metrics(tmp_path):
    bench = Bench(tmp_path)
    bench.metrics_step = 2
    bench.saver.save(3)
    time.sleep(0.2)
    assert list_checkpoints(tmp_path) == []
    bench.metrics_step = 3
    bench.saver.save(4)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["3"]
    bench.saver.abandon()
    bench.finish()
    # Step 4 never got its line: it is given up, without an error and without a trace.
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
    assert bench.errors == []


def test_the_best_is_recorded_behind_the_saves_before_it(tmp_path, gate):
    bench = Bench(tmp_path, keep_last=1)
    bench.saver.save(1)
    bench.saver.evaluated(1, 2.0, EASY)
    gate.set()
    bench.saver.save(2)
    bench.saver.evaluated(2, 1.5, EASY)
    bench.saver.save(3)
    bench.finish()
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["1", "3"]
    assert read_best(tmp_path) == Best(1, 2.0, EASY)
    assert [line for line in bench.lines if "best" in line] == [
        "best checkpoint so far: step 1, acceptance length 2.00"
    ]


def test_a_best_measured_on_something_else_is_said_in_a_line(tmp_path):
    bench = Bench(tmp_path)
    for step, length, sets in (
        (1, 3.0, {"easy": [[1]]}),
        (2, 2.0, {"hard": [[1], [2]]}),
        (3, 1.5, {"hard": [[3], [4]]}),
    ):
        bench.saver.save(step)
        bench.saver.evaluated(step, length, Yardstick.of(sets, 16))
    bench.finish()
    assert bench.lines == [
        "best checkpoint so far: step 1, acceptance length 3.00",
        "the best checkpoint is chosen anew: step 1, acceptance length 3.00, was measured on easy (prompts: 1, new "
        "tokens: 16), now it is hard (prompts: 2, new tokens: 16)",
        "best checkpoint so far: step 2, acceptance length 2.00",
        "the best checkpoint is chosen anew: step 2, acceptance length 2.00, was measured on hard (prompts: 2, new "
        "tokens: 16), now it is other prompts of these names",
        "best checkpoint so far: step 3, acceptance length 1.50",
    ]


def test_weights_that_are_their_own_masters_are_copied_once(tmp_path):
    drafter = tiny_drafter(tiny_target("llama"), 4, 1)
    optimizer = MasterOptimizer(drafter, OptimConfig())
    contents = contents_of(1, drafter, optimizer, RunConfig())
    snapshot = Snapshot(contents)
    assert sum(room.numel() for room in snapshot.room.values()) == 1 + sum(
        tensor.numel() for tensor in contents.moments.values()
    )
    copy = snapshot.take(contents)
    assert copy.weights["fc.weight"].data_ptr() == copy.moments["master.fc.weight"].data_ptr()
    assert copy.weights["fc.weight"].data_ptr() != drafter.fc.weight.data_ptr()
    assert torch.equal(copy.weights["fc.weight"], drafter.fc.weight)


def test_page_locked_room_is_whole_apart_and_aligned(monkeypatch):
    taken, empty = [], torch.empty

    def cpu_only(size, *, dtype, pin_memory=False):
        if size:
            taken.append((size, pin_memory))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(module.torch, "empty", cpu_only)
    monkeypatch.setattr(module, "BLOCK_BYTES", 1024)
    # Sizes that end off every boundary, one larger than a block, and nothing at all.
    likes = [torch.zeros(3, 5, dtype=torch.bfloat16), torch.zeros(7), torch.zeros(0), torch.zeros(2, 400)]
    likes += [torch.zeros((), dtype=torch.float64), torch.zeros(255, dtype=torch.bfloat16), torch.zeros(90)]
    found = module._room(likes, is_pinned=True)
    for number, room in enumerate(found):
        room.fill_(number + 1)
    for number, (room, like) in enumerate(zip(found, likes, strict=True)):
        assert (room.shape, room.dtype) == (like.shape, like.dtype)
        assert room.storage_offset() * room.element_size() % module.ALIGN_BYTES == 0
        assert (room == number + 1).all()
    assert taken == [(1024, True), (3200, True), (1024, True), (1024, True)]


def test_two_devices_may_use_one_address():
    here, there = (torch.empty(0, device=device) for device in ("cpu", "meta"))
    assert here.data_ptr() == there.data_ptr()
    assert module._place(here) != module._place(there)


def test_waiting_for_the_writer_ends_with_its_time_and_beats_meanwhile(tmp_path, gate):
    bench, beats = Bench(tmp_path), []
    bench.saver.save(1)
    bench.saver.finish(lambda: beats.append(bench.saver.is_alive()), seconds=0.15)
    assert beats
    assert bench.saver.is_alive()
    gate.set()
    bench.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_gpus_copy_comes_behind_the_step_and_the_next_update_behind_the_copy(tmp_path, monkeypatch):
    # The order in which a GPU hears of it: the side stream, its event, and who waits for what.
    log: list[str] = []

    class Side:
        def wait_stream(self, stream: str) -> None:
            log.append(f"side waits for {stream}")

    class Copied:
        def record(self, _stream: Side) -> None:
            log.append("copied")

        def wait(self, stream: str) -> None:
            log.append(f"{stream} waits for the copy")

        def synchronize(self) -> None:
            log.append("the writer waits for the copy")

    bench = Bench(tmp_path)
    snapshot = bench.saver._snapshot
    assert snapshot is not None
    device, other = bench.drafter.device, torch.device("cuda", 1)
    # The other GPU has another drafter's share of the state.
    for place in (device, other):
        snapshot.sides[place] = module.Side(Side(), Copied())  # type: ignore[arg-type]
    whole = Snapshot._copy
    monkeypatch.setattr(Snapshot, "_copy", lambda self, contents: (log.append("copies"), whole(self, contents))[1])
    monkeypatch.setattr(module.torch.cuda, "current_stream", lambda _device: "the step")
    monkeypatch.setattr(module.torch.cuda, "stream", lambda _stream: contextlib.nullcontext())
    bench.saver.save(1)
    bench.saver.before_update(torch.device("meta"))
    for place in (device, other):
        bench.saver.before_update(place)
        bench.saver.before_update(place)
    bench.finish()
    assert [line for line in log if "writer" not in line] == [
        "side waits for the step",
        "side waits for the step",
        "copies",
        "copied",
        "copied",
        "the step waits for the copy",
        "the step waits for the copy",
    ]
    assert log.count("the writer waits for the copy") == 2
    verify(list_checkpoints(tmp_path)[0])
