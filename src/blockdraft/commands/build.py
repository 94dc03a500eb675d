"""Builds the pieces of a run from its config, after the static checks: target, probe, held-out answers, drafters."""

import hashlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from blockdraft.commands.checks import Checked, HeldOut, compare_start, say_data
from blockdraft.config import ConfigError, RunConfig
from blockdraft.data.loader import Loader
from blockdraft.decoding.replay import Tape, record_tapes
from blockdraft.models.attention import bare_flex_attend, fits_kernels, sdpa_attend
from blockdraft.models.compiled import How
from blockdraft.models.drafter import Drafter, DrafterShape, derive_shape
from blockdraft.models.ends import Ends
from blockdraft.models.formats import load_export
from blockdraft.models.probe import LOW_SHARE, Sample, probe
from blockdraft.models.target import DTYPES, Target, choose_dtype
from blockdraft.runtime.memory_fit import explain_shortage, is_shortage, say_plan
from blockdraft.runtime.memory_plan import MemoryPlan, Sizes
from blockdraft.training.shards import Seat
from blockdraft.training.start import new_drafter
from blockdraft.training.step import DrafterStep, MakeAttend

if TYPE_CHECKING:
    from blockdraft.data.store import Store

PROBED = 8
"""Documents that the probe reads."""


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
    sizes: Sizes
    """What the memory plan was made from."""
    plan: MemoryPlan


def build(config: RunConfig, checked: Checked, say: Callable[[str], None], *, evaluates: bool) -> Built:
    """Loads and builds what one process needs, after the static checks; one node `evaluates`, for all.

    Raises:
        ConfigError: whatever is wrong with the target, or memory runs out.
    """
    say_data(checked, say)
    sizes = plan_sizes(config, checked)
    plan = say_plan(config, sizes, say)
    try:
        return _build(config, checked, sizes, plan, say, evaluates=evaluates)
    except RuntimeError as error:
        if not is_shortage(f"{type(error).__name__}: {error}"):
            raise
        raise ConfigError("\n".join([str(error), *explain_shortage(config, sizes)])) from error


def plan_sizes(config: RunConfig, checked: Checked) -> Sizes:
    """What the memory plan is made from."""
    is_alone = checked.loader.config.num_drafters == 1
    head_dim = checked.shape.head_dim
    how = choose_how(config.runtime.attention, checked.drafter_devices[0], head_dim, is_alone=is_alone)
    return checked.sizes(how)


def _build(
    config: RunConfig,
    checked: Checked,
    sizes: Sizes,
    plan: MemoryPlan,
    say: Callable[[str], None],
    *,
    evaluates: bool,
) -> Built:
    targets = _load_targets(config, checked)
    target = targets[0]
    probe_target(target, checked.loader, checked.store, say)
    tapes = _tapes(config, target, checked.held_out) if evaluates else {}
    # The same as was checked, now with the factors on the target's ends.
    shape = derive_shape(config.drafter, target.facts, checked.mask_token)
    drafter = _first_drafter(config, shape, target.ends, checked.draft_ids)
    steps = [
        _step(
            config,
            drafter,
            _near_ends(targets, device),
            checked.draft_ids,
            device,
            checked.total_steps,
            is_alone=checked.loader.config.num_drafters == 1,
            seat=Seat(number, len(checked.drafter_devices)) if config.optim.shard else None,
        )
        for number, device in enumerate(checked.drafter_devices)
    ]
    parameters = sum(weight.numel() for weight in drafter.parameters())
    say(f"drafter: {shape.num_layers} layers, {parameters / 1e6:.1f} M parameters, mask token {shape.mask_token_id}")
    for index, one in enumerate(targets):
        say(f"target {index}: {one.note}")
        if not config.loss.needs_final_states:
            # Held-out answers are recorded: nothing decodes from here on.
            one.drop_decoding()
    return Built(
        loader=checked.loader,
        targets=targets,
        steps=steps,
        tapes=tapes,
        total_steps=checked.total_steps,
        draft_vocab_size=checked.head_rows,
        fingerprint=fingerprint(checked.store),
        sizes=sizes,
        plan=plan,
    )


def _load_targets(config: RunConfig, checked: Checked) -> list[Target]:
    return [
        Target.load(
            config.target,
            device="+".join(map(str, devices)),
            layer_ids=config.drafter.target_layer_ids,
            num_drafter_layers=config.drafter.num_layers,
        )
        for devices in checked.target_devices
    ]


def _near_ends(targets: list[Target], device: torch.device) -> Ends:
    """The ends of a target on that device, which need no copy; else the first target's."""
    return next((one.ends for one in targets if one.ends.head_weight.device == device), targets[0].ends)


