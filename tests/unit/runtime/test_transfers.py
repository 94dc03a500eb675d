"""Page-locked memory on the way to GPUs: how much is taken before the first step."""

from collections import Counter

import pytest

from blockdraft.data.loader import Fill, Loader, LoaderConfig
from blockdraft.runtime.channel import QUEUE_LIMIT
from blockdraft.runtime.transfers import BLOCKS, carried_by, page_locked_blocks
from unit.data.test_loader import config, store_of


def test_it_is_taken_in_every_size_that_a_slot_needs():
    large = LoaderConfig(
        row_length=4096, num_rows=1, num_anchors=512, sort_window=8, target_tokens=8192, block_size=16,
        weight_L=(1.0,) * 16, after_gap=False, seed=0, num_drafters=1, accumulation=1, reuse=1,
    )  # fmt: skip
    found = page_locked_blocks(carried_by(large, None, 2))
    assert list(found) == [512 * 2**i for i in range(len(found))]
    # Labels are 512 x 15 numbers of 8 bytes, a target batch twice its budget at most.
    assert max(found) == 131072
    # Ids, documents and positions of 4096 tokens, and weights of 512 x 15 slots.
    assert found[32768] == BLOCKS + 4 * (QUEUE_LIMIT + 2 + 2)


def block_sizes(fill: Fill) -> list[int]:
    passes = [tensor for one in fill.passes for tensor in one[4:] if tensor is not None]
    batches = [tensor for batch in fill.batches for tensor in batch]
    numbers = [tensor.numel() * tensor.element_size() for tensor in (*passes, *batches)]
    return [max(512, 1 << (number - 1).bit_length()) for number in numbers]


@pytest.mark.parametrize("reuse", [1, 8])
@pytest.mark.parametrize("num_anchors", [6, 32])
def test_all_that_is_under_way_finds_a_block(reuse, num_anchors):
    depth, lengths = 3, [60] * 30
    loader_config = config(row_length=64, num_rows=4, num_anchors=num_anchors, reuse=reuse, target_tokens=256)
    loader = Loader(store_of(lengths), loader_config)  # type: ignore[arg-type]
    loader.fix_row_budget(20 * reuse)
    taken = page_locked_blocks(carried_by(loader_config, loader.row_budget, depth))
    # A full queue, every slot, what the loader has in hand, and a drafter's last fill.
    under_way = list(loader.fills(0, 20 * reuse))[: QUEUE_LIMIT + depth + 2]
    assert len(under_way) == QUEUE_LIMIT + depth + 2
    needed = Counter(size for fill in under_way for size in block_sizes(fill))
    assert all(number <= taken[size] for size, number in needed.items()), (needed, taken)
