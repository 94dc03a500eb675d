"""Between two steps, in drafter 0's thread: saving and held-out evaluation."""

import time
from collections.abc import Callable

import torch

from blockdraft.commands.build import Built
from blockdraft.config import RunConfig
from blockdraft.data.position import position_at
from blockdraft.decoding.replay import replay
from blockdraft.runtime.reports import Evaluated, SetAcceptance
from blockdraft.runtime.saver import Saver
from blockdraft.runtime.spans import Lane
from blockdraft.training.best import Yardstick
from blockdraft.training.checkpoint import Contents, contents_of


class Boundary:
    """Saves and evaluates when it is time."""

    def __init__(
        self,
        config: RunConfig,
        built: Built,
        saver: Saver,
        *,
        first_step: int,
        is_evaluated: bool,
        tell: Callable[[Evaluated], None],
        tick: Callable[[], None],
        lane: Lane,
    ) -> None:
        """`is_evaluated`: the evaluation after `first_step` is known already.

        `tick` says that something moves, and raises when the run is ending; `lane` is drafter 0's.
        """
        self.config, self.built, self.saver = config, built, saver
        self.first_step, self.is_evaluated = first_step, is_evaluated
        self.tell, self.tick, self.lane = tell, tick, lane
        prompts = {name: [one.token_ids[: one.prompt_length] for one in tapes] for name, tapes in built.tapes.items()}
        self.measured_on = Yardstick.of(prompts, config.eval.max_new_tokens)

    def pass_over(self, steps_done: int, *, ends_here: bool) -> None:
        """After `steps_done` steps, with everything the last one changed in place."""
        self.tick()
        is_due = steps_done % self.config.save_every == 0
        # Saved first: whoever stops a run may not wait for an evaluation.
        if (is_due or ends_here) and steps_done > self.first_step:
            with self.lane.span("save", steps_done - 1):
                self.saver.save(steps_done)
            self.tick()
        if self.is_evaluation_due(steps_done):
            with self.lane.both("evaluate", steps_done - 1):
                found = evaluate(self.built, steps_done, self.tick)
            self.tell(found)
            lengths = [one.acceptance_length for one in found.sets.values()]
            self.saver.evaluated(steps_done, sum(lengths) / len(lengths), self.measured_on)

    def is_evaluation_due(self, steps_done: int) -> bool:
        """Not where a run only stops: it goes on as if it never had."""
        if not self.built.tapes or (steps_done == self.first_step and self.is_evaluated):
            return False
        return steps_done % self.config.eval.every == 0 or steps_done == self.built.total_steps


def contents_at(config: RunConfig, built: Built, steps_done: int) -> Contents:
    """What a checkpoint holds, as it lies on drafter 0's device; its state on those of all drafters that divide it."""
    step, *others = built.steps
    return contents_of(
        steps_done,
        step.drafter,
        step.optimizer,
        config,
        others=[one.optimizer for one in others if one.seat is not None],
        data=built.fingerprint,
        position=position_at(built.loader.config, steps_done),
        total_steps=built.total_steps,
    )


@torch.no_grad()
def evaluate(built: Built, steps_done: int, tick: Callable[[], None]) -> Evaluated:
    """Acceptance on the held-out answers, by replay: only the drafter runs, and nothing of the training changes."""
    started, step = time.monotonic(), built.steps[0]
    sets = {}
    for name, tapes in built.tapes.items():
        found = replay(step.drafter, step.ends, tapes, progress=lambda _: tick())
        sets[name] = SetAcceptance(found.acceptance_length, found.rounds, found.per_slot)
    return Evaluated(steps_done, sets, time.monotonic() - started)
