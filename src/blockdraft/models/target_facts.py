"""What a target's shapes and conventions are, read off its config and measured on a few tokens.

N any number of tokens, S tokens of a document, V vocabulary, D width.
"""

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.config import ConfigError
from blockdraft.models.drafter import TargetFacts
from blockdraft.models.ends import Ends
from blockdraft.models.target_split import find_text_model

LOGIT_FACTORS: Final = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
"""What families call the number that their logits are multiplied with, or divided by."""


@torch.no_grad()
def find_ends(model: PreTrainedModel, first_layer: nn.Module, final_norm: nn.Module, softcap: float | None) -> Ends:
    """Embedding and head, with the factors that the target's forward puts on them, measured on a few tokens.

    Raises:
        ConfigError: logits recomputed from the last hidden state are not the target's own, or turn around or vanish by
            their factor.
    """
    check_logit_factor(model.config.get_text_config().to_dict())
    head = model.get_output_embeddings()
    if head is None or head.weight is None:
        raise ConfigError(f"{type(model).__name__} has no output head; expected a causal language model")
    embedding = model.get_input_embeddings()
    table = next(embedding.parameters())
    seen: dict[str, Tensor] = {}
    handles = [
        first_layer.register_forward_pre_hook(
            lambda _module, args, kwargs: seen.update(first=args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        ),
        final_norm.register_forward_hook(lambda _module, _args, out: seen.update(last=out)),
    ]
    token_1S = torch.arange(1, 9, device=table.device)[None] % head.weight.shape[0]
    try:
        logits = model(input_ids=token_1S, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    if not torch.isfinite(logits).all():
        raise ConfigError(_not_finite(model, token_1S))
    embedded = embedding(token_1S)
    ends = Ends(
        embedding,
        head.weight,
        embedding_multiplier=_factor(seen["first"], embedded),
        logit_multiplier=1.0,
        logit_softcap=softcap,
    )
    bare = ends.logits(seen["last"].to(head.weight.device))
    if softcap is None:
        ends.logit_multiplier = _factor(logits, bare)
        # Without any product there is none to see; the probe refuses states that are all zero.
        if bare.any() and not ends.logit_multiplier > 0:
            raise ConfigError(
                f"{type(model).__name__}: expected logits that are the head's products times a number above 0, found "
                f"{ends.logit_multiplier:g}; look for that number in its config.json, or take another target"
            )
    spread = logits.float().std().clamp(min=1e-6)
    error = (ends.logits(seen["last"].to(head.weight.device)).float() - logits.float()).abs().max() / spread
    tolerance = 1e-3 if table.dtype == torch.float32 else 5e-2
    if not torch.isfinite(error) or error > tolerance:
        raise ConfigError(
            f"{type(model).__name__}: logits recomputed from final norm and head must equal the target's "
            f"own to {tolerance} of their spread, found {float(error):.3g}; this family has an unknown convention"
        )
    return ends


def _not_finite(model: PreTrainedModel, token_1S: Tensor) -> str:
    """Which layer first puts out what is not finite."""
    layers = dict(find_text_model(model).named_children())["layers"]
    wrong: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def note(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            state = output if isinstance(output, Tensor) else output[0]
            if not torch.isfinite(state).all():
                wrong.append(name)

        return note

    handles = [layer.register_forward_hook(look(f"layer {index}")) for index, layer in enumerate(layers.children())]
    try:
        model(input_ids=token_1S, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return (
        f"target {wrong[0] if wrong else 'head'}: expected finite states for the ids {token_1S[0].tolist()}, found NaN "
        "or infinity; check that the model's files are whole, try --target.dtype float32, or look at the kernels with "
        "`blockdraft doctor`"
    )


def read_facts(config: dict[str, Any], ends: Ends, num_layers: int) -> TargetFacts:
    """What a drafter's shape is derived from, the factors on the ends included."""
    return config_facts(config, ends.vocab_size, num_layers)._replace(
        embedding_multiplier=_row_scale(ends), logit_multiplier=ends.logit_multiplier, logit_softcap=ends.logit_softcap
    )


def check_logit_factor(config: dict[str, Any]) -> None:
    """Refuses a factor on the logits that turns their order around, or leaves none.

    Raises:
        ConfigError: names the field of a text config.
    """
    for name in LOGIT_FACTORS:
        value = config.get(name)
        if isinstance(value, int | float) and not 0 < value < math.inf:
            raise ConfigError(
                f"target.path: {name} in the target's config.json must be a number above 0, since it scales "
                f"the logits, found {value}; copy the config again from where the model is from"
            )


def config_facts(config: dict[str, Any], vocab_size: int, num_layers: int) -> TargetFacts:
    """What a text config in either style says alone; factors on the ends are 1.

    Raises:
        ConfigError: it scales the logits by 0, or by less.
    """
    check_logit_factor(config)
    heads: int = config["num_attention_heads"]
    return TargetFacts(
        hidden_size=config["hidden_size"],
        num_layers=num_layers,
        vocab_size=vocab_size,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        intermediate_size=config.get("intermediate_size") or 3 * config["hidden_size"],
        is_moe=any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts")),
        rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
        rope_theta=rope_theta(config),
        max_position_embeddings=config.get("max_position_embeddings") or 32768,
        embedding_multiplier=1.0,
        logit_multiplier=1.0,
        logit_softcap=None,
    )


@torch.no_grad()
def _row_scale(ends: Ends) -> float:
    """Factor from raw embedding rows to what the layers read, a scale inside the embedding module included."""
    token_N = torch.arange(min(16, ends.vocab_size), device=ends.head_weight.device)
    weight: Tensor = dict(ends.embedding.named_parameters())["weight"]
    return _factor(ends.embed(token_N.to(weight.device)), weight[token_N.to(weight.device)])


def _factor(scaled: Tensor, bare: Tensor) -> float:
    """The constant that turns `bare` into `scaled`; 1 when they agree to rounding."""
    scaled64, bare64 = scaled.double().flatten(), bare.double().flatten()
    ratio = float((scaled64 @ bare64) / (bare64 @ bare64).clamp(min=1e-30))
    return 1.0 if abs(ratio - 1.0) < 1e-3 else ratio


def rope_theta(config: dict[str, Any]) -> float:
    """Base of the rotary angles, from `rope_parameters`; the flat `rope_theta` only where there are none."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    theta = rope.get("rope_theta", config.get("rope_theta"))
    return 10000.0 if theta is None else float(theta)
