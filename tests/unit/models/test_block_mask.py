"""R rows, T context tokens, A anchors, L block size, Q = A * L queries, K = T + Q keys, I and J tiles of 128."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from blockdraft.models.block_mask import TILE, block_mask, context_ranges
from blockdraft.models.blocks import visibility
from blockdraft.models.drafter import DrafterShape
from integration.tiny import tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def shape() -> DrafterShape:
    return tiny_drafter(tiny_target("llama"), 4).shape


def random_rows(random: np.random.Generator, num_rows: int, num_tokens: int, num_anchors: int) -> tuple[Tensor, ...]:
    """document_RT, position_RT and sorted anchor_RA: contiguous documents, padding, invalid anchors at the end."""
    document_RT = np.full((num_rows, num_tokens), -1)
    position_RT = np.zeros((num_rows, num_tokens), dtype=np.int64)
    anchor_RA = np.full((num_rows, num_anchors), -1)
    for one in range(num_rows):
        used = int(random.integers(2, num_tokens + 1))
        cuts = np.unique(random.integers(1, used, size=random.integers(0, 6)))
        for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, used], strict=True)):
            document_RT[one, start:stop] = number
            position_RT[one, start:stop] = np.arange(stop - start)
        count = int(random.integers(0, min(num_anchors, used) + 1))
        dense = random.random() < 0.5
        pool = np.arange(max(0, used - 2 * count) if dense else 0, used)
        anchor_RA[one, :count] = np.sort(random.choice(pool, count, replace=False))
    return torch.from_numpy(document_RT), torch.from_numpy(position_RT), torch.from_numpy(anchor_RA)


def tiles(counts: Tensor, order: Tensor) -> Tensor:
    """The dense table that counts and ordered indices stand for, bool [R, X, Y]."""
    chosen = torch.arange(order.shape[-1]) < counts[..., None]
    return torch.zeros(order.shape, dtype=torch.bool).scatter(-1, order.long(), chosen)[:, 0]


def tables(mask: BlockMask) -> dict[str, Tensor]:
    """Partial and full tiles, by queries and by keys."""
    names = {"": ("kv_num_blocks", "kv_indices"), "full": ("full_kv_num_blocks", "full_kv_indices")}
    transposed = {"q": ("q_num_blocks", "q_indices"), "full_q": ("full_q_num_blocks", "full_q_indices")}
    return {name: tiles(*(vars(mask)[part] for part in parts)) for name, parts in (names | transposed).items()}


SIZES = [(4, 100), (5, 60), (7, 40), (8, 48), (10, 30), (12, 50), (16, 40), (16, 8), (40, 7), (140, 3), (200, 2)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "num_anchors"), SIZES)
def test_every_tile_is_what_the_predicate_makes_it(shape, size, num_anchors, causal):
    random = np.random.default_rng([size, num_anchors, causal])
    for case in range(12):
        window = None if case % 3 == 0 else int(random.integers(size, 300))
        num_tokens = int(random.choice([128, 256, 384, 512, 77, 200, 129, 640]))
        document_RT, position_RT, anchor_RA = random_rows(random, 1 + case % 2, num_tokens, num_anchors)
        here = dataclasses.replace(
            shape, block_size=size, causal=causal, window=window, window_layers=(0,) if window else ()
        )
        # In every second window and every second full layer slot 0 does not ask, as in the last layer.
        num_slots = size - case // 3 % 2
        mask = block_mask(here, position_RT, anchor_RA, window, num_slots)
        seen_RQK = visibility(document_RT, position_RT, anchor_RA, size, window=window, causal=causal)
        seen_RQK = seen_RQK.unflatten(1, (-1, size))[:, :, size - num_slots :].flatten(1, 2)
        num_rows, num_queries, num_keys = seen_RQK.shape
        dense = create_mask(mask.mask_mod, num_rows, 1, num_queries, num_keys, device="cpu")[:, 0]
        assert torch.equal(dense, seen_RQK)

        def sees(row, _head, query, key, seen_RQK=seen_RQK):
            return seen_RQK[row, query, key]

        expected = create_block_mask(sees, num_rows, None, num_queries, num_keys, device="cpu")
        assert mask.seq_lengths == expected.seq_lengths
        found, wanted = tables(mask), tables(expected)
        for name, table in wanted.items():
            assert torch.equal(found[name], table), f"{name}: T {num_tokens}, window {window}, case {case}"
        full = found["full"].repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)[:, :num_queries, :num_keys]
        assert bool((seen_RQK | ~full).all())


@pytest.mark.parametrize("window", [None, 5, 6, 9, 40])
def test_a_tokens_range_is_what_the_predicate_lets_it_see(window):
    size, num_tokens, random = 5, 90, np.random.default_rng(3)
    document_RT, position_RT, anchor_RA = random_rows(random, 6, num_tokens, 12)
    first_RQ, stop_RQ = context_ranges(position_RT, anchor_RA, size, window)
    seen_RQK = visibility(document_RT, position_RT, anchor_RA, size, window=window, causal=False)
    key_T = torch.arange(num_tokens)
    found_RQT = (key_T >= first_RQ[..., None]) & (key_T < stop_RQ[..., None])
    assert torch.equal(found_RQT, seen_RQK[..., :num_tokens])
    assert bool((first_RQ <= stop_RQ).all())
    assert (first_RQ < stop_RQ).any()
    assert first_RQ.dtype == stop_RQ.dtype == torch.int32


def test_full_tiles_occur_in_context_and_block(shape):
    # Guards the test above against cases in which no tile is full.
    position_RT, anchor_RA = torch.arange(512)[None], torch.tensor([[400, 401, 402]])
    here = dataclasses.replace(shape, block_size=256)
    full = tables(block_mask(here, position_RT, anchor_RA, None))["full"][0]
    assert full.int().tolist() == [
        [1, 1, 1, 0, *own] for own in ([1, 1, 0, 0, 0, 0],) * 2 + ([0, 0, 1, 1, 0, 0],) * 2 + ([0, 0, 0, 0, 1, 1],) * 2
    ]


def test_shapes_follow_sizes_alone(shape):
    shapes = []
    for anchors in ([-1, -1, -1, -1], [1, 5, 9, 120]):
        mask = block_mask(shape, torch.arange(128)[None], torch.tensor([anchors]), None)
        shapes.append([vars(mask)[name].shape for name in ("kv_indices", "full_kv_indices", "q_indices")])
        assert mask.kv_indices.dtype == mask.kv_num_blocks.dtype == torch.int32
        assert mask.kv_indices.is_contiguous()
        assert mask.q_indices.is_contiguous()
    assert shapes[0] == shapes[1]
