"""`blockdraft evaluate`: acceptance length of a drafter on prompts, beside controls; by replay or by decoding."""

import dataclasses
import json
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import tyro

from blockdraft.commands.outputs import check_file, check_sampling, check_seed
from blockdraft.commands.unused import SAMPLED, Need, refuse_unused
from blockdraft.config import ConfigError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from blockdraft.commands.measure import PromptSet
    from blockdraft.models.drafter import Drafter


@dataclass(frozen=True, kw_only=True)
class Options:
    """Measure acceptance length, and with --method decode speed and losslessness."""

    drafter: tyro.conf.Positional[Path]
    """Export, checkpoint or run directory."""
    target: str
    """Directory, .gguf file or hub name of the target."""
    prompts: tuple[str, ...]
    """One or several sets: humaneval, gsm8k, mtbench (extra: eval), or conversations (.jsonl, .parquet, datasets name)
    of which the target answers the last user turn."""
    method: Literal["replay", "decode"] = "replay"
    """replay: answers decoded in batches, then drafted from at every position, the same counts for less time.
    decode: one answer at a time by speculative decoding and again by plain decoding."""
    num_prompts: int | None = 64
    """The first so many prompts of each set; None: all."""
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
    thinking: tyro.conf.FlagCreatePairsOff[bool] = False
    """Ask the chat template for the thinking mode; without either flag the template decides."""
    no_thinking: tyro.conf.FlagCreatePairsOff[bool] = False
    """Ask the chat template for the non-thinking mode."""
    batch_size: int = 16
    """Answers decoded at a time, for replay."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """float32: greedy output must equal plain decoding token for token. bfloat16: it may part at near ties.
    auto: bfloat16, but float32 on a CPU that only emulates it."""
    device: str = "auto"
    """auto: the first GPU, or the CPU where there is none."""
    output: Path | None = None
    """JSON file for the result: all sets together, and each under `sets`."""
    trust_remote_code: bool = False

    @property
    def wants_thinking(self) -> bool | None:
        """None: as the template does."""
        return True if self.thinking else False if self.no_thinking else None


NEEDS: Final = (
    SAMPLED,
    Need(("ngram_order", "ngram_tokens"), ("controls",), "--controls", lambda store: store is not None),
    Need(("controls",), ("temperature",), "--temperature 0 (controls guess greedy answers)", lambda value: value == 0),
    Need(("batch_size",), ("method",), "--method replay (decode takes one at a time)", lambda name: name == "replay"),
)


def run(options: Options) -> int:
    """Measures, prints a Markdown row a set and writes JSON; 1 if greedy float32 output was not lossless.

    Raises:
        ConfigError: options that do not go together, no usable prompts, or files that cannot be loaded.
    """
    _check(options)
    import torch

    from blockdraft import api
    from blockdraft.commands import measure

    drafter = api.load_drafter(options.drafter, device=options.device, dtype=options.dtype)
    target, tokenizer = api.load_target(
        options.target,
        drafter=drafter,
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    # Before anything is decoded: a store of another tokenizer is an error.
    table = None
    if options.controls is not None:
        table = measure.build_ngrams(options.controls, tokenizer, options.ngram_order, options.ngram_tokens)
    sets = read_sets(options, tokenizer, target.facts.max_position_embeddings)
    by_method = measure.measure_by_replay if options.method == "replay" else measure.measure_by_decoding
    size = drafter.shape.block_size
    parts = [measure.with_controls(part, size, table) for part in by_method(options, target, drafter, sets)]
    result: dict[str, Any] = {
        **measure.describe(measure.together(parts), size, table),
        "sets": {one.name: measure.describe(part, size, table) for one, part in zip(sets, parts, strict=True)},
        "settings": settings(options, tokenizer, target.device, drafter),
    }
    sys.stdout.write(markdown(result))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 1 if target.dtype == torch.float32 and result.get("lossless") is False else 0


def _check(options: Options) -> None:
    from blockdraft.data.evalsets import set_names

    if not options.prompts:
        raise ConfigError("--prompts: expected one set or more, found none")
    set_names(options.prompts)
    check_sampling(options.temperature, options.top_p, options.top_k)
    if options.temperature and options.method == "replay":
        raise ConfigError("replay is greedy; sampled acceptance (--temperature above 0) needs --method decode")
    if options.output is not None:
        check_file(options.output)
    check_seed(options.seed)
    for name in ("num_prompts", "max_new_tokens", "batch_size", "ngram_order", "ngram_tokens"):
        found = vars(options)[name]
        if found is not None and found < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {found}")
    if options.thinking and options.no_thinking:
        raise ConfigError("--thinking and --no-thinking: expected at most one of them, found both")
    refuse_unused(options, NEEDS)


def read_sets(options: Options, tokenizer: "PreTrainedTokenizerBase", max_positions: int) -> list["PromptSet"]:
    """The first prompts of each set that can be used; the others are counted by reason.

    Raises:
        ConfigError: none is left of a set.
    """
    from blockdraft.commands.measure import PromptSet
    from blockdraft.data.conversations import ChatTemplate, Drops, RowRefused
    from blockdraft.data.evalsets import read_prompts, set_name

    template, sets = ChatTemplate(tokenizer), list[PromptSet]()
    for source in options.prompts:
        drops, token_ids = Drops(), list[list[int]]()
        for conversation in read_prompts(source, drops):
            if options.num_prompts is not None and len(token_ids) == options.num_prompts:
                break
            try:
                prompt = template.prompt_ids(conversation, thinking=options.wants_thinking)
            except RowRefused as error:
                drops.add("refused by the template", conversation.source, str(error))
                continue
            if len(prompt) + options.max_new_tokens > max_positions:
                drops.add("too long for the target", conversation.source, f"{len(prompt)} tokens")
                continue
            token_ids.append(prompt)
        if drops.num_dropped:
            sys.stderr.write(f"{source}: prompts left out:\n" + "\n".join(drops.lines()) + "\n")
        if not token_ids:
            raise ConfigError(f"{source}: expected prompts, found none that can be used")
        sets.append(PromptSet(set_name(source), token_ids, dict(drops.counts)))
    return sets


def settings(
    options: Options, tokenizer: "PreTrainedTokenizerBase", device: "torch.device", drafter: "Drafter"
) -> dict[str, Any]:
    """Everything that the numbers depend on."""
    import torch

    from blockdraft.data.evalsets import EVAL_SETS
    from blockdraft.data.template import template_hash, tokenizer_hash

    values = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(options).items()}
    del values["no_thinking"]
    known = [name for name in options.prompts if name in EVAL_SETS]
    return {
        **values,
        "prompts": list(options.prompts),
        "thinking": options.wants_thinking,
        "dtype": str(drafter.dtype).removeprefix("torch."),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "cpu_threads": torch.get_num_threads(),
        "prompt_formats": {name: EVAL_SETS[name].prompt_format for name in known},
        "template_hash": template_hash(tokenizer),
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "drafter_shape": dataclasses.asdict(drafter.shape),
        "versions": {name: version(name) for name in ("blockdraft", "torch", "transformers")}
        | {EVAL_SETS[name].distribution: version(EVAL_SETS[name].distribution) for name in known}
        | {"python": platform.python_version()},
    }


def version(distribution: str) -> str:
    """That of an installed distribution; the package itself may run from its source."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def markdown(result: dict[str, Any]) -> str:
    """A table with a row a set, and the share of rounds in which each slot was accepted."""
    rows = [_row(name, found, result["settings"]) for name, found in result["sets"].items()]
    lines = [" | ".join(rows[0]), " | ".join(["---"] * len(rows[0]))]
    lines += [" | ".join(map(str, row.values())) for row in rows]
    text = "".join(f"| {line} |\n" for line in lines)
    for name, found in result["sets"].items():
        if found["per_slot"]:
            text += f"accepted by slot, {name}: " + " ".join(f"{share:.2f}" for share in found["per_slot"]) + "\n"
        if "lossless" in found:
            text += _losslessness(name, found)
    return text


