"""B documents of a target batch, S tokens of a document, D width, C captured layers, V vocabulary."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

from blockdraft.config import ConfigError, DrafterConfig, TargetConfig
from blockdraft.models.drafter import derive_shape
from blockdraft.models.kernels import use_torch_on_cpu
from blockdraft.models.target import Target, choose_dtype, load_tokenizer, mask_token_id
from blockdraft.models.target_facts import rope_theta
from integration.tiny import COMMON, CONFIGS, MASK_TOKEN_ID, TARGETS, VOCAB_SIZE, tiny_target
from tiny_chat import CHATML, save_tokenizer, tiny_tokenizer

SIX = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
HYBRIDS = {
    "qwen3_5": lambda: Qwen3_5TextConfig(**COMMON, **LINEAR),
    "qwen3_next": lambda: Qwen3NextConfig(
        **COMMON,
        **LINEAR,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
    ),
}
ODD = {
    "granite": lambda: GraniteConfig(
        **SIX,
        **HEADS,
        embedding_multiplier=12.0,
        logits_scaling=8.0,
        residual_multiplier=0.22,
        attention_multiplier=0.1,
    ),
    "gemma2": lambda: Gemma2Config(**COMMON, sliding_window=16, query_pre_attn_scalar=16, final_logit_softcapping=3.0),
    **HYBRIDS,
}
VISION = {
    "gemma3_vision": lambda: Gemma3Config(
        text_config=COMMON | {"sliding_window": 16, "query_pre_attn_scalar": 16},
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
    ),
    "qwen2_5_vl": lambda: Qwen2_5_VLConfig(
        text_config=SIX
        | HEADS
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    ),
}
EVERY = (*TARGETS, *ODD, *VISION)


def make(name: str, layer_ids: tuple[int, ...] = (1, 3, 4)) -> Target:
    torch.manual_seed(0)
    if name in VISION:
        model = AutoModelForImageTextToText.from_config(VISION[name](), dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config((CONFIGS | ODD)[name](), dtype=torch.float32)
    with torch.no_grad():
        # Norms that are all alike would hide a norm that is left out or read in the wrong convention.
        for module in model.modules():
            if "norm" in type(module).__name__.lower() and isinstance(
                vars(module)["_parameters"].get("weight"), torch.nn.Parameter
            ):
                module.weight.add_(torch.empty_like(module.weight).uniform_(-0.3, 0.3))
    return Target(model, layer_ids, 2)


def ids(batch: int = 2, length: int = 20, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 90, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", EVERY)
def test_a_captured_layer_is_the_output_of_that_layer(name):
    # Case 12: id l is hidden_states[l + 1], and a forward that stops early computes the same bits.
    target, ids_BS = make(name), ids()
    with torch.no_grad():
        whole = target.model(input_ids=ids_BS, use_cache=False, output_hidden_states=True)
    expected = torch.cat([whole.hidden_states[layer + 1] for layer in target.layer_ids], dim=-1)
    features_BSC = target.features(ids_BS)
    assert features_BSC.shape == (2, 20, 3 * 32)
    assert torch.equal(features_BSC, expected)
    output = target.forward(ids_BS, target.new_cache())
    torch.testing.assert_close(output.features_BSC, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(output.logits_BSV, whole.logits, atol=1e-4, rtol=1e-4)
    columns = features_BSC.split(32, dim=-1)
    assert not torch.allclose(columns[0], columns[1])


def test_the_last_layer_is_captured_before_the_final_norm():
    target = make("llama", (5,))
    seen = {}
    target.final_norm.register_forward_pre_hook(lambda _module, args: seen.update(before=args[0]))
    with torch.no_grad():
        whole = target.model(input_ids=ids(), use_cache=False, output_hidden_states=True)
    features_BSC = target.features(ids())
    assert torch.equal(features_BSC, seen["before"])
    assert not torch.allclose(features_BSC, whole.hidden_states[-1], atol=0.1)


def test_capture_stops_after_the_last_captured_layer():
    target, ran = make("llama"), []
    for number, layer in enumerate(target.layers):
        layer.register_forward_pre_hook(lambda _module, _args, number=number: ran.append(number))
    written = []
    target.capture(ids(), lambda column, hidden_BSD: written.append((column, tuple(hidden_BSD.shape))))
    assert ran == [0, 1, 2, 3, 4]
    assert written == [(0, (2, 20, 32)), (1, (2, 20, 32)), (2, (2, 20, 32))]


def test_a_fault_in_a_write_is_raised_and_leaves_no_trace():
    def fail(_column: int, _hidden: torch.Tensor) -> None:
        raise OSError("slot is gone")

    target = make("llama")
    with pytest.raises(OSError, match="slot is gone"):
        target.capture(ids(), fail)
    assert target.model(input_ids=ids(), use_cache=False).logits.shape == (2, 20, VOCAB_SIZE)


@pytest.mark.parametrize("name", EVERY)
def test_padding_on_the_right_does_not_reach_the_features(name):
    target, ids_BS = make(name), ids()
    other = ids_BS.clone()
    other[:, 12:] = ids(seed=9)[:, 12:]
    assert torch.equal(target.features(ids_BS)[:, :12], target.features(other)[:, :12])


def test_features_carry_no_graph():
    target = make("llama")
    assert not target.features(ids()).requires_grad
    assert not any(weight.requires_grad for weight in target.model.parameters())
    assert not target.model.training


@pytest.mark.parametrize("name", EVERY)
def test_logits_made_from_the_ends_equal_the_targets(name):
    # Cases 10 and 11: norms w*x and (1+w)*x, factors, soft caps, wrappers.
    target, seen = make(name), {}
    target.final_norm.register_forward_hook(lambda _module, _args, out: seen.update(last=out))
    target.layers[0].register_forward_pre_hook(
        lambda _module, args, kwargs: seen.update(first=args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        logits_BSV = target.model(input_ids=ids(), use_cache=False).logits
    torch.testing.assert_close(target.ends.logits(seen["last"]), logits_BSV, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(target.ends.embed(ids()), seen["first"], atol=1e-5, rtol=1e-4)
    assert target.vocab_size == VOCAB_SIZE
    assert logits_BSV.std() > 0.01


def test_families_with_factors_have_them_in_their_facts():
    granite, gemma2, llama = (make(name) for name in ("granite", "gemma2", "llama"))
    assert granite.facts.embedding_multiplier == pytest.approx(12.0, rel=1e-4)
    assert granite.facts.logit_multiplier == pytest.approx(1 / 8, rel=1e-4)
    assert gemma2.facts.embedding_multiplier == pytest.approx(32**0.5, rel=1e-3)
    assert gemma2.facts.logit_softcap == 3.0
    # The cap bites: without it the logits would be far larger.
    assert gemma2.ends.logits(torch.full((1, 32), 50.0)).abs().max() <= 3.0
    assert (llama.facts.embedding_multiplier, llama.facts.logit_multiplier, llama.facts.logit_softcap) == (
        1.0,
        1.0,
        None,
    )


def test_a_restricted_head_gives_the_same_logits_of_its_ids():
    for name in ("llama", "granite", "gemma2"):
        ends, hidden = make(name).ends, torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
        chosen = torch.tensor([3, 17, 99])
        torch.testing.assert_close(ends.restricted(chosen).logits(hidden), ends.logits(hidden)[:, chosen])


def test_an_unknown_convention_is_refused(monkeypatch):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32)
    head, forward = model.lm_head, model.lm_head.forward
    monkeypatch.setattr(head, "forward", lambda x: forward(x) + 0.2 * forward(x).abs())
    with pytest.raises(ConfigError, match="LlamaForCausalLM: logits recomputed from final norm and head must equal"):
        Target(model, (1,), 1)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (BertForMaskedLM, BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2)),
        (None, GPT2Config(vocab_size=50, n_embd=16, n_layer=4, n_head=2)),
    ],
    ids=["bert", "gpt2"],
)
def test_what_is_no_decoder_with_a_final_norm_is_refused(kind, config):
    model = kind(config) if kind else AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"expected a text model with embed_tokens, 4 layers and a final norm"):
        Target(model, (1,), 1)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_vision", "bert"])
def test_a_directory_is_loaded_or_refused(tmp_path, name):
    torch.manual_seed(0)
    if name == "bert":
        config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2)
        BertForMaskedLM(config).save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match="must be a decoder-only language model or a wrapper around one"):
            Target.load(TargetConfig(path=str(tmp_path), dtype="float32"), layer_ids=(1,))
        return
    if name == "qwen3":
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"](), dtype=torch.float32)
    else:
        model = AutoModelForImageTextToText.from_config(VISION["gemma3_vision"](), dtype=torch.float32)
    model.eval().save_pretrained(tmp_path)
    target = Target.load(TargetConfig(path=str(tmp_path), dtype="float32"), num_drafter_layers=2)
    assert target.layer_ids == (1, 3)
    assert (target.device.type, target.dtype, target.num_layers) == ("cpu", torch.float32, 6)
    with torch.no_grad():
        expected = model(input_ids=ids(), use_cache=False, output_hidden_states=True).hidden_states
    torch.testing.assert_close(target.features(ids()), torch.cat([expected[2], expected[4]], dim=-1))


def test_what_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(ConfigError, match="could not be loaded"):
        Target.load(TargetConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"found nothing at '\S*nothing': \S+ exists and has no nothing"):
        Target.load(TargetConfig(path=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match=r"target\.path is empty"):
        Target.load(TargetConfig())
    with pytest.raises(ConfigError, match=r"x\.gguf' names no file"):
        Target.load(TargetConfig(path=str(tmp_path / "x.gguf")))
    with pytest.raises(
        ConfigError, match=r"target_layer_ids must lie in 0\.\.5 \(the target has 6 layers\), got \[1, 6\]"
    ):
        make("llama", (1, 6))


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_hybrid_target_on_a_cpu_runs_torch_whatever_is_installed(name):
    # With flash-linear-attention installed, transformers binds its Triton kernels on import, for every device.
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(HYBRIDS[name](), dtype=torch.float32)
    use_torch_on_cpu(model)
    assert use_torch_on_cpu(model) == [], "replaced twice"
    module = sys.modules[type(model).__module__]
    kernel = vars(module)["torch_chunk_gated_delta_rule"]
    assert kernel.__module__ == module.__name__
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=ids(), use_cache=False).logits).all()


def test_tensors_elsewhere_keep_their_kernel(monkeypatch):
    binds = "transformers.integrations.hub_kernels"
    source = "def wrapped(*args, **kwargs):\n    return ('kernel', sorted(kwargs))\n"
    space: dict = {"__name__": binds}
    exec(source, space)
    bound = space["wrapped"]
    bound.__wrapped__ = lambda first, scale=1.0: ("torch", scale)
    module = SimpleNamespace(rule=bound, other=len)
    monkeypatch.setitem(sys.modules, "transformers.models.made_up", module)
    layer = type("Layer", (torch.nn.Module,), {"__module__": "transformers.models.made_up"})()
    assert use_torch_on_cpu(layer) == ["rule"]
    assert module.rule(torch.zeros(1), scale=2.0, only_the_kernel_has_this=1) == ("torch", 2.0)
    assert module.rule(torch.zeros(1, device="meta"), scale=2.0) == ("kernel", ["scale"])
    assert module.other is len


def test_a_qwen3_5_target_gives_a_plain_qwen3_drafter():
    # Case 8: full rotary, theta from rope_parameters, nothing else of the target's rotary settings.
    config = Qwen3_5TextConfig(
        **COMMON | {"head_dim": 256},
        **LINEAR,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    )
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), (1, 4), 2)
    shape = derive_shape(DrafterConfig(num_layers=2), target.facts, MASK_TOKEN_ID)
    assert shape.rope_theta == 1e7
    assert shape.head_dim == 128
    assert not {"partial_rotary_factor", "mrope_section", "layer_types"} & set(dataclasses.asdict(shape))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 123456.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 123456.0}},
        # The flat value that some converted configs carry along is wrong by two orders of magnitude.
        {"rope_theta": 10000.0, "rope_parameters": {"rope_type": "default", "rope_theta": 123456.0}},
    ],
    ids=["flat", "nested", "both"],
)
def test_either_config_style_gives_the_same_drafter(rope):
    # Case 30.
    torch.manual_seed(0)
    target = Target(AutoModelForCausalLM.from_config(Qwen3Config(**COMMON, **rope), dtype=torch.float32), None, 2)
    shape = derive_shape(DrafterConfig(num_layers=2), target.facts, MASK_TOKEN_ID)
    assert shape.rope_theta == 123456.0
    assert shape.max_position_embeddings == 512


def test_rope_theta_of_plain_values():
    nested = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert rope_theta({"rope_parameters": nested, "rope_theta": 5.0}) == 1e6
    assert rope_theta({"rope_theta": 5e5}) == 5e5
    assert rope_theta({"rope_parameters": None}) == 10000.0
    assert rope_theta({}) == 10000.0


def test_stop_ids_come_from_the_generation_config_first():
    config: PreTrainedConfig = LlamaConfig(**COMMON)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = [7, 9]
    assert Target(model, (1,), 1).stop_ids == (7, 9)
    model.generation_config.eos_token_id = None
    assert Target(model, (1,), 1).stop_ids == (2,)


def test_the_mask_token_is_the_first_unused_row():
    tokenizer = tiny_tokenizer(CHATML)
    known = len(tokenizer)
    assert mask_token_id(tokenizer, 300, set(), ()) == known
    # No row left: a special token that is not eos, pad or bos and does not occur in the data.
    start, back = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("im_start", "return"))
    assert mask_token_id(tokenizer, known, set(), ()) == back
    assert mask_token_id(tokenizer, known, {back}, ()) == start
    with pytest.raises(ConfigError, match=r"no mask token: .* name one .* with drafter\.mask_token_id"):
        mask_token_id(tokenizer, known, {start}, (back,))


def test_a_tokenizer_is_read_from_a_directory(tmp_path):
    assert len(load_tokenizer(save_tokenizer(tmp_path, CHATML))) == len(tiny_tokenizer(CHATML))


def test_auto_is_a_type_the_device_is_good_at():
    assert choose_dtype("float32", "cpu") == "float32"
    assert choose_dtype("bfloat16", "cpu") == "bfloat16"
    assert choose_dtype("auto", "cuda:0") == "bfloat16"
    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert choose_dtype("auto", "cpu") == ("bfloat16" if fast else "float32")


@pytest.mark.parametrize("name", TARGETS)
def test_ends_move_with_all_their_factors(name):
    ends = tiny_target(name).ends
    moved = ends.copy_to("cpu", torch.bfloat16)
    assert moved.head_weight.dtype == torch.bfloat16
    assert ends.copy_to("cpu") is ends
    assert (moved.embedding_multiplier, moved.logit_multiplier, moved.logit_softcap) == (
        ends.embedding_multiplier,
        ends.logit_multiplier,
        ends.logit_softcap,
    )
    torch.testing.assert_close(moved.embed(ids()).float(), ends.embed(ids()), atol=0.1, rtol=0.02)
