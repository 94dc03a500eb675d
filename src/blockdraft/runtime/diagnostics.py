"""Switches that look into the runtime itself; flags of `blockdraft train`, no part of a run's config."""

from typing import Final, NamedTuple


class Diagnostics(NamedTuple):
    """None of them changes a number of a sound run."""

    poison: bool = False
    """Drained slots are overwritten with NaN: features that are read too late show."""
    serial_targets: bool = False
    """One target at a time runs its forward: a fault that goes away with it is one of threads against each other."""
    trace_steps: int = 0
    """Steps of the steady state whose spans are written as a Chrome trace."""
    count_waits: int = 0
    """Steps over which the workers' waits for a GPU are counted, with the profiler."""


NONE: Final = Diagnostics()
