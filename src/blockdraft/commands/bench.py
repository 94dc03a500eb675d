"""`blockdraft bench`: how much of the hardware a drafter's step, a target's forward or both in threads reach.

Random weights where no target is given, random documents always: for speed and memory, never for acceptance.

T context tokens, A anchors, L block size.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import tyro

from blockdraft.commands.outputs import check_file
from blockdraft.commands.unused import Need, refuse_unused
from blockdraft.config import ConfigError

if TYPE_CHECKING:
    import torch

    from blockdraft.models.drafter import DrafterShape

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure speed, memory and the share of the matrix rate, on shapes of your own."""

    what: tyro.conf.Positional[Literal["step", "target", "pipeline"]]
    """step: a drafter's forward, loss, backward and update. target: capture of context features. pipeline: both, in
    threads, over documents of mixed lengths."""
    target: str = ""
    """Directory, .gguf file or hub name: shapes from its config for `step`, its weights for the others."""
    shapes: Literal["", "tiny", "qwen3-8b", "qwen3.6-27b"] = ""
    """Shapes of a known target in place of --target, with random weights."""
    num_layers: int = 5
    """Of the drafter."""
    block_size: int = 16
    window: int | None = None
    """Window of all drafter layers but the last."""
    row_length: int = 4096
    """Tokens of a row (T)."""
    num_anchors: int = 512
    """Anchors of a row (A)."""
    chunk_rows: int = 2048
    """Block tokens that pass through the head at a time."""
    objective: Literal["ce", "dpace", "kl"] = "ce"
    """Of `step`."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    device: str = "auto"
    """auto: the first GPU, or the CPU where there is none."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    steps: int = 8
    """Timed repetitions, or steps of the pipeline."""
    output: Path | None = None
    """JSON file for the numbers."""


NEEDS: Final = (
    Need(("objective",), ("what",), "step", lambda what: what == "step", is_positional=True),
    Need(
        ("block_size", "window", "num_anchors", "chunk_rows", "attention"),
        ("what",),
        "step or pipeline",
        lambda what: what != "target",
        is_positional=True,
    ),
    Need(("window",), ("num_layers",), "--num-layers 2 or more (the last has no window)", lambda count: count > 1),
)


class Bench:
    """What the three measurements share."""

    def __init__(self, options: Options) -> None:
        import torch

        from blockdraft.api import pick_device
        from blockdraft.commands.bench_timing import matrix_rate
        from blockdraft.models.target import DTYPES, choose_dtype

        self.options, self.numbers = options, dict[str, Any]()
        self.device = pick_device(options.device)
        if self.device.type == "cpu" and options.attention == "flex" and options.what != "target":
            raise ConfigError("--attention flex has no backward on a CPU; use auto or sdpa")
        self.dtype = DTYPES[choose_dtype(options.dtype, self.device)]
        is_gpu = self.device.type == "cuda"
        if is_gpu and self.device.index is not None:
            # Kernels that are not torch's own start on the current device.
            torch.cuda.set_device(self.device)
        self.device_name = (
            torch.cuda.get_device_name(self.device) if is_gpu else f"CPU, {torch.get_num_threads()} threads"
        )
        size = 8192 if is_gpu else 512
        self.rate = matrix_rate(self.device, self.dtype, size)
        self.say(f"{self.device_name}, torch {torch.__version__}, {str(self.dtype)[6:]}")
        self.say(f"matrix rate: {self.rate:.3g} TFLOP/s, a product of {size} x {size} x {size}, measured now")
        self.numbers |= {"device": self.device_name, "torch": torch.__version__, "dtype": str(self.dtype)[6:]}
        self.numbers["matrix_rate_tflops"] = self.rate
        if is_gpu:
            self._say_sustained(size)

    def _say_sustained(self, size: int) -> None:
        from blockdraft.commands.bench_sensors import sustained_rate

        found = sustained_rate(self.device, self.dtype, size, seconds=3.0)
        self.say(f"matrix rate kept up for 3 s: {found}")
        self.numbers["sustained_rate_tflops"] = found.rate
        if found.sensed is not None:
            self.numbers["sustained_clock_mhz"], self.numbers["sustained_watts"] = (
                found.sensed.clock_mhz,
                found.sensed.watts,
            )

    def say(self, line: str) -> None:
        """Prints a line."""
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def say_rate(self, name: str, flops: float, milliseconds: float) -> None:
        """Work, rate and share of the matrix rate."""
        achieved = flops / milliseconds / 1e9
        self.say(
            f"{name}: {milliseconds:.2f} ms for {flops / 1e12:.4g} TFLOP: {achieved:.3g} TFLOP/s, "
            f"{achieved / self.rate:.0%} of the matrix rate"
        )
        self.numbers |= {f"{name}_ms": milliseconds, f"{name}_tflop": flops / 1e12}
        self.numbers[f"{name}_share_of_rate"] = achieved / self.rate


