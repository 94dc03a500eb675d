"""`blockdraft regenerate`: the final answer of each conversation, replaced by the target's own.

Of every conversation the turns up to and including the last user turn are kept, and everything behind it is replaced by
one answer of the target; earlier assistant turns stay as they are and are part of the prompt. Each answer carries
`"finish"`: "stop", or "length" when the token limit cut it, which tells `prepare` not to train its end-of-turn token.

Looping answers (decoding/engine.py says which those are) and truncated ones are counted, and left out on request.

While the command runs, answers are appended to OUTPUT.partial, a chunk of like-long prompts at a time. A second run
with the same settings goes on from there; at the end OUTPUT is written in input order and the partial file removed.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import tyro

from blockdraft.config import ConfigError, TargetConfig

if TYPE_CHECKING:
    from blockdraft.data.conversations import ChatTemplate, Conversation, Drops
    from blockdraft.decoding.engine import AnswerEngine, EngineAnswer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Replace answers by the target's own, so that the drafter learns what the target would say."""

    conversations: tyro.conf.Positional[tuple[str, ...]]
    """.jsonl or .parquet files, directories or names of datasets (NAME or NAME:SPLIT)."""
    target: str
    """Directory, .gguf file or hub name of the target."""
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
    drop_truncated: bool = False
    """Leave answers out that the token limit cut. Answers cut inside their reasoning are always left out."""
    drop_looping: bool = False
    """Leave looping answers out."""
    max_drop: float = 0.05
    """Largest share of the rows that may be unusable as prompts before the command fails."""
    trust_remote_code: bool = False
    """Run model and tokenizer code that comes with the target."""


