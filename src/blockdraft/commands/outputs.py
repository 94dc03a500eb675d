"""Outputs and seeds that a user names, looked at before the work that needs them."""

import json
import os
from pathlib import Path
from typing import Final

from blockdraft.config import MOST_SEED, ConfigError

CONFIG: Final = "config.json"
WEIGHTS: Final = "model.safetensors"
DRAFTER: Final = "DFlashDraftModel"


def check_file(path: Path) -> None:
    """Refuses what cannot be written as a file.

    Raises:
        ConfigError: it is a directory, or lies where none can be made.
    """
    if path.is_dir():
        raise ConfigError(f"--output {path}: expected the name of a file, found a directory; name a file in it")
    _check_above(path)


def check_directory(path: Path) -> None:
    """Refuses what cannot be written as a directory, or must not be put in the place of one that is there.

    Raises:
        ConfigError: it is a file, lies where none can be made, or is the directory that the user stands in.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--output {path}: expected a directory to write to, found a file; choose another --output")
    if Path.cwd().is_relative_to(path.resolve()):
        raise ConfigError(
            f"--output {path}: expected a directory that can be replaced, found the one that the command runs in; name "
            "one inside it"
        )
    _check_above(path)


def check_export(path: Path) -> None:
    """`check_directory`, and refuses to write over the files of a target, a run or anything else.

    Raises:
        ConfigError: it holds a config.json or weights that are no drafter's export.
    """
    check_directory(path)
    if (path / CONFIG).is_file():
        try:
            found = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        except ValueError:
            found = None
        is_ours = isinstance(found, dict) and DRAFTER in (found.get("architectures") or [])
    else:
        is_ours = not (path / WEIGHTS).exists()
    if not is_ours:
        raise ConfigError(
            f"--output {path}: expected a new directory or an export to replace, found the {CONFIG} or {WEIGHTS} of "
            "something else; choose another --output"
        )


def check_seed(seed: int) -> None:
    """Refuses what torch's generators do not take.

    Raises:
        ConfigError: it is below 0 or beyond 63 bits.
    """
    if not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"--seed: expected a number from 0 up to {MOST_SEED:,}, found {seed}")


def _check_above(path: Path) -> None:
    """The nearest directory that is there can be written in."""
    there = path if path.exists() else path.absolute().parent
    while not there.exists():
        there = there.parent
    is_dir = there.is_dir() or there == path
    effective = os.access in os.supports_effective_ids
    if not is_dir or not os.access(there, os.W_OK, effective_ids=effective):
        problem = "which cannot be written" if is_dir else "which is no directory"
        raise ConfigError(
            f"--output {path}: expected a place that can be written, found {there}, {problem}; choose another --output"
        )
