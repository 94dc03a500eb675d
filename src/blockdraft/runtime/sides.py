"""Where each side's time goes, and which of them limits the run."""

from collections.abc import Sequence
from typing import NamedTuple

from blockdraft.runtime.channel import Channel, Waited
from blockdraft.runtime.clocks import BOUNDARY, BUSY, HANDING_OVER, OTHERS
from blockdraft.runtime.workers import Worker


class Busy(NamedTuple):
    """Shares of time spent computing."""

    target: float
    drafter: float


def busy_shares(workers: Sequence[Worker], elapsed_s: float) -> Busy:
    """Share of the time that each side's workers computed, on average; saving and evaluating left out."""

    def share(side: str) -> float:
        chosen = [
            worker.clock.seconds[BUSY] / max(1e-9, elapsed_s - worker.clock.seconds[BOUNDARY])
            for worker in workers
            if worker.name.startswith(side)
        ]
        # What runs inside a busy interval, such as an evaluation, is taken off before that interval is added.
        return min(1.0, max(0.0, sum(chosen) / len(chosen)))

    return Busy(share("target"), share("drafter"))


class Spent(NamedTuple):
    """What one worker's seconds went into."""

    busy_s: float
    for_input_s: float
    to_hand_over_s: float
    others_s: float
    """Waiting for other drafters."""
    boundary_s: float
    """Saving and evaluating."""


def spent(workers: Sequence[Worker], channel: Channel, elapsed_s: float) -> dict[str, Spent]:
    """Of every target and drafter, in `elapsed_s` since the steady state began."""
    waits = {f"target {i}": waited for i, waited in enumerate(channel.target_waits)}
    waits |= {f"drafter {i}": waited for i, waited in enumerate(channel.drafter_waits)}
    return {
        worker.name: _spent(dict(worker.clock.seconds), waits[worker.name], elapsed_s)
        for worker in workers
        if worker.name in waits
    }


def _spent(seconds: dict[str, float], waited: Waited, elapsed_s: float) -> Spent:
    # On a GPU the thread waits in the channel while the device still works, so its idle time is what counts; the
    # thread's waits say why.
    idle = max(0.0, elapsed_s - sum(seconds.values()))
    hand_over, for_input = waited.to_hand_over_s, waited.for_input_s
    share = hand_over / max(1e-9, hand_over + for_input)
    return Spent(
        seconds[BUSY],
        min(for_input, idle * (1 - share)),
        seconds[HANDING_OVER] + min(hand_over, idle * share),
        seconds[OTHERS],
        seconds[BOUNDARY],
    )


def describe_sides(workers: Sequence[Worker], channel: Channel, elapsed_s: float) -> list[str]:
    """For each worker what it did; the mean depth of the channel; which side limits the run."""
    elapsed_s = max(1e-9, elapsed_s)
    lines = []
    for name, found in spent(workers, channel, elapsed_s).items():
        parts = [
            f"busy {found.busy_s / elapsed_s:.0%}",
            f"waiting for input {found.for_input_s / elapsed_s:.0%}",
            f"waiting to hand over {found.to_hand_over_s / elapsed_s:.0%}",
        ]
        for kind, seconds in ((OTHERS, found.others_s), (BOUNDARY, found.boundary_s)):
            if seconds > 0.005 * elapsed_s:
                parts.append(f"{kind} {seconds / elapsed_s:.0%}")
        lines.append(f"{name}: {', '.join(parts)}")
    busy = busy_shares(workers, elapsed_s)
    limit = "target" if busy.target > busy.drafter else "drafter"
    full, slots = channel.mean_depth(), channel.depth * channel.num_drafters
    return [*lines, f"channel: {full:.1f} of {slots} slots filled on average", f"the {limit} side limits this run"]
