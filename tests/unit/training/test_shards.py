"""State divided over drafters: who keeps what, and updates that are those of an undivided optimizer, bit for bit."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from blockdraft.config import ConfigError
from blockdraft.training.optim import MasterOptimizer, merged_state
from blockdraft.training.shards import ROUNDS, Seat, rounds_of, share_out
from unit.training.test_optim import CONFIG, gradients_for, push, snapshot

LAYER = [16_777_216, 4_194_304, 4_194_304, 16_777_216, 128, 128, 50_331_648, 50_331_648, 50_331_648, 4096, 4096]
LARGE = [83_886_080, *LAYER * 5, 4096, 4096]
"""Of a drafter for Qwen3-8B."""


@pytest.mark.parametrize("count", range(2, 9))
def test_whole_weights_are_shared_out_evenly_and_always_alike(count):
    owners = share_out(LARGE, count)
    held = [sum(size for size, owner in zip(LARGE, owners, strict=True) if owner == one) for one in range(count)]
    assert sum(held) == sum(LARGE)
    assert max(held) < 1.03 * sum(LARGE) / count
    assert share_out(list(LARGE), count) == owners


@pytest.mark.parametrize("count", [2, 3, 8])
def test_rounds_have_every_weight_once_and_about_as_much_of_each_drafter(count):
    owners = share_out(LARGE, count)
    rounds = rounds_of(LARGE, owners)
    assert len(rounds) == ROUNDS
    assert sorted(index for one in rounds for index in one) == list(range(len(LARGE)))
    for owner in range(count):
        parts = [sum(LARGE[index] for index in one if owners[index] == owner) for one in rounds]
        # Whole weights: a round may have the largest more.
        assert max(parts) <= sum(parts) / ROUNDS + max(LARGE)


def test_a_weight_is_in_the_round_that_its_middle_lies_in():
    assert rounds_of([1, 3, 3, 1], [0] * 4) == [[0], [1], [2], [3]]
    # Of two drafters each one's own bytes count.
    assert rounds_of([1, 10, 3, 30, 3, 30, 1, 10], [0, 1] * 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_more_drafters_than_weights():
    assert sorted(share_out([5, 3], 4)) == [0, 1]
    assert rounds_of([5, 3], [0, 1]) == [[0, 1]]


def net_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    sizes = ((6, 8), (8, 9), (9, 4), (4, 4), (4, 2))
    layers = [layer for a, b in sizes for layer in (nn.Linear(a, b, bias=False), nn.LayerNorm(b, bias=False))]
    return nn.Sequential(*layers).to(dtype)


class Desk:
    """Drafters of one node that take turns: what an owner has updated is there for the others when all have stepped."""

    def __init__(self, nets: list[nn.Module]) -> None:
        self.named = [{weight.data_ptr(): name for name, weight in net.named_parameters()} for net in nets]
        self.weights = [dict(net.named_parameters()) for net in nets]
        self.rounds: list[list[list[tuple[int, str]]]] = [[] for _ in nets]
        self.waited = [0] * len(nets)

    def seat(self, number: int) -> "Place":
        return Place(self, number)

    def deliver(self) -> None:
        assert all(one == self.rounds[0] for one in self.rounds), "drafters hand out other weights than the others"
        assert self.waited == [len(one) for one in self.rounds], "a round that nobody waited for"
        for owner, name in (pair for one in self.rounds[0] for pair in one):
            for weights in self.weights:
                weights[name].data.copy_(self.weights[owner][name].data)
        self.rounds, self.waited = [[] for _ in self.rounds], [0] * len(self.waited)


class Place:
    """One drafter's end of it."""

    def __init__(self, desk: Desk, number: int) -> None:
        self.desk, self.number = desk, number

    def hand_out(self, weights: list[tuple[int, Tensor]]) -> None:
        names = self.desk.named[self.number]
        self.desk.rounds[self.number].append([(owner, names[weight.data_ptr()]) for owner, weight in weights])

    def wait(self) -> None:
        self.desk.waited[self.number] += 1


