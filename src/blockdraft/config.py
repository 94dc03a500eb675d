"""What a run is made of: frozen dataclasses that the command line, a recipe and a saved config.json share.

Nothing here imports torch, so `blockdraft --help` stays quick.
"""

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


class ConfigError(ValueError):
    """Something the user can mend: the message says what was expected, what was found and what to do."""


MOST_STEPS: typing.Final = 99_999_999
"""Names of checkpoints have eight digits."""
MOST_SEED: typing.Final = 2**63 - 2
"""torch's generators take 63 bits, and the start's probe draws with the next seed."""


@dataclass(frozen=True, kw_only=True)
class TargetConfig:
    """The frozen large model."""

    path: str = ""
    """Directory, .gguf file or hub name of the target."""
    dtype: Literal["auto", "bfloat16", "float32", "float8"] = "auto"
    """Data type the target computes in; auto: bfloat16, but float32 on a CPU that only emulates it. float8: bfloat16,
    with the matrix products of its feature pass in float8 (GPUs of compute capability 8.9 and newer)."""
    trust_remote_code: bool = False
    """Run model code that comes with the target."""


@dataclass(frozen=True, kw_only=True)
class DrafterConfig:
    """Shape of the drafter; None means: derived from the target (docs/algorithm.md, section 2)."""

    num_layers: int = 5
    block_size: int = 16
    """Tokens of a block, anchor included."""
    target_layer_ids: tuple[int, ...] | None = None
    """Target layers whose outputs are the context features."""
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    window: int | None = None
    """Sliding window over the context, in tokens, for the layers named by window_layers."""
    window_layers: tuple[int, ...] = ()
    causal: bool = False
    """Attend inside a block to earlier slots only."""
    mask_token_id: int | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type the drafter computes in; its master weights are float32 always."""
    init_from: str = ""
    """Published-format export to start from."""

    def __post_init__(self) -> None:
        for name, value in (
            ("num_layers", self.num_layers),
            ("num_heads", self.num_heads),
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("intermediate_size", self.intermediate_size),
        ):
            _at_least(1, f"drafter.{name}", value)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where documents come from and how they become rows."""

    train: str = ""
    """Token store written by `blockdraft prepare`."""
    row_length: int = 4096
    """Tokens of a packed drafter row (T)."""
    num_rows: int = 1
    """Rows of a micro-batch (R)."""
    num_anchors: int | None = None
    """Anchors of a row (A); None means row_length / 4."""
    sort_window: int = 1024
    """Documents sorted by length together."""
    target_tokens: int = 8192
    """Token budget of one target batch, padding included."""

    def __post_init__(self) -> None:
        _at_least(2, "data.row_length", self.row_length)
        for name, value in (("num_rows", self.num_rows), ("sort_window", self.sort_window)):
            _at_least(1, f"data.{name}", value)
        _at_least(1, "data.num_anchors", self.num_anchors)
        if self.num_anchors is not None and self.num_anchors > self.row_length:
            raise ConfigError(
                f"data.num_anchors must be at most data.row_length ({self.row_length}), got {self.num_anchors}: "
                "an anchor is a token of its row; lower it"
            )


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What is minimised (docs/algorithm.md, section 5)."""

    objective: Literal["ce", "dpace", "kl"] = "ce"
    """ce: cross-entropy of the labels by position weights. dpace: weighted by how likely the block is accepted so far.
    kl: the target's whole distribution in the labels' place; the target then runs to its end."""
    labels: Literal["data", "argmax"] = "data"
    """What counts as correct. argmax: what the target itself would say there; the target then runs to its end."""
    gamma: float | None = None
    """Decay of the position weight (ce, kl); None means: by block size."""
    after_gap: bool = False
    """Go on supervising behind the first unsupervised slot of a block."""
    draft_vocab: Literal["full", "data"] = "full"
    """Ids the head is restricted to in training: all, or those that occur in supervised positions of the data."""
    chunk_rows: int = 2048
    """Block tokens that pass through the head at a time."""

    def __post_init__(self) -> None:
        _at_least(1, "loss.chunk_rows", self.chunk_rows)
        _above_zero("loss.gamma", self.gamma)

    @property
    def needs_final_states(self) -> bool:
        """Whether the target's final hidden states travel with the context features."""
        return self.objective == "kl" or self.labels == "argmax"


