"""`blockdraft bench target` and `blockdraft bench pipeline`: what needs a whole target.

B documents and P tokens of a target batch, T tokens of a row.
"""

import queue
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from blockdraft.commands.bench import GIB, Bench, Options, step_shape
from blockdraft.commands.bench_cases import make_drafter
from blockdraft.commands.bench_shapes import random_loader, random_target
from blockdraft.commands.bench_timing import busy_share, time_rotated
from blockdraft.commands.build import choose_attention
from blockdraft.config import LossConfig, OptimConfig, RuntimeConfig, TargetConfig
from blockdraft.data.anchors import default_gamma, position_weights
from blockdraft.data.loader import Fill, LoaderConfig, TargetBatch
from blockdraft.models.target import Target
from blockdraft.runtime.pipeline import Pipeline
from blockdraft.runtime.reports import StepDone, WarmedUp
from blockdraft.runtime.slots import Filler, Slot
from blockdraft.runtime.startup import Protection
from blockdraft.runtime.transfers import pinned
from blockdraft.training.step import DrafterStep


def make_target(bench: Bench) -> Target:
    """The one that --target names, or one with random weights."""
    options = bench.options
    if options.shapes:
        return random_target(options.shapes, options.num_layers, bench.device, bench.dtype)
    name: Literal["float32", "bfloat16"] = "float32" if bench.dtype == torch.float32 else "bfloat16"
    config = TargetConfig(path=options.target, dtype=name)
    return Target.load(config, device=bench.device, num_drafter_layers=options.num_layers)


def measure_target(bench: Bench) -> None:
    """Capture of one row's tokens in batches of several lengths."""
    target, options = make_target(bench), bench.options
    rows, width = options.row_length, target.hidden_size * len(target.layer_ids)
    slot = Slot(1, rows, width, target.dtype, target.device)
    filler = Filler(target, 1, rows)
    kept = max(target.layer_ids) + 1
    count = sum(weight.numel() for layer in target.layers[:kept] for weight in layer.parameters())
    bench.say(f"target: {kept} of {target.num_layers} layers run, {count / 1e6:,.1f} M parameters; {target.note}")
    for length in sorted({rows, max(1, rows // 8)}, reverse=True):
        fill = _random_fill(rows // length, length, rows, target.ends.vocab_size, bench.device)
        filler.fill(slot, fill)
        name = f"target_{rows // length}x{length}"

        def capture(fill: Fill = fill) -> None:
            filler.fill(slot, fill)

        timing = time_rotated(bench.device, {name: capture}, rounds=1, steps=options.steps)[name]
        tokens = rows // length * length
        # Products with weights only: attention's own come on top.
        bench.say_rate(name, 2.0 * count * tokens, timing.median_ms)
        bench.say(
            f"{name}: {tokens / timing.median_ms * 1e3:,.0f} tokens/s, device busy "
            f"{busy_share(bench.device, capture):.0%}, +{timing.peak_gib:.2f} GiB above what stays"
        )
        bench.numbers |= {f"{name}_tok_s": tokens / timing.median_ms * 1e3, f"{name}_peak_gib": timing.peak_gib}


def _random_fill(batch: int, length: int, trash: int, vocab_size: int, device: torch.device) -> Fill:
    ids_BP = torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))
    row_BP = torch.arange(batch * length).view(batch, length).clamp(max=trash)
    fill = Fill(-1, -1, (TargetBatch(ids_BP, row_BP),), (batch * length,), ())
    return pinned(fill) if device.type == "cuda" else fill


def measure_pipeline(bench: Bench) -> None:
    """Target and drafter in their threads on one device, over documents of mixed lengths."""
    options = bench.options
    protection = Protection(bench.say) if bench.device.type == "cuda" else None
    target = make_target(bench)
    loader = random_loader(_loader_config(options), 8 * options.steps, target.ends.vocab_size)
    shape = replace(step_shape(options), target_layer_ids=target.layer_ids, num_target_layers=target.num_layers)
    drafter = make_drafter(shape, bench.device, bench.dtype)
    make_attend, how = choose_attention(options.attention, bench.device, shape.head_dim, is_alone=True)
    ends = target.ends.copy_to(bench.device, bench.dtype)
    step = DrafterStep(
        drafter,
        ends,
        ends,
        loss=LossConfig(chunk_rows=options.chunk_rows),
        optim=OptimConfig(),
        total_steps=options.steps,
        make_attend=make_attend,
        how=how,
    )
    places = (str(target.device),)
    pipeline = Pipeline(
        RuntimeConfig(topology="shared", targets=places, drafters=places),
        loader,
        [target],
        [step],
        first_step=0,
        total_steps=options.steps,
        at_boundary=lambda _steps: None,
        when_warm=protection.steady if protection else lambda: None,
    )
    tokens, seconds = _watch(bench, pipeline)
    _tell(bench, pipeline, tokens, seconds)
    if protection is not None:
        bench.say(f"after warm-up: {protection.compilations()}")
        protection.end()


def _loader_config(options: Options) -> LoaderConfig:
    weight_L: Sequence[float] = position_weights(options.block_size, default_gamma(options.block_size)).tolist()
    return LoaderConfig(
        row_length=options.row_length,
        num_rows=1,
        num_anchors=options.num_anchors,
        sort_window=1024,
        target_tokens=2 * options.row_length,
        block_size=options.block_size,
        weight_L=tuple(weight_L),
        after_gap=False,
        seed=0,
        num_drafters=1,
        accumulation=1,
        reuse=1,
    )


def _watch(bench: Bench, pipeline: Pipeline) -> tuple[int, float]:
    """Runs to the end; tokens trained on, and seconds in steady state."""

    pipeline.start()
    tokens = 0
    while pipeline.is_running() and pipeline.crew.first_error is None:
        tokens = _read(bench, pipeline, tokens)
        pipeline.watchdog.check()
    pipeline.crew.join()
    if bench.device.type == "cuda":
        torch.cuda.synchronize(bench.device)
    return _read(bench, pipeline, tokens), time.monotonic() - pipeline.started


def _read(bench: Bench, pipeline: Pipeline, tokens: int) -> int:
    while True:
        try:
            item = pipeline.reports.get(timeout=0.02)
        except queue.Empty:
            return tokens
        pipeline.watchdog.beat()
        if isinstance(item, StepDone):
            tokens = item.tokens
        elif isinstance(item, WarmedUp):
            bench.say(f"warm-up: {item.worker}, {item.what}, {item.seconds:.2f} s")


def _tell(bench: Bench, pipeline: Pipeline, tokens: int, seconds: float) -> None:
    bench.say(f"pipeline: {bench.options.steps} steps in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s")
    for line in pipeline.describe_sides():
        bench.say(line)
    busy = pipeline.busy_shares()
    bench.numbers |= {"pipeline_tok_s": tokens / seconds, "busy_target": busy.target, "busy_drafter": busy.drafter}
    if bench.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(bench.device) / GIB
        bench.say(f"memory: {peak:.2f} GiB at the highest point")
        bench.numbers["peak_gib"] = peak
