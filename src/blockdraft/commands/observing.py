"""What a run's workers did, beside its numbers: workers.jsonl, timeline.json, a trace on request.

All in control's thread. What depends on timing is here and not in metrics.jsonl, whose lines repeat bit for bit.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from blockdraft.commands.tracking import MetricsFile
from blockdraft.runtime.chrome_trace import Window, chrome_trace, last_steps, window
from blockdraft.runtime.pipeline import Pipeline
from blockdraft.runtime.sides import Spent, spent

SAMPLE_SECONDS: Final = 1.0
"""Shortest time between two lines of workers.jsonl; it grows with the run, to a thousandth of it."""
SAMPLE_STEPS: Final = 4
"""Fewest steps between them, unless they are slow."""
TIMELINE_STEPS: Final = 20
SETTLING_STEPS: Final = 10
"""Left out of a trace where the run is long enough: rings and queues fill in them."""
GIB: Final = 2**30


class Observer:
    """Samples the workers while a run goes on, and writes down what its lanes hold."""

    def __init__(
        self,
        run_dir: Path,
        say: Callable[[str], None],
        pipeline: Pipeline,
        *,
        trace_steps: int = 0,
        sample_seconds: float = SAMPLE_SECONDS,
    ) -> None:
        """`trace_steps`: steps of the steady state that become a Chrome trace; 0 for none."""
        self.run_dir, self.say, self.pipeline, self.sample_seconds = run_dir, say, pipeline, sample_seconds
        first, total = pipeline.first_step, pipeline.total_steps
        if first == 0:
            for old in [*run_dir.glob("trace_steps_*.json"), run_dir / "timeline.json", run_dir / "workers.jsonl"]:
                old.unlink(missing_ok=True)
        self._file = MetricsFile(run_dir / "workers.jsonl", first)
        self._trace_steps = trace_steps
        self._trace_from = max(first, min(first + SETTLING_STEPS, total - trace_steps))
        self._is_traced = trace_steps == 0
        self._sampled_at, self._sampled_step = time.monotonic(), first
        self._before: dict[str, Spent] = {}
        self._step = first

    def step(self, step: int) -> None:
        """A step, counted from 0, is done."""
        self._step = step + 1
        now = time.monotonic()
        elapsed = now - self._sampled_at
        # Work is counted when it is over: a sample of few steps would say more about where it was cut.
        is_whole = self._step - self._sampled_step >= SAMPLE_STEPS or elapsed >= 10 * self.sample_seconds
        if is_whole and elapsed >= max(self.sample_seconds, (now - self.pipeline.started) / 1000):
            self._sample(now)
        # One step later: by then what the devices did for the last one has happened and was read.
        if not self._is_traced and step >= self._trace_from + self._trace_steps:
            self._write_trace()

    def end(self) -> None:
        """The threads are gone: writes what is left."""
        try:
            if self._step > self.pipeline.first_step:
                self._sample(time.monotonic())
            self._file.close()
            self.pipeline.record.read_devices()
            if not self._is_traced:
                self._write_trace()
            shown = last_steps(self.pipeline.record, TIMELINE_STEPS)
            if shown is not None:
                self._write(self.run_dir / "timeline.json", shown)
        except OSError as error:
            # Often the disk that the run itself died of: its own error must be the one that is shown.
            self.say(f"what the workers did last could not be written: {error}")

    def _sample(self, now: float) -> None:
        """One line: shares of the time since the last one, channel and memory as they are."""
        pipeline = self.pipeline
        found = spent(pipeline.workers, pipeline.channel, now - pipeline.started)
        started = max(self._sampled_at, pipeline.started)
        elapsed = max(1e-9, now - started)
        depths = [one.filled for one in pipeline.record.depths(time.perf_counter() - elapsed)]
        depths = depths or [pipeline.channel.filled()]
        self._file.write(
            {
                "step": self._step,
                "seconds": round(now - pipeline.started, 3),
                "workers": {name: self._shares(name, one, elapsed) for name, one in found.items()},
                "channel": [round(sum(ring) / len(ring), 2) for ring in zip(*depths, strict=True)],
                "channel_depth": pipeline.channel.depth,
                "memory_gib": memory_now(pipeline.memory.devices),
            }
        )
        self._sampled_at, self._sampled_step, self._before = now, self._step, found

    def _shares(self, name: str, now: Spent, elapsed_s: float) -> dict[str, float]:
        before = self._before.get(name, Spent(0.0, 0.0, 0.0, 0.0, 0.0))
        # A long piece of work is counted when it is over, so one sample may hold more than its own time.
        shares = [min(1.0, max(0.0, (a - b) / elapsed_s)) for a, b in zip(now, before, strict=True)]
        return {field.removesuffix("_s"): round(share, 4) for field, share in zip(Spent._fields, shares, strict=True)}

    def _write_trace(self) -> None:
        self._is_traced = True
        record = self.pipeline.record
        last = self._trace_from + self._trace_steps - 1
        shown = window(record, self._trace_from, last)
        if shown is None:
            self.say("no trace: the run ended before the steps that were to be traced")
            return
        path = self.run_dir / f"trace_steps_{shown.first_step + 1}_{shown.last_step + 1}.json"
        self._write(path, shown)
        missed = self._trace_steps - (shown.last_step - shown.first_step + 1)
        fewer = f"; {missed} of {self._trace_steps} steps are not in it" if missed else ""
        left_out = f"; {record.left_out()} spans of devices were left out" if record.left_out() else ""
        self.say(f"trace: {path}, open it in https://ui.perfetto.dev{fewer}{left_out}")

    def _write(self, path: Path, shown: Window) -> None:
        side = path.with_name(path.name + ".writing")
        side.write_text(json.dumps(chrome_trace(self.pipeline.record, shown)) + "\n", encoding="utf-8")
        side.replace(path)


def memory_now(devices: list[torch.device]) -> dict[str, dict[str, float]]:
    """GiB of each GPU's allocator, and what the process holds of the host's memory where the system tells."""
    found: dict[str, dict[str, float]] = {}
    for device in devices:
        stats: dict[str, Any] = torch.cuda.memory_stats(device)
        found[str(device)] = {
            "allocated": round(stats.get("allocated_bytes.all.current", 0) / GIB, 3),
            "reserved": round(stats.get("reserved_bytes.all.current", 0) / GIB, 3),
        }
    status = Path("/proc/self/status")
    if status.is_file():
        lines = [line.split() for line in status.read_text(encoding="utf-8").splitlines()]
        resident = next((int(words[1]) for words in lines if words[0] == "VmRSS:"), None)
        if resident is not None:
            found["host"] = {"resident": round(resident / 2**20, 3)}
    return found
