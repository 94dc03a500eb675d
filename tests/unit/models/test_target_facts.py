"""Targets whose logits are scaled by a number that no kernel of the loss, and no greedy choice, can work with."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig

from blockdraft.config import ConfigError, TargetConfig
from blockdraft.models.outline import outline
from blockdraft.models.target import Target
from integration.tiny import COMMON, CONFIGS

SCALED = [
    (CohereConfig, "logit_scale", -0.5),
    (CohereConfig, "logit_scale", 0.0),
    (GraniteConfig, "logits_scaling", 0.0),
    (GraniteConfig, "logits_scaling", -8.0),
    (GraniteConfig, "logits_scaling", float("inf")),
]


@pytest.mark.parametrize(("family", "field", "value"), SCALED)
def test_a_factor_that_is_not_above_0_is_refused_by_its_field(tmp_path: Path, family: type, field: str, value: float):
    config = family(**COMMON | {"vocab_size": 300, field: value})
    expected = rf"{field} in the target's config\.json must be a number above 0, .*, found {value}"
    # From the files alone, and where the weights are there.
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=expected):
        outline(TargetConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=expected):
        Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), (1, 3, 4), 2)


@pytest.mark.parametrize("factor", [-2.0, 0.0])
def test_a_factor_that_no_field_tells_is_measured_and_refused(factor: float):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32)
    model.lm_head.register_forward_hook(lambda _module, _args, logits: logits * factor)
    with pytest.raises(ConfigError, match=rf"LlamaForCausalLM: expected logits .* a number above 0, found {factor:g};"):
        Target(model, (1, 3, 4), 2)


def test_factors_above_0_are_taken():
    torch.manual_seed(0)
    config = CohereConfig(**COMMON | {"vocab_size": 300, "logit_scale": 0.0625})
    target = Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), (1, 3, 4), 2)
    assert target.facts.logit_multiplier == pytest.approx(0.0625, rel=1e-4)
