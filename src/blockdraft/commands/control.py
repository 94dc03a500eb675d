"""Control of a training run, in the main thread: starts the workers, watches, logs, stops.

Saving and evaluating happen in drafter 0's thread, between two of its steps.
"""

import dataclasses
import queue
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from blockdraft.commands.build import Built, build
from blockdraft.commands.nodes import check_agreement
from blockdraft.commands.recording import LINE_SECONDS, Recorder
from blockdraft.commands.run_directory import claim, write_environment
from blockdraft.commands.tracking import MetricsFile, open_trackers
from blockdraft.config import RunConfig
from blockdraft.decoding.replay import replay
from blockdraft.models.target import choose_dtype
from blockdraft.runtime.diagnostics import NONE, Diagnostics
from blockdraft.runtime.distributed import SUM_SECONDS, NodeLost, join_world, this_node
from blockdraft.runtime.pipeline import Delay, Pipeline, no_delay
from blockdraft.runtime.reports import Evaluated, SetAcceptance, StepDone, WarmedUp
from blockdraft.runtime.startup import Protection
from blockdraft.runtime.workers import WorkerError
from blockdraft.training.checkpoint import (
    check_data,
    check_resumable,
    check_shape,
    read_state,
    resume_into,
    save_checkpoint,
)
from blockdraft.training.step import DrafterStep

POLL_SECONDS = 0.05


