"""The second half of the wrong inputs: targets, drafters, checkpoints, prompts, exports, the server."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GraniteConfig, Qwen3Config

from blockdraft.commands import evaluate, export, import_, regenerate, train
from blockdraft.commands.checks import check
from blockdraft.config import TargetConfig
from blockdraft.models.target import Target, mask_token_id
from integration.bad_inputs import ANSWER, ASK, Place, chat, drafter, expect, wrong
from integration.tiny import COMMON, CONFIGS
from integration.tiny_run import make_files, random_documents, run_control, tiny_config
from tiny_chat import CHATML, tiny_tokenizer

# Targets


def target(at: Place, path: str) -> None:
    check(at.config(target={"path": path}))


def save_model(path: Path, layers: int = 6, change: Any = None) -> None:
    """A tiny target whose weights were changed, with its tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(**COMMON | {"vocab_size": 300, "num_hidden_layers": layers})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if change is not None:
        with torch.no_grad():
            change(model)
    model.save_pretrained(path)
    tiny_tokenizer(CHATML).save_pretrained(path)


def train_on(at: Place, layers: int = 6, change: Any = None, **changes: Any) -> None:
    """Starts a run on such a target."""
    save_model(at.root / "target", layers, change)
    run_control(at.config(target={"path": str(at.root / "target")}, **changes))


def zero_states(model: Any) -> None:
    model.model.embed_tokens.weight.zero_()


