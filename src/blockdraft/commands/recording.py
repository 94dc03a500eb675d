"""What a run says of itself: metrics.jsonl, trackers and the console line. All in control's thread."""

import math
import time
from collections.abc import Callable
from typing import Any

from blockdraft.commands.tracking import MetricsFile, Tracker
from blockdraft.config import RunConfig
from blockdraft.runtime.pipeline import Pipeline
from blockdraft.runtime.reports import Evaluated, StepDone
from blockdraft.training.metrics import StepReport, StepSums, report

LINE_SECONDS = 1.0


class Recorder:
    """Writes every step and evaluation down, and says the steps that are due."""

    def __init__(
        self,
        config: RunConfig,
        say: Callable[[str], None],
        *,
        total_steps: int,
        first_step: int,
        tokens_before: int,
        trackers: list[Tracker],
        metrics: MetricsFile,
        line_seconds: float = LINE_SECONDS,
    ) -> None:
        """`line_seconds`: console lines of steps are at least so far apart; metrics.jsonl has every step."""
        self.config, self.say, self.total_steps = config, say, total_steps
        self.trackers, self.metrics, self.line_seconds = trackers, metrics, line_seconds
        self._tokens_before = tokens_before
        self._line_time, self._line_tokens, self._line_step = time.monotonic(), tokens_before, first_step

    def step(self, item: StepDone, sums: StepSums, grad_norm: float, num_skipped: int, pipeline: Pipeline) -> None:
        """One step of all drafters together; `num_skipped` so far, this one included."""
        found, steps_done = report(sums), item.step + 1
        values: dict[str, Any] = {
            "step": steps_done,
            "loss": found.loss,
            "accept": found.acceptance_length,
            "accuracy": found.accuracy,
            "grad_norm": grad_norm,
            "lr": self.config.optim.lr * item.lr_scale,
            "blocks": found.blocks,
            "skipped_steps": num_skipped,
        }
        for tracker in self.trackers:
            tracker.log(steps_done, values)
        tokens = self._tokens_before + item.tokens
        line = values | {
            "accuracy_per_slot": [round(value, 4) for value in found.accuracy_per_slot],
            "tokens": tokens,
            "seconds": round(time.monotonic() - pipeline.started, 3),
        }
        self.metrics.write(line)
        is_due = time.monotonic() - self._line_time >= self.line_seconds
        if is_due or steps_done == self.total_steps:
            skipped = f" | skipped {num_skipped}" if num_skipped else ""
            self.say(self._console_line(steps_done, found, values["lr"], tokens, pipeline) + skipped)

    def _console_line(self, steps_done: int, found: StepReport, lr: float, tokens: int, pipeline: Pipeline) -> str:
        now = time.monotonic()
        seconds = max(1e-9, now - self._line_time)
        rate = (tokens - self._line_tokens) / seconds
        left = (self.total_steps - steps_done) * seconds / max(1, steps_done - self._line_step)
        self._line_time, self._line_tokens, self._line_step = now, tokens, steps_done
        busy, channel = pipeline.busy_shares(), pipeline.channel
        depth = channel.depth * channel.num_drafters
        return (
            f"step {steps_done:,}/{self.total_steps:,} | loss {found.loss:.3f} | accept "
            f"{found.acceptance_length:.2f} | lr {lr:.1e} | {rate:,.0f} tok/s | target {busy.target:.0%} drafter "
            f"{busy.drafter:.0%} | channel {channel.in_flight()}/{depth} | eta {_spell_seconds(left)}"
        )

    def evaluation(self, item: Evaluated) -> None:
        """Held-out acceptance after some step."""
        values = {f"eval/{name}": found.acceptance_length for name, found in item.sets.items()}
        slots = {f"eval_slots/{name}": _rounded(found.per_slot) for name, found in item.sets.items()}
        self.metrics.write({"step": item.step, **values, **slots, "eval_seconds": round(item.seconds, 3)})
        for tracker in self.trackers:
            tracker.log(item.step, values)
        spelled = ", ".join(
            f"{name} {found.acceptance_length:.2f} ({found.rounds} rounds)" for name, found in item.sets.items()
        )
        self.say(f"evaluation after step {item.step}: acceptance length {spelled}")

    def close(self) -> None:
        """Closes file and trackers."""
        self.metrics.close()
        for tracker in self.trackers:
            tracker.close()


def _rounded(values: list[float]) -> list[float | None]:
    return [round(value, 4) if math.isfinite(value) else None for value in values]


def _spell_seconds(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
