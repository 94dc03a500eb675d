"""The fused update: interpreted beside torch's AdamW, and compiled for a GPU without one."""

import dataclasses
import re
import sys
from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blockdraft.training import buckets
from blockdraft.training.buckets import GradientBuckets
from blockdraft.training.optim import MasterOptimizer
from compiled_for_gpu import compile_for_gpu
from interpreted import run_interpreted
from unit.training.test_optim import CONFIG, gradients_for, module, push, snapshot

pytest.importorskip("triton")
from blockdraft.training import optim_triton
from blockdraft.training.optim_triton import FusedAdamW, FusedNorm, Slot, locate

SIZES = ((40, 48), (24,), (3, 1000))
RATES = (0.01, 0.05, 0.01)


def compare() -> None:
    """Run in a process of its own, where kernels are interpreted."""
    optim_triton.UPDATE_PROGRAM, optim_triton.NORM_PROGRAM, optim_triton.NORM_PART = 64, 512, 128
    for moments in (torch.float32, torch.bfloat16):
        one_kernel(moments)
    for choice in ("adamw", "adamw_bf16"):
        whole_optimizer(choice)
    beside_a_sum()
    sys.stdout.write("interpreted alike\n")


def one_kernel(moments: torch.dtype) -> None:
    """A few updates beside torch's AdamW, which gets the moments as they were kept."""
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(size, generator=generator) for size in SIZES]
    twins = [torch.nn.Parameter(master.clone()) for master in masters]
    slots = [
        Slot(master.bfloat16(), master, *(torch.zeros_like(master, dtype=moments) for _ in range(2)), rate)
        for master, rate in zip(masters, RATES, strict=True)
    ]
    fused = FusedAdamW(slots, (0.9, 0.95), 0.1)
    norm = FusedNorm([slot.weight for slot in slots])
    groups = [{"params": [twin], "lr": rate} for twin, rate in zip(twins, RATES, strict=True)]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    done = 0
    for number, kind in enumerate([torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]):
        gradients = [torch.randn(size, generator=generator).to(kind) for size in SIZES]
        is_lost = torch.tensor(float(number == 2))
        before = [value.clone() for slot in slots for value in slot[:4]]
        done += number != 2
        fused.step(locate(gradients), torch.tensor(0.5), is_lost, torch.tensor(float(done)), 0.7)
        found = norm.measure(locate(gradients))
        exact = torch.stack([gradient.double().square().sum() for gradient in gradients]).sum().sqrt()
        torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=0)
        assert torch.equal(norm.measure(locate(gradients)), found)
        for first in range(len(SIZES) + 1):
            norm.sum_P.fill_(float("nan"))
            norm.measure_from(locate(gradients), first)
            assert torch.equal(norm.measure(locate(gradients), first), found)
        after = [value for slot in slots for value in slot[:4]]
        if number == 2:
            assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
            continue
        for group, rate in zip(reference.param_groups, RATES, strict=True):
            group["lr"] = rate * 0.7
        for twin, gradient in zip(twins, gradients, strict=True):
            twin.grad = gradient.float() * 0.5
        reference.step()
        for slot, twin in zip(slots, twins, strict=True):
            torch.testing.assert_close(slot.master, twin.detach(), rtol=2e-6, atol=1e-7)
            state = reference.state[twin]
            # The interpreter cuts off where the hardware rounds: a whole step of bfloat16, not half of one.
            close = {"rtol": 2e-6, "atol": 1e-7} if moments == torch.float32 else {"rtol": 2.0**-7, "atol": 0.0}
            for mine, key in ((slot.mean, "exp_avg"), (slot.square, "exp_avg_sq")):
                torch.testing.assert_close(mine.float(), state[key], **close)
                state[key].copy_(mine)
            # The interpreter cuts to bfloat16 where the hardware rounds.
            torch.testing.assert_close(slot.weight.float(), slot.master, rtol=2**-7, atol=0)


