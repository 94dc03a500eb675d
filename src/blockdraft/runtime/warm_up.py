"""What a worker runs before the steady state: every shape that it will meet, in its own thread and its own modes.

First everybody compiles, one after the other. Then, on GPUs, what compiling has left in the allocator's hands goes, and
everybody repeats its work until that reserves no memory: from then on none is needed that is not there.

R rows, T tokens of a row, A anchors, S drafted slots; B documents and P tokens of a target batch.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from blockdraft.config import ConfigError
from blockdraft.data.loader import Fill, Loader, LoaderConfig, MicroBatch, TargetBatch
from blockdraft.data.packing import Bucket, budget_bucket
from blockdraft.models.tiles import lacks_resources, smaller_tiles
from blockdraft.runtime.channel import Stopped
from blockdraft.runtime.reports import WarmedUp, report_step
from blockdraft.runtime.slots import Filler, Slot
from blockdraft.runtime.transfers import pinned, to_device
from blockdraft.training.step import DrafterStep

Settle = Callable[[], int]
"""Repeats a worker's work until it reserves nothing more; the bytes that it takes at most beside what it keeps."""
MOST_ROUNDS = 5
"""The allocator settles in two or three; what still grows then is said by the run's own count."""


class Turns:
    """One worker at a time, and nobody settles before all have compiled."""

    def __init__(self, number: int, check: Callable[[], None]) -> None:
        """`check` raises when the run is ending."""
        self._number, self._check = number, check
        self._lock = threading.Lock()
        self._num_compiled = 0
        self._is_broken = False
        self._is_emptied = False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """This worker's turn to compile all that it will run."""
        with self._lock:
            # A turn may last minutes: none begins in a run that is ending.
            self._check()
            if self._is_broken:
                raise Stopped
            try:
                yield
            except BaseException:
                # Whoever dies here says so only when the next one has the lock already.
                self._is_broken = True
                raise
            self._num_compiled += 1

    def settle(self, settle: Settle) -> int:
        """Waits for the others, and for this worker's turn."""
        while self._num_compiled < self._number:
            self._check()
            time.sleep(0.05)
        with self._lock:
            self._check()
            if not self._is_emptied:
                # Tuning and compiling took memory that no step needs; how much depends on what was cached on disk.
                torch.cuda.empty_cache()
                self._is_emptied = True
            return settle()


def warm_up_target(
    name: str,
    filler: Filler,
    slots: Sequence[Slot],
    shapes: Sequence[Bucket],
    config: LoaderConfig,
    tell: Callable[[WarmedUp], None],
) -> Settle | None:
    """Runs the target on every shape, largest first. `slots`: one of each drafter that it feeds.

    On a GPU also on the token budget in full, whether or not the documents fill it: so the memory of a run follows from
    its config, and not from the lengths of its documents. Returns what is left to do there.
    """
    is_gpu = filler.device.type == "cuda"
    if is_gpu:
        budget = budget_bucket(config.row_length, config.target_tokens)
        shapes = [budget, *(shape for shape in shapes if shape != budget)]
    # Buffers and links to every drafter's device come with the first shape; all others need one slot only.
    waiting = list({slot.device: slot for slot in slots}.values())
    for bucket in shapes:
        started = time.perf_counter()
        for slot in waiting:
            filler.fill(slot, _padding(slot, [bucket], is_gpu))
        del waiting[1:]
        if is_gpu:
            torch.cuda.synchronize(filler.device)
        tell(WarmedUp(name, f"{bucket.batch} x {bucket.length} tokens", time.perf_counter() - started))
    if not is_gpu:
        return None
    # As in a fill: one batch after the other, in any order.
    both_ways = [*shapes, *reversed(shapes)]
    fill = _padding(waiting[0], both_ways, is_gpu)
    return lambda: _until_settled(filler.device, lambda: filler.fill(waiting[0], fill))


def _padding(slot: Slot, buckets: Sequence[Bucket], is_gpu: bool) -> Fill:
    """Batches of nothing but padding."""
    trash = slot.buffer.shape[0] - 1
    batches = tuple(
        TargetBatch(torch.zeros(bucket, dtype=torch.long), torch.full(bucket, trash, dtype=torch.long))
        for bucket in buckets
    )
    fill = Fill(-1, -1, batches, (0,) * slot.num_rows, ())
    return pinned(fill) if is_gpu else fill


def warm_up_drafter(
    step: DrafterStep, slot: Slot, loader: Loader, say: Callable[[str], None] = lambda _line: None
) -> Settle | None:
    """Runs a whole step on micro-batches without valid blocks at learning rate 0; checks that it changed nothing.

    Where attention needs more shared memory than the GPU has, smaller tiles are tried, which is said. Returns
    what is left to do on a GPU.

    Raises:
        ConfigError: no tiles are small enough.
    """
    device = step.drafter.device
    before = [weight.detach().clone() for weight in step.optimizer.masters.values()]
    fill = Fill(-1, -1, (), (), (_without_blocks(loader),) * 2)

    def run() -> None:
        for one in (pinned(fill) if device.type == "cuda" else fill).passes:
            step.micro_batch(slot.features_RTC, to_device(one, device), 1.0)
        sums = step.sums
        step.rehearse()
        report_step(-1, sums, step, 0)

    _with_tiles_that_fit(step, run, say)
    for weight, old in zip(step.optimizer.masters.values(), before, strict=True):
        assert torch.equal(weight, old), "warm-up changed a weight"
    del before
    return (lambda: _until_settled(device, run)) if device.type == "cuda" else None


def _with_tiles_that_fit(step: DrafterStep, run: Callable[[], None], say: Callable[[str], None]) -> None:
    smaller = smaller_tiles(step.make_attend)
    while True:
        try:
            run()
            return
        except Exception as error:
            # Triton, Inductor and Dynamo each raise it as something else.
            reason = lacks_resources(error)
            if not reason:
                raise
            tiles = next(smaller, None)
            if tiles is None:
                raise ConfigError(
                    f"attention fits {step.drafter.device} with no tiles of models/tiles.py ({reason}); use "
                    "runtime.attention sdpa, or a smaller drafter.head_dim"
                ) from error
            say(f"attention needs more than {step.drafter.device} has ({reason}); trying tiles of {tiles.name}")
        step.use_attention(tiles.make_attend)


def _without_blocks(loader: Loader) -> MicroBatch:
    config, budget = loader.config, loader.row_budget
    rows, anchors = (config.num_rows, config.row_length), (config.num_rows, config.num_anchors)
    slots = (*anchors, config.block_size - 1)
    return MicroBatch(
        step=-1,
        is_last=False,
        denominator=1.0,
        step_tokens=0,
        input_ids_RT=torch.zeros(rows, dtype=torch.long),
        document_RT=torch.full(rows, -1, dtype=torch.long),
        position_RT=torch.zeros(rows, dtype=torch.long),
        anchor_RA=torch.full(anchors, -1, dtype=torch.long),
        label_RAS=torch.zeros(slots, dtype=torch.long),
        supervised_RAS=torch.zeros(slots, dtype=torch.bool),
        weight_RAS=torch.zeros(slots),
        row_M=None if budget is None else torch.full((budget,), loader.num_slots),
    )


def _until_settled(device: torch.device, run: Callable[[], None]) -> int:
    """Repeats `run` until it reserves nothing more; what the last round took beside what lay there already."""
    taken = 0
    for _ in range(MOST_ROUNDS):
        reserved = torch.cuda.memory_reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        if torch.cuda.memory_reserved(device) == reserved:
            break
    return taken
