"""Who answers prompts for `regenerate`: the seam, and the engine that decodes in this process.

An answer loops when it ends in the same n-gram (n up to 64 tokens) at least 4 times in a row, over at least 24 tokens.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch

from blockdraft.data.conversations import ChatTemplate, Conversation
from blockdraft.decoding.batched import Decodes, generate_batch

UNFINISHED = "\ufffd"
LOOP_LONGEST = 64
LOOP_REPEATS = 4
LOOP_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are decoded."""

    max_new_tokens: int
    batch_size: int
    temperature: float = 0.0
    seed: int = 0
    thinking: bool | None = None
    """Mode asked of the chat template; None: as the template does."""


class EngineAnswer(NamedTuple):
    """One answer of an engine; `row` is the index of its conversation in what the engine was given."""

    row: int
    content: str
    reasoning: str
    finish: Literal["stop", "length"]
    is_looping: bool
    is_cut_in_reasoning: bool
    num_tokens: int


class EngineFailure(NamedTuple):
    """A conversation that an engine could not answer."""

    row: int
    reason: str
    detail: str


class AnswerEngine(Protocol):
    """Who answers: transformers in this process, or a server."""

    def answers(
        self, conversations: Sequence[Conversation], made: Callable[[int], None] | None = None
    ) -> Iterator[EngineAnswer | EngineFailure]:
        """Answers to conversations that end with a user turn, in any order, each as soon as it is there.

        `made` is called with numbers of tokens, as soon as the engine knows that they were made.
        """
        ...


class TransformersEngine:
    """Batched transformers decoding; a batch is one chunk, sampled from the seed and the chunk's number alone."""

    def __init__(self, target: Decodes, template: ChatTemplate, stop_ids: Sequence[int], sampling: Sampling) -> None:
        self._target = target
        self._template = template
        self._stop_ids = tuple(stop_ids)
        self._sampling = sampling

    def answers(
        self, conversations: Sequence[Conversation], made: Callable[[int], None] | None = None
    ) -> Iterator[EngineAnswer]:
        """One `generate_batch` call; its answers come together."""
        texts = [self._template.prompt_text(c, thinking=self._sampling.thinking) for c in conversations]
        # Seeded by the prompts themselves: the same chunk gives the same answers, whatever ran before it.
        digest = hashlib.sha256("\0".join([str(self._sampling.seed), *texts]).encode()).digest()
        decoded = generate_batch(
            self._target,
            [self._template.ids(text) for text in texts],
            max_new_tokens=self._sampling.max_new_tokens,
            stop_ids=self._stop_ids,
            temperature=self._sampling.temperature,
            generator=torch.Generator().manual_seed(int.from_bytes(digest[:7], "big")),
            batch_size=self._sampling.batch_size,
            made=made,
        )
        for row, (text, answer) in enumerate(zip(texts, decoded, strict=True)):
            ids = answer.token_ids[:-1] if answer.finish == "stop" else answer.token_ids
            written = str(self._template.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
            if answer.finish == "length":
                # The limit may cut a character: what stands for its bytes is nothing the target would write.
                written = written.rstrip(UNFINISHED)
            parts = split_reasoning(written, is_open=text.rstrip().endswith("<think>"))
            yield EngineAnswer(
                row,
                parts.content,
                parts.reasoning,
                answer.finish,
                is_looping(ids),
                parts.is_open,
                len(answer.token_ids),
            )


class Parts(NamedTuple):
    """An answer's reasoning and content; `is_open` when the reasoning never ended."""

    reasoning: str
    content: str
    is_open: bool


def split_reasoning(text: str, *, is_open: bool) -> Parts:
    """Splits `<think>reasoning</think>content`; `is_open` when the prompt had opened the block already."""
    opened, mark, rest = text.partition("<think>")
    is_marked = bool(mark) and not opened.strip()
    if not is_open and not is_marked:
        return Parts("", text, False)
    body = rest if is_marked else text
    reasoning, close, content = body.partition("</think>")
    return Parts(reasoning.strip("\n"), content.lstrip("\n"), not close)


def is_looping(ids: Sequence[int]) -> bool:
    """True if the answer ends in an n-gram that comes at least 4 times in a row, over at least 24 tokens."""
    for n in range(1, LOOP_LONGEST + 1):
        span = max(LOOP_REPEATS * n, LOOP_TOKENS)
        # Period n over the last `span` tokens.
        if len(ids) >= span and list(ids[len(ids) - span : -n]) == list(ids[len(ids) - span + n :]):
            return True
    return False
