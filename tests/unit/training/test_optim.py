"""Masters, accumulation, schedule, clipping, skipped steps."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from blockdraft.config import ConfigError, OptimConfig
from blockdraft.training.optim import MasterOptimizer, lr_scale

CONFIG = OptimConfig(lr=0.01, betas=(0.9, 0.95), clip=1e9)


def module(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8, bias=False), nn.Linear(8, 2, bias=False)).to(
        dtype
    )


def gradients_for(net: nn.Module, seed: int, scale: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(weight.shape, generator=generator) * scale for weight in net.parameters()]


def push(net: nn.Module, gradients: list[torch.Tensor]) -> None:
    """Runs a backward pass that gives every weight the wanted gradient."""
    total = sum(
        (weight * gradient.to(weight.dtype)).sum() for weight, gradient in zip(net.parameters(), gradients, strict=True)
    )
    assert isinstance(total, torch.Tensor)
    total.backward()


def snapshot(optimizer: MasterOptimizer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in optimizer.state_tensors().items()}


def test_float32_weights_are_their_own_masters_and_move_as_adamw_moves_them():
    net, other = module(), module()
    optimizer = MasterOptimizer(net, CONFIG)
    reference = torch.optim.AdamW(other.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for number, scale in enumerate((1.0, 0.5, 0.25)):
        push(net, gradients_for(net, number))
        push(other, gradients_for(other, number))
        for group in reference.param_groups:
            group["lr"] = 0.01 * scale
        reference.step()
        reference.zero_grad()
        optimizer.step(scale)
    for mine, its in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def test_bfloat16_weights_follow_float32_masters():
    net = module(torch.bfloat16)
    optimizer = MasterOptimizer(net, CONFIG)
    start = {name: weight.detach().float() for name, weight in net.named_parameters()}
    for number in range(20):
        push(net, gradients_for(net, number))
        # Far below half a bfloat16 step of a weight near 1: without masters nothing would move.
        optimizer.step(1e-3)
    for name, weight in net.named_parameters():
        master = optimizer.masters[name]
        assert master.dtype == torch.float32
        assert torch.equal(weight, master.bfloat16())
        assert 0 < (master - start[name]).abs().max() < 1e-3


def test_accumulation_never_rounds_to_bfloat16():
    net = module(torch.bfloat16)
    optimizer = MasterOptimizer(net, CONFIG)
    parts = [gradients_for(net, number, scale) for number, scale in enumerate((100.0, 0.1, 0.1, 0.1))]
    for part in parts:
        push(net, part)
    for index, total in enumerate(optimizer.gradients()):
        exact = sum(part[index].bfloat16().float() for part in parts)
        assert total.dtype == torch.float32
        torch.testing.assert_close(total, exact, atol=1e-5, rtol=1e-6)
        rounded = parts[0][index].bfloat16()
        for part in parts[1:]:
            rounded = rounded + part[index].bfloat16()
        assert not torch.allclose(total, rounded.float(), atol=1e-3)
    assert all(weight.grad is None for weight in net.parameters())


def test_gradients_start_at_zero_again_after_a_step():
    net = module()
    optimizer = MasterOptimizer(net, CONFIG)
    assert all((gradient == 0).all() for gradient in optimizer.gradients())
    push(net, gradients_for(net, 0))
    optimizer.step(1.0)
    assert all((gradient == 0).all() for gradient in optimizer.gradients())


def applied_gradients(clip: float) -> tuple[float, list[torch.Tensor]]:
    """Norm that a step reports, and the gradients that its optimizers get."""
    net = module()
    optimizer = MasterOptimizer(net, dataclasses.replace(CONFIG, clip=clip))
    seen: list[torch.Tensor] = []
    optimizer.parts["matrices"].register_step_pre_hook(
        lambda _optimizer, _args, _kwargs: seen.extend(gradient.clone() for gradient in optimizer.gradients())
    )
    push(net, gradients_for(net, 0, 3.0))
    return float(optimizer.step(1.0)), seen


def test_the_norm_is_over_all_weights_and_clips():
    gradients = gradients_for(module(), 0, 3.0)
    expected = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
    norm, clipped = applied_gradients(0.5)
    assert norm == pytest.approx(expected, rel=1e-5)
    for mine, whole in zip(clipped, gradients, strict=True):
        torch.testing.assert_close(mine, whole * (0.5 / expected), atol=1e-6, rtol=1e-4)
    # Below the limit nothing is scaled up.
    norm, free = applied_gradients(1e6)
    assert norm == pytest.approx(expected, rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(free, gradients, strict=True))


@pytest.mark.parametrize("optimizer_name", ["adamw", "adamw_bf16", "muon"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(optimizer_name, bad, dtype):
    net = module(dtype)
    optimizer = MasterOptimizer(net, dataclasses.replace(CONFIG, optimizer=optimizer_name, weight_decay=0.1))
    push(net, gradients_for(net, 0))
    optimizer.step(1.0)
    before, weights = snapshot(optimizer), [weight.clone() for weight in net.parameters()]
    broken = gradients_for(net, 1)
    broken[2][0, 0] = bad
    push(net, broken)
    assert not torch.isfinite(optimizer.step(1.0))
    assert int(optimizer.skipped) == 1
    after = snapshot(optimizer)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), weights, strict=True))
    push(net, gradients_for(net, 2))
    assert torch.isfinite(optimizer.step(1.0))
    assert int(optimizer.skipped) == 1
    assert not torch.equal(next(net.parameters()), weights[0])


def test_muon_takes_the_matrices_and_adamw_the_rest():
    net = module()
    optimizer = MasterOptimizer(net, dataclasses.replace(CONFIG, optimizer="muon", lr=0.05, norm_lr=0.02))
    start = {name: weight.detach().clone() for name, weight in net.named_parameters()}
    push(net, gradients_for(net, 0))
    optimizer.step(0.5)
    # AdamW's first step moves every number by the learning rate.
    moved = (net[1].weight.detach() - start["1.weight"]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), atol=1e-5, rtol=1e-3)
    # Muon's update is near orthogonal: every singular value alike.
    values = torch.linalg.svdvals(net[0].weight.detach() - start["0.weight"])
    assert float(values.max() / values.min()) < 2.0
    adamw = {name for name in optimizer.state_tensors() if ".exp_avg." in name}
    muon = {name for name in optimizer.state_tensors() if ".momentum_buffer." in name}
    assert {name.split(".", 2)[2] for name in adamw} == {"1.weight"}
    assert {name.split(".", 2)[2] for name in muon} == {"0.weight", "2.weight"}


@pytest.mark.parametrize(("norm_lr", "expected"), [(None, 0.005), (0.04, 0.02)])
def test_norms_have_a_learning_rate_of_their_own(norm_lr, expected):
    net = module()
    optimizer = MasterOptimizer(net, dataclasses.replace(CONFIG, norm_lr=norm_lr))
    start = [weight.detach().clone() for weight in net.parameters()]
    push(net, gradients_for(net, 0))
    optimizer.step(0.5)
    for weight, before, rate in zip(net.parameters(), start, (0.005, expected, 0.005), strict=True):
        moved = (weight.detach() - before).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, rate), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("optimizer_name", ["adamw", "adamw_bf16", "muon"])
def test_weights_decay_at_their_own_learning_rate(optimizer_name):
    net = module()
    torch.nn.init.normal_(net[1].weight)
    changes = {"optimizer": optimizer_name, "weight_decay": 0.5, "lr": 0.1, "norm_lr": 0.2}
    optimizer = MasterOptimizer(net, dataclasses.replace(CONFIG, **changes))
    start = [weight.detach().clone() for weight in net.parameters()]
    # Gradients of zero move nothing, so decay is all there is.
    push(net, [torch.zeros_like(weight) for weight in net.parameters()])
    optimizer.step(0.5)
    for weight, before, rate in zip(net.parameters(), start, (0.05, 0.1, 0.05), strict=True):
        torch.testing.assert_close(weight.detach(), before * (1 - rate * 0.5))


@pytest.mark.parametrize("optimizer_name", ["adamw", "adamw_bf16", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_round_trip_goes_on_bit_for_bit(optimizer_name, dtype):
    config = dataclasses.replace(CONFIG, optimizer=optimizer_name, weight_decay=0.01)
    net, other = module(dtype), module(dtype)
    one = MasterOptimizer(net, config)
    for number in range(3):
        push(net, gradients_for(net, number))
        one.step(1.0)
    saved = snapshot(one)
    two = MasterOptimizer(other, config)
    two.load_state_tensors(saved)
    assert all(torch.equal(snapshot(two)[name], value) for name, value in saved.items())
    for number in range(3, 6):
        for each, net_of in ((one, net), (two, other)):
            push(net_of, gradients_for(net_of, number))
            each.step(0.7)
    final = snapshot(two)
    assert all(torch.equal(final[name], value) for name, value in snapshot(one).items())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_masters_without_moments_are_loaded_as_a_fresh_start():
    net, fresh = module(), module()
    trained, plain = MasterOptimizer(net, CONFIG), MasterOptimizer(fresh, CONFIG)
    start = {name: value for name, value in snapshot(plain).items() if name.startswith("master.")}
    push(net, gradients_for(net, 0))
    trained.step(1.0)
    trained.load_state_tensors(start)
    assert all(torch.equal(value, snapshot(plain)[name]) for name, value in snapshot(trained).items())


def test_another_drafters_state_is_refused():
    net = module()
    optimizer = MasterOptimizer(net, CONFIG)
    push(net, gradients_for(net, 0))
    optimizer.step(1.0)
    lacking = {name: value for name, value in snapshot(optimizer).items() if name != "master.1.weight"}
    with pytest.raises(ConfigError, match=r"not this drafter's: 1\.weight is in only one of them"):
        optimizer.load_state_tensors(lacking)


@pytest.mark.parametrize(("wrote", "reads"), [("muon", "adamw"), ("adamw", "muon"), ("adamw_bf16", "muon")])
def test_another_optimizers_moments_are_refused(wrote, reads):
    saved = snapshot(MasterOptimizer(module(), dataclasses.replace(CONFIG, optimizer=wrote)))
    other = MasterOptimizer(module(), dataclasses.replace(CONFIG, optimizer=reads))
    with pytest.raises(ConfigError, match=rf"moments are not those of optim\.optimizer {reads}: matrices\."):
        other.load_state_tensors(saved)


def test_a_rehearsal_leaves_no_trace():
    net, fresh = module(), module()
    rehearsed, plain = MasterOptimizer(net, CONFIG), MasterOptimizer(fresh, CONFIG)
    push(net, [torch.zeros_like(weight) for weight in net.parameters()])
    rehearsed.step(0.0)
    rehearsed.reset_moments()
    for number in range(3):
        for each, net_of in ((rehearsed, net), (plain, fresh)):
            push(net_of, gradients_for(net_of, number))
            each.step(1.0)
    assert all(torch.equal(snapshot(plain)[name], value) for name, value in snapshot(rehearsed).items())


def scales(**changes) -> list[float]:
    config = OptimConfig(**changes)
    return [lr_scale(step, 100, config) for step in range(100)]


def test_cosine_warms_up_and_ends_at_the_final_rate():
    found = scales(schedule="cosine", warmup=0.04, final_lr=0.1)
    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[-1] == pytest.approx(0.1)
    assert found[4 + 48 - 1] == pytest.approx(0.55)
    assert found[4:] == sorted(found[4:], reverse=True)


def test_linear_falls_evenly():
    found = scales(schedule="linear", warmup=0.0, final_lr=0.0)
    assert found[0] == pytest.approx(0.99)
    assert found[49] == pytest.approx(0.5)
    assert found[-1] == pytest.approx(0.0)


def test_wsd_holds_and_then_falls_over_the_last_part():
    found = scales(schedule="wsd", warmup=0.1, decay=0.5, final_lr=0.05)
    assert found[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert found[10:50] == [1.0] * 40
    assert found[59] == pytest.approx(1 - 0.95 * 0.2)
    assert found[74] == pytest.approx(1 - 0.95 * 0.5)
    assert found[-1] == pytest.approx(0.05)
    # A decay that would begin before the warm-up ends begins behind it, from the peak.
    found = scales(schedule="wsd", warmup=0.6, decay=0.8, final_lr=0.0)
    assert found[59:] == pytest.approx([1 - i / 40 for i in range(41)])


def test_a_run_of_one_step_trains():
    for schedule in ("cosine", "linear", "wsd"):
        assert lr_scale(0, 1, OptimConfig(schedule=schedule, warmup=0.04, final_lr=0.1)) > 0
