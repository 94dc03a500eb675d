"""A target alone on one GPU: tokens per second of its passes, kernels, memory, and the error of its features.

usage: python benchmarks/device_target.py [--shapes qwen3.6-27b|qwen3-8b|tiny] [--batches 4x2048 8x1024 1x8192]
           [--float8] [--profile] [--reference] [--sustained]

Random weights. transformers' own forward and the fast pass run in one process on the same weights; with --float8 the
fast pass runs a second time with float8 products. --reference compares four layers with the plain forward in float32.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3_5TextConfig, Qwen3Config

from blockdraft.commands.bench_sensors import sustain, sustained_rate
from blockdraft.models.target import Target
from blockdraft.models.target_fast import FastTarget
from blockdraft.runtime.counters import CompileCounters

LARGEST = {
    "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_value_heads": 48, "linear_num_key_heads": 16,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
DENSE = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6, "max_position_embeddings": 40960,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
CONFIGS: dict[str, Callable[[int | None], PreTrainedConfig]] = {
    "qwen3.6-27b": lambda layers: Qwen3_5TextConfig(**LARGEST, num_hidden_layers=layers or 64),
    "qwen3-8b": lambda layers: Qwen3Config(**DENSE, num_hidden_layers=layers or 36),
    "tiny": lambda layers: Qwen3_5TextConfig(**TINY, num_hidden_layers=layers or 8),
}
LAYERS = {"qwen3.6-27b": (1, 16, 31, 46, 61), "qwen3-8b": (1, 9, 17, 25, 33), "tiny": (1, 4, 6)}
REFERENCE_LAYERS = 4


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def make_target(shapes: str, layer_ids: tuple[int, ...], num_layers: int | None = None) -> Target:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(CONFIGS[shapes](num_layers), dtype=torch.bfloat16)
    return Target(model, layer_ids)


def tokens(batch: int, length: int, vocab_size: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(batch * length)
    return torch.randint(vocab_size, (batch, length), device="cuda", generator=generator)


Run = Callable[[Tensor, Callable[[int, Tensor], None]], None]


def features(run: Run, ids_BS: Tensor) -> list[Tensor]:
    columns: list[Tensor] = []
    run(ids_BS, lambda _column, hidden_BSD: columns.append(hidden_BSD))
    return columns


def distances(found: list[Tensor], expected: list[Tensor]) -> str:
    pairs = zip(found, expected, strict=True)
    return ", ".join(f"{float((one.float() - two.float()).norm() / two.float().norm()):.4f}" for one, two in pairs)


def median_ms(call: Callable[[], None], repeats: int = 5) -> float:
    call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure(target: Target, name: str, run: Run, args: argparse.Namespace) -> None:
    last = max(target.layer_ids) + 1
    weights = [weight for layer in target.layers[:last] for weight in layer.parameters() if weight.dim() == 2]
    work = 2 * sum(weight.numel() for weight in weights)
    inputs = [tokens(*map(int, batch.split("x")), target.vocab_size) for batch in args.batches]
    for ids_BS in inputs:
        run(ids_BS, lambda _column, _hidden: None)
    counters = CompileCounters.install()
    before = counters.snapshot()
    for ids_BS in inputs:
        torch.cuda.reset_peak_memory_stats()
        ms = median_ms(lambda ids_BS=ids_BS: run(ids_BS, lambda _column, _hidden: None))  # type: ignore[misc]
        rate = ids_BS.numel() / ms * 1e3
        say(
            f"{name:12s} | {ids_BS.shape[0]} x {ids_BS.shape[1]} | {ms:.1f} ms | {rate:,.0f} tok/s | products "
            f"{work * rate / 1e12:.0f} TFLOP/s | peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
        )
    if args.sustained:
        found = sustain(target.device, lambda: run(inputs[0], lambda _column, _hidden: None), 4.0)
        rate = inputs[0].numel() / found.median_ms * 1e3
        say(f"{name:12s} | kept up for 4 s: {found.median_ms:.1f} ms | {rate:,.0f} tok/s | {found.sensed}")
    say(f"{name:12s} | compilations after warm-up: {counters.since(before)}")
    counters.remove()
    if args.profile:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            run(inputs[0], lambda _column, _hidden: None)
            torch.cuda.synchronize()
        rows = sorted(((row.self_device_time_total, row.count, row.key) for row in seen.key_averages()), reverse=True)
        for microseconds, count, key in rows[:20]:
            say(f"    {microseconds / 1e3:8.2f} ms {count:5d} x {key[:100]}")


def compare_with_float32(shapes: str) -> None:
    """Four layers, norms away from 1; the plain forward in float32 takes torch's own recurrent function."""
    target = make_target(shapes, tuple(range(REFERENCE_LAYERS)), REFERENCE_LAYERS)
    with torch.no_grad():
        for module in target.model.modules():
            weight = module._parameters.get("weight")
            if "Norm" in type(module).__name__ and weight is not None:
                weight.add_(torch.empty_like(weight).uniform_(-0.3, 0.3))
    ids_BS = tokens(2, 1024, target.vocab_size)
    found = {"plain": features(target.capture_plain, ids_BS)}
    for name, float8 in (("fast", False), ("float8", True)):
        one = Target(target.model, target.layer_ids, float8=float8)
        assert one.fast is not None, one.note
        found[name] = features(one.capture, ids_BS)
    names = vars(sys.modules[type(target.text_model).__module__])
    bound = names.get("torch_chunk_gated_delta_rule")
    if bound is not None:
        names["torch_chunk_gated_delta_rule"] = vars(bound)["__wrapped__"]
    target.model.float()
    reference = features(target.capture_plain, ids_BS)
    if bound is not None:
        # What is timed afterwards runs on flash-linear-attention again.
        names["torch_chunk_gated_delta_rule"] = bound
    for name, columns in found.items():
        say(f"distance from float32 after layers 0..{REFERENCE_LAYERS - 1}, {name}: {distances(columns, reference)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", choices=sorted(CONFIGS), default="qwen3.6-27b")
    parser.add_argument("--batches", nargs="+", default=["4x2048", "8x1024", "8x2048", "1x8192"])
    parser.add_argument("--float8", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument(
        "--sustained", action="store_true", help="each pass without a pause for 4 s, clock and power read"
    )
    args = parser.parse_args()
    if args.sustained:
        say(f"product of 8192 cubed kept up for 3 s: {sustained_rate(torch.device('cuda'), torch.bfloat16, 8192, 3.0)}")
    with torch.no_grad():
        if args.reference:
            compare_with_float32(args.shapes)
        target = make_target(args.shapes, LAYERS[args.shapes])
        say(f"{torch.cuda.get_device_name()} | {args.shapes} | {target.note}")
        measure(target, "transformers", target.capture_plain, args)
        measure(target, "fast", target.capture, args)
        ids_BS = tokens(2, 1024, target.vocab_size)
        plain = features(target.capture_plain, ids_BS)
        found = features(target.capture, ids_BS)
        say(f"fast against transformers, layers {target.layer_ids}: {distances(found, plain)}")
        if args.float8 and target.fast is not None:
            target.fast = FastTarget(target.text_model, target.ends, target.layer_ids, target.fast.ops, float8=True)
            measure(target, "float8", target.capture, args)
            say(f"float8 against transformers: {distances(features(target.capture, ids_BS), plain)}")
            before = torch.cuda.memory_allocated() / 2**30
            target.drop_decoding()
            say(f"decoding dropped: {before:.1f} to {torch.cuda.memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
