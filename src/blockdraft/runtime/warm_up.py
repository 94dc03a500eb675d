"""What a worker runs before the steady state: every shape that it will meet, in its own thread and its own modes.

R rows, T tokens of a row, A anchors, S drafted slots; B documents and P tokens of a target batch.
"""

import time
from collections.abc import Callable, Sequence

import torch

from blockdraft.data.loader import Fill, Loader, TargetBatch
from blockdraft.data.packing import Bucket
from blockdraft.runtime.reports import WarmedUp
from blockdraft.runtime.slots import Filler, Slot
from blockdraft.training.step import Blocks, DrafterStep


def warm_up_target(
    name: str, filler: Filler, slots: Sequence[Slot], shapes: Sequence[Bucket], tell: Callable[[WarmedUp], None]
) -> None:
    """Runs the target on every shape, largest first. `slots`: one of each drafter that it feeds."""
    # Buffers and links to every drafter's device come with the first shape; all others need one slot only.
    waiting = list({slot.device: slot for slot in slots}.values())
    for bucket in shapes:
        started = time.perf_counter()
        ids_BP = torch.zeros(bucket, dtype=torch.long)
        trash_BP = torch.full(bucket, waiting[0].buffer.shape[0] - 1, dtype=torch.long)
        empty = Fill(-1, -1, (TargetBatch(ids_BP, trash_BP),), (0,) * waiting[0].num_rows, ())
        for slot in waiting:
            filler.fill(slot, empty)
        del waiting[1:]
        if filler.device.type == "cuda":
            torch.cuda.synchronize(filler.device)
        tell(WarmedUp(name, f"{bucket.batch} x {bucket.length} tokens", time.perf_counter() - started))


def warm_up_drafter(step: DrafterStep, slot: Slot, loader: Loader) -> None:
    """Runs a whole step on a micro-batch without valid blocks at learning rate 0; checks that it changed nothing."""
    config, device = loader.config, step.drafter.device
    rows, anchors = (config.num_rows, config.row_length), (config.num_rows, config.num_anchors)
    slots = (*anchors, config.block_size - 1)
    empty = Blocks(
        torch.zeros(rows, dtype=torch.long, device=device),
        torch.full(rows, -1, dtype=torch.long, device=device),
        torch.zeros(rows, dtype=torch.long, device=device),
        torch.full(anchors, -1, dtype=torch.long, device=device),
        torch.zeros(slots, dtype=torch.long, device=device),
        torch.zeros(slots, dtype=torch.bool, device=device),
        torch.zeros(slots, device=device),
    )
    before = [weight.detach().clone() for weight in step.optimizer.masters.values()]
    step.micro_batch(slot.features_RTC, empty, 1.0)
    step.rehearse()
    for weight, old in zip(step.optimizer.masters.values(), before, strict=True):
        assert torch.equal(weight, old), "warm-up changed a weight"
