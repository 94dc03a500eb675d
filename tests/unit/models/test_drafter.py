"""R rows, T context tokens, Q block tokens, D width, C captured layers, E head width."""

import dataclasses

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb as reference_rotary

from blockdraft.config import ConfigError, DrafterConfig
from blockdraft.models.drafter import (
    Drafter,
    DrafterMLP,
    DrafterShape,
    RMSNorm,
    TargetFacts,
    default_layer_ids,
    derive_shape,
    rotate,
    rotation,
)
from integration.tiny import tiny_drafter, tiny_target

FACTS = TargetFacts(
    hidden_size=5120,
    num_layers=64,
    vocab_size=1000,
    num_heads=24,
    num_kv_heads=4,
    head_dim=128,
    intermediate_size=17408,
    is_moe=False,
    rms_norm_eps=1e-6,
    rope_theta=1e7,
    max_position_embeddings=4096,
    embedding_multiplier=1.0,
    logit_multiplier=1.0,
    logit_softcap=None,
)


def shape_of(facts: TargetFacts = FACTS, **changes) -> DrafterShape:
    return derive_shape(DrafterConfig(**changes), facts, 999)


def see_everything(_layer, query, context_key, context_value, block_key, block_value):
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        torch.cat([context_key, block_key], dim=2),
        torch.cat([context_value, block_value], dim=2),
        enable_gqa=True,
    )


@pytest.mark.parametrize(
    ("num_layers", "captured", "expected"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 5, (1, 8, 14, 20, 27)),
        (36, 1, (18,)),
        (6, 2, (1, 3)),
    ],
)
def test_layer_ids_are_spread_as_the_paper_has_them(num_layers, captured, expected):
    assert default_layer_ids(num_layers, captured) == expected


def test_a_target_of_three_layers_is_refused():
    with pytest.raises(ConfigError, match="at least 4 layers to choose from, found 3"):
        default_layer_ids(3, 2)


@pytest.mark.parametrize(("num_layers", "captured"), [(4, 2), (5, 5), (6, 4), (7, 5)])
def test_default_ids_that_would_repeat_are_refused(num_layers, captured):
    with pytest.raises(ConfigError, match=rf"at most {num_layers - 3} captured layers.*found {captured}; lower it"):
        default_layer_ids(num_layers, captured)
    assert len(default_layer_ids(num_layers, max(1, num_layers - 3))) == max(1, num_layers - 3)


def test_a_shape_follows_the_target():
    shape = shape_of()
    assert (shape.hidden_size, shape.num_layers, shape.block_size) == (5120, 5, 16)
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (24, 4, 128)
    assert (shape.intermediate_size, shape.rope_theta, shape.max_position_embeddings) == (17408, 1e7, 4096)
    assert shape.target_layer_ids == (1, 16, 31, 46, 61)


def test_wide_heads_are_cut_to_128_and_experts_become_a_dense_layer():
    wide = shape_of(FACTS._replace(head_dim=256))
    assert (wide.head_dim, wide.num_heads, wide.num_kv_heads) == (128, 40, 8)
    assert shape_of(FACTS._replace(is_moe=True)).intermediate_size == 3 * 5120
    # Gemma-2 2B: 18 heads of 128, which 8 does not divide.
    narrow = shape_of(FACTS._replace(hidden_size=2304, head_dim=256))
    assert (narrow.num_heads, narrow.num_kv_heads) == (18, 6)
    chosen = shape_of(head_dim=64, num_heads=16, num_kv_heads=2, intermediate_size=99)
    assert (chosen.head_dim, chosen.num_heads, chosen.num_kv_heads, chosen.intermediate_size) == (64, 16, 2, 99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, r"block_size must be at least 2 \(the anchor counts\), got 1"),
        ({"num_heads": 5, "num_kv_heads": 2}, "must be a multiple of drafter.num_kv_heads, got 5 and 2"),
        ({"head_dim": 33, "num_heads": 8}, r"head_dim must be even \(rotary embedding\), got 33"),
        ({"target_layer_ids": (3, 3)}, r"rising layer numbers in 0\.\.63, got \[3, 3\]"),
        ({"target_layer_ids": (5, 2)}, r"rising layer numbers"),
        ({"target_layer_ids": (1, 64)}, r"rising layer numbers"),
        ({"window": 15, "window_layers": (0,)}, r"drafter\.window must be at least drafter\.block_size \(16\), got 15"),
        ({"window": 32}, "go together"),
        ({"window_layers": (1,)}, "go together"),
        ({"window": 32, "window_layers": (5,)}, r"must be drafter layers 0\.\.4, got \(5,\)"),
        (
            {"window": 32, "window_layers": (1, 0)},
            r"expected rising drafter layers, each once, found \[1, 0\]; write 0 1",
        ),
        (
            {"window": 32, "window_layers": (0, 0)},
            r"expected rising drafter layers, each once, found \[0, 0\]; write 0$",
        ),
    ],
)
def test_shapes_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        shape_of(**changes)


