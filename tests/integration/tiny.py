"""Tiny random targets and drafters, made from fixed seeds: six layers, a vocabulary of 101 ids, float32, CPU."""

import functools
from collections.abc import Callable

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from blockdraft.config import DrafterConfig
from blockdraft.models.attention import sdpa_attend
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
EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
HYBRID = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": [*["linear_attention"] * 3, "full_attention", "linear_attention", "full_attention"],
}
HYBRID_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_next": lambda: Qwen3NextConfig(**COMMON, **HYBRID, **EXPERTS),
    "qwen3_5": lambda: Qwen3_5TextConfig(**COMMON, **HYBRID),
    "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**COMMON, **HYBRID, **EXPERTS),
}
HYBRIDS = tuple(HYBRID_CONFIGS)
CONFIGS |= HYBRID_CONFIGS


def tiny_target(
    name: str,
    *,
    seed: int = 0,
    num_drafter_layers: int = 2,
    layer_ids: tuple[int, ...] | None = None,
    initializer_range: float = 0.3,
) -> Target:
    """One of CONFIGS with random weights; its stop id is 2."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config.initializer_range = initializer_range
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
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
    drafter = Drafter(derive_shape(config, target.facts, MASK_TOKEN_ID))
    drafter.initialise(torch.Generator().manual_seed(seed))
    return drafter.eval()


def tiny_prompts(num_prompts: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Random prompts of 1 to `longest` ids, special ids left out; the first has one token. Fewer: a prefix of more."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for index in range(num_prompts):
        length = int(torch.randint(2, longest + 1, (), generator=generator)) if index else 1
        prompts.append(torch.randint(3, MASK_TOKEN_ID, (length,), generator=generator).tolist())
    return prompts


@torch.enable_grad()
def teach(
    target: Target,
    drafter: Drafter,
    texts: list[list[int]],
    prompt_lengths: list[int],
    *,
    num_steps: int,
    num_anchors: int = 12,
    seed: int = 0,
) -> None:
    """Trains `drafter` in place on texts of the target: a loop of a few lines that shares nothing with the trainer."""
    generator = torch.Generator().manual_seed(seed)
    size, mask = drafter.shape.block_size, drafter.shape.mask_token_id
    longest = max(map(len, texts)) + size
    ids_RT = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    length_R1 = torch.tensor([[len(text)] for text in texts])
    first_R1 = torch.tensor(prompt_lengths)[:, None]
    position_RT = torch.arange(longest).expand_as(ids_RT)
    features_RTC = target.features(ids_RT)
    document_RT = torch.where(position_RT < length_R1, 0, -1)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=5e-3)
    for _ in range(num_steps):
        draw_RA = torch.rand(len(texts), num_anchors, generator=generator)
        anchor_RA = (first_R1 + draw_RA * (length_R1 - 1 - first_R1).clamp(min=1)).long()
        token_RAL = torch.full((*anchor_RA.shape, size), mask)
        token_RAL[..., 0] = ids_RT.gather(1, anchor_RA)
        slot_RAL = anchor_RA[..., None] + torch.arange(size)
        hidden_RQD = drafter(
            drafter.project(features_RTC),
            position_RT,
            target.ends.embed(token_RAL.flatten(1)),
            slot_RAL.flatten(1),
            sdpa_attend(drafter.shape, document_RT, position_RT, anchor_RA),
        )
        label_RAL = ids_RT.gather(1, slot_RAL.flatten(1)).view_as(slot_RAL)
        label_RAL = torch.where(slot_RAL < length_R1[..., None], label_RAL, -100)
        label_RAL[..., 0] = -100
        logits_NV = target.ends.logits(hidden_RQD.flatten(0, 1))
        loss = torch.nn.functional.cross_entropy(logits_NV, label_RAL.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@functools.cache
def taught_pair(
    name: str,
    *,
    block_size: int = 8,
    window: int | None = None,
    window_layers: tuple[int, ...] = (),
    causal: bool = False,
    num_steps: int = 60,
) -> tuple[Target, Drafter]:
    """A target and a drafter that has learnt its answers to `tiny_prompts(4, seed=1)`: rounds accept 0 to L - 1."""
    target = tiny_target(name)
    drafter = tiny_drafter(target, block_size, window=window, window_layers=window_layers, causal=causal)
    with torch.no_grad():
        # normal(0, 0.02) is meant for wide layers; at width 32 it would take thousands of steps to grow.
        for weight in drafter.parameters():
            weight.mul_(8.0 if weight.dim() == 2 else 1.0)
    prompts = tiny_prompts(4, seed=1)
    answers = [plain_answer(target, prompt, 40) for prompt in prompts]
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    teach(target, drafter, texts, [len(prompt) for prompt in prompts], num_steps=num_steps)
    return target, drafter


def plain_answer(target: Target, prompt: list[int], num_tokens: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
    """The target's greedy answer by whole forwards without any cache: the plainest reference."""
    text = list(prompt)
    while len(text) < len(prompt) + num_tokens:
        with torch.no_grad():
            text.append(int(target.model(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        if text[-1] in stop_ids:
            break
    return text[len(prompt) :]
