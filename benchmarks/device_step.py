"""The drafter's step on one GPU: exactness, floors, variants and other trainers, in one process.

usage: PYTHONPATH=src python benchmarks/device_step.py [--parts exact,floor,step,graph,profile,objectives,...]
           [--shapes qwen3-8b,qwen3.6-27b] [--variants kernels/own/2048 stack/flex/4096] [--seconds 330] [--out DIR]
           [--peers specforge,nemo,speculators] [--rehearse]

Parts run in the order given. A variant is how the stack runs / its attention / rows of a chunk of the head; the
first one is what profile, graph, objectives and optimizer measure.

Protocol: T 4096, A 512, L 16, 5 layers, random data, all-ones loss mask, CUDA events, rotated order; median and
maximum, peak memory above the resident weights. A part that would start after --seconds is left out and named.
`--rehearse` runs every part on the CPU with tiny shapes and nothing compiled to kernels.
"""

import argparse
import functools
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import device_head
import torch
from device_exact import Check, check_loss, check_masks, check_stack
from device_peers import PEERS, peer_steps
from torch import Tensor

from blockdraft.commands.bench_cases import (
    Objective,
    Problem,
    choose_make_attend,
    head_products,
    make_drafter,
    make_problem,
    objective_step,
    presets,
    products,
    stack_step,
    useful_flops,
    whole_step,
)
from blockdraft.commands.bench_sensors import sustain, sustained_rate
from blockdraft.commands.bench_timing import (
    Timing,
    captured,
    finite,
    kernel_classes,
    matrix_rate,
    products_floor,
    time_alone,
    time_rotated,
)
from blockdraft.config import OptimConfig
from blockdraft.models.attention import compile_flex, flex_attend, sdpa_attend
from blockdraft.models.compiled import How
from blockdraft.models.drafter import Attend, Drafter
from blockdraft.training.head_loss import even_chunk
from blockdraft.training.optim import MasterOptimizer

PARTS: Final = (
    "exact", "floor", "step", "sustained", "graph", "profile", "objectives", "loss", "between", "attention", "peers",
    "optimizer",
)  # fmt: skip
CHUNK: Final = 4096


