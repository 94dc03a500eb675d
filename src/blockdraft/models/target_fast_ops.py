"""What the fast pass of a target does between its matrix products, in plain torch: the reference for the fused kernels.

N rows of a target batch (B documents of S tokens), D width, K inputs of a product, M outputs of a product, W columns of
a fused product, H heads, E width of a head, J inner width, R rotated width of a head.

Each operation takes the output of one product and makes the input of the next. The fused kernels
(models/target_fast_triton.py) do the same in one pass over memory each; everything is computed in float32 inside.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
TAPS = 4
"""Of a Gated-DeltaNet layer's convolution."""
L2_EPS = 1e-6
"""Under the root when queries and keys of a Gated-DeltaNet layer are normalized."""


class Norm(NamedTuple):
    """An RMS norm by its numbers: `weight_D` float32, with the one of the 1 + w convention in it."""

    weight_D: Tensor
    eps: float


class Columns(NamedTuple):
    """Where heads lie in a fused product: head h begins at offset + h // group * stride + h % group * dim."""

    num_heads: int
    dim: int
    offset: int
    group: int
    stride: int


class Rows(NamedTuple):
    """Inputs of a product: as they are, or in float8 with one scale a row."""

    value_NK: Tensor
    scale_N1: Tensor | None


class Weight(NamedTuple):
    """Weights of a product: as they are, or in float8 with one scale an output."""

    value_MK: Tensor
    bias_M: Tensor | None
    scale_M: Tensor | None


