"""Gradient sums by copies between devices: between threads on a CPU, and the order in which GPUs would work."""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peer_streams import AtOnce, streams_between
from peer_sums import ALIGNMENT, PeerGroup, PeerSum, cut_shares, largest_bucket
from torch import nn

from blockdraft.config import ConfigError
from blockdraft.runtime.channel import Stopped
from blockdraft.runtime.distributed import GradientSum, NodeLost, c10d
from blockdraft.training.buckets import GradientBuckets
from unit.runtime.test_distributed import run_threads

DEVICE = torch.device("cpu")
BUCKETS = (
    ((7, 3), (5,), (1, 2, 2)),
    ((),),
    ((1,), (1,), (1,)),
    ((129, 65),),
    ((64, 64), (0, 3), (1,), (63,), (1000, 3)),
)


def nothing():
    pass


def draws(drafter, round_number, shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * drafter + round_number)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def group_of(size, most_bytes=8 * 129 * 65, check=nothing):
    return PeerGroup([DEVICE] * size, most_bytes, check)


def added(size, round_number, shapes, dtype):
    """In float32, in the order of drafters, rounded once."""
    every = [draws(drafter, round_number, shapes, dtype) for drafter in range(size)]
    totals = [tensor.float() for tensor in every[0]]
    for tensors in every[1:]:
        totals = [total + tensor.float() for total, tensor in zip(totals, tensors, strict=True)]
    return [total.to(dtype) for total in totals]


