"""Compile counters: each kind of compilation counts once, warm calls count nothing, removal is whole."""

import platform
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.convert_frame

from blockdraft.runtime.counters import Compilations, CompileCounters
from blockdraft.runtime.guards_triton import guard_autotuner
from blockdraft.runtime.patches import Patches

if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("Triton is built for Linux on x86-64", allow_module_level=True)

from triton.compiler.compiler import CompiledKernel
from triton.runtime.autotuner import Autotuner, Config

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def counters():
    torch._dynamo.reset()
    counters = CompileCounters.install()
    yield counters
    counters.remove()
    torch._dynamo.reset()


def test_frames_count_also_with_fullgraph_and_warm_calls_do_not(counters):
    start = counters.snapshot()
    f = torch.compile(lambda x: x.sin(), backend="eager", dynamic=False, fullgraph=True)
    for length in (1, 1, 2, 1, 2):
        f(torch.ones(length))
    assert counters.since(start) == Compilations(dynamo_frames=2)


def test_counts_survive_a_reset_of_torchs_own(counters):
    torch.compile(lambda x: x.cos(), backend="eager")(torch.ones(1))
    torch._dynamo.utils.counters.clear()
    assert counters.snapshot().dynamo_frames == 1


def test_a_graph_out_of_inductors_cache_counts(counters, monkeypatch, tmp_path):
    """A new process, or a reset one, loads its graphs from disk: no lowering, and a stop all the same."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def f(x, w):
        return x @ w

    for _ in range(2):
        torch._dynamo.reset()
        before = counters.snapshot()
        with torch.no_grad():
            torch.compile(f, dynamic=False)(torch.ones(3, 3), torch.ones(3, 3))
        assert counters.since(before) == Compilations(dynamo_frames=1, inductor_lowerings=1)


class Kernel:
    arg_names = ("n", "BLOCK")

    def __init__(self):
        def fn(n, BLOCK):
            pass

        self.fn = fn

    def run(self, *args, **kwargs):
        return None


class PrunesItself(Autotuner):
    def prune_configs(self, kwargs):
        return self.configs


@pytest.mark.parametrize("tuner_class", [Autotuner, PrunesItself])
@pytest.mark.parametrize("guard_first", [None, True, False])
def test_benchmarks_count_once_with_and_without_the_guard(tuner_class, guard_first):
    patches, counters = Patches(), None
    if guard_first:
        guard_autotuner(patches, threading.RLock())
    counters = CompileCounters.install()
    if guard_first is False:
        guard_autotuner(patches, threading.RLock())
    try:
        kernel = Kernel()
        configs = [Config({"BLOCK": block}) for block in (16, 32, 64)]
        tuner = tuner_class(
            kernel, kernel.arg_names, configs, ["n"], None, None, do_bench=lambda call, quantiles: [1.0] * 3
        )
        for _ in range(5):
            tuner.run(1, grid=(1,), warmup=False)
        # Over the counters, the guard stops a call before it is counted; under them, the count knows a stopped call.
        assert counters.snapshot() == Compilations(autotuner_benchmarks=3)
    finally:
        if guard_first is False:
            patches.remove()
        counters.remove()
        patches.remove()


def test_a_triton_kernel_counts_when_it_is_built(counters):
    kernel = CompiledKernel.__new__(CompiledKernel)
    kernel.module = None  # which newer versions look at when they delete a kernel
    with pytest.raises(StopIteration):  # a group without metadata: the constructor is all that is tested
        kernel.__init__(SimpleNamespace(), {}, "hash")
    assert counters.snapshot().triton_compiles == 1


def test_threads_count_together(counters):
    def work():
        for _ in range(500):
            counters._add("dynamo_frames", 1)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot().dynamo_frames == 4000


def test_removal_puts_everything_back():
    places = (torch._dynamo.convert_frame, Autotuner, CompiledKernel, torch._inductor.codecache.FxGraphCache)
    before = [dict(vars(place)) for place in places]
    counters = CompileCounters.install()
    assert [dict(vars(place)) for place in places] != before
    counters.remove()
    assert [dict(vars(place)) for place in places] == before


def test_counters_do_without_triton(monkeypatch):
    found = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "triton" else found(name))
    counters = CompileCounters.install()
    counters.remove()
    assert counters.snapshot() == Compilations()


def test_the_line_that_a_run_prints():
    line = "dynamo frames 1, inductor lowerings 2, triton compiles 3, autotuner benchmarks 4"
    assert str(Compilations(1, 2, 3, 4)) == line
