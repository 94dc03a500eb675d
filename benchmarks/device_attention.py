"""Tile sizes, stages and warps of flex_attention's kernels for the drafter's mask, each timed alone on one GPU.

usage: PYTHONPATH=src python benchmarks/device_attention.py [--seconds 150]

Qwen3-8B shapes: T 4096, A 512, L 16, 32 heads on 8, head width 128, one document, all anchors valid.
"""

import argparse
import time
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention

from blockdraft.commands.bench_cases import presets
from blockdraft.commands.bench_timing import time_alone
from blockdraft.models.block_mask import block_mask

FORWARD = {
    "rows safe": {"ROWS_GUARANTEED_SAFE": True},
    "TMA": {"USE_TMA": True},
    **{
        f"{m} x {n}, {stages} stages, {warps} warps": {
            "fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_stages": stages, "fwd_num_warps": warps,
        }
        for m, n, stages, warps in [(128, 128, 2, 8), (128, 64, 2, 8), (128, 64, 4, 8), (64, 64, 3, 4), (128, 64, 3, 4)]
    },
}  # fmt: skip
BACKWARD = [
    (64, 128, 128, 64, 2, 8),
    (64, 64, 64, 64, 3, 4),
    (64, 64, 64, 64, 2, 4),
    (32, 128, 128, 32, 3, 4),
    (32, 128, 128, 32, 2, 8),
    (128, 128, 128, 128, 1, 8),
    (128, 128, 128, 128, 2, 8),
    (64, 128, 128, 64, 3, 4),
    (64, 128, 128, 64, 1, 8),
    (32, 64, 64, 32, 3, 4),
]
"""BLOCK_M1, N1, M2, N2, stages, warps."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=150.0)
    limit = time.monotonic() + parser.parse_args().seconds
    device = torch.device("cuda")
    shape = presets()["qwen3-8b"]
    torch.manual_seed(0)
    position_RT = torch.arange(4096, device=device)[None]
    anchor_RA = torch.randperm(4095, device=device)[:512].sort().values[None]
    mask = block_mask(shape, position_RT, anchor_RA, None)
    sizes = [(32, 8192), (8, 4096 + 8192), (8, 4096 + 8192)]
    query, key, value = (
        torch.randn(1, heads, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads, length in sizes
    )
    upstream = torch.randn_like(query)
    backward = {
        f"backward {one}": dict(
            zip(
                ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2", "bwd_num_stages", "bwd_num_warps"),
                one,
                strict=True,
            )
        )
        for one in BACKWARD
    }
    expected: Any = None
    for name, options in {"default": {}, **backward, **FORWARD}.items():
        if time.monotonic() > limit:
            print(f"LEFT OUT for lack of time: {name}")
            continue
        torch.compiler.reset()
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

        def forward(compiled: Any = compiled, options: dict[str, Any] = options) -> torch.Tensor:
            return compiled(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=options)  # type: ignore[no-any-return]

        def both(forward: Any = forward) -> None:
            forward().backward(upstream)

        try:
            query.grad = key.grad = value.grad = None
            both()
            found = [one.grad.clone() for one in (query, key, value)]
            expected = expected or found
            far = max(float((a - b).float().norm() / b.float().norm()) for a, b in zip(found, expected, strict=True))
            ahead, whole = time_alone(device, forward), time_alone(device, both)
            print(f"{name}: forward {ahead:.3f} ms, both {whole:.3f} ms, gradients {far:.1e} from the default's")
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:120]}")


if __name__ == "__main__":
    main()
