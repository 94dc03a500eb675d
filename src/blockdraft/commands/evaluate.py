"""`blockdraft evaluate`: acceptance length of a drafter on prompts, beside controls; by replay or by decoding."""

import dataclasses
import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import tyro

from blockdraft.config import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from blockdraft.decoding.acceptance import Acceptance
    from blockdraft.decoding.controls import NgramTable
    from blockdraft.decoding.speculative import Generation
    from blockdraft.models.drafter import Drafter
    from blockdraft.models.target import Target

WARM_UP_TOKENS: Final = 8


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure acceptance length, and with --method decode speed and losslessness."""

    drafter: tyro.conf.Positional[Path]
    """Export, checkpoint or run directory."""
    target: str
    """Directory, .gguf file or hub name of the target."""
    prompts: str
    """Conversations (.jsonl, .parquet, datasets name); the target answers the last user turn of each."""
    method: Literal["replay", "decode"] = "replay"
    """replay: answers decoded in batches, then drafted from at every position, the same counts for less time.
    decode: one answer at a time by speculative decoding and again by plain decoding."""
    num_prompts: int | None = 64
    """The first so many prompts; None: all."""
    max_new_tokens: int = 256
    temperature: float = 0.0
    """0: greedy. Sampled needs --method decode."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    controls: Path | None = None
    """Token store of the training answers: adds an n-gram table of them as a control."""
    ngram_order: int = 5
    ngram_tokens: int = 5_000_000
    """At most so many answer tokens go into the n-gram table, which lies in memory."""
    thinking: Literal["default", "on", "off"] = "default"
    """Thinking mode of the chat template; default: whatever the template does unasked."""
    batch_size: int = 16
    """Answers decoded at a time, for replay."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """float32: greedy output must equal plain decoding token for token. bfloat16: it may part at near ties."""
    device: str = "auto"
    """auto: the first GPU, or the CPU where there is none."""
    output: Path | None = None
    """JSON file for the result."""
    trust_remote_code: bool = False


class Prompts(NamedTuple):
    """Rendered prompts, and what was left out."""

    token_ids: list[list[int]]
    drops: dict[str, int]


class Measured(NamedTuple):
    """What a method found."""

    acceptance: "Acceptance"
    texts: list[tuple[list[int], int]]
    """Prompt and greedy answer, with the prompt's length; empty when sampled."""
    extra: dict[str, Any]


