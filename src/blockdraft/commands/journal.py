"""The answers of `regenerate` so far: OUTPUT.partial while it runs, OUTPUT and its summary at the end."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from blockdraft.config import ConfigError
from blockdraft.data.locks import try_lock

if TYPE_CHECKING:
    from blockdraft.data.conversations import Conversation
    from blockdraft.decoding.engine import EngineAnswer


class Journal:
    """The answers so far, in OUTPUT.partial: a line with the settings, then a line an answer; used as a context."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.output = output
        self.done: dict[int, EngineAnswer] = {}
        self.message = ""
        self._settings = settings
        self._partial = output.with_name(output.name + ".partial")
        self._summary = output.with_name(output.name + ".summary.json")
        self._file: TextIO | None = None

    def is_complete(self) -> bool:
        """True if the output is there, was made with these settings, and no prompt was left unanswered.

        Raises:
            ConfigError: the output is there but was made otherwise.
        """
        if not self.output.exists():
            return False
        try:
            found = json.loads(self._summary.read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.output}: expected no file, or one written by this command, found one without a readable "
                f"{self._summary.name}; choose another --output or remove it"
            ) from error
        _check_equal(self.output, found, self._settings)
        # What is left of it are the answers so far; the prompts without one are asked again.
        return not self._partial.exists()

    def __enter__(self) -> "Journal":
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open_alone()
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def _read(self) -> None:
        assert self._file is not None
        lines = self._partial.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            self.message = f"{self._partial}: the last line, {len(lines[-1])} bytes, was half-written; cut"
            with self._partial.open("r+b") as file:
                file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
        if len(lines) == 1 and lines[0].startswith(b'{"settings": '):
            # No answer yet, so nothing to lose: the settings may be others by now.
            self._file.truncate(0)
            lines = []
        if lines:
            self._resume(lines)
        else:
            self._write({"settings": self._settings})

    def _open_alone(self) -> TextIO:
        """The partial file, locked until it is closed.

        Raises:
            ConfigError: another command writes there.
        """
        file = self._partial.open("a", encoding="utf-8")
        if try_lock(file):
            return file
        file.close()
        raise ConfigError(
            f"{self._partial}: another command is writing there; wait for its end, or choose another --output"
        )

    def __exit__(self, *_error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, answer: "EngineAnswer") -> None:
        """Records one answer, on disk when this returns."""
        self._write(answer._asdict())
        self.done[answer.row] = answer

    def describe_stop(self, num_prompts: int) -> str:
        """What a command that was stopped has, and how it goes on."""
        if not self.done:
            return "stopped before the first answer: nothing to keep; the same command begins again"
        return (
            f"stopped after {len(self.done):,} of {num_prompts:,} answers, which are kept in {self._partial}; the same "
            "command goes on from there"
        )

    def complete(
        self, conversations: "Iterable[Conversation]", counts: dict[str, int], *, is_whole: bool = True
    ) -> None:
        """Writes the output and its summary; removes the partial file, if every prompt was answered (`is_whole`)."""
        from blockdraft.data.conversations import write_conversations

        side = self.output.with_name(self.output.name + ".writing")
        write_conversations(side, conversations)
        summary = {"settings": self._settings, "counts": counts}
        self._summary.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
        side.rename(self.output)
        if is_whole:
            self._partial.unlink()

    def _resume(self, lines: list[bytes]) -> None:
        from blockdraft.decoding.engine import EngineAnswer

        try:
            found = json.loads(lines[0])["settings"]
            _check_equal(self._partial, found, self._settings)
            for line in lines[1:]:
                answer = EngineAnswer(**json.loads(line))
                self.done[answer.row] = answer
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{self._partial}, line {len(self.done) + 2}: expected an answer of an earlier run, found: {error}; "
                "remove the file to start again"
            ) from error
        resumed = f"{self._partial}: going on after {len(self.done):,} answers"
        self.message = f"{self.message}\n{resumed}" if self.message else resumed

    def _write(self, value: dict[str, Any]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(value, ensure_ascii=False) + "\n")
        self._file.flush()


def _check_equal(path: Path, found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        other = found.get(name)
        if other != value:
            raise ConfigError(
                f"{path}: holds answers made with other settings: expected {name} {value!r}, found {other!r}; "
                "repeat those settings, choose another --output, or remove the file"
            )
