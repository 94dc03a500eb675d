"""Which checkpoint a run goes on from, and whether it may."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from blockdraft.config import ConfigError, RunConfig, read_config
from blockdraft.training.checkpoint import CONFIG, STATE, Damaged, list_checkpoints, read_state, verify, versions

RESUMABLE = (
    "run_dir", "steps", "epochs", "save_every", "keep_last", "trackers", "runtime", "eval",
    "optim.max_skipped", "optim.shard",
)  # fmt: skip
"""Fields that may differ between a checkpoint and the run that resumes it."""


def find_newest(root: Path, say: Callable[[str], None], *, set_aside: bool = True) -> Path | None:
    """The newest checkpoint of `root` that is whole, None without any; damaged ones are renamed and named.

    Raises:
        ConfigError: all are damaged, or one is of another format version.
    """
    found = list_checkpoints(root)
    for directory in reversed(found):
        try:
            verify(directory)
        except Damaged as error:
            say(f"warning: damaged checkpoint: {error}")
            if set_aside:
                aside = directory.with_name(f"damaged_{directory.name}")
                if aside.exists():
                    raise ConfigError(f"{aside} is in the way of another damaged checkpoint; remove it") from error
                directory.rename(aside)
                say(f"warning: it is {aside} now, and the checkpoint before it is taken")
        else:
            return directory
    if found:
        raise ConfigError(
            f"{root}: expected a whole checkpoint, found {len(found)} damaged; start over with --overwrite, or choose "
            "another --run-dir"
        )
    return None


def refuse_run_directory(directory: Path, run_dir: Path) -> None:
    """Says what to write instead, where --resume names a run, or its `checkpoints`, and not one checkpoint.

    Raises:
        ConfigError: it does.
    """
    run = directory.parent if directory.name == "checkpoints" else directory
    root = run / "checkpoints"
    if not root.is_dir() or (directory / STATE).is_file():
        return
    newest = "--resume auto" if run.resolve() == run_dir.resolve() else f"--resume auto --run-dir {run}"
    found = list_checkpoints(root)
    one = f", or --resume {found[-1]}" if found else ""
    what = "a run directory" if directory == run else "the checkpoints of a run"
    raise ConfigError(f"--resume {directory}: expected one checkpoint, found {what}; write {newest}{one}")


def check_resumable(directory: Path, config: RunConfig) -> None:
    """Refuses to resume when a field that changes the model or the data order differs.

    Raises:
        ConfigError: no checkpoint, or names every such field with both values.
    """
    if not (directory / STATE).is_file():
        raise ConfigError(
            f"--resume: expected a checkpoint, RUN/checkpoints/step_XXXXXXXX, found none at {directory}; "
            "--resume auto takes the newest of --run-dir"
        )
    before, now = (_deciding(one) for one in (read_config(directory / CONFIG), config))
    wrong = [f"{name}: {old!r} -> {new!r}" for name, old, new in _differences(before, now, "")]
    if wrong:
        raise ConfigError(
            f"{directory} cannot be resumed, these change the model or the data order: {'; '.join(wrong)}; give the "
            "earlier values, or start a new run in another --run-dir"
        )


def _deciding(config: RunConfig) -> dict[str, Any]:
    """The fields that decide model and data order."""
    values = dataclasses.asdict(config)
    runtime = values["runtime"]
    for name in RESUMABLE:
        *sections, last = name.split(".")
        holder = values
        for section in sections:
            holder = holder[section]
        holder.pop(last)
    values["runtime"] = {key: runtime[key] for key in ("reuse", "keep_features")}
    if runtime["reuse"] > 1:
        # Which passes share a slot depends on how many drafters the slots are dealt to.
        values["runtime"]["number of drafters"] = len(runtime["drafters"])
    return values


def _differences(before: dict[str, Any], now: dict[str, Any], prefix: str) -> list[tuple[str, Any, Any]]:
    found: list[tuple[str, Any, Any]] = []
    for name, old in before.items():
        new = now.get(name, old)
        if isinstance(old, dict):
            found += _differences(old, new, f"{prefix}{name}.")
        elif old != new:
            found.append((prefix + name, old, new))
    return found


def check_data(directory: Path, data: str, position: Mapping[str, int]) -> None:
    """Refuses to go on with other documents, or other random draws, than those the checkpoint was trained on.

    Raises:
        ConfigError: fingerprints, the place in the data, or what its generators draw next differ.
    """
    state = read_state(directory)
    before = state["data"]
    if before and before != data:
        raise ConfigError(
            f"{directory} was trained on other documents than data.train holds now ({before} there, {data} here); "
            "prepare the same conversations again, or start a new run"
        )
    for name, expected in state["position"].items():
        found = position[name]
        if found != expected:
            raise ConfigError(
                f"{directory}: expected {name} {expected} at step {state['steps_done']}, found {found}: this version "
                f"of blockdraft or numpy would go on with other data; resume with {state['versions']}"
            )


def describe_changes(directory: Path, total_steps: int) -> list[str]:
    """What is allowed to differ and still worth a line: versions, and a schedule of another length."""
    state, now = read_state(directory), versions()
    lines = [
        f"note: the checkpoint was written with {name} {old}, this is {now[name]}: last digits may differ"
        for name, old in state["versions"].items()
        if now[name] != old
    ]
    if state["total_steps"] not in (0, total_steps):
        lines.append(f"note: the schedule was made for {state['total_steps']:,} steps and is now for {total_steps:,}")
    return lines
