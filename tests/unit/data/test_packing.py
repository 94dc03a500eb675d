"""B documents of a target batch, S tokens of a document in it."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockdraft.config import ConfigError
from blockdraft.data.packing import bucket_for, bucket_lengths, budget_bucket, epoch_plan, padding_share, shapes_of


def plans(lengths, *, num_rows=1, row_length=64, sort_window=16, target_tokens=128, seed=0):
    return list(
        epoch_plan(
            np.asarray(lengths),
            num_rows=num_rows,
            row_length=row_length,
            sort_window=sort_window,
            target_tokens=target_tokens,
            generator=np.random.default_rng(seed),
        )
    )


@given(st.lists(st.integers(1, 64), min_size=1, max_size=80), st.integers(1, 4), st.integers(64, 400))
def test_no_batch_has_more_tokens_than_the_budgets_own(lengths, num_rows, target_tokens):
    budget = budget_bucket(64, target_tokens)
    shapes = shapes_of(plans(lengths, num_rows=num_rows, target_tokens=target_tokens))
    assert all(shape.batch * shape.length <= budget.batch * budget.length for shape in shapes)
    assert budget.batch * budget.length <= max(target_tokens, bucket_lengths(64)[-1])


@given(
    st.lists(st.integers(1, 64), min_size=1, max_size=80),
    st.integers(1, 4),
    st.integers(1, 40),
    st.integers(64, 400),
    st.integers(0, 1000),
)
def test_every_document_has_one_place_of_its_own(lengths, num_rows, sort_window, target_tokens, seed):
    found = plans(lengths, num_rows=num_rows, sort_window=sort_window, target_tokens=target_tokens, seed=seed)
    placed = [one for plan in found for one in plan.placed]
    assert sorted(one.document for one in placed) == list(range(len(lengths)))
    for plan in found:
        taken = np.zeros((num_rows, 64), dtype=int)
        for one in plan.placed:
            assert one.length == lengths[one.document]
            assert one.start + one.length <= 64
            taken[one.row, one.start : one.start + one.length] += 1
        assert taken.max() == 1, "two documents in one place"
        # Padding only at the end of a row.
        assert np.all(np.diff(taken, axis=1) <= 0)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=80), st.integers(1, 4), st.integers(64, 400))
def test_target_batches_hold_every_document_once_within_their_budget(lengths, num_rows, target_tokens):
    for plan in plans(lengths, num_rows=num_rows, target_tokens=target_tokens):
        read = [one for _, batch in plan.batches for one in batch]
        assert sorted(read) == sorted(plan.placed)
        for bucket, batch in plan.batches:
            assert 0 < len(batch) <= bucket.batch
            assert max(one.length for one in batch) <= bucket.length
            assert bucket.batch * bucket.length <= max(target_tokens, bucket.length)


def test_the_order_depends_on_the_generator_alone():
    lengths = np.random.default_rng(0).integers(5, 60, 200)
    assert plans(lengths, seed=1) == plans(lengths, seed=1)
    assert plans(lengths, seed=1) != plans(lengths, seed=2)


def test_a_windows_order_is_shuffled():
    # Sorted by length inside a window, but long slots must not always come last.
    lengths = np.random.default_rng(0).integers(5, 60, 400)
    mean = [np.mean([one.length for one in plan.placed]) for plan in plans(lengths, sort_window=400)]
    assert sum(later < earlier for earlier, later in itertools.pairwise(mean)) > len(mean) / 4


def mixtures() -> dict[str, np.ndarray]:
    draw = np.random.default_rng(0)
    spread = np.exp(draw.uniform(np.log(20), np.log(4000), 3000)).astype(int)
    return {
        "even": draw.integers(20, 4001, 3000),
        "log-even": spread,
        "chat": np.clip(draw.lognormal(6.0, 0.9, 3000).astype(int), 20, 4000),
        "one window": spread[:1024],
    }


@pytest.mark.parametrize("name", mixtures())
@pytest.mark.parametrize("num_rows", [1, 2])
def test_at_most_a_tenth_of_the_targets_tokens_is_padding(name, num_rows):
    # Case 32, at the default row length, window and token budget.
    lengths = mixtures()[name]
    found = plans(lengths, num_rows=num_rows, row_length=4096, sort_window=1024, target_tokens=8192)
    share = padding_share(found)
    assert share.tokens - share.padding == lengths.sum()
    assert share.padding / share.tokens <= 0.10


def test_shapes_are_few_and_largest_first():
    lengths = mixtures()["even"]
    found = shapes_of(plans(lengths, row_length=4096, sort_window=1024, target_tokens=8192))
    sizes = [bucket.batch * bucket.length for bucket in found]
    assert sizes == sorted(sizes, reverse=True)
    assert len({bucket.length for bucket in found}) <= len(bucket_lengths(4096)) <= 80


def test_a_batch_has_the_smallest_eighth_that_holds_its_documents():
    # Eighths of nine are rounded down, so that one document is not padded to two.
    for count, batch in enumerate([1, 2, 3, 4, 5, 6, 7, 9, 9], 1):
        (plan,) = plans([64] * count, num_rows=count, target_tokens=9 * 64)
        assert shapes_of([plan]) == [(batch, 64)], count
    # Of a batch below eight every size occurs.
    for count in (1, 2, 3):
        (plan,) = plans([64] * count, num_rows=count, target_tokens=3 * 64)
        assert shapes_of([plan]) == [(count, 64)]


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(5000, 20000))
def test_a_bucket_is_the_smallest_that_holds_the_document(longest, length, budget):
    length = min(length, longest)
    sizes = bucket_lengths(longest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] >= longest
    bucket = bucket_for(length, sizes, budget)
    assert bucket.length == min(size for size in sizes if size >= length)
    assert bucket.batch == max(1, budget // bucket.length)


def test_a_document_longer_than_a_row_is_refused():
    with pytest.raises(ConfigError, match=r"row_length must be at least the longest document \(65 tokens\), got 64"):
        plans([3, 65])


def test_a_budget_below_a_row_is_refused():
    with pytest.raises(ConfigError, match=r"data\.target_tokens must be at least data\.row_length \(64\), got 63"):
        plans([3, 64], target_tokens=63)
