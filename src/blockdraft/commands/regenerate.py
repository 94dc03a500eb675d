"""`blockdraft regenerate`: the final answer of each conversation, replaced by the target's own.

Of every conversation the turns up to and including the last user turn are kept, and everything behind it is replaced by
one answer of the target; earlier assistant turns stay as they are and are part of the prompt. Each answer carries
`"finish"`: "stop", or "length" when the token limit cut it, which tells `prepare` not to train its end-of-turn token.

Looping answers (decoding/engine.py says which those are) and truncated ones are counted, and left out on request.

With --server the answers come from any OpenAI-compatible server, such as vLLM's or SGLang's. Prompts that it fails to
answer are left out and counted by reason; more than --max-drop of them is an error. The same command asks for them
again.

While the command runs, answers are appended to OUTPUT.partial, a chunk of like-long prompts at a time (a server's as
each comes). A second run with the same settings goes on from there; at the end OUTPUT is written in input order and the
partial file removed, if every prompt was answered. Ctrl-C and SIGTERM drop what is being answered and end the command
with 130, since there is no OUTPUT that a next command could read.
"""

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import tyro

from blockdraft.commands.answering import answer_all
from blockdraft.commands.journal import Journal
from blockdraft.commands.outputs import check_file, check_sampling
from blockdraft.commands.stops import EXIT_INTERRUPTED, StopRequested, Stops
from blockdraft.commands.unused import Need, refuse_unused
from blockdraft.config import ConfigError, TargetConfig

if TYPE_CHECKING:
    from blockdraft.data.conversations import ChatTemplate, Conversation, Drops
    from blockdraft.decoding.engine import AnswerEngine, EngineAnswer, Sampling
    from blockdraft.decoding.server_engine import Server


@dataclass(frozen=True, kw_only=True)
class Options:
    """Replace answers by the target's own, so that the drafter learns what the target would say."""

    conversations: tyro.conf.Positional[tuple[str, ...]]
    """.jsonl or .parquet files, directories or names of datasets (NAME or NAME:SPLIT)."""
    target: str
    """Directory, .gguf file or hub name of the target; with --server only its tokenizer is loaded."""
    output: Path
    """JSONL file to write."""
    max_new_tokens: int = 2048
    """Longest answer, in tokens."""
    max_prompt_tokens: int = 4096
    """Prompts longer than this are dropped and counted."""
    batch_size: int = 32
    """Prompts decoded together."""
    temperature: float = 0.0
    """0 is greedy."""
    seed: int = 0
    """For sampling."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda:0 and so on."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type the target computes in; auto: bfloat16, but float32 on a CPU without bfloat16 instructions."""
    thinking: tyro.conf.FlagCreatePairsOff[bool] = False
    """Ask the chat template for the thinking mode; without either flag the template decides."""
    no_thinking: tyro.conf.FlagCreatePairsOff[bool] = False
    """Ask the chat template for the non-thinking mode."""
    reasoning: bool = True
    """Keep the reasoning of the answers."""
    drop_truncated: bool = False
    """Leave answers out that the token limit cut. Answers cut inside their reasoning are always left out."""
    drop_looping: bool = False
    """Leave looping answers out."""
    max_drop: float = 0.05
    """Largest share of rows unusable as prompts, and of prompts a server fails to answer, before the command fails."""
    trust_remote_code: bool = False
    """Run model and tokenizer code that comes with the target."""
    server: str = ""
    """URL of an OpenAI-compatible server that answers instead, such as http://localhost:8000/v1."""
    server_model: str = ""
    """Model to ask it for; default: the only one that it serves."""
    api_key_file: Path | None = None
    """File with the server's key."""
    concurrency: int = 32
    """Requests to the server at once."""
    request_timeout_s: float = 600.0
    """For a whole request, in seconds."""
    retries: int = 5
    """Times that a failed request is sent again."""


NEEDS: Final = (
    Need(("device", "dtype", "batch_size"), ("server",), "no --server, which decodes by settings of its own", not_),
    Need(("concurrency", "retries", "request_timeout_s"), ("server",), "--server", bool),
)


