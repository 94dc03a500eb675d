"""Where a run's numbers go: metrics.jsonl always, tensorboard, wandb or trackio on request."""

import importlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from blockdraft.config import ConfigError


class Tracker(Protocol):
    """A sink of metrics."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Takes the values of one step."""
        ...

    def close(self) -> None:
        """Flushes what is left."""
        ...


class MetricsFile:
    """metrics.jsonl: one object a line, flushed as it is written; a resumed run drops the lines it will write again."""

    def __init__(self, path: Path, first_step: int) -> None:
        kept = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.strip() and _is_before(line, first_step):
                    kept.append(line + "\n")
        # Renamed over the old file, so that a crash here loses nothing.
        side = path.with_name(path.name + ".writing")
        side.write_text("".join(kept), encoding="utf-8")
        side.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, values: dict[str, Any]) -> None:
        """Appends one line; JSON has no number for what is not finite, so that is null."""
        finite = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _is_before(line: str, first_step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= first_step
    except (json.JSONDecodeError, KeyError, TypeError):
        # The half line of a killed run.
        return False


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
