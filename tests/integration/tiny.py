"""Tiny random targets and drafters, made from fixed seeds: six layers, a vocabulary of 101 ids, float32, CPU."""

from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from blockdraft.config import DrafterConfig
from blockdraft.models.drafter import Drafter, derive_shape
from blockdraft.models.target import Target

VOCAB_SIZE = 101
MASK_TOKEN_ID = 100
GEMMA_WINDOW = 16
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    # Large enough that greedy answers wander before they loop, and that no two logits come close.
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**COMMON),
    "qwen3": lambda: Qwen3Config(**COMMON),
    "gemma3": lambda: Gemma3TextConfig(**COMMON, sliding_window=GEMMA_WINDOW, query_pre_attn_scalar=16),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON, moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1
    ),
}
TARGETS = tuple(CONFIGS)


def tiny_target(
    name: str, *, seed: int = 0, num_drafter_layers: int = 2, layer_ids: tuple[int, ...] | None = None
) -> Target:
    """One of TARGETS with random weights; its stop id is 2."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    return Target(model, layer_ids, num_drafter_layers)


def tiny_drafter(
    target: Target,
    block_size: int = 8,
    num_layers: int = 2,
    seed: int = 0,
    *,
    window: int | None = None,
    window_layers: tuple[int, ...] = (),
    causal: bool = False,
) -> Drafter:
    """A random float32 drafter for `target`; mask token 100."""
    config = DrafterConfig(
        num_layers=num_layers,
        block_size=block_size,
        target_layer_ids=target.layer_ids,
        window=window,
        window_layers=window_layers,
        causal=causal,
    )
    drafter = Drafter(derive_shape(config, target, MASK_TOKEN_ID))
    drafter.initialise(torch.Generator().manual_seed(seed))
    return drafter.eval()


def tiny_prompts(num_prompts: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Random prompts of 1 to `longest` ids, special ids left out; the first has one token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, *torch.randint(2, longest + 1, (num_prompts - 1,), generator=generator).tolist()]
    return [torch.randint(3, MASK_TOKEN_ID, (length,), generator=generator).tolist() for length in lengths]
