"""R rows, T tokens of a row, A anchors of a row, L block positions."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockdraft.data.anchors import (
    MIN_ANCHORS,
    block_labels,
    deal_anchors,
    default_gamma,
    eligible_anchors,
    position_weights,
    sample_anchors,
)

COUNTS = st.lists(st.integers(0, 400), min_size=0, max_size=40)


def row(*documents: str, length: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids, documents and loss masks of one row; a document is a string of 0 and 1, its loss mask."""
    mask = "".join(documents)
    length = length or len(mask)
    mask_T = np.zeros(length, dtype=np.int8)
    mask_T[: len(mask)] = [int(c) for c in mask]
    document_T = np.full(length, -1, dtype=np.int64)
    document_T[: len(mask)] = np.repeat(np.arange(len(documents)), [len(d) for d in documents])
    return np.arange(length) + 1000, document_T, mask_T


def labels(documents: tuple[str, ...], anchors: list[int], block_size: int, *, after_gap: bool = False):
    ids_T, document_T, mask_T = row(*documents)
    found = block_labels(
        ids_T[None], document_T[None], mask_T[None], np.asarray([anchors]), block_size, after_gap=after_gap
    )
    return found.label_RAL[0], found.supervised_RAL[0].astype(int).tolist()


def test_an_anchor_and_its_successor_are_supervised_in_one_document():
    _, document_T, mask_T = row("0011101", "110", "1")
    #                                   0011101    110    1: a document's last token has no successor
    assert eligible_anchors(mask_T, document_T).astype(int).tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0]


def test_padding_is_never_eligible():
    _, document_T, mask_T = row("11", length=5)
    mask_T[2:] = 1
    assert eligible_anchors(mask_T, document_T).tolist() == [True, False, False, False, False]


def test_slots_are_labelled_by_position_and_slot_0_is_never_supervised():
    label_AL, supervised = labels(("011111111",), [1, 3], 4)
    assert label_AL.tolist() == [[1001, 1002, 1003, 1004], [1003, 1004, 1005, 1006]]
    assert supervised == [[0, 1, 1, 1], [0, 1, 1, 1]]


