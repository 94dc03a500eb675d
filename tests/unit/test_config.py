"""A saved config reads back as it was, and a wrong one is refused by the name of its field."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from blockdraft.config import (
    ConfigError,
    DataConfig,
    DrafterConfig,
    OptimConfig,
    RunConfig,
    RuntimeConfig,
    from_json,
    read_config,
    to_json,
)
from blockdraft.recipes import RECIPES


def test_a_config_reads_back_as_it_was_written() -> None:
    config = RunConfig(
        steps=7,
        trackers=("wandb", "trackio"),
        drafter=DrafterConfig(target_layer_ids=(1, 8), window=16, window_layers=(0,)),
        optim=OptimConfig(lr=6e-4, betas=(0.8, 0.9)),
        runtime=RuntimeConfig(targets=("cuda:0", "cuda:1")),
    )
    assert from_json(to_json(config)) == config


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_reads_back_as_it_was_written(name: str) -> None:
    config = RECIPES[name]()
    assert from_json(to_json(config)) == config


def test_every_default_is_written_out() -> None:
    values = json.loads(to_json(RunConfig()))
    assert set(values) == {field.name for field in dataclasses.fields(RunConfig)}
    assert values["optim"]["lr"] == 6e-4
    assert values["drafter"]["target_layer_ids"] is None


def test_a_missing_field_takes_its_default() -> None:
    assert from_json('{"data": {"row_length": 64}}') == RunConfig(data=DataConfig(row_length=64))


def test_a_whole_number_is_a_float_where_a_float_is_due() -> None:
    clip = from_json('{"optim": {"clip": 1}}').optim.clip
    assert (clip, type(clip)) == (1.0, float)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"optim": {"lr": "6e-4"}}, "optim.lr"),
        ({"optim": {"betas": [0.9]}}, "optim.betas"),
        ({"steps": 1.5}, "steps"),
        ({"steps": True}, "steps"),
        ({"optim": {"lr": False}}, "optim.lr"),
        ({"target": {"dtype": "float16"}}, "target.dtype"),
        ({"runtime": {"targets": "cpu"}}, "runtime.targets"),
        ({"runtime": {"targets": [0]}}, "runtime.targets"),
        ({"drafter": {"target_layer_ids": [1, "2"]}}, "drafter.target_layer_ids"),
        ({"data": []}, "data"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.json: {field}\.? must be"):
        from_json(json.dumps(values), "run.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"save_every": 0}, "save_every must be at least 1, got 0"),
        ({"keep_last": 0}, "keep_last must be at least 1, got 0"),
        ({"epochs": 0}, "epochs must be above 0"),
        ({"eval": {"every": 0}}, "eval.every must be at least 1"),
        ({"eval": {"num_prompts": 0}}, "eval.num_prompts must be at least 1"),
        ({"data": {"num_anchors": 0}}, "data.num_anchors must be at least 1"),
        ({"data": {"sort_window": 0}}, "data.sort_window must be at least 1"),
        ({"drafter": {"num_layers": 0}}, "drafter.num_layers must be at least 1"),
        ({"loss": {"chunk_rows": 0}}, "loss.chunk_rows must be at least 1"),
        ({"optim": {"clip": 0}}, "optim.clip must be above 0"),
        ({"optim": {"clip": float("nan")}}, "optim.clip must be above 0"),
        ({"optim": {"warmup": 20}}, "optim.warmup is a share of the steps"),
        ({"optim": {"accumulation": 0}}, "optim.accumulation must be at least 1"),
        ({"optim": {"lr": -1e-3}}, "optim.lr must be above 0"),
        ({"optim": {"lr": float("nan")}}, "optim.lr must be above 0"),
        ({"optim": {"norm_lr": float("inf")}}, "optim.norm_lr must be above 0 and finite"),
        ({"optim": {"weight_decay": -0.1}}, "optim.weight_decay must be a number from 0 up"),
        ({"optim": {"final_lr": float("nan")}}, "optim.final_lr must be a number from 0 up"),
        ({"optim": {"betas": [0.9, 1.0]}}, "optim.betas must be two numbers from 0 up and below 1"),
        ({"loss": {"gamma": float("nan")}}, "loss.gamma must be above 0"),
        ({"runtime": {"stall_seconds": 0}}, "runtime.stall_seconds must be above 0"),
        ({"drafter": {"num_heads": 0}}, "drafter.num_heads must be at least 1"),
        ({"drafter": {"head_dim": 0}}, "drafter.head_dim must be at least 1"),
        ({"drafter": {"intermediate_size": -1}}, "drafter.intermediate_size must be at least 1"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"epochs": float("inf")}, "epochs must be above 0 and finite"),
        ({"run_dir": ""}, "run_dir is empty"),
    ],
    ids=str,
)
def test_a_number_that_cannot_work_is_refused_before_anything_is_loaded(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^run\.json: {re.escape(message)}"):
        from_json(json.dumps(values), "run.json")


@pytest.mark.parametrize(
    ("values", "field"),
    [({"step": 3}, "step"), ({"optim": {"learning_rate": 3}}, r"optim\.learning_rate")],
)
def test_an_unknown_field_is_refused_by_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.json: unknown field {field}; known here: .*"):
        from_json(json.dumps(values), "run.json")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"log_every": 5}, "log_every"),
        ({"runtime": {"poison": True}}, "--poison"),
        ({"resume": "auto"}, "--resume"),
    ],
)
def test_a_field_of_an_earlier_version_says_what_became_of_it(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.json: .* is of an earlier version: .*delete the line") as refused:
        from_json(json.dumps(values), "run.json")
    assert words in str(refused.value)


def test_a_field_of_an_earlier_version_that_says_nothing_may_stay() -> None:
    # What every config and every checkpoint of those versions has.
    values = {"seed": 3, "resume": "", "runtime": {"poison": False, "channel_depth": 4}}
    config = from_json(json.dumps(values), "run.json")
    assert (config.seed, config.runtime.channel_depth) == (3, 4)


def test_broken_json_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{\n  "steps": 3,\n}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"config\.json, line [23]: expected JSON"):
        read_config(path)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().steps = 3  # type: ignore[misc]
