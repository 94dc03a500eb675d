"""What control does before any worker starts and after all are warm: imports, guards, caches, counters, stance.

On a run without a GPU nothing is compiled, so nothing of this is loaded.
"""

from collections.abc import Callable

import torch

from blockdraft.runtime.counters import Compilations, CompileCounters
from blockdraft.runtime.guards import Guards, import_everything, install
from blockdraft.runtime.kernel_caches import cache_directories, sweep


class Protection:
    """Guards and counters of one run with kernels; `end` takes them away again."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """Imports everything in this thread, clears corrupt cache entries, installs guards and counters."""
        found = import_everything(kernels=True)
        say(f"imports done up front: {sum(one.found for one in found)} modules")
        for removed in sweep(cache_directories()):
            say(f"kernel cache: {removed}")
        self.guards: Guards = install()
        for line in self.guards.lines:
            say(f"guard: {line}")
        self.counters = CompileCounters.install()
        self.warm: Compilations | None = None

    def steady(self) -> None:
        """From here on a compilation is an error."""
        torch.compiler.set_stance("fail_on_recompile")
        self.warm = self.counters.snapshot()

    def compilations(self) -> Compilations | None:
        """What was compiled since `steady`."""
        return None if self.warm is None else self.counters.since(self.warm)

    def end(self) -> None:
        """Removes counters and guards, and allows compiling again."""
        torch.compiler.set_stance("default")
        self.counters.remove()
        self.guards.remove()
