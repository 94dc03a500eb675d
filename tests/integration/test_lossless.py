"""Greedy speculative output equals the target's own, whatever the drafter; replay counts what decoding counts."""

import functools

import pytest
import torch

from blockdraft.decoding.acceptance import Acceptance
from blockdraft.decoding.speculative import Generation, generate, generate_plain
from integration.tiny import (
    GEMMA_WINDOW,
    MASK_TOKEN_ID,
    TARGETS,
    plain_answer,
    taught_pair,
    tiny_drafter,
    tiny_prompts,
    tiny_target,
)

NUM_TOKENS = 30
# One token; a few; and, last, more than Gemma's sliding window.
PROMPTS = (*tiny_prompts(2, seed=1), tiny_prompts(7, seed=1)[5] + [11, 12, 13] * 6)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def expected(name: str, prompt: tuple[int, ...]) -> list[int]:
    return plain_answer(tiny_target(name), list(prompt), NUM_TOKENS)


def check(name: str, target, drafter, prompt: list[int]) -> Generation:
    found = generate(target, drafter, prompt, max_new_tokens=NUM_TOKENS, stop_ids=())
    assert found.token_ids == expected(name, tuple(prompt))
    assert sum(entry.committed for entry in found.rounds) == NUM_TOKENS - 1
    assert found.finish == "length"
    return found


def test_prompts_are_of_the_kinds_that_matter():
    assert len(PROMPTS[0]) == 1
    assert len(PROMPTS[-1]) > GEMMA_WINDOW


@pytest.mark.parametrize("name", TARGETS)
def test_plain_decoding_equals_whole_forwards(name):
    for prompt in PROMPTS:
        found = generate_plain(tiny_target(name), prompt, max_new_tokens=NUM_TOKENS, stop_ids=())
        assert found.token_ids == expected(name, tuple(prompt))
        assert found.rounds == []


@pytest.mark.parametrize("block_size", [2, 8, 16])
@pytest.mark.parametrize("name", TARGETS)
def test_random_drafters_change_nothing(name, block_size):
    target = tiny_target(name)
    drafter = tiny_drafter(target, block_size)
    for prompt in PROMPTS:
        check(name, target, drafter, prompt)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"block_size": 8}),
        ("qwen3", {"block_size": 2}),
        ("qwen3", {"block_size": 8}),
        ("qwen3", {"block_size": 16}),
        ("gemma3", {"block_size": 8}),
        ("gemma3", {"block_size": 16, "window": 16, "window_layers": (0, 1)}),
        ("qwen3_moe", {"block_size": 8, "window": 10, "window_layers": (0,), "causal": True}),
    ],
    ids=str,
)
def test_taught_drafters_change_nothing_and_are_accepted(name, settings):
    target, drafter = taught_pair(name, **settings)
    rounds = [entry for prompt in PROMPTS for entry in check(name, target, drafter, prompt).rounds]
    found = Acceptance.of(rounds, settings["block_size"])
    assert found.acceptance_length > 1.2, "nothing accepted: the test would see rejections alone"
    assert any(entry.accepted == 0 for entry in rounds), "nothing rejected"


def test_a_stop_token_inside_an_accepted_block_ends_the_answer():
    target, drafter = taught_pair("qwen3")
    prompt = PROMPTS[1]
    whole = generate(target, drafter, prompt, max_new_tokens=NUM_TOKENS, stop_ids=())
    start = 1
    for entry in whole.rounds:
        inside = whole.token_ids[start : start + max(0, entry.accepted - 1)]
        fresh = [token for token in inside if token not in whole.token_ids[:start]]
        if fresh:
            break
        start += entry.committed
    stop = fresh[0]
    end = whole.token_ids.index(stop) + 1
    found = generate(target, drafter, prompt, max_new_tokens=NUM_TOKENS, stop_ids=(stop,))
    plain = generate_plain(target, prompt, max_new_tokens=NUM_TOKENS, stop_ids=(stop,))
    assert found.token_ids == plain.token_ids == whole.token_ids[:end]
    assert found.finish == plain.finish == "stop"
    assert found.rounds[-1].cut
    assert found.rounds[-1].committed < entry.committed
    assert found.acceptance(8).cut_rounds == 1


def test_a_first_token_that_stops_takes_no_round():
    target, drafter = taught_pair("qwen3")
    first = expected("qwen3", tuple(PROMPTS[0]))[0]
    found = generate(target, drafter, PROMPTS[0], max_new_tokens=NUM_TOKENS, stop_ids=(first,))
    assert (found.token_ids, found.rounds, found.finish) == ([first], [], "stop")
    found = generate(target, drafter, PROMPTS[0], max_new_tokens=1, stop_ids=())
    assert (found.token_ids, found.rounds, found.finish) == ([first], [], "length")


@pytest.mark.parametrize("num_tokens", range(1, 20))
def test_every_length_limit_gives_a_prefix(num_tokens):
    target, drafter = taught_pair("qwen3")
    found = generate(target, drafter, PROMPTS[1], max_new_tokens=num_tokens, stop_ids=())
    assert found.token_ids == expected("qwen3", tuple(PROMPTS[1]))[:num_tokens]
    assert all(not entry.cut for entry in found.rounds[:-1])


@pytest.mark.parametrize("place", [0, 3, -1])
def test_a_mask_token_in_the_text_is_a_token_like_any_other(place):
    target, drafter = taught_pair("llama")
    prompt = list(PROMPTS[1])
    prompt[place] = MASK_TOKEN_ID
    check("llama", target, drafter, prompt)
