"""Writes one HTML page about a run: curves, speed, memory, a timeline of workers, settings, machine and data.

The page needs no network and no other file. What a run did not record is said where it would stand.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from tyro.conf import Positional

from blockdraft.config import ConfigError

TIMELINE = "timeline.json"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to report, and where to."""

    run: Annotated[Path, Positional]
    """Run directory that `blockdraft train` writes; the run may still go on."""
    output: Path | None = None
    """HTML file; RUN/report.html when not given."""


class RunFiles(NamedTuple):
    """What a run directory holds; what is missing is empty."""

    name: str
    config: dict[str, Any]
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    """Lines of metrics.jsonl of optimizer steps."""
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    """Lines of workers.jsonl."""
    timeline: dict[str, Any]
    unreadable: list[str]
    """Lines that could not be read, as FILE:LINE."""


def run(options: Options) -> int:
    """Writes the page and says where.

    Raises:
        ConfigError: no run in that directory, or a page that cannot be written.
    """
    from blockdraft.commands.report_page import page

    output = options.output if options.output is not None else options.run / "report.html"
    text = page(read_run(options.run))
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {output}: cannot be written ({error.strerror}); choose another place") from error
    sys.stdout.write(f"written: {output} ({len(text) / 1024:,.0f} KiB)\n")
    return 0


def read_run(directory: Path) -> RunFiles:
    """Everything that a report shows.

    Raises:
        ConfigError: the directory holds no run, or its config.json is no JSON.
    """
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{directory}: expected a run directory with a config.json, found none; give the --run-dir of "
            "`blockdraft train`"
        )
    unreadable: list[str] = []
    lines = _read_lines(directory / "metrics.jsonl", unreadable)
    return RunFiles(
        name=str(directory),
        config=_read_object(directory / "config.json"),
        environment=_read_object(directory / "environment.json"),
        steps=[line for line in lines if "loss" in line],
        evaluations=[line for line in lines if "eval_seconds" in line],
        samples=_read_lines(directory / "workers.jsonl", unreadable),
        timeline=_read_object(directory / TIMELINE),
        unreadable=unreadable,
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON, found {error}; remove the file to leave it out") from error
    return values


def _read_lines(path: Path, unreadable: list[str]) -> list[dict[str, Any]]:
    """Objects of a file with one a line; the last line may be half-written while the run goes on."""
    found = []
    if not path.is_file():
        return []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            values["step"] = int(values["step"])
        except (ValueError, KeyError, TypeError):
            unreadable.append(f"{path.name}:{number}")
            continue
        found.append(values)
    return found
