"""A drafter layer's kernels on a real GPU: as exact as the reference in the same type, and what they reach is printed.

Letters as in models/layer_ops.py; T context tokens, G key/value heads.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from blockdraft.models.drafter import rotation
from blockdraft.models.layer_ops import EAGER_OPS, Expand
from blockdraft.runtime.counters import CompileCounters

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(240),
]
EPS = 1e-6
SLEEP_CYCLES = 40_000_000
FULL_RATE = 4.2e9
"""Bytes a millisecond that a copy reaches on an H200."""


class Widths(NamedTuple):
    """Of a drafter's layer."""

    width: int
    inner: int
    num_heads: int
    num_kv_heads: int
    dim: int


class Rows(NamedTuple):
    """Of a pass: context tokens, and anchors of one batch row or more."""

    num_context: int
    num_batch_rows: int
    expand: Expand

    @property
    def num_block(self) -> int:
        return self.num_batch_rows * self.expand.num_anchors * self.expand.block_size

    @property
    def num_unique(self) -> int:
        return self.num_batch_rows * (self.expand.num_anchors + 1)


class Call(NamedTuple):
    """An operation on its inputs."""

    title: str
    name: str
    inputs: tuple[object, ...]
    options: dict[str, object]
    times: int = 0
    """In a middle layer."""


SMALL = Widths(520, 1100, 6, 3, 24), Rows(77, 2, Expand(9, 7))
LARGE = {
    "Qwen3-8B": (Widths(4096, 12288, 32, 8, 128), Rows(4096, 1, Expand(512, 16))),
    "27B": (Widths(5120, 17408, 32, 8, 128), Rows(4096, 1, Expand(512, 16))),
}
OTHER_ROWS = Rows(1001, 3, Expand(37, 16))


