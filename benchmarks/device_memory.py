"""The memory plan beside what whole runs with random weights reach, target and drafter on one GPU.

usage: python benchmarks/device_memory.py [--shapes qwen3-8b qwen3.6-27b] [--device cuda:0] [--steps 30]
"""

import argparse
import gc
import sys
import time
import traceback
from dataclasses import replace

import torch
from device_run import say, train
from device_shapes import DRAFTERS, ROWS, TARGETS, make_loader, make_step, make_target

from blockdraft.config import DataConfig, RunConfig, RuntimeConfig, TargetConfig
from blockdraft.data.packing import budget_bucket
from blockdraft.models.outline import outline_of
from blockdraft.runtime.memory_fit import compare, knobs, spell_knobs
from blockdraft.runtime.memory_plan import Sizes, plan_memory
from blockdraft.runtime.startup import Protection
from blockdraft.runtime.waits import WaitCount


def measure(shapes: str, device: str, steps: int, protection: Protection | None) -> list[str]:
    """Trains for some steps and returns plan and reached peak."""
    is_gpu = device.startswith("cuda")
    started = time.monotonic()
    target = make_target(shapes, device, torch.bfloat16 if is_gpu else torch.float32)
    found = outline_of(target.model)
    target.drop_decoding()
    step = make_step(shapes, target, device, how="kernels" if is_gpu else "nothing", accumulation=1, total_steps=steps)
    loader = make_loader(shapes, target.vocab_size, documents=400, num_drafters=1, accumulation=1)
    say(f"{shapes}: built in {time.monotonic() - started:.1f} s; {target.note}")
    rows = ROWS[shapes]
    dtype = "bfloat16" if is_gpu else "float32"
    config = RunConfig(
        target=TargetConfig(dtype=dtype),
        drafter=replace(DRAFTERS[shapes], dtype=dtype),
        data=DataConfig(row_length=rows.tokens, num_anchors=rows.anchors, target_tokens=2 * rows.tokens),
        runtime=RuntimeConfig(targets=(device,), drafters=(device,)),
    )  # fmt: skip
    bucket = budget_bucket(rows.tokens, 2 * rows.tokens)
    sizes = Sizes(found, step.drafter.shape, target.vocab_size, bucket, 0, step.how)
    plan = plan_memory(config, sizes)
    resident = torch.cuda.memory_allocated(device) if is_gpu else 0
    for line in (*plan.lines(), f"allocated before the workers start: {resident / 2**30:.3f} GiB"):
        say(line)
    ran = train("pool", loader, [target], [step], steps, protection=protection, waits=WaitCount(0))
    reached = {str(place): max(seen.peaks) for place, seen in ran.pipeline.memory.found().items()}
    lines = [*plan.lines(), *compare(plan, reached), *ran.pipeline.memory.describe()]
    helps = spell_knobs(knobs(config, sizes, device), most=12)
    return [f"{shapes}: {line}" for line in (*lines, f"{ran.later_rate:,.0f} tok/s", f"what helps: {helps}")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(TARGETS), default=["qwen3-8b", "qwen3.6-27b"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    table: list[str] = []
    failed = False
    for shapes in args.shapes:
        protection = Protection(lambda _line: None) if args.device.startswith("cuda") else None
        try:
            table += measure(shapes, args.device, args.steps, protection)
        except Exception:
            # The other shapes still count.
            failed = True
            say(f"FAILED {shapes}\n{traceback.format_exc(limit=-8)}")
        if protection is not None:
            torch.compiler.set_stance("default")
            protection.end()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    say("\n".join(table))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
