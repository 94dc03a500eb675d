"""Gradient sums between threads, each with a process group of its own."""

import threading

import pytest
import torch

from blockdraft.config import ConfigError
from blockdraft.runtime.devices import check_devices
from blockdraft.runtime.distributed import GradientSum, NodeLost, c10d, is_several_nodes, join_world

DEVICE = torch.device("cpu")


def run_threads(size: int, body) -> list[BaseException | None]:
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            body(rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def draws(rank: int, round_number: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank * 100 + round_number)
    return [torch.randn(shape, generator=generator) for shape in ((7, 3), (5,), (1, 2, 2))]


def test_every_thread_gets_the_same_sum():
    size, rounds = 4, 20
    store, found = c10d.HashStore(), {}

    def body(rank: int) -> None:
        total = GradientSum(store, rank, size, DEVICE, 20.0)
        for number in range(rounds):
            gradients = draws(rank, number)
            # Both run at once; sums end in the order in which they were started.
            total.start(gradients[:2])
            total.start(gradients[2:])
            total.wait()
            total.wait()
            found[rank, number] = gradients
        total.drop()

    assert run_threads(size, body) == [None] * size
    for number in range(rounds):
        expected = [sum(parts) for parts in zip(*(draws(rank, number) for rank in range(size)), strict=True)]
        for rank in range(size):
            for part, value in zip(found[rank, number], expected, strict=True):
                torch.testing.assert_close(part, value)
        for rank in range(1, size):
            for mine, first in zip(found[rank, number], found[0, number], strict=True):
                assert torch.equal(mine, first), "replicas part"


def test_weights_go_from_their_owner_to_the_drafters_of_its_node():
    # Two nodes of two: the first of each owns some weights, the second the others.
    store, found = c10d.HashStore(), {}
    kinds = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)
    owners = (0, 1, 1, 0)

    def body(rank: int) -> None:
        total = GradientSum(store, rank, 4, DEVICE, 20.0, near=2)
        for number in range(5):
            weights = [torch.full((3, 5), 10.0 * number + rank, dtype=kind) for kind in kinds]
            gradients = draws(rank, number)
            total.start(gradients)
            total.wait()
            total.hand_out(list(zip(owners[:2], weights[:2], strict=True)))
            total.hand_out(list(zip(owners[2:], weights[2:], strict=True)))
            total.wait()
            total.wait()
            found[rank, number] = [float(weight.float().mean()) for weight in weights]
        total.drop()

    assert run_threads(4, body) == [None] * 4
    for rank in range(4):
        first = rank // 2 * 2
        assert found[rank, 3] == [30.0 + first + owner for owner in owners]


def test_an_owner_that_leaves_ends_the_others_wait_for_its_weights():
    store, left, held = c10d.HashStore(), threading.Event(), []

    def body(rank: int) -> None:
        total = GradientSum(store, rank, 2, DEVICE, 90.0, near=2)
        # As a drafter's optimizer does, also of one that has left.
        held.append(total)
        weights = [(0, torch.zeros(4)), (1, torch.zeros(4))]
        total.hand_out(weights)
        total.wait()
        if rank == 1:
            total.drop()
            left.set()
            return
        left.wait(10)
        total.hand_out(weights)
        total.wait()

    errors = run_threads(2, body)
    assert errors[1] is None
    assert isinstance(errors[0], NodeLost)
    assert "the exchange of weights over 2 drafters failed at drafter 0" in str(errors[0])


def test_sums_have_a_stream_of_their_own_unless_told_otherwise():
    # NCCL would put them on the backward's own stream, and nothing would overlap.
    assert c10d.AllreduceCoalescedOptions().asyncOp
    assert c10d.BroadcastOptions().asyncOp


def test_a_group_that_is_left_ends_the_others_wait():
    store, left, held = c10d.HashStore(), threading.Event(), []

    def body(rank: int) -> None:
        total = GradientSum(store, rank, 2, DEVICE, 90.0)
        held.append(total)
        total.start(draws(rank, 0))
        total.wait()
        if rank == 1:
            total.drop()
            left.set()
            return
        left.wait(10)
        total.start(draws(rank, 1))
        total.wait()

    errors = run_threads(2, body)
    assert errors[1] is None
    assert isinstance(errors[0], RuntimeError)


def test_alone_in_the_world_without_torchrun(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = join_world()
    assert (world.node, world.num_nodes) == (0, 1)
    assert not is_several_nodes()
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert is_several_nodes()


def test_devices_are_parsed_or_refused():
    assert check_devices(("cpu", "cpu"), "targets") == [DEVICE, DEVICE]
    with pytest.raises(ConfigError, match=r"runtime\.targets: expected cpu or cuda:N, got 'tpu'"):
        check_devices(("tpu",), "targets")
    with pytest.raises(ConfigError, match=r"runtime\.drafters: cuda:99 is not here"):
        check_devices(("cuda:99",), "drafters")
    with pytest.raises(ConfigError, match=r"runtime\.drafters: meta is not here"):
        check_devices(("meta",), "drafters")
    with pytest.raises(ConfigError, match=r"runtime\.targets is empty"):
        check_devices((), "targets")


def test_several_processes_on_a_node_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="expected torchrun --nproc-per-node 1, found 2"):
        join_world()
