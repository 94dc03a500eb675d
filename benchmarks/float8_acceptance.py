"""What a float8 target costs: the error of its captured features, and what a trained drafter accepts on them.

usage: python benchmarks/float8_acceptance.py TARGET EXPORT PROMPTS [--prompts 128] [--tokens 40]

The target decodes the prompts once, in its own type. Then the features of prompts and answers are made in three ways
(transformers' own forward, the fast pass, the fast pass with float8 products) and the drafter is replayed on each. On a
CPU the float8 products are emulated: rows and weights are rounded to float8 and multiplied as float32 numbers.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from blockdraft.config import TargetConfig
from blockdraft.data.conversations import Drops, read_conversations
from blockdraft.data.template import ChatTemplate
from blockdraft.decoding.batched import generate_batch
from blockdraft.decoding.replay import Tape, record_tapes, replay
from blockdraft.models.formats import load_export
from blockdraft.models.target import Target, load_tokenizer
from blockdraft.models.target_fast_ops import TorchOps


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def distances(found: list[Tape], expected: list[Tape], num_columns: int) -> list[float]:
    """Of each captured layer: the difference against the states, over all tokens."""
    one, other = (torch.cat([tape.features_TC.float() for tape in tapes]) for tapes in (found, expected))

    def distance(part: Tensor, whole: Tensor) -> float:
        # Of the median token: the first tokens of a text are many times larger than all others.
        return float(((part - whole).norm(dim=-1) / whole.norm(dim=-1)).median())

    return [distance(*pair) for pair in zip(one.chunk(num_columns, -1), other.chunk(num_columns, -1), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("export")
    parser.add_argument("prompts")
    parser.add_argument("--prompts", dest="num_prompts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    drafter = load_export(Path(args.export), dtype=torch.float32).to(args.device).eval()
    is_cpu = args.device == "cpu"
    config = TargetConfig(path=args.target, dtype="float32" if is_cpu else "bfloat16")
    plain = Target.load(config, device=args.device, layer_ids=drafter.shape.target_layer_ids)
    ops = TorchOps(plain.dtype) if is_cpu else None
    template = ChatTemplate(load_tokenizer(args.target))
    rows = [template.prompt_ids(entry) for entry in read_conversations(args.prompts, Drops())][: args.num_prompts]
    answers = generate_batch(plain, rows, max_new_tokens=args.tokens, stop_ids=plain.stop_ids, batch_size=16)
    passes = {
        "transformers": plain,
        "fast": Target(plain.model, plain.layer_ids, ops=ops),
        "float8": Target(plain.model, plain.layer_ids, ops=ops, float8=True),
    }
    passes["transformers"].fast = None
    tapes: dict[str, list[Tape]] = {}
    for name, target in passes.items():
        tapes[name] = record_tapes(
            target, rows, max_new_tokens=args.tokens, stop_ids=plain.stop_ids, answers=answers, device=args.device
        )
        found = replay(drafter, plain.ends.copy_to(args.device, torch.float32), tapes[name])
        far = distances(tapes[name], tapes["transformers"], len(plain.layer_ids))
        say(
            f"{name:12s} | accept {found.acceptance_length:.4f} in {found.rounds} rounds | features of layers "
            f"{list(plain.layer_ids)} differ by {', '.join(f'{value:.4f}' for value in far)} | {target.note}"
        )


if __name__ == "__main__":
    main()
