"""The backward of block attention as Triton kernels; `attention_triton` has the forward and says how they walk.

R rows, T context keys, L block size, S slots of each block that ask (its last ones), Q block tokens: as keys L of a
block, as queries S. H query heads, G key/value heads, E head width; in a kernel M queries and N keys of a tile, J key
tiles. Streams are [R, T or Q, heads, E], the layout of the projections.
"""

from typing import Any

import triton
import triton.language as tl

from blockdraft.models.attention_triton import is_own, own_keys, rows, spans


@triton.jit  # type: ignore[untyped-decorator]
def _pull(
    gradient_ME: "Any", query_ME: "Any", upstream_ME: "Any", log_M: "Any", delta_M: "Any", key: "Any", value: "Any",
    line: "Any", column: "Any", scale: "Any", seen_MN: "Any", MASKED: tl.constexpr, PRECISION: tl.constexpr,
) -> "Any":  # fmt: skip
    """One key tile's part of d(query), without the scale."""
    key_NE = key.load([line, column])
    value_NE = value.load([line, column])
    score_MN = tl.dot(query_ME, tl.trans(key_NE), input_precision=PRECISION)
    share_MN = tl.exp2(score_MN * scale - log_M[:, None])
    if MASKED:
        share_MN = tl.where(seen_MN, share_MN, 0.0)
    pulled_MN = tl.dot(upstream_ME, tl.trans(value_NE), input_precision=PRECISION)
    slope_MN = (share_MN * (pulled_MN - delta_M[:, None])).to(key_NE.dtype)
    return tl.dot(slope_MN, key_NE, gradient_ME, input_precision=PRECISION)


