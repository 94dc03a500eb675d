"""One training run on GPUs, in a process of its own: `python run_cases.py CASE`. The last line printed is JSON.

Targets have random weights. The pieces are built by hand: what a run needs of configs, stores and tokenizers is left
out, so that the runtime alone is on trial.

A anchors, T tokens of a row, L block size.
"""

import contextlib
import faulthandler
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from run_parts import BLOCK_SIZE, HYBRID, NARROW, SMOLLM2, Size, build, say
from transformers import Qwen3Config

from blockdraft.config import RuntimeConfig
from blockdraft.runtime.diagnostics import Diagnostics
from blockdraft.runtime.distributed import GradientSum, join_world
from blockdraft.runtime.pipeline import Pipeline
from blockdraft.runtime.reports import StepDone, WarmedUp
from blockdraft.runtime.startup import Protection
from blockdraft.runtime.waits import WaitCount
from blockdraft.runtime.workers import WorkerError
from blockdraft.training.metrics import StepSums, report
from blockdraft.training.step import DrafterStep


def train(size: Size) -> dict[str, Any]:
    """A whole run; what it printed and counted."""
    protection = Protection(lambda _line: None)
    loader, targets, steps = build(size)
    waits = WaitCount(size.count_waits)

    def begin_steady() -> None:
        protection.steady()
        if size.record:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=200_000)

    pipeline = Pipeline(
        RuntimeConfig(
            topology=size.topology, targets=size.target_devices or size.devices, drafters=size.devices, channel_depth=2
        ),
        loader, targets, steps, first_step=0, total_steps=size.steps, at_boundary=lambda _step: None,
        world=join_world() if len(steps) > 1 else None, when_warm=begin_steady,
        diagnostics=Diagnostics(poison=size.poison),
    )  # fmt: skip
    losses: list[float] = []
    warm_up: list[str] = []
    deepest = 0

    def drain() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                item = pipeline.reports.get_nowait()
                if isinstance(item, WarmedUp):
                    warm_up.append(f"{item.worker}, {item.what}, {item.seconds:.1f} s")
                elif isinstance(item, StepDone):
                    losses.append(report(item.read(BLOCK_SIZE - 1)[0]).loss)
                    waits.step(len(losses), pipeline.workers)

    try:
        pipeline.start()
        while pipeline.is_running() and pipeline.crew.first_error is None:
            drain()
            deepest = max(deepest, pipeline.channel.in_flight())
            time.sleep(0.005)
        if pipeline.crew.first_error is not None:
            pipeline.abort_sums()
        pipeline.crew.join()
        drain()
        waits.end(pipeline.workers)
        return result(size, pipeline, protection, waits) | {
            "losses": losses,
            "warm_up": [line for line in warm_up if line.startswith("drafter")],
            "deepest": deepest,
        }
    finally:
        protection.end()


def result(size: Size, pipeline: Pipeline, protection: Protection, waits: WaitCount) -> dict[str, Any]:
    """What a run that is over has counted."""
    found, compilations = pipeline.memory.found(), protection.compilations()
    for line in (*pipeline.describe_sides(), *pipeline.memory.describe(), *waits.describe()):
        say(line)
    say(f"after warm-up: {compilations}")
    seconds = time.monotonic() - pipeline.started
    traces = recorded() if size.record else []
    return {
        "allocated": allocations(traces),
        "working_sets": [working_sets(trace) for trace in traces],
        "compilations": None if compilations is None else sum(compilations),
        "memory": {str(device): memory._asdict() for device, memory in found.items()},
        "flat": all(memory.is_flat for memory in found.values()),
        "shapes": len(pipeline.shapes),
        "waits": None if waits.found is None or waits.found.unseen else waits.found.calls,
        "seconds": seconds,
        "tok_per_s": pipeline.loader.tokens_before(size.steps) / seconds,
    }


def recorded() -> list[list[dict[str, Any]]]:
    """Every allocation and release of each device since all were warm."""
    traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
    torch.cuda.memory._record_memory_history(enabled=None)
    return traces


