"""Two runs and one directory: the second is refused before it looks at it; one that stops early hides nothing."""

import dataclasses
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blockdraft.commands import control, train
from blockdraft.commands.run_directory import hold
from blockdraft.commands.stops import StopRequested
from blockdraft.config import ConfigError, RunConfig
from blockdraft.runtime import saver
from blockdraft.training.checkpoint import list_checkpoints, newest_checkpoint
from integration.test_resume import forget_after
from integration.tiny_run import Files, assert_same_run, make_files, run_control, tiny_config

pytestmark = pytest.mark.alone

BUSY = "another run is writing there; wait for its end, or choose another --run-dir"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return make_files(tmp_path_factory.mktemp("lock"))


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory) -> Path:
    """Ten steps, with checkpoints after 5 and 10."""
    return run_control(tiny_config(files, tmp_path_factory.mktemp("whole"))).run_dir


class Earlier:
    """A run in another thread, which waits at a chosen moment until `end`."""

    def __init__(self, config: RunConfig, options: train.Options, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._there, self._go = threading.Event(), threading.Event()
        self.codes: list[int] = []
        self._thread = threading.Thread(target=lambda: self.codes.append(train.run(config, options)))
        self.loads = 0
        """Of the other runs."""
        for name in ("build", "write_environment"):
            monkeypatch.setattr(control, name, self._waiting(getattr(control, name), is_here=name == moment))
        self._thread.start()
        assert self._there.wait(60)

    def _waiting(self, whole: Callable[..., object], *, is_here: bool) -> Callable[..., object]:
        def slow(*arguments: object, **options: object) -> object:
            if threading.current_thread() is self._thread:
                if is_here:
                    self._there.set()
                    assert self._go.wait(60)
            elif whole.__name__ == "build":
                # The earlier run ends while this one loads its target.
                self.loads += 1
                self.end()
            return whole(*arguments, **options)

        return slow

    def end(self) -> None:
        self._go.set()
        self._thread.join(60)
        assert self.codes == [0]


@pytest.mark.parametrize(
    ("first", "moment", "second"),
    [
        (train.Options(), "build", train.Options()),
        (train.Options(), "build", train.Options(overwrite=True)),
        (train.Options(), "write_environment", train.Options(resume="auto")),
        (train.Options(resume="auto"), "write_environment", train.Options(resume="auto")),
    ],
    ids=["two new ones, slow to load", "over one that loads", "requeued before a save", "requeued behind a save"],
)
def test_a_second_run_is_refused_before_it_looks_or_loads(files, whole, tmp_path, monkeypatch, first, moment, second):
    run_dir = tmp_path / "run"
    if first.resume:
        forget_after(whole, run_dir, 5)
    config = tiny_config(files, run_dir)
    earlier = Earlier(config, first, moment, monkeypatch)
    try:
        with pytest.raises(ConfigError, match=BUSY):
            train.run(dataclasses.replace(config, steps=5), second)
        assert earlier.loads == 0
    finally:
        earlier.end()
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step_00000005", "step_00000010"]
    assert_same_run(run_dir, whole)


def test_a_checkpoint_of_a_run_that_goes_on_is_not_set_aside(files, whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    # As when the other run is just removing it.
    (run_dir / "checkpoints/step_00000010/state.json").unlink()
    config = tiny_config(files, run_dir)
    with hold(run_dir), pytest.raises(ConfigError, match=BUSY):
        train.run(config, train.Options(resume="auto"))
    assert [path.name[-2:] for path in list_checkpoints(run_dir / "checkpoints")] == ["05", "10"]
    assert train.run(config, train.Options(resume="auto")) == 0
    assert (run_dir / "checkpoints/damaged_step_00000010").is_dir()


@pytest.mark.parametrize("error", [ConfigError("no"), KeyboardInterrupt(), SystemExit(3), StopRequested(), OSError()])
def test_a_run_that_ends_before_its_first_step_leaves_no_directory_and_no_lock(files, tmp_path, monkeypatch, error):
    def refuse(*_arguments: object, **_options: object) -> None:
        with pytest.raises(ConfigError, match=BUSY), hold(run_dir):
            raise AssertionError("nothing was held")
        raise error

    monkeypatch.setattr(control, "build", refuse)
    (tmp_path / "old").mkdir()
    for name, kept in (("new/deep/run", "new"), ("old", "old")):
        run_dir = tmp_path / name
        with pytest.raises(type(error)):
            train.run(tiny_config(files, run_dir), train.Options())
        assert (tmp_path / kept).exists() == (kept == "old")
    with hold(tmp_path / "old"):
        pass


def test_what_is_refused_without_a_target_leaves_no_directory(files, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for changes, resume in (({"trackers": ("wandb",)}, ""), ({}, str(tmp_path / "none")), ({"epochs": 0.001}, "auto")):
        config = tiny_config(files, tmp_path / "run", target={"path": str(tmp_path / "none")}, **changes)
        with pytest.raises(ConfigError):
            train.run(config, train.Options(resume=resume))
        assert not (tmp_path / "run").exists()


@pytest.fixture
def stopped_in_warm_up(monkeypatch) -> Callable[[RunConfig, train.Options], None]:
    """Starts a run and stops it when its worker is nearly warm."""
    snapshot = saver.Snapshot

    def stop(*arguments: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)
        return snapshot(*arguments)

    def start(config: RunConfig, options: train.Options) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(saver, "Snapshot", stop)
            with pytest.raises(StopRequested):
                train.run(config, options)

    return start


def test_a_run_stopped_in_warm_up_hides_no_later_checkpoint(files, whole, tmp_path, stopped_in_warm_up):
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    before = {name: (run_dir / name).read_bytes() for name in ("metrics.jsonl", "workers.jsonl")}
    config = tiny_config(files, run_dir)
    earlier = train.Options(resume=str(list_checkpoints(run_dir / "checkpoints")[0]))
    stopped_in_warm_up(config, earlier)
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step_00000005", "step_00000010"]
    assert {name: (run_dir / name).read_bytes() for name in before} == before
    # One that trains does leave them behind.
    assert train.run(dataclasses.replace(config, steps=7), earlier) == 0
    assert newest_checkpoint(run_dir).name == "step_00000007"
    assert not list((run_dir / "checkpoints").glob(".step*"))


def test_a_new_run_stopped_in_warm_up_starts_again_as_before(files, whole, tmp_path, stopped_in_warm_up):
    config = tiny_config(files, tmp_path / "run")
    stopped_in_warm_up(config, train.Options())
    assert train.run(config, train.Options()) == 0
    assert_same_run(tmp_path / "run", whole)
