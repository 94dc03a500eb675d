"""The stage between the two products of the frozen-head loss as two Triton kernels, a program for a slice of a row.

The first finds each slice's maximum and sum, the second puts them together and overwrites the logits. Neither waits
for other slices, so both run at the pace of memory: logits are read twice and written once.

M rows of a chunk, V ids of the head, P slices of a row.
"""

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.training.head_loss import Finish

SLICE: Final = 8192
"""Ids of a program."""
NUM_WARPS: Final = 8


@triton.jit  # type: ignore[untyped-decorator]
def finish_logits(x: "Any", multiplier: "Any", softcap: "Any", HAS_SOFTCAP: tl.constexpr) -> "Any":
    """softcap * tanh(x * multiplier / softcap), and the slope of the cap there."""
    x = x.to(tl.float32) * multiplier
    if HAS_SOFTCAP:
        # Odd in x, so the exponential never overflows.
        small = tl.exp(-2.0 * tl.abs(x) / softcap)
        tanh = (1.0 - small) / (1.0 + small)
        tanh = tl.where(x < 0, -tanh, tanh)
        return tanh * softcap, 4.0 * small / ((1.0 + small) * (1.0 + small))
    return x, x


@triton.jit  # type: ignore[untyped-decorator]
def find_slice(x: "Any", ids: "Any", NUM_IDS: tl.constexpr) -> "Any":
    """Maximum of a slice, the first id that has it, and the sum of exponentials below it."""
    x = tl.where(ids < NUM_IDS, x, -float("inf"))
    largest = tl.max(x, 0)
    # Of equal logits the first is the largest, as argmax has it.
    first = tl.min(tl.where(x == largest, ids, NUM_IDS), 0)
    return largest, first, tl.sum(tl.exp(x - largest), 0)


@triton.jit  # type: ignore[untyped-decorator]
def join_slices(
    largest_ptr: "Any", first_ptr: "Any", total_ptr: "Any", row: "Any", NUM_IDS: tl.constexpr, P: tl.constexpr,
    P2: tl.constexpr,
) -> "Any":  # fmt: skip
    """log of the row's sum of exponentials, and its first largest id; P2 is P or the next power of two."""
    part = tl.arange(0, P2)
    inside = part < P
    largest_P = tl.load(largest_ptr + row * P + part, mask=inside, other=-float("inf"))
    first_P = tl.load(first_ptr + row * P + part, mask=inside, other=NUM_IDS)
    total_P = tl.load(total_ptr + row * P + part, mask=inside, other=0.0)
    largest = tl.max(largest_P, 0)
    log_sum = largest + tl.log(tl.sum(total_P * tl.exp(largest_P - largest), 0))
    return log_sum, tl.min(tl.where(largest_P == largest, first_P, NUM_IDS), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _between_find(
    product_ptr: "Any", label_ptr: "Any", largest_ptr: "Any", first_ptr: "Any", total_ptr: "Any", at_label_ptr: "Any",
    stride: "Any", multiplier: "Any", softcap: "Any", NUM_IDS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SLICE: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = row * tl.num_programs(0) + part
    ids = part * SLICE + tl.arange(0, SLICE)
    x = tl.load(product_ptr + row * stride + ids, mask=ids < NUM_IDS, other=0.0)
    x, _ = finish_logits(x, multiplier, softcap, HAS_SOFTCAP)
    largest, first, total = find_slice(x, ids, NUM_IDS)
    tl.store(largest_ptr + slot, largest)
    tl.store(first_ptr + slot, first)
    tl.store(total_ptr + slot, total)
    label = tl.load(label_ptr + row)
    # The program that has the label's logit keeps it: the second kernel overwrites it.
    if (label >= part * SLICE) & (label < part * SLICE + SLICE):
        tl.store(at_label_ptr + row, tl.sum(tl.where(ids == label, x, 0.0), 0))


@triton.jit  # type: ignore[untyped-decorator]
def _between_overwrite(
    product_ptr: "Any", label_ptr: "Any", largest_ptr: "Any", first_ptr: "Any", total_ptr: "Any", at_label_ptr: "Any",
    ce_ptr: "Any", correct_ptr: "Any", stride: "Any", multiplier: "Any", softcap: "Any", NUM_IDS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, SLICE: tl.constexpr, P: tl.constexpr, P2: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    log_sum, chosen = join_slices(largest_ptr, first_ptr, total_ptr, row, NUM_IDS, P, P2)
    label = tl.load(label_ptr + row)
    is_known = label >= 0
    ids = part * SLICE + tl.arange(0, SLICE)
    x = tl.load(product_ptr + row * stride + ids, mask=ids < NUM_IDS, other=0.0)
    x, slope = finish_logits(x, multiplier, softcap, HAS_SOFTCAP)
    gradient = tl.exp(x - log_sum) - tl.where(ids == label, 1.0, 0.0)
    if HAS_SOFTCAP:
        gradient = gradient * slope
    gradient = tl.where(is_known, gradient * multiplier, 0.0)
    tl.store(product_ptr + row * stride + ids, gradient.to(product_ptr.dtype.element_ty), mask=ids < NUM_IDS)
    if part == 0:
        at_label = tl.load(at_label_ptr + row, mask=is_known, other=0.0)
        tl.store(ce_ptr + row, tl.where(is_known, log_sum - at_label, 0.0))
        tl.store(correct_ptr + row, (is_known & (chosen == label)).to(tl.int8))


def between_triton(product_MV: Tensor, label_M: Tensor, finish: Finish) -> tuple[Tensor, Tensor]:
    """`head_loss.Between` on a GPU."""
    (num_rows, num_ids), device = product_MV.shape, product_MV.device
    num_slices = -(-num_ids // SLICE)
    largest_MP, total_MP = (torch.empty(num_rows, num_slices, device=device) for _ in range(2))
    first_MP = torch.empty(num_rows, num_slices, dtype=torch.int32, device=device)
    at_label_M, ce_M = (torch.empty(num_rows, device=device) for _ in range(2))
    correct_M = torch.empty(num_rows, dtype=torch.int8, device=device)
    softcap = 1.0 if finish.softcap is None else finish.softcap
    found = (product_MV, label_M, largest_MP, first_MP, total_MP, at_label_M)
    constants = {"NUM_IDS": num_ids, "HAS_SOFTCAP": finish.softcap is not None, "SLICE": SLICE}
    grid = (num_slices, num_rows)
    _between_find[grid](*found, product_MV.stride(0), finish.multiplier, softcap, **constants, num_warps=NUM_WARPS)
    _between_overwrite[grid](
        *found, ce_M, correct_M, product_MV.stride(0), finish.multiplier, softcap, **constants,
        P=num_slices, P2=triton.next_power_of_2(num_slices), num_warps=NUM_WARPS,
    )  # fmt: skip
    return ce_M, correct_M.bool()
