"""Targets with recurrent layers: lossless decoding from put-back states, features, batched answers, replay.

S tokens, V vocabulary, C captured layers.
"""

import functools

import pytest
import torch
from torch import Tensor

from blockdraft.decoding.acceptance import Acceptance
from blockdraft.decoding.batched import generate_batch
from blockdraft.decoding.replay import record_tapes, replay_rounds
from blockdraft.decoding.speculative import generate, generate_plain
from blockdraft.decoding.state import CroppedState, SnapshotState, new_target_state
from integration.tiny import HYBRIDS, plain_answer, taught_pair, tiny_drafter, tiny_prompts, tiny_target

NUM_TOKENS = 30
PROMPTS = tiny_prompts(4, seed=1)
# Prompts shorter than the convolution kernel are among them; this one is longer than a chunk of the recurrent kernel.
LONG_PROMPT = tiny_prompts(30, seed=2)[20] * 4


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def expected(name: str, prompt: tuple[int, ...]) -> list[int]:
    return plain_answer(tiny_target(name), list(prompt), NUM_TOKENS)


def random_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 100, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def calm_target(name: str):
    """Small weights: any two right ways to compute its logits agree to 3e-6 of their spread."""
    return tiny_target(name, initializer_range=0.05)


class RecordingCroppedState(CroppedState):
    """What decoding without snapshots would be: every layer records its past, and the whole cache is cropped."""

    def __init__(self, target) -> None:
        super().__init__(target)
        self.cache.activate_past_recording()


@torch.no_grad()
def error_after_a_rejection(target, state) -> float:
    """Of 16 drafted tokens 4 stay; the largest error of the next block's logits, in units of their spread."""
    prompt, block, next_block = random_tokens(21, 0), random_tokens(17, 1), random_tokens(17, 2)
    state.extend(torch.tensor([prompt]), last_only=True)
    state.keep(len(prompt))
    state.extend(torch.tensor([block]))
    state.keep(5)
    found_SV = state.extend(torch.tensor([next_block])).logits_BSV[0]
    text = [*prompt, *block[:5], *next_block]
    whole_SV = target.model(torch.tensor([text]), use_cache=False).logits[0, -len(next_block) :]
    assert found_SV.shape == whole_SV.shape
    return float((found_SV - whole_SV).abs().max() / whole_SV.std())


@pytest.mark.parametrize("name", HYBRIDS)
def test_logits_after_a_rejection_are_those_of_a_whole_forward(name):
    target = calm_target(name)
    assert error_after_a_rejection(target, new_target_state(target)) < 1e-5


@pytest.mark.parametrize("name", HYBRIDS)
def test_cropping_the_cache_would_fail_the_same_test(name):
    target = calm_target(name)
    assert error_after_a_rejection(target, RecordingCroppedState(target)) > 1e-2


def test_the_kind_of_state_follows_the_layers():
    assert isinstance(new_target_state(tiny_target("qwen3_5")), SnapshotState)
    for name in ("llama", "gemma3", "qwen3_moe"):
        assert isinstance(new_target_state(tiny_target(name)), CroppedState)


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRIDS)
def test_features_come_out_once_and_right_whatever_is_rejected(name, monkeypatch):
    target, text = calm_target(name), random_tokens(19, 3)
    state, sizes, parts = new_target_state(target), list[int](), list[Tensor]()
    forward = target.forward
    monkeypatch.setattr(
        target, "forward", lambda ids, *args, **more: sizes.append(ids.shape[1]) or forward(ids, *args, **more)
    )
    parts.append(state.extend(torch.tensor([text])).features_BSC)
    state.keep(len(text))
    # Long runs of rejections, whole blocks, single tokens in between.
    for turn, kept in enumerate([1] * 40 + [8, 8, 3, 8, 2, 7] + [1] * 5):
        block = random_tokens(1 if turn in (12, 45) else 8, 100 + turn)
        output = state.extend(torch.tensor([block]))
        whole_SV = target.model(torch.tensor([text + block]), use_cache=False).logits[0, -len(block) :]
        assert (output.logits_BSV[0] - whole_SV).abs().max() < 1e-5 * whole_SV.std()
        kept = min(kept, len(block))
        state.keep(kept)
        parts.append(output.features_BSC[:, :kept])
        text += block[:kept]
    found_SC = torch.cat(parts, dim=1)[0]
    whole_SC = target.features(torch.tensor([text]))[0]
    assert (found_SC - whole_SC).abs().max() < 1e-5 * whole_SC.std()
    assert max(sizes) <= SnapshotState.WAITING_LIMIT + 8, "tokens that wait to be read again must stay few"


@pytest.mark.parametrize("block_size", [2, 8, 16])
@pytest.mark.parametrize("name", HYBRIDS)
def test_random_drafters_change_nothing(name, block_size):
    target = tiny_target(name)
    drafter = tiny_drafter(target, block_size)
    for prompt in (*PROMPTS[:2], LONG_PROMPT):
        found = generate(target, drafter, prompt, max_new_tokens=NUM_TOKENS, stop_ids=())
        assert found.token_ids == expected(name, tuple(prompt))
        plain = generate_plain(target, prompt, max_new_tokens=NUM_TOKENS, stop_ids=())
        assert plain.token_ids == found.token_ids


@pytest.mark.parametrize("name", HYBRIDS)
def test_taught_drafters_change_nothing_and_replay_counts_the_same(name):
    target, drafter = taught_pair(name)
    decoded = [generate(target, drafter, prompt, max_new_tokens=NUM_TOKENS, stop_ids=()) for prompt in PROMPTS]
    assert [one.token_ids for one in decoded] == [expected(name, tuple(prompt)) for prompt in PROMPTS]
    tapes = record_tapes(target, PROMPTS, max_new_tokens=NUM_TOKENS, stop_ids=())
    assert [one.rounds for one in decoded] == replay_rounds(drafter, target.ends, tapes)
    rounds = [entry for one in decoded for entry in one.rounds]
    assert Acceptance.of(rounds, 8).acceptance_length > 1.2, "nothing accepted: the test would see rejections alone"
    assert any(entry.accepted == 0 for entry in rounds), "nothing rejected"


@pytest.mark.parametrize("name", HYBRIDS)
def test_answers_decoded_in_a_batch_are_those_decoded_alone(name):
    prompts = [*PROMPTS, LONG_PROMPT]
    answers = generate_batch(tiny_target(name), prompts, max_new_tokens=NUM_TOKENS, stop_ids=(), batch_size=5)
    assert [answer.token_ids for answer in answers] == [expected(name, tuple(prompt)) for prompt in prompts]


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRIDS)
def test_captured_features_are_the_layers_outputs_and_the_run_stops_behind_them(name):
    target = tiny_target(name, layer_ids=(0, 2, 3, 4))
    assert {target.text_config.layer_types[layer] for layer in target.layer_ids} == {
        "linear_attention",
        "full_attention",
    }
    ids_1S = torch.tensor([LONG_PROMPT])
    hidden = target.model(ids_1S, use_cache=False, output_hidden_states=True).hidden_states
    reached: list[int] = []
    handle = target.layers[5].register_forward_hook(lambda *_: reached.append(5))
    found_1SC = target.features(ids_1S)
    handle.remove()
    assert torch.equal(found_1SC, torch.cat([hidden[layer + 1] for layer in target.layer_ids], dim=-1))
    assert reached == []
