"""Which pass computes a target's context features: the fast one, or transformers' own forward, and why.

B documents of a target batch, S tokens of a document.
"""

import importlib.util
from typing import NamedTuple

import torch
from torch import nn

from blockdraft.config import ConfigError
from blockdraft.models.ends import Ends
from blockdraft.models.target_fast import FastTarget
from blockdraft.models.target_fast_layers import TUNED_TOKENS, UnknownStructure
from blockdraft.models.target_fast_ops import Ops
from blockdraft.models.target_split import replica_devices

FLOAT8_CAPABILITY = (8, 9)
CHECKED_TOKENS = (2, 40)
"""Documents and tokens that each layer is compared on; more tokens than a convolution or a chunk's first rows see."""


class Pass(NamedTuple):
    """The choice, and a line that says it."""

    fast: FastTarget | None
    note: str


def check_float8(device: str | torch.device) -> None:
    """Refuses float8 where products in float8 do not exist, before anything is loaded.

    Raises:
        ConfigError: a device of the target is a CPU, or a GPU of an older kind.
    """
    for one in replica_devices(device):
        if one.type != "cuda":
            raise ConfigError(f"target.dtype=float8 needs a GPU, got the device {str(one)!r}; use bfloat16 or float32")
        found = torch.cuda.get_device_capability(one)
        if found < FLOAT8_CAPABILITY:
            raise ConfigError(
                f"target.dtype=float8 needs compute capability {FLOAT8_CAPABILITY[0]}.{FLOAT8_CAPABILITY[1]} or newer, "
                f"{one} has {found[0]}.{found[1]}; use bfloat16"
            )


@torch.no_grad()
def tune_recurrent(text_model: nn.Module) -> None:
    """Lets the recurrent kernels of transformers' own forward choose their settings on a batch of a usual size.

    They choose on their first call, for any number of tokens, and keep the choice on disk; a target's first forward has
    eight tokens.
    """
    weight = next(text_model.parameters())
    sizes = ("num_v_heads", "head_k_dim", "head_v_dim")
    layers = [vars(module) for module in text_model.modules() if set(sizes) <= vars(module).keys()]
    if weight.device.type != "cuda" or not layers or importlib.util.find_spec("fla") is None:
        return
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    heads, dim_k, dim_v = (int(layers[0][size]) for size in sizes)
    key, value = (weight.new_ones(*TUNED_TOKENS, heads, dim) for dim in (dim_k, dim_v))
    beta = weight.new_full((*TUNED_TOKENS, heads), 0.5)
    torch.cuda.set_device(weight.device)
    chunk_gated_delta_rule(key, key, value, -beta.float(), beta, use_qk_l2norm_in_kernel=True)


def choose_pass(
    text_model: nn.Module, ends: Ends, layer_ids: tuple[int, ...], *, ops: Ops | None = None, float8: bool = False
) -> Pass:
    """Reads the target's structure, builds the fast pass, and compares every layer with the target's own.

    `ops` None: the fused kernels on a GPU, no fast pass on a CPU.

    Raises:
        ConfigError: float8 was asked for, and the fast pass cannot be used.
    """
    weight = next(text_model.parameters())
    try:
        if ops is None:
            ops = _fused_ops(weight)
        fast = FastTarget(text_model, ends, layer_ids, ops, float8=float8)
        found = fast.compare(text_model, _tokens(ends, weight.device), weight.dtype)
        if not found.error <= found.allowed:
            raise UnknownStructure(
                f"layer {found.layer} would differ from transformers' own by {found.error:.2g} of its update, "
                f"allowed is {found.allowed:g}"
            )
    except UnknownStructure as reason:
        if float8:
            raise ConfigError(
                f"target.dtype=float8 needs the fast pass, which does not fit this target: {reason}; use bfloat16"
            ) from reason
        return Pass(None, f"features by transformers' own forward: {reason}")
    kind = "float8 products" if float8 else str(weight.dtype).removeprefix("torch.")
    return Pass(
        fast,
        f"features by the fast pass, {max(layer_ids) + 1} of {len(fast.layers)} layers, {kind}; "
        f"layer {found.layer} differs most from transformers' own, by {found.error:.2g} of its update",
    )


def _fused_ops(weight: torch.Tensor) -> Ops:
    if weight.device.type != "cuda":
        raise UnknownStructure(f"the fused kernels need a GPU, the target is on {weight.device}")
    if weight.dtype not in (torch.bfloat16, torch.float16):
        raise UnknownStructure(f"the fused kernels are for 16-bit targets, this one computes in {weight.dtype}")
    try:
        from blockdraft.models.target_fast_triton import TritonOps
    except ImportError as error:
        raise UnknownStructure(f"the fused kernels need triton and flash-linear-attention ({error})") from error
    return TritonOps(weight.dtype)


def _tokens(ends: Ends, device: torch.device) -> torch.Tensor:
    documents, length = CHECKED_TOKENS
    # Ids far apart from each other, the same in every run.
    return (torch.arange(documents * length, device=device) * 7919 % ends.vocab_size).view(documents, length)
