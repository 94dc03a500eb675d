"""Wrong inputs and the message that each gets: what docs/bad-inputs.md is made of.

To write the page again: PYTHONPATH=src:tests .venv/bin/python -m integration.bad_inputs
"""

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from blockdraft.commands import prepare
from blockdraft.commands.checks import check
from blockdraft.config import ConfigError, DataConfig, DrafterConfig, LossConfig, OptimConfig, RunConfig, from_json
from blockdraft.data.template import Encoded
from blockdraft.recipes import load_recipe
from integration.tiny_run import Files, make_files, run_control, tiny_config
from tiny_chat import CHATML, REFUSING, UNSTABLE, tiny_tokenizer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "bad-inputs.md"
HEAD = """# Wrong inputs

What each gets said. Made by the test that runs them (`tests/integration/test_bad_inputs.py`); to write it again:
`PYTHONPATH=src:tests .venv/bin/python -m integration.bad_inputs`. Paths are shortened, and words
of other packages left out.
"""
FOREIGN = re.compile(r"(could not be (?:read|loaded)|found none that can be read|\(check the path\)): .*", re.DOTALL)
"""From here on another package speaks."""


class Place(NamedTuple):
    """What cases share; each works in a directory of its own."""

    root: Path
    files: Files
    run: Path
    """A run of two steps."""
    export: Path

    def config(self, **changes: Any) -> RunConfig:
        return tiny_config(self.files, self.root / "new-run", **changes)


Wrong = Callable[[Place], object]


class Case(NamedTuple):
    """One wrong input."""

    area: str
    what: str
    give: Wrong


CASES: list[Case] = []


def wrong(area: str, what: str) -> Callable[[Wrong], Wrong]:
    """Adds a case."""

    def add(give: Wrong) -> Wrong:
        CASES.append(Case(area, what, give))
        return give

    return add


def expect(area: str, what: str, give: Wrong) -> None:
    """The same for a case in one line."""
    CASES.append(Case(area, what, give))


def make_place(root: Path) -> Place:
    """Target, store, a short run and its export."""
    from blockdraft.commands import export

    files = make_files(root)
    ran = run_control(tiny_config(files, root / "run", steps=2, save_every=2))
    export.run(export.Options(source=ran.run_dir, output=root / "export", dtype="float32"))
    return Place(root, files, ran.run_dir, root / "export")


def message(case: Case, place: Place, number: int) -> str:
    """What the case is answered with, without this machine's paths and numbers."""
    here = place.root / f"case_{number}"
    here.mkdir()
    try:
        case.give(place._replace(root=here))
    except ConfigError as error:
        text = str(error)
    except Exception as error:
        raise AssertionError(f"{case.area}, {case.what}: expected a message for people, found a fault") from error
    else:
        raise AssertionError(f"{case.area}, {case.what}: nothing was said")
    text = text.replace(str(here) + "/", "").replace(str(place.root) + "/", "")
    text = text.replace(here.name, "DIR").replace(str(Path.cwd()), ".").replace("\n", " / ")
    text = FOREIGN.sub(r"\1: ...", text)
    text = re.sub(r"\b[0-9a-f]{16,64}\b", "HASH", text)
    text = re.sub(r"has \d+ CUDA devices", "has N CUDA devices", text)
    return " ".join(text.split())


def page(place: Place) -> str:
    """The whole page."""
    import integration.bad_runs  # noqa: F401 (it adds its cases)

    lines, area = [HEAD], ""
    for number, case in enumerate(sorted(CASES, key=lambda case: AREAS.index(case.area))):
        if case.area != area:
            area = case.area
            lines.append(f"\n## {area}\n\n| input | message |\n|---|---|")
        said = message(case, place, number).replace("|", "\\|")
        lines.append(f"| {case.what} | {said} |")
    return "\n".join(lines) + "\n"


