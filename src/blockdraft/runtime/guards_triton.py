"""Guards for Triton and for the FLA kernels on top of it.

Each function installs one guard into `patches` and returns a line for the log. Wrappers of other packages' functions
take `*args, **kwargs` because they must pass on whatever those take.
"""

import functools
import gc
import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from blockdraft.runtime.patches import Patches, is_marked, mark


class TuneMiss(BaseException):
    """Unwinds a call that would have tuned without the lock; the guard catches it and calls again under the lock.

    A BaseException, so that no `except Exception` on the way swallows it.
    """


class _Call(threading.local):
    """What the tuner calls of one thread keep.

    nargs: arguments by id of the tuner; tuner: the one whose call runs without the lock; depth: locks held.
    """

    def __init__(self) -> None:
        self.nargs: dict[int, Any] = {}
        self.tuner: Any = None
        self.depth = 0


def guard_autotuner(patches: Patches, lock: Any) -> str:
    """Give Triton's Autotuner, and so each subclass, call state per thread and a lock on a cache miss.

    `self.nargs` becomes a property that keeps a value per thread. `run` first goes through upstream's code without a
    lock: a hit never reaches the tuning code and costs two property writes and one more Python call (measured in
    docs/decisions/0002-thread-guards.md). A miss enters `prune_configs` (`_bench`, in a subclass that prunes its own
    way), which unwinds to `run`; `run` takes the lock and calls upstream's code again, and that looks into the cache
    again: one thread benchmarks a configuration. One lock serves all tuners, so nested tuners cannot deadlock.
    """
    from triton.runtime.autotuner import Autotuner

    if is_marked(Autotuner, "run"):
        return "triton autotuner: guarded already"
    original_run, original_prune, original_bench = Autotuner.run, Autotuner.prune_configs, Autotuner._bench
    names = original_run.__code__.co_names
    if "nargs" not in names or "prune_configs" not in names:
        return "triton autotuner: keeps no arguments on the tuner, nothing to guard"
    call = _Call()

    @functools.wraps(original_run)
    def run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        outer, call.tuner = call.tuner, tuner
        try:
            return original_run(tuner, *args, **kwargs)
        except TuneMiss:
            pass
        except BaseException:
            call.nargs.pop(id(tuner), None)
            raise
        finally:
            call.tuner = outer
        with lock:
            call.depth += 1
            try:
                return original_run(tuner, *args, **kwargs)
            finally:
                call.depth -= 1
                call.nargs.pop(id(tuner), None)

    def stop_unlocked(tuner: Any) -> None:
        # Calls from outside run (Inductor prunes by itself) and nested calls under the lock pass.
        if call.tuner is tuner and not call.depth:
            raise TuneMiss

    @functools.wraps(original_prune)
    def prune_configs(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        stop_unlocked(tuner)
        return original_prune(tuner, *args, **kwargs)

    @functools.wraps(original_bench)
    def bench(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        stop_unlocked(tuner)
        return original_bench(tuner, *args, **kwargs)

    patches.replace(Autotuner, "nargs", _nargs_per_thread(call))
    patches.replace(Autotuner, "prune_configs", mark(prune_configs))
    patches.replace(Autotuner, "_bench", mark(bench))
    patches.replace(Autotuner, "run", mark(run))
    return "triton autotuner: call state per thread, lock on a cache miss"


def _nargs_per_thread(call: _Call) -> property:
    def read(tuner: Any) -> Any:
        return call.nargs.get(id(tuner))

    def write(tuner: Any, value: Any) -> None:
        if value is None:  # upstream's end of a call: keep no tensors alive
            call.nargs.pop(id(tuner), None)
        else:
            call.nargs[id(tuner)] = value

    return property(read, write)


def guard_kernel_load(patches: Patches, lock: Any) -> str:
    """Let one thread at a time load a compiled kernel onto its device.

    CompiledKernel sets its launcher first and its function handle after the binary is loaded; a second thread between
    the two launches with `function=None`.
    """
    from triton.compiler.compiler import CompiledKernel

    if is_marked(CompiledKernel, "_init_handles"):
        return "triton kernel load: guarded already"
    entries = vars(CompiledKernel)
    original_init, original_launcher = entries.get("_init_handles"), entries.get("run")
    if (
        original_init is None
        or not isinstance(original_launcher, property)
        or "n_max_threads" not in (original_init.__code__.co_names)
    ):
        return "triton kernel load: other structure than that of triton 3.6-3.9, not guarded"

    @functools.wraps(original_init)
    def init_handles(kernel: Any) -> None:
        with lock:
            original_init(kernel)

    def launcher(kernel: Any) -> Any:
        # The last attribute that loading sets; until then the launcher alone says nothing.
        if "n_max_threads" not in vars(kernel):
            kernel._init_handles()
        return kernel._run

    patches.replace(CompiledKernel, "_init_handles", mark(init_handles))
    patches.replace(CompiledKernel, "run", property(launcher))
    return "triton kernel load: one thread at a time"


class PerThreadDeque(threading.local):
    """The part of collections.deque that FLA's tensor_cache uses, with entries of its own in every thread."""

    def __init__(self, maxlen: int) -> None:
        self.maxlen = maxlen
        self.entries: deque[Any] = deque(maxlen=maxlen)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.entries)

    def append(self, entry: Any) -> None:
        self.entries.append(entry)


class TensorCacheGuard:
    """Gives each function under FLA's tensor_cache a deque per thread; those decorated before are found."""

    def __init__(self) -> None:
        self._cells: list[tuple[CellType, Any]] = []

    def install(self, patches: Patches, decorators: ModuleType) -> str:
        """Guard the module that defines tensor_cache (fla.utils.decorators in fla-core 0.6)."""
        entries = vars(decorators)
        if entries.get("deque") is PerThreadDeque:
            return "FLA tensor_cache: guarded already"
        if entries.get("deque") is not deque or "deque" not in entries["tensor_cache"].__code__.co_names:
            return "FLA tensor_cache: holds no shared deque, nothing to guard"
        patches.replace(decorators, "deque", PerThreadDeque)
        for cell in _deque_cells(entries["tensor_cache"]):
            shared = cell.cell_contents
            self._cells.append((cell, shared))
            cell.cell_contents = PerThreadDeque(maxlen=shared.maxlen)
        return f"FLA tensor_cache: entries per thread, {len(self._cells)} functions decorated before"

    def remove(self) -> None:
        """Give the functions that were decorated before the guard their shared deque back."""
        while self._cells:
            cell, shared = self._cells.pop()
            cell.cell_contents = shared


def _deque_cells(decorator: FunctionType) -> Iterator[CellType]:
    """The closure cells that hold a deque, of all functions this decorator has made."""
    for code in decorator.__code__.co_consts:
        if not isinstance(code, CodeType) or "cached" not in code.co_freevars:
            continue
        for function in gc.get_referrers(code):
            if isinstance(function, FunctionType) and function.__closure__:
                cell = function.__closure__[code.co_freevars.index("cached")]
                if isinstance(cell.cell_contents, deque):
                    yield cell


def guard_fla_config(patches: Patches, lock: Any, cached_autotuner: type) -> str:
    """Put FLA's look-up of stored configurations (FLA_CACHE_MODE) under the lock of the autotuner.

    The look-up drops a key whose stored configuration was rejected. Two threads that find a key missing would let the
    second drop what the first has tuned meanwhile; under the lock the second looks again.
    """
    if is_marked(cached_autotuner, "maybe_load_cached_config"):
        return "FLA stored configurations: guarded already"
    original = vars(cached_autotuner).get("maybe_load_cached_config")
    if original is None:
        return "FLA stored configurations: this version has none, nothing to guard"

    @functools.wraps(original)
    def load(tuner: Any, key: Any, nargs: Any, runtime_kwargs: Any) -> None:
        with lock:
            if tuner.should_check_fla_cache(key):
                original(tuner, key=key, nargs=nargs, runtime_kwargs=runtime_kwargs)

    patches.replace(cached_autotuner, "maybe_load_cached_config", mark(load))
    return "FLA stored configurations: looked up under the autotuner's lock"


def imported(name: str) -> ModuleType | None:
    """A module that somebody has imported already."""
    return sys.modules.get(name)
