"""Attention of block tokens as Triton kernels: a range of context keys and the own block, forward and backward.

A block token sees one range of context keys [low, high) and keys of its own block (docs/algorithm.md, section 4), so
no mask is stored: a tile of queries walks the keys that all of its queries see without comparing anything, then those
at the two ends with comparisons, then its own blocks. Gradients of keys walk the queries that see them, which lie in
one range too since anchors rise; nothing is added with atomics, so results do not depend on timing.

R rows, T context keys, L block size, S slots of each block that ask (its last ones), Q block tokens: as keys L of a
block, as queries S. H query heads, G key/value heads, E head width; in a kernel M queries and N keys of a tile, J key
tiles. Streams are [R, T or Q, heads, E], the layout of the projections.
"""

from typing import Any

import triton
import triton.language as tl

EMPTY_MAX = tl.constexpr(-1e30)
"""Start of a running maximum: finite, so that a tile without a visible key leaves no NaN."""


@triton.jit  # type: ignore[untyped-decorator]
def rows(base: "Any", row: "Any", head: "Any", n: "Any", length: "Any", heads: "Any", E: tl.constexpr) -> "Any":
    """Addresses of a tile of a contiguous [R, length, heads, E] stream."""
    start = (row.to(tl.int64) * length * heads + head) * E
    return base + start + n[:, None].to(tl.int64) * heads * E + tl.arange(0, E)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def spans(low_M: "Any", high_M: "Any", inside_M: "Any", N: tl.constexpr) -> "Any":
    """Key tiles of a query tile: [first, inner_first) and [inner_stop, stop) need comparing, those between do not."""
    far = 1 << 30
    some_M = high_M > low_M
    stop = tl.max(tl.where(some_M, high_M, 0), 0)
    first = tl.minimum(tl.min(tl.where(some_M, low_M, far), 0), stop) // N * N
    inner_first = tl.cdiv(tl.max(tl.where(inside_M, low_M, 0), 0), N) * N
    inner_stop = tl.min(tl.where(inside_M, high_M, far), 0) // N * N
    is_none = inner_stop <= inner_first
    inner_first = tl.where(is_none, stop, inner_first)
    inner_stop = tl.where(is_none, stop, inner_stop)
    return first, inner_first, inner_stop, stop