def run(options: Options) -> int:
    """Measures, prints, and writes JSON if asked.

    Raises:
        ConfigError: options that do not go together, or a target that cannot be read.
    """
    _check(options)
    bench = Bench(options)
    if options.what == "step":
        measure_step(bench)
    else:
        from blockdraft.commands.bench_run import measure_pipeline, measure_target

        (measure_target if options.what == "target" else measure_pipeline)(bench)
    if options.output is not None:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps({"options": settings} | bench.numbers, indent=2) + "\n", encoding="utf-8")
    return 0


def _check(options: Options) -> None:
    if bool(options.target) == bool(options.shapes):
        found = "both" if options.target else "neither"
        raise ConfigError(f"blockdraft bench expects one of --target and --shapes, found {found}")
    for name in ("num_layers", "row_length", "num_anchors", "chunk_rows", "steps"):
        if vars(options)[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')}: expected at least 1, found {vars(options)[name]}")
    if options.what != "target" and options.num_anchors >= options.row_length:
        raise ConfigError(
            f"--num-anchors: expected fewer than the row's {options.row_length} tokens, found {options.num_anchors}"
        )
    refuse_unused(options, NEEDS)
    if options.output is not None:
        check_file(options.output)


def measure_step(bench: Bench) -> None:
    """The drafter's step and its update."""
    from blockdraft.commands.bench_cases import make_drafter, make_problem, objective_step, useful_flops, whole_step
    from blockdraft.commands.bench_timing import busy_share, finite, time_rotated

    options, device = bench.options, bench.device
    shape = step_shape(options)
    problem = make_problem(shape, options.row_length, options.num_anchors, device, bench.dtype)
    drafter = make_drafter(shape, device, bench.dtype)
    count = sum(weight.numel() for weight in drafter.parameters())
    bench.say(
        f"drafter: {shape.num_layers} layers of width {shape.hidden_size}, {count / 1e6:.1f} M parameters; "
        f"T {options.row_length}, A {options.num_anchors}, L {shape.block_size}"
    )
    forward = _forward(options, problem, drafter, device)
    step = whole_step(drafter, forward, objective_step(problem, options.objective, options.chunk_rows))
    # The first call compiles.
    finite(step())
    step()
    timing = time_rotated(device, {"step": step}, rounds=1, steps=options.steps)["step"]
    bench.say_rate("step", useful_flops(shape, options.row_length, problem.anchor_RA), timing.median_ms)
    busy = busy_share(device, step)
    bench.say(
        f"step: slowest {timing.max_ms:.2f} ms, {timing.median_ms / options.num_anchors:.4f} ms an anchor, "
        f"device busy {busy:.0%}, +{timing.peak_gib:.2f} GiB above what stays"
    )
    bench.numbers |= {"step_max_ms": timing.max_ms, "step_peak_gib": timing.peak_gib, "step_busy": busy}
    _measure_update(bench, drafter, timing.median_ms)


def step_shape(options: Options) -> "DrafterShape":
    """The drafter's shape, derived as a run derives it."""
    from blockdraft.commands.bench_cases import presets
    from blockdraft.config import DrafterConfig, TargetConfig
    from blockdraft.models.drafter import default_layer_ids, derive_shape

    windows = tuple(range(options.num_layers - 1)) if options.window is not None else ()
    if options.shapes:
        shape = presets()[options.shapes]
        return dataclasses.replace(
            shape,
            num_layers=options.num_layers,
            block_size=options.block_size,
            target_layer_ids=default_layer_ids(shape.num_target_layers, options.num_layers),
            window=options.window if windows else None,
            window_layers=windows,
        )
    from blockdraft.models.outline import outline

    config = DrafterConfig(
        num_layers=options.num_layers,
        block_size=options.block_size,
        window=options.window if windows else None,
        window_layers=windows,
    )
    facts = outline(TargetConfig(path=options.target)).facts
    # Which token is the mask does not matter to speed.
    return derive_shape(config, facts, facts.vocab_size - 1)


def _forward(options: Options, problem: Any, drafter: Any, device: "torch.device") -> Any:
    from blockdraft.commands.bench_cases import stack_step
    from blockdraft.commands.build import choose_attention
    from blockdraft.models.attention import bare_flex_attend

    make_attend, how = choose_attention(options.attention, device, problem.shape.head_dim, is_alone=True)
    if how == "nothing":
        return stack_step(problem, drafter, how, "sdpa")
    return stack_step(problem, drafter, how, "flex" if make_attend is bare_flex_attend else "own")


def _measure_update(bench: Bench, drafter: Any, step_ms: float) -> None:
    import torch

    from blockdraft.commands.bench_timing import time_alone
    from blockdraft.config import OptimConfig
    from blockdraft.training.optim import MasterOptimizer

    optimizer = MasterOptimizer(drafter, OptimConfig())
    made = {name: torch.randn_like(weight) * 1e-3 for name, weight in optimizer.weights.items()}

    def update() -> None:
        optimizer.keep_gradients()
        for name, gradient in made.items():
            optimizer.weights[name].grad = gradient.clone() if bench.device.type == "cpu" else gradient
        optimizer.step(0.0)

    spent = time_alone(bench.device, update, repeats=bench.options.steps)
    bench.say(f"update with clipping: {spent:.2f} ms, {spent / step_ms:.1%} of the step")
    bench.numbers |= {"update_ms": spent, "update_share_of_step": spent / step_ms}
