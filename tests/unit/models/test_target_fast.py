"""The fast pass of a target against transformers' own forward.

B documents of a target batch, S tokens of a document, D width, N rows.
"""

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from blockdraft.config import ConfigError, TargetConfig
from blockdraft.models import target_fast
from blockdraft.models.target import Target
from blockdraft.models.target_fast_layers import fuse
from blockdraft.models.target_fast_ops import TorchOps
from blockdraft.models.target_split import place
from integration.tiny import COMMON, CONFIGS, HYBRID

LAYERS = (0, 2, 4)
# Three value heads to a key head, and widths that differ between keys and values.
WIDE = HYBRID | {"linear_num_value_heads": 6, "linear_value_head_dim": 12}
NAMES = {
    **{name: CONFIGS[name] for name in ("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")},
    "qwen2": lambda: Qwen2Config(**{key: value for key, value in COMMON.items() if key != "head_dim"}),
    "llama_bias": lambda: LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True),
    "qwen3_5_wide": lambda: Qwen3_5TextConfig(**COMMON, **WIDE),
    # Dense, so that the fused feed-forward part runs beside the grouped layout.
    "qwen3_next_wide": lambda: Qwen3NextConfig(**COMMON, **WIDE, mlp_only_layers=list(range(6))),
}


def model_of(config) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                # Norms and biases that are all alike would hide one that is left out or read in the wrong convention.
                weight.add_(torch.empty_like(weight).uniform_(-0.3, 0.3))
            elif "conv1d" in name:
                weight.add_(torch.empty_like(weight).uniform_(-0.5, 0.5))
    return model


def fast_target(name: str, ops: TorchOps | None = None, **options) -> Target:
    return Target(model_of(NAMES[name]()), LAYERS, 2, ops=ops or TorchOps(torch.float32), **options)


def tokens(batch: int = 3, length: int = 33) -> Tensor:
    return torch.randint(3, 101, (batch, length), generator=torch.Generator().manual_seed(5))


def plain_features(target: Target, ids_BS: Tensor) -> Tensor:
    columns: list[Tensor] = []
    target.capture_plain(ids_BS, lambda _column, hidden_BSD: columns.append(hidden_BSD))
    return torch.cat(columns, dim=-1)


def distance(found: Tensor, expected: Tensor) -> float:
    """Of the worst token, against its norm. The reference takes a recurrent layer's tokens one by one, not chunks."""
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


@pytest.mark.parametrize("name", sorted(NAMES))
def test_features_equal_those_of_the_plain_forward(name):
    target = fast_target(name)
    assert target.fast is not None, target.note
    assert "fast pass, 5 of 6 layers, float32" in target.note
    assert distance(target.features(tokens()), plain_features(target, tokens())) < 3e-4


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_final_states_equal_those_of_the_plain_forward(name):
    target, found, expected = fast_target(name), {}, {}
    target.capture_with_final(tokens(), found.__setitem__)
    target.fast = None
    target.capture_with_final(tokens(), expected.__setitem__)
    assert sorted(found) == [0, 1, 2, 3]
    for column, states in expected.items():
        assert distance(found[column], states) < 3e-4


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3_next_wide"])
def test_what_padding_holds_changes_nothing(name):
    target, other = fast_target(name), tokens()
    other[:, 20:] = 7
    assert torch.equal(target.features(tokens())[:, :20], target.features(other)[:, :20])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_fused_weights_are_stored_once_and_the_plain_forward_stays_the_same(name):
    model = model_of(NAMES[name]())
    before = model(tokens()).logits
    size = sum(weight.numel() for weight in model.parameters())
    target = Target(model, LAYERS, 2, ops=TorchOps(torch.float32))
    assert torch.equal(model(tokens()).logits, before)
    layer = target.layers[3]
    first, second = layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight
    assert second.data_ptr() == first.data_ptr() + first.numel() * 4
    storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in model.parameters()}
    assert sum(storages.values()) == 4 * size


