"""The frozen target: any transformers causal language model, its context features, its frozen ends.

B documents of a target batch, S tokens of a document, D width, C captured layers, V vocabulary.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

from blockdraft.config import ConfigError, TargetConfig
from blockdraft.data.hub import is_model_cached, nearest, only_cached
from blockdraft.models.drafter import default_layer_ids
from blockdraft.models.kernels import use_torch_on_cpu
from blockdraft.models.packed_check import one_document_a_row, skip_packed_check
from blockdraft.models.target_facts import find_ends, read_facts
from blockdraft.models.target_fast_ops import Ops
from blockdraft.models.target_pass import check_float8, choose_pass, tune_recurrent
from blockdraft.models.target_split import find_text_model, place, replica_devices

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class TargetOutput(NamedTuple):
    """One cached forward of the whole target."""

    logits_BSV: Tensor
    features_BSC: Tensor
    """Captured layers side by side, [B, S, C * D]."""


class _Captured(Exception):
    """Ends a forward after the last captured layer; raised in a hook, caught by `Target.capture`."""


class Target:
    """A loaded target. One thread uses it at a time: hooks hand each captured layer to the call in progress."""

    def __init__(
        self,
        model: PreTrainedModel,
        layer_ids: tuple[int, ...] | None,
        num_drafter_layers: int = 5,
        *,
        ops: Ops | None = None,
        float8: bool = False,
    ) -> None:
        """Wraps a model that lies on its device already; `ops` and `float8` are those of `choose_pass`.

        Raises:
            ConfigError: no text model, layer list, final norm or head is found, a layer id is out of range, or the
                target cannot run in float8.
        """
        self.model = model
        model.eval()
        model.requires_grad_(False)
        self.text_model = find_text_model(model)
        parts = dict(self.text_model.named_children())
        self.layers, self.final_norm = cast(nn.ModuleList, parts["layers"]), parts["norm"]
        self.text_config = model.config.get_text_config()
        self.num_layers = len(self.layers)
        if self.device.type == "cpu":
            use_torch_on_cpu(model)
        skip_packed_check()
        tune_recurrent(self.text_model)
        self.layer_ids = layer_ids or default_layer_ids(self.num_layers, num_drafter_layers)
        if not all(0 <= layer < self.num_layers for layer in self.layer_ids):
            raise ConfigError(
                f"drafter.target_layer_ids must lie in 0..{self.num_layers - 1} (the target has {self.num_layers} "
                f"layers), got {list(self.layer_ids)}"
            )
        self._write: Callable[[int, Tensor], None] | None = None
        self._stop_early = False
        for column, layer in enumerate(self.layer_ids):
            self.layers[layer].register_forward_hook(self._hook(column))
        self._runs_to_end = False
        self.final_norm.register_forward_hook(self._hand_over_final)
        values: dict[str, Any] = self.text_config.to_dict()
        self.hidden_size: int = self.text_config.hidden_size
        self.stop_ids = stop_ids(self.model)
        self.pad_id = self.stop_ids[0] if self.stop_ids else 0
        self.ends = find_ends(model, self.layers[0], self.final_norm, values.get("final_logit_softcapping"))
        self.facts = read_facts(values, self.ends, self.num_layers)
        self.fast, self.note = choose_pass(self.text_model, self.ends, self.layer_ids, ops=ops, float8=float8)
        self._is_whole = True

    @staticmethod
    def load(
        config: TargetConfig,
        *,
        device: str | torch.device = "cpu",
        layer_ids: tuple[int, ...] | None = None,
        num_drafter_layers: int = 5,
    ) -> "Target":
        """Loads a directory, a .gguf file or a hub name onto a device, or onto several joined by plus signs.

        Raises:
            ConfigError: the path holds no model, or not all of its weights, or no causal language model is in it.
        """
        is_float8 = config.dtype == "float8"
        if is_float8:
            check_float8(device)
        source, extra = source_of(config.path)
        extra["trust_remote_code"] = config.trust_remote_code
        try:
            model_config = AutoConfig.from_pretrained(source, **extra)
            kind = AutoModelForCausalLM if is_causal(model_config) else AutoModelForImageTextToText
            dtype = DTYPES[choose_dtype(config.dtype, device)]
            # With the loading info it answers a pair, whatever its annotation says.
            loaded: Any = kind.from_pretrained(source, dtype=dtype, output_loading_info=True, **extra)
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(
                f"target.path must be a transformers model directory, a .gguf file or a hub name; "
                f"{config.path!r} could not be loaded: {error}"
            ) from error
        model, found = loaded
        _check_whole(config.path, model, found["missing_keys"])
        if Path(config.path).suffix == ".gguf":
            forget_quantization(model)
        return Target(place(model, device), layer_ids, num_drafter_layers, float8=is_float8)

    @property
    def device(self) -> torch.device:
        """Where the first layer lies."""
        return next(self.text_model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return next(self.text_model.parameters()).dtype

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.ends.vocab_size

    def _hook(self, column: int) -> Callable[..., None]:
        is_last = column == len(self.layer_ids) - 1

        def hand_over(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            if self._write is not None:
                hidden_BSD = output if isinstance(output, Tensor) else output[0]
                self._write(column, hidden_BSD.to(self.device))
                if is_last and self._stop_early:
                    raise _Captured

        return hand_over

    def _hand_over_final(self, _module: nn.Module, _inputs: object, hidden_BSD: Tensor) -> None:
        if self._write is not None and self._runs_to_end:
            self._write(len(self.layer_ids), hidden_BSD.to(self.device))

    @torch.no_grad()
    def capture_with_final(self, input_ids_BS: Tensor, write: Callable[[int, Tensor], None]) -> None:
        """As `capture`, but runs to the end: column C receives the final-normed hidden states, which the head reads."""
        assert self._is_whole, "the target's last layers were dropped"
        if self.fast is not None:
            self.fast.run(input_ids_BS, write, with_final=True)
            return
        self._write, self._runs_to_end = write, True
        try:
            with one_document_a_row():
                self.text_model(input_ids=input_ids_BS, use_cache=False)
        finally:
            self._write, self._runs_to_end = None, False

    def capture(self, input_ids_BS: Tensor, write: Callable[[int, Tensor], None]) -> None:
        """Runs the target up to its last captured layer; `write(column, hidden_BSD)` receives each captured layer.

        Rows may be padded on the right: a causal target's outputs before the padding do not depend on it.
        """
        if self.fast is not None:
            self.fast.run(input_ids_BS, write)
        else:
            self.capture_plain(input_ids_BS, write)

    @torch.no_grad()
    def capture_plain(self, input_ids_BS: Tensor, write: Callable[[int, Tensor], None]) -> None:
        """`capture` by transformers' own forward, whatever pass was chosen."""
        self._write, self._stop_early = write, True
        try:
            with one_document_a_row():
                self.text_model(input_ids=input_ids_BS, use_cache=False)
        except _Captured:
            return
        finally:
            self._write, self._stop_early = None, False
        raise AssertionError("the target's forward ended without reaching its last captured layer")

    def features(self, input_ids_BS: Tensor) -> Tensor:
        """Context features [B, S, C * D] of a batch of documents."""
        columns: list[Tensor] = []
        self.capture(input_ids_BS, lambda _column, hidden_BSD: columns.append(hidden_BSD))
        return torch.cat(columns, dim=-1)

    @torch.no_grad()
    def forward(
        self,
        input_ids_BS: Tensor,
        cache: DynamicCache,
        *,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int = 0,
    ) -> TargetOutput:
        """One forward of the whole target that extends `cache`; `logits_to_keep` 0 keeps all positions' logits."""
        assert self._is_whole, "the target's last layers were dropped"
        columns: list[Tensor] = []
        self._write = lambda _column, hidden_BSD: columns.append(hidden_BSD)
        try:
            output = self.model(
                input_ids=input_ids_BS,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=logits_to_keep,
            )
        finally:
            self._write = None
        return TargetOutput(output.logits, torch.cat(columns, dim=-1))

    def drop_decoding(self) -> None:
        """Frees what only decoding and final hidden states need: layers after the last captured one, and with float8
        products the 16-bit weights beside them."""
        self._is_whole = False
        del self.layers[max(self.layer_ids) + 1 :]
        if self.fast is not None:
            self.fast.drop_decoding()

    def new_cache(self) -> DynamicCache:
        """An empty cache whose attention layers can be cropped, sliding-window ones included."""
        cache = DynamicCache(config=self.text_config)
        for layer in cache.layers:
            # Not for recurrent layers: those would keep every convolution state and lose their one-token kernel.
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.activate_past_recording()
        return cache


