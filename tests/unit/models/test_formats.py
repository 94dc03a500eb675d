import json
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.commands import export
from blockdraft.config import ConfigError
from blockdraft.models.drafter import Drafter
from blockdraft.models.formats import load_export, published_config, read_shape, save_export
from blockdraft.models.speculators import Verifier
from integration.tiny import tiny_drafter, tiny_target


class Read(NamedTuple):
    """Stands for what a checkpoint of speculators holds."""

    drafter: Drafter


@pytest.fixture
def drafter():
    return tiny_drafter(tiny_target("qwen3"), 16, window=20, window_layers=(1,), causal=True)


def edit_config(directory, **changes):
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_block_size_16_is_15_draft_tokens_in_vllm_and_16_in_sglang(drafter, tmp_path):
    save_export(drafter, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["block_size"] == config["dflash_config"]["block_size"] == 16
    hints = export.serving_hints(drafter.shape, tmp_path)
    assert '"num_speculative_tokens": 15' in hints["vLLM"]
    assert "--speculative-num-draft-tokens 16" in hints["SGLang"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_config_names_the_type_of_the_tensors(drafter, tmp_path, dtype):
    save_export(drafter, tmp_path, dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert load_export(tmp_path).dtype == dtype
    assert load_export(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_a_config_that_names_another_type_is_refused(drafter, tmp_path):
    save_export(drafter, tmp_path)
    edit_config(tmp_path, dtype="float32")
    with pytest.raises(ConfigError, match=r"\['bfloat16'\], found 'float32'"):
        load_export(tmp_path)


def test_what_was_read_is_written_byte_for_byte(drafter, tmp_path):
    save_export(drafter, tmp_path / "first")
    save_export(load_export(tmp_path / "first"), tmp_path / "second")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_who_may_read_the_config_may_read_the_weights(drafter, tmp_path):
    save_export(drafter, tmp_path / "export")
    modes = {(tmp_path / "export" / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_tensors_have_the_published_names_eleven_a_layer_and_three(drafter, tmp_path):
    save_export(drafter, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    layer = {
        *(f"self_attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }
    assert len(layer) == 11
    expected = {f"layers.{i}.{name}" for i in range(2) for name in layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_the_shape_survives_with_windows_and_direction(drafter):
    config = published_config(drafter.shape, torch.bfloat16)
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["is_causal"] is True
    assert config["dflash_config"]["causal"] is True
    assert config["layer_types"] == ["full_attention", "sliding_attention"]
    assert (config["sliding_window"], config["dflash_config"]["swa_window_size"]) == (20, 20)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    assert read_shape(json.loads(json.dumps(config)), "config.json") == drafter.shape


def test_a_published_config_without_our_extras_is_read(tmp_path):
    drafter = tiny_drafter(tiny_target("qwen3"))
    save_export(drafter, tmp_path)
    # As others publish it: no direction, no block size inside dflash_config, no layer types, only the flat theta.
    ids = list(drafter.shape.target_layer_ids)
    edit_config(
        tmp_path,
        is_causal=None,
        layer_types=None,
        rope_parameters=None,
        dflash_config={"mask_token_id": 100, "target_layer_ids": ids},
    )
    assert load_export(tmp_path).shape == drafter.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "expected architectures"),
        ({"hidden_size": None}, "needs the field 'hidden_size'"),
        ({"intermediate_size": 50}, "of a wrong shape"),
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3, "sliding_window": None}, "is missing"),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_refused(tmp_path, change, message):
    save_export(tiny_drafter(tiny_target("qwen3")), tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises(ConfigError, match=message):
        load_export(tmp_path)


def test_missing_files_and_unknown_tensors_are_refused(drafter, tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_export(tmp_path)
    save_export(drafter, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"lm_head\.weight is not expected"):
        load_export(tmp_path)


def test_export_compares_what_it_reads_back(drafter, tmp_path, monkeypatch):
    assert export.export(drafter, tmp_path / "good", "bfloat16") == 25

    def damaged(directory):
        found = load_export(directory)
        with torch.no_grad():
            found.norm.weight[0] += 1
        return found

    monkeypatch.setattr("blockdraft.models.formats.load_export", damaged)
    with pytest.raises(RuntimeError, match=r"tensor norm\.weight"):
        export.export(drafter, tmp_path / "bad", "bfloat16")
    # What differs looks like no export, and replaces none.
    before = (tmp_path / "good" / "model.safetensors").read_bytes()
    with pytest.raises(RuntimeError, match=r"tensor norm\.weight"):
        export.export(drafter, tmp_path / "good", "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    assert (tmp_path / "good" / "model.safetensors").read_bytes() == before


def test_speculators_format_compares_before_it_is_in_place_too(tmp_path, monkeypatch):
    drafter = tiny_drafter(tiny_target("qwen3"), 16)
    monkeypatch.setattr("blockdraft.models.speculators.load_speculators", lambda _written: Read(drafter=other))
    other = tiny_drafter(tiny_target("qwen3"), 16, seed=1)
    with pytest.raises(RuntimeError, match="read back differs"):
        export.export(drafter, tmp_path / "bad", "float32", Verifier(None, []))
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_fails_leaves_the_one_before_and_nothing_else(tmp_path, monkeypatch):
    directory = tmp_path / "export"
    first, second = (tiny_drafter(tiny_target("llama"), 4, 1, seed=seed) for seed in (0, 1))
    save_export(first, directory)
    (directory / "README.md").write_text("mine")

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("blockdraft.models.formats.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_export(second, directory)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert torch.equal(load_export(directory).fc.weight, first.fc.weight.bfloat16())
    save_export(second, directory)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert torch.equal(load_export(directory).fc.weight, second.fc.weight.bfloat16())
    assert (directory / "README.md").read_text() == "mine"