def run(options: Options, stops: Stops | None = None) -> int:
    """Writes the output and prints counts; returns the exit code.

    Raises:
        ConfigError: nothing to read, too many unusable rows or failures, or an output of other settings.
        StopRequested: a stop was asked for before there was anything to keep.
    """
    from blockdraft.data.conversations import ChatTemplate, Drops
    from blockdraft.models.target import load_tokenizer

    _check(options)
    check_file(options.output)
    stops = Stops() if stops is None else stops
    server = _server(options) if options.server else None
    template = ChatTemplate(load_tokenizer(options.target, options.trust_remote_code))
    drops = Drops(options.max_drop)
    prompts = _read_prompts(options, template, drops)
    device, dtype = ("", None) if server else _where(options)
    journal = Journal(options.output, _settings(options, dtype, server.model if server else None, prompts))
    if journal.is_complete():
        sys.stdout.write(f"{options.output}: complete already, with these settings; nothing to do\n")
        return 0
    with journal:
        if journal.message:
            sys.stdout.write(journal.message + "\n")
        failed: dict[int, str] = {}
        try:
            if len(journal.done) < len(prompts):
                if server:
                    engine = _server_engine(options, server, template)
                    failed = answer_all(engine, prompts, journal, stops, chunk=None, max_failed=options.max_drop)
                else:
                    engine = _own_engine(options, device, dtype, template)
                    answer_all(engine, prompts, journal, stops, chunk=options.batch_size)
            with stops.deferred():
                counts = _finish(journal, prompts, failed, options)
        except StopRequested:
            sys.stdout.write(journal.describe_stop(len(prompts)) + "\n")
            return EXIT_INTERRUPTED
    lines = [f"{options.output}: {counts['written']:,} answers to {len(prompts):,} prompts", *_lines(counts)]
    if failed:
        lines.append(f"the same command asks for the {len(failed):,} prompts without an answer again")
    if drops.num_dropped:
        lines += [f"rows not used: {drops.num_dropped:,} of {drops.num_rows:,}", *drops.lines()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _own_engine(
    options: Options, device: str, dtype: Literal["bfloat16", "float32"] | None, template: "ChatTemplate"
) -> "AnswerEngine":
    from blockdraft.decoding.engine import TransformersEngine
    from blockdraft.models.target import Target

    assert dtype is not None
    config = TargetConfig(path=options.target, dtype=dtype, trust_remote_code=options.trust_remote_code)
    # No features are read: one layer will do, however few the target has.
    target = Target.load(config, device=device, num_drafter_layers=1)
    return TransformersEngine(target, template, target.stop_ids, _sampling(options))


def _server(options: Options) -> "Server":
    """The server, with its model named.

    Raises:
        ConfigError: no such server, or the model is not clear.
    """
    from dataclasses import replace

    from blockdraft.decoding.server_engine import Server, find_model

    key = ""
    if options.api_key_file is not None:
        if not options.api_key_file.is_file():
            raise ConfigError(f"--api-key-file {options.api_key_file}: expected a file with the key, found none")
        key = options.api_key_file.read_text(encoding="utf-8").strip()
    server = Server(
        url=options.server,
        model=options.server_model,
        api_key=key,
        concurrency=options.concurrency,
        timeout_s=options.request_timeout_s,
        retries=options.retries,
    )
    return replace(server, model=find_model(server))


def _server_engine(options: Options, server: "Server", template: "ChatTemplate") -> "AnswerEngine":
    from blockdraft.decoding.server_engine import ServerEngine

    return ServerEngine(server, template, _sampling(options))


def _sampling(options: Options) -> "Sampling":
    from blockdraft.decoding.engine import Sampling

    return Sampling(
        max_new_tokens=options.max_new_tokens,
        batch_size=options.batch_size,
        temperature=options.temperature,
        seed=options.seed,
        thinking=_thinking(options),
    )


def _finish(
    journal: Journal, prompts: "Sequence[tuple[Conversation, int]]", failed: dict[int, str], options: Options
) -> dict[str, int]:
    """Writes the output in input order, and the summary; returns counts."""
    answers = [journal.done[row] for row in range(len(prompts)) if row not in failed]
    kept = [answer for answer in answers if not _is_left_out(answer, options)]
    counts = {
        "written": len(kept),
        "cut inside their reasoning, left out": sum(a.is_cut_in_reasoning for a in answers),
        "empty, left out": sum(_is_empty(a) for a in answers),
        "cut by the token limit": sum(a.finish == "length" for a in answers),
        "looping": sum(a.is_looping for a in answers),
        "tokens": sum(a.num_tokens for a in answers),
    }
    for reason in failed.values():
        name = f"not answered, {reason}"
        counts[name] = counts.get(name, 0) + 1
    answered = (_answered(prompts[a.row][0], a, options.reasoning) for a in kept)
    journal.complete(answered, counts, is_whole=not failed)
    return counts


def _read_prompts(options: Options, template: "ChatTemplate", drops: "Drops") -> "list[tuple[Conversation, int]]":
    """Conversations up to their last user turn, with the prompt's length in tokens."""
    from blockdraft.data.conversations import RowRefused, conversation_hash, read_conversations
    from blockdraft.data.template import until_last_user

    prompts = []
    seen: set[str] = set()
    for source in options.conversations:
        for conversation in read_conversations(source, drops):
            try:
                prompt = until_last_user(conversation)
                length = len(template.prompt_ids(prompt, thinking=_thinking(options)))
            except RowRefused as error:
                drops.add("refused by the chat template", conversation.source, str(error))
                continue
            if length > options.max_prompt_tokens:
                detail = f"a prompt of {length:,} tokens, more than {options.max_prompt_tokens:,}"
                drops.add("over-long", conversation.source, detail)
                continue
            # Rows that differ only in the answer that is replaced.
            if conversation_hash(prompt) in seen:
                drops.add("duplicate prompt", conversation.source)
                continue
            seen.add(conversation_hash(prompt))
            prompts.append((prompt, length))
    drops.check()
    if not prompts:
        raise ConfigError("expected at least one prompt, found none")
    return prompts


def _where(options: Options) -> tuple[str, Literal["bfloat16", "float32"]]:
    """Device and data type, with auto resolved."""
    import torch

    from blockdraft.models.target import choose_dtype
    from blockdraft.runtime.devices import find_device

    device = options.device
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    for part in device.split("+"):
        find_device(part, "--device")
    return device, choose_dtype(options.dtype, device)


def _settings(
    options: Options, dtype: str | None, server_model: str | None, prompts: "Sequence[tuple[Conversation, int]]"
) -> dict[str, Any]:
    from blockdraft.data.conversations import conversation_hash

    hashes = "".join(conversation_hash(prompt) for prompt, _ in prompts)
    is_sampled = options.temperature > 0
    return {
        "target": options.target,
        "prompts": len(prompts),
        "prompts_hash": hashlib.sha256(hashes.encode("ascii")).hexdigest(),
        "max_new_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        # Both decide nothing in greedy decoding.
        "seed": options.seed if is_sampled else None,
        "batch_size": options.batch_size if is_sampled and server_model is None else None,
        "dtype": dtype,
        "thinking": _thinking(options),
        "drop_truncated": options.drop_truncated,
        "drop_looping": options.drop_looping,
        "reasoning": options.reasoning,
        "server_model": server_model,
    }


def _is_empty(answer: "EngineAnswer") -> bool:
    return not answer.is_cut_in_reasoning and not answer.content.strip()


def _is_left_out(answer: "EngineAnswer", options: Options) -> bool:
    return (
        answer.is_cut_in_reasoning
        or _is_empty(answer)
        or (options.drop_truncated and answer.finish == "length")
        or (options.drop_looping and answer.is_looping)
    )


def _answered(prompt: "Conversation", answer: "EngineAnswer", reasoning: bool) -> "Conversation":
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning and reasoning:
        message["reasoning_content"] = answer.reasoning
    message["finish"] = answer.finish
    return prompt._replace(messages=[*prompt.messages, message])


def _lines(counts: dict[str, int]) -> list[str]:
    return [f"  {count:,} {name}" for name, count in counts.items() if count and name != "written"]


def _thinking(options: Options) -> bool | None:
    return True if options.thinking else False if options.no_thinking else None


def _check(options: Options) -> None:
    if not options.conversations:
        raise ConfigError("expected at least one file or dataset of conversations, found none")
    if options.thinking and options.no_thinking:
        raise ConfigError("--thinking and --no-thinking: expected at most one of them, found both")
    if options.batch_size < 1 or options.max_new_tokens < 1:
        raise ConfigError(
            f"--batch-size and --max-new-tokens: expected at least 1, found {options.batch_size} and "
            f"{options.max_new_tokens}"
        )
    check_sampling(options.temperature)
    if options.max_prompt_tokens < 1:
        raise ConfigError(f"--max-prompt-tokens: expected at least 1, found {options.max_prompt_tokens}")
    if not 0 <= options.max_drop <= 1:
        raise ConfigError(f"--max-drop: expected a share between 0 and 1, found {options.max_drop}")
    if options.concurrency < 1 or options.retries < 0 or not 0 < options.request_timeout_s < math.inf:
        raise ConfigError(
            "--concurrency, --retries and --request-timeout-s: expected at least 1, at least 0 and more than 0, found "
            f"{options.concurrency}, {options.retries} and {options.request_timeout_s}"
        )
    if not options.server and (options.server_model or options.api_key_file is not None):
        raise ConfigError("--server-model and --api-key-file go with --server; name the server too")
    refuse_unused(options, NEEDS)
