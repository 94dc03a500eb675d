"""What a run on GPUs is made of: targets with random weights, documents in memory, the pieces built by hand."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig, Qwen3Config

from blockdraft.config import DrafterConfig, LossConfig, OptimConfig
from blockdraft.data.anchors import position_weights
from blockdraft.data.loader import Loader, LoaderConfig
from blockdraft.models.attention import bare_flex_attend, sdpa_attend
from blockdraft.models.compiled import How
from blockdraft.models.drafter import derive_shape
from blockdraft.models.target import Target
from blockdraft.training.shards import Seat
from blockdraft.training.start import new_drafter
from blockdraft.training.step import DrafterStep, MakeAttend

NARROW = Qwen3Config(
    vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=8192,
)  # fmt: skip
SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True, rope_theta=1e5, max_position_embeddings=8192,
)  # fmt: skip
"""SmolLM2-135M's own shape."""
HYBRID = Qwen3_5TextConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8, max_position_embeddings=8192,
)  # fmt: skip
"""Recurrent layers on flash-linear-attention's kernels, whose tuners start cold."""
BLOCK_SIZE = 16


class Size(NamedTuple):
    """What a run is made of."""

    config: Any
    row_length: int
    anchors: int
    steps: int
    shortest: int
    longest: int
    layers: int = 2
    attention: str = "own"
    """The kernels that a run has on GPUs, or flex, or sdpa."""
    devices: tuple[str, ...] = ("cuda:0",)
    topology: str = "shared"
    poison: bool = False
    count_waits: int = 0
    target_devices: tuple[str, ...] = ()
    """Empty: those of the drafters."""
    record: bool = False
    """Keep the stack of every allocation."""
    weights: str = ""
    """A GGUF file; empty: random weights."""
    shard: bool = False
    """Divide the optimizer's state over the drafters."""


class Documents:
    """A token store in memory: sequences with a stride, so that there is something to learn."""

    def __init__(self, size: Size, count: int = 600) -> None:
        draw = np.random.default_rng(0)
        spread = draw.uniform(np.log(size.shortest), np.log(size.longest), count)
        self.lengths = np.exp(spread).round().astype(np.int64)
        vocab = size.config.vocab_size - 1
        self.ids = [
            ((draw.integers(0, vocab) + draw.integers(1, 9) * np.arange(n)) % vocab).astype(np.int32)
            for n in self.lengths
        ]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return Document(self.ids[index], np.ones(len(self.ids[index]), dtype=np.int8))


class Document(NamedTuple):
    """Ids, all of them supervised."""

    input_ids: np.ndarray
    loss_mask: np.ndarray


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def own_attention() -> tuple[MakeAttend, How]:
    # Only GPUs have Triton.
    from blockdraft.models.block_attention import kernel_attend

    return kernel_attend, "kernels"


ATTENTION: dict[str, Callable[[], tuple[MakeAttend, How]]] = {
    "own": own_attention,
    "flex": lambda: (bare_flex_attend, "stack"),
    "sdpa": lambda: (sdpa_attend, "nothing"),
}


def target_model(size: Size, device: str) -> Any:
    if size.weights:
        path = Path(size.weights)
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).to(device)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(size.config, dtype=torch.bfloat16)


def build(size: Size) -> tuple[Loader, list[Target], list[DrafterStep]]:
    count = len(size.devices)
    weight_L = tuple(float(weight) for weight in position_weights(BLOCK_SIZE, 7.0))
    loader_config = LoaderConfig(
        row_length=size.row_length, num_rows=1, num_anchors=size.anchors, sort_window=256,
        target_tokens=2 * size.row_length, block_size=BLOCK_SIZE, weight_L=weight_L, after_gap=False, seed=0,
        num_drafters=count, accumulation=count, reuse=1,
    )  # fmt: skip
    store: Any = Documents(size)
    loader = Loader(store, loader_config)
    targets = [Target(target_model(size, device), None, size.layers) for device in size.target_devices or size.devices]
    make_attend, how = ATTENTION[size.attention]()
    shape = derive_shape(DrafterConfig(num_layers=size.layers), targets[0].facts, size.config.vocab_size - 1)
    steps = []
    first = targets[0].ends
    for number, device in enumerate(size.devices):
        drafter = new_drafter(shape, first, first, 0).to(device=device, dtype=torch.bfloat16)
        ends = first.copy_to(device, torch.bfloat16)
        steps.append(
            DrafterStep(
                drafter,
                ends,
                ends,
                loss=LossConfig(),
                optim=OptimConfig(accumulation=count),
                total_steps=size.steps,
                make_attend=make_attend,
                how=how,
                seat=Seat(number, count) if size.shard else None,
            )
        )
    return loader, targets, steps
