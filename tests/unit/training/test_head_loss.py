"""N rows, D width, V ids of the head."""

import pytest
import torch
from torch import Tensor, nn

from blockdraft.models.ends import Ends
from blockdraft.training.head_loss import between_eager, even_chunk, head_loss
from blockdraft.training.loss import slot_loss
from compiled_for_gpu import compile_for_gpu
from interpreted import run_interpreted

FINISHES = [{}, {"logit_multiplier": 0.25}, {"logit_softcap": 3.0}, {"logit_multiplier": 2.0, "logit_softcap": 2.5}]


def problem(dtype: torch.dtype = torch.float32, num_rows: int = 37, width: int = 24, num_ids: int = 211, **finish):
    """hidden_ND, label_N (some unknown), weight_N and ends; logits of a few units, as a head gives."""
    generator = torch.Generator().manual_seed(7)
    hidden_ND = torch.randn(num_rows, width, generator=generator).to(dtype)
    head_VD = (torch.randn(num_ids, width, generator=generator) * 0.6).to(dtype)
    label_N = torch.randint(num_ids, (num_rows,), generator=generator)
    label_N[::9] = -1
    # Half of the labels are what the head says, so that correctness is not one value throughout.
    label_N[1::2] = (hidden_ND @ head_VD.t()).argmax(-1)[1::2]
    weight_N = torch.rand(num_rows, generator=generator)
    return hidden_ND, label_N, weight_N, Ends(nn.Embedding(num_ids, width), head_VD, **finish)


def run(function, hidden_ND: Tensor, label_N: Tensor, weight_N: Tensor, *rest) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, correctness and the hidden states' gradient."""
    leaf_ND = hidden_ND.clone().requires_grad_()
    result = function(leaf_ND, label_N, *rest)
    loss = (result.ce_N * weight_N).sum() / weight_N.sum()
    loss.backward()
    assert leaf_ND.grad is not None
    return loss.detach(), result.correct_N, leaf_ND.grad


def distance(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference).norm() / reference.norm())


@pytest.mark.parametrize("chunk_rows", [5, 16, 1000])
@pytest.mark.parametrize("finish", FINISHES, ids=str)
def test_equals_the_reference_in_float32(finish, chunk_rows):
    *inputs, ends = problem(**finish)
    expected = run(slot_loss, *inputs, ends, 11)
    found = run(head_loss, *inputs, ends, chunk_rows, between_eager)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    assert torch.equal(found[1], expected[1])
    assert 0 < int(found[1].sum()) < len(found[1])
    assert distance(found[2], expected[2].double()) < 1e-6


@pytest.mark.parametrize("finish", FINISHES, ids=str)
def test_bfloat16_is_no_further_from_float64_than_the_plain_version(finish):
    hidden_ND, label_N, weight_N, ends = problem(torch.bfloat16, 640, 96, 1500, **finish)
    exact_ends = ends.copy_to("cpu", torch.float64)
    leaf_ND = hidden_ND.double().requires_grad_()
    logits_NV = exact_ends.logits(leaf_ND)
    exact_ce_N = nn.functional.cross_entropy(logits_NV, label_N, reduction="none", ignore_index=-1)
    (exact_ce_N * weight_N).sum().div(weight_N.sum()).backward()
    assert leaf_ND.grad is not None
    plain = run(slot_loss, hidden_ND, label_N, weight_N, ends, 256)
    found = run(head_loss, hidden_ND, label_N, weight_N, ends, 256, between_eager)
    assert distance(found[2], leaf_ND.grad) <= distance(plain[2], leaf_ND.grad)
    exact = float((exact_ce_N.detach() * weight_N).sum() / weight_N.sum())
    assert abs(float(found[0]) - exact) <= abs(float(plain[0]) - exact) + 1e-4


def test_no_gradient_reaches_rows_without_a_label_or_weight():
    hidden_ND, label_N, weight_N, ends = problem()
    weight_N[3] = 0.0
    _, _, gradient_ND = run(head_loss, hidden_ND, label_N, weight_N, ends, 8, between_eager)
    assert bool((gradient_ND[label_N == -1] == 0).all())
    assert bool((gradient_ND[3] == 0).all())
    assert int((gradient_ND.abs().sum(1) > 0).sum()) == int(((label_N >= 0) & (weight_N > 0)).sum())


def test_the_first_of_equal_logits_is_the_largest():
    ends = Ends(nn.Embedding(3, 2), torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]))
    result = head_loss(torch.ones(3, 2), torch.tensor([0, 1, 2]), ends, 8, between_eager)
    assert result.correct_N.tolist() == [True, False, False]


def test_chunks_are_whole_tiles_where_they_fit():
    assert even_chunk(7680, 2048) == 2048
    assert even_chunk(7680, 4096) == 4096
    assert even_chunk(7680, 2000) == 1920
    assert even_chunk(7000, 2048) == 2048
    assert even_chunk(4200, 2048) == 1536
    assert even_chunk(300, 4096) == 384
    assert even_chunk(100, 4096) == 128
    assert even_chunk(100, 64) == 50
    assert even_chunk(0, 64) == 0


