"""Targets with random weights and documents of mixed lengths, for measuring without either."""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3_5TextConfig, Qwen3Config

from blockdraft.data.loader import Loader, LoaderConfig
from blockdraft.models.target import Target


def target_configs() -> dict[str, PretrainedConfig]:
    """Shapes by name."""
    return {
        "tiny": Qwen3Config(
            vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=9, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16,
        ),
        "qwen3-8b": Qwen3Config(
            vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
            num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        "qwen3.6-27b": Qwen3_5TextConfig(
            vocab_size=248320, hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
            num_key_value_heads=4, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48,
            linear_key_head_dim=128, linear_value_head_dim=128, max_position_embeddings=40960,
            tie_word_embeddings=False,
            rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        ),
    }  # fmt: skip


def random_target(shapes: str, num_drafter_layers: int, device: torch.device, dtype: torch.dtype) -> Target:
    """A target of known shapes, its weights drawn on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(target_configs()[shapes], dtype=dtype)
    return Target(model, None, num_drafter_layers)


class Document(NamedTuple):
    """As a token store hands it out."""

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.int8]


class RandomDocuments:
    """A token store in memory: lengths from 20 to `longest`, even over their logarithm; every token is supervised."""

    def __init__(self, count: int, longest: int, vocab_size: int) -> None:
        generator = np.random.default_rng(0)
        shortest = min(20, longest)
        self.lengths = np.exp(generator.uniform(np.log(shortest), np.log(longest), count)).astype(np.int64)
        self.ids = [generator.integers(0, vocab_size, length, dtype=np.int32) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Document:
        return Document(self.ids[index], np.ones(len(self.ids[index]), dtype=np.int8))


def random_loader(config: LoaderConfig, count: int, vocab_size: int) -> Loader:
    """Micro-batches of random documents."""
    return Loader(cast(Any, RandomDocuments(count, min(config.row_length, 4000), vocab_size)), config)
