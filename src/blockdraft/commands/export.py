"""`blockdraft export`: a drafter in a format that engines read, read back and compared before the command says done."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from blockdraft.commands.outputs import check_export
from blockdraft.config import ConfigError

if TYPE_CHECKING:
    from blockdraft.models.drafter import Drafter, DrafterShape
    from blockdraft.models.speculators import Verifier


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a drafter for vLLM, SGLang and the dflash package."""

    source: tyro.conf.Positional[Path]
    """Run directory (its newest checkpoint), checkpoint directory, or an export."""
    output: Path
    """Directory of the export; files of an earlier export there are replaced."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the tensors."""
    format: Literal["published", "speculators"] = "published"
    """published: vLLM, SGLang and the dflash package; speculators: the speculators package and vLLM."""
    target: str = ""
    """Directory or hub name of the target, written into speculators' format; default: that of the run."""


def run(options: Options) -> int:
    """Writes the export; returns the exit code.

    Raises:
        ConfigError: there is no drafter at the source, or the format cannot say what it does.
        RuntimeError: what was read back is not what was written.
    """
    check_export(options.output)
    from blockdraft.api import load_drafter

    drafter = load_drafter(options.source, device="cpu")
    if options.format == "speculators":
        verifier = find_verifier(options)
        num_tensors = export(drafter, options.output, options.dtype, verifier)
        hints = speculators_hints(drafter.shape, options.output, verifier)
    elif options.target:
        raise ConfigError("--target goes with --format speculators; the published format does not name the target")
    else:
        num_tensors = export(drafter, options.output, options.dtype)
        hints = serving_hints(drafter.shape, options.output)
    sys.stdout.write(f"{options.output}: {num_tensors} tensors in {options.dtype}, read back and equal\n")
    sys.stdout.write("".join(f"{client}: {flags}\n" for client, flags in hints.items()))
    return 0


def export(
    drafter: "Drafter", directory: Path, dtype: Literal["bfloat16", "float32"], verifier: "Verifier | None" = None
) -> int:
    """Saves, reloads strictly and compares shape and every tensor bit for bit; returns the number of tensors.

    In speculators' format if a verifier is given. What differs never comes to lie at `directory`.

    Raises:
        RuntimeError: something differs.
    """
    import torch

    from blockdraft.models.formats import load_export, save_export
    from blockdraft.models.speculators import load_speculators, save_speculators
    from blockdraft.models.target import DTYPES

    expected = {name: weight.to("cpu", DTYPES[dtype]) for name, weight in drafter.state_dict().items()}

    def compare(written: Path) -> None:
        found = load_export(written) if verifier is None else load_speculators(written).drafter
        if found.shape != drafter.shape:
            raise RuntimeError(f"{directory}: expected the config of {drafter.shape}, read back {found.shape}")
        for name, weight in found.state_dict().items():
            if weight.dtype != expected[name].dtype or not torch.equal(weight, expected[name]):
                raise RuntimeError(f"{directory}: tensor {name} read back differs from the one written")

    if verifier is None:
        save_export(drafter, directory, DTYPES[dtype], compare)
    else:
        save_speculators(drafter, directory, verifier, DTYPES[dtype], compare)
    return len(expected)


def serving_hints(shape: "DrafterShape", directory: Path) -> dict[str, str]:
    """How each client is told to use the export. vLLM counts draft tokens, SGLang the anchor as well."""
    vllm = f'{{"method": "dflash", "model": "{directory}", "num_speculative_tokens": {shape.block_size - 1}}}'
    return {
        "vLLM": f"--speculative-config '{vllm}'",
        "SGLang": (
            f"--speculative-algorithm DFLASH --speculative-draft-model-path {directory} "
            f"--speculative-num-draft-tokens {shape.block_size}"
        ),
    }


def find_verifier(options: Options) -> "Verifier":
    """The target as speculators' format names it: --target, else that of the run at the source, else none.

    Raises:
        ConfigError: a .gguf file, which speculators does not read.
    """
    from blockdraft.models.speculators import Verifier
    from blockdraft.training.checkpoint import newest_checkpoint

    name = options.target
    if name.endswith(".gguf"):
        raise ConfigError(f"--target {name}: speculators reads a directory or a hub name, no .gguf file")
    source = options.source
    if not name and ((source / "state.json").is_file() or (source / "checkpoints").is_dir()):
        config = json.loads((newest_checkpoint(source) / "config.json").read_text(encoding="utf-8"))
        path = config["target"]["path"]
        name = "" if path.endswith(".gguf") else path
    if not name:
        return Verifier(None, [])
    file = Path(name) / "config.json"
    architectures = json.loads(file.read_text(encoding="utf-8")).get("architectures") if file.is_file() else None
    return Verifier(name, architectures or [])


def speculators_hints(shape: "DrafterShape", directory: Path, verifier: "Verifier") -> dict[str, str]:
    """How clients of speculators' format are told to use the export."""
    if verifier.name_or_path is None:
        return {"target": "not named in the export; --target names it"}
    said = f"target, method and {shape.block_size - 1} speculative tokens come from the export"
    return {"target": verifier.name_or_path, "vLLM": f"vllm serve {directory}   ({said})"}
