"""Checkpoints: safetensors and JSON, written to the side and renamed.

step_XXXXXXXX/ holds drafter.safetensors (weights as computed with), optimizer.safetensors (masters, moments),
state.json (steps done, shape) and config.json (the resolved run). Anchors and data order are keyed by number, so the
step is all that the loader's position needs.
"""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from blockdraft.config import ConfigError, RunConfig, read_config, to_json
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.training.optim import MasterOptimizer

FORMAT = 1


def checkpoint_name(step: int) -> str:
    """Directory of the checkpoint after `step` optimizer steps."""
    return f"step_{step:08d}"


def save_checkpoint(
    root: Path,
    steps_done: int,
    drafter: Drafter,
    optimizer: MasterOptimizer,
    config: RunConfig,
    keep_last: int,
    *,
    data: str = "",
) -> Path:
    """Writes one checkpoint and removes all but the newest `keep_last`; returns its directory.

    `data` is a fingerprint of the documents trained on, compared on resuming.

    Checkpoints of later steps go too: they are of a run that this one left behind by resuming from an earlier step.
    """
    final = root / checkpoint_name(steps_done)
    side = root / f".{final.name}.partial"
    shutil.rmtree(side, ignore_errors=True)
    side.mkdir(parents=True)
    weights = {name: weight.detach().to("cpu").contiguous() for name, weight in drafter.state_dict().items()}
    save_file(weights, side / "drafter.safetensors")
    moments = {name: value.detach().to("cpu").contiguous() for name, value in optimizer.state_tensors().items()}
    save_file(moments, side / "optimizer.safetensors")
    state = {
        "format": FORMAT,
        "steps_done": steps_done,
        "data": data,
        "optimizer": optimizer.config.optimizer,
        "skipped_steps": int(optimizer.skipped),
        "shape": dataclasses.asdict(drafter.shape),
    }
    (side / "state.json").write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    (side / "config.json").write_text(to_json(config), encoding="utf-8")
    for file in side.iterdir():
        _sync(file)
    if final.exists():
        shutil.rmtree(final)
    side.rename(final)
    _sync(root)
    found = list_checkpoints(root)
    own = found.index(final) + 1
    for other in (*found[: max(0, own - keep_last)], *found[own:]):
        shutil.rmtree(other)
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def list_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in root.glob("step_????????") if (path / "state.json").is_file())


def newest_checkpoint(path: Path) -> Path:
    """`path` itself if it is a checkpoint, else the newest one of the run directory `path`.

    Raises:
        ConfigError: there is none.
    """
    if (path / "state.json").is_file():
        return path
    found = list_checkpoints(path / "checkpoints")
    if not found:
        raise ConfigError(f"{path}: expected a checkpoint, or a run directory with checkpoints/step_XXXXXXXX in it")
    return found[-1]


def read_state(directory: Path) -> dict[str, Any]:
    """state.json of a checkpoint.

    Raises:
        ConfigError: another format version.
    """
    state: dict[str, Any] = json.loads((directory / "state.json").read_text(encoding="utf-8"))
    if state.get("format") != FORMAT:
        raise ConfigError(f"{directory}: expected checkpoint format {FORMAT}, found {state.get('format')}")
    return state


def load_drafter(path: Path) -> Drafter:
    """The drafter of a checkpoint or of a run's newest one, from its float32 masters, on the CPU."""
    directory = newest_checkpoint(path)
    values = read_state(directory)["shape"]
    for key in ("target_layer_ids", "window_layers"):
        values[key] = tuple(values[key])
    drafter = Drafter(DrafterShape(**values)).float()
    tensors = load_file(directory / "optimizer.safetensors")
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
    """Restores weights, masters and moments in place; returns the steps done.

    Raises:
        ConfigError: the checkpoint's drafter has another shape.
    """
    state = read_state(directory)
    check_shape(directory, drafter.shape)
    # Checkpoints from before this entry have none; check_resumable compares the configs.
    found, expected = state.get("optimizer", optimizer.config.optimizer), optimizer.config.optimizer
    if found != expected:
        raise ConfigError(
            f"{directory}: expected moments of optim.optimizer {expected}, found those of {found}; resume with "
            f"--optim.optimizer {found}, or start a new run"
        )
    optimizer.load_state_tensors(load_file(directory / "optimizer.safetensors"))
    drafter.load_state_dict(load_file(directory / "drafter.safetensors"))
    with torch.no_grad():
        optimizer.skipped.fill_(state["skipped_steps"])
    return int(state["steps_done"])


def check_data(directory: Path, data: str) -> None:
    """Refuses to go on with other documents than those the checkpoint was trained on.

    Raises:
        ConfigError: the fingerprints differ.
    """
    before = read_state(directory).get("data", "")
    if before and before != data:
        raise ConfigError(
            f"{directory} was trained on other documents than data.train holds now ({before} there, {data} here); "
            "prepare the same conversations again, or start a new run"
        )


RESUMABLE = (
    "run_dir", "steps", "epochs", "save_every", "keep_last", "resume", "trackers", "runtime", "eval",
)  # fmt: skip
"""Fields that may differ between a checkpoint and the run that resumes it."""


def check_resumable(directory: Path, config: RunConfig) -> None:
    """Refuses to resume when a field that changes the model or the data order differs.

    Raises:
        ConfigError: no checkpoint, or names every such field with both values.
    """
    if not (directory / "state.json").is_file():
        raise ConfigError(
            f"resume: expected a checkpoint, RUN/checkpoints/step_XXXXXXXX, found none at {directory}; "
            "--resume auto takes the newest of --run-dir"
        )
    before, now = dataclasses.asdict(read_config(directory / "config.json")), dataclasses.asdict(config)
    for name in RESUMABLE:
        if name == "runtime":
            for side in (before, now):
                runtime = side["runtime"]
                side["runtime"] = {key: runtime[key] for key in ("reuse", "keep_features")}
                if runtime["reuse"] > 1:
                    # Which passes share a slot depends on how many drafters the slots are dealt to.
                    side["runtime"]["number of drafters"] = len(runtime["drafters"])
        else:
            before.pop(name), now.pop(name)
    wrong = [f"{name}: {old!r} -> {new!r}" for name, old, new in _differences(before, now, "")]
    if wrong:
        raise ConfigError(
            f"{directory} cannot be resumed, these change the model or the data order: {'; '.join(wrong)}"
        )


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for name, old in before.items():
        new = now.get(name, old)
        if isinstance(old, dict):
            found += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append((prefix + name, old, new))
    return found