AREAS = [
    "Configuration", "Recipes", "Devices", "Conversations", "Chat templates", "Token stores", "Targets", "Drafters",
    "Checkpoints and run directories", "Held-out prompts", "Exports and imports", "Server",
]  # fmt: skip

# Configuration

expect("Configuration", "an unknown field", lambda _: from_json('{"optim": {"learning_rate": 1}}'))
expect("Configuration", "a number as text", lambda _: from_json('{"optim": {"lr": "6e-4"}}'))
expect("Configuration", "a word that is no choice", lambda _: from_json('{"loss": {"objective": "mse"}}'))
expect("Configuration", "half a file", lambda _: from_json('{"steps": 3,'))
expect("Configuration", "a list at the top", lambda _: from_json("[1]"))
expect("Configuration", "a field of an earlier version", lambda _: from_json('{"log_every": 10}'))
expect("Configuration", "no steps", lambda _: RunConfig(steps=0))
expect("Configuration", "no epochs", lambda _: RunConfig(epochs=0.0))
expect("Configuration", "clipping at 0", lambda _: OptimConfig(clip=0.0))
expect("Configuration", "a learning rate below 0", lambda _: OptimConfig(lr=-6e-4))
expect("Configuration", "a beta of 1", lambda _: OptimConfig(betas=(0.9, 1.0)))
expect(
    "Configuration",
    "a beta that bfloat16 moments cannot follow",
    lambda _: OptimConfig(optimizer="adamw_bf16", betas=(0.9, 0.999)),
)
expect("Configuration", "a seed below 0", lambda _: RunConfig(seed=-1))
expect("Configuration", "a seed of 80 bits", lambda _: RunConfig(seed=2**80))
expect("Configuration", "a warm-up of 20 steps instead of a share", lambda _: OptimConfig(warmup=20.0))
expect("Configuration", "chunks of no rows", lambda _: LossConfig(chunk_rows=0))
expect("Configuration", "more steps than checkpoints have names", lambda _: RunConfig(steps=10**12))
expect("Configuration", "so many epochs", lambda at: check(at.config(steps=None, epochs=1e9)))
expect("Configuration", "a block longer than a row", lambda at: at.config(drafter={"block_size": 100_000}))
expect("Configuration", "more anchors than a row has tokens", lambda _: DataConfig(num_anchors=100_000))
expect("Configuration", "rows of one token", lambda _: DataConfig(row_length=1))
expect("Configuration", "a gamma of 0", lambda at: check(at.config(loss={"gamma": 0.0})))
expect(
    "Configuration",
    "argmax labels with a vocabulary of the data",
    lambda at: check(at.config(loss={"labels": "argmax", "draft_vocab": "data"})),
)
expect(
    "Configuration",
    "three micro-batches a step for two drafters",
    lambda at: check(at.config(optim={"accumulation": 3}, runtime={"drafters": ("cpu", "cpu")})),
)
expect(
    "Configuration",
    "a state to divide, and one drafter",
    lambda at: check(at.config(optim={"shard": True})),
)
expect("Configuration", "no data", lambda at: check(at.config(data={"train": ""})))

# Recipes

expect("Recipes", "a misspelt name", lambda _: load_recipe("papper"))
expect("Recipes", "a file that is not there", lambda at: load_recipe(str(at.root / "mine.py")))


@wrong("Recipes", "a file without the function")
def _(at: Place) -> None:
    (at.root / "mine.py").write_text("def two_layers(): return 1\n")
    load_recipe(str(at.root / "mine.py"))


@wrong("Recipes", "a function that returns something else")
def _(at: Place) -> None:
    (at.root / "mine.py").write_text("def recipe(): return {'steps': 3}\n")
    load_recipe(str(at.root / "mine.py"))


# Devices


def devices(at: Place, **runtime: Any) -> None:
    check(at.config(runtime=runtime))


