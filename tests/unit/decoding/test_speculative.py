"""L block size, K draft tokens, V vocabulary, T context tokens, C captured layers."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.decoding.acceptance import Round
from blockdraft.decoding.sampling import Sampling, Verdict, verify_greedy, verify_sampled
from blockdraft.decoding.speculative import (
    _commit,
    _verify,
    find_divergence,
    first_divergence,
    generate,
    generate_plain,
)
from blockdraft.decoding.state import CroppedState, DraftState, new_target_state
from blockdraft.models.attention import sdpa_attend
from integration.tiny import MASK_TOKEN_ID, VOCAB_SIZE, taught_pair, tiny_drafter, tiny_prompts, tiny_target

SHAPES = (
    {},
    {"causal": True},
    {"window": 9, "window_layers": (0,)},
    {"window": 8, "window_layers": (0, 1), "causal": True},
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def logits_as_trained(target, drafter, text: list[int], anchor: int) -> Tensor:
    """Logits of slots 1 .. L - 1 of one block by the attention of training, the whole text in view, [K, V]."""
    size = drafter.shape.block_size
    ids_1T = torch.tensor([text])
    position_1T = torch.arange(len(text))[None]
    block_1L = torch.tensor([[text[anchor]] + [MASK_TOKEN_ID] * (size - 1)])
    hidden_1LD = drafter(
        drafter.project(target.features(ids_1T)),
        position_1T,
        target.ends.embed(block_1L),
        anchor + torch.arange(size)[None],
        sdpa_attend(drafter.shape, torch.zeros_like(ids_1T), position_1T, torch.tensor([[anchor]])),
    )
    return target.ends.logits(hidden_1LD[0, 1:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_cached_drafts_equal_those_of_training(shape):
    target = tiny_target("qwen3")
    drafter = tiny_drafter(target, 8, **shape)
    text = tiny_prompts(2, seed=3, longest=40)[1][:5] + tiny_prompts(8, seed=4)[6][:30]
    features_1TC = target.features(torch.tensor([text]))
    drafts, known = DraftState(drafter, target.ends, len(text)), 0
    # Context arrives in pieces, as rounds commit it; the anchor is the first token without features.
    for anchor in (1, 4, 5, 12, 20, len(text) - 1):
        cached_KV = drafts.draft_logits(features_1TC[:, known:anchor], text[anchor])
        known = anchor
        torch.testing.assert_close(cached_KV, logits_as_trained(target, drafter, text, anchor), atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_window_hides_and_the_causal_flag_hides():
    # Guards the comparison above against shapes that make no difference.
    target = tiny_target("qwen3")
    text = tiny_prompts(3, seed=5)[2] + list(range(3, 30))
    logits = [logits_as_trained(target, tiny_drafter(target, 8, **shape), text, len(text) - 1) for shape in SHAPES]
    for other_KV in logits[1:]:
        assert (other_KV - logits[0]).abs().max() > 1e-4


@torch.no_grad()
def test_a_state_forgets_rejected_tokens_and_windows_stay_right():
    target = tiny_target("gemma3")
    state = CroppedState(target)
    prompt = list(range(3, 40))
    state.extend(torch.tensor([prompt]))
    state.keep(len(prompt))
    text = list(prompt)
    for kept, block in ((1, [40, 41, 42, 43]), (4, [50, 51, 52, 53]), (2, [60, 61, 62])):
        found = state.extend(torch.tensor([block])).logits_BSV[0]
        expected = target.model(torch.tensor([text + block]), use_cache=False).logits[0, -len(block) :]
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        state.keep(kept)
        text += block[:kept]


def test_targets_that_cannot_be_rewound_are_refused():
    target = tiny_target("llama")
    target.text_config.layer_types = ["hybrid_sliding"] + ["full_attention"] * 5
    with pytest.raises(ConfigError, match="found hybrid_sliding"):
        new_target_state(target)


def logits_for(tokens: list[int]) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), 20).float()


def test_greedy_verification_accepts_the_leading_agreement():
    draft_K = torch.tensor([5, 6, 7])
    assert verify_greedy(draft_K, logits_for([5, 9, 7, 8]))[0] == Verdict(1, 9)
    assert verify_greedy(draft_K, logits_for([4, 6, 7, 8]))[0] == Verdict(0, 4)
    assert verify_greedy(draft_K, logits_for([5, 6, 7, 8]))[0] == Verdict(3, 8)
    # No position behind the last draft token: nothing to commit after it.
    assert verify_greedy(draft_K, logits_for([5, 6, 7])) == (Verdict(3, None), [5, 6, 7])


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict(2, 9), (Round(2, 3, False), [5, 6, 9])),
        (Verdict(0, 9), (Round(0, 1, False), [9])),
        (Verdict(3, None), (Round(3, 3, True), [5, 6, 7])),
        # A stop token that was drafted and accepted costs the round its bonus token; as bonus token it costs nothing.
        (Verdict(3, 9), (Round(3, 4, False), [5, 6, 7, 9])),
        (Verdict(1, 2), (Round(1, 2, False), [5, 2])),
    ],
)
def test_what_a_round_commits(verdict, expected):
    assert _commit(verdict, [5, 6, 7], stop_ids=(2,)) == expected


def test_a_stop_token_inside_the_accepted_draft_cuts_the_round():
    assert _commit(Verdict(3, 9), [5, 6, 7], stop_ids=(6,)) == (Round(2, 2, True), [5, 6])
    assert _commit(Verdict(3, 9), [5, 6, 7], stop_ids=(7,)) == (Round(3, 3, True), [5, 6, 7])
    # Not accepted, so not there.
    assert _commit(Verdict(1, 9), [5, 6, 7], stop_ids=(6,)) == (Round(1, 2, False), [5, 9])


def chi_square(counts: Counter, expected: dict, num_samples: int) -> float:
    """Statistic over cells with at least 5 expected counts, the others pooled, divided by its degrees of freedom."""
    big = {cell: p * num_samples for cell, p in expected.items() if p * num_samples >= 5}
    rest = num_samples - sum(big.values())
    value = sum((counts[cell] - mean) ** 2 / mean for cell, mean in big.items())
    if rest >= 5:
        value += (num_samples - sum(counts[cell] for cell in big) - rest) ** 2 / rest
    return value / max(1, len(big) - (rest < 5))


def first_tokens_by_rejection(p_NV: Tensor, q_KV: Tensor, num_samples: int, generator: torch.Generator) -> Counter:
    """Counts the first committed token of many rounds: the draft token or what was drawn instead."""
    counts: Counter = Counter()
    for _ in range(num_samples):
        draft_K = torch.multinomial(q_KV, 1, generator=generator)[:, 0]
        verdict, drafted = verify_sampled(draft_K, q_KV, p_NV, generator)
        counts[drafted[0] if verdict.accepted else verdict.next_token] += 1
    return counts


def test_rejection_sampling_keeps_the_distribution_whatever_was_drafted():
    generator = torch.Generator().manual_seed(0)
    p_NV = torch.tensor([[0.5, 0.3, 0.15, 0.05, 0.0], [0.2] * 5])
    expected = {token: float(p) for token, p in enumerate(p_NV[0])}
    for q in ([0.05, 0.05, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 0.0, 1.0], p_NV[0].tolist()):
        counts = first_tokens_by_rejection(p_NV, torch.tensor([q]), 3000, generator)
        assert counts[4] == 0
        assert chi_square(counts, expected, 3000) < 4, (q, counts)


def test_every_token_of_a_block_has_its_own_positions_distribution():
    # Whether a position is reached depends on the draws before it only, so what is committed there follows its own p.
    generator, num_samples = torch.Generator().manual_seed(0), 4000
    p_NV = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.3, 0.1, 0.6], [0.2, 0.5, 0.3]])
    q_KV = torch.tensor([[0.3, 0.3, 0.4], [0.6, 0.3, 0.1], [0.1, 0.5, 0.4]])
    counts_N: list[Counter] = [Counter() for _ in p_NV]
    for _ in range(num_samples):
        draft_K = torch.multinomial(q_KV, 1, generator=generator)[:, 0]
        verdict, drafted = verify_sampled(draft_K, q_KV, p_NV, generator)
        for counts, token in zip(counts_N, [*drafted[: verdict.accepted], verdict.next_token], strict=False):
            counts[token] += 1
    assert counts_N[0].total() == num_samples > counts_N[1].total() > counts_N[3].total() > num_samples / 10
    for counts, p_V in zip(counts_N, p_NV.tolist(), strict=True):
        assert chi_square(counts, dict(enumerate(p_V)), counts.total()) < 4, (counts, p_V)


def test_drafts_are_drawn_from_the_distribution_that_they_are_judged_by():
    # Only one token is left of either distribution, though the logits hardly differ.
    draft_KV = torch.tensor([[0.0, 0.1, 0.0], [0.1, 0.0, 0.0]])
    target_BSV = torch.tensor([[[0.0, 0.1, 0.0], [0.0, 0.0, 0.1], [0.1, 0.0, 0.0]]])
    output = SimpleNamespace(logits_BSV=target_BSV, features_BSC=None)
    state = SimpleNamespace(extend=lambda _block_1S: output)
    for sampling in (Sampling(temperature=1.0, top_k=1), Sampling(temperature=1e-3)):
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            verdict, drafted, _ = _verify(state, 0, draft_KV, 9, sampling, generator)  # type: ignore[arg-type]
            assert (verdict, drafted) == (Verdict(1, 2), [1, 0])


def test_the_chi_square_sees_a_wrong_rule():
    # Drawing a refused token from p instead of max(p - q, 0) favours what was drafted.
    generator = torch.Generator().manual_seed(0)
    p_V, q_V = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.1, 0.4, 0.4])
    counts: Counter = Counter()
    for _ in range(3000):
        token = int(torch.multinomial(q_V, 1, generator=generator))
        if torch.rand((), generator=generator) * q_V[token] >= p_V[token]:
            token = int(torch.multinomial(p_V, 1, generator=generator))
        counts[token] += 1
    assert chi_square(counts, {token: float(p) for token, p in enumerate(p_V)}, 3000) > 20


@torch.no_grad()
def test_sampled_decoding_has_the_targets_distribution():
    target, drafter = taught_pair("gemma3")
    prompt, sampling = tiny_prompts(4, seed=1)[3], Sampling(temperature=1.5, top_k=3)

    def next_probability(text: list[int]) -> dict[int, float]:
        logits_1V = target.model(torch.tensor([text]), use_cache=False).logits[0, -1:]
        probability_V = sampling.probabilities(logits_1V)[0]
        return {int(token): float(probability_V[token]) for token in probability_V.nonzero()}

    expected = {
        (first, second, third): p * q * r
        for first, p in next_probability(prompt).items()
        for second, q in next_probability([*prompt, first]).items()
        for third, r in next_probability([*prompt, first, second]).items()
    }
    generator, counts, accepted = torch.Generator().manual_seed(0), Counter(), 0
    for _ in range(400):
        found = generate(
            target, drafter, prompt, max_new_tokens=3, stop_ids=(), temperature=1.5, top_k=3, generator=generator
        )
        counts[tuple(found.token_ids)] += 1
        accepted += sum(entry.accepted for entry in found.rounds)
    assert set(counts) <= set(expected)
    assert accepted > 20, "nothing accepted: the test would only see plain sampling"
    assert chi_square(counts, expected, 400) < 2.5


def test_a_temperature_sharpens_or_flattens():
    logits_1V = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for temperature, power in ((0.5, 2.0), (2.0, 0.5), (1.0, 1.0)):
        expected_1V = torch.tensor([[0.4, 0.3, 0.2, 0.1]]) ** power
        found_1V = Sampling(temperature=temperature).probabilities(logits_1V)
        torch.testing.assert_close(found_1V, expected_1V / expected_1V.sum())


def test_top_k_and_top_p_keep_the_most_likely():
    logits_1V = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = Sampling(temperature=1.0, top_k=2).probabilities(logits_1V)
    torch.testing.assert_close(kept, torch.tensor([[4 / 7, 3 / 7, 0.0, 0.0]]))
    # top_p is a share of what top_k has left: 4/9 alone is enough of it.
    kept = Sampling(temperature=1.0, top_k=3, top_p=0.42).probabilities(logits_1V)
    torch.testing.assert_close(kept, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    kept = Sampling(temperature=1.0, top_p=0.6).probabilities(logits_1V)
    torch.testing.assert_close(kept, torch.tensor([[4 / 7, 3 / 7, 0.0, 0.0]]))
    kept = Sampling(temperature=1.0, top_p=0.1).probabilities(logits_1V)
    torch.testing.assert_close(kept, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    with pytest.raises(ConfigError, match="top_p"):
        Sampling(temperature=1.0, top_p=0.0)


def test_divergence_names_the_place_and_the_gap():
    target = tiny_target("llama")
    prompt = tiny_prompts(3)[1]
    plain = generate_plain(target, prompt, max_new_tokens=8, stop_ids=()).token_ids
    assert find_divergence(target, prompt, plain, list(plain)) is None
    other = list(plain)
    other[5] = (plain[5] + 1) % VOCAB_SIZE
    found = find_divergence(target, prompt, plain, other)
    assert found is not None
    assert (found.offset, found.plain_token, found.speculative_token) == (5, plain[5], other[5])
    with torch.no_grad():
        logits_V = target.model(torch.tensor([prompt + plain[:5]]), use_cache=False).logits[0, -1]
    assert found.logit_gap == pytest.approx(float(logits_V[plain[5]] - logits_V[other[5]]), abs=1e-4)
    assert found.logit_gap > 0


def test_first_divergence_counts_a_missing_end():
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == 1
    assert first_divergence([1, 2], [1, 2, 3]) == 2


def test_requests_that_cannot_be_served_are_refused():
    target = tiny_target("llama")
    drafter = tiny_drafter(target)
    with pytest.raises(ConfigError, match=r"at most 512 tokens, found a prompt of 500 and max_new_tokens 13"):
        generate(target, drafter, [5] * 500, max_new_tokens=13, stop_ids=())
    with pytest.raises(ConfigError, match="prompt is empty"):
        generate_plain(target, [], max_new_tokens=1, stop_ids=())
    with pytest.raises(ConfigError, match="max_new_tokens"):
        generate_plain(target, [5], max_new_tokens=0, stop_ids=())
    with pytest.raises(ConfigError, match="random generator"):
        generate(target, drafter, [5], max_new_tokens=4, stop_ids=(), temperature=1.0)
    other = tiny_target("llama", layer_ids=(0, 4))
    with pytest.raises(ConfigError, match=r"target layer ids \(1, 3\), found \(0, 4\)"):
        generate(other, drafter, [5], max_new_tokens=4, stop_ids=())


def test_an_answer_whose_last_token_stops_it_has_stopped():
    target = tiny_target("llama")
    drafter, prompt = tiny_drafter(target, 4), [5, 6, 7]
    answer = generate_plain(target, prompt, max_new_tokens=1, stop_ids=()).token_ids
    for stop_ids, finish in ((answer, "stop"), ((), "length")):
        for found in (
            generate(target, drafter, prompt, max_new_tokens=1, stop_ids=stop_ids),
            generate_plain(target, prompt, max_new_tokens=1, stop_ids=stop_ids),
        ):
            assert (found.token_ids, found.finish) == (answer, finish)


def test_rounds_are_reported_as_they_come():
    target, drafter = taught_pair("gemma3")
    calls: list[tuple[list[int], int]] = []
    found = generate(
        target,
        drafter,
        tiny_prompts(2, seed=1)[1],
        max_new_tokens=20,
        stop_ids=(),
        on_round=lambda token_ids, accepted: calls.append((token_ids, accepted)),
    )
    assert [token for tokens, _ in calls for token in tokens] == found.token_ids
    assert [(accepted, len(tokens)) for tokens, accepted in calls[1:]] == [
        (r.accepted, r.committed) for r in found.rounds
    ]
    assert calls[0] == (found.token_ids[:1], 0)


def test_the_last_position_of_the_target_can_be_reached():
    target = tiny_target("llama")
    drafter = tiny_drafter(target, 16)
    prompt = [7] * 505
    found = generate(target, drafter, prompt, max_new_tokens=7, stop_ids=())
    assert found.token_ids == generate_plain(target, prompt, max_new_tokens=7, stop_ids=()).token_ids
