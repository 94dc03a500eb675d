"""The probe of a loaded target: a few documents through the whole of it, before any drafter is built.

What the hooks capture must be what the layers put out, must be finite, must not be zero and must differ from position
to position; the frozen ends must recompute the target's own logits. Public trainers trained drafters for days on
states that were all zero (shared recurrent kernels on the wrong path) or off by one layer.

S tokens of a sample, D width, C captured layers, M positions whose logits are compared, V vocabulary.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.models.target import Target

LONGEST: Final = 1024
"""Tokens of a sample that the probe reads; logits of the whole vocabulary are made for each."""
COMPARED: Final = 64
"""Positions of a sample whose logits are recomputed."""
LOW_SHARE: Final = 0.7
"""Share of labels that are the target's own below which a run warns."""


class Sample(NamedTuple):
    """A document, and what messages call it."""

    name: str
    ids_S: Tensor
    supervised_S: Tensor
    """Bool: tokens that count as labels."""


class Agreement(NamedTuple):
    """How far the data are the target's own answers."""

    labels: int
    agreeing: int

    @property
    def share(self) -> float:
        """Share of the labels that equal the target's argmax."""
        return self.agreeing / max(1, self.labels)


class Seen(NamedTuple):
    """What one forward of the whole target showed."""

    first_SD: Tensor
    """What the first layer reads."""
    states: tuple[Tensor, ...]
    """transformers' own hidden states of every layer, each [S, D]."""
    last_SD: Tensor
    """What the final norm reads."""
    normed_SD: Tensor
    logits_SV: Tensor


@torch.no_grad()
def probe(target: Target, samples: Sequence[Sample]) -> Agreement:
    """Checks captured states and ends on every sample; returns how many labels are the target's argmax.

    Raises:
        ConfigError: names the check, the layer and the sample, with what was expected and found.
    """
    labels = agreeing = 0
    for sample in samples:
        ids_S = sample.ids_S[:LONGEST].to(target.device)
        supervised_S = sample.supervised_S[:LONGEST].to(target.device)
        captured = target.features(ids_S[None])[0].split(target.hidden_size, dim=-1)
        hooked = plain_states(target, ids_S)
        seen = look(target, ids_S)
        for layer, state_SD, hooked_SD in zip(target.layer_ids, captured, hooked, strict=True):
            check_state(state_SD, ids_S, layer, sample.name)
            check_layer(hooked_SD, seen, layer, sample.name)
            check_nearest(state_SD, seen, layer, sample.name)
        check_ends(target, seen, ids_S, sample.name)
        choice_S = seen.logits_SV[:-1].argmax(-1).to(ids_S.device)
        labels += int(supervised_S[1:].sum())
        agreeing += int(((choice_S == ids_S[1:]) & supervised_S[1:]).sum())
    return Agreement(labels, agreeing)


def plain_states(target: Target, ids_S: Tensor) -> list[Tensor]:
    """What the hooks capture from the target's own forward, each [S, D], whatever pass computes features."""
    columns: list[Tensor] = []
    target.capture_plain(ids_S[None], lambda _column, hidden_BSD: columns.append(hidden_BSD[0]))
    return columns