class NoWaiting(TorchDispatchMode):
    """Refuses to hand a tensor's number to Python, which a GPU would have to be waited for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "the update waits for the device"
        return func(*args, **(kwargs or {}))


def whole_optimizer(choice: str) -> None:
    """With the kernel and without: gradients kept or added up, a lost step, a state that is restored."""
    nets = [module(torch.bfloat16) for _ in range(3)]
    config = dataclasses.replace(CONFIG, optimizer=choice, clip=1.0)
    plain, fused, restored = (MasterOptimizer(net, config) for net in nets)
    fused._is_fused = restored._is_fused = True
    with NoWaiting():
        fused.rehearse()
    for number in range(5):
        if number == 3:
            restored.load_state_tensors(snapshot(fused))
        for optimizer, net in zip((plain, fused, restored), nets, strict=True):
            for part in range(1 + number % 2):
                if number % 2 == 0:
                    optimizer.keep_gradients()
                push(net, gradients_for(net, 10 * number + part, float("nan") if number == 2 else 3.0))
            with NoWaiting() if optimizer is not plain else nullcontext():
                if optimizer is restored:
                    # As in a sum over drafters; what was begun must not outlive its step.
                    optimizer.measure_all_but(list(optimizer.weights)[: number % 3])
                norm = optimizer.step(0.9)
            assert torch.isfinite(norm) == (number != 2)
            assert all(weight.grad is None for weight in net.parameters())
    expected = snapshot(plain)
    # Four moments of bfloat16, each cut off where the hardware rounds, and what follows from them.
    close = {"rtol": 1e-5, "atol": 1e-6} if choice == "adamw" else {"rtol": 4 * 2.0**-7, "atol": 1e-3}
    for found in (snapshot(fused), snapshot(restored)):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            torch.testing.assert_close(found[name], value, **close, msg=name)
    # What was restored goes on as what was saved.
    for name, value in snapshot(fused).items():
        assert torch.equal(value, snapshot(restored)[name]), name
    assert int(fused.skipped) == int(plain.skipped) == 1


class Doubled:
    """A sum over two equal replicas that changes nothing before it is waited for; adds `more[n]` to its nth bucket."""

    def __init__(self, more: dict[int, float]) -> None:
        self.more, self.buckets, self.num_ended = more, [], 0

    def start(self, bucket: list[torch.Tensor]) -> None:
        self.buckets.append(bucket)

    def wait(self) -> None:
        for value in self.buckets[self.num_ended]:
            value.mul_(2).add_(self.more.get(self.num_ended, 0.0))
        self.num_ended += 1


def beside_a_sum() -> None:
    """The norm of sums that end one after the other is that of all of them at once, bit for bit."""
    buckets.BUCKET_BYTES = 1
    nets = [module(torch.bfloat16) for _ in range(2)]
    summed, whole = (MasterOptimizer(net, dataclasses.replace(CONFIG, clip=1.0)) for net in nets)
    for optimizer in (summed, whole):
        optimizer._is_fused = True
        optimizer.rehearse()
    parts = GradientBuckets(summed.weights, summed.gradient, summed.land, summed.measure_all_but)
    assert len(parts.layout) == 3
    nan, held = float("nan"), []
    for number, more in enumerate([{}, {0: nan}, {1: nan}, {2: nan}, {2: float("inf")}, {}, None, {}]):
        gradients = gradients_for(nets[0], number)
        for optimizer, net in zip((summed, whole), nets, strict=True):
            if number % 2 == 0:
                optimizer.keep_gradients()
            is_summed = more is not None and optimizer is summed
            if is_summed:
                # What was summed stays alive: memory that is read too late must not be the next gradients'.
                held.append(Doubled(more))
                parts.begin(held[-1])
            push(net, gradients if is_summed or more is None else [2 * gradient for gradient in gradients])
            if is_summed:
                parts.finish(torch.zeros(1))
        norms = [optimizer.step(0.9) for optimizer in (summed, whole)]
        if more:
            assert not torch.isfinite(norms[0])
            whole.load_state_tensors(snapshot(summed))
        else:
            assert torch.equal(*norms), number
        one, other = snapshot(summed), snapshot(whole)
        assert all(torch.equal(value, other[name]) for name, value in one.items()), number
    assert int(summed.skipped) == 4 and float(summed._steps[0]) == 4


def test_the_update_equals_torchs_adamw_when_interpreted():
    run_interpreted("from unit.training.test_optim_triton import compare; compare()")


def compiled_without_16_bit_accesses(kernel, constants: dict[str, object], num_warps: int):
    types = {name: "*i64" for name in ("address_ptr", "gradient_ptr", "size_ptr")}
    types |= {name: "*i32" for name in ("tensor_ptr", "start_ptr")}
    types |= {name: "*fp32" for name in ("rate_ptr", "scalar_ptr", "sum_ptr")} | {"first_program": "i32"}
    compiled = compile_for_gpu(
        kernel, lambda name: types.get(name, "fp32"), constants, num_warps=num_warps, is_aligned=lambda _name: False
    )
    assert not re.search(r"(ld|st)\.global\S*\.b16", compiled.asm["ptx"])
    return compiled


@pytest.mark.parametrize("low_moments", [True, False])
@pytest.mark.parametrize("is_kept", [True, False])
def test_the_update_compiles_for_a_gpu_and_moves_4_numbers_at_a_time(is_kept, low_moments):
    constants = {"BFLOAT16": True, "IS_KEPT": is_kept, "LOW_MOMENTS": low_moments, "ALIGN": 8}
    compiled = compiled_without_16_bit_accesses(
        optim_triton.update_kernel, constants | {"B": optim_triton.UPDATE_PROGRAM}, optim_triton.UPDATE_WARPS
    )
    # Nothing changes hands between threads.
    assert compiled.metadata.shared == 0
    moved = re.findall(r"(ld|st)\.global\.v(\d)", compiled.asm["ptx"])
    # 8 elements of a thread: twice 4 of each tensor, 16 bytes of float32 or 8 of 16 bits.
    float32 = 2 * (1 if low_moments else 3)
    assert moved.count(("ld", "4")) == float32 + (0 if is_kept else 2)
    assert moved.count(("st", "4")) == float32
    assert moved.count(("ld", "2")) == 6 - float32 + (2 if is_kept else 0)
    assert moved.count(("st", "2")) == 6 - float32 + 2


@pytest.mark.parametrize("is_kept", [True, False])
def test_the_norm_compiles_for_a_gpu_and_moves_16_bytes_at_a_time(is_kept):
    constants = {"BFLOAT16": True, "IS_KEPT": is_kept, "ALIGN": 8}
    constants |= {"B": optim_triton.NORM_PROGRAM, "PART": optim_triton.NORM_PART}
    compiled = compiled_without_16_bit_accesses(optim_triton.norm_kernel, constants, optim_triton.NORM_WARPS)
    streams = re.findall(r"ld\.global\.L1::evict_first\S*", compiled.asm["ptx"])
    assert all(".v4." in stream for stream in streams)
    # 16 elements of a thread and part; the compiler may have unrolled some parts.
    assert streams and len(streams) % (2 if is_kept else 4) == 0