def run(options: Options) -> int:
    """Writes the output and prints counts; returns the exit code.

    Raises:
        ConfigError: nothing to read, too many unusable rows, or an output of other settings.
    """
    from blockdraft.data.conversations import ChatTemplate, Drops
    from blockdraft.decoding.engine import Sampling, TransformersEngine
    from blockdraft.models.target import Target, load_tokenizer

    _check(options)
    device, dtype = _where(options)
    template = ChatTemplate(load_tokenizer(options.target, options.trust_remote_code))
    drops = Drops(options.max_drop)
    prompts = _read_prompts(options, template, drops)
    journal = Journal(options.output, _settings(options, dtype, prompts))
    if journal.is_complete():
        sys.stdout.write(f"{options.output}: complete already, with these settings; nothing to do\n")
        return 0
    with journal:
        if journal.message:
            sys.stdout.write(journal.message + "\n")
        if len(journal.done) < len(prompts):
            config = TargetConfig(path=options.target, dtype=dtype, trust_remote_code=options.trust_remote_code)
            target = Target.load(config, device=device)
            sampling = Sampling(
                max_new_tokens=options.max_new_tokens,
                batch_size=options.batch_size,
                temperature=options.temperature,
                seed=options.seed,
                thinking=_thinking(options),
            )
            engine = TransformersEngine(target, template, target.stop_ids, sampling)
            _answer_all(engine, prompts, journal, options.batch_size)
        counts = journal.finish(prompts, options)
    lines = [f"{options.output}: {counts['written']:,} answers to {len(prompts):,} prompts", *_lines(counts)]
    if drops.num_dropped:
        lines += [f"rows not used: {drops.num_dropped:,} of {drops.num_rows:,}", *drops.lines()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _answer_all(
    engine: "AnswerEngine", prompts: "Sequence[tuple[Conversation, int]]", journal: "Journal", batch_size: int
) -> None:
    """Chunks of like-long prompts, longest first; a chunk that was not recorded whole is answered again."""
    from tqdm import tqdm

    order = sorted(range(len(prompts)), key=lambda row: prompts[row][1], reverse=True)
    with tqdm(desc="regenerate", unit=" answers", total=len(prompts), initial=len(journal.done)) as bar:
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            if all(row in journal.done for row in rows):
                continue
            for answer in engine.answers([prompts[row][0] for row in rows]):
                row = rows[answer.row]
                if row not in journal.done:
                    journal.add(answer._replace(row=row))
                    bar.update(1)


class Journal:
    """The answers so far, in OUTPUT.partial: a line with the settings, then a line an answer; used as a context."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.output = output
        self.done: dict[int, EngineAnswer] = {}
        self.message = ""
        self._settings = settings
        self._partial = output.with_name(output.name + ".partial")
        self._summary = output.with_name(output.name + ".summary.json")
        self._file: TextIO | None = None

    def is_complete(self) -> bool:
        """True if the output is there and was made with these settings.

        Raises:
            ConfigError: the output is there but was made otherwise.
        """
        if not self.output.exists():
            return False
        try:
            found = json.loads(self._summary.read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.output}: expected no file, or one written by this command, found one without a readable "
                f"{self._summary.name}; choose another --output or remove it"
            ) from error
        _check_equal(self.output, found, self._settings)
        return True

    def __enter__(self) -> "Journal":
        self.output.parent.mkdir(parents=True, exist_ok=True)
        lines = self._partial.read_bytes().splitlines(keepends=True) if self._partial.exists() else []
        if lines and not lines[-1].endswith(b"\n"):
            self.message = f"{self._partial}: the last line, {len(lines[-1])} bytes, was half-written; cut"
            with self._partial.open("r+b") as file:
                file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        if lines:
            self._resume(lines)
        self._file = self._partial.open("a", encoding="utf-8")
        if not lines:
            self._write({"settings": self._settings})
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, answer: "EngineAnswer") -> None:
        """Records one answer, on disk when this returns."""
        self._write(answer._asdict())
        self.done[answer.row] = answer

    def finish(self, prompts: "Sequence[tuple[Conversation, int]]", options: Options) -> dict[str, int]:
        """Writes the output in input order, and the summary; returns counts."""
        from blockdraft.data.conversations import write_conversations

        answers = [self.done[row] for row in range(len(prompts))]
        kept = [answer for answer in answers if not _is_left_out(answer, options)]
        counts = {
            "written": len(kept),
            "cut inside their reasoning, left out": sum(a.is_cut_in_reasoning for a in answers),
            "empty, left out": sum(_is_empty(a) for a in answers),
            "cut by the token limit": sum(a.finish == "length" for a in answers),
            "looping": sum(a.is_looping for a in answers),
            "tokens": sum(a.num_tokens for a in answers),
        }
        side = self.output.with_name(self.output.name + ".writing")
        write_conversations(side, (_answered(prompts[answer.row][0], answer) for answer in kept))
        summary = {"settings": self._settings, "counts": counts}
        self._summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        side.rename(self.output)
        self._partial.unlink()
        return counts

    def _resume(self, lines: list[bytes]) -> None:
        from blockdraft.decoding.engine import EngineAnswer

        try:
            found = json.loads(lines[0])["settings"]
            _check_equal(self._partial, found, self._settings)
            for line in lines[1:]:
                answer = EngineAnswer(**json.loads(line))
                self.done[answer.row] = answer
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{self._partial}, line {len(self.done) + 2}: expected an answer of an earlier run, found: {error}; "
                "remove the file to start again"
            ) from error
        resumed = f"{self._partial}: going on after {len(self.done):,} answers"
        self.message = f"{self.message}\n{resumed}" if self.message else resumed

    def _write(self, value: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(value, ensure_ascii=False) + "\n")
        self._file.flush()


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

    device = options.device
    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    return device, choose_dtype(options.dtype, device)


def _settings(options: Options, dtype: str, prompts: "Sequence[tuple[Conversation, int]]") -> dict[str, Any]:
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
        "batch_size": options.batch_size if is_sampled else None,
        "dtype": dtype,
        "thinking": _thinking(options),
        "drop_truncated": options.drop_truncated,
        "drop_looping": options.drop_looping,
    }


def _check_equal(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if found[name] != value:
            raise ConfigError(
                f"{path}: holds answers made with other settings: expected {name} {value!r}, found {found[name]!r}; "
                "repeat those settings, choose another --output, or remove the file"
            )


def _is_empty(answer: "EngineAnswer") -> bool:
    return not answer.is_cut_in_reasoning and not answer.content.strip()


def _is_left_out(answer: "EngineAnswer", options: Options) -> bool:
    return (
        answer.is_cut_in_reasoning
        or _is_empty(answer)
        or (options.drop_truncated and answer.finish == "length")
        or (options.drop_looping and answer.is_looping)
    )


def _answered(prompt: "Conversation", answer: "EngineAnswer") -> "Conversation":
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
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