def _row(name: str, found: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    row = {
        "drafter": Path(chosen["drafter"]).name,
        "set": name,
        "method": chosen["method"],
        "dtype": chosen["dtype"],
        "thinking": {None: "template's", True: "on", False: "off"}[chosen["thinking"]],
        "prompts": found["num_prompts"],
        "accept": _number(found["acceptance_length"]),
        "rounds": f"{found['rounds']} (+{found['cut_rounds']} cut)",
    }
    for control, values in found["controls"].items():
        row[control.replace("_", " ")] = _number(values["acceptance_length"])
    if chosen["method"] == "decode":
        row["tok/s"], row["plain tok/s"] = found["tokens_per_second"], found["plain_tokens_per_second"]
        row["speed-up"] = _number(found["speedup"])
    return row


def _losslessness(name: str, found: dict[str, Any]) -> str:
    partings, total = found["divergences"], found["num_prompts"]
    if not partings:
        return f"lossless, {name}: {total} of {total} answers equal plain decoding token for token\n"
    largest = max(abs(parting["logit_gap"]) for parting in partings)
    first = partings[0]
    return (
        f"not equal to plain decoding, {name}: {len(partings)} of {total} answers; largest logit gap at the first "
        f"difference {largest:.4f}; first: prompt {first['prompt']}, token {first['offset']}\n"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
