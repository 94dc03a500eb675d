"""A whole run on GPUs with random weights: target and drafter threads, hundreds of steps of mixed document lengths.

usage: python benchmarks/device_run.py [--shapes tiny|hybrid|qwen3-8b] [--targets cuda:0 ...] [--drafters cuda:0 ...]
           [--attention flex] [--steps 300] [--documents 400]

Prints what a run must show: compilations after warm-up (0), allocated and reserved memory over the run (flat), share of
time busy per side, tokens per second, and the throughput of each side running alone in the same process.
"""

import argparse
import functools
import queue
import sys
import time
import warnings
from collections import Counter
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

from blockdraft.config import DrafterConfig, LossConfig, OptimConfig, RuntimeConfig
from blockdraft.data.anchors import position_weights
from blockdraft.data.loader import Loader, LoaderConfig
from blockdraft.models.attention import bare_flex_attend, sdpa_attend
from blockdraft.models.drafter import Drafter, derive_shape
from blockdraft.models.target import Target
from blockdraft.runtime.distributed import join_world
from blockdraft.runtime.pipeline import Pipeline
from blockdraft.runtime.reports import StepDone, WarmedUp
from blockdraft.runtime.slots import Filler, Slot
from blockdraft.runtime.startup import Protection
from blockdraft.runtime.transfers import pinned, to_device
from blockdraft.runtime.waits import WaitCount
from blockdraft.runtime.workers import WorkerError
from blockdraft.training.metrics import report
from blockdraft.training.step import DrafterStep, MakeAttend

TARGETS = {
    "tiny": Qwen3Config(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    ),
    # Recurrent layers on flash-linear-attention's kernels, whose tuners start cold.
    "hybrid": Qwen3_5TextConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8,
    ),
    "qwen3-8b": Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, rope_theta=1e6, max_position_embeddings=40960,
    ),
}  # fmt: skip
ROW_LENGTH = {"tiny": 512, "hybrid": 512, "qwen3-8b": 4096}
ANCHORS = {"tiny": 32, "hybrid": 32, "qwen3-8b": 512}
DRAFTER_LAYERS = {"tiny": 2, "hybrid": 2, "qwen3-8b": 5}


