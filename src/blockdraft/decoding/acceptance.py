"""What a set of decoding rounds accepted, and the walk that counts it on a known greedy answer.

L block size (anchor included), so a round accepts 0 to L - 1 draft tokens and commits one token more.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Round(NamedTuple):
    """One draft and its verification."""

    accepted: int
    """Draft tokens that agreed with the target, from the first on."""
    committed: int
    """Tokens added to the answer: the accepted ones and the bonus token, fewer when `cut`."""
    cut: bool
    """A stop token or the length limit ended the answer before the round was used up; left out of acceptance."""


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Counts of rounds; every number of acceptance follows from them."""

    histogram: tuple[int, ...]
    """Rounds by accepted draft tokens, 0 to L - 1; cut rounds left out."""
    cut_rounds: int = 0

    @staticmethod
    def of(rounds: Iterable[Round], block_size: int) -> "Acceptance":
        """Counts rounds of decoding with blocks of `block_size`."""
        counts, cut_rounds = [0] * block_size, 0
        for entry in rounds:
            if entry.cut:
                cut_rounds += 1
            else:
                counts[entry.accepted] += 1
        return Acceptance(histogram=tuple(counts), cut_rounds=cut_rounds)

    @staticmethod
    def pool(parts: Sequence["Acceptance"]) -> "Acceptance":
        """All rounds of `parts` together; block sizes must agree."""
        columns = zip(*(part.histogram for part in parts), strict=True)
        return Acceptance(
            histogram=tuple(sum(column) for column in columns), cut_rounds=sum(part.cut_rounds for part in parts)
        )

    @property
    def rounds(self) -> int:
        """Rounds that count."""
        return sum(self.histogram)

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target verification, the bonus token included; NaN without rounds."""
        accepted = sum(count * rounds for count, rounds in enumerate(self.histogram))
        return accepted / self.rounds + 1 if self.rounds else math.nan

    @property
    def per_slot(self) -> list[float]:
        """Share of the rounds in which slot k's draft token was accepted, for k = 1 .. L - 1."""
        if not self.rounds:
            return [math.nan] * (len(self.histogram) - 1)
        return [sum(self.histogram[slot:]) / self.rounds for slot in range(1, len(self.histogram))]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; numbers that do not exist without rounds are None."""
        has_rounds = self.rounds > 0
        return {
            "acceptance_length": round(self.acceptance_length, 4) if has_rounds else None,
            "per_slot": [round(share, 4) for share in self.per_slot] if has_rounds else None,
            "rounds": self.rounds,
            "cut_rounds": self.cut_rounds,
            "histogram": list(self.histogram),
        }


def walk_rounds(token_ids: Sequence[int], prompt_length: int, draft: Callable[[int], Sequence[int]]) -> list[Round]:
    """The rounds that greedy decoding takes to write `token_ids[prompt_length:]`, the target's own greedy answer.

    `draft(a)` gives the draft tokens of a block whose anchor is `token_ids[a]`.
    """
    walk = Walk(token_ids, prompt_length)
    while (anchor := walk.anchor) is not None:
        walk.advance(draft(anchor))
    return walk.rounds


class Walk:
    """The rounds of one answer, taken one at a time, so that many answers can be walked side by side.

    Rounds start at the first answer token, which the prefill gives for free, and a round is cut if its draft agrees
    with all that is left.
    """

    def __init__(self, token_ids: Sequence[int], prompt_length: int) -> None:
        self.token_ids, self.rounds = token_ids, list[Round]()
        self._anchor = prompt_length

    @property
    def anchor(self) -> int | None:
        """Where the next block is anchored; None when the answer is written."""
        return self._anchor if self._anchor < len(self.token_ids) - 1 else None

    def advance(self, drafted: Sequence[int]) -> None:
        """Takes a round with these draft tokens."""
        left = self.token_ids[self._anchor + 1 :]
        accepted = agreement(drafted, left)
        committed = min(accepted + 1, len(left))
        self.rounds.append(Round(accepted, committed, committed <= accepted))
        self._anchor += committed


def agreement(drafted: Sequence[int], expected: Sequence[int]) -> int:
    """Length of the leading run on which both agree."""
    count = 0
    for ours, theirs in zip(drafted, expected, strict=False):
        if ours != theirs:
            break
        count += 1
    return count
