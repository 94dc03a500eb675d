"""Numbered micro-batches from a token store: packed rows, anchors, labels, target batches, step denominators.

R rows, T tokens of a row, A anchors, L block positions, S = L - 1 drafted slots; B documents and P tokens of a target
batch, M the run's row budget. A fill is the contents of one slot; it serves `reuse` passes, each a micro-batch with
anchors of its own.

Every random draw is keyed by (seed, purpose, number), so a loader can start at any micro-batch and a resumed run draws
the same, whatever the number of workers.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.data.anchors import block_labels, eligible_anchors, sample_anchors
from blockdraft.data.packing import Bucket, FillPlan, PaddingShare, Placed, epoch_plan, padding_share, shapes_of
from blockdraft.data.row_budget import MOST_COUNTED, choose_budget, counted_rows

if TYPE_CHECKING:
    # Only its type: whoever brings documents of another kind need not install `datasets`.
    from blockdraft.data.store import Store

ORDER, ANCHORS = 0, 1
MOST_PLANNED = 100_000
"""Fills whose shapes are looked up before a run, 0.04 ms each; so many always, more where an epoch has more."""


class TargetBatch(NamedTuple):
    """One forward of the target."""

    input_ids_BP: Tensor
    slot_index_BP: Tensor
    """Row of the flattened slot [R * T + 1, C * D] that each token's features go to; padding goes to the last."""


class MicroBatch(NamedTuple):
    """One pass of a drafter over a slot."""

    step: int
    """Optimizer step that it belongs to."""
    is_last: bool
    """Whether it is its drafter's last of the step."""
    denominator: float
    """The whole step's sum of weights, over all drafters."""
    step_tokens: int
    """Document tokens of the whole step, over all drafters."""
    input_ids_RT: Tensor
    document_RT: Tensor
    position_RT: Tensor
    anchor_RA: Tensor
    label_RAS: Tensor
    supervised_RAS: Tensor
    weight_RAS: Tensor
    row_M: Tensor | None = None
    """Slots that reach the head, as `row_budget.counted_rows` numbers them; None: all."""


class _Rows(NamedTuple):
    """The contents of a slot's rows."""

    input_ids_RT: np.ndarray
    document_RT: np.ndarray
    position_RT: np.ndarray
    loss_mask_RT: np.ndarray


class _Drawn(NamedTuple):
    """Anchors of a pass, and what their blocks are to predict."""

    anchor_RA: np.ndarray
    label_RAL: np.ndarray
    supervised_RAL: np.ndarray


class Fill(NamedTuple):
    """What a slot is filled with, and its passes."""

    number: int
    content: int
    """Equal numbers mean equal features; -1 where none are kept."""
    batches: tuple[TargetBatch, ...]
    used_R: tuple[int, ...]
    """Tokens in use of each row; the rest is padding."""
    passes: tuple[MicroBatch, ...]


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """Everything the loader's arithmetic depends on."""

    row_length: int
    num_rows: int
    num_anchors: int
    sort_window: int
    target_tokens: int
    block_size: int
    weight_L: tuple[float, ...]
    after_gap: bool
    seed: int
    num_drafters: int
    """Of all nodes together."""
    accumulation: int
    """Micro-batches of a step, over all drafters."""
    reuse: int
    keep_features: bool = False
    """Every epoch has the slots of the first, in another order, so that their features can be kept."""
    first_drafter: int = 0
    """First of this node's drafters."""
    drafters_here: int | None = None
    """How many this node has; None means all. Only their fills are handed out."""

    def __post_init__(self) -> None:
        if self.accumulation % self.num_drafters:
            raise ConfigError(
                f"optim.accumulation ({self.accumulation}) must be a multiple of the number of drafters "
                f"({self.num_drafters}): it counts the micro-batches of a step over all drafters"
            )

    def is_here(self, number: int) -> bool:
        """Whether this node's drafters train on a fill."""
        here = self.num_drafters if self.drafters_here is None else self.drafters_here
        return 0 <= number % self.num_drafters - self.first_drafter < here

    @property
    def per_drafter(self) -> int:
        """Micro-batches of a step for each drafter."""
        return self.accumulation // self.num_drafters


