"""Cross-entropy through the frozen head with its gradient made in the forward pass: two matrix products a chunk.

A row's gradient with respect to its hidden state is d(CE_n)/d(hidden_n) = (softmax - onehot) @ head, whatever weight
the loss gives to the row later. So the forward makes it beside the cross-entropy, chunk by chunk, while the chunk's
logits are at hand, and the backward only scales rows. No logits are kept and none are made twice; the head needs no
gradient. `training/loss.py` holds the readable version, which this one equals.

N rows, M rows of a chunk, D width, V ids of the head.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.models.ends import Ends
from blockdraft.training.loss import SlotLoss, slot_loss


class Finish(NamedTuple):
    """What the target does to the bare product: softcap(product * multiplier)."""

    multiplier: float
    softcap: float | None


class Between(Protocol):
    """The stage between the two products, one pass over a chunk's logits."""

    def __call__(self, product_MV: Tensor, label_M: Tensor, finish: Finish, ce_M: Tensor, correct_M: Tensor) -> None:
        """Writes CE (float32) and correctness (bool); leaves d(CE)/d(product) in `product_MV`."""
        ...


class ScaleRows(Protocol):
    """The backward: each row times its weight, rounded once."""

    def __call__(self, gradient_ND: Tensor, weight_N: Tensor, dtype: torch.dtype) -> Tensor: ...


class ChosenLoss(Protocol):
    """`loss.slot_loss`, or this module's equal of it."""

    def __call__(self, hidden_ND: Tensor, label_N: Tensor, ends: Ends, chunk_rows: int) -> SlotLoss: ...


def choose_slot_loss(device: torch.device) -> ChosenLoss:
    """On a GPU the fused loss with its Triton kernel; on a CPU the readable one."""
    if device.type != "cuda":
        return slot_loss
    # Only GPUs have Triton; build the step in the main thread, before workers start.
    from blockdraft.training.head_loss_triton import between_triton, scale_rows_triton

    def fused(hidden_ND: Tensor, label_N: Tensor, ends: Ends, chunk_rows: int) -> SlotLoss:
        return head_loss(hidden_ND, label_N, ends, chunk_rows, between_triton, scale_rows_triton)

    return fused


def scale_rows_eager(gradient_ND: Tensor, weight_N: Tensor, dtype: torch.dtype) -> Tensor:
    """`ScaleRows` in plain operations."""
    return torch.mul(gradient_ND, weight_N[:, None], out=torch.empty_like(gradient_ND, dtype=dtype))


def head_loss(
    hidden_ND: Tensor,
    label_N: Tensor,
    ends: Ends,
    chunk_rows: int,
    between: Between,
    scale_rows: ScaleRows = scale_rows_eager,
) -> SlotLoss:
    """What `loss.slot_loss` gives: cross-entropy, and whether the label is the largest logit (the first of equals)."""
    finish = Finish(ends.logit_multiplier, ends.logit_softcap)
    ce_N, correct_N = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ND, label_N, ends.head_weight, finish, chunk_rows, between, scale_rows
    )
    return SlotLoss(ce_N, correct_N)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        label_N: Tensor,
        head_VD: Tensor,
        finish: Finish,
        chunk_rows: int,
        between: Between,
        scale_rows: ScaleRows,
    ) -> tuple[Tensor, Tensor]:
        num_rows = len(label_N)
        ce_N = torch.empty(num_rows, dtype=torch.float32, device=hidden_ND.device)
        correct_N = torch.empty(num_rows, dtype=torch.bool, device=hidden_ND.device)
        # Float32, so that the row's weight is applied before the one rounding to the weights' type.
        gradient_ND = torch.empty_like(hidden_ND, dtype=torch.float32)
        rows = even_chunk(num_rows, chunk_rows)
        # One buffer for the logits of every chunk: the products write into it, so nothing is allocated in the loop.
        logits_MV = hidden_ND.new_empty(rows, len(head_VD))
        for start in range(0, num_rows, rows):
            chunk = slice(start, min(start + rows, num_rows))
            product_MV = logits_MV[: chunk.stop - start]
            torch.mm(hidden_ND[chunk], head_VD.t(), out=product_MV)
            between(product_MV, label_N[chunk], finish, ce_N[chunk], correct_N[chunk])
            float32_product(product_MV, head_VD, gradient_ND[chunk])
        ctx.save_for_backward(gradient_ND)
        ctx.dtype, ctx.scale_rows = hidden_ND.dtype, scale_rows
        ctx.mark_non_differentiable(correct_N)
        return ce_N, correct_N

    @staticmethod
    def backward(ctx: Any, grad_ce_N: Tensor, _grad_correct: None) -> tuple[Tensor, *tuple[None, ...]]:
        (gradient_ND,) = ctx.saved_tensors
        return ctx.scale_rows(gradient_ND, grad_ce_N, ctx.dtype), None, None, None, None, None, None


def float32_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Of 16-bit matrices, summed and written in float32."""
    if left.device.type == "cuda" and left.dtype != torch.float32:
        torch.mm(left, right, out_dtype=torch.float32, out=out)
    else:
        torch.mm(left.float(), right.float(), out=out)


def even_chunk(num_rows: int, chunk_rows: int) -> int:
    """Rows of a chunk: at most `chunk_rows`, even over the chunks, then a multiple of 512, or else of 128, if one fits.

    What is left for the last chunk matters less than whole tiles in the others: see docs/performance.md.
    """
    num_chunks = max(1, -(-num_rows // chunk_rows))
    even = -(-num_rows // num_chunks)
    for multiple in (512, 128):
        rows = -(-even // multiple) * multiple
        if rows <= chunk_rows and rows < num_rows + 128:
            return rows
    return even


def between_eager(product_MV: Tensor, label_M: Tensor, finish: Finish, ce_M: Tensor, correct_M: Tensor) -> None:
    """The stage in plain operations, float32 throughout; what runs on a CPU and what Inductor may compile."""
    logits_MV = product_MV.float() * finish.multiplier
    if finish.softcap is not None:
        capped_MV = torch.tanh(logits_MV / finish.softcap)
        logits_MV = capped_MV * finish.softcap
    is_known_M = label_M >= 0
    label_M1 = label_M.clamp(min=0)[:, None]
    log_sum_M = torch.logsumexp(logits_MV, -1)
    ce_M.copy_(torch.where(is_known_M, log_sum_M - logits_MV.gather(1, label_M1)[:, 0], 0.0))
    correct_M.copy_(logits_MV.argmax(-1) == label_M)
    ids_V = torch.arange(product_MV.shape[1], device=product_MV.device)
    gradient_MV = torch.exp(logits_MV - log_sum_M[:, None]) - (ids_V == label_M1).float()
    if finish.softcap is not None:
        gradient_MV = gradient_MV * (1 - capped_MV.square())
    gradient_MV = torch.where(is_known_M[:, None], gradient_MV * finish.multiplier, 0.0)
    product_MV.copy_(gradient_MV)
