"""Runs that end in the middle: killed, stopped, out of disk, damaged; what follows is what would have been."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blockdraft.commands import boundary, train
from blockdraft.commands.run_directory import check_directory
from blockdraft.commands.tracking import MetricsFile
from blockdraft.config import ConfigError
from blockdraft.data.conversations import write_conversations
from blockdraft.data.position import position_at
from blockdraft.runtime import saver
from blockdraft.runtime.workers import WorkerError
from blockdraft.training.checkpoint import list_checkpoints, read_state, verify
from integration.test_drafters import assert_close_run
from integration.test_resume import forget_after
from integration.tiny_run import Files, assert_same_run, make_files, metrics, run_control, tiny_config, worker_threads
from tiny_chat import chat

pytestmark = pytest.mark.alone

SOURCE = str(Path(train.__file__).parents[2])
TWO = ("cpu", "cpu")
TOPOLOGIES = {
    "pool": {"topology": "pool", "targets": TWO},
    "pairs": {"topology": "pairs", "targets": TWO, "drafters": TWO},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def evaluation(tmp_path_factory) -> dict[str, object]:
    path = tmp_path_factory.mktemp("prompts") / "pairs.jsonl"
    write_conversations(path, [chat("Say ab."), chat("Count.")])
    return {"prompts": (str(path),), "every": 5, "max_new_tokens": 12}


@pytest.mark.parametrize("runtime", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_five_and_five_equal_ten_with_evaluation(files, tmp_path, evaluation, runtime):
    changes = {"optim": {"accumulation": 2}, "runtime": runtime, "eval": evaluation}
    config = tiny_config(files, tmp_path / "whole", **changes)
    whole = run_control(config)
    checkpoint = forget_after(whole.run_dir, tmp_path / "parts", 5)
    resumed = run_control(dataclasses.replace(config, run_dir=str(tmp_path / "parts")), resume=checkpoint)
    # Parameters, masters, moments; losses, learning rates, tokens, acceptance.
    assert_same_run(resumed.run_dir, whole.run_dir)
    states = [read_state(list_checkpoints(run.run_dir / "checkpoints")[-1]) for run in (whole, resumed)]
    for state in states:
        state.pop("files")
    assert states[0] == states[1]
    assert states[0]["position"] == position_at(whole.control.built.loader.config, 10)
    for before, after in zip(whole.control.built.steps, resumed.control.built.steps, strict=True):
        assert float(before.optimizer.skipped) == float(after.optimizer.skipped) == 0
        kept = after.optimizer.state_tensors()
        assert all(torch.equal(value, kept[name]) for name, value in before.optimizer.state_tensors().items())


def test_pairs_go_on_as_a_pool_and_two_drafters_as_one(files, tmp_path):
    changes = {"optim": {"accumulation": 2}}
    config = tiny_config(files, tmp_path / "whole", runtime=TOPOLOGIES["pairs"], **changes)
    whole = run_control(config).run_dir
    for name, runtime in (("pool", {"targets": ("cpu",), "drafters": TWO}), ("one", {"targets": ("cpu",)})):
        checkpoint = forget_after(whole, tmp_path / name, 5)
        now = tiny_config(files, tmp_path / name, runtime=runtime, **changes)
        resumed = run_control(now, resume=checkpoint).run_dir
        assert [line["tokens"] for line in metrics(resumed)] == [line["tokens"] for line in metrics(whole)]
        if name == "pool":
            assert_same_run(resumed, whole)
        else:
            assert_close_run(resumed, whole, 1e-6)


def test_an_evaluation_that_a_kill_prevented_is_made_up_for(files, tmp_path, evaluation):
    config = tiny_config(files, tmp_path / "whole", eval=evaluation)
    whole = run_control(config).run_dir
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    for step in (5, 10):
        # Saved, and then killed before the evaluation after the same step.
        checkpoint = forget_after(whole, tmp_path / str(step), step)
        kept = [line for line in lines if json.loads(line)["step"] < step or '"loss"' in line]
        kept = [line for line in kept if json.loads(line)["step"] <= step]
        (tmp_path / str(step) / "metrics.jsonl").write_text("".join(kept))
        run_control(dataclasses.replace(config, run_dir=str(tmp_path / str(step))), resume=checkpoint)
        assert metrics(tmp_path / str(step)) == metrics(whole)


def test_auto_takes_the_one_before_a_damaged_checkpoint_and_says_so(files, tmp_path, capsys):
    config = tiny_config(files, tmp_path / "whole")
    whole = run_control(config).run_dir
    newest = list_checkpoints(whole / "checkpoints")[-1]
    flip(newest / "optimizer.safetensors")
    config = dataclasses.replace(config, run_dir=str(whole))
    with pytest.raises(ConfigError, match=r"optimizer\.safetensors: expected sha256 \w+, found \w+; the file"):
        train.run(config, train.Options(resume=str(newest)))
    shutil.copytree(whole, tmp_path / "parts")
    parts = dataclasses.replace(config, run_dir=str(tmp_path / "parts"))
    assert train.run(parts, train.Options(resume="auto")) == 0
    said = capsys.readouterr().out
    assert "warning: damaged checkpoint" in said
    assert "damaged_step_00000010 now, and the checkpoint before it is taken" in said
    assert "checkpoints/step_00000005: 5 steps done" in said
    # Nothing is overwritten: the damaged one is there for whoever wants to look at it.
    damaged = tmp_path / "parts/checkpoints/damaged_step_00000010"
    assert (damaged / "optimizer.safetensors").read_bytes() == (newest / "optimizer.safetensors").read_bytes()
    verify(list_checkpoints(tmp_path / "parts/checkpoints")[-1])
    assert metrics(tmp_path / "parts") == metrics(whole)


def test_other_versions_and_nothing_but_damage_are_refused(files, tmp_path):
    config = tiny_config(files, tmp_path, steps=4, save_every=2)
    run_control(config)
    first, last = list_checkpoints(tmp_path / "checkpoints")
    whole = (last / "state.json").read_text()
    assert '"format": 2' in whole
    (last / "state.json").write_text(whole.replace('"format": 2', '"format": 3'))
    auto = train.Options(resume="auto")
    with pytest.raises(ConfigError, match="expected checkpoint format 2, found 3, written by blockdraft"):
        train.run(config, auto)
    (last / "state.json").unlink()
    (first / "drafter.safetensors").unlink()
    with pytest.raises(ConfigError, match="expected a whole checkpoint, found 2 damaged; start over with --overwrite"):
        train.run(config, auto)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_disk_that_fills_up_in_a_save_ends_the_run_and_keeps_the_last_checkpoint(files, tmp_path, capsys):
    config = tiny_config(files, tmp_path / "run", steps=10, save_every=5)
    whole = run_control(dataclasses.replace(config, run_dir=str(tmp_path / "whole"))).run_dir
    size = (list_checkpoints(whole / "checkpoints")[-1] / "optimizer.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))

    def delay(worker: str, number: int) -> None:
        # From step 8 on the kernel refuses to write files as large as the optimizer's.
        if worker == "drafter 0" and number == 7:
            limit(size - 1000)

    try:
        with pytest.raises(
            WorkerError, match=r"the checkpoint of step 10 could not be written: File too large"
        ) as full:
            run_control(config, delay=delay)
    finally:
        limit(before[0])
    assert "Traceback" not in str(full.value)
    assert worker_threads() == []
    root = tmp_path / "run/checkpoints"
    assert [path.name for path in root.iterdir()] == ["step_00000005"]
    verify(root / "step_00000005")
    assert train.run(config, train.Options(resume="auto")) == 0
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize(("number", "is_full"), [(28, True), (5, False)])
def test_metrics_that_cannot_be_written_end_the_run_with_a_message(
    files, tmp_path, monkeypatch, capsys, number, is_full
):
    whole, lines = MetricsFile.write, []

    def write(self, values):
        lines.append(values)
        if len(lines) == 8:
            raise OSError(number, os.strerror(number))
        whole(self, values)

    monkeypatch.setattr(MetricsFile, "write", write)
    assert train.run(tiny_config(files, tmp_path, steps=400), train.Options()) == 1
    said = capsys.readouterr().err
    reason = f"[Errno {number}] {os.strerror(number)}"
    assert f"error: control could not write to {tmp_path}: {reason}; free space there" in said
    assert ("Traceback" in said) != is_full
    assert worker_threads() == []
    # A checkpoint of a later step, without its metrics, is given up.
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000005"]
    assert f"the last complete checkpoint is {tmp_path}/checkpoints/step_00000005" in said


def test_a_disk_without_room_is_said_before_the_run(files, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage._replace(free=10_000))
    with pytest.raises(ConfigError, match=r"a run that keeps 2 checkpoints at a time needs 0\.\d+ GiB, 0\.000 GiB"):
        train.run(tiny_config(files, tmp_path / "run"), train.Options())
    assert not (tmp_path / "run").exists()


def test_a_run_directory_that_cannot_be_written_is_refused(files, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(
        ConfigError, match=r"expected a directory that can be written, found .*file, which is no directory"
    ):
        train.run(tiny_config(files, tmp_path / "file" / "run"), train.Options())


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A directory of somebody else's; root may write everywhere, so it becomes nobody for this test."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o555)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    yield directory
    if was_root:
        os.seteuid(0)
    directory.chmod(0o755)
    shutil.rmtree(directory)


def test_a_read_only_run_directory_is_refused(nobody):
    with pytest.raises(ConfigError, match="expected a directory that can be written"):
        check_directory(nobody / "run", tiny_config(Files(nobody, nobody), nobody), None, 1)  # type: ignore[arg-type]


def start(arguments: list[str], **options: object) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "blockdraft.cli", "train", "tiny", *arguments],
        env=os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,  # type: ignore[call-overload]
    )


def test_a_stop_in_the_first_second_ends_with_0(files, tmp_path):
    process = start(["--run-dir", str(tmp_path / "run"), "--target.path", str(files.target), "--data.train", "x"])
    handlers = Path(f"/proc/{process.pid}/status")
    deadline = time.monotonic() + 60
    # As soon as the signal is caught; imports go on for seconds behind that.
    while not caught(handlers, signal.SIGTERM):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 0, text
    assert "stopped before the first step: nothing was trained, nothing to save" in text
    assert not (tmp_path / "run").exists()


def caught(status: Path, number: int) -> bool:
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


class Signals:
    """Sends a signal to this process at a chosen moment of a run; the handler runs in this, the main thread."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.number, self.sent = number, False

    def send(self) -> None:
        if not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)


