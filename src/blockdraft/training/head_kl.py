"""Divergence from the target through the frozen head, its gradient made in the forward pass: three products a chunk.

d(KL_n)/d(hidden_n) = (softmax of the drafter - softmax of the target) @ head: as with the cross-entropy (`head_loss`)
it is made while a chunk's logits are at hand, and the backward only scales rows. `training/loss.py` holds the readable
version, which this one equals.

N rows, M rows of a chunk, D width, V ids of the head.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from blockdraft.models.ends import Ends
from blockdraft.training.head_loss import Finish, ScaleRows, even_chunk, float32_product, scale_rows_eager
from blockdraft.training.loss import SlotKL, slot_kl


class BetweenKL(Protocol):
    """The stage between the products, over the drafter's and the target's logits of a chunk."""

    def __call__(self, product_MV: Tensor, target_MV: Tensor, finish: Finish) -> tuple[Tensor, Tensor, Tensor]:
        """KL (float32), the drafter's and the target's choice (int64); leaves d(KL)/d(product) in `product_MV`."""
        ...


class ChosenKL(Protocol):
    """`loss.slot_kl`, or this module's equal of it."""

    def __call__(self, hidden_ND: Tensor, final_ND: Tensor, ends: Ends, chunk_rows: int) -> SlotKL: ...


def choose_slot_kl(device: torch.device) -> ChosenKL:
    """On a GPU the fused divergence with its Triton kernel; on a CPU the readable one."""
    if device.type != "cuda":
        return slot_kl
    # Only GPUs have Triton.
    from blockdraft.training.head_kl_triton import between_kl_triton
    from blockdraft.training.head_loss_triton import scale_rows_triton

    def fused(hidden_ND: Tensor, final_ND: Tensor, ends: Ends, chunk_rows: int) -> SlotKL:
        return head_kl(hidden_ND, final_ND, ends, chunk_rows, between_kl_triton, scale_rows_triton)

    return fused


def head_kl(
    hidden_ND: Tensor,
    final_ND: Tensor,
    ends: Ends,
    chunk_rows: int,
    between: BetweenKL,
    scale_rows: ScaleRows = scale_rows_eager,
) -> SlotKL:
    """What `loss.slot_kl` gives."""
    finish = Finish(ends.logit_multiplier, ends.logit_softcap)
    found = _HeadKL.apply(  # type: ignore[no-untyped-call]
        hidden_ND, final_ND, ends.head_weight, finish, chunk_rows, between, scale_rows
    )
    return SlotKL(*found)


class _HeadKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        final_ND: Tensor,
        head_VD: Tensor,
        finish: Finish,
        chunk_rows: int,
        between: BetweenKL,
        scale_rows: ScaleRows,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, device = len(hidden_ND), hidden_ND.device
        kl_N = torch.empty(num_rows, dtype=torch.float32, device=device)
        drafted_N, target_N = (torch.empty(num_rows, dtype=torch.int64, device=device) for _ in range(2))
        gradient_ND = torch.empty_like(hidden_ND, dtype=torch.float32)
        # Two sets of logits are alive at a time: chunks of half the rows need the memory that cross-entropy needs.
        rows = even_chunk(num_rows, max(1, chunk_rows // 2))
        product_MV, logits_MV = (hidden_ND.new_empty(rows, len(head_VD)) for _ in range(2))
        for start in range(0, num_rows, rows):
            chunk = slice(start, min(start + rows, num_rows))
            drafter_MV, target_MV = (buffer[: chunk.stop - start] for buffer in (product_MV, logits_MV))
            torch.mm(hidden_ND[chunk], head_VD.t(), out=drafter_MV)
            torch.mm(final_ND[chunk], head_VD.t(), out=target_MV)
            kl_N[chunk], drafted_N[chunk], target_N[chunk] = between(drafter_MV, target_MV, finish)
            float32_product(drafter_MV, head_VD, gradient_ND[chunk])
        ctx.save_for_backward(gradient_ND)
        ctx.dtype, ctx.scale_rows = hidden_ND.dtype, scale_rows
        ctx.mark_non_differentiable(drafted_N, target_N)
        return kl_N, drafted_N, target_N

    @staticmethod
    def backward(ctx: Any, grad_kl_N: Tensor, _drafted: None, _target: None) -> tuple[Tensor, *tuple[None, ...]]:
        (gradient_ND,) = ctx.saved_tensors
        return ctx.scale_rows(gradient_ND, grad_kl_N, ctx.dtype), None, None, None, None, None, None


def between_kl_eager(product_MV: Tensor, target_MV: Tensor, finish: Finish) -> tuple[Tensor, Tensor, Tensor]:
    """The stage in plain operations, float32 throughout."""
    slope: Tensor | float = finish.multiplier
    logits = [values.float() * finish.multiplier for values in (product_MV, target_MV)]
    if finish.softcap is not None:
        capped = [torch.tanh(values / finish.softcap) for values in logits]
        logits = [values * finish.softcap for values in capped]
        slope = (1 - capped[0].square()) * finish.multiplier
    drafter_MV, own_MV = (values.log_softmax(-1) for values in logits)
    share_MV = own_MV.exp()
    kl_M = (share_MV * (own_MV - drafter_MV)).sum(-1)
    choices = [values.argmax(-1) for values in logits]
    product_MV.copy_((drafter_MV.exp() - share_MV) * slope)
    return kl_M, choices[0], choices[1]
