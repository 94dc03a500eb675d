"""The command line: `blockdraft VERB ...`.

The verb is looked up first and only its module is imported, so that `blockdraft --help` answers without torch.
A command's module has a dataclass `Options`, from which its flags are made, and `run(options) -> int`. `train` takes a
recipe as well: its flags are the fields of the recipe's RunConfig, and its module has `run(config, options) -> int`.
`doctor` and `plan` may be given one: their config is None without.
"""

import dataclasses
import difflib
import errno
import importlib
import os
import select
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Final, NamedTuple

from blockdraft.commands.outputs import silence_stdout
from blockdraft.commands.stops import EARLY_STOP, EARLY_STOP_ANSWERING, EXIT_INTERRUPTED, StopRequested, Stops
from blockdraft.commands.unused import unused_fields
from blockdraft.config import ConfigError, RunConfig
from blockdraft.recipes import RECIPES, list_recipes, load_recipe


class Verb(NamedTuple):
    """A row of `blockdraft --help`."""

    module: str
    help: str


VERBS: Final = {
    "prepare": Verb("blockdraft.commands.prepare", "conversations to a token store, by the target's own chat template"),
    "regenerate": Verb("blockdraft.commands.regenerate", "replace the answers of conversations by the target's own"),
    "train": Verb("blockdraft.commands.train", "train a drafter from a recipe"),
    "evaluate": Verb("blockdraft.commands.evaluate", "acceptance length and speed, by decoding or by replay"),
    "generate": Verb("blockdraft.commands.generate", "stream one answer, accepted tokens coloured"),
    "export": Verb("blockdraft.commands.export", "write a drafter in a published format and compare it"),
    "report": Verb("blockdraft.commands.report", "one HTML page about a run: curves, speed, memory, workers"),
    "import": Verb("blockdraft.commands.import_", "read a published drafter, for warm starts and evaluation"),
    "doctor": Verb("blockdraft.commands.doctor", "look at machine, packages and what a recipe needs"),
    "bench": Verb("blockdraft.commands.bench", "speed, memory and share of the hardware, on your own shapes"),
    "plan": Verb("blockdraft.commands.plan", "the best split of 1 to 1,000 GPUs, its speed, memory and hours"),
}
WITH_RECIPE: Final = ("doctor", "plan")
"""Verbs that may take a recipe first, and then flags over it."""
EXIT_ERROR: Final = 2  # As for a flag that does not exist.
EXIT_PIPE: Final = 141  # 128 + SIGPIPE, as shells have it.
OF_THE_PLACE: Final = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT,
    errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip
"""Errors of a path that a user named: no fault of the program."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code: 2 for what the user can mend, 130 for Ctrl-C, 141 for `| head`."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _open_streams()
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_ERROR
    except BrokenPipeError:
        if not _is_stdout_left():
            raise
        silence_stdout()
        return EXIT_PIPE
    except OSError as error:
        if error.errno not in OF_THE_PLACE or error.filename is None:
            raise
        sys.stderr.write(
            f"error: {error.filename}: {error.strerror}; make room or rights there, or name another place\n"
        )
        return EXIT_ERROR
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED


def _open_streams() -> None:
    """Output and errors that the shell has closed (`>&-`) go nowhere."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115


def _is_stdout_left() -> bool:
    """True if whoever read the output has gone."""
    waiting = select.poll()
    waiting.register(sys.stdout.fileno(), 0)
    return bool(waiting.poll(0))


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_overview())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        sys.stdout.write(f"blockdraft {_version()}\n")
        return 0
    if name not in VERBS:
        raise ConfigError(_unknown_verb(name))
    if name == "train":
        return _until_stopped(partial(_train, rest), EARLY_STOP, 0)
    if name == "regenerate":
        return _until_stopped(partial(_regenerate, rest), EARLY_STOP_ANSWERING, EXIT_INTERRUPTED)
    module = importlib.import_module(VERBS[name].module)
    if name in WITH_RECIPE:
        return _perhaps_with_recipe(name, module, rest)
    return int(module.run(_parse(module.Options, f"blockdraft {name}", rest, module.__doc__)))


def _perhaps_with_recipe(name: str, module: ModuleType, arguments: list[str]) -> int:
    if not arguments or arguments[0].startswith("-"):
        return int(module.run(None, _parse(module.Options, f"blockdraft {name} [RECIPE]", arguments, module.__doc__)))
    recipe, rest = arguments[0], arguments[1:]
    both = _train_arguments(module, load_recipe(recipe))
    parsed = _parse(both, f"blockdraft {name} {recipe}", rest, module.__doc__)
    return int(module.run(parsed.config, parsed.options))


