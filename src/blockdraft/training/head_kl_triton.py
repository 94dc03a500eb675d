"""The stage between the products of the frozen head's divergence as two Triton kernels, a program for a slice of a row.

As in `head_loss_triton`: the first finds each slice's maximum and sum for both rows of logits, the second puts them
together and overwrites the drafter's.

M rows of a chunk, V ids of the head, P slices of a row.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.training.head_loss import Finish
from blockdraft.training.head_loss_triton import NUM_WARPS, SLICE, find_slice, finish_logits, first_of, join_slices


@triton.jit  # type: ignore[untyped-decorator]
def _between_kl_find(
    product_ptr: "Any", largest_ptr: "Any", total_ptr: "Any", stride: "Any", multiplier: "Any", softcap: "Any",
    NUM_IDS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SLICE: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = row * tl.num_programs(0) + part
    ids = part * SLICE + tl.arange(0, SLICE)
    largest, total = find_slice(product_ptr + row * stride, ids, multiplier, softcap, NUM_IDS, HAS_SOFTCAP)
    tl.store(largest_ptr + slot, largest)
    tl.store(total_ptr + slot, total)


@triton.jit  # type: ignore[untyped-decorator]
def _between_kl_overwrite(
    product_ptr: "Any", target_ptr: "Any", largest_ptr: "Any", total_ptr: "Any", target_largest_ptr: "Any",
    target_total_ptr: "Any", kl_ptr: "Any", drafted_ptr: "Any", chosen_ptr: "Any", stride: "Any", multiplier: "Any",
    softcap: "Any", NUM_IDS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SLICE: tl.constexpr, P: tl.constexpr,
    P2: tl.constexpr,
) -> None:  # fmt: skip
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    slot = row * P + part
    largest_P, largest, log_sum = join_slices(largest_ptr, total_ptr, row, P, P2)
    target_largest_P, target_largest, target_log_sum = join_slices(target_largest_ptr, target_total_ptr, row, P, P2)
    ids = part * SLICE + tl.arange(0, SLICE)
    inside = ids < NUM_IDS
    x = tl.load(product_ptr + row * stride + ids, mask=inside, other=0.0)
    x, slope = finish_logits(x, multiplier, softcap, HAS_SOFTCAP)
    y = tl.load(target_ptr + row * stride + ids, mask=inside, other=0.0)
    y, _ = finish_logits(y, multiplier, softcap, HAS_SOFTCAP)
    if tl.load(largest_ptr + slot) == largest:
        first, holder = first_of(x, largest_P, largest, ids, NUM_IDS, P2)
        tl.store(drafted_ptr + row, first, mask=part == holder)
    if tl.load(target_largest_ptr + slot) == target_largest:
        first, holder = first_of(y, target_largest_P, target_largest, ids, NUM_IDS, P2)
        tl.store(chosen_ptr + row, first, mask=part == holder)
    if part == 0:
        # Rows of no numbers have their maximum nowhere.
        tl.store(drafted_ptr + row, NUM_IDS, mask=largest != largest)
        tl.store(chosen_ptr + row, NUM_IDS, mask=target_largest != target_largest)
    share = tl.exp(y - target_log_sum)
    tl.store(kl_ptr + slot, tl.sum(tl.where(inside, share * ((y - target_log_sum) - (x - log_sum)), 0.0), 0))
    gradient = (tl.exp(x - log_sum) - share) * multiplier
    if HAS_SOFTCAP:
        gradient = gradient * slope
    tl.store(product_ptr + row * stride + ids, gradient.to(product_ptr.dtype.element_ty), mask=inside)


def between_kl_triton(product_MV: Tensor, target_MV: Tensor, finish: Finish) -> tuple[Tensor, Tensor, Tensor]:
    """`head_kl.BetweenKL` on a GPU."""
    (num_rows, num_ids), device = product_MV.shape, product_MV.device
    num_slices = -(-num_ids // SLICE)
    assert product_MV.stride(0) == target_MV.stride(0)
    assert finish.multiplier > 0, "the largest product is taken for the largest logit"
    softcap = 1.0 if finish.softcap is None else finish.softcap
    numbers = (product_MV.stride(0), finish.multiplier, softcap)
    constants = {"NUM_IDS": num_ids, "HAS_SOFTCAP": finish.softcap is not None, "SLICE": SLICE}
    grid = (num_slices, num_rows)
    found = [torch.empty(num_rows, num_slices, device=device) for _ in range(4)]
    _between_kl_find[grid](product_MV, *found[:2], *numbers, **constants, num_warps=NUM_WARPS)
    _between_kl_find[grid](target_MV, *found[2:], *numbers, **constants, num_warps=NUM_WARPS)
    kl_MP = torch.empty(num_rows, num_slices, device=device)
    drafted_M, chosen_M = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
    _between_kl_overwrite[grid](
        product_MV, target_MV, *found, kl_MP, drafted_M, chosen_M, *numbers, **constants,
        P=num_slices, P2=triton.next_power_of_2(num_slices), num_warps=NUM_WARPS,
    )  # fmt: skip
    return kl_MP.sum(1), drafted_M, chosen_M
