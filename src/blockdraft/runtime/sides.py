"""Where each side's time goes, and which of them limits the run."""

from collections.abc import Sequence
from typing import NamedTuple

from blockdraft.runtime.channel import Channel
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
        return min(1.0, sum(chosen) / len(chosen))

    return Busy(share("target"), share("drafter"))


def describe_sides(workers: Sequence[Worker], channel: Channel, elapsed_s: float) -> list[str]:
    """For each worker what it did; the mean depth of the channel; which side limits the run."""
    waits = {f"target {i}": waited for i, waited in enumerate(channel.target_waits)}
    waits |= {f"drafter {i}": waited for i, waited in enumerate(channel.drafter_waits)}
    elapsed_s = max(1e-9, elapsed_s)
    lines = []
    for worker in workers:
        if worker.name not in waits:
            continue
        seconds, waited = dict(worker.clock.seconds), waits[worker.name]
        # On a GPU the thread waits in the channel while the device still works, so its idle time is what counts;
        # the thread's waits say why.
        idle = max(0.0, elapsed_s - sum(seconds.values()))
        hand_over, for_input = waited.to_hand_over_s, waited.for_input_s
        share = hand_over / max(1e-9, hand_over + for_input)
        handing = seconds[HANDING_OVER] + min(hand_over, idle * share)
        parts = [
            f"busy {seconds[BUSY] / elapsed_s:.0%}",
            f"waiting for input {min(for_input, idle * (1 - share)) / elapsed_s:.0%}",
            f"waiting to hand over {handing / elapsed_s:.0%}",
        ]
        parts += [
            f"{kind} {seconds[kind] / elapsed_s:.0%}"
            for kind in (OTHERS, BOUNDARY)
            if seconds[kind] > 0.005 * elapsed_s
        ]
        lines.append(f"{worker.name}: {', '.join(parts)}")
    busy = busy_shares(workers, elapsed_s)
    limit = "target" if busy.target > busy.drafter else "drafter"
    full, slots = channel.mean_depth(), channel.depth * channel.num_drafters
    return [*lines, f"channel: {full:.1f} of {slots} slots filled on average", f"the {limit} side limits this run"]
