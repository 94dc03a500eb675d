"""Whoever fails, the run ends soon, says who and why, and leaves no thread behind."""

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from blockdraft import cli
from blockdraft.commands import boundary, train
from blockdraft.commands.control import Control
from blockdraft.config import ConfigError
from blockdraft.data.conversations import write_conversations
from blockdraft.data.loader import Loader
from blockdraft.data.template import Encoded
from blockdraft.models.target import Target
from blockdraft.runtime import pipeline
from blockdraft.runtime.workers import Stalled, WorkerError
from blockdraft.training import checkpoint
from blockdraft.training.checkpoint import list_checkpoints
from integration.tiny_run import Files, assert_same_run, make_files, run_control, tiny_config, worker_threads
from tiny_chat import chat

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("failures"))


class Broken(RuntimeError):
    """Raised on purpose."""


def raise_in(who: str, number: int):
    """A delay that fails before the given number of one worker."""

    def break_now(worker: str, at: int) -> None:
        if worker == who and at == number:
            raise Broken(f"{who} breaks here")

    return break_now


@pytest.mark.parametrize("reuse", [1, 3])
@pytest.mark.parametrize("who", ["loader", "target 0", "target 1", "drafter 0"])
def test_a_dead_worker_ends_the_run_with_its_traceback(files, tmp_path, who, reuse):
    runtime = {"targets": ("cpu", "cpu"), "channel_depth": 1, "reuse": reuse}
    config = tiny_config(files, tmp_path, steps=400, save_every=1, runtime=runtime)

    def delay(worker: str, number: int) -> None:
        # Which target gets a number is a matter of timing: it fails at its first behind number 3.
        if worker == who and number >= 3:
            raise Broken(f"{who} breaks here")

    started = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        run_control(config, delay=delay)
    assert time.monotonic() - started < 10
    assert worker_threads() == []
    message = str(caught.value)
    assert message.startswith(f"{who} on cpu died in step ")
    assert f"Broken: {who} breaks here" in message
    assert "Traceback (most recent call last)" in message
    assert "test_failures.py" in message


def test_the_message_names_the_step(files, tmp_path):
    with pytest.raises(WorkerError, match=r"target 0 on cpu died in step 5:"):
        run_control(tiny_config(files, tmp_path), delay=raise_in("target 0", 4))
    with pytest.raises(WorkerError, match=r"drafter 0 on cpu died in step 5:"):
        run_control(tiny_config(files, tmp_path), delay=raise_in("drafter 0", 4))


def test_only_the_first_error_counts(files, tmp_path):
    def both(worker: str, number: int) -> None:
        if worker == "target 0" and number == 2:
            raise Broken("first")
        if worker == "drafter 0" and number == 2:
            time.sleep(0.5)
            raise Broken("second")

    with pytest.raises(WorkerError, match="first"):
        run_control(tiny_config(files, tmp_path), delay=both)


def test_an_error_of_the_writer_ends_the_run_with_its_traceback(files, tmp_path, monkeypatch):
    def broken(*_arguments: object, **_options: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("blockdraft.runtime.saver.write_checkpoint", broken)
    with pytest.raises(WorkerError, match=r"saving failed in the writer:\nTraceback[\s\S]*Input/output error"):
        run_control(tiny_config(files, tmp_path))
    assert worker_threads() == []


def test_a_disk_that_fills_up_in_a_save_ends_train_with_a_line_and_the_last_checkpoint(
    files, tmp_path, monkeypatch, capsys
):
    whole = checkpoint.write_text

    def full(path: Path, text: str) -> object:
        if path.parent.name == ".step_00000004.partial":
            raise OSError(28, "No space left on device")
        return whole(path, text)

    monkeypatch.setattr(checkpoint, "write_text", full)
    assert train.run(tiny_config(files, tmp_path, steps=8, save_every=2), train.Options()) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    error, last = said[said.index("error: ") :].splitlines()
    assert "the checkpoint of step 4 could not be written: No space left on device; it needs " in error
    assert last.startswith(f"the last complete checkpoint is {tmp_path}/checkpoints/step_00000002; go on with --resume")
    assert worker_threads() == []


def test_an_error_of_control_itself_ends_every_thread(files, tmp_path):
    def fail(_control: Control, line: str) -> None:
        if line.startswith("step 3/"):
            raise Broken("the console is gone")

    with pytest.raises(Broken, match="the console is gone"):
        run_control(tiny_config(files, tmp_path, steps=400), say=fail)
    assert worker_threads() == []


@pytest.mark.parametrize("who", ["target", "drafter"])
def test_an_error_during_warm_up(files, tmp_path, monkeypatch, who):
    def fail(*_arguments: object, **_options: object) -> None:
        raise Broken("no memory left")

    monkeypatch.setattr(pipeline, f"warm_up_{who}", fail)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=rf"{who} 0 on cpu died before its first step:[\s\S]*Broken: no memory left"):
        run_control(tiny_config(files, tmp_path))
    assert time.monotonic() - started < 10
    assert worker_threads() == []