def fingerprint(store: "Store") -> str:
    """Of a store's documents: their lengths, and the tokens and masks of up to 64 of them."""
    digest = hashlib.sha256(store.lengths.tobytes())
    for index in np.linspace(0, len(store) - 1, min(64, len(store))).astype(np.int64):
        document = store[int(index)]
        digest.update(document.input_ids.tobytes() + document.loss_mask.tobytes())
    return digest.hexdigest()[:16]


def _first_drafter(config: RunConfig, shape: DrafterShape, ends: Ends, draft_ids: NDArray[np.int64] | None) -> Drafter:
    if config.drafter.init_from:
        drafter = load_export(Path(config.drafter.init_from), dtype=torch.float32)
        compare_start(config.drafter.init_from, drafter.shape, shape)
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
    *,
    is_alone: bool,
    seat: Seat | None,
) -> DrafterStep:
    dtype = DTYPES[choose_dtype(config.drafter.dtype, device)]
    replica = Drafter(drafter.shape)
    replica.load_state_dict(drafter.state_dict())
    replica = replica.to(device=device, dtype=dtype)
    near = ends.copy_to(device, dtype)
    head = near if draft_ids is None else near.restricted(torch.from_numpy(draft_ids))
    make_attend, how = choose_attention(config.runtime.attention, device, drafter.shape.head_dim, is_alone=is_alone)
    return DrafterStep(
        replica,
        near,
        head,
        loss=config.loss,
        optim=config.optim,
        total_steps=total_steps,
        make_attend=make_attend,
        how=how,
        seat=seat,
    )


def choose_attention(name: str, device: torch.device, head_dim: int, *, is_alone: bool) -> tuple[MakeAttend, How]:
    """Masked SDPA on a CPU; on a GPU kernels of our own, or flex_attention. All unless told otherwise."""
    how = choose_how(name, device, head_dim, is_alone=is_alone)
    if how == "nothing":
        return sdpa_attend, how
    if how != "kernels":
        return bare_flex_attend, how
    # Only GPUs have Triton.
    from blockdraft.models.block_attention import kernel_attend

    return kernel_attend, how


def choose_how(name: str, device: torch.device, head_dim: int, *, is_alone: bool) -> How:
    """By our own kernels where they are tuned; with flex_attention compiled, all layers at once if told to and alone.

    Of one graph all gradients come at its end, where no backward is left to run beside their sum.
    """
    if name == "sdpa" or (name == "auto" and device.type == "cpu"):
        return "nothing"
    # Their tiles were chosen on a Hopper GPU. For sm_80, sm_89 and sm_120 the compiler says that they spill registers.
    is_tuned = not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] == 9
    if name == "auto" and is_tuned and fits_kernels(head_dim):
        return "kernels"
    return "stack" if name == "flex" and is_alone else "layer"


def cpu_threads(config: RunConfig) -> int | None:
    """Intra-op threads of each CPU worker: torch's own number (OMP_NUM_THREADS) divided among the busy ones."""
    busy = sum(name.startswith("cpu") for name in (*config.runtime.targets, *config.runtime.drafters))
    return max(1, torch.get_num_threads() // busy) if busy else None


def _tapes(config: RunConfig, target: Target, held_out: list[HeldOut]) -> dict[str, list[Tape]]:
    """Held-out answers by set; prompts of all sets are answered together, in batches of 32."""
    prompts = [prompt for one in held_out for prompt in one.prompts]
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
    return {one.name: list(itertools.islice(waiting, len(one.prompts))) for one in held_out}


def probe_target(target: Target, loader: Loader, store: "Store", say: Callable[[str], None]) -> None:
    """Runs the probe on a few documents and says how many labels are the target's own.

    Raises:
        ConfigError: the target's captured states or ends are not what they should be.
    """
    count = min(PROBED, len(loader.documents))
    chosen = loader.documents[np.linspace(0, len(loader.documents) - 1, count).astype(np.int64)]
    samples = []
    for index in chosen:
        document = store[int(index)]
        ids_S = torch.from_numpy(document.input_ids.astype(np.int64))
        samples.append(Sample(f"document {index} of {store.path}", ids_S, torch.from_numpy(document.loss_mask > 0)))
    agreement = probe(target, samples)
    say(f"probe: {count} documents, target layers {list(target.layer_ids)} and ends are as they should be")
    say(f"labels that are the target's own greedy choice: {agreement.share:.1%} of {agreement.labels:,}")
    # Acceptance is about the target's answers.
    if agreement.share < LOW_SHARE:
        say(
            f"warning: fewer than {LOW_SHARE:.0%} of the labels are what the target would say; a drafter learns other "
            "text than it will be asked to draft. Replace the answers with `blockdraft regenerate`"
        )
