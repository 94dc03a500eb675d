"""Ctrl-C and SIGTERM, heard from the command's first moment on. Nothing here imports torch.

Before there is a step to finish, the first one ends the command with exit code 0: nothing is lost. Later it asks the
run to finish its step and save. A second one leaves at once.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Final

EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT, as shells have it."""
EARLY_STOP: Final = (
    "stopped before the first step: nothing was trained, nothing to save; start again as before, with --resume auto "
    "if there are checkpoints"
)

EARLY_STOP_ANSWERING: Final = (
    "stopped before the first new answer: nothing was added; the same command begins again, or goes on where an "
    "earlier one stopped"
)


class StopRequested(BaseException):
    """A stop was asked for while there was nothing to finish. No error: nothing that catches errors may catch it."""


class Stops:
    """Counts what it hears, and passes the first one on."""

    def __init__(self) -> None:
        self.count = 0
        self.ask: Callable[[], None] | None = None
        """What a run that has something to finish is told; None before there is one."""
        self._is_listening = False

    @contextlib.contextmanager
    def listen(self) -> Iterator[None]:
        """Installs the handlers, if this is the main thread and they are not installed yet."""
        if self._is_listening or threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_listening = True
        before = [(number, signal.signal(number, self._heard)) for number in (signal.SIGINT, signal.SIGTERM)]
        try:
            yield
        finally:
            self._is_listening = False
            for number, handler in before:
                signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """For what must not be broken off, such as a write: one that is heard inside is counted, and raises nothing."""
        self.ask = _nothing
        yield
        # Not after an error: no stop has caused that, and it is to be seen.
        self.ask = None

    def check(self) -> None:
        """Raises StopRequested if one was heard: an import or a callback may have swallowed the first one."""
        if self.count:
            raise StopRequested

    def _heard(self, _signal: int, _frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        if self.ask is None:
            raise StopRequested
        # Nothing is printed here: a signal may arrive while the main thread is inside a write.
        self.ask()


def _nothing() -> None:
    """Counted is enough."""
