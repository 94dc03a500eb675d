"""Keeps a target's forward from asking its GPU whether the rows are packed.

transformers (5.17, `masking_utils.find_packed_sequence_indices`) looks in every forward without a cache whether
position ids restart inside a row, and reads the answer back from the device: the thread waits until its whole queue is
done. Here a row of a target batch is one document, so the answer is known.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import transformers.masking_utils

NAME = "find_packed_sequence_indices"
MARK = "blockdraft_one_document_a_row"


class _Here(threading.local):
    """Whether this thread's rows are known to be one document each."""

    def __init__(self) -> None:
        self.known = False


HERE = _Here()


def skip_packed_check() -> None:
    """Puts the check under `one_document_a_row`; what runs outside of that is left as it is. Safe to call again."""
    original: Any = vars(transformers.masking_utils).get(NAME)
    if original is None or MARK in vars(original):
        # A transformers without the check waits for nothing.
        return

    @functools.wraps(original)
    def find(*args: Any, **kwargs: Any) -> Any:
        return None if HERE.known else original(*args, **kwargs)

    vars(find)[MARK] = True
    setattr(transformers.masking_utils, NAME, find)


@contextlib.contextmanager
def one_document_a_row() -> Iterator[None]:
    """Inside, in this thread: no row holds a second document."""
    before, HERE.known = HERE.known, True
    try:
        yield
    finally:
        HERE.known = before
