"""What the whole-run benchmarks run: targets and drafters with random weights, documents of mixed lengths."""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3Config

from blockdraft.commands.bench_shapes import Document, target_configs
from blockdraft.config import DrafterConfig, LossConfig, OptimConfig
from blockdraft.data.anchors import position_weights
from blockdraft.data.loader import Loader, LoaderConfig
from blockdraft.models.attention import bare_flex_attend, sdpa_attend
from blockdraft.models.compiled import How
from blockdraft.models.drafter import Drafter, derive_shape
from blockdraft.models.target import Target
from blockdraft.training.step import DrafterStep, MakeAttend

TARGETS = {
    "tiny": Qwen3Config(
        vocab_size=1024, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    ),
    # Recurrent layers on flash-linear-attention's kernels, whose tuners start cold.
    "hybrid": Qwen3_5TextConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8,
    ),
    **{name: config for name, config in target_configs().items() if name != "tiny"},
}  # fmt: skip
DRAFTERS = {
    "tiny": DrafterConfig(num_layers=2),
    "hybrid": DrafterConfig(num_layers=2),
    "qwen3-8b": DrafterConfig(),
    # As published: four layers with a window and a full one.
    "qwen3.6-27b": DrafterConfig(num_heads=32, num_kv_heads=8, head_dim=128, window=2048, window_layers=(0, 1, 2, 3)),
}


class Rows(NamedTuple):
    """What one micro-batch is made of: a row of so many tokens, with so many anchors."""

    tokens: int
    anchors: int


ROWS = {
    "tiny": Rows(512, 32),
    "hybrid": Rows(512, 32),
    "qwen3-8b": Rows(4096, 512),
    "qwen3.6-27b": Rows(4096, 512),
}


class RandomDocuments:
    """A token store in memory: rows of ids, lengths spread from 20 to 4,000 tokens or what a row holds."""

    def __init__(self, count: int, longest: int, vocab_size: int) -> None:
        generator = np.random.default_rng(0)
        self.lengths = np.exp(generator.uniform(np.log(20), np.log(longest), count)).astype(np.int64)
        # Sequences with a stride, so that there is something to learn.
        starts, strides = generator.integers(0, vocab_size, count), generator.integers(1, 9, count)
        self.ids = [
            ((start + stride * np.arange(n)) % (vocab_size - 1)).astype(np.int32)
            for start, stride, n in zip(starts, strides, self.lengths, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Document:
        return Document(self.ids[index], np.ones(len(self.ids[index]), dtype=np.int8))


def make_target(shapes: str, device: str | torch.device, dtype: torch.dtype, *, float8: bool = False) -> Target:
    """Random weights, equal for equal devices' kinds."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(TARGETS[shapes], dtype=dtype)
    return Target(model, None, DRAFTERS[shapes].num_layers, float8=float8)


def make_step(
    shapes: str,
    target: Target,
    device: str | torch.device,
    *,
    how: How,
    accumulation: int,
    total_steps: int,
    attention: str = "own",
) -> DrafterStep:
    """A drafter for that target, in its type; `how` nothing means masked SDPA, uncompiled.

    `attention`: the kernels that a run has on GPUs (own), or flex.
    """
    shape = derive_shape(DRAFTERS[shapes], target.facts, target.vocab_size - 1)
    torch.manual_seed(1)
    with torch.device(device):
        drafter = Drafter(shape).to(target.dtype)
    for weight in drafter.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.02)
    torch.nn.init.constant_(drafter.norm.weight, 0.05)
    ends = target.ends.copy_to(torch.device(device), target.dtype)
    attend: MakeAttend = sdpa_attend if how == "nothing" else bare_flex_attend
    if how != "nothing" and attention == "own":
        # Only GPUs have Triton.
        from blockdraft.models.block_attention import kernel_attend

        attend = kernel_attend
    return DrafterStep(
        drafter, ends, ends, loss=LossConfig(), optim=OptimConfig(accumulation=accumulation), total_steps=total_steps,
        make_attend=attend, how=how,
    )  # fmt: skip


def make_loader(shapes: str, vocab_size: int, *, documents: int, num_drafters: int, accumulation: int) -> Loader:
    """One row a micro-batch; the same documents in the same order whatever the number of drafters."""
    rows = ROWS[shapes]
    store = RandomDocuments(documents, min(rows.tokens, 4000), vocab_size)
    config = LoaderConfig(
        row_length=rows.tokens, num_rows=1, num_anchors=rows.anchors, sort_window=1024, target_tokens=2 * rows.tokens,
        block_size=16, weight_L=tuple(float(w) for w in position_weights(16, 7.0)), after_gap=False, seed=0,
        num_drafters=num_drafters, accumulation=accumulation, reuse=1,
    )  # fmt: skip
    return Loader(cast(Any, store), config)
