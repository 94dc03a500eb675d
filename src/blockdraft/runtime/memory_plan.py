"""The memory plan: what each device of a run will hold, component by component, before anything is loaded.

Weights, optimizer and slots are counted; what a forward or backward holds while it runs is estimated by the formulas
of `step_peak` and `forward_peak`, which were fitted to measured peaks (docs/performance.md, "Memory"). Left out:
the CUDA context, NCCL's buffers, and what the allocator keeps between its blocks.

Letters of the formulas: R rows, T tokens of a row, A anchors, L block size; Q = R * A * L block tokens, N = R * A *
(L - 1) drafted slots, B of them that reach the head (the run's row budget, or N), K = R * T context tokens; D width,
I inner width, F = heads * head width, G = key/value heads * head width, C captured layers, V ids of the head, w bytes
of a number. On a CPU masked attention keeps masks of their own (`mask_bytes`).
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from blockdraft.config import RunConfig
from blockdraft.data.packing import Bucket
from blockdraft.models.compiled import How
from blockdraft.models.drafter import DrafterShape
from blockdraft.models.outline import Outline
from blockdraft.models.target_split import layer_devices
from blockdraft.runtime.transfers import Carried, page_locked_blocks
from blockdraft.training.head_loss import even_chunk
from blockdraft.training.shards import share_out

GIB = 2**30
HOST = "host"
BYTES = {"bfloat16": 2, "float32": 4, "float8": 2}
"""Of a number of the target's states and the drafter's weights; a float8 target hands out bfloat16."""


class Sizes(NamedTuple):
    """What a plan is made from, beside the config (whose data types are resolved)."""

    outline: Outline
    shape: DrafterShape
    head_rows: int
    """Ids that the drafter's head covers in training: all, or a draft vocabulary."""
    bucket: Bucket
    """The largest batch of the target."""
    kept_slots: int
    """Slots of an epoch, whose features are kept in host memory if asked."""
    how: How
    """How the drafter runs: it decides what its forward keeps."""
    row_budget: int | None = None
    """Slots of a micro-batch that reach the head; None: all."""


class Part(NamedTuple):
    """One component on one device."""

    device: str
    name: str
    bytes: int
    passes: bool
    """Whether it is there only while a forward, a backward or an update runs."""


class MemoryPlan(NamedTuple):
    """All components."""

    parts: tuple[Part, ...]

    def devices(self) -> list[str]:
        """Devices in order of their names; the host last."""
        return sorted({part.device for part in self.parts}, key=lambda name: (name == HOST, name))

    def total(self, device: str, *, resident: bool = False) -> int:
        """Bytes on a device, at most; `resident` leaves out what comes and goes."""
        return sum(part.bytes for part in self.parts if part.device == device and not (resident and part.passes))

    def lines(self) -> list[str]:
        """A line for each device."""
        return [f"memory plan, {device}: {self._spell(device)}" for device in self.devices()]

    def _spell(self, device: str) -> str:
        sums: dict[str, int] = defaultdict(int)
        for part in self.parts:
            if part.device == device:
                sums[part.name] += part.bytes
        spelled = ", ".join(f"{name} {spell_bytes(count)}" for name, count in sums.items() if count)
        return f"{spell_bytes(self.total(device))} = {spelled}"


def spell_bytes(count: int) -> str:
    """GiB, or MiB below a tenth of one."""
    return f"{count / GIB:.2f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def plan_memory(config: RunConfig, sizes: Sizes) -> MemoryPlan:
    """The plan of one process."""
    parts: list[Part] = []
    for name in config.runtime.targets:
        parts += _target_parts(config, sizes, name.split("+"))
    for name, held in zip(config.runtime.drafters, held_parameters(config, sizes.shape), strict=True):
        parts += _drafter_parts(config, sizes, name, held)
    parts.append(Part(HOST, "copy for checkpoints", checkpoint_bytes(config, sizes.shape), False))
    parts.append(Part(HOST, "micro-batches", micro_batch_bytes(config, sizes), False))
    locked = len(config.runtime.drafters) * page_locked_bytes(config, sizes) if uses_gpus(config) else 0
    parts.append(Part(HOST, "page-locked blocks", locked, False))
    if config.runtime.keep_features:
        parts.append(Part(HOST, "kept features", sizes.kept_slots * slot_bytes(config, sizes), False))
    return MemoryPlan(tuple(part for part in parts if part.bytes))


