"""AdamW of all weights in one launch: each gradient read once, clipped, moments and master updated, weight written.

P programs, B elements that one program updates.
"""

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAM: Final = 8192
"""Elements of a program."""
PART: Final = 1024
"""Of these at a time."""
NUM_WARPS: Final = 4


@triton.jit  # type: ignore[untyped-decorator]
def update_kernel(
    address_ptr: "Any", tensor_ptr: "Any", first_ptr: "Any", size_ptr: "Any", rate_ptr: "Any", scalar_ptr: "Any",
    share: "Any", beta1: "Any", beta2: "Any", decay: "Any", eps: "Any",
    BFLOAT16: tl.constexpr, IS_KEPT: tl.constexpr, LOW_MOMENTS: tl.constexpr, ALIGN: tl.constexpr, B: tl.constexpr,
    PART: tl.constexpr,
) -> None:  # fmt: skip
    """`address_ptr` [tensors, 5]: weight, gradient, master, first moment, second moment.

    `scalar_ptr`: factor on the gradient, whether the step is lost, bias correction of the first moment, root of the
    second's. `share`: of the peak learning rates in `rate_ptr`.
    """
    if tl.load(scalar_ptr + 1) != 0.0:
        return
    factor = tl.load(scalar_ptr)
    correction1, root2 = tl.load(scalar_ptr + 2), tl.load(scalar_ptr + 3)
    program = tl.program_id(0)
    tensor = tl.load(tensor_ptr + program)
    first = tl.load(first_ptr + program)
    # What is loaded carries no alignment, and without it every element is an access of its own.
    size = tl.multiple_of(tl.load(size_ptr + tensor), ALIGN)
    lr = tl.load(rate_ptr + tensor) * share
    table = address_ptr + tensor * 5
    low: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    made: tl.constexpr = low if IS_KEPT else tl.float32
    kept: tl.constexpr = tl.bfloat16 if LOW_MOMENTS else tl.float32
    weight_ptr = tl.multiple_of(tl.load(table).to(tl.pointer_type(low)), 16)
    gradient_ptr = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(made)), 16)
    master_ptr = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(tl.float32)), 16)
    mean_ptr = tl.multiple_of(tl.load(table + 3).to(tl.pointer_type(kept)), 16)
    square_ptr = tl.multiple_of(tl.load(table + 4).to(tl.pointer_type(kept)), 16)
    for start in range(0, B, PART):
        n = tl.multiple_of(first + start, PART) + tl.arange(0, PART)
        inside = n < size
        gradient = tl.load(gradient_ptr + n, mask=inside, other=0.0).to(tl.float32) * factor
        mean = tl.load(mean_ptr + n, mask=inside, other=0.0).to(tl.float32)
        square = tl.load(square_ptr + n, mask=inside, other=0.0).to(tl.float32)
        master = tl.load(master_ptr + n, mask=inside, other=0.0)
        mean += (gradient - mean) * (1.0 - beta1)
        square = square * beta2 + gradient * gradient * (1.0 - beta2)
        master *= 1.0 - lr * decay
        master -= lr / correction1 * mean / (tl.sqrt(square) / root2 + eps)
        tl.store(mean_ptr + n, mean.to(kept), mask=inside)
        tl.store(square_ptr + n, square.to(kept), mask=inside)
        tl.store(master_ptr + n, master, mask=inside)
        tl.store(weight_ptr + n, master.to(low), mask=inside)


class Slot(NamedTuple):
    """One weight with what belongs to it, and its peak learning rate."""

    weight: Tensor
    master: Tensor
    mean: Tensor
    square: Tensor
    rate: float


class FusedAdamW:
    """The update of a fixed list of 16-bit weights on float32 masters, as torch's fused AdamW computes it.

    Moments are all float32, or all bfloat16 and rounded to nearest.
    """

    def __init__(self, slots: list[Slot], betas: tuple[float, float], decay: float) -> None:
        self.slots, self.betas, self.decay = slots, betas, decay
        self.device = slots[0].weight.device
        sizes = [slot.weight.numel() for slot in slots]
        firsts = [(number, first) for number, size in enumerate(sizes) for first in range(0, size, PROGRAM)]
        self.tensor_P = torch.tensor([number for number, _ in firsts], device=self.device)
        self.first_P = torch.tensor([first for _, first in firsts], device=self.device)
        self.size = torch.tensor(sizes, device=self.device)
        self.rate = torch.tensor([slot.rate for slot in slots], device=self.device)
        # 8 numbers of 16 bits are one access of 16 bytes.
        self.align = 8 if all(size % 8 == 0 for size in sizes) else 1

    def step(self, gradients: list[Tensor], factor: Tensor, is_lost: Tensor, steps: Tensor, share: float) -> None:
        """Updates everything unless `is_lost`, all on the device. `steps`: this one included, float32.

        `gradients` are all float32, or all of the weights' type.
        """
        beta1, beta2 = self.betas
        # In float64: torch's kernel computes powers so.
        exact = steps.double()
        correction1, root2 = 1 - beta1**exact, (1 - beta2**exact).sqrt()
        scalars = torch.stack([factor.double(), is_lost.double(), correction1, root2]).float()
        bfloat16 = self.slots[0].weight.dtype == torch.bfloat16
        low_moments = self.slots[0].mean.dtype == torch.bfloat16
        update_kernel[(len(self.first_P),)](
            self._addresses(gradients), self.tensor_P, self.first_P, self.size, self.rate, scalars,
            share, beta1, beta2, self.decay, 1e-8,
            BFLOAT16=bfloat16, IS_KEPT=gradients[0].dtype != torch.float32, LOW_MOMENTS=low_moments,
            ALIGN=self.align, B=PROGRAM, PART=PART, num_warps=NUM_WARPS,
        )  # fmt: skip

    def _addresses(self, gradients: list[Tensor]) -> Tensor:
        lines = [
            [tensor.data_ptr() for tensor in (slot.weight, gradient, slot.master, slot.mean, slot.square)]
            for slot, gradient in zip(self.slots, gradients, strict=True)
        ]
        assert all(gradient.is_contiguous() for gradient in gradients)
        # Page-locked, so that the copy waits for nothing.
        table = torch.tensor(lines, pin_memory=self.device.type == "cuda")
        return table.to(self.device, non_blocking=True)
