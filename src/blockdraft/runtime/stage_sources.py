"""Where the speed of each side comes from: a run directory's measurements, or arithmetic over a matrix rate."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from blockdraft.config import ConfigError, RunConfig, read_config
from blockdraft.models.drafter import DrafterShape
from blockdraft.models.outline import Outline
from blockdraft.runtime.memory_plan import drafter_parameters

TARGET_EFFICIENCY: Final = 0.70
"""Share of the matrix rate that a target's forward reaches over document tokens, padding counted as lost."""
DRAFTER_EFFICIENCY: Final = 0.73
"""The same for the drafter's step, without the update."""
UPDATE_BYTES: Final = {"adamw": 30, "adamw_bf16": 22, "muon": 30}
"""Of a parameter, that an update moves: the gradient read twice, master and moments read and written, the weight
written. Muon's products are not counted."""
MEMORY_GB_S: Final = 4000.0
"""Of an H200, as reached by one pass over large arrays."""
WARM_SAMPLES: Final = 1
"""First lines of workers.jsonl that are left out: rings fill in them."""


class Rates(NamedTuple):
    """Tokens per second of each side alone on one GPU, and how they were found."""

    target_tok_s: float
    drafter_tok_s: float
    source: str
    has_exchange: bool = False
    """Whether the drafter's contains an exchange of weights (optim.shard), as in a run that had one."""


def measured_rates(run_dir: Path) -> Rates:
    """From a run's own record: its pace, divided by how many workers a side has and by how busy they were.

    Raises:
        ConfigError: the directory holds no run that was recorded long enough.
    """
    config = read_config(_needed(run_dir / "config.json"))
    steps = _last_start([line for line in _lines(_needed(run_dir / "metrics.jsonl")) if "tokens" in line])
    since = steps[0]["step"] if steps else 0
    samples = [line for line in _last_start(list(_lines(_needed(run_dir / "workers.jsonl")))) if line["step"] >= since]
    samples = samples[WARM_SAMPLES:]
    counted = [line for line in steps if samples and line["step"] >= samples[0]["step"]]
    if len(counted) < 2:
        raise ConfigError(
            f"{run_dir}: expected a run of some seconds behind its warm-up, found {len(steps)} steps and "
            f"{len(samples)} samples of its workers; name a longer one, or give --target-tok-s and --drafter-tok-s"
        )
    first, last = counted[0], counted[-1]
    rate = (last["tokens"] - first["tokens"]) / max(1e-9, last["seconds"] - first["seconds"])
    busy = {side: _busy(samples, side) for side in ("target", "drafter")}
    for side, share in busy.items():
        if share <= 0:
            raise ConfigError(f"{run_dir}: expected busy {side} workers in workers.jsonl, found none; name another run")
    targets, drafters = len(config.runtime.targets), len(config.runtime.drafters)
    return Rates(
        rate / config.runtime.reuse / targets / busy["target"],
        rate / drafters / busy["drafter"],
        f"measured in {run_dir}: {rate:,.0f} tokens/s, targets busy {busy['target']:.0%}, drafters "
        f"{busy['drafter']:.0%}",
        has_exchange=config.optim.shard and drafters > 1,
    )


def _last_start(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those since the run was last resumed: each start counts its seconds from zero."""
    falls = [at for at in range(1, len(lines)) if lines[at]["seconds"] < lines[at - 1]["seconds"]]
    return lines[falls[-1] if falls else 0 :]


def _busy(samples: list[dict[str, Any]], side: str) -> float:
    shares = [worker["busy"] for line in samples for name, worker in line["workers"].items() if name.startswith(side)]
    return sum(shares) / len(shares) if shares else 0.0


def _needed(file: Path) -> Path:
    if not file.is_file():
        raise ConfigError(f"{file.parent}: expected a run directory with {file.name}, found none; check --run")
    return file


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            yield json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number}: expected JSON, found {error}") from error


def estimated_rates(
    config: RunConfig, outline: Outline, shape: DrafterShape, micro_batch_tokens: float, rate_tflops: float
) -> Rates:
    """By arithmetic: products of each side over a share of the GPU's matrix rate, and what an update moves."""
    kept = outline.kept_layers(shape.target_layer_ids, to_end=config.loss.needs_final_states)
    target_tok_s = rate_tflops * 1e12 * TARGET_EFFICIENCY / (2 * sum(outline.layers[:kept]))
    step_s = step_flops(config, shape) / (rate_tflops * 1e12 * DRAFTER_EFFICIENCY)
    update_s = drafter_parameters(shape) * UPDATE_BYTES[config.optim.optimizer] / (MEMORY_GB_S * 1e9)
    accumulation = max(1, config.optim.accumulation // len(config.runtime.drafters))
    return Rates(
        target_tok_s,
        micro_batch_tokens / (step_s + update_s / accumulation),
        f"estimated from products at {rate_tflops:,.0f} TFLOP/s: target {TARGET_EFFICIENCY:.0%} and drafter "
        f"{DRAFTER_EFFICIENCY:.0%} of it",
    )


def step_flops(config: RunConfig, shape: DrafterShape) -> float:
    """Useful work of a micro-batch: 3 x the stack's forward and 2 x the head's, attention as full triangles."""
    data = config.data
    anchors = data.num_rows * (data.num_anchors if data.num_anchors is not None else data.row_length // 4)
    context, block = data.num_rows * data.row_length, anchors * shape.block_size
    width, queries = shape.hidden_size, shape.num_heads * shape.head_dim
    keys = shape.num_kv_heads * shape.head_dim
    layer = 2 * block * (2 * queries * width + 3 * width * shape.intermediate_size)
    layer += 2 * (block + context) * 2 * keys * width
    # An anchor lies in the middle of its row on average.
    layer += 4 * queries * block * (data.row_length // 2 + shape.block_size)
    features = 2 * context * len(shape.target_layer_ids) * width * width
    head = 2 * block * width * shape.vocab_size
    return 3.0 * (shape.num_layers * layer + features) + 2.0 * head