INTERPRETED = """
import torch
from unit.training.test_head_loss import FINISHES, distance, problem, run
from blockdraft.training import head_loss_triton
from blockdraft.training.head_loss import Finish, between_eager, head_loss, scale_rows_eager
head_loss_triton.SLICE = 64
for dtype in (torch.float32, torch.bfloat16):
    for finish in FINISHES:
        # A chunk of 16 rows and one of 4, in slices of 64, 64, 64 and 19 ids.
        *inputs, ends = problem(dtype, 20, **finish)
        plain = run(head_loss, *inputs, ends, 16, between_eager)
        stages = head_loss_triton.between_triton, head_loss_triton.scale_rows_triton
        found = run(head_loss, *inputs, ends, 16, *stages)
        torch.testing.assert_close(found[0], plain[0], rtol=2e-6, atol=0)
        assert torch.equal(found[1], plain[1]), finish
        far = distance(found[2], plain[2].double())
        # Triton's interpreter cuts to bfloat16 where the hardware rounds, twice: one unit in the last place each.
        assert far < (5e-6 if dtype == torch.float32 else 1e-2), (finish, far)
# Several equal maxima, of one slice and of two; a row of no numbers; rows of the last slice alone.
logits_MV = torch.zeros(5, 150)
logits_MV[0, [7, 9, 100]] = 2.0
logits_MV[1, [70, 140]] = 2.0
logits_MV[2] = float("nan")
logits_MV[3:, 149] = 2.0
label_M, results = torch.tensor([7, 140, 3, 149, -1]), []
for between in (between_eager, head_loss_triton.between_triton):
    ce_M, correct_M = torch.full((5,), -9.0), torch.ones(5, dtype=torch.bool)
    between(logits_MV.clone(), label_M, Finish(0.5, None), ce_M, correct_M)
    results.append((ce_M, correct_M))
assert results[1][1].tolist() == results[0][1].tolist() == [True, False, False, True, False]
torch.testing.assert_close(results[1][0], results[0][0], equal_nan=True)
# Ids that fill every slice: no padding stands for the maximum of a row of no numbers.
correct_M, nothing_MV = torch.ones(1, dtype=torch.bool), torch.full((1, 128), float("nan"))
head_loss_triton.between_triton(nothing_MV, torch.tensor([3]), Finish(1.0, None), torch.empty(1), correct_M)
assert not bool(correct_M)
# A weight for all rows, as a bare sum's gradient is.
gradient_ND = torch.randn(4, 2100)
for weight_N in (torch.randn(4), torch.tensor(0.3).expand(4)):
    found = head_loss_triton.scale_rows_triton(gradient_ND, weight_N, torch.float32)
    assert torch.equal(found, scale_rows_eager(gradient_ND, weight_N, torch.float32))
print("interpreted alike")
"""


def test_the_triton_kernel_equals_the_plain_stage_when_interpreted():
    pytest.importorskip("triton")
    run_interpreted(INTERPRETED)


def compiled(function, is_capped: bool) -> str:
    """A stage of the head compiled for a GPU at Qwen3-8B's ids: its assembly."""
    import triton

    from blockdraft.training.head_loss_triton import NUM_WARPS, SLICE

    num_slices = -(-151936 // SLICE)
    constants = {"NUM_IDS": 151936, "HAS_SOFTCAP": is_capped, "SLICE": SLICE, "P": num_slices}
    constants |= {"P2": triton.next_power_of_2(num_slices), "D": 4096, "BLOCK": 2048}
    types = {"product_ptr": "*bf16", "target_ptr": "*bf16", "label_ptr": "*i64", "correct_ptr": "*i8"}
    types |= {
        "drafted_ptr": "*i64",
        "chosen_ptr": "*i64",
        "scaled_ptr": "*bf16",
        "stride": "i32",
        "multiplier": "fp32",
        "softcap": "fp32",
    }
    return compile_for_gpu(
        function,
        lambda name: types.get(name, "*fp32"),
        constants,
        num_warps=NUM_WARPS,
        is_aligned=lambda name: name.endswith("ptr") or name == "stride",
    ).asm["ptx"]


@pytest.mark.parametrize("is_capped", [False, True])
def test_the_triton_kernels_compile_for_a_gpu_and_read_16_bytes_at_a_time(is_capped):
    pytest.importorskip("triton")
    from blockdraft.training import head_loss_triton

    for name in ("_between_find", "_between_overwrite"):
        assert compiled(vars(head_loss_triton)[name], is_capped).count("ld.global.v4") >= 4
    scaled = compiled(head_loss_triton._scale, is_capped)
    assert scaled.count("ld.global.v4") == 4
    assert scaled.count("st.global.v4") == 2
