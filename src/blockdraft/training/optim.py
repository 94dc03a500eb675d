"""Optimizers on float32 masters, the schedule, and clipping.

The drafter computes in its own type; every micro-batch's gradient is added into the float32 master's gradient as soon
as autograd has finished it, or as soon as it is summed over replicas, so accumulation never rounds to bfloat16.
"""

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from blockdraft.config import ConfigError, OptimConfig
from blockdraft.training.adamw_bf16 import LowAdamW

if TYPE_CHECKING:
    from blockdraft.training.optim_triton import FusedAdamW, FusedNorm


def lr_scale(step: int, total_steps: int, config: OptimConfig) -> float:
    """Learning rate of a step (0-based) as a share of the peak.

    Linear warm-up over `warmup` of the steps; then cosine or linear down to `final_lr`, or (wsd) constant and linear
    over the last `decay` of the steps.
    """
    warmup_steps = round(config.warmup * total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    first = (
        warmup_steps if config.schedule != "wsd" else max(warmup_steps, total_steps - round(config.decay * total_steps))
    )
    progress = min(1.0, max(0.0, (step - first + 1) / max(1, total_steps - first)))
    if config.schedule == "cosine":
        return config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (1 - config.final_lr) * progress


class MasterOptimizer:
    """AdamW, or Muon for matrices with AdamW for the rest, on float32 masters of a module's weights.

    Moments are there from the beginning, at addresses that never change.
    """

    def __init__(self, module: nn.Module, config: OptimConfig) -> None:
        self.config = config
        self.weights = dict(module.named_parameters())
        same = all(weight.dtype == torch.float32 for weight in self.weights.values())
        self.masters = (
            self.weights
            if same
            else {name: nn.Parameter(weight.detach().float()) for name, weight in self.weights.items()}
        )
        self._owns_masters = not same
        if self._owns_masters:
            for name, weight in self.weights.items():
                weight.register_post_accumulate_grad_hook(partial(self._made, name))
        self._is_kept = False
        device = next(iter(self.weights.values())).device
        is_low = all(weight.dtype in (torch.bfloat16, torch.float16) for weight in self.weights.values())
        self._is_fused = device.type == "cuda" and is_low and config.optimizer != "muon"
        """Whether one kernel measures all gradients and one updates everything."""
        self._norm: FusedNorm | None = None
        self._update: FusedAdamW | None = None
        matrices = [master for master in self.masters.values() if master.dim() == 2]
        others = [master for master in self.masters.values() if master.dim() != 2]
        self.parts: dict[str, torch.optim.Optimizer] = {
            "matrices": torch.optim.Muon(matrices, weight_decay=config.weight_decay)
            if config.optimizer == "muon"
            else _adamw(matrices, config),
            "norms": _adamw(others, config),
        }
        self.peaks = {"matrices": config.lr, "norms": config.lr if config.norm_lr is None else config.norm_lr}
        self._steps = torch.zeros(len(self.masters), device=device)
        """Steps done, of each weight that AdamW moves."""
        self._begin()
        self.skipped = torch.zeros((), device=device)

    def _begin(self) -> None:
        """Moments of zero and, of AdamW, the steps done; torch's optimizers would make the same in their first step."""
        dtype = torch.bfloat16 if self.config.optimizer == "adamw_bf16" else torch.float32
        counters = iter(self._steps)
        for part in self.parts.values():
            is_muon = isinstance(part, torch.optim.Muon)
            for master in (master for group in part.param_groups for master in group["params"]):
                state = part.state[master]
                if not is_muon:
                    state["step"] = next(counters)
                for key in ("momentum_buffer",) if is_muon else ("exp_avg", "exp_avg_sq"):
                    state[key] = torch.zeros_like(master, dtype=dtype, requires_grad=False)

    def _made(self, name: str, _weight: Tensor) -> None:
        if not self._is_kept:
            self.land([name])

    def keep_gradients(self) -> None:
        """Lets the next backward leave its gradients where it makes them, in the weights' type, until they `land`.

        The fused kernel reads them there: what is not added to anything need not be written as float32 first.
        """
        self._is_kept = self._owns_masters

    def land(self, names: list[str]) -> None:
        """Adds finished gradients into the masters' and frees them; where weights are masters they are there."""
        if not self._owns_masters or (self._is_kept and self._is_fused):
            return
        for name in names:
            weight, master = self.weights[name], self.masters[name]
            if weight.grad is None:
                continue
            if master.grad is None:
                master.grad = weight.grad.float()
            else:
                master.grad.add_(weight.grad)
            weight.grad = None

    def gradient(self, name: str) -> Tensor:
        """One weight's gradient so far; zeros if it got none. Float32, or as `keep_gradients` left it."""
        holder = self.weights[name] if self._is_kept else self.masters[name]
        if holder.grad is None:
            holder.grad = torch.zeros_like(holder)
        return holder.grad

    def gradients(self) -> list[Tensor]:
        """The float32 gradients, in a fixed order."""
        self._is_kept = False
        self.land(list(self.weights))
        return [self.gradient(name) for name in self.masters]

    def forget_gradients(self) -> None:
        """Frees every gradient; the next ones are a new step's."""
        self._is_kept = False
        for weight, master in zip(self.weights.values(), self.masters.values(), strict=True):
            weight.grad = master.grad = None

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """Clips, updates the masters at `scale` of the peak learning rate, copies them into the weights.

        Returns the gradient's norm before clipping. A step whose norm is not finite changes no master and no moment;
        AdamW's kernel finds that out on the device, so nothing waits for the norm. Muon has to.
        """
        if self._is_fused:
            norm = self._step_fused(scale)
        else:
            gradients = self.gradients()
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))
            self._step_parts(gradients, *self._clip(norm), scale)
        self.skipped += (~torch.isfinite(norm)).float()
        return norm

    def _clip(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Factor on the gradients, and 1 where the step is lost."""
        return (self.config.clip / (norm + 1e-6)).clamp(max=1.0), (~torch.isfinite(norm)).float()

    def _step_fused(self, scale: float) -> Tensor:
        # Only GPUs have Triton.
        from blockdraft.training.optim_triton import FusedNorm, locate

        if self._norm is None or self._update is None:
            self._norm, self._update = FusedNorm(list(self.weights.values())), self._build_update()
        # Neither waits for the device: a list of counters, each moved by a tensor, would.
        gradients = locate([self.gradient(name) for name in self.masters])
        norm = self._norm.measure(gradients)
        factor, is_lost = self._clip(norm)
        self._steps += 1 - is_lost
        self._update.step(gradients, factor, is_lost, self._steps[0], scale)
        # Not zeroed: the next gradients are put in their place, not added.
        self.forget_gradients()
        return norm

    def _build_update(self) -> "FusedAdamW":
        from blockdraft.training.optim_triton import FusedAdamW, Slot

        slots: dict[int, Slot] = {}
        for part_name, part in self.parts.items():
            for group in part.param_groups:
                for master in group["params"]:
                    state = part.state[master]
                    slots[id(master)] = Slot(
                        master, master, state["exp_avg"], state["exp_avg_sq"], self.peaks[part_name]
                    )
        ordered = [slots[id(self.masters[name])]._replace(weight=weight) for name, weight in self.weights.items()]
        return FusedAdamW(ordered, self.config.betas, self.config.weight_decay)

    def _step_parts(self, gradients: list[Tensor], factor: Tensor, is_lost: Tensor, scale: float) -> None:
        torch._foreach_mul_(gradients, factor)
        for name, part in self.parts.items():
            for group in part.param_groups:
                group["lr"] = self.peaks[name] * scale
            if isinstance(part, torch.optim.Muon):
                if not bool(is_lost):
                    part.step()
            else:
                # What the fused kernels read: 1 leaves everything as it is.
                part.found_inf = is_lost  # type: ignore[attr-defined]
                part.step()
        if self._owns_masters:
            torch._foreach_copy_(list(self.weights.values()), list(self.masters.values()))
        torch._foreach_zero_(gradients)

    @torch.no_grad()
    def rehearse(self) -> None:
        """Everything that `step` may have to compile, at learning rate 0; moments are as before the first step."""
        self.step(0.0)
        if self._is_fused:
            self.keep_gradients()
            self.step(0.0)
        self.reset_moments()

    @torch.no_grad()
    def reset_moments(self) -> None:
        """Zeroes moments and step counters in place: what a fresh optimizer has, at the same addresses."""
        for part in self.parts.values():
            for state in part.state.values():
                for value in state.values():
                    value.zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        """Masters and moments under flat names."""
        names = {id(master): name for name, master in self.masters.items()}
        found = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for part_name, part in self.parts.items():
            for master, state in part.state.items():
                for key, value in state.items():
                    found[f"{part_name}.{key}.{names[id(master)]}"] = torch.as_tensor(value)
        return found

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restores what `state_tensors` gave.

        Raises:
            ConfigError: the tensors belong to another optimizer or another drafter.
        """
        held = self.state_tensors()
        masters = {name for name in tensors if name.startswith("master.")}
        if odd := sorted(masters ^ {name for name in held if name.startswith("master.")}):
            name = odd[0].removeprefix("master.")
            raise ConfigError(f"the checkpoint's weights are not this drafter's: {name} is in only one of them")
        # A checkpoint of something that never trained has masters only.
        if set(tensors) != masters and (odd := sorted(set(tensors) ^ set(held))):
            raise ConfigError(
                f"the checkpoint's moments are not those of optim.optimizer {self.config.optimizer}: {odd[0]} is in "
                "only one of them; take the optimizer that wrote it"
            )
        self.reset_moments()
        for name, value in tensors.items():
            if value.dtype != held[name].dtype:
                raise ConfigError(
                    f"the checkpoint holds {name} as {value.dtype}, optim.optimizer {self.config.optimizer} keeps it "
                    f"as {held[name].dtype}; take the optimizer that wrote it"
                )
            held[name].copy_(value)
        if self._owns_masters:
            torch._foreach_copy_(list(self.weights.values()), list(self.masters.values()))


def _adamw(masters: list[nn.Parameter], config: OptimConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adamw_bf16":
        return LowAdamW(masters, config.betas, config.weight_decay)
    return torch.optim.AdamW(masters, betas=config.betas, weight_decay=config.weight_decay, fused=True)
