"""Protections against threads that break each other inside Triton, FLA and torch.

Control calls `import_everything()` and then `install()` once, in the main thread, before any kernel runs and before
anything is compiled. docs/decisions/0002-thread-guards.md says what each guard excludes and what it costs.
"""

import importlib
import importlib.util
import logging
import pkgutil
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

from blockdraft.runtime.guards_torch import (
    DenseAttentionError,
    FxFlagGuard,
    attention_site,
    guard_dense_attention,
)
from blockdraft.runtime.guards_triton import (
    TensorCacheGuard,
    guard_autotuner,
    guard_fla_config,
    guard_kernel_load,
    imported,
)
from blockdraft.runtime.patches import Patches

__all__ = ["DenseAttentionError", "Guards", "Imported", "attention_site", "import_everything", "install"]

LOG = logging.getLogger(__name__)

TORCH_MODULES = (
    "torch._dynamo",
    "torch._dynamo.backends.cudagraphs",
    "torch._dynamo.backends.distributed",
    "torch._dynamo.backends.inductor",
    "torch._dynamo.backends.onnxrt",
    "torch._dynamo.backends.tensorrt",
    "torch._dynamo.backends.torchxla",
    "torch._dynamo.backends.tvm",
    "torch._dynamo.dce_extra_outputs",
    "torch._dynamo.repro.after_dynamo",
    "torch._dynamo.testing",
    "torch._export.db.logging",
    "torch._export.passes._node_metadata_hook",
    "torch._export.passes.add_runtime_assertions_for_constraints_pass",
    "torch._export.passes.collect_tracepoints_pass",
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._functorch.aot_autograd",
    "torch._functorch.partitioners",
    "torch._higher_order_ops.flex_attention",
    "torch._higher_order_ops.passes.inline_invoke_subgraph",
    "torch._inductor.async_compile",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch._inductor.codegen.cpp_wrapper_cpu_array_ref",
    "torch._inductor.codegen.cpp_wrapper_gpu",
    "torch._inductor.codegen.cpp_wrapper_mps",
    "torch._inductor.codegen.cuda_combined_scheduling",
    "torch._inductor.codegen.halide",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.codegen.mps",
    "torch._inductor.codegen.pallas",
    "torch._inductor.codegen.python_wrapper_mtia",
    "torch._inductor.codegen.triton",
    "torch._inductor.codegen.wrapper_fxir",
    "torch._inductor.codegen.xpu.xpu_combined_scheduling",
    "torch._inductor.compile_fx",
    "torch._inductor.compiler_bisector",
    "torch._inductor.decomposition",
    "torch._inductor.fx_passes.joint_graph",
    "torch._inductor.fx_passes.post_grad",
    "torch._inductor.fx_passes.pre_grad",
    "torch._inductor.graph",
    "torch._inductor.hooks",
    "torch._inductor.kernel",
    "torch._inductor.lowering",
    "torch._inductor.runtime.triton_heuristics",
    "torch._inductor.scheduler",
    "torch._inductor.select_algorithm",
    "torch._subclasses.schema_check_mode",
    "torch.export._leakage_detection_utils",
    "torch.export._trace",
    "torch.export._unlift",
    "torch.fx.experimental.proxy_tensor",
    "torch.fx.experimental.validator",
    "torch.nn.attention.flex_attention",
    "torch.utils._cpp_embed_headers",
    "torch.utils.checkpoint",
)
"""What a first compile with Inductor imports in torch 2.13; other versions lack some and may have more."""
TRANSFORMERS_MODULES = (
    "transformers",
    "transformers.cache_utils",
    "transformers.generation",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
KERNEL_MODULES = (
    "triton",
    "triton.language",
    "triton.runtime.autotuner",
    "triton.compiler.compiler",
    "triton.testing",
    "fla.utils",
    "fla.ops.utils.cache",
    "fla.modules",
    "fla.ops.gated_delta_rule",
)


COLD_CACHE_MODULES = (
    "torch._inductor.choices",
    "torch._inductor.codegen.cpu_device_op_overrides",
    "torch._inductor.codegen.cuda.device_op_overrides",
    "torch._inductor.codegen.mps_device_op_overrides",
    "torch._inductor.codegen.mtia",
    "torch._inductor.codegen.mtia.device_op_overrides",
    "torch._inductor.codegen.segmented_tree",
    "torch._inductor.codegen.xpu.device_op_overrides",
    "torch._inductor.extern_node_serializer",
    "torch._inductor.kernel_template_choice",
)
"""What Inductor imports at a first compile only when its disk cache has nothing."""
COLD_CACHE_PACKAGES = (
    "torch._inductor.fx_passes",
    "torch._inductor.fx_passes.serialized_patterns",
    "torch._inductor.runtime.caching",
)
"""The same, for packages of which any module may be wanted."""


class Imported(NamedTuple):
    """A module that was brought in up front; `found` is False where this installation lacks it."""

    name: str
    found: bool
    seconds: float


def import_everything(*, kernels: bool, more: Iterable[str] = ()) -> list[Imported]:
    """Do in this thread every import that torch, transformers and the kernels would do at their first call.

    A first import from two threads at once can hand one of them a half-imported module. `kernels` adds Triton and FLA,
    which a run on CPUs has no use for; `more` adds modules of the target's own.
    """
    names = TORCH_MODULES + COLD_CACHE_MODULES + TRANSFORMERS_MODULES + (KERNEL_MODULES if kernels else ())
    inside = [name for package in COLD_CACHE_PACKAGES for name in _modules_of(package)]
    return [_import(name) for name in (*names, *inside, *more)]


def _modules_of(package: str) -> list[str]:
    """The package and its modules; nothing where this torch has no such package."""
    if not _exists(package):
        return []
    path = importlib.import_module(package).__path__
    return [package, *(f"{package}.{module.name}" for module in pkgutil.iter_modules(path))]


def _import(name: str) -> Imported:
    began = time.perf_counter()
    found = _exists(name)
    if found:
        importlib.import_module(name)
    return Imported(name, found, time.perf_counter() - began)


def _exists(name: str) -> bool:
    # find_spec imports the parents, and says so when one of them is missing.
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


class Guards:
    """What `install` put in place; `lines` says it, a line for each guard."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._patches = Patches()
        self._fx_flag = FxFlagGuard()
        self._tensor_cache = TensorCacheGuard()

    def _install(self, dense_device_types: tuple[str, ...]) -> None:
        tune_lock, load_lock = threading.RLock(), threading.RLock()
        self.lines.append(self._fx_flag.install(self._patches))
        if dense_device_types:
            self.lines.append(guard_dense_attention(self._patches, dense_device_types))
        if _exists("triton"):
            self.lines.append(guard_autotuner(self._patches, tune_lock))
            self.lines.append(guard_kernel_load(self._patches, load_lock))
        else:
            self.lines.append("triton: not installed, nothing to guard")
        decorators = imported("fla.utils.decorators") or imported("fla.utils")
        if decorators is not None:
            self.lines.append(self._tensor_cache.install(self._patches, decorators))
        fla_cache = imported("fla.ops.utils.cache")
        if fla_cache is not None:
            self.lines.append(guard_fla_config(self._patches, tune_lock, fla_cache.CachedAutotuner))

    def remove(self) -> None:
        """Undo what this object installed; a second call does nothing."""
        self._fx_flag.remove()
        self._tensor_cache.remove()
        self._patches.remove()


def install(*, dense_device_types: tuple[str, ...] = ("cuda",)) -> Guards:
    """Install every guard that this torch, Triton and FLA need, and log a line for each.

    Safe to call again: a guard that stands is left, and `remove()` of the second object leaves it too. FLA is guarded
    only when it was imported before (`import_everything` does that). Uncompiled flex_attention becomes an error on
    devices of `dense_device_types`.
    """
    guards = Guards()
    guards._install(dense_device_types)
    for line in guards.lines:
        LOG.info("guard: %s", line)
    return guards
