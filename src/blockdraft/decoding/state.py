"""What target and drafter remember between the rounds of decoding one answer.

L block tokens, S tokens of a target forward, T context tokens, D width, C captured layers, H query heads,
G key/value heads, E head width.
"""

from typing import Final, NamedTuple, Protocol, TypeGuard

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from blockdraft.config import ConfigError
from blockdraft.models.drafter import Drafter, DrafterShape
from blockdraft.models.ends import Ends
from blockdraft.models.target import Target, TargetOutput

REWINDABLE_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
RECURRENT_LAYERS = ("linear_attention", "conv", "hybrid")


class TargetState(Protocol):
    """The target's memory of a text, which can give up tokens again."""

    def extend(self, token_1S: Tensor, *, last_only: bool = False) -> TargetOutput:
        """Runs the target over new tokens; `last_only` keeps the last position's logits alone."""
        ...

    def keep(self, num_tokens: int) -> None:
        """Of the tokens of the last `extend`, remembers the first `num_tokens`. Called after every `extend`."""
        ...


class CroppedState:
    """A key/value cache whose tail is cut off: for targets made of attention layers alone."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.cache = target.new_cache()
        self._num_new = 0

    def extend(self, token_1S: Tensor, *, last_only: bool = False) -> TargetOutput:
        """As the protocol says."""
        self._num_new = token_1S.shape[1]
        return self.target.forward(token_1S, self.cache, logits_to_keep=1 if last_only else 0)

    def keep(self, num_tokens: int) -> None:
        """As the protocol says."""
        # Cropping nothing is not idle: sliding-window layers drop what lies behind their window only here.
        self.cache.crop(num_tokens - self._num_new)


class _Memory(NamedTuple):
    """What one recurrent layer remembered, by index of its states."""

    convolution: dict[int, Tensor]
    recurrent: dict[int, Tensor]


class SnapshotState:
    """A cache with recurrent layers, which cannot be rewound: their states are copied before tokens that may go again.

    Once tokens are given up, the copy is put back and attention layers are cropped to the same length. The tokens that
    stay are then missing from the cache: they wait, and the next `extend` reads them again before its own. What waits
    is bounded: more than WAITING_LIMIT tokens are read in a forward of their own. transformers' `cache.crop` is no
    way here: it leaves the recurrent states as they are, without an error (up to 5.24).
    """

    WAITING_LIMIT: Final = 32

    def __init__(self, target: Target) -> None:
        self.target = target
        self.cache = target.new_cache()
        self._waiting_1S = torch.empty(1, 0, dtype=torch.long, device=target.device)
        self._new_1S = self._waiting_1S
        self._memories: list[_Memory] | None = None

    def extend(self, token_1S: Tensor, *, last_only: bool = False) -> TargetOutput:
        """As the protocol says."""
        if self._waiting_1S.shape[1] > self.WAITING_LIMIT:
            self.target.forward(self._waiting_1S, self.cache, logits_to_keep=1)
            self._waiting_1S, self._memories = self._waiting_1S[:, :0], None
        self._new_1S, size = token_1S, token_1S.shape[1]
        # A single token always stays, and so does the prompt, before which there is nothing to go back to.
        if size == 1 or not self.cache.get_seq_length():
            self._memories = None
        elif self._memories is None:
            self._memories = [_remember(layer) for layer in self.cache.layers if _is_recurrent(layer)]
        text_1S = torch.cat([self._waiting_1S, token_1S], dim=1)
        output = self.target.forward(text_1S, self.cache, logits_to_keep=1 if last_only else size)
        # The features of waiting tokens have been handed out before.
        return output._replace(features_BSC=output.features_BSC[:, -size:])

    def keep(self, num_tokens: int) -> None:
        """As the protocol says."""
        if num_tokens == self._new_1S.shape[1]:
            self._waiting_1S, self._memories = self._waiting_1S[:, :0], None
            # Sliding-window layers drop what lies behind their window only when they are cropped.
            self._crop(0)
            return
        assert self._memories is not None, "a prompt and a single token stay whole"
        recurrent = [layer for layer in self.cache.layers if _is_recurrent(layer)]
        for layer, memory in zip(recurrent, self._memories, strict=True):
            _restore(layer, memory)
        self._crop(self._waiting_1S.shape[1] + self._new_1S.shape[1])
        self._waiting_1S = torch.cat([self._waiting_1S, self._new_1S[:, :num_tokens]], dim=1)

    def _crop(self, num_tokens: int) -> None:
        for layer in self.cache.layers:
            if isinstance(layer, LinearAttentionAndFullAttentionLayer):
                # Its attention half; its own crop would cut the convolution state as well.
                DynamicLayer.crop(layer, -num_tokens)
            elif isinstance(layer, DynamicLayer):
                layer.crop(-num_tokens)


def _is_recurrent(layer: object) -> TypeGuard[LinearAttentionLayer]:
    return isinstance(layer, LinearAttentionLayer)


def _remember(layer: LinearAttentionLayer) -> _Memory:
    # Copies: the layer writes new states into the old ones' place.
    convolution, recurrent = (
        {index: state.clone() for index, state in states.items() if state is not None}
        for states in (layer.conv_states, layer.recurrent_states)
    )
    return _Memory(convolution, recurrent)


def _restore(layer: LinearAttentionLayer, memory: _Memory) -> None:
    for states, kept in ((layer.conv_states, memory.convolution), (layer.recurrent_states, memory.recurrent)):
        for index, state in kept.items():
            held = states[index]
            assert held is not None
            held.copy_(state)


def new_target_state(target: Target) -> TargetState:
    """An empty state of the kind that the target's layers need.

    Raises:
        ConfigError: the target has layers whose memory can be neither cut nor put back.
    """
    layer_types = target.text_config.to_dict().get("layer_types") or []
    unknown = sorted(set(layer_types) - set(REWINDABLE_LAYERS) - set(RECURRENT_LAYERS))
    if unknown:
        raise ConfigError(
            f"decoding needs a target made of attention layers ({', '.join(REWINDABLE_LAYERS)}) and recurrent layers "
            f"({', '.join(RECURRENT_LAYERS)}), found {unknown[0]}; such layers cannot give up rejected tokens"
        )
    return SnapshotState(target) if set(layer_types) & set(RECURRENT_LAYERS) else CroppedState(target)


class ContextCache:
    """The drafter's attention in decoding: context keys and values are kept, those of the block are not.

    One buffer a layer. A round writes its new context behind the old, the block behind that, and attends to a view;
    the next round's context overwrites the block. Context position t lies at index t, so the anchor's position is
    the number of context tokens.
    """

    def __init__(self, shape: DrafterShape, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.shape = shape
        size = (shape.num_layers, 1, shape.num_kv_heads, capacity + shape.block_size, shape.head_dim)
        self._keys = torch.empty(size, device=device, dtype=dtype)
        self._values = torch.empty(size, device=device, dtype=dtype)
        self._slot_L = torch.arange(shape.block_size, device=device)
        self.num_context = 0
        self._first = 0
        self._full_mask: Tensor | None = None
        self._window_mask: Tensor | None = None

    def grow(self, num_new: int) -> None:
        """Announces the new context tokens of a round and sets what each slot may see."""
        self._first = self.num_context
        self.num_context += num_new
        if self.shape.is_causal(None):
            self._full_mask = self._seen(0, None)
        if self.shape.window is not None:
            self._window_mask = self._seen(self._window_start(), self.shape.window)

    def _window_start(self) -> int:
        """First context position that any slot sees through the window."""
        assert self.shape.window is not None
        return max(0, self.num_context + 1 - self.shape.window)

    def _seen(self, start: int, window: int | None) -> Tensor:
        """Keys from `start` on that each slot sees, bool [L, T - start + L], as `models.blocks.visibility` defines."""
        key_K = torch.arange(start, self.num_context, device=self._slot_L.device)
        context_LT = torch.ones(len(self._slot_L), len(key_K), dtype=torch.bool, device=key_K.device)
        if window is not None:
            context_LT = key_K > self.num_context + self._slot_L[:, None] - window
        block_LL = torch.ones(len(self._slot_L), len(self._slot_L), dtype=torch.bool, device=key_K.device)
        return torch.cat([context_LT, block_LL.tril() if self.shape.is_causal(window) else block_LL], dim=1)

    def __call__(
        self,
        layer: int,
        query_RHQE: Tensor,
        context_key_RGTE: Tensor,
        context_value_RGTE: Tensor,
        block_key_RGQE: Tensor,
        block_value_RGQE: Tensor,
    ) -> Tensor:
        """Attention of one layer over the kept context and this round's block."""
        middle, end = self.num_context, self.num_context + self.shape.block_size
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self._first : middle], values[:, :, self._first : middle] = context_key_RGTE, context_value_RGTE
        keys[:, :, middle:end], values[:, :, middle:end] = block_key_RGQE, block_value_RGQE
        is_windowed = layer in self.shape.window_layers
        start = self._window_start() if is_windowed else 0
        return torch.nn.functional.scaled_dot_product_attention(
            query_RHQE,
            keys[:, :, start:end],
            values[:, :, start:end],
            attn_mask=self._window_mask if is_windowed else self._full_mask,
            enable_gqa=True,
        )


