"""The fast pass of a target on real GPUs: the fused kernels, float8, two GPUs, and what a warm pass must not do."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config, Qwen3NextConfig

from blockdraft.models.target import Target
from blockdraft.models.target_split import place
from blockdraft.runtime.counters import CompileCounters

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(420),
]
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SIZES = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 528,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# Three value heads to a key head, as in the largest target of docs/performance.md.
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3_5": lambda: Qwen3_5TextConfig(**SIZES, **LINEAR),
    "qwen3_next": lambda: Qwen3NextConfig(**SIZES, **LINEAR, mlp_only_layers=list(range(8))),
}
LAYERS = (1, 4, 6)
SHAPES = ((4, 512), (8, 256), (2, 100), (1, 33))


def target_on(name: str, device: str = "cuda:0", *, float8: bool = False) -> Target:
    torch.manual_seed(0)
    with torch.device("cuda:0"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(torch.empty_like(weight).uniform_(-0.3, 0.3))
    return Target(place(model, device), LAYERS, 2, float8=float8)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(1024, (batch, length), generator=torch.Generator().manual_seed(length)).to("cuda:0")


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def plain_features(target: Target, ids_BS: Tensor) -> Tensor:
    columns: list[Tensor] = []
    target.capture_plain(ids_BS, lambda _column, hidden_BSD: columns.append(hidden_BSD))
    return torch.cat(columns, dim=-1)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_features_are_near_those_of_the_plain_forward(name):
    target, rough = target_on(name), target_on(name, float8=True)
    assert target.fast is not None, target.note
    for batch, length in SHAPES:
        expected = plain_features(target, tokens(batch, length))
        assert distance(target.features(tokens(batch, length)), expected) < 0.03
        assert distance(rough.features(tokens(batch, length)), expected) < 0.3


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_what_padding_holds_changes_nothing(name):
    target, other = target_on(name), tokens(4, 512)
    other[:, 300:] = 7
    assert torch.equal(target.features(tokens(4, 512))[:, :300], target.features(other)[:, :300])


@pytest.mark.parametrize("float8", [False, True])
def test_a_warm_pass_neither_compiles_nor_waits_for_the_device(float8):
    target = target_on("qwen3_5", float8=float8)
    inputs = [tokens(*shape) for shape in SHAPES]
    counters = CompileCounters.install()
    try:
        for ids_BS in inputs:
            target.features(ids_BS)
        before = counters.snapshot()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for ids_BS in reversed(inputs):
                target.features(ids_BS)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not any(counters.since(before)), counters.since(before)
    finally:
        counters.remove()


@NEEDS_TWO
@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_divided_target_has_bit_equal_features(name, float8):
    whole, divided = target_on(name, float8=float8), target_on(name, "cuda:0+cuda:1", float8=float8)
    assert divided.fast is not None, divided.note
    assert {layer.device.index for layer in divided.fast.layers} == {0, 1}
    for batch, length in SHAPES:
        found = divided.features(tokens(batch, length))
        assert found.device == torch.device("cuda:0")
        assert torch.equal(found, whole.features(tokens(batch, length)))
    assert torch.cuda.current_device() == 0
