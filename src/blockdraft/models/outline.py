"""What a target's files say without its weights: shape, layers, parameter counts. Takes no device memory.

The model is built on torch's meta device, so counts are those of the class that will be loaded, whatever the family.
"""

from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

from blockdraft.config import ConfigError, TargetConfig
from blockdraft.models.drafter import TargetFacts
from blockdraft.models.target import is_causal, source_of, stop_ids
from blockdraft.models.target_facts import config_facts
from blockdraft.models.target_split import find_text_model


class Outline(NamedTuple):
    """A target without weights; counts are parameters."""

    model_class: str
    facts: TargetFacts
    """Factors on embedding and logits are not measured yet: 1."""
    layers: tuple[int, ...]
    """Of each decoder layer."""
    embedding: int
    head: int
    """0 where it is the embedding."""
    stop_ids: tuple[int, ...]
    rest: int
    """Final norm, and what is not part of the text model, such as a vision tower."""

    @property
    def parameters(self) -> int:
        """Of the whole target."""
        return sum(self.layers) + self.embedding + self.head + self.rest

    def kept_layers(self, layer_ids: tuple[int, ...], *, to_end: bool) -> int:
        """Layers that stay in memory while a run trains: up to the last captured one, or all."""
        return len(self.layers) if to_end else max(layer_ids) + 1


def outline(config: TargetConfig) -> Outline:
    """Reads a target's config and counts its parameters.

    Raises:
        ConfigError: no model at that path, or none with a text model and a head in it.
    """
    source, extra = source_of(config.path)
    extra["trust_remote_code"] = config.trust_remote_code
    try:
        model_config = AutoConfig.from_pretrained(source, **extra)
        kind = AutoModelForCausalLM if is_causal(model_config) else AutoModelForImageTextToText
        with torch.device("meta"):
            model = kind.from_config(  # type: ignore[no-untyped-call]
                model_config, trust_remote_code=config.trust_remote_code
            )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"target.path must be a transformers model directory, a .gguf file or a hub name; {config.path!r} could "
            f"not be read: {error}"
        ) from error
    if (Path(config.path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(config.path)
    return outline_of(model)


def outline_of(model: PreTrainedModel) -> Outline:
    """The outline of a model that is there, on the meta device or any other.

    Raises:
        ConfigError: no text model or no head in it.
    """
    parts = dict(find_text_model(model).named_children())
    layers = parts["layers"]
    assert isinstance(layers, nn.ModuleList)
    head = cast(nn.Linear | None, model.get_output_embeddings())
    if head is None or head.weight is None:
        raise ConfigError(
            f"target.path: expected a causal language model, found {type(model).__name__} without an output head"
        )
    embedding = cast(nn.Embedding, model.get_input_embeddings()).weight
    is_tied = head.weight is embedding
    counts = tuple(_count(layer) for layer in layers)
    head_count = 0 if is_tied else head.weight.numel()
    facts = config_facts(model.config.get_text_config().to_dict(), head.weight.shape[0], len(layers))
    return Outline(
        model_class=type(model).__name__,
        facts=facts,
        layers=counts,
        embedding=embedding.numel(),
        head=head_count,
        stop_ids=stop_ids(model),
        rest=_count(model) - sum(counts) - embedding.numel() - head_count,
    )


def _count(module: nn.Module) -> int:
    # A parameter that two modules share counts once.
    return sum(weight.numel() for weight in module.parameters())
