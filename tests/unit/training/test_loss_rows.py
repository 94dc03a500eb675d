"""Only supervised rows reach the head: the same loss, gradients and counts for less work.

R rows, A anchors, S drafted slots, N of a micro-batch, M of them that reach the head, D width.
"""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from blockdraft.config import LossConfig
from blockdraft.data.loader import Fill, Loader
from blockdraft.models.ends import Ends
from blockdraft.runtime.transfers import to_device
from blockdraft.training.head_kl import between_kl_eager, head_kl
from blockdraft.training.head_loss import between_eager, head_loss
from blockdraft.training.loss_rows import put_back, take_labels, take_rows
from blockdraft.training.metrics import report
from integration.tiny import tiny_target
from unit.data.test_row_budget import loaded
from unit.training.test_objectives import CPU, filled, step_for

LOSSES = [
    LossConfig(),
    LossConfig(objective="dpace"),
    LossConfig(objective="kl"),
    LossConfig(objective="kl", labels="argmax"),
    LossConfig(labels="argmax"),
]


def fused_ce(hidden_ND: Tensor, label_N: Tensor, ends: Ends, chunk_rows: int):
    return head_loss(hidden_ND, label_N, ends, chunk_rows, between_eager)


def fused_kl(hidden_ND: Tensor, final_ND: Tensor, ends: Ends, chunk_rows: int):
    return head_kl(hidden_ND, final_ND, ends, chunk_rows, between_kl_eager)


def a_fill() -> tuple[Loader, Fill]:
    loader = loaded(3)
    # Of the first three the one that needs fewest rows, so that the index is filled up.
    return loader, min(loader.fills(0, 3), key=lambda fill: int(fill.passes[0].supervised_RAS.sum()))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.objective} {loss.labels}")
def test_rows_that_count_give_the_same_loss_gradients_and_counts(loss, is_fused):
    _, fill = a_fill()
    (one,), target = fill.passes, tiny_target("llama")
    assert one.row_M is not None
    num_slots = one.label_RAS.numel()
    assert (one.row_M == num_slots).any()
    slot = filled(target, fill, 2, with_final=loss.needs_final_states)
    # What padding of a row holds is whatever was there before; zeros are the kindest to the version without rows.
    slot.buffer.nan_to_num_(0.0)

    def run(row_M: Tensor | None):
        step = step_for(target, loss)
        if is_fused:
            step.slot_loss, step.slot_kl = fused_ce, fused_kl
        step.micro_batch(slot.features_RTC, to_device(one._replace(row_M=row_M), CPU), one.denominator)
        gradients = [gradient.clone() for gradient in step.optimizer.gradients()]
        return report(step.finish(0)), gradients

    (found, gradients), (wanted, its) = run(one.row_M), run(None)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert found._replace(loss=0.0) == wanted._replace(loss=0.0)
    for mine, other in zip(gradients, its, strict=True):
        assert float((mine - other).norm()) <= 1e-5 * float(other.norm())
    # Slots of their neighbours would be noticed.
    shifted, _ = run((one.row_M + 1).clamp(max=num_slots))
    assert shifted.loss != pytest.approx(wanted.loss, rel=1e-4)


def test_the_head_multiplies_the_budgets_rows_alone():
    _, fill = a_fill()
    (one,), target = fill.passes, tiny_target("llama")
    assert one.row_M is not None
    slot, work = filled(target, fill, 2, with_final=False), []
    for row_M in (None, one.row_M):
        step = step_for(target, LossConfig())
        with FlopCounterMode(display=False) as counter:
            step.micro_batch(slot.features_RTC, to_device(one._replace(row_M=row_M), CPU), one.denominator)
        work.append(counter.get_flop_counts()["Global"][torch.ops.aten.mm])
    left_out = one.label_RAS.numel() - len(one.row_M)
    assert left_out > 0
    # The readable loss makes logits twice and a gradient from them: three products a row.
    assert work[0] - work[1] == 3 * 2 * left_out * target.hidden_size * target.vocab_size


def test_what_no_row_stands_for_leaves_no_trace():
    hidden_ND = torch.arange(12.0).view(4, 3).requires_grad_()
    row_M = torch.tensor([0, 2, 4, 4])
    taken_MD = take_rows(hidden_ND, row_M)
    assert torch.equal(taken_MD[:2], hidden_ND[[0, 2]])
    assert take_labels(torch.tensor([5, 6, 7, 8]), row_M).tolist() == [5, 7, -1, -1]
    put_4 = put_back(taken_MD[:, 0] * torch.tensor([1.0, 1.0, torch.nan, torch.nan]), row_M, 4)
    assert put_4.tolist() == [0.0, 0.0, 6.0, 0.0]
    put_4.sum().backward()
    assert hidden_ND.grad is not None
    assert hidden_ND.grad.tolist() == [[1.0, 0.0, 0.0], [0.0] * 3, [1.0, 0.0, 0.0], [0.0] * 3]
    assert put_back(torch.tensor([True, True, True, True]), row_M, 4).tolist() == [True, False, True, False]
