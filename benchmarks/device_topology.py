"""Several targets and several drafters with random weights: 5 + 3 on eight GPUs, 4 + 4, 6 + 2, pairs.

usage: python benchmarks/device_topology.py [--split 5+3] [--pairs] [--shapes qwen3.6-27b] [--steps 200] [--compare 30]
           [--trace FILE.json] [--how kernels]

Targets take the first devices, drafters the next ones; `--pairs` ties target i to drafter i. `--crowded` puts several
workers on a GPU: order, sums, memory and losses show with fewer GPUs, speeds do not. `--device cpu` rehearses it
on threads. Prints tokens per second, what each worker's time went into, depth of the channel, start-up, compilations
after warm-up, memory, waits for the interpreter lock; each side alone and what `blockdraft plan` makes of
them; and the losses beside those of one target and one drafter with the same micro-batches.
"""

import argparse
import gc
import json
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from device_run import Ran, Rates, alone, say, synchronize, tell, train
from device_shapes import TARGETS, make_loader, make_step, make_target

from blockdraft.data.loader import Loader
from blockdraft.models.compiled import How
from blockdraft.models.target import Target
from blockdraft.runtime.chrome_trace import chrome_trace, last_steps
from blockdraft.runtime.sides import busy_shares
from blockdraft.runtime.stages import Links, Stages, apart
from blockdraft.runtime.startup import Protection
from blockdraft.runtime.waits import WaitCount
from blockdraft.runtime.workers import WorkerError
from blockdraft.training.step import DrafterStep

BF16_ROUNDING = 2**-8


class Late(NamedTuple):
    """How much later than asked a sleeping thread went on, in milliseconds."""

    median: float
    p99: float
    most: float
    samples: int

    def __str__(self) -> str:
        return f"median {self.median:.2f} ms, 99% {self.p99:.2f} ms, most {self.most:.1f} ms ({self.samples:,} naps)"


class LockProbe:
    """A thread that naps for a millisecond again and again: to go on it needs the interpreter lock, as every worker."""

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lock probe", daemon=True)

    def __enter__(self) -> "LockProbe":
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.is_set():
            started = time.perf_counter()
            time.sleep(1e-3)
            self.late_ms.append((time.perf_counter() - started) * 1e3 - 1)

    def found(self, share: float = 1.0) -> Late:
        """Over the last share of the naps: start-up compiles in the lock."""
        late = np.array(self.late_ms[int(len(self.late_ms) * (1 - share)) :] or [0.0])
        return Late(float(np.median(late)), float(np.quantile(late, 0.99)), float(late.max()), len(late))


