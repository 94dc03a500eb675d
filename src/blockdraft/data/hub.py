"""Names that stand for a directory here or for a repository of the hub: which of both, told before anything waits.

The hub's client tries for 23 s before it says that nobody answers; whoever mistypes a path should not wait for that.
"""

import difflib
import re
from collections.abc import Callable
from pathlib import Path

from blockdraft.config import ConfigError

ANSWER_SECONDS = 5.0


def only_cached(name: str, expected: str, is_cached: Callable[[str], bool]) -> bool:
    """Whether a name is to be read from the hub's cache alone, since the hub does not answer and the cache has it.

    `expected`: the flag and what may stand there, for messages.

    Raises:
        ConfigError: nothing is there and no repository can be called so; or the hub does not answer, and its cache
            does not have it.
    """
    if Path(name).exists():
        return False
    if not may_be_repository(name):
        raise ConfigError(f"{expected}, found nothing at {name!r}: {nearest(name)}")
    problem = _hub_problem()
    if problem and not is_cached(name):
        raise ConfigError(
            f"{expected}, found no {name!r} here ({nearest(name)}) nor in the hub's cache, and {problem}; "
            "where that is the name of a repository, check the connection"
        )
    return bool(problem)


def may_be_repository(name: str) -> bool:
    """Whether a hub could have a repository of that name: `name` or `owner/name`. Its client knows more rules."""
    parts = name.split("/")
    return len(parts) <= 2 and all(re.fullmatch(r"\w[\w.-]*", part, re.ASCII) for part in parts)


def is_model_cached(name: str) -> bool:
    """Whether the hub's cache has a model's config."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def nearest(name: str) -> str:
    """How much of a path exists, and what there is spelled like the rest."""
    if name.startswith("~"):
        return "nothing has put your home directory in the place of ~, write it in full"
    path = Path(name).resolve()
    there = next(parent for parent in path.parents if parent.is_dir())
    missing = path.relative_to(there).parts[0]
    try:
        names = [entry.name for entry in there.iterdir()]
    except PermissionError:
        names = []
    similar = difflib.get_close_matches(missing, names, n=1)
    asked = f", did you mean {similar[0]}?" if similar else "; check the path"
    return f"{there} exists and has no {missing}{asked}"


def _hub_problem() -> str:
    """Why the hub cannot be asked; empty where it can."""
    import httpx
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        # Whatever it answers is an answer; the session has the user's proxies and certificates.
        get_session().head(constants.ENDPOINT, timeout=ANSWER_SECONDS)
    except httpx.TransportError as error:
        return f"the hub ({constants.ENDPOINT}) does not answer: {str(error) or type(error).__name__}"
    return ""
