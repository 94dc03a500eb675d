"""A target divided over devices: the same numbers, every layer fed on its own device."""

import pytest
import torch

from blockdraft.config import ConfigError
from blockdraft.models import target_split
from blockdraft.models.target import Target
from blockdraft.models.target_split import layer_devices, place, replica_devices
from blockdraft.runtime.devices import check_devices, check_replicas
from integration.tiny import CONFIGS, tiny_target

LAYERS = (1, 3)


def divided(name: str, devices: str) -> Target:
    """The same random weights as `tiny_target(name)`, divided."""
    whole = tiny_target(name)
    return Target(place(whole.model, devices), LAYERS)


def tokens(target: Target) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(3, target.vocab_size, (3, 17), generator=generator)


@pytest.mark.parametrize("devices", ["cpu+cpu", "cpu+cpu+cpu"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_features_of_a_divided_target_are_bit_equal(name, devices):
    whole = tiny_target(name)
    ids_BS = tokens(whole)
    expected = Target(whole.model, LAYERS).features(ids_BS)
    logits = whole.model(input_ids=ids_BS).logits
    target = divided(name, devices)
    assert torch.equal(target.features(ids_BS), expected)
    assert torch.equal(target.model(input_ids=ids_BS).logits, logits)


def test_every_layer_is_fed_through_a_move_to_its_device(monkeypatch):
    # On a CPU a move changes nothing, so each is counted, and made a copy: nothing may depend on sharing memory.
    moved: list[tuple[int, ...]] = []

    def copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cpu")
        moved.append(tuple(tensor.shape))
        return tensor.clone()

    target = divided("qwen3", "cpu+cpu")
    expected = target.features(tokens(target))
    monkeypatch.setattr(target_split, "move", copy)
    moved.clear()
    assert torch.equal(target.features(tokens(target)), expected)
    hidden = [shape for shape in moved if shape == (3, 17, target.hidden_size)]
    assert len(hidden) == LAYERS[-1] + 1, "layers up to the last captured one, each fed once"
    shared = len(moved) - len(hidden)
    target.features(tokens(target))
    assert len(moved) == 2 * (len(hidden) + shared), "what layers share is moved once a forward"
    moved.clear()
    target.model(input_ids=tokens(target))
    assert len([shape for shape in moved if shape == (3, 17, target.hidden_size)]) == target.num_layers + 2


def test_a_divided_target_decodes_with_its_cache():
    whole = tiny_target("qwen3")
    target = Target(whole.model, LAYERS)
    ids_BS = tokens(target)
    plain = target.forward(ids_BS, target.new_cache())
    target = divided("qwen3", "cpu+cpu")
    cache = target.new_cache()
    target.forward(ids_BS[:, :9], cache)
    rest = target.forward(ids_BS[:, 9:], cache)
    torch.testing.assert_close(rest.logits_BSV, plain.logits_BSV[:, 9:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rest.features_BSC, plain.features_BSC[:, 9:], rtol=1e-4, atol=1e-5)


def test_layers_are_divided_evenly():
    devices = replica_devices("cuda:0+cuda:1+cuda:2")
    assert [device.index for device in layer_devices(7, devices)] == [0, 0, 0, 1, 1, 2, 2]
    assert layer_devices(36, devices[:2]) == [devices[0]] * 18 + [devices[1]] * 18
    with pytest.raises(ConfigError, match=r"at most one device a layer \(2 here\), got 3"):
        layer_devices(2, devices)


def test_devices_that_cannot_share_a_target_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    two = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert check_replicas(("cuda:0+cuda:1", "cuda:2")) == [two, [torch.device("cuda", 2)]]
    with pytest.raises(ConfigError, match=r"cpu\+cuda:0 joins a CPU and a GPU"):
        check_replicas(("cpu+cuda:0",))
    with pytest.raises(ConfigError, match=r"cuda:1\+cuda:1 names a GPU twice"):
        check_replicas(("cuda:1+cuda:1",))
    with pytest.raises(ConfigError, match=r"cuda:9 is not here"):
        check_replicas(("cuda:0+cuda:9",))
    with pytest.raises(ConfigError, match=r"runtime\.targets is empty"):
        check_replicas(())
    with pytest.raises(ConfigError, match="a drafter lies on one, only a target is divided"):
        check_devices(("cuda:0+cuda:1",), "drafters")
