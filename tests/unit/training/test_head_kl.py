"""N rows, D width, V ids of the head."""

import sys

import pytest
import torch
from torch import Tensor

from blockdraft.training.head_kl import between_kl_eager, head_kl
from blockdraft.training.head_loss import Finish
from blockdraft.training.loss import slot_kl
from interpreted import run_interpreted
from unit.training.test_head_loss import FINISHES, compiled, distance, problem


def run(function, hidden_ND: Tensor, final_ND: Tensor, weight_N: Tensor, *rest) -> tuple[Tensor, ...]:
    """Loss, choices, and the hidden states' gradient."""
    leaf_ND = hidden_ND.clone().requires_grad_()
    found = function(leaf_ND, final_ND, *rest)
    loss = (found.kl_N * weight_N).sum() / weight_N.sum()
    loss.backward()
    assert leaf_ND.grad is not None
    return loss.detach(), found.drafted_N, found.target_N, leaf_ND.grad


def kl_problem(dtype: torch.dtype = torch.float32, num_rows: int = 37, **finish):
    hidden_ND, _, weight_N, ends = problem(dtype, num_rows, **finish)
    final_ND = hidden_ND + torch.randn(hidden_ND.shape, generator=torch.Generator().manual_seed(3)).to(dtype) * 0.5
    return hidden_ND, final_ND, weight_N, ends


@pytest.mark.parametrize("chunk_rows", [7, 1000])
@pytest.mark.parametrize("finish", FINISHES, ids=str)
def test_equals_the_reference_in_float32(finish, chunk_rows):
    *inputs, ends = kl_problem(**finish)
    expected = run(slot_kl, *inputs, ends, 11)
    found = run(head_kl, *inputs, ends, chunk_rows, between_kl_eager)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    for mine, its in zip(found[1:3], expected[1:3], strict=True):
        # Where a soft cap flattens two logits, rounding decides which is the larger.
        assert int((mine != its).sum()) <= ("logit_softcap" in finish)
    assert 0 < int((found[1] == found[2]).sum()) < len(found[1])
    assert distance(found[3], expected[3].double()) < 1e-5


def test_bfloat16_is_no_further_from_float64_than_the_plain_version():
    hidden_ND, final_ND, weight_N, ends = kl_problem(torch.bfloat16)
    exact = run(slot_kl, hidden_ND.double(), final_ND.double(), weight_N, ends.copy_to("cpu", torch.float64), 64)
    plain = run(slot_kl, hidden_ND, final_ND, weight_N, ends, 64)
    found = run(head_kl, hidden_ND, final_ND, weight_N, ends, 64, between_kl_eager)
    assert distance(found[3], exact[3].double()) <= distance(plain[3], exact[3].double())


def compare() -> None:
    """Run in a process of its own, where kernels are interpreted."""
    from blockdraft.training import head_kl_triton

    head_kl_triton.SLICE = 64
    for dtype in (torch.float32, torch.bfloat16):
        for finish in FINISHES:
            # A chunk of 16 rows and one of 4, in slices of 64, 64, 64 and 19 ids.
            *inputs, ends = kl_problem(dtype, num_rows=20, **finish)
            plain = run(head_kl, *inputs, ends, 16, between_kl_eager)
            found = run(head_kl, *inputs, ends, 16, head_kl_triton.between_kl_triton)
            torch.testing.assert_close(found[0], plain[0], rtol=1e-5, atol=0)
            assert torch.equal(found[1], plain[1])
            assert torch.equal(found[2], plain[2])
            # Triton's interpreter cuts to bfloat16 where the hardware rounds: one unit in the last place.
            assert distance(found[3], plain[3].double()) < (1e-5 if dtype == torch.float32 else 5e-3)
    compare_choices(head_kl_triton.between_kl_triton)
    sys.stdout.write("interpreted alike\n")


def compare_choices(between) -> None:
    """Several equal maxima, of one slice and of two, of either side; rows of no numbers choose no id."""
    drafter_MV, target_MV = torch.zeros(4, 128), torch.zeros(4, 128)
    drafter_MV[0, [7, 9, 100]] = target_MV[1, [7, 9, 100]] = 2.0
    drafter_MV[1, [70, 127]] = target_MV[0, [70, 127]] = 2.0
    drafter_MV[2] = target_MV[3] = float("nan")
    drafter_MV[3, 80] = target_MV[2, 90] = 2.0
    plain = between_kl_eager(drafter_MV.clone(), target_MV.clone(), Finish(0.5, None))
    found = between(drafter_MV.clone(), target_MV.clone(), Finish(0.5, None))
    torch.testing.assert_close(found[0], plain[0], equal_nan=True)
    assert found[1].tolist() == [7, 70, 128, 80] and found[1][:2].equal(plain[1][:2])
    assert found[2].tolist() == [70, 7, 90, 128] and found[2][:2].equal(plain[2][:2])


def test_the_triton_kernel_equals_the_plain_stage_when_interpreted():
    pytest.importorskip("triton")
    run_interpreted("from unit.training.test_head_kl import compare; compare()")


@pytest.mark.parametrize("is_capped", [False, True])
def test_the_triton_kernels_compile_for_a_gpu_and_read_16_bytes_at_a_time(is_capped):
    pytest.importorskip("triton")
    from blockdraft.training import head_kl_triton

    for name in ("_between_kl_find", "_between_kl_overwrite"):
        ptx = compiled(vars(head_kl_triton)[name], is_capped)
        assert ptx.count("ld.global.v4") >= 4
