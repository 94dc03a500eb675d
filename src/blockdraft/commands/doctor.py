"""Looks at machine, packages and, with a recipe, everything that its run would need; the exit code counts failures.

Each line: verdict, check, result, fix. Nothing is changed, no weight is loaded and no device memory is taken.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from blockdraft.config import ConfigError, RunConfig

if TYPE_CHECKING:
    from blockdraft.commands.checks import Checked
    from blockdraft.runtime.machine import Finding

MOST_FAILURES = 125
"""Exit codes above it mean something else to a shell."""
MASTER_BYTES = 4
"""Of a drafter's parameter in a checkpoint, beside its weight and its moments."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Flags beside those of the recipe: none."""


def run(config: RunConfig | None, options: Options) -> int:
    """Prints a line a check; returns the number of failures, at most 125. Without a config: machine and packages."""
    from blockdraft.runtime.machine import machine_findings

    failures = 0
    for finding in (*machine_findings(), *(run_findings(config) if config is not None else ())):
        sys.stdout.write(f"{finding}\n")
        sys.stdout.flush()
        failures += finding.verdict == "FAIL"
    sys.stdout.write(f"{failures} failures\n" if failures != 1 else "1 failure\n")
    return min(failures, MOST_FAILURES)


def run_findings(config: RunConfig) -> "Iterator[Finding]":
    """What a run of this config needs, one thing after the other; what depends on a failed one is skipped."""
    from blockdraft.commands.checks import resolve_dtypes

    has_failed = False
    for finding in _each_part(config):
        has_failed |= finding.verdict == "FAIL"
        yield finding
    if has_failed:
        yield _finding("run, mask token, disk, memory plan", "skip", "they need what failed above")
    else:
        yield from _whole(resolve_dtypes(config))


def _finding(check: str, verdict: str, result: str, fix: str = "") -> "Finding":
    from blockdraft.runtime.machine import Finding

    return Finding(check, verdict, result, fix)  # type: ignore[arg-type]


def _attempt(check: str, look: Callable[[], str]) -> "Finding":
    """What `look` says, or what is wrong: messages name the fix themselves."""
    try:
        return _finding(check, "ok", look())
    except (ConfigError, OSError) as error:
        return _finding(check, "FAIL", str(error))


def _each_part(config: RunConfig) -> "Iterator[Finding]":
    """Checks that stand alone: one that fails hides no other."""
    yield _attempt("devices", lambda: _devices(config))
    yield _attempt("target", lambda: _target(config))
    yield _attempt("tokenizer and template", lambda: _template(config))
    yield _attempt("token store", lambda: _store(config))
    yield _attempt("run directory", lambda: _run_directory(config))


def _devices(config: RunConfig) -> str:
    from blockdraft.commands.checks import check_topology

    targets, drafters = check_topology(config)
    spelled = ", ".join("+".join(map(str, devices)) for devices in targets)
    return f"targets on {spelled}; drafters on {', '.join(map(str, drafters))}; topology {config.runtime.topology}"


def _target(config: RunConfig) -> str:
    from blockdraft.models.outline import outline

    found = outline(config.target)
    return (
        f"{found.model_class}, {len(found.layers)} layers, {found.parameters / 1e6:,.1f} M parameters, "
        f"{found.facts.vocab_size:,} ids"
    )


def _template(config: RunConfig) -> str:
    """Renders a chat of two turns with reasoning and looks at its loss mask."""
    from blockdraft.data.template import ChatTemplate, Conversation, RowRefused
    from blockdraft.models.target import load_tokenizer

    template = ChatTemplate(load_tokenizer(config.target.path, config.target.trust_remote_code))
    messages = [
        {"role": "user", "content": "How many days has a week?"},
        {"role": "assistant", "content": "Seven."},
        {"role": "user", "content": "And a year?"},
        {"role": "assistant", "content": "365, or 366.", "reasoning_content": "Leap years count too."},
    ]
    try:
        encoded = template.encode(Conversation(messages, None, "the doctor's chat"))
    except RowRefused as error:
        raise ConfigError(f"a plain chat of two turns is refused: {error}") from error
    supervised = sum(encoded.loss_mask)
    if not supervised:
        raise ConfigError(f"{template.name}: expected supervised tokens in two answers, found none")
    kept = "left out" if encoded.unrendered_reasoning else "kept"
    return f"{supervised} of {len(encoded.input_ids)} tokens of a trial chat are supervised, reasoning is {kept}"


