"""Lookup: drafts that copy what followed the same tokens before (prompt lookup, Saxena 2023)."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch

from llama import KVCache, Sampling
from moa import CacheUpdate, Draft, DraftLimits, DraftState


@dataclass
class Lookup:
    """Takes the place of a `DraftState` in the loop. If the newest tokens have occurred before, the
    draft copies what followed them there. Otherwise the drafter drafts, if there is one."""

    state: DraftState | None  # the drafter's; None without a drafter (see `NoDrafter`)
    vocab_size: int
    sampling: Sampling
    history: list[int] = field(default_factory=list)  # the text: all tokens before the root

    def append_verified(self, update: CacheUpdate | None) -> None:
        """Grow the history, and the drafter's caches. update: None while a server is out of reach.

        While the server is out of reach, the history lacks the unverified tokens, and a draft may
        copy from the wrong place. Such a draft does no harm, because it is never verified.
        """
        if update is not None:
            self.history += update.tokens
        if self.state is not None:
            self.state.append_verified(update)

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        """Copy a chain from the text. If there is nothing to copy, let the drafter draft."""
        tokens = self.history + [root]
        count = min(limits.depth, limits.total_tokens)
        # Copy where the last 3 tokens occurred before, else where the last 2 did, else the last 1.
        # With a drafter, copy only where the last 3 did, because after a shorter match the drafter
        # is right more often than a copy.
        sizes = (3, 2, 1) if self.state is None else (3,)
        for size in sizes:
            place = find_earlier(tokens, size)
            if place is not None:
                # If fewer than `count` tokens are left to copy, they are repeated. For example,
                # 5 7 8 7 8 ends with 7 8, which also occurs earlier. Only 7 8 follows the earlier
                # occurrence, so the draft is 7 8 7 8 7 ...
                copied = tokens[place:place + count]
                return self.certain_draft(root, (copied * count)[:count])
        if self.state is None:
            return Draft(root)
        return self.state.draft(root, limits)

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


def find_earlier(tokens: list[int], size: int) -> int | None:
    """Find the newest place where the last `size` tokens occurred before. Return the index of the
    token that followed them there, or None if there is no such place."""
    newest = tokens[-size:]
    for start in reversed(range(len(tokens) - size)):  # (`newest` itself starts later)
        if tokens[start:start + size] == newest:
            return start + size
    return None


class NoDrafter:
    """Takes the place of a `Drafter` in a verifier if all drafts are copied, and no cache of a
    drafter is to grow. Used only by the benchmark's method "lookup" (experiments/bench.py)."""

    def cache_update(self, tokens: list[int], cache: KVCache) -> CacheUpdate:
        return CacheUpdate(tokens, ca_kv=None, tli_kv=None)
