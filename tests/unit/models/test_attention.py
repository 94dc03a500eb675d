"""R rows, T context tokens, A anchors, L block positions, Q = A * L, K = T + Q, H query heads, G key/value heads."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from torch.nn.attention.flex_attention import create_mask, flex_attention

from blockdraft.models.attention import flex_attend, sdpa_attend
from blockdraft.models.block_mask import block_mask
from blockdraft.models.blocks import visibility
from integration.tiny import tiny_drafter, tiny_target
from unit.models.test_blocks import packed_rows, row


@pytest.fixture(scope="module")
def shape():
    return tiny_drafter(tiny_target("llama"), 4).shape


def streams(num_tokens: int, num_queries: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """query, context key and value, block key and value for H 4, G 2, E 16."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(4, num_queries), (2, num_tokens), (2, num_tokens), (2, num_queries), (2, num_queries)]
    return tuple(torch.randn(1, heads, length, 16, generator=generator) for heads, length in sizes)


@given(packed_rows())
@settings(max_examples=40)
def test_the_flex_predicate_equals_visibility(shape, case):
    lengths, anchors, size, window, causal, padding = case
    document_RT, position_RT = row(*lengths, padding=padding)
    anchor_RA = torch.tensor([anchors])
    here = dataclasses.replace(
        shape, block_size=size, causal=causal, window=window, window_layers=(0,) if window else ()
    )
    mask = block_mask(here, position_RT, anchor_RA, window)
    num_queries = len(anchors) * size
    dense = create_mask(mask.mask_mod, 1, 1, num_queries, document_RT.shape[1] + num_queries, device="cpu")[:, 0]
    expected = visibility(document_RT, position_RT, anchor_RA, size, window=window, causal=causal)
    assert torch.equal(dense, expected)
    # What the blocks say must cover what the predicate allows.
    assert mask.to_dense().sum() > 0


def test_two_rows_have_masks_of_their_own(shape):
    one, two = row(5, 3), row(2, 4, padding=2)
    document_RT, position_RT = torch.cat([one[0], two[0]]), torch.cat([one[1], two[1]])
    anchor_RA = torch.tensor([[2, 6], [1, -1]])
    mask = block_mask(shape, position_RT, anchor_RA, None)
    dense = create_mask(mask.mask_mod, 2, 1, 8, 16, device="cpu")[:, 0]
    assert torch.equal(dense, visibility(document_RT, position_RT, anchor_RA, 4))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 4, "window_layers": (1,)}], ids=str)
def test_both_backends_attend_alike(shape, options):
    document_RT, position_RT = row(9, 7)
    anchor_RA = torch.tensor([[5, 6, 14, -1]])
    here = dataclasses.replace(shape, **options)
    inputs = streams(16, 16)
    dense = sdpa_attend(here, document_RT, position_RT, anchor_RA)
    sparse = flex_attend(here, document_RT, position_RT, anchor_RA, flex_attention)
    for layer in range(here.num_layers):
        torch.testing.assert_close(sparse(layer, *inputs), dense(layer, *inputs), atol=1e-5, rtol=1e-4)
    # In the last layer slot 0 of a block does not ask; what the others get is the same.
    last, whole_RHQE = here.num_layers - 1, dense(here.num_layers - 1, *inputs)
    drafted_RHQE = inputs[0].unflatten(2, (4, 4))[:, :, :, 1:].flatten(2, 3)
    wanted_RHQE = whole_RHQE.unflatten(2, (4, 4))[:, :, :, 1:].flatten(2, 3)
    for attend in (dense, sparse):
        found_RHQE = attend(last, drafted_RHQE, *inputs[1:])
        torch.testing.assert_close(found_RHQE, wanted_RHQE, atol=1e-5, rtol=1e-4)


def test_windows_hold_for_the_layers_named(shape):
    document_RT, position_RT = row(20)
    anchor_RA = torch.tensor([[18]])
    inputs = streams(20, 4)
    here = dataclasses.replace(shape, window=5, window_layers=(1,))
    attend, plain = (sdpa_attend(one, document_RT, position_RT, anchor_RA) for one in (here, shape))
    assert torch.equal(attend(0, *inputs), plain(0, *inputs))
    assert (attend(1, *inputs) - plain(1, *inputs)).abs().max() > 1e-3


def test_what_is_hidden_does_not_reach_the_output(shape):
    document_RT, position_RT = row(6, 6)
    anchor_RA = torch.tensor([[3, 8, -1]])
    query, context_key, context_value, block_key, block_value = streams(12, 12)
    attend = sdpa_attend(shape, document_RT, position_RT, anchor_RA)
    before = attend(0, query, context_key, context_value, block_key, block_value)
    hidden = torch.tensor([3, 4, 5, 8, 9, 10, 11])
    for stream in (context_key, context_value):
        stream[:, :, hidden] = 1e3
    assert torch.equal(attend(0, query, context_key, context_value, block_key, block_value), before)
    assert torch.isfinite(before).all()