def test_nobody_warms_up_in_a_run_that_is_ending(files, tmp_path, monkeypatch):
    def warm_up(name: str, *_arguments: object, **_options: object) -> None:
        if name == "target 0":
            time.sleep(0.3)
            raise Broken("no memory left")
        time.sleep(3)

    monkeypatch.setattr(pipeline, "warm_up_target", warm_up)
    runtime = {"targets": ("cpu",) * 4, "topology": "pool"}
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"target 0 on cpu died before its first step"):
        run_control(tiny_config(files, tmp_path, runtime=runtime))
    # Whoever has its turn before target 0 is the one that takes its time.
    assert time.monotonic() - started < 6
    assert worker_threads() == []


def test_a_thread_that_cannot_be_started_ends_those_that_were(files, tmp_path, monkeypatch):
    start = threading.Thread.start

    def refuse(self: threading.Thread) -> None:
        if self.name == "drafter 0":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_control(tiny_config(files, tmp_path))
    assert worker_threads() == []


def test_an_evaluation_ends_with_the_run(files, tmp_path, monkeypatch):
    write_conversations(tmp_path / "prompts.jsonl", [chat("Say ab.")])

    def replay(*_arguments: object, progress: Callable[[int], None]) -> None:
        for _ in range(400):
            time.sleep(0.05)
            progress(1)

    def delay(worker: str, number: int) -> None:
        if worker == "target 0" and number == 2:
            time.sleep(0.5)
            raise Broken("gone")

    monkeypatch.setattr(boundary, "replay", replay)
    evaluation = {"prompts": (str(tmp_path / "prompts.jsonl"),), "max_new_tokens": 8}
    config = tiny_config(files, tmp_path, eval=evaluation, runtime={"channel_depth": 3})
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"^target 0 on cpu died in step 3:") as caught:
        run_control(config, delay=delay)
    assert "still running" not in str(caught.value)
    assert time.monotonic() - started < 10
    assert worker_threads() == []


def test_the_exit_code_survives_a_thread_that_does_not_end(files, tmp_path, monkeypatch, capfd):
    def leave(code: int) -> None:
        raise SystemExit(code)

    def fill(*_arguments: object) -> None:
        time.sleep(3)

    monkeypatch.setattr("blockdraft.commands.train.os._exit", leave)
    monkeypatch.setattr("blockdraft.runtime.workers.Crew.wait", lambda *_arguments: ["target 0"])
    monkeypatch.setattr(pipeline.Filler, "fill", fill)
    monkeypatch.setattr(pipeline, "warm_up_target", lambda *_arguments: None)
    with pytest.raises(SystemExit) as caught:
        train.run(tiny_config(files, tmp_path, runtime={"stall_seconds": 1.0}), train.Options())
    assert caught.value.code == 1
    assert "error: nothing moved for 1 s" in capfd.readouterr().err
    time.sleep(3)
    assert worker_threads() == []


def test_a_fault_inside_the_loaders_iterator(files, tmp_path, monkeypatch):
    def fail(*_arguments: object) -> None:
        raise Broken("bad row")

    monkeypatch.setattr(Loader, "_materialise", fail)
    with pytest.raises(WorkerError, match=r"loader on cpu died before its first step:[\s\S]*bad row"):
        run_control(tiny_config(files, tmp_path))


def test_the_command_exits_with_one_and_names_the_last_checkpoint(files, tmp_path, monkeypatch, capsys):
    capture, calls = Target.capture, []

    def fail_later(self: Target, *arguments: object) -> None:
        calls.append(1)
        if len(calls) > 40:
            raise Broken("gone")
        capture(self, *arguments)

    monkeypatch.setattr(Target, "capture", fail_later)
    flags = ["--run-dir", str(tmp_path), "--target.path", str(files.target), "--data.train", str(files.store)]
    assert cli.main(["train", "tiny", *flags, "--steps", "1000", "--save-every", "1", "--eval.every", "1000"]) == 1
    said = capsys.readouterr().err
    assert "error: target 0 on cpu died in step " in said, said
    assert "Broken: gone" in said
    last = list_checkpoints(tmp_path / "checkpoints")[-1]
    assert f"the last complete checkpoint is {last}; go on with --resume auto" in said
    assert worker_threads() == []


def test_a_stall_prints_all_stacks_and_stops(files, tmp_path, capfd):
    release = time.monotonic() + 4

    def hang(worker: str, number: int) -> None:
        while worker == "target 0" and number == 2 and time.monotonic() < release:
            time.sleep(0.05)

    config = tiny_config(files, tmp_path, runtime={"stall_seconds": 1.0})
    with pytest.raises(Stalled, match=r"nothing moved for 1 s"):
        run_control(config, delay=hang)
    assert worker_threads() == []
    stacks = capfd.readouterr().err
    assert "in hang" in stacks


