"""AdamW with bfloat16 moments beside AdamW in float64: how far rounding may take it, and no further."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from blockdraft.config import ConfigError, OptimConfig
from blockdraft.training.optim import MasterOptimizer
from unit.training.test_optim import CONFIG, gradients_for, module, push, snapshot

LOW = dataclasses.replace(CONFIG, optimizer="adamw_bf16", weight_decay=0.1)
BETA1, BETA2 = CONFIG.betas
EPS = 1e-8
HALF = 2.0**-8
"""Half a step of bfloat16 relative to the number, at most: it has 8 significant bits."""
FLOAT = 2.0**-24
STEPS = 200


class Exact:
    """One weight's AdamW in float64, and how far moments that are rounded after each step can be from its own.

    mean' = (BETA1 (mean + e) + (1 - BETA1) g)(1 + d) with |d| <= HALF, so e' <= BETA1 e (1 + HALF) + HALF |mean|.
    Every term of the second moment is positive, so it stays between two averages that shrink and grow by HALF a step.
    The update uses a step's moments before they are rounded.
    """

    def __init__(self, master: Tensor) -> None:
        self.master = master.double()
        self.mean, self.square = torch.zeros_like(self.master), torch.zeros_like(self.master)
        self.error, self.least, self.most = (torch.zeros_like(self.master) for _ in range(3))
        self.bound = torch.zeros_like(self.master)
        self.path = torch.zeros_like(self.master)
        self.steps = 0

    def step(self, gradient: Tensor, lr: float, decay: float) -> None:
        gradient = gradient.double()
        self.steps += 1
        self.mean = BETA1 * self.mean + (1 - BETA1) * gradient
        self.square = BETA2 * self.square + (1 - BETA2) * gradient**2
        error = BETA1 * self.error
        least, most = (BETA2 * edge + (1 - BETA2) * gradient**2 for edge in (self.least, self.most))
        rate, root = lr / (1 - BETA1**self.steps), (1 - BETA2**self.steps) ** 0.5
        middle, low, high = (1 / (edge.sqrt() / root + EPS) for edge in (self.square, least, most))
        self.bound += rate * (error * low + self.mean.abs() * (low - high))
        moved = rate * self.mean * middle
        self.path += moved.abs()
        self.master = self.master * (1 - lr * decay) - moved
        # Float32 arithmetic: some roundings of the master, some of the update.
        self.bound += 4 * FLOAT * self.master.abs() + 16 * FLOAT * moved.abs()
        self.error = error * (1 + HALF) + HALF * self.mean.abs()
        self.least, self.most = least * (1 - HALF), most * (1 + HALF)


def gradients_of(net: nn.Module, number: int) -> list[Tensor]:
    """A steady part, noise, and a size that changes a hundredfold: what makes averages rise and fall."""
    size = 10.0 ** (2 * abs(number % 100 - 50) / 50 - 1)
    steady = gradients_for(net, 10_000)
    return [size * (0.3 * part + noise) for part, noise in zip(steady, gradients_for(net, number), strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_stay_within_what_rounding_of_the_moments_allows(dtype):
    net = module(dtype)
    optimizer = MasterOptimizer(net, LOW)
    exact = [Exact(master.detach()) for master in optimizer.masters.values()]
    for number in range(STEPS):
        gradients = [gradient.to(dtype).float() for gradient in gradients_of(net, number)]
        push(net, gradients)
        optimizer.step(1.0)
        for one, gradient in zip(exact, gradients, strict=True):
            one.step(gradient, LOW.lr, LOW.weight_decay)
    off, path = 0.0, 0.0
    for one, master in zip(exact, optimizer.masters.values(), strict=True):
        away = (master.detach().double() - one.master).abs()
        assert (away <= one.bound).all()
        off, path = off + float(away.sum()), path + float(one.path.sum())
        # A bound that anything would meet says nothing: it is a small part of the way.
        assert (one.bound < 0.2 * one.path).all()
    # Float32 moments would be off by a thousandth of this.
    assert 1e-4 < off / path < 0.01
    kinds = {key.split(".")[1]: value.dtype for key, value in snapshot(optimizer).items() if "exp_avg" in key}
    assert kinds == {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}


def test_a_checkpoint_of_other_moments_is_refused():
    net = module()
    high = MasterOptimizer(net, CONFIG)
    push(net, gradients_for(net, 0))
    high.step(1.0)
    with pytest.raises(ConfigError, match=r"float32, optim.optimizer adamw_bf16 keeps it as torch.bfloat16; take the"):
        MasterOptimizer(module(), LOW).load_state_tensors(snapshot(high))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.995, 0.95)])
def test_betas_whose_averages_bfloat16_cannot_hold_are_refused(betas):
    with pytest.raises(ConfigError, match=r"optim.betas: .* expected at most 0.99, found"):
        OptimConfig(optimizer="adamw_bf16", betas=betas)
    assert OptimConfig(betas=betas).betas == betas


@pytest.mark.parametrize(("beta", "falls"), [(0.99, True), (0.999, False)])
def test_an_average_falls_when_gradients_vanish_only_with_such_betas(beta, falls):
    held = torch.linspace(1, 2, 129).bfloat16()
    assert bool(((held.float() * beta).bfloat16() < held).all()) == falls
