"""Micro-batches on their way from the loader to the GPUs.

R rows, T tokens of a row, A anchors, S drafted slots, M rows of the head; B documents and P tokens of a target batch.
"""

from typing import Final

import torch

from blockdraft.data.loader import Fill, LoaderConfig, MicroBatch, TargetBatch
from blockdraft.training.step import Blocks

SMALLEST_BYTES: Final = 512
BLOCKS: Final = 64
"""Page-locked blocks of each size and drafter; a few slots' contents and reports are under way at a time."""


def page_locked_sizes(config: LoaderConfig) -> list[int]:
    """Powers of two, as torch hands page-locked memory out, up to the largest tensor of a slot's contents."""
    rows, drafted = config.num_rows * config.row_length, config.num_anchors * (config.block_size - 1)
    largest = 8 * max(rows, config.num_rows * drafted, 2 * config.target_tokens)
    sizes = [SMALLEST_BYTES]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes


def take_page_locked(config: LoaderConfig, num_drafters: int) -> None:
    """Has torch take all the page-locked memory that a steady state needs, and keep it.

    Taking more waits until every GPU of the process is idle, so it must not happen while one waits for another in a
    collective.
    """
    sizes = [size for size in page_locked_sizes(config) for _ in range(BLOCKS * num_drafters)]
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
