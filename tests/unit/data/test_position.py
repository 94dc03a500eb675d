"""Where a run stands, against numbers written down and against what a loader yields from there."""

import numpy as np
import pytest
import torch

from blockdraft.data.loader import ANCHORS, ORDER, Loader
from blockdraft.data.position import position_at
from unit.data.test_loader import LENGTHS, config, store_of

STANDS = [
    # changes, step: fill, pass
    ({}, 3, 3, 0),
    ({"reuse": 2}, 2, 1, 0),
    ({"reuse": 2}, 3, 1, 1),
    ({"reuse": 2, "accumulation": 3}, 1, 1, 1),
    ({"reuse": 3, "accumulation": 4, "num_drafters": 2}, 2, 2, 1),
    ({"accumulation": 2, "num_drafters": 2}, 3, 6, 0),
]


@pytest.mark.parametrize(("changes", "step", "fill", "turn"), STANDS)
def test_a_position_names_the_pass_that_comes_next(changes, step, fill, turn):
    here = config(seed=7, **changes)
    assert position_at(here, step) == {
        "fill": fill,
        "pass": turn,
        "order_draw": int(np.random.default_rng([7, ORDER, 0]).integers(2**63)),
        "anchor_draw": int(np.random.default_rng([7, ANCHORS, fill, turn]).integers(2**63)),
    }


@pytest.mark.parametrize(("changes", "step", "fill", "turn"), STANDS)
def test_a_resumed_loader_begins_with_that_pass(changes, step, fill, turn):
    loader = Loader(store_of(LENGTHS), config(**changes))  # type: ignore[arg-type]
    whole = {one.number: one for one in loader.fills(0, 9)}
    first = next(loader.fills(step, 9))
    assert first.number == fill
    assert len(first.passes) == loader.config.reuse - turn
    for mine, its in zip(first.passes, whole[fill].passes[turn:], strict=True):
        assert torch.equal(mine.anchor_RA, its.anchor_RA)
