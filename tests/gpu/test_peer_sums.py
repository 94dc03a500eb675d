"""Gradient sums by copies between GPUs that reach each other's memory: right, and without a wait on the host."""

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from peer_sums import PeerGroup, PeerSum
from torch import Tensor

from blockdraft.runtime.meeting import Meeting

BUCKETS = (((1024, 4096), (4096,), (128,)), ((3, 1111), (1,), (63,)), ((1,),), ((2048, 4096), (4096,)), ((3, 4097),))
MOST_ELEMENTS = 2049 * 4096
SLEEP_CYCLES = 100_000_000


class Crew:
    """A thread for each GPU, each with a stream of its own as a run's workers have; the first error ends all."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.devices = [torch.device("cuda", index) for index in range(size)]
        self.dtype = dtype
        self.errors: list[BaseException] = []
        self.meeting = Meeting(size, self._check)
        self.group = PeerGroup(self.devices, MOST_ELEMENTS * dtype.itemsize, self._check)

    def _check(self) -> None:
        if self.errors:
            raise RuntimeError("another drafter ended")

    def run(self, body: Callable[[int, PeerSum], None]) -> None:
        def work(number: int) -> None:
            try:
                device = self.devices[number]
                torch.cuda.set_device(device)
                torch.cuda.set_stream(torch.cuda.Stream(device))
                total = PeerSum(self.group, number, self.meeting.meet)
                body(number, total)
                torch.cuda.synchronize(device)
                total.meet()
                total.drop()
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(self.devices))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        if self.errors:
            raise self.errors[0]
        assert not any(thread.is_alive() for thread in threads)

    def zeros(self, number: int) -> list[list[Tensor]]:
        """What one drafter sums."""
        device, dtype = self.devices[number], self.dtype
        return [[torch.zeros(shape, device=device, dtype=dtype) for shape in shapes] for shapes in BUCKETS]

    def drawn(self, number: int, turn: int) -> list[list[Tensor]]:
        """A drafter's gradients of a turn, the same each time."""
        generator = torch.Generator().manual_seed(1000 * number + turn)
        return [[torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes] for shapes in BUCKETS]

    def expected(self, turn: int) -> list[list[Tensor]]:
        """Added in float32 in the order of drafters, rounded once; on a CPU."""
        every = [self.drawn(number, turn) for number in range(len(self.devices))]
        found = []
        for bucket in zip(*every, strict=True):
            totals = [tensor.float() for tensor in bucket[0]]
            for other in bucket[1:]:
                totals = [total + tensor.float() for total, tensor in zip(totals, other, strict=True)]
            found.append([total.to(self.dtype) for total in totals])
        return found


def sum_all(total: PeerSum, buckets: list[list[Tensor]]) -> None:
    for bucket in buckets:
        total.start(bucket)
    for _ in buckets:
        total.wait()


def crew_of(size: int, dtype: torch.dtype = torch.bfloat16) -> Crew:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    return Crew(size, dtype)


