"""A trained export beside the `dflash` package's own client: tokens, rounds, replay and losslessness on real prompts.

usage: python benchmarks/dflash_client.py EXPORT TARGET PROMPTS.jsonl [PROMPTS.jsonl ...] [--max-new-tokens 40]

For each prompt, in float32: plain greedy decoding, our speculative decoding, the client's, and our replay. Exits 1 when
tokens, committed tokens per round, or replayed rounds differ anywhere.
"""

import argparse
import sys
import time
from pathlib import Path

import dflash.model
import torch

from blockdraft.config import TargetConfig
from blockdraft.data.conversations import Drops, read_conversations
from blockdraft.data.template import ChatTemplate
from blockdraft.decoding.replay import record_tapes, replay_rounds
from blockdraft.decoding.speculative import generate, generate_plain
from blockdraft.models.formats import load_export
from blockdraft.models.target import Target, load_tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export", type=Path)
    parser.add_argument("target")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--num-prompts", type=int, default=20)
    args = parser.parse_args()
    # The client's statistics synchronise a CUDA device, whether there is one or not.
    dflash.model._cuda_time = time.perf_counter
    drafter = load_export(args.export, dtype=torch.float32)
    target = Target.load(TargetConfig(path=args.target, dtype="float32"), layer_ids=drafter.shape.target_layer_ids)
    client, info = dflash.model.DFlashDraftModel.from_pretrained(
        args.export, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    template = ChatTemplate(load_tokenizer(args.target))
    prompts = [
        template.prompt_ids(one)
        for conversations in zip(*(read_conversations(file, Drops()) for file in args.prompts), strict=False)
        for one in conversations
    ][: args.num_prompts]
    tapes = record_tapes(target, prompts, max_new_tokens=args.max_new_tokens, stop_ids=target.stop_ids)
    replayed = replay_rounds(drafter, target.ends, tapes)
    wrong, committed, rounds = 0, 0, 0
    for number, (prompt, tape, again) in enumerate(zip(prompts, tapes, replayed, strict=True)):
        plain = generate_plain(target, prompt, max_new_tokens=args.max_new_tokens, stop_ids=target.stop_ids)
        ours = generate(target, drafter, prompt, max_new_tokens=args.max_new_tokens, stop_ids=target.stop_ids)
        theirs = dflash.model.dflash_generate(
            client.eval(),
            target.model,
            torch.tensor([prompt]),
            args.max_new_tokens,
            stop_token_ids=list(target.stop_ids),
            return_stats=True,
        )
        size = drafter.shape.block_size
        whole = whole_rounds([one.committed for one in ours.rounds], size, args.max_new_tokens)
        checks = {
            "lossless": plain.token_ids == ours.token_ids,
            "batched answer": tape.token_ids[len(prompt) :] == plain.token_ids,
            "client tokens": theirs.output_ids[0, len(prompt) :].tolist() == ours.token_ids,
            "client rounds": whole_rounds(theirs.acceptance_lengths, size, args.max_new_tokens) == whole,
            "replay": again == ours.rounds,
        }
        committed, rounds = committed + sum(whole), rounds + len(whole)
        failed = [name for name, is_right in checks.items() if not is_right]
        wrong += bool(failed)
        sys.stdout.write(
            f"prompt {number}: {len(whole)} rounds, {'differs in ' + ', '.join(failed) if failed else 'equal'}\n"
        )
    sys.stdout.write(f"{len(prompts)} prompts, {wrong} differ; {committed / max(1, rounds):.3f} tokens a whole round\n")
    return int(wrong > 0)


def whole_rounds(lengths: list[int], block_size: int, max_new_tokens: int) -> list[int]:
    """Rounds with a whole block to go: the client shortens its last blocks, we do not."""
    kept, written = [], 1
    for length in lengths:
        if 1 + max_new_tokens - written < block_size:
            break
        kept.append(length)
        written += length
    return kept


if __name__ == "__main__":
    sys.exit(main())
