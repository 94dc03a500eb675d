"""Reading and writing conversations; every row that cannot be used is counted by reason.

A row has `messages` (role, content, optionally reasoning_content and tool_calls) and optionally `tools`, or ShareGPT's
`conversations` (from, value). Sources: a .jsonl file, a .parquet file, a directory written by `datasets`, or the name
of a dataset, `NAME` or `NAME:SPLIT` (split train by default).

Turns: system or developer turns first, then a user turn; an assistant turn follows a user or a tool turn; a tool turn
follows an assistant or a tool turn. Anything else is counted as "wrong roles".

Every turn has text; only an assistant turn with tool calls or reasoning may leave its content out. A row whose last
user turn is blank asks nothing: it is counted as "blank prompt".
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from blockdraft.config import ConfigError
from blockdraft.data.hub import only_cached
from blockdraft.data.template import (
    ChatTemplate,
    Conversation,
    Encoded,
    Message,
    RowRefused,
    encode,
    render_prompt,
)

__all__ = [
    "ChatTemplate",
    "Conversation",
    "Drops",
    "Encoded",
    "RowRefused",
    "conversation_hash",
    "encode",
    "read_conversations",
    "render_prompt",
    "write_conversations",
]

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
MAY_FOLLOW = {
    "start": ("system", "developer", "user"),
    "system": ("system", "developer", "user"),
    "developer": ("system", "developer", "user"),
    "user": ("user", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant", "user"),
}


class _Row(NamedTuple):
    source: str
    value: Any
    error: str = ""


class _BadRow(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class Drops:
    """Rows read and rows dropped, by reason, with the first examples of each; also remembers rows to find duplicates.

    `max_share` is the largest share of the rows that may be dropped before `check` raises.
    """

    def __init__(self, max_share: float = 1.0, num_examples: int = 3) -> None:
        self.max_share = max_share
        self.num_examples = num_examples
        self.num_rows = 0
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self._seen: set[bytes] = set()

    @property
    def num_dropped(self) -> int:
        return self.counts.total()

    def add(self, reason: str, source: str, detail: str = "") -> None:
        """Counts one dropped row; `source` is "file:line"."""
        self.counts[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < self.num_examples:
            examples.append(f"{source}: {detail or reason}")

    def is_duplicate(self, conversation: Conversation) -> bool:
        """True from the second time on that these messages and tools come by."""
        digest = bytes.fromhex(conversation_hash(conversation))
        is_known = digest in self._seen
        self._seen.add(digest)
        return is_known

    def lines(self) -> list[str]:
        """For people: a line for each reason, its first examples below it."""
        lines = []
        for reason, count in self.counts.most_common():
            lines.append(f"  {count:,} {reason}")
            lines += [f"      {example}" for example in self.examples[reason]]
        return lines

    def check(self, where: str = "", fix: str = "mend them, or raise --max-drop") -> None:
        """Stops when too many rows were dropped; `where` begins the message, `fix` ends it.

        Raises:
            ConfigError: no rows at all, or a larger share than `max_share` was dropped.
        """
        if self.num_rows == 0:
            raise ConfigError(f"{where}expected conversations, found no rows in any input")
        share = self.num_dropped / self.num_rows
        if share > self.max_share:
            raise ConfigError(
                f"{where}expected at most {self.max_share:.1%} of the rows to be dropped, found {self.num_dropped:,} "
                f"of {self.num_rows:,} ({share:.1%}):\n" + "\n".join([*self.lines(), fix])
            )


def read_conversations(path_or_name: str, drops: Drops, *, need_answers: bool = False) -> Iterator[Conversation]:
    """Conversations of one source, in order.

    With `need_answers`, rows without an assistant turn and rows with an empty one are dropped too; without, rows may
    end with a user turn (prompts).

    Raises:
        ConfigError: the source cannot be found or read at all.
    """
    for row in _rows(path_or_name):
        drops.num_rows += 1
        if row.error:
            drops.add("unreadable row", row.source, row.error)
            continue
        try:
            conversation = _parse(row)
            if need_answers:
                _check_answers(conversation.messages)
            _check_prompt(conversation.messages, need_answers=need_answers)
        except _BadRow as bad:
            drops.add(bad.reason, row.source, str(bad))
            continue
        if drops.is_duplicate(conversation):
            drops.add("duplicate", row.source)
            continue
        yield conversation


def write_conversations(path: Path | str, conversations: Iterable[Conversation]) -> int:
    """Writes JSONL with `messages` (and `tools`); returns the number of rows."""
    count = 0
    with Path(path).open("w", encoding="utf-8") as file:
        for conversation in conversations:
            row: dict[str, Any] = {"messages": conversation.messages}
            if conversation.tools:
                row["tools"] = conversation.tools
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
    return count


def conversation_hash(conversation: Conversation) -> str:
    """SHA-256 of messages and tools."""
    # Parquet brings types that JSON lacks, such as times, in fields that no template reads.
    text = json.dumps([conversation.messages, conversation.tools], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _rows(path_or_name: str) -> Iterator[_Row]:
    path = Path(path_or_name)
    if path.is_file():
        if path.suffix == ".jsonl":
            return _jsonl_rows(path)
        if path.suffix == ".parquet":
            return _parquet_rows(path)
        raise ConfigError(f"{path}: expected a .jsonl or .parquet file, found {path.suffix or 'no suffix'!r}")
    if path.suffix in (".jsonl", ".parquet") and not path.exists():
        raise ConfigError(f"{path}: expected a file, found nothing; check the path")
    return _dataset_rows(path_or_name)


def _jsonl_rows(path: Path) -> Iterator[_Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1 and line.startswith(UTF16_MARKS):
                raise ConfigError(f"{path}: expected UTF-8, found UTF-16; convert it: iconv -f UTF-16 -t UTF-8")
            if not line.strip():
                continue
            source = f"{path}:{number}"
            try:
                value = json.loads(line.decode("utf-8-sig"))
                if b"\\ud" in line.lower():
                    # Half of a surrogate pair is valid JSON, and no text that could be tokenized or written.
                    json.dumps(value, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError as error:
                yield _Row(source, None, f"half a character: {error}")
            except (ValueError, RecursionError) as error:
                # Numbers of thousands of digits and brackets of thousands of levels are valid JSON that nobody reads.
                yield _Row(source, None, f"not JSON: {error}")
            else:
                yield _Row(source, value)


def _parquet_rows(path: Path) -> Iterator[_Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for value in batch.to_pylist():
                    number += 1
                    yield _Row(f"{path}:{number}", _without_nulls(value))
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path}, row {number + 1}: expected a parquet file, found: {error}") from error


def _dataset_rows(name: str) -> Iterator[_Row]:
    import datasets

    plain, _, split = name.partition(":")
    expected = "expected a .jsonl or .parquet file, a directory or a dataset name (NAME or NAME:SPLIT)"
    is_saved = any((Path(name) / mark).exists() for mark in ("state.json", "dataset_dict.json"))
    if not is_saved:
        # Where the hub does not answer and the cache has the data, `datasets` takes them from there by itself.
        only_cached(plain, f"{name}: {expected}", _is_dataset_cached)
    try:
        table = datasets.load_from_disk(name) if is_saved else datasets.load_dataset(plain, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetBuildError) as error:
        raise ConfigError(f"{name}: {expected}, found none that can be read: {error}") from error
    if isinstance(table, datasets.DatasetDict):
        raise ConfigError(f"{name}: expected one split, found {', '.join(table)}; name the directory of one of them")
    for number, value in enumerate(table, start=1):
        yield _Row(f"{name}:{number}", _without_nulls(value))


def _is_dataset_cached(name: str) -> bool:
    import datasets

    *owner, last = name.split("/")
    directory = "___".join([*owner, datasets.naming.camelcase_to_snakecase(last)])
    return Path(datasets.config.HF_DATASETS_CACHE, directory).is_dir()


def _without_nulls(value: Any) -> Any:
    # Arrow gives every row every field of the table; those a row did not have come back as None.
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part) for part in value]
    return value


def _parse(row: _Row) -> Conversation:
    value = row.value
    if not isinstance(value, dict):
        raise _BadRow("unreadable row", f"expected an object, a conversation a line, found {type(value).__name__}")
    raw = value.get("messages")
    if raw is None:
        raw = _from_sharegpt(value)
    if not isinstance(raw, list) or not raw:
        raise _BadRow("no messages", "expected `messages` or `conversations` with at least one turn")
    messages = [_message(item, number) for number, item in enumerate(raw, start=1)]
    _check_roles(messages)
    return Conversation(messages, _tools(value.get("tools")), row.source)


def _from_sharegpt(value: dict[str, Any]) -> list[Message] | None:
    raw = value.get("conversations")
    if not isinstance(raw, list):
        return None
    messages = []
    for number, item in enumerate(raw, start=1):
        if not isinstance(item, dict) or "from" not in item:
            expected = f"message {number} of `conversations`: expected from and value"
            raise _BadRow("unreadable row", f"{expected}, found {_spell_fields(item)}")
        role = SHAREGPT_ROLES.get(str(item["from"]))
        if role is None:
            raise _BadRow("wrong roles", f"expected one of {', '.join(SHAREGPT_ROLES)}, found {item['from']!r}")
        if item.get("value") is None:
            raise _no_content(number, "value", item)
        messages.append({"role": role, "content": item["value"]})
    system = value.get("system")
    if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _message(item: Any, number: int) -> Message:
    if not isinstance(item, dict) or not isinstance(item.get("role"), str):
        raise _BadRow("unreadable row", f"message {number}: expected role and content, found {_spell_fields(item)}")
    message = {name: value for name, value in item.items() if value is not None}
    has_more = message.get("tool_calls") or message.get("reasoning_content")
    if "content" not in message and not (message["role"] == "assistant" and has_more):
        # A misspelt name of the field would become an empty turn.
        raise _no_content(number, "content", item)
    message["content"] = _text(message.get("content", ""))
    return message


def _no_content(number: int, name: str, item: dict[str, Any]) -> _BadRow:
    if name in item:
        return _BadRow("no content", f"message {number}: expected text in {name}, found null")
    return _BadRow("no content", f"message {number}: expected {name}, found {_spell_fields(item)}")


def _spell_fields(item: Any) -> str:
    if not isinstance(item, dict):
        return f"no object but {type(item).__name__}"
    return f"the fields {', '.join(map(str, item))}" if item else "no fields"


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        return "".join(part["text"] for part in parts)
    raise _BadRow("content is not text", f"expected text, found {json.dumps(content)[:60]}")


def _tools(tools: Any) -> list[Any] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError as error:
            raise _BadRow("unreadable row", f"`tools` is not JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise _BadRow("unreadable row", f"expected a list in `tools`, found {type(tools).__name__}")
    return tools


def _check_roles(messages: list[Message]) -> None:
    before = "start"
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role not in MAY_FOLLOW[before]:
            expected = " or ".join(MAY_FOLLOW[before])
            raise _BadRow("wrong roles", f"message {number}: expected {expected} after {before}, found {role!r}")
        before = role


def _check_answers(messages: list[Message]) -> None:
    answers = [(number, m) for number, m in enumerate(messages, start=1) if m["role"] == "assistant"]
    if not answers:
        raise _BadRow("no assistant turn", "expected at least one assistant turn")
    for number, message in answers:
        if not message["content"].strip() and not message.get("tool_calls"):
            raise _BadRow("empty reply", f"message {number} is an empty reply")


def _check_prompt(messages: list[Message], *, need_answers: bool) -> None:
    """The last user turn says something; where answers are needed, turns behind the last one do not count."""
    last_role = "assistant" if need_answers else "user"
    end = max((number for number, m in enumerate(messages, start=1) if m["role"] == last_role), default=0)
    users = [(number, m) for number, m in enumerate(messages[:end], start=1) if m["role"] == "user"]
    if users and not users[-1][1]["content"].strip():
        raise _BadRow("blank prompt", f"message {users[-1][0]}: expected text in the last user turn, found a blank one")
