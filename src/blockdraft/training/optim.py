"""Optimizers on float32 masters, the schedule, and clipping.

The drafter computes in its own type; every micro-batch's gradient is added to a float32 sum as soon as autograd has
finished it, or as soon as it is summed over replicas, so accumulation never rounds to bfloat16.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from blockdraft.config import ConfigError, OptimConfig
from blockdraft.training.adamw_bf16 import LowAdamW
from blockdraft.training.shards import Exchange, Seat, rounds_of, share_out

if TYPE_CHECKING:
    from blockdraft.training.optim_triton import FusedAdamW, FusedNorm, Located


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

    One of several drafters with a `seat` has masters and moments of its own share of the weights only. All of these
    are there from the beginning, at addresses that never change.
    """

    def __init__(self, module: nn.Module, config: OptimConfig, seat: Seat | None = None) -> None:
        self.config = config
        self.weights = dict(module.named_parameters())
        names, sizes = list(self.weights), [weight.numel() for weight in self.weights.values()]
        number, count = seat or Seat(0, 1)
        owners = share_out(sizes, count)
        self.owner_of = dict(zip(names, owners, strict=True))
        self.rounds = [[names[index] for index in one] for one in rounds_of(sizes, owners)] if seat else [names]
        """What is updated, and handed out, at a time."""
        self.exchange: Exchange | None = None
        """Takes the weights of each round to the other drafters; None: nobody waits for them, as in a rehearsal."""
        own = [name for name in names if self.owner_of[name] == number]
        self._owns_masters = not all(weight.dtype == torch.float32 for weight in self.weights.values())
        self.masters = {
            name: nn.Parameter(self.weights[name].detach().float()) if self._owns_masters else self.weights[name]
            for name in own
        }
        self._sums = {name: self.masters[name] if name in self.masters else self._bare(name) for name in names}
        """Whose gradients are the float32 sums."""
        if self._owns_masters:
            for name, weight in self.weights.items():
                weight.register_post_accumulate_grad_hook(partial(self._made, name))
        self._is_kept = False
        device = next(iter(self.weights.values())).device
        is_low = all(weight.dtype in (torch.bfloat16, torch.float16) for weight in self.weights.values())
        self._is_fused = device.type == "cuda" and is_low and config.optimizer != "muon"
        """Whether one kernel measures all gradients and one updates everything."""
        self._norm: FusedNorm | None = None
        self._begun: tuple[Located, int] | None = None
        """Where the gradients lie, and from which number on their norm is being measured (`measure_all_but`)."""
        self._updates: list[FusedAdamW | None] = []
        """Of each round; None where nothing in it is this drafter's."""
        self.parts = self._make_parts()
        self.peaks = {"matrices": config.lr, "norms": config.lr if config.norm_lr is None else config.norm_lr}
        self._steps = torch.zeros(len(self.masters), device=device)
        """Steps done, of each weight that AdamW moves."""
        self._begin()
        self.skipped = torch.zeros((), device=device)

    def _bare(self, name: str) -> nn.Parameter:
        """What holds the sum of a weight without a master here: a parameter of that shape, all of it one zero."""
        weight = self.weights[name]
        return (
            nn.Parameter(torch.zeros((), device=weight.device).expand(weight.shape)) if self._owns_masters else weight
        )

    def _make_parts(self) -> dict[str, torch.optim.Optimizer]:
        config, parts = self.config, dict[str, torch.optim.Optimizer]()
        for part in ("matrices", "norms"):
            masters = [master for name, master in self.masters.items() if self._part_of(name) == part]
            if not masters:
                continue
            if config.optimizer == "muon" and part == "matrices":
                parts[part] = torch.optim.Muon(masters, weight_decay=config.weight_decay)
            elif config.optimizer == "adamw_bf16":
                parts[part] = LowAdamW(masters, config.betas, config.weight_decay)
            else:
                parts[part] = torch.optim.AdamW(
                    masters, betas=config.betas, weight_decay=config.weight_decay, fused=True
                )
        return parts

    def _part_of(self, name: str) -> str:
        return "matrices" if self.weights[name].dim() == 2 else "norms"

    def _keys_of(self, part: str) -> tuple[str, ...]:
        is_muon = self.config.optimizer == "muon" and part == "matrices"
        return ("momentum_buffer",) if is_muon else ("step", "exp_avg", "exp_avg_sq")

    def _begin(self) -> None:
        """Moments of zero and, of AdamW, the steps done; torch's optimizers would make the same in their first step."""
        dtypes, counters = self.layout(), iter(self._steps)
        for name, master in self.masters.items():
            part = self._part_of(name)
            state = self.parts[part].state[master]
            for key in self._keys_of(part):
                dtype = dtypes[f"{part}.{key}.{name}"]
                state[key] = (
                    next(counters) if key == "step" else torch.zeros_like(master, dtype=dtype, requires_grad=False)
                )

    def layout(self) -> dict[str, torch.dtype]:
        """Flat names of the whole state, of all drafters together, each with its type."""
        found = {f"master.{name}": torch.float32 for name in self.weights}
        low = torch.bfloat16 if self.config.optimizer == "adamw_bf16" else torch.float32
        for part in ("matrices", "norms"):
            for name in (name for name in self.weights if self._part_of(name) == part):
                found |= {
                    f"{part}.{key}.{name}": torch.float32 if key == "step" else low for key in self._keys_of(part)
                }
        return found

    def _made(self, name: str, _weight: Tensor) -> None:
        if not self._is_kept:
            self.land([name])

    def keep_gradients(self) -> None:
        """Lets the next backward leave its gradients where it makes them, in the weights' type, until they `land`.

        The fused kernel reads them there: what is not added to anything need not be written as float32 first.
        """
        self._is_kept = self._owns_masters

    def land(self, names: list[str]) -> None:
        """Adds finished gradients to the float32 sums and frees them; where weights are masters they are there."""
        if not self._owns_masters or (self._is_kept and self._is_fused):
            return
        for name in names:
            weight, total = self.weights[name], self._sums[name]
            if weight.grad is None:
                continue
            if total.grad is None:
                total.grad = weight.grad.float()
            else:
                total.grad.add_(weight.grad)
            weight.grad = None

    def gradient(self, name: str) -> Tensor:
        """One weight's gradient so far; zeros if it got none. Float32, or as `keep_gradients` left it."""
        holder = self.weights[name] if self._is_kept else self._sums[name]
        if holder.grad is None:
            holder.grad = torch.zeros(holder.shape, dtype=holder.dtype, device=holder.device)
        return holder.grad

    def gradients(self) -> list[Tensor]:
        """The float32 gradients of all weights, in a fixed order."""
        self._is_kept = False
        self.land(list(self.weights))
        return [self.gradient(name) for name in self.weights]

    def measure_all_but(self, names: list[str]) -> None:
        """Begins to measure all gradients but those of these weights, the first ones: theirs are not final yet.

        Only where one kernel measures; it fills the time that the last sum takes.
        """
        if self._norm is None:
            return
        assert set(names) == set(list(self.weights)[: len(names)]), "gradients are made in another order"
        self._begun = self._locate_all(), len(names)
        self._norm.measure_from(*self._begun)

    def _locate_all(self) -> "Located":
        from blockdraft.training.optim_triton import locate

        return locate([self.gradient(name) for name in self.weights])

    def forget_gradients(self) -> None:
        """Frees every gradient; the next ones are a new step's."""
        self._is_kept, self._begun = False, None
        for weight, total in zip(self.weights.values(), self._sums.values(), strict=True):
            weight.grad = total.grad = None

    @torch.no_grad()
    def step(self, scale: float) -> Tensor:
        """Clips, updates the masters at `scale` of the peak learning rate, copies them into the weights.

        Returns the gradient's norm before clipping. Weights of other drafters are there once `await_weights` returns. A
        step whose norm is not finite changes no master and no moment; AdamW's kernel finds that out on the device, so
        nothing waits for the norm. Muon has to.
        """
        if self._is_fused:
            norm = self._step_fused(scale)
        else:
            gradients = self.gradients()
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, torch.float32)))
            self._step_parts(*self._clip(norm), scale)
            torch._foreach_zero_(gradients)
        self.skipped += (~torch.isfinite(norm)).float()
        return norm

    def _clip(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Factor on the gradients, and 1 where the step is lost."""
        return (self.config.clip / (norm + 1e-6)).clamp(max=1.0), (~torch.isfinite(norm)).float()

    def _hand_out(self, names: list[str]) -> None:
        if self.exchange is not None:
            self.exchange.hand_out([(self.owner_of[name], self.weights[name].detach()) for name in names])

    def share_all(self, exchange: Exchange) -> None:
        """From now on hands out what a step has updated. Does it once, so that what carries it is set up and warm."""
        self.exchange = exchange
        for names in self.rounds:
            self._hand_out(names)
        self.await_weights()

    def await_weights(self) -> None:
        """Ends what the last step began to hand out; on a GPU the current stream waits."""
        if self.exchange is not None:
            for _ in self.rounds:
                self.exchange.wait()

    def _step_fused(self, scale: float) -> Tensor:
        # Only GPUs have Triton.
        from blockdraft.training.optim_triton import FusedNorm, locate

        if self._norm is None:
            self._norm = FusedNorm(list(self.weights.values()))
            self._updates = [self._build_update(names) for names in self.rounds]
        # Neither waits for the device: a list of counters, each moved by a tensor, would.
        located, known_from = self._begun or (self._locate_all(), None)
        norm = self._norm.measure(located, known_from)
        factor, is_lost = self._clip(norm)
        self._steps += 1 - is_lost
        for names, update in zip(self.rounds, self._updates, strict=True):
            own = [name for name in names if name in self.masters]
            if update is not None:
                gradients = located if len(own) == len(self.weights) else locate([self.gradient(name) for name in own])
                update.step(gradients, factor, is_lost, self._steps[0], scale)
            self._hand_out(names)
        # Not zeroed: the next gradients are put in their place, not added.
        self.forget_gradients()
        return norm

    def _build_update(self, names: list[str]) -> "FusedAdamW | None":
        from blockdraft.training.optim_triton import FusedAdamW, Slot

        slots = []
        for name in names:
            if name in self.masters:
                part, master = self._part_of(name), self.masters[name]
                state = self.parts[part].state[master]
                slots.append(Slot(self.weights[name], master, state["exp_avg"], state["exp_avg_sq"], self.peaks[part]))
        return FusedAdamW(slots, self.config.betas, self.config.weight_decay) if slots else None

    def _step_parts(self, factor: Tensor, is_lost: Tensor, scale: float) -> None:
        gradients = [self.gradient(name) for name in self.masters]
        if gradients:
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
            for name, master in self.masters.items():
                self.weights[name].copy_(master)
        for names in self.rounds:
            self._hand_out(names)

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
        """Masters and moments of this drafter's share under flat names."""
        found = {f"master.{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            part = self._part_of(name)
            state = self.parts[part].state[master]
            found |= {f"{part}.{key}.{name}": torch.as_tensor(state[key]) for key in self._keys_of(part)}
        return {name: found[name] for name in self.layout() if name in found}

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Restores a whole state, as `merged_state` gives it; a share takes what is its own.

        Raises:
            ConfigError: the tensors belong to another optimizer or another drafter.
        """
        layout = self.layout()
        masters = {name for name in tensors if name.startswith("master.")}
        if odd := sorted(masters ^ {name for name in layout if name.startswith("master.")}):
            name = odd[0].removeprefix("master.")
            raise ConfigError(f"the checkpoint's weights are not this drafter's: {name} is in only one of them")
        # A checkpoint of something that never trained has masters only.
        if set(tensors) != masters and (odd := sorted(set(tensors) ^ set(layout))):
            raise ConfigError(
                f"the checkpoint's moments are not those of optim.optimizer {self.config.optimizer}: {odd[0]} is in "
                "only one of them; take the optimizer that wrote it"
            )
        for name, value in tensors.items():
            if value.dtype != layout[name]:
                raise ConfigError(
                    f"the checkpoint holds {name} as {value.dtype}, optim.optimizer {self.config.optimizer} keeps it "
                    f"as {layout[name]}; take the optimizer that wrote it"
                )
        self.reset_moments()
        for name, held in self.state_tensors().items():
            if name in tensors:
                held.copy_(tensors[name])
        for name, weight in self.weights.items():
            weight.copy_(tensors[f"master.{name}"])


def merged_state(optimizers: Sequence[MasterOptimizer]) -> dict[str, Tensor]:
    """The whole state of one drafter, from all drafters that divide it; nothing is copied."""
    found: dict[str, Tensor] = {}
    for optimizer in optimizers:
        found |= optimizer.state_tensors()
    return {name: found[name] for name in optimizers[0].layout()}
