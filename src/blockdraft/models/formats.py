"""The published layout of a drafter: config.json and model.safetensors, read by vLLM, SGLang and the `dflash` package.

Source of every field: docs/formats.md.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.models.drafter import Drafter, DrafterShape

ARCHITECTURE = "DFlashDraftModel"
_TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


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
    layer_types = [
        "sliding_attention" if layer in shape.window_layers else "full_attention" for layer in range(shape.num_layers)
    ]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": shape.block_size,
        "num_target_layers": shape.num_target_layers,
        "dflash_config": dflash,
        **direction,
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
        "dtype": str(dtype).removeprefix("torch."),
    }


def read_shape(config: dict[str, Any], source: str) -> DrafterShape:
    """The shape that a published config.json describes.

    Raises:
        ConfigError: another architecture, or a field is missing.
    """
    if ARCHITECTURE not in config.get("architectures", []):
        raise ConfigError(f"{source}: expected architectures [{ARCHITECTURE!r}], found {config.get('architectures')}")
    dflash = config.get("dflash_config", {})
    try:
        layer_types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        window_layers = tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")
        causal = config.get("is_causal", dflash.get("causal"))
        return DrafterShape(
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate_size=config["intermediate_size"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=float((config.get("rope_parameters") or config)["rope_theta"]),
            block_size=config.get("block_size") or dflash["block_size"],
            mask_token_id=dflash["mask_token_id"],
            target_layer_ids=tuple(dflash["target_layer_ids"]),
            num_target_layers=config["num_target_layers"],
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            window=config.get("sliding_window") or dflash.get("swa_window_size") if window_layers else None,
            window_layers=window_layers,
            causal=bool(causal),
            window_causal=causal is None and bool(window_layers),
            embedding_multiplier=dflash.get("input_embedding_scale", 1.0),
            logit_multiplier=dflash.get("output_multiplier", 1.0),
            logit_softcap=dflash.get("final_logit_softcapping"),
        )
    except KeyError as error:
        raise ConfigError(f"{source}: the published format needs the field {error.args[0]!r}, found none") from error


def save_export(drafter: Drafter, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes config.json and model.safetensors; an existing export there is replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.detach().to("cpu", dtype).contiguous() for name, weight in drafter.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = published_config(drafter.shape, dtype)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_export(directory: Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> Drafter:
    """Loads an export strictly; `dtype` None keeps that of the tensors.

    Raises:
        ConfigError: no export, missing or unknown tensors, wrong shapes, or a config that names another data type.
    """
    config_file, weights_file = directory / "config.json", directory / "model.safetensors"
    for file in (config_file, weights_file):
        if not file.is_file():
            raise ConfigError(f"{directory}: expected an export with config.json and model.safetensors, no {file.name}")
    config = json.loads(config_file.read_text(encoding="utf-8"))
    shape = read_shape(config, str(config_file))
    tensors: dict[str, Tensor] = load_file(weights_file)
    found = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()}
    stated = config.get("dtype") or config.get("torch_dtype")
    if found != {stated}:
        raise ConfigError(f"{config_file}: dtype must be that of the tensors, {sorted(found)}, found {stated!r}")
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
        raise ConfigError(f"{weights_file}: tensor {wrong[0]} is {kind} ({len(wrong)} such tensors)")
    dtype = dtype or _TORCH_DTYPES[str(stated)]
    placed = {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}
    drafter.load_state_dict(placed, assign=True)
    return drafter
