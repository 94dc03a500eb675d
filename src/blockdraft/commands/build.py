"""Builds the pieces of a run from its config: target, drafter, loader, evaluation tapes, each checked as it is made."""

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from blockdraft.config import ConfigError, LossConfig, RunConfig
from blockdraft.data.anchors import default_gamma, position_weights
from blockdraft.data.conversations import Drops
from blockdraft.data.evalsets import read_prompts, set_names
from blockdraft.data.loader import Loader, LoaderConfig
from blockdraft.data.store import Store, open_store
from blockdraft.data.template import ChatTemplate, RowRefused, tokenizer_hash
from blockdraft.decoding.replay import Tape, record_tapes
from blockdraft.models.attention import bare_flex_attend, sdpa_attend
from blockdraft.models.compiled import How
from blockdraft.models.drafter import Drafter, DrafterShape, derive_shape
from blockdraft.models.ends import Ends
from blockdraft.models.formats import load_export
from blockdraft.models.target import DTYPES, Target, choose_dtype, load_tokenizer, mask_token_id
from blockdraft.runtime.devices import check_devices, check_replicas
from blockdraft.training.start import new_drafter
from blockdraft.training.step import DrafterStep, MakeAttend


class Built(NamedTuple):
    """Everything the pipeline needs."""

    loader: Loader
    targets: list[Target]
    steps: list[DrafterStep]
    tapes: dict[str, list[Tape]]
    """Held-out answers of the target, by name of the evaluation set."""
    total_steps: int
    draft_vocab_size: int
    fingerprint: str
    """Of the documents."""


class Agreement(NamedTuple):
    """How far the data are the target's own answers."""

    labels: int
    agreeing: int

    @property
    def share(self) -> float:
        """Share of the labels that equal the target's argmax."""
        return self.agreeing / max(1, self.labels)


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


def build(config: RunConfig, say: Callable[[str], None], *, node: int = 0, num_nodes: int = 1) -> Built:
    """Loads and builds what one of `num_nodes` processes needs; cheap checks come before anything large is loaded.

    Raises:
        ConfigError: whatever is wrong with the config, the data or the target.
    """
    target_devices, drafter_devices = check_topology(config)
    if not config.data.train:
        raise ConfigError("data.train is empty; give the token store that `blockdraft prepare` wrote")
    store = open_store(config.data.train)
    tokenizer = load_tokenizer(config.target.path, config.target.trust_remote_code)
    found, expected = store.manifest.get("tokenizer_hash"), tokenizer_hash(tokenizer)
    if found != expected:
        raise ConfigError(
            f"{config.data.train}: prepared with another tokenizer ({found}) than the target's ({expected}); "
            f"prepare it again with --target {config.target.path}"
        )
    # All that the store alone can show to be wrong, before the target is loaded.
    draft_ids = store.seen_ids() if config.loss.draft_vocab == "data" else None
    loader = Loader(store, _loader_config(config, len(drafter_devices), node, num_nodes), draft_ids)
    _say_data(loader, draft_ids, say)
    names = set_names(config.eval.prompts)
    ids = config.drafter.target_layer_ids
    targets = [
        Target.load(
            config.target,
            device="+".join(map(str, devices)),
            layer_ids=ids,
            num_drafter_layers=config.drafter.num_layers,
        )
        for devices in target_devices
    ]
    target = targets[0]
    shape = _shape(
        config, target, store, lambda seen: mask_token_id(tokenizer, target.vocab_size, seen, target.stop_ids)
    )
    report_agreement(target, loader, store, say)
    # Node 0 evaluates for all.
    tapes = _tapes(config, target, tokenizer, names) if node == 0 else {}
    total_steps = config.steps if config.steps is not None else loader.steps_for(config.epochs)
    drafter = _first_drafter(config, shape, target.ends, draft_ids)
    steps = [_step(config, drafter, target.ends, draft_ids, device, total_steps) for device in drafter_devices]
    parameters = sum(weight.numel() for weight in drafter.parameters())
    say(f"drafter: {shape.num_layers} layers, {parameters / 1e6:.1f} M parameters, mask token {shape.mask_token_id}")
    size = target.vocab_size if draft_ids is None else len(draft_ids)
    return Built(loader, targets, steps, tapes, total_steps, size, fingerprint(store))


def fingerprint(store: Store) -> str:
    """Of a store's documents: their lengths, and the tokens and masks of up to 64 of them."""
    digest = hashlib.sha256(store.lengths.tobytes())
    for index in np.linspace(0, len(store) - 1, min(64, len(store))).astype(np.int64):
        document = store[int(index)]
        digest.update(document.input_ids.tobytes() + document.loss_mask.tobytes())
    return digest.hexdigest()[:16]


def _loader_config(config: RunConfig, drafters_here: int, node: int, num_nodes: int) -> LoaderConfig:
    data, block_size = config.data, config.drafter.block_size
    gamma = config.loss.gamma if config.loss.gamma is not None else default_gamma(block_size)
    if gamma <= 0:
        raise ConfigError(f"loss.gamma must be above 0, got {gamma}")
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


def _shape(config: RunConfig, target: Target, store: Store, find_mask: Callable[[set[int]], int]) -> DrafterShape:
    seen = set(store.all_ids().tolist())
    highest = max(seen)
    if highest >= target.vocab_size:
        raise ConfigError(
            f"{config.data.train}: holds token id {highest}, the target's embedding has {target.vocab_size} rows; "
            "prepare it again with this target's tokenizer"
        )
    mask = config.drafter.mask_token_id
    return derive_shape(config.drafter, target.facts, find_mask(seen) if mask is None else mask)


