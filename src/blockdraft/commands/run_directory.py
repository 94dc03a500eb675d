"""The directory of a run: claimed once every check has passed, with its config and its environment written down."""

import json
import os
import platform
import shutil
from pathlib import Path

import torch
import transformers

from blockdraft.commands.build import Built
from blockdraft.config import RunConfig, to_json


def claim(run_dir: Path, config: RunConfig) -> None:
    """Makes the directory this run's: an earlier run that is not resumed goes, this run's config comes."""
    run_dir.mkdir(parents=True, exist_ok=True)
    if not config.resume:
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    side = run_dir / "config.json.partial"
    side.write_text(to_json(config), encoding="utf-8")
    side.rename(run_dir / "config.json")


def write_environment(run_dir: Path, built: Built) -> None:
    """Versions and machine, in environment.json."""
    target = built.targets[0]
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "cuda_devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "target_class": type(target.model).__name__,
        "target_layers": target.num_layers,
        "draft_vocab": built.draft_vocab_size,
    }
    (run_dir / "environment.json").write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
