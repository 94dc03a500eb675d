"""Buckets of gradients: in the backward's order, the same on every replica, started while the backward runs."""

import pytest
import torch
from torch import nn

from blockdraft.training import buckets
from blockdraft.training.buckets import BUCKET_BYTES, GradientBuckets, cut


class Recorded:
    """A sum that notes what it is given; `log` is shared with the module's backward."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.sums = log, []

    def meet(self) -> None:
        self.log.append("meet")

    def start(self, bucket) -> None:
        self.sums.append(bucket)
        self.log.append(f"start {len(self.sums) - 1}")

    def wait(self) -> None:
        self.log.append("wait")

    def drop(self) -> None:
        pass


class Stack(nn.Module):
    """Three layers one after the other, and a weight that only some forwards use."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.idle = nn.Parameter(torch.ones(4))
        self.log = log

    def forward(self, x_N4: torch.Tensor, is_whole: bool = True) -> torch.Tensor:
        for name in ("first", "second", "third"):
            x_N4 = getattr(self, name)(x_N4)
            x_N4.register_hook(lambda _grad, name=name: self.log.append(f"backward {name}"))
        return (x_N4 * self.idle).sum() if is_whole else x_N4.sum()


@pytest.fixture
def one_each(monkeypatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)


def build(log: list[str]) -> tuple[Stack, GradientBuckets]:
    stack = Stack(log)
    weights = dict(stack.named_parameters())
    # Declared first, used last.
    weights = {name: weights[name] for name in ("first.weight", "second.weight", "third.weight", "idle")}

    def gradient(name: str) -> torch.Tensor:
        found = weights[name].grad
        return torch.zeros_like(weights[name]) if found is None else found

    landed, all_but = (lambda names, what=what: log.append(f"{what} {names}") for what in ("landed", "all but"))
    return stack, GradientBuckets(weights, gradient, landed, all_but)


def test_a_bucket_is_started_when_its_gradients_are_made(one_each):
    log: list[str] = []
    stack, found = build(log)
    total = Recorded(log)
    stack(torch.ones(2, 4)).backward()
    assert not any(entry.startswith("start") for entry in log), "an earlier micro-batch's gradients are not final"
    log.clear()
    found.begin(total)
    stack(torch.ones(2, 4)).backward()
    assert log.index("start 1") < log.index("backward second") < log.index("start 2") < log.index("backward first")
    assert log[-1] == "start 3"
    counts = torch.ones(3)
    found.finish(counts)
    assert log[-11:] == [
        *("start 4", "wait", "landed ['idle']", "wait", "landed ['third.weight']", "wait", "landed ['second.weight']"),
        *("all but ['first.weight']", "wait", "landed ['first.weight']", "wait"),
    ]
    assert total.sums[-1][0] is counts
    assert total.sums[3][0] is stack.first.weight.grad


def test_every_replica_starts_the_same_buckets_whatever_its_backward_makes(one_each):
    # A weight without a gradient holds back the buckets behind it until the end.
    logs: list[list[str]] = [[], []]
    shapes = []
    for log, is_whole in zip(logs, (True, False), strict=True):
        stack, found = build(log)
        total = Recorded(log)
        found.begin(total)
        stack(torch.ones(2, 4), is_whole).backward()
        started = [entry for entry in log if entry.startswith("start")]
        assert len(started) == (4 if is_whole else 0)
        found.finish(torch.ones(3))
        shapes.append([[value.shape for value in bucket] for bucket in total.sums])
    assert shapes[0] == shapes[1]


def test_every_step_starts_all_buckets_anew(one_each):
    log: list[str] = []
    stack, found = build(log)
    steps = []
    for _ in range(3):
        log.clear()
        total = Recorded(log)
        found.begin(total)
        stack(torch.ones(2, 4)).backward()
        found.finish(torch.ones(3))
        steps.append(list(log))
        assert [len(bucket) for bucket in total.sums] == [1] * 5
    assert steps[0] == steps[1] == steps[2]


def test_a_step_whose_sum_is_not_begun_is_a_bug():
    _, found = build([])
    with pytest.raises(AssertionError, match="not begun"):
        found.finish(torch.ones(3))


def test_buckets_hold_every_gradient_in_order():
    def shapes(*sizes: int) -> dict[str, nn.Parameter]:
        return {str(i): nn.Parameter(torch.empty(size, device="meta")) for i, size in enumerate(sizes)}

    half = BUCKET_BYTES // 8
    for sizes, expected in (
        ((10,) * 5, [5]),
        ((half,) * 5, [2, 2, 1]),
        ((3 * half, *(10,) * 5), [1, 5]),
        # What is not half full waits for the next one, however large.
        ((10, 3 * half, 10), [2, 1]),
        ((half // 2, half // 2, half + 1), [3]),
        ((half // 2, half // 2 + 1, half + 1), [2, 1]),
        ((), []),
    ):
        weights = shapes(*sizes)
        found = list(cut(list(weights), weights))
        assert [len(bucket) for bucket in found] == expected
        assert [name for bucket in found for name in bucket] == list(weights)