def run(options: Options) -> int:
    """Measures, prints a Markdown row and writes the JSON result; 1 if greedy float32 output was not lossless.

    Raises:
        ConfigError: options that do not go together, no usable prompts, or files that cannot be loaded.
    """
    from blockdraft import api

    _check(options)
    drafter = api.load_drafter(options.drafter, device=options.device, dtype=options.dtype)
    target, tokenizer = api.load_target(
        options.target,
        drafter=drafter,
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    # Before anything is decoded: a store of another tokenizer is an error.
    table = None if options.controls is None else build_ngrams(options.controls, tokenizer, options)
    prompts = read_prompts(options, tokenizer, target.facts.max_position_embeddings)
    measure = measure_by_replay if options.method == "replay" else measure_by_decoding
    measured = measure(options, target, drafter, prompts.token_ids)
    result: dict[str, Any] = {
        **measured.acceptance.as_dict(),
        "num_prompts": len(prompts.token_ids),
        "prompts_left_out": prompts.drops,
        **measured.extra,
        "controls": run_controls(measured.texts, drafter.shape.block_size, table, options.ngram_order),
        "settings": settings(options, tokenizer, target.device, drafter),
    }
    sys.stdout.write(markdown(result))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if options.dtype == "float32" and result.get("lossless") is False else 0


def _check(options: Options) -> None:
    if options.temperature and options.method == "replay":
        raise ConfigError("replay is greedy; sampled acceptance (--temperature above 0) needs --method decode")
    if options.num_prompts is not None and options.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {options.num_prompts}")


def read_prompts(options: Options, tokenizer: "PreTrainedTokenizerBase", max_positions: int) -> Prompts:
    """The first prompts that can be used; the others are counted by reason.

    Raises:
        ConfigError: none is left.
    """
    from blockdraft.data.conversations import ChatTemplate, Drops, RowRefused, read_conversations

    drops, template, token_ids = Drops(), ChatTemplate(tokenizer), list[list[int]]()
    thinking = None if options.thinking == "default" else options.thinking == "on"
    for conversation in read_conversations(options.prompts, drops):
        if options.num_prompts is not None and len(token_ids) == options.num_prompts:
            break
        try:
            prompt = template.prompt_ids(conversation, thinking=thinking)
        except RowRefused as error:
            drops.add("refused by the template", conversation.source, str(error))
            continue
        if len(prompt) + options.max_new_tokens > max_positions:
            drops.add("too long for the target", conversation.source, f"{len(prompt)} tokens")
            continue
        token_ids.append(prompt)
    if drops.num_dropped:
        sys.stderr.write("prompts left out:\n" + "\n".join(drops.lines()) + "\n")
    if not token_ids:
        raise ConfigError(f"{options.prompts}: expected prompts, found none that can be used")
    return Prompts(token_ids, dict(drops.counts))


def measure_by_replay(options: Options, target: "Target", drafter: "Drafter", prompts: list[list[int]]) -> Measured:
    """Acceptance from greedy answers that are decoded once."""
    from tqdm import tqdm

    from blockdraft.decoding.replay import record_tapes, replay

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
        acceptance = replay(drafter, target.ends.copy_to(drafter.device), tapes, progress=bar.update)
    answer_tokens = sum(len(tape.token_ids) - tape.prompt_length for tape in tapes)
    return Measured(acceptance, [(t.token_ids, t.prompt_length) for t in tapes], {"answer_tokens": answer_tokens})


def measure_by_decoding(options: Options, target: "Target", drafter: "Drafter", prompts: list[list[int]]) -> Measured:
    """Acceptance, speed beside plain decoding, and whether the answers are the same."""
    import torch
    from tqdm import tqdm

    from blockdraft.decoding.acceptance import Acceptance
    from blockdraft.decoding.speculative import Divergence, find_divergence, generate, generate_plain

    ends = target.ends.copy_to(drafter.device)

    def both(prompt: list[int], num_tokens: int) -> tuple["Generation", "Generation"]:
        request: dict[str, Any] = {"max_new_tokens": num_tokens, "stop_ids": target.stop_ids}
        request |= {"temperature": options.temperature, "top_p": options.top_p, "top_k": options.top_k}
        speculative = generate(target, drafter, prompt, ends=ends, generator=generator, **request)
        return speculative, generate_plain(target, prompt, generator=generator, **request)

    generator = torch.Generator(target.device).manual_seed(options.seed)
    both(prompts[0], min(WARM_UP_TOKENS, options.max_new_tokens))
    is_greedy = options.temperature == 0
    ours, plains, partings = list["Generation"](), list["Generation"](), list[dict[str, Any]]()
    for number, prompt in enumerate(tqdm(prompts, desc="decode", unit="prompt")):
        speculative, plain = both(prompt, options.max_new_tokens)
        ours.append(speculative)
        plains.append(plain)
        if is_greedy:
            parting: Divergence | None = find_divergence(target, prompt, plain.token_ids, speculative.token_ids)
            if parting is not None:
                partings.append({"prompt": number, **parting._asdict()})
    acceptance = Acceptance.of([entry for generation in ours for entry in generation.rounds], drafter.shape.block_size)
    extra: dict[str, Any] = {"answer_tokens": sum(len(entry.token_ids) for entry in ours), **speeds(ours, plains)}
    if is_greedy:
        extra |= {"lossless": not partings, "divergences": partings}
    texts = [
        ([*prompt, *plain.token_ids], len(prompt)) for prompt, plain in zip(prompts, plains, strict=True) if is_greedy
    ]
    return Measured(acceptance, texts, extra)


def speeds(speculative: list["Generation"], plain: list["Generation"]) -> dict[str, float | None]:
    """Tokens per second after the first token, over all prompts together."""

    def rate(generations: list["Generation"]) -> float:
        seconds = sum(entry.decode_seconds for entry in generations)
        return sum(len(entry.token_ids) - 1 for entry in generations) / seconds if seconds else 0.0

    fast, slow = rate(speculative), rate(plain)
    return {
        "tokens_per_second": round(fast, 2),
        "plain_tokens_per_second": round(slow, 2),
        "speedup": round(fast / slow, 3) if slow else None,
    }


def build_ngrams(path: Path, tokenizer: "PreTrainedTokenizerBase", options: Options) -> "NgramTable":
    """An n-gram table of a store's supervised answers.

    Raises:
        ConfigError: the store was written with another tokenizer.
    """
    from tqdm import tqdm

    from blockdraft.data.store import open_store
    from blockdraft.data.template import tokenizer_hash
    from blockdraft.decoding.controls import NgramTable

    store, table = open_store(path), NgramTable(options.ngram_order)
    expected, found = tokenizer_hash(tokenizer), store.manifest["tokenizer_hash"]
    if expected != found:
        raise ConfigError(
            f"--controls {path}: expected a store of the target's tokenizer ({expected[:12]}), found {found[:12]}; "
            "prepare the answers with this target"
        )
    for index in tqdm(range(len(store)), desc="n-grams", unit="document"):
        if table.num_tokens >= options.ngram_tokens:
            sys.stderr.write(f"n-gram table: {index:,} of {len(store):,} documents used (--ngram-tokens)\n")
            break
        document = store[index]
        table.add(document.input_ids.tolist(), document.loss_mask.tolist())
    return table


def run_controls(
    texts: list[tuple[list[int], int]], block_size: int, table: "NgramTable | None", order: int
) -> dict[str, Any]:
    """Acceptance of the controls on the same greedy answers; nothing when sampled."""
    from blockdraft.decoding.controls import control_acceptance, prompt_lookup

    if not texts:
        return {}
    found = {"prompt_lookup": control_acceptance(texts, block_size, prompt_lookup).as_dict()}
    if table is not None:
        counted = control_acceptance(texts, block_size, table.draft).as_dict()
        found["ngram"] = {**counted, "order": order, "answer_tokens_counted": table.num_tokens}
    return found


def settings(
    options: Options, tokenizer: "PreTrainedTokenizerBase", device: "torch.device", drafter: "Drafter"
) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    from importlib import metadata

    import torch

    from blockdraft.data.template import template_hash, tokenizer_hash

    values = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(options).items()}
    return {
        **values,
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cpu_threads": torch.get_num_threads(),
        "template_hash": template_hash(tokenizer),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "drafter_shape": dataclasses.asdict(drafter.shape),
        "versions": {name: metadata.version(name) for name in ("blockdraft", "torch", "transformers")}
        | {"python": platform.python_version()},
    }


