"""A whole run on GPUs with random weights: target and drafter threads, hundreds of steps of mixed document lengths.

usage: python benchmarks/device_run.py [--shapes tiny|hybrid|qwen3-8b|qwen3.6-27b] [--targets cuda:0 ...]
           [--drafters cuda:0 ...] [--attention own] [--steps 300] [--documents 400]

Prints what a run must show: compilations after warm-up (0), allocated and reserved memory over the run (flat), share of
time busy per side, tokens per second, and the throughput of each side running alone in the same process.
"""

import argparse
import contextlib
import functools
import queue
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np
import torch
from device_shapes import TARGETS, make_loader, make_step, make_target

from blockdraft.config import RuntimeConfig
from blockdraft.data.loader import Loader
from blockdraft.models.compiled import How
from blockdraft.models.target import Target
from blockdraft.runtime.distributed import join_world
from blockdraft.runtime.pipeline import Delay, Pipeline, no_delay
from blockdraft.runtime.reports import StepDone, WarmedUp
from blockdraft.runtime.slots import Filler, Slot
from blockdraft.runtime.startup import Protection
from blockdraft.runtime.transfers import pinned, to_device
from blockdraft.runtime.waits import WaitCount
from blockdraft.runtime.workers import WorkerError
from blockdraft.training.metrics import report
from blockdraft.training.step import DrafterStep


class Ran(NamedTuple):
    """A finished run."""

    losses: list[float]
    rate: float
    """Tokens per second, all steps."""
    later_rate: float
    """The same over the second half of the tokens."""
    seconds: float
    start_up_s: float
    pipeline: Pipeline


class Rates(NamedTuple):
    """Tokens per second of each side by itself."""

    target: float
    drafter: float


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def run(args: argparse.Namespace) -> int:
    dtype = torch.bfloat16 if args.targets[0] != "cpu" else torch.float32
    protection = Protection(say) if "cpu" not in args.targets else None
    targets = [make_target(args.shapes, device, dtype) for device in args.targets]
    say(f"target: {targets[0].note}")
    count = len(args.drafters)
    compiled: How = "kernels" if args.attention == "own" else "stack" if count == 1 else "layer"
    steps = [
        make_step(
            args.shapes, targets[0], device, how="nothing" if args.attention == "sdpa" else compiled,
            accumulation=count, total_steps=args.steps, attention=args.attention,
        )
        for device in args.drafters
    ]  # fmt: skip
    loader = make_loader(
        args.shapes, targets[0].vocab_size, documents=args.documents, num_drafters=count, accumulation=count
    )
    waits = WaitCount(args.count_waits)
    ran = train(
        "pool", loader, targets, steps, args.steps, protection=protection, waits=waits,
        delay=functools.partial(die, args.die),
    )  # fmt: skip
    tell(ran, protection, waits)
    if protection is not None:
        torch.compiler.set_stance("default")
    alone(loader, targets[0], steps[0], args.steps)
    if protection is not None:
        protection.end()
    return 0


def train(
    topology: str,
    loader: Loader,
    targets: list[Target],
    steps: list[DrafterStep],
    total_steps: int,
    *,
    protection: Protection | None,
    waits: WaitCount,
    delay: Delay = no_delay,
    restore: Callable[[DrafterStep], None] | None = None,
) -> Ran:
    """Trains so many steps; `restore` is called in each drafter's thread after its warm-up."""
    shapes = loader.shapes_until(total_steps)
    say(f"{len(shapes)} target shapes, epoch of {loader.counts.fills} slots, padding {loader.counts.padding}")
    places = tuple(str(target.device) for target in targets), tuple(str(step.drafter.device) for step in steps)
    pipeline = Pipeline(
        RuntimeConfig(topology=topology, targets=places[0], drafters=places[1], channel_depth=2),
        loader, targets, steps, first_step=0, total_steps=total_steps, at_boundary=lambda _step: None,
        restore=restore, world=join_world() if len(steps) > 1 else None,
        when_warm=protection.steady if protection else lambda: None, delay=delay,
    )  # fmt: skip
    for line in pipeline.describe_links():
        say(line)
    started = time.monotonic()
    losses: list[float] = []
    marks: list[tuple[float, int]] = []
    tokens = watch(pipeline, losses, marks, waits)
    seconds = time.monotonic() - pipeline.started
    return Ran(losses, tokens / seconds, pace(marks), seconds, pipeline.started - started, pipeline)


