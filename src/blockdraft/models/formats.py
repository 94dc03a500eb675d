"""The published layout of a drafter: config.json and model.safetensors, read by vLLM, SGLang and the `dflash` package.

Source of every field: docs/formats.md.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.models.drafter import Drafter, DrafterShape

ARCHITECTURE = "DFlashDraftModel"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"


def published_config(shape: DrafterShape, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of an export: Qwen3Config fields of the drafter and its `dflash_config`."""
    dflash: dict[str, Any] = {
        "mask_token_id": shape.mask_token_id,
        "target_layer_ids": list(shape.target_layer_ids),
        "block_size": shape.block_size,
    }
    if shape.window is not None:
        dflash |= {"use_swa": True, "swa_window_size": shape.window}
    # Where no direction is stated, every client runs layers with a window causally and full layers both ways.
    direction = {} if shape.window_causal else {"is_causal": shape.causal}
    if direction:
        dflash["causal"] = shape.causal
    if shape.embedding_multiplier != 1.0:
        dflash["input_embedding_scale"] = shape.embedding_multiplier
    if shape.logit_multiplier != 1.0:
        dflash["output_multiplier"] = shape.logit_multiplier
    if shape.logit_softcap is not None:
        dflash["final_logit_softcapping"] = shape.logit_softcap
    return {
        "architectures": [ARCHITECTURE],
        "block_size": shape.block_size,
        "num_target_layers": shape.num_target_layers,
        "dflash_config": dflash,
        **direction,
        **qwen3_fields(shape),
        "dtype": dtype_name(dtype),
    }


def qwen3_fields(shape: DrafterShape) -> dict[str, Any]:
    """What both layouts say about the drafter's layers, as a Qwen3Config has it."""
    layer_types = [
        "sliding_attention" if layer in shape.window_layers else "full_attention" for layer in range(shape.num_layers)
    ]
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "max_position_embeddings": shape.max_position_embeddings,
        "vocab_size": shape.vocab_size,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": layer_types,
        "sliding_window": shape.window,
        "use_sliding_window": shape.window is not None,
        "max_window_layers": shape.num_layers,
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def read_shape(config: dict[str, Any], source: str) -> DrafterShape:
    """The shape that a published config.json describes.

    Raises:
        ConfigError: another architecture, a field is missing, or one asks for what a drafter here does not do.
    """
    if ARCHITECTURE not in config.get("architectures", []):
        raise ConfigError(f"{source}: expected architectures [{ARCHITECTURE!r}], found {config.get('architectures')}")
    dflash = config.get("dflash_config", {})
    try:
        window, window_layers = check_layers(config, source)
        if dflash.get("use_swa") and not window_layers:
            raise ConfigError(f"{source}: dflash_config.use_swa is set and no layer has sliding_attention; name them")
        causal = config.get("is_causal", dflash.get("causal"))
        return DrafterShape(
            **layer_numbers(config),
            block_size=config.get("block_size") or dflash["block_size"],
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            num_target_layers=config["num_target_layers"],
            window=window or (dflash["swa_window_size"] if window_layers else None),
            window_layers=window_layers,
            causal=bool(causal),
            window_causal=causal is None and bool(window_layers),
            embedding_multiplier=dflash.get("input_embedding_scale", 1.0),
            logit_multiplier=dflash.get("output_multiplier", 1.0),
            logit_softcap=dflash.get("final_logit_softcapping"),
        )
    except KeyError as error:
        raise ConfigError(f"{source}: the published format needs the field {error.args[0]!r}, found none") from error