LOW_BETA: typing.Final = 0.99
"""Largest beta whose averages bfloat16 can hold: gradients that vanish still make them fall by 1% a step."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and schedule."""

    optimizer: Literal["adamw", "adamw_bf16", "muon"] = "adamw"
    """adamw_bf16: AdamW that keeps its moments in bfloat16. muon: torch.optim.Muon for the matrices, AdamW for the
    rest."""
    lr: float = 6e-4
    """Of the matrices; Muon wants about 0.02."""
    norm_lr: float | None = None
    """Of the norms' weights, by AdamW; None means lr. A calibrated final norm starts small and has far to go."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 1.0
    """Largest norm of the gradient."""
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup: float = 0.04
    """Share of the steps that warm up linearly."""
    decay: float = 0.5
    """Share of the steps, at the end, over which wsd decays linearly."""
    final_lr: float = 0.1
    """Learning rate at the end, as a share of lr."""
    accumulation: int = 1
    """Micro-batches of a step, over all drafters."""
    shard: bool = False
    """Divide masters and moments over the drafters of a node; the numbers of a run stay the same, bit for bit."""
    max_skipped: int = 10
    """Steps that a run may skip because their gradients are not finite; one more ends it."""

    def __post_init__(self) -> None:
        _at_least(1, "optim.accumulation", self.accumulation)
        _at_least(0, "optim.max_skipped", self.max_skipped)
        _above_zero("optim.lr", self.lr)
        _above_zero("optim.norm_lr", self.norm_lr)
        for name, value in (("weight_decay", self.weight_decay), ("final_lr", self.final_lr)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"optim.{name} must be a number from 0 up, got {value}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"optim.betas must be two numbers from 0 up and below 1, got {self.betas}")
        if self.optimizer == "adamw_bf16" and max(self.betas) > LOW_BETA:
            raise ConfigError(
                f"optim.betas: adamw_bf16 keeps averages in bfloat16, which steps that change them by less than 1 in "
                f"256 leave as they are; expected at most {LOW_BETA}, found {self.betas}; lower them, or take "
                "optim.optimizer adamw"
            )
        if not self.clip > 0:
            raise ConfigError(f"optim.clip must be above 0 (a large number clips nothing), got {self.clip}")
        for name, value in (("warmup", self.warmup), ("decay", self.decay)):
            if not 0 <= value <= 1:
                raise ConfigError(f"optim.{name} is a share of the steps and must lie in 0..1, got {value}")


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """Threads, devices and the channel between them."""

    topology: Literal["pool", "pairs", "shared"] = "pool"
    targets: tuple[str, ...] = ("cpu",)
    """Device of each target worker, such as cuda:0; cuda:0+cuda:1 divides one target's layers over two."""
    drafters: tuple[str, ...] = ("cpu",)
    """Device of each drafter worker."""
    channel_depth: int = 2
    """Slots between target and drafter, per drafter."""
    reuse: int = 1
    """Passes over one slot, each with fresh anchors, before it is released."""
    keep_features: bool = False
    """Keep every slot's features in host memory: the target runs once, later epochs reorder the same slots."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """auto: kernels of our own on a Hopper GPU, compiled flex_attention on others, masked SDPA on a CPU."""
    stall_seconds: float = 300.0
    """Print all stacks and stop when nothing moved for this long."""

    def __post_init__(self) -> None:
        _above_zero("runtime.stall_seconds", self.stall_seconds)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Held-out acceptance during the run, by replay."""

    prompts: tuple[str, ...] = ()
    """Held-out sets: files of conversations, of which the target answers the last user turns; or humaneval, gsm8k,
    mtbench."""
    every: int = 100
    """Steps between evaluations; also before the first step and after the last."""
    num_prompts: int = 32
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        _at_least(1, "eval.every", self.every)
        _at_least(1, "eval.num_prompts", self.num_prompts)
        _at_least(1, "eval.max_new_tokens", self.max_new_tokens)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run, resolved: saved as config.json in the run directory and readable back."""

    run_dir: str = "runs/run"
    seed: int = 0
    steps: int | None = None
    """Optimizer steps; None means: by epochs."""
    epochs: float = 6.0
    save_every: int = 500
    keep_last: int = 2
    """Checkpoints kept."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("save_every", self.save_every), ("keep_last", self.keep_last)):
            _at_least(1, name, value)
        if self.drafter.block_size > self.data.row_length:
            raise ConfigError(
                f"drafter.block_size must be at most data.row_length ({self.data.row_length}), got "
                f"{self.drafter.block_size}: no document goes on behind its row's end; lower it (16 is usual)"
            )
        if self.steps is not None and self.steps > MOST_STEPS:
            raise ConfigError(f"steps must be at most {MOST_STEPS:,}, got {self.steps:,}; lower it")
        _at_least(0, "seed", self.seed)
        if self.seed > MOST_SEED:
            raise ConfigError(f"seed must be at most {MOST_SEED:,}, got {self.seed:,}; lower it")
        _above_zero("epochs", self.epochs)
        if not self.run_dir:
            raise ConfigError("run_dir is empty; name the directory that the run writes")


