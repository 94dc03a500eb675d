"""The flex_attention mask of a row's blocks in closed form: no predicate is evaluated over Q x K.

A block token sees one range of context tokens and one range of its own block, so whether a tile of 128 queries and 128
keys is empty, partial or full follows from the ends of these ranges. Documents are contiguous in a row and their
positions rise by one, so a block's context runs from (anchor - position of the anchor) up to the anchor.

R rows, T context tokens, A anchors, L block size, S slots of each block that ask (its last ones), Q = A * S queries,
K = T + A * L keys, I tiles of queries, J tiles of keys, M blocks that touch a tile of queries.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from blockdraft.models.drafter import DrafterShape

TILE = 128
"""Queries and keys of a tile; flex_attention's own default."""


class _Context(NamedTuple):
    """The context range of each block, int32 [R, A]; empty for an invalid block. A window raises `first` by slot."""

    first_RA: Tensor
    stop_RA: Tensor


class _Tiles(NamedTuple):
    """Which tiles hold anything visible, and which are visible throughout, bool [R, I, J]."""

    some_RIJ: Tensor
    every_RIJ: Tensor


class _Blocks(NamedTuple):
    """Of a layer kind."""

    length: int
    """L"""
    asking: int
    """S"""
    window: int | None
    causal: bool

    @property
    def first(self) -> int:
        """Slot of a block's first query."""
        return self.length - self.asking


def block_mask(
    shape: DrafterShape, position_RT: Tensor, anchor_RA: Tensor, window: int | None, num_slots: int | None = None
) -> BlockMask:
    """What `blocks.visibility` says, as tiles; every shape is fixed and nothing is read back from the device.

    With `num_slots` for queries of so many slots of each block, its last ones; else of all.
    """
    context = _context(position_RT, anchor_RA)
    length, num_tokens = shape.block_size, position_RT.shape[1]
    blocks = _Blocks(length, length if num_slots is None else num_slots, window, shape.is_causal(window))
    tiles = _tiles(context, num_tokens, blocks)
    partial_RIJ = tiles.some_RIJ & ~tiles.every_RIJ
    num_anchors = anchor_RA.shape[1]
    kv_num_blocks, kv_indices = _ordered(partial_RIJ)
    full_kv_num_blocks, full_kv_indices = _ordered(tiles.every_RIJ)
    q_num_blocks, q_indices = _ordered(partial_RIJ.mT)
    full_q_num_blocks, full_q_indices = _ordered(tiles.every_RIJ.mT)
    return BlockMask(
        seq_lengths=(num_anchors * blocks.asking, num_tokens + num_anchors * length),
        kv_num_blocks=kv_num_blocks,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_num_blocks,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num_blocks,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=_predicate(context, num_tokens, blocks),
    )


def _context(position_RT: Tensor, anchor_RA: Tensor) -> _Context:
    valid_RA = anchor_RA >= 0
    first_RA = anchor_RA - position_RT.gather(1, anchor_RA.clamp(min=0))
    return _Context(torch.where(valid_RA, first_RA, 0).int(), anchor_RA.clamp(min=0).int())


