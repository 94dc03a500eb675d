"""An export read by the `dflash` package, which shares no code with this one: same tensors, tokens and acceptance.

The package is part of the test setup (installed with --no-deps); where it is missing these tests fail.
"""

import time

import pytest
import torch
from dflash.model import DFlashDraftModel, dflash_generate

from blockdraft.decoding.speculative import generate
from blockdraft.models.formats import load_export, save_export
from integration.tiny import taught_pair, tiny_prompts

NUM_TOKENS = 32
STOP_IDS = [2]


@pytest.fixture(autouse=True)
def clock_without_a_gpu(monkeypatch):
    # The client's statistics synchronise a CUDA device, whether there is one or not.
    monkeypatch.setattr("dflash.model._cuda_time", time.perf_counter)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load_in_client(directory):
    client, info = DFlashDraftModel.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return client.eval()


def whole_rounds(lengths: list[int], block_size: int) -> list[int]:
    """Tokens committed by the rounds that have a whole block to go: the client shortens later blocks, we do not.

    A round that a stop token cut is left in: both commit up to the stop token.
    """
    kept, written = [], 1
    for length in lengths:
        # The client verifies the anchor and at most what is left.
        if 1 + NUM_TOKENS - written < block_size:
            break
        kept.append(length)
        written += length
    return kept


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"block_size": 8}),
        ("qwen3", {"block_size": 8}),
        ("qwen3", {"block_size": 8, "window": 10, "window_layers": (0, 1)}),
        ("qwen3", {"block_size": 8, "window": 12, "window_layers": (0,), "causal": True}),
    ],
    ids=str,
)
def test_the_client_writes_the_same_tokens_in_the_same_rounds(name, settings, tmp_path):
    target, drafter = taught_pair(name, **settings)
    save_export(drafter, tmp_path, torch.float32)
    client = load_in_client(tmp_path)
    prompts = tiny_prompts(4, seed=1) + tiny_prompts(17, seed=2)[1:]
    accepted = 0
    for prompt in prompts:
        ours = generate(target, drafter, prompt, max_new_tokens=NUM_TOKENS, stop_ids=STOP_IDS)
        theirs = dflash_generate(
            client, target.model, torch.tensor([prompt]), NUM_TOKENS, stop_token_ids=STOP_IDS, return_stats=True
        )
        assert theirs.output_ids[0, len(prompt) :].tolist() == ours.token_ids
        lengths = whole_rounds([entry.committed for entry in ours.rounds], 8)
        assert whole_rounds(theirs.acceptance_lengths, 8) == lengths
        accepted += sum(length - 1 for length in lengths)
    assert accepted > 20, "nothing accepted: equal acceptance says little"


def test_the_client_reads_the_default_export_bit_for_bit(tmp_path):
    _, drafter = taught_pair("llama", block_size=8)
    save_export(drafter, tmp_path)
    client, info = DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    ours, theirs = load_export(tmp_path).state_dict(), client.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert weight.dtype == theirs[name].dtype == torch.bfloat16
        assert torch.equal(weight, theirs[name])


def test_windows_and_direction_reach_the_client(tmp_path):
    _, drafter = taught_pair("qwen3", block_size=8, window=12, window_layers=(0,), causal=True)
    save_export(drafter, tmp_path)
    client = DFlashDraftModel.from_pretrained(tmp_path)
    attention = [layer.self_attn for layer in client.layers]
    assert [layer.sliding_window for layer in attention] == [12, None]
    assert [layer.is_causal for layer in attention] == [True, True]
    assert (client.block_size, client.mask_token_id) == (8, 100)