class Run:
    """What the parts share: device, clock, and everything that was measured."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.started = options, time.monotonic()
        self.device = torch.device("cpu" if options.rehearse else "cuda")
        self.dtype = torch.float32 if options.rehearse else torch.bfloat16
        self.results: dict[str, Any] = {}
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)
        print(f"[{time.monotonic() - self.started:5.0f} s] {line}", flush=True)

    def keep(self, name: str, value: Any) -> None:
        self.results[name] = value

    def attempt(self, what: str, function: Callable[[], None]) -> None:
        """Runs a part; one that fails is reported and the next one starts."""
        if time.monotonic() - self.started > self.options.seconds:
            self.say(f"LEFT OUT for lack of time: {what}")
            return
        try:
            function()
        except Exception:
            self.say(f"FAILED: {what}\n{traceback.format_exc(limit=-6)}")
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def save(self) -> None:
        if self.options.out:
            folder = Path(self.options.out)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "device_step.json").write_text(json.dumps(self.results, indent=1))
            (folder / "device_step.txt").write_text("\n".join(self.lines) + "\n")


def exact(run: Run) -> None:
    """Every check, those that fail marked."""
    small = run.options.rehearse
    stages = ("eager",) if small else ("triton", "inductor")

    def show(checks: list[Check]) -> None:
        for check in checks:
            holds = check.found <= check.limit
            run.say(f"{'ok  ' if holds else 'FAIL'} {check.what}: {check.found:.3g} (limit {check.limit:.3g})")
            run.keep(f"exact {check.what}", check._asdict() | {"holds": holds})

    run.attempt("exact loss", lambda: show(check_loss(run.device, stages, small)))
    run.attempt("exact masks", lambda: show(check_masks(run.device)))
    run.attempt("exact stack", lambda: show(check_stack(run.device)))


class Case:
    """One set of shapes: problem, drafter, variants."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self.forwards: dict[Any, Callable[[], Tensor]] = {}
        shape = presets()[name]
        self.num_tokens, self.num_anchors = (256, 24) if run.options.rehearse else (4096, 512)
        self.problem: Problem = make_problem(shape, self.num_tokens, self.num_anchors, run.device, run.dtype)
        self.drafter: Drafter = make_drafter(shape, run.device, run.dtype)
        self.rows = self.num_anchors * (shape.block_size - 1)
        self.flops = useful_flops(shape, self.num_tokens, self.problem.anchor_RA)
        self.rate = matrix_rate(run.device, run.dtype, 256 if run.options.rehearse else 8192)
        run.say(f"== {name}: {self.flops / 1e12:.1f} TFLOP of useful work, matrix rate {self.rate:.0f} TFLOP/s, "
                f"so {self.flops / self.rate / 1e9:.1f} ms")  # fmt: skip
        run.keep(f"{name} rate", self.rate)
        self.best: Callable[[], Tensor] | None = None

    def show(self, timings: dict[str, Timing]) -> None:
        """A line each."""
        for what, one in timings.items():
            achieved = self.flops / one.median_ms / 1e9
            self.run.say(
                f"{self.name} | {what:<30} | {one.median_ms:7.1f} ms | max {one.max_ms:7.1f} | {achieved:4.0f} TFLOP/s "
                f"| {achieved / self.rate:4.0%} of rate | +{one.peak_gib:.2f} GiB"
            )
            self.run.keep(f"{self.name} {what}", one._asdict())

    def warm(self, what: str, step: Callable[[], Tensor]) -> bool:
        """First calls: compile; says how long each took."""
        spent, loss = [time.monotonic()], 0.0

        def first() -> None:
            nonlocal loss
            for _ in range(2):
                loss = float(finite(step()))
                spent.append(time.monotonic())

        self.run.attempt(f"{self.name} {what}", first)
        if len(spent) == 3:
            seconds = f"first step {spent[1] - spent[0]:.1f} s, second {spent[2] - spent[1]:.1f} s"
            self.run.say(f"{self.name}: {what} ready: {seconds}, loss {loss:.4g}")
        return len(spent) == 3

    def step(self) -> None:
        """Variants of the whole step, and the peers if asked for: warmed in the order of the parts, timed rotated."""
        options = self.run.options
        made: dict[str, Callable[[], Tensor]] = {}
        for part in options.parts:
            if part == "peers":
                made |= peer_steps(self.problem, self.run.dtype, options.peers, self.run.attempt)
            elif part == "step":
                named = {what: what.split("/") for what in options.variants}
                made |= {what: self.make(how, attention, int(chunk)) for what, (how, attention, chunk) in named.items()}
        steps = {what: step for what, step in made.items() if self.warm(what, step)}
        self.best = next((steps[what] for what in options.variants if what in steps), None)
        self.show(time_rotated(self.run.device, steps, 2 if options.rehearse else 4, 3))

    def make(self, how: str, attention: str, chunk: int, objective: Objective = "ce") -> Callable[[], Tensor]:
        """A whole step; its forward is compiled once for all of a kind."""
        if (how, attention) not in self.forwards:
            chosen: Any = "sdpa" if self.run.options.rehearse else attention
            self.forwards[how, attention] = stack_step(self.problem, self.drafter, cast(How, how), chosen)
        return whole_step(self.drafter, self.forwards[how, attention], objective_step(self.problem, objective, chunk))

    def objectives(self) -> None:
        """The first variant with each objective, rotated; and the cross-entropy beside one more product of the head."""
        how, attention, chunk = self.run.options.variants[0].split("/")
        names: tuple[Objective, ...] = ("ce", "dpace", "kl")
        steps = {f"objective {name}": self.make(how, attention, int(chunk), name) for name in names}
        lose = device_head.with_product(self.problem, objective_step(self.problem, "ce", int(chunk)), int(chunk))
        steps["objective ce, a product more"] = whole_step(self.drafter, self.forwards[how, attention], lose)
        for step in steps.values():
            finite(step())
        self.show(time_rotated(self.run.device, steps, 2 if self.run.options.rehearse else 6, 3))

    def sustained(self) -> None:
        """A large product and the first variant without a pause, 3 s each: what the power limit leaves of both."""
        if self.best is None:
            return
        size, seconds = (256, 0.1) if self.run.options.rehearse else (8192, 3.0)
        rate = sustained_rate(self.run.device, self.run.dtype, size, seconds)
        self.run.say(f"{self.name} | product of {size} cubed kept up: {rate}")
        found = sustain(self.run.device, self.best, seconds)
        achieved = self.flops / found.median_ms / 1e9
        self.run.say(
            f"{self.name} | {self.run.options.variants[0]} kept up: {found.median_ms:.1f} ms, {achieved:.0f} TFLOP/s, "
            f"{achieved / rate.rate:.0%} of the product's; {found.sensed}"
        )
        self.run.keep(f"{self.name} sustained", [rate.rate, found.median_ms])

    def graph(self) -> None:
        """The first variant replayed as one CUDA graph, beside itself."""
        if self.best is None or self.run.options.rehearse:
            return
        started = time.perf_counter()
        self.best()
        host = (time.perf_counter() - started) * 1e3
        torch.cuda.synchronize()
        steps = {"without a graph": self.best, "as one CUDA graph": captured(self.best)}
        self.run.say(f"{self.name} | the host needs {host:.1f} ms for a step without a graph")
        self.show(time_rotated(self.run.device, steps, 4, 3))

    def floor(self) -> None:
        """Each matrix product's shape alone, and attention alone."""
        shape = self.problem.shape
        for what, found in (
            ("products of the stack", products(shape, self.num_tokens, self.num_anchors)),
            ("products of the head", head_products(shape, self.rows, even_chunk(self.rows, CHUNK))),
        ):
            timed = products_floor(self.run.device, self.run.dtype, found)
            total = sum(one.times * spent for one, spent, _ in timed)
            self.run.say(f"{self.name} | floor: {what}: {total:.1f} ms")
            self.run.keep(f"{self.name} floor {what}", total)
            rows = [(*one, spent, rate) for one, spent, rate in timed]
            self.run.keep(f"{self.name} floor {what}, each", rows)
            for kind, m, n, k, times, spent, rate in sorted(rows, key=lambda row: -row[4] * row[5])[:12]:
                self.run.say(
                    f"    {times:2} x {kind:<7} {m:>6} x {n:>6} x {k:>6}: {spent:6.3f} ms, {rate:4.0f} TFLOP/s"
                )

    def attention(self) -> None:
        """flex_attention alone, forward and backward, and with the published windows."""
        shape, device, dtype = self.problem.shape, self.run.device, self.run.dtype
        block = self.num_anchors * shape.block_size
        sizes = [
            (shape.num_heads, block),
            *((shape.num_kv_heads, length) for length in (self.num_tokens,) * 2 + (block,) * 2),
        ]
        tensors = [
            torch.randn(1, heads, length, shape.head_dim, device=device, dtype=dtype).requires_grad_()
            for heads, length in sizes
        ]
        numbers = (self.problem.document_RT, self.problem.position_RT, self.problem.anchor_RA)
        attends: dict[str, tuple[Attend, int]] = {}
        if self.run.options.rehearse:
            attends["SDPA"] = (sdpa_attend(shape, *numbers), 0)
        else:
            windows = presets()["qwen3.6-27b-windows"]
            attends["flex, full"] = (flex_attend(shape, *numbers, compile_flex()), 0)
            make_own = choose_make_attend("own", "nothing")
            attends["own, full"] = (make_own(shape, *numbers), 0)
            attends["own, window 2048"] = (make_own(windows, *numbers), 0)
        upstream_RHQE = torch.randn_like(tensors[0])

        for what, (attend, layer) in attends.items():
            forward = functools.partial(attend, layer, *tensors)

            def measure(what: str = what, forward: Callable[[], Tensor] = forward) -> None:
                ahead = time_alone(device, forward)
                whole = time_alone(device, lambda: forward().backward(upstream_RHQE))
                self.run.say(
                    f"{self.name} | attention alone, {what}: forward {ahead:.2f} ms, both {whole:.2f} ms a layer"
                )
                self.run.keep(f"{self.name} attention {what}", [ahead, whole])

            self.run.attempt(f"{self.name} attention {what}", measure)

    def loss(self) -> None:
        """The head's loss alone on given hidden states: stages and chunks."""
        device_head.loss(self.run, self.name, self.problem)

    def between(self) -> None:
        """The stages between the losses' products, by the ids of a program and its warps."""
        device_head.between(self.run, self.name, self.problem)
        device_head.between_kl(self.run, self.name, self.problem)

    def profile(self) -> None:
        """Kernel classes of the best variant."""
        if self.best is None or self.run.options.rehearse:
            return
        shares = kernel_classes(self.best)
        total = sum(share.milliseconds for share in shares.values())
        for kind, share in shares.items():
            self.run.say(f"{self.name} | {kind:<22} {share.milliseconds:7.2f} ms {share.milliseconds / total:4.0%} "
                         f"{share.launches:6.1f} launches | {share.slowest}")  # fmt: skip
        self.run.say(f"{self.name} | all kernels {total:.1f} ms")
        self.run.keep(f"{self.name} kernels", {kind: share._asdict() for kind, share in shares.items()})

    def optimizer(self) -> None:
        """The update with clipping: gradients where the backward leaves them, and added up in float32."""
        optimizer = MasterOptimizer(self.drafter, OptimConfig())
        count = sum(weight.numel() for weight in optimizer.weights.values())
        for dtype in (self.run.dtype, torch.float32):
            holders = optimizer.masters if dtype == torch.float32 else optimizer.weights
            made = {name: torch.randn_like(weight, dtype=dtype) * 1e-3 for name, weight in optimizer.weights.items()}

            def update(
                made: dict[str, Tensor] = made, holders: Any = holders, is_kept: bool = dtype != torch.float32
            ) -> None:
                if is_kept:
                    optimizer.keep_gradients()
                for name, gradient in made.items():
                    holders[name].grad = gradient
                optimizer.step(0.0)

            spent = time_alone(self.run.device, update, repeats=7)
            # Norm and update read the gradient; master and moments are read and written, the weight is written.
            moved = count * (2 * dtype.itemsize + 3 * 8 + self.run.dtype.itemsize)
            self.run.say(
                f"{self.name} | update with clipping, gradients {dtype}: {spent:.2f} ms, {moved / spent / 1e9:.2f} TB/s"
            )
            self.run.keep(f"{self.name} optimizer {dtype}", spent)
            for holder in holders.values():
                holder.grad = None


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--shapes", default="qwen3-8b,qwen3.6-27b")
    parser.add_argument("--seconds", type=float, default=330.0)
    parser.add_argument("--out", default="")
    parser.add_argument("--variants", nargs="+", default=["kernels/own/2048"])
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    for what, known in (("parts", PARTS), ("peers", PEERS)):
        chosen = vars(options)[what] = vars(options)[what].split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"unknown {what} {sorted(unknown)}; known: {', '.join(known)}")
    if options.rehearse:
        torch.compile = functools.partial(torch.compile, backend="eager")
    run = Run(options)
    run.say(f"torch {torch.__version__}, {torch.cuda.get_device_name() if run.device.type == 'cuda' else 'CPU'}")
    if "exact" in options.parts:
        exact(run)
    for name in ["tiny"] if options.rehearse else options.shapes.split(","):
        torch.compiler.reset()
        case = Case(run, name)
        for part in options.parts:
            if part not in ("exact", "peers"):
                run.attempt(f"{name} {part}", vars(Case)[part].__get__(case))
        del case
        if run.device.type == "cuda":
            torch.cuda.empty_cache()
        run.save()
    run.save()
    return 0


if __name__ == "__main__":
    sys.exit(main())
