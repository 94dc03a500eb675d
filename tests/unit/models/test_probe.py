"""The probe refuses a target whose captured states or ends are not what they should be; case 9."""

import pytest
import torch
from torch import Tensor, nn

from blockdraft.config import ConfigError
from blockdraft.models import probe as module
from blockdraft.models.probe import Sample, probe
from blockdraft.models.target import Target
from integration.tiny import plain_answer, tiny_target
from unit.models.test_target import EVERY, make


def sample(ids: list[int], prompt: int = 4) -> Sample:
    supervised_S = torch.arange(len(ids)) >= prompt
    return Sample("document 7 of the store", torch.tensor(ids), supervised_S)


def spoil(target: Target, layer: int, change) -> None:
    """Puts a fault behind a layer, where the target's own hooks of later registration see it."""
    hooks = target.layers[layer]._forward_hooks
    before = dict(hooks)
    hooks.clear()

    def fault(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> object:
        state = output if isinstance(output, Tensor) else output[0]
        changed = change(state)
        return changed if isinstance(output, Tensor) else (changed, *output[1:])

    target.layers[layer].register_forward_hook(fault)
    hooks.update(before)


@pytest.mark.parametrize("name", EVERY)
def test_every_family_and_every_wrapper_passes(name: str) -> None:
    target = make(name, layer_ids=(0, 3, 5))
    found = probe(target, [sample([5, 9, 77, 4, 31, 12, 8, 60])])
    assert found.labels == 4


def test_the_targets_own_answer_agrees_fully() -> None:
    target = tiny_target("qwen3")
    prompt = [5, 9, 77, 4]
    answer = plain_answer(target, prompt, 12)
    assert probe(target, [sample(prompt + answer)]) == (12, 12)
    # Off by one, hardly any would.
    assert probe(target, [sample(prompt + answer[1:] + answer[:1])]).share < 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (torch.zeros_like, "that are not zero, found zeros at all 8 positions"),
        (lambda state: state[:, :1].expand_as(state).clone(), "found the same state at all 8 positions"),
        (
            lambda state: torch.where(torch.arange(8)[None, :, None] == 3, float("nan"), state),
            "finite, found NaN or infinity at 1 of 8 positions, the first at 3",
        ),
    ],
)
def test_states_that_carry_nothing_are_refused(change, message: str) -> None:
    target = tiny_target("qwen3_5", layer_ids=(1, 4))
    spoil(target, 1, change)
    with pytest.raises(ConfigError, match=f"target layer 1, document 7 of the store: expected .*{message}"):
        probe(target, [sample([5, 9, 77, 4, 31, 12, 8, 60])])


def test_a_text_of_one_token_may_give_one_state() -> None:
    target = tiny_target("llama", layer_ids=(1, 4))
    spoil(target, 1, lambda state: state[:, :1].expand_as(state).clone())
    spoil(target, 4, lambda state: state[:, :1].expand_as(state).clone())
    assert probe(target, [sample([9] * 8)]).labels == 4


def test_a_hook_off_by_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3", layer_ids=(1, 4))
    wrong = tiny_target("qwen3", layer_ids=(2, 4))
    monkeypatch.setattr(target, "capture_plain", wrong.capture_plain)
    with pytest.raises(ConfigError, match=r"target layer 1, document 7.*to equal hidden_states\[2\]"):
        probe(target, [sample([5, 9, 77, 4, 31, 12, 8, 60])])


@pytest.mark.parametrize("other", [0, 2])
def test_features_of_another_layer_are_refused_whatever_their_rounding(other, monkeypatch) -> None:
    target = tiny_target("qwen3", layer_ids=(1, 4))
    rounded = target.features
    monkeypatch.setattr(target, "features", lambda ids: rounded(ids) * (1 + 0.3 * torch.randn(32)).repeat(2))
    probe(target, [sample([5, 9, 77, 4, 31, 12, 8, 60])])
    monkeypatch.setattr(target, "features", tiny_target("qwen3", layer_ids=(other, 4)).features)
    with pytest.raises(ConfigError, match=r"target layer 1, document 7.*expected context features nearest"):
        probe(target, [sample([5, 9, 77, 4, 31, 12, 8, 60])])


def test_the_last_layer_is_compared_before_the_final_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("qwen3", layer_ids=(5,))
    captured = target.capture_plain
    monkeypatch.setattr(
        target, "capture_plain", lambda ids, write: captured(ids, lambda column, state: write(column, state * 1.01))
    )
    with pytest.raises(ConfigError, match="to equal the input of the final norm"):
        probe(target, [sample([5, 9, 77, 4, 31, 12, 8, 60])])


@pytest.mark.parametrize(("factor", "message"), [("embedding", "the embedding"), ("logit", "final norm and head")])
def test_ends_with_a_wrong_factor_are_refused(factor: str, message: str) -> None:
    target = tiny_target("gemma3")
    setattr(target.ends, f"{factor}_multiplier", 1.5)
    with pytest.raises(ConfigError, match=f"document 7 of the store: expected {message}"):
        probe(target, [sample([5, 9, 77, 4, 31, 12, 8, 60])])


def test_long_documents_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST", 6)
    target = tiny_target("llama", layer_ids=(1, 4))
    assert probe(target, [sample(list(range(3, 40)))]).labels == 2
