"""Exact passes: with drafts, greedy text is bit for bit that of the target alone, on a CPU.

In exact arithmetic it always is. But a computer rounds, so that a sum depends on the order of its
terms, and a CPU's kernels order them by the shapes that they are given. Two modules of plumbing/
find out how to keep the order, and you can read this one without them:

    kernels.py    `AttentionLimits`: how many rows, queries and keys a pass needs, so that a token's
                  sums are the same in a pass over that token and in a pass over a draft
    layout.py     `TreeLayout`: slots in which a tree's keys are added up in the text's order

Three subclasses of the chapters' classes apply this:

    ExactLlama      pads each pass to what the limits ask for, and masks the padding
    ExactKVCache    returns as many keys as the mask has, and puts a tree's nodes in their slots
    ExactVerifier   leaves out of a tree what finds no slot

A reader of the paper may skip this file. On a GPU or in float16 the plain classes do the same, up
to rounding.
"""
from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llama import Config, KVCache, Llama
from moa import Draft, keep_nodes
from plumbing.kernels import KEY_BLOCK, MIN_ROWS, AttentionLimits
from plumbing.layout import TreeLayout, lay_out_tree
from speculate import LocalVerifier, VerifyResult


class ExactLlama(Llama):
    """A Llama on a CPU, whose parts `pack` of app/packed.py replaces. With a cache from its own
    `new_cache`, a pass over up to `limits.most_tokens` tokens is exact. (The pieces of a prompt are
    longer. They repeat because a prompt is always cut at the same places.)"""

    def __init__(self, config: Config, limits: AttentionLimits):
        super().__init__(config)
        self.limits = limits

    def new_cache(self, capacity: int, batch: int = 1) -> ExactKVCache:
        capacity += -capacity % KEY_BLOCK  # leaves room for masked keys
        return ExactKVCache(super().new_cache(capacity, batch).kv)

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(cache, ExactKVCache):
            return super().hidden(tokens, cache, positions, mask)
        assert (positions is None) == (mask is None), "give both positions and a mask, or neither"
        count = tokens.shape[1]
        if positions is None:
            slots = torch.arange(cache.length + count)
            positions = slots[cache.length:]
            mask = positions.unsqueeze(1) >= slots  # needed even for a single token
        elif cache.layout is not None:
            mask = cache.layout.mask  # the nodes' slots are not those that the given mask is for
        # Every product needs at least MIN_ROWS rows. Padding the tokens once here saves most of the
        # padding in the products.
        padding = max(MIN_ROWS - count, 0)
        tokens = F.pad(tokens, (0, padding))
        positions = F.pad(positions, (0, padding))
        mask = F.pad(mask, (0, 0, 0, padding), value=True)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        mask = self.limits.attention_mask(mask, group, self.dtype)
        cache.keys = mask.shape[1]
        try:
            hidden = super().hidden(tokens, cache, positions, mask)
        finally:
            cache.keys = None
        cache.length -= padding  # counted by Llama.hidden
        return hidden[:, :count]


class ExactKVCache(KVCache):
    """A cache that returns as many keys as the mask of `ExactLlama.hidden` has, used or not.

    While a tree is verified, `layout` says in which slots its nodes lie: there attention adds up
    the keys in the text's order. `keep_path` moves the accepted nodes to the slots that they have
    in the text, and forgets the layout.
    """

    def __init__(self, kv: Tensor):
        super().__init__(kv)
        self.layout: TreeLayout | None = None
        self.keys: int | None = None  # what `append` returns in the present pass

    def lay_out(self, draft: Draft, limits: AttentionLimits) -> Draft:
        """Find slots for a draft. Return the draft of the nodes that have one. (A chain's tokens
        have the slots that they will have in the text, and need no layout.)"""
        draft = likeliest_first(draft)
        layout = lay_out_tree(draft.paths, self.length, limits)
        draft = keep_nodes(draft, layout.nodes)
        self.layout = None if draft.is_chain else layout
        return draft

    def append(self, layer: int, kv: Tensor) -> Tensor:
        """Raises RuntimeError in a pass other than `ExactLlama.hidden`, which would neither be
        exact nor mask the unused slots."""
        if self.keys is None:
            raise RuntimeError("only ExactLlama.hidden may write to its cache: use an unpacked one")
        if self.layout is None:
            # Padding beyond the keys is not stored. What is stored, the next tokens overwrite.
            super().append(layer, kv[:, :, :self.keys - self.length])
        else:
            self.layout.write(self.kv[layer], kv)
        return self.kv[layer, :, :, :self.keys]

    def keep_path(self, start: int, path: list[int]) -> None:
        if self.layout is not None:
            slot_of_node = self.layout.slots.tolist()
            path = [slot_of_node[node] - start for node in path]
            self.layout = None
        super().keep_path(start, path)


@dataclass
class DetailedResult(VerifyResult):
    """A result with what programs show of a cycle. `link` is one of

        "connected"      the target has read the prompt, or verified the draft
        "reconnected"    the same, over a new connection; if the draft was lost with the old one,
                         the server has read the text again
        "offline"        the server is out of reach, and the drafter has written unverified tokens

    A target on this machine is always connected.
    """

    draft: Draft  # that was verified, perhaps without unlikely tokens; empty if none was
    logits: Tensor | None = None  # the target's, after each node, (1 + K, V), if they are known
    link: str = "connected"
    reason: str = ""  # why the link is offline


class ExactVerifier(LocalVerifier):
    """A verifier with detailed results. With an `ExactLlama` it is exact at temperature 0.

    Above temperature 0 every token that was drawn has to be proposed, so none can be left out to
    make a tree fit. The last bits may differ there, but the distribution is right.
    """

    def prefill(self, prompt: list[int]) -> DetailedResult:
        result = super().prefill(prompt)
        # Nothing was drafted. Every draft has a root, for which the last token stands in.
        return DetailedResult(**vars(result), draft=Draft(prompt[-1]))

    def verify(self, draft: Draft) -> DetailedResult:
        if self.sampling.temperature == 0 and isinstance(self.model, ExactLlama):
            draft = self.cache.lay_out(draft, self.model.limits)
        result = super().verify(draft)
        return DetailedResult(**vars(result), draft=draft, logits=self.logits)

    def read_draft(self, draft: Draft) -> Tensor:
        self.logits = super().read_draft(draft)  # kept for the result
        return self.logits


def likeliest_first(draft: Draft) -> Draft:
    """Return the same draft with its nodes in the order of their paths' probabilities: where there
    is no room for all, the last ones are left out. (A path is at least as likely as its extensions,
    so parents come first.) For temperature 0 only."""
    nodes = range(len(draft.tokens))
    return keep_nodes(draft, sorted(nodes, key=lambda node: -draft.path_probabilities[node]))