expect("Devices", "a GPU that is not there", lambda at: devices(at, targets=("cuda:99",)))
expect("Devices", "a name that is no device", lambda at: devices(at, targets=("gpu0",)))
expect("Devices", "no drafter", lambda at: devices(at, drafters=()))
expect("Devices", "a drafter over two devices", lambda at: devices(at, drafters=("cpu+cpu",)))
expect("Devices", "pairs of unequal numbers", lambda at: devices(at, topology="pairs", drafters=("cpu", "cpu")))
expect("Devices", "a channel without slots", lambda at: devices(at, channel_depth=0))
expect("Devices", "flex_attention on a CPU", lambda at: devices(at, attention="flex"))
expect("Devices", "float8 on a CPU", lambda at: run_control(at.config(target={"dtype": "float8"})))

# Conversations


def rows(at: Place, *values: Any, **options: Any) -> None:
    """Prepares a file of these rows."""
    lines = [value if isinstance(value, str) else json.dumps(value) for value in values]
    (at.root / "chats.jsonl").write_text("\n".join(lines) + "\n")
    prepare_from(at, at.root / "chats.jsonl", **options)


def prepare_from(at: Place, source: Path, target: Path | None = None, **options: Any) -> None:
    made = prepare.Options(
        conversations=(str(source),),
        target=str(target or at.files.target),
        output=options.pop("output", at.root / "store"),
        **options,
    )
    prepare.run(made)


