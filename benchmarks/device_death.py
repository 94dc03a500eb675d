"""A drafter that dies while the other waits for it inside a collective on GPUs: how long the run takes to end.

usage: python benchmarks/device_death.py [--devices cuda:0 cuda:1] [--bucket 1]
"""

import argparse
import time

import torch
from device_run import say, train
from device_shapes import TARGETS, make_loader, make_step, make_target

from blockdraft.runtime.distributed import GradientSum
from blockdraft.runtime.startup import Protection
from blockdraft.runtime.waits import WaitCount
from blockdraft.runtime.workers import WorkerError
from blockdraft.training import buckets

STEPS, DEADLY_STEP = 400, 20


class Mortal:
    """Drafter 1 raises an error where it would start a bucket; the other one has started it."""

    def __init__(self, bucket: int, num_buckets: int) -> None:
        self.deadly = DEADLY_STEP * (num_buckets + 1) + bucket
        self.started = 0
        self.died = 0.0
        self._start = GradientSum.start

    def start(self, total: GradientSum, bucket: list[torch.Tensor]) -> None:
        if total.rank == 1:
            self.started += 1
            if self.started == self.deadly:
                time.sleep(1.0)
                self.died = time.monotonic()
                raise RuntimeError("dies inside a collective, as asked")
        self._start(total, bucket)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"])
    parser.add_argument("--bucket", type=int, default=2, help="1 is a step's first")
    args = parser.parse_args()
    is_gpu = args.devices[0] != "cpu"
    protection = Protection(say) if is_gpu else None
    buckets.BUCKET_BYTES = 2**20
    targets = [make_target("tiny", device, torch.float32) for device in args.devices]
    steps = [
        make_step("tiny", target, device, how="nothing", accumulation=2, total_steps=STEPS)
        for target, device in zip(targets, args.devices, strict=True)
    ]
    loader = make_loader("tiny", TARGETS["tiny"].vocab_size, documents=200, num_drafters=2, accumulation=2)
    mortal = Mortal(args.bucket, len(steps[0].buckets.layout))
    GradientSum.start = lambda self, bucket: mortal.start(self, bucket)  # type: ignore[method-assign]
    try:
        train("shared", loader, targets, steps, STEPS, protection=protection, waits=WaitCount(0))
        say("FAILED: the run went on")
    except WorkerError as error:
        seconds = time.monotonic() - mortal.died
        say(f"{error}\na drafter died inside a collective on {args.devices}: ended after {seconds:.1f} s")


if __name__ == "__main__":
    main()
