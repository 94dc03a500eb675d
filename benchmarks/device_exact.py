"""Exactness on a GPU: the fused loss, the block mask and the drafter's layers, each against a plain version.

R rows, T context tokens, A anchors, L block size, N rows of the head, D width, V ids.
"""

import dataclasses
import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

from blockdraft.commands.bench_cases import Loss, choose_between, choose_make_attend, presets
from blockdraft.models.block_mask import block_mask
from blockdraft.models.blocks import block_positions, visibility
from blockdraft.models.compiled import How, compile_drafter
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.models.ends import Ends
from blockdraft.training.head_loss import head_loss
from blockdraft.training.loss import slot_loss


class Check(NamedTuple):
    """One comparison; it holds when `found` is at most `limit`."""

    what: str
    found: float
    limit: float


def distance(found: Tensor, reference: Tensor) -> float:
    """Norm of the difference over the reference's norm, in float64."""
    return float((found.double() - reference.double()).norm() / reference.double().norm())


def check_loss(device: torch.device, stages: tuple[Loss, ...], small: bool) -> list[Check]:
    """The fused loss in float32 against the reference, in bfloat16 against float64 beside the plain version."""
    checks = []
    for finish in ({}, {"logit_multiplier": 0.5, "logit_softcap": 4.0}):
        torch.manual_seed(0)
        rows, width, ids = (128, 64, 501) if small else (1024, 512, 20011)
        hidden_ND = torch.randn(rows, width, device=device)
        head_VD = torch.randn(ids, width, device=device) * (0.28 if small else 0.1)
        label_N = torch.randint(ids, (rows,), device=device)
        label_N[::7] = -1
        label_N[1::2] = (hidden_ND @ head_VD.t()).argmax(-1)[1::2]
        weight_N = torch.rand(rows, device=device)
        for dtype in (torch.float32, torch.bfloat16):
            hidden, head = hidden_ND.to(dtype), head_VD.to(dtype)
            ends = Ends(nn.Embedding(1, 1), head, **finish)
            exact_ends = Ends(nn.Embedding(1, 1), head.double(), **finish)
            leaf = hidden.double().requires_grad_()
            exact_ce_N = nn.functional.cross_entropy(
                exact_ends.logits(leaf), label_N, reduction="none", ignore_index=-1
            )
            exact = _loss_and_gradient(exact_ce_N, leaf, weight_N)
            leaf = hidden.clone().requires_grad_()
            plain_result = slot_loss(leaf, label_N, ends, 256)
            plain = _loss_and_gradient(plain_result.ce_N, leaf, weight_N)
            for stage in stages:
                leaf = hidden.clone().requires_grad_()
                result = head_loss(leaf, label_N, ends, 256, choose_between(stage))
                found = _loss_and_gradient(result.ce_N, leaf, weight_N)
                name = f"loss {stage} {str(dtype)[6:]} {'softcap' if finish else ''}"
                if dtype == torch.float32:
                    checks.append(Check(f"{name}: loss", distance(found[0], plain[0]), 1e-6))
                    checks.append(Check(f"{name}: gradient", distance(found[1], plain[1]), 1e-5))
                    checks.append(
                        Check(f"{name}: correct", float((result.correct_N != plain_result.correct_N).sum()), 0)
                    )
                else:
                    checks.append(
                        Check(f"{name}: gradient", distance(found[1], exact[1]), distance(plain[1], exact[1]))
                    )
                    checks.append(
                        Check(f"{name}: loss", distance(found[0], exact[0]), 1e-5 + distance(plain[0], exact[0]))
                    )
    return checks


def _loss_and_gradient(ce_N: Tensor, leaf_ND: Tensor, weight_N: Tensor) -> tuple[Tensor, Tensor]:
    loss = (ce_N * weight_N.to(ce_N.dtype)).sum() / weight_N.sum()
    loss.backward()
    assert leaf_ND.grad is not None
    return loss.detach(), leaf_ND.grad