def test_a_mask_token_outside_the_embedding_is_refused():
    with pytest.raises(ConfigError, match=r"must lie in the target's embedding \(0\.\.999\), got 1000"):
        derive_shape(DrafterConfig(), FACTS, 1000)


def test_tensor_names_are_the_published_ones():
    drafter = tiny_drafter(tiny_target("llama"), 8, 2)
    layer = {"input_layernorm", "post_attention_layernorm"}
    layer |= {f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
    layer |= {f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")}
    expected = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    assert set(drafter.state_dict()) == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert drafter.fc.weight.shape == (32, 2 * 32)


def test_rotary_angles_equal_those_of_qwen3():
    config = Qwen3Config(head_dim=16, hidden_size=32, num_attention_heads=2, rope_theta=5e5)
    position_RN = torch.tensor([[0, 1, 7, 500]])
    x_RHNE = torch.randn(1, 2, 4, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = Qwen3RotaryEmbedding(config)(x_RHNE, position_RN)
    expected, _ = reference_rotary(x_RHNE, x_RHNE, cos, sin)
    torch.testing.assert_close(
        rotate(x_RHNE, rotation(position_RN, 16, 5e5, torch.float32)), expected, atol=5e-5, rtol=1e-4
    )


def test_norm_and_mlp_equal_those_of_qwen3():
    generator = torch.Generator().manual_seed(0)
    x_RND = torch.randn(2, 3, 32, generator=generator) * 3
    norm, reference = RMSNorm(32, 1e-6), Qwen3RMSNorm(32, 1e-6)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(32, generator=generator))
    reference.load_state_dict(norm.state_dict())
    assert torch.equal(norm(x_RND), reference(x_RND))
    shape = tiny_drafter(tiny_target("llama"), 8).shape
    mlp = DrafterMLP(shape)
    other = Qwen3MLP(Qwen3Config(hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size))
    other.load_state_dict(mlp.state_dict())
    assert torch.equal(mlp(x_RND), other(x_RND))


def test_bfloat16_norms_average_in_float32():
    norm = RMSNorm(4096, 1e-6).bfloat16()
    x = torch.full((1, 4096), 3.0, dtype=torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x).float(), torch.ones(1, 4096), atol=1e-3, rtol=0)


def test_context_features_skip_the_input_norm_and_share_the_projections():
    drafter = tiny_drafter(tiny_target("llama"), 8, 1)
    attention, seen = drafter.layers[0].self_attn, []
    attention.k_proj.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    context_RTD, block_RQD = torch.randn(1, 6, 32) * 5, torch.randn(1, 8, 32) * 5
    position_RT, position_RQ = torch.arange(6)[None], torch.arange(5, 13)[None]
    drafter(context_RTD, position_RT, block_RQD, position_RQ, see_everything)
    assert torch.equal(seen[0], context_RTD)
    assert torch.equal(seen[1], drafter.layers[0].input_layernorm(block_RQD))
    assert not torch.equal(seen[1], block_RQD)


@torch.no_grad()
def test_only_position_differences_matter():
    drafter = tiny_drafter(tiny_target("llama"), 8, 2)
    context_RTD, block_RQD = torch.randn(1, 6, 32), torch.randn(1, 8, 32)
    position_RT, position_RQ = torch.arange(6)[None], torch.arange(5, 13)[None]
    here = drafter(context_RTD, position_RT, block_RQD, position_RQ, see_everything)
    there = drafter(context_RTD, position_RT + 40, block_RQD, position_RQ + 40, see_everything)
    moved = drafter(context_RTD, position_RT, block_RQD, position_RQ + 3, see_everything)
    torch.testing.assert_close(here, there, atol=2e-5, rtol=1e-4)
    assert (here - moved).abs().max() > 1e-3


def test_weights_are_drawn_from_the_generator():
    one, other = (tiny_drafter(tiny_target("llama"), 8, 2, seed=seed) for seed in (0, 1))
    again = tiny_drafter(tiny_target("qwen3"), 8, 2, seed=0)
    assert torch.equal(one.fc.weight, again.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)
    for name, weight in one.named_parameters():
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight)), name
        else:
            assert 0.015 < float(weight.detach().std()) < 0.025, name


def test_a_shape_survives_a_round_trip():
    shape = shape_of(window=32, window_layers=(0, 4), causal=True)
    assert DrafterShape(**dataclasses.asdict(shape)) == shape
    assert Drafter(dataclasses.replace(tiny_drafter(tiny_target("llama")).shape, causal=True)).shape.causal
