"""Choosing tokens: greedy or sampled, and rejection sampling that keeps the target's distribution.

N positions, K draft tokens, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from blockdraft.config import ConfigError


class Verdict(NamedTuple):
    """What a verification says about K draft tokens."""

    accepted: int
    next_token: int | None
    """The target's own token after the accepted ones; None if all K were accepted and nothing comes after them."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ConfigError(
                f"expected a finite temperature >= 0, 0 < top_p <= 1 and top_k >= 0, got {self.temperature}, "
                f"{self.top_p} and {self.top_k}"
            )

    @property
    def is_greedy(self) -> bool:
        """No randomness."""
        return self.temperature == 0

    def probabilities(self, logits_NV: Tensor) -> Tensor:
        """The distribution that tokens are drawn from, float32 [N, V]; top_k applies before top_p."""
        score_NV = logits_NV.float() / self.temperature
        if 0 < self.top_k < score_NV.shape[-1]:
            least_N1 = score_NV.topk(self.top_k).values[..., -1:]
            score_NV = score_NV.masked_fill(score_NV < least_N1, -torch.inf)
        probability_NV = score_NV.softmax(-1)
        if self.top_p < 1:
            sorted_NV, order_NV = probability_NV.sort(dim=-1, descending=True)
            # A token stays if those before it do not reach top_p, so the most likely one always stays.
            keep_NV = sorted_NV.cumsum(-1) - sorted_NV < self.top_p
            probability_NV = torch.zeros_like(probability_NV).scatter(-1, order_NV, sorted_NV * keep_NV)
            probability_NV = probability_NV / probability_NV.sum(-1, keepdim=True)
        return probability_NV


def draw(probability_NV: Tensor, generator: torch.Generator) -> Tensor:
    """One token a position, int64 [N]."""
    return torch.multinomial(probability_NV, 1, generator=generator)[:, 0]


def verify_greedy(draft_K: Tensor, logits_NV: Tensor) -> tuple[Verdict, list[int]]:
    """Accepts the leading draft tokens that are the target's argmax; N is K or, with a bonus position, K + 1.

    Also returns the draft tokens, which come to the host in the same transfer.
    """
    num_drafts = len(draft_K)
    host = torch.cat([draft_K, logits_NV.argmax(-1)]).tolist()
    drafted, expected = host[:num_drafts], host[num_drafts:]
    accepted = 0
    while accepted < num_drafts and drafted[accepted] == expected[accepted]:
        accepted += 1
    return Verdict(accepted, expected[accepted] if accepted < len(expected) else None), drafted


def verify_sampled(
    draft_K: Tensor, draft_probability_KV: Tensor, target_probability_NV: Tensor, generator: torch.Generator
) -> tuple[Verdict, list[int]]:
    """Accepts draft token x with probability min(1, p(x) / q(x)); the first refused one is drawn again from
    max(p - q, 0), so that what is committed has the target's distribution p whatever the drafter's q is
    (Leviathan et al., arXiv 2211.17192). N is K or, with a bonus position, K + 1.
    """
    num_drafts = len(draft_K)
    p_K = target_probability_NV[:num_drafts].gather(1, draft_K[:, None])[:, 0]
    q_K = draft_probability_KV.gather(1, draft_K[:, None])[:, 0]
    chance_K = torch.rand(num_drafts, generator=generator, device=draft_K.device)
    accepted = int((chance_K * q_K < p_K).int().cumprod(0).sum())
    drafted = draft_K.tolist()
    if accepted == len(target_probability_NV):
        return Verdict(accepted, None), drafted
    p_V = target_probability_NV[accepted]
    if accepted < num_drafts:
        rest_V = (p_V - draft_probability_KV[accepted]).clamp(min=0)
        # Equal distributions leave nothing but rounding; then the target's own is the right one.
        p_V = rest_V if bool(rest_V.sum() > 0) else p_V
    return Verdict(accepted, int(draw(p_V[None], generator)[0])), drafted
