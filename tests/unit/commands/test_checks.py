"""Static checks of a run: what is read to evaluate on, and documents longer than a row."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from blockdraft import cli
from blockdraft.commands.checks import Checked, check, say_data
from blockdraft.config import ConfigError
from blockdraft.data.conversations import write_conversations
from integration.tiny_run import Files, make_files, tiny_config
from tiny_chat import chat

MISSPELT = json.dumps({"messages": [{"role": "user", "text": "hello"}]})


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("checks"))


def prompts(tmp_path: Path, num_good: int, num_bad: int) -> str:
    path = tmp_path / "mixed.jsonl"
    write_conversations(path, [chat(f"Count to {number}.") for number in range(num_good)])
    with path.open("a", encoding="utf-8") as file:
        file.writelines(MISSPELT + "\n" for _ in range(num_bad))
    return str(path)


def checked(files: Files, tmp_path: Path, source: str, **changes: Any) -> Checked:
    return check(tiny_config(files, tmp_path / "run", eval={"prompts": (source,), **changes}))


def said(found: Checked) -> list[str]:
    lines: list[str] = []
    say_data(found, lines.append)
    return [line for line in lines if not line.startswith(("data: ", "rows of the head: "))]


def test_rows_of_a_held_out_set_that_are_no_prompts_are_said(files: Files, tmp_path: Path):
    source = prompts(tmp_path, 30, 1)
    found = checked(files, tmp_path, source, num_prompts=64)
    assert len(found.held_out[0].prompts) == 30
    assert said(found) == [
        "held-out mixed: 30 of 31 rows used",
        "  1 no content",
        f"      {source}:31: message 1: expected content, found the fields role, text",
    ]
    # What lies behind the last prompt that is wanted is not read.
    assert said(checked(files, tmp_path, source, num_prompts=30)) == ["held-out mixed: 30 of 30 rows used"]


def test_a_held_out_set_that_is_mostly_no_prompts_is_refused(files: Files, tmp_path: Path):
    source = prompts(tmp_path, 1, 29)
    with pytest.raises(ConfigError) as caught:
        checked(files, tmp_path, source)
    first, *_, last = str(caught.value).splitlines()
    assert first == (f"eval.prompts {source}: expected at most 5.0% of the rows to be dropped, found 29 of 30 (96.7%):")
    # `train` has no --max-drop.
    assert last == "mend them, or take them out of the file"


@pytest.mark.parametrize(
    "more", [(), ("--no-reasoning", "--trust-remote-code")], ids=["plain", "without reasoning, with code"]
)
def test_documents_longer_than_a_row_come_with_the_command_that_cuts_them(
    files: Files, tmp_path: Path, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    answers = tmp_path / "all answers.jsonl"
    write_conversations(answers, [chat("Count.", f"{number}, " * 30) for number in range(3)] + [chat("Go.", "No.")])
    store = tmp_path / "store"
    assert cli.main(["prepare", str(answers), "--target", str(files.target), "--output", str(store), *more]) == 0
    config = tiny_config(files, tmp_path / "run", data={"train": str(store)})
    with pytest.raises(ConfigError, match=r"got 64; 3 of 4 documents are longer\. Cut them: `[^`]*`, which") as caught:
        check(config)
    command = shlex.split(str(caught.value).split("`")[1])
    assert command[0] == "blockdraft"
    assert cli.main(command[1:]) == 0
    assert "cut at 64 tokens: 3" in capsys.readouterr().out
    settings = check(config).store.manifest["settings"]
    assert (settings["reasoning"], settings["trust_remote_code"]) == (not more, bool(more))
