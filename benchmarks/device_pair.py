"""Two GPUs with random weights: gradient sums, the pipeline on both, two target replicas, a divided target.

usage: python benchmarks/device_pair.py [--shapes qwen3-8b|qwen3.6-27b|hybrid|tiny] [--steps 300] [--seconds 240]
           [--parts losses,sums,pool,targets,split] [--float8] [--several layer] [--single layer] [--sums nccl peer]

`--devices cpu cpu` rehearses every part on CPUs. A part that fails is said, and the next one runs.

losses   two pairs that share a GPU each against one drafter with twice the micro-batches
sums     time of a step without sums, with sums beside its backward, with sums after it; the sums alone. `--sums`: by
         NCCL, by copies between the GPUs, or first the one and then the other
whole    the same with the drafter compiled as `pool` has it
steps    time of a step of one drafter, compiled both ways
pool     target on the first GPU, drafter on the second; each side alone in the same process
targets  two target replicas, one a GPU, against one; both start cold at once
split    features of a target over both GPUs against the whole one's, bit for bit
"""

import argparse
import gc
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from device_run import alone, say, synchronize, tell, train
from device_shapes import TARGETS, make_loader, make_step, make_target
from device_sums import Replica, Stopwatch, Sums, measure_sums
from peer_sums import NUM_LANES
from transformers import AutoModelForCausalLM

from blockdraft.data.loader import Fill, Loader
from blockdraft.models.compiled import How
from blockdraft.models.target import Target
from blockdraft.models.target_split import place
from blockdraft.runtime.slots import Filler, Slot
from blockdraft.runtime.startup import Protection
from blockdraft.runtime.transfers import pinned
from blockdraft.runtime.waits import WaitCount
from blockdraft.training.step import DrafterStep


class Bench:
    """What the parts share; models are built when a part first needs them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.shapes, self.steps, self.documents = args.shapes, args.steps, args.documents
        self.float8: bool = args.float8
        self.ctas: list[str] = args.ctas
        self.lanes: list[int] = args.lanes
        self.sums: list[Literal["nccl", "peer"]] = args.sums
        self.devices = [torch.device(name) for name in args.devices]
        self.is_gpu = self.devices[0].type == "cuda"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32
        self.several: How = args.several if self.is_gpu else "nothing"
        self.single: How = args.single if self.is_gpu else "nothing"
        self.protection = Protection(say) if self.is_gpu else None
        self.started, self.seconds = time.monotonic(), args.seconds
        self._targets: dict[int, Target] = {}
        self._steps: dict[tuple[int, How], DrafterStep] = {}

    def target(self, index: int) -> Target:
        """The replica on that device."""
        if index not in self._targets:
            started = time.monotonic()
            self._targets[index] = make_target(self.shapes, self.devices[index], self.dtype, float8=self.float8)
            synchronize()
            seconds = time.monotonic() - started
            say(f"target on {self.devices[index]}: built in {seconds:.1f} s; {self._targets[index].note}")
        return self._targets[index]

    def forget(self, index: int) -> None:
        """Frees that replica."""
        self._targets.pop(index, None)
        clear()

    def step(self, index: int, how: How) -> DrafterStep:
        """The drafter on that device that is compiled so."""
        if (index, how) not in self._steps:
            target = self.target(min(self._targets, default=0))
            self._steps[index, how] = make_step(
                self.shapes, target, self.devices[index], how=how, accumulation=1, total_steps=self.steps
            )
        return self._steps[index, how]

    def loader(self, num_drafters: int, accumulation: int) -> Loader:
        """The same documents for every run."""
        vocab_size = TARGETS[self.shapes].vocab_size
        return make_loader(
            self.shapes, vocab_size, documents=self.documents, num_drafters=num_drafters, accumulation=accumulation
        )

    def fills(self, count: int) -> list[Fill]:
        """The first slots' contents."""
        found = []
        for fill in self.loader(1, 1).fills(0, count):
            found.append(pinned(fill) if self.is_gpu else fill)
        return found[:count]

    def let_compile(self) -> None:
        """A steady state is over."""
        if self.protection is not None:
            torch.compiler.set_stance("default")

    def left(self) -> float:
        """Seconds until no further part is begun."""
        return self.seconds - (time.monotonic() - self.started)


