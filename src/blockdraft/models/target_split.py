"""One target over several devices: its layers divided evenly, hidden states handed on by hooks.

`cuda:0+cuda:1` names a replica: embedding and head lie on the first device, where features are gathered as well, the
final norm on the last. Whatever a layer is called with is moved to its device.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blockdraft.config import ConfigError


def replica_devices(name: str | torch.device) -> list[torch.device]:
    """The devices that a replica's name joins with plus signs."""
    return [torch.device(part) for part in str(name).split("+")]


def layer_devices(num_layers: int, devices: list[torch.device]) -> list[torch.device]:
    """The device of each layer: as many for each, in order.

    Raises:
        ConfigError: there are more devices than layers.
    """
    if len(devices) > num_layers:
        raise ConfigError(
            f"runtime.targets: a replica may span at most one device a layer ({num_layers} here), got {len(devices)}"
        )
    return [devices[index * len(devices) // num_layers] for index in range(num_layers)]


def place(model: PreTrainedModel, name: str | torch.device) -> PreTrainedModel:
    """Moves a loaded model to its device, or divides it over several.

    Raises:
        ConfigError: more devices than layers, or no text model is found.
    """
    devices = replica_devices(name)
    home = devices[0]
    if len(devices) == 1:
        return cast(PreTrainedModel, model.to(home))  # type: ignore[arg-type]
    parts = dict(find_text_model(model).named_children())
    layers, norm = cast(nn.ModuleList, parts["layers"]), parts["norm"]
    chosen = layer_devices(len(layers), devices)
    moves = Moves(home)
    in_layers = {inner for layer in layers for inner in layer.modules()}
    for module in model.modules():
        if module not in in_layers:
            _move_own(module, home)
    for index, (layer, device) in enumerate(zip(layers, chosen, strict=True)):
        layer.to(device)
        moves.attach(layer, device, is_first=index == 0)
    norm.to(devices[-1])
    moves.attach(norm, devices[-1])
    head = model.get_output_embeddings()
    if head is not None:
        moves.attach(cast(nn.Module, head), home)
    return model


def _move_own(module: nn.Module, device: torch.device) -> None:
    """Parameters and buffers of this module alone, its children's not."""
    for parameter in module._parameters.values():
        if parameter is not None:
            parameter.data = parameter.data.to(device)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device)


class Moves:
    """Hooks that bring arguments to a module's device; what all layers share is moved once for each device."""

    def __init__(self, home: torch.device) -> None:
        self.home = home
        self._moved: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}

    def attach(self, module: nn.Module, device: torch.device, *, is_first: bool = False) -> None:
        """Runs `module` on `device`; the first layer begins a forward."""
        module.register_forward_pre_hook(self._before(device, is_first), with_kwargs=True)
        if device.type == "cuda":
            module.register_forward_hook(self._after, always_call=True)

    def _before(self, device: torch.device, is_first: bool) -> Callable[..., tuple[Any, Any]]:
        def bring(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            if is_first:
                self._moved.clear()
            if device.type == "cuda":
                # Kernels that are not torch's own start on the thread's current device.
                torch.cuda.set_device(device)
            # Hidden states are new in every layer; keeping them would keep every activation.
            new = tuple(move(value, device) for value in args[:1])
            named = {
                name: move(value, device) if name == "hidden_states" else self._shared(value, device)
                for name, value in kwargs.items()
            }
            return (*new, *(self._shared(value, device) for value in args[1:])), named

        return bring

    def _after(self, _module: nn.Module, _args: object, _output: object) -> None:
        torch.cuda.set_device(self.home)

    def _shared(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, Tensor):
            key = id(value), device
            if key not in self._moved:
                # The source is kept too: an id may be used again once its tensor is gone.
                self._moved[key] = value, move(value, device)
            return self._moved[key][1]
        if type(value) in (tuple, list):
            return type(value)(self._shared(part, device) for part in value)
        if type(value) is dict:
            return {name: self._shared(part, device) for name, part in value.items()}
        return value


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; itself where it lies there already."""
    return tensor.to(device, non_blocking=True) if tensor.device.type == device.type == "cuda" else tensor.to(device)


def find_text_model(model: PreTrainedModel) -> nn.Module:
    """The decoder stack (with `layers` and `norm`) of a causal language model or of a vision-language wrapper.

    Raises:
        ConfigError: no such stack is found.
    """
    expected = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        parts = dict(module.named_children())
        layers, norm = parts.get("layers"), parts.get("norm")
        if (
            isinstance(layers, nn.ModuleList)
            and len(layers) == expected
            and norm is not None
            and "embed_tokens" in parts
        ):
            return module
    raise ConfigError(
        f"{type(model).__name__}: expected a text model with embed_tokens, {expected} layers and a final norm, found "
        "none; the target must be a decoder-only language model or a wrapper around one"
    )
