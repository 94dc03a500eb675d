"""`prepare`: rows to a store, everything else counted (cases 17, 27 and 33)."""

import json
from pathlib import Path
from typing import Any

import pytest

from blockdraft.commands.prepare import Options, run
from blockdraft.config import ConfigError
from blockdraft.data.conversations import write_conversations
from blockdraft.data.store import Store, open_store
from integration.tiny import CONFIGS
from tiny_chat import CHATML, REFUSING, THINKING, UNSTABLE, chat, reasoned, save_tokenizer

SHORT = [chat("q", f"answer {number}") for number in range(8)]


@pytest.fixture
def target(tmp_path: Path) -> str:
    return save_tokenizer(tmp_path / "target", CHATML)


def source(tmp_path: Path, *extra: str) -> str:
    path = tmp_path / "chat.jsonl"
    write_conversations(path, SHORT)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in extra)
    return str(path)


def prepared(tmp_path: Path, conversations: str, target: str, **options: Any) -> Store:
    output = tmp_path / "store"
    assert run(Options(conversations=(conversations,), target=target, output=output, **options)) == 0
    return open_store(output)


def test_a_store_with_its_manifest(tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]):
    store = prepared(tmp_path, source(tmp_path, "{"), target, max_drop=0.2)
    assert len(store) == 8
    manifest = store.manifest
    assert manifest["rows_read"] == 9
    assert manifest["drops"] == {"unreadable row": 1}
    assert manifest["drop_examples"]["unreadable row"][0].startswith(f"{tmp_path / 'chat.jsonl'}:9: ")
    assert manifest["tokens"] == int(store.lengths.sum())
    assert manifest["supervised_tokens"] == sum(int(store[i].loss_mask.sum()) for i in range(8))
    assert manifest["settings"]["max_length"] == 4096
    assert manifest["tokenizer"] == target
    assert len(manifest["tokenizer_hash"]) == len(manifest["template_hash"]) == 64
    printed = capsys.readouterr().out
    assert "8 documents of 9 rows" in printed
    assert "1 unreadable row" in printed


def test_too_many_drops_write_nothing(tmp_path: Path, target: str):
    with pytest.raises(ConfigError, match=r"at most 5\.0% of the rows to be dropped, found 1 of 9") as caught:
        prepared(tmp_path, source(tmp_path, "{"), target)
    assert "chat.jsonl:9" in str(caught.value)
    assert not (tmp_path / "store").exists()


def long_one(question: str, answer: str) -> str:
    return json.dumps({"messages": chat(question, answer).messages})


def test_long_documents_are_cut_where_something_remains_to_learn(tmp_path: Path, target: str):
    path = source(tmp_path, long_one("q", "a" * 200), long_one("q" * 200, "a"))
    store = prepared(tmp_path, path, target, max_length=64, max_drop=0.5)
    assert store.manifest["documents"] == 9
    assert store.manifest["cut"] == 1
    assert store.manifest["drops"] == {"over-long": 1}
    assert "chat.jsonl:10: " in store.manifest["drop_examples"]["over-long"][0]
    assert int(store.lengths.max()) == 64
    assert store[8].loss_mask[-1] == 1


def test_long_documents_are_dropped_on_request(tmp_path: Path, target: str):
    path = source(tmp_path, long_one("q", "a" * 200), long_one("q" * 200, "a"))
    store = prepared(tmp_path, path, target, max_length=64, max_drop=0.5, long="drop")
    assert store.manifest["documents"] == 8
    assert store.manifest["cut"] == 0
    assert store.manifest["drops"] == {"over-long": 2}


def test_a_cut_between_the_first_two_tokens_of_an_answer_leaves_no_pair(tmp_path: Path, target: str):
    first = int(prepared(tmp_path, source(tmp_path), target)[0].loss_mask.argmax())
    options = {"max_drop": 1.0, "conversations": source(tmp_path), "target": target}
    with pytest.raises(ConfigError, match="at least one document"):
        prepared(tmp_path, max_length=first + 1, **options)
    assert len(prepared(tmp_path, max_length=first + 2, **options)) > 0


def test_an_unstable_template_stops_the_command(tmp_path: Path):
    target = save_tokenizer(tmp_path / "target", UNSTABLE)
    with pytest.raises(ConfigError, match=r"chat\.jsonl:1: the chat template of .*target has no stable prefix"):
        prepared(tmp_path, source(tmp_path), target, max_drop=1.0)
    assert not (tmp_path / "store").exists()


def test_rows_the_template_refuses_are_counted(tmp_path: Path):
    target = save_tokenizer(tmp_path / "target", REFUSING)
    row = {"messages": [{"role": "system", "content": "s"}, *chat("q", "a").messages]}
    store = prepared(tmp_path, source(tmp_path, json.dumps(row)), target, max_drop=0.2)
    assert store.manifest["drops"] == {"refused by the chat template": 1}
    assert "no system turn" in store.manifest["drop_examples"]["refused by the chat template"][0]


def test_reasoning_can_be_left_out_and_what_the_template_drops_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    target = save_tokenizer(tmp_path / "target", THINKING)
    path = tmp_path / "chat.jsonl"
    write_conversations(path, [chat("q", reasoned("a", "long reasoning"), "q2", reasoned("a2", "r2"))])
    kept = prepared(tmp_path, str(path), target)
    assert kept.manifest["unrendered_reasoning"] == 1
    assert "reasoning the chat template leaves out: 1" in capsys.readouterr().out
    num_kept = int(kept[0].loss_mask.sum())
    bare = prepared(tmp_path, str(path), target, reasoning=False)
    assert num_kept - int(bare[0].loss_mask.sum()) == len("\nr2\n\n\n") + 2


@pytest.mark.parametrize("family", ["qwen3", "llama", None])
def test_a_directory_without_a_tokenizer_is_named_with_the_files_that_belong_there(tmp_path: Path, family: str | None):
    # Of a qwen3 config alone transformers makes a tokenizer of one token; of llama's, and of nothing, none.
    (tmp_path / "target").mkdir()
    if family is not None:
        CONFIGS[family]().save_pretrained(tmp_path / "target")
        (tmp_path / "target" / "chat_template.jinja").write_text(CHATML)
    expected = (
        rf"^{tmp_path}/target: expected .*tokenizer\.json.*, found no file with a vocabulary; copy these files from"
    )
    with pytest.raises(ConfigError, match=expected):
        prepared(tmp_path, source(tmp_path), str(tmp_path / "target"))


def test_a_tokenizer_that_is_cut_is_told_from_one_that_is_missing(tmp_path: Path, target: str):
    (Path(target) / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="expected a target with a tokenizer, found none that can be read: Expecting"):
        prepared(tmp_path, source(tmp_path), target)


def test_options_out_of_range(tmp_path: Path, target: str):
    with pytest.raises(ConfigError, match="--max-drop: expected a share between 0 and 1, found 5"):
        prepared(tmp_path, source(tmp_path), target, max_drop=5)
    with pytest.raises(ConfigError, match="--max-length: expected at least 2"):
        prepared(tmp_path, source(tmp_path), target, max_length=1)
    with pytest.raises(ConfigError, match="expected at least one file"):
        run(Options(conversations=(), target=target, output=tmp_path / "store"))
