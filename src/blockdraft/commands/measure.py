"""Measuring a drafter on sets of prompts, for `blockdraft evaluate`: by replay or by decoding, beside controls."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from tqdm import tqdm

from blockdraft.config import ConfigError
from blockdraft.data.store import open_store
from blockdraft.data.template import tokenizer_hash
from blockdraft.decoding.acceptance import Acceptance, Round
from blockdraft.decoding.controls import NgramTable, control_acceptance, prompt_lookup
from blockdraft.decoding.replay import record_tapes, replay_rounds
from blockdraft.decoding.speculative import Divergence, Generation, find_divergence, generate, generate_plain
from blockdraft.models.drafter import Drafter
from blockdraft.models.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from blockdraft.commands.evaluate import Options

WARM_UP_TOKENS: Final = 8


class PromptSet(NamedTuple):
    """Rendered prompts of one set, and what was left out."""

    name: str
    token_ids: list[list[int]]
    drops: dict[str, int]


class Both(NamedTuple):
    """One prompt decoded both ways."""

    speculative: Generation
    plain: Generation
    parting: Divergence | None


class Measured(NamedTuple):
    """What was found on one set, or on several together."""

    rounds: list[Round]
    num_prompts: int
    drops: dict[str, int]
    answer_tokens: int
    texts: list[tuple[list[int], int]]
    """Prompt and greedy answer, with the prompt's length; empty when sampled."""
    both: list[Both]
    """Empty for replay."""
    controls: dict[str, Acceptance]


def measure_by_replay(
    options: "Options", target: Target, drafter: Drafter, sets: Sequence[PromptSet]
) -> list[Measured]:
    """Acceptance from greedy answers; those of all sets are decoded in the same batches."""
    prompts = [prompt for one in sets for prompt in one.token_ids]
    with tqdm(total=len(prompts), desc="answers", unit="prompt") as bar:
        tapes = record_tapes(
            target,
            prompts,
            max_new_tokens=options.max_new_tokens,
            stop_ids=target.stop_ids,
            batch_size=options.batch_size,
            progress=bar.update,
        )
    with tqdm(total=len(prompts), desc="replay", unit="prompt") as bar:
        rounds = replay_rounds(drafter, target.ends.copy_to(drafter.device), tapes, progress=bar.update)
    found, start = [], 0
    for one in sets:
        span = slice(start, start := start + len(one.token_ids))
        texts = [(tape.token_ids, tape.prompt_length) for tape in tapes[span]]
        tokens = sum(len(token_ids) - length for token_ids, length in texts)
        entries = [entry for part in rounds[span] for entry in part]
        found.append(Measured(entries, len(texts), one.drops, tokens, texts, [], {}))
    return found


def measure_by_decoding(
    options: "Options", target: Target, drafter: Drafter, sets: Sequence[PromptSet]
) -> list[Measured]:
    """Acceptance, speed beside plain decoding, and whether the answers are the same."""
    ends, is_greedy = target.ends.copy_to(drafter.device), options.temperature == 0
    generator = torch.Generator(target.device).manual_seed(options.seed)

    def decode(prompt: list[int], num_tokens: int) -> Both:
        request: dict[str, Any] = {"max_new_tokens": num_tokens, "stop_ids": target.stop_ids}
        request |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        ours = generate(target, drafter, prompt, ends=ends, generator=generator, **request)
        plain = generate_plain(target, prompt, generator=generator, **request)
        parting = find_divergence(target, prompt, plain.token_ids, ours.token_ids) if is_greedy else None
        return Both(ours, plain, parting)

    decode(sets[0].token_ids[0], min(WARM_UP_TOKENS, options.max_new_tokens))
    found = []
    for one in sets:
        both = [decode(prompt, options.max_new_tokens) for prompt in tqdm(one.token_ids, desc=one.name, unit="prompt")]
        pairs = zip(one.token_ids, both, strict=True)
        texts = [([*prompt, *entry.plain.token_ids], len(prompt)) for prompt, entry in pairs if is_greedy]
        rounds = [part for entry in both for part in entry.speculative.rounds]
        tokens = sum(len(entry.speculative.token_ids) for entry in both)
        found.append(Measured(rounds, len(both), one.drops, tokens, texts, both, {}))
    return found