SIDES = {"fill": "target", "_consume": "drafter"}
"""Whose code a function on the stack is."""


def allocations(traces: list[list[dict[str, Any]]]) -> dict[str, list[str]]:
    """Which side's code allocated on each device, by the functions on the stack."""
    found: dict[str, list[str]] = {}
    for index, trace in enumerate(traces):
        stacks = [{frame["name"] for frame in entry["frames"]} for entry in trace if entry["action"] == "alloc"]
        found[f"cuda:{index}"] = sorted({side for stack in stacks for name, side in SIDES.items() if name in stack})
    return found


def working_sets(trace: list[dict[str, Any]]) -> dict[str, int]:
    """The most bytes that each side held at once of what it allocated in the steady state.

    A stream belongs to one worker; whose it is say the stacks (a backward pass runs in a thread that has none).
    """
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    live: dict[int, tuple[int, int]] = {}
    owner: dict[int, str] = {}
    for entry in trace:
        if entry["action"] == "alloc":
            stream, size = entry["stream"], entry["size"]
            live[entry["addr"]] = stream, size
            held[stream] = held.get(stream, 0) + size
            most[stream] = max(most.get(stream, 0), held[stream])
            names = {frame["name"] for frame in entry["frames"]}
            for side in (side for name, side in SIDES.items() if name in names):
                owner[stream] = side
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            stream, size = live.pop(entry["addr"])
            held[stream] -= size
    return {owner.get(stream, f"stream {number}"): most[stream] for number, stream in enumerate(sorted(most))}


def lengths() -> dict[str, Any]:
    """50 micro-batches of documents of 4 to 2,000 tokens."""
    return train(Size(NARROW, 2048, 64, 50, 4, 2000))


def flat() -> dict[str, Any]:
    """1,000 steps of mixed lengths, waits counted over ten of them."""
    return train(Size(NARROW, 1024, 32, 1000, 8, 1000, count_waits=10))


def waiting() -> dict[str, Any]:
    """A drafter that reads its gradient's norm in each step: what `flat` counts nothing of must be counted here."""
    finish = DrafterStep.finish

    def wait(self: DrafterStep, step: int) -> StepSums:
        sums = finish(self, step)
        float(self.grad_norm)
        return sums

    DrafterStep.finish = wait  # type: ignore[method-assign]
    return train(Size(NARROW, 1024, 32, 60, 8, 1000, count_waits=10))


def poison() -> dict[str, Any]:
    """Drained slots are NaN: a feature that is read too late shows in the loss."""
    return train(Size(NARROW, 1024, 32, 200, 8, 1000, poison=True))


def short() -> dict[str, Any]:
    return train(Size(NARROW, 2048, 64, 60, 8, 64, record=True))


def long() -> dict[str, Any]:
    return train(Size(NARROW, 2048, 64, 60, 1800, 2048, record=True))


def mixed() -> dict[str, Any]:
    return train(Size(NARROW, 2048, 64, 60, 8, 2048, record=True))


def smollm2(attention: str) -> dict[str, Any]:
    """Its real weights where a second argument names the GGUF file, else random ones."""
    weights = sys.argv[2] if len(sys.argv) > 2 else ""
    return train(Size(SMOLLM2, 1024, 64, 60, 8, 1000, layers=5, attention=attention, count_waits=10, weights=weights))


def smollm2_flex() -> dict[str, Any]:
    return smollm2("flex")


def smollm2_own() -> dict[str, Any]:
    return smollm2("own")


def smollm2_sdpa() -> dict[str, Any]:
    return smollm2("sdpa")


def little_shared_memory() -> dict[str, Any]:
    """99 KB of shared memory a block, as consumer cards have; Triton refuses what needs more, as it does there."""
    import torch._inductor.config
    import triton.compiler.compiler

    torch._inductor.config.use_static_cuda_launcher = False
    triton.compiler.compiler.max_shared_mem = lambda _device: 99 * 1024
    wide = Qwen3Config(
        vocab_size=2048, hidden_size=512, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=8192,
    )  # fmt: skip
    return train(Size(wide, 1024, 64, 40, 8, 1000, attention="flex"))


