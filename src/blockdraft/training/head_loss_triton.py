"""The stage between the two products of the frozen-head loss as two Triton kernels, a program for a slice of a row.

The first finds each slice's maximum and sum, the second puts them together and overwrites the logits. Neither waits
for other slices, so both run at the pace of memory: logits are read twice and written once.

M rows of a chunk, V ids of the head, P slices of a row.
"""

import math
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.training.head_loss import Finish

SLICE: Final = 4096
"""Ids of a program."""
NUM_WARPS: Final = 4
LOG2_E = tl.constexpr(math.log2(math.e))


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
def find_slice(
    product_ptr: "Any", ids: "Any", multiplier: "Any", softcap: "Any", NUM_IDS: tl.constexpr, HAS_SOFTCAP: tl.constexpr
) -> "Any":
    """Maximum of a slice's logits, and the sum of exponentials below it. The multiplier is positive."""
    x = tl.load(product_ptr + ids, mask=ids < NUM_IDS, other=-float("inf")).to(tl.float32)
    factor = 1.0
    if HAS_SOFTCAP:
        x, _ = finish_logits(x, multiplier, softcap, HAS_SOFTCAP)
        x = tl.where(ids < NUM_IDS, x, -float("inf"))
    else:
        # The multiplier is part of the exponential's own factor: a subtraction and a product an id, no more.
        factor = multiplier
    largest = tl.max(x, 0)
    return largest * factor, tl.sum(tl.exp2((x - largest) * (factor * LOG2_E)), 0)


@triton.jit  # type: ignore[untyped-decorator]
def join_slices(largest_ptr: "Any", total_ptr: "Any", row: "Any", P: tl.constexpr, P2: tl.constexpr) -> "Any":
    """The slices' maxima, the row's, and the log of its sum of exponentials; P2 is P or the next power of two."""
    part = tl.arange(0, P2)
    inside = part < P
    largest_P = tl.load(largest_ptr + row * P + part, mask=inside, other=-float("inf"))
    total_P = tl.load(total_ptr + row * P + part, mask=inside, other=0.0)
    largest = tl.max(largest_P, 0)
    return largest_P, largest, largest + tl.log(tl.sum(total_P * tl.exp(largest_P - largest), 0))


@triton.jit  # type: ignore[untyped-decorator]
def first_of(x: "Any", largest_P: "Any", largest: "Any", ids: "Any", NUM_IDS: tl.constexpr, P2: tl.constexpr) -> "Any":
    """The first id of a slice that has the row's maximum, as argmax has it, and the first such slice.

    Nearly every slice has a smaller maximum than its row: it need not look.
    """
    holder = tl.min(tl.where(largest_P == largest, tl.arange(0, P2), P2), 0)
    return tl.min(tl.where((x == largest) & (ids < NUM_IDS), ids, NUM_IDS), 0), holder


