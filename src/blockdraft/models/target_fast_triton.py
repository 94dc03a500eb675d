"""The fused kernels of a target's fast pass: one pass over memory between two matrix products.

Letters as in models/target_fast_ops.py, which is the reference. Widths are compile-time constants and row counts are
not specialized, so one target compiles each kernel once, whatever its batches are.
"""

# Triton reads the annotations of a kernel's parameters as they stand: tl.constexpr, no strings.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
import torch
import triton
import triton.language as tl
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import Tensor

from blockdraft.models.target_fast_ops import FLOAT8, L2_EPS, Columns, Norm, Rows, Weight, attend, product_onto

FLOAT8_MAX: tl.constexpr = tl.constexpr(448.0)


@triton.jit
def _store_row(out_ptr, scale_ptr, row, value, index, mask, K: tl.constexpr, QUANTIZE: tl.constexpr):
    out_ptr += row * K
    if QUANTIZE:
        scale = tl.maximum(tl.max(tl.abs(tl.where(mask, value, 0.0))), 1e-12) / 448.0
        tl.store(scale_ptr + row, scale)
        value = tl.minimum(tl.maximum(value / scale, -448.0), 448.0)
    tl.store(out_ptr + index, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add_norm(
    hidden_ptr, delta_ptr, weight_ptr, total_ptr, out_ptr, scale_ptr, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    mask = index < D
    value = tl.load(hidden_ptr + row * D + index, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta_ptr + row * D + index, mask=mask, other=0.0).to(tl.float32)
        # The norm reads what the next layer will read: the rounded sum.
        rounded = value.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * D + index, rounded, mask=mask)
        value = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value) / D + eps)
    value = value * rstd * tl.load(weight_ptr + index, mask=mask, other=0.0)
    _store_row(out_ptr, scale_ptr, row, value, index, mask, D, QUANTIZE)


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, J: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index < J
    gate = tl.load(gate_up_ptr + row * 2 * J + index, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * J + J + index, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * J + index, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_times(gate_ptr, index, mask, J: tl.constexpr):
    gate = tl.load(gate_ptr + index, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + J + index, mask=mask, other=0.0).to(tl.float32)
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _swiglu_float8(gate_up_ptr, out_ptr, scale_ptr, J: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr):
    # A row stays in registers between its maximum and its rounding: its largest power of two, and the rest.
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD)
    tail = HEAD + tl.arange(0, TAIL)
    value = _silu_times(gate_up_ptr + row * 2 * J, head, head < J, J)
    rest = _silu_times(gate_up_ptr + row * 2 * J, tail, tail < J, J)
    scale = tl.maximum(tl.maximum(tl.max(tl.abs(value)), tl.max(tl.abs(rest))), 1e-12) / 448.0
    tl.store(scale_ptr + row, scale)
    out_ptr += row * J
    value = tl.minimum(tl.maximum(value / scale, -448.0), 448.0)
    rest = tl.minimum(tl.maximum(rest / scale, -448.0), 448.0)
    tl.store(out_ptr + head, value.to(out_ptr.dtype.element_ty), mask=head < J)
    tl.store(out_ptr + tail, rest.to(out_ptr.dtype.element_ty), mask=tail < J)


