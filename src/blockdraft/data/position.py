"""Where a run stands in its data, in numbers that a checkpoint can hold and a resumed run can compare.

Draws are keyed by (seed, purpose, number), so there is no generator's state to save: the next keys are the state. What
they draw is kept too, since another version of numpy might draw something else from the same key.
"""

import numpy as np

from blockdraft.data.loader import ANCHORS, ORDER, LoaderConfig


def position_at(config: LoaderConfig, step: int) -> dict[str, int]:
    """The next fill and pass after `step` steps, over all drafters, and the next draws of both purposes."""
    passes = step * config.per_drafter
    fill, own = passes // config.reuse * config.num_drafters, passes % config.reuse
    return {
        "fill": fill,
        "pass": own,
        "order_draw": _draw([config.seed, ORDER, 0]),
        "anchor_draw": _draw([config.seed, ANCHORS, fill, own]),
    }


def _draw(key: list[int]) -> int:
    return int(np.random.default_rng(key).integers(2**63))
