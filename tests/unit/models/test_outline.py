"""What a target's files say without its weights agrees with what loading shows."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Qwen3Config

from blockdraft.config import ConfigError, TargetConfig
from blockdraft.models.outline import outline, outline_of
from blockdraft.models.target import Target
from integration.tiny import COMMON, CONFIGS, tiny_target


@pytest.mark.parametrize("name", CONFIGS)
def test_counts_and_facts_are_those_of_the_loaded_model(name: str, tmp_path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).save_pretrained(tmp_path)
    found = outline(TargetConfig(path=str(tmp_path)))
    target = Target.load(TargetConfig(path=str(tmp_path), dtype="float32"), layer_ids=(1, 3))
    assert found.parameters == sum(weight.numel() for weight in target.model.parameters())
    assert found.layers == tuple(sum(w.numel() for w in layer.parameters()) for layer in target.layers)
    # gemma3's scale lies inside its embedding, and is measured on weights.
    assert found.facts == target.facts._replace(embedding_multiplier=1.0)
    assert found.stop_ids == target.stop_ids == (2,)
    assert found.model_class == type(target.model).__name__


def test_a_tied_head_counts_once() -> None:
    tied = outline_of(AutoModelForCausalLM.from_config(Qwen3Config(**COMMON, tie_word_embeddings=True)))
    apart = outline_of(AutoModelForCausalLM.from_config(Qwen3Config(**COMMON, tie_word_embeddings=False)))
    assert (tied.head, apart.head) == (0, apart.embedding)
    assert apart.parameters - tied.parameters == apart.head


def test_layers_behind_the_last_captured_one_are_kept_only_for_runs_to_the_end() -> None:
    found = outline_of(tiny_target("llama").model)
    assert found.kept_layers((1, 3), to_end=False) == 4
    assert found.kept_layers((1, 3), to_end=True) == 6


def test_what_is_no_language_model_is_refused(tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"target\.path: expected a model directory.*found nothing at.*exists and has no nothing"
    ):
        outline(TargetConfig(path=str(tmp_path / "nothing")))
    headless = AutoModel.from_config(AutoConfig.for_model("llama", **COMMON))
    with pytest.raises(ConfigError, match="expected a causal language model, found LlamaModel"):
        outline_of(headless)
