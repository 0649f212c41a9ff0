"""Exact passes: with drafts, greedy text is bit for bit that of the target alone, on a CPU.

In exact arithmetic it always is. But a computer rounds, so the value of a sum depends on the order
of its terms, and the kernels of a CPU choose that order by the shapes that they are given.
plumbing/kernels.py finds out how much padding makes the order the same in a pass over one token and
in a pass over a draft, and plumbing/layout.py finds slots in which a tree's keys are added up in
the order that they will have in the text. Here both are applied, around the plain classes of
llama.py and speculate.py:

    ExactLlama      pads the tokens of a pass, and tells the cache about the pass
    ExactKVCache    returns masked keys as padding, and keeps a tree's nodes in their slots
    ExactVerifier   leaves out what finds no slot, and gives the cache the layout of a tree

`RefinedHead` is about something else: which of two tokens wins where bfloat16 cannot tell.

You do not need this file to understand the paper. Where nothing here applies (on a GPU, in float16)
the plain classes do the same, up to rounding.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.results import DetailedResult
from llama import KVCache, Llama
from moa import Draft, keep_nodes
from plumbing.kernels import KEY_BLOCK, MIN_ROWS, AttentionLimits
from plumbing.layout import TreeLayout, lay_out_tree
from speculate import LocalVerifier


class ExactLlama(Llama):
    """A packed Llama on a CPU (app/packed.py makes it). With a cache from its own `new_cache`, a
    pass over up to `limits.most_tokens` tokens is exact. The pieces of a prompt are longer, but a
    prompt is always cut into pieces at the same places, so the results repeat."""

    def __init__(self, model: Llama, limits: AttentionLimits):
        """Take over the parts of a model whose layers are packed."""
        nn.Module.__init__(self)  # Llama's own would create parts that are not packed
        self.config = model.config
        self.limits = limits
        self.group = model.config.num_attention_heads // model.config.num_key_value_heads
        for name, part in model.named_children():
            self.add_module(name, part)
        self.register_buffer("rotary", model.rotary, persistent=False)

    def new_cache(self, capacity: int, batch: int = 1) -> ExactKVCache:
        capacity += -capacity % KEY_BLOCK  # leaves room for masked keys
        return ExactKVCache(super().new_cache(capacity, batch).kv, self.limits)

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
        end = cache.length + count
        if positions is None:
            slots = torch.arange(end)
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
        mask = self.limits.attention_mask(mask, self.group, self.dtype)
        with cache.expect(count):  # the cache does not store the padding
            hidden = super().hidden(tokens, cache, positions, mask)
        cache.length = end  # the length does not count the padding
        return hidden[:, :count]


class ExactKVCache(KVCache):
    """A cache whose `append` also returns some unused slots, so that the number of keys is one that
    the limits allow. `ExactLlama.hidden` masks the unused slots.

    While a tree is verified, `layout` says in which slots its nodes lie. There attention adds up
    the keys in the same order as in the text. `keep_path` moves the accepted nodes to the slots
    that they have in the text, and forgets the layout.
    """

    def __init__(self, kv: Tensor, limits: AttentionLimits):
        super().__init__(kv)
        self.limits = limits
        self.layout: TreeLayout | None = None
        self.expected: int | None = None  # the tokens of the current pass, without padding

    @contextmanager
    def expect(self, count: int) -> Iterator[None]:
        """Tell the cache that a pass over `count` tokens, and perhaps padding, runs in this
        block."""
        self.expected = count
        try:
            yield
        finally:
            self.expected = None

    def append(self, layer: int, kv: Tensor) -> Tensor:
        """Raises RuntimeError in a pass other than `ExactLlama.hidden`, which would neither be
        exact nor mask the unused slots."""
        if self.expected is None:
            raise RuntimeError("only ExactLlama.hidden may write to its cache: use an unpacked one")
        if self.layout is None:
            end = super().append(layer, kv[:, :, :self.expected]).shape[2]
        else:
            self.layout.write(self.kv[layer], kv)
            end = self.layout.mask.shape[1]
        return self.kv[layer, :, :, :self.limits.padded(end)]

    def keep_path(self, start: int, path: list[int]) -> None:
        if self.layout is not None:
            slot_of_node = self.layout.slots.tolist()
            path = [slot_of_node[node] - start for node in path]
            self.layout = None
        super().keep_path(start, path)


class ExactVerifier(LocalVerifier):
    """A verifier that is exact at temperature 0, with an `ExactLlama`. With any target it returns
    detailed results.

    Above temperature 0 every token that was drawn has to be proposed, so none can be left out to
    make a tree fit. The last bits may differ there, but the distribution is right.
    """

    def prefill(self, prompt: list[int]) -> DetailedResult:
        result = super().prefill(prompt)
        # Nothing was drafted. Every draft has a root, for which the last token stands in.
        return DetailedResult(**vars(result), draft=Draft(prompt[-1]))

    def verify(self, draft: Draft) -> DetailedResult:
        if self.sampling.temperature == 0 and isinstance(self.cache, ExactKVCache):
            draft = self.lay_out(draft, self.cache)
        result = super().verify(draft)
        return DetailedResult(**vars(result), draft=draft, logits=self.logits)

    def lay_out(self, draft: Draft, cache: ExactKVCache) -> Draft:
        """Find slots for a draft. Return the draft of the nodes that have one, and give the cache
        the layout if these are a tree. (A chain's tokens have the slots that they will have in the
        text, as the cache has it anyway.)"""
        draft = likeliest_first(draft)
        layout = lay_out_tree(draft.paths, cache.length, cache.limits)
        draft = keep_nodes(draft, layout.nodes)
        if not draft.is_chain:
            cache.layout = layout
        return draft

    def read_draft(self, draft: Draft) -> Tensor:
        self.logits = super().read_draft(draft)  # kept for the result
        return self.logits


def likeliest_first(draft: Draft) -> Draft:
    """Return the same draft with its nodes in the order of their paths' probabilities: where there
    is no room for all, the last ones are left out. (A path is at least as likely as its extensions,
    so parents come first.) For temperature 0 only."""
    nodes = range(len(draft.tokens))
    return keep_nodes(draft, sorted(nodes, key=lambda node: -draft.path_probabilities[node]))


REFINED_TOKENS = 16


class RefinedHead(nn.Module):
    """A bfloat16 LM head whose largest logits are computed again in float32.

    A bfloat16 number has eight significant bits, so that 28.1 and 28.15 are both rounded to 28.125.
    Without this, the two likeliest tokens are exactly tied at one of 25 places in greedy text, and
    the order of the vocabulary decides. (To multiply the whole LM head in float32 would cost a
    sixth of the speed.) Rows have the same bits alone and together: each has its own sums.
    """

    def __init__(self, head: nn.Module, weight: Tensor):
        """head: packed. weight: the same weight, not packed, (V, E)."""
        super().__init__()
        self.head = head
        self.rows = weight.detach()

    def forward(self, hidden: Tensor) -> Tensor:
        """Return logits in float32: hidden (..., E) -> (..., V)."""
        logits = self.head(hidden).float()
        count = min(REFINED_TOKENS, logits.shape[-1])
        likeliest = logits.topk(count).indices  # (..., 16)
        rows = self.rows[likeliest].float()  # (..., 16, E)
        refined = (rows * hidden.float().unsqueeze(-2)).sum(-1)  # (..., 16)
        return logits.scatter_(-1, likeliest, refined)
