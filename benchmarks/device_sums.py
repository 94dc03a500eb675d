"""What gradient sums cost a step: two drafters in two threads, their features at hand, no target.

Sums by a process group (NCCL; on CPUs gloo), or by copies between the drafters' devices (benchmarks/peer_sums.py).
"""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import torch
from peer_sums import NUM_LANES, PeerGroup, PeerSum, largest_bucket

from blockdraft.data.loader import Fill
from blockdraft.runtime.distributed import GradientSum, join_world
from blockdraft.runtime.meeting import Meeting
from blockdraft.runtime.transfers import to_device
from blockdraft.training.buckets import GradientBuckets, SumGradients
from blockdraft.training.step import DrafterStep

WARM, TIMED = 2, 5
WAYS = ("without", "met", "beside", "after", "alone")


class Sums(NamedTuple):
    """What carries the sums."""

    by: Literal["nccl", "peer"] = "nccl"
    most_ctas: int | None = None
    """Multiprocessors that NCCL may take; None leaves it to NCCL."""
    lanes: int = NUM_LANES
    """Buckets that copies have on their way at a time."""

    def __str__(self) -> str:
        if self.by == "peer":
            return f"copies in {self.lanes} lanes"
        return f"NCCL's CTAs {self.most_ctas or 'its own choice'}"