def draw(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return lambda *sizes: torch.randn(*sizes, generator=generator, device="cuda", dtype=torch.float32).to(dtype)


def turned(num_rows: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = rotation(torch.arange(num_rows, device="cuda")[None] % 4096, dim, 1e6, dtype)
    return cos[0, 0], sin[0, 0]


def norm_calls(widths: Widths, rows: Rows, dtype: torch.dtype) -> Iterator[Call]:
    make, num, size, expand = draw(dtype), rows.num_block, rows.expand.block_size, rows.expand
    x_ND, delta_ND, upstream_ND = (make(num, widths.width) for _ in range(3))
    weight_D = 1 + 0.1 * make(widths.width)
    yield Call("norm", "add_norm", (x_ND, None, weight_D, EPS), {})
    yield Call("add, norm", "add_norm", (x_ND, delta_ND, weight_D, EPS), {}, 2)
    unique_UD = x_ND[: rows.num_unique]
    yield Call("add, norm: first layer", "add_norm", (unique_UD, delta_ND, weight_D, EPS, expand), {})
    drafted_MD = delta_ND[: num // size * (size - 1)]
    yield Call("add, norm: last layer", "add_norm", (x_ND, drafted_MD, weight_D, EPS, None, size), {})
    rstd_N = EAGER_OPS.add_norm(x_ND, None, weight_D, EPS).rstd_N
    numbers = upstream_ND, x_ND, rstd_N, weight_D
    both = {"wants_normed": True}
    yield Call("norm back", "norm_backward", (*numbers, None), {"wants_normed": False})
    yield Call("norm back, add, norm", "norm_backward", (*numbers, delta_ND), both, 2)
    yield Call("norm back, add, norm: last layer", "norm_backward", (*numbers, drafted_MD), {**both, "drop": size})


def head_calls(widths: Widths, rows: Rows, dtype: torch.dtype) -> Iterator[Call]:
    make, expand = draw(dtype), rows.expand
    weight_E = 1 + 0.1 * make(widths.dim)
    streams = (
        ("queries", widths.num_heads, rows.num_block, None, 1),
        ("block keys", widths.num_kv_heads, rows.num_block, None, 1),
        ("context keys", widths.num_kv_heads, rows.num_context, None, 1),
        ("first queries", widths.num_heads, rows.num_unique, expand, 0),
        ("first block keys", widths.num_kv_heads, rows.num_unique, expand, 0),
        ("first queries, slots 1..", widths.num_heads, rows.num_unique, expand._replace(first_slot=1), 0),
    )
    for title, num_heads, num_rows, one, times in streams:
        num_made = num_rows if one is None else one.num_made(num_rows)
        x_NF, upstream_MF = make(num_rows, num_heads * widths.dim), make(num_made, num_heads * widths.dim)
        numbers = x_NF, weight_E, EPS, *turned(num_made, widths.dim, dtype), one
        yield Call(f"rotate {title}", "rotate_heads", numbers, {}, times)
        yield Call(f"rotate back {title}", "rotate_heads_backward", (upstream_MF, *numbers), {}, times)
    values_NF = make(rows.num_unique, widths.num_kv_heads * widths.dim)
    yield Call("expand first values", "expand_rows", (values_NF, expand), {})
    upstream_MF = make(rows.num_block, widths.num_kv_heads * widths.dim)
    yield Call("sum first values", "sum_rows_onto", (torch.empty_like(values_NF), upstream_MF, expand), {})
    yield Call("copy values", "sum_rows_onto", (torch.empty_like(upstream_MF), upstream_MF, None), {}, 1)


def inner_calls(widths: Widths, rows: Rows, dtype: torch.dtype) -> Iterator[Call]:
    make = draw(dtype)
    product_NJ, upstream_NI = make(rows.num_block, 2 * widths.inner), make(rows.num_block, widths.inner)
    yield Call("swiglu", "swiglu", (product_NJ,), {}, 1)
    yield Call("swiglu back", "swiglu_backward_onto", (upstream_NI, product_NJ), {}, 1)


MAKERS = (norm_calls, head_calls, inner_calls)


def made(ops: object, call: Call, dtype: torch.dtype | None = None) -> list[Tensor | None]:
    """Results on copies of the inputs, in `dtype` if that is given."""
    own = [
        value.clone() if dtype is None else value.to(dtype, copy=True) if value.is_floating_point() else value
        for value in (value for value in call.inputs if isinstance(value, Tensor))
    ]
    inputs = [own.pop(0) if isinstance(value, Tensor) else value for value in call.inputs]
    found = getattr(ops, call.name)(*inputs, **call.options)
    # One that returns nothing writes to its first argument.
    found = inputs[0] if found is None else found
    return [found] if isinstance(found, Tensor) else list(found)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def num_bytes(call: Call, results: list[Tensor | None]) -> int:
    """Everything once: inputs that are read, results that are written."""
    is_given = call.name == "add_norm" and call.inputs[1] is None  # the sum is the input
    written = results[1:] if is_given else results if call.name != "sum_rows_onto" else []
    return sum(value.nbytes for value in (*call.inputs, *written) if isinstance(value, Tensor))


def times_ms(run: Callable[[], object], turns: int = 20) -> tuple[float, float]:
    """Medians on the device, its cache emptied before each turn, and on the host."""
    for _ in range(3):
        run()
    other = torch.empty(2**28, dtype=torch.int8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(turns)]
    host_ms = []
    torch.cuda.synchronize()
    # The device waits until all turns are queued: short kernels take less time than their launch.
    torch.cuda._sleep(SLEEP_CYCLES)
    for before, after in events:
        other.zero_()
        before.record()
        began = time.perf_counter()
        run()
        host_ms.append(1e3 * (time.perf_counter() - began))
        after.record()
    torch.cuda.synchronize()
    return statistics.median(before.elapsed_time(after) for before, after in events), statistics.median(host_ms)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("which", ["small", *LARGE])
def test_kernels_are_as_exact_as_the_reference(which, dtype):
    from blockdraft.models.layer_triton import TRITON_OPS

    widths, rows = SMALL if which == "small" else LARGE[which]
    if which != "small" and dtype != torch.bfloat16:
        pytest.skip("large tensors in the type of training only")
    worst = 0.0
    for maker in MAKERS:
        for call in maker(widths, rows, dtype):
            exact, eager, fused = made(EAGER_OPS, call, torch.float64), made(EAGER_OPS, call), made(TRITON_OPS, call)
            for number, (its, plain, mine) in enumerate(zip(exact, eager, fused, strict=True)):
                assert (mine is None) == (its is None)
                if its is None:
                    continue
                assert (mine.shape, mine.dtype) == (plain.shape, plain.dtype)
                # Rounded alike, summed in another order.
                bound = 1.02 * error(plain, its) + 1e-6
                assert error(mine, its) <= bound, (call.title, number, error(mine, its), bound)
                worst = max(worst, error(mine, its))
            again = made(TRITON_OPS, call)
            assert all(one is None or torch.equal(one, other) for one, other in zip(fused, again, strict=True)), call
            del exact, eager, fused, again
    sys.stdout.write(f"\n{which} {dtype}: relative error at most {worst:.2e}\n")


@pytest.mark.parametrize("which", LARGE)
def test_what_the_kernels_reach_and_that_they_are_compiled_once_for_all_numbers_of_rows(which):
    from blockdraft.models.layer_triton import TRITON_OPS

    widths, rows = LARGE[which]
    layer_ms = least_ms = 0.0
    lines = ["", which]
    for maker in MAKERS:
        for call in maker(widths, rows, torch.bfloat16):
            size = num_bytes(call, made(TRITON_OPS, call))
            run = partial(getattr(TRITON_OPS, call.name), *call.inputs, **call.options)
            time_ms, host_ms = times_ms(run)
            layer_ms += call.times * time_ms
            least_ms += call.times * size / FULL_RATE
            rate = f"{1e3 * time_ms:7.1f} us {size / 2**20:7.1f} MiB {size / time_ms / 1e9:5.2f} TB/s"
            rate += f", host {1e3 * host_ms:5.1f} us"
            lines.append(f"{call.title:34} {rate}")
    lines.append(f"a middle layer {layer_ms:.3f} ms; its bytes at 4.2 TB/s {least_ms:.3f} ms")
    sys.stdout.write("\n".join([*lines, ""]))
    counters = CompileCounters.install()
    try:
        for maker in MAKERS:
            for call in maker(widths, OTHER_ROWS, torch.bfloat16):
                made(TRITON_OPS, call)
        assert counters.snapshot().triton_compiles == 0
    finally:
        counters.remove()
