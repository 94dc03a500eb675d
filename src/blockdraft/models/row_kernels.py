"""What follows from positions, anchors and the order of rows alone: one launch each, where torch needs dozens.

R rows of a batch, T context tokens, A anchors, L block size, S slots of each block that ask (its last ones), Q = A * S
queries, I tiles of M queries, J tiles of N context keys, E head width, D width.
"""

# Triton reads the annotations of a kernel's parameters as they stand: tl.constexpr, no strings.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 256
"""Queries of a program of `ranges_kernel`."""
TILES: Final = 16
"""Tiles of queries that a program of `spans_kernel` looks at together."""
ROWS: Final = 8
"""Rows of a program of `rotary_kernel`."""


@triton.jit(do_not_specialize=["num_context", "num_anchors", "num_queries"])
def ranges_kernel(
    position_ptr, anchor_ptr, low_ptr, high_ptr, num_context, num_anchors, num_queries,
    L: tl.constexpr, S: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`block_mask.context_ranges` of slots L - S and later; WINDOW 0 is none."""
    row = tl.program_id(1).to(tl.int64)
    query = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = query < num_queries
    anchor = tl.load(anchor_ptr + row * num_anchors + query // S, mask=mask, other=-1)
    stop = tl.maximum(anchor, 0)
    position = tl.load(position_ptr + row * num_context + stop, mask=mask, other=0)
    first = tl.where(anchor >= 0, anchor - position, 0)
    if WINDOW > 0:
        first = tl.maximum(first, stop + query % S + (L - S - WINDOW + 1))
    tl.store(low_ptr + row * num_queries + query, first.to(tl.int32), mask=mask)
    tl.store(high_ptr + row * num_queries + query, stop.to(tl.int32), mask=mask)


@triton.jit(do_not_specialize=["num_context", "num_queries", "num_tiles"])
def spans_kernel(
    low_ptr, high_ptr, span_ptr, num_context, num_queries, num_tiles,
    M: tl.constexpr, N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """`block_attention.context_spans`: a program finds the four ends of one tile of keys."""
    key_tile, row = tl.program_id(0), tl.program_id(1)
    left = key_tile * N
    first, inner_first = tl.full((TILES,), 2**30, tl.int32), tl.full((TILES,), 2**30, tl.int32)
    stop, inner_stop = tl.zeros((TILES,), tl.int32), tl.zeros((TILES,), tl.int32)
    num_inner = tl.zeros((TILES,), tl.int32)
    base = row.to(tl.int64) * num_queries
    for start in range(0, num_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        query = tile[:, None] * M + tl.arange(0, M)[None]
        # Padding sees nothing, so a tile that reaches past the last query is never an inner one.
        low = tl.load(low_ptr + base + query, mask=query < num_queries, other=0)
        high = tl.load(high_ptr + base + query, mask=query < num_queries, other=0)
        lowest = tl.min(tl.where(high > low, low, num_context), 1)
        is_some = (tile < num_tiles) & (lowest < left + N) & (tl.max(high, 1) > left)
        is_inner = (tile < num_tiles) & (tl.max(low, 1) <= left) & (tl.min(high, 1) >= left + N)
        first = tl.minimum(first, tl.where(is_some, tile, 2**30))
        stop = tl.maximum(stop, tl.where(is_some, tile + 1, 0))
        inner_first = tl.minimum(inner_first, tl.where(is_inner, tile, 2**30))
        inner_stop = tl.maximum(inner_stop, tl.where(is_inner, tile + 1, 0))
        num_inner += is_inner.to(tl.int32)
    stop_all, inner_stop_all = tl.max(stop, 0), tl.max(inner_stop, 0)
    first_all, inner_first_all = (
        tl.minimum(tl.min(first, 0), stop_all),
        tl.minimum(tl.min(inner_first, 0), inner_stop_all),
    )
    is_range = tl.sum(num_inner, 0) == inner_stop_all - inner_first_all
    inner_first_all = tl.where(is_range, inner_first_all, stop_all)
    inner_first_all = tl.minimum(tl.maximum(inner_first_all, first_all), stop_all)
    inner_stop_all = tl.where(is_range, inner_stop_all, stop_all)
    inner_stop_all = tl.minimum(tl.maximum(inner_stop_all, inner_first_all), stop_all)
    out = span_ptr + (row.to(tl.int64) * tl.num_programs(0) + key_tile) * 4
    tl.store(out, first_all)
    tl.store(out + 1, inner_first_all)
    tl.store(out + 2, inner_stop_all)
    tl.store(out + 3, stop_all)


@triton.jit(do_not_specialize=["num_context", "num_block", "num_rows"])
def rotary_kernel(
    context_ptr, block_ptr, frequency_ptr, cos_ptr, sin_ptr, num_context, num_block, num_rows,
    L: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotary factors of context tokens, then of block tokens, then of these without slot 0 of each block."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    drafted = row - num_context - num_block
    token = tl.where(drafted < 0, row - num_context, drafted // (L - 1) * L + drafted % (L - 1) + 1)
    is_context, is_block = row < num_context, (row >= num_context) & (row < num_rows)
    position = tl.load(context_ptr + row, mask=is_context, other=0) + tl.load(block_ptr + token, mask=is_block, other=0)
    index = tl.arange(0, HALF)
    frequency = tl.load(frequency_ptr + index, mask=index < E // 2, other=0.0)
    angle = position.to(tl.float32)[:, None] * frequency[None]
    mask = (row < num_rows)[:, None] & (index < E // 2)[None]
    place = row.to(tl.int64)[:, None] * E + index[None]
    cos, sin = tl.cos(angle).to(cos_ptr.dtype.element_ty), tl.sin(angle).to(sin_ptr.dtype.element_ty)
    tl.store(cos_ptr + place, cos, mask=mask)
    tl.store(cos_ptr + place + E // 2, cos, mask=mask)
    tl.store(sin_ptr + place, sin, mask=mask)
    tl.store(sin_ptr + place + E // 2, sin, mask=mask)


@triton.jit
def drafted_kernel(all_ptr, drafted_ptr, D: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr, ADDS: tl.constexpr):
    """A program copies a row of a later slot out, or adds one of `drafted` to it where it lies."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    mask = index < D
    all_ptr += (row // (L - 1) * L + row % (L - 1) + 1) * D + index
    drafted_ptr += row * D + index
    value = tl.load(all_ptr, mask=mask)
    if ADDS:
        value = (value.to(tl.float32) + tl.load(drafted_ptr, mask=mask).to(tl.float32)).to(all_ptr.dtype.element_ty)
        tl.store(all_ptr, value, mask=mask)
    else:
        tl.store(drafted_ptr, value, mask=mask)


def launch_ranges(
    position_RT: Tensor, anchor_RA: Tensor, block_size: int, num_slots: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """First and one past the last context key that each query sees, int32 [R, Q]; equal where it sees none."""
    (rows, num_context), num_anchors = position_RT.shape, anchor_RA.shape[1]
    num_queries = num_anchors * num_slots
    low_RQ = torch.empty(rows, num_queries, dtype=torch.int32, device=anchor_RA.device)
    high_RQ = torch.empty_like(low_RQ)
    ranges_kernel[(triton.cdiv(num_queries, BLOCK), rows)](
        position_RT.contiguous(), anchor_RA.contiguous(), low_RQ, high_RQ, num_context, num_anchors, num_queries,
        L=block_size, S=num_slots, WINDOW=0 if window is None else window, BLOCK=BLOCK,
    )  # fmt: skip
    return low_RQ, high_RQ


def launch_spans(low_RQ: Tensor, high_RQ: Tensor, num_context: int, queries: int, keys: int) -> Tensor:
    """`block_attention.context_spans` for tiles of so many queries and keys."""
    rows, num_queries = low_RQ.shape
    num_key_tiles = triton.cdiv(num_context, keys)
    span_RJ4 = torch.empty(rows, num_key_tiles, 4, dtype=torch.int32, device=low_RQ.device)
    spans_kernel[(num_key_tiles, rows)](
        low_RQ, high_RQ, span_RJ4, num_context, num_queries, triton.cdiv(num_queries, queries),
        M=queries, N=keys, TILES=TILES,
    )  # fmt: skip
    return span_RJ4


def launch_rotary(
    context_RT: Tensor, block_RQ: Tensor, frequency_Y: Tensor, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [rows, E] of context tokens, then of block tokens, then of these without slot 0."""
    num_context, num_block, half = context_RT.numel(), block_RQ.numel(), len(frequency_Y)
    num_rows = num_context + num_block + num_block // block_size * (block_size - 1)
    cos = torch.empty(num_rows, 2 * half, dtype=dtype, device=frequency_Y.device)
    sin = torch.empty_like(cos)
    rotary_kernel[(triton.cdiv(num_rows, ROWS),)](
        context_RT.contiguous(), block_RQ.contiguous(), frequency_Y, cos, sin, num_context, num_block, num_rows,
        L=block_size, E=2 * half, HALF=triton.next_power_of_2(half), ROWS=ROWS,
    )  # fmt: skip
    return cos, sin


def launch_drafted(all_ND: Tensor, drafted_MD: Tensor, block_size: int, *, adds: bool) -> None:
    """Copies rows without slot 0 of each block into `drafted_MD`, or adds that to them."""
    assert all_ND.is_contiguous() and drafted_MD.is_contiguous(), "rows are counted by their width"
    num_rows, width = drafted_MD.shape
    block = triton.next_power_of_2(width)
    drafted_kernel[(num_rows,)](
        all_ND, drafted_MD, D=width, BLOCK=block, L=block_size, ADDS=adds, num_warps=min(16, max(1, block // 512))
    )
