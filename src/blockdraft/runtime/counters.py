"""Four counters of compilation, by which a run shows that nothing compiles after warm-up."""

import functools
import importlib.util
import logging
import threading
from typing import Any, NamedTuple

from blockdraft.runtime.guards_triton import TuneMiss
from blockdraft.runtime.patches import Patches

LOG = logging.getLogger(__name__)


class Compilations(NamedTuple):
    """How often each kind of compilation happened.

    dynamo_frames: frames that torch.compile turned into graphs, or tried to. inductor_lowerings: graphs lowered or
    loaded from Inductor's cache, forward and backward apart. triton_compiles: Triton kernels built or loaded from disk.
    autotuner_benchmarks: configurations timed, by Triton's tuner and by Inductor's.
    """

    dynamo_frames: int = 0
    inductor_lowerings: int = 0
    triton_compiles: int = 0
    autotuner_benchmarks: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in self._asdict().items())


class CompileCounters:
    """Counts compilations of every thread from `install` on.

    The counts come from functions that each compilation passes through. torch's own `counters` would miss what is
    compiled with fullgraph=True, and anybody may clear them; the stance `fail_on_recompile` misses lazy backwards.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(Compilations._fields, 0)
        self._patches = Patches()

    @classmethod
    def install(cls) -> "CompileCounters":
        """Start counting. Imports torch's compiler and, where it is installed, Triton."""
        from torch._dynamo import convert_frame
        from torch._inductor import codecache, graph
        from torch._inductor.runtime import triton_heuristics

        counters = cls()
        counters._count(convert_frame, "_compile", "dynamo_frames")
        counters._count(graph.GraphLowering, "run", "inductor_lowerings")
        # A graph out of the cache is not lowered, but loading it is no less of a stop.
        counters._count(codecache.FxGraphCache, "cache_hit_post_compile", "inductor_lowerings")
        counters._count(triton_heuristics.CachingAutotuner, "bench", "autotuner_benchmarks")
        if importlib.util.find_spec("triton") is not None:
            from triton.compiler.compiler import CompiledKernel
            from triton.runtime.autotuner import Autotuner

            counters._count(CompiledKernel, "__init__", "triton_compiles")
            counters._count(Autotuner, "_bench", "autotuner_benchmarks")
        return counters

    def remove(self) -> None:
        """Stop counting. What was put over the counters later must go first."""
        self._patches.remove()

    def snapshot(self) -> Compilations:
        """The counts so far."""
        with self._lock:
            return Compilations(**self._counts)

    def since(self, snapshot: Compilations) -> Compilations:
        """The counts since that snapshot."""
        return Compilations(*(now - then for now, then in zip(self.snapshot(), snapshot, strict=True)))

    def _count(self, owner: Any, name: str, counter: str) -> None:
        original = vars(owner).get(name)
        if original is None:
            LOG.warning("%s has no %s: %s will read too low", owner, name, counter)
            return
        is_classmethod, is_static = isinstance(original, classmethod), isinstance(original, staticmethod)
        function = original.__func__ if is_classmethod or is_static else original

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            happened = 1
            try:
                return function(*args, **kwargs)
            except TuneMiss:
                happened = 0  # nothing ran: the guard calls again under its lock
                raise
            finally:
                self._add(counter, happened)

        replacement: Any = counted
        if is_classmethod:
            replacement = classmethod(counted)
        elif is_static:
            replacement = staticmethod(counted)
        self._patches.replace(owner, name, replacement)

    def _add(self, counter: str, number: int) -> None:
        with self._lock:
            self._counts[counter] += number