def clear() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def part_sums(bench: Bench) -> None:
    bounded = [(1, Sums("nccl", int(ctas))) for ctas in bench.ctas if "nccl" in bench.sums]
    chosen = [
        Sums(by, lanes=lanes) for by in bench.sums for lanes in (bench.lanes if by == "peer" else bench.lanes[:1])
    ]
    time_sums(bench, bench.several, [*((number, sums) for number in (1, 2) for sums in chosen), *bounded])


def part_whole(bench: Bench) -> None:
    time_sums(bench, bench.single, [(1, Sums(by)) for by in bench.sums])


def part_steps(bench: Bench) -> None:
    fill = bench.fills(1)[0]
    width = bench.target(0).hidden_size * len(bench.target(0).layer_ids)
    for how in (bench.single, bench.several):
        replica = Replica(bench.step(0, how), fill, width, 1)
        for _ in range(3):
            replica.run("without")
        found = [Stopwatch(bench.devices[0]).measure(lambda: replica.run("without"), 5) for _ in range(3)]  # noqa: B023
        say(f"one drafter run by {how}: {' '.join(f'{ms:.2f}' for ms in found)} ms a step, update included")


def time_sums(bench: Bench, how: How, variants: list[tuple[int, Sums]]) -> None:
    steps = [bench.step(index, how) for index in range(2)]
    width = bench.target(0).hidden_size * len(bench.target(0).layer_ids)
    for micro_batches, sums in variants:
        bench.let_compile()
        for line in measure_sums(steps, bench.fills(2), width, micro_batches, sums):
            say(f"by {how}, {micro_batches} micro-batches a replica, {sums}: {line}")


def part_losses(bench: Bench) -> None:
    num_steps = min(24, bench.steps)
    steps = [bench.step(index, bench.several) for index in range(2)]
    first = {
        f"master.{name}": value.detach().to("cpu", copy=True) for name, value in steps[0].optimizer.masters.items()
    }
    targets = [bench.target(index) for index in range(2)]

    def restore(step: DrafterStep) -> None:
        step.optimizer.load_state_tensors(first)

    two = train(
        "shared", bench.loader(2, 2), targets, steps, num_steps, protection=bench.protection,
        waits=WaitCount(0), restore=restore,
    )  # fmt: skip
    say("two pairs, each on one device:")
    tell(two, bench.protection, WaitCount(0))
    bench.let_compile()
    one = train(
        "pool", bench.loader(1, 2), targets[1:], steps[:1], num_steps, protection=bench.protection,
        waits=WaitCount(0), restore=restore,
    )  # fmt: skip
    say("one drafter, two micro-batches a step:")
    tell(one, bench.protection, WaitCount(0))
    bench.let_compile()
    apart = [abs(a - b) / b for a, b in zip(two.losses, one.losses, strict=True)]
    shown = " ".join(f"{share:.1e}" for share in apart)
    say(f"losses apart by (relative, steps 1 to {num_steps}): {shown}; most {max(apart):.2e}, bf16 rounding is 3.9e-03")


def part_pool(bench: Bench) -> None:
    bench.forget(1)
    target = bench.target(0)
    step = bench.step(1, bench.single)
    # As a run has it: layers behind the last captured one are freed.
    target.drop_decoding()
    clear()
    loader = bench.loader(1, 1)
    memory_of(bench, {"target": target.model.parameters(), "drafter": step.drafter.parameters()}, step)
    ran = train("pool", loader, [target], [step], bench.steps, protection=bench.protection, waits=WaitCount(0))
    tell(ran, bench.protection, WaitCount(0))
    bench.let_compile()
    rates = alone(loader, target, step, bench.steps, most=20)
    bench.forget(0)
    slower = min(rates)
    say(
        f"pool 1 + 1: {ran.later_rate:,.0f} tok/s (second half), {ran.later_rate / slower:.1%} of the slower side alone"
    )


def memory_of(bench: Bench, parts: dict[str, object], step: DrafterStep) -> None:
    """GiB by component, and what each device has allocated with everything built."""
    for name, values in parts.items():
        say(f"memory: {name} weights {size_of(values):.2f} GiB")
    state = [*step.optimizer.masters.values()]
    say(f"memory: masters {size_of(state):.2f} GiB, both moments and float32 gradients {3 * size_of(state):.2f} GiB")
    say(
        f"memory: embedding and head {size_of(step.ends.embedding.parameters()) + size_of([step.head.head_weight]):.2f}"
    )
    if bench.is_gpu:
        for device in bench.devices:
            say(f"memory: {device} allocated {torch.cuda.memory_allocated(device) / 2**30:.2f} GiB before the run")


