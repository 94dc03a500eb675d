"""What the nodes of one run must have in common, checked before any of them trains."""

import dataclasses
from typing import Any

from blockdraft.config import RunConfig
from blockdraft.runtime.distributed import World

OWN = (
    "run_dir", "trackers", "target.path", "data.train", "drafter.init_from", "runtime.channel_depth",
    "runtime.stall_seconds", "eval.prompts", "eval.every", "eval.num_prompts", "eval.max_new_tokens",
)  # fmt: skip
"""Fields that each node may have of its own: places, and what changes no number."""
COUNTED = ("runtime.targets", "runtime.drafters")
"""Devices: as many on every node, by whatever name. They are joined alike everywhere."""


def check_agreement(world: World, config: RunConfig, fingerprint: str, first_step: int) -> None:
    """Compares this node's run with node 0's; `fingerprint` is that of the documents.

    Raises:
        ConfigError: names the first field that differs, with both values.
    """
    for name, value in _flatten(dataclasses.asdict(config), ""):
        if name in COUNTED:
            world.agree(f"number of {name}", str(len(value)))
        elif name not in OWN:
            world.agree(name, repr(value))
    world.agree("fingerprint of data.train", fingerprint)
    world.agree("steps done", str(first_step))


def _flatten(values: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        found += _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
    return found
