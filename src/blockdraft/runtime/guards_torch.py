"""Guards for torch: the FX tracing flag, and attention that would materialise its scores.

Shape letters: R rows, H heads, Q queries, K keys, E head width.
"""

import contextlib
import contextvars
import functools
import importlib
import sys
import threading
from collections.abc import Collection, Iterator
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from blockdraft.runtime.patches import Patches, is_marked, mark

FLAG = "_is_fx_tracing_flag"
THREAD_FLAG = "_blockdraft_fx_tracing"
SMALLEST_HEAD = 16
"""Head width below which Inductor has no fused flex_attention kernel (torch 2.11-2.13)."""
SITE: contextvars.ContextVar[str] = contextvars.ContextVar("blockdraft_attention_site", default="unknown")
"""Layer whose attention runs here; a context variable works at module level only."""


class ThreadFlag(threading.local):
    """A truth value of its own in every thread."""

    def __init__(self) -> None:
        self.on = False

    def __bool__(self) -> bool:
        return self.on


class FxFlagGuard:
    """Makes torch.fx's process-wide "is tracing" flag per thread (torch 2.11-2.13; thread-local upstream from 2.14).

    Three kinds of access exist and each is led to a ThreadFlag. Functions of the module that read the global get the
    same code with another global's name, so references to them that were taken before hold as well. `Tracer.trace`,
    which writes the global, is wrapped. Code outside reads and writes the module's attribute, which becomes a property.
    """

    def __init__(self) -> None:
        self._readers: list[tuple[FunctionType, CodeType]] = []
        self._module_class: tuple[ModuleType, type[ModuleType]] | None = None

    def install(self, patches: Patches) -> str:
        """Guard torch.fx._symbolic_trace."""
        import torch.fx._symbolic_trace as tracing

        if is_marked(tracing.Tracer, "trace"):
            return "FX tracing flag: guarded already"
        if not isinstance(vars(tracing).get(FLAG), bool):
            return "FX tracing flag: thread-local in this torch, nothing to guard"
        flag = ThreadFlag()
        patches.replace(tracing, THREAD_FLAG, flag)
        for entry in list(vars(tracing).values()):
            if isinstance(entry, FunctionType) and FLAG in entry.__code__.co_names:
                self._readers.append((entry, entry.__code__))
                names = tuple(THREAD_FLAG if name == FLAG else name for name in entry.__code__.co_names)
                entry.__code__ = entry.__code__.replace(co_names=names)
        patches.replace(tracing.Tracer, "trace", _trace_per_thread(tracing.Tracer.trace, flag))
        self._module_class = tracing, type(tracing)
        tracing.__class__ = _module_class(type(tracing), flag)
        return f"FX tracing flag: per thread, {len(self._readers)} readers"

    def remove(self) -> None:
        """Give the module its own code and its process-wide flag back."""
        while self._readers:
            function, code = self._readers.pop()
            function.__code__ = code
        if self._module_class is not None:
            module, module_class = self._module_class
            module.__class__ = module_class
            vars(module)[FLAG] = False
            self._module_class = None


def _trace_per_thread(original: Any, flag: ThreadFlag) -> Any:
    @functools.wraps(original)
    def trace(*args: Any, **kwargs: Any) -> Any:
        before, flag.on = flag.on, True
        try:
            return original(*args, **kwargs)
        finally:
            flag.on = before

    return mark(trace)


def _module_class(base: type[ModuleType], flag: ThreadFlag) -> type[ModuleType]:
    def read(_: ModuleType) -> bool:
        return flag.on

    def write(_: ModuleType, value: object) -> None:
        flag.on = bool(value)

    return type("ModuleWithThreadFlag", (base,), {FLAG: property(read, write)})


class DenseAttentionError(RuntimeError):
    """A flex_attention call that would materialise its scores on a guarded device."""


@contextlib.contextmanager
def attention_site(layer: str | int) -> Iterator[None]:
    """Name the layer whose attention runs inside, for DenseAttentionError. Enter it outside compiled code."""
    token = SITE.set(str(layer))
    try:
        yield
    finally:
        SITE.reset(token)