@triton.jit  # type: ignore[untyped-decorator]
def is_own(m_M: "Any", n_N: "Any", num_keys: "Any", L: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr) -> "Any":
    """Whether a query sees a key of its own block, [M, N]."""
    same = (m_M[:, None] // S == n_N[None, :] // L) & (n_N[None, :] < num_keys)
    if CAUSAL:
        same = same & (n_N[None, :] % L <= m_M[:, None] % S + (L - S))
    return same


@triton.jit  # type: ignore[untyped-decorator]
def own_keys(tile: "Any", num_keys: "Any", L: tl.constexpr, S: tl.constexpr, M: tl.constexpr) -> "Any":
    """Keys of the blocks that a tile of queries belongs to: first, stop."""
    return tile * M // S * L, tl.minimum(tl.cdiv(tile * M + M, S) * L, num_keys)


@triton.jit  # type: ignore[untyped-decorator]
def _take(
    accumulator_ME: "Any", largest_M: "Any", total_M: "Any", query_ME: "Any", key: "Any", value: "Any", line: "Any",
    column: "Any", scale: "Any", seen_MN: "Any", MASKED: tl.constexpr, PRECISION: tl.constexpr,
) -> "Any":  # fmt: skip
    """One key tile of the running softmax; powers of two, `scale` holds log2(e)."""
    key_NE = key.load([line, column])
    score_MN = tl.dot(query_ME, tl.trans(key_NE), input_precision=PRECISION)
    if MASKED:
        score_MN = tl.where(seen_MN, score_MN * scale, -float("inf"))
        larger_M = tl.maximum(largest_M, tl.max(score_MN, 1))
        share_MN = tl.exp2(score_MN - larger_M[:, None])
    else:
        larger_M = tl.maximum(largest_M, tl.max(score_MN, 1) * scale)
        share_MN = tl.exp2(score_MN * scale - larger_M[:, None])
    kept_M = tl.exp2(largest_M - larger_M)
    total_M = total_M * kept_M + tl.sum(share_MN, 1)
    value_NE = value.load([line, column])
    accumulator_ME = accumulator_ME * kept_M[:, None]
    accumulator_ME = tl.dot(share_MN.to(value_NE.dtype), value_NE, accumulator_ME, input_precision=PRECISION)
    return accumulator_ME, larger_M, total_M


@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(
    query: "Any", context_key: "Any", context_value: "Any", block_key: "Any", block_value: "Any", low_ptr: "Any",
    high_ptr: "Any", out_ptr: "Any", log_ptr: "Any", num_queries: "Any", num_context: "Any", scale: "Any",
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, L: tl.constexpr, S: tl.constexpr, CAUSAL: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    # Late tiles see most, so they start first.
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row, head = tl.program_id(0) // H, tl.program_id(0) % H
    group = head // (H // G)
    m_M = tile * M + tl.arange(0, M)
    inside_M = m_M < num_queries
    low_M = tl.load(low_ptr + row * num_queries + m_M, mask=inside_M, other=0)
    high_M = tl.load(high_ptr + row * num_queries + m_M, mask=inside_M, other=0)
    query_ME = query.load([row * num_queries + tile * M, head * E])
    accumulator_ME = tl.zeros((M, E), dtype=tl.float32)
    largest_M = tl.full((M,), EMPTY_MAX, tl.float32)
    total_M = tl.zeros((M,), dtype=tl.float32)
    first, inner_first, inner_stop, stop = spans(low_M, high_M, inside_M, N)

    for start in range(inner_first, inner_stop, N):
        n_N = start + tl.arange(0, N)
        accumulator_ME, largest_M, total_M = _take(
            accumulator_ME, largest_M, total_M, query_ME,
            context_key, context_value, row * num_context + start, group * E, scale, n_N,
            MASKED=False, PRECISION=PRECISION,
        )  # fmt: skip
    num_left = tl.cdiv(inner_first - first, N)
    for turn in range(num_left + tl.cdiv(stop - inner_stop, N)):
        start = tl.where(turn < num_left, first + turn * N, inner_stop + (turn - num_left) * N)
        n_N = start + tl.arange(0, N)
        seen_MN = (n_N[None, :] >= low_M[:, None]) & (n_N[None, :] < high_M[:, None])
        accumulator_ME, largest_M, total_M = _take(
            accumulator_ME, largest_M, total_M, query_ME,
            context_key, context_value, row * num_context + start, group * E, scale, seen_MN,
            MASKED=True, PRECISION=PRECISION,
        )  # fmt: skip
    num_keys = num_queries // S * L
    own_first, own_stop = own_keys(tile, num_keys, L, S, M)
    for start in range(own_first, own_stop, N):
        n_N = start + tl.arange(0, N)
        seen_MN = is_own(m_M, n_N, num_keys, L, S, CAUSAL)
        accumulator_ME, largest_M, total_M = _take(
            accumulator_ME, largest_M, total_M, query_ME,
            block_key, block_value, row * num_keys + start, group * E, scale, seen_MN,
            MASKED=True, PRECISION=PRECISION,
        )  # fmt: skip

    out_ME = accumulator_ME / total_M[:, None]
    tl.store(
        rows(out_ptr, row, head, m_M, num_queries, H, E), out_ME.to(out_ptr.dtype.element_ty), mask=inside_M[:, None]
    )
    log_M = largest_M + tl.log2(total_M)
    tl.store(log_ptr + (row * H + head) * num_queries + m_M, log_M, mask=inside_M)
