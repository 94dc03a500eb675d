"""Honest controls: what acceptance do drafters get that need no training, or that only count the training answers?

Both draft L - 1 tokens a round, L being the block size, and are walked over the same greedy answers as the drafter.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from blockdraft.decoding.acceptance import Acceptance, Round, walk_rounds

DraftFrom = Callable[[Sequence[int], int], list[int]]
"""(text up to and including the anchor, number of draft tokens) to draft tokens, fewer where it has nothing to say."""

LONGEST_MATCH: Final = 16


class NgramTable:
    """The most frequent next token after the last `order - 1` tokens, backing off to fewer where those are unknown."""

    def __init__(self, order: int = 5) -> None:
        self.order = order
        self._counts: list[dict[tuple[int, ...], Counter[int]]] = [{} for _ in range(order)]
        self._best: list[dict[tuple[int, ...], int]] | None = None
        self.num_tokens = 0
        """Answer tokens counted."""

    def add(self, token_ids: Sequence[int], loss_mask: Sequence[int]) -> None:
        """Counts the supervised tokens of a document, each after what stands before it, prompt included."""
        self._best = None
        for position, (token, is_supervised) in enumerate(zip(token_ids, loss_mask, strict=True)):
            if not is_supervised:
                continue
            self.num_tokens += 1
            for length in range(min(self.order - 1, position) + 1):
                context = tuple(token_ids[position - length : position])
                self._counts[length].setdefault(context, Counter())[token] += 1

    def draft(self, text: Sequence[int], num_drafts: int) -> list[int]:
        """Draft tokens, each after the ones before it; nothing from an empty table."""
        if self._best is None:
            self._best = [
                {context: _most_frequent(counter) for context, counter in level.items()} for level in self._counts
            ]
        recent = list(text[-(self.order - 1) :]) if self.order > 1 else []
        drafted: list[int] = []
        while len(drafted) < num_drafts:
            token = self._next(recent)
            if token is None:
                break
            drafted.append(token)
            recent = [*recent, token][1 - self.order :] if self.order > 1 else []
        return drafted

    def _next(self, recent: list[int]) -> int | None:
        assert self._best is not None
        for length in range(min(self.order - 1, len(recent)), -1, -1):
            token = self._best[length].get(tuple(recent[len(recent) - length :]))
            if token is not None:
                return token
        return None


def _most_frequent(counter: Counter[int]) -> int:
    # The lowest id wins a tie, so that the table does not depend on the order of the documents.
    return min(counter, key=lambda token: (-counter[token], token))


def prompt_lookup(text: Sequence[int], num_drafts: int) -> list[int]:
    """Copies what followed the longest earlier match of the text's end (at most 16 tokens; the latest of equals).

    The copy may run into its own output, so a loop is continued; nothing where the last token never occurred before.
    """
    best_length, best_end = 0, -1
    for end in range(len(text) - 2, -1, -1):
        if text[end] != text[-1]:
            continue
        length = 1
        while length < LONGEST_MATCH and length <= end and text[end - length] == text[-1 - length]:
            length += 1
        if length > best_length:
            best_length, best_end = length, end
        if best_length == LONGEST_MATCH:
            break
    if not best_length:
        return []
    period = len(text) - 1 - best_end
    source = list(text[best_end + 1 :])
    return [source[index % period] for index in range(num_drafts)]


def control_acceptance(
    texts: Iterable[tuple[Sequence[int], int]],
    block_size: int,
    draft_from: DraftFrom,
    *,
    progress: Callable[[int], None] | None = None,
) -> Acceptance:
    """Acceptance of a control over (prompt and greedy answer, prompt length), with the drafter's block size."""
    rounds: list[Round] = []
    for token_ids, prompt_length in texts:

        def draft(anchor: int, text: Sequence[int] = token_ids) -> list[int]:
            return draft_from(text[: anchor + 1], block_size - 1)

        rounds += walk_rounds(token_ids, prompt_length, draft)
        if progress is not None:
            progress(1)
    return Acceptance.of(rounds, block_size)