class Ops(Protocol):
    """The operations of a fast pass; `quantize` asks for rows in float8."""

    def add_norm(self, hidden_ND: Tensor, delta_ND: Tensor | None, norm: Norm, quantize: bool) -> tuple[Tensor, Rows]:
        """The sum, in the type of `hidden_ND`, and its norm."""

    def swiglu(self, gate_up_NJ: Tensor, quantize: bool) -> Rows:
        """silu(first half) * second half."""

    def conv(
        self, mixed_NW: Tensor, weight_CT: Tensor, parts: tuple[Columns, ...], length: int, normalize: bool
    ) -> tuple[Tensor, ...]:
        """Causal depthwise convolution over each document, silu, and an L2 norm of each head if asked.

        Of parts of equal sizes, whose channels lie one after the other in the weights: [N, H, E] each.
        """

    def decay(
        self, mixed_NW: Tensor, beta: Columns, alpha: Columns, a_log_H: Tensor, dt_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log decay and write strength of a Gated-DeltaNet layer, float32 [N, H]."""

    def delta_rule(self, q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, g_BSH: Tensor, beta_BSH: Tensor) -> Tensor:
        """The gated delta rule over each document: [B, S, H, E]."""

    def gated_norm(self, core_NHE: Tensor, mixed_NW: Tensor, gate: Columns, norm: Norm, quantize: bool) -> Rows:
        """norm(core) * silu(gate), heads side by side."""

    def rotate(self, mixed_NW: Tensor, columns: Columns, norm: Norm | None, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """Norm of each head and rotation of its first R entries: [N, H, E]."""

    def attend(self, q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, scale: float) -> Tensor:
        """Causal attention: [B, S, H, E]."""

    def gate_heads(self, attended_NHE: Tensor, mixed_NW: Tensor, gate: Columns | None, quantize: bool) -> Rows:
        """Heads side by side, times sigmoid(gate) where there is one."""

    def product(self, rows: Rows, weight: Weight) -> Tensor:
        """rows @ weight.T + bias, in the target's type."""

    def product_onto(self, stream_ND: Tensor, rows: Rows, weight: Weight) -> Tensor | None:
        """The product, or None where it has been added to the stream in place."""


class TorchOps:
    """The reference, for CPUs and for tests."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def add_norm(self, hidden_ND: Tensor, delta_ND: Tensor | None, norm: Norm, quantize: bool) -> tuple[Tensor, Rows]:
        """As Ops."""
        total_ND = hidden_ND if delta_ND is None else hidden_ND + delta_ND
        return total_ND, self._rows(_normed(total_ND.float(), norm), quantize)

    def swiglu(self, gate_up_NJ: Tensor, quantize: bool) -> Rows:
        """As Ops."""
        gate_NJ, up_NJ = gate_up_NJ.float().chunk(2, dim=-1)
        return self._rows(nn.functional.silu(gate_NJ) * up_NJ, quantize)

    def conv(
        self, mixed_NW: Tensor, weight_CT: Tensor, parts: tuple[Columns, ...], length: int, normalize: bool
    ) -> tuple[Tensor, ...]:
        """As Ops."""
        weights = weight_CT.float().chunk(len(parts))
        found = (self._conv(mixed_NW, weight, part, length) for weight, part in zip(weights, parts, strict=True))
        if normalize:
            found = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + L2_EPS) for part in found)
        return tuple(part.to(self.dtype) for part in found)

    def _conv(self, mixed_NW: Tensor, weight_CT: Tensor, columns: Columns, length: int) -> Tensor:
        value_BSC = pick(mixed_NW, columns).float().reshape(-1, length, columns.num_heads * columns.dim)
        padded_BSC = nn.functional.pad(value_BSC, (0, 0, TAPS - 1, 0))
        total_BSC = torch.zeros_like(value_BSC)
        for tap in range(TAPS):
            total_BSC += padded_BSC[:, tap : tap + length] * weight_CT[:, tap]
        return nn.functional.silu(total_BSC).reshape(-1, columns.num_heads, columns.dim)

    def decay(
        self, mixed_NW: Tensor, beta: Columns, alpha: Columns, a_log_H: Tensor, dt_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As Ops."""
        alpha_NH = pick(mixed_NW, alpha).float().squeeze(-1)
        g_NH = -a_log_H.exp() * nn.functional.softplus(alpha_NH + dt_H)
        return g_NH, pick(mixed_NW, beta).float().squeeze(-1).sigmoid()

    def delta_rule(self, q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, g_BSH: Tensor, beta_BSH: Tensor) -> Tensor:
        """As Ops, one token after the other."""
        repeat = v_BSHE.shape[2] // q_BSHE.shape[2]
        q_BSHE, k_BSHE = (part.float().repeat_interleave(repeat, dim=2) for part in (q_BSHE, k_BSHE))
        q_BSHE, value_BSHE = q_BSHE * q_BSHE.shape[-1] ** -0.5, v_BSHE.float()
        state_BHEE = value_BSHE.new_zeros(*v_BSHE.shape[:1], v_BSHE.shape[2], q_BSHE.shape[-1], v_BSHE.shape[-1])
        out = []
        for step in range(q_BSHE.shape[1]):
            q, k, value = q_BSHE[:, step], k_BSHE[:, step], value_BSHE[:, step]
            state_BHEE = state_BHEE * g_BSH[:, step, :, None, None].exp()
            written = (value - (state_BHEE * k[..., None]).sum(-2)) * beta_BSH[:, step, :, None]
            state_BHEE = state_BHEE + k[..., None] * written[..., None, :]
            out.append((state_BHEE * q[..., None]).sum(-2))
        return torch.stack(out, dim=1).to(v_BSHE.dtype)

    def gated_norm(self, core_NHE: Tensor, mixed_NW: Tensor, gate: Columns, norm: Norm, quantize: bool) -> Rows:
        """As Ops."""
        gated_NHE = _normed(core_NHE.float(), norm) * nn.functional.silu(pick(mixed_NW, gate).float())
        return self._rows(gated_NHE.flatten(1), quantize)

    def rotate(self, mixed_NW: Tensor, columns: Columns, norm: Norm | None, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """As Ops."""
        length, rotated = cos_SR.shape
        head_NHE = pick(mixed_NW, columns).float()
        if norm is not None:
            head_NHE = _normed(head_NHE, norm)
        turned_BSHR = head_NHE[..., :rotated].reshape(-1, length, columns.num_heads, rotated)
        left, right = turned_BSHR.chunk(2, dim=-1)
        turned_BSHR = turned_BSHR * cos_SR[:, None] + torch.cat([-right, left], dim=-1) * sin_SR[:, None]
        turned_NHR = turned_BSHR.reshape(-1, columns.num_heads, rotated)
        return torch.cat([turned_NHR, head_NHE[..., rotated:]], dim=-1).to(mixed_NW.dtype)

    def attend(self, q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, scale: float) -> Tensor:
        """As Ops."""
        return attend(q_BSHE, k_BSHE, v_BSHE, scale)

    def gate_heads(self, attended_NHE: Tensor, mixed_NW: Tensor, gate: Columns | None, quantize: bool) -> Rows:
        """As Ops."""
        if gate is None:
            return self._rows(attended_NHE.flatten(1), quantize)
        return self._rows((attended_NHE.float() * pick(mixed_NW, gate).float().sigmoid()).flatten(1), quantize)

    def product(self, rows: Rows, weight: Weight) -> Tensor:
        """As Ops; float8 rows and weights are multiplied as the numbers that they stand for."""
        if rows.scale_N1 is None or weight.scale_M is None:
            return nn.functional.linear(rows.value_NK, weight.value_MK, weight.bias_M)
        value_NK = rows.value_NK.float() * rows.scale_N1
        value_MK = weight.value_MK.float() * weight.scale_M[:, None]
        bias_M = None if weight.bias_M is None else weight.bias_M.float()
        return nn.functional.linear(value_NK, value_MK, bias_M).to(self.dtype)

    def product_onto(self, stream_ND: Tensor, rows: Rows, weight: Weight) -> Tensor | None:
        """As Ops."""
        return product_onto(self, stream_ND, rows, weight)

    def _rows(self, value_NK: Tensor, quantize: bool) -> Rows:
        return quantized(value_NK) if quantize else Rows(value_NK.to(self.dtype), None)


def quantized(value_NK: Tensor) -> Rows:
    """Float8 with one scale a row: the largest entry becomes 448."""
    value_NK = value_NK.float()
    scale_N1 = value_NK.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FLOAT8_MAX
    return Rows((value_NK / scale_N1).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8), scale_N1)


def pick(mixed_NW: Tensor, columns: Columns) -> Tensor:
    """The heads' own columns of a fused product, [N, H, E]; a view where groups lie side by side."""
    groups = columns.num_heads // columns.group
    shape = (mixed_NW.shape[0], groups, columns.group, columns.dim)
    strides = (mixed_NW.stride(0), columns.stride, columns.dim, 1)
    return mixed_NW.as_strided(shape, strides, mixed_NW.storage_offset() + columns.offset).flatten(1, 2)


def attend(q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, scale: float) -> Tensor:
    """Causal attention without a mask, grouped heads included: [B, S, H, E]."""
    out_BHSE = nn.functional.scaled_dot_product_attention(
        q_BSHE.transpose(1, 2),
        k_BSHE.transpose(1, 2),
        v_BSHE.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=q_BSHE.shape[2] != k_BSHE.shape[2],
    )
    return out_BHSE.transpose(1, 2)


def product_onto(ops: Ops, stream_ND: Tensor, rows: Rows, weight: Weight) -> Tensor | None:
    """A product without a bias and not in float8 adds itself to the stream, which saves two passes over it."""
    if weight.scale_M is None and weight.bias_M is None:
        stream_ND.addmm_(rows.value_NK, weight.value_MK.t())
        return None
    return ops.product(rows, weight)


def _normed(value: Tensor, norm: Norm) -> Tensor:
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + norm.eps) * norm.weight_D