class DraftState:
    """A drafter at work on one answer."""

    def __init__(self, drafter: Drafter, ends: Ends, capacity: int) -> None:
        """`ends` lie on the drafter's device; `capacity` is the largest number of context tokens."""
        self.drafter, self.ends = drafter, ends
        self.cache = ContextCache(drafter.shape, capacity, drafter.device, drafter.dtype)
        self._block_1L = torch.full(
            (1, drafter.shape.block_size), drafter.shape.mask_token_id, dtype=torch.long, device=drafter.device
        )

    def draft_logits(self, features_1TC: Tensor, anchor_token: int) -> Tensor:
        """Takes the new context features and drafts behind the anchor; logits of slots 1 .. L - 1, [L - 1, V]."""
        drafter, cache = self.drafter, self.cache
        device = drafter.device
        first = cache.num_context
        cache.grow(features_1TC.shape[1])
        self._block_1L[0, 0] = anchor_token
        hidden_1LD = drafter(
            drafter.project(features_1TC.to(device=device, dtype=drafter.dtype)),
            torch.arange(first, cache.num_context, device=device)[None],
            self.ends.embed(self._block_1L).to(drafter.dtype),
            cache.num_context + torch.arange(drafter.shape.block_size, device=device)[None],
            cache,
        )
        return self.ends.logits(hidden_1LD[0, 1:].to(self.ends.head_weight.dtype))
