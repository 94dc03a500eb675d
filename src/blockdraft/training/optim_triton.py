"""AdamW of all weights in one launch, and the norm of all gradients in another; each reads a gradient where it lies.

P programs, B elements of a program. Both kernels are as fast as memory: what they move, over what a copy reaches, was
98% of the update and all of the norm (docs/performance.md).
"""

import itertools
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

UPDATE_PROGRAM: Final = 1024
"""Elements of a program of the update: all that it has is on its way before anything is computed."""
UPDATE_WARPS: Final = 4
NORM_PROGRAM: Final = 16384
NORM_PART: Final = 4096
"""Elements that a program of the norm reads at a time."""
NORM_WARPS: Final = 8


@triton.jit  # type: ignore[untyped-decorator]
def update_kernel(
    address_ptr: "Any", gradient_ptr: "Any", tensor_ptr: "Any", start_ptr: "Any", size_ptr: "Any", rate_ptr: "Any",
    scalar_ptr: "Any", share: "Any", beta1: "Any", beta2: "Any", decay: "Any", eps: "Any",
    BFLOAT16: tl.constexpr, IS_KEPT: tl.constexpr, LOW_MOMENTS: tl.constexpr, ALIGN: tl.constexpr, B: tl.constexpr,
) -> None:  # fmt: skip
    """`address_ptr` [tensors, 4]: weight, master, first moment, second moment; `gradient_ptr` [tensors].

    `tensor_ptr` [P]: whose elements a program updates; `start_ptr` [tensors]: the first program of each.
    `scalar_ptr`: factor on the gradient, whether the step is lost, bias correction of the first moment, root of the
    second's. `share`: of the peak learning rates in `rate_ptr`.
    """
    if tl.load(scalar_ptr + 1) != 0.0:
        return
    factor = tl.load(scalar_ptr)
    correction1, root2 = tl.load(scalar_ptr + 2), tl.load(scalar_ptr + 3)
    program = tl.program_id(0)
    tensor = tl.load(tensor_ptr + program)
    first = (program - tl.load(start_ptr + tensor)).to(tl.int64) * B
    # What is loaded carries no alignment, and without it every element is an access of its own.
    size = tl.multiple_of(tl.load(size_ptr + tensor), ALIGN)
    lr = tl.load(rate_ptr + tensor) * share
    table = address_ptr + tensor * 4
    low: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    made: tl.constexpr = low if IS_KEPT else tl.float32
    kept: tl.constexpr = tl.bfloat16 if LOW_MOMENTS else tl.float32
    # A thread takes 4 elements of each tensor at a time. Were 16-bit ones read 8 at a time, float32 ones would have to
    # change hands through shared memory before they are stored.
    weight_ptr = tl.multiple_of(tl.load(table).to(tl.pointer_type(low)), 8)
    made_ptr = tl.multiple_of(tl.load(gradient_ptr + tensor).to(tl.pointer_type(made)), 8 if IS_KEPT else 16)
    master_ptr = tl.multiple_of(tl.load(table + 1).to(tl.pointer_type(tl.float32)), 16)
    mean_ptr = tl.multiple_of(tl.load(table + 2).to(tl.pointer_type(kept)), 8 if LOW_MOMENTS else 16)
    square_ptr = tl.multiple_of(tl.load(table + 3).to(tl.pointer_type(kept)), 8 if LOW_MOMENTS else 16)
    n = first + tl.arange(0, B)
    inside = n < size
    gradient = tl.load(made_ptr + n, mask=inside, other=0.0).to(tl.float32) * factor
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


# Of any first program: a kernel for each would be compiled in the middle of a run.
@triton.jit(do_not_specialize=["first_program"])  # type: ignore[untyped-decorator]
def norm_kernel(
    gradient_ptr: "Any", tensor_ptr: "Any", start_ptr: "Any", size_ptr: "Any", sum_ptr: "Any", first_program: "Any",
    BFLOAT16: tl.constexpr, IS_KEPT: tl.constexpr, ALIGN: tl.constexpr, B: tl.constexpr, PART: tl.constexpr,
) -> None:  # fmt: skip
    """`sum_ptr` [P]: the sum of squares of each program's elements."""
    program = first_program + tl.program_id(0)
    tensor = tl.load(tensor_ptr + program)
    first = (program - tl.load(start_ptr + tensor)).to(tl.int64) * B
    size = tl.multiple_of(tl.load(size_ptr + tensor), ALIGN)
    low: tl.constexpr = tl.bfloat16 if BFLOAT16 else tl.float16
    made: tl.constexpr = low if IS_KEPT else tl.float32
    made_ptr = tl.multiple_of(tl.load(gradient_ptr + tensor).to(tl.pointer_type(made)), 16)
    square_B = tl.zeros((PART,), dtype=tl.float32)
    for start in range(0, B, PART):
        n = first + start + tl.arange(0, PART)
        # The update reads them again long after they have left the cache.
        value = tl.load(made_ptr + n, mask=n < size, other=0.0, eviction_policy="evict_first").to(tl.float32)
        square_B += value * value
    tl.store(sum_ptr + program, tl.sum(square_B, axis=0))


