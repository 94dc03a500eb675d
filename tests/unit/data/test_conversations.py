"""Reading conversations: every row comes out or is counted (case 27)."""

import datetime
import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from blockdraft.config import ConfigError
from blockdraft.data.conversations import Conversation, Drops, read_conversations, write_conversations
from tiny_chat import chat

GOOD = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def write_lines(path: Path, *lines: Any) -> str:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines), encoding="utf-8")
    return str(path)


def read(name: str, *, need_answers: bool = True) -> tuple[list[Conversation], Drops]:
    drops = Drops()
    return list(read_conversations(name, drops, need_answers=need_answers)), drops


def test_messages_with_reasoning_tools_and_calls(tmp_path: Path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": "!"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r"},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "a"},
    ]
    path = write_lines(tmp_path / "a.jsonl", {"messages": messages, "tools": json.dumps([{"name": "f"}])})
    (conversation,), drops = read(path)
    assert drops.num_dropped == 0
    assert conversation.tools == [{"name": "f"}]
    assert conversation.source == f"{path}:1"
    assert [m["content"] for m in conversation.messages] == ["s", "q!", "", "42", "a"]
    assert conversation.messages[2]["reasoning_content"] == "r"
    assert conversation.messages[2]["tool_calls"] == [call]


def test_sharegpt(tmp_path: Path):
    turns = [("human", "q"), ("gpt", "a"), ("human", "q2"), ("gpt", "a2")]
    row = {"system": "s", "conversations": [{"from": role, "value": text} for role, text in turns]}
    (conversation,), _ = read(write_lines(tmp_path / "a.jsonl", row))
    roles = [m["role"] for m in conversation.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in conversation.messages] == ["s", "q", "a", "q2", "a2"]


def with_roles(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": f"{number}"} for number, role in enumerate(roles)]}


BAD = [
    ("unreadable row", '{"messages": ['),
    ("unreadable row", [1, 2]),
    ("unreadable row", {"messages": ["hello"]}),
    ("unreadable row", {"messages": [{"content": "q"}]}),
    ("unreadable row", {"messages": GOOD, "tools": "{not json"}),
    ("unreadable row", {"conversations": [{"role": "user"}]}),
    ("no messages", {}),
    ("no messages", {"messages": []}),
    ("wrong roles", with_roles("assistant", "user")),
    ("wrong roles", with_roles("user", "assistant", "assistant")),
    ("wrong roles", with_roles("user", "system", "assistant")),
    ("wrong roles", with_roles("user", "bot")),
    ("wrong roles", with_roles("user", "tool")),
    ("wrong roles", {"conversations": [{"from": "human", "value": "q"}, {"from": "parrot", "value": "a"}]}),
    ("content is not text", {"messages": [{"role": "user", "content": [{"type": "image"}]}, GOOD[1]]}),
    ("content is not text", {"messages": [{"role": "user", "content": 3}, GOOD[1]]}),
    ("empty reply", {"messages": [GOOD[0], {"role": "assistant", "content": " \n"}]}),
    ("empty reply", {"messages": [GOOD[0], {"role": "assistant", "reasoning_content": "r"}]}),
    ("no assistant turn", with_roles("user")),
    ("no content", {"messages": [{"role": "user", "text": "q"}, GOOD[1]]}),
    ("no content", {"messages": [{"role": "user", "content": None}, GOOD[1]]}),
    ("no content", {"messages": [GOOD[0], {"role": "assistant", "tool_calls": []}]}),
    ("no content", {"messages": [{"role": "user", "reasoning_content": "r"}, GOOD[1]]}),
    ("no content", {"conversations": [{"from": "human", "text": "q"}, {"from": "gpt", "value": "a"}]}),
    ("blank prompt", {"messages": [{"role": "user", "content": " \n"}, GOOD[1]]}),
    ("blank prompt", {"messages": [{"role": "user", "content": []}, GOOD[1]]}),
    ("blank prompt", {"conversations": [{"from": "human", "value": ""}, {"from": "gpt", "value": "a"}]}),
    ("blank prompt", {"messages": [*GOOD, {"role": "user", "content": ""}, GOOD[1]]}),
]


@pytest.mark.parametrize(("reason", "row"), BAD)
def test_a_bad_row_is_counted_by_reason_with_file_and_line(tmp_path: Path, reason: str, row: Any):
    path = write_lines(tmp_path / "a.jsonl", {"messages": GOOD}, "", row)
    conversations, drops = read(path)
    assert len(conversations) == 1
    assert (drops.num_rows, dict(drops.counts)) == (2, {reason: 1})
    assert drops.examples[reason][0].startswith(f"{path}:3: ")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [{"role": "user", "text": "q"}]}, "message 1: expected content, found the fields role, text"),
        (
            {"messages": [GOOD[0], GOOD[1], {"role": "user", "content": None}]},
            "message 3: expected text in content, found null",
        ),
        (
            {"messages": [{"from": "human", "value": "q"}]},
            "message 1: expected role and content, found the fields from, value",
        ),
        ({"messages": ["q"]}, "message 1: expected role and content, found no object but str"),
        (
            {"conversations": [{"from": "human", "text": "q"}]},
            "message 1: expected value, found the fields from, text",
        ),
        (
            {"conversations": [{"role": "user", "content": "q"}]},
            "message 1 of `conversations`: expected from and value, found the fields role, content",
        ),
        (
            {"messages": [*GOOD, {"role": "user", "content": "\t"}]},
            "message 3: expected text in the last user turn, found a blank one",
        ),
    ],
)
def test_a_turn_without_text_is_said_with_what_was_found(tmp_path: Path, row: Any, said: str):
    # The same where rows are prompts only: nothing is asked with an empty turn.
    path = write_lines(tmp_path / "a.jsonl", row)
    conversations, drops = read(path, need_answers=False)
    assert conversations == []
    assert list(drops.examples.values()) == [[f"{path}:1: {said}"]]


