"""Tile sizes, warps and stages of the program's own attention kernels, each kernel timed alone on one GPU.

usage: PYTHONPATH=src python benchmarks/device_own_attention.py [--shapes qwen3-8b] [--tokens 4096] [--anchors 512]

One document, all anchors valid, bfloat16. For each kernel the fastest is said last.
"""

import argparse
from collections.abc import Callable
from typing import Any, Final

import torch

from blockdraft.commands.bench_cases import presets
from blockdraft.commands.bench_timing import time_alone
from blockdraft.models.block_attention import (
    Ranges,
    Tile,
    context_spans,
    launch_block,
    launch_context,
    launch_forward,
    launch_query,
)
from blockdraft.models.block_mask import context_ranges

TRIED: Final = {
    "forward": [(128, 64, 8, 3), (128, 64, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2)],
    "query": [(128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 8, 3)],
    "context": [(64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3)],
    "block": [(64, 64, 4, 2), (64, 64, 8, 2), (32, 32, 4, 2), (64, 32, 4, 2)],
}
"""Queries, keys, warps, stages."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", choices=list(presets()), default="qwen3-8b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--anchors", type=int, default=512)
    args = parser.parse_args()
    shape, device = presets()[args.shapes], torch.device("cuda")
    torch.manual_seed(0)
    position_RT = torch.arange(args.tokens, device=device)[None]
    anchor_RA = torch.randperm(args.tokens - 1, device=device)[: args.anchors].sort().values[None]
    length = shape.block_size
    ranges = Ranges(*context_ranges(position_RT, anchor_RA, length, shape.window))
    block = args.anchors * length
    sizes = [(block, shape.num_heads), *((n, shape.num_kv_heads) for n in (args.tokens,) * 2 + (block,) * 2)]
    streams = [torch.randn(1, n, heads, shape.head_dim, device=device).bfloat16() for n, heads in sizes]
    gradient_RQHE = torch.randn_like(streams[0])
    out_RQHE, log_RHQ = launch_forward(streams, ranges, length, False, Tile(64, 64, 4, 2))
    forward = [out_RQHE, log_RHQ]
    _, upstream = launch_query(streams, ranges, forward, gradient_RQHE, length, False, Tile(64, 64, 4, 2))

    def kernel(name: str, tile: Tile) -> Callable[[], Any]:
        if name == "forward":
            return lambda: launch_forward(streams, ranges, length, False, tile)
        if name == "query":
            return lambda: launch_query(streams, ranges, forward, gradient_RQHE, length, False, tile)
        if name == "block":
            return lambda: launch_block(streams, upstream, length, False, tile)
        span_RJ4 = context_spans(ranges, args.tokens, tile)
        return lambda: launch_context(streams, ranges, span_RJ4, upstream, tile)

    for name, tried in TRIED.items():
        timed: dict[tuple[int, ...], float] = {}
        for numbers in tried:
            try:
                timed[numbers] = time_alone(device, kernel(name, Tile(*numbers)))
                print(f"{name} {numbers}: {timed[numbers]:.3f} ms", flush=True)
            except Exception as error:
                print(f"{name} {numbers}: {type(error).__name__}: {str(error)[:120]}", flush=True)
        best = min(timed, key=timed.__getitem__)
        print(f"{name}: fastest {best}, {timed[best]:.3f} ms")


if __name__ == "__main__":
    main()