@given(st.lists(st.integers(0, 700), max_size=9), st.integers(2, 8))
def test_shares_cover_every_element_once_are_even_and_cut_at_multiples(sizes, num_shares):
    shares = cut_shares(sizes, num_shares)
    assert len(shares) == num_shares
    seen = [torch.zeros(size, dtype=torch.int) for size in sizes]
    for share in shares:
        for tensor, start, stop in share:
            seen[tensor][start:stop] += 1
            assert start % ALIGNMENT == 0
            assert stop % ALIGNMENT == 0 or stop == sizes[tensor]
        held = sum(stop - start for _, start, stop in share)
        assert held < -(-sum(sizes) // num_shares) + ALIGNMENT
    assert all(bool((one == 1).all()) for one in seen)
    # In the order of the bucket, so that a share is contiguous.
    assert [piece for share in shares for piece in share] == sorted(piece for share in shares for piece in share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_thread_gets_the_sum_rounded_once(size, dtype):
    rounds, found = 4, {}
    group = group_of(size)

    def body(drafter):
        total = PeerSum(group, drafter)
        for number in range(rounds):
            buckets = [draws(drafter, 10 * number + index, shapes, dtype) for index, shapes in enumerate(BUCKETS)]
            for bucket in buckets:
                total.start(bucket)
            for _ in buckets:
                total.wait()
            found[drafter, number] = buckets
        total.drop()

    assert run_threads(size, body) == [None] * size
    for number in range(rounds):
        for index, shapes in enumerate(BUCKETS):
            expected = added(size, 10 * number + index, shapes, dtype)
            for drafter in range(size):
                for mine, its in zip(found[drafter, number][index], expected, strict=True):
                    assert torch.equal(mine, its)
    assert (group._deposits, group._queued) == ({}, {})


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_equal_those_of_a_process_group(size):
    store, found, group = c10d.HashStore(), {}, group_of(size)

    def body(drafter):
        for name, total in (
            ("group", GradientSum(store, drafter, size, DEVICE, 20.0)), ("peers", PeerSum(group, drafter)),
        ):  # fmt: skip
            buckets = [draws(drafter, index, shapes) for index, shapes in enumerate(BUCKETS)]
            # gloo refuses what has no element.
            buckets = [[tensor for tensor in bucket if tensor.numel()] for bucket in buckets]
            for bucket in buckets:
                total.start(bucket)
            for _ in buckets:
                total.wait()
            found[name, drafter] = [tensor for bucket in buckets for tensor in bucket]

    assert run_threads(size, body) == [None] * size
    for drafter in range(size):
        torch.testing.assert_close(found["peers", drafter], found["group", drafter], rtol=1e-6, atol=1e-6)
        assert all(map(torch.equal, found["peers", drafter], found["peers", 0]))


def test_a_module_s_gradients_are_summed_beside_its_backward():
    size, found = 3, {}

    def net_of(drafter):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
        return net, torch.randn(3, 5, generator=torch.Generator().manual_seed(drafter))

    # Here and not in the threads: they share one generator, and would draw from each other's numbers.
    nets = [net_of(drafter) for drafter in range(size)]
    weights = dict(nets[0][0].named_parameters())
    group = group_of(size, largest_bucket([[name] for name in weights], weights, 4))

    def body(drafter):
        net, x_RD = nets[drafter]
        weights = dict(net.named_parameters())
        buckets = GradientBuckets(weights, lambda name: weights[name].grad)
        buckets.layout = [[name] for name in reversed(weights)]
        buckets._bucket_of = {name: index for index, (name,) in enumerate(buckets.layout)}
        total = PeerSum(group, drafter)
        for _ in range(3):
            net.zero_grad()
            buckets.begin(total)
            net(x_RD).square().sum().backward()
            counts = torch.tensor([1.0, drafter])
            buckets.finish(counts)
        found[drafter] = [weight.grad for weight in weights.values()], counts

    assert run_threads(size, body) == [None] * size
    expected = [0.0 * weight for weight in weights.values()]
    for drafter in range(size):
        net, x_RD = net_of(drafter)
        net(x_RD).square().sum().backward()
        expected = [total + weight.grad for total, weight in zip(expected, net.parameters(), strict=True)]
    for gradients, counts in found.values():
        torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)
        assert counts.tolist() == [3.0, 3.0]


def test_a_start_never_waits_and_a_wait_waits_for_the_last_to_start():
    group = group_of(2)
    one, two = PeerSum(group, 0), PeerSum(group, 1)
    mine, its = [torch.ones(3)], [torch.ones(3)]
    one.start(mine)
    waiting = threading.Thread(target=one.wait, daemon=True)
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    assert mine[0].tolist() == [1.0, 1.0, 1.0]
    two.start(its)
    waiting.join(5)
    assert not waiting.is_alive()
    two.wait()
    assert mine[0].tolist() == its[0].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("how", ["check", "drop", "abort"])
def test_a_drafter_that_dies_before_it_starts_ends_the_waits_of_the_others(how):
    is_over = threading.Event()

    def check():
        if is_over.is_set():
            raise Stopped

    size, arrived = 3, threading.Barrier(3)
    group = group_of(size, check=check)

    def body(drafter):
        total = PeerSum(group, drafter)
        total.start([torch.ones(3)])
        total.wait()
        arrived.wait(10)
        if drafter == 1:
            time.sleep(0.1)
            is_over.set() if how == "check" else getattr(total, how)()
            raise ArithmeticError
        total.start([torch.ones(3)])
        total.wait()

    errors = run_threads(size, body)
    expected = Stopped if how == "check" else NodeLost
    assert [type(error) for error in errors] == [expected, ArithmeticError, expected]
    if how != "check":
        assert "over 3 drafters failed at drafter 2: another one ended" in str(errors[2])
        with pytest.raises(NodeLost):
            PeerSum(group, 0).start([torch.ones(3)])


def test_a_sum_that_is_queued_outlives_whoever_leaves():
    group = group_of(2)
    one, two = PeerSum(group, 0), PeerSum(group, 1)
    mine = [torch.ones(3)]
    one.start(mine)
    two.start([torch.ones(3)])
    two.drop()
    one.wait()
    assert mine[0].tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        ([torch.ones(4)], "different tensors"),
        ([torch.ones(3).bfloat16()], "different tensors"),
        ([torch.ones(3), torch.ones(1)], "different tensors"),
    ],
)
def test_drafters_that_sum_different_buckets_are_refused(bucket, message):
    group = group_of(2)
    group.deposit(0, 0, [torch.ones(3)])
    with pytest.raises(AssertionError, match=message):
        group.deposit(1, 0, bucket)


def test_a_bucket_that_is_larger_than_said_is_refused_and_the_largest_fits():
    for elements in (4096, 4097, 5000 * 3):
        group = group_of(3, most_bytes=4 * elements)
        for drafter in range(3):
            group.deposit(drafter, 0, [torch.ones(elements)])
        for drafter in range(2):
            group.deposit(drafter, 1, [torch.ones(2 * elements)])
        with pytest.raises(AssertionError, match="larger than said"):
            group.deposit(2, 1, [torch.ones(2 * elements)])


def test_tensors_whose_elements_are_not_one_behind_the_other_are_refused():
    group = group_of(2)
    group.deposit(0, 0, [torch.ones(3, 4).t()])
    with pytest.raises(RuntimeError, match="view"):
        group.deposit(1, 0, [torch.ones(3, 4).t()])


def test_devices_that_cannot_copy_from_each_other_are_refused(monkeypatch):
    assert isinstance(streams_between([DEVICE, DEVICE], 2), AtOnce)
    for names in (("cpu", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda", "cuda"), ("meta", "meta")):
        with pytest.raises(ConfigError, match=f"a GPU for each drafter .* found {names[0]} {names[1]}"):
            streams_between([torch.device(name) for name in names], 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one.index < other.index)
    with pytest.raises(ConfigError, match="cuda:1 does not reach cuda:0's"):
        streams_between([torch.device("cuda:0"), torch.device("cuda:1")], 2)
