"""Which gradients are summed over replicas together, and when: while the backward still makes others."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Protocol

from torch import Tensor, nn

BUCKET_BYTES = 64 * 2**20
"""Of float32 gradients. A bucket that is not half full takes one more weight, whatever its size."""


class SumGradients(Protocol):
    """Adds tensors of all replicas up, in place, bucket by bucket; all start the same buckets in the same order."""

    @property
    def meet(self) -> Callable[[], None]:
        """Returns when all replicas of this process have come to a step's last micro-batch."""
        ...

    def start(self, bucket: list[Tensor]) -> None:
        """Begins to sum these tensors, which nobody may touch before `wait`."""
        ...

    def wait(self) -> None:
        """Ends the oldest sum that was started."""
        ...

    def drop(self) -> None:
        """Leaves the group of replicas."""
        ...


class GradientBuckets:
    """A module's gradients in the order in which a backward makes them, in buckets of about 64 MiB.

    Built over a module whose parameters are declared in the order of its forward; a backward makes their gradients the
    other way round. Every replica starts the same buckets in the same order, whatever its own backward does: a bucket
    waits for those before it, and what no hook has announced is started at the end.
    """

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        gradient: Callable[[str], Tensor],
        landed: Callable[[list[str]], None] = lambda _names: None,
        all_but: Callable[[list[str]], None] = lambda _names: None,
    ) -> None:
        """`gradient(name)`: what is summed for a weight, once its hook has run; zeros where there is none.

        `landed(names)`: called when these are summed, while later buckets may still be on their way. Its hooks come
        behind those that are registered already.
        `all_but(names)`: called when all others are summed, the last bucket's. Nothing of a backward is left to run
        beside that sum, so this is the place for what can be done without it.
        """
        self._gradient, self._landed, self._all_but = gradient, landed, all_but
        self.layout = list(cut(list(reversed(weights)), weights))
        """Names of the weights of each bucket, in the order of the sums."""
        self._bucket_of = {name: index for index, bucket in enumerate(self.layout) for name in bucket}
        self._missing: list[int] = []
        self.num_started = 0
        """Buckets of this step's sum that were started so far."""
        self._sum: SumGradients | None = None
        for name, weight in weights.items():
            weight.register_post_accumulate_grad_hook(partial(self._made, name))

    def begin(self, total: SumGradients) -> None:
        """From now on a gradient that is made is final: the backward of a step's last micro-batch follows."""
        self._missing = [len(bucket) for bucket in self.layout]
        self.num_started = 0
        self._sum = total

    def _made(self, name: str, _weight: Tensor) -> None:
        if self._sum is not None:
            self.announce(name)

    def announce(self, name: str) -> None:
        """Says that this weight's gradient is final; starts the sums that waited for it."""
        self._missing[self._bucket_of[name]] -= 1
        while self.num_started < len(self.layout) and self._missing[self.num_started] == 0:
            self._start()

    def _start(self) -> None:
        assert self._sum is not None
        bucket = self.layout[self.num_started]
        self.num_started += 1
        self._sum.start([self._gradient(name) for name in bucket])

    def finish(self, counts: Tensor) -> None:
        """Starts what is left, `counts` after it, and waits for every sum, oldest first."""
        assert self._sum is not None, "a sum that was not begun"
        while self.num_started < len(self.layout):
            self._start()
        total, self._sum = self._sum, None
        total.start([counts])
        for number, bucket in enumerate(self.layout, 1):
            if number == len(self.layout):
                self._all_but(bucket)
            total.wait()
            self._landed(bucket)
        total.wait()


def cut(names: list[str], weights: dict[str, nn.Parameter]) -> Iterator[list[str]]:
    """Consecutive weights, none shared by two buckets; a bucket is closed by what does not fit once it is half full.

    So a large weight is alone but for small ones in front of it: a sum costs about the same whatever little is in it.
    """
    bucket: list[str] = []
    size = 0
    for name in names:
        more = 4 * weights[name].numel()
        if size + more > BUCKET_BYTES and 2 * size > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += more
    if bucket:
        yield bucket
