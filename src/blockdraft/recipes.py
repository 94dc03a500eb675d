"""Recipes: functions that return a whole RunConfig, and how the command line finds one by name.

A recipe of one's own is a function in any Python file, `blockdraft train my_recipe.py:mine`; a config.json that a run
saved is one too. Nothing here imports torch.
"""

import difflib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from blockdraft.config import (
    ConfigError,
    DataConfig,
    DrafterConfig,
    EvalConfig,
    LossConfig,
    OptimConfig,
    RunConfig,
    RuntimeConfig,
    TargetConfig,
    read_config,
)


def tiny() -> RunConfig:
    """A few steps at toy sizes, for tests and for trying an installation."""
    return RunConfig(
        run_dir="runs/tiny",
        steps=4,
        save_every=2,
        target=TargetConfig(dtype="float32"),
        drafter=DrafterConfig(num_layers=1, block_size=4, target_layer_ids=(1, 2), dtype="float32"),
        data=DataConfig(row_length=64, num_rows=2, num_anchors=8, sort_window=16, target_tokens=128),
        loss=LossConfig(chunk_rows=64),
        optim=OptimConfig(lr=1e-3, warmup=0.25),
        runtime=RuntimeConfig(attention="sdpa", stall_seconds=60.0),
        eval=EvalConfig(every=2, num_prompts=4, max_new_tokens=16),
    )


def smollm2_demo() -> RunConfig:
    """SmolLM2-135M on two CPU cores: the recipe behind `make demo`, minutes."""
    steps = 640
    return RunConfig(
        run_dir="runs/demo/train",
        steps=steps,
        save_every=steps,
        # One layer: on a narrow family it learns as much a step as two, in half the time.
        drafter=DrafterConfig(num_layers=1, block_size=8, target_layer_ids=(1, 8, 14, 20, 27)),
        # A step is 8 rows of 8 anchors. A prompt (about 25 tokens) and its answer (at most 40) fill one row.
        data=DataConfig(row_length=72, num_rows=8, num_anchors=8, sort_window=128, target_tokens=8 * 72),
        # Acceptance near 2 is decided in the first slots.
        loss=LossConfig(gamma=2.0, draft_vocab="data"),
        optim=OptimConfig(lr=2e-3, norm_lr=2e-2, clip=1.0, schedule="wsd", warmup=15 / steps, decay=0.5, final_lr=0.05),
        # The target's forward costs several of the drafter's steps: it reads each document once.
        runtime=RuntimeConfig(targets=("cpu",), drafters=("cpu",), keep_features=True),
        eval=EvalConfig(every=320, num_prompts=16, max_new_tokens=40),
    )


def paper() -> RunConfig:
    """The DFlash paper's recipe for Qwen3-8B, target on cuda:0 and drafter on cuda:1."""
    return RunConfig(
        run_dir="runs/qwen3-8b",
        epochs=6.0,
        target=TargetConfig(path="Qwen/Qwen3-8B"),
        drafter=DrafterConfig(num_layers=5, block_size=16),
        # 512 anchors for each 3,072 tokens (docs/algorithm.md, section 9).
        data=DataConfig(row_length=3072, num_rows=1, num_anchors=512, target_tokens=8192),
        loss=LossConfig(gamma=7.0),
        optim=OptimConfig(
            optimizer="adamw",
            lr=6e-4,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            clip=1.0,
            schedule="cosine",
            warmup=0.04,
            final_lr=0.1,
        ),
        runtime=RuntimeConfig(targets=("cuda:0",), drafters=("cuda:1",)),
    )


RECIPES: Final[dict[str, Callable[[], RunConfig]]] = {"tiny": tiny, "smollm2_demo": smollm2_demo, "paper": paper}


def list_recipes() -> dict[str, str]:
    """Names of the recipes that come with the package, each with the first line of its docstring."""
    return {name: (inspect.getdoc(recipe) or "").splitlines()[0] for name, recipe in RECIPES.items()}


def load_recipe(name: str) -> RunConfig:
    """The config of a recipe: a known name, `FILE.py`, `FILE.py:FUNCTION`, or a saved config.json.

    Raises:
        ConfigError: no such recipe, file or function, or the function returns something else than a RunConfig.
    """
    if name in RECIPES:
        return RECIPES[name]()
    if name.endswith(".json"):
        return read_config(_existing(name))
    file, colon, function = name.rpartition(":")
    if not colon:
        file, function = name, "recipe"
    if file.endswith(".py"):
        return _call(_existing(file), function)
    near = difflib.get_close_matches(name, RECIPES, n=1)
    hint = f"did you mean {near[0]}?" if near else "one of your own is FILE.py, FILE.py:FUNCTION or a config.json"
    raise ConfigError(f"unknown recipe {name!r}, known: {', '.join(RECIPES)}; {hint}")


def _existing(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"recipe {name}: no such file (looked in {Path.cwd()})")
    return path


def _call(path: Path, name: str) -> RunConfig:
    found = vars(_import_file(path))
    function = found.get(name)
    if not inspect.isfunction(function):
        functions = [key for key, value in found.items() if inspect.isfunction(value) and not key.startswith("_")]
        raise ConfigError(
            f"recipe {path}: expected a function {name}() -> RunConfig, found {_spell(functions)}; "
            f"name one with {path}:FUNCTION"
        )
    config: Any = function()
    if not isinstance(config, RunConfig):
        raise ConfigError(f"recipe {path}:{name} must return a RunConfig, found {type(config).__name__}")
    return config


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"blockdraft_recipe_{path.stem}", path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    # Dataclasses in the file look their own module up here.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _spell(functions: list[str]) -> str:
    return f"the functions {', '.join(functions)}" if functions else "no function"
