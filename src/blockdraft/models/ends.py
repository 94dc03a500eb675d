"""The target's frozen ends: its embedding and its output head, in the target's own conventions.

N any number of tokens, D width, V vocabulary.
"""

import copy

import torch
from torch import Tensor, nn


class Ends(nn.Module):
    """Embedding and head of a target, for the drafter to read and write tokens with.

    The embedding module is the target's own, so a scale that it applies itself (Gemma-3) is kept; a factor that the
    target's forward applies outside it (Granite) is `embedding_multiplier`. Logits are
    softcap(head(hidden) * logit_multiplier).
    """

    def __init__(
        self,
        embedding: nn.Module,
        head_weight_VD: Tensor,
        *,
        embedding_multiplier: float = 1.0,
        logit_multiplier: float = 1.0,
        logit_softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.register_buffer("head_weight", head_weight_VD.detach(), persistent=False)
        self.embedding_multiplier = embedding_multiplier
        self.logit_multiplier = logit_multiplier
        self.logit_softcap = logit_softcap
        self.requires_grad_(False)

    head_weight: Tensor

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.head_weight.shape[0]

    @torch.no_grad()
    def embed(self, token_N: Tensor) -> Tensor:
        """Token ids to hidden states, [..., D]."""
        hidden: Tensor = self.embedding(token_N)
        return hidden if self.embedding_multiplier == 1.0 else hidden * self.embedding_multiplier

    def finish_logits(self, product: Tensor) -> Tensor:
        """Factor and soft cap of the target on the bare product of hidden states and head."""
        if self.logit_multiplier != 1.0:
            product = product * self.logit_multiplier
        if self.logit_softcap is not None:
            product = torch.tanh(product / self.logit_softcap) * self.logit_softcap
        return product

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Final-normed hidden states to logits, [..., V]."""
        return self.finish_logits(nn.functional.linear(hidden_ND, self.head_weight))

    def restricted(self, draft_ids_W: Tensor) -> "Ends":
        """The same ends with a head of the given token ids only (a draft vocabulary)."""
        return Ends(
            self.embedding,
            self.head_weight[draft_ids_W.to(self.head_weight.device)],
            embedding_multiplier=self.embedding_multiplier,
            logit_multiplier=self.logit_multiplier,
            logit_softcap=self.logit_softcap,
        )

    def copy_to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> "Ends":
        """A copy on another device or in another type; the same object when nothing differs."""
        weight = self.head_weight
        device, dtype = torch.device(device), dtype or weight.dtype
        if weight.device == device and weight.dtype == dtype:
            return self
        return Ends(
            copy.deepcopy(self.embedding).to(device=device, dtype=dtype),
            weight.to(device=device, dtype=dtype),
            embedding_multiplier=self.embedding_multiplier,
            logit_multiplier=self.logit_multiplier,
            logit_softcap=self.logit_softcap,
        )
