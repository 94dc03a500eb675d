"""The top of a report: which run this is, of what target and drafter, when and where it ran."""

import html
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from blockdraft.commands.report import RunFiles

LOSSES = {
    "ce": "Cross-entropy of the draft tokens, mean by position weights.",
    "dpace": "Cross-entropy of the draft tokens, weighted by how likely the block is accepted so far.",
    "kl": "Divergence of the draft tokens' distributions from the target's, mean by position weights.",
}
"""What is plotted as loss, by objective."""


def title(found: RunFiles) -> str:
    """Of the window: tells two reports apart without opening them."""
    return f"{_name(found)}: a drafter for {_target_name(found) or 'a target without a name'}"


def head(found: RunFiles) -> str:
    """Name of the run, and lines on drafter, target, place and time."""
    lines = [_drafter(found), _target(found), _place(found)]
    under = "".join(f'<p class="under">{html.escape(line)}</p>' for line in lines if line)
    return f"<header><h1>{html.escape(title(found))}</h1>{under}</header>"


def loss_is(found: RunFiles) -> str:
    """What the plot of the loss shows."""
    objective, ids = found.config.get("loss", {}).get("objective"), found.environment.get("draft_vocab")
    about = LOSSES.get(objective, "What the objective minimises.")
    if objective == "ce" and ids:
        about += f" Knowing nothing gives ln {ids:,} = {math.log(ids):.2f}."
    return about


def drafter_rows(found: RunFiles) -> dict[str, str]:
    """The drafter's shape, as recorded; of runs that recorded none, what the config says of it."""
    drafter = found.environment.get("drafter")
    if drafter is None:
        asked = found.config.get("drafter", {})
        return {name.replace("_", " "): str(asked[name]) for name in ("num_layers", "block_size") if name in asked}
    return {
        "layers": f"{drafter['num_layers']:,}",
        "width": f"{drafter['hidden_size']:,}",
        "block size, anchor included": f"{drafter['block_size']:,}",
        "reads target layers": ", ".join(map(str, drafter["target_layer_ids"])),
        "trainable parameters": f"{drafter['parameters'] / 1e6:,.1f} M",
    }


def _name(found: RunFiles) -> str:
    return Path(found.name).resolve().name or found.name


def _target_name(found: RunFiles) -> str:
    """The last part of a directory or hub name."""
    return Path(found.config.get("target", {}).get("path") or "").name


def _drafter(found: RunFiles) -> str:
    config, shape = found.config.get("drafter", {}), found.environment.get("drafter")
    if shape is None:
        if "num_layers" not in config or "block_size" not in config:
            return ""
        return f"Drafter: {_layers(config)}, blocks of {config['block_size']} (anchor included)"
    return (
        f"Drafter: {_layers(shape)} of width {shape['hidden_size']:,}, blocks of {shape['block_size']} "
        f"(anchor included), {shape['parameters'] / 1e6:,.1f} M parameters; reads target layers "
        f"{', '.join(map(str, shape['target_layer_ids']))}"
    )


def _layers(shape: Mapping[str, Any]) -> str:
    return f"{shape['num_layers']} layer{'s' if shape['num_layers'] != 1 else ''}"


def _target(found: RunFiles) -> str:
    path = found.config.get("target", {}).get("path") or "not named"
    known = found.environment
    model = f" ({known['target_class']}, {known['target_layers']} layers)" if "target_class" in known else ""
    runtime = found.config.get("runtime", {})
    devices = [f"{side} on {', '.join(runtime[side])}" for side in ("targets", "drafters") if runtime.get(side)]
    return "; ".join([f"Target: {path}{model}", *devices])


def _place(found: RunFiles) -> str:
    started = found.environment.get("started", [])
    if not started:
        return f"Run directory {found.name}; when it ran was not recorded"
    again = f", gone on {_moment(started[-1])} (start {len(started)})" if len(started) > 1 else ""
    return f"Run directory {found.name}; begun {_moment(started[0])}{again}"


def _moment(text: str) -> str:
    return f"{datetime.fromisoformat(text):%Y-%m-%d %H:%M} UTC"
