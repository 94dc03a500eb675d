"""The frozen head alone: its loss by chunks, the kernels between its products, and what one product more costs.

N rows, M rows of a chunk, D width, V ids of the head.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor

from blockdraft.commands.bench_cases import Problem, choose_between, loss_step
from blockdraft.commands.bench_timing import time_alone
from blockdraft.training.head_kl import between_kl_eager
from blockdraft.training.head_loss import Finish, even_chunk


class Run(Protocol):
    """What a measurement asks of the benchmark it belongs to."""

    options: Any
    device: torch.device
    dtype: torch.dtype

    def say(self, line: str) -> None: ...

    def keep(self, name: str, value: Any) -> None: ...

    def attempt(self, what: str, function: Callable[[], None]) -> None: ...


SETTINGS = ((4096, 4), (4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 32))
KL_SETTINGS = ((4096, 4), (4096, 8), (2048, 4), (2048, 8), (1024, 4), (8192, 16))
"""Ids of a program and its warps. Two rows of 4,096 ids in four warps take 251 registers of a thread, 2,048 take 96."""


def loss(run: Run, name: str, problem: Problem) -> None:
    """The head's loss alone on given hidden states: stages and chunks."""
    rows = len(problem.label_N)
    hidden_ND = torch.randn(rows, problem.shape.hidden_size, device=run.device, dtype=run.dtype)
    hidden_ND.requires_grad_()
    stages = ("eager",) if run.options.rehearse else ("triton", "inductor")
    for stage in stages:
        for chunk in (1024, 1536, 1920, 2048, 2560, 4096) if stage == "triton" else (4096,):
            lose = loss_step(problem, stage, chunk)

            def measure(lose: Callable[[Tensor], Tensor] = lose, what: str = f"{stage}, chunk {chunk}") -> None:
                spent = time_alone(run.device, lambda: lose(hidden_ND).backward(), repeats=5)
                run.say(f"{name} | loss alone, {what}: {spent:.2f} ms")
                run.keep(f"{name} loss {what}", spent)

            run.attempt(f"{name} loss {stage} {chunk}", measure)


def between(run: Run, name: str, problem: Problem) -> None:
    """The stage between the products of the cross-entropy."""
    product_MV, finish = logits_of(run, problem), Finish(1.0, None)
    label_M = problem.label_N[: len(product_MV)]
    ce_M, correct_M = torch.empty(len(label_M), device=label_M.device), torch.empty_like(label_M, dtype=torch.bool)
    stage = choose_between("eager" if run.options.rehearse else "triton")
    settings = ((0, 0),) if run.options.rehearse else SETTINGS

    def work() -> None:
        stage(product_MV, label_M, finish, ce_M, correct_M)

    sweep(run, f"{name} | between", "blockdraft.training.head_loss_triton", settings, work, 3 * bytes_of(product_MV))


def between_kl(run: Run, name: str, problem: Problem) -> None:
    """The stage between the products of the divergence."""
    product_MV, target_MV, finish = logits_of(run, problem), logits_of(run, problem), Finish(1.0, None)
    stage, settings = between_kl_eager, ((0, 0),)
    if not run.options.rehearse:
        # Only GPUs have Triton.
        from blockdraft.training.head_kl_triton import between_kl_triton

        stage, settings = between_kl_triton, KL_SETTINGS

    def work() -> None:
        stage(product_MV, target_MV, finish)

    module = "blockdraft.training.head_kl_triton"
    sweep(run, f"{name} | between of kl", module, settings, work, 5 * bytes_of(product_MV))


def logits_of(run: Run, problem: Problem) -> Tensor:
    """Logits of a chunk's rows, random."""
    head_VD = problem.ends.head_weight
    rows = min(1024, len(problem.label_N))
    hidden_MD = torch.randn(rows, head_VD.shape[1], device=run.device, dtype=run.dtype)
    return torch.mm(hidden_MD * 0.3, head_VD.t())


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def sweep(
    run: Run, what: str, module: str, settings: tuple[tuple[int, int], ...], work: Callable[[], None], moved: int
) -> None:
    """The same work with other slices, which moves so many bytes. A setting of 0 is the module's own."""
    for ids, warps in settings:

        def measure(ids: int = ids, warps: int = warps) -> None:
            with mock.patch.multiple(module, SLICE=ids, NUM_WARPS=warps) if ids else nullcontext():
                spent = time_alone(run.device, work)
            run.say(f"{what}, {ids} ids, {warps} warps: {spent:.3f} ms, {moved / spent / 1e9:.2f} TB/s")
            run.keep(f"{what} {ids} {warps}", spent)

        run.attempt(f"{what} {ids} {warps}", measure)


def with_product(problem: Problem, lose: Callable[[Tensor], Tensor], chunk: int) -> Callable[[Tensor], Tensor]:
    """What the divergence's product costs in a step, and nothing else of it: logits of the target's hidden states."""
    head_VD = problem.ends.head_weight
    rows = len(problem.label_N)
    final_ND = torch.randn(rows, head_VD.shape[1], device=head_VD.device).to(head_VD.dtype)
    size = even_chunk(rows, chunk)

    def run(hidden_ND: Tensor) -> Tensor:
        logits_MV = hidden_ND.new_empty(size, len(head_VD))
        for rows_MD in final_ND.split(size):
            torch.mm(rows_MD, head_VD.t(), out=logits_MV[: len(rows_MD)])
        del logits_MV
        return lose(hidden_ND)

    return run
