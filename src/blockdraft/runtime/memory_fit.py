"""Whether a memory plan fits its devices, which knob buys how much, and how the plan compares with what was reached."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from blockdraft.config import LOW_BETA, ConfigError, DataConfig, RunConfig
from blockdraft.data.packing import budget_bucket
from blockdraft.runtime.memory_plan import HOST, MemoryPlan, Sizes, plan_memory, spell_bytes

UNPLANNED: Final = 2**30
"""Bytes of a GPU that no plan counts: context, NCCL, what lies between the allocator's blocks."""

HOPELESS: Final = 2
"""How many times a device's memory an estimated peak may be: estimates are off by percents, not by this."""

ELSEWHERE: Final = "cuda:99"
"""A GPU that no run has, for plans that move something away."""


class Knob(NamedTuple):
    """A change of the config and what it frees on one device."""

    change: str
    saved: int


def capacities(devices: list[str]) -> dict[str, int]:
    """What each device of a plan holds in all; the CPU's memory is the host's. Takes nothing on any device."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        name: host
        if name == HOST or torch.device(name).type == "cpu"
        else torch.cuda.get_device_properties(torch.device(name)).total_memory - UNPLANNED
        for name in devices
    }


def knobs(config: RunConfig, sizes: Sizes, *devices: str) -> list[Knob]:
    """What would free memory on a device, or on several that share theirs, the largest first."""

    def total(config: RunConfig, sizes: Sizes) -> int:
        plan = plan_memory(config, sizes)
        return sum(plan.total(device) for device in devices)

    before, found = total(config, sizes), []
    for change, other, other_sizes in _changes(config, sizes, devices[0]):
        saved = before - total(other, other_sizes)
        if saved > before / 1000:
            found.append(Knob(change, saved))
    return sorted(found, key=lambda knob: -knob.saved)


def _changes(config: RunConfig, sizes: Sizes, device: str) -> Iterator[tuple[str, RunConfig, Sizes]]:
    """Changes of the run's numbers: (flags, config, sizes)."""
    data, loss, runtime, shape = config.data, config.loss, config.runtime, sizes.shape
    anchors = data.num_anchors if data.num_anchors is not None else data.row_length // 4
    fewer = max(1, anchors // 2)
    yield f"--data.num-anchors {fewer}", _with(config, replace(data, num_anchors=fewer)), sizes
    chunk = max(1, loss.chunk_rows // 2)
    yield f"--loss.chunk-rows {chunk}", replace(config, loss=replace(loss, chunk_rows=chunk)), sizes
    yield "--runtime.channel-depth 1", replace(config, runtime=replace(runtime, channel_depth=1)), sizes
    rows = max(1, data.num_rows // 2)
    yield f"--data.num-rows {rows}", _with(config, replace(data, num_rows=rows)), sizes
    half = data.row_length // 2
    # No row is shorter than a block: config.py refuses it.
    if half >= max(2, config.drafter.block_size):
        budget = max(half, data.target_tokens // 2)
        shorter = replace(data, row_length=half, num_anchors=fewer, target_tokens=budget)
        flags = f"--data.row-length {half} --data.num-anchors {fewer} --data.target-tokens {budget}"
        bucket = budget_bucket(half, budget)
        yield f"{flags} (and prepare with --max-length {half})", _with(config, shorter), sizes._replace(bucket=bucket)
    optim = config.optim
    if optim.accumulation >= 2 * len(runtime.drafters):
        steps = optim.accumulation // 2 // len(runtime.drafters) * len(runtime.drafters)
        yield f"--optim.accumulation {steps}", replace(config, optim=replace(optim, accumulation=steps)), sizes
    if runtime.reuse > 1:
        again = runtime.reuse // 2
        yield f"--runtime.reuse {again}", replace(config, runtime=replace(runtime, reuse=again)), sizes
    if data.target_tokens >= 2 * data.row_length:
        budget = data.target_tokens // 2
        bucket = budget_bucket(data.row_length, budget)
        smaller = _with(config, replace(data, target_tokens=budget))
        yield f"--data.target-tokens {budget}", smaller, sizes._replace(bucket=bucket)
    if len(shape.target_layer_ids) > 1 and shape.num_layers > 1:
        layers = shape.num_layers - 1
        # Default ids reach as deep with fewer layers.
        thinner = replace(shape, num_layers=layers, target_layer_ids=shape.target_layer_ids[1:])
        yield f"--drafter.num-layers {layers}", config, sizes._replace(shape=thinner)
    yield from _moves(config, sizes, device)


def _with(config: RunConfig, data: DataConfig) -> RunConfig:
    return replace(config, data=data)


def _moves(config: RunConfig, sizes: Sizes, device: str) -> Iterator[tuple[str, RunConfig, Sizes]]:
    """Changes of type and place."""
    runtime, is_gpu = config.runtime, device.startswith("cuda")
    if config.optim.optimizer == "adamw" and max(config.optim.betas) <= LOW_BETA:
        rounded = replace(config.optim, optimizer="adamw_bf16")
        yield "--optim.optimizer adamw_bf16 (moments in bfloat16)", replace(config, optim=rounded), sizes
    muon = replace(config.optim, optimizer="muon")
    yield "--optim.optimizer muon (with a learning rate of its own)", replace(config, optim=muon), sizes
    if is_gpu and device in runtime.drafters and not config.optim.shard:
        shard, others = replace(config.optim, shard=True), runtime.drafters
        flags = "--optim.shard"
        if len(others) == 1:
            flags, others = "--optim.shard and another of --runtime.drafters", (*others, ELSEWHERE)
        yield flags, replace(config, optim=shard, runtime=replace(runtime, drafters=others)), sizes
    if is_gpu:
        target = replace(config.target, dtype="bfloat16")
        yield "--target.dtype bfloat16", replace(config, target=target), sizes
        drafter = replace(config.drafter, dtype="bfloat16")
        yield "--drafter.dtype bfloat16", replace(config, drafter=drafter), sizes
    if device in runtime.drafters and any(device in name.split("+") for name in runtime.targets):
        apart = replace(runtime, topology="pool", drafters=(ELSEWHERE,))
        yield (
            "the drafter on another GPU (--runtime.topology pool --runtime.drafters)",
            (replace(config, runtime=apart)),
            sizes,
        )
    if is_gpu and runtime.targets == (device,):
        divided = replace(runtime, topology="pool", targets=(f"{device}+{ELSEWHERE}",))
        yield (
            f"the target's layers over two GPUs (--runtime.targets {device}+OTHER)",
            (replace(config, runtime=divided)),
            sizes,
        )


class Need(NamedTuple):
    """What a run wants of one memory; the CPU's is the host's."""

    devices: tuple[str, ...]
    holds: int
    total: int
    resident: int
    """What has to stay all the time."""

    def spell(self) -> str:
        """The devices' names."""
        return " and ".join(self.devices)


def needs(plan: MemoryPlan, holds: dict[str, int]) -> list[Need]:
    """What a plan wants of each memory, by its devices in order."""
    on_host = tuple(name for name in plan.devices() if name == HOST or torch.device(name).type == "cpu")
    groups = [(name,) for name in plan.devices() if name not in on_host] + [on_host]
    return [
        Need(
            devices,
            holds[devices[0]],
            sum(plan.total(name) for name in devices),
            sum(plan.total(name, resident=True) for name in devices),
        )
        for devices in groups
    ]


def say_plan(
    config: RunConfig, sizes: Sizes, say: Callable[[str], None], capacity: dict[str, int] | None = None
) -> MemoryPlan:
    """Says the plan, and for every device that it does not fit, what would help; returns it.

    Raises:
        ConfigError: as `refuse_what_cannot_fit`.
    """
    plan = plan_memory(config, sizes)
    holds = capacities(plan.devices()) if capacity is None else capacity
    for line in plan.lines():
        say(line)
    refuse_what_cannot_fit(config, sizes, holds)
    for need in needs(plan, holds):
        if need.total > need.holds:
            say(
                f"warning: memory of {need.spell()}: the plan's {spell_bytes(need.total)} may not fit into "
                f"{spell_bytes(need.holds)}; what helps: {spell_knobs(knobs(config, sizes, *need.devices))}"
            )
    return plan


def refuse_what_cannot_fit(
    config: RunConfig, sizes: Sizes, capacity: dict[str, int] | None = None, *, only_hopeless: bool = False
) -> None:
    """Ends a run that would only fail later, in the middle of building or warming up.

    Raises:
        ConfigError: what has to stay on a device all the time is more than it holds (not asked with `only_hopeless`),
            or the estimated peak is more than `HOPELESS` times that.
    """
    plan = plan_memory(config, sizes)
    holds = capacities(plan.devices()) if capacity is None else capacity
    for need in needs(plan, holds):
        stays = need.resident > need.holds and not only_hopeless
        if stays or need.total > HOPELESS * need.holds:
            raise ConfigError(
                f"memory of {need.spell()}: expected at most {spell_bytes(need.holds)}, found that the run has to keep "
                f"{spell_bytes(need.resident)} there ({spell_bytes(need.total)} at its peak); what helps: "
                f"{spell_knobs(knobs(config, sizes, *need.devices))}"
            )


def spell_knobs(found: list[Knob], most: int = 6) -> str:
    """The changes that free most."""
    return ", ".join(f"{knob.change} frees {spell_bytes(knob.saved)}" for knob in found[:most]) or "a larger device"


def is_shortage(text: str) -> bool:
    """Whether an error's text says that memory ran out: torch has a type for it on GPUs alone."""
    return torch.OutOfMemoryError.__name__ in text or "DefaultCPUAllocator" in text


def compare(plan: MemoryPlan, reached: dict[str, int]) -> list[str]:
    """A line a device: planned and reached."""
    lines = []
    for device in plan.devices():
        planned = plan.total(device)
        if device in reached:
            off = planned / reached[device] - 1
            lines.append(
                f"memory of {device}: planned {spell_bytes(planned)}, reached {spell_bytes(reached[device])} "
                f"({off:+.1%} off)"
            )
        else:
            lines.append(f"memory of {device}: planned {spell_bytes(planned)}; torch counts no peak there")
    return lines


def peaks(devices: list[str]) -> dict[str, int]:
    """The most that was allocated so far on each GPU among the devices."""
    return {
        name: torch.cuda.max_memory_allocated(torch.device(name))
        for name in devices
        if name != HOST and torch.device(name).type == "cuda"
    }


def explain_shortage(config: RunConfig, sizes: Sizes) -> list[str]:
    """What an out-of-memory error is answered with: plan against actual, and what would help."""
    plan = plan_memory(config, sizes)
    lines = ["out of memory; the plan and what was reached:", *plan.lines()]
    reached = peaks(plan.devices())
    lines += compare(plan, reached)
    for name in reached:
        free, total = torch.cuda.mem_get_info(torch.device(name))
        own = torch.cuda.memory_reserved(torch.device(name))
        others = max(0, total - free - own - UNPLANNED)
        lines.append(
            f"{name}: {spell_bytes(own)} reserved by this run, {spell_bytes(others)} by others, {spell_bytes(free)} "
            f"free of {spell_bytes(total)}"
        )
    for device in plan.devices():
        lines.append(f"what helps on {device}: {spell_knobs(knobs(config, sizes, device))}")
    return lines
