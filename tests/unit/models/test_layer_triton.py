"""A layer's kernels: interpreted beside the reference, and compiled for GPUs without one.

N rows read, M rows made, D width, F width of all heads, E head width, I inner width.
"""

import re
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

from blockdraft.models.layer_ops import EAGER_OPS, Expand
from compiled_for_gpu import compile_for_gpu
from interpreted import run_interpreted
from unit.models.test_layer_ops import EPS, angles, draw

pytest.importorskip("triton")
from blockdraft.models import layer_kernels, layer_triton
from blockdraft.models.layer_triton import TRITON_OPS

EXPANDS = (None, Expand(3, 4), Expand(3, 4, 1))
# The interpreter cuts to bfloat16 where the hardware rounds: one unit in the last place.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


class Columns(NamedTuple):
    """Of a wider matrix, to be written to."""

    rows: int
    width: int
    dtype: torch.dtype

    def cut(self) -> torch.Tensor:
        return torch.full((self.rows, self.width + 7), 9.0, dtype=self.dtype)[:, 3:-4]


def same(name, *inputs, **options) -> None:
    """The operation of that name makes of these inputs what the reference makes."""

    def made(ops):
        # Some operations write over an input.
        own = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
        own = [value.cut() if isinstance(value, Columns) else value for value in own]
        found = getattr(ops, name)(*own, **options)
        # One that returns nothing writes to its first argument.
        found = own[0] if found is None else found
        for columns in (value for value in own if isinstance(value, torch.Tensor) and not value.is_contiguous()):
            assert bool((columns._base[:, [*range(3), *range(-4, 0)]] == 9).all()), "columns of others"
        return (found,) if isinstance(found, torch.Tensor) else found

    for mine, its in zip(made(TRITON_OPS), made(EAGER_OPS), strict=True):
        assert (mine is None) == (its is None)
        if its is not None:
            assert (mine.shape, mine.dtype) == (its.shape, its.dtype)
            far = float((mine.float() - its.float()).norm() / its.float().norm())
            assert far < TOLERANCES[inputs[0].dtype], (name, options, far)


