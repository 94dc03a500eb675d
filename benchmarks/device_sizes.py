"""The drafter's step over row lengths and anchor counts: time, time per anchor, memory; and the largest that fits.

usage: PYTHONPATH=src python benchmarks/device_sizes.py [--shapes qwen3-8b] [--tokens 1024 4096] [--anchors 64 512]
           [--how kernels] [--attention own] [--chunk 2048] [--seconds 120] [--rehearse]

Protocol of device_step.py: random data, one document a row, forward + loss + backward, no update; median of 6, peak
memory above what is resident. Sizes that do not fit are said. `--rehearse` runs tiny shapes on the CPU.

T tokens of a row, A anchors.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from blockdraft.commands.bench_cases import (
    Attention,
    make_drafter,
    make_problem,
    objective_step,
    presets,
    stack_step,
    useful_flops,
    whole_step,
)
from blockdraft.commands.bench_timing import finite, matrix_rate, time_rotated
from blockdraft.models.compiled import How


class Sizes:
    """Steps of one drafter at many sizes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = torch.device("cpu" if options.rehearse else "cuda")
        self.dtype = torch.float32 if options.rehearse else torch.bfloat16
        self.shape = presets()["tiny" if options.rehearse else options.shapes]
        self.drafter = make_drafter(self.shape, self.device, self.dtype)
        self.started = time.monotonic()

    def say(self, line: str) -> None:
        sys.stdout.write(f"[{time.monotonic() - self.started:5.0f} s] {line}\n")
        sys.stdout.flush()

    def step(self, num_tokens: int, num_anchors: int) -> tuple[Callable[[], Tensor], float]:
        """A whole step, and its useful operations."""
        problem = make_problem(self.shape, num_tokens, num_anchors, self.device, self.dtype)
        attention = cast(Attention, "sdpa" if self.options.rehearse else self.options.attention)
        forward = stack_step(problem, self.drafter, cast(How, self.options.how), attention)
        lose = objective_step(problem, "ce", self.options.chunk)
        return whole_step(self.drafter, forward, lose), useful_flops(self.shape, num_tokens, problem.anchor_RA)

    def measure(self, num_tokens: int, num_anchors: int) -> bool:
        """Prints a line of the table; whether the size fits."""
        try:
            step, flops = self.step(num_tokens, num_anchors)
            finite(step())
            found = time_rotated(self.device, {"step": step}, rounds=2, steps=3)["step"]
        except torch.OutOfMemoryError:
            self.say(f"| {num_tokens:,} | {num_anchors:,} | does not fit |")
            return False
        finally:
            step = None  # type: ignore[assignment]
            self.drafter.zero_grad(set_to_none=True)
            clear(self.device)
        spent, each = found.median_ms, found.median_ms / num_anchors * 1e3
        self.say(
            f"| {num_tokens:,} | {num_anchors:,} | {spent:.1f} ms | {each:.0f} us | {flops / spent / 1e9:.0f} TFLOP/s "
            f"| +{found.peak_gib:.2f} GiB |"
        )
        return True

    def largest(self, num_tokens: int) -> None:
        """The most anchors of a row of so many tokens, to a sixteenth."""
        fits, first_bad = 0, 0
        count = min(2048, num_tokens // 2)
        while count < num_tokens and not first_bad and self.has_time():
            if self.measure(num_tokens, count):
                fits, count = count, count * 2
            else:
                first_bad = count
        piece = max(1, fits // 16)
        while first_bad - fits > piece and self.has_time():
            middle = (fits + first_bad) // 2
            fits, first_bad = (middle, first_bad) if self.measure(num_tokens, middle) else (fits, middle)
        said = f"{first_bad:,} do not" if first_bad else "every number below the row's length does, or time is over"
        self.say(f"rows of {num_tokens:,} tokens: {fits:,} anchors fit, {said}")

    def has_time(self) -> bool:
        return time.monotonic() - self.started < self.options.seconds


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-8b")
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--anchors", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--how", default="kernels")
    parser.add_argument("--attention", default="own")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    if options.rehearse:
        options.tokens, options.anchors = [128, 256], [16, 32]
    sizes = Sizes(options)
    if sizes.device.type == "cuda":
        sizes.say(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.shapes}, chunks of {options.chunk}"
        )
        sizes.say(f"matrix rate {matrix_rate(sizes.device, sizes.dtype, 8192):.0f} TFLOP/s")
    sizes.say("| T | A | step | per anchor | rate | above resident |")
    for num_tokens in options.tokens:
        for num_anchors in options.anchors:
            if num_anchors < num_tokens and sizes.has_time():
                sizes.measure(num_tokens, num_anchors)
    if sizes.device.type == "cuda":
        sizes.largest(max(options.tokens))


if __name__ == "__main__":
    main()