def test_blank_turns_that_nothing_is_asked_with(tmp_path: Path):
    blank = {"role": "user", "content": ""}
    rows = [
        # A user turn further up was answered as it stands; a system turn and a tool's result may be empty.
        {"messages": [{"role": "system", "content": ""}, blank, *GOOD[1:], *GOOD]},
        {"messages": [GOOD[0], {**GOOD[1], "tool_calls": [{}]}, {"role": "tool", "content": ""}, GOOD[1]]},
        # Behind the last answer: `prepare` leaves it out.
        {"messages": [*GOOD, blank]},
    ]
    path = write_lines(tmp_path / "a.jsonl", *rows)
    assert len(read(path)[0]) == 3
    conversations, drops = read(path, need_answers=False)
    assert (len(conversations), dict(drops.counts)) == (2, {"blank prompt": 1})


def test_bytes_that_are_no_text_are_one_bad_row(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"messages": "\xff"}\n' + json.dumps({"messages": GOOD}).encode() + b"\n")
    conversations, drops = read(str(path))
    assert (len(conversations), dict(drops.counts)) == (1, {"unreadable row": 1})


@pytest.mark.parametrize("line", ["1" * 5000, "[" * 100_000], ids=["a number of 5,000 digits", "100,000 brackets"])
def test_json_that_nobody_reads_is_one_bad_row(tmp_path: Path, line: str):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": GOOD}) + "\n" + line + "\n")
    conversations, drops = read(str(path))
    assert (len(conversations), dict(drops.counts)) == (1, {"unreadable row": 1})
    assert drops.examples["unreadable row"][0].startswith(f"{path}:2: not JSON: ")


