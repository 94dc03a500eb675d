"""Layers with a window that attend causally beside full layers that do not: how published checkpoints run that state no
direction.
"""

import dataclasses
import json

import pytest
import torch
from dflash.model import DFlashDraftModel

from blockdraft.config import ConfigError
from blockdraft.decoding.state import ContextCache
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.drafter import Drafter
from blockdraft.models.formats import load_export, save_export
from integration.tiny import tiny_drafter, tiny_target


@pytest.fixture
def drafter() -> Drafter:
    made = tiny_drafter(tiny_target("qwen3"), 8, window=12, window_layers=(0,))
    mixed = Drafter(dataclasses.replace(made.shape, window_causal=True)).eval()
    mixed.load_state_dict(made.state_dict())
    return mixed


def test_no_direction_is_read_and_written_as_published(drafter, tmp_path):
    save_export(drafter, tmp_path, torch.float32)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "is_causal" not in config
    assert "causal" not in config["dflash_config"]
    assert load_export(tmp_path).shape == drafter.shape
    client = DFlashDraftModel.from_pretrained(tmp_path)
    assert [layer.self_attn.is_causal for layer in client.layers] == [True, False]


def seen_by(attend, drafter, layer, num_context):
    """[L, T + L]: which keys each slot of the block sees; values are one-hot, so the output shows them."""
    shape = drafter.shape
    length = shape.block_size
    query = torch.zeros(1, shape.num_heads, length, shape.head_dim)
    keys = torch.zeros(1, shape.num_kv_heads, num_context + length, shape.head_dim)
    columns = []
    for key in range(num_context + length):
        value = torch.zeros_like(keys)
        value[:, :, key] = 1.0
        context, block = value[:, :, :num_context], value[:, :, num_context:]
        columns.append(
            attend(layer, query, keys[:, :, :num_context], context, keys[:, :, num_context:], block)[0, 0, :, 0] > 0
        )
    return torch.stack(columns, dim=1)


def test_training_and_decoding_see_the_same(drafter):
    num_context, length = 9, 8
    training = sdpa_attend(
        drafter.shape,
        torch.zeros(1, num_context + 1, dtype=torch.long),
        torch.arange(num_context + 1)[None],
        torch.tensor([[num_context]]),
    )

    def in_training(layer, query, context_key, context_value, block_key, block_value):
        # The row also holds the anchor's own context token, which no slot sees.
        pad = context_key.new_zeros(*context_key.shape[:2], 1, context_key.shape[3])
        return training(
            layer, query, torch.cat([context_key, pad], 2), torch.cat([context_value, pad], 2), block_key, block_value
        )

    for layer, is_causal in enumerate([True, False]):
        seen = seen_by(in_training, drafter, layer, num_context)
        everything = torch.ones(length, length, dtype=torch.bool)
        assert torch.equal(seen[:, num_context:], everything.tril() if is_causal else everything)

        def in_decoding(*arguments):
            cache = ContextCache(drafter.shape, num_context, torch.device("cpu"), torch.float32)
            cache.grow(num_context)
            return cache(*arguments)

        assert torch.equal(seen_by(in_decoding, drafter, layer, num_context), seen)


def test_a_direction_of_windows_needs_windows(drafter):
    with pytest.raises(ConfigError, match="window_causal"):
        dataclasses.replace(drafter.shape, window=None, window_layers=())
    with pytest.raises(ConfigError, match="window_causal"):
        dataclasses.replace(drafter.shape, causal=True)