def _target_parts(config: RunConfig, sizes: Sizes, devices: list[str]) -> Iterable[Part]:
    outline, width = sizes.outline, BYTES[config.target.dtype]
    kept = outline.kept_layers(sizes.shape.target_layer_ids, to_end=config.loss.needs_final_states)
    places = layer_devices(len(outline.layers), [torch.device(device) for device in devices])
    for number, device in enumerate(devices):
        placed = zip(outline.layers[:kept], places, strict=False)
        layers = sum(count for count, place in placed if place == torch.device(device))
        # Embedding and head lie on the first device of a replica, the final norm on the last.
        others = outline.embedding + outline.head if number == 0 else 0
        others += outline.rest if number == len(devices) - 1 else 0
        layer_width = 1 if config.target.dtype == "float8" else width
        yield Part(device, "target weights", layers * layer_width + others * width, False)
        is_fast = device.startswith("cuda") and width == 2
        yield Part(device, "target forward", forward_peak(sizes.outline, sizes.bucket, width, is_fast=is_fast), True)
    if any(drafter != devices[0] for drafter in config.runtime.drafters):
        yield Part(devices[0], "staging", 2 * slot_bytes(config, sizes), False)


def slot_bytes(config: RunConfig, sizes: Sizes) -> int:
    """One slot: [R * T + 1, C * D], with the final hidden states where the objective needs them."""
    columns = len(sizes.shape.target_layer_ids) + config.loss.needs_final_states
    rows = config.data.num_rows * config.data.row_length + 1
    return rows * columns * sizes.shape.hidden_size * BYTES[config.target.dtype]


def forward_peak(outline: Outline, bucket: Bucket, width: int, *, is_fast: bool) -> int:
    """What a target's forward holds at its widest point, for each of its tokens.

    In the MLP: gate, activation and up product (3 I), and three states (3 D) in the fast pass, four in transformers'
    own forward. Recurrent layers hold about as much, in other pieces.
    """
    facts = outline.facts
    states = (3 if is_fast else 4) * facts.hidden_size
    return bucket.batch * bucket.length * width * (3 * facts.intermediate_size + states)


def weight_sizes(shape: DrafterShape) -> list[int]:
    """Numbers of each weight of a drafter."""
    width, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    layer = [width * queries] * 2 + [width * keys] * 2 + [width * shape.intermediate_size] * 3
    layer += [shape.head_dim] * 2 + [width] * 2
    return [len(shape.target_layer_ids) * width * width, *layer * shape.num_layers, width, width]


def drafter_parameters(shape: DrafterShape) -> int:
    """Trainable numbers of a drafter."""
    return sum(weight_sizes(shape))


def held_parameters(config: RunConfig, shape: DrafterShape) -> list[int]:
    """Numbers of which each drafter keeps masters and moments: all, or its share."""
    sizes, count = weight_sizes(shape), len(config.runtime.drafters)
    if not config.optim.shard:
        return [sum(sizes)] * count
    owners = share_out(sizes, count)
    return [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == one) for one in range(count)]


def checkpoint_bytes(config: RunConfig, shape: DrafterShape) -> int:
    """Of one drafter's weights, masters and moments, copied to the host to be written; masters may be the weights."""
    width = BYTES[config.drafter.dtype]
    return drafter_parameters(shape) * ((width if width != 4 else 0) + 4 + moments_bytes(config))


