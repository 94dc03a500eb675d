"""Timing for `bench`: rotated order, CUDA events on a GPU, the rate of the matrix units, floors and kernel classes."""

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockdraft.commands.bench_cases import Product

GIB = 2**30


class Timing(NamedTuple):
    """Of one function."""

    median_ms: float
    max_ms: float
    peak_gib: float
    """Allocated at the highest point above what was allocated before; 0 on a CPU."""


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_once(device: torch.device, functions: list[Callable[[], Any]]) -> list[float]:
    """Milliseconds of each call, one behind the other without waiting in between."""
    if device.type != "cuda":
        found = []
        for function in functions:
            started = time.perf_counter()
            function()
            found.append((time.perf_counter() - started) * 1e3)
        return found
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(functions) + 1)]
    events[0].record()
    for function, event in zip(functions, events[1:], strict=True):
        function()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def time_rotated(
    device: torch.device, functions: dict[str, Callable[[], Any]], rounds: int = 4, steps: int = 3
) -> dict[str, Timing]:
    """`rounds` x `steps` timed calls of each; in every round each runs once untimed first, and the order rotates."""
    names = list(functions)
    times: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, float] = defaultdict(float)
    for turn in range(rounds):
        shift = turn % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            functions[name]()
            synchronize(device)
            before = _start_memory(device)
            times[name] += time_once(device, [functions[name]] * steps)
            peaks[name] = max(peaks[name], _peak_memory(device) - before)
    return {name: Timing(statistics.median(times[name]), max(times[name]), peaks[name] / GIB) for name in names}


def _start_memory(device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(device)
    return float(torch.cuda.memory_allocated(device))


def _peak_memory(device: torch.device) -> float:
    return float(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0.0


def time_alone(device: torch.device, function: Callable[[], Any], warmup: int = 3, repeats: int = 8) -> float:
    """Median milliseconds of one function."""
    for _ in range(warmup):
        function()
    synchronize(device)
    return statistics.median(time_once(device, [function] * repeats))


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """TFLOP/s of a large square product on random data, measured now."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / time_alone(device, lambda: torch.mm(left, right)) / 1e9


def time_product(device: torch.device, dtype: torch.dtype, one: Product) -> float:
    """Milliseconds of one product alone, its operands laid out as autograd has them."""
    left = torch.randn(*((one.k, one.m) if one.kind == "weight" else (one.m, one.k)), device=device, dtype=dtype)
    right = torch.randn(*((one.n, one.k) if one.kind == "forward" else (one.k, one.n)), device=device, dtype=dtype)
    left, right = left.t() if one.kind == "weight" else left, right.t() if one.kind == "forward" else right
    out = torch.empty(one.m, one.n, device=device, dtype=dtype)
    return time_alone(device, lambda: torch.mm(left, right, out=out))


def products_floor(
    device: torch.device, dtype: torch.dtype, found: list[Product]
) -> list[tuple[Product, float, float]]:
    """Each product with its milliseconds alone and its TFLOP/s; the floor is the sum over times x milliseconds."""
    timed = {one[:4]: time_product(device, dtype, one) for one in found}
    return [(one, timed[one[:4]], 2 * one.m * one.n * one.k / timed[one[:4]] / 1e9) for one in found]


# fmt: off
CLASSES = {
    "loss between products": ("_between", "_scale"),
    "attention backward": ("query_kernel", "context_kernel", "block_kernel"),
    "attention forward": ("forward_kernel",),
    "products": ("nvjet", "gemm", "cutlass", "cublas", "splitk", "triton_mm", "triton_tem_fused_mm"),
    "copies": ("Memcpy", "Memset"),
    "fused elementwise": (
        "triton_", "norm_kernel", "norm_backward", "rotate_", "turn_back", "mask_row", "expand_kernel", "sum_kernel",
        "reduce_kernel", "swiglu_", "drafted_kernel", "place_kernel", "rotary_", "ranges_kernel", "spans_kernel",
    ),
}
# fmt: on


def kernel_class(name: str) -> str:
    """What a kernel does, by its name."""
    if "flex_attention" in name:
        return "attention backward" if "backward" in name else "attention forward"
    return next((kind for kind, parts in CLASSES.items() if any(part in name for part in parts)), "other")


class KernelShare(NamedTuple):
    """Kernels of one class within a step."""

    milliseconds: float
    launches: float
    slowest: str


def kernel_classes(function: Callable[[], Any], steps: int = 3) -> dict[str, KernelShare]:
    """Time on the GPU per step by class of kernel, from the profiler."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            function()
        torch.cuda.synchronize()
    time_of: dict[str, float] = defaultdict(float)
    count_of: dict[str, float] = defaultdict(float)
    names: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in trace.events() or []:
        if event.device_type == DeviceType.CUDA:
            kind, spent = kernel_class(event.name), event.self_device_time_total / 1e3 / steps
            time_of[kind] += spent
            count_of[kind] += 1 / steps
            names[kind][event.name] += spent
    return {
        kind: KernelShare(total, count_of[kind], max(names[kind], key=names[kind].__getitem__)[:70])
        for kind, total in sorted(time_of.items(), key=lambda item: -item[1])
    }


def busy_share(device: torch.device, function: Callable[[], Any], repeats: int = 3) -> float:
    """Share of a function's time in which the device computes: kernels on a GPU, all intra-op threads on a CPU."""
    if device.type != "cuda":
        wall, work = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            function()
        wall, work = time.perf_counter() - wall, time.process_time() - work
        return min(1.0, work / wall / torch.get_num_threads())
    wall_ms = sum(time_once(device, [function] * repeats)) / repeats
    return min(1.0, sum(share.milliseconds for share in kernel_classes(function).values()) / wall_ms)


def captured(step: Callable[[], Tensor]) -> Callable[[], None]:
    """A step as one CUDA graph. It ran before, so that nothing compiles; what it reads and makes stays where it is."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # As a worker would have to: other threads go on allocating.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def finite(loss: Tensor) -> Tensor:
    """Stops when a step's loss is not a number: such a step is timed for nothing."""
    if not bool(torch.isfinite(loss)):
        raise ArithmeticError(f"the step's loss is {float(loss)}")
    return loss
