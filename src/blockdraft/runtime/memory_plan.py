"""The memory plan: what each device of a run will hold, component by component, before anything is loaded.

Weights, optimizer and slots are counted; what a forward or backward holds while it runs is estimated by the formulas
of `step_peak` and `forward_peak`, which were fitted to measured peaks (docs/performance.md, "Memory"). Left out:
the CUDA context, NCCL's buffers, and what the allocator keeps between its blocks.

Letters of the formulas: R rows, T tokens of a row, A anchors, L block size; Q = R * A * L block tokens, N = R * A *
(L - 1) drafted slots, K = R * T context tokens; D width, I inner width, F = heads * head width, G = key/value heads *
head width, C captured layers, V ids of the head, w bytes of a number.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from blockdraft.config import RunConfig
from blockdraft.data.packing import Bucket
from blockdraft.models.drafter import DrafterShape
from blockdraft.models.outline import Outline
from blockdraft.models.target_split import layer_devices
from blockdraft.training.head_loss import even_chunk

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
    for name in config.runtime.drafters:
        parts += _drafter_parts(config, sizes, name)
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
        yield Part(device, "target forward", forward_peak(sizes.outline, sizes.bucket, width), True)
    if any(drafter != devices[0] for drafter in config.runtime.drafters):
        yield Part(devices[0], "staging", 2 * slot_bytes(config, sizes), False)


def slot_bytes(config: RunConfig, sizes: Sizes) -> int:
    """One slot: [R * T + 1, C * D], with the final hidden states where the objective needs them."""
    columns = len(sizes.shape.target_layer_ids) + config.loss.needs_final_states
    rows = config.data.num_rows * config.data.row_length + 1
    return rows * columns * sizes.shape.hidden_size * BYTES[config.target.dtype]


def forward_peak(outline: Outline, bucket: Bucket, width: int) -> int:
    """What a target's forward holds at its widest point, for each of its tokens.

    In the MLP of transformers' own forward: gate, activation and up product (3 I), and seven states (7 D).
    """
    facts = outline.facts
    return bucket.batch * bucket.length * width * (3 * facts.intermediate_size + 7 * facts.hidden_size)


def drafter_parameters(shape: DrafterShape) -> int:
    """Trainable numbers of a drafter."""
    width, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    layer = 2 * width * queries + 2 * width * keys + 3 * width * shape.intermediate_size
    layer += 2 * shape.head_dim + 2 * width
    return shape.num_layers * layer + len(shape.target_layer_ids) * width * width + 2 * width


def _drafter_parts(config: RunConfig, sizes: Sizes, device: str) -> Iterable[Part]:
    shape, width = sizes.shape, BYTES[config.drafter.dtype]
    count = drafter_parameters(shape)
    yield Part(device, "drafter weights", count * width, False)
    if width != 4:
        yield Part(device, "masters", count * 4, False)
    # Muon keeps one moment of a matrix, AdamW two; norms are too small to tell.
    yield Part(device, "moments", count * 4 * (1 if config.optim.optimizer == "muon" else 2), False)
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
    return device.startswith("cuda") and config.drafter.dtype == "bfloat16" and config.optim.optimizer == "adamw"


def step_peak(config: RunConfig, sizes: Sizes) -> dict[str, int]:
    """What the drafter's step holds at its peak, beside everything that stays; the compiled stack's on a GPU.

    Kept for the backward, in numbers of the weights' type:
        a layer: its normed input, both residual sums and the normed state before the MLP (4 D), queries before and
            behind norm and rotation and the attended values (3 F), gate, up and their product (3 I), each of Q tokens;
            keys before and behind norm and rotation, and values (3 G), each of K + Q tokens.
        the last layer: slot 0 is dropped behind the attention, so only D + 3 F are of Q tokens; F + 4 D + 3 I of N.
        beside the layers: the block's embeddings (D of Q tokens), projected features and their norm (2 D of K tokens).
    The peak is in the loss, at the start of the backward, or at its end, whichever holds most:
        loss: beside what is kept, the logits of one chunk (M rows of V ids), d(loss)/d(hidden) in float32 and hidden
            states (D, each of N).
        start: beside what is kept, hidden states (D) and the MLP's gradients (5/3 I as measured), each of N.
        end: the gradient of every weight in the weights' type, and of the block's states (2 D of Q tokens).
    """
    data, shape, width = config.data, sizes.shape, BYTES[config.drafter.dtype]
    anchors = data.num_anchors if data.num_anchors is not None else data.row_length // 4
    blocks = data.num_rows * anchors * shape.block_size
    slots = data.num_rows * anchors * (shape.block_size - 1)
    context = data.num_rows * data.row_length
    hidden, inner = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    whole = blocks * (4 * hidden + 3 * queries + 3 * inner)
    last = blocks * (hidden + 3 * queries) + slots * (queries + 4 * hidden + 3 * inner)
    kept = (shape.num_layers - 1) * whole + last + shape.num_layers * (context + blocks) * 3 * keys
    kept += blocks * hidden + context * 2 * hidden
    chunk = even_chunk(slots, config.loss.chunk_rows) * sizes.head_rows * width
    rows = slots * hidden * (4 + width)
    backward = slots * hidden * width + slots * inner * width * 5 // 3
    end = (drafter_parameters(shape) + 2 * blocks * hidden) * width
    phases: list[dict[str, int]] = [
        {"kept activations": kept * width, "head chunk": chunk, "loss gradients": rows},
        {"kept activations": kept * width, "backward": backward},
        {"weight gradients": end},
    ]
    return max(phases, key=lambda phase: sum(phase.values()))
