"""AdamW that keeps both of its moments in bfloat16: they are read, computed with in float32, and rounded to be kept.

Rounding to nearest takes away at most 1 in 256 of a number, so an average that a step moves by less than that stands
still; config.py refuses betas for which that could happen. DeepSeek-V3 was trained so (arXiv 2412.19437, section 3.3).
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple, overload

import torch
from torch import Tensor


class LowAdamW(torch.optim.Optimizer):
    """The update of torch's AdamW on float32 weights, in plain operations; GPUs have a kernel (optim_triton.py)."""

    def __init__(self, masters: Iterable[Tensor], betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(masters, {"lr": 0.0, "betas": betas, "weight_decay": weight_decay, "eps": 1e-8})
        self.found_inf: Tensor | None = None
        """As torch's fused optimizers have it: where it is 1, a step leaves everything as it is."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every weight that has a gradient."""
        assert closure is None and self.found_inf is not None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            rates = _Rates(group["lr"], beta1, beta2, group["weight_decay"], group["eps"])
            for master in group["params"]:
                if master.grad is not None:
                    _update(master, master.grad, self.state[master], rates, self.found_inf > 0)
        return None


class _Rates(NamedTuple):
    lr: float
    beta1: float
    beta2: float
    decay: float
    eps: float


def _update(master: Tensor, gradient: Tensor, state: dict[str, Tensor], by: _Rates, is_lost: Tensor) -> None:
    steps, mean, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
    steps += (~is_lost).float()
    new_mean = torch.lerp(mean.float(), gradient, 1 - by.beta1)
    new_square = square.float().mul_(by.beta2).addcmul_(gradient, gradient, value=1 - by.beta2)
    # In float64, as torch's kernels compute powers.
    exact = steps.double()
    rate, root = by.lr / (1 - by.beta1**exact), (1 - by.beta2**exact).sqrt()
    moved = new_mean * rate.float() / (new_square.sqrt() / root.float() + by.eps)
    new_master = master * (1 - by.lr * by.decay) - moved
    for held, value in ((mean, new_mean), (square, new_square), (master, new_master)):
        held.copy_(torch.where(is_lost, held, value.to(held.dtype)))
