"""From a conversation to token ids and a loss mask, by the tokenizer's own chat template.

The whole conversation is rendered once and tokenized once: what is rendered is what is trained. Where an assistant turn
lies in that text is found by rendering prefixes of the conversation: the prompt before the turn (with the generation
prompt) gives its start, the conversation up to and including the turn gives its end. Both must be prefixes of the whole
rendering, or the template has no stable prefix and encoding stops with an error.

One difference is allowed: reasoning blocks, `<think>...</think>`. Templates of the Qwen3 kind keep the reasoning of the
turns after the last user turn and drop all earlier reasoning, so a prefix rendering shows reasoning that the whole
rendering no longer has. Prefixes are therefore compared with all reasoning blocks taken out, and the positions found
are carried back to the whole rendering. So of a three-turn chat with reasoning, turns one and two are supervised as the
final text shows them, without their reasoning, and turn three with its reasoning.

Inside a turn the mask is 1 from the first token that the target would generate to the end-of-turn token:
- what a generation prompt supplies has mask 0 (role header, an opened `<think>`, an empty think block), whether it is
  the prompt of the thinking or of the non-thinking mode;
- reasoning has mask 1; with `reasoning=False` it is taken out of the conversation before rendering, as in the
  non-thinking mode;
- whatever follows the end-of-turn token (a newline) has mask 0. The end-of-turn token is the last added token of the
  turn with nothing but white space behind it; without one, the turn ends at its last visible character;
- an answer that was cut by a length limit (`"finish": "length"`) has mask 0 at its end-of-turn token.

Tokens are mapped by character offsets. Slow tokenizers have none: there the text is tokenized in pieces, cut at the
turns, and it is an error if that gives other ids than the whole.
"""

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2

from blockdraft.config import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]

THINK_BLOCK = re.compile(r"<think>.*?</think>\n*", re.DOTALL)
SUPPLIED_THINKING = re.compile(r"<think>\s*(</think>\s*)?$")


class Conversation(NamedTuple):
    """One conversation; a message has role, content, and optionally reasoning_content, tool_calls, finish."""

    messages: list[Message]
    tools: list[Any] | None
    source: str
    """Where it was read: "file:line"."""


class Encoded(NamedTuple):
    """Token ids of a rendered conversation, and 1 where the target itself would have generated the token."""

    input_ids: list[int]
    loss_mask: list[int]
    unrendered_reasoning: int = 0
    """Assistant turns whose reasoning the template left out."""


class RowRefused(ValueError):
    """This conversation cannot be rendered by this template; others may be."""


class _Span(NamedTuple):
    start: int
    end: int
    is_unfinished: bool


class _Tokens(NamedTuple):
    ids: list[int]
    begins: list[int]
    """Character at which each token begins."""
    ends: list[int]


def encode(conversation: Conversation, tokenizer: "PreTrainedTokenizerBase", *, reasoning: bool = True) -> Encoded:
    """Ids and loss mask of one conversation; for many, keep a `ChatTemplate`. See there."""
    return ChatTemplate(tokenizer).encode(conversation, reasoning=reasoning)


def render_prompt(
    conversation: Conversation, tokenizer: "PreTrainedTokenizerBase", *, thinking: bool | None = None
) -> list[int]:
    """Ids up to and including the last user turn, with the generation prompt; for many, keep a `ChatTemplate`."""
    return ChatTemplate(tokenizer).prompt_ids(conversation, thinking=thinking)


