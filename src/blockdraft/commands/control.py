"""Control of a training run, in the main thread: starts the workers, watches, logs, stops.

Saving and evaluating begin in drafter 0's thread, between two of its steps (boundary.py).
"""

import dataclasses
import queue
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from blockdraft.commands.boundary import Boundary, contents_at, evaluate
from blockdraft.commands.build import Built, build, cpu_threads
from blockdraft.commands.checks import check, check_topology, resolve_dtypes
from blockdraft.commands.nodes import check_agreement
from blockdraft.commands.observing import SAMPLE_SECONDS, Observer
from blockdraft.commands.recording import LINE_SECONDS, Recorder
from blockdraft.commands.run_directory import check_directory, check_usable, claim, is_over, write_environment
from blockdraft.commands.skips import Skips
from blockdraft.commands.stops import StopRequested, Stops
from blockdraft.commands.tracking import METRICS, MetricsFile, Tracker, check_trackers, open_trackers
from blockdraft.config import RunConfig
from blockdraft.data.position import position_at
from blockdraft.runtime.diagnostics import NONE, Diagnostics
from blockdraft.runtime.distributed import SUM_SECONDS, NodeLost, join_world, this_node
from blockdraft.runtime.memory_fit import compare, explain_shortage, is_shortage
from blockdraft.runtime.pipeline import Delay, Pipeline, no_delay
from blockdraft.runtime.reports import Evaluated, MicroBatches, Report, WarmedUp
from blockdraft.runtime.saver import Saver, is_full
from blockdraft.runtime.startup import Protection
from blockdraft.runtime.workers import WorkerError
from blockdraft.training.checkpoint import check_shape, leave_behind, read_state, resume_into
from blockdraft.training.resuming import check_data, check_resumable, describe_changes
from blockdraft.training.step import DrafterStep

POLL_SECONDS = 0.05
LAST_SAVE_SECONDS = 120.0
"""Longest wait, after an error, for a checkpoint that is being written."""