def with_controls(measured: Measured, block_size: int, table: NgramTable | None) -> Measured:
    """Adds the acceptance of the controls on the same greedy answers; none when sampled."""
    if not measured.texts:
        return measured
    controls = {"prompt_lookup": control_acceptance(measured.texts, block_size, prompt_lookup)}
    if table is not None:
        controls["ngram"] = control_acceptance(measured.texts, block_size, table.draft)
    return measured._replace(controls=controls)


def together(parts: Sequence[Measured]) -> Measured:
    """All sets as one: every round counts the same."""
    reasons = {reason for part in parts for reason in part.drops}
    return Measured(
        rounds=[entry for part in parts for entry in part.rounds],
        num_prompts=sum(part.num_prompts for part in parts),
        drops={reason: sum(part.drops.get(reason, 0) for part in parts) for reason in sorted(reasons)},
        answer_tokens=sum(part.answer_tokens for part in parts),
        texts=[text for part in parts for text in part.texts],
        both=[entry for part in parts for entry in part.both],
        controls={name: Acceptance.pool([part.controls[name] for part in parts]) for name in parts[0].controls},
    )


def describe(measured: Measured, block_size: int, table: NgramTable | None) -> dict[str, Any]:
    """For JSON."""
    controls = {name: found.as_dict() for name, found in measured.controls.items()}
    if table is not None and "ngram" in controls:
        controls["ngram"] |= {"order": table.order, "answer_tokens_counted": table.num_tokens}
    values: dict[str, Any] = {
        **Acceptance.of(measured.rounds, block_size).as_dict(),
        "num_prompts": measured.num_prompts,
        "prompts_left_out": measured.drops,
        "answer_tokens": measured.answer_tokens,
    }
    if measured.both:
        values |= speeds(measured.both)
    if measured.both and measured.texts:
        partings = [(number, entry.parting) for number, entry in enumerate(measured.both)]
        found = [{"prompt": number, **one._asdict()} for number, one in partings if one is not None]
        values |= {"lossless": not found, "divergences": found}
    return values | {"controls": controls}


def speeds(both: Sequence[Both]) -> dict[str, float | None]:
    """Tokens per second after the first token, over all prompts together."""

    def rate(generations: list[Generation]) -> float:
        seconds = sum(entry.decode_seconds for entry in generations)
        return sum(len(entry.token_ids) - 1 for entry in generations) / seconds if seconds else 0.0

    fast, slow = rate([entry.speculative for entry in both]), rate([entry.plain for entry in both])
    return {
        "tokens_per_second": round(fast, 2),
        "plain_tokens_per_second": round(slow, 2),
        "speedup": round(fast / slow, 3) if slow else None,
    }


def build_ngrams(path: Path, tokenizer: "PreTrainedTokenizerBase", order: int, most_tokens: int) -> NgramTable:
    """An n-gram table of a store's supervised answers.

    Raises:
        ConfigError: the store was written with another tokenizer.
    """
    store, table = open_store(path), NgramTable(order)
    expected, found = tokenizer_hash(tokenizer), store.manifest["tokenizer_hash"]
    if expected != found:
        raise ConfigError(
            f"--controls {path}: expected a store of the target's tokenizer ({expected[:12]}), found {found[:12]}; "
            "prepare the answers with this target"
        )
    for index in tqdm(range(len(store)), desc="n-grams", unit="document"):
        if table.num_tokens >= most_tokens:
            sys.stderr.write(f"n-gram table: {index:,} of {len(store):,} documents used (--ngram-tokens)\n")
            break
        document = store[index]
        table.add(document.input_ids.tolist(), document.loss_mask.tolist())
    return table
