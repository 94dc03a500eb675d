"""Batched decoding against decoding alone, without a cache."""

from dataclasses import dataclass

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_5 import modeling_qwen3_5

from blockdraft.config import ConfigError
from blockdraft.decoding.batched import Answer, generate_batch

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    # Wide enough that the logits of a random model lie well apart.
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
}
HYBRID = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
LENGTHS = [5, 1, 12, 3, 12, 1, 7]


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """What batched decoding needs of a target."""

    model: PreTrainedModel
    device: torch.device


def tiny(kind: str) -> StandIn:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    elif kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    elif kind == "gemma3":
        model = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=6, query_pre_attn_scalar=8))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPE, **HYBRID))
    return StandIn(model=model.eval().float(), device=torch.device("cpu"))


@pytest.fixture
def torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recurrent layers' kernels in plain torch: where FLA is installed transformers takes its, on a CPU too."""
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
        monkeypatch.setattr(modeling_qwen3_5, name, vars(vars(modeling_qwen3_5)[name])["__wrapped__"])


def some_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 61, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.no_grad()
def alone(target: StandIn, prompt: list[int], max_new_tokens: int, stop_ids: set[int]) -> Answer:
    """Greedy, every token by a forward over the whole text."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_new_tokens:
        ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            return Answer(ids[len(prompt) :], "stop")
    return Answer(ids[len(prompt) :], "length")


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "hybrid"])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_an_answer_of_a_batch_equals_the_answer_alone(kind: str, batch_size: int):
    target, prompts = tiny(kind), some_prompts()
    free = [alone(target, prompt, 16, set()) for prompt in prompts]
    # Stops that end some rows early, and at different times, so that rows leave the batch.
    stops = {free[0].token_ids[2], free[2].token_ids[6], free[5].token_ids[0]}
    expected = [alone(target, prompt, 16, stops) for prompt in prompts]
    assert len({len(answer.token_ids) for answer in expected}) >= 3
    finished: list[int] = []
    made: list[int] = []
    found = generate_batch(
        target,
        prompts,
        max_new_tokens=16,
        stop_ids=tuple(stops),
        batch_size=batch_size,
        progress=finished.append,
        made=made.append,
    )
    assert found == expected
    assert sum(finished) == len(prompts)
    assert 0 not in finished
    # Said in every round, of rows that have not finished.
    assert sum(made) == sum(len(answer.token_ids) for answer in found)
    assert made[0] == batch_size
    assert 0 not in made


def test_finished_rows_leave_the_batch():
    target, prompts = tiny("llama"), some_prompts()
    stop = alone(target, prompts[2], 8, set()).token_ids[0]
    sizes: list[int] = []
    target.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    answers = generate_batch(target, prompts, max_new_tokens=8, stop_ids=[stop], batch_size=7)
    # One forward for the prompts, then one for every token but the last.
    lengths = [len(answer.token_ids) for answer in answers]
    assert sizes == [7] + [sum(length > n for length in lengths) for n in range(1, max(lengths))]
    assert sizes[1] < 7


def test_one_token_and_a_stop_at_once():
    target, prompts = tiny("llama"), some_prompts()
    firsts = [alone(target, prompt, 1, set()) for prompt in prompts]
    assert generate_batch(target, prompts, max_new_tokens=1, stop_ids=[], batch_size=4) == firsts
    stops = {answer.token_ids[0] for answer in firsts}
    answers = generate_batch(target, prompts, max_new_tokens=9, stop_ids=stops, batch_size=4)
    assert answers == [Answer(answer.token_ids, "stop") for answer in firsts]
    assert generate_batch(target, [], max_new_tokens=1, stop_ids=[]) == []


def test_sampling_follows_the_targets_distribution():
    target = tiny("llama")
    prompt = some_prompts()[0]
    with torch.no_grad():
        probability_V = (target.model(torch.tensor([prompt])).logits[0, -1] / 4.0).softmax(-1)
    answers = generate_batch(
        target,
        [prompt] * 4000,
        max_new_tokens=1,
        stop_ids=[],
        temperature=4.0,
        generator=torch.Generator().manual_seed(5),
        batch_size=4000,
    )
    count_V = torch.bincount(torch.tensor([a.token_ids[0] for a in answers]), minlength=61)
    expected_V = 4000 * probability_V
    # 0.999 quantile of chi-square with 60 degrees of freedom.
    assert float(((count_V - expected_V) ** 2 / expected_V).sum()) < 99.6


def test_the_same_generator_state_samples_the_same():
    target, prompts = tiny("llama"), some_prompts()

    def sample(seed: int) -> list[Answer]:
        generator = torch.Generator().manual_seed(seed)
        return generate_batch(
            target, prompts, max_new_tokens=6, stop_ids=[], temperature=2.0, generator=generator, batch_size=3
        )

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_numbers_out_of_range_are_errors():
    target = tiny("llama")
    with pytest.raises(ConfigError, match="prompt 2: expected at least one token"):
        generate_batch(target, [[1], []], max_new_tokens=1, stop_ids=[])
    with pytest.raises(ConfigError, match="max_new_tokens: expected at least 1, found 0"):
        generate_batch(target, [[1]], max_new_tokens=0, stop_ids=[])
    with pytest.raises(ConfigError, match="temperature: expected 0"):
        generate_batch(target, [[1]], max_new_tokens=1, stop_ids=[], temperature=-1.0)