class Control:
    """One run."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        say: Callable[[str], None],
        *,
        delay: Delay = no_delay,
        find_resume: Callable[[], Path | None] = lambda: None,
        line_seconds: float = LINE_SECONDS,
        diagnostics: Diagnostics = NONE,
        stops: Stops | None = None,
    ) -> None:
        """`find_resume`, called first of all once the nodes have met: the checkpoint to go on from.
        `line_seconds`: console lines of steps are at least so far apart; metrics.jsonl has every step.
        """
        self.line_seconds, self.find_resume = line_seconds, find_resume
        self.config, self.run_dir, self.delay = config, run_dir, delay
        self.diagnostics = diagnostics
        # One node speaks, writes and evaluates for all.
        self.is_first_node = this_node() == 0
        self.say = say if self.is_first_node else _say_nothing
        self.stops = Stops() if stops is None else stops
        self.pipeline: Pipeline | None = None
        self.protection: Protection | None = None

    def run(self) -> int:
        """Builds everything, trains, and returns the exit code.

        Raises:
            ConfigError: something the user can mend.
            WorkerError, Stalled, NodeLost: a worker died, nothing moved, or another node is gone.
            NonFinite: too many steps had gradients that are not finite.
            StopRequested: a stop was asked for before the first step.
        """
        config = self.config = resolve_dtypes(self.config)
        self.world = join_world()
        try:
            with self.stops.listen():
                self.resume = self.find_resume()
                done = self._run(config)
            self.world.part()
            return done
        except BaseException as error:
            self.world.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            if self.protection is not None:
                self.protection.end()

    def _run(self, config: RunConfig) -> int:
        # What needs no target is refused, or found to be over, before one is loaded.
        if self.resume is not None:
            check_resumable(self.resume, config)
        if self.is_first_node:
            check_usable(self.run_dir, is_resumed=self.resume is not None)
            check_trackers(config.trackers)
        if self._is_over(config.steps):
            return 0
        targets, drafters = check_topology(config)
        if any(one.type != "cpu" for side in (*targets, drafters) for one in side):
            self.protection = Protection(self.say)
        checked = check(config, node=self.world.node, num_nodes=self.world.num_nodes)
        if self._is_over(checked.total_steps):
            return 0
        self.built: Built = build(config, checked, self.say, evaluates=self.is_first_node)
        if self.world.num_nodes > 1:
            self.say(f"{self.world.num_nodes} nodes with {len(self.built.steps)} drafters each")
        first_step, num_skipped = self._read_resumed(config)
        check_agreement(self.world, config, self.built.fingerprint, first_step)
        # Trackers first: one that is not installed must leave no sign of a run behind.
        trackers = []
        if self.is_first_node:
            check_directory(
                self.run_dir, config, contents_at(config, self.built, 0), self.built.total_steps - first_step
            )
            trackers = open_trackers(config.trackers, self.run_dir, dataclasses.asdict(config))
        if first_step >= self.built.total_steps:
            return self._evaluate_what_is_done(trackers)
        loader = self.built.loader
        ranks = [loader.config.first_drafter + index for index in range(len(self.built.steps))]
        self.skips = Skips(loader, self.run_dir, config.optim.max_skipped, self.say, so_far=num_skipped, drafters=ranks)
        return self._train(config, trackers, first_step)

    def _is_over(self, total_steps: int | None) -> bool:
        # Several nodes find it out together, further on.
        resume = self.resume if self.world.num_nodes == 1 else None
        if resume is None or not is_over(self.run_dir, resume, self.config, total_steps):
            return False
        self.say(f"all {total_steps} steps are done already")
        return True

    def _train(self, config: RunConfig, trackers: list[Tracker], first_step: int) -> int:
        if self.is_first_node:
            claim(self.run_dir, config, is_resumed=self.resume is not None)
            write_environment(self.run_dir, self.built)
            self.recorder = self._recorder(trackers, first_step)
        pipeline = self._make_pipeline(first_step)
        if self.is_first_node:
            self._make_boundary(pipeline, first_step)
            self.observer = Observer(
                self.run_dir,
                self.say,
                pipeline,
                trace_steps=self.diagnostics.trace_steps,
                sample_seconds=min(self.line_seconds, SAMPLE_SECONDS),
            )
        self.pipeline = pipeline
        self.stops.check()
        # From here on there is something to finish; the watch asks the pipeline for it.
        self.stops.ask = _nothing
        try:
            return self._watch(pipeline)
        finally:
            if self.is_first_node:
                self.recorder.close()
                self.observer.end()

    def _read_resumed(self, config: RunConfig) -> tuple[int, int]:
        """Steps done and steps skipped before this start."""
        directory = self.resume
        if directory is None:
            return 0, 0
        state = read_state(directory)
        first_step = int(state["steps_done"])
        check_data(directory, self.built.fingerprint, position_at(self.built.loader.config, first_step))
        check_shape(directory, self.built.steps[0].drafter.shape)
        self.say(f"resuming from {directory}: {first_step} steps done")
        for line in describe_changes(directory, self.built.total_steps):
            self.say(line)
        return first_step, int(state["skipped_steps"])

    def _recorder(self, trackers: list[Tracker], first_step: int) -> Recorder:
        return Recorder(
            self.config,
            self.say,
            total_steps=self.built.total_steps,
            first_step=first_step,
            tokens_before=self.built.loader.tokens_before(first_step),
            trackers=trackers,
            metrics=MetricsFile(self.run_dir / METRICS, first_step),
            line_seconds=self.line_seconds,
        )

    def _evaluate_what_is_done(self, trackers: list[Tracker]) -> int:
        """Nothing to train; the last evaluation may be missing, if the run was killed before it."""
        total, step = self.built.total_steps, self.built.steps[0]
        if self.is_first_node and self.built.tapes:
            recorder = self._recorder(trackers, total)
            if not recorder.metrics.is_evaluated:
                assert self.resume is not None
                resume_into(self.resume, step.drafter, step.optimizer)
                recorder.evaluation(evaluate(self.built, total, _nothing))
            recorder.close()
        self.say(f"all {total} steps are done already")
        return 0

    def _make_pipeline(self, first_step: int) -> Pipeline:
        return Pipeline(
            self.config.runtime,
            self.built.loader,
            self.built.targets,
            self.built.steps,
            first_step=first_step,
            total_steps=self.built.total_steps,
            at_boundary=self._at_boundary,
            restore=self._after_warm_up,
            cpu_threads=cpu_threads(self.config),
            world=self.world if self.built.loader.config.num_drafters > 1 else None,
            sum_seconds=SUM_SECONDS,
            when_warm=partial(self._when_warm, first_step),
            delay=self.delay,
            diagnostics=self.diagnostics,
        )

    def _make_boundary(self, pipeline: Pipeline, first_step: int) -> None:
        self.saver = Saver(
            self.run_dir / "checkpoints",
            self.config.keep_last,
            contents_at=lambda steps_done: contents_at(self.config, self.built, steps_done),
            fail=pipeline.crew.fail,
            tick=pipeline.watchdog.beat,
            check=pipeline.channel.check,
            await_metrics=self.recorder.metrics.await_step,
            say=self.say,
            lane=pipeline.record.writer,
        )
        for step in self.built.steps:
            step.before_update = partial(self.saver.before_update, step.drafter.device)
        self.boundary = Boundary(
            self.config,
            self.built,
            self.saver,
            first_step=first_step,
            is_evaluated=self.recorder.metrics.is_evaluated,
            # In line with the steps, so that the order of metrics.jsonl never depends on timing.
            tell=pipeline.reports.put,
            tick=pipeline.go_on,
            lane=next(worker.lane for worker in pipeline.workers if worker.name == "drafter 0"),
        )

    # In the drafters' threads

    def _after_warm_up(self, step: DrafterStep) -> None:
        if self.resume is not None:
            resume_into(self.resume, step.drafter, step.optimizer)
        if self.is_first_node and step is self.built.steps[0]:
            self.saver.prepare()

    def _at_boundary(self, steps_done: int) -> None:
        assert self.pipeline is not None
        self.boundary.pass_over(steps_done, ends_here=steps_done == self.pipeline.last_step + 1)

    # In the main thread

    def _when_warm(self, first_step: int) -> None:
        # Not earlier: a run that ends before its first step leaves what it found.
        if self.is_first_node:
            for name in leave_behind(self.run_dir / "checkpoints", first_step):
                self.say(f"note: {name} is of the run that is left here; the next save removes it")
        if self.protection is not None:
            self.protection.steady()

    def _watch(self, pipeline: Pipeline) -> int:
        for line in pipeline.describe_links():
            self.say(line)
        said = False
        try:
            pipeline.start()
            while pipeline.is_running() and pipeline.crew.first_error is None:
                self._drain(pipeline, POLL_SECONDS)
                if self.stops.count and not said:
                    if not pipeline.has_begun:
                        raise StopRequested
                    said = True
                    pipeline.ask_to_stop()
                    self.say("stopping: this step is finished and saved first; once more to stop at once")
                pipeline.watchdog.check()
                self.world.beat()
            if pipeline.crew.first_error is not None:
                pipeline.abort_sums()
            pipeline.crew.join()
            while pipeline.reports.qsize():
                # The last numbers may still be on their way from a GPU.
                self._drain(pipeline, POLL_SECONDS)
                pipeline.watchdog.check()
            self._finish_saving(pipeline)
        except BaseException as error:
            self._clean_up(pipeline, error)
            if isinstance(error, WorkerError) and NodeLost.__name__ in str(error):
                reason = self.world.reason(2.0)
                raise WorkerError(f"{error}\n{reason}" if reason else str(error)) from error
            if isinstance(error, OSError):
                what = f"control could not write to {self.run_dir}: {error}; free space there"
                raise WorkerError(what if is_full(error) else f"{what}\n{traceback.format_exc()}") from error
            raise
        self._say_end(pipeline)
        return 0

    def _finish_saving(self, pipeline: Pipeline) -> None:
        """Waits for the writer: a run is over when its last checkpoint is on disk."""
        if not self.is_first_node:
            return

        def while_waiting() -> None:
            pipeline.watchdog.check()
            self.world.beat()

        self.saver.finish(while_waiting)
        if self.saver.error:
            raise WorkerError(self.saver.error)

    def _clean_up(self, pipeline: Pipeline, error: BaseException) -> None:
        """After an error every thread ends before it is shown, and a checkpoint being written is finished."""
        pipeline.abort_sums()
        pipeline.waits.stop()
        pipeline.crew.fail(f"control stopped the run: {error!r}")
        # Somebody who wants to leave at once does not wait.
        is_hurried = isinstance(error, KeyboardInterrupt | StopRequested)
        if not isinstance(error, WorkerError):
            pipeline.crew.wait(1.0 if is_hurried else 10.0)
        if not self.is_first_node:
            return
        try:
            if isinstance(error, WorkerError):
                # Metrics of steps that are done: a checkpoint may wait for them.
                self._drain(pipeline, 0.0)
        finally:
            self.saver.abandon()
            self.saver.finish(_nothing, 1.0 if is_hurried else LAST_SAVE_SECONDS)

    def has_threads(self) -> bool:
        """Whether a worker or the writer still runs, inside a call that nothing can interrupt."""
        if self.pipeline is None:
            return False
        return self.pipeline.crew.is_alive() or (self.is_first_node and self.saver.is_alive())

    def explain(self, error: BaseException) -> list[str]:
        """What is worth knowing beside an error: when memory ran out, the plan against what was reached."""
        # Errors of workers come as text.
        is_short = is_shortage(str(error))
        return explain_shortage(self.config, self.built.sizes) if is_short and self.pipeline is not None else []

    def _say_end(self, pipeline: Pipeline) -> None:
        done = pipeline.last_step + 1
        pipeline.waits.end(pipeline.workers)
        for line in (*pipeline.describe_sides(), *pipeline.memory.describe(), *pipeline.waits.describe()):
            self.say(line)
        reached = {str(device): max(seen.peaks) for device, seen in pipeline.memory.found().items()}
        for line in compare(self.built.plan, reached):
            self.say(line)
        if self.protection is not None:
            self.say(f"after warm-up: {self.protection.compilations()}")
        if done < self.built.total_steps:
            self.say(
                f"stopped after step {done}; go on with: blockdraft train {self.run_dir}/config.json --resume auto"
            )
        else:
            self.say(f"done: {done} steps, checkpoints in {self.run_dir / 'checkpoints'}")

    # Reports of the workers, in the main thread

    def _drain(self, pipeline: Pipeline, seconds: float) -> None:
        """Handles what the workers have reported, waiting for at most `seconds`."""
        reports = pipeline.reports
        try:
            self._handle(pipeline, reports.get(timeout=seconds) if seconds else reports.get_nowait())
            while True:
                self._handle(pipeline, reports.get_nowait())
        except queue.Empty:
            pass

    def _handle(self, pipeline: Pipeline, item: Report) -> None:
        pipeline.watchdog.beat()
        if isinstance(item, WarmedUp):
            self.say(f"warm-up: {item.worker}, {item.what}, {item.seconds:.1f} s")
        elif isinstance(item, Evaluated):
            self.recorder.evaluation(item)
        elif isinstance(item, MicroBatches):
            self.skips.measured(item)
        else:
            sums, grad_norm = item.read(self.config.drafter.block_size - 1)
            self.skips.step(item, grad_norm)
            pipeline.waits.step(item.step + 1 - pipeline.first_step, pipeline.workers)
            if self.is_first_node:
                with pipeline.record.control.span("log", item.step):
                    self.recorder.step(item, sums, grad_norm, self.skips.count, pipeline)
                    self.observer.step(item.step)
        self.skips.end_if_due()


def _say_nothing(_line: str) -> None:
    """On every node but the first."""


def _nothing() -> None:
    """Nothing to do."""