def size_of(values: object) -> float:
    return sum(value.numel() * value.element_size() for value in values) / 2**30  # type: ignore[attr-defined]


def part_targets(bench: Bench) -> None:
    targets = [bench.target(index) for index in range(2)]
    fills = bench.fills(8)
    used = sum(sum(fill.used_R) for fill in fills)
    config = bench.loader(1, 1).config

    def work(target: Target, repeats: int) -> None:
        if bench.is_gpu:
            torch.cuda.set_device(target.device)
        width = target.hidden_size * len(target.layer_ids)
        slot = Slot(config.num_rows, config.row_length, width, target.dtype, target.device)
        filler = Filler(target, config.num_rows, config.row_length)
        for _ in range(repeats):
            for fill in fills:
                filler.fill(slot, fill)
        if bench.is_gpu:
            torch.cuda.synchronize(target.device)

    rates = {}
    for name, chosen, repeats in (
        ("both, cold", targets, 1), ("one", targets[:1], 2), ("both", targets, 2), ("the other", targets[1:], 2),
    ):  # fmt: skip
        seconds = in_threads([lambda target=target, repeats=repeats: work(target, repeats) for target in chosen])
        rates[name] = len(chosen) * repeats * used / seconds
        say(f"targets, {name}: {rates[name]:,.0f} tok/s, {seconds:.2f} s")
    say(f"two target replicas: {rates['both'] / rates['one']:.3f} times one")


def in_threads(bodies: list[Callable[[], None]]) -> float:
    """Runs them at once; seconds until the last is done. Raises what the first of them raised."""
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    started = time.monotonic()
    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
    return time.monotonic() - started


def part_split(bench: Bench) -> None:
    whole = bench.target(0)
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randint(0, whole.vocab_size, shape, generator=generator) for shape in ((2, 256), (1, 777), (8, 64))
    ]
    expected = [whole.features(ids_BP.to(whole.device)) for ids_BP in batches]
    # Not by `.to`: it would round the rotary frequencies too.
    with torch.device(bench.devices[0]):
        model = AutoModelForCausalLM.from_config(whole.model.config, dtype=bench.dtype)
    model.load_state_dict(whole.model.state_dict())
    split = Target(place(model, "+".join(str(device) for device in bench.devices)), whole.layer_ids)
    say(f"divided: {sorted({str(weight.device) for weight in split.model.parameters()})}; {split.note}")
    for ids_BP, features_BPC in zip(batches, expected, strict=True):
        found_BPC = split.features(ids_BP.to(split.device))
        same = torch.equal(found_BPC, features_BPC)
        apart = float((found_BPC.float() - features_BPC.float()).abs().max())
        say(f"divided target, {tuple(ids_BP.shape)}: bit-equal {same}, largest difference {apart:.3g}")
    del split, model
    clear()


PARTS = {
    "losses": part_losses,
    "sums": part_sums,
    "whole": part_whole,
    "steps": part_steps,
    "pool": part_pool,
    "targets": part_targets,
    "split": part_split,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=list(TARGETS), default="tiny")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--ctas", nargs="*", default=["16", "8", "4"], help="bounds on what NCCL takes, for `sums`")
    parser.add_argument(
        "--lanes", nargs="+", type=int, default=[NUM_LANES], help="buckets under way, for `--sums peer`"
    )
    parser.add_argument("--sums", nargs="+", choices=["nccl", "peer"], default=["nccl"], help="by what, for `sums`")
    parser.add_argument("--float8", action="store_true", help="targets with products in float8")
    parser.add_argument("--several", default="kernels", help="how drafters run whose gradients are summed")
    parser.add_argument("--single", default="kernels", help="how the one of `pool` is")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--after", default="", help="begins when this file is there: imports beside another run")
    parser.add_argument("--seconds", type=float, default=240.0, help="no part is begun after this long")
    args = parser.parse_args()
    while args.after and not Path(args.after).exists():
        time.sleep(0.1)
    bench = Bench(args)
    for name in args.parts.split(","):
        if bench.left() <= 0:
            say(f"=== {name}: left out, no time")
            continue
        say(f"=== {name} on {bench.shapes}, {bench.left():.0f} s left")
        started = time.monotonic()
        try:
            PARTS[name](bench)
        except Exception:
            say(f"FAILED {name}:\n{traceback.format_exc(limit=-8)}")
        bench.let_compile()
        say(f"=== {name} took {time.monotonic() - started:.1f} s")
    if bench.protection is not None:
        bench.protection.end()


if __name__ == "__main__":
    main()
