"""Losses of twenty CPU steps of a tiny run, against which every change is held.

A change that means to alter the numbers records them again, and says so in its message:

    PYTHONPATH=src:tests python tests/golden/record.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from integration.tiny_run import make_files, metrics, run_control, tiny_config

RECORDED = Path(__file__).parent
RUNS: dict[str, dict[str, Any]] = {
    "plain": {"optim": {"lr": 1e-2}},
    # No Muon: it orthogonalises in bfloat16, which CPUs round too differently for 1e-4.
    "window_reuse_draft_vocab": {
        "optim": {"lr": 1e-2, "weight_decay": 0.1, "accumulation": 2, "schedule": "wsd"},
        "runtime": {"reuse": 3},
        "loss": {"draft_vocab": "data"},
        "drafter": {"num_layers": 2, "block_size": 6, "window": 8, "window_layers": (1,)},
    },
}
KEYS = ("step", "loss", "accept", "grad_norm", "lr", "blocks", "tokens")


def twenty_steps(name: str, directory: Path) -> list[dict[str, float]]:
    """One of RUNS, its lines cut to KEYS."""
    config = tiny_config(make_files(directory), directory / "run", steps=20, save_every=20, **RUNS[name])
    return [{key: line[key] for key in KEYS} for line in metrics(run_control(config).run_dir)]


def recorded(name: str) -> list[dict[str, float]]:
    """What was recorded."""
    lines: list[dict[str, float]] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return lines


def main() -> None:
    """Records every run."""
    for name in RUNS:
        with tempfile.TemporaryDirectory() as directory:
            lines = twenty_steps(name, Path(directory))
        rows = ",\n".join(json.dumps(line) for line in lines)
        (RECORDED / f"{name}.json").write_text(f"[\n{rows}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
