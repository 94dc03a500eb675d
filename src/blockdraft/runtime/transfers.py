"""Micro-batches on their way from the loader to the GPUs.

R rows, T tokens of a row, A anchors, S drafted slots, M rows of the head; B documents and P tokens of a target batch.
"""

from typing import Final, NamedTuple

import torch

from blockdraft.data.loader import Fill, LoaderConfig, MicroBatch, TargetBatch
from blockdraft.runtime.channel import QUEUE_LIMIT
from blockdraft.training.step import Blocks

SMALLEST_BYTES: Final = 512
BLOCKS: Final = 64
"""Page-locked blocks of each size and drafter for what is small or short-lived: target batches, reports, addresses."""
ON_THE_WAY: Final = 2
"""Fills of a drafter that are neither queued nor in a slot: one is being queued, of one copies are under way."""


class Carried(NamedTuple):
    """What decides the sizes of the tensors that travel."""

    tokens: int
    """R * T"""
    anchors: int
    """R * A"""
    block_size: int
    target_tokens: int
    reuse: int
    row_budget: int | None
    """M"""
    depth: int
    """Slots of a drafter."""


def page_locked_blocks(carried: Carried) -> dict[int, int]:
    """How many blocks of which size a drafter's part of the steady state needs.

    Sizes are powers of two, as torch hands page-locked memory out, up to the largest tensor of a slot's contents.
    Every fill under way has the tensors of all its passes.
    """
    drafted = carried.anchors * (carried.block_size - 1)
    tensors = [8 * carried.tokens] * 3
    tensors += [8 * carried.anchors, 8 * drafted, drafted, 4 * drafted, 8 * (carried.row_budget or 0)]
    sizes = [SMALLEST_BYTES]
    while sizes[-1] < max(*tensors, 16 * carried.target_tokens):
        sizes.append(2 * sizes[-1])
    found = dict.fromkeys(sizes, BLOCKS)
    for tensor in tensors:
        size = next(size for size in sizes if size >= tensor)
        found[size] += (QUEUE_LIMIT + carried.depth + ON_THE_WAY) * carried.reuse
    return found


def carried_by(config: LoaderConfig, row_budget: int | None, depth: int) -> Carried:
    """What a loader hands out."""
    return Carried(
        tokens=config.num_rows * config.row_length,
        anchors=config.num_rows * config.num_anchors,
        block_size=config.block_size,
        target_tokens=config.target_tokens,
        reuse=config.reuse,
        row_budget=row_budget,
        depth=depth,
    )


def take_page_locked(config: LoaderConfig, num_drafters: int, row_budget: int | None, depth: int) -> None:
    """Has torch take all the page-locked memory that a steady state needs, and keep it.

    Taking more waits until every GPU of the process is idle, so it must not happen while one waits for another in a
    collective.
    """
    found = page_locked_blocks(carried_by(config, row_budget, depth))
    sizes = [size for size, number in found.items() for _ in range(number * num_drafters)]
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
    del blocks


def pinned(fill: Fill) -> Fill:
    """The same fill in page-locked memory: only from there a copy to a GPU does not make its thread wait."""
    batches = tuple(TargetBatch(*(tensor.pin_memory() for tensor in batch)) for batch in fill.batches)
    passes = tuple(
        one._replace(
            input_ids_RT=one.input_ids_RT.pin_memory(),
            document_RT=one.document_RT.pin_memory(),
            position_RT=one.position_RT.pin_memory(),
            anchor_RA=one.anchor_RA.pin_memory(),
            label_RAS=one.label_RAS.pin_memory(),
            supervised_RAS=one.supervised_RAS.pin_memory(),
            weight_RAS=one.weight_RAS.pin_memory(),
            row_M=None if one.row_M is None else one.row_M.pin_memory(),
        )
        for one in fill.passes
    )
    return fill._replace(batches=batches, passes=passes)


def to_device(one: MicroBatch, device: torch.device) -> Blocks:
    """The tensors of a micro-batch on the drafter's device."""
    tensors = (
        one.input_ids_RT,
        one.document_RT,
        one.position_RT,
        one.anchor_RA,
        one.label_RAS,
        one.supervised_RAS,
        one.weight_RAS,
    )
    blocks = Blocks(*(tensor.to(device, non_blocking=True) for tensor in tensors))
    return blocks if one.row_M is None else blocks._replace(row_M=one.row_M.to(device, non_blocking=True))