class Control:
    """One run."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        say: Callable[[str], None],
        *,
        delay: Delay = no_delay,
        line_seconds: float = LINE_SECONDS,
        diagnostics: Diagnostics = NONE,
    ) -> None:
        """`line_seconds`: console lines of steps are at least so far apart; metrics.jsonl has every step."""
        self.line_seconds = line_seconds
        self.config, self.run_dir, self.delay = config, run_dir, delay
        self.diagnostics = diagnostics
        # One node speaks, writes and evaluates for all.
        self.is_first_node = this_node() == 0
        self.say = say if self.is_first_node else _say_nothing
        self._interrupts = 0
        self._saved_step = -1

    def run(self) -> int:
        """Builds everything, trains, and returns the exit code.

        Raises:
            ConfigError: something the user can mend.
            WorkerError, Stalled, NodeLost: a worker died, nothing moved, or another node is gone.
        """
        config = self.config = resolve_dtypes(self.config)
        has_kernels = any(not name.startswith("cpu") for name in (*config.runtime.targets, *config.runtime.drafters))
        protection = Protection(self.say) if has_kernels else None
        self.world = join_world()
        try:
            done = self._run(config, protection)
            self.world.part()
            return done
        except BaseException as error:
            self.world.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            if protection is not None:
                protection.end()

    def _run(self, config: RunConfig, protection: Protection | None) -> int:
        self.protection = protection
        world = self.world
        self.built: Built = build(config, self.say, node=world.node, num_nodes=world.num_nodes)
        if world.num_nodes > 1:
            self.say(f"{world.num_nodes} nodes with {len(self.built.steps)} drafters each")
        first_step = 0
        if config.resume:
            directory = Path(config.resume)
            check_resumable(directory, config)
            check_data(directory, self.built.fingerprint)
            check_shape(directory, self.built.steps[0].drafter.shape)
            first_step = int(read_state(directory)["steps_done"])
            self.say(f"resuming from {directory}: {first_step} steps done")
        check_agreement(world, config, self.built.fingerprint, first_step)
        if first_step >= self.built.total_steps:
            self.say(f"all {self.built.total_steps} steps are done already")
            return 0
        self._saved_step = first_step if config.resume else -1
        # Trackers first: one that is not installed must leave no sign of a run behind.
        if self.is_first_node:
            trackers = open_trackers(config.trackers, self.run_dir, dataclasses.asdict(config))
            claim(self.run_dir, config)
            write_environment(self.run_dir, self.built)
            self.recorder = Recorder(
                config,
                self.say,
                total_steps=self.built.total_steps,
                first_step=first_step,
                tokens_before=self.built.loader.tokens_before(first_step),
                trackers=trackers,
                metrics=MetricsFile(self.run_dir / "metrics.jsonl", first_step),
                line_seconds=self.line_seconds,
            )
        self.pipeline = Pipeline(
            config.runtime,
            self.built.loader,
            self.built.targets,
            self.built.steps,
            first_step=first_step,
            total_steps=self.built.total_steps,
            at_boundary=self._at_boundary,
            restore=self._restore if config.resume else None,
            cpu_threads=self._cpu_threads(),
            world=world if self.built.loader.config.num_drafters > 1 else None,
            sum_seconds=SUM_SECONDS,
            when_warm=self._when_warm,
            delay=self.delay,
            diagnostics=self.diagnostics,
        )
        previous = signal.signal(signal.SIGINT, self._interrupted) if _in_main_thread() else None
        terminate = signal.signal(signal.SIGTERM, self._interrupted) if _in_main_thread() else None
        try:
            return self._watch()
        finally:
            if _in_main_thread():
                signal.signal(signal.SIGINT, previous)
                signal.signal(signal.SIGTERM, terminate)
            if self.is_first_node:
                self.recorder.close()

    def _restore(self, step: DrafterStep) -> None:
        resume_into(Path(self.config.resume), step.drafter, step.optimizer)

    def _when_warm(self) -> None:
        if self.protection is not None:
            self.protection.steady()

    def _cpu_threads(self) -> int | None:
        """Intra-op threads of each CPU worker: torch's own number (OMP_NUM_THREADS) divided among the busy ones."""
        runtime = self.config.runtime
        busy = sum(name.startswith("cpu") for name in (*runtime.targets, *runtime.drafters))
        if not busy:
            return None
        return max(1, torch.get_num_threads() // busy)

    def _watch(self) -> int:
        pipeline = self.pipeline
        for line in pipeline.describe_links():
            self.say(line)
        pipeline.start()
        said = False
        try:
            while pipeline.is_running() and pipeline.crew.first_error is None:
                self._drain(POLL_SECONDS)
                if self._interrupts and not said:
                    said = True
                    self.say("stopping: this step is finished and saved first; once more to stop at once")
                pipeline.watchdog.check()
                self.world.beat()
            if pipeline.crew.first_error is not None:
                pipeline.abort_sums()
            pipeline.crew.join()
        except BaseException as error:
            pipeline.abort_sums()
            pipeline.crew.fail(f"control stopped the run: {error!r}")
            if not isinstance(error, WorkerError):
                # The error is control's own: every thread ends before it is shown. Not so after a second Ctrl-C.
                pipeline.crew.wait(1.0 if isinstance(error, KeyboardInterrupt) else 10.0)
            elif NodeLost.__name__ in str(error):
                reason = self.world.reason(2.0)
                raise WorkerError(f"{error}\n{reason}" if reason else str(error)) from error
            raise
        self._drain(0.0)
        done = pipeline.last_step + 1
        self._say_sides()
        if self.protection is not None:
            self.say(f"after warm-up: {self.protection.compilations()}")
        if done < self.built.total_steps:
            self.say(
                f"stopped after step {done}; go on with: blockdraft train {self.run_dir}/config.json --resume auto"
            )
        else:
            self.say(f"done: {done} steps, checkpoints in {self.run_dir / 'checkpoints'}")
        return 0

    def _interrupted(self, _signal: int, _frame: FrameType | None) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            raise KeyboardInterrupt
        # Nothing is printed here: a signal may arrive while the main thread is inside a write.
        self.pipeline.ask_to_stop()

    # In drafter 0's thread

    def _at_boundary(self, steps_done: int) -> None:
        """Saves and evaluates, when it is time, with everything this step changed in place."""
        self.pipeline.watchdog.beat()
        ends_here = steps_done == self.pipeline.last_step + 1
        due = steps_done % self.config.eval.every == 0
        # A resumed run's first boundary was evaluated and saved before it stopped.
        is_new = steps_done > self._saved_step
        save_due = steps_done % self.config.save_every == 0 and steps_done > 0
        # Saved first: whoever stops a run may not wait for an evaluation.
        if (save_due or ends_here) and is_new:
            step = self.built.steps[0]
            root, keep = self.run_dir / "checkpoints", self.config.keep_last
            data = self.built.fingerprint
            save_checkpoint(root, steps_done, step.drafter, step.optimizer, self.config, keep, data=data)
            self._saved_step = steps_done
            self.pipeline.watchdog.beat()
        if self.built.tapes and (due or ends_here) and is_new:
            self._evaluate(steps_done)

    @torch.no_grad()
    def _evaluate(self, steps_done: int) -> None:
        started = time.monotonic()
        step = self.built.steps[0]
        sets = {}
        for name, tapes in self.built.tapes.items():
            found = replay(step.drafter, step.ends, tapes, progress=lambda _: self.pipeline.watchdog.beat())
            sets[name] = SetAcceptance(found.acceptance_length, found.rounds)
        # In line with the steps, so that the order of metrics.jsonl never depends on timing.
        self.pipeline.reports.put(Evaluated(steps_done, sets, time.monotonic() - started))

    # Reports of the workers, in the main thread

    def _drain(self, seconds: float) -> None:
        """Handles what the workers have reported, waiting for at most `seconds`."""
        try:
            self._handle(self.pipeline.reports.get(timeout=seconds) if seconds else self.pipeline.reports.get_nowait())
            while True:
                self._handle(self.pipeline.reports.get_nowait())
        except queue.Empty:
            pass

    def _handle(self, item: StepDone | WarmedUp | Evaluated) -> None:
        self.pipeline.watchdog.beat()
        if isinstance(item, WarmedUp):
            self.say(f"warm-up: {item.worker}, {item.what}, {item.seconds:.1f} s")
        elif isinstance(item, Evaluated):
            self.recorder.evaluation(item)
        elif self.is_first_node:
            self.recorder.step(item, self.pipeline)

    def _say_sides(self) -> None:
        for line in (*self.pipeline.describe_sides(), *self.pipeline.memory.describe()):
            self.say(line)


def _say_nothing(_line: str) -> None:
    """On every node but the first."""


def resolve_dtypes(config: RunConfig) -> RunConfig:
    """The config with every `auto` data type replaced by the one the devices are good at."""
    target = choose_dtype(config.target.dtype, config.runtime.targets[0])
    drafter = choose_dtype(config.drafter.dtype, config.runtime.drafters[0])
    return dataclasses.replace(
        config,
        target=dataclasses.replace(config.target, dtype=target),
        drafter=dataclasses.replace(config.drafter, dtype=drafter),
    )


def _in_main_thread() -> bool:
    import threading

    return threading.current_thread() is threading.main_thread()