def guard_dense_attention(patches: Patches, device_types: Collection[str]) -> str:
    """Make the dense path of flex_attention an error on devices of these types.

    Two places are watched. `flex_attention` itself, where it is about to run without being compiled (so the error comes
    before a fail-on-recompile stance would raise a less telling one), and the function that materialises the scores,
    which forward and backward share: that one also sees backends which run the operator as it is.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    # By name: the attribute torch._higher_order_ops.flex_attention is the operator and hides its module.
    operator = importlib.import_module("torch._higher_order_ops.flex_attention")
    public = importlib.import_module("torch.nn.attention.flex_attention")

    if is_marked(operator, "_math_attention_inner"):
        return "dense attention: guarded already"
    original_inner = vars(operator).get("_math_attention_inner")
    if original_inner is None:
        return "dense attention: this torch has another dense path, NOT guarded"
    guarded = frozenset(device_types)

    def check(query_RHQE: Any, key_RHKE: Any) -> None:
        if query_RHQE.device.type in guarded and not isinstance(query_RHQE, FakeTensor):
            raise DenseAttentionError(_explain(query_RHQE, key_RHKE, sys._getframe(2)))

    @functools.wraps(original_inner)
    def inner(query_RHQE: Any, key_RHKE: Any, *args: Any, **kwargs: Any) -> Any:
        check(query_RHQE, key_RHKE)
        return original_inner(query_RHQE, key_RHKE, *args, **kwargs)

    patches.replace(operator, "_math_attention_inner", mark(inner))
    places = 1
    for name in ("setup_compilation_env", "_set_compilation_env"):
        original_env = vars(public).get(name)
        if original_env is not None:
            patches.replace(public, name, _checked_entry(original_env, check))
            places += 1
    return f"dense attention: an error on {', '.join(sorted(guarded))}, watched at {places} places"


def _checked_entry(original: Any, check: Any) -> Any:
    @functools.wraps(original)
    def enter(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_name == "flex_attention":
            check(caller.f_locals["query"], caller.f_locals["key"])
        return original(*args, **kwargs)

    return mark(enter)


def _explain(query_RHQE: Any, key_RHKE: Any, frame: FrameType) -> str:
    return (
        f"flex_attention would materialise its scores: layer {SITE.get()}, thread {threading.current_thread().name}, "
        f"query {tuple(query_RHQE.shape)}, key {tuple(key_RHKE.shape)}, {query_RHQE.dtype} on {query_RHQE.device}; "
        f"expected the compiled kernel, found: {_reason(query_RHQE.shape[-1], frame)}. Call "
        f"torch.compile(flex_attention, dynamic=False, fullgraph=True) on shapes that were warmed up, or choose SDPA."
    )


def _reason(head_width: int, frame: FrameType | None) -> str:
    """Why the call is not the compiled one, read off the stack."""
    from torch.nn.attention.flex_attention import flex_attention

    reason = "a backend that runs the operator as it is"
    callee: FrameType | None = None
    seen_flex = False
    while frame is not None:
        code = frame.f_code
        if code is flex_attention.__code__:  # what torch.compile makes of it has another code object
            seen_flex, reason = True, "not compiled"
        elif seen_flex and callee is not None and _is_compile_wrapper(code):
            reason = _fallback(callee.f_code)
            break
        callee, frame = frame, frame.f_back
    if head_width < SMALLEST_HEAD:
        reason += f"; head width {head_width} is below {SMALLEST_HEAD}, for which there is no compiled kernel"
    return reason


def _is_compile_wrapper(code: CodeType) -> bool:
    return code.co_name == "compile_wrapper" and code.co_filename.endswith("_dynamo/eval_frame.py")


def _fallback(code: CodeType) -> str:
    """Why compiled code runs as plain Python: `code` belongs to the function that was compiled."""
    import torch._dynamo.config
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    limit = torch._dynamo.config.recompile_limit
    entries = len(_debug_get_cache_entry_list(code))
    if entries >= limit:
        return f"recompile limit reached ({code.co_name} has {entries} compiled versions, the limit is {limit})"
    return f"{code.co_name} is compiled, but this call runs as plain Python (graph break, disabled, or skipped)"