def _version() -> str:
    try:
        return metadata.version("blockdraft")
    except metadata.PackageNotFoundError:
        return "(run from source, not installed)"


def _until_stopped(run: Callable[[Stops], int], early: str, code: int) -> int:
    """Hears stops from here on: imports alone take seconds. `early` is said where there was nothing to finish."""
    stops = Stops()
    try:
        with stops.listen():
            return run(stops)
    except StopRequested:
        pass
    except Exception:
        # Whatever a stop broke off, such as a half-done import, may fail in its own way.
        if stops.ask is not None or not stops.count:
            raise
    sys.stdout.write(f"{early}\n")
    return code


def _regenerate(arguments: list[str], stops: Stops) -> int:
    module = importlib.import_module(VERBS["regenerate"].module)
    return int(module.run(_parse(module.Options, "blockdraft regenerate", arguments, module.__doc__), stops))


def _train(arguments: list[str], stops: Stops) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.stdout.write(_train_overview())
        return 0
    recipe, rest = arguments[0], arguments[1:]
    if recipe.startswith("-"):
        raise ConfigError(
            f"blockdraft train expects a recipe before the flags, found {recipe}; known: {_known_recipes()}"
        )
    config = load_recipe(recipe)
    module = importlib.import_module(VERBS["train"].module)
    parsed = _parse(_train_arguments(module, config), f"blockdraft train {recipe}", rest, module.__doc__)
    if parsed.config.run_dir == config.run_dir:
        _note_a_copy(Path(recipe), Path(config.run_dir))
    # A recipe that comes with the package has values for what its user may add, such as prompts.
    for line in unused_fields(parsed.config, config if recipe in RECIPES else RunConfig()):
        sys.stderr.write(f"note: {line}\n")
    return int(module.run(parsed.config, parsed.options, stops))


def _note_a_copy(recipe: Path, run_dir: Path) -> None:
    """A run directory that was copied or moved still names the place where it was first."""
    here = recipe.parent
    if (here / "metrics.jsonl").is_file() and recipe.name == "config.json" and here.resolve() != run_dir.resolve():
        sys.stderr.write(f"note: {recipe} names the run directory {run_dir}; to go on in {here} add --run-dir {here}\n")


def _train_arguments(module: ModuleType, config: RunConfig) -> type:
    """One set of flags for both: `--optim.lr` of the config beside the command's own, neither with a prefix."""
    from tyro.conf import arg

    unprefixed = arg(name="")
    return dataclasses.make_dataclass(
        "TrainArguments",
        [
            ("config", Annotated[RunConfig, unprefixed], dataclasses.field(default=config)),
            ("options", Annotated[module.Options, unprefixed], dataclasses.field(default=module.Options())),
        ],
        frozen=True,
        kw_only=True,
    )


def _parse(options: type, prog: str, arguments: list[str], docstring: str | None) -> Any:
    # Loaded here: the lists of verbs and recipes answer at once without it.
    import tyro

    description = (docstring or "").strip().split("\n\n")[0]
    return tyro.cli(options, prog=prog, args=arguments, description=description)


def _overview() -> str:
    verbs = "".join(f"  {name:<12}{verb.help}\n" for name, verb in VERBS.items())
    return (
        "usage: blockdraft VERB [flags]\n\n"
        "Trains draft models for speculative decoding (DFlash) beside their frozen target.\n\n"
        f"verbs:\n{verbs}\n"
        "blockdraft VERB --help lists a verb's flags; blockdraft --version prints the version.\n"
    )


def _train_overview() -> str:
    recipes = "".join(f"  {name:<16}{text}\n" for name, text in list_recipes().items())
    return (
        "usage: blockdraft train RECIPE [flags over the recipe, such as --optim.lr 3e-4]\n\n"
        f"RECIPE is one of\n{recipes}"
        "  FILE.py         a Python file with a function recipe() -> RunConfig\n"
        "  FILE.py:NAME    the same with another function\n"
        "  config.json     what an earlier run saved\n\n"
        "blockdraft train RECIPE --help lists the flags with the recipe's own values.\n"
    )


def _known_recipes() -> str:
    return ", ".join(list_recipes())


def _unknown_verb(name: str) -> str:
    near = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else "blockdraft --help lists them"
    return f"blockdraft knows no verb {name!r} (known: {', '.join(VERBS)}); {hint}"


if __name__ == "__main__":
    sys.exit(main())
