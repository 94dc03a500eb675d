"""Promises about the tree itself: line budgets, words that stay out, and a command line that starts without torch."""

import ast
import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockdraft.config import RunConfig

ROOT = Path(__file__).parents[2]
SOURCE = sorted((ROOT / "src" / "blockdraft").rglob("*.py"))
ALL_PYTHON = SOURCE + sorted(path for top in ("tests", "examples", "benchmarks") for path in (ROOT / top).rglob("*.py"))
MAY_READ_ENVIRONMENT = ("cli.py", "runtime/distributed.py")


def test_no_file_is_longer_than_400_lines() -> None:
    lengths = {name(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL_PYTHON}
    assert lengths, "found no Python files"
    assert {path: length for path, length in lengths.items() if length > 400} == {}


def test_no_function_is_longer_than_60_lines() -> None:
    lengths = {
        f"{name(path)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for path in ALL_PYTHON
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    }
    assert {function: length for function, length in lengths.items() if length > 60} == {}


def test_a_run_has_at_most_60_config_fields() -> None:
    assert count_fields(RunConfig) <= 60


@pytest.mark.parametrize("path", SOURCE, ids=lambda path: name(path))
def test_the_package_keeps_to_its_rules(path: Path) -> None:
    assert list(broken_rules(path, tree(path))) == []


def test_the_rules_find_what_they_forbid() -> None:
    code = """
getattr(x, "name", None)
hasattr(x, "name")
print(x)
os.environ["HOME"]
os.getenv("HOME")
checkpoint(f, use_reentrant=True)
"""
    found = list(broken_rules(Path("models/x.py"), ast.parse(code)))
    assert sorted(rule.split(": ")[0] for rule in found) == [f"models/x.py:{line}" for line in range(2, 8)]


def test_help_answers_without_torch() -> None:
    code = (
        "import sys; from blockdraft.cli import main; main(sys.argv[1:]); print('heavy:', *{heavy} & set(sys.modules))"
    )
    code = code.replace("{heavy}", "{'torch', 'transformers', 'datasets', 'numpy'}")
    for arguments in ([], ["--help"], ["train", "--help"]):
        # -c puts the working directory on the path: the package needs no installation.
        command = [sys.executable, "-c", code, *arguments]
        run = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=True)
        assert run.stdout.startswith("usage: blockdraft")
        assert run.stdout.splitlines()[-1] == "heavy:"


def test_files_that_the_makefile_names_exist() -> None:
    named = re.findall(r"(?:benchmarks|examples|tests)/[\w./]+", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert "examples/demo.py" in named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_constraints_hold_names_and_versions_only() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_absolute() else str(path)


def count_fields(config: type) -> int:
    """Values a user can set; a nested config counts as what it holds."""
    count = 0
    for field in dataclasses.fields(config):
        is_nested = isinstance(field.type, type) and dataclasses.is_dataclass(field.type)
        count += count_fields(field.type) if is_nested else 1
    return count


def broken_rules(path: Path, module: ast.Module) -> Iterator[str]:
    """One line for each call or name that stays out of the package."""
    reads_environment = str(path).endswith(MAY_READ_ENVIRONMENT)
    for node in ast.walk(module):
        where = f"{name(path)}:{node.lineno}" if isinstance(node, ast.expr) else ""
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, _, _]):
                yield f"{where}: getattr with a default hides a wrong name"
            case ast.Call(func=ast.Name(id="hasattr")):
                yield f"{where}: hasattr hides a wrong name"
            case ast.Call(func=ast.Name(id="print")):
                yield f"{where}: print; write to sys.stdout or by tqdm.write"
            case ast.Call(keywords=keywords) if any(is_reentrant(keyword) for keyword in keywords):
                yield f"{where}: use_reentrant=True runs its own autograd inside backward"
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "getenv") if not reads_environment:
                yield f"{where}: only {' and '.join(MAY_READ_ENVIRONMENT)} read the environment"


def is_reentrant(keyword: ast.keyword) -> bool:
    return keyword.arg == "use_reentrant" and not (
        isinstance(keyword.value, ast.Constant) and keyword.value.value is False
    )