def layer_numbers(config: dict[str, Any]) -> dict[str, Any]:
    """The plain numbers among Qwen3Config's fields, under the names of DrafterShape; KeyError names a missing one."""
    return {
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "intermediate_size": config["intermediate_size"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_theta": float((config.get("rope_parameters") or config)["rope_theta"]),
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
    }


def check_layers(config: dict[str, Any], source: str) -> tuple[int | None, tuple[int, ...]]:
    """Window and windowed layers; refuses what would run differently here than where the checkpoint was trained.

    Raises:
        ConfigError: names the field.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    for name, expected, found in (
        ("rope_type", "default", kind),
        ("hidden_act", "silu", config.get("hidden_act", "silu")),
        ("attention_bias", False, config.get("attention_bias", False)),
    ):
        if found != expected:
            raise ConfigError(f"{source}: {name} must be {expected!r} for a DFlash drafter here, found {found!r}")
    kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != config["num_hidden_layers"]:
        raise ConfigError(
            f"{source}: layer_types must be full_attention or sliding_attention for each of "
            f"{config['num_hidden_layers']} layers, found {kinds}"
        )
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    return (config.get("sliding_window") if layers else None), layers


def accept(written: Path) -> None:
    """The default: nobody compares."""


def save_export(
    drafter: Drafter,
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
    compare: Callable[[Path], None] = accept,
) -> None:
    """Writes config.json and model.safetensors; an existing export there is replaced. `compare`: write_checkpoint."""
    write_checkpoint(drafter, directory, published_config(drafter.shape, dtype), dtype, compare)


def write_checkpoint(
    drafter: Drafter,
    directory: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    compare: Callable[[Path], None] = accept,
) -> None:
    """Tensors in `dtype` and the config, complete or not at all; both layouts name tensors alike.

    Written beside `directory`, synced and renamed. Other files of a directory that is there already are kept.
    `compare` looks at what was written before it takes its place; if it raises, `directory` stays as it was.
    """
    directory = directory.resolve()
    directory.parent.mkdir(parents=True, exist_ok=True)
    side, old = (directory.with_name(f".{directory.name}.{kind}") for kind in ("writing", "old"))
    if old.exists():
        # Killed between the two renames, or right behind them.
        old.rename(directory) if not directory.exists() else shutil.rmtree(old)
    shutil.rmtree(side, ignore_errors=True)
    side.mkdir()
    try:
        tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in drafter.state_dict().items()}
        save_file(tensors, side / WEIGHTS, metadata={"format": "pt"})
        (side / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        # safetensors lets nobody else read; an export is for whoever serves.
        shutil.copymode(side / CONFIG, side / WEIGHTS)
        for path in (side / WEIGHTS, side / CONFIG, side):
            _sync(path)
        compare(side)
    except BaseException:
        shutil.rmtree(side, ignore_errors=True)
        raise
    if directory.exists():
        directory.rename(old)
    side.rename(directory)
    if old.exists():
        for path in old.iterdir():
            if path.name not in (WEIGHTS, CONFIG):
                path.rename(directory / path.name)
        shutil.rmtree(old)
    _sync(directory.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_export(directory: Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> Drafter:
    """Loads an export strictly; `dtype` None keeps that of the tensors.

    Raises:
        ConfigError: no export, missing or unknown tensors, wrong shapes, or a config that names another data type.
    """
    config = read_json(directory / CONFIG)
    if "speculators_model_type" in config:
        raise ConfigError(
            f"{directory}: found speculators' format, expected the published one; "
            f"convert it: blockdraft import {directory} --output DIR"
        )
    shape = read_shape(config, str(directory / CONFIG))
    return build_drafter(shape, read_tensors(directory), config, directory, device=device, dtype=dtype)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a config.json.

    Raises:
        ConfigError: no such file, or no JSON object in it.
    """
    if not file.is_file():
        raise ConfigError(f"{file.parent}: expected an export with {CONFIG} and {WEIGHTS}, found no {file.name}")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file}: expected JSON, found {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, from one file or from the several that an index lists.

    Raises:
        ConfigError: no weights, or a file that the index lists is missing.
    """
    index = directory / f"{WEIGHTS}.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.is_file() else [WEIGHTS]
    for name in names:
        if not (directory / name).is_file():
            raise ConfigError(f"{directory}: expected an export with {CONFIG} and {WEIGHTS}, found no {name}")
    return {key: tensor for name in names for key, tensor in load_file(directory / name).items()}


def build_drafter(
    shape: DrafterShape,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    directory: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
) -> Drafter:
    """A drafter of exactly these tensors.

    Raises:
        ConfigError: missing or unknown tensors, wrong shapes, or a config that names another data type.
    """
    found = {dtype_name(tensor.dtype) for tensor in tensors.values()}
    stated = config.get("dtype") or config.get("torch_dtype")
    if found != {stated}:
        raise ConfigError(f"{directory / CONFIG}: dtype must be that of the tensors, {sorted(found)}, found {stated!r}")
    with torch.device("meta"):
        drafter = Drafter(shape)
    expected = {name: tuple(weight.shape) for name, weight in drafter.state_dict().items()}
    wrong = sorted(set(expected) ^ set(tensors)) or sorted(
        name for name, size in expected.items() if tuple(tensors[name].shape) != size
    )
    if wrong:
        kind = (
            "missing" if wrong[0] not in tensors else "not expected" if wrong[0] not in expected else "of a wrong shape"
        )
        raise ConfigError(
            f"{directory / WEIGHTS}: tensor {wrong[0]} is {kind} ({len(wrong)} such tensors); fetch or write the "
            "export again"
        )
    placed = {name: tensor.to(device=device, dtype=dtype or tensor.dtype) for name, tensor in tensors.items()}
    drafter.load_state_dict(placed, assign=True)
    return drafter
