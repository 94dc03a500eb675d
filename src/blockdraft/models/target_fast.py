"""The fast pass of a target: its context features without transformers' own forward.

B documents of a target batch, S tokens of a document, N = B * S, D width, R rotated width of a head.

Per layer the projections that read one input are one product, and everything between two products is one fused kernel
(models/target_fast_triton.py); no attention mask is built, since right padding needs none. A layer's kind is read off
its structure, and each layer is compared with the target's own on a few tokens before the pass is used. The plain
forward stays for decoding, for targets of another structure, and for CPUs.
"""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from blockdraft.models.ends import Ends
from blockdraft.models.target_fast_layers import Batch, DeltaNet, Layer, UnknownStructure, read_layer
from blockdraft.models.target_fast_ops import Ops, Rows
from blockdraft.models.target_split import move

KNOWN_TYPES = {"full_attention", "linear_attention"}
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
FLOAT8_TOLERANCE = 0.5


class Difference(NamedTuple):
    """How far one fast layer is from the target's own."""

    layer: int
    error: float
    """Root mean square over tokens of |fast - plain| / |plain update|."""
    allowed: float


class FastTarget:
    """Runs a target's layers up to the last that is wanted, and writes the captured ones."""

    def __init__(
        self, text_model: nn.Module, ends: Ends, layer_ids: tuple[int, ...], ops: Ops, *, float8: bool = False
    ) -> None:
        """Reads the layers' structure and fuses their weights.

        Raises:
            UnknownStructure: a layer, a norm or the rotary part is of another kind.
        """
        parts = dict(text_model.named_children())
        modules, config = cast(nn.ModuleList, parts["layers"]), vars(text_model)["config"].to_dict()
        if "rotary_emb" not in parts:
            raise UnknownStructure(f"{type(text_model).__name__} has no rotary_emb")
        check_types(config.get("layer_types"), config.get("sliding_window"))
        self.ends, self.ops, self.layer_ids = ends, ops, layer_ids
        self.rotary, self.final_norm = parts["rotary_emb"], parts["norm"]
        self._copied: list[nn.Linear] = []
        self.layers = [read_layer(module, self._copied if float8 else None) for module in modules]
        self.home = self.layers[0].device
        self.float8 = float8

    @torch.no_grad()
    def run(self, input_ids_BS: Tensor, write: Callable[[int, Tensor], None], *, with_final: bool = False) -> None:
        """As `Target.capture` and, `with_final`, as `Target.capture_with_final`."""
        length = input_ids_BS.shape[1]
        hidden_ND, update_ND = self.ends.embed(input_ids_BS).flatten(0, 1), None
        batches: dict[torch.device, Batch] = {}
        last = len(self.layers) if with_final else max(self.layer_ids) + 1
        try:
            for index, layer in enumerate(self.layers[:last]):
                if layer.device not in batches:
                    batches[layer.device] = self.batch(length, layer.device)
                _enter(layer.device)
                hidden_ND = move(hidden_ND, layer.device)
                update_ND = None if update_ND is None else move(update_ND, layer.device)
                hidden_ND, rows = self.ops.add_norm(hidden_ND, update_ND, layer.before_mixer, layer.quantize_mixer)
                if index:
                    self._write(index - 1, hidden_ND, length, write)
                hidden_ND, update_ND = self._finish(layer, hidden_ND, rows, batches[layer.device])
        finally:
            _enter(self.home)
        final_ND = hidden_ND if update_ND is None else hidden_ND + update_ND
        self._write(last - 1, final_ND, length, write)
        if with_final:
            write(len(self.layer_ids), self.final_norm(final_ND).unflatten(0, (-1, length)).to(self.home))

    def drop_decoding(self) -> None:
        """Frees the layers after the last captured one and, in float8, the modules' own weights."""
        del self.layers[max(self.layer_ids) + 1 :]
        for linear in self._copied:
            linear.weight.data = linear.weight.data.new_empty(0)
        self._copied.clear()

    def _finish(self, layer: Layer, hidden_ND: Tensor, rows: Rows, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """A layer from its first norm on: the stream, and the update that is still to be added to it."""
        mixed_ND = layer.mixer(hidden_ND, rows, batch, self.ops)
        hidden_ND, rows = self.ops.add_norm(hidden_ND, mixed_ND, layer.before_mlp, layer.quantize_mlp)
        return hidden_ND, layer.mlp(hidden_ND, rows, batch, self.ops)

    def _write(self, index: int, hidden_ND: Tensor, length: int, write: Callable[[int, Tensor], None]) -> None:
        for column, wanted in enumerate(self.layer_ids):
            if wanted == index:
                # A copy: the next products may add to the stream in place.
                write(column, hidden_ND.unflatten(0, (-1, length)).to(self.home, copy=True))

    def batch(self, length: int, device: torch.device) -> Batch:
        """Rotary angles of positions 0..length - 1, float32, on a device."""
        _enter(self.home)
        # Only its device and type are read.
        like = torch.empty(1, device=self.home, dtype=torch.float32)
        position_1S = torch.arange(length, device=self.home)[None]
        # Text in a model of text and pictures: one position for time, height and width.
        is_split = "mrope_section" in vars(self.rotary)
        cos, sin = self.rotary(like, position_1S.expand(3, 1, -1) if is_split else position_1S)
        _enter(device)
        return Batch(length, *(part.reshape(length, -1).contiguous().to(device) for part in (cos, sin)))

    @torch.no_grad()
    def compare(self, text_model: nn.Module, input_ids_BS: Tensor, dtype: torch.dtype) -> Difference:
        """The layer that differs most from the target's own, each given what the target's own layer reads."""
        length = input_ids_BS.shape[1]
        _enter(self.home)
        recurrent = [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaNet)]
        for mixer in recurrent[:1]:
            mixer.tune(self.ops)
        worst = Difference(0, 0.0, 0.0)
        seen = _streams(text_model, self.layers, input_ids_BS)
        tolerance = FLOAT8_TOLERANCE if self.float8 else TOLERANCE[dtype]
        try:
            for index, (layer, before_ND, after_ND) in enumerate(zip(self.layers, seen, seen[1:], strict=False)):
                _enter(layer.device)
                before_ND, after_ND = move(before_ND, layer.device), move(after_ND, layer.device)
                hidden_ND, rows = self.ops.add_norm(before_ND.clone(), None, layer.before_mixer, layer.quantize_mixer)
                hidden_ND, update_ND = self._finish(layer, hidden_ND, rows, self.batch(length, layer.device))
                found_ND = hidden_ND if update_ND is None else hidden_ND + update_ND
                error = _distance(before_ND, after_ND, found_ND, tolerance)
                # NaN is the worst of all.
                if index == 0 or not error <= worst.error:
                    worst = Difference(index, error, tolerance)
        finally:
            _enter(self.home)
        return worst