def test_a_stop_in_warm_up_ends_with_0_and_no_threads(files, tmp_path, monkeypatch, capsys):
    signals, whole = Signals(), saver.Snapshot

    def snapshot(contents):
        signals.send()
        time.sleep(0.3)
        return whole(contents)

    monkeypatch.setattr(saver, "Snapshot", snapshot)
    from blockdraft import cli

    flags = ["--run-dir", str(tmp_path), "--target.path", str(files.target), "--data.train", str(files.store)]
    assert cli.main(["train", "tiny", *flags, "--steps", "50"]) == 0
    assert "stopped before the first step: nothing was trained" in capsys.readouterr().out
    assert list_checkpoints(tmp_path / "checkpoints") == []
    assert worker_threads() == []


def test_a_stop_does_not_wait_for_a_worker_that_nothing_can_interrupt(files, tmp_path, monkeypatch, capsys):
    signals = Signals()

    def compile_for_long(*_arguments, **_options):
        signals.send()
        time.sleep(3.0)

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr("blockdraft.runtime.pipeline.warm_up_target", compile_for_long)
    monkeypatch.setattr("blockdraft.commands.train.os._exit", leave)
    with pytest.raises(SystemExit) as caught:
        train.run(tiny_config(files, tmp_path), train.Options())
    assert caught.value.code == 0
    assert "stopped before the first step" in capsys.readouterr().out
    time.sleep(3.0)
    assert worker_threads() == []