def context_ranges(
    position_RT: Tensor, anchor_RA: Tensor, block_size: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """First and one past the last context key that each block token sees, int32 [R, Q]; equal where it sees none."""
    first_RA, stop_RA = _context(position_RT, anchor_RA)
    stop_RAL = stop_RA[..., None].expand(-1, -1, block_size)
    first_RAL = first_RA[..., None].expand_as(stop_RAL)
    if window is not None:
        slot_L = torch.arange(block_size, device=anchor_RA.device, dtype=torch.int32)
        first_RAL = torch.maximum(first_RAL, stop_RAL + slot_L - (window - 1))
    return first_RAL.flatten(1).contiguous(), stop_RAL.flatten(1).contiguous()


def _tiles(context: _Context, num_tokens: int, blocks: _Blocks) -> _Tiles:
    device, num_anchors, window = context.stop_RA.device, context.stop_RA.shape[1], blocks.window
    num_queries = num_anchors * blocks.asking
    num_keys = num_tokens + num_anchors * blocks.length
    num_query_tiles, num_key_tiles = -(-num_queries // TILE), -(-num_keys // TILE)
    # The blocks of each tile of queries, and the slots of each that lie in it. Where blocks do not divide a tile one
    # may lie in two, and a tile touches one block more at either end.
    most = TILE // blocks.asking if TILE % blocks.asking == 0 else (TILE - 1) // blocks.asking + 2
    tile_I1 = torch.arange(num_query_tiles, device=device)[:, None] * TILE
    block_IM = tile_I1 // blocks.asking + torch.arange(most, device=device)
    start_IM = block_IM * blocks.asking
    is_inside_IM = (start_IM < tile_I1 + TILE) & (block_IM < num_anchors)
    low_slot_IM = (tile_I1 - start_IM).clamp(min=0) + blocks.first
    high_slot_IM = (tile_I1 + TILE - 1 - start_IM).clamp(max=blocks.asking - 1) + blocks.first

    safe_IM = block_IM.clamp(max=num_anchors - 1)
    first_RIM, stop_RIM = context.first_RA[:, safe_IM], context.stop_RA[:, safe_IM]
    widest_RIM = narrowest_RIM = first_RIM
    if window is not None:
        widest_RIM = torch.maximum(first_RIM, stop_RIM + low_slot_IM - window + 1)
        narrowest_RIM = torch.maximum(first_RIM, stop_RIM + high_slot_IM - window + 1)
    own_first_IM = num_tokens + block_IM * blocks.length
    longest_IM = own_first_IM + (high_slot_IM + 1 if blocks.causal else blocks.length)
    shortest_IM = own_first_IM + (low_slot_IM + 1 if blocks.causal else blocks.length)

    left_J = torch.arange(num_key_tiles, device=device) * TILE
    some_RIMJ = _meets(widest_RIM, stop_RIM, left_J) | _meets(own_first_IM, longest_IM, left_J)
    every_RIMJ = _covers(narrowest_RIM, stop_RIM, left_J) | _covers(own_first_IM, shortest_IM, left_J)
    is_inside_IM1 = is_inside_IM[..., None]
    # A tile that reaches past the last query or key is never full: the kernel has to mask its edge.
    is_whole_IJ = (tile_I1 + TILE <= num_queries) & (left_J + TILE <= num_keys)
    return _Tiles(
        (some_RIMJ & is_inside_IM1).any(2),
        (every_RIMJ | ~is_inside_IM1).all(2) & is_whole_IJ,
    )


def _meets(first: Tensor, stop: Tensor, left_J: Tensor) -> Tensor:
    """Whether the range [first, stop) has a key in each tile, [..., J]."""
    return torch.maximum(first[..., None], left_J) < torch.minimum(stop[..., None], left_J + TILE)


def _covers(first: Tensor, stop: Tensor, left_J: Tensor) -> Tensor:
    """Whether the range [first, stop) holds the whole of each tile, [..., J]."""
    return (first[..., None] <= left_J) & (left_J + TILE <= stop[..., None])


def _ordered(chosen_RXY: Tensor) -> tuple[Tensor, Tensor]:
    """Count and numbers of the chosen tiles of each line, chosen ones first, int32 [R, 1, X] and [R, 1, X, Y]."""
    order_RXY = torch.argsort(chosen_RXY.to(torch.int8), dim=-1, descending=True, stable=True)
    count_RX = chosen_RXY.sum(-1, dtype=torch.int32)
    return count_RX[:, None].contiguous(), order_RXY.int()[:, None].contiguous()


def _predicate(
    context: _Context, num_tokens: int, blocks: _Blocks
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    first_RA, stop_RA = context
    # Plain numbers: what is compiled around the predicate need not look into a tuple.
    length, asking, first_slot, window, causal = (
        blocks.length,
        blocks.asking,
        blocks.first,
        blocks.window,
        blocks.causal,
    )

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        block, slot = query // asking, query % asking + first_slot
        first, stop = first_RA[row, block], stop_RA[row, block]
        if window is not None:
            first = torch.maximum(first, stop + slot - window + 1)
        own = key - num_tokens - block * length
        last = slot if causal else length - 1
        return ((key >= first) & (key < stop)) | ((own >= 0) & (own <= last))

    return sees