def look(target: Target, ids_S: Tensor) -> Seen:
    """One forward of the whole target with every hidden state.

    Raises:
        ConfigError: the model gives no hidden states.
    """
    found: dict[str, Tensor] = {}
    handles = [
        target.layers[0].register_forward_pre_hook(
            lambda _module, args, kwargs: found.update(first=args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        ),
        target.final_norm.register_forward_pre_hook(lambda _module, args: found.update(last=args[0])),
        target.final_norm.register_forward_hook(lambda _module, _args, out: found.update(normed=out)),
    ]
    try:
        output = target.model(input_ids=ids_S[None], use_cache=False, output_hidden_states=True)
    finally:
        for handle in handles:
            handle.remove()
    if output.hidden_states is None:
        raise ConfigError(
            f"target.path: expected a model that gives its hidden states, found {type(target.model).__name__} without; "
            "without them no captured layer can be checked"
        )
    states = tuple(state[0] for state in output.hidden_states)
    return Seen(found["first"][0], states, found["last"][0], found["normed"][0], output.logits[0])


def check_state(state_SD: Tensor, ids_S: Tensor, layer: int, sample: str) -> None:
    """A captured state is finite, not zero, and not the same at every position."""
    where = f"target layer {layer}, {sample}: expected captured states"
    fix = (
        "the run would train on nothing. Try --target.dtype float32, look at the kernels with `blockdraft doctor`, or "
        "choose other layers with drafter.target_layer_ids"
    )
    wrong_S = ~torch.isfinite(state_SD).all(-1)
    if wrong_S.any():
        first = int(wrong_S.nonzero()[0])
        raise ConfigError(
            f"{where} that are finite, found NaN or infinity at {int(wrong_S.sum())} of {len(wrong_S)} positions, the "
            f"first at {first}; {fix}"
        )
    if not state_SD.any():
        raise ConfigError(f"{where} that are not zero, found zeros at all {len(state_SD)} positions; {fix}")
    # A text of one token may well give one state.
    if bool((ids_S != ids_S[0]).any()) and bool((state_SD == state_SD[:1]).all()):
        raise ConfigError(
            f"{where} that vary over positions, found the same state at all {len(state_SD)} positions; {fix}"
        )


def check_layer(state_SD: Tensor, seen: Seen, layer: int, sample: str) -> None:
    """What the hook of layer l captured is hidden_states[l + 1]; of the last layer, what the final norm reads."""
    is_last = layer + 2 == len(seen.states)
    # transformers puts the final norm on the last entry.
    expected_SD = seen.last_SD if is_last else seen.states[layer + 1]
    difference = _relative(state_SD, expected_SD.to(state_SD.device))
    limit = 1e-3 if state_SD.dtype == torch.float32 else 3e-2
    if not difference <= limit:
        name = "the input of the final norm" if is_last else f"hidden_states[{layer + 1}]"
        raise ConfigError(
            f"target layer {layer}, {sample}: expected the captured states to equal {name} to {limit:g} of their "
            f"length, found {difference:.3g}; this family's layers put out something else than its hidden states"
        )


def check_nearest(state_SD: Tensor, seen: Seen, layer: int, sample: str) -> None:
    """Features of layer l, by whatever pass and in whatever products, are nearer to that layer's output than to others.

    Rounding differs from pass to pass; another layer's output differs by more than any rounding.
    """
    # transformers puts the final norm on the last entry.
    outputs = [*seen.states[:-1], seen.last_SD]
    places = [index for index in (layer, layer + 1, layer + 2) if index < len(outputs)]
    # Of the median position: some tokens' states hardly change from layer to layer.
    distance = {index: float(_differences(state_SD, outputs[index].to(state_SD.device)).median()) for index in places}
    nearest = min(places, key=lambda index: distance[index])
    if nearest != layer + 1:
        raise ConfigError(
            f"target layer {layer}, {sample}: expected context features nearest to that layer's output, found them "
            f"{distance[layer + 1]:.3g} of its length away and {distance[nearest]:.3g} from the output of layer "
            f"{nearest - 1}; use --target.dtype bfloat16 if it is float8, and report the target's family"
        )


def check_ends(target: Target, seen: Seen, ids_S: Tensor, sample: str) -> None:
    """Embedding, head and final norm give the target's own first states and logits."""
    limit = 1e-3 if target.dtype == torch.float32 else 5e-2
    embedded_SD = target.ends.embed(ids_S)
    difference = _relative(embedded_SD, seen.first_SD.to(embedded_SD.device))
    if not difference <= limit:
        raise ConfigError(
            f"{sample}: expected the embedding to give what the target's first layer reads to {limit:g} of its length, "
            f"found {difference:.3g}; this family has an unknown convention"
        )
    chosen_M = torch.linspace(0, len(ids_S) - 1, min(COMPARED, len(ids_S)), device=seen.normed_SD.device).long()
    normed_MD = seen.normed_SD[chosen_M].to(target.ends.head_weight.device)
    logits_MV = seen.logits_SV[chosen_M.to(seen.logits_SV.device)].to(normed_MD.device).float()
    error = (target.ends.logits(normed_MD).float() - logits_MV).abs().max() / logits_MV.std().clamp(min=1e-6)
    if not error <= limit:
        raise ConfigError(
            f"{sample}: expected final norm and head to recompute the target's logits to {limit:g} of their spread, "
            f"found {float(error):.3g}; this family has an unknown convention"
        )


def _relative(found_SD: Tensor, expected_SD: Tensor) -> float:
    """The largest difference of a position, as a share of its expected length."""
    return float(_differences(found_SD, expected_SD).max())


def _differences(found_SD: Tensor, expected_SD: Tensor) -> Tensor:
    """Of each position, as a share of its expected length, [S]."""
    found_SD, expected_SD = found_SD.float(), expected_SD.float()
    length_S = torch.linalg.vector_norm(expected_SD, dim=-1).clamp(min=1e-12)
    shares_S: Tensor = torch.linalg.vector_norm(found_SD - expected_SD, dim=-1) / length_S
    return shares_S