def tell(ran: Ran, protection: Protection | None, waits: WaitCount) -> None:
    """Everything that a run must show."""
    losses = ran.losses
    say(f"start-up {ran.start_up_s:.1f} s, {len(losses)} steps in {ran.seconds:.1f} s, {ran.rate:,.0f} tok/s")
    shown = " ".join(f"{loss:.4f}" for loss in losses[:: max(1, len(losses) // 20)])
    say(f"losses: {shown}, last {losses[-1]:.4f}, all finite {all(np.isfinite(losses))}")
    say(f"second half: {ran.later_rate:,.0f} tok/s")
    for line in ran.pipeline.describe_sides():
        say(line)
    if protection is not None:
        say(f"after warm-up: {protection.compilations()}")
        waits.end(ran.pipeline.workers)
        for line in (*ran.pipeline.memory.describe(), *waits.describe()):
            say(line)


def pace(marks: list[tuple[float, int]]) -> float:
    """Tokens per second from half of all tokens on."""
    later = [mark for mark in marks if 2 * mark[1] >= marks[-1][1]]
    return (later[-1][1] - later[0][1]) / max(1e-9, later[-1][0] - later[0][0])


def watch(pipeline: Pipeline, losses: list[float], marks: list[tuple[float, int]], waits: WaitCount) -> int:
    """Runs the pipeline to its end; the tokens trained on."""
    pipeline.start()
    tokens = 0
    while pipeline.is_running() and pipeline.crew.first_error is None:
        tokens = drain(pipeline, losses, tokens, waits)
        marks.append((time.monotonic(), tokens))
        pipeline.watchdog.check()
    if pipeline.crew.first_error is not None:
        pipeline.abort_sums()
    pipeline.crew.join()
    return drain(pipeline, losses, tokens, waits)


def die(victim: str, worker: str, number: int) -> None:
    """Kills the worker that `--die` names, before its piece of work of that number."""
    if victim == f"{worker}:{number}":
        raise RuntimeError(f"{worker} dies at {number}, as asked at {time.time():.1f}")


def drain(pipeline: Pipeline, losses: list[float], tokens: int, waits: WaitCount) -> int:
    while True:
        try:
            item = pipeline.reports.get(timeout=0.02)
        except queue.Empty:
            return tokens
        pipeline.watchdog.beat()
        if isinstance(item, WarmedUp):
            say(f"warm-up: {item.worker}, {item.what}, {item.seconds:.2f} s")
        elif isinstance(item, StepDone):
            sums, _ = item.read(15)
            tokens = item.tokens
            losses.append(report(sums).loss)
            waits.step(len(losses), pipeline.workers)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """As a worker's thread has it: Triton launches on the current device, wherever its tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def alone(loader: Loader, target: Target, step: DrafterStep, total_steps: int, most: int = 40) -> Rates:
    """Throughput of each side by itself, over the same slots."""
    device = step.drafter.device
    fills = []
    for fill in loader.fills(0, min(most, total_steps)):
        fills.append(pinned(fill) if device.type == "cuda" else fill)
        if len(fills) == most:
            break
    config = loader.config
    width = target.hidden_size * len(target.layer_ids)
    here = Slot(config.num_rows, config.row_length, width, target.dtype, target.device)
    filler = Filler(target, config.num_rows, config.row_length)
    used = sum(sum(fill.used_R) for fill in fills)
    rates = []
    for name in ("target", "drafter"):
        synchronize()
        started = time.monotonic()
        slot = Slot(config.num_rows, config.row_length, width, target.dtype, device) if name == "drafter" else here
        with warnings.catch_warnings(record=True) as seen, on_device(slot.device):
            warnings.simplefilter("always")
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            for fill in fills:
                if name == "target":
                    filler.fill(slot, fill)
                else:
                    for one in fill.passes:
                        step.begin_sum()
                        step.micro_batch(slot.features_RTC, to_device(one, device), one.denominator)
                    step.finish(total_steps - 1)
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        synchronize()
        rates.append(used / (time.monotonic() - started))
        say(f"{name} alone: {rates[-1]:,.0f} tok/s over {len(fills)} slots")
        for place, count in Counter(f"{one.filename}:{one.lineno}" for one in seen).most_common(5):
            say(f"  waited for the device {count} times in {place}")
    return Rates(*rates)


def synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", choices=list(TARGETS), default="tiny")
    parser.add_argument("--targets", nargs="+", default=["cpu"])
    parser.add_argument("--drafters", nargs="+", default=["cpu"])
    parser.add_argument("--attention", choices=["sdpa", "flex", "own"], default="sdpa")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--count-waits", type=int, default=0, help="calls of workers that wait, over so many steps")
    parser.add_argument("--die", default="", help="such as 'drafter 1:21': this worker fails there")
    try:
        return run(parser.parse_args())
    except WorkerError as error:
        say(f"{error}\nended at {time.time():.1f}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
