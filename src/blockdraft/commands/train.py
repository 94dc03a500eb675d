"""Trains a drafter beside its frozen target, from a recipe.

Writes a run directory: config.json (resolved), environment.json, metrics.jsonl, checkpoints/step_XXXXXXXX/.
"""

import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from blockdraft.commands.control import Control


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags beside those of the recipe."""

    overwrite: bool = False
    """Start over in a run directory that holds a run; its metrics and checkpoints go once the new run is checked."""
    poison: bool = False
    """Diagnostic: overwrite drained slots with NaN, so that features which are read too late show."""
    serial_targets: bool = False
    """Diagnostic: let one target at a time run its forward."""


def run(config: RunConfig, options: Options) -> int:
    """Runs it; 0 when the last step is done or a stop was asked for, 1 when a worker died."""
    from blockdraft.commands.control import Control
    from blockdraft.runtime.diagnostics import Diagnostics
    from blockdraft.runtime.distributed import NodeLost, this_node
    from blockdraft.runtime.workers import Stalled, WorkerError

    run_dir = Path(config.run_dir)
    if this_node() == 0:
        _check_run_dir(run_dir, config, options)
    config = _find_resume(config, run_dir)
    diagnostics = Diagnostics(poison=options.poison, serial_targets=options.serial_targets)
    control = Control(config, run_dir, _say, diagnostics=diagnostics)
    try:
        return control.run()
    except (WorkerError, Stalled, NodeLost) as error:
        sys.stderr.write(f"error: {error}\n")
        _say_last_checkpoint(control)
        return 1


def _say_last_checkpoint(control: "Control") -> None:
    from blockdraft.training.checkpoint import list_checkpoints

    found = list_checkpoints(control.run_dir / "checkpoints")
    if found:
        sys.stderr.write(f"the last complete checkpoint is {found[-1]}; go on with --resume auto\n")


def _find_resume(config: RunConfig, run_dir: Path) -> RunConfig:
    if config.resume != "auto":
        return config
    from blockdraft.training.checkpoint import list_checkpoints

    found = list_checkpoints(run_dir / "checkpoints")
    return replace(config, resume=str(found[-1]) if found else "")


def _check_run_dir(run_dir: Path, config: RunConfig, options: Options) -> None:
    """Refuses to mix two runs in one directory; nothing is removed before the new run has passed its own checks.

    Raises:
        ConfigError: it holds a run, and neither --resume nor --overwrite was given.
    """
    if (run_dir / "metrics.jsonl").exists() and not config.resume and not options.overwrite:
        raise ConfigError(
            f"{run_dir} holds a run already; go on with --resume auto, start over with --overwrite, or choose another "
            "--run-dir"
        )


def _say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()