class ChatTemplate:
    """A tokenizer's chat template; keeps the set of added tokens, which is slow to list.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer
        self.name = f"the chat template of {tokenizer.name_or_path or type(tokenizer).__name__}"
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{tokenizer.name_or_path}: expected a tokenizer with a chat template, found none; "
                "put a chat_template.jinja beside the tokenizer's files"
            )
        self._added_ids = frozenset(tokenizer.added_tokens_decoder)

    def encode(self, conversation: Conversation, *, reasoning: bool = True) -> Encoded:
        """Ids and loss mask of a whole conversation; turns behind the last assistant turn are left out.

        Raises:
            ConfigError: the template has no stable prefix; names the template, the row and the turn.
            RowRefused: the template itself refused this conversation.
        """
        messages = _until_last_answer(conversation.messages)
        if not reasoning:
            messages = [without_reasoning(message) for message in messages]
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        is_thinking = any(_reasoning_of(messages[index]) for index in answers)
        whole = conversation._replace(messages=messages)
        text = self.render(whole, thinking=is_thinking)
        spans = [
            self._find_turn(text, whole, number, index, is_thinking) for number, index in enumerate(answers, start=1)
        ]
        tokens = self._tokenize(text, spans, conversation.source)
        loss_mask = [0] * len(tokens.ids)
        for span in spans:
            first, last = self._supervised(text, tokens, span)
            loss_mask[first:last] = [1] * (last - first)
        unrendered = sum(
            1
            for index, span in zip(answers, spans, strict=True)
            if _reasoning_of(messages[index]) not in text[span.start : span.end]
        )
        return Encoded(tokens.ids, loss_mask, unrendered)

    def prompt_text(self, conversation: Conversation, *, thinking: bool | None = None) -> str:
        """The conversation up to its last user turn, with the generation prompt; `thinking` None: as the template does.

        Raises:
            RowRefused: there is no user turn, or the template refused the conversation.
        """
        return self.render(until_last_user(conversation), thinking=thinking, is_prompt=True)

    def prompt_ids(self, conversation: Conversation, *, thinking: bool | None = None) -> list[int]:
        """Token ids of `prompt_text`."""
        return self.ids(self.prompt_text(conversation, thinking=thinking))

    def ids(self, text: str) -> list[int]:
        """Token ids of rendered text: the template wrote the special tokens, so none are added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def render(self, conversation: Conversation, *, thinking: bool | None, is_prompt: bool = False) -> str:
        """The template's text for a conversation, with the generation prompt if `is_prompt`."""
        flags: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        messages = [
            {name: value for name, value in message.items() if name != "finish"} for message in conversation.messages
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=conversation.tools, tokenize=False, add_generation_prompt=is_prompt, **flags
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise RowRefused(f"{self.name}: {error}") from error
        return str(text)

    def _find_turn(self, text: str, whole: Conversation, number: int, index: int, is_thinking: bool) -> _Span:
        bare = _Bare(text)
        before = whole._replace(messages=whole.messages[:index])
        prompts = [self.render(before, thinking=flag, is_prompt=True) for flag in (is_thinking, not is_thinking)]
        headers = [SUPPLIED_THINKING.sub("", prompt) for prompt in prompts]
        header = THINK_BLOCK.sub("", headers[0])
        if index + 1 < len(whole.messages):
            up_to = self.render(whole._replace(messages=whole.messages[: index + 1]), thinking=is_thinking)
        else:
            up_to = text
        turn = THINK_BLOCK.sub("", up_to)
        for expected, found in ((header, bare.text), (header, turn), (turn, bare.text)):
            if not found.startswith(expected):
                raise ConfigError(self._unstable(whole.source, number, index, expected, found))
        start, end = bare.position(len(header)), bare.position(len(turn))
        supplied = [
            prompt[len(cut) :]
            for prompt, cut in zip(prompts, headers, strict=True)
            if THINK_BLOCK.sub("", cut) == header and text.startswith(prompt[len(cut) :], start)
        ]
        is_unfinished = whole.messages[index].get("finish") == "length"
        return _Span(start + max(map(len, supplied), default=0), end, is_unfinished)

    def _unstable(self, source: str, number: int, index: int, expected: str, found: str) -> str:
        pairs = zip(expected, found, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(found)))
        return (
            f"{source}: {self.name} has no stable prefix at assistant turn {number} (message {index + 1}): "
            f"expected the rendering to go on with {expected[at : at + 40]!r} at character {at}, as it does when the "
            f"conversation ends there, found {found[at : at + 40]!r}; "
            "use a template that renders a turn alike whatever follows it, or single-turn conversations"
        )

    def _tokenize(self, text: str, spans: Sequence[_Span], source: str) -> _Tokens:
        if self.tokenizer.is_fast:
            coded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            begins, ends, reached = [], [], 0
            for begin, end in coded["offset_mapping"]:
                # A token of trimmed white space has an empty span; it began where the token before it ended.
                begins.append(min(begin, reached))
                reached = max(reached, end)
                ends.append(reached)
            return _Tokens(list(coded["input_ids"]), begins, ends)
        ids = self.ids(text)
        cuts = [0, *(cut for span in spans for cut in (span.start, span.end)), len(text)]
        pieces = [(self.ids(text[a:b]), a, b) for a, b in pairwise(cuts)]
        if [token for piece, _, _ in pieces for token in piece] != ids:
            raise ConfigError(
                f"{source}: {self.tokenizer.name_or_path} has no character offsets, and a token crosses the start or "
                "end of an assistant turn; expected a fast tokenizer (tokenizer.json)"
            )
        return self._spread(ids, pieces)

    def _spread(self, ids: list[int], pieces: Sequence[tuple[list[int], int, int]]) -> _Tokens:
        # Inside a piece only the order matters, and where white space ends the piece: decoded lengths, kept in range.
        begins: list[int] = []
        ends: list[int] = []
        for piece, start, stop in pieces:
            reached = start
            for token in piece:
                begins.append(min(reached, stop - 1))
                reached = min(stop, reached + len(self.tokenizer.decode([token])))
                ends.append(reached)
        return _Tokens(ids, begins, ends)

    def _supervised(self, text: str, tokens: _Tokens, span: _Span) -> tuple[int, int]:
        first, last = bisect_left(tokens.begins, span.start), bisect_left(tokens.begins, span.end)
        while last > first:
            if tokens.ids[last - 1] in self._added_ids:
                return first, last - 1 if span.is_unfinished else last
            if text[tokens.begins[last - 1] : tokens.ends[last - 1]].strip():
                break
            last -= 1
        return first, last


