"""Tile sizes of the attention kernels for GPUs with little shared memory, tried one after the other at warm-up.

Of flex_attention's here, of our own in `block_attention`.
torch chooses tiles by the kind of GPU and the head width. On cards with 99 KB of shared memory a block (consumer
cards, sm_86, sm_89, sm_120) its choice may ask for more than there is; Triton then raises OutOfResources when the
kernel is loaded. Smaller tiles need less and read the keys more often.

E head width.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from blockdraft.models.attention import bare_flex_attend, sdpa_attend
from blockdraft.models.drafter import Attend, DrafterShape


class MakesAttend(Protocol):
    """The attention of one pass."""

    def __call__(self, shape: DrafterShape, document_RT: Tensor, position_RT: Tensor, anchor_RA: Tensor) -> Attend: ...


class FlexTiles(NamedTuple):
    """One size of tile for all kernels of flex_attention; `queries` and `keys` divide the mask's tiles of 128."""

    queries: int
    keys: int
    stages: int
    warps: int

    def options(self) -> dict[str, int]:
        """As flex_attention's kernel_options name them. Its backward has two kernels with tiles of their own."""
        forward = {"BLOCK_M": self.queries, "BLOCK_N": self.keys}
        backward = {
            "BLOCK_M1": self.queries,
            "BLOCK_N1": self.keys,
            "BLOCK_M2": self.keys,
            "BLOCK_N2": self.queries,
        }
        both = {"num_stages": self.stages, "num_warps": self.warps}
        return {
            **{f"fwd_{name}": value for name, value in (forward | both).items()},
            **{f"bwd_{name}": value for name, value in (backward | both).items()},
        }

    def __str__(self) -> str:
        return f"{self.queries} x {self.keys}, {self.stages} stages, {self.warps} warps"


SMALLER: Final = (FlexTiles(64, 64, 1, 4), FlexTiles(32, 32, 2, 4), FlexTiles(32, 32, 1, 4), FlexTiles(16, 16, 1, 4))
"""In this order, behind torch's own choice."""


class OtherTiles(NamedTuple):
    """An attention that needs less shared memory."""

    name: str
    make_attend: MakesAttend


def smaller_tiles(make_attend: Callable[..., Attend]) -> Iterator[OtherTiles]:
    """What may be tried in place of `make_attend`, the fastest first; nothing where no tile can be chosen."""
    if make_attend is bare_flex_attend:
        for tiles in SMALLER:
            yield OtherTiles(str(tiles), partial(bare_flex_attend, options=tiles.options()))
    elif make_attend is not sdpa_attend:
        # Only where Triton is.
        from blockdraft.models.block_attention import SIZES, kernel_attend

        if make_attend is kernel_attend:
            for size, sizes in enumerate(SIZES[1:], start=1):
                named = f"{sizes.context.queries} x {sizes.context.keys}, {sizes.context.stages} stages"
                yield OtherTiles(named, partial(kernel_attend, size=size))


def lacks_resources(error: BaseException) -> str:
    """Triton's own words when a kernel needs more than the GPU has, wherever in the chain they are; else empty.

    Inductor and Dynamo wrap the error, and name it in their message.
    """
    seen: BaseException | None = error
    while seen is not None:
        if type(seen).__name__ == "OutOfResources" or "out of resource" in str(seen).lower():
            lines = [line.strip() for line in str(seen).splitlines() if "out of resource" in line.lower()]
            return lines[0] if lines else str(seen)
        seen = seen.__cause__ or seen.__context__
    return ""
