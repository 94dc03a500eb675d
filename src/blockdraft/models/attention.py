"""Attention backends of the drafter in training: masked SDPA (reference, CPU) and compiled flex_attention (GPU).

R rows, T context tokens, Q block tokens, K = T + Q keys, H query heads, G key/value heads, E head width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from blockdraft.models.block_mask import block_mask
from blockdraft.models.blocks import visibility
from blockdraft.models.compiled import compile_alone
from blockdraft.models.drafter import Attend, DrafterShape, asking_slots, drop_anchors


def sdpa_attend(shape: DrafterShape, document_RT: Tensor, position_RT: Tensor, anchor_RA: Tensor) -> Attend:
    """The reference: one dense boolean mask a layer kind, [R, 1, Q, K]."""

    def dense(window: int | None) -> Tensor:
        seen = visibility(
            document_RT, position_RT, anchor_RA, shape.block_size, window=window, causal=shape.is_causal(window)
        )
        return seen[:, None]

    full = dense(None) if len(shape.window_layers) < shape.num_layers else None
    windowed = dense(shape.window) if shape.window_layers else None

    def attend(
        layer: int,
        query_RHQE: Tensor,
        context_key_RGTE: Tensor,
        context_value_RGTE: Tensor,
        block_key_RGQE: Tensor,
        block_value_RGQE: Tensor,
    ) -> Tensor:
        mask = windowed if layer in shape.window_layers else full
        assert mask is not None
        if asking_slots(query_RHQE, block_key_RGQE, shape.block_size) < shape.block_size:
            mask = drop_anchors(mask, shape.block_size, dim=2)
        return torch.nn.functional.scaled_dot_product_attention(
            query_RHQE,
            torch.cat([context_key_RGTE, block_key_RGQE], dim=2),
            torch.cat([context_value_RGTE, block_value_RGQE], dim=2),
            attn_mask=mask,
            enable_gqa=True,
        )

    return attend


def fits_kernels(head_dim: int) -> bool:
    """Whether the program's own attention kernels take heads of that width; flex_attention pads any other."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


def compile_flex() -> Callable[..., Any]:
    """flex_attention compiled for fixed shapes. One per worker: call it first in the thread that will use it."""
    return compile_alone(flex_attention)


def bare_flex_attend(
    shape: DrafterShape,
    document_RT: Tensor,
    position_RT: Tensor,
    anchor_RA: Tensor,
    options: dict[str, int] | None = None,
) -> Attend:
    """Block-sparse attention for code that is compiled as a whole: on its own it would materialise the scores.

    `options`: tile sizes (models/tiles.py); None leaves them to torch.
    """
    return flex_attend(shape, document_RT, position_RT, anchor_RA, flex_attention, options)


def flex_attend(
    shape: DrafterShape,
    document_RT: Tensor,
    position_RT: Tensor,
    anchor_RA: Tensor,
    compiled: Callable[..., Any],
    options: dict[str, int] | None = None,
) -> Attend:
    """Block-sparse attention through `compiled`: a compiled flex_attention, or the bare one inside compiled code.

    `options`: flex_attention's kernel_options.
    """
    full = block_mask(shape, position_RT, anchor_RA, None)
    windowed = block_mask(shape, position_RT, anchor_RA, shape.window) if shape.window_layers else full
    # Of the last layer, where slot 0 does not ask.
    last = shape.window if shape.num_layers - 1 in shape.window_layers else None
    drafted = block_mask(shape, position_RT, anchor_RA, last, shape.block_size - 1)

    def attend(
        layer: int,
        query_RHQE: Tensor,
        context_key_RGTE: Tensor,
        context_value_RGTE: Tensor,
        block_key_RGQE: Tensor,
        block_value_RGQE: Tensor,
    ) -> Tensor:
        mask = windowed if layer in shape.window_layers else full
        if asking_slots(query_RHQE, block_key_RGQE, shape.block_size) < shape.block_size:
            assert layer == shape.num_layers - 1
            mask = drafted
        out: Tensor = compiled(
            query_RHQE,
            torch.cat([context_key_RGTE, block_key_RGQE], dim=2),
            torch.cat([context_value_RGTE, block_value_RGQE], dim=2),
            block_mask=mask,
            enable_gqa=True,
            kernel_options=options,
        )
        return out

    return attend