class Mutated(TorchOps):
    """One operation done wrongly."""

    def __init__(self, wrong: str) -> None:
        super().__init__(torch.float32)
        self.wrong = wrong

    def add_norm(self, hidden_ND, delta_ND, norm, quantize):
        wrong = norm._replace(weight_D=norm.weight_D - 1.0) if self.wrong == "norm convention" else norm
        return super().add_norm(hidden_ND, delta_ND, wrong, quantize)

    def swiglu(self, gate_up_NJ, quantize):
        halves = gate_up_NJ.chunk(2, dim=-1)
        return super().swiglu(torch.cat(halves[::-1], dim=-1) if self.wrong == "gate and up" else gate_up_NJ, quantize)

    def conv(self, mixed_NW, weight_CT, parts, length, normalize):
        if self.wrong == "documents run together":
            length = len(mixed_NW)
        weight_CT = weight_CT.flip(1) if self.wrong == "taps" else weight_CT
        return super().conv(mixed_NW, weight_CT, parts, length, normalize and self.wrong != "norm of keys")

    def decay(self, mixed_NW, beta, alpha, a_log_H, dt_H):
        if self.wrong == "beta and alpha":
            beta, alpha = alpha, beta
        return super().decay(mixed_NW, beta, alpha, a_log_H, torch.zeros_like(dt_H) if self.wrong == "bias" else dt_H)

    def gated_norm(self, core_NHE, mixed_NW, gate, norm, quantize):
        gate = gate._replace(offset=0) if self.wrong == "gate of the core" else gate
        return super().gated_norm(core_NHE, mixed_NW, gate, norm, quantize)

    def rotate(self, mixed_NW, columns, norm, cos_SR, sin_SR):
        sin_SR = -sin_SR if self.wrong == "rotation" else sin_SR
        return super().rotate(mixed_NW, columns, None if self.wrong == "norm of heads" else norm, cos_SR, sin_SR)

    def attend(self, q_BSHE, k_BSHE, v_BSHE, scale):
        if self.wrong == "not causal":
            parts = (part.transpose(1, 2) for part in (q_BSHE, k_BSHE, v_BSHE))
            return nn.functional.scaled_dot_product_attention(*parts, scale=scale, enable_gqa=True).transpose(1, 2)
        return super().attend(q_BSHE, k_BSHE, v_BSHE, scale * (2.0 if self.wrong == "scale" else 1.0))

    def product_onto(self, stream_ND, rows, weight):
        return torch.zeros_like(stream_ND) if self.wrong == "sum" else super().product_onto(stream_ND, rows, weight)

    def gate_heads(self, attended_NHE, mixed_NW, gate, quantize):
        return super().gate_heads(attended_NHE, mixed_NW, None if self.wrong == "gate of heads" else gate, quantize)


MUTATIONS = [
    "sum", "norm convention", "gate and up", "documents run together", "taps", "norm of keys", "beta and alpha",
    "bias", "gate of the core", "rotation", "norm of heads", "not causal", "scale", "gate of heads",
]  # fmt: skip


@pytest.mark.parametrize("wrong", MUTATIONS)
def test_a_pass_that_computes_something_else_is_refused_and_the_plain_forward_stays(wrong):
    target = fast_target("qwen3_5", Mutated(wrong))
    assert target.fast is None
    assert "by transformers' own forward: layer" in target.note
    assert torch.equal(target.features(tokens()), plain_features(target, tokens()))


class Broken(nn.Linear):
    """An adapted projection."""


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (CONFIGS["gemma3"](), "sliding_attention"),
        (MistralConfig(**COMMON, sliding_window=16), "a window of 16"),
        (GraniteConfig(**COMMON, residual_multiplier=0.22), "would differ from transformers' own"),
        (
            OlmoConfig(**{key: value for key, value in COMMON.items() if key != "head_dim"}),
            "OlmoLayerNorm is no RMS norm",
        ),
        (Olmo2Config(**COMMON), "Olmo2DecoderLayer has the parts"),
    ],
    ids=["gemma3", "mistral", "granite", "olmo", "olmo2"],
)
def test_targets_of_another_structure_keep_the_plain_forward(config, reason):
    target = Target(model_of(config), LAYERS, 2, ops=TorchOps(torch.float32))
    assert target.fast is None
    assert reason in target.note
    assert torch.equal(target.features(tokens()), plain_features(target, tokens()))


def test_a_projection_that_is_no_plain_linear_layer_is_refused():
    model = model_of(NAMES["qwen3"]())
    old = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = Broken(old.in_features, old.out_features, bias=False)
    assert "Broken, not a plain linear layer" in Target(model, LAYERS, 2, ops=TorchOps(torch.float32)).note


