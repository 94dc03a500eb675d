"""Static checks of a run: files, template, tokenizer, ids, mask token. They come before any device memory is taken.

Each message says which flag, file or row, what was expected, what was found, and what mends it.
"""

import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from blockdraft.config import MOST_STEPS, ConfigError, LossConfig, RunConfig
from blockdraft.data.anchors import default_gamma, position_weights
from blockdraft.data.conversations import Drops
from blockdraft.data.evalsets import read_prompts, set_names
from blockdraft.data.loader import Loader, LoaderConfig
from blockdraft.data.packing import budget_bucket
from blockdraft.data.row_budget import GRAIN
from blockdraft.data.template import ChatTemplate, RowRefused, template_hash, tokenizer_hash
from blockdraft.models.compiled import How
from blockdraft.models.drafter import DrafterShape, TargetFacts, derive_shape
from blockdraft.models.formats import CONFIG, read_json, read_shape
from blockdraft.models.outline import Outline, outline
from blockdraft.models.target import choose_dtype, load_tokenizer, mask_token_id
from blockdraft.runtime.devices import check_devices, check_replicas
from blockdraft.runtime.memory_fit import refuse_what_cannot_fit
from blockdraft.runtime.memory_plan import Sizes

if TYPE_CHECKING:
    from blockdraft.data.store import Store


MOST_DROPPED: Final = 0.05
"""Share of an evaluation set's rows; the same as `prepare` takes unless told otherwise."""


class HeldOut(NamedTuple):
    """An evaluation set, as token ids."""

    name: str
    prompts: list[list[int]]
    num_rows: int
    """Rows read for them."""
    drop_lines: list[str]
    """Those that are no prompts, by reason."""


class Checked(NamedTuple):
    """What the checks have read, for what comes after them."""

    target_devices: list[list[torch.device]]
    drafter_devices: list[torch.device]
    store: "Store"
    tokenizer: PreTrainedTokenizerBase
    loader: Loader
    draft_ids: NDArray[np.int64] | None
    outline: Outline
    mask_token: int
    shape: DrafterShape
    """Without the factors on the target's ends, which are measured on its weights."""
    held_out: list[HeldOut]
    total_steps: int

    @property
    def head_rows(self) -> int:
        """Ids of the drafter's head in training."""
        return self.shape.vocab_size if self.draft_ids is None else len(self.draft_ids)

    def sizes(self, how: How) -> Sizes:
        """What the memory plan is made from; `how` the drafter will run."""
        data = self.loader.config
        bucket = budget_bucket(data.row_length, data.target_tokens)
        fills, budget = self.loader.counts.fills, self.loader.row_budget
        return Sizes(self.outline, self.shape, self.head_rows, bucket, fills, how, budget)


def resolve_dtypes(config: RunConfig) -> RunConfig:
    """The config with every `auto` data type replaced by the one the devices are good at."""
    float8 = config.target.dtype == "float8"
    target = config.target.dtype if float8 else choose_dtype(config.target.dtype, config.runtime.targets[0])
    drafter = choose_dtype(config.drafter.dtype, config.runtime.drafters[0])
    return replace(
        config,
        target=replace(config.target, dtype=target),
        drafter=replace(config.drafter, dtype=drafter),
    )


