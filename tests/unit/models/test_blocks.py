"""R rows, T context tokens, A anchors of a row, L block positions, Q = A * L block tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.models.blocks import block_positions, block_tokens, check_window, visibility


def row(*lengths: int, padding: int = 0) -> tuple[Tensor, Tensor]:
    """document_RT and position_RT of one packed row."""
    document = [index for index, length in enumerate(lengths) for _ in range(length)] + [-1] * padding
    position = [t for length in lengths for t in range(length)] + [0] * padding
    return torch.tensor([document]), torch.tensor([position])


def seen(lengths: tuple[int, ...], anchors: list[int], block_size: int, *, padding: int = 0, **options) -> list:
    document_RT, position_RT = row(*lengths, padding=padding)
    return visibility(document_RT, position_RT, torch.tensor([anchors]), block_size, **options)[0].int().tolist()


def test_a_block_sees_only_its_own_document_before_its_anchor():
    assert seen((3, 3), [1, 4], 2) == [
        # context 0..5      block of 1  block of 4
        [1, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0, 1, 1],
        [0, 0, 0, 1, 0, 0, 0, 0, 1, 1],
    ]


def test_anchors_closer_than_a_block_do_not_leak():
    # Case 1: positions are compared, never block indices. Blocks of 2 and 3 overlap in what they draft.
    assert seen((6,), [2, 3], 3) == [
        # context 0..5      block of 2  block of 3
        [1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1],
        [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1],
        [1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1],
    ]


def test_anchors_at_10_and_12_with_blocks_of_16():
    # Case 1 in its own numbers.
    table = seen((40,), [10, 12], 16)
    for query, keys in enumerate(table):
        anchor, own = (10, range(40, 56)) if query < 16 else (12, range(56, 72))
        assert [k for k, visible in enumerate(keys) if visible] == [*range(anchor), *own]


def test_an_invalid_block_sees_only_itself():
    assert seen((2,), [-1, 1], 2, padding=2) == [
        # context     invalid  block of 1
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [1, 0, 0, 0, 0, 0, 1, 1],
        [1, 0, 0, 0, 0, 0, 1, 1],
    ]


def test_a_window_moves_with_the_slot():
    # Context positions above position(anchor) + k - 3, that is 5 + k - 3.
    assert seen((8,), [5], 3, window=3) == [
        # context 0..7          block
        [0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1],
    ]


def test_a_window_counts_positions_within_the_document():
    assert seen((4, 5), [7], 2, window=2) == [
        # positions 0..3 and 0..4; the anchor's is 3
        [0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    ]


def test_a_causal_block_sees_earlier_slots():
    assert seen((2,), [1, 0], 3, causal=True) == [
        [1, 0, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 1, 0, 0, 0, 0],
        [1, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1, 1, 1],
    ]


def test_rows_are_apart():
    one, two = row(3, 3), row(2, padding=4)
    document_RT, position_RT = torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]])
    found = visibility(document_RT, position_RT, torch.tensor([[4], [1]]), 2)
    for r, (lengths, padding, anchor) in enumerate([((3, 3), 0, 4), ((2,), 4, 1)]):
        assert found[r].int().tolist() == seen(lengths, [anchor], 2, padding=padding)


@st.composite
def packed_rows(draw):
    """Documents, anchors (also invalid ones, also close together), block size, window, causal flag."""
    lengths = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=4)))
    block_size = draw(st.integers(2, 6))
    anchors = draw(st.lists(st.integers(-1, sum(lengths) - 1), min_size=1, max_size=5))
    window = draw(st.none() | st.integers(block_size, 14))
    return lengths, anchors, block_size, window, draw(st.booleans()), draw(st.integers(0, 5))


@given(packed_rows())
def test_visibility_equals_the_rule_spelled_out(case):
    lengths, anchors, size, window, causal, padding = case
    (document_T,), (position_T,) = (part.tolist() for part in row(*lengths, padding=padding))
    table = seen(lengths, anchors, size, padding=padding, window=window, causal=causal)
    for query, keys in enumerate(table):
        block, slot = divmod(query, size)
        anchor = anchors[block]
        assert any(keys), "a fully masked row is NaN after softmax"
        for key, visible in enumerate(keys):
            if key >= len(document_T):
                other, other_slot = divmod(key - len(document_T), size)
                expected = other == block and (not causal or other_slot <= slot)
            else:
                expected = anchor >= 0 and document_T[key] == document_T[anchor]
                expected = expected and position_T[key] < position_T[anchor]
                if expected and window is not None:
                    expected = position_T[key] > position_T[anchor] + slot - window
            assert visible == expected


@given(packed_rows())
def test_positions_count_from_the_anchors_own(case):
    lengths, anchors, size, _, _, padding = case
    _, position_RT = row(*lengths, padding=padding)
    found = block_positions(position_RT, torch.tensor([anchors]), size).view(-1, size).tolist()
    starts = [position_RT[0, anchor].item() if anchor >= 0 else 0 for anchor in anchors]
    assert found == [list(range(start, start + size)) for start in starts]


def test_a_block_reads_its_anchor_and_mask_tokens():
    ids_RT = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    found = block_tokens(ids_RT, torch.tensor([[3, -1], [0, 2]]), 3, 99)
    assert found.tolist() == [[13, 99, 99, 99, 99, 99], [20, 99, 99, 22, 99, 99]]


def test_a_window_below_a_block_is_refused():
    check_window(None, 8)
    check_window(8, 8)
    with pytest.raises(ConfigError, match=r"drafter\.window must be at least drafter\.block_size \(8\), got 7"):
        check_window(7, 8)