class Split(NamedTuple):
    """Devices of both sides."""

    targets: list[str]
    drafters: list[str]

    @staticmethod
    def of(text: str, device: str, is_crowded: bool) -> "Split":
        """Such as 5+3: the first five GPUs and the next three; crowded, a GPU for each drafter and targets in turn."""
        num_targets, num_drafters = map(int, text.split("+"))
        names = [device] * 99 if device == "cpu" else [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        if is_crowded:
            if len(names) < num_drafters:
                raise SystemExit(f"--split {text} --crowded needs {num_drafters} GPUs, found {len(names)}")
            return Split([names[index % len(names)] for index in range(num_targets)], names[:num_drafters])
        if len(names) < num_targets + num_drafters:
            raise SystemExit(f"--split {text} needs {num_targets + num_drafters} GPUs, found {len(names)}")
        return Split(names[:num_targets], names[num_targets : num_targets + num_drafters])


def run(args: argparse.Namespace) -> None:
    split = Split.of(args.split, args.device, args.crowded)
    is_gpu = args.device != "cpu"
    with LockProbe() as idle:
        time.sleep(0.5)
    protection = Protection(say) if is_gpu else None
    targets, steps = build(args, split, is_gpu)
    first = {
        f"master.{name}": value.detach().to("cpu", copy=True) for name, value in steps[0].optimizer.masters.items()
    }
    loader = make_loader_of(args, len(steps))
    with LockProbe() as probe:
        ran = train(
            "pairs" if args.pairs else "pool", loader, targets, steps, args.steps,
            protection=protection, waits=WaitCount(0),
        )  # fmt: skip
    tell(ran, protection, WaitCount(0))
    say(f"interpreter lock, nothing running: {idle.found()}")
    steady = ran.seconds / (ran.seconds + ran.start_up_s)
    say(f"interpreter lock, steady state: {probe.found(steady)}")
    if args.trace:
        write_trace(ran, Path(args.trace))
    if protection is not None:
        torch.compiler.set_stance("default")
    rates = alone(loader, targets[0], steps[-1], args.steps, most=12)
    summary(args, split, ran, rates, probe.found(steady), steps)
    if args.compare:
        compare(args, ran, targets[0], steps[0], first, protection)
    if protection is not None:
        protection.end()


def build(args: argparse.Namespace, split: Split, is_gpu: bool) -> tuple[list[Target], list[DrafterStep]]:
    dtype = torch.bfloat16 if is_gpu else torch.float32
    targets = []
    for device in split.targets:
        started = time.monotonic()
        targets.append(make_target(args.shapes, device, dtype))
        synchronize()
        say(f"target on {device}: built in {time.monotonic() - started:.1f} s")
    how: How = args.how if is_gpu else "nothing"
    steps = [
        make_step(
            args.shapes, targets[0], device, how=how, accumulation=len(split.drafters), total_steps=args.steps
        )
        for device in split.drafters
    ]  # fmt: skip
    for target in targets:
        target.drop_decoding()
    gc.collect()
    return targets, steps


def make_loader_of(args: argparse.Namespace, num_drafters: int, accumulation: int | None = None) -> Loader:
    return make_loader(
        args.shapes, TARGETS[args.shapes].vocab_size, documents=args.documents, num_drafters=num_drafters,
        accumulation=accumulation or num_drafters,
    )  # fmt: skip


def compare(
    args: argparse.Namespace, ran: Ran, target: Target, step: DrafterStep, first: dict[str, torch.Tensor],
    protection: Protection | None,
) -> None:  # fmt: skip
    """The first steps once more with one target and one drafter, from the same weights."""

    def restore(replica: DrafterStep) -> None:
        replica.optimizer.load_state_tensors(first)

    count = min(args.compare, args.steps)
    step.sum_gradients = None
    micro_batches = int(args.split.split("+")[1])
    one = train(
        "pool", make_loader_of(args, 1, micro_batches), [target], [step], count,
        protection=protection, waits=WaitCount(0), restore=restore,
    )  # fmt: skip
    apart = [abs(a - b) / abs(b) for a, b in zip(ran.losses[:count], one.losses, strict=True)]
    say(f"1 + 1 with {micro_batches} micro-batches a step, losses: {' '.join(f'{loss:.4f}' for loss in one.losses)}")
    say(f"losses of {args.split} beside them, relative: {' '.join(f'{share:.1e}' for share in apart)}")
    say(
        f"{args.split} and 1 + 1: losses of {count} steps at most {max(apart):.2e} apart, bf16 rounding is "
        f"{BF16_ROUNDING:.1e}: {'within' if max(apart) < BF16_ROUNDING else 'NOT within'}"
    )


def write_trace(ran: Ran, path: Path) -> None:
    ran.pipeline.record.read_devices()
    shown = last_steps(ran.pipeline.record, 10)
    if shown is None:
        say("no trace: no step was recorded")
        return
    path.write_text(json.dumps(chrome_trace(ran.pipeline.record, shown)) + "\n", encoding="utf-8")
    say(f"trace of steps {shown.first_step + 1} to {shown.last_step + 1}: {path}")


def summary(
    args: argparse.Namespace, split: Split, ran: Ran, rates: Rates, late: Late, steps: list[DrafterStep]
) -> None:
    """One line that can stand in a table."""
    count = len(split.drafters)
    weights = list(steps[0].drafter.parameters())
    stages = Stages(
        rates.target,
        rates.drafter,
        ran.rate * ran.seconds / (len(ran.losses) * count),
        sum(weight.numel() * weight.element_size() for weight in weights),
        accumulation=count,
    )
    planned = apart(stages, 1, len(split.targets), count, Links())
    busy = busy_shares(ran.pipeline.workers, ran.seconds)
    channel = ran.pipeline.channel
    cells = {
        "split": f"{args.split}{' pairs' if args.pairs else ''}",
        "steps": len(ran.losses),
        "tok/s": f"{ran.rate:,.0f}",
        "second half": f"{ran.later_rate:,.0f}",
        "plan says": f"{planned.tok_s:,.0f} ({planned.limit})",
        "target alone": f"{rates.target:,.0f}",
        "drafter alone": f"{rates.drafter:,.0f}",
        "target busy": f"{busy.target:.0%}",
        "drafter busy": f"{busy.drafter:.0%}",
        "channel": f"{channel.mean_depth():.1f}/{channel.depth * channel.num_drafters}",
        "start-up": f"{ran.start_up_s:.0f} s",
        "lock median, 99%": f"{late.median:.2f}, {late.p99:.2f} ms",
    }
    say(f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}\n| {' | '.join(map(str, cells.values()))} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="5+3", help="targets + drafters")
    parser.add_argument("--pairs", action="store_true", help="target i feeds drafter i")
    parser.add_argument("--crowded", action="store_true", help="several workers a GPU: what holds with fewer GPUs")
    parser.add_argument("--shapes", choices=list(TARGETS), default="qwen3.6-27b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--how", choices=["kernels", "stack", "layer"], default="kernels", help="drafters run")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--compare", type=int, default=30, help="steps repeated with 1 + 1; 0 for none")
    parser.add_argument("--trace", default="", help="JSON file for the last ten steps")
    try:
        run(parser.parse_args())
    except WorkerError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