def test_utf_16_is_said(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    for coding in ("utf-16", "utf-16-be"):
        mark = "" if coding == "utf-16" else "\ufeff"
        path.write_bytes((mark + json.dumps({"messages": GOOD}) + "\n").encode(coding))
        with pytest.raises(ConfigError, match=r"a\.jsonl: expected UTF-8, found UTF-16; convert it: iconv"):
            read(str(path))


def test_half_a_character_is_one_bad_row(tmp_path: Path):
    # Valid JSON, and no text: it could be neither tokenized nor written again.
    whole = [{"role": "user", "content": "\U0001f642"}, GOOD[1]]
    half = [{"role": "user", "content": "\ud83d"}, GOOD[1]]
    path = write_lines(tmp_path / "a.jsonl", {"messages": whole}, {"messages": half}, {"messages": GOOD})
    conversations, drops = read(path)
    assert [c.messages for c in conversations] == [whole, GOOD]
    assert dict(drops.counts) == {"unreadable row": 1}
    assert drops.examples["unreadable row"][0].startswith(f"{path}:2: half a character: ")


def test_duplicates_are_dropped_over_all_sources(tmp_path: Path):
    drops = Drops()
    for name in ("a.jsonl", "b.jsonl"):
        path = write_lines(tmp_path / name, {"messages": GOOD}, {"messages": GOOD, "id": 7})
        list(read_conversations(path, drops))
    assert dict(drops.counts) == {"duplicate": 3}
    assert drops.examples["duplicate"][1:] == [f"{tmp_path / 'b.jsonl'}:1: duplicate", f"{path}:2: duplicate"]


def test_prompts_need_no_answers(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", with_roles("user"))
    assert len(read(path, need_answers=False)[0]) == 1


def test_too_many_drops_are_an_error_that_lists_them(tmp_path: Path):
    path = write_lines(tmp_path / "a.jsonl", {"messages": GOOD}, "{", "[]", *[with_roles("user", "bot")] * 5)
    drops = Drops(max_share=0.9, num_examples=2)
    list(read_conversations(path, drops))
    drops.check()
    drops.max_share = 0.5
    with pytest.raises(ConfigError, match=r"at most 50\.0% .* found 7 of 8 \(87\.5%\)") as caught:
        drops.check()
    assert f"{path}:2: not JSON" in str(caught.value)
    assert str(caught.value).count("found 'bot'") == 2
    with pytest.raises(ConfigError, match="no rows"):
        Drops().check()


def test_parquet_and_dataset_directories(tmp_path: Path):
    with_tool = [GOOD[0], {**GOOD[1], "reasoning_content": "r"}]
    table = datasets.Dataset.from_list([{"messages": GOOD}, {"messages": with_tool}, {"messages": []}])
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    for name in (str(tmp_path / "a.parquet"), str(tmp_path / "saved")):
        conversations, drops = read(name)
        assert [c.messages for c in conversations] == [GOOD, with_tool]
        assert drops.examples["no messages"][0].startswith(f"{name}:3: ")


def test_fields_that_json_lacks_do_not_stop_the_reading(tmp_path: Path):
    timed = [{**message, "at": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)} for message in GOOD]
    datasets.Dataset.from_list([{"messages": timed}]).to_parquet(tmp_path / "a.parquet")
    conversations, drops = read(str(tmp_path / "a.parquet"))
    assert (len(conversations), drops.num_dropped) == (1, 0)
    write_conversations(tmp_path / "b.jsonl", conversations)
    assert [m["content"] for m in read(str(tmp_path / "b.jsonl"))[0][0].messages] == ["q", "a"]


def test_a_directory_of_files_is_read_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train.jsonl", {"messages": GOOD})
    assert [c.messages for c in read(str(tmp_path / "data"))[0]] == [GOOD]


def test_a_directory_of_other_files_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "target").mkdir()
    write_lines(tmp_path / "target" / "a.jsonl", {"hidden_size": 4})
    write_lines(tmp_path / "target" / "b.jsonl", {"added_tokens": ["x"]})
    with pytest.raises(ConfigError, match=r"target: expected a \.jsonl or .*, found none that can be read: "):
        read(str(tmp_path / "target"))


def test_sources_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="expected a file, found nothing"):
        read(str(tmp_path / "none.jsonl"))
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match=r"\.jsonl or \.parquet file, found '\.csv'"):
        read(str(tmp_path / "a.csv"))
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(ConfigError, match="expected a parquet file"):
        read(str(tmp_path / "a.parquet"))
    datasets.DatasetDict({"a": datasets.Dataset.from_list([{"messages": GOOD}])}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match="expected one split, found a"):
        read(str(tmp_path / "splits"))

    def missing(path: str, split: str) -> None:
        raise FileNotFoundError(f"no {path} {split}")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    # In the cache of `datasets`, so that it is left to find the data by itself where no hub answers.
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    (tmp_path / "some___name").mkdir()
    with pytest.raises(ConfigError, match=r"a dataset name .*no some/name test"):
        read("some/name:test")


def test_what_is_written_is_read_back(tmp_path: Path):
    conversations = [chat("q é", "a\n"), chat("q2", "a2", tools=[{"name": "f"}])]
    assert write_conversations(tmp_path / "a.jsonl", conversations) == 2
    found, _ = read(str(tmp_path / "a.jsonl"))
    assert [c[:2] for c in found] == [c[:2] for c in conversations]
