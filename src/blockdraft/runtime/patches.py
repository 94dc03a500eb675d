"""Attributes of other packages that are replaced for the length of a run, and put back."""

import logging
from typing import Any, NamedTuple

LOG = logging.getLogger(__name__)
MARK = "blockdraft_guard"
"""Attribute of each function that stands in for another; functools.wraps hands it on to whatever wraps it later."""


class Patch(NamedTuple):
    """One replaced attribute. `original` is the raw entry of the owner's dictionary, so descriptors survive."""

    owner: Any
    name: str
    was_there: bool
    original: Any
    replacement: Any


class Patches:
    """A list of replaced attributes, undone in reverse order."""

    def __init__(self) -> None:
        self._done: list[Patch] = []

    def replace(self, owner: Any, name: str, replacement: Any) -> None:
        """Set `owner.name`, keeping what stood there."""
        entries = vars(owner)
        self._done.append(Patch(owner, name, name in entries, entries.get(name), replacement))
        setattr(owner, name, replacement)

    def remove(self) -> None:
        """Put everything back. What somebody else has replaced since then is left alone, with a warning."""
        while self._done:
            patch = self._done.pop()
            if vars(patch.owner).get(patch.name) is not patch.replacement:
                LOG.warning("%s.%s was replaced after the guard; it is left as it is", patch.owner, patch.name)
            elif patch.was_there:
                setattr(patch.owner, patch.name, patch.original)
            else:
                delattr(patch.owner, patch.name)


def mark(function: Any) -> Any:
    """Mark a function as one of ours, so that a second install finds it."""
    function.__dict__[MARK] = True
    return function


def is_marked(owner: Any, name: str) -> bool:
    """Whether `owner.name` is one of ours, also when something has wrapped it since."""
    entry = vars(owner).get(name)
    return callable(entry) and MARK in vars(entry)