def broken_weight(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")


expect("Targets", "no path", lambda at: target(at, ""))
expect("Targets", "a path with nothing there", lambda at: target(at, str(at.root / "Qwen3-8B")))
expect("Targets", "a .gguf file that is not there", lambda at: target(at, str(at.root / "model.gguf")))
expect("Targets", "a layer that it does not have", lambda at: drafter(at, target_layer_ids=(1, 9)))
expect("Targets", "layers in no order", lambda at: drafter(at, target_layer_ids=(3, 1)))
expect("Targets", "fewer layers than default ids", lambda at: drafter(at, target_layer_ids=None, num_layers=5))
expect("Targets", "captured states that are all zero", lambda at: train_on(at, change=zero_states))
expect("Targets", "a weight that is NaN", lambda at: train_on(at, change=broken_weight))


@wrong("Targets", "weights without a tokenizer")
def _(at: Place) -> None:
    AutoModelForCausalLM.from_config(CONFIGS["qwen3"](), dtype=torch.float32).save_pretrained(at.root / "target")
    target(at, str(at.root / "target"))


@wrong("Targets", "logits that are divided by 0")
def _(at: Place) -> None:
    GraniteConfig(**COMMON | {"vocab_size": 300, "logits_scaling": 0.0}).save_pretrained(at.root / "target")
    tiny_tokenizer(CHATML).save_pretrained(at.root / "target")
    target(at, str(at.root / "target"))


@wrong("Targets", "an encoder")
def _(at: Place) -> None:
    tiny_tokenizer(CHATML).save_pretrained(at.root / "target")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    (at.root / "target" / "config.json").write_text(json.dumps({"model_type": "distilbert", **shape}))
    target(at, str(at.root / "target"))


@wrong("Targets", "three layers")
def _(at: Place) -> None:
    save_model(at.root / "target", layers=3)
    Target.load(TargetConfig(path=str(at.root / "target"), dtype="float32"), num_drafter_layers=2)


# Drafters

expect("Drafters", "blocks of one token", lambda at: drafter(at, block_size=1))
expect("Drafters", "a window below a block", lambda at: drafter(at, window=2, window_layers=(0,)))
expect("Drafters", "a window without layers", lambda at: drafter(at, window=16))
expect("Drafters", "a window for a layer that is not there", lambda at: drafter(at, window=16, window_layers=(3,)))
expect("Drafters", "windowed layers in no order", lambda at: drafter(at, num_layers=2, window=16, window_layers=(1, 0)))
expect("Drafters", "a windowed layer twice", lambda at: drafter(at, num_layers=2, window=16, window_layers=(0, 0)))
expect("Drafters", "a mask token beyond the embedding", lambda at: drafter(at, mask_token_id=300))
expect("Drafters", "query heads that key heads do not divide", lambda at: drafter(at, num_heads=5, num_kv_heads=2))
expect("Drafters", "heads of odd width", lambda at: drafter(at, head_dim=15))
expect("Drafters", "a start from a run directory", lambda at: drafter(at, init_from=str(at.run)))
expect("Drafters", "a start from a checkpoint", lambda at: drafter(at, init_from=str(checkpoint(at))))
expect("Drafters", "a start from nothing", lambda at: drafter(at, init_from=str(at.root / "export")))
expect("Drafters", "a start of another shape", lambda at: drafter(at, init_from=str(at.export), block_size=8))


@wrong("Drafters", "a full vocabulary and no token to mask with")
def _(at: Place) -> None:
    tokenizer = tiny_tokenizer(CHATML)
    full = max(tokenizer.get_vocab().values()) + 1
    mask_token_id(tokenizer, full, set(range(full)), ())


# Checkpoints and run directories

RUNS = "Checkpoints and run directories"


def checkpoint(at: Place) -> Path:
    return at.run / "checkpoints" / "step_00000002"


def copied(at: Place) -> Path:
    """A copy of the run, to break."""
    shutil.copytree(at.run, at.root / "run")
    return at.root / "run" / "checkpoints" / "step_00000002"


def resume(at: Place, directory: Path, **changes: Any) -> None:
    """Goes on from a checkpoint."""
    config = tiny_config(at.files, directory.parents[1], steps=4, save_every=2)
    for section, values in changes.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    train.run(config, train.Options(resume=str(directory)))


def begin_in(at: Place, run_dir: Path) -> None:
    train.run(replace(at.config(), run_dir=str(run_dir)), train.Options())


expect(
    RUNS,
    "a run that is there already",
    lambda at: train.run(replace(at.config(), run_dir=str(at.run)), train.Options()),
)
expect(RUNS, "a run directory that is the target's", lambda at: begin_in(at, at.files.target))
expect(RUNS, "a run directory that is the store's", lambda at: begin_in(at, at.files.store))
expect(RUNS, "no checkpoint to resume", lambda at: resume(at, at.run / "checkpoints" / "step_00000007"))
expect(
    RUNS,
    "the run instead of its checkpoint",
    lambda at: train.run(replace(at.config(), run_dir=str(at.run)), train.Options(resume=str(at.run))),
)
expect(
    RUNS,
    "the checkpoints of another run",
    lambda at: train.run(at.config(), train.Options(resume=str(at.run / "checkpoints"))),
)
expect(RUNS, "another block size than before", lambda at: resume(at, copied(at), drafter={"block_size": 8}))
expect(RUNS, "another learning rate than before", lambda at: resume(at, copied(at), optim={"lr": 0.5}))
expect(
    RUNS, "a drafter in an empty directory", lambda at: export.run(export.Options(source=at.root, output=at.root / "x"))
)


@wrong(RUNS, "other documents than before")
def _(at: Place) -> None:
    other = make_files(at.root / "others", documents=random_documents(20, seed=5))
    resume(at, copied(at), data={"train": str(other.store)})


@wrong(RUNS, "a checkpoint of another version")
def _(at: Place) -> None:
    directory = copied(at)
    state = json.loads((directory / "state.json").read_text())
    (directory / "state.json").write_text(json.dumps(state | {"format": 99}))
    resume(at, directory)


@wrong(RUNS, "a flipped byte in a checkpoint")
def _(at: Place) -> None:
    directory = copied(at)
    file = directory / "drafter.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    resume(at, directory)


@wrong(RUNS, "a run directory that is a file")
def _(at: Place) -> None:
    (at.root / "new-run").touch()
    train.run(replace(at.config(), run_dir=str(at.root / "new-run" / "run")), train.Options())


# Held-out prompts


def held_out(at: Place, *sources: str, **changes: Any) -> None:
    check(at.config(eval={"prompts": sources, **changes}))


def prompts(at: Place, *values: Any) -> str:
    (at.root / "prompts.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(at.root / "prompts.jsonl")


HELD = "Held-out prompts"
expect(HELD, "a file that is not there", lambda at: held_out(at, str(at.root / "prompts.jsonl")))
expect(HELD, "two sets of one name", lambda at: held_out(at, "a/unseen.jsonl", "b/unseen.jsonl"))
expect(
    HELD,
    "answers longer than the target's positions",
    lambda at: held_out(at, prompts(at, chat(ASK)), max_new_tokens=600),
)
expect(HELD, "a file without prompts", lambda at: held_out(at, prompts(at)))
expect(HELD, "conversations that begin with an answer", lambda at: held_out(at, prompts(at, chat(ANSWER))))
expect(
    HELD,
    "one row of two without text",
    lambda at: held_out(at, prompts(at, chat(ASK), {"messages": [{"role": "user", "text": "Hello"}]})),
)


def evaluated(at: Place, **options: Any) -> None:
    """Evaluates the export on a prompt."""
    made = {"drafter": at.export, "target": str(at.files.target), "prompts": (prompts(at, chat(ASK)),)}
    evaluate.run(evaluate.Options(**(made | options)))


expect(HELD, "sampling by replay", lambda at: evaluated(at, temperature=0.7))
expect(HELD, "a temperature that is no number", lambda at: evaluated(at, method="decode", temperature=float("nan")))
expect(HELD, "a share of 7", lambda at: evaluated(at, method="decode", temperature=0.7, top_p=7.0))
expect(HELD, "a share of greedy answers", lambda at: evaluated(at, top_p=0.9))
expect(HELD, "the order of a table that is not made", lambda at: evaluated(at, ngram_order=3))

# Exports and imports

EXPORTS = "Exports and imports"


def spoiled(at: Place, **config: Any) -> Path:
    """A copy of the export, to break."""
    shutil.copytree(at.export, at.root / "export")
    file = at.root / "export" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return at.root / "export"


def read(at: Place, source: Path) -> None:
    import_.run(import_.Options(source=source, output=at.root / "imported"))


expect(EXPORTS, "an import of a target", lambda at: read(at, at.files.target))
expect(EXPORTS, "an import of nothing", lambda at: read(at, at.root / "nothing"))
expect(EXPORTS, "a config that names another type", lambda at: read(at, spoiled(at, dtype="bfloat16")))
expect(
    EXPORTS,
    "scaled rotary embeddings",
    lambda at: read(at, spoiled(at, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})),
)
expect(
    EXPORTS, "an export onto the target", lambda at: export.run(export.Options(source=at.run, output=at.files.target))
)
expect(EXPORTS, "an export onto its run", lambda at: export.run(export.Options(source=at.run, output=at.run)))


@wrong(EXPORTS, "an export beside files of another kind")
def _(at: Place) -> None:
    (at.root / "thesis").mkdir()
    (at.root / "thesis" / "thesis.tex").touch()
    export.run(export.Options(source=at.run, output=at.root / "thesis"))


expect(EXPORTS, "an import onto itself", lambda at: import_.run(import_.Options(source=at.export, output=at.export)))
expect(
    EXPORTS,
    "a target named where the format has none",
    lambda at: export.run(export.Options(source=at.run, output=at.root / "x", target="some/target")),
)


@wrong(EXPORTS, "a tensor that is missing")
def _(at: Place) -> None:
    directory = spoiled(at)
    tensors = load_file(directory / "model.safetensors")
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    read(at, directory)


@wrong(EXPORTS, "no weights")
def _(at: Place) -> None:
    directory = spoiled(at)
    (directory / "model.safetensors").unlink()
    read(at, directory)


# Server


def ask(at: Place, **options: Any) -> None:
    made = {"conversations": (prompts(at, chat(ASK)),), "target": str(at.files.target), "output": at.root / "out.jsonl"}
    regenerate.run(regenerate.Options(**(made | options)))


expect("Server", "an address that is none", lambda at: ask(at, server="localhost:8000"))
expect("Server", "nobody listens", lambda at: ask(at, server="http://127.0.0.1:9/v1", retries=0))
expect("Server", "a model without a server", lambda at: ask(at, server_model="qwen"))
expect(
    "Server",
    "a key file that is not there",
    lambda at: ask(at, server="http://127.0.0.1:9/v1", api_key_file=at.root / "key"),
)
expect("Server", "no requests at once", lambda at: ask(at, server="http://127.0.0.1:9/v1", concurrency=0))
expect("Server", "a device for a server", lambda at: ask(at, server="http://127.0.0.1:9/v1", device="cpu"))
expect("Server", "retries without a server", lambda at: ask(at, retries=1))
expect("Server", "both modes of thinking", lambda at: ask(at, thinking=True, no_thinking=True))
