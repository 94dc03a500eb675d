"""Batched decoding of many prompts with the target alone: plain forwards and a KV cache.

B rows of a batch that are still held, S prompt length after padding, V vocabulary.

Prompts are sorted by length, longest first, so that a batch needs little padding and the largest batch comes first.
Padding is on the left, with position ids that start at the first real token. Rows that have finished leave the batch,
cache included. In float32 an answer equals the one decoded alone as long as no two logits tie within rounding: padded
and unpadded batches run other kernel shapes, whose last bits differ.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from blockdraft.config import ConfigError

# Selecting rows copies the cache, so finished rows are let go of in groups of at least this share of the batch.
LEAVING_SHARE = 8


class Decodes(Protocol):
    """What is needed of a target."""

    @property
    def model(self) -> PreTrainedModel: ...
    @property
    def device(self) -> torch.device: ...


class Answer(NamedTuple):
    """One answer, the stop token included when there was one."""

    token_ids: list[int]
    finish: Literal["stop", "length"]


@torch.inference_mode()
def generate_batch(
    target: Decodes,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
    made: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Answers in the order of the prompts; greedy at temperature 0, sampled from the whole vocabulary otherwise.

    `progress` is called with the number of answers that have just finished, `made` with the tokens of each round.

    Raises:
        ConfigError: an empty prompt, or numbers out of range.
    """
    _check(prompts, max_new_tokens, batch_size, temperature)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]), reverse=True)
    answers: dict[int, Answer] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        batch = _Batch(target, [prompts[i] for i in chosen])
        pick = _Picker(temperature, generator)
        decoded = _decode(batch, pick, max_new_tokens, frozenset(stop_ids), progress, made)
        answers.update(zip(chosen, decoded, strict=True))
    return [answers[i] for i in range(len(prompts))]


def _decode(
    batch: "_Batch",
    pick: "_Picker",
    max_new_tokens: int,
    stop_ids: frozenset[int],
    progress: Callable[[int], None] | None,
    made: Callable[[int], None] | None,
) -> list[Answer]:
    tokens: list[list[int]] = [[] for _ in batch.rows]
    finish: dict[int, Literal["stop", "length"]] = {}
    logits_BV = batch.prefill()
    while True:
        next_B = pick(logits_BV)
        num_before, num_open = len(finish), len(tokens) - len(finish)
        # The only read from the device in a round.
        for row, token in zip(batch.rows, next_B.tolist(), strict=True):
            if row in finish:
                continue
            tokens[row].append(token)
            if token in stop_ids:
                finish[row] = "stop"
            elif len(tokens[row]) == max_new_tokens:
                finish[row] = "length"
        if made is not None:
            made(num_open)
        if progress is not None and len(finish) > num_before:
            progress(len(finish) - num_before)
        if len(finish) == len(tokens):
            return [Answer(ids, finish[row]) for row, ids in enumerate(tokens)]
        keep = [i for i, row in enumerate(batch.rows) if row not in finish]
        if (len(batch.rows) - len(keep)) * LEAVING_SHARE >= len(batch.rows):
            batch.select(keep)
            next_B = next_B[torch.tensor(keep, device=next_B.device)]
        logits_BV = batch.step(next_B)


class _Batch:
    """Rows that decode together: their cache, padding and positions."""

    def __init__(self, target: Decodes, prompts: Sequence[Sequence[int]]) -> None:
        self.rows = list(range(len(prompts)))
        """Which prompt each row of the batch answers."""
        self._model = target.model
        self._cache = DynamicCache(config=target.model.config)
        # Some models cannot leave out the logits of the other positions.
        takes_keep = "logits_to_keep" in inspect.signature(target.model.forward).parameters
        self._extra: dict[str, Any] = {"logits_to_keep": 1} if takes_keep else {}
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        device = target.device
        self._ids_BS = torch.tensor([[0] * n + list(p) for n, p in zip(padding, prompts, strict=True)], device=device)
        first_B1 = torch.tensor(padding, device=device)[:, None]
        steps_S = torch.arange(longest, device=device)
        self._position_BS = (steps_S - first_B1).clamp(min=0)
        # Without padding no mask is passed: attention takes its quicker causal path.
        self._mask_BS = (steps_S >= first_B1).long() if any(padding) else None

    def prefill(self) -> Tensor:
        logits_BV = self._forward(self._ids_BS, self._position_BS)
        self._position_BS = self._position_BS[:, -1:]
        return logits_BV

    def step(self, token_B: Tensor) -> Tensor:
        self._position_BS = self._position_BS + 1
        if self._mask_BS is not None:
            self._mask_BS = torch.nn.functional.pad(self._mask_BS, (0, 1), value=1)
        return self._forward(token_B[:, None], self._position_BS)

    def select(self, keep: list[int]) -> None:
        """Lets go of all rows but these."""
        self.rows = [self.rows[i] for i in keep]
        index = torch.tensor(keep, device=self._position_BS.device)
        # Selects from recurrent layers too, where batch_select_indices is missing.
        self._cache.reorder_cache(cast(torch.LongTensor, index))
        self._position_BS = self._position_BS[index]
        if self._mask_BS is not None:
            self._mask_BS = self._mask_BS[index]

    def _forward(self, ids_BS: Tensor, position_BS: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids_BS,
            attention_mask=self._mask_BS,
            position_ids=position_BS,
            past_key_values=self._cache,
            use_cache=True,
            **self._extra,
        )
        logits_BV: Tensor = output.logits[:, -1]
        return logits_BV


class _Picker:
    def __init__(self, temperature: float, generator: torch.Generator | None) -> None:
        self._temperature = temperature
        self._generator = generator

    def __call__(self, logits_BV: Tensor) -> Tensor:
        if self._temperature == 0:
            return logits_BV.argmax(dim=-1)
        probability_BV = (logits_BV.float() / self._temperature).softmax(dim=-1)
        if self._generator is not None:
            # Drawn where the generator lives.
            probability_BV = probability_BV.to(self._generator.device)
        drawn_B1 = torch.multinomial(probability_BV, num_samples=1, generator=self._generator)
        return drawn_B1[:, 0].to(logits_BV.device)


def _check(prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int, temperature: float) -> None:
    for number, prompt in enumerate(prompts, start=1):
        if len(prompt) == 0:
            raise ConfigError(f"prompt {number}: expected at least one token, found none")
    for name, value in (("max_new_tokens", max_new_tokens), ("batch_size", batch_size)):
        if value < 1:
            raise ConfigError(f"{name}: expected at least 1, found {value}")
    if temperature < 0:
        raise ConfigError(f"temperature: expected 0 (greedy) or more, found {temperature}")
