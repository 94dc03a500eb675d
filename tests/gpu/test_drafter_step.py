"""The parts of the drafter's step on a real GPU, each against plain operations in higher precision.

R rows, T context keys, A anchors, L block size, N rows of the head, D width, V ids.
"""

import dataclasses
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from blockdraft.config import OptimConfig
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.blocks import block_positions
from blockdraft.models.compiled import How, compile_drafter
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.training.head_kl import choose_slot_kl
from blockdraft.training.head_loss import choose_slot_loss
from blockdraft.training.loss import slot_kl, slot_loss
from blockdraft.training.optim import MasterOptimizer
from integration.tiny import tiny_drafter, tiny_target
from unit.models.test_compiled import inputs
from unit.training.test_head_loss import FINISHES, problem

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(420),
]


def distance(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize("num_slots", [16, 15])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 40, "window_layers": (0,)}], ids=str)
def test_attention_and_its_gradients(options, num_slots):
    from blockdraft.models.block_attention import kernel_attend

    shape = tiny_drafter(tiny_target("llama"), 16).shape
    shape = dataclasses.replace(shape, num_heads=8, num_kv_heads=2, head_dim=128, **options)
    tokens, anchors = 500, 21
    position_RT = torch.arange(tokens, device="cuda").repeat(2, 1)
    document_RT = torch.zeros_like(position_RT)
    document_RT[0, 200:], position_RT[0, 200:] = 1, position_RT[0, 200:] - 200
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = [torch.randperm(tokens - 1, generator=generator, device="cuda")[:anchors].sort().values for _ in range(2)]
    anchor_RA = torch.stack(drawn)
    anchor_RA[1, -3:] = -1
    # Without slot 0 of each block's 16, as in the last layer, and with it.
    sizes = [(8, anchors * num_slots), (2, tokens), (2, tokens), (2, anchors * 16), (2, anchors * 16)]
    made = [torch.randn(2, heads, n, 128, generator=generator, device="cuda").bfloat16() for heads, n in sizes]
    upstream_RHQE = torch.randn(made[0].shape, generator=generator, device="cuda").bfloat16()

    def run(make_attend, dtype: torch.dtype) -> list[Tensor]:
        streams = [stream.to(dtype).requires_grad_() for stream in made]
        out_RHQE = make_attend(shape, document_RT, position_RT, anchor_RA)(0, *streams)
        return [out_RHQE.detach(), *torch.autograd.grad(out_RHQE, streams, upstream_RHQE.to(dtype))]

    exact = run(sdpa_attend, torch.float64)
    for found, wanted in zip(run(kernel_attend, torch.float32), exact, strict=True):
        assert distance(found, wanted) < 2e-6
    plain = run(sdpa_attend, torch.bfloat16)
    for found, its, wanted in zip(run(kernel_attend, torch.bfloat16), plain, exact, strict=True):
        assert distance(found, wanted) <= 1.05 * distance(its, wanted)


