"""Triton's tuners, kernel loading and FLA's caches under threads, with stubs for the kernels: each race, and its cure.

Triton and FLA come with the test extra; on Linux x86-64 their absence fails these tests instead of skipping them.
"""

import collections
import importlib.util
import platform
import random
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from blockdraft.runtime.guards_triton import TensorCacheGuard, guard_autotuner, guard_fla_config, guard_kernel_load
from blockdraft.runtime.patches import Patches

if sys.platform != "linux" or platform.machine() != "x86_64":
    pytest.skip("Triton is built for Linux on x86-64", allow_module_level=True)

import triton.compiler.compiler as compiler
from triton.runtime.autotuner import Autotuner, Config, Heuristics

pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]
NUM_THREADS = 8
NUM_KEYS = 6
NUM_CONFIGS = 4
EAGER_S = 1e-5


@pytest.fixture(autouse=True)
def _eager_switches():
    """Threads change places far more often than in a real run, so that races show in seconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(EAGER_S)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def guarded():
    patches = Patches()
    guard_autotuner(patches, threading.RLock())
    yield
    patches.remove()


@pytest.fixture(scope="module")
def fla_cache():
    """FLA's tuner, loaded from its file: importing the whole of fla.ops takes many seconds and is not needed."""
    path = Path(importlib.util.find_spec("fla").origin).parent / "ops" / "utils" / "cache.py"
    spec = importlib.util.spec_from_file_location("fla_cache_for_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


class StubKernel:
    """Stands for a JITFunction; fails when it is called without the tuned argument."""

    __name__ = "kernel"

    def __init__(self):
        def kernel(x, n, BLOCK):
            pass

        self.fn = kernel
        self.arg_names = ["x", "n", "BLOCK"]

    def run(self, *args, grid, warmup, **kwargs):
        return kwargs["BLOCK"]


class PrunesItself(Autotuner):
    """Overrides what the guard watches first."""

    def prune_configs(self, kwargs):
        assert self.nargs is not None
        return self.configs


class OwnRun(Autotuner):
    """Reaches the benchmark through overridden methods."""

    def run(self, *args, **kwargs):
        return super().run(*args, **kwargs)

    def check_disk_cache(self, tuning_key, configs, bench_fn):
        bench_fn()
        return False


def make_tuner(tuner_class, kernel=None, **options):
    """A tuner, and how often it benchmarked which configuration."""
    benchmarks = collections.Counter()
    lock = threading.Lock()

    def do_bench(call, quantiles):
        call()
        time.sleep(0.0005 * (0.5 + random.random()))  # gives up the interpreter, as a real benchmark does
        with lock:
            benchmarks["all"] += 1
        return [1.0, 1.0, 1.0]

    kernel = kernel or StubKernel()
    configs = [Config({"BLOCK": 16 << i}) for i in range(NUM_CONFIGS)]
    return tuner_class(kernel, kernel.arg_names, configs, ["n"], None, None, do_bench=do_bench, **options), benchmarks


def run_threads(number, body):
    """Run body(i) in threads that start together; return the errors."""
    gate, errors = threading.Barrier(number), []

    def work(i):
        gate.wait()
        try:
            body(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def hammer(tuner, num_calls, eager_calls=None):
    """All threads call the cold tuner with all keys; return the errors of single calls.

    From `eager_calls` calls on, when everything is tuned, threads change places as in a real run: that is quicker.
    """
    errors = []
    sys.setswitchinterval(EAGER_S)

    def body(i):
        x = SimpleNamespace(dtype="bf16")
        for call in range(num_calls):
            # The same order in every thread until all keys are tuned, then each begins elsewhere.
            key = (call if call < NUM_KEYS else call + i) % NUM_KEYS
            if call == eager_calls:
                sys.setswitchinterval(0.005)
            try:
                tuner.run(x, key, grid=(1,), warmup=False)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")

    assert run_threads(NUM_THREADS, body) == []
    return errors


def tuner_class_of(name, fla_cache):
    return {"base": Autotuner, "fla": fla_cache.CachedAutotuner, "own run": OwnRun, "prunes": PrunesItself}[name]


@pytest.mark.parametrize("name", ["base", "fla"])
def test_unguarded_tuners_fail_in_most_trials(name, fla_cache):
    trials = []
    for _ in range(6):
        tuner, benchmarks = make_tuner(tuner_class_of(name, fla_cache))
        errors = hammer(tuner, 2000)
        trials.append((len(errors), benchmarks["all"]))
        assert all("'NoneType' object is not a mapping" in error for error in errors)
    assert sum(errors > 0 for errors, _ in trials) > 3, trials
    assert sum(count > NUM_CONFIGS * NUM_KEYS for _, count in trials) > 3, trials


@pytest.mark.parametrize("name", ["base", "fla"])
def test_guarded_tuners_start_cold_100_times(name, fla_cache, guarded):
    for _ in range(100):
        tuner, benchmarks = make_tuner(tuner_class_of(name, fla_cache))
        assert hammer(tuner, 2000, eager_calls=200) == []
        assert benchmarks["all"] == NUM_CONFIGS * NUM_KEYS


@pytest.mark.parametrize("name", ["base", "fla", "own run", "prunes"])
@pytest.mark.parametrize("cache_results", [False, True])
def test_guarded_tuners_hold_2000_calls(name, cache_results, fla_cache, guarded):
    tuner, benchmarks = make_tuner(tuner_class_of(name, fla_cache))
    if cache_results:
        tuner.cache_results = True
        tuner.check_disk_cache = lambda key, configs, bench: (bench(), False)[1]
    assert hammer(tuner, 2000) == []
    assert benchmarks["all"] == NUM_CONFIGS * NUM_KEYS


def test_heuristics_over_and_under_a_tuner(guarded):
    tuner, benchmarks = make_tuner(Autotuner, kernel=None)
    over = Heuristics(tuner, tuner.arg_names, {"num_stages_of_test": lambda args: args["n"]})
    inner = Heuristics(StubKernel(), StubKernel().arg_names, {"extra": lambda args: args["n"]})
    under, benchmarks_under = make_tuner(Autotuner, kernel=inner)
    assert hammer(over, 300) == hammer(under, 300) == []
    assert benchmarks["all"] == benchmarks_under["all"] == NUM_CONFIGS * NUM_KEYS


def test_a_hook_sees_its_own_threads_arguments(guarded):
    tuner, _ = make_tuner(Autotuner)
    wrong = []
    own = threading.local()

    def hook(arguments):
        if arguments["x"] is not own.x:
            wrong.append(arguments["x"])

    for config in tuner.configs:
        config.pre_hook = hook

    def body(i):
        for call in range(500):
            own.x = SimpleNamespace(dtype="bf16", thread=i, call=call)
            tuner.run(own.x, call % 2, grid=(1,), warmup=False)

    assert run_threads(NUM_THREADS, body) == []
    assert wrong == []


def test_tuners_that_call_each_other_do_not_deadlock(guarded):
    first, first_count = make_tuner(Autotuner)
    second, second_count = make_tuner(Autotuner)
    busy = threading.local()

    def calls(other):
        def hook(arguments, reset_only=False):
            if "on" not in vars(busy):
                busy.on = True
                other.run(SimpleNamespace(dtype="bf16"), 1, grid=(1,), warmup=False)
                del busy.on

        return hook

    first.pre_hook, second.pre_hook = calls(second), calls(first)
    tuners = [first, second]
    assert run_threads(8, lambda i: tuners[i % 2].run(SimpleNamespace(dtype="x"), 0, grid=(1,), warmup=False)) == []
    assert first_count["all"] >= NUM_CONFIGS
    assert second_count["all"] >= NUM_CONFIGS


def test_an_error_while_tuning_frees_the_lock_and_the_arguments(guarded):
    tuner, benchmarks = make_tuner(Autotuner)
    works = tuner.fn.run
    tuner.fn.run = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        tuner.run(SimpleNamespace(dtype="bf16"), 0, grid=(1,), warmup=False)
    assert tuner.nargs is None
    tuner.fn.run = works
    assert hammer(tuner, 50) == []
    assert benchmarks["all"] == NUM_CONFIGS * NUM_KEYS


def test_pruning_outside_a_call_passes(guarded):
    tuner, _ = make_tuner(Autotuner)
    tuner.nargs = {"x": 1}
    assert tuner.prune_configs({}) == tuner.configs


def test_the_autotuner_guard_is_installed_once_and_removed_whole():
    before = dict(vars(Autotuner))
    first, second = Patches(), Patches()
    guard_autotuner(first, threading.RLock())
    run = Autotuner.run
    assert run is not before["run"]
    assert "already" in guard_autotuner(second, threading.RLock())
    second.remove()
    assert Autotuner.run is run
    first.remove()
    assert dict(vars(Autotuner)) == before


def test_a_tuner_without_call_state_is_left_alone(monkeypatch):
    def run(self, *args, **kwargs):
        return None

    monkeypatch.setattr(Autotuner, "run", run)
    assert "nothing to guard" in guard_autotuner(Patches(), threading.RLock())
    assert Autotuner.run is run


def load_kernel_in_threads(monkeypatch):
    """Launch one cold kernel in 4 threads; return the function handles that the launches saw."""

    def load_binary(*_):
        time.sleep(0.02)
        return "module", "function", 1, 0, 1024

    target = SimpleNamespace(warp_size=32)
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        launcher_cls=lambda src, metadata: "launcher",
        get_current_target=lambda: target,
        utils=SimpleNamespace(load_binary=load_binary, unload_module=lambda module: None),
    )
    monkeypatch.setattr(compiler, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 1 << 16)
    kernel = compiler.CompiledKernel.__new__(compiler.CompiledKernel)
    kernel.module = kernel.function = kernel._run = None
    kernel.src = kernel.name = kernel.kernel = kernel.metadata_group = kernel.hash = "stub"
    kernel.metadata = SimpleNamespace(shared=0, num_warps=4, warp_size=32)
    seen = []

    def body(_):
        launcher = kernel.run  # the order in which JITFunction.run reads them
        seen.append((launcher, kernel.function))

    assert run_threads(4, body) == []
    return seen


def test_an_unguarded_kernel_is_launched_before_it_is_loaded(monkeypatch):
    assert ("launcher", None) in load_kernel_in_threads(monkeypatch)


def test_a_guarded_kernel_is_launched_after_it_is_loaded(monkeypatch):
    patches = Patches()
    guard_kernel_load(patches, threading.RLock())
    try:
        assert load_kernel_in_threads(monkeypatch) == [("launcher", "function")] * 4
    finally:
        patches.remove()


@pytest.fixture(scope="module")
def fla_decorators():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA says at import that there is no GPU
        import fla.utils.decorators
    return fla.utils.decorators


def call_cached_in_threads(function, seconds):
    """Call it with fresh arguments in 4 threads; return the errors."""
    end = time.monotonic() + seconds

    def body(_):
        while time.monotonic() < end:
            for _ in range(200):
                function(object())

    return run_threads(4, body)


def test_the_unguarded_tensor_cache_fails(fla_decorators):
    errors = call_cached_in_threads(fla_decorators.tensor_cache(lambda x: x), 2.0)
    assert errors
    assert all("deque mutated during iteration" in str(error) for error in errors)


def test_the_guarded_tensor_cache_holds_for_functions_decorated_before_and_after(fla_decorators):
    before = fla_decorators.tensor_cache(lambda x: x)
    patches, guard = Patches(), TensorCacheGuard()
    line = guard.install(patches, fla_decorators)
    assert "entries per thread" in line
    after = fla_decorators.tensor_cache(lambda x: [x])
    try:
        assert "already" in TensorCacheGuard().install(Patches(), fla_decorators)
        assert call_cached_in_threads(before, 1.0) == call_cached_in_threads(after, 1.0) == []
        key = object()
        assert after(key) is after(key), "a thread no longer finds what it stored"
    finally:
        guard.remove()
        patches.remove()
    cell = before.__closure__[before.__code__.co_freevars.index("cached")]
    assert type(cell.cell_contents) is fla_decorators.deque is collections.deque


def test_a_tensor_cache_without_a_shared_deque_is_left_alone():
    module = SimpleNamespace(tensor_cache=lambda function: function)
    assert "nothing to guard" in TensorCacheGuard().install(Patches(), module)


@pytest.mark.parametrize("with_guard", [False, True])
def test_a_rejected_stored_configuration_drops_nothing_tuned_meanwhile(with_guard, fla_cache, monkeypatch):
    """Thread B finds the key missing; thread A tunes; B's stored configuration is rejected and B drops the key."""
    stored = {"kwargs": {"BLOCK": 1}, "num_warps": 4, "num_stages": 2, "num_ctas": 1}
    monkeypatch.setattr(fla_cache, "FLA_CACHE_MODE", fla_cache.FlaCacheMode.FULL)
    monkeypatch.setattr(fla_cache, "load_cached_config", lambda name, key: stored)
    tuner, _ = make_tuner(
        fla_cache.CachedAutotuner, prune_configs_by={"early_config_prune": lambda configs, nargs, **_: configs[:1]}
    )
    key = fla_cache.AutotuneKey.build(tuner.arg_names, tuner.keys, (SimpleNamespace(dtype="x"), 0), {})
    patches = Patches()
    if with_guard:
        guard_fla_config(patches, threading.RLock(), fla_cache.CachedAutotuner)
    try:
        assert tuner.should_check_fla_cache(key)  # B
        tuner.cache[key.autotune_key] = tuner.configs[0]  # A
        tuner.maybe_load_cached_config(key=key, nargs={}, runtime_kwargs={})  # B
        assert (key.autotune_key in tuner.cache) == with_guard
    finally:
        patches.remove()
