"""torch's own races and traps: each shown without the cure, and gone with it.

Imports change a process for good, so those tests run in processes of their own.
"""

import contextvars
import os
import subprocess
import sys
import tempfile
import textwrap
import threading

import pytest
import torch
import torch.nn.attention.flex_attention

from blockdraft.runtime.counters import CompileCounters
from blockdraft.runtime.guards_torch import DenseAttentionError, FxFlagGuard, attention_site, guard_dense_attention
from blockdraft.runtime.patches import Patches

pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]


def run_script(script, *arguments):
    """Run a script in a fresh interpreter with a cold cache; return what it printed."""
    with tempfile.TemporaryDirectory() as cold:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), *arguments],
            capture_output=True,
            text=True,
            timeout=110,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": cold},
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.fixture
def fx_guard():
    patches, guard = Patches(), FxFlagGuard()
    guard.install(patches)
    yield guard
    guard.remove()
    patches.remove()


class Pauses(torch.nn.Module):
    """Its forward, and so the tracing of it, waits for the test."""

    def __init__(self):
        super().__init__()
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.seen = []

    def forward(self, x):
        self.seen.append(bool(torch.fx._symbolic_trace.is_fx_symbolic_tracing()))
        self.entered.set()
        assert self.go_on.wait(60)
        return x + 1


def beside_a_tracing_thread(body):
    """Run body() while another thread is inside symbolic_trace; return the body's result and what the tracer saw."""
    module = Pauses()
    thread = threading.Thread(target=torch.fx.symbolic_trace, args=(module,))
    thread.start()
    assert module.entered.wait(60)
    try:
        return body(), module.seen
    finally:
        module.go_on.set()
        thread.join()


def warm_call():
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    compiled(torch.ones(3))
    return lambda: compiled(torch.ones(3))


FLAG_IS_GLOBAL = isinstance(vars(torch.fx._symbolic_trace).get("_is_fx_tracing_flag"), bool)


@pytest.mark.skipif(not FLAG_IS_GLOBAL, reason="this torch keeps the flag per thread")
def test_unguarded_tracing_breaks_a_warm_call_in_another_thread():
    with pytest.raises(RuntimeError, match="FX to symbolically trace"):
        beside_a_tracing_thread(warm_call())


def test_guarded_tracing_leaves_other_threads_alone(fx_guard):
    result, seen_by_tracer = beside_a_tracing_thread(warm_call())
    assert torch.equal(result, torch.ones(3).sin() + 1)
    assert seen_by_tracer == [True]
    assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()


def test_a_call_that_was_compiled_before_the_guard_is_guarded():
    call = warm_call()
    patches, guard = Patches(), FxFlagGuard()
    guard.install(patches)
    try:
        beside_a_tracing_thread(call)
    finally:
        guard.remove()
        patches.remove()


@pytest.mark.skipif(not FLAG_IS_GLOBAL, reason="this torch keeps the flag per thread")
def test_the_flag_seen_from_outside_is_per_thread_and_removable():
    tracing = torch.fx._symbolic_trace
    patches, guard = Patches(), FxFlagGuard()
    guard.install(patches)
    tracing._is_fx_tracing_flag = True
    seen = []
    thread = threading.Thread(target=lambda: seen.append(tracing._is_fx_tracing_flag))
    thread.start()
    thread.join()
    assert (tracing._is_fx_tracing_flag, bool(tracing.is_fx_tracing()), seen) == (True, True, [False])
    assert "already" in FxFlagGuard().install(Patches())
    guard.remove()
    patches.remove()
    assert vars(tracing)["_is_fx_tracing_flag"] is False
    assert tracing.is_fx_tracing() is False
    assert type(tracing) is type(torch)


@pytest.fixture
def dense_guard():
    patches = Patches()
    guard_dense_attention(patches, ("cpu",))
    yield
    patches.remove()
    torch._dynamo.reset()


def attend(function, length=32, head_width=16):
    q_RHQE, k_RHKE, v_RHKE = (torch.randn(1, 2, length, head_width) for _ in range(3))
    return function(q_RHQE, k_RHKE, v_RHKE)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_unguarded_dense_attention_only_warns():
    torch._dynamo.reset()
    assert attend(torch.nn.attention.flex_attention.flex_attention).shape == (1, 2, 32, 16)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_dense_attention_names_layer_thread_shapes_and_reason(dense_guard):
    with attention_site("layers.3"), pytest.raises(DenseAttentionError) as caught:
        attend(torch.nn.attention.flex_attention.flex_attention)
    message = str(caught.value)
    for part in ("layer layers.3", "thread MainThread", "(1, 2, 32, 16)", "torch.float32 on cpu", "not compiled"):
        assert part in message
    assert "head width" not in message


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_dense_attention_names_a_head_width_without_a_kernel(dense_guard):
    with pytest.raises(DenseAttentionError, match="head width 8 is below 16"):
        attend(torch.nn.attention.flex_attention.flex_attention, head_width=8)


