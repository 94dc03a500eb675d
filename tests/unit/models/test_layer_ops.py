"""The reference of a layer's operations: beside the drafter's own modules, and its gradients beside autograd's.

R batch rows, A anchors, L block size, N rows read, M rows made, D width, H heads, E head width.
"""

import pytest
import torch
from torch import nn

from blockdraft.models.drafter import RMSNorm, rotate, rotation
from blockdraft.models.layer_ops import EAGER_OPS, Expand

EPS = 1e-6


def draw(*sizes, dtype=torch.float64, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed + sum(sizes)), dtype=torch.float64).to(
        dtype
    )


def angles(rows, width, dtype=torch.float64):
    found = rotation(torch.arange(3, 3 + rows)[None], width, 10_000.0, dtype)
    return found.cos[0, 0], found.sin[0, 0]


def plain_norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def plain_heads(x_NF, weight_E, cos_ME, sin_ME):
    normed_MHE = plain_norm(x_NF.unflatten(1, (-1, len(weight_E))), weight_E)
    return rotate(normed_MHE[None].transpose(1, 2), Turned(cos_ME, sin_ME))[0].transpose(0, 1).flatten(1)


class Turned:
    """Factors of one batch row."""

    def __init__(self, cos_ME, sin_ME):
        self.cos, self.sin = cos_ME, sin_ME


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_the_forward_is_the_drafters_own_in_float32():
    x_ND, delta_ND = draw(7, 12, dtype=torch.float32), draw(7, 12, dtype=torch.float32, seed=1)
    norm = RMSNorm(12, EPS)
    norm.weight.data = draw(12, dtype=torch.float32)
    found = EAGER_OPS.add_norm(x_ND, delta_ND, norm.weight, EPS)
    assert torch.equal(found.total_ND, x_ND + delta_ND)
    assert torch.equal(found.normed_ND, norm(x_ND + delta_ND))
    alone = EAGER_OPS.add_norm(x_ND, None, norm.weight, EPS)
    assert alone.total_ND is x_ND
    assert torch.equal(alone.normed_ND, norm(x_ND))
    heads = RMSNorm(4, EPS)
    cos_ME, sin_ME = angles(7, 4, torch.float32)
    wanted_NF = rotate(heads(x_ND.view(1, 7, 3, 4)).transpose(1, 2), Turned(cos_ME, sin_ME)).transpose(1, 2).flatten(2)
    close(EAGER_OPS.rotate_heads(x_ND, heads.weight, EPS, cos_ME, sin_ME), wanted_NF[0])
    hidden_ND = EAGER_OPS.swiglu(torch.cat([x_ND, delta_ND], 1))
    torch.testing.assert_close(hidden_ND, nn.functional.silu(x_ND) * delta_ND)


def test_the_norm_reads_the_rounded_sum_and_rounds_once():
    x_ND, delta_ND = draw(5, 64, dtype=torch.bfloat16), draw(5, 64, dtype=torch.bfloat16, seed=1)
    found = EAGER_OPS.add_norm(x_ND, delta_ND, torch.ones(64), EPS)
    assert found.total_ND.dtype == found.normed_ND.dtype == torch.bfloat16
    assert found.rstd_N.dtype == torch.float32
    assert torch.equal(found.normed_ND, plain_norm((x_ND + delta_ND).float(), torch.ones(64)).bfloat16())


@pytest.mark.parametrize("first_slot", [0, 1])
def test_rows_of_later_slots_are_the_mask_tokens(first_slot):
    # Two batch rows of two anchors: rows 0 1 | 2 and 3 4 | 5, the mask tokens' last.
    x_NF, expand = torch.arange(6.0)[:, None], Expand(2, 3, first_slot)
    wanted = [[0, 2, 2], [1, 2, 2], [3, 5, 5], [4, 5, 5]]
    made_MF = EAGER_OPS.expand_rows(x_NF, expand)
    assert made_MF.view(4, -1).tolist() == [row[first_slot:] for row in wanted]
    assert (expand.num_made(6), expand.num_read(len(made_MF))) == (len(made_MF), 6)
    upstream_MF = torch.arange(float(len(made_MF)))[:, None]
    asked_NF = x_NF.clone().requires_grad_()
    (wanted_NF,) = torch.autograd.grad(EAGER_OPS.expand_rows(asked_NF, expand), asked_NF, upstream_MF)
    # Columns of a wider matrix, whose others stay.
    wide_NX = torch.full((6, 3), -1.0)
    EAGER_OPS.sum_rows_onto(wide_NX[:, 1:2], upstream_MF, expand)
    assert torch.equal(wide_NX[:, 1:2], wanted_NF)
    assert bool((wide_NX[:, ::2] == -1).all())