def _at_least(least: int, name: str, value: int | None) -> None:
    """Refuses a number that would only fail, or train nothing, in the middle of a run."""
    if value is not None and value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def _above_zero(name: str, value: float | None) -> None:
    """The same for numbers that are no counts; infinity and NaN are refused too."""
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{name} must be above 0{' and finite' if value > 0 else ''}, got {value}")


def to_json(config: RunConfig) -> str:
    """The config as indented JSON, every default written out."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str, source: str = "config.json") -> RunConfig:
    """Reads what `to_json` wrote; unknown names and wrong types are errors that name the field.

    Raises:
        ConfigError: not JSON, an unknown field, or a value of the wrong type.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}, line {error.lineno}: expected JSON, found {error.msg}") from error
    config: RunConfig = _build(RunConfig, values, source, "")
    return config


def read_config(path: Path) -> RunConfig:
    """Reads a saved config.json."""
    return from_json(path.read_text(encoding="utf-8"), str(path))


class Removed(typing.NamedTuple):
    """A field that saved configs of earlier versions have."""

    default: Any
    """What says nothing, so that it may stay there; None: whatever it says has to go."""
    advice: str


REMOVED: typing.Final = {
    "log_every": Removed(
        None, "console lines come when they are due, and metrics.jsonl has every step; delete the line"
    ),
    "resume": Removed("", "it is a flag of the command now, --resume; delete the line"),
    "runtime.poison": Removed(False, "it is a flag of the command now, --poison; delete the line"),
}


def _build(cls: type, values: Any, source: str, prefix: str) -> Any:
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: {prefix or 'the top level'} must be an object, found {type(values).__name__}")
    hints = typing.get_type_hints(cls)
    known = {f.name for f in dataclasses.fields(cls)}
    values = {name: value for name, value in values.items() if not _says_nothing(prefix + name, value)}
    unknown = sorted(set(values) - known)
    if unknown and prefix + unknown[0] in REMOVED:
        advice = REMOVED[prefix + unknown[0]].advice
        raise ConfigError(f"{source}: {prefix}{unknown[0]} is of an earlier version: {advice}")
    if unknown:
        raise ConfigError(f"{source}: unknown field {prefix}{unknown[0]}; known here: {', '.join(sorted(known))}")
    fields = {name: _value(hints[name], value, source, prefix + name) for name, value in values.items()}
    try:
        return cls(**fields)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error


def _says_nothing(name: str, value: Any) -> bool:
    return name in REMOVED and value is not None and value == REMOVED[name].default


def _value(hint: Any, value: Any, source: str, name: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, source, name + ".")
    if _fits(hint, value):
        return _coerce(hint, value)
    raise ConfigError(f"{source}: {name} must be {_spell(hint)}, found {value!r}")


def _fits(hint: Any, value: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return any(_fits(part, value) for part in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        return isinstance(value, (list, tuple)) and (
            all(_fits(args[0], v) for v in value)
            if len(args) == 2 and args[1] is Ellipsis
            else len(value) == len(args) and all(map(_fits, args, value))
        )
    if hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is hint


def _coerce(hint: Any, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return float(value) if hint is float else value


def _spell(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    return str(hint).replace("typing.", "") if typing.get_origin(hint) else hint.__name__