class Stopwatch:
    """Milliseconds on the device of this thread, or on the wall where that is a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"

    def measure(self, work: Callable[[], None], times: int) -> float:
        """Mean over so many calls, without waiting between them."""
        if not self.is_gpu:
            started = time.perf_counter()
            for _ in range(times):
                work()
            return (time.perf_counter() - started) * 1e3 / times
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        began.record()
        for _ in range(times):
            work()
        ended.record()
        torch.cuda.synchronize(self.device)
        return began.elapsed_time(ended) / times


class Replica:
    """One drafter with a fill of its own, in a thread of its own."""

    def __init__(self, step: DrafterStep, fill: Fill, width: int, micro_batches: int) -> None:
        one = fill.passes[0]
        self.step, self.micro_batches = step, micro_batches
        self.device = step.drafter.device
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (*one.input_ids_RT.shape, width)
        self.features_RTC = torch.randn(shape, generator=generator, device=self.device).to(step.drafter.dtype)
        self.blocks = to_device(one, self.device)
        self.denominator = one.denominator
        self.total: SumGradients | None = None
        self.one_number = torch.zeros(128, device=self.device)
        # The class's: another replica of this step may have left it silent.
        self.announce = partial(GradientBuckets.announce, step.buckets)
        self.waits: list[tuple[float | torch.cuda.Event, float | torch.cuda.Event]] = []
        self.waited_ms = 0.0
        step.timed = self._timed

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = self._mark()
        yield
        if what == "sum of gradients":
            self.waits.append((began, self._mark()))

    def _mark(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mean_wait(self) -> float:
        """Milliseconds of a step between its backward and its update; the device is idle."""
        found = [
            began.elapsed_time(ended) if isinstance(began, torch.cuda.Event) else (ended - began) * 1e3  # type: ignore
            for began, ended in self.waits
        ]
        return sum(found) / max(1, len(found))

    def run(self, way: str) -> None:
        """One step: `without` sums, `met`, or with sums `beside` the backward, or `after` it.

        `met`: one number is summed behind the backward. GPUs are never equally fast, so this is what a step takes
        whose replicas wait for each other but exchange nothing; sums are compared with it.
        """
        step = self.step
        step.sum_gradients = self.total if way in ("beside", "after") else None
        step.buckets.announce = self.announce if way == "beside" else _say_nothing  # type: ignore[method-assign]
        for number in range(self.micro_batches):
            if number == self.micro_batches - 1:
                step.begin_sum()
            step.micro_batch(self.features_RTC, self.blocks, self.denominator)
        if way == "met":
            assert self.total is not None
            self.total.start([self.one_number])
            self.total.wait()
        step.finish(0)

    def sum_alone(self, bucket_LN: list[list[torch.Tensor]]) -> None:
        """The sums of a step and nothing else."""
        assert self.total is not None
        for bucket in bucket_LN:
            self.total.start(bucket)
        for _ in bucket_LN:
            self.total.wait()

    def like_gradients(self) -> list[list[torch.Tensor]]:
        """Zeros of the types and sizes that are summed."""
        weights = self.step.optimizer.weights
        return [
            [torch.zeros_like(weights[name], dtype=self.summed_dtype) for name in bucket]
            for bucket in self.step.buckets.layout
        ]

    @property
    def summed_dtype(self) -> torch.dtype:
        """The type of the gradients that are summed."""
        return self.step.drafter.dtype if self.micro_batches == 1 else torch.float32

    def largest_bucket(self) -> int:
        """Its bytes."""
        return largest_bucket(self.step.buckets.layout, self.step.optimizer.weights, self.summed_dtype.itemsize)


def _say_nothing(_name: str) -> None:
    """No gradient is announced, so every sum is started at the end."""


class Contest:
    """All replicas run each way in turn, at the same time; of every way the slower replica counts."""

    def __init__(self, replicas: list[Replica], rounds: int, sums: Sums) -> None:
        self.replicas, self.rounds, self.sums = replicas, rounds, sums
        self.store = join_world().store
        self.together = threading.Barrier(len(replicas))
        self.launches = Meeting(len(replicas), self._check)
        self.peers: PeerGroup | None = None
        if sums.by == "peer":
            largest = max(replica.largest_bucket() for replica in replicas)
            devices = [replica.device for replica in replicas]
            self.peers = PeerGroup(devices, largest, self._check, num_lanes=sums.lanes)
        self.compiling = threading.Lock()
        self.found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
        self.errors: list[BaseException] = []

    def run(self) -> dict[str, float]:
        """Milliseconds of each way: the best round. Raises what a replica raised."""
        threads = [threading.Thread(target=self._body, args=(rank,), daemon=True) for rank in range(len(self.replicas))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(200)
        if self.errors:
            raise self.errors[0]
        return {way: min(max(both) for both in rounds) for way, rounds in self.found.items()}

    def _check(self) -> None:
        if self.errors:
            raise threading.BrokenBarrierError

    def _body(self, rank: int) -> None:
        try:
            self._work(rank)
        except BaseException as error:
            self.errors.append(error)
            self.together.abort()

    def _work(self, rank: int) -> None:
        replica = self.replicas[rank]
        if replica.device.type == "cuda":
            torch.cuda.set_device(replica.device)
        torch.autograd.set_multithreading_enabled(False)
        with self.compiling:
            replica.run("without")
            replica.run("without")
        self.together.wait(200)
        replica.total = self._end_of(rank, replica.device)
        replica.step.join(replica.total)
        zeros = replica.like_gradients()
        for number in range(self.rounds):
            # Another comes first each time: a GPU slows down while it heats up.
            for way in (*WAYS[number:], *WAYS[:number]):
                self._time(replica, rank, way, number, zeros)
        replica.total.drop()
        replica.step.sum_gradients = None

    def _end_of(self, rank: int, device: torch.device) -> SumGradients:
        if self.peers is not None:
            return PeerSum(self.peers, rank)
        return GradientSum(
            self.store, rank, len(self.replicas), device, 60.0, most_ctas=self.sums.most_ctas, launch=self.launches
        )

    def _time(self, replica: Replica, rank: int, way: str, number: int, bucket_LN: list[list[torch.Tensor]]) -> None:
        def call() -> None:
            replica.sum_alone(bucket_LN) if way == "alone" else replica.run(way)

        for _ in range(WARM):
            call()
        self.together.wait(60)
        if rank == 0:
            self.found[way].append([0.0] * len(self.replicas))
        self.together.wait(60)
        replica.waits.clear()
        self.found[way][number][rank] = Stopwatch(replica.device).measure(call, TIMED)
        if way == "beside":
            replica.waited_ms = replica.mean_wait()
        self.together.wait(60)


def measure_sums(
    steps: list[DrafterStep], fills: list[Fill], width: int, micro_batches: int, sums: Sums
) -> Iterator[str]:
    """Lines with milliseconds of a step, each way."""
    replicas = [Replica(step, fill, width, micro_batches) for step, fill in zip(steps, fills, strict=True)]
    contest = Contest(replicas, 3, sums)
    best = contest.run()
    yield ", ".join(f"{way} {ms:.2f} ms" for way, ms in best.items())
    for way, found in contest.found.items():
        yield f"  {way}, round by round: {' '.join(f'{ms:.2f}' for both in found for ms in both)} ms"
    for way in ("beside", "after"):
        pairs = zip(contest.found[way], contest.found["met"], strict=True)
        more = statistics.median(max(each) - max(met) for each, met in pairs)
        alone = best["alone"]
        yield f"sums {way} the backward add {more:.2f} ms to `met`: {1 - more / alone:.1%} of {alone:.2f} ms hidden"
    waited = " ".join(f"{replica.waited_ms:.2f}" for replica in replicas)
    yield f"behind the backward a replica waits for sums, and takes them in, for {waited} ms"
