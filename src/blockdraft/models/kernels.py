"""Which kernels a target on a CPU runs: transformers' own torch path, whatever else is installed.

transformers (5.17, `integrations/hub_kernels.py`) binds the kernels of recurrent layers when a model's module is
imported: with flash-linear-attention installed, the Gated-DeltaNet layers of Qwen3-Next and Qwen3.5 call its Triton
kernels on every device, and on a CPU those die with "0 active drivers". The bound function keeps the torch function it
stands for in `__wrapped__`; here it is replaced, in the module that calls it, by one that looks at its first argument:
CPU tensors go to the torch function, all others where they went before. So the choice is made per call, and a target
on a GPU in the same process is not touched.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

BINDS = "transformers.integrations.hub_kernels"
"""Module whose functions stand for torch functions."""


def use_torch_on_cpu(model: nn.Module) -> list[str]:
    """Routes the CPU calls of every bound kernel that the model's classes use; returns the names of those replaced.

    Calling it again changes nothing.
    """
    return [name for module in _modules_of(model) for name in _replace_in(module)]


def _modules_of(model: nn.Module) -> list[ModuleType]:
    names = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


def _replace_in(module: ModuleType) -> list[str]:
    replaced = []
    for name, value in list(vars(module).items()):
        if isinstance(value, FunctionType) and value.__globals__["__name__"] == BINDS and "__wrapped__" in vars(value):
            setattr(module, name, _by_device(value, vars(value)["__wrapped__"]))
            replaced.append(name)
    return replaced


def _by_device(bound: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    known = frozenset(inspect.signature(plain).parameters)

    @functools.wraps(plain)
    def choose(first: Tensor, *args: Any, **options: Any) -> Any:
        if first.device.type != "cpu":
            return bound(first, *args, **options)
        # As transformers does it: the caller passes options that only some of the kernels have.
        return plain(first, *args, **{name: value for name, value in options.items() if name in known})

    return choose