def check_types(layer_types: list[str] | None, window: int | None) -> None:
    """Refuses layers that see only a window: the pass has no mask.

    Raises:
        UnknownStructure: there are such layers.
    """
    other = set(layer_types or ()) - KNOWN_TYPES
    if other:
        raise UnknownStructure(f"layers of the types {sorted(other)}")
    if layer_types is None and window is not None:
        raise UnknownStructure(f"layers with a window of {window}")


def _streams(text_model: nn.Module, layers: list[Layer], input_ids_BS: Tensor) -> list[Tensor]:
    """What each of the target's own layers reads, and what the last one returns, [N, D] each."""
    seen: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen.append((args[0] if args else kwargs["hidden_states"]).flatten(0, 1))

    def keep_last(_module: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        seen.append((output if isinstance(output, Tensor) else output[0]).flatten(0, 1))

    modules = cast(nn.ModuleList, dict(text_model.named_children())["layers"])
    handles = [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules]
    handles.append(modules[len(layers) - 1].register_forward_hook(keep_last))
    try:
        text_model(input_ids=input_ids_BS, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _distance(before_ND: Tensor, plain_ND: Tensor, fast_ND: Tensor, tolerance: float) -> float:
    """Root mean square over tokens of the difference against the update.

    A stream much larger than the update hides the update's low bits in both: that rounding is allowed for.
    """
    before_ND, plain_ND, fast_ND = before_ND.float(), plain_ND.float(), fast_ND.float()
    rounding = 2.0**-8 if tolerance > TOLERANCE[torch.float32] else 2.0**-20
    scale_N = (plain_ND - before_ND).norm(dim=-1) + rounding / tolerance * plain_ND.norm(dim=-1)
    error_N = (fast_ND - plain_ND).norm(dim=-1) / scale_N.clamp(min=1e-30)
    return float(error_N.square().mean().sqrt())


def _enter(device: torch.device) -> None:
    if device.type == "cuda":
        # Kernels that are not torch's own start on the thread's current device.
        torch.cuda.set_device(device)
