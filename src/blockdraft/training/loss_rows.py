"""Rows of the head: only supervised slots are taken to it, and what it finds is put back where they were.

N slots of a micro-batch, M rows of the run's budget (data/row_budget.py), D width. An index of N stands for no row.
"""

from typing import Any

import torch
from torch import Tensor


def take_rows(hidden_ND: Tensor, row_M: Tensor | None) -> Tensor:
    """[M, D]; all of them without an index. Where the index is N some row comes, of which nothing is kept."""
    if row_M is None:
        return hidden_ND
    taken_MD: Tensor = _Take.apply(hidden_ND, row_M)  # type: ignore[no-untyped-call]
    return taken_MD


def take_labels(label_N: Tensor, row_M: Tensor | None) -> Tensor:
    """Labels of the same rows, -1 where there is none: its cross-entropy and gradient are 0."""
    if row_M is None:
        return label_N
    last = len(label_N) - 1
    return torch.where(row_M <= last, label_N[row_M.clamp(max=last)], -1)


def put_back(found_M: Tensor, row_M: Tensor | None, num_slots: int) -> Tensor:
    """[N]; 0 (or False) where no row was taken."""
    if row_M is None:
        return found_M
    # Every index that stands for no row goes to one place behind the last, which is cut off.
    empty = torch.zeros(num_slots + 1, dtype=found_M.dtype, device=found_M.device)
    return empty.index_copy(0, row_M, found_M)[:num_slots]


class _Take(torch.autograd.Function):
    """index_select whose backward copies: no row is taken twice but the one of no use, so nothing has to be added."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, row_M: Tensor) -> Tensor:
        ctx.save_for_backward(row_M)
        ctx.num_slots = len(hidden_ND)
        return hidden_ND.index_select(0, row_M.clamp(max=len(hidden_ND) - 1))

    @staticmethod
    def backward(ctx: Any, gradient_MD: Tensor) -> tuple[Tensor, None]:
        (row_M,) = ctx.saved_tensors
        whole = gradient_MD.new_zeros(ctx.num_slots + 1, gradient_MD.shape[1])
        return whole.index_copy_(0, row_M, gradient_MD)[: ctx.num_slots], None
