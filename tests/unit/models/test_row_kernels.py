"""Kernels of positions and anchors: interpreted beside plain operations, and compiled for a GPU without one.

R rows, T context tokens, A anchors, L block size, S slots of each block that ask, Q queries, E head width, D width.
"""

import sys

import pytest
import torch

from blockdraft.models.block_mask import context_ranges
from blockdraft.models.blocks import block_positions
from blockdraft.models.drafter import drop_anchors, rotary_frequencies, rotation
from blockdraft.models.layer_ops import EAGER_OPS
from compiled_for_gpu import compile_for_gpu
from interpreted import run_interpreted

pytest.importorskip("triton")
from blockdraft.models import row_kernels
from blockdraft.models.block_attention import Ranges, Tile, context_spans
from blockdraft.models.layer_triton import TRITON_OPS
from unit.models.test_block_attention import CASES, let_numbers_index, rows


def compare() -> None:
    """Run in a process of its own, where kernels are interpreted."""
    let_numbers_index()
    # Several programs and several turns of each.
    row_kernels.BLOCK, row_kernels.TILES, row_kernels.ROWS = 32, 4, 2
    for case in CASES:
        compare_ranges(case["block_size"], case.get("window"))
    for dtype in (torch.float32, torch.bfloat16):
        compare_rows(dtype)
    sys.stdout.write("interpreted alike\n")


def compare_ranges(length: int, window: int | None) -> None:
    _, position_RT, anchor_RA = rows()
    whole = context_ranges(position_RT, anchor_RA, length, window)
    for num_slots in (length, length - 1):
        wanted = Ranges(*(drop_anchors(ends, length) if num_slots < length else ends for ends in whole))
        found = Ranges(*row_kernels.launch_ranges(position_RT, anchor_RA, length, num_slots, window))
        assert all(torch.equal(mine, its) for mine, its in zip(found, wanted, strict=True)), (length, window, num_slots)
        for queries, keys in ((8, 16), (64, 64)):
            span_RJ4 = row_kernels.launch_spans(*found, position_RT.shape[1], queries, keys)
            its_RJ4 = context_spans(wanted, position_RT.shape[1], Tile(queries, keys, 4, 1))
            assert torch.equal(span_RJ4, its_RJ4), (length, window, num_slots, queries, keys)


def compare_rows(dtype: torch.dtype) -> None:
    _, position_RT, anchor_RA = rows()
    position_RT = position_RT + 40_000
    block_RQ = block_positions(position_RT, anchor_RA, 4)
    numbers = (position_RT, block_RQ, rotary_frequencies(12, 1e6, position_RT.device), 4, dtype)
    for mine, its in zip(TRITON_OPS.rotary(*numbers), EAGER_OPS.rotary(*numbers), strict=True):
        # numpy's sine is not torch's; bfloat16 is cut by the interpreter, not rounded.
        torch.testing.assert_close(mine, its, atol=1e-6 if dtype == torch.float32 else 8e-3, rtol=0)
    generator = torch.Generator().manual_seed(0)
    x_ND, more_MD = (torch.randn(count, 12, generator=generator).to(dtype) for count in (24, 18))
    assert torch.equal(TRITON_OPS.take_drafted(x_ND, 4), EAGER_OPS.take_drafted(x_ND, 4))
    mine_ND, its_ND = x_ND.clone(), x_ND.clone()
    TRITON_OPS.add_drafted(mine_ND, more_MD, 4)
    EAGER_OPS.add_drafted(its_ND, more_MD, 4)
    torch.testing.assert_close(mine_ND, its_ND, atol=1e-6, rtol=0 if dtype == torch.float32 else 8e-3)
    assert not torch.equal(mine_ND, x_ND)


def test_kernels_equal_plain_operations_when_interpreted():
    run_interpreted("from unit.models.test_row_kernels import compare; compare()")


def test_rotary_factors_are_the_drafters():
    _, position_RT, anchor_RA = rows()
    block_RQ = block_positions(position_RT, anchor_RA, 4)
    found = EAGER_OPS.rotary(position_RT, block_RQ, rotary_frequencies(12, 1e6, position_RT.device), 4, torch.bfloat16)
    block = rotation(block_RQ, 12, 1e6, torch.bfloat16)
    for mine_NE, context, asked in zip(found, rotation(position_RT, 12, 1e6, torch.bfloat16), block, strict=True):
        parts = (context, asked, drop_anchors(asked, 4, dim=2))
        assert torch.equal(mine_NE, torch.cat([part.flatten(0, 2) for part in parts]))


BUILT = {
    "ranges_kernel": {"L": 16, "S": 15, "WINDOW": 2048, "BLOCK": 256},
    "spans_kernel": {"M": 64, "N": 64, "TILES": 16},
    "rotary_kernel": {"L": 16, "E": 128, "HALF": 64, "ROWS": 8},
    "drafted_kernel": {"D": 5120, "BLOCK": 8192, "L": 16, "ADDS": True},
}
INTEGERS = {"position_ptr": "*i64", "anchor_ptr": "*i64", "context_ptr": "*i64", "block_ptr": "*i64"}
INTEGERS |= {"low_ptr": "*i32", "high_ptr": "*i32", "span_ptr": "*i32", "frequency_ptr": "*fp32"}


@pytest.mark.parametrize("name", sorted(BUILT))
def test_kernels_compile_for_a_gpu_and_spill_nothing(name):
    kernel, constants = vars(row_kernels)[name], BUILT[name]

    def kind(argument: str) -> str:
        return INTEGERS.get(argument, "*bf16" if argument.endswith("_ptr") else "i32")

    found = compile_for_gpu(kernel, kind, constants, num_warps=16 if name == "drafted_kernel" else 4)
    assert "ld.local" not in found.asm["ptx"] or name == "rotary_kernel"
    if name == "drafted_kernel":
        assert "ld.global.v4" in found.asm["ptx"]
        assert "st.global.v4" in found.asm["ptx"]