class RandomDocuments:
    """A token store in memory: rows of ids, lengths spread from 20 to 4,000 tokens or what a row holds."""

    def __init__(self, count: int, longest: int, vocab_size: int) -> None:
        generator = np.random.default_rng(0)
        self.lengths = np.exp(generator.uniform(np.log(20), np.log(longest), count)).astype(np.int64)
        # Sequences with a stride, so that there is something to learn.
        starts, strides = generator.integers(0, vocab_size, count), generator.integers(1, 9, count)
        self.ids = [
            ((start + stride * np.arange(n)) % (vocab_size - 1)).astype(np.int32)
            for start, stride, n in zip(starts, strides, self.lengths, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return _Document(self.ids[index], np.ones(len(self.ids[index]), dtype=np.int8))


class _Document:
    def __init__(self, input_ids: np.ndarray, loss_mask: np.ndarray) -> None:
        self.input_ids, self.loss_mask = input_ids, loss_mask


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def make_target(shapes: str, device: str, dtype: torch.dtype) -> Target:
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(TARGETS[shapes], dtype=dtype)
    return Target(model, None, DRAFTER_LAYERS[shapes])


def make_step(args: argparse.Namespace, target: Target, device: str, dtype: torch.dtype) -> DrafterStep:
    shape = derive_shape(DrafterConfig(num_layers=DRAFTER_LAYERS[args.shapes]), target.facts, target.vocab_size - 1)
    torch.manual_seed(1)
    with torch.device(device):
        drafter = Drafter(shape).to(dtype)
    for weight in drafter.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.02)
    torch.nn.init.constant_(drafter.norm.weight, 0.05)
    ends = target.ends.copy_to(device, dtype)
    attend: MakeAttend = bare_flex_attend if args.attention == "flex" else sdpa_attend
    return DrafterStep(
        drafter, ends, ends, loss=LossConfig(), optim=OptimConfig(accumulation=len(args.drafters)),
        total_steps=args.steps, make_attend=attend, how="stack" if args.attention == "flex" else "nothing",
    )  # fmt: skip


def make_loader(args: argparse.Namespace, vocab_size: int) -> Loader:
    length = ROW_LENGTH[args.shapes]
    store = RandomDocuments(args.documents, min(length, 4000), vocab_size)
    config = LoaderConfig(
        row_length=length, num_rows=1, num_anchors=ANCHORS[args.shapes], sort_window=1024, target_tokens=2 * length,
        block_size=16, weight_L=tuple(float(w) for w in position_weights(16, 7.0)), after_gap=False, seed=0,
        num_drafters=len(args.drafters), accumulation=len(args.drafters), reuse=1,
    )  # fmt: skip
    return Loader(cast(Any, store), config)


def run(args: argparse.Namespace) -> int:
    dtype = torch.bfloat16 if args.targets[0] != "cpu" else torch.float32
    protection = Protection(say) if "cpu" not in args.targets else None
    targets = [make_target(args.shapes, device, dtype) for device in args.targets]
    steps = [make_step(args, targets[0], device, dtype) for device in args.drafters]
    loader = make_loader(args, targets[0].vocab_size)
    shapes = loader.shapes_until(args.steps)
    say(f"{len(shapes)} target shapes, epoch of {loader.counts.fills} slots, padding {loader.counts.padding}")
    waits = WaitCount(args.count_waits)
    pipeline = Pipeline(
        RuntimeConfig(topology="pool", targets=tuple(args.targets), drafters=tuple(args.drafters), channel_depth=2),
        loader, targets, steps, first_step=0, total_steps=args.steps, at_boundary=lambda _step: None,
        world=join_world() if len(steps) > 1 else None,
        when_warm=protection.steady if protection else lambda: None,
        delay=functools.partial(die, args.die),
    )  # fmt: skip
    for line in pipeline.describe_links():
        say(line)
    started = time.monotonic()
    losses: list[float] = []
    marks: list[tuple[float, int]] = []
    tokens = watch(pipeline, losses, marks, waits)
    elapsed = time.monotonic() - pipeline.started
    rate = tokens / elapsed
    say(f"start-up {pipeline.started - started:.1f} s, {args.steps} steps in {elapsed:.1f} s, {rate:,.0f} tok/s")
    shown = " ".join(f"{loss:.4f}" for loss in losses[:: max(1, len(losses) // 20)])
    say(f"losses: {shown}, last {losses[-1]:.4f}, all finite {all(np.isfinite(losses))}")
    say(f"second half: {pace(marks):,.0f} tok/s")
    for line in pipeline.describe_sides():
        say(line)
    if protection is not None:
        say(f"after warm-up: {protection.compilations()}")
        for line in (*pipeline.memory.describe(), *waits.describe()):
            say(line)
        torch.compiler.set_stance("default")
    alone(args, loader, targets[0], steps[0])
    if protection is not None:
        protection.end()
    return 0


def pace(marks: list[tuple[float, int]]) -> float:
    """Tokens per second from half of all tokens on."""
    later = [mark for mark in marks if 2 * mark[1] >= marks[-1][1]]
    return (later[-1][1] - later[0][1]) / max(1e-9, later[-1][0] - later[0][0])


def watch(pipeline: Pipeline, losses: list[float], marks: list[tuple[float, int]], waits: WaitCount) -> int:
    """Runs the pipeline to its end; the tokens trained on."""
    pipeline.start()
    tokens = 0
    while pipeline.is_running() and pipeline.crew.first_error is None:
        tokens = drain(pipeline, losses, tokens)
        marks.append((time.monotonic(), tokens))
        waits.step(len(losses), pipeline.workers)
        pipeline.watchdog.check()
    if pipeline.crew.first_error is not None:
        pipeline.abort_sums()
    pipeline.crew.join()
    return drain(pipeline, losses, tokens)


def die(victim: str, worker: str, number: int) -> None:
    """Kills the worker that `--die` names, before its piece of work of that number."""
    if victim == f"{worker}:{number}":
        raise RuntimeError(f"{worker} dies at {number}, as asked at {time.time():.1f}")


def drain(pipeline: Pipeline, losses: list[float], tokens: int) -> int:
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


def alone(args: argparse.Namespace, loader: Loader, target: Target, step: DrafterStep) -> None:
    """Throughput of each side by itself, over the same slots."""
    device = step.drafter.device
    fills = []
    for fill in loader.fills(0, min(40, args.steps)):
        fills.append(pinned(fill) if device.type == "cuda" else fill)
        if len(fills) == 40:
            break
    config = loader.config
    width = target.hidden_size * len(target.layer_ids)
    here = Slot(config.num_rows, config.row_length, width, target.dtype, target.device)
    filler = Filler(target, config.num_rows, config.row_length)
    used = sum(sum(fill.used_R) for fill in fills)
    for name in ("target", "drafter"):
        synchronize()
        started = time.monotonic()
        slot = Slot(config.num_rows, config.row_length, width, target.dtype, device) if name == "drafter" else here
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            for fill in fills:
                if name == "target":
                    filler.fill(slot, fill)
                else:
                    for one in fill.passes:
                        step.micro_batch(slot.features_RTC, to_device(one, device), one.denominator)
                    step.finish(args.steps - 1)
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        synchronize()
        say(f"{name} alone: {used / (time.monotonic() - started):,.0f} tok/s over {len(fills)} slots")
        for place, count in Counter(f"{one.filename}:{one.lineno}" for one in seen).most_common(5):
            say(f"  waited for the device {count} times in {place}")


def synchronize() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", choices=list(TARGETS), default="tiny")
    parser.add_argument("--targets", nargs="+", default=["cpu"])
    parser.add_argument("--drafters", nargs="+", default=["cpu"])
    parser.add_argument("--attention", choices=["sdpa", "flex"], default="sdpa")
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
