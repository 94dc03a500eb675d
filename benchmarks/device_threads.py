"""How many workers one process can drive: launches of small layers from 1 to 8 threads, and waits for the interpreter.

usage: python benchmarks/device_threads.py [--devices cuda:0 cuda:1] [--seconds 1.5]

Each worker runs the forward of a small model over and over, as it is or as a captured CUDA graph, threads dealt to the
devices in turn; `python` is nothing but the interpreter, as a control. A sampler sleeps for a millisecond at a time;
how much later it gets the interpreter's lock than when nobody runs says how contended the lock is.
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

WIDTH, DEPTH, ROWS = 256, 24, 128
LATE_S = 1e-4
"""A sampler that gets the lock this much later than when nobody runs has waited for it."""


class Layer(nn.Module):
    """Norm, two products, an activation and a sum: a dozen launches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x_NW: torch.Tensor) -> torch.Tensor:
        y_NW = self.norm(x_NW)
        return x_NW + self.down(torch.nn.functional.silu(self.up(y_NW)) * 0.5)


class Found(NamedTuple):
    """What a number of workers did together."""

    passes_s: float
    """Forwards per second, all workers."""
    late: float
    """Share of the sampler's wake-ups that waited for the interpreter's lock."""
    wait_us: float
    """Its mean wait beyond that of an idle process."""
    at_most_us: float


class Sampler(threading.Thread):
    """Notes how late it gets the interpreter's lock after a sleep."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.waits: list[float] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            started = time.perf_counter()
            time.sleep(0.001)
            self.waits.append(time.perf_counter() - started - 0.001)

    def end(self) -> list[float]:
        self.is_over.set()
        self.join()
        return self.waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cuda:0", "cuda:1"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=1.5)
    args = parser.parse_args()
    devices = [torch.device(name) for name in args.devices]
    say(f"python {sys.version.split()[0]}, torch {torch.__version__}, lock switched every {sys.getswitchinterval()} s")
    idle = idle_wait()
    say(f"sampler in an idle process: {idle * 1e6:.0f} us late")
    say(f"one forward: {launches(devices[0])} launches")
    kinds = ("eager", "graph", "python") if devices[0].type == "cuda" else ("eager", "python")
    say("| devices | kind | workers | forwards/s | a worker's | late wake-ups | mean wait us | longest |")
    say("|---|---|---|---|---|---|---|---|")
    for chosen in [devices[:1], devices] if len(devices) > 1 else [devices]:
        for kind in kinds:
            alone = 0.0
            for count in args.workers:
                found = contend(kind, count, chosen, args.seconds, idle)
                alone = alone or found.passes_s
                each = found.passes_s / count / alone
                say(
                    f"| {len(chosen)} | {kind} | {count} | {found.passes_s:,.0f} | {each:.0%} | {found.late:.1%} "
                    f"| {found.wait_us:.0f} | {found.at_most_us:.0f} |"
                )


def contend(kind: str, count: int, devices: list[torch.device], seconds: float, idle: float) -> Found:
    """So many workers at once."""
    ready, go, is_over = threading.Barrier(count + 1), threading.Event(), threading.Event()
    passes = [0] * count
    errors: list[BaseException] = []
    capturing = threading.Lock()

    def work(rank: int) -> None:
        try:
            device = devices[rank % len(devices)]
            with capturing:
                forward = make(kind, device)
                forward()
            ready.wait(60)
            go.wait()
            while not is_over.is_set():
                forward()
                passes[rank] += 1
        except BaseException as error:
            errors.append(error)
            ready.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    try:
        ready.wait(60)
    except threading.BrokenBarrierError:
        raise errors[0] from None
    sampler = Sampler()
    sampler.start()
    started = time.perf_counter()
    go.set()
    time.sleep(seconds)
    is_over.set()
    for thread in threads:
        thread.join(30)
    elapsed = time.perf_counter() - started
    waits = [max(0.0, wait - idle) for wait in sampler.end()]
    return Found(
        sum(passes) / elapsed, sum(wait > LATE_S for wait in waits) / len(waits), statistics.mean(waits) * 1e6,
        max(waits) * 1e6,
    )  # fmt: skip


def make(kind: str, device: torch.device) -> Callable[[], None]:
    """A forward for this thread, on a stream of its own: eager, as a graph, or nothing but the interpreter."""
    if kind == "python":
        return lambda: sum(range(20_000)) and None
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(DEPTH))).to(device)
    x_NW = torch.randn(ROWS, WIDTH, device=device)
    if device.type != "cuda":

        def on_cpu() -> None:
            with torch.no_grad():
                model(x_NW)

        return on_cpu
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            model(x_NW)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        if kind == "graph":
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                model(x_NW)
    calls = [0]

    def run() -> None:
        with torch.no_grad(), torch.cuda.stream(stream):
            graph.replay() if kind == "graph" else model(x_NW)
        calls[0] += 1
        if calls[0] % 16 == 0:
            # Never more than 16 forwards ahead: what is counted was run.
            stream.synchronize()

    return run


def launches(device: torch.device) -> int:
    """Kernels of one forward; operators on a CPU."""
    forward = make("eager", device)
    forward()
    with torch.profiler.profile() as found:
        forward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    kind = torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    return sum(event.device_type == kind for event in found.events())


def idle_wait() -> float:
    """Median lateness of a sleep of a millisecond when nothing else runs."""
    sampler = Sampler()
    sampler.start()
    time.sleep(0.5)
    return statistics.median(sampler.end())


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