@triton.jit  # type: ignore[untyped-decorator]
def query_kernel(
    query: "Any", context_key: "Any", context_value: "Any", block_key: "Any", block_value: "Any", low_ptr: "Any",
    high_ptr: "Any", upstream: "Any", out: "Any", log_ptr: "Any", delta_ptr: "Any", gradient_ptr: "Any",
    num_queries: "Any", num_context: "Any", scale: "Any", slope: "Any", H: tl.constexpr, G: tl.constexpr,
    E: tl.constexpr, L: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """d(query), the forward's walk once more; leaves row sums of out * upstream for the other kernels.

    These are what the softmax's derivative subtracts.
    """
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, head = tl.program_id(0) // H, tl.program_id(0) % H
    group = head // (H // G)
    m_M = tile * M + tl.arange(0, M)
    inside_M = m_M < num_queries
    low_M = tl.load(low_ptr + row * num_queries + m_M, mask=inside_M, other=0)
    high_M = tl.load(high_ptr + row * num_queries + m_M, mask=inside_M, other=0)
    query_ME = query.load([row * num_queries + tile * M, head * E])
    upstream_ME = upstream.load([row * num_queries + tile * M, head * E])
    log_M = tl.load(log_ptr + (row * H + head) * num_queries + m_M, mask=inside_M, other=0.0)
    out_ME = out.load([row * num_queries + tile * M, head * E])
    delta_M = tl.sum(out_ME.to(tl.float32) * upstream_ME.to(tl.float32), 1)
    tl.store(delta_ptr + (row * H + head) * num_queries + m_M, delta_M, mask=inside_M)
    gradient_ME = tl.zeros((M, E), dtype=tl.float32)
    first, inner_first, inner_stop, stop = spans(low_M, high_M, inside_M, N)

    for start in range(inner_first, inner_stop, N):
        n_N = start + tl.arange(0, N)
        gradient_ME = _pull(
            gradient_ME, query_ME, upstream_ME, log_M, delta_M,
            context_key, context_value, row * num_context + start, group * E, scale, n_N,
            MASKED=False, PRECISION=PRECISION,
        )  # fmt: skip
    num_left = tl.cdiv(inner_first - first, N)
    for turn in range(num_left + tl.cdiv(stop - inner_stop, N)):
        start = tl.where(turn < num_left, first + turn * N, inner_stop + (turn - num_left) * N)
        n_N = start + tl.arange(0, N)
        seen_MN = (n_N[None, :] >= low_M[:, None]) & (n_N[None, :] < high_M[:, None])
        gradient_ME = _pull(
            gradient_ME, query_ME, upstream_ME, log_M, delta_M,
            context_key, context_value, row * num_context + start, group * E, scale, seen_MN,
            MASKED=True, PRECISION=PRECISION,
        )  # fmt: skip
    num_keys = num_queries // S * L
    own_first, own_stop = own_keys(tile, num_keys, L, S, M)
    for start in range(own_first, own_stop, N):
        seen_MN = is_own(m_M, start + tl.arange(0, N), num_keys, L, S, CAUSAL)
        gradient_ME = _pull(
            gradient_ME, query_ME, upstream_ME, log_M, delta_M,
            block_key, block_value, row * num_keys + start, group * E, scale, seen_MN,
            MASKED=True, PRECISION=PRECISION,
        )  # fmt: skip

    tl.store(
        rows(gradient_ptr, row, head, m_M, num_queries, H, E),
        (gradient_ME * slope).to(gradient_ptr.dtype.element_ty),
        mask=inside_M[:, None],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _gather(
    key_gradient_NE: "Any", value_gradient_NE: "Any", key_NE: "Any", value_NE: "Any", query: "Any", upstream: "Any",
    line: "Any", column: "Any", log_ptr: "Any", delta_ptr: "Any", inside_M: "Any", seen_NM: "Any", scale: "Any",
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
) -> "Any":  # fmt: skip
    """One query tile's part of d(key), without the scale, and of d(value)."""
    query_ME = query.load([line, column])
    upstream_ME = upstream.load([line, column])
    if MASKED:
        log_M = tl.load(log_ptr, mask=inside_M, other=0.0)
        delta_M = tl.load(delta_ptr, mask=inside_M, other=0.0)
    else:
        log_M = tl.load(log_ptr)
        delta_M = tl.load(delta_ptr)
    score_NM = tl.dot(key_NE, tl.trans(query_ME), input_precision=PRECISION)
    share_NM = tl.exp2(score_NM * scale - log_M[None, :])
    if MASKED:
        share_NM = tl.where(seen_NM, share_NM, 0.0)
    value_gradient_NE = tl.dot(
        share_NM.to(upstream_ME.dtype), upstream_ME, value_gradient_NE, input_precision=PRECISION
    )
    pulled_NM = tl.dot(value_NE, tl.trans(upstream_ME), input_precision=PRECISION)
    slope_NM = (share_NM * (pulled_NM - delta_M[None, :])).to(query_ME.dtype)
    key_gradient_NE = tl.dot(slope_NM, query_ME, key_gradient_NE, input_precision=PRECISION)
    return key_gradient_NE, value_gradient_NE


@triton.jit  # type: ignore[untyped-decorator]
def context_kernel(
    query: "Any", context_key: "Any", context_value: "Any", low_ptr: "Any", high_ptr: "Any", span_ptr: "Any",
    upstream: "Any", log_ptr: "Any", delta_ptr: "Any", key_gradient_ptr: "Any", value_gradient_ptr: "Any",
    num_queries: "Any", num_context: "Any", scale: "Any", slope: "Any", H: tl.constexpr, G: tl.constexpr,
    E: tl.constexpr, M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """d(key) and d(value) of a tile of context keys, over all query heads of its group."""
    # Early keys are seen by most, so they start first.
    tile = tl.program_id(1)
    row, group = tl.program_id(0) // G, tl.program_id(0) % G
    n_N = tile * N + tl.arange(0, N)
    inside_N1 = (n_N < num_context)[:, None]
    key_NE = context_key.load([row * num_context + tile * N, group * E])
    value_NE = context_value.load([row * num_context + tile * N, group * E])
    key_gradient_NE = tl.zeros((N, E), dtype=tl.float32)
    value_gradient_NE = tl.zeros((N, E), dtype=tl.float32)
    span = span_ptr + (row * tl.num_programs(1) + tile) * 4
    first, inner_first = tl.load(span), tl.load(span + 1)
    inner_stop, stop = tl.load(span + 2), tl.load(span + 3)

    num_inner = inner_stop - inner_first
    for turn in range(num_inner * (H // G)):
        head = group * (H // G) + turn // num_inner
        start = (inner_first + turn % num_inner) * M
        m_M = start + tl.arange(0, M)
        line = (row * H + head) * num_queries + m_M
        key_gradient_NE, value_gradient_NE = _gather(
            key_gradient_NE, value_gradient_NE, key_NE, value_NE,
            query, upstream, row * num_queries + start, head * E,
            log_ptr + line, delta_ptr + line, m_M, m_M, scale, MASKED=False, PRECISION=PRECISION,
        )  # fmt: skip
    num_left = inner_first - first
    num_ends = num_left + stop - inner_stop
    for turn in range(num_ends * (H // G)):
        head = group * (H // G) + turn // num_ends
        step = turn % num_ends
        start = tl.where(step < num_left, first + step, inner_stop + step - num_left) * M
        m_M = start + tl.arange(0, M)
        line = (row * H + head) * num_queries + m_M
        low_M = tl.load(low_ptr + row * num_queries + m_M, mask=m_M < num_queries, other=0)
        high_M = tl.load(high_ptr + row * num_queries + m_M, mask=m_M < num_queries, other=0)
        seen_NM = (n_N[:, None] >= low_M[None, :]) & (n_N[:, None] < high_M[None, :])
        key_gradient_NE, value_gradient_NE = _gather(
            key_gradient_NE, value_gradient_NE, key_NE, value_NE,
            query, upstream, row * num_queries + start, head * E,
            log_ptr + line, delta_ptr + line, m_M < num_queries, seen_NM, scale, MASKED=True, PRECISION=PRECISION,
        )  # fmt: skip

    dtype = key_gradient_ptr.dtype.element_ty
    tl.store(
        rows(key_gradient_ptr, row, group, n_N, num_context, G, E), (key_gradient_NE * slope).to(dtype), mask=inside_N1
    )
    tl.store(rows(value_gradient_ptr, row, group, n_N, num_context, G, E), value_gradient_NE.to(dtype), mask=inside_N1)


@triton.jit  # type: ignore[untyped-decorator]
def block_kernel(
    query: "Any", block_key: "Any", block_value: "Any", upstream: "Any", log_ptr: "Any", delta_ptr: "Any",
    key_gradient_ptr: "Any", value_gradient_ptr: "Any", num_queries: "Any", scale: "Any", slope: "Any",
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, L: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """d(key) and d(value) of a tile of block tokens."""
    tile = tl.program_id(1)
    row, group = tl.program_id(0) // G, tl.program_id(0) % G
    n_N = tile * N + tl.arange(0, N)
    num_keys = num_queries // S * L
    inside_N1 = (n_N < num_keys)[:, None]
    key_NE = block_key.load([row * num_keys + tile * N, group * E])
    value_NE = block_value.load([row * num_keys + tile * N, group * E])
    key_gradient_NE = tl.zeros((N, E), dtype=tl.float32)
    value_gradient_NE = tl.zeros((N, E), dtype=tl.float32)
    first = tile * N // L * S
    num_steps = tl.cdiv(tl.minimum(tl.cdiv(tile * N + N, L) * S, num_queries) - first, M)
    for turn in range(num_steps * (H // G)):
        head = group * (H // G) + turn // num_steps
        start = first + turn % num_steps * M
        m_M = start + tl.arange(0, M)
        line = (row * H + head) * num_queries + m_M
        seen_NM = (n_N[:, None] // L == m_M[None, :] // S) & (m_M[None, :] < num_queries)
        if CAUSAL:
            seen_NM = seen_NM & (n_N[:, None] % L <= m_M[None, :] % S + (L - S))
        key_gradient_NE, value_gradient_NE = _gather(
            key_gradient_NE, value_gradient_NE, key_NE, value_NE,
            query, upstream, row * num_queries + start, head * E,
            log_ptr + line, delta_ptr + line, m_M < num_queries, seen_NM, scale, MASKED=True, PRECISION=PRECISION,
        )  # fmt: skip
    dtype = key_gradient_ptr.dtype.element_ty
    tl.store(
        rows(key_gradient_ptr, row, group, n_N, num_keys, G, E), (key_gradient_NE * slope).to(dtype), mask=inside_N1
    )
    tl.store(rows(value_gradient_ptr, row, group, n_N, num_keys, G, E), value_gradient_NE.to(dtype), mask=inside_N1)
