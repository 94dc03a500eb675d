"""The kernels of a drafter layer's elementwise operations: one pass over memory between two matrix products.

Letters as in models/layer_ops.py. Widths and the block size are compile-time constants and row counts are not
specialized, so each kernel is compiled once for all lengths of row. What is summed over rows is kept in registers by a
program, written as one float32 line each, and added up by `reduce_kernel`: no atomics, so sums have a fixed order.
"""

# Triton reads the annotations of a kernel's parameters as they stand: tl.constexpr, no strings.
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def _read_row(row, num_anchors, L: tl.constexpr, FIRST: tl.constexpr, EXPAND: tl.constexpr, DROP: tl.constexpr):
    # The row that `row` is made of.
    if EXPAND:
        block, slot = row // (L - FIRST), row % (L - FIRST) + FIRST
        row = block // num_anchors * (num_anchors + 1) + tl.where(slot == 0, block % num_anchors, num_anchors)
    if DROP:
        row = row // (L - 1) * L + row % (L - 1) + 1
    return row


@triton.jit(do_not_specialize=["num_anchors"])
def add_norm_kernel(
    x_ptr, delta_ptr, weight_ptr, total_ptr, normed_ptr, rstd_ptr, num_anchors, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_DELTA: tl.constexpr, L: tl.constexpr, FIRST: tl.constexpr,
    EXPAND: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """A program makes one row."""
    row = tl.program_id(0)
    index = tl.arange(0, BLOCK)
    mask = index < D
    base = row.to(tl.int64) * D
    read = _read_row(row, num_anchors, L, FIRST, EXPAND, DROP).to(tl.int64) * D
    value = tl.load(x_ptr + read + index, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta_ptr + base + index, mask=mask, other=0.0).to(tl.float32)
        # The norm reads what later layers will read: the rounded sum.
        rounded = value.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + base + index, rounded, mask=mask)
        value = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(value * value) / D + eps)
    tl.store(rstd_ptr + row, rstd)
    value = value * rstd * tl.load(weight_ptr + index, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + base + index, value.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _norm_inputs(
    upstream_ptr, total_ptr, rstd_ptr, residual_ptr, row, index, mask,
    D: tl.constexpr, HAS_RESIDUAL: tl.constexpr, L: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    base = row.to(tl.int64) * D
    upstream = tl.load(upstream_ptr + base + index, mask=mask, other=0.0)
    total = tl.load(total_ptr + base + index, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + row)
    residual = rstd
    if HAS_RESIDUAL:
        if DROP:
            base = (row // L * (L - 1) + row % L - 1).to(tl.int64) * D
            mask = mask & (row % L > 0)
        residual = tl.load(residual_ptr + base + index, mask=mask, other=0.0)
    return upstream, total, rstd, residual


@triton.jit(do_not_specialize=["num_rows"])
def norm_backward_kernel(
    upstream_ptr, total_ptr, rstd_ptr, weight_ptr, residual_ptr, gradient_ptr, normed_ptr, part_ptr, num_rows,
    D: tl.constexpr, BLOCK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_NORMED: tl.constexpr, L: tl.constexpr,
    DROP: tl.constexpr,
):  # fmt: skip
    """A program takes every P-th row, and keeps its share of the weight's gradient."""
    index = tl.arange(0, BLOCK)
    mask = index < D
    weight = tl.load(weight_ptr + index, mask=mask, other=0.0)
    share = tl.zeros([BLOCK], tl.float32)
    first, step = tl.program_id(0), tl.num_programs(0)
    upstream, total, rstd, residual = _norm_inputs(
        upstream_ptr, total_ptr, rstd_ptr, residual_ptr, first, index, mask, D, HAS_RESIDUAL, L, DROP
    )
    for turn in range(0, tl.cdiv(num_rows - first, step)):
        row = first + turn * step
        # The next row is asked for before this one is summed, so that the memory never waits for a program. At the end
        # the last one again, from the cache: cheaper than a mask.
        next_upstream, next_total, next_rstd, next_residual = _norm_inputs(
            upstream_ptr, total_ptr, rstd_ptr, residual_ptr, tl.minimum(row + step, num_rows - 1), index, mask,
            D, HAS_RESIDUAL, L, DROP,
        )  # fmt: skip
        base = row.to(tl.int64) * D
        normed = total.to(tl.float32) * rstd
        scaled = upstream.to(tl.float32) * weight.to(tl.float32)
        mean = tl.sum(scaled * normed) / D
        share += upstream.to(tl.float32) * normed
        gradient = rstd * (scaled - normed * mean)
        if HAS_RESIDUAL:
            gradient += residual.to(tl.float32)
        tl.store(gradient_ptr + base + index, gradient.to(gradient_ptr.dtype.element_ty), mask=mask)
        if HAS_NORMED:
            again = normed * weight.to(tl.float32)
            tl.store(normed_ptr + base + index, again.to(normed_ptr.dtype.element_ty), mask=mask)
        upstream, total, rstd, residual = next_upstream, next_total, next_rstd, next_residual
    tl.store(part_ptr + first.to(tl.int64) * D + index, share, mask=mask)


@triton.jit(do_not_specialize=["num_parts", "first", "step"])
def reduce_kernel(
    part_ptr, out_ptr, num_parts, first, step,
    D: tl.constexpr, LINE: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums of lines [groups, num_parts, D]; the one of group g is written to row first + g * step, of `LINE`."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    group = tl.program_id(1).to(tl.int64)
    part = tl.arange(0, PARTS)[:, None]
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    part_ptr += group * num_parts * D + index
    for start in range(0, num_parts, PARTS):
        line = start + part
        total += tl.load(part_ptr + line.to(tl.int64) * D, mask=(line < num_parts) & (index < D), other=0.0)
    found = tl.sum(total, axis=0)[None, :]
    tl.store(out_ptr + (first + group * step) * LINE + index, found.to(out_ptr.dtype.element_ty), mask=index < D)


@triton.jit
def _turn(first, second, cos, sin):
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _heads(ptr, head, index, mask, E: tl.constexpr):
    # Both halves of heads, in float32.
    ptr += head.to(tl.int64)[:, None] * E + index
    first = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    return first, tl.load(ptr + E // 2, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _halves(ptr, index, E: tl.constexpr):
    # Both halves of a norm's weight.
    first = tl.load(ptr + index, mask=index < E // 2, other=0.0).to(tl.float32)
    return first, tl.load(ptr + E // 2 + index, mask=index < E // 2, other=0.0).to(tl.float32)


@triton.jit
def _store_heads(ptr, head, row, index, mask, first, second, E: tl.constexpr, GAP: tl.constexpr):
    # Heads are counted over all rows, and each row is so much longer than its heads.
    ptr += head.to(tl.int64)[:, None] * E + index + row.to(tl.int64)[:, None] * GAP
    tl.store(ptr, first.to(ptr.dtype.element_ty), mask=mask)
    tl.store(ptr + E // 2, second.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _factors(cos_ptr, sin_ptr, row, index, mask, E: tl.constexpr):
    place = row.to(tl.int64)[:, None] * E + index
    cos = tl.load(cos_ptr + place, mask=mask, other=0.0).to(tl.float32)
    return cos, tl.load(sin_ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rstd(first, second, eps, E: tl.constexpr):
    return tl.rsqrt((tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / E + eps)[:, None]


@triton.jit(do_not_specialize=["num_rows", "num_anchors"])
def rotate_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, num_rows, num_anchors, eps,
    H: tl.constexpr, E: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, L: tl.constexpr, FIRST: tl.constexpr,
    EXPAND: tl.constexpr,
):  # fmt: skip
    """A program makes `TILE` heads, of one row or several."""
    head = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = head // H
    index = tl.arange(0, HALF)[None, :]
    mask = (row < num_rows)[:, None] & (index < E // 2)
    read = _read_row(row, num_anchors, L, FIRST, EXPAND, False) * H + head % H
    first, second = _heads(x_ptr, read, index, mask, E)
    cos, sin = _factors(cos_ptr, sin_ptr, row, index, mask, E)
    first_weight, second_weight = _halves(weight_ptr, index, E)
    rstd = _rstd(first, second, eps, E)
    first, second = _turn(first * rstd * first_weight, second * rstd * second_weight, cos, sin)
    _store_heads(out_ptr, head, row, index, mask, first, second, E, 0)


@triton.jit
def _unnorm(up_1, up_2, x_1, x_2, weight_1, weight_2, eps, E: tl.constexpr):
    # Gradients of both halves of heads before their norm, and their shares of the weight's.
    rstd = _rstd(x_1, x_2, eps, E)
    x_1, x_2 = x_1 * rstd, x_2 * rstd
    share_1, share_2 = up_1 * x_1, up_2 * x_2
    mean = (tl.sum(share_1 * weight_1, axis=1) + tl.sum(share_2 * weight_2, axis=1))[:, None] / E
    return rstd * (up_1 * weight_1 - x_1 * mean), rstd * (up_2 * weight_2 - x_2 * mean), share_1, share_2


@triton.jit
def _store_share(part_ptr, line, index, share_1, share_2, E: tl.constexpr):
    part_ptr += line.to(tl.int64) * E + index
    tl.store(part_ptr, tl.sum(share_1, axis=0)[None, :], mask=index < E // 2)
    tl.store(part_ptr + E // 2, tl.sum(share_2, axis=0)[None, :], mask=index < E // 2)


@triton.jit(do_not_specialize=["num_rows", "num_anchors"])
def rotate_backward_kernel(
    upstream_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, gradient_ptr, part_ptr, num_rows, num_anchors, eps,
    H: tl.constexpr, E: tl.constexpr, LINE: tl.constexpr, TILE: tl.constexpr, HALF: tl.constexpr, L: tl.constexpr,
    EXPAND: tl.constexpr,
):  # fmt: skip
    """A program takes every P-th tile of heads of all rows, with `EXPAND` of the anchors' rows."""
    index = tl.arange(0, HALF)[None, :]
    weight_1, weight_2 = _halves(weight_ptr, index, E)
    all_1, all_2 = tl.zeros([TILE, HALF], tl.float32), tl.zeros([TILE, HALF], tl.float32)
    for start in range(tl.program_id(0) * TILE, num_rows * H, tl.num_programs(0) * TILE):
        head = start + tl.arange(0, TILE)
        row, made = head // H, head // H
        mask = (row < num_rows)[:, None] & (index < E // 2)
        if EXPAND:
            row, made = row + row // num_anchors, row * L
        head = head % H
        x_1, x_2 = _heads(x_ptr, row * H + head, index, mask, E)
        up_1, up_2 = _heads(upstream_ptr, made * H + head, index, mask, E)
        cos, sin = _factors(cos_ptr, sin_ptr, made, index, mask, E)
        up_1, up_2 = _turn(up_1, up_2, cos, -sin)
        gradient_1, gradient_2, share_1, share_2 = _unnorm(up_1, up_2, x_1, x_2, weight_1, weight_2, eps, E)
        all_1 += share_1
        all_2 += share_2
        _store_heads(gradient_ptr, row * H + head, row, index, mask, gradient_1, gradient_2, E, LINE - H * E)
    _store_share(part_ptr, tl.program_id(0), index, all_1, all_2, E)


@triton.jit(do_not_specialize=["num_anchors"])
def turn_back_kernel(
    upstream_ptr, cos_ptr, sin_ptr, part_ptr, num_anchors,
    H: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, L: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Of later slots: gradients before the rotation, summed over some of a batch row's tokens, [R, P, F]."""
    index = tl.arange(0, HALF)[None, :]
    tile = tl.arange(0, ROWS * HEADS)
    head = tl.program_id(1) * HEADS + tile % HEADS
    num_rows = num_anchors * (L - FIRST)
    all_1, all_2 = tl.zeros([ROWS * HEADS, HALF], tl.float32), tl.zeros([ROWS * HEADS, HALF], tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + tile // HEADS
        inside = (row < num_rows) & (head < H) & (row % (L - FIRST) + FIRST > 0)
        row += tl.program_id(2) * num_rows
        mask = inside[:, None] & (index < E // 2)
        up_1, up_2 = _heads(upstream_ptr, row * H + head, index, mask, E)
        cos, sin = _factors(cos_ptr, sin_ptr, row, index, mask, E)
        up_1, up_2 = _turn(up_1, up_2, cos, -sin)
        all_1 += up_1
        all_2 += up_2
    sum_1 = tl.sum(tl.reshape(all_1, [ROWS, HEADS, HALF]), axis=0)
    sum_2 = tl.sum(tl.reshape(all_2, [ROWS, HEADS, HALF]), axis=0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    line = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    _store_heads(part_ptr, line * H + head, head, index, (head < H)[:, None] & (index < E // 2), sum_1, sum_2, E, 0)


@triton.jit(do_not_specialize=["num_parts", "num_anchors", "num_lines"])
def mask_row_kernel(
    sum_ptr, x_ptr, weight_ptr, gradient_ptr, part_ptr, num_parts, num_anchors, num_lines, eps,
    H: tl.constexpr, E: tl.constexpr, LINE: tl.constexpr, PARTS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A program finishes one head of one mask token's row from the sums [R, P, F].

    Its share of the weight's gradient comes behind the `num_lines` that are there.
    """
    index = tl.arange(0, HALF)[None, :]
    head, group = tl.program_id(0), tl.program_id(1)
    all_1, all_2 = tl.zeros([PARTS, HALF], tl.float32), tl.zeros([PARTS, HALF], tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        mask = (part < num_parts)[:, None] & (index < E // 2)
        up_1, up_2 = _heads(sum_ptr, (group * num_parts + part) * H + head, index, mask, E)
        all_1 += up_1
        all_2 += up_2
    row = group * (num_anchors + 1) + num_anchors + tl.arange(0, 1)
    head += row * H
    x_1, x_2 = _heads(x_ptr, head, index, index < E // 2, E)
    weight_1, weight_2 = _halves(weight_ptr, index, E)
    gradient_1, gradient_2, share_1, share_2 = _unnorm(
        tl.sum(all_1, axis=0)[None, :], tl.sum(all_2, axis=0)[None, :], x_1, x_2, weight_1, weight_2, eps, E
    )
    _store_heads(gradient_ptr, head, row, index, index < E // 2, gradient_1, gradient_2, E, LINE - H * E)
    _store_share(part_ptr, num_lines + group * H + tl.program_id(0), index, share_1, share_2, E)


@triton.jit(do_not_specialize=["num_rows", "num_anchors"])
def expand_kernel(
    x_ptr, out_ptr, num_rows, num_anchors,
    F: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """A program makes `BLOCK` columns of `ROWS` rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (index < F)
    read = _read_row(row, num_anchors, L, FIRST, True, False)
    value = tl.load(x_ptr + read.to(tl.int64) * F + index, mask=mask)
    tl.store(out_ptr + row.to(tl.int64) * F + index, value, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def place_kernel(
    x_ptr, out_ptr, num_rows, F: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program copies `BLOCK` columns of `ROWS` rows into a matrix `LINE` wide."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (index < F)
    value = tl.load(x_ptr + row.to(tl.int64) * F + index, mask=mask)
    tl.store(out_ptr + row.to(tl.int64) * LINE + index, value, mask=mask)


@triton.jit(do_not_specialize=["num_anchors"])
def sum_kernel(
    upstream_ptr, gradient_ptr, part_ptr, num_anchors,
    F: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, L: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Copies rows of slot 0, and sums later slots over some of a batch row's tokens, [R, P, F]."""
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    group = tl.program_id(2)
    num_rows = num_anchors * (L - FIRST)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(tl.program_id(0) * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mask = (row < num_rows) & (index < F)
        is_anchor = row % (L - FIRST) + FIRST == 0
        value = tl.load(upstream_ptr + (group * num_rows + row).to(tl.int64) * F + index, mask=mask, other=0.0)
        if FIRST == 0:
            anchor = group * (num_anchors + 1) + row // L
            tl.store(gradient_ptr + anchor.to(tl.int64) * LINE + index, value, mask=mask & is_anchor)
        total += tl.where(is_anchor, 0.0, value.to(tl.float32))
    line = group * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_ptr + line.to(tl.int64) * F + index, tl.sum(total, axis=0)[None, :], mask=index < F)


@triton.jit
def swiglu_kernel(product_ptr, out_ptr, INNER: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """A program makes one of the `PARTS` of a row."""
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    index = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    mask = index < INNER
    gate = tl.load(product_ptr + row * (2 * INNER) + index, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(product_ptr + row * (2 * INNER) + INNER + index, mask=mask, other=0.0).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * INNER + index, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(upstream_ptr, product_ptr, INNER: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """As `swiglu_kernel`; the gradient lies where the product was, the output made again where the upstream was."""
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    index = tl.program_id(0) % PARTS * BLOCK + tl.arange(0, BLOCK)
    mask = index < INNER
    upstream_ptr += row * INNER + index
    gate_ptr, up_ptr = product_ptr + row * (2 * INNER) + index, product_ptr + row * (2 * INNER) + INNER + index
    upstream = tl.load(upstream_ptr, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr, mask=mask, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    silu = gate * share
    gate_gradient = upstream * up * share * (1.0 + gate * (1.0 - share))
    tl.store(gate_ptr, gate_gradient.to(product_ptr.dtype.element_ty), mask=mask)
    tl.store(up_ptr, (upstream * silu).to(product_ptr.dtype.element_ty), mask=mask)
    tl.store(upstream_ptr, (silu * up).to(upstream_ptr.dtype.element_ty), mask=mask)
