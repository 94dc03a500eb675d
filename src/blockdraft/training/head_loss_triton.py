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

SLICE: Final = 4096
"""Ids of a program."""
NUM_WARPS: Final = 4


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
    """Maximum of a slice, and the sum of exponentials below it."""
    x = tl.where(ids < NUM_IDS, x, -float("inf"))
    largest = tl.max(x, 0)
    return largest, tl.sum(tl.exp(x - largest), 0)


@triton.jit  # type: ignore[untyped-decorator]
def join_slices(largest_ptr: "Any", total_ptr: "Any", row: "Any", P: tl.constexpr, P2: tl.constexpr) -> "Any":
    """The row's maximum and the log of its sum of exponentials; P2 is P or the next power of two."""
    part = tl.arange(0, P2)
    inside = part < P
    largest_P = tl.load(largest_ptr + row * P + part, mask=inside, other=-float("inf"))
    total_P = tl.load(total_ptr + row * P + part, mask=inside, other=0.0)
    largest = tl.max(largest_P, 0)
    return largest, largest + tl.log(tl.sum(total_P * tl.exp(largest_P - largest), 0))


@triton.jit  # type: ignore[untyped-decorator]
def first_of(x: "Any", own: "Any", largest: "Any", ids: "Any", NUM_IDS: tl.constexpr) -> "Any":
    """The first id of a slice that has the row's maximum, as argmax has it; NUM_IDS where none has.

    `own`: the slice's maximum. Nearly every slice has a smaller one than its row and looks for nothing.
    """
    first = NUM_IDS
    if own == largest:
        first = tl.min(tl.where((x == largest) & (ids < NUM_IDS), ids, NUM_IDS), 0)
    return first


@triton.jit  # type: ignore[untyped-decorator]
def _between_find(
    product_ptr: "Any", label_ptr: "Any", largest_ptr: "Any", total_ptr: "Any", at_label_ptr: "Any", stride: "Any",
    multiplier: "Any", softcap: "Any", NUM_IDS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SLICE: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = row * tl.num_programs(0) + part
    ids = part * SLICE + tl.arange(0, SLICE)
    x = tl.load(product_ptr + row * stride + ids, mask=ids < NUM_IDS, other=0.0)
    x, _ = finish_logits(x, multiplier, softcap, HAS_SOFTCAP)
    largest, total = find_slice(x, ids, NUM_IDS)
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
    first_ptr: "Any", stride: "Any", multiplier: "Any", softcap: "Any", NUM_IDS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, SLICE: tl.constexpr, P: tl.constexpr, P2: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    largest, log_sum = join_slices(largest_ptr, total_ptr, row, P, P2)
    label = tl.load(label_ptr + row)
    is_known = label >= 0
    ids = part * SLICE + tl.arange(0, SLICE)
    x = tl.load(product_ptr + row * stride + ids, mask=ids < NUM_IDS, other=0.0)
    x, slope = finish_logits(x, multiplier, softcap, HAS_SOFTCAP)
    own = tl.load(largest_ptr + row * P + part)
    tl.store(first_ptr + row * P + part, first_of(x, own, largest, ids, NUM_IDS))
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


def between_triton(product_MV: Tensor, label_M: Tensor, finish: Finish) -> tuple[Tensor, Tensor]:
    """`head_loss.Between` on a GPU."""
    (num_rows, num_ids), device = product_MV.shape, product_MV.device
    num_slices = -(-num_ids // SLICE)
    largest_MP, total_MP = (torch.empty(num_rows, num_slices, device=device) for _ in range(2))
    first_MP = torch.empty(num_rows, num_slices, dtype=torch.int32, device=device)
    at_label_M, ce_M = (torch.empty(num_rows, device=device) for _ in range(2))
    softcap = 1.0 if finish.softcap is None else finish.softcap
    found = (product_MV, label_M, largest_MP, total_MP, at_label_M)
    constants = {"NUM_IDS": num_ids, "HAS_SOFTCAP": finish.softcap is not None, "SLICE": SLICE}
    grid = (num_slices, num_rows)
    _between_find[grid](*found, product_MV.stride(0), finish.multiplier, softcap, **constants, num_warps=NUM_WARPS)
    _between_overwrite[grid](
        *found, ce_M, first_MP, product_MV.stride(0), finish.multiplier, softcap, **constants,
        P=num_slices, P2=triton.next_power_of_2(num_slices), num_warps=NUM_WARPS,
    )  # fmt: skip
    return ce_M, first_MP.amin(1) == label_M
