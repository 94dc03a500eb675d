"""Options that do nothing as the others stand: a command refuses them, a run names them and goes on.

A run goes on because one that was begun with such a field has to be resumable. A seed is none of these: what is greedy
is the same under every seed.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blockdraft.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


class Need(NamedTuple):
    """Options, and what they do nothing without."""

    names: tuple[str, ...]
    others: tuple[str, ...]
    wanted: str
    """In words."""
    is_met: Callable[..., bool]
    """Takes the values of `others`."""
    is_positional: bool = False
    """Whether `others` stand on the command line without their names."""


SAMPLED: Final = Need(("top_p", "top_k"), ("temperature",), "--temperature above 0", lambda value: value > 0)

OF_A_RUN: Final = (
    Need(("loss.gamma",), ("loss.objective",), "loss.objective ce or kl", lambda value: value != "dpace"),
    Need(("optim.decay",), ("optim.schedule",), "optim.schedule wsd", lambda value: value == "wsd"),
    Need(("epochs",), ("steps",), "no steps", lambda value: value is None),
    Need(("eval.every", "eval.num_prompts", "eval.max_new_tokens"), ("eval.prompts",), "eval.prompts", bool),
)


def refuse_unused(options: "DataclassInstance", needs: tuple[Need, ...]) -> None:
    """Refuses the first option that differs from its default and does nothing.

    Raises:
        ConfigError: names it, and the option that it depends on.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(options)}
    for name, need, said in _find(vars(options), defaults, needs, _flag):
        others = "" if need.is_positional else f", or change {' or '.join(map(_flag, need.others))}"
        raise ConfigError(f"{said}; leave {_flag(name)} out{others}")


def unused_fields(config: RunConfig, usual: RunConfig) -> list[str]:
    """A sentence for each field that differs from `usual` and that the run does not read."""
    return [said for _, _, said in _find(_flat(config), _flat(usual), OF_A_RUN, str)]


def _find(
    values: Mapping[str, Any], usual: Mapping[str, Any], needs: tuple[Need, ...], spell: Callable[[str], str]
) -> Iterator[tuple[str, Need, str]]:
    for need in needs:
        found = [values[other] for other in need.others]
        if need.is_met(*found):
            continue
        pairs = zip(need.others, found, strict=True)
        others = " and ".join(
            str(value) if need.is_positional else _pair(spell(other), value) for other, value in pairs
        )
        for name in need.names:
            if values[name] != usual[name]:
                given = _pair(spell(name), values[name])
                yield name, need, f"{given} does nothing as things stand: expected {need.wanted}, found {others}"


def _flat(config: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _pair(name: str, value: Any) -> str:
    return f"no {name}" if value in (None, "", ()) else f"{name} {value}"