def hybrid() -> dict[str, Any]:
    """Two targets of recurrent layers beside one drafter, on one GPU."""
    return train(Size(HYBRID, 512, 32, 30, 8, 500, target_devices=("cuda:0", "cuda:0"), topology="pool"))


def apart() -> dict[str, Any]:
    """Target and drafter on a GPU each."""
    return train(
        Size(
            NARROW, 1024, 32, 40, 8, 1000, target_devices=("cuda:0",), devices=("cuda:1",), topology="pool", record=True
        )
    )


def two_pairs() -> dict[str, Any]:
    """A target and a drafter on each of two GPUs, gradients summed by NCCL."""
    return train(Size(NARROW, 1024, 32, 60, 8, 1000, devices=("cuda:0", "cuda:1"), topology="pairs"))


def two_pairs_divided() -> dict[str, Any]:
    """The same, with the optimizer's state divided over both."""
    return train(Size(NARROW, 1024, 32, 60, 8, 1000, devices=("cuda:0", "cuda:1"), topology="pairs", shard=True))


def dead_in_collective() -> dict[str, Any]:
    """Drafter 1 dies when drafter 0's sum already runs on its GPU and waits for the other.

    Drafters of one process launch together, so nobody can die there: as if the two were of two nodes, they do not.
    """
    GradientSum._launching = lambda _self: contextlib.nullcontext()  # type: ignore[method-assign, assignment]
    return dead_before_sum()


def dead_in_exchange() -> dict[str, Any]:
    """Drafter 1 dies when drafter 0 already waits for the weights of a later round, as in `dead_in_collective`."""
    GradientSum._launching = lambda _self: contextlib.nullcontext()  # type: ignore[method-assign, assignment]
    GradientSum.hand_out = mortal(GradientSum.hand_out, DIED)  # type: ignore[method-assign]
    return end_of_a_dying_run(shard=True)


def dead_before_sum() -> dict[str, Any]:
    """Drafter 1 dies when drafter 0 waits for it to launch a sum together."""
    GradientSum.start = mortal(GradientSum.start, DIED)  # type: ignore[method-assign]
    return end_of_a_dying_run(shard=False)


DIED: list[float] = []
"""When drafter 1 died."""


def mortal(launch: Callable[[GradientSum, Any], None], died: list[float]) -> Callable[[GradientSum, Any], None]:
    """The same call, whose tenth kills drafter 1."""
    calls: list[int] = []

    def die(self: GradientSum, tensors: Any) -> None:
        if self.rank == 1:
            calls.append(1)
            if len(calls) == 10:
                time.sleep(1.0)
                died.append(time.monotonic())
                faulthandler.dump_traceback_later(40, exit=True)
                raise RuntimeError("drafter 1 dies inside a sum, as asked")
        launch(self, tensors)

    return die


def end_of_a_dying_run(*, shard: bool) -> dict[str, Any]:
    """What the run says at its end, how long that took, and which threads are left."""
    message = ""
    try:
        train(Size(NARROW, 1024, 32, 400, 8, 1000, devices=("cuda:0", "cuda:1"), topology="pairs", shard=shard))
    except WorkerError as error:
        message = str(error)
    seconds = time.monotonic() - DIED[0]
    faulthandler.cancel_dump_traceback_later()
    kinds = ("loader", "target", "drafter")
    alive = [thread.name for thread in threading.enumerate() if thread.name.startswith(kinds)]
    return {"message": message, "seconds": seconds, "alive": alive}


CASES = {
    case.__name__: case
    for case in (
        lengths,
        flat,
        waiting,
        poison,
        short,
        long,
        mixed,
        smollm2_flex,
        smollm2_own,
        smollm2_sdpa,
        little_shared_memory,
        hybrid,
        apart,
        two_pairs,
        two_pairs_divided,
        dead_in_exchange,
        dead_in_collective,
        dead_before_sum,
    )
}

if __name__ == "__main__":
    say(json.dumps({"torch": torch.__version__, **CASES[sys.argv[1]]()}))