pytestmark = [
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(180),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_gpu_has_the_sum_although_gradients_are_late_and_memory_is_used_again(
    size: int, dtype: torch.dtype
) -> None:
    crew, turns = crew_of(size, dtype), 6
    found: list[list[list[list[Tensor]]]] = [[] for _ in range(size)]

    def body(number: int, total: PeerSum) -> None:
        drawn = [crew.drawn(number, turn) for turn in range(turns)]
        sources = [[[tensor.to(crew.devices[number]) for tensor in bucket] for bucket in turn] for turn in drawn]
        kept = [crew.zeros(number) for _ in range(turns)]
        buckets = crew.zeros(number)
        total.meet()
        for turn in range(turns):
            for index, bucket in enumerate(buckets):
                if (number + turn + index) % 3 == 0:
                    # This GPU is behind the others.
                    torch.cuda._sleep(SLEEP_CYCLES // 10)
                torch._foreach_copy_(bucket, sources[turn][index])
                total.start(bucket)
            for index, bucket in enumerate(buckets):
                total.wait()
                torch._foreach_copy_(kept[turn][index], bucket)
                # Nobody may still read or write it.
                torch._foreach_zero_(bucket)
        found[number] = kept

    crew.run(body)
    for turn in range(turns):
        for index, expected in enumerate(crew.expected(turn)):
            for number in range(size):
                for mine, its in zip(found[number][turn][index], expected, strict=True):
                    assert torch.equal(mine.cpu(), its), (turn, index, number)


def test_no_call_waits_for_a_gpu() -> None:
    crew = crew_of(2)
    is_asleep: list[bool] = []

    def body(number: int, total: PeerSum) -> None:
        buckets = crew.zeros(number)
        sum_all(total, buckets)
        torch.cuda.synchronize()
        total.meet()
        if number == 0:
            # Of the whole process.
            torch.cuda.set_sync_debug_mode("error")
        total.meet()
        slept = torch.cuda.Event()
        torch.cuda._sleep(10 * SLEEP_CYCLES)
        slept.record()
        sum_all(total, buckets)
        is_asleep.append(not slept.query())
        total.meet()
        torch.cuda.set_sync_debug_mode("default")

    try:
        crew.run(body)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert is_asleep == [True, True], "a call came back only when its GPU had slept"


def test_memory_and_its_allocations_stand_still_over_50_rounds() -> None:
    crew = crew_of(2)
    found: list[list[tuple[int, int]]] = [[] for _ in range(2)]

    def body(number: int, total: PeerSum) -> None:
        buckets = crew.zeros(number)
        for turn in range(53):
            total.meet()
            sum_all(total, buckets)
            if turn in (2, 52):
                total.meet()
                stats = torch.cuda.memory_stats(crew.devices[number])
                found[number].append((stats["allocation.all.allocated"], stats["reserved_bytes.all.current"]))
                total.meet()

    crew.run(body)
    for early, late in found:
        assert early == late
    assert (crew.group._deposits, crew.group._queued) == ({}, {})


def test_copies_take_copy_engines_and_the_only_kernel_is_the_addition() -> None:
    crew = crew_of(2)
    buckets = [crew.zeros(number) for number in range(2)]

    def body(number: int, total: PeerSum) -> None:
        sum_all(total, buckets[number])

    crew.run(body)
    crew = crew_of(2)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        crew.run(body)
    names = Counter(event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    sys.stdout.write(f"\nwhat two GPUs did: {dict(names)}\n")
    copies = sum(count for name, count in names.items() if "Memcpy" in name)
    assert copies > 0
    assert all("PtoP" in name for name in names if "Memcpy" in name)
    # Of a single piece, and of several at once.
    kinds = ("CUDAFunctor_add", "multi_tensor_apply")
    kernels = [name for name in names if "Memcpy" not in name]
    assert all(any(kind in name for kind in kinds) for name in kernels), kernels


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_speed_is_printed(size: int) -> None:
    crew, lines, took = crew_of(size), [""] * size, [0.0] * size
    shape, num_buckets = (4096, 4096), 64
    crew.group = PeerGroup(crew.devices, shape[0] * shape[1] * crew.dtype.itemsize, crew._check)

    def body(number: int, total: PeerSum) -> None:
        own = [[torch.zeros(shape, device=crew.devices[number], dtype=crew.dtype)] for _ in range(num_buckets)]
        sum_all(total, own)
        torch.cuda.synchronize()
        total.meet()
        began = time.perf_counter()
        sum_all(total, own)
        host = time.perf_counter() - began
        torch.cuda.synchronize()
        took[number] = time.perf_counter() - began
        lines[number] = f"GPU {number} of {size}: host {host * 1e3:.2f} ms, sums {took[number] * 1e3:.2f} ms"

    crew.run(body)
    gigabytes = num_buckets * shape[0] * shape[1] * crew.dtype.itemsize / 1e9
    lines.append(f"{size} GPUs: {gigabytes:.2f} GB of gradients, {gigabytes / max(took):.0f} GB/s")
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
