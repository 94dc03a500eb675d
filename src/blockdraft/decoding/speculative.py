"""Speculative decoding of one answer at a time: draft a block, verify it in one target forward, keep what agrees.

L block size (anchor included), S tokens, V vocabulary, C captured layers. docs/algorithm.md, section 7.
"""

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.decoding.acceptance import Acceptance, Round
from blockdraft.decoding.sampling import Sampling, Verdict, draw, verify_greedy, verify_sampled
from blockdraft.decoding.state import DraftState, TargetState, new_target_state
from blockdraft.models.drafter import Drafter
from blockdraft.models.ends import Ends
from blockdraft.models.target import Target

Finish = Literal["stop", "length"]


class Generation(NamedTuple):
    """One answer."""

    token_ids: list[int]
    """The stop token included when one was hit."""
    rounds: list[Round]
    """Empty for plain decoding."""
    prefill_seconds: float
    """To the first token."""
    decode_seconds: float
    """All tokens after the first."""
    finish: Finish

    @property
    def tokens_per_second(self) -> float:
        """Speed after the first token; 0 if there was nothing to decode."""
        return (len(self.token_ids) - 1) / self.decode_seconds if len(self.token_ids) > 1 else 0.0

    def acceptance(self, block_size: int) -> Acceptance:
        """The rounds, counted."""
        return Acceptance.of(self.rounds, block_size)


class OnRound(Protocol):
    """Receives tokens as they are committed: first the token of the prefill, then those of each round."""

    def __call__(self, token_ids: list[int], accepted: int) -> None:
        """The first `accepted` of `token_ids` were drafted; what follows them is the target's own."""
        ...


class Divergence(NamedTuple):
    """Where two answers part."""

    offset: int
    """Tokens of the answer before it."""
    plain_token: int
    speculative_token: int
    logit_gap: float
    """By how much the target, in one forward over the common text, prefers the plain token (may be negative)."""


def check_pair(target: Target, drafter: Drafter) -> None:
    """Refuses a drafter that was made for another target.

    Raises:
        ConfigError: width, vocabulary, number of layers or captured layers differ.
    """
    shape = drafter.shape
    pairs = (
        ("hidden size", target.hidden_size, shape.hidden_size),
        ("vocabulary size", target.vocab_size, shape.vocab_size),
        ("number of target layers", target.num_layers, shape.num_target_layers),
        ("target layer ids", tuple(target.layer_ids), shape.target_layer_ids),
    )
    for what, of_target, of_drafter in pairs:
        if of_target != of_drafter:
            raise ConfigError(
                f"the drafter expects a target with {what} {of_drafter}, found {of_target}; "
                "load the target the drafter was trained for, with the drafter's target_layer_ids"
            )


@torch.no_grad()
def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    on_round: OnRound | None = None,
    ends: Ends | None = None,
) -> Generation:
    """Decodes one answer with blocks of the drafter.

    Greedy (temperature 0), the answer equals `generate_plain`'s; sampled, it has the target's distribution. `generator`
    lies on the target's device. `ends` saves the copy of the target's ends when the drafter lies on another device.

    Raises:
        ConfigError: an empty prompt, too many tokens for the target, no generator, or a drafter of another target.
    """
    check_pair(target, drafter)
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    _check_request(target, prompt_ids, max_new_tokens, sampling, generator)
    ends = target.ends.copy_to(drafter.device) if ends is None else ends
    state = new_target_state(target)
    drafts = DraftState(drafter, ends, len(prompt_ids) + max_new_tokens)
    started = _now(target.device)
    token, features_1SC = _prefill(target, state, prompt_ids, sampling, generator)
    prefilled = _now(target.device)
    answer, rounds = [token], list[Round]()
    if on_round is not None:
        on_round([token], 0)
    while answer[-1] not in stop_ids and len(answer) < max_new_tokens:
        left = max_new_tokens - len(answer)
        draft_logits_KV = drafts.draft_logits(features_1SC, answer[-1])[:left].to(target.device)
        verdict, drafted, features_1SC = _verify(state, answer[-1], draft_logits_KV, left, sampling, generator)
        entry, new = _commit(verdict, drafted, stop_ids)
        state.keep(entry.committed)
        features_1SC = features_1SC[:, : entry.committed]
        answer += new
        rounds.append(entry)
        if on_round is not None:
            on_round(new, entry.accepted)
    finish: Finish = "stop" if answer[-1] in stop_ids else "length"
    return Generation(answer, rounds, prefilled - started, _now(target.device) - prefilled, finish)


