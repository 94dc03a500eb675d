"""The stage between the two products of the frozen-head loss as one Triton kernel: a program for each row.

A row's logits are read twice, the second time mostly from the L2 cache, and overwritten once.

M rows of a chunk, V ids of the head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.training.head_loss import Finish

BLOCK = 4096
NUM_WARPS = 8


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
def _between(
    product_ptr: "Any",
    label_ptr: "Any",
    ce_ptr: "Any",
    correct_ptr: "Any",
    stride: "Any",
    multiplier: "Any",
    softcap: "Any",
    NUM_IDS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_ptr = product_ptr + row * stride
    label = tl.load(label_ptr + row)
    is_known = label >= 0
    offset = tl.arange(0, BLOCK)

    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, NUM_IDS, BLOCK):
        ids = start + offset
        x = tl.load(row_ptr + ids, mask=ids < NUM_IDS, other=0.0)
        x, _ = finish_logits(x, multiplier, softcap, HAS_SOFTCAP)
        x = tl.where(ids < NUM_IDS, x, -float("inf"))
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    log_sum = largest + tl.log(total)
    at_label = tl.load(row_ptr + tl.where(is_known, label, 0))
    at_label, _ = finish_logits(at_label, multiplier, softcap, HAS_SOFTCAP)
    tl.store(ce_ptr + row, tl.where(is_known, log_sum - at_label, 0.0))
    # Every thread has read the label's logit before any overwrites it.
    tl.debug_barrier()

    earlier = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, NUM_IDS, BLOCK):
        ids = start + offset
        x = tl.load(row_ptr + ids, mask=ids < NUM_IDS, other=0.0)
        x, slope = finish_logits(x, multiplier, softcap, HAS_SOFTCAP)
        # Of equal logits the first is the largest, as argmax has it.
        earlier += ((x == largest) & (ids < label)).to(tl.int32)
        gradient = tl.exp(x - log_sum) - tl.where(ids == label, 1.0, 0.0)
        if HAS_SOFTCAP:
            gradient = gradient * slope
        gradient = tl.where(is_known, gradient * multiplier, 0.0)
        tl.store(row_ptr + ids, gradient.to(product_ptr.dtype.element_ty), mask=ids < NUM_IDS)
    is_correct = is_known & (at_label == largest) & (tl.sum(earlier, 0) == 0)
    tl.store(correct_ptr + row, is_correct.to(tl.int8))


def between_triton(product_MV: Tensor, label_M: Tensor, finish: Finish) -> tuple[Tensor, Tensor]:
    """`head_loss.Between` on a GPU."""
    ce_M = torch.empty(len(label_M), dtype=torch.float32, device=product_MV.device)
    correct_M = torch.empty(len(label_M), dtype=torch.int8, device=product_MV.device)
    _between[(len(label_M),)](
        product_MV,
        label_M,
        ce_M,
        correct_M,
        product_MV.stride(0),
        finish.multiplier,
        1.0 if finish.softcap is None else finish.softcap,
        NUM_IDS=product_MV.shape[1],
        HAS_SOFTCAP=finish.softcap is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return ce_M, correct_M.bool()