def check(config: RunConfig, *, node: int = 0, num_nodes: int = 1) -> Checked:
    """Everything that can be found wrong without loading a weight.

    Raises:
        ConfigError: whatever is wrong with the config, the data or the target's files.
    """
    target_devices, drafter_devices = check_topology(config)
    if config.optim.shard and len(drafter_devices) == 1:
        raise ConfigError(
            "optim.shard divides the optimizer's state over the drafters of a node: expected at least 2 "
            "runtime.drafters, found 1; name more, or leave it out"
        )
    store = check_store(config)
    tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
    check_prepared_for(config, store, tokenizer)
    found = outline(config.target)
    check_lengths(config, store)
    seen = check_ids(config, store, found.facts.vocab_size)
    mask = config.drafter.mask_token_id
    if mask is None:
        mask = mask_token_id(tokenizer, found.facts.vocab_size, seen, found.stop_ids)
    shape = derive_shape(config.drafter, found.facts, mask)
    if config.drafter.init_from:
        check_start(config.drafter.init_from, shape)
    draft_ids = store.seen_ids() if config.loss.draft_vocab == "data" else None
    check_memory(config, found, shape, shape.vocab_size if draft_ids is None else len(draft_ids))
    loader = Loader(store, loader_config(config, len(drafter_devices), node, num_nodes), draft_ids)
    held_out = list(read_held_out(config, tokenizer, found.facts))
    total_steps = config.steps if config.steps is not None else loader.steps_for(config.epochs)
    if total_steps > MOST_STEPS:
        raise ConfigError(
            f"epochs {config.epochs:g} of these data are {total_steps:,} steps, at most {MOST_STEPS:,}; lower it"
        )
    loader.fix_row_budget(total_steps)
    return Checked(
        target_devices,
        drafter_devices,
        store,
        tokenizer,
        loader,
        draft_ids,
        found,
        mask,
        shape,
        held_out,
        total_steps,
    )


def check_topology(config: RunConfig) -> tuple[list[list[torch.device]], list[torch.device]]:
    """Devices of each target replica, and of drafters.

    Raises:
        ConfigError: devices that do not exist, or a topology they cannot form.
    """
    runtime = config.runtime
    targets = check_replicas(runtime.targets)
    drafters = check_devices(runtime.drafters, "drafters")
    if runtime.topology != "pool" and len(targets) != len(drafters):
        raise ConfigError(
            f"runtime.topology {runtime.topology} joins one target to one drafter; got {len(targets)} targets and "
            f"{len(drafters)} drafters; give as many of each, or use pool"
        )
    if runtime.topology == "shared" and targets != [[device] for device in drafters]:
        raise ConfigError(
            f"runtime.topology shared puts target and drafter of a pair on one device; got targets {runtime.targets} "
            f"and drafters {runtime.drafters}; name the same devices for both"
        )
    for name, value in (("channel_depth", runtime.channel_depth), ("reuse", runtime.reuse)):
        if value < 1:
            raise ConfigError(f"runtime.{name} must be at least 1, got {value}")
    if runtime.attention == "flex" and any(device.type == "cpu" for device in drafters):
        raise ConfigError("runtime.attention flex has no backward on a CPU; use auto or sdpa")
    return targets, drafters


def check_store(config: RunConfig) -> "Store":
    """The token store that the config names.

    Raises:
        ConfigError: none is named, or there is none.
    """
    # Machines that only run benchmarks have no `datasets`.
    from blockdraft.data.store import open_store

    if not config.data.train:
        raise ConfigError("data.train is empty; give the token store that `blockdraft prepare` wrote")
    return open_store(config.data.train)


def check_prepared_for(config: RunConfig, store: "Store", tokenizer: PreTrainedTokenizerBase) -> None:
    """The store was made with this target's tokenizer and chat template.

    Raises:
        ConfigError: it was made with others.
    """
    fix = f"prepare it again with --target {config.target.path}"
    for what, key, expected in (
        ("tokenizer", "tokenizer_hash", tokenizer_hash(tokenizer)),
        ("chat template", "template_hash", template_hash(tokenizer)),
    ):
        found = store.manifest.get(key)
        if found != expected:
            raise ConfigError(
                f"{config.data.train}: prepared with another {what} ({found}) than the target's ({expected}); {fix}"
            )