@pytest.mark.parametrize("which", ["plain", "expand", "later slots", "drop"])
def test_gradients_of_a_sum_and_its_norm_are_autograds(which):
    expand = {"expand": Expand(2, 3), "later slots": Expand(2, 3, 1)}.get(which)
    drop = 3 if which == "drop" else None
    x_ND = draw(12, 10).requires_grad_()
    num_made = expand.num_made(12) if expand else 8 if drop else 12
    delta_MD = draw(num_made, 10, seed=1).requires_grad_()
    weight_D = draw(10, seed=2).requires_grad_()
    pick_M = torch.arange(12)
    if expand:
        pick_M = EAGER_OPS.expand_rows(pick_M[:, None], expand)[:, 0]
    elif drop:
        pick_M = pick_M[pick_M % 3 > 0]
    total_MD = x_ND[pick_M] + delta_MD
    normed_MD = plain_norm(total_MD, weight_D)
    found = EAGER_OPS.add_norm(x_ND.detach(), delta_MD.detach(), weight_D.detach(), EPS, expand, drop)
    close(found.total_ND, total_MD.detach())
    close(found.normed_ND, normed_MD.detach())
    upstream_MD, beside_MD = draw(num_made, 10, seed=3), draw(num_made, 10, seed=4)
    wanted = torch.autograd.grad([normed_MD, total_MD], [delta_MD, weight_D], [upstream_MD, beside_MD])
    gradient = EAGER_OPS.norm_backward(
        upstream_MD, found.total_ND, found.rstd_N, weight_D.detach(), beside_MD, wants_normed=True
    )
    close(gradient.total_ND, wanted[0])
    close(gradient.weight_D, wanted[1])
    close(gradient.normed_ND, found.normed_ND)


def test_a_residual_without_rows_for_slot_0_adds_zero_there():
    total_ND, upstream_ND, weight_D = draw(12, 10), draw(12, 10, seed=1), draw(10)
    rstd_N = EAGER_OPS.add_norm(total_ND, None, weight_D, EPS).rstd_N
    residual_MD = draw(8, 10, seed=2)
    numbers = upstream_ND, total_ND, rstd_N, weight_D
    bare = EAGER_OPS.norm_backward(*numbers, None, wants_normed=False)
    assert bare.normed_ND is None
    added_ND = EAGER_OPS.norm_backward(*numbers, residual_MD, wants_normed=False, drop=3).total_ND - bare.total_ND
    close(added_ND.view(4, 3, 10)[:, 0], torch.zeros(4, 10, dtype=torch.float64))
    close(added_ND.view(4, 3, 10)[:, 1:].flatten(0, 1), residual_MD)


@pytest.mark.parametrize("expand", [None, Expand(3, 4), Expand(3, 4, 1)])
def test_gradients_of_rotated_heads_are_autograds(expand):
    x_NF, weight_E = draw(8, 12).requires_grad_(), draw(4, seed=1).requires_grad_()
    num_made = expand.num_made(8) if expand else 8
    cos_ME, sin_ME = angles(num_made, 4)
    read_MF = EAGER_OPS.expand_rows(x_NF, expand) if expand else x_NF
    made_MF = plain_heads(read_MF, weight_E, cos_ME, sin_ME)
    numbers = x_NF.detach(), weight_E.detach(), EPS, cos_ME, sin_ME, expand
    close(EAGER_OPS.rotate_heads(*numbers), made_MF.detach())
    upstream_MF = draw(num_made, 12, seed=2)
    found = EAGER_OPS.rotate_heads_backward(upstream_MF, *numbers)
    for mine, its in zip(found, torch.autograd.grad(made_MF, [x_NF, weight_E], upstream_MF), strict=True):
        close(mine, its)
    wide_NX = torch.full((8, 20), -1.0, dtype=torch.float64)
    assert EAGER_OPS.rotate_heads_backward(upstream_MF, *numbers, wide_NX[:, 5:17]).x_NF.data_ptr() > 0
    close(wide_NX[:, 5:17], found.x_NF)
    assert bool((wide_NX[:, [4, 17]] == -1).all())


def test_gradients_of_swiglu_are_autograds_and_results_lie_over_what_came_in():
    product_NJ = draw(5, 18).requires_grad_()
    gate_NI, up_NI = product_NJ.chunk(2, dim=1)
    hidden_NI = nn.functional.silu(gate_NI) * up_NI
    upstream_NI, given_NJ = draw(5, 9, seed=2), product_NJ.detach().clone()
    (wanted_NJ,) = torch.autograd.grad(hidden_NI, product_NJ, upstream_NI)
    found = EAGER_OPS.swiglu_backward_onto(upstream_NI, given_NJ)
    close(given_NJ, wanted_NJ)
    close(upstream_NI, hidden_NI.detach())
    assert found.product_NJ.data_ptr() == given_NJ.data_ptr()
    assert found.hidden_NI.data_ptr() == upstream_NI.data_ptr()
