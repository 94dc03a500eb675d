"""Acceptance by replay: the target's greedy answers are decoded once, then drafted from at every position in parallel.

In greedy mode what a round accepts depends on the target's own answer alone, so walking the rounds over ready-made
drafts counts exactly what decoding would (docs/algorithm.md, section 6).

R rows (1 here), T tokens of a tape after padding, A anchors of a chunk, L block size, Q = A * L block tokens, D width,
C captured layers, W ids of a restricted head.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.config import ConfigError
from blockdraft.decoding.acceptance import Acceptance, Round, Walk
from blockdraft.decoding.batched import Answer, generate_batch
from blockdraft.models.attention import sdpa_attend
from blockdraft.models.blocks import block_positions, block_tokens
from blockdraft.models.drafter import Attend, Drafter, DrafterShape
from blockdraft.models.ends import Ends
from blockdraft.models.target import Target

AttendFactory = Callable[[DrafterShape, Tensor, Tensor, Tensor], Attend]
"""(shape, document_RT, position_RT, anchor_RA) to an attention, as `models.attention.sdpa_attend`."""

INVALID = -1
"""Document of padding, and anchor of a block that is not there."""
LENGTH_STEP = 64
"""Tapes are padded to a multiple of this many tokens."""
TAPES_TOGETHER = 16
"""Answers walked side by side; their hidden states are kept meanwhile."""


class Tape(NamedTuple):
    """One prompt with the target's greedy answer, and the target's states over both."""

    token_ids: list[int]
    prompt_length: int
    features_TC: Tensor
    """Context features [T, C * D] in the target's data type; empty where only token ids are needed."""


def record_tapes(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int],
    batch_size: int = 16,
    answers: Sequence[Answer] | None = None,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> list[Tape]:
    """Decodes the prompts greedily, unless `answers` are given, and captures features of prompt and answer.

    Features lie on `device` in the target's data type. `progress` is called with numbers of answers decoded.
    """
    if answers is None:
        answers = generate_batch(
            target,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            batch_size=batch_size,
            progress=progress,
        )
    texts = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
    tapes: dict[int, Tape] = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        longest = len(texts[chosen[0]])
        padded = [texts[index] + [target.pad_id] * (longest - len(texts[index])) for index in chosen]
        features_BSC = target.features(torch.tensor(padded, device=target.device))
        for index, features_SC in zip(chosen, features_BSC, strict=True):
            # A copy, so that the batch is not kept alive by its rows.
            features_TC = features_SC[: len(texts[index])].to(device, copy=True)
            tapes[index] = Tape(texts[index], len(prompts[index]), features_TC)
    return [tapes[index] for index in range(len(texts))]


def replay(
    drafter: Drafter,
    ends: Ends,
    tapes: Sequence[Tape],
    *,
    draft_ids: Tensor | None = None,
    attend_factory: AttendFactory = sdpa_attend,
    length: int | None = None,
    num_anchors: int = 64,
    chunk_rows: int = 512,
    progress: Callable[[int], None] | None = None,
) -> Acceptance:
    """Acceptance of greedy decoding over all tapes together; `replay_rounds` without the pooling."""
    parts = replay_rounds(
        drafter,
        ends,
        tapes,
        draft_ids=draft_ids,
        attend_factory=attend_factory,
        length=length,
        num_anchors=num_anchors,
        chunk_rows=chunk_rows,
        progress=progress,
    )
    return Acceptance.of([entry for rounds in parts for entry in rounds], drafter.shape.block_size)


