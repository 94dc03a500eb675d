"""A point that several threads pass together, again and again."""

import threading
from collections.abc import Callable
from typing import Final

CHECK_SECONDS: Final = 0.05


class Meeting:
    """Lets `number` threads on when all of them have come.

    Why it exists: a collective's kernel on one GPU runs until the other GPUs' kernels have come. Many calls into CUDA
    wait until a GPU is idle (page-locked memory, a kernel's first load), some for every GPU of the process, and while
    they do nobody else's call gets through. A drafter that launches its collective early may so keep the others from
    ever launching theirs. Hence nobody launches before all are about to, and nobody goes on before all have.
    """

    def __init__(self, number: int, check: Callable[[], None]) -> None:
        """`check` raises when the run is ending; it is asked again and again by whoever waits."""
        self._number, self._check = number, check
        self._changed = threading.Condition()
        self._num_waiting, self._num_met = 0, 0

    def meet(self) -> None:
        """Returns when everybody has come here.

        Raises:
            Whatever `check` raises.
        """
        self._check()
        with self._changed:
            turn = self._num_met
            self._num_waiting += 1
            if self._num_waiting == self._number:
                self._num_waiting = 0
                self._num_met += 1
                self._changed.notify_all()
                return
            while self._num_met == turn:
                self._changed.wait(CHECK_SECONDS)
                if self._num_met == turn:
                    self._check()
