"""Checkpoints: safetensors and JSON, written to the side, synced and renamed.

step_XXXXXXXX/ holds drafter.safetensors (weights as computed with), optimizer.safetensors (masters, moments),
config.json (the resolved run) and state.json: steps done, place in the data, versions, and a checksum of every file.
best.json (best.py) beside them names the one with the best held-out acceptance, kept besides the newest ones.
"""

import dataclasses
import hashlib
import json
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from os import O_RDONLY, close, fsync
from os import open as open_descriptor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from blockdraft.config import ConfigError, RunConfig, to_json
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.training.best import BEST, Best, read_best
from blockdraft.training.optim import MasterOptimizer, merged_state
from blockdraft.training.tensor_file import no_tick, sum_file, write_tensors, write_text

FORMAT = 2
STATE, CONFIG = "state.json", "config.json"
DRAFTER, OPTIMIZER = "drafter.safetensors", "optimizer.safetensors"
SPARE_BYTES = 2**20
"""Room for the small files of a checkpoint."""


class Damaged(ConfigError):
    """A checkpoint that is not what was written."""


class Contents(NamedTuple):
    """What one checkpoint holds; its tensors may lie on any device until it is written."""

    steps_done: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    """Masters too, under the optimizer's flat names."""
    skipped: Tensor
    """Steps skipped so far."""
    state: dict[str, Any]
    """The rest of state.json but checksums."""
    config: RunConfig

    def num_bytes(self) -> int:
        """What its files need."""
        tensors = (*self.weights.values(), *self.moments.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + SPARE_BYTES


def checkpoint_name(steps_done: int) -> str:
    """Directory of the checkpoint after so many optimizer steps."""
    return f"step_{steps_done:08d}"


def contents_of(
    steps_done: int,
    drafter: Drafter,
    optimizer: MasterOptimizer,
    config: RunConfig,
    *,
    others: Sequence[MasterOptimizer] = (),
    data: str = "",
    position: Mapping[str, int] | None = None,
    total_steps: int = 0,
) -> Contents:
    """A checkpoint of what these hold now; nothing is copied. `others`: who holds the rest of a divided state.

    `data`: fingerprint of the documents; `position`: place in the data and its random draws. Both are compared on
    resuming. `total_steps`: what the schedule was made for.
    """
    state = {
        "format": FORMAT,
        "steps_done": steps_done,
        "total_steps": total_steps,
        "data": data,
        "position": dict(position or {}),
        "optimizer": optimizer.config.optimizer,
        "shape": dataclasses.asdict(drafter.shape),
        "versions": versions(),
    }
    weights = {name: weight.detach() for name, weight in drafter.state_dict().items()}
    moments = merged_state([optimizer, *others])
    return Contents(steps_done, weights, moments, optimizer.skipped, state, config)


def versions() -> dict[str, str]:
    """Of what decides the numbers of a run."""
    try:
        own = metadata.version("blockdraft")
    except metadata.PackageNotFoundError:
        own = "source"
    return {
        "blockdraft": own,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
    }


def write_checkpoint(
    root: Path,
    contents: Contents,
    keep_last: int,
    *,
    tick: Callable[[], None] = no_tick,
    before_rename: Callable[[], None] = no_tick,
) -> Path:
    """Writes one checkpoint of host tensors and removes old ones; returns its directory.

    `tick` is called as data are written, `before_rename` when everything is on disk but the name.

    Checkpoints of later steps go too: they are of a run that this one left behind by resuming from an earlier step.

    Raises:
        ConfigError: not enough disk space; nothing was written.
    """
    root.mkdir(parents=True, exist_ok=True)
    final = root / checkpoint_name(contents.steps_done)
    remove_torn(root)
    check_space(root, contents.num_bytes(), f"the checkpoint of step {contents.steps_done}")
    side = root / f".{final.name}.partial"
    side.mkdir()
    try:
        _fill(side, contents, tick)
        before_rename()
    except BaseException:
        shutil.rmtree(side, ignore_errors=True)
        raise
    old = root / f".{final.name}.old"
    if final.exists():
        final.rename(old)
    side.rename(final)
    sync_directory(root)
    shutil.rmtree(old, ignore_errors=True)
    _remove_old(root, keep_last, newest=contents.steps_done)
    return final


def _fill(side: Path, contents: Contents, tick: Callable[[], None]) -> None:
    config = to_json(contents.config)
    files = {
        DRAFTER: write_tensors(side / DRAFTER, contents.weights, tick),
        OPTIMIZER: write_tensors(side / OPTIMIZER, contents.moments, tick),
        CONFIG: write_text(side / CONFIG, config),
    }
    state = contents.state | {
        "skipped_steps": int(contents.skipped),
        "files": {name: found._asdict() for name, found in files.items()},
    }
    write_text(side / STATE, json.dumps(state | {"sha256": _state_sum(state)}, indent=2) + "\n")
    sync_directory(side)


def _state_sum(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def sync_directory(path: Path) -> None:
    """Waits until a directory's entries are on disk."""
    descriptor = open_descriptor(path, O_RDONLY)
    try:
        fsync(descriptor)
    finally:
        close(descriptor)


def remove_torn(root: Path) -> None:
    """Removes what a killed run left half-written."""
    for kind in ("partial", "old"):
        for path in root.glob(f".step_????????.{kind}"):
            shutil.rmtree(path)


def leave_behind(root: Path, steps_done: int) -> list[str]:
    """Hides checkpoints of later steps: their run is left by going on from an earlier one; the next save removes them.

    The metrics of those steps go, and a kill before that save must not let anybody resume where there are none. Returns
    their names.
    """
    later = [path for path in list_checkpoints(root) if int(path.name.removeprefix("step_")) > steps_done]
    for path in later:
        old = root / f".{path.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    return [path.name for path in later]


def free_bytes(path: Path) -> int:
    """Of the file system that a path lies on, or would."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def check_space(path: Path, num_bytes: int, what: str) -> None:
    """Refuses to begin what does not fit.

    Raises:
        ConfigError: with what is needed, what is free and what to do.
    """
    free = free_bytes(path)
    if free < num_bytes:
        raise ConfigError(
            f"{path}: {what} needs {num_bytes / 2**30:.3f} GiB, {free / 2**30:.3f} GiB are free; free space there, "
            "lower --keep-last, or take another --run-dir. What is there stays as it is"
        )


def _remove_old(root: Path, keep_last: int, newest: int | None = None) -> None:
    found = list_checkpoints(root)
    best = read_best(root)
    if newest is not None and best is not None and best.steps_done > newest:
        (root / BEST).unlink()
        best = None
    own = len(found) if newest is None else found.index(root / checkpoint_name(newest)) + 1
    for other in (*found[: max(0, own - keep_last)], *found[own:]):
        if best is None or other.name != checkpoint_name(best.steps_done):
            # Somebody may tidy up by hand meanwhile: what is gone is gone.
            with suppress(FileNotFoundError):
                shutil.rmtree(other)


def record_best(root: Path, candidate: Best, keep_last: int) -> bool:
    """Makes a checkpoint the best if it is there and better, or the first that was measured on something else.

    The former best goes unless it is among the newest.
    """
    best = read_best(root)
    if not (root / checkpoint_name(candidate.steps_done)).is_dir():
        return False
    if not (best.is_beaten_by(candidate) if best is not None else candidate.acceptance_length > 0.0):
        return False
    side = root / f".{BEST}.partial"
    write_text(side, candidate.to_json(checkpoint_name(candidate.steps_done)))
    side.rename(root / BEST)
    sync_directory(root)
    _remove_old(root, keep_last)
    return True


def list_checkpoints(root: Path) -> list[Path]:
    """Checkpoints, oldest first; one may be damaged (`verify`)."""
    return sorted(path for path in root.glob("step_????????") if path.is_dir())


def newest_checkpoint(path: Path) -> Path:
    """`path` itself if it is a checkpoint, else the newest one of the run directory `path`.

    Raises:
        ConfigError: there is none.
    """
    if (path / STATE).is_file():
        return path
    found = list_checkpoints(path / "checkpoints")
    if not found:
        raise ConfigError(f"{path}: expected a checkpoint, or a run directory with checkpoints/step_XXXXXXXX in it")
    return found[-1]


def read_state(directory: Path) -> dict[str, Any]:
    """state.json of a checkpoint.

    Raises:
        Damaged: missing, or not what was written.
        ConfigError: another format version.
    """
    try:
        state = json.loads((directory / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Damaged(f"{directory}/{STATE}: expected the JSON of a checkpoint, found: {error}") from error
    if not isinstance(state, dict):
        raise Damaged(f"{directory}/{STATE}: expected an object, found {type(state).__name__}")
    expected = state.pop("sha256", None)
    if isinstance(state.get("format"), int) and state["format"] != FORMAT:
        # Before the checksum: what another version sums up is its own affair.
        writer = state.get("versions", {}).get("blockdraft", "an unknown version")
        raise ConfigError(
            f"{directory}: expected checkpoint format {FORMAT}, found {state['format']}, written by blockdraft "
            f"{writer}; go on with that version, or start a new run in another --run-dir"
        )
    if expected != _state_sum(state):
        raise Damaged(f"{directory}/{STATE}: expected checksum {expected}, found {_state_sum(state)}")
    return state


def verify(directory: Path) -> dict[str, Any]:
    """Reads every file of a checkpoint and compares it with its checksum; returns the state.

    Raises:
        Damaged: names the file.
        ConfigError: another format version.
    """
    state = read_state(directory)
    for name in state["files"]:
        verify_file(directory, state, name)
    return state


def verify_file(directory: Path, state: dict[str, Any], name: str) -> None:
    """Compares one file with its checksum.

    Raises:
        Damaged: it is missing or another.
    """
    path, expected = directory / name, state["files"][name]
    try:
        found = sum_file(path)._asdict()
    except OSError as error:
        raise Damaged(f"{path}: expected {expected['num_bytes']:,} bytes, found none: {error.strerror}") from error
    for what in ("num_bytes", "sha256"):
        if found[what] != expected[what]:
            raise Damaged(f"{path}: expected {what} {expected[what]}, found {found[what]}; the file is damaged")


def load_drafter(path: Path) -> Drafter:
    """The drafter of a checkpoint or of a run's newest one, from its float32 masters, on the CPU.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    directory = newest_checkpoint(path)
    state = read_state(directory)
    verify_file(directory, state, OPTIMIZER)
    values = state["shape"]
    for key in ("target_layer_ids", "window_layers"):
        values[key] = tuple(values[key])
    drafter = Drafter(DrafterShape(**values)).float()
    tensors = load_file(directory / OPTIMIZER)
    masters = {name.removeprefix("master."): value for name, value in tensors.items() if name.startswith("master.")}
    drafter.load_state_dict(masters)
    return drafter


def check_shape(directory: Path, shape: DrafterShape) -> None:
    """Refuses a checkpoint whose drafter has another shape.

    Raises:
        ConfigError: names the first number that differs.
    """
    found = json.loads(json.dumps(dataclasses.asdict(shape)))
    for name, value in read_state(directory)["shape"].items():
        if found[name] != value:
            raise ConfigError(f"{directory}: its drafter has {name} {value}, this run's has {found[name]}")


def resume_into(directory: Path, drafter: Drafter, optimizer: MasterOptimizer) -> int:
    """Restores weights, masters and moments in place; returns the steps done. `verify` comes before.

    Raises:
        ConfigError: the checkpoint's drafter has another shape.
    """
    state = read_state(directory)
    check_shape(directory, drafter.shape)
    found, expected = state["optimizer"], optimizer.config.optimizer
    if found != expected:
        raise ConfigError(
            f"{directory}: expected moments of optim.optimizer {expected}, found those of {found}; resume with "
            f"--optim.optimizer {found}, or start a new run"
        )
    optimizer.load_state_tensors(load_file(directory / OPTIMIZER))
    drafter.load_state_dict(load_file(directory / DRAFTER))
    with torch.no_grad():
        optimizer.skipped.fill_(state["skipped_steps"])
    return int(state["steps_done"])
