"""What the benchmark of sums compares is what it says: sums beside the backward are started there."""

import torch
from device_shapes import make_loader, make_step, make_target
from device_sums import Replica

from blockdraft.training import buckets


class Sum:
    """Adds nothing; counts what was started."""

    def __init__(self):
        self.num_started = 0

    def meet(self):
        pass

    def start(self, _bucket):
        self.num_started += 1

    def wait(self):
        pass

    def drop(self):
        pass


def test_a_step_that_is_used_again_still_sums_beside_its_backward(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    target = make_target("tiny", torch.device("cpu"), torch.float32)
    step = make_step("tiny", target, torch.device("cpu"), how="nothing", accumulation=1, total_steps=10)
    (fill, *_) = make_loader("tiny", target.vocab_size, documents=50, num_drafters=1, accumulation=1).fills(0, 1)
    finish, early = buckets.GradientBuckets.finish, []

    def noted(self, counts):
        early.append(self.num_started)
        finish(self, counts)

    monkeypatch.setattr(buckets.GradientBuckets, "finish", noted)
    for _ in range(2):
        replica = Replica(step, fill, target.hidden_size * len(target.layer_ids), 1)
        replica.total = Sum()
        # The last way leaves silence behind.
        for way in ("beside", "after"):
            replica.run(way)
    assert early == [len(step.buckets.layout), 0] * 2