def choose_dtype(name: str, device: str | torch.device) -> Literal["bfloat16", "float32"]:
    """Resolves `auto`: bfloat16, but float32 on a CPU without bfloat16 instructions, which would emulate it slowly.

    A float8 target is loaded in bfloat16.
    """
    if name != "auto":
        return "float32" if name == "float32" else "bfloat16"
    is_slow = replica_devices(device)[0].type == "cpu" and not (
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return "float32" if is_slow else "bfloat16"


def stop_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end an answer: those of the generation config, else of the model's config."""
    sources: list[Any] = [model.generation_config, model.config, model.config.get_text_config()]
    for source in sources:
        found = None if source is None else source.eos_token_id
        if found is not None:
            return tuple(found) if isinstance(found, (list, tuple)) else (int(found),)
    return ()


def forget_quantization(model: PreTrainedModel) -> None:
    """Weights read from GGUF are plain tensors: drops the marks that keep transformers from saving them."""
    for holder, name in ((model.config, "quantization_config"), (model, "hf_quantizer")):
        if name in vars(holder):
            delattr(holder, name)
    vars(model)["is_quantized"] = False


def _check_whole(path: str, model: PreTrainedModel, missing_keys: Iterable[str]) -> None:
    """Refuses a model some of whose weights are in no file: transformers fills them with random numbers, and warns."""
    missing = sorted({name for name, _ in model.named_parameters()} & set(missing_keys))
    if missing:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ConfigError(
            f"{path}: expected the weights of the whole model, found none for {shown}; download or copy its weight "
            "files again"
        )


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The target's tokenizer, from a directory, a .gguf file or a hub name.

    Raises:
        ConfigError: there is none.
    """
    source, extra = source_of(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, **extra
        )
    except (OSError, ValueError) as error:
        # What transformers says then is about packages for conversion, which would not help.
        if Path(path).is_dir() and not _has_tokenizer(Path(path)):
            raise ConfigError(_no_tokenizer(path)) from error
        raise ConfigError(
            f"{path!r}: expected a target with a tokenizer, found none that can be read: {error}"
        ) from error
    # For some families transformers makes a tokenizer without any file: it knows its special tokens alone.
    if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
        raise ConfigError(_no_tokenizer(path))
    return tokenizer


def _has_tokenizer(directory: Path) -> bool:
    """Whether a file is there that may hold a vocabulary, or code that makes one, whatever the family calls it."""
    patterns = ("tokenizer.json", "*vocab*", "*.model", "*.tiktoken", "tekken.json", "tokeniz*.py")
    return any(any(directory.glob(pattern)) for pattern in patterns)


def _no_tokenizer(path: str) -> str:
    return (
        f"{path}: expected the target's tokenizer in it (tokenizer.json, or tokenizer.model, or vocab.json with "
        "merges.txt; beside it tokenizer_config.json and chat_template.jinja), found no file with a vocabulary; copy "
        "these files from where the model is from, or save them there with the tokenizer's save_pretrained"
    )


def mask_token_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int, seen: set[int], stop: tuple[int, ...]) -> int:
    """The token that stands for an undrafted slot (docs/algorithm.md, section 2).

    The first embedding row beyond the tokenizer's ids; if there is none, the last special token that is not eos, pad
    or bos and is not `seen` in the data.

    Raises:
        ConfigError: there is neither.
    """
    known = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0))
    if known < vocab_size:
        return known
    used = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id, *stop, *seen}
    special = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special and index not in used]
    if not special:
        raise ConfigError(
            f"no mask token: the tokenizer's {known} ids fill the embedding ({vocab_size} rows) and every special "
            "token is in use; name one that never occurs in the data with drafter.mask_token_id"
        )
    return max(special)


def source_of(path: str) -> tuple[str, dict[str, Any]]:
    """What transformers loads from, and its options: a .gguf file is a name in its directory.

    Raises:
        ConfigError: nothing is there, found out without waiting for the hub's client to give up.
    """
    if not path:
        raise ConfigError("target.path is empty; give a model directory, a .gguf file or a hub name")
    file = Path(path)
    if file.suffix == ".gguf":
        if not file.is_file():
            raise ConfigError(f"target.path {path!r} names no file: {nearest(path)}")
        return str(file.parent), {"gguf_file": file.name}
    expected = "target.path: expected a model directory, a .gguf file or a hub name"
    return path, {"local_files_only": True} if only_cached(path, expected, is_model_cached) else {}


def is_causal(config: PreTrainedConfig) -> bool:
    """Whether it is a causal language model's config; otherwise the model is a wrapper around one."""
    return type(config) in AutoModelForCausalLM._model_mapping