class Located(NamedTuple):
    """Gradients as kernels find them, all of one type."""

    address: Tensor
    """[tensors], on their device."""
    is_kept: bool
    """Of the weights' type, where the backward left them; otherwise float32."""


def locate(gradients: list[Tensor]) -> Located:
    """Sends addresses to the device; nothing waits for them."""
    assert all(gradient.is_contiguous() for gradient in gradients)
    device = gradients[0].device
    addresses = torch.tensor([gradient.data_ptr() for gradient in gradients], pin_memory=device.type == "cuda")
    return Located(addresses.to(device, non_blocking=True), gradients[0].dtype != torch.float32)


class Places:
    """Which elements each program of a kernel has, for tensors of these sizes."""

    def __init__(self, sizes: list[int], size: int, device: torch.device) -> None:
        counts = [-(-one // size) for one in sizes]
        starts = [0, *itertools.accumulate(counts)]
        self.first_programs = tuple(starts)
        """Of each tensor, and the number of all."""
        self.num_programs = starts.pop()
        numbers = torch.arange(len(sizes), dtype=torch.int32)
        self.tensor_P = numbers.repeat_interleave(torch.tensor(counts)).to(device)
        self.start = torch.tensor(starts, dtype=torch.int32, device=device)
        self.size = torch.tensor(sizes, device=device)
        # 8 numbers of 16 bits are one access of 16 bytes, 4 one of 8.
        self.align = next(align for align in (8, 4, 1) if all(one % align == 0 for one in sizes))


class FusedNorm:
    """The norm of a fixed list of gradients, the same bits each time: no program waits for or adds to another."""

    def __init__(self, weights: list[Tensor]) -> None:
        self.is_bfloat16 = weights[0].dtype == torch.bfloat16
        self.places = Places([weight.numel() for weight in weights], NORM_PROGRAM, weights[0].device)
        self.sum_P = torch.empty(self.places.num_programs, device=weights[0].device)

    def measure(self, gradients: Located, known_from: int | None = None) -> Tensor:
        """Euclidean, over all of them together; those from `known_from` on are `measure_from`'s."""
        places = self.places
        self._square(gradients, 0, places.num_programs if known_from is None else places.first_programs[known_from])
        return self.sum_P.sum().sqrt()

    def measure_from(self, gradients: Located, number: int) -> None:
        """Begins with the gradients from this number on; the bits of `measure` are the same."""
        self._square(gradients, self.places.first_programs[number], self.places.num_programs)

    def _square(self, gradients: Located, first: int, last: int) -> None:
        places = self.places
        if first == last:
            return
        norm_kernel[(last - first,)](
            gradients.address, places.tensor_P, places.start, places.size, self.sum_P, first,
            BFLOAT16=self.is_bfloat16, IS_KEPT=gradients.is_kept, ALIGN=places.align, B=NORM_PROGRAM, PART=NORM_PART,
            num_warps=NORM_WARPS,
        )  # fmt: skip


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
        device = slots[0].weight.device
        self.places = Places([slot.weight.numel() for slot in slots], UPDATE_PROGRAM, device)
        # The tensors stay where they are for as long as this lives.
        self.address = torch.tensor([[part.data_ptr() for part in slot[:4]] for slot in slots], device=device)
        self.rate = torch.tensor([slot.rate for slot in slots], device=device)

    def step(self, gradients: Located, factor: Tensor, is_lost: Tensor, steps: Tensor, share: float) -> None:
        """Updates everything unless `is_lost`, all on the device. `steps`: this one included, float32."""
        beta1, beta2 = self.betas
        # In float64: torch's kernel computes powers so.
        exact = steps.double()
        correction1, root2 = 1 - beta1**exact, (1 - beta2**exact).sqrt()
        scalars = torch.stack([factor.double(), is_lost.double(), correction1, root2]).float()
        places, slot = self.places, self.slots[0]
        update_kernel[(places.num_programs,)](
            self.address, gradients.address, places.tensor_P, places.start, places.size, self.rate, scalars,
            share, beta1, beta2, self.decay, 1e-8,
            BFLOAT16=slot.weight.dtype == torch.bfloat16, IS_KEPT=gradients.is_kept,
            LOW_MOMENTS=slot.mean.dtype == torch.bfloat16, ALIGN=places.align, B=UPDATE_PROGRAM, num_warps=UPDATE_WARPS,
        )  # fmt: skip
