"""The optimizer's state divided over the drafters of a node: who keeps what, and how new weights travel.

Every drafter has the gradients of all weights, summed. It keeps masters and moments of some weights only, updates
those, and hands them to the others: what ZeRO calls its first stage (Rajbhandari et al., 2020).
"""

from typing import Final, NamedTuple, Protocol

from torch import Tensor

ROUNDS: Final = 4
"""Weights of a round travel while the next round's are updated."""


class Seat(NamedTuple):
    """A drafter among those of its node, one process, that divide the state."""

    number: int
    """From 0."""
    of: int


class Exchange(Protocol):
    """What carries weights between the drafters of a node; all start the same weights in the same order."""

    def hand_out(self, weights: list[tuple[int, Tensor]]) -> None:
        """Begins to copy each weight from the drafter of that number to the others, in place."""
        ...

    def wait(self) -> None:
        """Ends the oldest copy that was begun."""
        ...


def share_out(sizes: list[int], count: int) -> list[int]:
    """Which of `count` drafters keeps each of some weights, by their sizes: the largest first, to whoever has least."""
    held = [0] * count
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: (-sizes[index], index)):
        owner = min(range(count), key=lambda number: (held[number], number))
        owners[index] = owner
        held[owner] += sizes[index]
    return owners


def rounds_of(sizes: list[int], owners: list[int]) -> list[list[int]]:
    """Weights by number, in rounds: of each owner's about the same number of bytes in every round, in their order."""
    totals = {owner: sum(size for size, one in zip(sizes, owners, strict=True) if one == owner) for owner in owners}
    before = dict.fromkeys(totals, 0)
    rounds: list[list[int]] = [[] for _ in range(ROUNDS)]
    for index, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        middle = before[owner] + size / 2
        rounds[int(middle / totals[owner] * ROUNDS)].append(index)
        before[owner] += size
    return [found for found in rounds if found]
