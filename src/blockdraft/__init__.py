"""blockdraft trains DFlash drafters online: target and drafter side by side in one process, one thread per GPU."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blockdraft.api import LoadedTarget, Reply, generate, load_drafter, load_target

__all__ = ["LoadedTarget", "Reply", "generate", "load_drafter", "load_target"]


def __getattr__(name: str) -> Any:
    # Loaded when first asked for, so that `blockdraft --help` does without torch.
    if name in __all__:
        return vars(importlib.import_module("blockdraft.api"))[name]
    raise AttributeError(f"module 'blockdraft' has no attribute {name!r}")
