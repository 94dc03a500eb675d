"""What an asynchronous save costs a training step: steps without one, then as many around one, and what was written.

usage: python benchmarks/device_save.py [--shapes qwen3-8b|tiny] [--steps 100] [--root DIR] [--how kernels]

Random features and weights, no target. Prints milliseconds for every step, the overall slowdown, and whether the
checkpoint equals, bit for bit, what the drafter held at that step.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from blockdraft.commands.bench_cases import choose_make_attend, make_drafter, make_problem, presets
from blockdraft.config import LossConfig, OptimConfig, RunConfig
from blockdraft.models.compiled import How
from blockdraft.runtime.saver import Saver
from blockdraft.runtime.spans import Lane
from blockdraft.training.checkpoint import DRAFTER, OPTIMIZER, contents_of, verify
from blockdraft.training.step import Blocks, DrafterStep


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def make_step(args: argparse.Namespace, device: torch.device) -> tuple[DrafterStep, Tensor, Blocks]:
    shape = presets()[args.shapes]
    num_tokens, num_anchors = (4096, 512) if args.shapes != "tiny" else (64, 8)
    dtype = torch.bfloat16
    problem = make_problem(shape, num_tokens, num_anchors, device, dtype)
    how = cast(How, args.how) if device.type == "cuda" else "nothing"
    step = DrafterStep(
        make_drafter(shape, device, dtype), problem.ends, problem.ends, loss=LossConfig(),
        optim=OptimConfig(lr=1e-4), total_steps=10 * args.steps,
        make_attend=choose_make_attend("sdpa" if how == "nothing" else "own", how), how=how,
    )  # fmt: skip
    slots = (1, num_anchors, shape.block_size - 1)
    weight_RAS = problem.weight_N.view(slots).float()
    blocks = Blocks(
        problem.input_ids_RT, problem.document_RT, problem.position_RT, problem.anchor_RA,
        problem.label_N.view(slots), weight_RAS > 0, weight_RAS,
    )  # fmt: skip
    return step, problem.features_RTC, blocks


class Clock:
    """Milliseconds of each step, by events on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.marks: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        if not self.is_cuda:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def steps_ms(self) -> list[float]:
        found = []
        for one, other in zip(self.marks, self.marks[1:], strict=False):
            if isinstance(one, float) and isinstance(other, float):
                found.append(1e3 * (other - one))
            elif isinstance(one, torch.cuda.Event) and isinstance(other, torch.cuda.Event):
                found.append(one.elapsed_time(other))
        return found


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Trainer:
    """One drafter on one micro-batch, again and again, on the caller's thread."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.device, self.count = device, 0
        self.step, self.features_RTC, self.blocks = make_step(args, device)
        self.denominator = float(self.blocks.weight_RAS.sum())
        self.held: dict[str, Tensor] = {}

    def train(self, clock: Clock, num_steps: int, save_at: int = -1, saver: Saver | None = None) -> float:
        """Seconds that the steps took, a save begun behind one of them."""
        settle(self.device)
        started = time.perf_counter()
        clock.mark()
        for index in range(num_steps):
            self.step.micro_batch(self.features_RTC, self.blocks, self.denominator)
            self.step.finish(self.count)
            self.count += 1
            if index == save_at and saver is not None:
                # On the device, so that the comparison needs no second copy to the host now.
                self.held = {name: value.detach().clone() for name, value in self._named().items()}
                begun = time.perf_counter()
                saver.save(self.count)
                say(f"save() took {1e3 * (time.perf_counter() - begun):.1f} ms of the drafter's thread")
            clock.mark()
        settle(self.device)
        return time.perf_counter() - started

    def _named(self) -> dict[str, Tensor]:
        named = {f"w.{name}": value for name, value in self.step.drafter.state_dict().items()}
        return named | {f"m.{name}": value for name, value in self.step.optimizer.state_tensors().items()}

    def make_saver(self, root: Path, fail: Callable[[str], None]) -> Saver:
        """Ready to save, its host memory taken."""
        step = self.step
        saver = Saver(
            root, 2, contents_at=lambda done: contents_of(done, step.drafter, step.optimizer, RunConfig()),
            fail=fail, tick=lambda: None, check=lambda: None, await_metrics=lambda _step, _over: True, say=say,
            lane=Lane("writer", torch.device("cpu")),
        )  # fmt: skip
        started = time.perf_counter()
        saver.prepare()
        size = saver.contents_at(0).num_bytes() / 2**30
        say(f"host memory for {size:.2f} GiB taken in {time.perf_counter() - started:.1f} s")
        step.before_update = saver.before_update
        return saver


def run(args: argparse.Namespace) -> int:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    trainer = Trainer(args, device)
    settle(device)
    say(f"{args.shapes} built in {time.perf_counter() - started:.1f} s")
    say(f"three first steps, compiling included: {trainer.train(Clock(device), 3):.1f} s")
    root, failures = Path(args.root or tempfile.mkdtemp()), list[str]()
    saver = trainer.make_saver(root, failures.append)
    plain, around = Clock(device), Clock(device)
    trainer.train(Clock(device), 10)
    plain_s = trainer.train(plain, args.steps)
    say(f"{args.steps} steps without a save: {plain_s:.2f} s")
    written = threading.Thread(target=watch_writer, args=(root, time.perf_counter()), daemon=True)
    written.start()
    around_s = trainer.train(around, args.steps, args.steps // 10, saver)
    started = time.perf_counter()
    saver.finish(lambda: None)
    say(f"writer needed {time.perf_counter() - started:.1f} s more behind the last step")
    for name, clock in (("without", plain), ("with", around)):
        say(f"ms of each step {name}: " + " ".join(f"{ms:.0f}" for ms in clock.steps_ms()))
    share = around_s / plain_s - 1
    say(f"{args.steps} steps: {plain_s:.2f} s without a save, {around_s:.2f} s around one: {share:+.1%}")
    if failures:
        say(f"FAILED: {failures[0]}")
        return 1
    return compare(root, trainer.held)


def watch_writer(root: Path, started: float) -> None:
    """Says when the checkpoint got its name."""
    with contextlib.suppress(OSError):
        while not list(root.glob("step_*")):
            time.sleep(0.05)
        say(f"checkpoint complete {time.perf_counter() - started:.1f} s after the first of these steps")


def compare(root: Path, held: dict[str, Tensor]) -> int:
    (directory,) = root.glob("step_*")
    started = time.perf_counter()
    verify(directory)
    say(f"checksums verified in {time.perf_counter() - started:.1f} s")
    wrong, num_tensors = [], 0
    for prefix, file in (("w.", DRAFTER), ("m.", OPTIMIZER)):
        for name, value in load_file(directory / file).items():
            num_tensors += 1
            kept = held[prefix + name]
            if not torch.equal(value.to(kept.device), kept):
                wrong.append(name)
    shutil.rmtree(root)
    say(f"{num_tensors} tensors of {len(held)} compared with the state at that step: {len(wrong)} differ {wrong[:3]}")
    return int(bool(wrong) or num_tensors != len(held))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--shapes", default="qwen3-8b", choices=sorted(presets()))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--root", default="")
    parser.add_argument("--how", default="kernels")
    # torch's own warnings are not what is measured.
    warnings.simplefilter("ignore")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
