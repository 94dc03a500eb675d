"""Attention of block tokens through the Triton kernels, differentiable and visible to torch.compile as one operation.

R rows, T context keys, A anchors, L block size, S slots of each block that ask (its last ones), Q block tokens: as keys
A * L, as queries A * S. H query heads, G key/value heads, E head width, I tiles of queries, J tiles of context keys.
"""

import math
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from blockdraft.models.attention import bare_flex_attend, fits_kernels
from blockdraft.models.attention_backward_triton import block_kernel, context_kernel, query_kernel
from blockdraft.models.attention_triton import forward_kernel
from blockdraft.models.block_mask import context_ranges
from blockdraft.models.drafter import Attend, DrafterShape, asking_slots, drop_anchors
from blockdraft.models.row_kernels import launch_ranges, launch_spans


class Tile(NamedTuple):
    """Queries and keys of a tile, and how its kernel is compiled."""

    queries: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """One for each kernel; `block` is the one of the block tokens' own keys."""

    forward: Tile
    query: Tile
    context: Tile
    block: Tile


def _alike(tile: Tile) -> Tiles:
    return Tiles(tile, tile, tile, tile)


SIZES: Final = (
    Tiles(Tile(64, 64, 4, 3), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    _alike(Tile(64, 64, 4, 1)),
    _alike(Tile(32, 32, 4, 2)),
    _alike(Tile(16, 16, 4, 1)),
)
"""From the fastest on an H200 with heads of 128 to what little shared memory holds; 16-bit types."""
FLOAT32_SIZES: Final = (_alike(Tile(32, 32, 4, 1)), _alike(Tile(16, 16, 4, 1)))


def choose_tiles(dtype: torch.dtype, size: int) -> Tiles:
    """Of a size number, 0 the largest; float32 needs twice the shared memory for each element."""
    sizes = FLOAT32_SIZES if dtype == torch.float32 else SIZES
    return sizes[min(size, len(sizes) - 1)]


class Ranges(NamedTuple):
    """Context keys [low, high) that each block token sees, int32 [R, Q]."""

    low_RQ: Tensor
    high_RQ: Tensor


def context_spans(ranges: Ranges, num_context: int, tile: Tile) -> Tensor:
    """Query tiles that each tile of context keys is seen by, int32 [R, J, 4]: first, inner first, inner stop, stop.

    Between the inner two every query sees every key. Anchors rise, so these tiles are one range; where they are not
    (invalid blocks stand last and see nothing), the inner range is empty and everything is compared.
    """
    num_queries = ranges.low_RQ.shape[1]
    num_tiles, num_key_tiles = -(-num_queries // tile.queries), -(-num_context // tile.keys)
    # Padding sees nothing, so a tile that reaches past the last query is never an inner one.
    low_RIM, high_RIM = (
        torch.nn.functional.pad(value, (0, num_tiles * tile.queries - num_queries)).unflatten(1, (num_tiles, -1))
        for value in ranges
    )
    left_J = torch.arange(num_key_tiles, device=low_RIM.device, dtype=torch.int32)[:, None] * tile.keys
    lowest_RI = torch.where(high_RIM > low_RIM, low_RIM, num_context).amin(-1)
    some_RJI = (lowest_RI[:, None] < left_J + tile.keys) & (high_RIM.amax(-1)[:, None] > left_J)
    inner_RJI = (low_RIM.amax(-1)[:, None] <= left_J) & (high_RIM.amin(-1)[:, None] >= left_J + tile.keys)
    first_RJ, stop_RJ = _ends(some_RJI)
    inner_first_RJ, inner_stop_RJ = _ends(inner_RJI)
    is_range_RJ = inner_RJI.sum(-1) == inner_stop_RJ - inner_first_RJ
    inner_first_RJ = torch.where(is_range_RJ, inner_first_RJ, stop_RJ).clamp(first_RJ, stop_RJ)
    inner_stop_RJ = torch.where(is_range_RJ, inner_stop_RJ, stop_RJ).clamp(inner_first_RJ, stop_RJ)
    return torch.stack([first_RJ, inner_first_RJ, inner_stop_RJ, stop_RJ], -1).int()


def _ends(chosen_RJI: Tensor) -> tuple[Tensor, Tensor]:
    """First and one past the last chosen number of each line; 0 and 0 without any."""
    number_I = torch.arange(chosen_RJI.shape[-1], device=chosen_RJI.device)
    stop_RJ = torch.where(chosen_RJI, number_I + 1, 0).amax(-1)
    first_RJ = torch.where(chosen_RJI, number_I, chosen_RJI.shape[-1]).amin(-1)
    return torch.minimum(first_RJ, stop_RJ), stop_RJ


class Sizes(NamedTuple):
    """Of a call."""

    rows: int
    queries: int
    heads: int
    groups: int
    width: int
    context: int
    block_keys: int

    def slots(self, length: int) -> int:
        """S of blocks of that size."""
        return self.queries * length // self.block_keys

    @property
    def scale(self) -> float:
        """Of the scores."""
        return 1.0 / math.sqrt(self.width)

    @property
    def constants(self) -> dict[str, int]:
        """What the kernels are compiled for."""
        return {"H": self.heads, "G": self.groups, "E": self.width}


def _sizes(query_RQHE: Tensor, context_key_RTGE: Tensor, block_key_RQGE: Tensor) -> Sizes:
    rows, queries, heads, width = query_RQHE.shape
    _, context, groups, _ = context_key_RTGE.shape
    return Sizes(rows, queries, heads, groups, width, context, block_key_RQGE.shape[1])


def _precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"


def _describe(stream_RNHE: Tensor, rows: int) -> TensorDescriptor:
    """A contiguous stream as the copy engine reads it: tiles of `rows` tokens of one head."""
    rows_of_all, width = stream_RNHE.shape[0] * stream_RNHE.shape[1], stream_RNHE.shape[3]
    return TensorDescriptor.from_tensor(stream_RNHE.view(rows_of_all, -1), [rows, width])


def _described(streams: list[Tensor], tile: Tile) -> list[TensorDescriptor]:
    return [_describe(streams[0], tile.queries), *(_describe(stream, tile.keys) for stream in streams[1:])]


LOG2_E: Final = math.log2(math.e)


def launch_forward(streams: list[Tensor], ranges: Ranges, length: int, causal: bool, tile: Tile) -> list[Tensor]:
    """Output, and log2 of the softmax's sum. `streams`: query, context key and value, block key and value."""
    sizes = _sizes(streams[0], streams[1], streams[3])
    out_RQHE = torch.empty_like(streams[0])
    log_RHQ = out_RQHE.new_empty(sizes.rows, sizes.heads, sizes.queries, dtype=torch.float32)
    grid = (sizes.rows * sizes.heads, -(-sizes.queries // tile.queries))
    forward_kernel[grid](
        *_described(streams, tile), *ranges, out_RQHE, log_RHQ, sizes.queries, sizes.context, sizes.scale * LOG2_E,
        **sizes.constants, L=length, S=sizes.slots(length), CAUSAL=causal, M=tile.queries, N=tile.keys,
        PRECISION=_precision(out_RQHE.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return [out_RQHE, log_RHQ]


class Upstream(NamedTuple):
    """What the backward's kernels of keys read beside the streams."""

    gradient_RQHE: Tensor
    log_RHQ: Tensor
    delta_RHQ: Tensor


def launch_query(
    streams: list[Tensor],
    ranges: Ranges,
    forward: list[Tensor],
    upstream_RQHE: Tensor,
    length: int,
    causal: bool,
    tile: Tile,
) -> tuple[Tensor, Upstream]:
    """d(query), and what the other kernels of the backward read; `forward` is what `launch_forward` gave."""
    sizes = _sizes(streams[0], streams[1], streams[3])
    gradient_RQHE, (out_RQHE, log_RHQ) = torch.empty_like(streams[0]), forward
    delta_RHQ = torch.empty_like(log_RHQ)
    grid = (sizes.rows * sizes.heads, -(-sizes.queries // tile.queries))
    query_kernel[grid](
        *_described(streams, tile), *ranges, _describe(upstream_RQHE, tile.queries), _describe(out_RQHE, tile.queries),
        log_RHQ, delta_RHQ, gradient_RQHE, sizes.queries, sizes.context, sizes.scale * LOG2_E, sizes.scale,
        **sizes.constants, L=length, S=sizes.slots(length), CAUSAL=causal, M=tile.queries, N=tile.keys,
        PRECISION=_precision(gradient_RQHE.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return gradient_RQHE, Upstream(upstream_RQHE, log_RHQ, delta_RHQ)


def launch_context(
    streams: list[Tensor], ranges: Ranges, span_RJ4: Tensor, upstream: Upstream, tile: Tile
) -> list[Tensor]:
    """d(key) and d(value) of the context; `span_RJ4` was made for the same tile."""
    query_RQHE, key_RTGE, value_RTGE, block_key_RQGE, _ = streams
    sizes = _sizes(query_RQHE, key_RTGE, block_key_RQGE)
    found = [torch.empty_like(key_RTGE), torch.empty_like(value_RTGE)]
    grid = (sizes.rows * sizes.groups, -(-sizes.context // tile.keys))
    context_kernel[grid](
        *_described(streams[:3], tile), *ranges, span_RJ4,
        _describe(upstream.gradient_RQHE, tile.queries), *upstream[1:], *found,
        sizes.queries, sizes.context, sizes.scale * LOG2_E, sizes.scale,
        **sizes.constants, M=tile.queries, N=tile.keys,
        PRECISION=_precision(query_RQHE.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return found


def launch_block(streams: list[Tensor], upstream: Upstream, length: int, causal: bool, tile: Tile) -> list[Tensor]:
    """d(key) and d(value) of the block tokens."""
    query_RQHE, context_key, _, key_RQGE, value_RQGE = streams
    sizes = _sizes(query_RQHE, context_key, key_RQGE)
    found = [torch.empty_like(key_RQGE), torch.empty_like(value_RQGE)]
    grid = (sizes.rows * sizes.groups, -(-sizes.block_keys // tile.keys))
    block_kernel[grid](
        *_described([query_RQHE, key_RQGE, value_RQGE], tile), _describe(upstream.gradient_RQHE, tile.queries),
        *upstream[1:], *found, sizes.queries, sizes.scale * LOG2_E, sizes.scale,
        **sizes.constants, L=length, S=sizes.slots(length), CAUSAL=causal, M=tile.queries, N=tile.keys,
        PRECISION=_precision(query_RQHE.dtype), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return found


@torch.library.custom_op("blockdraft::block_attention", mutates_args=())
def block_attention(
    query_RQHE: Tensor,
    context_key_RTGE: Tensor,
    context_value_RTGE: Tensor,
    block_key_RQGE: Tensor,
    block_value_RQGE: Tensor,
    low_RQ: Tensor,
    high_RQ: Tensor,
    span_RJ4: Tensor,
    length: int,
    causal: bool,
    size: int,
) -> tuple[Tensor, Tensor]:
    """Output [R, Q, H, E] and log2 of the softmax's sum [R, H, Q]. Streams are contiguous."""
    streams = [query_RQHE, context_key_RTGE, context_value_RTGE, block_key_RQGE, block_value_RQGE]
    assert all(stream.is_contiguous() for stream in streams)
    tile = choose_tiles(query_RQHE.dtype, size).forward
    out_RQHE, log_RHQ = launch_forward(streams, Ranges(low_RQ, high_RQ), length, causal, tile)
    return out_RQHE, log_RHQ


@block_attention.register_fake
def _(
    query_RQHE: Tensor,
    context_key_RTGE: Tensor,
    context_value_RTGE: Tensor,
    block_key_RQGE: Tensor,
    block_value_RQGE: Tensor,
    low_RQ: Tensor,
    high_RQ: Tensor,
    span_RJ4: Tensor,
    length: int,
    causal: bool,
    size: int,
) -> tuple[Tensor, Tensor]:
    rows, queries, heads, _ = query_RQHE.shape
    return torch.empty_like(query_RQHE), query_RQHE.new_empty(rows, heads, queries, dtype=torch.float32)


@torch.library.custom_op("blockdraft::block_attention_backward", mutates_args=())
def block_attention_backward(
    upstream_RQHE: Tensor,
    out_RQHE: Tensor,
    log_RHQ: Tensor,
    streams: list[Tensor],
    low_RQ: Tensor,
    high_RQ: Tensor,
    span_RJ4: Tensor,
    length: int,
    causal: bool,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the five streams."""
    tiles, ranges = choose_tiles(out_RQHE.dtype, size), Ranges(low_RQ, high_RQ)
    forward = [out_RQHE, log_RHQ]
    query, upstream = launch_query(streams, ranges, forward, upstream_RQHE.contiguous(), length, causal, tiles.query)
    context = launch_context(streams, ranges, span_RJ4, upstream, tiles.context)
    block = launch_block(streams, upstream, length, causal, tiles.block)
    return query, context[0], context[1], block[0], block[1]


@block_attention_backward.register_fake
def _(
    upstream_RQHE: Tensor,
    out_RQHE: Tensor,
    log_RHQ: Tensor,
    streams: list[Tensor],
    low_RQ: Tensor,
    high_RQ: Tensor,
    span_RJ4: Tensor,
    length: int,
    causal: bool,
    size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    query, context_key, context_value, block_key, block_value = map(torch.empty_like, streams)
    return query, context_key, context_value, block_key, block_value


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], *output)
    ctx.numbers = inputs[8:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, upstream_RQHE: Tensor, _log: None) -> tuple[Any, ...]:
    *streams, low_RQ, high_RQ, span_RJ4, out_RQHE, log_RHQ = ctx.saved_tensors
    found = torch.ops.blockdraft.block_attention_backward(
        upstream_RQHE, out_RQHE, log_RHQ, streams, low_RQ, high_RQ, span_RJ4, *ctx.numbers
    )
    return (*found, None, None, None, None, None, None)


block_attention.register_autograd(_backward, setup_context=_keep)


class Seen(NamedTuple):
    """What layers of a kind see."""

    ranges: Ranges
    span_RJ4: Tensor


def kernel_attend(
    shape: DrafterShape, document_RT: Tensor, position_RT: Tensor, anchor_RA: Tensor, size: int = 0
) -> Attend:
    """Attention through the kernels, compiled with the rest of the drafter or not. `size`: of tiles, 0 the largest.

    A head width that is no power of two goes through flex_attention, which pads it.
    """
    if not fits_kernels(shape.head_dim):
        return bare_flex_attend(shape, document_RT, position_RT, anchor_RA)
    found: dict[tuple[bool, bool], Seen] = {}
    num_context, length = position_RT.shape[1], shape.block_size

    def see(is_windowed: bool, is_dropped: bool, dtype: torch.dtype) -> Seen:
        window, tile = shape.window if is_windowed else None, choose_tiles(dtype, size).context
        if not torch.compiler.is_compiling():
            ranges = Ranges(*launch_ranges(position_RT, anchor_RA, length, length - is_dropped, window))
            return Seen(ranges, launch_spans(*ranges, num_context, tile.queries, tile.keys))
        ranges = Ranges(*context_ranges(position_RT, anchor_RA, length, window))
        if is_dropped:
            ranges = Ranges(*(drop_anchors(ends, length) for ends in ranges))
        return Seen(ranges, context_spans(ranges, num_context, tile))

    def attend(
        layer: int,
        query_RHQE: Tensor,
        context_key_RGTE: Tensor,
        context_value_RGTE: Tensor,
        block_key_RGQE: Tensor,
        block_value_RGQE: Tensor,
    ) -> Tensor:
        is_windowed = layer in shape.window_layers
        is_dropped = asking_slots(query_RHQE, block_key_RGQE, shape.block_size) < shape.block_size
        if torch.compiler.is_compiling():
            # Part of each graph: a compiled layer leaves nothing behind for the next one.
            seen = see(is_windowed, is_dropped, query_RHQE.dtype)
        else:
            # Once for layers alike.
            if (is_windowed, is_dropped) not in found:
                found[is_windowed, is_dropped] = see(is_windowed, is_dropped, query_RHQE.dtype)
            seen = found[is_windowed, is_dropped]
        streams = (query_RHQE, context_key_RGTE, context_value_RGTE, block_key_RGQE, block_value_RGQE)
        out_RQHE: Tensor = torch.ops.blockdraft.block_attention(
            *(stream.transpose(1, 2).contiguous() for stream in streams),
            *seen.ranges,
            seen.span_RJ4,
            shape.block_size,
            shape.is_causal(shape.window if is_windowed else None),
            size,
        )[0]
        return out_RQHE.transpose(1, 2)

    return attend
