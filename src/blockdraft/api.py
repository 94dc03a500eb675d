"""The package from Python: load a target and a drafter, generate.

For example, greedy, so equal to what the target alone would write:

    drafter = blockdraft.load_drafter("runs/demo/export")
    target = blockdraft.load_target("path/of/the/target", drafter=drafter)
    reply = blockdraft.generate(target, drafter, "Write a Python function that adds two numbers.")
    print(reply.text, reply.acceptance.acceptance_length)
"""

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from blockdraft.config import ConfigError, TargetConfig
from blockdraft.data.template import ChatTemplate, Conversation, Message
from blockdraft.decoding.acceptance import Acceptance
from blockdraft.decoding.speculative import Generation, OnRound
from blockdraft.decoding.speculative import generate as decode
from blockdraft.models.drafter import Drafter
from blockdraft.models.formats import load_export
from blockdraft.models.target import DTYPES, Target, choose_dtype, load_tokenizer
from blockdraft.runtime.devices import find_device
from blockdraft.training import checkpoint

DtypeName = Literal["auto", "bfloat16", "float32"]


class LoadedTarget(NamedTuple):
    """A target and what turns text into its tokens."""

    target: Target
    tokenizer: PreTrainedTokenizerBase


class Reply(NamedTuple):
    """One answer."""

    text: str
    generation: Generation
    acceptance: Acceptance


def pick_device(name: str = "auto") -> torch.device:
    """The device of that name; auto is the first GPU, or the CPU where there is none.

    Raises:
        ConfigError: no name of a device, or one that is not there.
    """
    if name != "auto":
        return find_device(name, "device")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_drafter(path: str | Path, *, device: str = "auto", dtype: DtypeName | None = None) -> Drafter:
    """A drafter from an export, a checkpoint or a run directory (its newest checkpoint).

    `dtype` None keeps that of the export; a checkpoint's master weights are float32.

    Raises:
        ConfigError: there is none of these at `path`, or it is damaged; the device is not there.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise ConfigError(f"{path}: expected a directory with an export, a checkpoint or a run, found none")
    if (directory / "state.json").is_file() or (directory / "checkpoints").is_dir():
        drafter = checkpoint.load_drafter(directory)
    else:
        drafter = load_export(directory)
    placed = pick_device(device)
    return drafter.to(device=placed, dtype=DTYPES[choose_dtype(dtype, placed)] if dtype else drafter.dtype).eval()


def load_target(
    path: str,
    *,
    drafter: Drafter | None = None,
    device: str = "auto",
    dtype: DtypeName = "auto",
    trust_remote_code: bool = False,
) -> LoadedTarget:
    """A target with its tokenizer; with `drafter`, the layers that the drafter reads are captured.

    Raises:
        ConfigError: the path holds no causal language model, or no tokenizer, or another width than the drafter's; the
            device is not there.
    """
    target = Target.load(
        TargetConfig(path=path, dtype=dtype, trust_remote_code=trust_remote_code),
        device=pick_device(device),
        layer_ids=drafter.shape.target_layer_ids if drafter else None,
        # Without a drafter nobody reads features: one layer will do, however few the target has.
        num_drafter_layers=1,
    )
    if drafter is not None and drafter.shape.hidden_size != target.hidden_size:
        raise ConfigError(
            f"{path}: expected the target that the drafter was trained for, of width {drafter.shape.hidden_size} and "
            f"{drafter.shape.num_target_layers} layers, found one of width {target.hidden_size} and "
            f"{target.num_layers} layers; name that target"
        )
    return LoadedTarget(target, load_tokenizer(path, trust_remote_code))


def generate(
    target: LoadedTarget,
    drafter: Drafter,
    prompt: str | list[Message],
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    thinking: bool | None = None,
    on_round: OnRound | None = None,
) -> Reply:
    """Answers a prompt, or the last user turn of a list of messages, by the target's chat template.

    Greedy at temperature 0, and then equal to the target's own greedy answer. `thinking` None leaves the template's
    default. `on_round` receives tokens as they are committed.

    Raises:
        ConfigError: see `blockdraft.decoding.speculative.generate`.
    """
    model, tokenizer = target
    prompt_ids = render(tokenizer, prompt, thinking)
    generation = decode(
        model,
        drafter,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        stop_ids=model.stop_ids,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        generator=torch.Generator(model.device).manual_seed(seed),
        on_round=on_round,
    )
    text = str(tokenizer.decode(generation.token_ids, skip_special_tokens=True))
    return Reply(text, generation, generation.acceptance(drafter.shape.block_size))


def render(tokenizer: PreTrainedTokenizerBase, prompt: str | list[Message], thinking: bool | None) -> list[int]:
    """Token ids of a prompt with the generation prompt; the bare text where the tokenizer has no chat template."""
    if not tokenizer.chat_template:
        if not isinstance(prompt, str):
            raise ConfigError(f"{tokenizer.name_or_path}: messages need a chat template, found none; give plain text")
        if thinking is not None:
            raise ConfigError(
                f"{tokenizer.name_or_path}: a mode of thinking is asked of a chat template, found none; leave thinking "
                "out"
            )
        return list(tokenizer(prompt)["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    conversation = Conversation(messages=messages, tools=None, source="prompt")
    return ChatTemplate(tokenizer).prompt_ids(conversation, thinking=thinking)