def test_dense_attention_inside_a_compiled_graph_is_an_error(dense_guard):
    compiled = torch.compile(torch.nn.attention.flex_attention.flex_attention, backend="eager", dynamic=False)
    with pytest.raises(DenseAttentionError, match="a backend that runs the operator as it is"):
        attend(compiled)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_dense_attention_behind_the_recompile_limit_says_so(dense_guard):
    def fused(graph, inputs):
        """Stands for a fused kernel: the right shape, no scores."""
        return lambda *tensors: (torch.zeros(1, 2, 32, 16),)

    compiled = torch.compile(torch.nn.attention.flex_attention.flex_attention, backend=fused, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        assert attend(compiled).shape == (1, 2, 32, 16)
        with pytest.raises(DenseAttentionError, match=r"recompile limit reached .flex_attention has 1"):
            attend(compiled, length=64)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_dense_guard_spares_other_devices():
    patches = Patches()
    guard_dense_attention(patches, ("cuda",))
    try:
        assert attend(torch.nn.attention.flex_attention.flex_attention).shape == (1, 2, 32, 16)
    finally:
        patches.remove()
        torch._dynamo.reset()


HALF_IMPORTS = """
    import importlib, sys, threading
    sys.setswitchinterval(1e-5)
    import torch
    from blockdraft.runtime.guards import import_everything
    if sys.argv[1] == "up front":
        import_everything(kernels=False)
    names = ["torch._inductor.compile_fx", "torch._inductor.lowering", "torch._inductor.graph",
             "torch._inductor.scheduler", "torch._inductor.ir", "torch._dynamo", "torch._dynamo.eval_frame"]
    gate, errors = threading.Barrier(len(names)), []
    def work(name):
        gate.wait()
        try:
            importlib.import_module(name)
        except (ImportError, AttributeError) as error:
            errors.append(str(error))
    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print(sum("partially initialized" in error for error in errors), len(errors))
"""
FIRST_COMPILE = """
    before = set(sys.modules)
    def work():
        x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
        torch.compile(lambda x, w: x @ w @ w)(x, w).sum().backward()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    new = [name for name in set(sys.modules) - before if name.startswith("torch.") and "compile_tasks" not in name]
    print(sorted(new))
"""


def test_first_imports_from_threads_are_half_done():
    """Up to 5 tries: one is nearly always enough."""
    assert any(int(run_script(HALF_IMPORTS, "from threads").split()[0]) > 0 for _ in range(5))


def test_imports_done_up_front_leave_none_to_the_threads():
    """Nor does a first compile in a worker import anything of the compiler; compile_tasks holds generated code."""
    imports, new_modules = run_script(HALF_IMPORTS + FIRST_COMPILE, "up front").splitlines()
    assert imports == "0 0"
    if torch.__version__.startswith("2.13"):  # the version that the list was read off
        assert new_modules == "[]"


@pytest.mark.skipif(torch.__version__ < "2.12", reason="config is process-wide in this torch")
def test_config_reaches_a_worker_only_through_a_copied_context():
    seen = []

    def read():
        seen.append(torch._dynamo.config.recompile_limit)

    before = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = 77
    try:
        for target, arguments in ((read, ()), (contextvars.copy_context().run, (read,))):
            thread = threading.Thread(target=target, args=arguments)
            thread.start()
            thread.join()
    finally:
        torch._dynamo.config.recompile_limit = before
    assert seen == [before, 77]


@pytest.fixture
def _default_stance():
    torch._dynamo.reset()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()


@pytest.mark.usefixtures("_default_stance")
@pytest.mark.parametrize("wait_for_all", [False, True])
def test_a_stance_set_by_one_worker_breaks_the_warm_up_of_the_next_unless_it_waits(wait_for_all):
    """The stance belongs to the process. The cure is a barrier: nobody sets it before everybody is warm."""
    f = torch.compile(lambda x: x.sin(), backend="eager", dynamic=False)
    first_is_warm, second_is_warm, stance_is_set = threading.Event(), threading.Event(), threading.Event()
    outcome = []

    def first():
        f(torch.ones(1))
        first_is_warm.set()
        if wait_for_all:
            second_is_warm.wait(60)
        torch.compiler.set_stance("fail_on_recompile")
        stance_is_set.set()

    def second():
        first_is_warm.wait(60)
        if not wait_for_all:
            stance_is_set.wait(60)
        try:
            f(torch.ones(2))
            outcome.append("warm")
        except RuntimeError:
            outcome.append("broken")
        second_is_warm.set()

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcome == ["warm" if wait_for_all else "broken"]


@pytest.mark.usefixtures("_default_stance")
@pytest.mark.parametrize("warm_backward", [False, True])
def test_a_lazy_backward_compile_passes_the_stance_and_the_counters_see_it(warm_backward):
    """The cure is a warm-up that runs the backward too. Matrix products only: they need no C++ compiler."""
    counters = CompileCounters.install()
    start = counters.snapshot()
    f = torch.compile(lambda x, w: x @ w @ w, dynamic=False, fullgraph=True)

    def call():
        return f(torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)).sum()

    try:
        with torch._inductor.config.patch(force_disable_caches=True):
            out = call()
            if warm_backward:
                out.backward()
            torch.compiler.set_stance("fail_on_recompile")
            warm = counters.snapshot()
            for _ in range(3):
                call().backward()
        assert counters.since(start)[:2] == (1, 2)
        assert counters.since(warm) == ((0, 0, 0, 0) if warm_backward else (0, 1, 0, 0))
    finally:
        counters.remove()
