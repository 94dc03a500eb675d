"""`blockdraft import`: a drafter that others published, checked and written again in this project's export layout.

Reads the published layout and that of speculators, strictly: no field that would be ignored, no tensor too many. What
comes out is for `drafter.init_from`, `evaluate` and `generate`; its tensors are the source's, byte for byte.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from blockdraft.commands.outputs import check_export
from blockdraft.config import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from blockdraft.models.drafter import Drafter


@dataclass(frozen=True, kw_only=True)
class Options:
    """Read a published checkpoint, for a warm start or for evaluation."""

    source: tyro.conf.Positional[Path]
    """Directory with config.json and .safetensors files, published or of speculators."""
    output: Path
    """Directory of the export; files of an earlier export there are replaced."""
    target: str = ""
    """Directory, .gguf file or hub name of the target, whose number of layers speculators' format does not say."""


def run(options: Options) -> int:
    """Writes the export and says what it is; returns the exit code.

    Raises:
        ConfigError: the source is no DFlash drafter that this project can run.
        RuntimeError: what was written is not what was read.
    """
    from blockdraft.models.formats import CONFIG, dtype_name, load_export, read_json, read_tensors, save_export
    from blockdraft.models.speculators import load_speculators, read_verifier

    if options.output.resolve() == options.source.resolve():
        raise ConfigError(f"--output {options.output}: expected another directory than the source")
    check_export(options.output)
    config = read_json(options.source / CONFIG)
    left_out: list[str] = []
    if "speculators_model_type" in config:
        name = options.target or _local_path(read_verifier(config).name_or_path)
        found = load_speculators(options.source, num_target_layers=_count_layers(name) if name else None)
        drafter, left_out = found.drafter, found.left_out
        kind = f"speculators' format {found.version}, made for {found.verifier.name_or_path or 'a target not named'}"
    elif options.target:
        raise ConfigError(
            f"--target {options.target} does nothing as things stand: the published format of {options.source} says "
            "the target's number of layers itself; leave --target out"
        )
    else:
        drafter, kind = load_export(options.source), "published format"
    kept = {name: tensor for name, tensor in read_tensors(options.source).items() if name not in left_out}
    save_export(drafter, options.output, drafter.dtype, lambda written: compare(written, drafter, kept))
    lines = [f"{options.source}: {kind}", *_describe(drafter)]
    if left_out:
        lines.append(f"  left out, the target's own: {', '.join(left_out)}")
    lines.append(
        f"{options.output}: {len(kept)} tensors in {dtype_name(drafter.dtype)}, byte for byte those of the source"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def compare(directory: Path, drafter: "Drafter", expected: "dict[str, Tensor]") -> None:
    """Reads an export back and compares shape and bytes.

    Raises:
        RuntimeError: something differs.
    """
    import torch

    from blockdraft.models.formats import load_export, read_tensors

    if load_export(directory).shape != drafter.shape:
        raise RuntimeError(f"{directory}: the config read back is not the one written")
    found = read_tensors(directory)
    if found.keys() != expected.keys():
        raise RuntimeError(f"{directory}: expected tensors {sorted(expected)}, read back {sorted(found)}")
    for name, tensor in expected.items():
        other = found[name]
        if tensor.dtype != other.dtype or not torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)):
            raise RuntimeError(f"{directory}: tensor {name} differs from the source's")


def _describe(drafter: "Drafter") -> list[str]:
    shape = drafter.shape
    lines = [
        f"  {shape.num_layers} layers of width {shape.hidden_size}, block size {shape.block_size}, "
        f"mask token {shape.mask_token_id}, {sum(w.numel() for w in drafter.parameters()):,} parameters",
        f"  reads layers {', '.join(map(str, shape.target_layer_ids))} of a target with {shape.num_target_layers} "
        f"layers and {shape.vocab_size:,} ids",
    ]
    if shape.window is not None:
        windowed = ", ".join(map(str, shape.window_layers))
        lines.append(f"  window of {shape.window} tokens in layers {windowed}")
    if shape.causal or shape.window_causal:
        lines.append(f"  causal inside a block{' in layers with a window' if shape.window_causal else ''}")
    return lines


def _local_path(name: str | None) -> str:
    return name if name and (Path(name) / "config.json").is_file() else ""


def _count_layers(name: str) -> int:
    """The target's number of layers, from its config alone."""
    from transformers import AutoConfig

    from blockdraft.models.target import source_of

    source, extra = source_of(name)
    try:
        config = AutoConfig.from_pretrained(source, **extra)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--target {name}: expected a model with a config, found none: {error}") from error
    return int(config.get_text_config().num_hidden_layers)