def _store(config: RunConfig) -> str:
    from blockdraft.commands.checks import check_prepared_for, check_store
    from blockdraft.models.target import load_tokenizer

    store = check_store(config)
    check_prepared_for(config, store, load_tokenizer(config.target.path, config.target.trust_remote_code))
    manifest = store.manifest
    dropped = sum(manifest["drops"].values())
    return (
        f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens, {manifest['supervised_tokens']:,} "
        f"supervised; {dropped:,} of {manifest['rows_read']:,} rows dropped"
    )


def _run_directory(config: RunConfig) -> str:
    directory = Path(config.run_dir).absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"run_dir {config.run_dir}: expected a directory, found the file {existing}; name another")
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"run_dir {config.run_dir}: {existing} cannot be written to; name another with --run-dir")
    free = shutil.disk_usage(existing).free
    return f"{directory}, {free / 2**30:,.1f} GiB free"


def _whole(config: RunConfig) -> "Iterator[Finding]":
    """All static checks of a run together, then what follows from them."""
    from blockdraft.commands.checks import check

    try:
        checked = check(config)
    except (ConfigError, OSError) as error:
        yield _finding("run", "FAIL", str(error))
        yield _finding("mask token, disk, memory plan", "skip", "they need what failed above")
        return
    counts = checked.loader.counts
    yield _finding(
        "run",
        "ok",
        f"{checked.total_steps:,} steps, {counts.fills:,} slots an epoch, {counts.skipped_unanchored:,} documents "
        f"skipped, target layers {list(checked.shape.target_layer_ids)}",
    )
    is_own = config.drafter.mask_token_id is None
    yield _finding("mask token", "ok", f"{checked.mask_token}, {'chosen' if is_own else 'as configured'}")
    yield _disk(config, checked)
    yield from _memory(config, checked)


def _disk(config: RunConfig, checked: "Checked") -> "Finding":
    from blockdraft.models.target import DTYPES, choose_dtype
    from blockdraft.runtime.memory_plan import drafter_parameters, moments_bytes, spell_bytes

    directory = Path(config.run_dir).absolute()
    free = shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free
    weight_bytes = DTYPES[choose_dtype(config.drafter.dtype, config.runtime.drafters[0])].itemsize
    one = weight_bytes + MASTER_BYTES + moments_bytes(config)
    # The newest ones, the best, and the one being written.
    need = drafter_parameters(checked.shape) * one * (config.keep_last + 2)
    result = (
        f"the last {config.keep_last} checkpoints, the best and one being written take {spell_bytes(need)}, "
        f"{spell_bytes(free)} free"
    )
    if need > free:
        return _finding("disk", "FAIL", result, "free some, lower --keep-last, or choose another --run-dir")
    return _finding("disk", "ok", result)


def _memory(config: RunConfig, checked: "Checked") -> "Iterator[Finding]":
    from blockdraft.commands.build import plan_sizes
    from blockdraft.runtime.memory_fit import capacities, knobs, needs, spell_knobs
    from blockdraft.runtime.memory_plan import plan_memory, spell_bytes

    sizes = plan_sizes(config, checked)
    plan = plan_memory(config, sizes)
    holds = capacities(plan.devices())
    too_small = {device for need in needs(plan, holds) if need.total > need.holds for device in need.devices}
    for device, line in zip(plan.devices(), plan.lines(), strict=True):
        result = f"{line.removeprefix('memory plan, ')}, of {spell_bytes(holds[device])}"
        if device in too_small:
            helps = spell_knobs(knobs(config, sizes, device))
            yield _finding("memory", "FAIL", result, f"what helps: {helps}")
        else:
            yield _finding("memory", "ok", result)
