"""`blockdraft export`: a drafter in the published format, read back and compared before the command says done."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    from blockdraft.models.drafter import Drafter, DrafterShape


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write a drafter for vLLM, SGLang and the dflash package."""

    source: tyro.conf.Positional[Path]
    """Run directory (its newest checkpoint), checkpoint directory, or an export."""
    output: Path
    """Directory of the export; files of an earlier export there are replaced."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Data type of the tensors."""


def run(options: Options) -> int:
    """Writes the export; returns the exit code.

    Raises:
        ConfigError: there is no drafter at the source.
        RuntimeError: what was read back is not what was written.
    """
    from blockdraft.api import load_drafter

    drafter = load_drafter(options.source, device="cpu")
    num_tensors = export(drafter, options.output, options.dtype)
    hints = serving_hints(drafter.shape, options.output)
    sys.stdout.write(f"{options.output}: {num_tensors} tensors in {options.dtype}, read back and equal\n")
    sys.stdout.write("".join(f"{client}: {flags}\n" for client, flags in hints.items()))
    return 0


def export(drafter: "Drafter", directory: Path, dtype: Literal["bfloat16", "float32"]) -> int:
    """Saves, reloads strictly and compares shape and every tensor bit for bit; returns the number of tensors.

    Raises:
        RuntimeError: something differs.
    """
    import torch

    from blockdraft.models.formats import load_export, save_export
    from blockdraft.models.target import DTYPES

    save_export(drafter, directory, DTYPES[dtype])
    found = load_export(directory)
    expected = {name: weight.to("cpu", DTYPES[dtype]) for name, weight in drafter.state_dict().items()}
    if found.shape != drafter.shape:
        raise RuntimeError(f"{directory}: expected the config of {drafter.shape}, read back {found.shape}")
    for name, weight in found.state_dict().items():
        if weight.dtype != expected[name].dtype or not torch.equal(weight, expected[name]):
            raise RuntimeError(f"{directory}: tensor {name} read back differs from the one written")
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