def chat(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


ASK, ANSWER = ("user", "How many days has a week?"), ("assistant", "Seven days.")
CHATS = "Conversations"
expect(CHATS, "a file that is not there", lambda at: prepare_from(at, at.root / "chats.jsonl"))
expect(CHATS, "a file of another kind", lambda at: ((at.root / "a.csv").touch(), prepare_from(at, at.root / "a.csv")))
expect(CHATS, "an empty file", lambda at: rows(at, ""))
expect(CHATS, "a line that is no JSON", lambda at: rows(at, chat(ASK, ANSWER), '{"messages": ['))
expect(CHATS, "a row without turns", lambda at: rows(at, chat(ASK, ANSWER), {"text": "hello"}))
expect(CHATS, "two user turns and two answers in a row", lambda at: rows(at, chat(ASK, ANSWER, ANSWER)))
expect(CHATS, "a role of another scheme", lambda at: rows(at, {"conversations": [{"from": "bard", "value": "x"}]}))
expect(CHATS, "text in another field", lambda at: rows(at, {"messages": [{"role": "user", "text": "Hello"}]}))
expect(CHATS, "a ShareGPT turn likewise", lambda at: rows(at, {"conversations": [{"from": "human", "text": "Hello"}]}))
expect(CHATS, "a blank question", lambda at: rows(at, chat(("user", " "), ANSWER)))
expect(CHATS, "an empty reply", lambda at: rows(at, chat(ASK, ("assistant", " "))))
expect(CHATS, "no reply", lambda at: rows(at, chat(ASK)))
expect(CHATS, "a picture", lambda at: rows(at, chat(("user", [{"type": "image", "url": "x"}]), ANSWER)))
expect(CHATS, "the same conversation twice", lambda at: rows(at, chat(ASK, ANSWER), chat(ASK, ANSWER)))
expect(CHATS, "longer than allowed", lambda at: rows(at, chat(ASK, ANSWER), max_length=20, long="drop"))
expect(CHATS, "half a surrogate pair", lambda at: rows(at, chat(ASK, ANSWER), '{"messages": "\\ud800"}'))
expect(CHATS, "a share of drops above 1", lambda at: rows(at, chat(ASK, ANSWER), max_drop=5.0))
expect(CHATS, "a number of 5,000 digits", lambda at: rows(at, chat(ASK, ANSWER), '{"messages": ' + "1" * 5000 + "}"))
expect(CHATS, "an output below a file", lambda at: rows(at, chat(ASK, ANSWER), output=at.root / "chats.jsonl" / "x"))


@wrong(CHATS, "a file in UTF-16")
def _(at: Place) -> None:
    (at.root / "chats.jsonl").write_text(json.dumps(chat(ASK, ANSWER)) + "\n", encoding="utf-16")
    prepare_from(at, at.root / "chats.jsonl")


@wrong(CHATS, "a .parquet file that is none")
def _(at: Place) -> None:
    (at.root / "chats.parquet").write_text("no table")
    prepare_from(at, at.root / "chats.parquet")


@wrong(CHATS, "an output directory that holds other files")
def _(at: Place) -> None:
    (at.root / "store").mkdir()
    (at.root / "store" / "thesis.tex").touch()
    rows(at, chat(ASK, ANSWER))


# Chat templates


def with_template(at: Place, template: str | None, *turns: tuple[str, Any]) -> None:
    tokenizer = tiny_tokenizer(CHATML)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(at.root / "target")
    (at.root / "chats.jsonl").write_text(json.dumps(chat(*turns)) + "\n")
    prepare_from(at, at.root / "chats.jsonl", target=at.root / "target")


expect("Chat templates", "none", lambda at: with_template(at, None, ASK, ANSWER))
expect(
    "Chat templates", "one without a stable prefix", lambda at: with_template(at, UNSTABLE, ASK, ANSWER, ASK, ANSWER)
)
expect(
    "Chat templates",
    "one that refuses the conversation",
    lambda at: with_template(at, REFUSING, ("system", "Be brief."), ASK, ANSWER),
)

# Token stores


def with_store(at: Place, documents: list[Encoded], **changes: Any) -> None:
    """Checks a run over these documents."""
    made = make_files(at.root, documents=documents)
    check(tiny_config(made, at.root / "new-run", **changes))


def with_manifest(at: Place, **changes: Any) -> None:
    """Checks a run over a store whose manifest says something else."""
    made = make_files(at.root)
    file = made.store / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    check(tiny_config(made, at.root / "new-run"))


STORES = "Token stores"
expect(STORES, "no such directory", lambda at: check(at.config(data={"train": str(at.root / "store")})))
expect(STORES, "a directory of something else", lambda at: check(at.config(data={"train": str(at.files.target)})))
expect(STORES, "another format version", lambda at: with_manifest(at, format_version=99))
expect(STORES, "documents that are missing", lambda at: with_manifest(at, documents=25))
expect(STORES, "prepared with another tokenizer", lambda at: with_manifest(at, tokenizer_hash="0" * 64))
expect(STORES, "prepared with another chat template", lambda at: with_manifest(at, template_hash="0" * 64))
expect(STORES, "ids beyond the embedding", lambda at: with_store(at, [Encoded([5, 999, 7, 8], [1] * 4)]))
expect(STORES, "nothing that can be anchored", lambda at: with_store(at, [Encoded([5, 6, 7, 8], [0, 1, 0, 1])]))
expect(STORES, "a document longer than a row", lambda at: with_store(at, [Encoded([5] * 90, [1] * 90)]))
expect(STORES, "a token budget below a row", lambda at: check(at.config(data={"target_tokens": 32})))


@wrong(STORES, "a manifest that is half-written")
def _(at: Place) -> None:
    made = make_files(at.root)
    (made.store / "manifest.json").write_text('{"format": ')
    check(tiny_config(made, at.root / "new-run"))


@wrong(STORES, "Arrow files that are gone")
def _(at: Place) -> None:
    made = make_files(at.root)
    for file in made.store.glob("*.arrow"):
        file.unlink()
    check(tiny_config(made, at.root / "new-run"))


def drafter(at: Place, **changes: Any) -> None:
    """Checks a run with these fields of the drafter."""
    config = at.config()
    check(replace(config, drafter=replace(config.drafter, **changes)))


expect("Drafters", "no layers", lambda _: DrafterConfig(num_layers=0))

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    from integration import bad_inputs

    with tempfile.TemporaryDirectory() as directory:
        PAGE.write_text(bad_inputs.page(bad_inputs.make_place(Path(directory))), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE} with {len(bad_inputs.CASES)} cases\n")
