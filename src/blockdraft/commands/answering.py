"""Asks an engine for the answers that are missing, keeps each, and shows how far it is. Loads no torch of its own."""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from blockdraft.commands.journal import Journal
from blockdraft.commands.stops import Stops
from blockdraft.config import ConfigError

if TYPE_CHECKING:
    from blockdraft.data.conversations import Conversation
    from blockdraft.decoding.engine import AnswerEngine, EngineAnswer, EngineFailure

SHOWN_SECONDS = 0.5
"""Least time between two states of the bar."""


def answer_all(
    engine: "AnswerEngine",
    prompts: "Sequence[tuple[Conversation, int]]",
    journal: Journal,
    stops: Stops,
    *,
    chunk: int | None,
    max_failed: float = 0.0,
) -> dict[int, str]:
    """Chunks of like-long prompts, longest first; returns the prompts that could not be answered, with the reason.

    A chunk that was not recorded whole is answered again whole, so that its answers are the same. Without chunks, as
    for a server, only what is not recorded is asked for, all at once. `max_failed` is a share of the prompts.

    Raises:
        ConfigError: too many prompts could not be answered.
        StopRequested: a stop was asked for; no answer is half recorded.
    """
    from blockdraft.decoding.engine import EngineFailure

    failed: dict[int, str] = {}
    details: list[str] = []
    order = sorted(range(len(prompts)), key=lambda row: prompts[row][1], reverse=True)
    if chunk is None:
        order, chunk = [row for row in order if row not in journal.done], len(prompts)
    shown = _Shown(len(prompts), len(journal.done))
    with shown.bar:
        for start in range(0, len(order), chunk):
            rows = order[start : start + chunk]
            if all(row in journal.done for row in rows):
                continue
            with _closing(engine.answers([prompts[row][0] for row in rows], shown.made)) as answers:
                for answer in answers:
                    row = rows[answer.row]
                    if isinstance(answer, EngineFailure):
                        failed[row] = answer.reason
                        details.append(f"{prompts[row][0].source}: {answer.reason}: {answer.detail}")
                        _check_failed(len(failed), len(prompts), max_failed, details, len(journal.done))
                    elif row not in journal.done:
                        with stops.deferred():
                            journal.add(answer._replace(row=row))
                        stops.check()
                        shown.bar.update(1)
    return failed


class _Shown:
    """The bar: answers that are recorded, and tokens, which move while a large batch is decoded."""

    def __init__(self, num_prompts: int, num_done: int) -> None:
        from tqdm import tqdm

        # miniters: it looks at the clock in every call, those that add no answer included.
        self.bar = tqdm(
            desc="regenerate",
            unit=" answers",
            total=num_prompts,
            initial=num_done,
            mininterval=SHOWN_SECONDS,
            miniters=0,
        )
        self._num_tokens = 0

    def made(self, tokens: int) -> None:
        """Counts tokens of answers that may not be whole yet."""
        self._num_tokens += tokens
        self.bar.set_postfix_str(f"{self._num_tokens:,} tokens", refresh=False)
        self.bar.update(0)


@contextmanager
def _closing(answers: "Iterator[EngineAnswer | EngineFailure]") -> "Iterator[Iterator[EngineAnswer | EngineFailure]]":
    """Closes an engine's answers when the loop over them ends early: a server's requests under way are cut then."""
    try:
        yield answers
    finally:
        if isinstance(answers, Generator):
            answers.close()


def _check_failed(num_failed: int, num_prompts: int, most: float, details: list[str], num_done: int) -> None:
    if num_failed > most * num_prompts:
        raise ConfigError(
            f"{num_failed:,} of {num_prompts:,} prompts could not be answered, more than --max-drop {most:g}; the same "
            f"command goes on after {num_done:,} answers. The first:\n  " + "\n  ".join(details[:3])
        )