def test_no_label_crosses_a_document_and_none_lies_behind_the_row():
    # A block may run past its document's end: what lies there is masked.
    _, supervised = labels(("11111", "11111"), [2, 3, 8], 4)
    assert supervised == [[0, 1, 1, 0], [0, 1, 0, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize(
    ("after_gap", "expected"), [(False, [0, 1, 1, 0, 0, 0, 0, 0]), (True, [0, 1, 1, 0, 0, 1, 1, 0])]
)
def test_supervision_ends_at_the_first_gap_unless_told_otherwise(after_gap, expected):
    _, supervised = labels(("0111001101",), [1], 8, after_gap=after_gap)
    assert supervised == [expected]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(2, 16), st.integers(0, 2**32 - 1))
def test_without_gaps_both_rules_agree(lengths, block_size, seed):
    ids_T, document_T, mask_T = row(*("1" * length for length in lengths))
    anchor_A = np.random.default_rng(seed).integers(-1, len(ids_T), 12)
    arguments = (ids_T[None], document_T[None], mask_T[None], anchor_A[None], block_size)
    strict, loose = block_labels(*arguments), block_labels(*arguments, after_gap=True)
    assert np.array_equal(strict.supervised_RAL, loose.supervised_RAL)


def test_an_invalid_block_has_no_labels():
    label_AL, supervised = labels(("1111",), [-1, 0], 3)
    assert label_AL[0].tolist() == [0, 0, 0]
    assert supervised == [[0, 0, 0], [0, 1, 1]]


def test_two_documents_of_20_and_30_tokens_have_exact_counts():
    # Case 13. Every position but the last of each document is eligible; a block at position p of a document of n
    # tokens supervises min(7, n - 1 - p) slots.
    ids_T, document_T, mask_T = row("1" * 20, "1" * 30)
    anchor_A = np.flatnonzero(eligible_anchors(mask_T, document_T))
    assert len(anchor_A) == 19 + 29
    found = block_labels(ids_T[None], document_T[None], mask_T[None], anchor_A[None], 8)
    counts = found.supervised_RAL[0].sum(-1).tolist()
    assert counts == [min(7, 19 - p) for p in range(19)] + [min(7, 29 - p) for p in range(29)]
    assert sum(counts) == (12 * 7 + 28) + (22 * 7 + 28)
    label_ALs = found.label_RAL[0][found.supervised_RAL[0]]
    source_ALs = np.repeat(anchor_A, counts)
    assert np.array_equal(document_T[label_ALs - 1000], document_T[source_ALs])


@given(
    st.lists(st.text("01", min_size=1, max_size=30), min_size=1, max_size=5),
    st.integers(2, 16),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_supervision_equals_the_rule_spelled_out(documents, block_size, after_gap, seed):
    ids_T, document_T, mask_T = row(*documents)
    anchor_A = np.random.default_rng(seed).integers(-1, len(ids_T), 8)
    found = block_labels(ids_T[None], document_T[None], mask_T[None], anchor_A[None], block_size, after_gap=after_gap)
    for anchor, label_L, supervised_L in zip(anchor_A, found.label_RAL[0], found.supervised_RAL[0], strict=True):
        broken = False
        for slot in range(block_size):
            t = anchor + slot
            good = anchor >= 0 and t < len(ids_T) and document_T[t] == document_T[anchor] and mask_T[t] == 1
            expected = slot > 0 and good and not (broken and not after_gap)
            broken = broken or (slot > 0 and not good)
            assert supervised_L[slot] == expected
            assert not expected or label_L[slot] == ids_T[t]


def test_anchors_are_dealt_by_largest_remainder():
    # Minimum 4 each, the remaining 8 by 60 : 30 : 10, that is 4.8, 2.4, 0.8.
    assert deal_anchors([60, 30, 10], 20) == [4 + 5, 4 + 2, 4 + 1]


def test_what_a_cap_leaves_over_is_dealt_again():
    assert deal_anchors([6, 100, 100], 80) == [6, 37, 37]
    assert deal_anchors([5, 5, 5], 100) == [5, 5, 5]
    assert deal_anchors([3, 1, 0], 10) == [3, 1, 0]


def test_the_minimum_shrinks_when_the_row_cannot_give_it():
    assert deal_anchors([100, 100, 100], 6) == [2, 2, 2]
    assert sum(deal_anchors([100] * 10, 3)) == 3
    assert deal_anchors([], 5) == []


@given(COUNTS, st.integers(0, 600))
def test_dealing_keeps_sums_caps_and_minimum(counts, num_anchors):
    dealt = deal_anchors(counts, num_anchors)
    assert sum(dealt) == min(num_anchors, sum(counts))
    assert all(0 <= given <= count for given, count in zip(dealt, counts, strict=True))
    if sum(min(MIN_ANCHORS, count) for count in counts) <= num_anchors:
        assert all(given >= min(MIN_ANCHORS, count) for given, count in zip(dealt, counts, strict=True))


@given(COUNTS, st.integers(0, 600))
def test_a_document_with_more_to_offer_never_gets_less_than_one_with_fewer(counts, num_anchors):
    dealt = sorted(zip(counts, deal_anchors(counts, num_anchors), strict=True))
    assert all(less <= more + 1 for (_, less), (_, more) in itertools.pairwise(dealt))


def test_many_short_conversations_get_their_share():
    # Case 14: 60 short replies beside 4 long ones in a row of 512 anchors.
    counts = [12] * 60 + [900] * 4
    dealt = deal_anchors(counts, 512)
    assert sum(dealt) == 512
    assert min(dealt) >= MIN_ANCHORS
    coverage = [given / count for given, count in zip(dealt, counts, strict=True)]
    assert min(coverage[:60]) >= 4 / 12


def test_anchors_are_sorted_distinct_eligible_and_uniform():
    _, document_T, mask_T = row("0" * 5 + "1" * 20, "0" * 3 + "1" * 10, length=60)
    eligible = set(np.flatnonzero(eligible_anchors(mask_T, document_T)).tolist())
    generator = np.random.default_rng(0)
    hits = np.zeros(60)
    for _ in range(400):
        anchor_A = sample_anchors(mask_T, document_T, 10, generator)
        assert np.all(np.diff(anchor_A) > 0)
        assert set(anchor_A.tolist()) <= eligible
        hits[anchor_A] += 1
    # 19 and 9 eligible: 4 each, one more by share, one more by remainder.
    assert (hits[5:24].sum(), hits[28:37].sum()) == (400 * 5, 400 * 5)
    for block in (hits[5:24], hits[28:37]):
        assert block.min() > 0.7 * block.mean()
        assert block.max() < 1.3 * block.mean()


def test_missing_anchors_are_invalid_blocks():
    _, document_T, mask_T = row("0111", "0000", length=12)
    assert sample_anchors(mask_T, document_T, 5, np.random.default_rng(0)).tolist() == [1, 2, -1, -1, -1]
    assert sample_anchors(mask_T * 0, document_T, 3, np.random.default_rng(0)).tolist() == [-1, -1, -1]


def test_position_weights_decay_by_the_block_sizes_gamma():
    assert [default_gamma(size) for size in (16, 10, 8)] == [7.0, 5.0, 4.0]
    assert default_gamma(12) == pytest.approx(5.5)
    assert default_gamma(32) == pytest.approx(13.0)
    assert default_gamma(4) == 2.0
    weight_L = position_weights(5, 2.0)
    assert weight_L.dtype == np.float32
    assert weight_L.tolist() == pytest.approx([0.0, 1.0, np.exp(-0.5), np.exp(-1.0), np.exp(-1.5)], rel=1e-6)
