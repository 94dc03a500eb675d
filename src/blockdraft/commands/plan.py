"""The best split of some GPUs into targets and drafters: tokens a second, memory, hours for a data set.

Speed of each side comes from --target-tok-s and --drafter-tok-s, from a run directory (--run), or is estimated from
arithmetic. The model and its errors against measured runs: docs/performance.md.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from blockdraft.commands.unused import Need, refuse_unused
from blockdraft.config import ConfigError, RunConfig, read_config

if TYPE_CHECKING:
    from blockdraft.runtime.memory_plan import Sizes
    from blockdraft.runtime.stage_sources import Rates
    from blockdraft.runtime.stages import Links, Split, Stages

TABLE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
FILLED = 0.81
"""Share of a row that documents fill where no data set is named, as measured with lengths of 20 to 4,000 tokens."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags beside those of the recipe."""

    gpus: int = 8
    """GPUs to plan for in detail; the table has numbers from 1 to 1000."""
    gpus_per_node: int = 8
    run: Path | None = None
    """Run directory whose measurements are used; without a recipe its config as well."""
    target_tok_s: float | None = None
    """Tokens a second of one target alone."""
    drafter_tok_s: float | None = None
    """Tokens a second of one drafter alone, update included."""
    tokens: float | None = None
    """Tokens of the data set; without it those of data.train."""
    rate_tflops: float = 790.0
    """Matrix rate that a GPU reaches in bfloat16, for estimates; 790 was measured on an H200."""
    gpu_gib: float = 139.0
    """Memory of a GPU."""
    peer_gb_s: float = 285.0
    """All-reduce between GPUs of a node, GB/s."""
    node_gb_s: float = 50.0
    """All-reduce between nodes, GB/s."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')}: expected a finite number above 0, found {value:g}")


NEEDS: Final = (
    Need(("rate_tflops",), ("run",), "no --run, whose rates were measured", lambda run: run is None),
    Need(
        ("rate_tflops",),
        ("target_tok_s", "drafter_tok_s"),
        "a rate that is not given",
        lambda *given: None in given,
    ),
)


class Basis(NamedTuple):
    """What every split is judged by."""

    config: RunConfig
    sizes: "Sizes"
    micro_batch_tokens: float
    data_tokens: float | None


def run(config: RunConfig | None, options: Options) -> int:
    """Prints the plan; 0, or 1 when no split fits.

    Raises:
        ConfigError: nothing to plan from, or the target or the run cannot be read.
    """
    from blockdraft.runtime.memory_plan import drafter_parameters
    from blockdraft.runtime.stages import Links, Stages, best

    refuse_unused(options, NEEDS)
    basis = find_basis(config, options)
    rates = find_rates(basis, options)
    chosen = basis.config
    # Gradients are summed in the weights' type, and weights handed out in it.
    weight_bytes = drafter_parameters(basis.sizes.shape) * (4 if chosen.drafter.dtype == "float32" else 2)
    stages = Stages(
        rates.target_tok_s,
        rates.drafter_tok_s,
        basis.micro_batch_tokens,
        weight_bytes,
        chosen.optim.accumulation,
        chosen.runtime.reuse,
        weight_bytes if chosen.optim.shard and not rates.has_exchange else 0.0,
    )
    links = Links(options.peer_gb_s, options.node_gb_s)
    fit = find_fit(basis, options)
    _say(f"rates on one GPU alone, {rates.source}:")
    _say(f"  target {rates.target_tok_s:,.0f} tokens/s, drafter {rates.drafter_tok_s:,.0f} tokens/s")
    for line in fit.lines:
        _say(line)
    every = find_splits(stages, options.gpus, options, links, fit)
    found = best(every)
    if found is None:
        _say(f"no split of {_count(options.gpus)} fits; see the lines above")
        if fit.fits and fit.least_drafters > 1:
            _say("  optim.shard divides the state over two drafters of a node or more: name more GPUs, or leave it out")
        return 1
    _say(f"{_count(options.gpus)}: {found.spell()}")
    _say(f"  {_spell_speed(found, basis)}; {found.limit} set the pace")
    _say(f"  {step_tokens(stages, found):,.0f} tokens a step; flags: {spell_flags(found)}")
    if chosen.optim.shard:
        _say(_spell_exchange(stages, found, links))
    for line in _spell_fewer(every, found):
        _say(line)
    for line in table(stages, options, links, basis, fit):
        _say(line)
    return 0


def find_basis(config: RunConfig | None, options: Options) -> Basis:
    """Config, shapes and data.

    Raises:
        ConfigError: neither a recipe nor a run is given, or the target cannot be read.
    """
    import torch

    from blockdraft.commands.build import choose_how
    from blockdraft.commands.checks import check_store, loader_config, resolve_dtypes
    from blockdraft.data.loader import Loader
    from blockdraft.data.packing import budget_bucket
    from blockdraft.models.drafter import derive_shape
    from blockdraft.models.outline import outline
    from blockdraft.runtime.memory_plan import Sizes

    if config is None:
        if options.run is None:
            raise ConfigError("blockdraft plan expects a recipe, such as `plan paper`, or --run DIR; found neither")
        config = read_config(options.run / "config.json") if (options.run / "config.json").is_file() else None
        if config is None:
            raise ConfigError(f"--run {options.run}: expected a run directory with config.json, found none")
    # Planned for GPUs, wherever the recipe runs.
    gpu = replace(config.runtime, targets=("cuda:0",), drafters=("cuda:1",), topology="pool")
    config = resolve_dtypes(replace(config, runtime=gpu))
    found = outline(config.target)
    mask = 0 if config.drafter.mask_token_id is None else config.drafter.mask_token_id
    shape = derive_shape(config.drafter, found.facts, mask)
    rows = config.data.num_rows * config.data.row_length
    filled, tokens = rows * FILLED, options.tokens
    if config.data.train:
        store = check_store(config)
        single = replace(config, optim=replace(config.optim, accumulation=1))
        counts = Loader(store, loader_config(single, 1, 0, 1)).counts
        filled = float(store.lengths.sum()) / counts.fills
        tokens = tokens if tokens is not None else float(store.lengths.sum())
    bucket = budget_bucket(config.data.row_length, config.data.target_tokens)
    how = choose_how(config.runtime.attention, torch.device("cuda:0"), shape.head_dim, is_alone=False)
    return Basis(config, Sizes(found, shape, found.facts.vocab_size, bucket, 0, how), filled, tokens)


def find_rates(basis: Basis, options: Options) -> "Rates":
    """Given, measured or estimated."""
    from blockdraft.runtime.stage_sources import Rates, estimated_rates, measured_rates

    if options.run is not None:
        found = measured_rates(options.run)
    else:
        found = estimated_rates(
            basis.config, basis.sizes.outline, basis.sizes.shape, basis.micro_batch_tokens, options.rate_tflops
        )
    given = [value for value in (options.target_tok_s, options.drafter_tok_s) if value is not None]
    return Rates(
        options.target_tok_s or found.target_tok_s,
        options.drafter_tok_s or found.drafter_tok_s,
        "as given" if len(given) == 2 else f"{found.source}{', one of them as given' if given else ''}",
        has_exchange=found.has_exchange and options.drafter_tok_s is None,
    )


def _spell_exchange(stages: "Stages", split: "Split", links: "Links") -> str:
    """What the model counts of a divided optimizer state, and what not."""
    from blockdraft.runtime.memory_plan import spell_bytes
    from blockdraft.runtime.stages import exchange_seconds

    if not stages.exchanged_bytes:
        return "  optim.shard: exchanges of weights are part of the measured drafter's rate"
    seconds = exchange_seconds(stages.exchanged_bytes, split.drafters, links)
    size = spell_bytes(round(seconds * links.inside * 1e9))
    return (
        f"  optim.shard: {seconds * 1e3:.1f} ms of each step are counted for an exchange of weights ({size} into each "
        f"drafter at --peer-gb-s {links.inside:g}); that a drafter updates only its share is not counted"
    )


class Fit(NamedTuple):
    """What the memory of a GPU allows."""

    gpus_per_target: int
    may_share: bool
    fits: bool
    least_drafters: int
    """Of a node: one has nobody to divide the optimizer's state with."""
    lines: list[str]


