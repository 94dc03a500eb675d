"""T context tokens, C captured layers, V vocabulary."""

import pytest
import torch

from blockdraft.config import ConfigError
from blockdraft.decoding.acceptance import Acceptance
from blockdraft.decoding.batched import Answer
from blockdraft.decoding.replay import record_tapes, replay, replay_rounds
from blockdraft.decoding.speculative import generate
from blockdraft.models.attention import sdpa_attend
from integration.tiny import MASK_TOKEN_ID, VOCAB_SIZE, taught_pair, tiny_drafter, tiny_prompts, tiny_target

STOP_IDS = (2,)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decoded_rounds(target, drafter, prompts, num_tokens):
    return [
        generate(target, drafter, prompt, max_new_tokens=num_tokens, stop_ids=STOP_IDS).rounds for prompt in prompts
    ]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {}),
        ("gemma3", {"block_size": 16, "window": 16, "window_layers": (0, 1)}),
        ("qwen3_moe", {"window": 10, "window_layers": (0,), "causal": True}),
    ],
    ids=str,
)
def test_replay_counts_what_decoding_counts(name, settings):
    target, drafter = taught_pair(name, **settings)
    # Four that the drafter has learnt, sixteen that it has not.
    prompts = tiny_prompts(4, seed=1) + tiny_prompts(17, seed=2)[1:]
    tapes = record_tapes(target, prompts, max_new_tokens=24, stop_ids=STOP_IDS, batch_size=8)
    found = replay_rounds(drafter, target.ends, tapes, num_anchors=16)
    assert found == decoded_rounds(target, drafter, prompts, 24)
    rounds = [entry for part in found for entry in part]
    assert len({entry.accepted for entry in rounds}) > 2, "one kind of round only: the comparison says little"
    assert any(entry.cut for entry in rounds)
    block_size = drafter.shape.block_size
    assert replay(drafter, target.ends, tapes) == Acceptance.of(rounds, block_size)


def test_replay_of_a_random_drafter_counts_what_decoding_counts():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, 4)
    prompts = tiny_prompts(20, seed=3, longest=20)
    tapes = record_tapes(target, prompts, max_new_tokens=12, stop_ids=STOP_IDS, batch_size=20)
    assert replay_rounds(drafter, target.ends, tapes) == decoded_rounds(target, drafter, prompts, 12)


def test_counts_depend_neither_on_chunks_nor_on_padding_and_shapes_never_change():
    target, drafter = taught_pair("gemma3")
    prompts = tiny_prompts(4, seed=1)
    tapes = record_tapes(target, prompts, max_new_tokens=24, stop_ids=STOP_IDS)
    expected = replay_rounds(drafter, target.ends, tapes)
    shapes = set()

    def recording(shape, document_RT, position_RT, anchor_RA):
        shapes.add((tuple(document_RT.shape), tuple(anchor_RA.shape)))
        return sdpa_attend(shape, document_RT, position_RT, anchor_RA)

    found = replay_rounds(
        drafter, target.ends, tapes, attend_factory=recording, length=150, num_anchors=7, chunk_rows=5
    )
    assert found == expected
    assert shapes == {((1, 150), (1, 7))}


def test_tapes_longer_than_the_shape_are_refused():
    target, drafter = taught_pair("gemma3")
    tapes = record_tapes(target, [[5, 6, 7]], max_new_tokens=24, stop_ids=())
    with pytest.raises(ConfigError, match="longest tape, 27, got 20"):
        replay(drafter, target.ends, tapes, length=20)


def test_a_restricted_head_drafts_its_own_ids():
    target, drafter = taught_pair("gemma3")
    tapes = record_tapes(target, tiny_prompts(4, seed=1), max_new_tokens=24, stop_ids=())
    # All ids in another order: the same drafts, if they are mapped back.
    draft_ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    shuffled = target.ends.restricted(draft_ids)
    assert replay(drafter, shuffled, tapes, draft_ids=draft_ids) == replay(drafter, target.ends, tapes)
    # An id that never occurs: nothing can be accepted.
    only_mask = torch.tensor([MASK_TOKEN_ID])
    assert replay(drafter, target.ends.restricted(only_mask), tapes, draft_ids=only_mask).acceptance_length == 1.0


def test_tapes_hold_prompt_answer_and_the_states_of_exactly_these_tokens():
    target = tiny_target("llama")
    prompts = tiny_prompts(5)
    tapes = record_tapes(target, prompts, max_new_tokens=6, stop_ids=(), batch_size=2)
    for prompt, tape in zip(prompts, tapes, strict=True):
        assert tape.token_ids[: tape.prompt_length] == prompt
        assert len(tape.token_ids) == len(prompt) + 6
        alone_TC = target.features(torch.tensor([tape.token_ids]))[0]
        torch.testing.assert_close(tape.features_TC, alone_TC, atol=1e-4, rtol=1e-3)


def test_given_answers_are_taken_as_they_are():
    target = tiny_target("llama")
    finished: list[int] = []
    tapes = record_tapes(
        target,
        [[5, 6], [7]],
        max_new_tokens=6,
        stop_ids=(),
        answers=[Answer([8, 9], "length"), Answer([2], "stop")],
        progress=finished.append,
    )
    assert [tape.token_ids for tape in tapes] == [[5, 6, 8, 9], [7, 2]]
    assert finished == []
    # One token an answer: there is nothing to draft.
    drafter = tiny_drafter(target)
    assert replay_rounds(drafter, target.ends, tapes)[1] == []
