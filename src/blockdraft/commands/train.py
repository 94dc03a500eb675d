"""Trains a drafter beside its frozen target, from a recipe.

Writes a run directory: config.json (resolved), environment.json, metrics.jsonl, checkpoints/step_XXXXXXXX/.
"""

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.commands.outputs import silence_stdout
from blockdraft.commands.stops import EARLY_STOP, EXIT_INTERRUPTED, Stops
from blockdraft.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from blockdraft.commands.control import Control


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags beside those of the recipe."""

    resume: str = ""
    """Go on from this checkpoint directory; auto: from the newest of the run directory, which may
    be none yet."""
    overwrite: bool = False
    """Start over in a run directory that holds a run; its metrics and checkpoints go once the new run is checked."""
    poison: bool = False
    """Diagnostic: overwrite drained slots with NaN, so that features which are read too late show."""
    serial_targets: bool = False
    """Diagnostic: let one target at a time run its forward."""
    count_waits: int = 0
    """Diagnostic: count, over so many steps behind the twentieth, how often workers wait for a GPU."""
    trace: int = 0
    """Steps whose spans are written into the run directory, as a Chrome trace with a lane per worker."""

    def __post_init__(self) -> None:
        if self.trace < 0:
            raise ConfigError(f"--trace is a number of steps and must be at least 0 (no trace), got {self.trace}")
        if self.count_waits < 0:
            raise ConfigError(f"--count-waits is a number of steps and must be at least 0, got {self.count_waits}")


def run(config: RunConfig, options: Options, stops: Stops | None = None) -> int:
    """Runs it; 0 when the last step is done or a stop was asked for, 1 when a worker died.

    Raises:
        StopRequested: a stop was asked for before the first step.
    """
    from blockdraft.commands.control import Control
    from blockdraft.runtime.diagnostics import Diagnostics

    run_dir = Path(config.run_dir)
    if options.overwrite and options.resume:
        raise ConfigError(f"--overwrite starts over and --resume {options.resume} goes on; leave one of them out")
    diagnostics = Diagnostics(
        poison=options.poison,
        serial_targets=options.serial_targets,
        trace_steps=options.trace,
        count_waits=options.count_waits,
    )
    with ExitStack() as held:
        find_resume = partial(_take, run_dir, options, held)
        control = Control(config, run_dir, _say, find_resume=find_resume, diagnostics=diagnostics, stops=stops)
        return _train(control)


def _train(control: "Control") -> int:
    """Runs it while its directory is held, and says what ended it."""
    from blockdraft.commands.skips import NonFinite
    from blockdraft.commands.stops import StopRequested
    from blockdraft.runtime.distributed import STOPPED, NodeLost
    from blockdraft.runtime.workers import Stalled, WorkerError

    try:
        return control.run()
    except (WorkerError, Stalled, NodeLost, NonFinite) as error:
        if STOPPED in str(error) and not (control.pipeline is not None and control.pipeline.has_begun):
            _leave_early(control)
            raise StopRequested from error
        sys.stderr.write("\n".join([f"error: {error}", *control.explain(error)]) + "\n")
        _say_last_checkpoint(control)
        if control.has_threads():
            _leave_threads(1)
        return 1
    except (StopRequested, KeyboardInterrupt) as stop:
        if isinstance(stop, StopRequested):
            _leave_early(control)
        elif control.has_threads():
            _say("interrupted")
            _leave_threads(EXIT_INTERRUPTED)
        raise


def _leave_early(control: "Control") -> None:
    """After a stop before the first step, asked of this node or of another; returns where no thread is in the way."""
    if control.has_threads():
        _say(EARLY_STOP)
        _leave_threads(0)


def _leave_threads(code: int) -> None:
    """Ends the process beside a thread inside a call that nothing interrupts, such as a compilation or a write.

    The interpreter would crash or wait in taking it down, and the exit code would be lost.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _say_last_checkpoint(control: "Control") -> None:
    from blockdraft.training.checkpoint import list_checkpoints

    found = list_checkpoints(control.run_dir / "checkpoints")
    if found:
        sys.stderr.write(f"the last complete checkpoint is {found[-1]}; go on with --resume auto\n")


def _take(run_dir: Path, options: Options, held: ExitStack) -> Path | None:
    """Holds the run directory, and only then looks at what it holds; returns the checkpoint to go on from.

    Node 0 writes for all nodes and holds it for all: a run that is still there is refused before anything is decided.

    Raises:
        ConfigError: another run is writing there, it holds a run that is not to go on, or the checkpoint is none.
    """
    from blockdraft.commands.run_directory import hold
    from blockdraft.runtime.distributed import this_node

    if this_node() == 0:
        held.enter_context(hold(run_dir))
        _check_run_dir(run_dir, options)
    return _find_resume(options.resume, run_dir)


def _find_resume(resume: str, run_dir: Path) -> Path | None:
    """The checkpoint to go on from, whole by its checksums; None: the run begins.

    Raises:
        ConfigError: the checkpoint named is damaged, of another version, or none but a whole run.
    """
    from blockdraft.runtime.distributed import this_node
    from blockdraft.training.checkpoint import verify
    from blockdraft.training.resuming import find_newest, refuse_run_directory

    if resume == "auto":
        newest = find_newest(run_dir / "checkpoints", _say, set_aside=this_node() == 0)
        if newest is None and this_node() == 0:
            _say(f"--resume auto: {run_dir} holds no checkpoint, the run begins")
        return newest
    directory = Path(resume) if resume else None
    if directory is not None:
        refuse_run_directory(directory, run_dir)
    # What is no checkpoint at all is refused with the rest of what may not be resumed.
    if directory is not None and (directory / "config.json").is_file():
        verify(directory)
    return directory


def _check_run_dir(run_dir: Path, options: Options) -> None:
    """Refuses to mix two runs in one directory; nothing is removed before the new run has passed its own checks.

    Raises:
        ConfigError: it holds a run, and neither --resume nor --overwrite was given.
    """
    from blockdraft.training.checkpoint import list_checkpoints

    is_used = (run_dir / "metrics.jsonl").exists() or list_checkpoints(run_dir / "checkpoints")
    if is_used and not options.resume and not options.overwrite:
        raise ConfigError(
            f"{run_dir} holds a run already; go on with --resume auto, start over with --overwrite, or choose another "
            "--run-dir"
        )


def _say(line: str) -> None:
    try:
        sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Days of training are not lost with a window or a pager.
        silence_stdout()
        sys.stderr.write("nobody reads the output any more; the run goes on, its run directory has the metrics\n")
