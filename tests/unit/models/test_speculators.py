"""speculators' layout, written and read; that speculators' own class loads it is for `make parity`."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from blockdraft.config import ConfigError
from blockdraft.models.drafter import Drafter
from blockdraft.models.formats import load_export
from blockdraft.models.speculators import Verifier, load_speculators, save_speculators, speculators_config
from integration.tiny import tiny_drafter, tiny_target

VERIFIER = Verifier("some/target", ["Qwen3ForCausalLM"])


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen3")


@pytest.fixture
def drafter(target):
    return tiny_drafter(target)


def edit_config(directory, **changes):
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def test_fields(drafter):
    config = speculators_config(drafter.shape, torch.bfloat16, VERIFIER)
    assert config["aux_hidden_state_layer_ids"] == [layer + 1 for layer in drafter.shape.target_layer_ids]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "some/target",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert config["draft_vocab_size"] == config["transformer_layer_config"]["vocab_size"] == 101
    assert config["transformer_layer_config"]["rope_parameters"]["rope_theta"] == drafter.shape.rope_theta
    assert config["sliding_window_non_causal"] is True
    assert config["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"window": 12, "window_layers": (0,)},
        {"window": 12, "window_layers": (0,), "window_causal": True},
        {"window": 12, "window_layers": (0, 1), "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_written_is_read(drafter, tmp_path, changes, dtype):
    made = Drafter(dataclasses.replace(drafter.shape, **changes))
    save_speculators(made, tmp_path, VERIFIER, dtype)
    found = load_speculators(tmp_path)
    assert found.drafter.shape == made.shape
    assert found.verifier == VERIFIER
    for name, weight in made.state_dict().items():
        assert torch.equal(found.drafter.state_dict()[name], weight.to(dtype))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"causal": True}, "2 causal ones"),
        ({"window": 12, "window_layers": (0,), "causal": True}, "1 causal ones"),
        ({"embedding_multiplier": 2.0}, "embedding_multiplier 2.0"),
        ({"logit_softcap": 30.0}, "logit_softcap 30.0"),
    ],
    ids=str,
)
def test_what_the_format_cannot_say_is_refused(drafter, changes, message):
    with pytest.raises(ConfigError, match=message):
        speculators_config(dataclasses.replace(drafter.shape, **changes), torch.bfloat16, VERIFIER)


def test_a_checkpoint_as_speculators_writes_it(drafter, tmp_path):
    save_speculators(drafter, tmp_path, VERIFIER)
    config = json.loads((tmp_path / "config.json").read_text())
    # Its config does not say how many layers the target has, leaves defaults out, and copies of the target's tensors
    # may stand beside the drafter's.
    layers = {
        name: value
        for name, value in config["transformer_layer_config"].items()
        if name not in ("hidden_act", "attention_bias", "layer_types", "rope_theta", "sliding_window")
    }
    edit_config(tmp_path, num_target_layers=None, target_hidden_size=32, transformer_layer_config=layers)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"embed_tokens.weight": torch.zeros(101, 32, dtype=torch.bfloat16)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="name the target by --target"):
        load_speculators(tmp_path)
    found = load_speculators(tmp_path, num_target_layers=6)
    assert found.drafter.shape == drafter.shape
    assert found.left_out == ["embed_tokens.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "eagle3"}, "speculators_model_type must be 'dflash'"),
        ({"draft_vocab_size": 50}, "draft_vocab_size must be 101"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"target_hidden_size": 64}, "target_hidden_size must be 32"),
        ({"aux_hidden_state_layer_ids": [0, 3]}, "rising layer numbers"),
        ({"mask_token_id": None}, "needs the field 'mask_token_id'"),
        ({"num_target_layers": 7}, "number of the target's layers"),
        ({"transformer_layer_config": {"model_type": "nothing"}}, "'nothing' is not known"),
        ({"dtype": "float32"}, "dtype must be that of the tensors"),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_refused(drafter, tmp_path, change, message):
    save_speculators(drafter, tmp_path, VERIFIER)
    edit_config(tmp_path, **change)
    with pytest.raises(ConfigError, match=message):
        load_speculators(tmp_path, num_target_layers=6)


def test_other_rotary_and_activation_settings_are_refused(drafter, tmp_path):
    for name, value in (
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
    ):
        save_speculators(drafter, tmp_path, VERIFIER)
        layers = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
        edit_config(tmp_path, transformer_layer_config=layers | {name: value})
        with pytest.raises(ConfigError, match=f"{name.replace('parameters', 'type')} must be"):
            load_speculators(tmp_path)


def test_the_published_reader_points_to_import(drafter, tmp_path):
    save_speculators(drafter, tmp_path, VERIFIER)
    with pytest.raises(ConfigError, match="blockdraft import"):
        load_export(tmp_path)
