"""Outputs, seeds and temperatures that a user names, looked at before the work that needs them.

And output that nobody reads.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

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
    _check_place(path)


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
    _check_place(path)


def check_export(path: Path) -> None:
    """`check_directory`, and refuses to write over the files of a target, a run or anything else.

    Raises:
        ConfigError: it holds anything, and no drafter's export.
    """
    check_directory(path)
    if (path / CONFIG).is_file() and DRAFTER in (read_object(path / CONFIG).get("architectures") or []):
        return
    if (path / CONFIG).exists() or (path / WEIGHTS).exists():
        found = f"the {CONFIG} or {WEIGHTS} of something else"
    elif path.is_dir() and any(path.iterdir()):
        found = "other files"
    else:
        return
    raise ConfigError(
        f"--output {path}: expected a new directory or an export to replace, found {found}; choose another --output"
    )


def check_seed(seed: int) -> None:
    """Refuses what torch's generators do not take.

    Raises:
        ConfigError: it is below 0 or beyond 63 bits.
    """
    if not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"--seed: expected a number from 0 up to {MOST_SEED:,}, found {seed}")


def check_sampling(temperature: float, top_p: float = 1.0, top_k: int = 0) -> None:
    """Refuses what no distribution can be made with.

    Raises:
        ConfigError: names the flag.
    """
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature: expected 0 (greedy) or more, found {temperature}")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p: expected a share above 0, and 1 for all tokens, found {top_p}")
    if top_k < 0:
        raise ConfigError(f"--top-k: expected at least 1, or 0 for all tokens, found {top_k}")


def in_the_way(path: Path) -> str:
    """What keeps this path from being made or written; empty where nothing does."""
    there = path if path.exists() else path.absolute().parent
    while not there.exists():
        there = there.parent
    if there != path and not there.is_dir():
        return f"{there}, which is no directory"
    needed = os.W_OK | os.X_OK if there.is_dir() else os.W_OK
    may = os.access(there, needed, effective_ids=os.access in os.supports_effective_ids)
    if not may:
        return f"{there}, which cannot be written"
    return _refusal(there) if there.is_dir() and not path.is_file() else ""


def _refusal(directory: Path) -> str:
    """Rights are not all: /proc and full or broken disks take no file. A file without a name leaves nothing there."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return ""
    except OSError as error:
        return f"{directory}, which takes no file ({error.strerror})"


def read_object(file: Path) -> dict[str, Any]:
    """What a JSON file says; empty where it is no JSON, or no object."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def silence_stdout() -> None:
    """Output that nobody reads any more goes nowhere, and what is still in its buffer with it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _check_place(path: Path) -> None:
    if problem := in_the_way(path):
        raise ConfigError(
            f"--output {path}: expected a place that can be written, found {problem}; choose another --output"
        )
