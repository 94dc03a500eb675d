"""One race on a GPU, in a process of its own: `python race_cases.py CASE guarded|unguarded`.

Cold caches come from the environment (test_races.py sets empty directories). The last line printed is JSON with
`errors` (by message) and what the case measured. A case that hangs prints the stacks of all threads after HANG_S
seconds and exits with 1.

Shape letters: R rows, H query heads, G key-value heads, Q block queries, K context and block keys, E head width.
"""

import collections
import contextlib
import faulthandler
import functools
import json
import sys
import threading

import torch
import torch._dynamo
import torch._inductor.compile_fx
import torch._inductor.utils
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from blockdraft.runtime.counters import CompileCounters
from blockdraft.runtime.guards import DenseAttentionError, attention_site, import_everything, install

HANG_S = 60
NUM_THREADS = 4
HEADS, KV_HEADS, HEAD_WIDTH, CONTEXT, ANCHORS, BLOCK = 32, 8, 128, 2048, 128, 16


def run_threads(body, number=NUM_THREADS):
    """Run body(i) in threads that start together; errors by message."""
    gate, errors = threading.Barrier(number), collections.Counter()

    def work(i):
        gate.wait()
        try:
            body(i)
        except Exception as error:
            errors[f"{type(error).__name__}: {str(error)[:160]}"] += 1

    threads = [threading.Thread(target=work, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@triton.jit
def twice(x, y, n, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


def launch_twice(kernel, **options):
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.randn(1 << 20, device="cuda")
        y = torch.empty_like(x)
        kernel[lambda meta: (triton.cdiv(x.numel(), meta["B"]),)](x, y, x.numel(), **options)
        torch.cuda.current_stream().synchronize()
        assert torch.equal(y, x * 2)


def autotuner(guarded):
    """Cold tuner objects, called by all threads at once; each configuration must be benchmarked once."""
    starts, failed, benchmarks, errors = 100 if guarded else 20, 0, 0, collections.Counter()
    configs = [triton.Config({"B": size}, num_warps=warps) for size in (128, 256, 512, 1024) for warps in (1, 4)]

    def bench(call, quantiles):
        nonlocal benchmarks
        benchmarks += 1
        return triton.testing.do_bench(call, warmup=1, rep=3, quantiles=quantiles)

    for _ in range(starts):
        kernel = triton.autotune(configs=configs, key=["n"], do_bench=bench)(twice)
        new = run_threads(lambda i, kernel=kernel: launch_twice(kernel))
        errors += new
        failed += bool(new)
    return {"errors": errors, "starts": starts, "failed": failed, "benchmarks": benchmarks, "configs": len(configs)}


def kernel_load(_guarded):
    """Cold kernels without a tuner: all threads load the same binary at once."""
    errors = collections.Counter()
    for _ in range(50):
        kernel = triton.jit(twice.fn)
        errors += run_threads(lambda i, kernel=kernel: launch_twice(kernel, B=256), 8)
    return {"errors": errors}


def attention_inputs():
    query_RHQE = torch.randn(1, HEADS, ANCHORS * BLOCK, HEAD_WIDTH, device="cuda", dtype=torch.bfloat16)
    key_RGKE = torch.randn(1, KV_HEADS, CONTEXT + ANCHORS * BLOCK, HEAD_WIDTH, device="cuda", dtype=torch.bfloat16)
    anchor_A = torch.randperm(CONTEXT - BLOCK, device="cuda")[:ANCHORS].sort().values

    def visible(row, head, query, key):
        block = query // BLOCK
        in_context = (key < CONTEXT) & (key < anchor_A[block])
        return in_context | ((key >= CONTEXT) & ((key - CONTEXT) // BLOCK == block))

    mask = create_block_mask(visible, None, None, query_RHQE.shape[2], key_RGKE.shape[2], device="cuda")
    return query_RHQE.requires_grad_(), key_RGKE.requires_grad_(), torch.randn_like(key_RGKE).requires_grad_(), mask


def attend(function, steps=3):
    """Forward and backward on a stream of this thread."""
    with torch.cuda.stream(torch.cuda.Stream()):
        query_RHQE, key_RGKE, value_RGKE, mask = attention_inputs()
        for _ in range(steps):
            out_RHQE = function(query_RHQE, key_RGKE, value_RGKE, block_mask=mask, enable_gqa=True)
            out_RHQE.float().pow(2).mean().backward()
        torch.cuda.current_stream().synchronize()


def deadlock(guarded):
    """The first call of one compiled flex_attention, by all threads. Guarded: the start-up order of a run."""
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    lock, warm = threading.Lock(), threading.Barrier(NUM_THREADS)
    counters = CompileCounters.install()
    snapshots = []

    def body(_):
        if guarded:
            torch.autograd.set_multithreading_enabled(False)
            with lock:
                attend(compiled, steps=1)
            warm.wait()
            snapshots.append(counters.snapshot())
        attend(compiled)

    starts, errors, after_warm_up = 5 if guarded else 1, collections.Counter(), 0
    for _ in range(starts):
        torch._dynamo.reset()
        snapshots.clear()
        with torch._inductor.utils.fresh_cache():
            errors += run_threads(body)
        after_warm_up += sum(counters.since(snapshots[0])) if snapshots else 0
    return {"errors": errors, "starts": starts, "after_warm_up": after_warm_up}


def mainwarm(_guarded):
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    counters = CompileCounters.install()
    attend(compiled)
    warm = counters.snapshot()
    errors = run_threads(lambda i: attend(compiled))
    return {"errors": errors, "after_warm_up": sum(counters.since(warm))}


def graphtrees(_guarded):
    """CUDA-graph trees outside the thread that made them, one call at a time."""
    lock, trees = threading.Lock(), torch.compile(flex_attention, dynamic=False, mode="reduce-overhead")

    def body(_):
        with lock:
            attend(trees)

    return {"errors": run_threads(body, 2)}


def peak_gib(function):
    attend(function, 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(function, 1)
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def dense(guarded):
    """Memory of both paths; guarded, the dense one must say what it is."""
    compiled_gib = peak_gib(torch.compile(flex_attention, dynamic=False, fullgraph=True))
    if not guarded:
        return {"errors": {}, "compiled_gib": compiled_gib, "dense_gib": peak_gib(flex_attention)}
    message = ""
    try:
        with attention_site("layers.2"):
            attend(flex_attention, 1)
    except DenseAttentionError as error:
        message = str(error)
    return {"errors": {}, "compiled_gib": compiled_gib, "message": message}


class Adds(torch.nn.Module):
    def forward(self, x):
        for _ in range(200):
            x = x + 1
        return x


def fxflag(_guarded):
    """One thread traces, the others make warm compiled calls."""
    compiled = torch.compile(lambda x: x.sin() + 1)
    compiled(torch.randn(4))

    def body(i):
        for _ in range(30 if i == 0 else 3000):
            if i == 0:
                torch.fx.symbolic_trace(Adds())
            else:
                compiled(torch.randn(4))

    return {"errors": run_threads(body)}


CASES = {case.__name__: case for case in (autotuner, kernel_load, deadlock, mainwarm, graphtrees, dense, fxflag)}


def main(name, mode):
    case = functools.partial(CASES[name], mode == "guarded")
    guards = contextlib.ExitStack()
    if mode == "guarded":
        import_everything(kernels=True)
        installed = install()
        guards.callback(installed.remove)
        sys.stdout.write("\n".join(installed.lines) + "\n")
    if name == "deadlock" and mode == "unguarded":
        faulthandler.dump_traceback_later(HANG_S, exit=True)
    with guards:
        result = case()
    sys.stdout.write(json.dumps({"torch": torch.__version__, "triton": triton.__version__, **result}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