def micro_batch_bytes(config: RunConfig, sizes: Sizes) -> int:
    """What the loader holds: the step that it hands out and the one that it makes, or all passes of a slot.

    A pass: label (8), whether it counts (1) and weight (4) of N slots, B row numbers (8), A anchors (8); a fill: ids,
    documents and positions of K tokens (8 each).
    """
    data, rows = config.data, sizes.row_budget or 0
    anchors = data.num_rows * (data.num_anchors if data.num_anchors is not None else data.row_length // 4)
    one = 13 * anchors * (sizes.shape.block_size - 1) + 8 * rows + 8 * anchors
    passes = max(2 * config.optim.accumulation, config.runtime.reuse)
    return passes * one + -(-passes // config.runtime.reuse) * 24 * data.num_rows * data.row_length


def uses_gpus(config: RunConfig) -> bool:
    """Whether a side of the run is on a GPU."""
    return any(not name.startswith("cpu") for name in (*config.runtime.targets, *config.runtime.drafters))


def page_locked_bytes(config: RunConfig, sizes: Sizes) -> int:
    """Of a drafter's blocks that micro-batches go to the GPU from, taken before the first step and kept.

    64 blocks of every power of two from 512 bytes to the largest tensor, the target's batches included (16 bytes for
    each of `data.target_tokens`), and of each tensor below one rounded up to such a power, (queue + slots + 2) * reuse
    times: 8 K three times, 8 R A, 8 N, N, 4 N, 8 B (`transfers.page_locked_blocks`).
    """
    data, n = config.data, count_tokens(config, sizes.shape)
    carried = Carried(
        tokens=n.context,
        anchors=n.first - n.rows,
        block_size=sizes.shape.block_size,
        target_tokens=data.target_tokens,
        reuse=config.runtime.reuse,
        row_budget=sizes.row_budget,
        depth=config.runtime.channel_depth,
    )
    return sum(size * number for size, number in page_locked_blocks(carried).items())


def moments_bytes(config: RunConfig) -> int:
    """Of a parameter's moments. Muon keeps one of a matrix, AdamW two; norms are too small to tell."""
    return {"adamw": 8, "adamw_bf16": 4, "muon": 4}[config.optim.optimizer]


def _drafter_parts(config: RunConfig, sizes: Sizes, device: str, held: int) -> Iterable[Part]:
    shape, width = sizes.shape, BYTES[config.drafter.dtype]
    count = drafter_parameters(shape)
    yield Part(device, "drafter weights", count * width, False)
    if width != 4:
        yield Part(device, "masters", held * 4, False)
    yield Part(device, "moments", held * moments_bytes(config), False)
    is_added = not _is_fused(config, device) or config.optim.accumulation > len(config.runtime.drafters)
    # The fused update frees gradients behind each step; otherwise they stay, zeroed.
    yield Part(device, "gradients", count * 4 if is_added else 0, _is_fused(config, device))
    is_shared = BYTES[config.target.dtype] == width and any(
        name.split("+")[0] == device for name in config.runtime.targets
    )
    ends = sizes.outline.embedding + (sizes.outline.head or 0)
    yield Part(device, "embedding and head", 0 if is_shared else ends * width, False)
    if sizes.head_rows < shape.vocab_size:
        yield Part(device, "draft vocabulary's head", sizes.head_rows * shape.hidden_size * width, False)
    yield Part(device, "slots", config.runtime.channel_depth * slot_bytes(config, sizes), False)
    for name, size in step_peak(config, sizes).items():
        yield Part(device, name, size, True)


def _is_fused(config: RunConfig, device: str) -> bool:
    """Whether one kernel updates all weights, which reads the gradients of a step's only micro-batch as they are."""
    return device.startswith("cuda") and config.drafter.dtype == "bfloat16" and config.optim.optimizer != "muon"


class Counts(NamedTuple):
    """Tokens and widths of a step; the letters of the module's docstring."""

    blocks: int
    """Q"""
    first: int
    """R * (A + 1)"""
    slots: int
    """N"""
    context: int
    """K"""
    rows: int
    """R"""
    hidden: int
    """D"""
    inner: int
    """I"""
    queries: int
    """F"""
    keys: int
    """G"""
    layers: int


def count_tokens(config: RunConfig, shape: DrafterShape) -> Counts:
    """Of a micro-batch."""
    data = config.data
    anchors = data.num_rows * (data.num_anchors if data.num_anchors is not None else data.row_length // 4)
    return Counts(
        blocks=anchors * shape.block_size,
        first=anchors + data.num_rows,
        slots=anchors * (shape.block_size - 1),
        context=data.num_rows * data.row_length,
        rows=data.num_rows,
        hidden=shape.hidden_size,
        inner=shape.intermediate_size,
        queries=shape.num_heads * shape.head_dim,
        keys=shape.num_kv_heads * shape.head_dim,
        layers=shape.num_layers,
    )


def kept_of_a_stack(n: Counts) -> int:
    """Numbers that a forward compiled as one graph keeps for the backward (uncompiled: about as many).

    A layer: its normed input, both residual sums and the normed state before the MLP (4 D), queries before and behind
    norm and rotation and the attended values (3 F), gate, up and their product (3 I), each of Q tokens; keys before and
    behind norm and rotation, and values (3 G), each of K + Q tokens. In the last layer slot 0 has keys and values only:
    D of Q tokens, and 3 F + 5 D + 3 I of N (its normed input without slot 0 once more). Beside the layers: the block's
    embeddings (D of Q tokens), projected features and their norm (2 D of K tokens).
    """
    layer = n.blocks * (4 * n.hidden + 3 * n.queries + 3 * n.inner)
    last = n.blocks * n.hidden + n.slots * (3 * n.queries + 5 * n.hidden + 3 * n.inner)
    ends = n.blocks * n.hidden + n.context * 2 * n.hidden
    return (n.layers - 1) * layer + last + n.layers * (n.context + n.blocks) * 3 * n.keys + ends


def kept_by_layer(n: Counts, head_dim: int) -> int:
    """The same where layers are compiled one by one and elementwise results are made again: products and attention.

    A layer: its input and what the attention's output projection gives (2 D), queries and attended values (2 F), gate
    and up (2 I), each of Q tokens; keys and values (2 G), each of K + Q tokens. The last layer: D of Q tokens,
    2 F + D + 2 I of N. Beside the layers: projected features and their norm (2 D of K tokens), rotary factors (2 E of
    K + Q tokens), the last layer's output and its norm (2 D of N tokens).
    """
    layer = n.blocks * (2 * n.hidden + 2 * n.queries + 2 * n.inner)
    last = n.blocks * n.hidden + n.slots * (2 * n.queries + n.hidden + 2 * n.inner)
    ends = n.context * 2 * n.hidden + (n.context + n.blocks) * 2 * head_dim + n.slots * 2 * n.hidden
    return (n.layers - 1) * layer + last + n.layers * (n.context + n.blocks) * 2 * n.keys + ends


def mask_bytes(n: Counts, shape: DrafterShape, width: int) -> int:
    """Masks of uncompiled attention, [R, Q / R, (K + Q) / R]: a boolean for each kind of layer, and what each layer's
    backward keeps, which torch turns into numbers of the queries' type."""
    kinds = 1 + (0 < len(shape.window_layers) < shape.num_layers)
    return n.blocks * (n.context + n.blocks) // n.rows * (kinds + n.layers * width)


def kept_by_kernels(n: Counts, head_dim: int) -> int:
    """The same where layers run without a compiler (models/own_layers.py): products and what the attention keeps.

    A layer: its input (D) and keys before norm and rotation (G), of Q tokens; queries before them (F); queries behind
    them, attended values (2 F), the sum before the MLP (D), gate and up (2 I); keys and values (2 G) of Q tokens, and
    these and keys before norm and rotation (3 G) of K. What is of neither keys nor the input is of N in the last layer.
    The first layer's input, queries and keys before norm and rotation are of R * (A + 1) rows. Beside the layers:
    projected features and their norm (2 D of K tokens), rotary factors (2 E of K + Q + N), the last sum and its norm
    (2 D of N).
    """
    kept = 0
    for layer in range(n.layers):
        asking = n.slots if layer == n.layers - 1 else n.blocks
        known, queries = (n.blocks, asking) if layer else (n.first, n.first)
        kept += known * (n.hidden + n.keys) + queries * n.queries
        kept += asking * (2 * n.queries + n.hidden + 2 * n.inner) + (2 * n.blocks + 3 * n.context) * n.keys
    factors = (n.context + n.blocks + n.slots) * 2 * head_dim
    return kept + n.context * 2 * n.hidden + factors + n.slots * 2 * n.hidden


def step_peak(config: RunConfig, sizes: Sizes) -> dict[str, int]:
    """What the drafter's step holds at its peak, beside everything that stays.

    The peak is in the loss, at the start of the backward, or at its end, whichever holds most:
        loss: beside what is kept, the logits of one chunk (M rows of V ids), d(loss)/d(hidden) in float32 (D of B),
            where a stack was compiled hidden states (D of N), and with a row budget the rows taken out (D of B).
        start: beside what is kept, gradients of the last layer's MLP: 5/3 I of N in a stack, as measured, 4 I of N
            where compiled layers make elementwise results again; without a compiler I + D of N with the gradient of
            its last matrix (D I), or 4 D of N with those of all its matrices and the output projection's.
        end: the gradient of every weight in the weights' type, and of the block's states (2 D of Q tokens).
    """
    shape, width = sizes.shape, BYTES[config.drafter.dtype]
    n = count_tokens(config, shape)
    kept = _kept(n, sizes) * width
    is_remade = sizes.how in ("kernels", "layer")
    hidden = 0 if is_remade else n.slots * n.hidden * width
    rows = n.slots if sizes.row_budget is None else min(sizes.row_budget, n.slots)
    masks = mask_bytes(n, shape, width) if sizes.how == "nothing" else 0
    chunk = even_chunk(rows, config.loss.chunk_rows) * sizes.head_rows * width
    loss = rows * n.hidden * (4 if sizes.row_budget is None else 4 + width) + hidden
    inner = n.slots * n.inner * width
    backward = 4 * inner if is_remade else inner * 5 // 3 + hidden
    if sizes.how == "kernels":
        slots, weight = n.slots * n.hidden * width, n.hidden * n.inner * width
        backward = max(inner + slots + weight, 4 * slots + 3 * weight + n.hidden * n.queries * width)
    end = (drafter_parameters(shape) + 2 * n.blocks * n.hidden) * width
    phases: list[dict[str, int]] = [
        {"kept activations": kept, "attention masks": masks, "head chunk": chunk, "loss gradients": loss},
        {"kept activations": kept, "attention masks": masks, "backward": backward},
        {"weight gradients": end},
    ]
    return max(phases, key=lambda phase: sum(phase.values()))


def _kept(n: Counts, sizes: Sizes) -> int:
    if sizes.how == "kernels":
        return kept_by_kernels(n, sizes.shape.head_dim)
    return kept_by_layer(n, sizes.shape.head_dim) if sizes.how == "layer" else kept_of_a_stack(n)