class _Totals(NamedTuple):
    """Of one step, over all drafters."""

    weight: float
    tokens: int


class LoaderCounts(NamedTuple):
    """What became of the documents, over the first epoch's plan."""

    documents: int
    skipped_unanchored: int
    """Documents without two supervised tokens in a row."""
    padding: PaddingShare
    fills: int


class Loader:
    """Iterates over fills, one optimizer step ahead of what it yields."""

    def __init__(self, store: "Store", config: LoaderConfig, draft_ids: np.ndarray | None = None) -> None:
        """`draft_ids`: sorted ids of a draft vocabulary; labels become indices into it, -1 outside.

        Raises:
            ConfigError: no document has an eligible anchor, or one is longer than a row.
        """
        self.store, self.config = store, config
        self.row_budget: int | None = None
        """Rows of a micro-batch that reach the head, fixed for a run by `fix_row_budget`; None: all slots do."""
        self.draft_index_V: np.ndarray | None = None
        if draft_ids is not None:
            self.draft_index_V = np.full(int(draft_ids.max()) + 1, -1, dtype=np.int64)
            self.draft_index_V[draft_ids] = np.arange(len(draft_ids))
        anchored = np.asarray([_has_anchor(store[i].loss_mask) for i in range(len(store))], dtype=bool)
        self.documents = np.flatnonzero(anchored)
        if not len(self.documents):
            raise ConfigError(
                f"the token store's {len(store)} documents hold no two supervised tokens in a row, so no block can be "
                "anchored; look at the drops in its manifest.json"
            )
        self.lengths = store.lengths[self.documents]
        plans = list(self._epoch(0))
        self.counts = LoaderCounts(
            documents=len(store),
            skipped_unanchored=len(store) - len(self.documents),
            padding=padding_share(plans),
            fills=len(plans),
        )

    def steps_for(self, epochs: float) -> int:
        """Optimizer steps that make up `epochs` passes over the documents."""
        return max(1, round(epochs * self.counts.fills * self.config.reuse / self.config.accumulation))

    def _epoch(self, epoch: int) -> Iterator[FillPlan]:
        config = self.config
        return epoch_plan(
            self.lengths,
            num_rows=config.num_rows,
            row_length=config.row_length,
            sort_window=config.sort_window,
            target_tokens=config.target_tokens,
            generator=np.random.default_rng([config.seed, ORDER, epoch]),
        )

    def _plans(self) -> Iterator[tuple[int, FillPlan]]:
        """Every slot's plan for ever, each with the number of its content."""
        if not self.config.keep_features:
            for epoch in itertools.count():
                yield from ((-1, plan) for plan in self._epoch(epoch))
        first = list(self._epoch(0))
        for epoch in itertools.count():
            order = np.random.default_rng([self.config.seed, ORDER, epoch]).permutation(len(first))
            yield from ((int(chosen), first[chosen]) for chosen in order)

    def fills(self, first_step: int, total_steps: int) -> Iterator[Fill]:
        """Fills of this node in order, from the one with the first micro-batch of `first_step` to the last step's.

        A fill's passes that belong to steps outside the range are left out. Other nodes' fills are made too, since the
        step's totals are over all of them.
        """
        config, waiting = self.config, deque[Fill]()
        totals: dict[int, _Totals] = {}
        missing: dict[int, int] = {}
        for number, (content, plan) in enumerate(self._plans()):
            if self._steps_of(number)[0] >= total_steps:
                # Fills come in groups of one per drafter; a whole group lies behind the last step.
                break
            if self._steps_of(number)[-1] < first_step:
                continue
            fill = self._materialise(number, content, plan, first_step, total_steps)
            waiting.append(fill)
            for one in fill.passes:
                weight, tokens = totals.get(one.step, _Totals(0.0, 0))
                weight += float(one.weight_RAS.sum(dtype=torch.float64))
                totals[one.step] = _Totals(weight, tokens + sum(fill.used_R))
                missing[one.step] = missing.get(one.step, config.accumulation) - 1
            while waiting and all(not missing[one.step] for one in waiting[0].passes):
                ready = waiting.popleft()
                if config.is_here(ready.number):
                    yield self._stamp(ready, totals)
        assert not waiting, "a step was cut short"

    def shapes_until(self, total_steps: int) -> list[Bucket]:
        """Every shape that the target meets before `total_steps`, largest first. Reads lengths only.

        Of long runs those of the first epoch and of at least `MOST_PLANNED` fills: a rarer one is met unprepared.
        """
        last = total_steps * self.config.per_drafter // self.config.reuse * self.config.num_drafters
        fills = last + self.config.num_drafters
        if self.config.keep_features:
            fills = min(fills, self.counts.fills)
        fills = min(fills, max(MOST_PLANNED, self.counts.fills))
        return shapes_of(plan for _, plan in itertools.islice(self._plans(), fills))

    def num_contents(self, first_step: int, total_steps: int) -> int:
        """Different contents of this node's fills in these steps, at most, where features are kept."""
        config = self.config
        here = config.num_drafters if config.drafters_here is None else config.drafters_here
        # A fill at either end may serve steps outside of these.
        fills = ((total_steps - first_step) * config.per_drafter // config.reuse + 2) * here
        return min(fills, self.counts.fills)

    @property
    def num_slots(self) -> int:
        """Drafted slots of a micro-batch."""
        return self.config.num_rows * self.config.num_anchors * (self.config.block_size - 1)

    def fix_row_budget(self, total_steps: int) -> None:
        """Draws every anchor of the run once, so that the head's rows have one length that is enough for all.

        A run of more than `MOST_COUNTED` micro-batches is not counted: then all slots reach the head.
        """
        if total_steps * self.config.accumulation <= MOST_COUNTED:
            self.row_budget = choose_budget(self._counts(total_steps), self.num_slots)

    def _counts(self, total_steps: int) -> Iterator[int]:
        """Supervised slots of every micro-batch before `total_steps`."""
        for number, (_, plan) in enumerate(self._plans()):
            steps = self._steps_of(number)
            if steps[0] >= total_steps:
                return
            rows = self._rows(plan)
            for i, step in enumerate(steps):
                if step < total_steps:
                    yield int(self._draw(rows, number, i).supervised_RAL.sum())

    def placed(self, number: int) -> list[Placed]:
        """The documents of a fill, by their index in the store, with their places."""
        _, plan = next(itertools.islice(self._plans(), number, None))
        return [one._replace(document=int(self.documents[one.document])) for one in plan.placed]

    def tokens_before(self, first_step: int) -> int:
        """Document tokens that all drafters together have trained on before `first_step`."""
        total = 0
        for number, (_, plan) in enumerate(self._plans()):
            passes = sum(step < first_step for step in self._steps_of(number))
            if not passes:
                break
            total += passes * sum(one.length for one in plan.placed)
        return total

    def _steps_of(self, number: int) -> list[int]:
        """Optimizer step of each pass of a fill."""
        first = number // self.config.num_drafters * self.config.reuse
        return [(first + i) // self.config.per_drafter for i in range(self.config.reuse)]

    @staticmethod
    def _stamp(fill: Fill, totals: "dict[int, _Totals]") -> Fill:
        # A step without any supervised slot has nothing to divide by; its loss is 0 either way.
        stamped = tuple(
            one._replace(denominator=totals[one.step].weight or 1.0, step_tokens=totals[one.step].tokens)
            for one in fill.passes
        )
        return fill._replace(passes=stamped)

    def _materialise(self, number: int, content: int, plan: FillPlan, first_step: int, total_steps: int) -> Fill:
        config, rows = self.config, self._rows(plan)
        used = [0] * config.num_rows
        for one in plan.placed:
            used[one.row] = max(used[one.row], one.start + one.length)
        batches = tuple(self._target_batch(bucket, placed, rows.input_ids_RT) for bucket, placed in plan.batches)
        local = number // config.num_drafters * config.reuse
        passes = tuple(
            self._pass(rows, step, local + i, self._draw(rows, number, i))
            for i, step in enumerate(self._steps_of(number))
            if first_step <= step < total_steps
        )
        return Fill(number, content, batches, tuple(used), passes)

    def _rows(self, plan: FillPlan) -> _Rows:
        shape_RT = (self.config.num_rows, self.config.row_length)
        rows = _Rows(
            input_ids_RT=np.zeros(shape_RT, dtype=np.int64),
            document_RT=np.full(shape_RT, -1, dtype=np.int64),
            position_RT=np.zeros(shape_RT, dtype=np.int64),
            loss_mask_RT=np.zeros(shape_RT, dtype=np.int8),
        )
        for index, one in enumerate(plan.placed):
            document = self.store[int(self.documents[one.document])]
            span = slice(one.start, one.start + one.length)
            rows.input_ids_RT[one.row, span] = document.input_ids
            rows.loss_mask_RT[one.row, span] = document.loss_mask
            rows.document_RT[one.row, span] = index
            rows.position_RT[one.row, span] = np.arange(one.length)
        return rows

    def _target_batch(
        self, bucket: tuple[int, int], placed: tuple[Placed, ...], input_ids_RT: np.ndarray
    ) -> TargetBatch:
        row_length, trash = self.config.row_length, self.config.num_rows * self.config.row_length
        ids_BP = np.zeros(bucket, dtype=np.int64)
        index_BP = np.full(bucket, trash, dtype=np.int64)
        for b, one in enumerate(placed):
            ids_BP[b, : one.length] = input_ids_RT[one.row, one.start : one.start + one.length]
            index_BP[b, : one.length] = one.row * row_length + one.start + np.arange(one.length)
        return TargetBatch(torch.from_numpy(ids_BP), torch.from_numpy(index_BP))

    def _draw(self, rows: _Rows, number: int, turn: int) -> _Drawn:
        """The same for the same fill and pass, whoever asks and whenever."""
        config, generator = self.config, np.random.default_rng([self.config.seed, ANCHORS, number, turn])
        anchor_RA = np.stack(
            [
                sample_anchors(mask_T, document_T, config.num_anchors, generator)
                for mask_T, document_T in zip(rows.loss_mask_RT, rows.document_RT, strict=True)
            ]
        )
        found = block_labels(
            rows.input_ids_RT, rows.document_RT, rows.loss_mask_RT, anchor_RA, config.block_size,
            after_gap=config.after_gap,
        )  # fmt: skip
        return _Drawn(anchor_RA, *found)

    def _pass(self, rows: _Rows, step: int, local: int, drawn: _Drawn) -> MicroBatch:
        config = self.config
        anchor_RA, label_RAL, supervised_RAL = drawn
        weight_RAL = supervised_RAL * np.asarray(config.weight_L, dtype=np.float32)
        if self.draft_index_V is not None:
            known = label_RAL < len(self.draft_index_V)
            label_RAL = np.where(known, self.draft_index_V[np.where(known, label_RAL, 0)], -1)
            weight_RAL = weight_RAL * (label_RAL >= 0)
        supervised_RAS = supervised_RAL[..., 1:].copy()
        budget = self.row_budget
        return MicroBatch(
            step=step,
            is_last=(local + 1) % config.per_drafter == 0,
            denominator=0.0,
            step_tokens=0,
            input_ids_RT=torch.from_numpy(rows.input_ids_RT),
            document_RT=torch.from_numpy(rows.document_RT),
            position_RT=torch.from_numpy(rows.position_RT),
            anchor_RA=torch.from_numpy(anchor_RA),
            label_RAS=torch.from_numpy(label_RAL[..., 1:].copy()),
            supervised_RAS=torch.from_numpy(supervised_RAS),
            weight_RAS=torch.from_numpy(weight_RAL[..., 1:].astype(np.float32)),
            row_M=None if budget is None else torch.from_numpy(counted_rows(supervised_RAS, budget)),
        )


def _has_anchor(loss_mask_T: np.ndarray) -> bool:
    return bool(eligible_anchors(loss_mask_T, np.zeros(len(loss_mask_T), dtype=np.int64)).any())