class _Bare:
    """A text without its reasoning blocks, and the way back to positions in the text."""

    def __init__(self, text: str) -> None:
        pieces, self._starts, self._origins = [], [], []
        length = origin = 0
        for begin, end in [*(block.span() for block in THINK_BLOCK.finditer(text)), (len(text), len(text))]:
            pieces.append(text[origin:begin])
            self._starts.append(length)
            self._origins.append(origin)
            length += begin - origin
            origin = end
        self.text = "".join(pieces)

    def position(self, bare_position: int) -> int:
        """Position in the full text; before a reasoning block that was taken out just there."""
        piece = max(0, bisect_left(self._starts, bare_position) - 1)
        return self._origins[piece] + bare_position - self._starts[piece]


def until_last_user(conversation: Conversation) -> Conversation:
    """The conversation up to and including its last user turn.

    Raises:
        RowRefused: there is none.
    """
    users = [index for index, message in enumerate(conversation.messages) if message["role"] == "user"]
    if not users:
        raise RowRefused("expected a user turn, found none")
    return conversation._replace(messages=conversation.messages[: users[-1] + 1])


def without_reasoning(message: Message) -> Message:
    """An assistant message without reasoning_content and without reasoning blocks in its content."""
    if message["role"] != "assistant":
        return message
    bare = {name: value for name, value in message.items() if name != "reasoning_content"}
    return {**bare, "content": THINK_BLOCK.sub("", message["content"])}


def template_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of the chat template."""
    return _sha256(json.dumps(tokenizer.chat_template, sort_keys=True))


def tokenizer_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """SHA-256 of everything that decides ids: the tokenizer file, or the vocabulary of a slow tokenizer."""
    if not tokenizer.is_fast:
        return _sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True))
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # Left by whoever called the tokenizer last; they decide no ids here.
    state.pop("truncation", None)
    state.pop("padding", None)
    return _sha256(json.dumps(state, sort_keys=True))


def _until_last_answer(messages: list[Message]) -> list[Message]:
    last = max((index for index, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    if last < 0:
        raise RowRefused("expected an assistant turn, found none")
    return messages[: last + 1]


def _reasoning_of(message: Message) -> str:
    block = THINK_BLOCK.search(message["content"])
    inline = block.group().strip().removeprefix("<think>").removesuffix("</think>").strip() if block else ""
    return str(message.get("reasoning_content") or "").strip() or inline


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
