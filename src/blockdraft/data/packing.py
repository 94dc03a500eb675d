"""From documents to micro-batches: windows sorted by length, packed rows, target batches of few shapes.

R rows, T tokens of a row, B documents of a target batch, S tokens of a document in it (padding included).
Works on lengths alone, so the whole order of a run can be replayed without touching a token.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from blockdraft.config import ConfigError

GRAIN = 8
"""Target batch lengths are multiples of this."""
SPACING = 1.09
"""Ratio between neighbouring target batch lengths: the mean padding is half of what it is above 1."""


class Bucket(NamedTuple):
    """Shape of a target batch."""

    batch: int
    length: int


class Placed(NamedTuple):
    """A document's place: which row, from which token on."""

    document: int
    row: int
    start: int
    length: int


class FillPlan(NamedTuple):
    """One slot's contents: its documents' places, and how the target reads them."""

    placed: tuple[Placed, ...]
    batches: tuple[tuple[Bucket, tuple[Placed, ...]], ...]


class PaddingShare(NamedTuple):
    """Tokens the target computes, and how many of them are padding."""

    tokens: int
    padding: int


def bucket_lengths(longest: int) -> list[int]:
    """The few lengths that target batches have: multiples of 8, each about 9% above the one before."""
    lengths: list[int] = []
    length = float(GRAIN)
    while True:
        rounded = -(-int(np.ceil(length)) // GRAIN) * GRAIN
        if not lengths or rounded > lengths[-1]:
            lengths.append(rounded)
        if rounded >= longest:
            return lengths
        length = max(length * SPACING, rounded + 1)


def bucket_for(length: int, lengths: list[int], target_tokens: int) -> Bucket:
    """The smallest bucket that holds a document of `length`; its batch fills the token budget."""
    chosen = lengths[int(np.searchsorted(lengths, length))]
    return Bucket(max(1, target_tokens // chosen), chosen)


def budget_bucket(row_length: int, target_tokens: int) -> Bucket:
    """The largest batch of all: no batch of any plan has more tokens. Of equals the one of the longest documents."""
    lengths = bucket_lengths(row_length)
    buckets = [bucket_for(length, lengths, target_tokens) for length in lengths]
    return max(buckets, key=lambda bucket: (bucket.batch * bucket.length, bucket.length))


def epoch_plan(
    lengths: np.ndarray,
    *,
    num_rows: int,
    row_length: int,
    sort_window: int,
    target_tokens: int,
    generator: np.random.Generator,
) -> Iterator[FillPlan]:
    """One pass over all documents: shuffled, sorted by length inside a window, packed, the window's order shuffled."""
    if int(lengths.max(initial=0)) > row_length:
        raise ConfigError(
            f"data.row_length must be at least the longest document ({int(lengths.max())} tokens), got {row_length}; "
            "raise it or prepare the data with a smaller --max-length"
        )
    if target_tokens < row_length:
        raise ConfigError(f"data.target_tokens must be at least data.row_length ({row_length}), got {target_tokens}")
    sizes = bucket_lengths(row_length)
    order = generator.permutation(len(lengths))
    for first in range(0, len(order), sort_window):
        window = order[first : first + sort_window]
        window = window[np.argsort(lengths[window], kind="stable")]
        fills = list(_pack(window, lengths, num_rows, row_length))
        for chosen in generator.permutation(len(fills)):
            placed = fills[chosen]
            yield FillPlan(tuple(placed), tuple(_batches(placed, sizes, target_tokens)))


def _pack(window: np.ndarray, lengths: np.ndarray, num_rows: int, row_length: int) -> Iterator[list[Placed]]:
    """Next-fit over the rows of one slot at a time; documents arrive in order of length."""
    placed: list[Placed] = []
    used = [0] * num_rows
    for document in window:
        length = int(lengths[document])
        row = next((r for r in range(num_rows) if used[r] + length <= row_length), None)
        if row is None:
            yield placed
            placed, used, row = [], [0] * num_rows, 0
        placed.append(Placed(int(document), row, used[row], length))
        used[row] += length
    if placed:
        yield placed


def _batches(placed: list[Placed], sizes: list[int], target_tokens: int) -> Iterator[tuple[Bucket, tuple[Placed, ...]]]:
    """Cuts a slot's documents, longest first, into target batches."""
    by_length = sorted(placed, key=lambda one: (-one.length, one.document))
    while by_length:
        bucket = bucket_for(by_length[0].length, sizes, target_tokens)
        taken, by_length = by_length[: bucket.batch], by_length[bucket.batch :]
        yield Bucket(_fitting_batch(len(taken), bucket.batch), bucket.length), tuple(taken)


def _fitting_batch(count: int, largest: int) -> int:
    """The smallest of 1/8, 2/8 ... 8/8 of `largest` that holds `count` documents: few shapes, little waste."""
    return next(batch for batch in (max(1, largest * part // 8) for part in range(1, 9)) if batch >= count)


def padding_share(plans: list[FillPlan]) -> PaddingShare:
    """Counts the target's tokens and padding over some slots."""
    tokens = sum(bucket.batch * bucket.length for plan in plans for bucket, _ in plan.batches)
    real = sum(one.length for plan in plans for one in plan.placed)
    return PaddingShare(tokens, tokens - real)


def shapes_of(plans: Iterable[FillPlan]) -> list[Bucket]:
    """Every shape the target will see, largest first."""
    return sorted({bucket for plan in plans for bucket, _ in plan.batches}, key=lambda b: (-b.batch * b.length, b))
