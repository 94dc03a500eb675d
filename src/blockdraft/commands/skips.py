"""Steps skipped because their gradients were not finite: counted, said, and the end of the run when there are too many.

R rows, T tokens, A anchors, S drafted slots.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blockdraft.data.loader import Fill, Loader, MicroBatch
from blockdraft.runtime.reports import MicroBatches, StepDone
from blockdraft.training.health import Health
from blockdraft.training.tensor_file import write_tensors, write_text


class NonFinite(RuntimeError):
    """More steps were skipped than a run may skip."""


class Skips:
    """Watches the gradient's norm of every step; every node has one, for its own drafters."""

    def __init__(
        self, loader: Loader, run_dir: Path, most: int, say: Callable[[str], None], *, so_far: int, drafters: list[int]
    ) -> None:
        """`so_far`: skipped before this start. `drafters`: ranks of this node's."""
        self.loader, self.run_dir, self.most, self.say = loader, run_dir, most, say
        self.count, self.drafters = so_far, drafters
        self._measured: dict[int, dict[int, list[Health]]] = {}
        self._fatal_step: int | None = None

    def measured(self, item: MicroBatches) -> None:
        """What one drafter measured in one step."""
        self._measured.setdefault(item.step, {})[item.drafter] = item.read()

    def step(self, item: StepDone, grad_norm: float) -> None:
        """Counts a step."""
        if math.isfinite(grad_norm):
            for step in [step for step in self._measured if step <= item.step]:
                del self._measured[step]
            return
        self.count += 1
        self.say(
            f"warning: step {item.step + 1} skipped on all drafters, its gradients are not finite "
            f"({self.count} skipped of at most {self.most})"
        )
        if self.count > self.most:
            self._fatal_step = item.step

    def end_if_due(self) -> None:
        """Ends the run when too many steps were skipped and all is known that is to be written down.

        Raises:
            NonFinite: names the micro-batches at fault, which are written out.
        """
        step = self._fatal_step
        if step is None or set(self._measured.get(step, {})) != set(self.drafters):
            return
        written = self._write_out(step, self._measured[step])
        where = ", ".join(str(path) for path in written) or "by a drafter of another node"
        raise NonFinite(
            f"{self.count} steps had gradients that are not finite, optim.max_skipped allows {self.most}; the last was "
            f"step {step + 1}, its micro-batch is written to {where}. Look at its features and documents, lower "
            "optim.lr, or raise optim.max_skipped and go on with --resume auto"
        )

    def _write_out(self, step: int, measured: dict[int, list[Health]]) -> list[Path]:
        """Micro-batches whose features or loss were not finite; all of the step where none was (a backward pass)."""
        guilty = {
            (rank, index): health
            for rank, found in measured.items()
            for index, health in enumerate(found)
            if not health.is_finite
        }
        several_nodes = len(self.drafters) < self.loader.config.num_drafters
        if not guilty and not several_nodes:
            guilty = {(rank, i): health for rank, found in measured.items() for i, health in enumerate(found)}
        config, written = self.loader.config, []
        counted = dict.fromkeys(self.drafters, 0)
        for fill in self.loader.fills(step, step + 1):
            rank = fill.number % config.num_drafters
            for one in fill.passes:
                key = (rank, counted[rank])
                counted[rank] += 1
                if key in guilty:
                    written.append(self._write_one(fill, one, key, guilty[key]))
        return written

    def _write_one(self, fill: Fill, one: MicroBatch, key: tuple[int, int], health: Health) -> Path:
        directory = self.run_dir / "nonfinite"
        directory.mkdir(parents=True, exist_ok=True)
        rank, index = key
        path = directory / f"step_{one.step + 1:08d}_drafter_{rank}_micro_batch_{index}.safetensors"
        tensors = {
            "input_ids": one.input_ids_RT,
            "document": one.document_RT,
            "position": one.position_RT,
            "anchor": one.anchor_RA,
            "label": one.label_RAS,
            "supervised": one.supervised_RAS,
            "weight": one.weight_RAS,
        }
        write_tensors(path, tensors)
        facts: dict[str, Any] = {
            "step": one.step + 1,
            "drafter": rank,
            "micro_batch": index,
            "fill": fill.number,
            **{name: value if math.isfinite(value) else str(value) for name, value in health._asdict().items()},
            "is_finite": health.is_finite,
            "denominator": one.denominator,
            "documents": [placed._asdict() for placed in self.loader.placed(fill.number)],
        }
        write_text(path.with_suffix(".json"), json.dumps(facts, indent=2) + "\n")
        return path