@pytest.mark.parametrize("moment", ["save", "evaluation"])
def test_a_stop_during_a_save_or_an_evaluation_finishes_step_and_save(
    files, tmp_path, evaluation, monkeypatch, capsys, moment
):
    signals = Signals(signal.SIGINT)
    holder, name = (saver, "write_checkpoint") if moment == "save" else (boundary, "replay")
    whole = getattr(holder, name)

    def slow(*arguments, **options):
        signals.send()
        time.sleep(0.3)
        return whole(*arguments, **options)

    monkeypatch.setattr(holder, name, slow)
    config = tiny_config(files, tmp_path, steps=40, save_every=5, eval=evaluation)
    assert train.run(config, train.Options()) == 0
    text = capsys.readouterr().out
    (line,) = (line for line in text.splitlines() if "stopped after step" in line)
    assert f"go on with: blockdraft train {tmp_path}/config.json --resume auto" in line
    newest = list_checkpoints(tmp_path / "checkpoints")[-1]
    verify(newest)
    steps = [entry["step"] for entry in metrics(tmp_path) if "loss" in entry]
    assert steps == list(range(1, int(newest.name[-8:]) + 1))
    assert steps[-1] < 40
    assert worker_threads() == []


def test_a_second_ctrl_c_leaves_at_once(files, tmp_path, monkeypatch):
    def never(*_arguments, **_options):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(2.0)

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(saver, "write_checkpoint", never)
    # The interpreter would abort: the writer may be inside torch.
    monkeypatch.setattr("blockdraft.commands.train.os._exit", leave)
    started = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        train.run(tiny_config(files, tmp_path, steps=400, save_every=5), train.Options())
    assert caught.value.code == 130
    assert time.monotonic() - started < 10
    assert list_checkpoints(tmp_path / "checkpoints") == []
    time.sleep(2.0)


def test_killed_runs_go_on_and_end_alike(tmp_path):
    driver = Path(__file__).with_name("kill_runs.py")
    done = subprocess.run(
        [sys.executable, str(driver), str(tmp_path), "6"],
        env=os.environ | {"PYTHONPATH": f"{driver.parents[1]}:{SOURCE}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["killed"] >= 3, done.stdout