@triton.jit(do_not_specialize=["length"])
def _conv(
    mixed_ptr, weight_ptr, out_ptr, length, l2_eps,
    W: tl.constexpr, H: tl.constexpr, E: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    # Down the rows of some heads, with the last three rows in registers: each row is read once.
    first = tl.program_id(0) * ROWS
    document = tl.program_id(2).to(tl.int64)
    index = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    entry = tl.arange(0, BLOCK_E)[None, :]
    part, head = index // H, index % H
    mask = (index < PARTS * H) & (entry < E)
    column = OFFSET + part * SHIFT + head // GROUP * STRIDE + head % GROUP * E + entry
    base_ptr = mixed_ptr + document * length * W + column
    taps_ptr = weight_ptr + (index * E + entry) * 4
    tap_0 = tl.load(taps_ptr, mask=mask, other=0.0).to(tl.float32)
    tap_1 = tl.load(taps_ptr + 1, mask=mask, other=0.0).to(tl.float32)
    tap_2 = tl.load(taps_ptr + 2, mask=mask, other=0.0).to(tl.float32)
    tap_3 = tl.load(taps_ptr + 3, mask=mask, other=0.0).to(tl.float32)
    before = mask & (first > 0)
    row_0 = tl.load(base_ptr + (first - 3).to(tl.int64) * W, mask=before, other=0.0).to(tl.float32)
    row_1 = tl.load(base_ptr + (first - 2).to(tl.int64) * W, mask=before, other=0.0).to(tl.float32)
    row_2 = tl.load(base_ptr + (first - 1).to(tl.int64) * W, mask=before, other=0.0).to(tl.float32)
    row_3 = tl.load(base_ptr + first.to(tl.int64) * W, mask=mask & (first < length), other=0.0).to(tl.float32)
    # In terms of H and E, which are known to be multiples of what one store takes.
    out_ptr += (((part * tl.num_programs(2) + document) * length) * H + head) * E + entry
    for turn in tl.static_range(ROWS):
        step = (first + turn).to(tl.int64)
        # Asked for before the store, which a later load could not overtake.
        is_next = mask & (step + 1 < length) & (turn + 1 < ROWS)
        ahead = tl.load(base_ptr + (step + 1) * W, mask=is_next, other=0.0)
        total = row_0 * tap_0 + row_1 * tap_1 + row_2 * tap_2 + row_3 * tap_3
        total = total * tl.sigmoid(total)
        if NORMALIZE:
            total = total * tl.rsqrt(tl.sum(total * total, axis=1) + l2_eps)[:, None]
        tl.store(out_ptr + step * H * E, total.to(out_ptr.dtype.element_ty), mask=mask & (step < length))
        row_0, row_1, row_2, row_3 = row_1, row_2, row_3, ahead.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _decay(
    mixed_ptr, a_log_ptr, dt_ptr, g_ptr, beta_ptr, num_rows,
    W: tl.constexpr, H: tl.constexpr, B_OFFSET: tl.constexpr, B_GROUP: tl.constexpr, B_STRIDE: tl.constexpr,
    A_OFFSET: tl.constexpr, A_GROUP: tl.constexpr, A_STRIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    head = tl.arange(0, BLOCK_H)
    mask = (row[:, None] < num_rows) & (head[None, :] < H)
    b_column = B_OFFSET + head // B_GROUP * B_STRIDE + head % B_GROUP
    a_column = A_OFFSET + head // A_GROUP * A_STRIDE + head % A_GROUP
    beta = tl.load(mixed_ptr + row[:, None] * W + b_column[None, :], mask=mask, other=0.0).to(tl.float32)
    alpha = tl.load(mixed_ptr + row[:, None] * W + a_column[None, :], mask=mask, other=0.0).to(tl.float32)
    alpha += tl.load(dt_ptr + head, mask=head < H, other=0.0)[None, :]
    # As torch's softplus: the identity above 20.
    soft = tl.where(alpha > 20.0, alpha, tl.log(1.0 + tl.exp(tl.minimum(alpha, 20.0))))
    g = -tl.exp(tl.load(a_log_ptr + head, mask=head < H, other=0.0))[None, :] * soft
    place = row[:, None] * H + head[None, :]
    tl.store(g_ptr + place, g, mask=mask)
    tl.store(beta_ptr + place, tl.sigmoid(beta), mask=mask)


@triton.jit
def _gated_norm(
    core_ptr, mixed_ptr, weight_ptr, out_ptr, scale_ptr, eps,
    W: tl.constexpr, H: tl.constexpr, E: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H)[:, None]
    entry = tl.arange(0, BLOCK_E)[None, :]
    mask = (head < H) & (entry < E)
    index = head * E + entry
    core = tl.load(core_ptr + row * H * E + index, mask=mask, other=0.0).to(tl.float32)
    column = OFFSET + head // GROUP * STRIDE + head % GROUP * E + entry
    gate = tl.load(mixed_ptr + row * W + column, mask=mask, other=0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(core * core, axis=1) / E + eps)[:, None]
    weight = tl.load(weight_ptr + entry, mask=entry < E, other=0.0)
    value = core * rstd * weight * gate * tl.sigmoid(gate)
    _store_row(out_ptr, scale_ptr, row, value, index, mask, H * E, QUANTIZE)


@triton.jit(do_not_specialize=["length"])
def _rotate(
    mixed_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, length, eps,
    W: tl.constexpr, H: tl.constexpr, E: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr, R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = row % length
    head = tl.arange(0, BLOCK_H)[:, None]
    entry = tl.arange(0, BLOCK_E)[None, :]
    mask = (head < H) & (entry < E)
    partner = tl.where(entry < R // 2, entry + R // 2, entry - R // 2)
    turns = entry < R
    base = row * W + OFFSET + head // GROUP * STRIDE + head % GROUP * E
    own = tl.load(mixed_ptr + base + entry, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(mixed_ptr + base + partner, mask=mask & turns, other=0.0).to(tl.float32)
    if HAS_NORM:
        rstd = tl.rsqrt(tl.sum(own * own, axis=1) / E + eps)[:, None]
        own = own * rstd * tl.load(weight_ptr + entry, mask=entry < E, other=0.0)
        other = other * rstd * tl.load(weight_ptr + partner, mask=turns, other=0.0)
    cos = tl.load(cos_ptr + step * R + entry, mask=turns, other=1.0)
    sin = tl.load(sin_ptr + step * R + entry, mask=turns, other=0.0)
    value = own * cos + tl.where(entry < R // 2, -other, other) * sin
    tl.store(out_ptr + row * H * E + head * E + entry, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gate_heads(
    attended_ptr, mixed_ptr, out_ptr, scale_ptr,
    W: tl.constexpr, H: tl.constexpr, E: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr,
    STRIDE: tl.constexpr, BLOCK: tl.constexpr, HAS_GATE: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    mask = index < H * E
    value = tl.load(attended_ptr + row * H * E + index, mask=mask, other=0.0).to(tl.float32)
    if HAS_GATE:
        head = index // E
        column = OFFSET + head // GROUP * STRIDE + head % GROUP * E + index % E
        value = value * tl.sigmoid(tl.load(mixed_ptr + row * W + column, mask=mask, other=0.0).to(tl.float32))
    _store_row(out_ptr, scale_ptr, row, value, index, mask, H * E, QUANTIZE)


class TritonOps:
    """The fused operations, for GPUs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def add_norm(self, hidden_ND: Tensor, delta_ND: Tensor | None, norm: Norm, quantize: bool) -> tuple[Tensor, Rows]:
        """As Ops."""
        num_rows, width = hidden_ND.shape
        total_ND = hidden_ND if delta_ND is None else torch.empty_like(hidden_ND)
        rows = self._new_rows(num_rows, width, hidden_ND, quantize)
        _add_norm[(num_rows,)](
            hidden_ND, hidden_ND if delta_ND is None else delta_ND, norm.weight_D, total_ND, rows.value_NK,
            rows.value_NK if rows.scale_N1 is None else rows.scale_N1, norm.eps,
            D=width, BLOCK=triton.next_power_of_2(width), HAS_DELTA=delta_ND is not None, QUANTIZE=quantize,
            num_warps=_warps(width),
        )  # fmt: skip
        return total_ND, rows

    def swiglu(self, gate_up_NJ: Tensor, quantize: bool) -> Rows:
        """As Ops."""
        num_rows, width = gate_up_NJ.shape[0], gate_up_NJ.shape[1] // 2
        rows = self._new_rows(num_rows, width, gate_up_NJ, quantize)
        block = min(2048, triton.next_power_of_2(width))
        if rows.scale_N1 is None:
            _swiglu[(num_rows, triton.cdiv(width, block))](gate_up_NJ, rows.value_NK, J=width, BLOCK=block)
        else:
            head = triton.next_power_of_2(width + 1) // 2
            _swiglu_float8[(num_rows,)](
                gate_up_NJ, rows.value_NK, rows.scale_N1,
                J=width, HEAD=head, TAIL=triton.next_power_of_2(max(1, width - head)), num_warps=_warps(width),
            )  # fmt: skip
        return rows

    def conv(
        self, mixed_NW: Tensor, weight_CT: Tensor, parts: tuple[Columns, ...], length: int, normalize: bool
    ) -> tuple[Tensor, ...]:
        """As Ops."""
        one, num_rows = parts[0], mixed_NW.shape[0]
        out_PNHE = torch.empty(len(parts), num_rows, one.num_heads, one.dim, dtype=self.dtype, device=mixed_NW.device)
        all_heads = len(parts) * one.num_heads
        heads, rows = min(8, triton.next_power_of_2(all_heads)), 16
        _conv[(triton.cdiv(length, rows), triton.cdiv(all_heads, heads), num_rows // length)](
            mixed_NW, weight_CT, out_PNHE, length, L2_EPS,
            W=mixed_NW.shape[1], H=one.num_heads, E=one.dim, OFFSET=one.offset, GROUP=one.group, STRIDE=one.stride,
            PARTS=len(parts), SHIFT=parts[-1].offset - one.offset, ROWS=rows, BLOCK_H=heads,
            BLOCK_E=triton.next_power_of_2(one.dim), NORMALIZE=normalize,
        )  # fmt: skip
        return tuple(out_PNHE)

    def decay(
        self, mixed_NW: Tensor, beta: Columns, alpha: Columns, a_log_H: Tensor, dt_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As Ops."""
        num_rows, heads = mixed_NW.shape[0], beta.num_heads
        g_NH, beta_NH = (torch.empty(num_rows, heads, dtype=torch.float32, device=mixed_NW.device) for _ in range(2))
        block = 16
        _decay[(triton.cdiv(num_rows, block),)](
            mixed_NW, a_log_H, dt_H, g_NH, beta_NH, num_rows,
            W=mixed_NW.shape[1], H=heads, B_OFFSET=beta.offset, B_GROUP=beta.group, B_STRIDE=beta.stride,
            A_OFFSET=alpha.offset, A_GROUP=alpha.group, A_STRIDE=alpha.stride,
            ROWS=block, BLOCK_H=triton.next_power_of_2(heads),
        )  # fmt: skip
        return g_NH, beta_NH

    def delta_rule(self, q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, g_BSH: Tensor, beta_BSH: Tensor) -> Tensor:
        """As Ops; key heads are shared by value heads without a copy."""
        out_BSHE: Tensor = chunk_gated_delta_rule(q_BSHE, k_BSHE, v_BSHE, g_BSH, beta_BSH)[0]
        return out_BSHE

    def gated_norm(self, core_NHE: Tensor, mixed_NW: Tensor, gate: Columns, norm: Norm, quantize: bool) -> Rows:
        """As Ops."""
        num_rows, heads, dim = core_NHE.shape
        rows = self._new_rows(num_rows, heads * dim, core_NHE, quantize)
        _gated_norm[(num_rows,)](
            core_NHE, mixed_NW, norm.weight_D, rows.value_NK,
            rows.value_NK if rows.scale_N1 is None else rows.scale_N1, norm.eps,
            W=mixed_NW.shape[1], H=heads, E=dim, OFFSET=gate.offset, GROUP=gate.group, STRIDE=gate.stride,
            BLOCK_H=triton.next_power_of_2(heads), BLOCK_E=triton.next_power_of_2(dim), QUANTIZE=quantize,
            num_warps=_warps(heads * dim),
        )  # fmt: skip
        return rows

    def rotate(self, mixed_NW: Tensor, columns: Columns, norm: Norm | None, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """As Ops."""
        num_rows, heads, dim = mixed_NW.shape[0], columns.num_heads, columns.dim
        out_NHE = torch.empty(num_rows, heads, dim, dtype=self.dtype, device=mixed_NW.device)
        _rotate[(num_rows,)](
            mixed_NW, cos_SR if norm is None else norm.weight_D, cos_SR, sin_SR, out_NHE, cos_SR.shape[0],
            0.0 if norm is None else norm.eps,
            W=mixed_NW.shape[1], H=heads, E=dim, OFFSET=columns.offset, GROUP=columns.group, STRIDE=columns.stride,
            R=cos_SR.shape[1], BLOCK_H=triton.next_power_of_2(heads), BLOCK_E=triton.next_power_of_2(dim),
            HAS_NORM=norm is not None, num_warps=_warps(heads * dim),
        )  # fmt: skip
        return out_NHE

    def attend(self, q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, scale: float) -> Tensor:
        """As Ops."""
        return attend(q_BSHE, k_BSHE, v_BSHE, scale)

    def gate_heads(self, attended_NHE: Tensor, mixed_NW: Tensor, gate: Columns | None, quantize: bool) -> Rows:
        """As Ops."""
        if gate is None and not quantize:
            return Rows(attended_NHE.flatten(1), None)
        num_rows, heads, dim = attended_NHE.shape
        attended_NHE = attended_NHE.contiguous()
        rows = self._new_rows(num_rows, heads * dim, attended_NHE, quantize)
        place = Columns(heads, dim, 0, 1, dim) if gate is None else gate
        _gate_heads[(num_rows,)](
            attended_NHE, mixed_NW, rows.value_NK, rows.value_NK if rows.scale_N1 is None else rows.scale_N1,
            W=mixed_NW.shape[1], H=heads, E=dim, OFFSET=place.offset, GROUP=place.group, STRIDE=place.stride,
            BLOCK=triton.next_power_of_2(heads * dim), HAS_GATE=gate is not None, QUANTIZE=quantize,
            num_warps=_warps(heads * dim),
        )  # fmt: skip
        return rows

    def product(self, rows: Rows, weight: Weight) -> Tensor:
        """As Ops."""
        if rows.scale_N1 is None or weight.scale_M is None:
            return torch.nn.functional.linear(rows.value_NK, weight.value_MK, weight.bias_M)
        return torch._scaled_mm(
            rows.value_NK, weight.value_MK.t(), rows.scale_N1, weight.scale_M[None],
            bias=weight.bias_M, out_dtype=self.dtype, use_fast_accum=True,
        )  # fmt: skip

    def product_onto(self, stream_ND: Tensor, rows: Rows, weight: Weight) -> Tensor | None:
        """As Ops."""
        return product_onto(self, stream_ND, rows, weight)

    def _new_rows(self, num_rows: int, width: int, like: Tensor, quantize: bool) -> Rows:
        dtype = FLOAT8 if quantize else self.dtype
        value_NK = torch.empty(num_rows, width, dtype=dtype, device=like.device)
        scale_N1 = torch.empty(num_rows, 1, dtype=torch.float32, device=like.device) if quantize else None
        return Rows(value_NK, scale_N1)


def _warps(width: int) -> int:
    return 16 if width > 8192 else 8 if width >= 4096 else 4 if width >= 1024 else 2