def test_on_a_cpu_the_plain_forward_is_used():
    target = Target(model_of(NAMES["qwen3"]()), LAYERS, 2)
    assert target.fast is None
    assert "the fused kernels need a GPU, the target is on cpu" in target.note


# The stream of five layers and, with biases, the update that comes with it from the second layer on.
@pytest.mark.parametrize(("name", "num_moves"), [("qwen3", 5), ("qwen3_5", 5), ("llama_bias", 9)])
def test_a_divided_target_has_bit_equal_features_and_every_boundary_is_moved_over(name, num_moves, monkeypatch):
    expected = fast_target(name).features(tokens())
    divided = Target(place(model_of(NAMES[name]()), "cpu+cpu"), LAYERS, 2, ops=TorchOps(torch.float32))
    assert divided.fast is not None
    moved = []

    def copy(tensor, device):
        moved.append(tuple(tensor.shape))
        return tensor.clone()

    monkeypatch.setattr(target_fast, "move", copy)
    assert torch.equal(divided.features(tokens()), expected)
    assert len(moved) == num_moves


@pytest.mark.parametrize("name", ["llama_bias", "qwen3_5", "qwen3_moe"])
def test_float8_products_are_close_and_not_the_same(name):
    target = fast_target(name, float8=True)
    assert target.fast is not None
    assert "float8 products" in target.note
    expected = plain_features(target, tokens())
    assert 0.01 < float((target.features(tokens()) - expected).norm() / expected.norm()) < 0.6


def test_float8_needs_a_gpu_and_a_structure_that_is_known():
    with pytest.raises(ConfigError, match=r"target.dtype=float8 needs a GPU, got the device 'cpu'; use bfloat16"):
        Target.load(TargetConfig(path="nowhere", dtype="float8"))
    with pytest.raises(ConfigError, match=r"does not fit this target: layers of the types \['sliding_attention'\]"):
        Target(model_of(CONFIGS["gemma3"]()), LAYERS, 2, ops=TorchOps(torch.float32), float8=True)
    with pytest.raises(ConfigError, match=r"a product of 72 inputs, where float8 needs a multiple of 16; use bfloat16"):
        fast_target("qwen3_5_wide", float8=True)


def test_outputs_of_a_float8_product_are_filled_up():
    weight = fuse([nn.Linear(32, 20), nn.Linear(32, 3, bias=False)], [])
    assert weight.value_MK.shape == (32, 32)
    assert len(weight.bias_M) == len(weight.scale_M) == 32
    assert not weight.value_MK[23:].float().any()


@pytest.mark.parametrize("float8", [False, True])
def test_what_only_decoding_needs_can_be_dropped(float8):
    target = fast_target("qwen3_5", float8=float8)
    expected = target.features(tokens())
    before = sum(weight.numel() for weight in target.model.parameters())
    last = sum(weight.numel() for weight in target.layers[5].parameters())
    target.drop_decoding()
    after = sum(weight.numel() for weight in target.model.parameters())
    linears = [part for part in target.layers.modules() if isinstance(part, nn.Linear)]
    assert torch.equal(target.features(tokens()), expected)
    assert len(target.layers) == 5
    assert after == before - last - (sum(part.in_features * part.out_features for part in linears) if float8 else 0)
    with pytest.raises(AssertionError, match="dropped"):
        target.capture_with_final(tokens(), lambda _column, _hidden: None)
    with pytest.raises(AssertionError, match="dropped"):
        target.forward(tokens(), target.new_cache())


def test_the_thread_is_on_a_layers_device_before_any_of_its_kernels_is_started(monkeypatch):
    # On a second GPU a kernel of Triton's cannot reach its tensors otherwise.
    log: list[str] = []

    class Noted(TorchOps):
        def add_norm(self, *arguments, **options):
            log.append("kernel")
            return super().add_norm(*arguments, **options)

    monkeypatch.setattr(target_fast, "_enter", lambda device: log.append(str(device)))
    target = fast_target("qwen3", Noted(torch.float32))
    assert log[0] == "cpu"
    assert "kernel" in log
    log.clear()
    target.features(tokens())
    assert log[0] == "cpu"
    assert "kernel" in log
