"""Lookup: drafts that copy what followed the same tokens before (prompt lookup, Saxena 2023)."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch

from llama import Sampling
from moa import CacheUpdate, Draft, DraftLimits, DraftState


@dataclass
class Lookup:
    """Takes the place of a `DraftState` in the loop. If the newest `size` tokens have occurred
    before, the draft copies what followed them there. Otherwise `state` drafts."""

    state: DraftState
    vocab_size: int
    sampling: Sampling
    size: int = 3  # after a shorter match the drafter is right more often than a copy
    history: list[int] = field(default_factory=list)  # the text: all tokens before the root
    # For each run of `size` tokens in the history: the index after its newest occurrence.
    places: dict[tuple[int, ...], int] = field(default_factory=dict)

    def append_verified(self, update: CacheUpdate | None) -> None:
        """Grow the history, and the drafter's caches. update: None while a server is out of reach.

        While the server is out of reach, the history lacks the unverified tokens, and a draft may
        copy from the wrong place. Such a draft does no harm, because it is never verified.
        """
        if update is not None:
            for token in update.tokens:
                self.history.append(token)
                self.places[tuple(self.history[-self.size:])] = len(self.history)
        self.state.append_verified(update)

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        """Copy a chain from the text. If there is nothing to copy, let the drafter draft."""
        tokens = [*self.history, root]
        place = self.places.get(tuple(tokens[-self.size:]))
        if place is None:
            return self.state.draft(root, limits)
        # If fewer than `count` tokens are left to copy, they are repeated. For example, 5 7 8 7 8
        # ends with 7 8, which also occurs earlier. Only 7 8 follows the earlier occurrence, so the
        # draft is 7 8 7 8 7 ...
        count = min(limits.depth, limits.total_tokens)
        copied = tokens[place:place + count] * count
        return self.certain_draft(root, copied[:count])

    def certain_draft(self, root: int, tokens: list[int]) -> Draft:
        """Make a chain of tokens that were not drawn.

        Above temperature 0 the rule of acceptance needs a q to compare p with. Token x was certain
        to be drafted, so q(x) = 1. The rule therefore accepts x with probability p(x). If x is
        rejected, the residual is p without x, scaled to sum to 1. (EAGLE-2 does this with its whole
        tree, whose tokens are the likeliest and not drawn.)
        """
        draft = Draft(root)
        for parent, token in enumerate(tokens):  # in a chain each token follows the one before it
            draft.add(token, parent, probability=1.0)
            if self.sampling.temperature > 0:
                q = torch.zeros(self.vocab_size, device=self.sampling.generator.device)
                q[token] = 1.0
                draft.q[parent] = q
        return draft