def check_lengths(config: RunConfig, store: "Store") -> None:
    """Every document fits in a row.

    Raises:
        ConfigError: one does not; with the command that cuts it, from the same answers.
    """
    row_length, longest = config.data.row_length, int(store.lengths.max(initial=0))
    if longest <= row_length:
        return
    made = store.manifest["settings"]
    sources = [shlex.quote(source) for source in made.get("conversations", [])] or ["CONVERSATIONS"]
    target = shlex.quote(made.get("target", config.target.path))
    command = ["blockdraft prepare", *sources, "--target", target, "--output", shlex.quote(str(store.path))]
    command += ["--max-length", str(row_length)]
    command += [] if made.get("reasoning", True) else ["--no-reasoning"]
    command += ["--trust-remote-code"] if made.get("trust_remote_code", False) else []
    raise ConfigError(
        f"{config.data.train}: data.row_length must be at least the longest document ({longest} tokens), got "
        f"{row_length}; {int((store.lengths > row_length).sum()):,} of {len(store):,} documents are longer. Cut them: "
        f"`{' '.join(command)}`, which reads the same answers again; or raise data.row_length"
    )


def check_ids(config: RunConfig, store: "Store", vocab_size: int) -> set[int]:
    """Every token id of the store is a row of the target's embedding; returns the ids.

    Raises:
        ConfigError: one is not.
    """
    seen = set(store.all_ids().tolist())
    highest = max(seen)
    if highest >= vocab_size:
        raise ConfigError(
            f"{config.data.train}: holds token id {highest}, the target's embedding has {vocab_size} rows; "
            "prepare it again with this target's tokenizer"
        )
    return seen


def check_memory(config: RunConfig, found: Outline, shape: DrafterShape, head_rows: int) -> None:
    """No row, block or number of anchors that no memory could hold: the loader would be the first to ask for it.

    Raises:
        ConfigError: the least that the run can need is hopelessly much. What is only too much, the memory plan says.
    """
    is_cpu = any(name.startswith("cpu") for name in config.runtime.drafters)
    how: How = "nothing" if is_cpu else "layer"
    # Less than a row, the loader refuses.
    bucket = budget_bucket(config.data.row_length, max(config.data.target_tokens, config.data.row_length))
    refuse_what_cannot_fit(config, Sizes(found, shape, head_rows, bucket, 0, how, row_budget=GRAIN), only_hopeless=True)


def check_start(init_from: str, shape: DrafterShape) -> None:
    """The export to start from has this run's shape; factors of the target's ends are left out here.

    Raises:
        ConfigError: a run directory, no export, or another shape.
    """
    directory = Path(init_from)
    checkpoints = sorted((directory / "checkpoints").glob("step_????????"))
    if checkpoints or (directory / "state.json").is_file():
        run, found = (directory, "run directory") if checkpoints else (directory.parents[1], "checkpoint")
        raise ConfigError(
            f"drafter.init_from {init_from}: expected an export, found a {found}; write one with "
            f"`blockdraft export {run} --output DIR` and give DIR, or go on with the run itself: "
            f"`blockdraft train {run}/config.json --resume auto`"
        )
    export = read_shape(read_json(directory / CONFIG), str(directory / CONFIG))
    compare_start(init_from, export, shape, is_static=True)


def compare_start(init_from: str, found: DrafterShape, expected: DrafterShape, *, is_static: bool = False) -> None:
    """Refuses an export of another shape.

    Raises:
        ConfigError: names every number that differs.
    """
    # No flag has window_causal: a property of the export that the run takes over.
    skipped = {"window_causal"}
    if is_static:
        skipped |= {"embedding_multiplier", "logit_multiplier", "logit_softcap"}
    names = [name for name, value in vars(expected).items() if name not in skipped and vars(found)[name] != value]
    if names:
        values = ", ".join(f"{name} {vars(found)[name]} (this run: {vars(expected)[name]})" for name in names)
        raise ConfigError(f"drafter.init_from {init_from}: its shape differs: {values}; set the drafter's fields alike")


