"""Where a run's numbers go: metrics.jsonl always, tensorboard, wandb or trackio on request."""

import importlib
import json
import math
import os
import threading
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Final, Protocol

from blockdraft.config import ConfigError

METRICS: Final = "metrics.jsonl"


class Tracker(Protocol):
    """A sink of metrics."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Takes the values of one step."""
        ...

    def close(self) -> None:
        """Flushes what is left."""
        ...


class MetricsFile:
    """metrics.jsonl: one object a line, flushed as it is written; a resumed run drops the lines it will write again.

    They go with the first line: a run that ends before it leaves the file as it is.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._kept = [line for line in _read_lines(path) if line["step"] <= first_step]
        self.is_evaluated = _has_evaluation(self._kept, first_step)
        """Whether the evaluation after `first_step` is there: a run can end between a save and its evaluation."""
        self._moved, self._last_step = threading.Condition(), first_step

    def write(self, values: dict[str, Any]) -> None:
        """Appends one line; JSON has no number for what is not finite, so that is null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        with self._moved:
            if self._file is None:
                self._file = self._begin()
            line = memoryview((json.dumps(finite) + "\n").encode())
            while line:
                line = line[self._file.write(line) :]
            self._last_step = max(self._last_step, int(values["step"]))
            self._moved.notify_all()

    def _begin(self) -> FileIO:
        # Renamed over the old file, so that a crash here loses nothing.
        side = self._path.with_name(self._path.name + ".writing")
        side.write_text("".join(json.dumps(line) + "\n" for line in self._kept), encoding="utf-8")
        side.replace(self._path)
        # Unbuffered: after a write that failed there is nothing left that closing would try to write again.
        return self._path.open("ab", buffering=0)

    def await_step(self, step: int, is_over: Callable[[], bool]) -> bool:
        """Whether the line of this step is on disk; waits for it unless no more lines come. From another thread."""
        with self._moved:
            while self._last_step < step:
                if is_over():
                    return False
                self._moved.wait(0.05)
            if self._file is not None:
                os.fsync(self._file.fileno())
        return True

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def is_evaluated(path: Path, step: int) -> bool:
    """Whether the evaluation after `step` is in a metrics.jsonl, which is left as it is."""
    return _has_evaluation(_read_lines(path), step)


def _has_evaluation(lines: list[dict[str, Any]], step: int) -> bool:
    return any(line["step"] == step and "eval_seconds" in line for line in lines)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    lines = (_read(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line is not None]


def _read(line: str) -> dict[str, Any] | None:
    try:
        values: dict[str, Any] = json.loads(line)
        return values if isinstance(values["step"], int) else None
    except (json.JSONDecodeError, KeyError, TypeError):
        # The half line of a killed run.
        return None


class _Tensorboard:
    def __init__(self, run_dir: Path) -> None:
        self._writer = _import("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """wandb, and trackio, which has the same calls."""

    def __init__(self, module: str, run_dir: Path, config: dict[str, Any]) -> None:
        self._module = _import(module, module)
        self._module.init(project="blockdraft", name=run_dir.name, config=config)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._module.log(values, step=step)

    def close(self) -> None:
        self._module.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Refuses trackers whose packages are not installed.

    Raises:
        ConfigError: with what to install.
    """
    for name in names:
        _import("torch.utils.tensorboard" if name == "tensorboard" else name, name)


def open_trackers(names: Sequence[str], run_dir: Path, config: dict[str, Any]) -> list[Tracker]:
    """The trackers of a run.

    Raises:
        ConfigError: a tracker's package is not installed.
    """
    return [_Tensorboard(run_dir) if name == "tensorboard" else _Wandb(name, run_dir, config) for name in names]


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"--trackers {extra} needs its package: pip install 'blockdraft[{extra}]'") from error
