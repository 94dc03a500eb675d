"""Who ends a sum that others wait in: a dying drafter on a CPU, control on GPUs."""

import threading
from types import SimpleNamespace

import pytest
import torch

from blockdraft.runtime.distributed import GradientSum
from blockdraft.runtime.pipeline import Pipeline


class Group:
    """An abort that ends only when every group of the process is being aborted, as NCCL's may."""

    def __init__(self, gate: threading.Barrier) -> None:
        self.gate = gate
        self.is_aborted = False
        self.num_aborts = 0

    def abort(self) -> None:
        self.gate.wait(20)
        self.is_aborted = True
        self.num_aborts += 1


def summing(device: str, group: object, near: object = None) -> GradientSum:
    found = GradientSum.__new__(GradientSum)
    found.device, found.group, found.near = torch.device(device), group, near
    found._running = []
    return found


def pipeline_of(device: str, groups: list[object], first_error: str | None = None) -> Pipeline:
    found = Pipeline.__new__(Pipeline)
    drafter = SimpleNamespace(device=torch.device(device))
    found.steps = [SimpleNamespace(drafter=drafter, sum_gradients=summing(device, group)) for group in groups]
    found.crew = SimpleNamespace(first_error=first_error)
    return found


def test_control_aborts_all_groups_at_once_and_waits_for_it():
    gate = threading.Barrier(3)
    groups = [Group(gate) for _ in range(3)]
    pipeline_of("cuda:0", groups).abort_sums()
    assert [group.is_aborted for group in groups] == [True] * 3
    assert not any(thread.name == "abort" for thread in threading.enumerate())


def test_the_group_of_a_node_is_aborted_too_and_once_where_it_is_that_of_all():
    gate, alone = threading.Barrier(2), Group(threading.Barrier(1))
    both = [Group(gate), Group(gate)]
    pipeline = pipeline_of("cuda:0", [None, None])
    pipeline.steps[0].sum_gradients = summing("cuda:0", *both)
    pipeline.steps[1].sum_gradients = summing("cuda:1", alone, alone)
    pipeline.abort_sums()
    assert [group.is_aborted for group in (*both, alone)] == [True] * 3
    assert alone.num_aborts == 1


def test_on_a_cpu_there_is_nothing_to_abort():
    groups = [Group(threading.Barrier(1))]
    pipeline_of("cpu", groups).abort_sums()
    assert not groups[0].is_aborted


@pytest.mark.parametrize(
    ("device", "first_error", "is_left"),
    [("cpu", None, True), ("cpu", "gone", True), ("cuda:0", None, True), ("cuda:0", "gone", False)],
)
def test_a_drafter_leaves_its_group_unless_a_sum_may_be_on_its_way_on_a_gpu(device, first_error, is_left):
    pipeline = pipeline_of(device, ["group"], first_error)
    total = pipeline.steps[0].sum_gradients
    pipeline._leave(0)()
    assert (total.group is None) is is_left
    assert (pipeline.steps[0].sum_gradients is None) is is_left