def loader_config(config: RunConfig, drafters_here: int, node: int, num_nodes: int) -> LoaderConfig:
    """What the loader needs of a config.

    Raises:
        ConfigError: numbers that cannot work together.
    """
    data, block_size = config.data, config.drafter.block_size
    gamma = config.loss.gamma if config.loss.gamma is not None else default_gamma(block_size)
    if config.loss.labels == "argmax" and config.loss.draft_vocab != "full":
        raise ConfigError(
            "loss.labels argmax may be any id, loss.draft_vocab data has some only; use draft_vocab full or labels data"
        )
    return LoaderConfig(
        row_length=data.row_length,
        num_rows=data.num_rows,
        num_anchors=data.num_anchors if data.num_anchors is not None else data.row_length // 4,
        sort_window=data.sort_window,
        target_tokens=data.target_tokens,
        block_size=block_size,
        weight_L=_slot_weights(config.loss, block_size, gamma),
        after_gap=config.loss.after_gap,
        seed=config.seed,
        num_drafters=drafters_here * num_nodes,
        first_drafter=drafters_here * node,
        drafters_here=drafters_here,
        accumulation=config.optim.accumulation,
        reuse=config.runtime.reuse,
        keep_features=config.runtime.keep_features,
    )


def _slot_weights(loss: LossConfig, block_size: int, gamma: float) -> tuple[float, ...]:
    # dpace makes its weights in the step and divides by the supervised slots: the sum of ones.
    if loss.objective == "dpace":
        return (1.0,) * block_size
    return tuple(float(weight) for weight in position_weights(block_size, gamma))


def read_held_out(config: RunConfig, tokenizer: PreTrainedTokenizerBase, facts: TargetFacts) -> Iterator[HeldOut]:
    """The first prompts of every evaluation set, rendered.

    Raises:
        ConfigError: a set cannot be read, has no prompt, has one that leaves no room for an answer, or more rows than
            `MOST_DROPPED` that are no prompts: the acceptance would be that of a few.
    """
    if not config.eval.prompts:
        return
    template = ChatTemplate(tokenizer)
    for name, source in zip(set_names(config.eval.prompts), config.eval.prompts, strict=True):
        drops = Drops(MOST_DROPPED)
        prompts: list[list[int]] = []
        for conversation in read_prompts(source, drops):
            try:
                prompts.append(template.prompt_ids(conversation))
            except RowRefused as error:
                drops.add("refused by the template", conversation.source, str(error))
            if len(prompts) == config.eval.num_prompts:
                break
        drops.check(f"eval.prompts {source}: ", "mend them, or take them out of the file")
        longest = max((len(prompt) for prompt in prompts), default=0) + config.eval.max_new_tokens
        limit = facts.max_position_embeddings
        if not prompts or longest > limit:
            found = f"answers of up to {longest} tokens" if prompts else "no prompt that can be used"
            raise ConfigError(
                f"eval.prompts {source}: expected prompts that leave room for eval.max_new_tokens in the target's "
                f"{limit} positions, found {found}"
            )
        yield HeldOut(name, prompts, drops.num_rows, drops.lines())


def say_data(checked: Checked, say: Callable[[str], None]) -> None:
    """Documents, skipped documents and padding, in a line; and what was read to evaluate on."""
    counts = checked.loader.counts
    padding = counts.padding.padding / max(1, counts.padding.tokens)
    say(
        f"data: {counts.documents:,} documents, {counts.skipped_unanchored:,} skipped (no two supervised tokens in a "
        f"row); an epoch is {counts.fills:,} slots, {padding:.1%} of the target's tokens are padding"
    )
    budget, slots = checked.loader.row_budget, checked.loader.num_slots
    if budget is not None:
        say(f"rows of the head: {budget:,} of a micro-batch's {slots:,} slots, no micro-batch has more supervised ones")
    if checked.draft_ids is not None:
        say(f"draft vocabulary: {len(checked.draft_ids):,} ids")
    for one in checked.held_out:
        say(f"held-out {one.name}: {len(one.prompts):,} of {one.num_rows:,} rows used")
        for line in one.drop_lines:
            say(line)