def find_fit(basis: Basis, options: Options) -> Fit:
    """Whether a drafter fits a GPU, over how many a target has to be divided, and whether both fit one."""
    from blockdraft.runtime.memory_fit import ELSEWHERE, knobs, spell_knobs
    from blockdraft.runtime.memory_plan import GIB, plan_memory, spell_bytes

    least = 2 if basis.config.optim.shard else 1

    def total(targets: tuple[str, ...], drafters: tuple[str, ...], device: str) -> int:
        placed = replace(basis.config, runtime=replace(basis.config.runtime, targets=targets, drafters=drafters))
        return plan_memory(placed, basis.sizes).total(device)

    holds = int(options.gpu_gib * GIB)
    # As many drafters of a node as there are at least, or one.
    others = (ELSEWHERE,) * (least - 1)
    drafter = total(("cuda:0",), ("cuda:1", *others), "cuda:1")
    both = total(("cuda:0",), ("cuda:0", *others), "cuda:0")
    per_target, target = 0, 0
    for count in range(1, min(options.gpus_per_node, len(basis.sizes.outline.layers)) + 1):
        name = "+".join(f"cuda:{index}" for index in range(count))
        target = max(total((name,), (f"cuda:{count}",), f"cuda:{index}") for index in range(count))
        if target <= holds:
            per_target = count
            break
    lines = [
        f"memory of a GPU, {spell_bytes(holds)}: a target takes {spell_bytes(target)}"
        + (f" on each of {per_target}" if per_target > 1 else "")
        + f", a drafter {spell_bytes(drafter)}, both together {spell_bytes(both)}"
    ]
    if drafter > holds:
        apart = replace(basis.config, runtime=replace(basis.config.runtime, targets=("cuda:0",), drafters=("cuda:1",)))
        lines.append(f"  the drafter does not fit; what helps: {spell_knobs(knobs(apart, basis.sizes, 'cuda:1'))}")
    if not per_target:
        lines.append(f"  the target does not fit, divided over a node of {options.gpus_per_node} either")
    return Fit(per_target, both <= holds and per_target == 1, drafter <= holds and per_target > 0, least, lines)


