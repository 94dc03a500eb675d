"""The directory of a run: claimed once every check has passed, with its config and its environment written down."""

import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers

from blockdraft.commands.build import Built
from blockdraft.commands.outputs import in_the_way, read_object
from blockdraft.commands.tracking import METRICS, is_evaluated
from blockdraft.config import ConfigError, RunConfig, to_json
from blockdraft.data.locks import try_lock
from blockdraft.training.checkpoint import Contents, check_space, list_checkpoints, read_state

ENVIRONMENT = "environment.json"


def check_directory(run_dir: Path, config: RunConfig, contents: Contents, steps_left: int) -> None:
    """Refuses a directory that cannot be written, or a disk without room for the checkpoints of the run.

    Raises:
        ConfigError: with what is needed and what is there.
    """
    check_writable(run_dir)
    # The newest ones, the best, and the one being written.
    copies = min(-(-steps_left // config.save_every), config.keep_last + 2)
    root = run_dir / "checkpoints"
    there_already = sum(file.stat().st_size for found in list_checkpoints(root) for file in found.iterdir())
    check_space(root, copies * contents.num_bytes() - there_already, f"a run that keeps {copies} checkpoints at a time")


def check_usable(run_dir: Path, *, is_resumed: bool) -> None:
    """Refuses a directory that cannot be made or written, or that no run goes on in, before anything is loaded.

    Raises:
        ConfigError: with what is in the way.
    """
    check_writable(run_dir)
    check_ours(run_dir, is_resumed=is_resumed)
    if is_resumed:
        starts_before(run_dir / ENVIRONMENT)


def check_ours(run_dir: Path, *, is_resumed: bool) -> None:
    """Refuses a directory of something else: a run would write over a model's config.json and remove `checkpoints`.

    Raises:
        ConfigError: with the file that is not a run's.
    """
    config, checkpoints = run_dir / "config.json", run_dir / "checkpoints"
    other = ""
    if config.is_file():
        if "run_dir" not in read_object(config):
            other = "a config.json of something else"
    elif (run_dir / "manifest.json").exists():
        other = "a manifest.json, as token stores have it"
    elif not is_resumed and checkpoints.is_dir() and any(checkpoints.iterdir()):
        other = "checkpoints and no config.json of a run"
    if other:
        raise ConfigError(
            f"run_dir {run_dir}: expected a new directory or that of a run, found {other}; choose another --run-dir"
        )


def check_writable(run_dir: Path) -> None:
    """Refuses a directory that cannot be made or written.

    Raises:
        ConfigError: with what is in the way.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(
            f"run_dir {run_dir}: expected a directory that can be written, found a file; choose another --run-dir"
        )
    if problem := in_the_way(run_dir):
        raise ConfigError(
            f"run_dir {run_dir}: expected a directory that can be written, found {problem}; choose another --run-dir"
        )


def is_over(run_dir: Path, checkpoint: Path, config: RunConfig, total_steps: int | None) -> bool:
    """Whether nothing is left to do behind a checkpoint; a run may have been killed before its last evaluation.

    `total_steps`: None where they are not known yet.
    """
    steps_done = int(read_state(checkpoint)["steps_done"])
    if steps_done == total_steps and config.eval.prompts:
        return is_evaluated(run_dir / METRICS, steps_done)
    return total_steps is not None and steps_done >= total_steps


@contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Locks the directory against other runs; the end of the process unlocks it too, and no file is left.

    Directories that were made for it go again where nothing was written.

    Raises:
        ConfigError: another run is writing there, or it cannot be made or written.
    """
    check_writable(run_dir)
    made = [one for one in (run_dir, *run_dir.parents) if not one.exists()]
    held = _open(run_dir)
    try:
        if held is None or not try_lock(held) or not _is_at(held, run_dir):
            raise ConfigError(
                f"run_dir {run_dir}: another run is writing there; wait for its end, or choose another --run-dir"
            )
        try:
            yield
        finally:
            # While it is locked: another run may not come in between. One that is not empty stays.
            with suppress(OSError):
                for one in made:
                    one.rmdir()
    finally:
        if held is not None:
            os.close(held)


def _open(run_dir: Path) -> int | None:
    """None: another run, which ended without a step, removed it at this moment."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return os.open(run_dir, os.O_RDONLY)
    except FileNotFoundError:
        return None


def _is_at(held: int, run_dir: Path) -> bool:
    """Whether what was opened is still what the path names."""
    try:
        return os.path.samestat(os.fstat(held), run_dir.stat())
    except FileNotFoundError:
        return False


def claim(run_dir: Path, config: RunConfig, *, is_resumed: bool) -> None:
    """Makes the directory this run's: an earlier run that is not resumed goes, this run's config comes."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not is_resumed:
        for name in (METRICS, ENVIRONMENT):
            (run_dir / name).unlink(missing_ok=True)
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    _write(run_dir / "config.json", to_json(config))


def write_environment(run_dir: Path, built: Built) -> None:
    """When it was started, versions and machine, drafter and data, in environment.json."""
    target, drafter = built.targets[0], built.steps[0].drafter
    environment = {
        "started": [*starts_before(run_dir / ENVIRONMENT), datetime.now(UTC).isoformat(timespec="seconds")],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "target_class": type(target.model).__name__,
        "target_layers": target.num_layers,
        "draft_vocab": built.draft_vocab_size,
        "drafter": {
            "num_layers": drafter.shape.num_layers,
            "hidden_size": drafter.shape.hidden_size,
            "block_size": drafter.shape.block_size,
            "target_layer_ids": list(drafter.shape.target_layer_ids),
            "parameters": sum(weight.numel() for weight in drafter.parameters()),
        },
        "data": _describe_data(built),
    }
    _write(run_dir / ENVIRONMENT, json.dumps(environment, indent=2) + "\n")


def starts_before(file: Path) -> list[str]:
    """Of the run that goes on here.

    Raises:
        ConfigError: the file is another than a run writes.
    """
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: expected JSON, found: {error}; remove it, it is written again") from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{file}: expected a JSON object, found {type(found).__name__}; remove it, it is written again"
        )
    starts = found.get("started", [])
    if not isinstance(starts, list):
        raise ConfigError(
            f"{file}: expected started to be a list of moments, found {type(starts).__name__}; remove the file, it is "
            "written again"
        )
    return starts


def _write(file: Path, text: str) -> None:
    """Complete or not there.

    Raises:
        ConfigError: the file system takes no more, or not this.
    """
    side = file.with_name(file.name + ".partial")
    try:
        side.write_text(text, encoding="utf-8")
        side.rename(file)
    except OSError as error:
        raise ConfigError(
            f"{file}: could not be written: {error}; free space there, or choose another --run-dir"
        ) from error


def _describe_data(built: Built) -> dict[str, object]:
    """What was prepared, what was dropped on the way and why, and what the loader made of it."""
    manifest, counts = built.loader.store.manifest, built.loader.counts
    kept = ("rows_read", "documents", "tokens", "supervised_tokens", "cut", "drops")
    return {name: manifest[name] for name in kept if name in manifest} | {
        "skipped_unanchored": counts.skipped_unanchored,
        "slots_of_an_epoch": counts.fills,
        "padding_share": round(counts.padding.padding / max(1, counts.padding.tokens), 4),
    }
