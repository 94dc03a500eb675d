"""The threads of a run: loader, target workers, drafter workers, and the order in which they start.

Start-up: every worker warms up in its own thread, one after the other under one lock; then a barrier; then steady
state. Control (the caller's thread) only waits and reads what the workers report.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import torch

from blockdraft.config import RuntimeConfig
from blockdraft.data.loader import Fill, Loader, MicroBatch
from blockdraft.models.target import Target
from blockdraft.runtime.channel import Channel, Stopped, Work
from blockdraft.runtime.clocks import BOUNDARY, BUSY, OTHERS
from blockdraft.runtime.diagnostics import NONE, Diagnostics
from blockdraft.runtime.distributed import SUM_SECONDS, GradientSum, World
from blockdraft.runtime.meeting import Meeting
from blockdraft.runtime.memory import MemoryWatch
from blockdraft.runtime.reports import Inbox, WarmedUp, report_micro_batches, report_step
from blockdraft.runtime.sides import Busy, busy_shares, describe_sides
from blockdraft.runtime.slots import Filler, KeptFeatures, Slot, describe_link, step_of
from blockdraft.runtime.spans import HAND_OVER, INPUT, KEPT, TRACED, Record
from blockdraft.runtime.transfers import pinned, take_page_locked, to_device
from blockdraft.runtime.waits import WaitCount
from blockdraft.runtime.warm_up import Settle, Turns, warm_up_drafter, warm_up_target
from blockdraft.runtime.workers import Crew, Watchdog, Worker
from blockdraft.training.step import DrafterStep

WARM_UP_SECONDS = 1800.0
"""A start-up in which nothing is reported for this long has hung: one compilation or load can take many minutes."""

ABORT_SECONDS = 10.0
"""Longest wait for collectives on GPUs to end once they are aborted."""

Delay = Callable[[str, int], None]
"""Called as (worker's name, number) before each piece of work; tests sleep or raise in it."""


def no_delay(_worker: str, _number: int) -> None:
    """The default."""


class Pipeline:
    """One run's threads. `run` returns when the last step is done, or raises the first worker's error."""

    def __init__(
        self,
        config: RuntimeConfig,
        loader: Loader,
        targets: list[Target],
        steps: list[DrafterStep],
        *,
        first_step: int,
        total_steps: int,
        at_boundary: Callable[[int], None],
        restore: Callable[[DrafterStep], None] | None = None,
        cpu_threads: int | None = None,
        world: World | None = None,
        sum_seconds: float = SUM_SECONDS,
        when_warm: Callable[[], None] = lambda: None,
        delay: Delay = no_delay,
        diagnostics: Diagnostics = NONE,
    ) -> None:
        """Takes calls back into the trainer. `world` joins several drafters; `sum_seconds` is the longest sum.

        `at_boundary(steps_done)`: in node 0's drafter 0's thread, after each of its steps; it saves and evaluates.
        `when_warm()`: in control's thread, when every worker is warm and none has started.
        `restore(step)`: in each drafter's thread, after its warm-up (which resets moments); it loads a checkpoint.
        """
        self.world, self.sum_seconds, self.when_warm = world, sum_seconds, when_warm
        self.is_first_node = world is None or world.node == 0
        self.config, self.loader, self.targets, self.steps = config, loader, targets, steps
        self.first_step, self.total_steps = first_step, total_steps
        self.last_step = total_steps - 1
        self.at_boundary, self.restore, self.delay = at_boundary, restore, delay
        self.diagnostics = diagnostics
        self._turn: contextlib.AbstractContextManager[object] = (
            threading.Lock() if diagnostics.serial_targets else contextlib.nullcontext()
        )
        self.channel = Channel(
            num_targets=len(targets),
            num_drafters=len(steps),
            depth=config.channel_depth,
            pairs=config.topology != "pool",
            first_drafter=loader.config.first_drafter,
            all_drafters=loader.config.num_drafters,
        )
        self.crew = Crew(self.channel)
        self.watchdog = Watchdog(self.channel, config.stall_seconds, WARM_UP_SECONDS)
        self.reports, self._launches = Inbox(), Meeting(len(steps), self.channel.check)
        self._turns = Turns(len(targets) + len(steps), self.channel.check)
        self._go = threading.Event()
        self._stop_wanted, self._tokens = False, 0
        self._with_final = steps[0].loss_config.needs_final_states
        self.shapes = loader.shapes_until(total_steps)
        self.kept = KeptFeatures() if config.keep_features else None
        self.slots = self._make_slots()
        devices = [place.device for target in targets for place in target.model.parameters()]
        devices = sorted({*devices, *(step.drafter.device for step in steps)}, key=str)
        self._is_on_gpu = any(device.type == "cuda" for device in devices)
        self.memory = MemoryWatch(devices)
        self.waits = WaitCount(diagnostics.count_waits, is_on_gpu=self._is_on_gpu)
        keep = TRACED if diagnostics.trace_steps else KEPT
        self.workers = self._make_workers(cpu_threads, keep)
        self.record = Record([worker.lane for worker in self.workers], keep)

    def _make_slots(self) -> list[list[Slot]]:
        rows, length, target = self.loader.config.num_rows, self.loader.config.row_length, self.targets[0]
        width = target.hidden_size * (len(target.layer_ids) + self._with_final)
        depth = range(self.config.channel_depth)
        return [[Slot(rows, length, width, target.dtype, step.drafter.device) for _ in depth] for step in self.steps]

    def _make_workers(self, cpu_threads: int | None, keep: int) -> list[Worker]:
        workers = [Worker("loader", torch.device("cpu"), self._load, cpu_threads=1, keep_spans=keep)]
        for i, target in enumerate(self.targets):
            body = self._target_body(i)
            workers.append(Worker(f"target {i}", target.device, body, cpu_threads, keep_spans=keep))
        for i, step in enumerate(self.steps):
            body, leave, name = self._drafter_body(i), self._leave(i), f"drafter {i}"
            workers.append(Worker(name, step.drafter.device, body, cpu_threads, at_end=leave, keep_spans=keep))
        return workers

    def start(self) -> None:
        """Starts every thread; they warm up and then wait for each other."""
        self.started = time.monotonic()
        self.crew.start(self.workers)

    def is_running(self) -> bool:
        """Whether any worker still runs; lets the steady state begin once everybody is warm."""
        is_warm = not self._go.is_set() and all(worker.warm for worker in self.workers)
        if is_warm and (self.world is None or self.world.is_everyone_ready()):
            self.when_warm()
            self.memory.begin()
            self.started = time.monotonic()
            self.watchdog.begin_steady()
            self._go.set()
        self.record.read_devices()
        return self.crew.is_alive()

    @property
    def has_begun(self) -> bool:
        """Whether the steady state has begun."""
        return self._go.is_set()

    def ask_to_stop(self) -> None:
        """Lets every drafter, of all nodes, finish the step it is in, and end there."""
        self._stop_wanted = True
        if self.world is not None:
            self.world.want_stop()

    def abort_sums(self) -> None:
        """Ends the collectives on GPUs that drafters wait in; all at once, since each waits for the others."""
        sums = [step.sum_gradients for step in self.steps]
        aborts = [thread for one in sums if isinstance(one, GradientSum) for thread in one.abort()]
        for thread in aborts:
            thread.join(ABORT_SECONDS)

    def busy_shares(self) -> Busy:
        """Share of the time since steady state began that each side's workers computed, on average."""
        return busy_shares(self.workers, time.monotonic() - self.started)

    def describe_sides(self) -> list[str]:
        """For each worker: busy, waiting for input, waiting to hand over; and which side limits the run."""
        return describe_sides(self.workers, self.channel, time.monotonic() - self.started)

    def describe_links(self) -> list[str]:
        """How features reach each drafter from each target on another device."""
        pairs = {(target.device, slots[0].device) for target in self.targets for slots in self.slots}
        return [describe_link(source, to) for source, to in sorted(pairs, key=str) if source != to]

    # Bodies, each in its own thread

    def _settle(self, worker: Worker, settle: Settle | None) -> None:
        if settle is not None:
            self.memory.expect(worker.device, self._turns.settle(settle))

    def _begin(self, worker: Worker) -> None:
        worker.lane.begin()
        worker.warm = True
        while not self._go.wait(0.05):
            if self.crew.first_error is not None:
                raise Stopped
        worker.clock.restart()

    def _load(self, worker: Worker) -> None:
        if self._is_on_gpu:
            loader = self.loader
            take_page_locked(loader.config, len(self.steps), loader.row_budget, self.config.channel_depth)
            if self.kept is not None and len(self.steps) > 1:
                # Two workers may compute the same.
                most = loader.num_contents(self.first_step, self.total_steps) + len(self.targets)
                self.kept.take(most, self.slots[0][0].buffer)
        self._begin(worker)

        def fills() -> Iterator[Fill]:
            started = time.perf_counter()
            for fill in self.loader.fills(self.first_step, self.total_steps):
                worker.step = fill.passes[0].step
                self.delay(worker.name, fill.number)
                ready = pinned(fill) if self._is_on_gpu else fill
                worker.lane.add("pack", started, worker.step)
                with worker.lane.span(HAND_OVER, worker.step):
                    yield ready
                started = time.perf_counter()

        self.channel.feed(fills())

    def _target_body(self, index: int) -> Callable[[Worker], None]:
        def body(worker: Worker) -> None:
            config = self.loader.config
            rows, length = config.num_rows, config.row_length
            filler = Filler(
                self.targets[index],
                rows,
                length,
                self.kept,
                with_final=self._with_final,
                clock=worker.clock,
                lane=worker.lane,
            )
            with self._turns.compiling():
                reached = self.slots if self.config.topology == "pool" else [self.slots[index]]
                first_slots = [slots[0] for slots in reached]
                settle = warm_up_target(worker.name, filler, first_slots, self.shapes, config, self._warmed)
            self._settle(worker, settle)
            self._begin(worker)
            while (work := self._next_work(worker, index)) is not None:
                self.delay(worker.name, work.fill.number)
                with self._turn, worker.lane.span("fill", worker.step):
                    filler.fill(self.slots[work.drafter][work.slot], work.fill)
                self.channel.publish(work)
                self.record.depth(self.channel.filled())

        return body

    def _next_work(self, worker: Worker, index: int) -> Work | None:
        started, before = time.perf_counter(), self.channel.target_waits[index]
        work = self.channel.next_work(index)
        after = self.channel.target_waits[index]
        if work is not None:
            worker.step = step_of(work.fill)
        for_input_s, to_hand_over_s = (now - then for now, then in zip(after, before, strict=True))
        worker.lane.waited(started, for_input_s, to_hand_over_s, worker.step)
        return work

    def _drafter_body(self, index: int) -> Callable[[Worker], None]:
        def body(worker: Worker) -> None:
            step = self.steps[index]
            step.timed = lambda what: worker.lane.both(what, worker.step)
            with self._turns.compiling():
                started = time.perf_counter()
                settle = warm_up_drafter(step, self.slots[index][0], self.loader, self._tell(worker))
                self.reports.put(WarmedUp(worker.name, "forward, backward, update", time.perf_counter() - started))
            self._settle(worker, settle)
            if self.restore is not None:
                self.restore(step)
            self._begin(worker)
            if self.world is not None:
                self.channel.meet()
                rank, size = self.loader.config.first_drafter + index, self.loader.config.num_drafters
                client, device = self.world.client(), step.drafter.device
                near = len(self.steps) if step.seat is not None else None
                meet = self.channel.meet
                total = GradientSum(
                    client, rank, size, device, self.sum_seconds, meet, near=near, launch=self._launches
                )
                step.join(total, total if step.seat is not None else None)
            self._train(worker, index)
            self._finish_together(index)

        return body

    def _warmed(self, part: WarmedUp) -> None:
        self.reports.put(part)
        self.channel.check()

    def _tell(self, worker: Worker) -> Callable[[str], None]:
        started = time.perf_counter()
        return lambda line: self.reports.put(WarmedUp(worker.name, line, time.perf_counter() - started))

    def _leave(self, index: int) -> Callable[[], None]:
        def leave() -> None:
            step = self.steps[index]
            is_gpu = step.drafter.device.type == "cuda"
            if step.sum_gradients is None or (is_gpu and self.crew.first_error is not None):
                # A group with a sum on its way cannot be left on a GPU: control aborts it.
                return
            # Others may wait in the same collective: leaving the group ends their wait.
            step.sum_gradients.drop()
            step.sum_gradients = None

        return leave

    def _finish_together(self, index: int) -> None:
        """Leaves when every drafter has its last sum: a group that is left breaks what others still receive."""
        if self.world is not None:
            if self.steps[index].drafter.device.type == "cuda":
                # The thread is ahead of its GPU: the last sum may still be running there.
                torch.cuda.synchronize(self.steps[index].drafter.device)
            self.channel.meet()
            if index == 0:
                # Other nodes' control says whether they live, so waiting for them is no stall.
                self.world.finish(self.go_on)
            self.channel.meet()
        if index == 0 and self.last_step < self.total_steps - 1:
            # Stopped early: the loader and the targets still have work queued.
            self.channel.stop()

    def go_on(self) -> None:
        """By a worker inside something long: says that it moves; raises Stopped when the run is ending."""
        self.watchdog.beat()
        self.channel.check()

    def _train(self, worker: Worker, index: int) -> None:
        if index == 0 and self.is_first_node:
            with worker.clock.spend(BOUNDARY):
                self.at_boundary(self.first_step)
        config = self.loader.config
        number = self.first_step * config.per_drafter // config.reuse * config.num_drafters
        number += config.first_drafter + index
        is_done = False
        while not is_done:
            worker.step = max(self.first_step, number // config.num_drafters * config.reuse // config.per_drafter)
            self.delay(worker.name, number)
            with worker.lane.span(INPUT, worker.step):
                work = self.channel.take(index, number)
            self.record.depth(self.channel.filled())
            slot = self.slots[index][work.slot]
            slot.await_filled()
            worker.lane.idle_on_device(INPUT, worker.step)
            with worker.clock.spend(BUSY):
                is_done = self._consume(worker, index, work.fill, slot)
            number += config.num_drafters

    def _consume(self, worker: Worker, index: int, fill: Fill, slot: Slot) -> bool:
        """Trains on every pass of a fill; returns whether the run's last step is done."""
        step = self.steps[index]
        for one in fill.passes:
            worker.step = one.step
            blocks = to_device(one, step.drafter.device)
            if one.is_last:
                with worker.clock.spend(OTHERS), worker.lane.span(OTHERS, one.step):
                    if index == 0:
                        # Before the drafters meet for this step's sum, so that every one of them knows the last step.
                        self._settle_last_step(one.step)
                    step.begin_sum()
            with worker.lane.both("micro-batch", one.step):
                step.micro_batch(slot.features_RTC, blocks, one.denominator)
            if one is fill.passes[-1]:
                slot.mark_drained(self.diagnostics.poison)
                self.channel.release(index)
            if one.is_last:
                self._finish(worker, index, one)
                if one.step >= self.last_step:
                    return True
        return False

    def _finish(self, worker: Worker, index: int, one: MicroBatch) -> None:
        sums = self.steps[index].finish(one.step)
        rank = self.loader.config.first_drafter + index
        self.reports.put(report_micro_batches(one.step, rank, self.steps[index]))
        if index == 0:
            self._tokens += one.step_tokens
            self.reports.put(report_step(one.step, sums, self.steps[index], self._tokens))
            self.memory.step()
            if self.is_first_node:
                with worker.clock.spend(BOUNDARY):
                    self.at_boundary(one.step + 1)

    def _settle_last_step(self, step_number: int) -> None:
        world = self.world
        if world is not None and world.node > 0:
            self.last_step = world.follow(step_number, self.go_on)
            return
        is_wanted = self._stop_wanted or (world is not None and world.is_stop_wanted())
        if is_wanted and self.last_step == self.total_steps - 1:
            self.last_step = step_number
        if world is not None:
            world.lead(step_number, self.last_step)
