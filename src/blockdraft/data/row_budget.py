"""Which rows reach the head: the supervised slots of a micro-batch, in an index of one length for the whole run.

R rows, A anchors of a row, S = L - 1 drafted slots, N = R * A * S slots of a micro-batch, M the budget.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np

MOST_COUNTED: Final = 10_000
"""Micro-batches that are counted before a run, two to four milliseconds each (4,096 tokens, 512 or 1,024 anchors)."""
WORTH: Final = 0.95
"""Share of all slots from which on taking rows out gains less than it costs."""
GRAIN: Final = 8
"""Budgets are multiples of it, as the matrix units want."""


def choose_budget(counts: Iterator[int], num_slots: int) -> int | None:
    """The rows that the micro-batch with most of them needs; None where nearly all slots count in some micro-batch."""
    limit, most = WORTH * num_slots, 0
    for count in counts:
        most = max(most, count)
        if most >= limit:
            return None
    budget = max(GRAIN, -(-most // GRAIN) * GRAIN)
    return budget if budget < limit else None


def counted_rows(supervised_RAS: np.ndarray, budget: int) -> np.ndarray:
    """Numbers of the supervised slots among all N, rising; int64 [M], filled up with N.

    They are taken and put back on the device with shapes that never change (training/loss_rows.py).
    """
    number_M = np.full(budget, supervised_RAS.size, dtype=np.int64)
    found = np.flatnonzero(supervised_RAS)
    assert len(found) <= budget, f"{len(found)} supervised slots in a micro-batch, the run's budget is {budget}"
    number_M[: len(found)] = found
    return number_M
