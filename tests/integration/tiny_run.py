"""Whole training runs at toy sizes: a target directory, a token store, a config, and a run in this process."""

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from blockdraft.commands.control import Control
from blockdraft.config import RunConfig
from blockdraft.data.store import ManifestInfo, write_store
from blockdraft.data.template import Encoded, template_hash, tokenizer_hash
from blockdraft.recipes import tiny
from blockdraft.runtime.diagnostics import NONE, Diagnostics
from blockdraft.runtime.pipeline import Delay, no_delay
from blockdraft.training.checkpoint import list_checkpoints
from integration.tiny import CONFIGS
from tiny_chat import CHATML, tiny_tokenizer

RUN_VOCAB_SIZE = 300


class Files(NamedTuple):
    """What a run reads."""

    target: Path
    store: Path


def random_documents(num_documents: int, seed: int = 0, longest: int = 50) -> list[Encoded]:
    """Random ids; a prompt of 3 to 8 tokens, then a reply. Some have a second turn, the first has no reply at all."""
    draw = np.random.default_rng(seed)
    documents = []
    for index in range(num_documents):
        length = int(draw.integers(16, longest + 1))
        mask = np.ones(length, dtype=np.int64)
        mask[: draw.integers(3, 9)] = 0
        if index % 3 == 1:
            mask[length // 2 : length // 2 + 3] = 0
        if index == 0:
            mask[:] = 0
        documents.append(Encoded(draw.integers(3, 250, length).tolist(), mask.tolist()))
    return documents


def save_run_target(path: Path, name: str = "qwen3") -> None:
    """One of the tiny targets with a tokenizer beside it."""
    config = CONFIGS[name]()
    config.vocab_size = RUN_VOCAB_SIZE
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    tiny_tokenizer(CHATML).save_pretrained(path)


def make_files(root: Path, name: str = "qwen3", documents: list[Encoded] | None = None) -> Files:
    """Writes target and store."""
    save_run_target(root / "target", name)
    tokenizer = tiny_tokenizer(CHATML)
    info = ManifestInfo(tokenizer_hash=tokenizer_hash(tokenizer), template_hash=template_hash(tokenizer))
    write_store(root / "store", random_documents(24) if documents is None else documents, info)
    return Files(root / "target", root / "store")


def tiny_config(files: Files, run_dir: Path, **changes: dict[str, Any] | Any) -> RunConfig:
    """Recipe `tiny` over `files`; a dict changes fields of a section."""
    config = dataclasses.replace(tiny(), run_dir=str(run_dir), steps=10, save_every=5)
    sections = {
        "target": {"path": str(files.target), "dtype": "float32"},
        "data": {"train": str(files.store)},
        "drafter": {"dtype": "float32"},
    }
    for name, value in changes.items():
        if isinstance(value, dict):
            sections[name] = sections.get(name, {}) | value
        else:
            config = dataclasses.replace(config, **{name: value})
    for name, values in sections.items():
        config = dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **values)})
    return config


class Ran(NamedTuple):
    """A finished run."""

    run_dir: Path
    lines: list[str]
    """What it said."""
    control: Control


def run_control(
    config: RunConfig,
    *,
    resume: Path | None = None,
    delay: Delay = no_delay,
    say: Callable[[Control, str], None] | None = None,
    diagnostics: Diagnostics = NONE,
) -> Ran:
    """Trains in this thread, from the checkpoint `resume` on if there is one; `say` sees each console line."""
    run_dir = Path(config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []

    def hear(line: str) -> None:
        lines.append(line)
        if say is not None:
            say(control, line)

    control = Control(
        config, run_dir, hear, find_resume=lambda: resume, delay=delay, line_seconds=0.0, diagnostics=diagnostics
    )
    assert control.run() == 0
    assert worker_threads() == []
    return Ran(run_dir, lines, control)


def worker_threads() -> list[str]:
    """Names of a run's threads that are alive."""
    kinds = ("loader", "target", "drafter", "writer")
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(kinds)]


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without wall-clock times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.endswith("seconds")} for line in lines]


def final_tensors(run_dir: Path) -> dict[str, torch.Tensor]:
    """Weights, masters and moments of the newest checkpoint."""
    directory = list_checkpoints(run_dir / "checkpoints")[-1]
    return load_file(directory / "optimizer.safetensors") | load_file(directory / "drafter.safetensors")


def assert_same_run(left: Path, right: Path) -> None:
    """Metrics, weights, masters and moments are equal bit for bit."""
    assert metrics(left) == metrics(right)
    one, other = final_tensors(left), final_tensors(right)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name