@torch.no_grad()
def generate_plain(
    target: Target,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Generation:
    """Decodes one answer token by token with the same target forward and the same stop rules.

    Raises:
        ConfigError: an empty prompt, too many tokens for the target, or no generator.
    """
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    _check_request(target, prompt_ids, max_new_tokens, sampling, generator)
    state = new_target_state(target)
    started = _now(target.device)
    token, _ = _prefill(target, state, prompt_ids, sampling, generator)
    prefilled = _now(target.device)
    answer = [token]
    while answer[-1] not in stop_ids and len(answer) < max_new_tokens:
        output = state.extend(torch.tensor([[answer[-1]]], device=target.device))
        state.keep(1)
        answer.append(_choose(output.logits_BSV[0, -1:], sampling, generator))
    finish: Finish = "stop" if answer[-1] in stop_ids else "length"
    return Generation(answer, [], prefilled - started, _now(target.device) - prefilled, finish)


def first_divergence(plain: Sequence[int], speculative: Sequence[int]) -> int | None:
    """Offset of the first token that differs, one answer's end included; None when the answers are equal."""
    for offset, (ours, theirs) in enumerate(zip(plain, speculative, strict=False)):
        if ours != theirs:
            return offset
    return None if len(plain) == len(speculative) else min(len(plain), len(speculative))


@torch.no_grad()
def find_divergence(
    target: Target, prompt_ids: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Divergence | None:
    """The first token in which two greedy answers differ, and how close the target's logits are there.

    In bfloat16 a block and single tokens round differently, so near ties may fall either way; a large gap is a fault.
    """
    offset = first_divergence(plain, speculative)
    if offset is None:
        return None
    # Both answers follow the same stop rules, so neither is a prefix of the other.
    assert offset < len(plain) and offset < len(speculative), "one answer stopped where the other went on"
    text_1S = torch.tensor([[*prompt_ids, *plain[:offset]]], device=target.device)
    logits_V = target.forward(text_1S, target.new_cache(), logits_to_keep=1).logits_BSV[0, -1].float()
    gap = float(logits_V[plain[offset]] - logits_V[speculative[offset]])
    return Divergence(offset, plain[offset], speculative[offset], gap)


def _check_request(
    target: Target,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> None:
    if not prompt_ids:
        raise ConfigError("the prompt is empty; expected at least one token")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    total, most = len(prompt_ids) + max_new_tokens, target.facts.max_position_embeddings
    if total > most:
        raise ConfigError(
            f"the target reads at most {most} tokens, found a prompt of {len(prompt_ids)} "
            f"and max_new_tokens {max_new_tokens} ({total} together); shorten the prompt or lower max_new_tokens"
        )
    if not sampling.is_greedy and generator is None:
        raise ConfigError(f"temperature {sampling.temperature} needs a random generator on {target.device}, found none")


def _prefill(
    target: Target,
    state: TargetState,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator | None,
) -> tuple[int, Tensor]:
    """First token of the answer, and the prompt's context features."""
    output = state.extend(torch.tensor([list(prompt_ids)], device=target.device), last_only=True)
    state.keep(len(prompt_ids))
    return _choose(output.logits_BSV[0, -1:], sampling, generator), output.features_BSC


def _choose(logits_1V: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    if sampling.is_greedy:
        return int(logits_1V.argmax())
    assert generator is not None
    return int(draw(sampling.probabilities(logits_1V), generator)[0])


def _verify(
    state: TargetState,
    anchor_token: int,
    draft_logits_KV: Tensor,
    left: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> tuple[Verdict, list[int], Tensor]:
    """Verdict on the draft, the draft tokens, and the context features of the verified block.

    With `left` tokens to go the target reads at most `left` tokens: K draft tokens are judged, but the last of them
    need not be read when nothing can follow it.
    """
    device = draft_logits_KV.device
    if sampling.is_greedy:
        draft_K = draft_logits_KV.argmax(-1)
    else:
        assert generator is not None
        draft_probability_KV = sampling.probabilities(draft_logits_KV)
        draft_K = draw(draft_probability_KV, generator)
    block_1S = torch.cat([torch.tensor([anchor_token], device=device), draft_K[: left - 1]])[None]
    output = state.extend(block_1S)
    logits_NV = output.logits_BSV[0]
    if sampling.is_greedy:
        verdict, drafted = verify_greedy(draft_K, logits_NV)
    else:
        assert generator is not None
        verdict, drafted = verify_sampled(draft_K, draft_probability_KV, sampling.probabilities(logits_NV), generator)
    return verdict, drafted, output.features_BSC


def _commit(verdict: Verdict, drafted: list[int], stop_ids: Sequence[int]) -> tuple[Round, list[int]]:
    """The tokens a round adds, up to the first stop token; a round that loses its bonus token is cut."""
    new = drafted[: verdict.accepted]
    stop = next((index for index, token in enumerate(new) if token in stop_ids), None)
    if stop is not None:
        new = new[: stop + 1]
    elif verdict.next_token is not None:
        new.append(verdict.next_token)
    is_cut = stop is not None or verdict.next_token is None
    accepted = len(new) if is_cut else verdict.accepted
    return Round(accepted, len(new), is_cut), new


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