def divided(
    count: int, dtype: torch.dtype, config, prepare: Callable[[MasterOptimizer], None] = lambda _: None
) -> tuple[list[nn.Module], list[MasterOptimizer], Desk]:
    nets = [net_of(dtype) for _ in range(count)]
    optimizers = [MasterOptimizer(net, config, Seat(number, count)) for number, net in enumerate(nets)]
    desk = Desk(nets)
    for number, optimizer in enumerate(optimizers):
        prepare(optimizer)
        optimizer.rehearse()
        optimizer.share_all(desk.seat(number))
    desk.deliver()
    return nets, optimizers, desk


def step_all(nets, optimizers, desk: Desk | None, seed: int, scale: float = 3.0) -> list[Tensor]:
    norms = []
    for net, optimizer in zip(nets, optimizers, strict=True):
        for part in range(1 + seed % 2):
            if seed % 2 == 0:
                optimizer.keep_gradients()
            push(net, gradients_for(net, 10 * seed + part, scale))
        norms.append(optimizer.step(0.7))
        optimizer.await_weights()
    if desk is not None:
        desk.deliver()
    return norms


def assert_alike(net: nn.Module, optimizer: MasterOptimizer, nets, optimizers) -> None:
    expected = snapshot(optimizer)
    found = merged_state(optimizers)
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    for other in nets:
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), net.parameters(), strict=True))


@pytest.mark.parametrize("choice", ["adamw", "adamw_bf16", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 12])
def test_divided_steps_are_those_of_one(choice, dtype, count):
    config = dataclasses.replace(CONFIG, optimizer=choice, weight_decay=0.1, clip=1.0, norm_lr=0.02)
    net = net_of(dtype)
    whole = MasterOptimizer(net, config)
    nets, optimizers, desk = divided(count, dtype, config)
    for seed in range(5):
        scale = float("nan") if seed == 3 else 3.0
        (norm,) = step_all([net], [whole], None, seed, scale)
        norms = step_all(nets, optimizers, desk, seed, scale)
        assert all(torch.equal(one, norm) or seed == 3 for one in norms)
        assert_alike(net, whole, nets, optimizers)
    assert [int(one.skipped) for one in optimizers] == [1] * count
    held = [sum(value.numel() for value in one.state_tensors().values()) for one in optimizers]
    assert sum(held) == sum(value.numel() for value in whole.state_tensors().values())
    # Whole weights: one of twelve drafters has just the largest, and two have none.
    assert max(held) <= sum(held) / count + 3 * 72 + 1
    assert (0 in held) == (count == 12)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_a_whole_state_is_loaded_by_any_number_of_drafters(before, after):
    config = dataclasses.replace(CONFIG, weight_decay=0.1)

    def make(count: int) -> tuple[list[nn.Module], list[MasterOptimizer], Desk | None]:
        if count > 1:
            return divided(count, torch.bfloat16, config)
        net = net_of(torch.bfloat16)
        return [net], [MasterOptimizer(net, config)], None

    old, new = make(before), make(after)
    for seed in range(3):
        step_all(*old, seed)
    saved = {name: value.clone() for name, value in merged_state(old[1]).items()}
    for optimizer in new[1]:
        optimizer.load_state_tensors(saved)
    for net in new[0]:
        for name, weight in net.named_parameters():
            assert torch.equal(weight, saved[f"master.{name}"].bfloat16()), name
    for seed in range(3, 6):
        step_all(*old, seed)
        step_all(*new, seed)
    expected = merged_state(old[1])
    for name, value in merged_state(new[1]).items():
        assert torch.equal(value, expected[name]), name
    for net in new[0]:
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), old[0][0].parameters(), strict=True))


def test_a_share_alone_is_no_whole_state():
    _, (first, _), _ = divided(2, torch.bfloat16, CONFIG)
    with pytest.raises(ConfigError, match="the checkpoint's weights are not this drafter's"):
        first.load_state_tensors(first.state_tensors())