def rows(num_tokens: int, num_anchors: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """document_RT, position_RT and anchor_RA of two rows: several documents, padding, invalid anchors."""
    lengths = [[num_tokens // 2, num_tokens // 3, num_tokens - num_tokens // 2 - num_tokens // 3], [num_tokens - 37]]
    document_RT = torch.full((2, num_tokens), -1)
    position_RT = torch.zeros(2, num_tokens, dtype=torch.long)
    for row, parts in enumerate(lengths):
        start = 0
        for number, length in enumerate(parts):
            document_RT[row, start : start + length] = number
            position_RT[row, start : start + length] = torch.arange(length)
            start += length
    anchor_RA = torch.stack([torch.randperm(num_tokens - 40)[:num_anchors].sort().values for _ in range(2)])
    anchor_RA[1, -3:] = -1
    return document_RT.to(device), position_RT.to(device), anchor_RA.to(device)


def check_masks(device: torch.device) -> list[Check]:
    """Tiles that differ from create_block_mask's on the predicate."""
    checks = []
    cases = [(512, 40, 16, None, False), (512, 40, 16, 100, True), (1000, 33, 16, 64, False), (640, 50, 10, None, True)]
    for num_tokens, num_anchors, size, window, causal in cases:
        document_RT, position_RT, anchor_RA = rows(num_tokens, num_anchors, device)
        options = {"block_size": size, "causal": causal, "window": window, "window_layers": (0,) if window else ()}
        shape = dataclasses.replace(presets()["tiny"], **options)
        seen_RQK = visibility(document_RT, position_RT, anchor_RA, size, window=window, causal=causal)

        def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor, seen_RQK: Tensor = seen_RQK) -> Tensor:
            return seen_RQK[row, query, key]

        expected = create_block_mask(sees, 2, None, *seen_RQK.shape[1:], device=str(device))
        found = block_mask(shape, position_RT, anchor_RA, window)
        names = ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks")
        differing = sum(int((vars(found)[name] != vars(expected)[name]).sum()) for name in names)
        differing += int((found.to_dense() != expected.to_dense()).sum())
        checks.append(Check(f"mask T {num_tokens}, L {size}, window {window}, causal {causal}", float(differing), 0.0))
    return checks


def check_stack(device: torch.device) -> list[Check]:
    """Outputs and gradients of the stack as it runs: float32 against plain SDPA, bfloat16 against float64."""
    checks = []
    wide = {"hidden_size": 256, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64, "intermediate_size": 512}
    # One layer with a window and one without.
    shape = dataclasses.replace(presets()["tiny"], **wide, window=64, window_layers=(0,))
    exact = _run_stack(shape, device, torch.float64, "nothing")
    hows: tuple[How, ...] = ("kernels", "layer")
    for dtype, how in itertools.product((torch.float32, torch.bfloat16), hows):
        plain = _run_stack(shape, device, dtype, "nothing")
        found = _run_stack(shape, device, dtype, how)
        limits = [1e-5] * len(plain)
        if dtype == torch.bfloat16:
            limits = [1.05 * distance(mine, its) for mine, its in zip(plain, exact, strict=True)]
        reference = plain if dtype == torch.float32 else exact
        far = [distance(mine, its) for mine, its in zip(found, reference, strict=True)]
        name = f"stack by {how}, {str(dtype)[6:]}"
        checks.append(Check(f"{name}: output", far[0], limits[0]))
        worst = max(range(1, len(far)), key=lambda i: far[i] / limits[i])
        checks.append(Check(f"{name}: worst gradient", far[worst], limits[worst]))
    return checks


def _run_stack(shape: DrafterShape, device: torch.device, dtype: torch.dtype, how: How) -> list[Tensor]:
    torch.manual_seed(1)
    drafter = Drafter(shape)
    drafter.initialise(torch.Generator().manual_seed(1))
    drafter = drafter.to(torch.bfloat16).to(device, dtype)
    document_RT, position_RT, anchor_RA = rows(512, 32, device)
    generator = torch.Generator().manual_seed(2)
    features_RTC = torch.randn(2, 512, drafter.fc.in_features, generator=generator).bfloat16().to(device, dtype)
    first_RAD = torch.randn(2, 33, shape.hidden_size, generator=generator).bfloat16().to(device, dtype)
    upstream_RND = torch.randn(2, 480, shape.hidden_size, generator=generator).bfloat16().to(device, dtype)
    run = compile_drafter(drafter, how)
    make_attend = choose_make_attend("own" if how != "nothing" and device.type == "cuda" else "sdpa", how)
    attend = make_attend(shape, document_RT, position_RT, anchor_RA)
    block_position_RQ = block_positions(position_RT, anchor_RA, shape.block_size)
    hidden_RND = run(features_RTC, position_RT, first_RAD, block_position_RQ, attend)
    (hidden_RND * upstream_RND).sum().backward()
    return [hidden_RND.detach(), *(weight.grad for weight in drafter.parameters() if weight.grad is not None)]
