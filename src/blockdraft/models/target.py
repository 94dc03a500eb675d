"""The frozen target: any transformers causal language model, its context features, its frozen ends.

B documents of a target batch, S tokens of a document, D width, C captured layers, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
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

from blockdraft.config import ConfigError, TargetConfig
from blockdraft.models.drafter import default_layer_ids
from blockdraft.models.ends import Ends

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

    def __init__(self, model: PreTrainedModel, layer_ids: tuple[int, ...] | None, num_drafter_layers: int = 5) -> None:
        """Wraps a model that lies on its device already.

        Raises:
            ConfigError: no text model, layer list, final norm or head is found, or a layer id is out of range.
        """
        self.model = model.eval().requires_grad_(False)
        self.text_model = find_text_model(model)
        self.layers: nn.ModuleList = self.text_model.layers
        self.text_config = model.config.get_text_config()
        self.num_layers = len(self.layers)
        self.layer_ids = layer_ids or default_layer_ids(self.num_layers, num_drafter_layers)
        if not all(0 <= layer < self.num_layers for layer in self.layer_ids):
            raise ConfigError(
                f"drafter.target_layer_ids must lie in 0..{self.num_layers - 1} (the target has {self.num_layers} layers), "
                f"got {list(self.layer_ids)}"
            )
        self._write: Callable[[int, Tensor], None] | None = None
        self._stop_early = False
        for column, layer in enumerate(self.layer_ids):
            self.layers[layer].register_forward_hook(self._hook(column))
        self._read_facts()
        self.ends = self._find_ends()

    @staticmethod
    def load(
        config: TargetConfig,
        *,
        device: str | torch.device = "cpu",
        layer_ids: tuple[int, ...] | None = None,
        num_drafter_layers: int = 5,
    ) -> "Target":
        """Loads a directory, a .gguf file or a hub name onto one device.

        Raises:
            ConfigError: the path holds no model, or the model has no causal language model in it.
        """
        source, extra = _source(config.path)
        extra["trust_remote_code"] = config.trust_remote_code
        try:
            model_config = AutoConfig.from_pretrained(source, **extra)
            kind = AutoModelForCausalLM if _is_causal(model_config) else AutoModelForImageTextToText
            model = kind.from_pretrained(source, dtype=DTYPES[config.dtype], **extra)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"target.path must be a transformers model directory, a .gguf file or a hub name; "
                f"{config.path!r} could not be loaded: {error}"
            ) from error
        if Path(config.path).suffix == ".gguf":
            forget_quantization(model)
        return Target(model.to(torch.device(device)), layer_ids, num_drafter_layers)

    def _read_facts(self) -> None:
        config = self.text_config
        values: dict[str, Any] = config.to_dict()
        self.hidden_size: int = config.hidden_size
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = values.get("num_key_value_heads") or config.num_attention_heads
        self.head_dim: int = values.get("head_dim") or config.hidden_size // config.num_attention_heads
        self.is_moe = any(key in values for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        self.intermediate_size: int = values.get("intermediate_size") or 3 * config.hidden_size
        self.rms_norm_eps: float = values.get("rms_norm_eps") or 1e-6
        self.rope_theta = rope_theta(values)
        self.max_position_embeddings: int = values.get("max_position_embeddings") or 32768
        self.logit_softcap: float | None = values.get("final_logit_softcapping")
        self.stop_ids = stop_ids(self.model)
        self.pad_id = self.stop_ids[0] if self.stop_ids else 0

    @property
    def device(self) -> torch.device:
        """Where the first layer lies."""
        return next(self.text_model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return next(self.text_model.parameters()).dtype

    @property
    def embedding_multiplier(self) -> float:
        """Factor on the raw embedding rows, a scale inside the embedding module included."""
        probe = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        weight: Tensor = self.model.get_input_embeddings().weight
        embedded, raw = self.ends.embed(probe)[0, 0].double(), weight[0].double()
        if not raw.any():
            probe, raw = probe + 1, weight[1].double()
            embedded = self.ends.embed(probe)[0, 0].double()
        ratio = float(embedded @ raw / (raw @ raw).clamp(min=1e-30))
        return 1.0 if abs(ratio - 1.0) < 1e-6 else ratio

    @property
    def logit_multiplier(self) -> float:
        """Factor on the bare product of hidden states and head."""
        return self.ends.logit_multiplier

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.ends.vocab_size

    def _hook(self, column: int) -> Callable[..., None]:
        is_last = column == len(self.layer_ids) - 1

        def hand_over(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            if self._write is not None:
                self._write(column, output if isinstance(output, Tensor) else output[0])
                if is_last and self._stop_early:
                    raise _Captured

        return hand_over

    @torch.no_grad()
    def capture(self, input_ids_BS: Tensor, write: Callable[[int, Tensor], None]) -> None:
        """Runs the target up to its last captured layer; `write(column, hidden_BSD)` receives each captured layer.

        Rows may be padded on the right: a causal target's outputs before the padding do not depend on it.
        """
        self._write, self._stop_early = write, True
        try:
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

    def new_cache(self) -> DynamicCache:
        """An empty key/value cache that can be cropped, sliding-window layers included."""
        cache = DynamicCache(config=self.text_config)
        cache.activate_past_recording()
        return cache

    @torch.no_grad()
    def _find_ends(self) -> Ends:
        """Embedding and head, with the factors that the target's forward puts on them, measured on a few tokens.

        Raises:
            ConfigError: logits recomputed from the last hidden state are not the target's own.
        """
        head = self.model.get_output_embeddings()
        if head is None or head.weight is None:
            raise ConfigError(f"{type(self.model).__name__} has no output head; expected a causal language model")
        embedding = self.model.get_input_embeddings()
        seen: dict[str, Tensor] = {}
        handles = [
            self.layers[0].register_forward_pre_hook(
                lambda _module, args, kwargs: seen.update(first=args[0] if args else kwargs["hidden_states"]),
                with_kwargs=True,
            ),
            self.text_model.norm.register_forward_hook(lambda _module, _args, out: seen.update(last=out)),
        ]
        token_1S = torch.arange(1, 9, device=self.device)[None] % head.weight.shape[0]
        try:
            logits = self.model(input_ids=token_1S, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()
        embedded = embedding(token_1S)
        ends = Ends(
            embedding,
            head.weight,
            embedding_multiplier=_factor(seen["first"], embedded),
            logit_multiplier=1.0,
            logit_softcap=self.logit_softcap,
        )
        bare = ends.logits(seen["last"].to(head.weight.device))
        if self.logit_softcap is None:
            ends.logit_multiplier = _factor(logits, bare)
        spread = logits.float().std().clamp(min=1e-6)
        error = (ends.logits(seen["last"].to(head.weight.device)).float() - logits.float()).abs().max() / spread
        tolerance = 1e-3 if self.dtype == torch.float32 else 5e-2
        if not torch.isfinite(error) or error > tolerance:
            raise ConfigError(
                f"{type(self.model).__name__}: logits recomputed from the final norm and the head must equal the target's "
                f"own to {tolerance} of their spread, found {float(error):.3g}; this family has an unknown convention"
            )
        return ends


def _factor(scaled: Tensor, bare: Tensor) -> float:
    """The constant that turns `bare` into `scaled`; 1 when they agree to rounding."""
    scaled64, bare64 = scaled.double().flatten(), bare.double().flatten()
    ratio = float((scaled64 @ bare64) / (bare64 @ bare64).clamp(min=1e-30))
    return 1.0 if abs(ratio - 1.0) < 1e-2 else ratio


def find_text_model(model: PreTrainedModel) -> nn.Module:
    """The decoder stack (with `layers` and `norm`) of a causal language model or of a vision-language wrapper.

    Raises:
        ConfigError: no such stack is found.
    """
    expected = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        parts = dict(module.named_children())
        layers, norm = parts.get("layers"), parts.get("norm")
        if isinstance(layers, nn.ModuleList) and len(layers) == expected and norm is not None and "embed_tokens" in parts:
            return module
    raise ConfigError(
        f"{type(model).__name__}: expected a text model with embed_tokens, {expected} layers and a final norm, found none; "
        "the target must be a decoder-only language model or a wrapper around one"
    )


def rope_theta(config: dict[str, Any]) -> float:
    """Base of the rotary angles, from `rope_parameters`; the flat `rope_theta` only where there are none."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return 10000.0 if theta is None else float(theta)


def stop_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Ids that end an answer: those of the generation config, else of the model's config."""
    sources = [model.generation_config, model.config, model.config.get_text_config()]
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
    model.is_quantized = False


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The target's tokenizer, from a directory, a .gguf file or a hub name.

    Raises:
        ConfigError: there is none.
    """
    source, extra = _source(path)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, **extra
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r}: expected a target with a tokenizer, found none: {error}") from error
    return tokenizer


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
            f"no mask token: the tokenizer's {known} ids fill the embedding ({vocab_size} rows) and every special token is "
            "in use; name one that never occurs in the data with drafter.mask_token_id"
        )
    return max(special)


def _source(path: str) -> tuple[str, dict[str, Any]]:
    if not path:
        raise ConfigError("target.path is empty; give a model directory, a .gguf file or a hub name")
    file = Path(path)
    if file.suffix == ".gguf":
        if not file.is_file():
            raise ConfigError(f"target.path {path!r} names no file")
        return str(file.parent), {"gguf_file": file.name}
    return path, {}


def _is_causal(config: PreTrainedConfig) -> bool:
    return type(config) in AutoModelForCausalLM._model_mapping
