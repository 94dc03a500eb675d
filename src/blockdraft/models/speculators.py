"""speculators' layout of a drafter: the same tensors as the published one, and a config.json of its own.

Fields as speculators 0.9.0 writes them; docs/formats.md has each, and who reads it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from blockdraft.config import ConfigError
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.models.formats import (
    CONFIG,
    accept,
    build_drafter,
    check_layers,
    dtype_name,
    layer_numbers,
    qwen3_fields,
    read_json,
    read_tensors,
    write_checkpoint,
)

VERSION = "0.9.0"
"""Version of speculators whose fields are written."""
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's tensors that some checkpoints carry; a drafter here reads the target's."""


class Verifier(NamedTuple):
    """The target as the config names it."""

    name_or_path: str | None
    architectures: list[str]


class Found(NamedTuple):
    """A checkpoint that was read."""

    drafter: Drafter
    version: str
    verifier: Verifier
    left_out: list[str]
    """Tensors of the target."""


def speculators_config(shape: DrafterShape, dtype: torch.dtype, verifier: Verifier) -> dict[str, Any]:
    """The config.json of an export.

    Raises:
        ConfigError: the drafter has something that the format cannot say.
    """
    num_full = shape.num_layers - len(shape.window_layers)
    if shape.causal and num_full:
        raise ConfigError(
            f"speculators' format runs full-attention layers both ways inside a block, this drafter has {num_full} "
            "causal ones; use --format published"
        )
    for name, value, plain in (
        ("embedding_multiplier", shape.embedding_multiplier, 1.0),
        ("logit_multiplier", shape.logit_multiplier, 1.0),
        ("logit_softcap", shape.logit_softcap, None),
    ):
        if value != plain:
            raise ConfigError(f"speculators' format cannot say the target's {name} {value}; use --format published")
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": shape.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": verifier._asdict(),
        },
        "transformer_layer_config": qwen3_fields(shape),
        "draft_vocab_size": shape.vocab_size,
        "block_size": shape.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in shape.target_layer_ids],
        "mask_token_id": shape.mask_token_id,
        "target_hidden_size": None,
        # vLLM takes this for every layer, so it is true for a drafter without windows too.
        "sliding_window_non_causal": not (shape.causal or shape.window_causal),
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
        # Not a field of speculators, which keeps it unread: what an import back needs.
        "num_target_layers": shape.num_target_layers,
        "dtype": dtype_name(dtype),
    }


def save_speculators(
    drafter: Drafter,
    directory: Path,
    verifier: Verifier,
    dtype: torch.dtype = torch.bfloat16,
    compare: Callable[[Path], None] = accept,
) -> None:
    """Writes config.json and model.safetensors; an existing export there is replaced. `compare`: write_checkpoint.

    Raises:
        ConfigError: the drafter has something that the format cannot say.
    """
    write_checkpoint(drafter, directory, speculators_config(drafter.shape, dtype, verifier), dtype, compare)


def load_speculators(directory: Path, *, num_target_layers: int | None = None) -> Found:
    """Reads a checkpoint strictly, tensors in their own type.

    `num_target_layers` is needed where the config does not have it, as in checkpoints that speculators wrote.

    Raises:
        ConfigError: not a DFlash drafter of this kind, or a field or tensor is missing or of a wrong shape.
    """
    config = read_json(directory / CONFIG)
    shape = read_speculators_shape(config, str(directory / CONFIG), num_target_layers)
    tensors = read_tensors(directory)
    left_out = [name for name in TARGETS_OWN if name in tensors]
    kept = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    drafter = build_drafter(shape, kept, config, directory)
    return Found(drafter, str(config.get("speculators_version")), read_verifier(config), left_out)


def read_verifier(config: dict[str, Any]) -> Verifier:
    """The target that the config names, if any."""
    found = (config.get("speculators_config") or {}).get("verifier") or {}
    return Verifier(found.get("name_or_path"), list(found.get("architectures") or []))


def read_speculators_shape(config: dict[str, Any], source: str, num_target_layers: int | None) -> DrafterShape:
    """The shape that a config.json of speculators describes.

    Raises:
        ConfigError: another algorithm, a reduced vocabulary, or a field is missing.
    """
    try:
        layers = _layer_config(config["transformer_layer_config"], source)
        for name, expected, found in (
            ("speculators_model_type", "dflash", config["speculators_model_type"]),
            ("sample_from_anchor", False, config.get("sample_from_anchor", False)),
            ("draft_vocab_size", layers["vocab_size"], config["draft_vocab_size"]),
            ("target_hidden_size", layers["hidden_size"], config.get("target_hidden_size") or layers["hidden_size"]),
        ):
            if found != expected:
                raise ConfigError(f"{source}: {name} must be {expected!r} to be read here, found {found!r}")
        known = config.get("num_target_layers", num_target_layers)
        if known is None or (num_target_layers is not None and known != num_target_layers):
            raise ConfigError(
                f"{source}: expected the number of the target's layers ({num_target_layers} by --target), "
                f"found {config.get('num_target_layers')}; name the target by --target"
            )
        window, window_layers = check_layers(layers, source)
        is_causal = bool(window_layers) and not config.get("sliding_window_non_causal", False)
        is_mixed = len(window_layers) < layers["num_hidden_layers"]
        return DrafterShape(
            **layer_numbers(layers),
            block_size=config["block_size"],
            mask_token_id=config["mask_token_id"],
            target_layer_ids=tuple(layer - 1 for layer in config["aux_hidden_state_layer_ids"]),
            num_target_layers=known,
            window=window,
            window_layers=window_layers,
            causal=is_causal and not is_mixed,
            window_causal=is_causal and is_mixed,
        )
    except KeyError as error:
        raise ConfigError(f"{source}: speculators' format needs the field {error.args[0]!r}, found none") from error


def _layer_config(values: dict[str, Any], source: str) -> dict[str, Any]:
    """`transformer_layer_config` with the defaults of its model type filled in, as speculators fills them."""
    kind = values.get("model_type", "qwen3")
    try:
        config = AutoConfig.for_model(kind, **{name: value for name, value in values.items() if name != "model_type"})
    except ValueError as error:
        raise ConfigError(f"{source}: transformer_layer_config.model_type {kind!r} is not known here") from error
    filled: dict[str, Any] = config.to_dict()
    if "sliding_attention" in (filled.get("rope_parameters") or {}):
        raise ConfigError(f"{source}: expected one set of rope_parameters, found one for each layer type")
    return filled