def test_a_drafter_compiled_by_layers():
    from blockdraft.models.block_attention import kernel_attend

    shape = tiny_drafter(tiny_target("llama"), 4).shape
    shape = dataclasses.replace(shape, num_layers=3, head_dim=64, window=12, window_layers=(0,))
    drafter = Drafter(shape)
    drafter.initialise(torch.Generator().manual_seed(0))
    numbers = [value.cuda() for value in inputs(drafter, 0)]
    drafter.cuda()

    def gradients(how, make_attend) -> list[Tensor]:
        drafter.zero_grad()
        document_RT, position_RT, anchor_RA, features_RTC, first_RAD = numbers
        attend = make_attend(shape, document_RT, position_RT, anchor_RA)
        block_position_RQ = block_positions(position_RT, anchor_RA, shape.block_size)
        run = compile_drafter(drafter, how)
        hidden_RND = run(features_RTC, position_RT, first_RAD, block_position_RQ, attend)
        # Not its squares: behind a norm their sum hardly depends on anything, and gradients would be mere rounding.
        upstream_RND = torch.randn(hidden_RND.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
        hidden_RND.backward(upstream_RND)
        return [weight.grad.clone() for weight in drafter.parameters() if weight.grad is not None]

    for found, wanted in zip(gradients("layer", kernel_attend), gradients("nothing", sdpa_attend), strict=True):
        assert distance(found, wanted) < 1e-5


class Case(NamedTuple):
    """Two rows of a middle size, the first of two documents, the second with invalid blocks; all bfloat16 numbers."""

    shape: DrafterShape
    document_RT: Tensor
    position_RT: Tensor
    anchor_RA: Tensor
    features_RTC: Tensor
    first_RAD: Tensor
    upstream_RND: Tensor


def middle_case(head_dim: int, options: dict[str, Any]) -> Case:
    shape = dataclasses.replace(
        tiny_drafter(tiny_target("llama"), 16).shape, hidden_size=512, num_heads=8, num_kv_heads=2, head_dim=head_dim,
        intermediate_size=1408, **options,
    )  # fmt: skip
    tokens, anchors = 700, 45
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(2, *size, generator=generator, device="cuda").bfloat16()

    position_RT = torch.arange(tokens, device="cuda").repeat(2, 1)
    document_RT = torch.zeros_like(position_RT)
    document_RT[0, 300:], position_RT[0, 300:] = 1, position_RT[0, 300:] - 300
    drawn = [torch.randperm(tokens - 1, generator=generator, device="cuda")[:anchors].sort().values for _ in range(2)]
    anchor_RA = torch.stack(drawn)
    anchor_RA[1, -3:] = -1
    width = len(shape.target_layer_ids) * shape.hidden_size
    first_RAD = draw(anchors + 1, shape.hidden_size)
    return Case(shape, document_RT, position_RT, anchor_RA, draw(tokens, width), first_RAD, draw(anchors * 15, 512))


def outputs_and_gradients(case: Case, how: How, make_attend: Any, dtype: torch.dtype) -> list[Tensor]:
    """Of a second pass: in the first kernels are compiled, in the second nothing may wait for the GPU."""
    drafter = Drafter(case.shape)
    drafter.initialise(torch.Generator().manual_seed(0))
    drafter = drafter.bfloat16().to("cuda", dtype)
    run = compile_drafter(drafter, how)
    found: list[Tensor] = []
    for mode in ("default", "error"):
        drafter.zero_grad()
        torch.cuda.set_sync_debug_mode(mode if how == "kernels" else "default")
        try:
            attend = make_attend(case.shape, case.document_RT, case.position_RT, case.anchor_RA)
            block_position_RQ = block_positions(case.position_RT, case.anchor_RA, case.shape.block_size)
            first_RAD = case.first_RAD.to(dtype)
            hidden_RND = run(case.features_RTC.to(dtype), case.position_RT, first_RAD, block_position_RQ, attend)
            hidden_RND.backward(case.upstream_RND.to(dtype))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        before = found
        found = [hidden_RND.detach(), *(weight.grad for weight in drafter.parameters() if weight.grad is not None)]
    assert len(found) == 1 + len(list(drafter.parameters()))
    if how == "kernels":
        assert all(torch.equal(mine, its) for mine, its in zip(found, before, strict=True)), (
            "other bits the second time"
        )
    return found


# First, middle and last layers, and one that is all of these.
SEVERAL, ONE = {"num_layers": 3, "window": 40, "window_layers": (0,)}, {"num_layers": 1}


def test_a_drafter_by_its_own_kernels_in_float32():
    from blockdraft.models.block_attention import kernel_attend

    # Narrow heads: the attention's products in float32 take the compiler long.
    case = middle_case(16, SEVERAL)
    exact = outputs_and_gradients(case, "nothing", sdpa_attend, torch.float64)
    for found, wanted in zip(outputs_and_gradients(case, "kernels", kernel_attend, torch.float32), exact, strict=True):
        assert distance(found, wanted) < 1e-5


@pytest.mark.parametrize("options", [SEVERAL, ONE], ids=str)
def test_a_drafter_by_its_own_kernels_in_bfloat16(options):
    from blockdraft.models.block_attention import kernel_attend

    case = middle_case(128, options)
    exact = outputs_and_gradients(case, "nothing", sdpa_attend, torch.float64)
    plain = outputs_and_gradients(case, "nothing", sdpa_attend, torch.bfloat16)
    mine = outputs_and_gradients(case, "kernels", kernel_attend, torch.bfloat16)
    far, its = ([distance(*pair) for pair in zip(one, exact, strict=True)] for one in (mine, plain))
    sys.stdout.write(f"bfloat16 from float64, {options}: {max(far):.2e}, the plain drafter's {max(its):.2e}\n")
    # A vector of few sums may be off by chance.
    assert far[0] <= 1.05 * its[0]
    assert sum(far) <= 1.05 * sum(its)
    assert all(one <= 1.5 * other for one, other in zip(far, its, strict=True))


@pytest.mark.parametrize("finish", FINISHES, ids=str)
def test_the_heads_losses(finish):
    hidden_ND, label_N, weight_N, ends = problem(num_ids=9001, width=64, num_rows=300, **finish)
    hidden_ND, label_N, weight_N, ends = hidden_ND.cuda() * 0.4, label_N.cuda(), weight_N.cuda(), ends.cuda()
    final_ND = hidden_ND.flip(0)

    def run(lose, *inputs):
        leaf_ND = hidden_ND.clone().requires_grad_()
        found = lose(leaf_ND, *inputs, ends, 128)
        (found[0] * weight_N).sum().backward()
        assert leaf_ND.grad is not None
        return found, leaf_ND.grad

    for fused, plain, second in (
        (choose_slot_loss, slot_loss, label_N),
        (choose_slot_kl, slot_kl, final_ND),
    ):
        found, gradient_ND = run(fused(hidden_ND.device), second)
        wanted, its_ND = run(plain, second)
        assert distance(found[0], wanted[0]) < 1e-5
        assert distance(gradient_ND, its_ND) < 1e-5
        for mine, its in zip(found[1:], wanted[1:], strict=True):
            # A soft cap may flatten two logits into one.
            assert float((mine != its).float().mean()) < 0.02


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_fused_update(is_kept):
    nets = [torch.nn.Sequential(torch.nn.Linear(64, 96, bias=False), torch.nn.LayerNorm(96)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    fused, plain = (MasterOptimizer(net.to("cuda", torch.bfloat16), OptimConfig(weight_decay=0.1)) for net in nets)
    plain._is_fused = False
    for number in range(4):
        x = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16) * (float("nan") if number == 2 else 1.0)
        for optimizer, net in zip((fused, plain), nets, strict=True):
            if is_kept and optimizer is fused:
                optimizer.keep_gradients()
            net(x).square().sum().backward()
            optimizer.step(0.5)
    for name, master in fused.masters.items():
        torch.testing.assert_close(master, plain.masters[name], rtol=1e-5, atol=1e-7)
        assert torch.equal(fused.weights[name], master.bfloat16())
    assert int(fused.skipped) == int(plain.skipped) == 1
