"""The run's row budget: enough for every micro-batch, known before the run, and worth having.

R rows, A anchors, S = L - 1 drafted slots, M the budget.
"""

import numpy as np
import pytest
import torch

from blockdraft.data import loader as loader_module
from blockdraft.data.loader import Loader
from blockdraft.data.row_budget import GRAIN, choose_budget, counted_rows
from unit.data.test_loader import LENGTHS, config, passes, same_pass, store_of

CASES = [
    {},
    {"reuse": 3},
    {"num_drafters": 2, "accumulation": 4, "keep_features": True},
    {"after_gap": True, "num_rows": 4},
]


def loaded(total_steps: int, **changes) -> Loader:
    # More anchors than a row has eligible ones, short documents: many slots count for nothing.
    found = Loader(store_of(LENGTHS, prompt=3), config(num_anchors=28, **changes))  # type: ignore[arg-type]
    found.fix_row_budget(total_steps)
    return found


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_the_budget_holds_every_supervised_slot_of_a_run_and_few_others(changes):
    loader = loaded(8, **changes)
    budget = loader.row_budget
    assert budget is not None
    found = passes(list(loader.fills(0, 8)))
    for one in found:
        assert one.row_M is not None
        assert one.row_M.shape == (budget,)
        taken_M = one.row_M[one.row_M < loader.num_slots]
        assert torch.equal(taken_M, one.supervised_RAS.flatten().nonzero()[:, 0])
        assert (one.row_M[len(taken_M) :] == loader.num_slots).all()
    assert budget - max(int(one.supervised_RAS.sum()) for one in found) < GRAIN
    assert budget < 0.95 * loader.num_slots


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_counting_changes_nothing_else_and_a_resumed_run_counts_the_same(changes):
    counted = loaded(8, **changes)
    plain = Loader(counted.store, counted.config)
    found = passes(list(counted.fills(0, 8)))
    for one, other in zip(found, passes(list(plain.fills(0, 8))), strict=True):
        assert same_pass(one._replace(row_M=None), other)
    resumed = passes(list(loaded(8, **changes).fills(5, 8)))
    assert all(same_pass(*pair) for pair in zip(resumed, [one for one in found if one.step >= 5], strict=True))


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_what_is_counted_is_what_is_sent(changes, monkeypatch):
    # Few anchors, so that each pass over a slot draws others.
    sent = passes(list(Loader(store_of(LENGTHS), config(**changes)).fills(0, 8)))  # type: ignore[arg-type]
    counted: list[int] = []
    monkeypatch.setattr(loader_module, "choose_budget", lambda counts, _num_slots: counted.extend(counts))
    Loader(store_of(LENGTHS), config(**changes)).fix_row_budget(8)  # type: ignore[arg-type]
    assert counted == [int(one.supervised_RAS.sum()) for one in sent]


def test_a_micro_batch_above_the_budget_is_never_sent():
    supervised_RAS = np.asarray([[[True, True, False], [True, False, False]]])
    assert counted_rows(supervised_RAS, 4).tolist() == [0, 1, 3, 6]
    with pytest.raises(AssertionError, match="3 supervised slots in a micro-batch, the run's budget is 2"):
        counted_rows(supervised_RAS, 2)
    loader = loaded(8)
    loader.row_budget = 8
    with pytest.raises(AssertionError, match="the run's budget is 8"):
        list(loader.fills(0, 8))


@pytest.mark.parametrize(
    ("counts", "budget"), [([3, 41, 17], 48), ([40], 40), ([0, 0], 8), ([94], None), ([95, 2], None), ([], 8)]
)
def test_the_most_rounds_up_and_is_dropped_where_nearly_all_slots_count(counts, budget):
    assert choose_budget(iter(counts), 100) == budget


def test_long_runs_are_not_counted(monkeypatch):
    monkeypatch.setattr(loader_module, "MOST_COUNTED", 7)
    assert loaded(7).row_budget is not None
    assert loaded(8).row_budget is None
