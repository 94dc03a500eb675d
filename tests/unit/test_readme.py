"""What the documentation and the demo say can be typed: commands parse, links lead somewhere, names exist."""

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import blockdraft
from blockdraft.cli import VERBS, main
from blockdraft.config import RunConfig, to_json

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
INLINE = re.compile(r"`blockdraft ([^`\n]+)`")


class Command(NamedTuple):
    """One line that can be typed."""

    page: str
    words: list[str]

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"


def fenced_commands(page: Path) -> Iterator[Command]:
    """Lines of code blocks that start with `blockdraft`; a backslash continues a line."""
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language not in ("", "sh"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if "blockdraft " in line else []
            if words and words[0] == "blockdraft":
                yield Command(page.name, words)


def demo_commands(monkeypatch: pytest.MonkeyPatch, directory: Path) -> list[list[str]]:
    """What the demo would run."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None and spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    commands: list[list[str]] = []

    def record(command: list[str], *, check: bool) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(demo.subprocess, "run", record)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--runs-dir", str(directory), "--steps", "3"])
    demo.main()
    return commands


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Arguments that the verbs would have been run with; nothing runs."""
    found: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> int:
        found.append(arguments)
        return 0

    for verb in VERBS.values():
        monkeypatch.setattr(importlib.import_module(verb.module), "run", run)
    return found


def write_recipe(name: str) -> None:
    """Puts a recipe that a command names where the command looks for it."""
    file = Path(name.partition(":")[0])
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        file.write_text(to_json(RunConfig()), encoding="utf-8")
    elif file.suffix == ".py":
        blocks = [block for _, block in FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))]
        file.write_text(next(block for block in blocks if block.startswith(f"# {file.name}\n")), encoding="utf-8")


@pytest.mark.parametrize("command", [one for page in PAGES for one in fenced_commands(page)], ids=str)
def test_a_command_of_the_documentation_parses(
    command: Command, parsed: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    verb, *rest = command.words[1:]
    if verb == "train":
        write_recipe(rest[0])
    if "--help" in rest:
        with pytest.raises(SystemExit, match="0"):
            main([verb, *rest])
        return
    assert main([verb, *rest]) == 0
    assert verb.startswith("--") or len(parsed) == 1


def test_the_tour_names_every_verb() -> None:
    named = {command.words[1] for command in fenced_commands(ROOT / "README.md")}
    assert named >= set(VERBS)


def test_a_command_that_does_not_exist_is_found(parsed: list[tuple[Any, ...]]) -> None:
    with pytest.raises(SystemExit):
        main(["export", "runs/demo", "--outputs", "there"])
    assert main(["evalutae"]) != 0
    assert parsed == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_in_the_text_exist(page: Path) -> None:
    found = {words.split()[0] for words in INLINE.findall(page.read_text(encoding="utf-8"))}
    assert {verb for verb in found if not verb.startswith("-") and verb.islower()} <= set(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = [link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [target for target in targets if target and not (page.parent / target).exists()] == []


def test_python_of_the_readme_compiles_and_names_what_is_there() -> None:
    blocks = [
        block for language, block in FENCE.findall((ROOT / "README.md").read_text("utf-8")) if language == "python"
    ]
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "blockdraft":
                assert node.attr in blockdraft.__all__


def test_every_command_of_the_demo_parses(
    parsed: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = demo_commands(monkeypatch, tmp_path)
    verbs = {command[3] for command in commands if command[1] == "-m"}
    assert verbs == {"regenerate", "prepare", "train", "export", "evaluate", "report"}
    for executable, first, *rest in commands:
        assert executable == sys.executable
        if first == "-m":
            assert rest[0] == "blockdraft.cli"
            assert main(rest[1:]) == 0
        else:
            assert Path(first).is_file()
    assert len(parsed) == sum(command[1] == "-m" for command in commands)