def markdown(result: dict[str, Any]) -> str:
    """A table of one row, and the share of rounds in which each slot was accepted."""
    chosen, controls = result["settings"], result["controls"]
    row = {
        "drafter": Path(chosen["drafter"]).name,
        "method": chosen["method"],
        "dtype": chosen["dtype"],
        "prompts": result["num_prompts"],
        "accept": _number(result["acceptance_length"]),
        "rounds": f"{result['rounds']} (+{result['cut_rounds']} cut)",
    }
    for name, control in controls.items():
        row[name.replace("_", " ")] = _number(control["acceptance_length"])
    if chosen["method"] == "decode":
        row["tok/s"], row["plain tok/s"] = result["tokens_per_second"], result["plain_tokens_per_second"]
        row["speed-up"] = _number(result["speedup"])
    lines = [" | ".join(row), " | ".join(["---"] * len(row)), " | ".join(map(str, row.values()))]
    text = "".join(f"| {line} |\n" for line in lines)
    if result["per_slot"]:
        text += "accepted by slot: " + " ".join(f"{share:.2f}" for share in result["per_slot"]) + "\n"
    if "lossless" in result:
        text += _losslessness(result)
    return text


def _losslessness(result: dict[str, Any]) -> str:
    partings, total = result["divergences"], result["num_prompts"]
    if not partings:
        return f"lossless: {total} of {total} answers equal plain decoding token for token\n"
    largest = max(abs(parting["logit_gap"]) for parting in partings)
    first = partings[0]
    return (
        f"not equal to plain decoding: {len(partings)} of {total} answers; largest logit gap at the first difference "
        f"{largest:.4f}; first: prompt {first['prompt']}, token {first['offset']}\n"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
