"""A drafter that drafts only some of the target's tokens (FR-Spec, Zhao et al. 2025, and EAGLE-3).

For a small target, most of a draft's cost is the LM head, and rare tokens are seldom drafted. The
target can still write all of them: rejection sampling is exact for any q, and a q may be 0.
"""
from __future__ import annotations

import torch
from torch import Tensor, nn

from llama import Llama, Sampling
from moa import Drafter, DrafterConfig


class LimitedDrafter(Drafter):
    """A drafter whose LM head has a row for each token of its vocabulary only, V' of V.

    Drafts and their q are over all V tokens. Outside this class only training sees the small head:
    its loss compares p and q over the V' tokens, both scaled to sum to 1 there.
    """

    def __init__(self, target: Llama, config: DrafterConfig, vocabulary: tuple[int, ...]):
        """vocabulary: distinct tokens. The target must not be packed yet."""
        super().__init__(target, config)
        self.vocabulary = vocabulary
        ids = torch.tensor(vocabulary, device=target.device)  # (V')
        self.register_buffer("vocabulary_ids", ids, persistent=False)
        rows = target.lm_head.weight[ids]  # (V', E), a copy
        self.lm_head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(rows, requires_grad=False)

    def distributions(self, hidden: Tensor, sampling: Sampling) -> Tensor:
        """Return q: hidden (..., E) -> (..., V). It is 0 for all tokens outside the vocabulary."""
        q = super().distributions(hidden, sampling)  # (..., V')
        everywhere = q.new_zeros(*q.shape[:-1], self.target.config.vocab_size)
        return everywhere.index_copy_(-1, self.vocabulary_ids, q)
