"""`blockdraft generate`: streams one answer; tokens that the drafter guessed and the target accepted are green."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol

import tyro

from blockdraft.commands.outputs import check_sampling, check_seed
from blockdraft.commands.unused import SAMPLED, refuse_unused
from blockdraft.config import ConfigError

if TYPE_CHECKING:
    from blockdraft.api import Reply

ACCEPTED: Final = "\x1b[32m"
RESET: Final = "\x1b[0m"
UNFINISHED: Final = "\ufffd"
"""What a tokenizer writes for bytes that are no whole character yet."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Stream one answer by speculative decoding."""

    drafter: tyro.conf.Positional[Path]
    """Export, checkpoint or run directory."""
    prompt: tyro.conf.Positional[str]
    """What the user says."""
    target: str
    """Directory, .gguf file or hub name of the target."""
    max_new_tokens: int = 256
    temperature: float = 0.0
    """0: greedy."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    thinking: tyro.conf.FlagCreatePairsOff[bool] = False
    """Ask the chat template for the thinking mode; without either flag the template decides."""
    no_thinking: tyro.conf.FlagCreatePairsOff[bool] = False
    """Ask the chat template for the non-thinking mode."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    device: str = "auto"
    """auto: the first GPU, or the CPU where there is none."""
    color: bool = False
    """Colours even where the output is no terminal."""
    trust_remote_code: bool = False


class Decodes(Protocol):
    """What the stream needs of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str | list[str]: ...


class TextStream:
    """Text of a growing list of tokens, never half a character.

    A token's text is what it adds to the text of the tokens shortly before it, since tokenizers drop or add spaces at
    the start of a text, and bytes of one character may be spread over tokens.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0
        self._shown = 0

    def push(self, token_id: int) -> str:
        """The text that can be shown now that `token_id` has come."""
        self._ids.append(token_id)
        text = self._decode(len(self._ids))
        if text.endswith(UNFINISHED):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What was held back as unfinished."""
        return self._advance(self._decode(len(self._ids)))

    def _advance(self, text: str) -> str:
        new = text[len(self._decode(self._shown)) :]
        self._start, self._shown = self._shown, len(self._ids)
        return new

    def _decode(self, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[self._start : end], skip_special_tokens=True))


class Printer:
    """Writes rounds as they come: accepted draft tokens in colour, the target's own tokens plain."""

    def __init__(self, stream: TextStream, write: Callable[[str], object], *, use_color: bool) -> None:
        self._stream, self._write, self._use_color = stream, write, use_color

    def __call__(self, token_ids: list[int], accepted: int) -> None:
        """Takes one round, as `decoding.speculative.OnRound`."""
        for index, token_id in enumerate(token_ids):
            text = self._stream.push(token_id)
            if text:
                self._write(f"{ACCEPTED}{text}{RESET}" if self._use_color and index < accepted else text)


def run(options: Options) -> int:
    """Streams the answer; returns the exit code.

    Raises:
        ConfigError: drafter and target do not fit or cannot be loaded, or flags contradict each other.
    """
    _check(options)
    from blockdraft import api

    drafter = api.load_drafter(options.drafter, device=options.device, dtype=options.dtype)
    target = api.load_target(
        options.target,
        drafter=drafter,
        device=options.device,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    use_color = options.color or sys.stdout.isatty()
    stream = TextStream(target.tokenizer)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    reply = api.generate(
        target,
        drafter,
        options.prompt,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        thinking=True if options.thinking else False if options.no_thinking else None,
        on_round=Printer(stream, write, use_color=use_color),
    )
    write(stream.flush() + "\n" + closing_line(reply, use_color=use_color) + "\n")
    return 0


def _check(options: Options) -> None:
    if options.thinking and options.no_thinking:
        raise ConfigError("--thinking and --no-thinking: expected at most one of them, found both")
    if options.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    check_seed(options.seed)
    check_sampling(options.temperature, options.top_p, options.top_k)
    refuse_unused(options, (SAMPLED,))


def closing_line(reply: "Reply", *, use_color: bool) -> str:
    """Acceptance, rounds and speed of one answer; cut rounds are told apart."""
    acceptance, generation = reply.acceptance, reply.generation
    cut = f" + {acceptance.cut_rounds} cut" if acceptance.cut_rounds else ""
    length = f"{acceptance.acceptance_length:.2f}" if acceptance.rounds else "-"
    legend = f"{ACCEPTED}drafted and accepted{RESET} | " if use_color else ""
    return (
        f"{legend}accept {length} | rounds {acceptance.rounds}{cut} | tokens {len(generation.token_ids)} | "
        f"{generation.tokens_per_second:.1f} tok/s | end: {generation.finish}"
    )