@triton.jit  # type: ignore[untyped-decorator]
def _between_find(
    product_ptr: "Any", label_ptr: "Any", largest_ptr: "Any", total_ptr: "Any", at_label_ptr: "Any", stride: "Any",
    multiplier: "Any", softcap: "Any", NUM_IDS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SLICE: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = row * tl.num_programs(0) + part
    ids = part * SLICE + tl.arange(0, SLICE)
    largest, total = find_slice(product_ptr + row * stride, ids, multiplier, softcap, NUM_IDS, HAS_SOFTCAP)
    tl.store(largest_ptr + slot, largest)
    tl.store(total_ptr + slot, total)
    label = tl.load(label_ptr + row)
    # The program that has the label's logit keeps it: the second kernel overwrites it.
    if (label >= part * SLICE) & (label < part * SLICE + SLICE):
        product = tl.load(product_ptr + row * stride + label)
        at_label, _unused = finish_logits(product, multiplier, softcap, HAS_SOFTCAP)
        tl.store(at_label_ptr + row, at_label)


@triton.jit  # type: ignore[untyped-decorator]
def _between_overwrite(
    product_ptr: "Any", label_ptr: "Any", largest_ptr: "Any", total_ptr: "Any", at_label_ptr: "Any", ce_ptr: "Any",
    correct_ptr: "Any", stride: "Any", multiplier: "Any", softcap: "Any", NUM_IDS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, SLICE: tl.constexpr, P: tl.constexpr, P2: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    largest_P, largest, log_sum = join_slices(largest_ptr, total_ptr, row, P, P2)
    label = tl.load(label_ptr + row)
    is_known = label >= 0
    ids = part * SLICE + tl.arange(0, SLICE)
    x = tl.load(product_ptr + row * stride + ids, mask=ids < NUM_IDS, other=0.0)
    x, slope = finish_logits(x, multiplier, softcap, HAS_SOFTCAP)
    if tl.load(largest_ptr + row * P + part) == largest:
        first, holder = first_of(x, largest_P, largest, ids, NUM_IDS, P2)
        tl.store(correct_ptr + row, (first == label).to(tl.int8), mask=part == holder)
    gradient = tl.exp(x - log_sum)
    if HAS_SOFTCAP:
        gradient = gradient * slope
    gradient = tl.where(is_known, gradient * multiplier, 0.0)
    tl.store(product_ptr + row * stride + ids, gradient.to(product_ptr.dtype.element_ty), mask=ids < NUM_IDS)
    if (label >= part * SLICE) & (label < part * SLICE + SLICE):
        # The label's own gradient once more, behind the slice's: cheaper than to compare every id with the label.
        logit = tl.load(at_label_ptr + row)
        here = (tl.exp(logit - log_sum) - 1.0) * multiplier
        if HAS_SOFTCAP:
            here = here * (1.0 - logit / softcap * (logit / softcap))
        tl.debug_barrier()
        tl.store(product_ptr + row * stride + label, here.to(product_ptr.dtype.element_ty))
    if part == 0:
        at_label = tl.load(at_label_ptr + row, mask=is_known, other=0.0)
        tl.store(ce_ptr + row, tl.where(is_known, log_sum - at_label, 0.0))
        # A row of no numbers has its maximum nowhere.
        tl.store(correct_ptr + row, 0, mask=largest != largest)


def between_triton(product_MV: Tensor, label_M: Tensor, finish: Finish, ce_M: Tensor, correct_M: Tensor) -> None:
    """`head_loss.Between` on a GPU."""
    (num_rows, num_ids), device = product_MV.shape, product_MV.device
    num_slices = -(-num_ids // SLICE)
    largest_MP, total_MP = (torch.empty(num_rows, num_slices, device=device) for _ in range(2))
    at_label_M = torch.empty(num_rows, device=device)
    assert finish.multiplier > 0, "the largest product is taken for the largest logit"
    softcap = 1.0 if finish.softcap is None else finish.softcap
    found = (product_MV, label_M, largest_MP, total_MP, at_label_M)
    constants = {"NUM_IDS": num_ids, "HAS_SOFTCAP": finish.softcap is not None, "SLICE": SLICE}
    grid = (num_slices, num_rows)
    _between_find[grid](*found, product_MV.stride(0), finish.multiplier, softcap, **constants, num_warps=NUM_WARPS)
    _between_overwrite[grid](
        *found, ce_M, correct_M.view(torch.int8), product_MV.stride(0), finish.multiplier, softcap, **constants,
        P=num_slices, P2=triton.next_power_of_2(num_slices), num_warps=NUM_WARPS,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _scale(
    gradient_ptr: "Any", weight_ptr: "Any", scaled_ptr: "Any", stride: "Any", D: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(gradient_ptr + row * D + index, mask=index < D, other=0.0) * tl.load(weight_ptr + row * stride)
    tl.store(scaled_ptr + row * D + index, value.to(scaled_ptr.dtype.element_ty), mask=index < D)


def scale_rows_triton(gradient_ND: Tensor, weight_N: Tensor, dtype: torch.dtype) -> Tensor:
    """`head_loss.ScaleRows` on a GPU: torch's product of two types takes three times as long."""
    scaled_ND = torch.empty_like(gradient_ND, dtype=dtype)
    (num_rows, width), block = gradient_ND.shape, 2048
    if num_rows:
        _scale[(num_rows, triton.cdiv(width, block))](
            gradient_ND, weight_N, scaled_ND, weight_N.stride(0), D=width, BLOCK=block, num_warps=NUM_WARPS
        )
    return scaled_ND
