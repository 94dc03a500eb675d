"""What the memory watch makes of an allocator's numbers."""

import pytest
import torch

from blockdraft.runtime.memory import MemoryWatch

GPU = torch.device("cuda", 0)
GIB = 2**30


class Allocator:
    """Stands for torch.cuda's statistics."""

    def __init__(self):
        self.peak, self.reserved, self.retries, self.resets = 3 * GIB, 5 * GIB, 2, 0

    def reset(self, _device):
        self.resets += 1
        self.peak = 2 * GIB


@pytest.fixture
def allocator(monkeypatch):
    found = Allocator()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: found.peak)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: found.reserved)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _device: {"num_alloc_retries": found.retries})
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _device: GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", found.reset)
    return found


def test_equal_windows_and_constant_reserved_memory_are_flat(allocator):
    watch = MemoryWatch([GPU, torch.device("cpu"), GPU])
    watch.expect(GPU, GIB)
    watch.expect(GPU, GIB // 2)
    watch.begin()
    for _ in range(120):
        watch.step()
    found = watch.found()[GPU]
    assert found == (5 * GIB // 2, (2 * GIB, 2 * GIB), (5 * GIB,), 0)
    assert found.is_flat
    assert watch.describe() == [
        "memory of cuda:0: flat; peak 2.000 GiB (at most 2.500 expected) per 50 steps, reserved 5.000 "
        "GiB from step 20 on, 0 allocator retries"
    ]


def test_growth_before_step_20_is_no_growth_and_after_it_is(allocator):
    watch = MemoryWatch([GPU])
    watch.begin()
    for step in range(1, 61):
        if step in (10, 30):
            allocator.reserved += 2**21
        watch.step()
    found = watch.found()[GPU]
    assert found.reserved == (5 * GIB + 2**21, 5 * GIB + 2**22)
    assert not found.is_flat
    assert "NOT flat" in watch.describe()[0]


def test_a_retry_of_the_allocator_is_not_flat(allocator):
    watch = MemoryWatch([GPU])
    watch.begin()
    allocator.retries += 1
    for _ in range(50):
        watch.step()
    assert watch.found()[GPU].retries == 1
    assert not watch.found()[GPU].is_flat


def test_a_short_run_says_that_nothing_settled(allocator):
    watch = MemoryWatch([GPU])
    watch.begin()
    watch.step()
    assert "reserved not measured: fewer than 20 steps" in watch.describe()[0]


def test_without_a_gpu_there_is_nothing_to_say():
    watch = MemoryWatch([torch.device("cpu")])
    watch.begin()
    watch.step()
    assert watch.describe() == []