def _first_drafter(config: RunConfig, shape: DrafterShape, ends: Ends, draft_ids: NDArray[np.int64] | None) -> Drafter:
    if config.drafter.init_from:
        drafter = load_export(Path(config.drafter.init_from), dtype=torch.float32)
        # No flag has it: a property of the export that the run takes over.
        shape = replace(shape, window_causal=drafter.shape.window_causal)
        if drafter.shape != shape:
            names = [name for name, value in vars(shape).items() if vars(drafter.shape)[name] != value]
            values = ", ".join(f"{name} {vars(drafter.shape)[name]} (this run: {vars(shape)[name]})" for name in names)
            raise ConfigError(f"drafter.init_from {config.drafter.init_from}: its shape differs: {values}")
        return drafter
    head = ends if draft_ids is None else ends.restricted(torch.from_numpy(draft_ids))
    return new_drafter(shape, ends, head, config.seed)


def _step(
    config: RunConfig,
    drafter: Drafter,
    ends: Ends,
    draft_ids: NDArray[np.int64] | None,
    device: torch.device,
    total_steps: int,
) -> DrafterStep:
    dtype = DTYPES[choose_dtype(config.drafter.dtype, device)]
    replica = Drafter(drafter.shape)
    replica.load_state_dict(drafter.state_dict())
    replica = replica.to(device=device, dtype=dtype)
    near = ends.copy_to(device, dtype)
    head = near if draft_ids is None else near.restricted(torch.from_numpy(draft_ids))
    make_attend, how = choose_attention(config.runtime.attention, device)
    return DrafterStep(
        replica,
        near,
        head,
        loss=config.loss,
        optim=config.optim,
        total_steps=total_steps,
        make_attend=make_attend,
        how=how,
    )


def choose_attention(name: str, device: torch.device) -> tuple[MakeAttend, How]:
    """Masked SDPA on a CPU; on a GPU flex_attention, compiled with the whole stack. Both unless told otherwise."""
    if name == "sdpa" or (name == "auto" and device.type == "cpu"):
        return sdpa_attend, "nothing"
    return bare_flex_attend, "stack"


def _tapes(config: RunConfig, target: Target, tokenizer: object, names: list[str]) -> dict[str, list[Tape]]:
    """Held-out answers by set; prompts of all sets are answered together, in batches of 32."""
    template = ChatTemplate(tokenizer)  # type: ignore[arg-type]
    sets: list[list[list[int]]] = []
    for file in config.eval.prompts:
        drops = Drops()
        one_set: list[list[int]] = []
        for conversation in read_prompts(file, drops):
            if len(one_set) == config.eval.num_prompts:
                break
            try:
                one_set.append(template.prompt_ids(conversation))
            except RowRefused as error:
                drops.add("refused by the template", conversation.source, str(error))
        drops.check()
        longest = max((len(prompt) for prompt in one_set), default=0) + config.eval.max_new_tokens
        limit = target.facts.max_position_embeddings
        if not one_set or longest > limit:
            found = f"answers of up to {longest} tokens" if one_set else "no prompt that can be used"
            raise ConfigError(
                f"eval.prompts {file}: expected prompts that leave room for eval.max_new_tokens in the target's "
                f"{limit} positions, found {found}"
            )
        sets.append(one_set)
    prompts = [prompt for one_set in sets for prompt in one_set]
    if not prompts:
        return {}
    with tqdm(total=len(prompts), desc="held-out answers", unit="answer") as bar:
        tapes = record_tapes(
            target,
            prompts,
            max_new_tokens=config.eval.max_new_tokens,
            stop_ids=target.stop_ids,
            batch_size=32,
            progress=bar.update,
        )
    waiting = iter(tapes)
    return {name: list(itertools.islice(waiting, len(one_set))) for name, one_set in zip(names, sets, strict=True)}


def _say_data(loader: Loader, draft_ids: NDArray[np.int64] | None, say: Callable[[str], None]) -> None:
    counts = loader.counts
    padding = counts.padding.padding / max(1, counts.padding.tokens)
    say(
        f"data: {counts.documents:,} documents, {counts.skipped_unanchored:,} skipped (no two supervised tokens in a "
        f"row); an epoch is {counts.fills:,} slots, {padding:.1%} of the target's tokens are padding"
    )
    if draft_ids is not None:
        say(f"draft vocabulary: {len(draft_ids):,} ids")


@torch.no_grad()
def measure_agreement(target: Target, store: Store, documents: NDArray[np.int64]) -> Agreement:
    """Share of supervised labels that are the target's greedy choice, over a few documents."""
    labels = agreeing = 0
    for index in documents:
        document = store[int(index)]
        ids = torch.from_numpy(document.input_ids.astype(np.int64)).to(target.device)[None]
        choice_T = target.model(input_ids=ids, use_cache=False).logits[0, :-1].argmax(-1)
        supervised_T = torch.from_numpy(document.loss_mask[1:] > 0).to(target.device)
        labels += int(supervised_T.sum())
        agreeing += int(((choice_T == ids[0, 1:]) & supervised_T).sum())
    return Agreement(labels, agreeing)


def report_agreement(target: Target, loader: Loader, store: Store, say: Callable[[str], None]) -> Agreement:
    """Says how many labels are the target's own, and warns below 70%: acceptance is about the target's answers."""
    count = min(8, len(loader.documents))
    chosen = loader.documents[np.linspace(0, len(loader.documents) - 1, count).astype(np.int64)]
    agreement = measure_agreement(target, store, chosen)
    say(f"labels that are the target's own greedy choice: {agreement.share:.1%} of {agreement.labels:,}")
    if agreement.share < 0.7:
        say(
            "warning: fewer than 70% of the labels are what the target would say; a drafter learns other text than it "
            "will be asked to draft. Replace the answers with `blockdraft regenerate`"
        )
    return agreement