def compare() -> None:
    """Run in a process of its own, where kernels are interpreted."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        # numpy 2.4 makes no number of an array of one element, which the interpreter's loop bounds are.
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
    # Several programs, and several turns of each.
    layer_triton.TILE, layer_triton.SWIGLU_TILE = 64, 64
    layer_triton.HEAD_PROGRAMS, layer_triton.NORM_WARPS, layer_triton.PARTS = 3, 3, 2
    for dtype in TOLERANCES:
        compare_norms(dtype)
        compare_heads(dtype, num_heads=3, dim=12)
        compare_rows(dtype)
    compare_heads(torch.float32, num_heads=9, dim=4)
    sys.stdout.write("interpreted alike\n")


def compare_norms(dtype) -> None:
    """Sums and norms, with rows that repeat or are left out."""
    x_ND, weight_D = draw(8, 24, dtype=dtype), draw(24, dtype=torch.float32)
    same("add_norm", x_ND, None, weight_D, EPS)
    for expand, drop in (*((expand, None) for expand in EXPANDS), (None, 4)):
        num_made = expand.num_made(8) if expand else 6 if drop else 8
        same("add_norm", x_ND, draw(num_made, 24, dtype=dtype, seed=1), weight_D, EPS, expand, drop)
    rstd_N = EAGER_OPS.add_norm(x_ND, None, weight_D, EPS).rstd_N
    numbers = draw(8, 24, dtype=dtype, seed=2), x_ND, rstd_N, weight_D.to(dtype)
    same("norm_backward", *numbers, None, wants_normed=True)
    same("norm_backward", *numbers, draw(8, 24, dtype=dtype, seed=3), wants_normed=False)
    same("norm_backward", *numbers, draw(6, 24, dtype=dtype, seed=4), wants_normed=True, drop=4)


def compare_heads(dtype, num_heads, dim) -> None:
    """Heads normed and rotated, and back."""
    x_NF, weight_E = draw(8, num_heads * dim, dtype=dtype), draw(dim, dtype=dtype, seed=1)
    for expand in EXPANDS:
        num_made = expand.num_made(8) if expand else 8
        numbers = x_NF, weight_E, EPS, *angles(num_made, dim, dtype), expand
        same("rotate_heads", *numbers)
        same("rotate_heads_backward", draw(num_made, num_heads * dim, dtype=dtype, seed=2), *numbers)
        wide = Columns(8, num_heads * dim, dtype)
        same("rotate_heads_backward", draw(num_made, num_heads * dim, dtype=dtype, seed=2), *numbers, wide)


def compare_rows(dtype) -> None:
    """Rows that repeat, and products of elements."""
    for expand in EXPANDS[1:]:
        same("expand_rows", draw(8, 40, dtype=dtype), expand)
    for expand in EXPANDS:
        num_made = expand.num_made(8) if expand else 8
        same("sum_rows_onto", Columns(8, 40, dtype), draw(num_made, 40, dtype=dtype), expand)
    # Widths of one program and of several, whole and not.
    for width in (24, 5, 128, 150):
        product_NJ, upstream_NI = draw(9, 2 * width, dtype=dtype), draw(9, width, dtype=dtype, seed=2)
        same("swiglu", product_NJ)
        same("swiglu_backward_onto", upstream_NI, product_NJ)


def test_kernels_equal_the_reference_when_interpreted():
    run_interpreted("from unit.models.test_layer_triton import compare; compare()")


class Built(NamedTuple):
    """A kernel at the shapes of a large drafter, and what it may need."""

    constants: dict[str, int]
    warps: int
    most_registers: int
    """Of a thread: fewer programs at a time leave the memory idle."""
    loads: int
    stores: int


PLAIN = {"L": 16, "FIRST": 0, "EXPAND": False}
WIDE = {"D": 5120, "BLOCK": 8192}
HEADS = {"H": 8, "E": 128, "HALF": 64}
BUILT = {
    "add_norm_kernel": Built({**WIDE, **PLAIN, "HAS_DELTA": True, "DROP": False}, 16, 40, 4, 4),
    "norm_backward_kernel": Built(
        {**WIDE, "HAS_RESIDUAL": True, "HAS_NORMED": True, "L": 16, "DROP": True}, 16, 128, 12, 4
    ),
    "rotate_kernel": Built({**HEADS, **PLAIN, "TILE": 32, "EXPAND": True}, 4, 80, 8, 4),
    "rotate_backward_kernel": Built({**HEADS, "LINE": 6144, "TILE": 32, "L": 16, "EXPAND": False}, 4, 128, 14, 4),
    "turn_back_kernel": Built({**HEADS, "HEADS": 8, "ROWS": 4, "L": 16, "FIRST": 0}, 4, 96, 8, 2),
    "expand_kernel": Built({"F": 1024, "ROWS": 4, "BLOCK": 1024, "L": 16, "FIRST": 0}, 4, 64, 4, 4),
    "place_kernel": Built({"F": 1024, "LINE": 6144, "ROWS": 8, "BLOCK": 512}, 4, 64, 4, 4),
    "sum_kernel": Built({"F": 1024, "LINE": 6144, "ROWS": 8, "BLOCK": 512, "L": 16, "FIRST": 0}, 4, 64, 4, 4),
    "swiglu_kernel": Built({"INNER": 17408, "PARTS": 17, "BLOCK": 1024}, 4, 64, 2, 1),
    "swiglu_backward_kernel": Built({"INNER": 17408, "PARTS": 17, "BLOCK": 1024}, 4, 64, 3, 3),
}


def compiled(kernel, constants, warps, capability):
    """For a GPU that need not be there."""

    def kind(name: str) -> str:
        if name.endswith("_ptr"):
            return "*fp32" if name in ("rstd_ptr", "part_ptr", "sum_ptr") else "*bf16"
        return "fp32" if name == "eps" else "i32"

    return compile_for_gpu(kernel, kind, constants, num_warps=warps, capability=capability)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", sorted(BUILT))
def test_kernels_compile_for_a_gpu_spill_nothing_and_move_16_bytes_at_a_time(name, capability, tmp_path):
    from triton import knobs

    built = BUILT[name]
    found = compiled(vars(layer_kernels)[name], built.constants, built.warps, capability)
    ptx = found.asm["ptx"]
    assert ptx.count("ld.global.v4") >= built.loads
    assert ptx.count("st.global.v4") >= built.stores
    assert not re.search(r"(ld|st)\.global\.b16", ptx)
    (tmp_path / "kernel.cubin").write_bytes(found.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(tmp_path / "kernel.cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(found) for found in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    assert stack == 0, usage
    assert registers <= built.most_registers