def find_splits(stages: "Stages", gpus: int, options: Options, links: "Links", fit: Fit) -> "list[Split]":
    """Every split of so many GPUs, or of fewer nodes, that fits."""
    from blockdraft.runtime.stages import splits

    if not fit.fits:
        return []
    found = splits(
        stages,
        gpus,
        options.gpus_per_node,
        links,
        gpus_per_target=fit.gpus_per_target,
        may_share=fit.may_share,
    )
    return [split for split in found if split.drafters >= fit.least_drafters]


def _spell_fewer(every: "list[Split]", found: "Split") -> Iterator[str]:
    """Whether all nodes are used, and what fewer of them would do."""
    from blockdraft.runtime.stages import fewest_nodes

    offered = max(split.nodes for split in every)
    if found.nodes < offered:
        yield (
            f"  {offered} nodes would be no faster: sums of gradients between them take longer than they save; a "
            "larger --optim.accumulation sums less often"
        )
    fewer = fewest_nodes(every, found)
    if fewer.nodes < found.nodes:
        yield (
            f"  {fewer.spell()} reach {fewer.tok_s:,.0f} tokens/s, {fewer.tok_s / found.tok_s:.0%} of that on "
            f"{fewer.gpus} GPUs; flags: {spell_flags(fewer)}"
        )


def _spell_speed(split: "Split", basis: Basis) -> str:
    text = f"{split.tok_s:,.0f} tokens/s"
    if basis.data_tokens is None:
        return f"{text}; name the data (--tokens or --data.train) for hours"
    hours = basis.data_tokens * basis.config.epochs / split.tok_s / 3600
    return f"{text}, {hours:,.1f} h for {basis.data_tokens:,.0f} tokens x {basis.config.epochs:g} epochs"


def step_tokens(stages: "Stages", split: "Split") -> float:
    """Tokens of one optimizer step."""
    from blockdraft.runtime.stages import per_drafter

    each = per_drafter(stages, split.nodes, split.drafters)
    return stages.micro_batch_tokens * each * split.nodes * split.drafters


def spell_flags(split: "Split") -> str:
    """What `train` is to be told, on each node."""
    if split.is_shared:
        devices = " ".join(f"cuda:{index}" for index in range(split.targets))
        flags = f"--runtime.topology shared --runtime.targets {devices} --runtime.drafters {devices}"
    else:
        span, count = split.gpus_per_target, split.targets
        groups = ["+".join(f"cuda:{one * span + part}" for part in range(span)) for one in range(count)]
        drafters = " ".join(f"cuda:{count * span + index}" for index in range(split.drafters))
        flags = f"--runtime.topology pool --runtime.targets {' '.join(groups)} --runtime.drafters {drafters}"
    launched = f", by torchrun --nnodes {split.nodes} --nproc-per-node 1" if split.nodes > 1 else ""
    return f"{flags} --optim.accumulation {split.nodes * split.drafters} (or a multiple){launched}"


def table(stages: "Stages", options: Options, links: "Links", basis: Basis, fit: Fit) -> Iterator[str]:
    """A line for each number of GPUs."""
    from blockdraft.runtime.stages import best

    yield f"{'GPUs':>5}  {'used':>5}  {'tokens/s':>12}  {'a GPU':>8}  {'hours':>9}  split of a node"
    for gpus in sorted({*TABLE, options.gpus}):
        split = best(find_splits(stages, gpus, options, links, fit))
        if split is None:
            yield f"{gpus:>5}  too few"
            continue
        tokens = basis.data_tokens
        hours = "-" if tokens is None else f"{tokens * basis.config.epochs / split.tok_s / 3600:,.2f}"
        yield (
            f"{gpus:>5}  {split.gpus:>5}  {split.tok_s:>12,.0f}  {split.tok_s / split.gpus:>8,.0f}  {hours:>9}  "
            f"{split.spell()}, {split.limit}"
        )


def _count(gpus: int) -> str:
    return f"{gpus} GPU{'s' if gpus > 1 else ''}"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
