"""Weights side by side in memory. K rows of one weight, X of all of them, D width."""

import copy

import pytest
import torch
from torch import nn

from blockdraft.models.joined_weights import join, joined

APART = r"expected side by side in memory, found apart"


def three() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.randn(rows, 3, generator=generator)) for rows in (3, 2, 2)]
    join(made)
    return made


def test_a_product_reads_what_an_update_wrote_and_writes_to_no_neighbour():
    weights = three()
    before = [weight.detach().clone() for weight in weights]
    whole_XD = joined(*weights)
    assert torch.equal(whole_XD, torch.cat(before)) and not whole_XD.requires_grad
    assert torch.equal(joined(*weights[1:]), torch.cat(before[1:]))
    with torch.no_grad():
        weights[1].copy_(torch.full((2, 3), 7.0))
    assert torch.equal(whole_XD, torch.cat([before[0], torch.full((2, 3), 7.0), before[2]]))


def test_what_lies_otherwise_is_not_taken_for_one_matrix():
    first, second, third = three()
    for wrong in ((second, first), (first, third), (second, second)):
        with pytest.raises(RuntimeError, match=APART):
            joined(*wrong)
    # At the same place of other memory, and turned.
    room = torch.zeros(7, 3)
    for other in (nn.Parameter(room[3:5]), nn.Parameter(room[3:5].clone()), copy.deepcopy(second)):
        with pytest.raises(RuntimeError, match=APART):
            joined(first, other)
    with pytest.raises(RuntimeError, match=APART):
        joined(nn.Parameter(first.detach().t()), second)
    with pytest.raises(RuntimeError, match=APART):
        joined(*(nn.Parameter(weight.detach().to(torch.bfloat16)) for weight in (first, second)))


def test_weights_that_are_loaded_in_place_stay_joined_and_a_copy_is_joined_for_itself():
    weights = nn.ParameterList(three())
    places = [weight.data_ptr() for weight in weights]
    given = {name: torch.randn(weight.shape) for name, weight in weights.state_dict().items()}
    weights.load_state_dict(given)
    assert [weight.data_ptr() for weight in weights] == places
    assert torch.equal(joined(*weights), torch.cat(list(given.values())))
    twin = copy.deepcopy(weights)
    join(list(twin))
    with torch.no_grad():
        twin[1].zero_()
    assert torch.equal(joined(*weights), torch.cat(list(given.values())))