def replay_rounds(
    drafter: Drafter,
    ends: Ends,
    tapes: Sequence[Tape],
    *,
    draft_ids: Tensor | None = None,
    attend_factory: AttendFactory = sdpa_attend,
    length: int | None = None,
    num_anchors: int = 64,
    chunk_rows: int = 512,
    progress: Callable[[int], None] | None = None,
) -> list[list[Round]]:
    """The rounds of every tape.

    Every drafter forward has the same shapes: `length` context tokens (by default the longest tape, rounded up) and
    `num_anchors` blocks, so a compiled attention compiles once. Drafts pass through the head `chunk_rows` block tokens
    at a time. `ends` lie on the drafter's device; if their head is restricted to a draft vocabulary, `draft_ids` [W]
    names its token ids.

    Raises:
        ConfigError: a tape is longer than `length`.
    """
    longest = max((len(tape.token_ids) for tape in tapes), default=0)
    length = -(-longest // LENGTH_STEP) * LENGTH_STEP if length is None else length
    if longest > length:
        raise ConfigError(f"replay: length must be at least that of the longest tape, {longest}, got {length}")
    pass_over = _Pass(drafter, ends, draft_ids, attend_factory, length, num_anchors, chunk_rows)
    parts: list[list[Round]] = []
    for first in range(0, len(tapes), TAPES_TOGETHER):
        chosen = tapes[first : first + TAPES_TOGETHER]
        parts += pass_over.rounds(chosen)
        if progress is not None:
            progress(len(chosen))
    return parts


class _Pass(NamedTuple):
    """Fixed settings of one replay."""

    drafter: Drafter
    ends: Ends
    draft_ids: Tensor | None
    attend_factory: AttendFactory
    length: int
    num_anchors: int
    chunk_rows: int

    @torch.no_grad()
    def rounds(self, tapes: Sequence[Tape]) -> list[list[Round]]:
        """Walks the tapes side by side: only blocks that a round starts at pass through the head."""
        hidden = [self._hidden(tape) for tape in tapes]
        walks = [Walk(tape.token_ids, tape.prompt_length) for tape in tapes]
        while going := [(i, walk.anchor) for i, walk in enumerate(walks) if walk.anchor is not None]:
            hidden_BLD = torch.stack([hidden[i][anchor - tapes[i].prompt_length] for i, anchor in going])
            for (i, _), drafted in zip(going, self._argmax(hidden_BLD).tolist(), strict=True):
                walks[i].advance(drafted)
        return [walk.rounds for walk in walks]

    def _hidden(self, tape: Tape) -> Tensor:
        """Final-normed hidden states of slots 1..L-1 behind every answer token but the last, [answer - 1, L - 1, D]."""
        drafter, shape = self.drafter, self.drafter.shape
        device, num_tokens = drafter.device, len(tape.token_ids)
        token_1T = torch.zeros(1, self.length, dtype=torch.long, device=device)
        token_1T[0, :num_tokens] = torch.tensor(tape.token_ids, device=device)
        position_1T = torch.arange(self.length, device=device)[None]
        document_1T = torch.where(position_1T < num_tokens, 0, INVALID)
        features_1TC = torch.zeros(1, self.length, tape.features_TC.shape[1], dtype=drafter.dtype, device=device)
        features_1TC[0, :num_tokens] = tape.features_TC.to(device=device, dtype=drafter.dtype)
        context_1TD = drafter.project(features_1TC)
        drafted = []
        for first in range(tape.prompt_length, num_tokens - 1, self.num_anchors):
            anchor_A = torch.arange(first, first + self.num_anchors, device=device)
            anchor_1A = torch.where(anchor_A < num_tokens - 1, anchor_A, INVALID)[None]
            token_1Q = block_tokens(token_1T, anchor_1A, shape.block_size, shape.mask_token_id)
            hidden_1QD = drafter(
                context_1TD,
                position_1T,
                self.ends.embed(token_1Q).to(drafter.dtype),
                block_positions(position_1T, anchor_1A, shape.block_size),
                self.attend_factory(shape, document_1T, position_1T, anchor_1A),
            )
            drafted.append(hidden_1QD[0].unflatten(0, (-1, shape.block_size))[:, 1:])
        num_drafts = num_tokens - 1 - tape.prompt_length
        return torch.cat(drafted)[:num_drafts] if drafted else context_1TD[0, :0, None]

    def _argmax(self, hidden_ALD: Tensor) -> Tensor:
        """Most likely token of every slot, int64 [A, L - 1]."""
        hidden_ND = hidden_ALD.flatten(0, 1).to(self.ends.head_weight.dtype)
        best_N = torch.cat(
            [self.ends.logits(part_ND).argmax(-1) for part_ND in torch.split(hidden_ND, self.chunk_rows)]
        )
        if self.draft_ids is not None:
            best_N = self.draft_ids.to(best_N.device)[best_N]
        return best_N.view(hidden_ALD.shape[:2])
