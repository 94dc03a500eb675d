"""The stage between the products of the frozen head's divergence as one Triton kernel: a program for each row.

A row of both logits is read twice, the second time mostly from the L2 cache; the drafter's is overwritten once.

M rows of a chunk, V ids of the head.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from blockdraft.training.head_loss import Finish
from blockdraft.training.head_loss_triton import BLOCK, NUM_WARPS, finish_logits


@triton.jit  # type: ignore[untyped-decorator]
def _grow(largest: "Any", total: "Any", x: "Any") -> "Any":
    """Running maximum and sum of exponentials."""
    larger = tl.maximum(largest, tl.max(x, 0))
    return larger, total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _between_kl(
    product_ptr: "Any", target_ptr: "Any", kl_ptr: "Any", drafted_ptr: "Any", chosen_ptr: "Any", stride: "Any",
    multiplier: "Any", softcap: "Any", NUM_IDS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    product_ptr += row * stride
    target_ptr += row * stride
    offset = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    target_largest = tl.full((), float("-inf"), tl.float32)
    target_total = tl.full((), 0.0, tl.float32)
    for start in range(0, NUM_IDS, BLOCK):
        ids = start + offset
        inside = ids < NUM_IDS
        x, _ = finish_logits(tl.load(product_ptr + ids, mask=inside, other=0.0), multiplier, softcap, HAS_SOFTCAP)
        y, _ = finish_logits(tl.load(target_ptr + ids, mask=inside, other=0.0), multiplier, softcap, HAS_SOFTCAP)
        largest, total = _grow(largest, total, tl.where(inside, x, -float("inf")))
        target_largest, target_total = _grow(target_largest, target_total, tl.where(inside, y, -float("inf")))
    log_sum = largest + tl.log(total)
    target_log_sum = target_largest + tl.log(target_total)

    divergence = tl.zeros((BLOCK,), dtype=tl.float32)
    # Of equal logits the first is the largest, as argmax has it.
    drafted = tl.full((BLOCK,), NUM_IDS, tl.int32)
    chosen = tl.full((BLOCK,), NUM_IDS, tl.int32)
    for start in range(0, NUM_IDS, BLOCK):
        ids = start + offset
        inside = ids < NUM_IDS
        x, slope = finish_logits(tl.load(product_ptr + ids, mask=inside, other=0.0), multiplier, softcap, HAS_SOFTCAP)
        y, _ = finish_logits(tl.load(target_ptr + ids, mask=inside, other=0.0), multiplier, softcap, HAS_SOFTCAP)
        drafted = tl.minimum(drafted, tl.where(inside & (x == largest), ids, NUM_IDS))
        chosen = tl.minimum(chosen, tl.where(inside & (y == target_largest), ids, NUM_IDS))
        share = tl.exp(y - target_log_sum)
        divergence += tl.where(inside, share * ((y - target_log_sum) - (x - log_sum)), 0.0)
        gradient = (tl.exp(x - log_sum) - share) * multiplier
        if HAS_SOFTCAP:
            gradient = gradient * slope
        tl.store(product_ptr + ids, gradient.to(product_ptr.dtype.element_ty), mask=inside)
    tl.store(kl_ptr + row, tl.sum(divergence, 0))
    tl.store(drafted_ptr + row, tl.min(drafted, 0).to(tl.int64))
    tl.store(chosen_ptr + row, tl.min(chosen, 0).to(tl.int64))


def between_kl_triton(product_MV: Tensor, target_MV: Tensor, finish: Finish) -> tuple[Tensor, Tensor, Tensor]:
    """`head_kl.BetweenKL` on a GPU."""
    num_rows = len(product_MV)
    assert product_MV.stride(0) == target_MV.stride(0)
    kl_M = torch.empty(num_rows, dtype=torch.float32, device=product_MV.device)
    drafted_M, chosen_M = (torch.empty(num_rows, dtype=torch.int64, device=product_MV.device) for _ in range(2))
    _between_kl[(num_rows,)](
        product_MV, target_MV, kl_M, drafted_M, chosen_M, product_MV.stride(0),
        finish.multiplier, 1.0 if finish.softcap is None else finish.softcap,
        NUM_IDS=product_MV.shape[1], HAS_SOFTCAP=finish.softcap is not None, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return kl_M, drafted_M, chosen_M
