"""best.json: which checkpoint had the best held-out acceptance, and what that was measured on.

Acceptance on other prompts, or over answers of another length, is neither better nor worse: it begins a new best.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BEST = "best.json"


class Yardstick(NamedTuple):
    """What an acceptance length was measured on."""

    sets: tuple[str, ...]
    num_prompts: int
    """Of all sets together."""
    prompts_sha256: str
    """Over the names of the sets and the token ids of their prompts."""
    max_new_tokens: int

    @classmethod
    def of(cls, prompts: Mapping[str, Sequence[Sequence[int]]], max_new_tokens: int) -> "Yardstick":
        """From the prompts' token ids by set; the order of the sets does not count."""
        ordered = {name: [list(prompt) for prompt in prompts[name]] for name in sorted(prompts)}
        digest = hashlib.sha256(json.dumps(ordered).encode("utf-8")).hexdigest()
        return cls(tuple(ordered), sum(map(len, ordered.values())), digest, max_new_tokens)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "Yardstick":
        """From best.json."""
        return cls(
            tuple(values["sets"]),
            int(values["num_prompts"]),
            str(values["prompts_sha256"]),
            int(values["max_new_tokens"]),
        )

    def spell(self) -> str:
        """For people."""
        return f"{', '.join(self.sets)} (prompts: {self.num_prompts}, new tokens: {self.max_new_tokens})"


class Best(NamedTuple):
    """The checkpoint with the best held-out acceptance so far."""

    steps_done: int
    acceptance_length: float
    """Mean over the evaluation sets."""
    measured_on: Yardstick | None
    """None: written by a version that did not note it, so nothing can be compared with it."""

    def is_comparable(self, other: "Best") -> bool:
        """Whether both were measured on the same."""
        return self.measured_on is not None and self.measured_on == other.measured_on

    def is_beaten_by(self, other: "Best") -> bool:
        """By a longer acceptance on the same, by any acceptance on something else; never by one that is no number."""
        return other.acceptance_length > (self.acceptance_length if self.is_comparable(other) else 0.0)

    def spell_change(self, other: "Best") -> str:
        """Why another one that was measured otherwise took the place of this one, in a line."""
        on = "what an earlier version did not note" if self.measured_on is None else self.measured_on.spell()
        now = "" if other.measured_on is None else other.measured_on.spell()
        if self.measured_on is not None and on == now:
            now = "other prompts of these names"
        return (
            f"the best checkpoint is chosen anew: step {self.steps_done}, acceptance length "
            f"{self.acceptance_length:.2f}, was measured on {on}, now it is {now}"
        )

    def to_json(self, checkpoint: str) -> str:
        """Text of the file; `checkpoint` is the directory's name."""
        values = {"steps_done": self.steps_done, "acceptance_length": self.acceptance_length, "checkpoint": checkpoint}
        noted = {} if self.measured_on is None else {"measured_on": self.measured_on._asdict()}
        return json.dumps(values | noted, indent=2) + "\n"


def read_best(root: Path) -> Best | None:
    """What best.json says; None without one, or where its checkpoint is gone."""
    path = root / BEST
    if not path.is_file():
        return None
    values = json.loads(path.read_text(encoding="utf-8"))
    noted = values.get("measured_on")
    measured_on = None if noted is None else Yardstick.read(noted)
    best = Best(int(values["steps_done"]), float(values["acceptance_length"]), measured_on)
    return best if (root / str(values["checkpoint"])).is_dir() else None
