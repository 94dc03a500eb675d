"""N slots, D width, V ids of the head, R rows, A anchors, S drafted slots."""

import pytest
import torch
from torch import Tensor, nn

from blockdraft.models.ends import Ends
from blockdraft.training.loss import slot_loss, weighted_loss

VOCAB = 37


def ends_of(dtype: torch.dtype = torch.float64, **options) -> Ends:
    generator = torch.Generator().manual_seed(0)
    embedding = nn.Embedding(VOCAB, 12).to(dtype)
    return Ends(embedding, torch.randn(VOCAB, 12, generator=generator, dtype=torch.float64).to(dtype), **options)


def hidden_and_labels(num_slots: int = 50, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden_ND = torch.randn(num_slots, 12, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden_ND, torch.randint(0, VOCAB, (num_slots,), generator=generator)


@pytest.mark.parametrize("options", [{}, {"logit_multiplier": 0.125}, {"logit_softcap": 3.0}], ids=str)
@pytest.mark.parametrize("chunk_rows", [1, 7, 50, 4096])
def test_loss_and_gradient_equal_plain_cross_entropy_in_float64(options, chunk_rows):
    ends = ends_of(**options)
    hidden_ND, label_N = hidden_and_labels()
    weight_N = torch.linspace(0, 1, 50, dtype=torch.float64)
    found = slot_loss(hidden_ND, label_N, ends, chunk_rows)
    assert found.ce_N.dtype == torch.float32
    (gradient_ND,) = torch.autograd.grad((found.ce_N * weight_N).sum(), hidden_ND)

    product_NV = hidden_ND @ ends.head_weight.T * options.get("logit_multiplier", 1.0)
    cap = options.get("logit_softcap")
    logits_NV = product_NV if cap is None else torch.tanh(product_NV / cap) * cap
    expected_N = nn.functional.cross_entropy(logits_NV, label_N, reduction="none")
    (expected_ND,) = torch.autograd.grad((expected_N * weight_N).sum(), hidden_ND)
    # The logits are rounded to float32 once: 1e-6 of their size.
    torch.testing.assert_close(found.ce_N.double(), expected_N, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradient_ND, expected_ND, atol=1e-6, rtol=1e-6)
    assert torch.equal(found.correct_N, logits_NV.argmax(-1) == label_N)


def test_labels_outside_a_draft_vocabulary_cost_nothing_and_are_never_correct():
    ends, (hidden_ND, label_N) = ends_of(), hidden_and_labels()
    masked_N = torch.where(torch.arange(50) % 3 == 0, -1, label_N)
    found, plain = slot_loss(hidden_ND, masked_N, ends, 7), slot_loss(hidden_ND, label_N, ends, 7)
    outside = masked_N < 0
    assert (found.ce_N[outside] == 0).all()
    assert not found.correct_N[outside].any()
    assert torch.equal(found.ce_N[~outside], plain.ce_N[~outside])
    (gradient_ND,) = torch.autograd.grad(found.ce_N.sum(), hidden_ND)
    assert (gradient_ND[outside] == 0).all()
    assert (gradient_ND[~outside] != 0).any(-1).all()


def test_cross_entropy_is_float32_whatever_the_weights_are():
    ends = ends_of(torch.bfloat16)
    hidden_ND, label_N = hidden_and_labels(dtype=torch.bfloat16)
    found = slot_loss(hidden_ND, label_N, ends, 16)
    assert found.ce_N.dtype == torch.float32
    logits_NV = nn.functional.linear(hidden_ND, ends.head_weight).detach().float()
    torch.testing.assert_close(found.ce_N, nn.functional.cross_entropy(logits_NV, label_N, reduction="none"))
    found.ce_N.sum().backward()
    assert hidden_ND.grad is not None and hidden_ND.grad.dtype == torch.bfloat16


def test_no_logits_outlive_their_chunk():
    ends, (hidden_ND, label_N) = ends_of(), hidden_and_labels()
    sizes: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        slot_loss(hidden_ND, label_N, ends, 10)
    assert max(sizes, default=0) < 10 * VOCAB


def test_a_micro_batch_adds_its_share_of_the_steps_loss():
    ce_RAS = torch.tensor([[[2.0, 4.0]], [[6.0, 8.0]]])
    weight_RAS = torch.tensor([[[1.0, 0.5]], [[0.0, 1.0]]])
    assert float(weighted_loss(ce_RAS, weight_RAS, 5.0)) == pytest.approx((2 + 2 + 8) / 5)