def test_a_step_with_gradients_that_are_not_finite_is_skipped(files, tmp_path, monkeypatch):
    loss, calls = pipeline.DrafterStep.micro_batch, []

    def poison_one(self, features_RTC, blocks, denominator):
        calls.append(1)
        # The first call is the warm-up, so this is step 3.
        loss(self, features_RTC * float("nan") if len(calls) == 4 else features_RTC, blocks, denominator)

    monkeypatch.setattr(pipeline.DrafterStep, "micro_batch", poison_one)
    ran = run_control(tiny_config(files, tmp_path, steps=6))
    optimizer = ran.control.built.steps[0].optimizer
    assert int(optimizer.skipped) == 1
    assert all(torch.isfinite(value).all() for value in optimizer.state_tensors().values())
    assert {int(value) for name, value in optimizer.state_tensors().items() if ".step." in name} == {5}


def test_a_document_longer_than_a_row_is_refused(tmp_path):
    files = make_files(tmp_path, documents=[Encoded(list(range(3, 103)), [1] * 100)])
    with pytest.raises(ConfigError, match=r"data\.row_length must be at least the longest document \(100 tokens\)"):
        train.run(tiny_config(files, tmp_path / "run"), train.Options())


def test_data_without_any_anchor_are_refused(tmp_path):
    files = make_files(tmp_path, documents=[Encoded([5, 6, 7, 8], [0, 1, 0, 1])] * 3)
    with pytest.raises(ConfigError, match="3 documents hold no two supervised tokens in a row"):
        train.run(tiny_config(files, tmp_path / "run"), train.Options())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runtime": {"channel_depth": 0}}, r"runtime\.channel_depth must be at least 1, got 0"),
        ({"runtime": {"reuse": 0}}, r"runtime\.reuse must be at least 1, got 0"),
        ({"runtime": {"topology": "pairs", "targets": ("cpu", "cpu")}}, "got 2 targets and 1 drafters"),
        ({"runtime": {"targets": ("cuda:7",)}}, r"runtime\.targets: cuda:7 is not here"),
        ({"runtime": {"drafters": ("gpu",)}}, r"runtime\.drafters: expected cpu or cuda:N, got 'gpu'"),
        ({"runtime": {"attention": "flex"}}, "has no backward on a CPU"),
        ({"loss": {"gamma": 0.0}}, r"loss\.gamma must be above 0"),
        ({"data": {"train": ""}}, r"data\.train is empty"),
        ({"data": {"target_tokens": 32}}, r"data\.target_tokens must be at least data\.row_length \(64\), got 32"),
        ({"drafter": {"target_layer_ids": (1, 9)}}, r"target_layer_ids must be rising layer numbers in 0\.\.5"),
        ({"drafter": {"mask_token_id": 300}}, r"mask_token_id must lie in the target's embedding \(0\.\.299\)"),
        ({"drafter": {"window": 2, "window_layers": (0,)}}, r"drafter\.window must be at least drafter\.block_size"),
    ],
)
def test_what_cannot_run_is_said_before_any_thread_starts(files, tmp_path, changes, message, capsys):
    with pytest.raises(ConfigError, match=message):
        train.run(tiny_config(files, tmp_path, **changes), train.Options())
    # Guards too are for what runs, and their lines would stand above the one that matters.
    assert "guard:" not in capsys.readouterr().out
    assert worker_threads() == []


def test_a_store_of_another_tokenizer_is_refused(files, tmp_path):
    other = make_files(tmp_path / "other")
    manifest = Path(other.store) / "manifest.json"
    text = manifest.read_text()
    assert '"tokenizer_hash": "' in text
    manifest.write_text(text.replace('"tokenizer_hash": "', '"tokenizer_hash": "f'))
    with pytest.raises(ConfigError, match="prepared with another tokenizer"):
        train.run(tiny_config(Files(files.target, other.store), tmp_path / "run"), train.Options())


def test_going_on_from_an_earlier_checkpoint_leaves_no_gap_when_it_dies(files, tmp_path):
    config = tiny_config(files, tmp_path / "whole")
    whole = run_control(config).run_dir
    shutil.copytree(whole, tmp_path / "parts")
    first, last = list_checkpoints(tmp_path / "parts/checkpoints")
    config = dataclasses.replace(config, run_dir=str(tmp_path / "parts"))
    lines: list[str] = []
    with pytest.raises(WorkerError, match="target 0 breaks here"):
        run_control(config, resume=first, delay=raise_in("target 0", 7), say=lambda _control, line: lines.append(line))
    assert "note: step_00000010 is of the run that is left here; the next save removes it" in lines
    # Step 10 is of the run that was left: its metrics are gone, so nobody may go on from there.
    assert list_checkpoints(tmp_path / "parts/checkpoints") == [first]
    assert train.run(config, train.Options(resume="auto")) == 0
    assert_same_run(tmp_path / "parts", whole)
    assert sorted(path.name for path in (tmp_path / "parts/checkpoints").glob("*step*")) == [first.name, last.name]
