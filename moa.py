"""The drafter: a Mixture of Attentions (Zimmer et al., ICLR 2025, arXiv 2410.03804, section 3).

In the paper it is M_Small. It reads the target's KV cache, and drafts the tokens that come next:

    LSA  Layer Self-Attention, over the L layers of one token's keys and values in the target's
         cache. Its mean over the layers, projected to E, is that token's *memory*: a view of all
         layers at that token, where EAGLE, EAGLE-2 and Medusa see the last one only.
    SA   Self-Attention, causal, over the embeddings of the text and the draft. Thanks to it a
         drafted token sees those before it.
    CA   Cross-Attention, from SA's output to the memory of all verified tokens. Drafted tokens have
         none yet. So training hides from each position that drafts, a *query*, all memory after its
         *horizon*: what drafting would hide. (In training every position of an answer but its last
         is a query.) The paper calls this on-policy.
    TLI  Target Layer Inference. With N = 0, CA's output at a token predicts the target's final
         hidden state of that token, from which the target's LM head makes a distribution of the
         next one. With N > 0 it predicts the state that enters the target's last N layers, which
         then run on it: often better drafts, at a higher cost. They attend, of verified tokens, to
         the target's own keys and values; of drafted ones, to those they make of CA's output.

In formulas. Number the tokens of the text, and of the draft after it, 0, 1, 2, ... The first t are
verified: 0 to t - 1. Token i, with i >= t, is the newest one (i = t) or a drafted one. e_j is the
embedding of token j, [k_jl v_jl] its key and value in the target's layer l:

    z_j1, ..., z_jL = LSA([k_j1 v_j1], ..., [k_jL v_jL])    for all j < t
    m_j = W mean(z_j1, ..., z_jL) + b                       the memory of token j
    s_i = the last output of SA(e_0, ..., e_i)
    g_i = CA(query s_i; keys and values from m_0, ..., m_{t-1})
    h'_i = g_i, or norm(the target's last N layers on g_i);    q_i = softmax(LM head h'_i)

Keys are read as they lie in the cache, that is, rotated by their position. With several kv heads
[k v] is their keys and values in turn, head by head: k v of head 0, k v of head 1, ...

A token is *verified* once the target has read it and keeps it. Only then does it have a memory. The
newest token, which the target has chosen but not yet read, is not verified.

`Drafter.features` states the whole of it: these layers, over all positions in one pass. Read it as
the definition. (No script calls it. `train.distill` takes the same four steps, and keeps what is
between them; the tests compare with it.) `DraftState` runs the layers step by step, with caches, as
drafting does. Read as far as the bar, "The method ends here".

Shapes: as in llama.py, and N reused target layers, K drafted tokens, F nodes on the frontier of a
draft (see `TreeConfig`), V' tokens that may be drafted (above the bar all V of them). H, Hkv and D
are those of the layer at hand: each has its own.
"""
from __future__ import annotations

# What the method uses:
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from llama import (
    Attention,
    Config,
    DecoderLayer,
    KVCache,
    Llama,
    Sampling,
    causal_mask,
    probabilities,
    rotary_table,
    sample,
)

# What only the code below the bar uses:
import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from safetensors import SafetensorError
from safetensors.torch import save_file

from llama import (
    InputError,
    RaggedKVCache,
    RaggedPass,
    atomic_write,
    can_pack,
    checksum,
    input_errors,
    load_weights,
    pack,
    read_json,
    read_tensors,
)

LSA_TOKENS = 64  # LSA reads so many at a time: a whole prompt, times L layers, may not fit in RAM


# --- The four layers, and training's pass over all positions ---


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and choices of a drafter, with the names of the authors' config.json where it has them.
    """

    num_attention_heads: int  # of SA and CA
    layer_self_attention_num_attention_heads: int
    layer_self_attention_num_key_value_heads: int
    layer_self_attention_intermediate_size: int
    self_attention_num_key_value_heads: int
    self_attention_intermediate_size: int
    cross_attention_num_key_value_heads: int
    cross_attention_intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    target_layer_inference: int = 0  # N
    use_layer_self_attention: bool = True  # this and the next two: ablations, below the bar
    use_cross_attention: bool = True
    use_self_attention: bool = True
    draft_vocabulary: tuple[int, ...] | None = None  # of `LimitedHead`, below the bar


class CrossAttentionLayer(DecoderLayer):
    """A decoder layer whose keys and values come from another sequence, the memory.

    Call `keys_values(memory, rope)` once, then `attend_to` with any queries. The attention is still
    called `self_attn`, as in the authors' checkpoints, and the one norm serves both sequences.
    """

    def attend_to(self, kv: Tensor, x: Tensor, rope: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run the layer on queries from x (B, T, E) over kv (B, Hkv, S, 2D) -> (B, T, E)."""
        q = self.self_attn.queries(self.input_layernorm(x), rope)
        return self.feed_forward(x + self.self_attn(q, kv, mask))


class Drafter(nn.Module):
    """Trainable: LSA, the projection, SA and CA. All else is the target's, and frozen.

    The layers have the names of the authors' checkpoints, the methods that run them are verbs.
    """

    checkpoint_hash = ""  # set by `load_drafter`: a client and its server compare theirs

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.__dict__["target"] = target  # no submodule: its weights are not to be trained or saved
        self.head = DraftHead(target)
        sizes = target.config
        hidden_size = sizes.hidden_size
        heads = config.num_attention_heads
        kv_width = 2 * sizes.num_key_value_heads * sizes.head_dim  # 2 Ekv
        layer_heads = config.layer_self_attention_num_attention_heads
        self.layer_self_attention = DecoderLayer(
            width=kv_width,
            inner=config.layer_self_attention_intermediate_size,
            heads=layer_heads,
            kv_heads=config.layer_self_attention_num_key_value_heads,
            head_dim=kv_width // layer_heads,
            eps=config.rms_norm_eps,
        )
        self.Ekv2E = nn.Linear(kv_width, hidden_size)  # the authors' name for the projection
        self.self_attention = DecoderLayer(
            width=hidden_size,
            inner=config.self_attention_intermediate_size,
            heads=heads,
            kv_heads=config.self_attention_num_key_value_heads,
            head_dim=hidden_size // heads,
            eps=config.rms_norm_eps,
        )
        self.cross_attention = CrossAttentionLayer(
            width=hidden_size,
            inner=config.cross_attention_intermediate_size,
            heads=heads,
            kv_heads=config.cross_attention_num_key_value_heads,
            head_dim=hidden_size // heads,
            eps=config.rms_norm_eps,
        )
        # LSA's sequence is the L layers of one token: so here a position is a layer's number.
        layer_rotary = rotary_table(
            length=sizes.num_hidden_layers,
            head_dim=kv_width // layer_heads,
            theta=config.rope_theta,
            device=target.device,
        )
        rotary = rotary_table(
            length=sizes.max_position_embeddings,
            head_dim=hidden_size // heads,
            theta=config.rope_theta,
            device=target.device,
        )
        self.register_buffer("layer_rotary", layer_rotary, persistent=False)  # (2, L, D/2)
        self.register_buffer("rotary", rotary, persistent=False)  # (2, context, D/2)

    @property
    def N(self) -> int:
        return self.config.target_layer_inference

    @property
    def dtype(self) -> torch.dtype:
        return self.Ekv2E.weight.dtype

    def features(self, tokens: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        """Run the whole drafter over all positions. Returns predicted final hidden states
        (B, T, E), which the LM head reads.

        tokens (B, T); kv (B, T, L, 2 Ekv) from the target's cache; horizon (B, T): the last
        position whose memory query i may read, -1 for none.
        """
        memory = self.build_memory(kv)  # LSA: (B, T, E)
        x = self.self_attend(tokens)  # SA: (B, T, E)
        x = self.cross_attend(x, memory, horizon)  # CA: (B, T, E)
        return self.infer_target_layers(x, kv, horizon)  # TLI: (B, T, E)

    def build_memory(self, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the memory of tokens (B, T, E), given their kv (B, T, L, 2 Ekv) in the cache.

        hidden: the target's final states (B, T, E), which only a drafter without LSA reads (see
        `LastStateDrafter`, below the bar).
        """
        means = []
        for piece in kv.split(LSA_TOKENS, dim=1):  # LSA never looks across tokens
            means.append(self.layer_self_attend(piece))  # (B, at most LSA_TOKENS, 2 Ekv)
        return self.Ekv2E(torch.cat(means, dim=1))

    def layer_self_attend(self, kv: Tensor) -> Tensor:
        """Run LSA and take its mean over layers: kv (B, T, L, 2 Ekv) -> (B, T, 2 Ekv)."""
        batch, count, layers = kv.shape[:3]
        # Each token is a sequence of its own, of L layers: so the tokens count as a batch.
        x = kv.reshape(batch * count, layers, -1).to(self.dtype)  # (B T, L, 2 Ekv)
        x = self.layer_self_attention(x, self.layer_rotary)  # no mask: each layer sees all layers
        return x.mean(dim=1).unflatten(0, (batch, count))

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up the target's embeddings of tokens (B, T): (B, T, E)."""
        return self.target.embed_tokens(tokens).to(self.dtype)

    def self_attend(self, tokens: Tensor) -> Tensor:
        """Run SA over all positions: tokens (B, T) -> (B, T, E)."""
        count = tokens.shape[1]
        mask = causal_mask(count, past=0, device=tokens.device)
        return self.self_attention(self.embed(tokens), self.rotary[:, :count], mask)

    def cross_attend(self, x: Tensor, memory: Tensor, horizon: Tensor) -> Tensor:
        """Run CA over all positions, from SA's output x (B, T, E) to memory (B, T, E).

        Query i reads the memory of positions up to horizon[b, i], and none if that is -1. Returns
        predicted hidden states (B, T, E).
        """
        count = x.shape[1]
        rope = self.rotary[:, :count]
        positions = torch.arange(count, device=x.device)
        within = positions <= horizon.unsqueeze(-1)  # (B, T, T): query i, memory j
        kv = self.cross_attention.keys_values(memory, rope)  # (B, Hkv, T, 2D)
        # With horizon -1 a query reads nothing: PyTorch's attention then returns zeros, and the
        # residual connection hands on SA's output alone.
        return self.cross_attention.attend_to(kv, x, rope, within.unsqueeze(1))

    def infer_target_layers(self, x: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        """Run TLI over all positions: the target's last N layers and final norm on x (B, T, E).

        Each position has two pairs of keys and values: the target's own, kv (B, T, L, 2 Ekv), and
        those that the layers make of x. A query reads the target's where tokens are verified, up to
        its horizon, and those made of x where they count as drafted, from there up to itself:
        exactly what is in the caches while drafting. So the layers get 2 T of them, first the
        target's of all positions, then those made of x. Query 6 with horizon 3:

            position                         0 1 2 3 4 5 6 7
            the target's keys and values     + + + + . . . .
            those made of x                  . . . . + + + .

        (Positions 4 and 5 are of the same run as 6, and so have the same horizon. What the layers
        make of them here is what they make of them in a draft that begins at 4.)
        """
        if self.N == 0:
            return x
        count = x.shape[1]
        rope = self.target.rotary[:, :count]
        positions = torch.arange(count, device=x.device)
        within = positions <= horizon.unsqueeze(-1)  # (B, T, T): query i, position j
        after = ~within & (positions <= positions.unsqueeze(-1))  # (B, T, T)
        mask = torch.cat([within, after], dim=-1).unsqueeze(1)  # (B, 1, T, 2T)
        kv_heads = self.target.config.num_key_value_heads
        reused = kv[:, :, -self.N:].unflatten(-1, (kv_heads, -1))  # (B, T, N, Hkv, 2D)
        known = KnownKeysValues(reused.permute(2, 0, 3, 1, 4))  # (N, B, Hkv, T, 2D)
        return self.run_target_layers(x, rope, mask, known)

    # For drafting: what the target's side sends, and TLI step by step.

    def memory_update(self, tokens: list[int], cache: KVCache, hidden: Tensor) -> MemoryUpdate:
        """Return what drafting needs of newly verified tokens, the last ones in the target's cache.

        Called on the target's side, where that cache is. hidden (1, T, E): the target's final
        states of these tokens, which only `LastStateDrafter`, below the bar, reads.
        """
        start = cache.length - len(tokens)
        end = cache.length
        memory = self.build_memory(cache.by_token(start, end), hidden)  # (1, T, E)
        rope = self.rotary[:, start:end]
        cross_kv = self.cross_attention.keys_values(memory, rope)  # (1, Hkv, T, 2D)
        first_reused = len(cache.kv) - self.N  # of the L layers
        reused_kv = cache.kv[first_reused:, :, :, start:end]  # (N, 1, Hkv, T, 2D)
        return MemoryUpdate(tokens, cross_kv, reused_kv)

    def run_target_layers(
        self, x: Tensor, rope: Tensor, mask: Tensor | None, cache: KVCache | KnownKeysValues
    ) -> Tensor:
        """Run the target's last N layers and its final norm: x (B, T, E) -> (B, T, E).

        Training (`infer_target_layers`) and drafting (`DraftState.step`) call it with different
        masks and caches. The cache, of N layers, brings the target's own keys and values of
        verified tokens, followed by those that the layers make of x.
        """
        if self.N == 0:
            return x
        x = x.to(self.target.dtype)
        for i, layer in enumerate(self.target.layers[-self.N:]):
            x = layer(x, rope, mask, cache, i)
        return self.target.norm(x)


class KnownKeysValues:
    """Stands in for a KVCache in training. `append` returns keys and values that are known from the
    beginning, those of the target, followed by new ones, those that a layer has just made of x.
    Nothing is stored."""

    def __init__(self, kv: Tensor):
        self.kv = kv

    def append(self, layer: int, kv: Tensor) -> Tensor:
        return torch.cat([self.kv[layer].to(kv.dtype), kv], dim=2)  # (B, Hkv, 2T, 2D)


@dataclass
class MemoryUpdate:
    """What the drafter's caches grow by when T tokens have been verified. Of the memory CA reads
    only the keys and values made of it, so these are sent."""

    tokens: list[int]
    cross_kv: Tensor  # CA's keys and values of the memory, (1, Hkv, T, 2D)
    reused_kv: Tensor  # keys and values in the target's last N layers, (N, 1, Hkv, T, 2D)


class DraftHead:
    """The target's LM head, frozen: features to logits, one for each token.

    The index of a logit, here called an *output*, is a token. (Only with `LimitedHead`, below the
    bar, it is not: that has logits for V' chosen tokens. For it there are `token` and
    `over_all_tokens`, which here return their argument.)

    (This is not an nn.Module, so that the target's weights do not become the drafter's.)
    """

    def __init__(self, target: Llama):
        self.target = target

    @property
    def weight(self) -> Tensor:
        """Return the rows that features are multiplied with, (V', E). The loss in train.py needs
        them."""
        return self.target.lm_head.weight

    def logits(self, features: Tensor) -> Tensor:
        """Map features (..., E) to logits (..., V')."""
        return self.target.lm_head(features.to(self.target.dtype))

    def token(self, output: int) -> int:
        """Return the token that an output stands for."""
        return output

    def over_all_tokens(self, q: Tensor) -> Tensor:
        """Spread a distribution q (V') over the target's vocabulary (V)."""
        return q


# --- Drafting: the same layers, step by step ---


class Draft:
    """A tree of tokens that may follow the target's newest token. A chain is the simplest kind.

    A *node* is a token of the tree, by its number. Node 0 is the root: the newest token. Node i is
    the token tokens[i], and follows node parents[i], whose number is smaller:

        node   token        parent   path
         0     " lies"        -1     0
         1     " in"           0     0 1
         2     " within"       0     0 2
         3     " the"          1     0 1 3
    """

    def __init__(self, root: int):
        # One entry for each node: in the end 1 + K.
        self.tokens = [root]
        self.parents = [-1]
        self.paths = [[0]]  # the nodes from the root to each one, both included
        self.probabilities = [1.0]  # the drafter's, of each token after its parent
        self.path_probabilities = [1.0]  # the product of these along the path
        # By the parent's node: the distribution (V) that its children were drawn from, which
        # rejection sampling needs. Empty at temperature 0, where nothing is drawn.
        self.q: dict[int, Tensor] = {}

    def add(self, token: int, parent: int, probability: float) -> int:
        """Add a token after its parent. Returns its node."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.paths.append(self.paths[parent] + [node])
        self.probabilities.append(probability)
        self.path_probabilities.append(self.path_probabilities[parent] * probability)
        return node

    @property
    def is_chain(self) -> bool:
        """Tell whether each node follows the one before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    def children(self, parent: int) -> list[int]:
        """Return the nodes that follow `parent`, in the order added: if drawn, in that order."""
        return [node for node, other in enumerate(self.parents) if other == parent]

    def child(self, parent: int, token: int) -> int | None:
        """Return the node of this token after `parent`. None if it was not drafted there."""
        for node in self.children(parent):
            if self.tokens[node] == token:
                return node
        return None

    def depth(self, node: int) -> int:
        """Return how far a node is from the root."""
        return len(self.paths[node]) - 1

    def mask(self, nodes: list[int], cached: list[int], text_length: int) -> Tensor:
        """Return which slots each of `nodes` may see, (len(nodes), text_length + len(cached)): the
        whole text and, of the draft, its ancestors and itself. Not its siblings: they are
        alternatives.

        cached: the nodes whose keys and values lie in the cache after the text, in this order.
        """
        rows = []
        for node in nodes:
            rows.append([other in self.paths[node] for other in cached])
        text = torch.ones(len(nodes), text_length, dtype=torch.bool)
        return torch.cat([text, torch.tensor(rows)], dim=1)

    def keep(self, kept: list[int]) -> Draft:
        """Return the draft of these nodes only: in ascending order, with the root and all parents.

        For temperature 0 only: where tokens are drawn, all of them have to be proposed (see
        `sample_tree`).
        """
        smaller = Draft(self.tokens[0])
        new_node = {0: 0}  # in the smaller draft, of each node kept
        for node in kept[1:]:
            parent = new_node[self.parents[node]]
            new_node[node] = smaller.add(self.tokens[node], parent, self.probabilities[node])
        return smaller


@dataclass(frozen=True)
class TreeConfig:
    """The limits of a draft, which grows level by level.

    To *expand* a node is to run the drafter on it, and to add tokens after it. The nodes that are
    expanded next are the *frontier*. The first three limits are EAGLE-2's. The other two are ours:
    a token that the drafter itself finds unlikely is hardly worth its cost.
    """

    depth: int  # levels below the root: in a chain the number of drafted tokens, K
    top_k: int = 1  # nodes of a frontier, at most; with 1 the draft is a chain
    total_tokens: int = 64  # drafted tokens of a tree, at most
    min_confidence: float = 0.0  # stop if the frontier's paths are together less likely than this
    # Of a greedy tree: leave out tokens whose path is less likely than this. (`sample_tree`, below
    # the bar, uses it otherwise.)
    min_probability: float = 0.0


def draft_distributions(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return q, what drafts are chosen from: logits (..., V') -> (..., V')."""
    if sampling.temperature == 0:
        # A greedy chain needs no probabilities, but trees rank paths by them, and TreeConfig's
        # limits and --trace ask for them.
        return probabilities(logits, 1.0)
    return probabilities(logits, sampling.temperature, sampling.top_p)


def extend_chain(draft: Draft, q: Tensor, head: DraftHead, sampling: Sampling) -> None:
    """Add to a chain a token that is chosen from q (V'): the likeliest, or a draw."""
    last = len(draft.tokens) - 1
    if sampling.temperature == 0:
        choice = int(q.argmax())
    else:
        choice = sample(q, sampling.generator)
        draft.q[last] = head.over_all_tokens(q)
    draft.add(head.token(choice), parent=last, probability=float(q[choice]))


class DraftState:
    """The drafter's side of one conversation: three caches, and the draft that is being made.

        keys and values            of verified tokens        of expanded nodes of the draft
        self_cache     SA          its own                   its own
        cross_cache    CA          made of the memory        none: they have no memory
        reused_cache   N layers    the target's own          what the layers make of CA's output

    After `append_verified` all three have the length of the text. While drafting, SA's and TLI's
    grow by the same nodes in the same order, that of `expanded`, so that one mask serves both. One
    cycle after a text of 10 tokens, with a chain of three of which the target accepts two:

                                        length of the caches:   SA   CA   TLI
        before the draft                                        10   10   10
        step on the root, which drafts token 1                  11   10   11
        step on token 1, which drafts token 2                   12   10   12
        step on token 2, which drafts token 3                   13   10   13
        discard_draft                                           10   10   10
        append_verified of the root and tokens 1 and 2          13   13   13

    The accepted tokens are not kept from the draft but appended again: only now do they have a
    memory, and the target's own keys and values.
    """

    def __init__(self, drafter: Drafter, capacity: int, sampling: Sampling):
        """capacity: slots for the text, and for the draft's nodes that are expanded: in a tree at
        most 1 + (depth - 1) * top_k."""
        self.drafter = drafter
        self.sampling = sampling
        self.self_cache = drafter_cache(drafter, drafter.self_attention.self_attn, capacity)
        self.cross_cache = drafter_cache(drafter, drafter.cross_attention.self_attn, capacity)
        self.reused_cache = drafter.target.new_cache(capacity, layers=drafter.N)
        self.expanded: list[int] = []  # the draft's nodes that are in the caches, in their order

    @property
    def text_length(self) -> int:
        """How many tokens come before the draft: the verified ones."""
        return self.cross_cache.length

    def append_verified(self, update: MemoryUpdate) -> None:
        """Grow the caches by newly verified tokens, in place of what was drafted.

        No attention runs here. SA is one layer on embeddings, so its keys and values are a
        projection of these. Its output is for CA's queries only, and a verified token is not one.
        """
        self.discard_draft()
        rope = self.next_rope(len(update.tokens))
        x = self.embed(update.tokens)  # (1, T, E)
        self.self_cache.append(0, self.drafter.self_attention.keys_values(x, rope))
        self.cross_cache.append(0, update.cross_kv)
        self.append_reused(update)
        self.move_ends(len(update.tokens))

    def append_reused(self, update: MemoryUpdate) -> None:
        """Append the target's own keys and values to TLI's cache."""
        for i in range(self.drafter.N):
            self.reused_cache.append(i, update.reused_kv[i])

    def move_ends(self, count: int) -> None:
        """Count what was appended to the three caches as text: `count` tokens."""
        for cache in (self.self_cache, self.cross_cache, self.reused_cache):
            cache.length += count

    def discard_draft(self) -> None:
        """Go back to the end of the text."""
        self.expanded = []
        self.self_cache.length = self.text_length
        self.reused_cache.length = self.text_length

    def next_rope(self, count: int) -> Tensor:
        """Return the rotary angles of the next `count` tokens of the text: (2, T, D/2)."""
        return self.drafter.rotary[:, self.text_length:self.text_length + count]

    def draft(self, root: int, tree: TreeConfig) -> Draft:
        """Draft a chain or a tree of tokens that may follow the target's newest token, `root`."""
        self.discard_draft()  # of an earlier call, if nothing was verified since (offline)
        if tree.top_k == 1:
            return self.draft_chain(root, tree)
        if self.sampling.temperature == 0:
            return self.draft_tree(root, tree)
        return sample_tree(self, root, tree)  # below the bar

    def draft_chain(self, root: int, tree: TreeConfig) -> Draft:
        """Draft up to K tokens, each chosen from q after those before it (algorithm 1).

        It may stop early, and the text stays the target's: whether to go on depends only on tokens
        that are proposed anyway.
        """
        draft = Draft(root)
        for last in range(tree.depth):  # the last node so far: those of a chain are 0, 1, 2, ...
            if not worth_expanding(draft, [last], tree):
                break
            q = self.next_distributions(draft, [last]).squeeze(0)  # (V')
            extend_chain(draft, q, self.drafter.head, self.sampling)
        return draft

    def next_distributions(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Return q after each node of the frontier, (F, V'): what its children are chosen from."""
        logits = self.drafter.head.logits(self.step(draft, frontier))
        return draft_distributions(logits, self.sampling)

    def step(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Run SA, CA and TLI on the frontier, nodes of one level: features (F, E).

        What `Drafter.features` does for all positions, here for F new tokens, with caches.
        """
        drafter = self.drafter
        self.expanded += frontier  # cached from now on: each node sees itself, too
        mask = self.tree_mask(draft, frontier)  # (F, S)
        # Nodes of one level have the same position, so one angle serves them all: (2, 1, D/2).
        position = self.text_length + draft.depth(frontier[0])
        rope = drafter.rotary[:, position:position + 1]
        target_rope = drafter.target.rotary[:, position:position + 1]
        x = self.embed([draft.tokens[node] for node in frontier])  # (1, F, E), and so on
        x = drafter.self_attention(x, rope, mask, self.self_cache, 0)
        x = self.read_memory(x, rope)
        x = drafter.run_target_layers(x, target_rope, mask, self.reused_cache)
        self.self_cache.length += len(frontier)
        self.reused_cache.length += len(frontier)
        return x.squeeze(0)

    def tree_mask(self, draft: Draft, frontier: list[int]) -> Tensor | None:
        """Return which of the tokens in the caches each node of the frontier sees, (F, S). None if
        they see all of them, as in a chain: attention is faster without a mask."""
        if draft.is_chain:
            return None
        mask = draft.mask(frontier, self.expanded, self.text_length)
        return None if mask.all() else mask.to(self.drafter.target.device)

    def read_memory(self, x: Tensor, rope: Tensor) -> Tensor:
        """Run CA. No mask: every node sees the memory of all verified tokens, and nothing else."""
        verified = self.cross_cache.length
        kv = self.cross_cache.kv[0, :, :, :verified]  # (1, Hkv, verified, 2D)
        return self.drafter.cross_attention.attend_to(kv, x, rope)

    def embed(self, tokens: list[int]) -> Tensor:
        """Look up embeddings of tokens: (1, T, E)."""
        return self.drafter.embed(torch.tensor([tokens], device=self.drafter.target.device))

    # Trees: several tokens that may follow the same one.

    def draft_tree(self, root: int, tree: TreeConfig) -> Draft:
        """Draft a dynamic tree at temperature 0, after EAGLE-2 (Li et al. 2024b).

        A token is as likely as its whole path from the root: the product of q along it. At each
        level:

        1. Run the drafter on the frontier.
        2. Of all tokens that may follow the frontier, add the `total_tokens` likeliest. More can
           never be kept.
        3. The `top_k` likeliest of these are the next frontier.

        At the end keep the `total_tokens` likeliest of all levels. An example with depth 2, top_k 2
        and total_tokens 4, in which e and f follow a (0.60 times 0.7 and 0.2), and g and h follow b
        (0.30 times 0.8 and 0.1):

            level 1, after the root     a 0.60   b 0.30   c 0.05   d 0.03    next frontier: a, b
            level 2, after a and b      e 0.42   g 0.24   f 0.12   h 0.03
            kept                        a 0.60   e 0.42   b 0.30   g 0.24

        No token is kept without its parent: that is at least as likely, and comes first where both
        are equally likely. (EAGLE-2 adds `top_k` tokens after each node. Here all nodes of a
        frontier compete.)
        """
        draft = Draft(root)
        frontier = [0]
        for _ in range(tree.depth):
            if not worth_expanding(draft, frontier, tree):
                break
            q = self.next_distributions(draft, frontier)  # (F, V')
            choices = likeliest_choices(draft, frontier, q, tree.total_tokens, tree.min_probability)
            children = self.add_choices(draft, frontier, choices)
            frontier = likeliest_paths(draft, children, tree.top_k)
        drafted = list(range(1, len(draft.tokens)))  # all nodes but the root
        return draft.keep([0] + likeliest_paths(draft, drafted, tree.total_tokens))

    def add_choices(self, draft: Draft, frontier: list[int], choices: list[Choice]) -> list[int]:
        """Add the chosen tokens after their nodes of the frontier. Returns the new nodes."""
        children = []
        for choice in choices:
            token = self.drafter.head.token(choice.output)
            children.append(draft.add(token, frontier[choice.row], choice.probability))
        return children


def drafter_cache(drafter: Drafter, attention: Attention, capacity: int) -> KVCache:
    """Return an empty cache for one of the drafter's own layers."""
    shape = (1, 1, attention.kv_heads, capacity, 2 * attention.head_dim)
    return KVCache(torch.zeros(shape, dtype=drafter.dtype, device=drafter.target.device))


def worth_expanding(draft: Draft, frontier: list[int], tree: TreeConfig) -> bool:
    """Tell whether it pays to go on: whether the paths to the frontier are together likely."""
    if not frontier:  # the level before added nothing
        return False
    confidence = sum(draft.path_probabilities[node] for node in frontier)
    return confidence >= tree.min_confidence


class Choice(NamedTuple):
    """A token to add to a tree, after a node of its frontier."""

    row: int  # the node is frontier[row], and its distribution is q[row]
    output: int  # of the drafter's head (see `DraftHead`)
    probability: float  # of the token after this node


def likeliest_choices(
    draft: Draft, frontier: list[int], q: Tensor, count: int, min_probability: float
) -> list[Choice]:
    """Of all tokens after the frontier, return the `count` whose paths are likeliest. q (F, V')

    There may be fewer, as paths below `min_probability` are left out.
    """
    # Tokens of probability 0, of which top-p leaves many, are left out as well: they cannot be
    # drawn.
    least = max(min_probability, 1e-30)
    top = q.topk(min(count, q.shape[-1]))  # of each node: no more can be among the likeliest
    top_probabilities = top.values.tolist()  # F lists
    top_outputs = top.indices.tolist()
    likely = []  # the probability of a path, and its last token
    for row, node in enumerate(frontier):
        for probability, output in zip(top_probabilities[row], top_outputs[row]):
            path_probability = draft.path_probabilities[node] * probability
            if path_probability >= least:
                likely.append((path_probability, Choice(row, output, probability)))
    likely.sort(key=lambda pair: -pair[0])
    return [choice for _, choice in likely[:count]]


def likeliest_paths(draft: Draft, nodes: list[int], count: int) -> list[int]:
    """Of these nodes, in ascending order, return the `count` with the likeliest paths, again in
    ascending order.

    Sorting is stable. So of equally likely nodes the smaller comes first: a parent before a child
    of probability 1.
    """
    best = sorted(nodes, key=lambda node: -draft.path_probabilities[node])[:count]
    return sorted(best)


# --- The method ends here: what follows makes it fast and practical ---
#
# Each part can be read by itself:
#
#     Sampled trees                   for temperatures above 0
#     Sizes, and a head ...           which sizes fit a target; fewer tokens
#     Ablations                       without LSA, CA or SA; EAGLE's drafter
#     What ... a network needs        coarse q, and going on alone
#     Chains for many conversations   all rows of a batch in one pass
#     Fast                            bfloat16 and packing
#     Which drafter ...               the class that a config, or a target on a server, asks for
#     Checkpoints                     the authors' names and shapes


# --- Sampled trees: for temperatures above 0 ---


def sample_tree(state: DraftState, root: int, tree: TreeConfig) -> Draft:
    """Draft a tree of tokens that are drawn from q. (Read `rejection_sample_tree` of speculate.py
    first.)

    Its rule of acceptance compares p to the q that a token was drawn from. So it needs tokens
    that were drawn, and every token that was drawn has to be proposed: to drop one afterwards
    would change what comes out. Say p = q = (0.6, 0.4). One token is drawn; if it is the second, it
    is thrown away as too unlikely. The target then draws one itself, and the first token comes out
    with probability 0.6 + 0.4 * 0.6 = 0.84 instead of 0.6.

    What may be chosen is how many tokens are drawn after each node, and only before they are
    drawn. At each level:

    1. Divide the tokens that are left by the levels that are left, rounded up: the `share`.
    2. Find the `share` likeliest tokens after the frontier, and count those after each node.
       So a node that more of the likely paths go through gets more children.
    3. After each node draw that many from its q, without replacement, whichever they are.
    4. Of the drawn tokens, those with the `top_k` likeliest paths are the next frontier.

    With depth 2 and total_tokens 4, level 1 gets two: two tokens are drawn after the root.
    Level 2 gets the other two. If the two likeliest paths go through one child each, one token
    is drawn after each child.

    The counts of a level must not depend on what it draws, for the same reason. They may depend
    on q and on earlier levels. And step 4 is allowed: a token that is not expanded is proposed
    all the same.

    (This is ours: a budget that follows likely paths, as in EAGLE-2, for children drawn without
    replacement, as by Jeon et al. 2024. EAGLE-2 proposes the likeliest tokens at any temperature.
    That is exact, too: a token that is certain to be proposed is accepted with probability p.)
    """
    draft = Draft(root)
    frontier = [0]
    for level in range(tree.depth):
        left = tree.total_tokens - (len(draft.tokens) - 1)
        share = math.ceil(left / (tree.depth - level))
        if share == 0 or not worth_expanding(draft, frontier, tree):
            break
        q = state.next_distributions(draft, frontier)  # (F, V')
        choices = likeliest_choices(draft, frontier, q, share, tree.min_probability)
        drawn = draw_choices(choices, q, state.sampling.generator)  # as many after each node
        children = state.add_choices(draft, frontier, drawn)
        for row in {choice.row for choice in drawn}:  # the nodes that got children
            draft.q[frontier[row]] = state.drafter.head.over_all_tokens(q[row])  # (V)
        frontier = likeliest_paths(draft, children, tree.top_k)
    return draft


def draw_choices(choices: list[Choice], q: Tensor, generator: torch.Generator) -> list[Choice]:
    """Draw as many tokens after each node as these choices have there. q (F, V')"""
    counts = Counter(choice.row for choice in choices)  # 0 for a row without a choice
    most = max(counts.values(), default=0)
    # One call draws `most` tokens for each row, in order. A row that needs fewer uses the first.
    drawn = gumbel_topk(q, most, generator)  # (F, most)
    drawn_probabilities = q.gather(-1, drawn).tolist()
    drawn_choices = []
    for row, outputs in enumerate(drawn.tolist()):
        for rank in range(counts[row]):
            probability = drawn_probabilities[row][rank]
            drawn_choices.append(Choice(row, outputs[rank], probability))
    return drawn_choices


def gumbel_topk(p: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Draw k tokens from each p (..., V') without replacement. Returns them in order (..., k).

    With e_x ~ Exp(1), e_x / p_x is the time until a random clock of rate p_x rings. Of such clocks,
    one for each token, x is the first to ring with probability p_x, and the order in which all ring
    is that of draws without replacement. The first to ring has the largest p_x / e_x. (This is the
    Gumbel top-k trick of Kool et al. 2019: log(p_x / e_x) is log p_x plus Gumbel noise.)
    """
    e = torch.empty_like(p).exponential_(generator=generator)
    # Some devices draw 0. Where p = 0 that makes 0 / 0 = NaN, which topk takes for the largest.
    e = e.clamp(min=torch.finfo(p.dtype).tiny)
    return (p / e).topk(k).indices


# --- Sizes, and a head of fewer tokens ---


def default_config(target: Llama) -> DrafterConfig:
    """Return the paper's sizes for Llama-3-8B. For another target, sizes of the same proportions,
    as near as its heads divide. For Llama-3-8B, some 0.25 billion parameters in all:

        layer      width    heads    kv heads    MLP
        LSA         2048       32           8    3072
        SA, CA      4096       32           4    6144
    """
    sizes = target.config
    heads = sizes.num_attention_heads
    kv_heads = math.gcd(heads, max(1, heads // 8))  # one for eight heads, if that divides them
    kv_width = 2 * sizes.num_key_value_heads * sizes.head_dim  # LSA's width
    # LSA has the target's number of heads, which need not divide kv_width (SmolLM2: 9 of 42 in
    # 384). RoPE needs an even size: else take fewer, at the least the kv heads, of size 2 D.
    layer_heads = heads
    while kv_width // layer_heads % 2 != 0:
        layer_heads -= sizes.num_key_value_heads
    return DrafterConfig(
        num_attention_heads=heads,
        layer_self_attention_num_attention_heads=layer_heads,
        layer_self_attention_num_key_value_heads=sizes.num_key_value_heads,
        layer_self_attention_intermediate_size=3 * kv_width // 2,
        self_attention_num_key_value_heads=kv_heads,
        self_attention_intermediate_size=3 * sizes.hidden_size // 2,
        cross_attention_num_key_value_heads=kv_heads,
        cross_attention_intermediate_size=3 * sizes.hidden_size // 2,
        rms_norm_eps=sizes.rms_norm_eps,
        rope_theta=sizes.rope_theta,
    )


def check_sizes(config: DrafterConfig, sizes: Config) -> None:
    """Raises InputError for sizes that do not fit a target of these sizes."""
    if config.target_layer_inference > sizes.num_hidden_layers:
        raise InputError(
            f"target_layer_inference {config.target_layer_inference}: the target has only "
            f"{sizes.num_hidden_layers} layers (train.py: --tli)"
        )
    if config.use_cross_attention and not config.use_self_attention:
        raise InputError("use_self_attention: CA needs SA (train.py: --no-sa needs --no-ca)")
    heads = config.num_attention_heads
    width = sizes.hidden_size
    check_heads("self_attention", width, heads, config.self_attention_num_key_value_heads)
    check_heads("cross_attention", width, heads, config.cross_attention_num_key_value_heads)
    if config.use_layer_self_attention:
        check_heads(
            "layer_self_attention",
            2 * sizes.num_key_value_heads * sizes.head_dim,
            config.layer_self_attention_num_attention_heads,
            config.layer_self_attention_num_key_value_heads,
        )


def check_heads(layer: str, width: int, heads: int, kv_heads: int) -> None:
    """Raises InputError unless kv_heads divides heads, and a head's size, width // heads, is even,
    for RoPE."""
    head_dim = width // max(1, heads)
    valid = heads >= 1 and kv_heads >= 1 and heads % kv_heads == 0
    if not valid or head_dim < 2 or head_dim % 2 != 0:
        raise InputError(
            f"{layer}: num_attention_heads {heads} of size {head_dim} with num_key_value_heads "
            f"{kv_heads}: kv heads must divide the heads, whose size must be even (train.py: "
            "--lsa-heads, --kv-heads)"
        )


class LimitedHead(DraftHead):
    """The LM head for some tokens only, V' of V.

    For a small target the LM head is most of what a draft costs, and rare tokens are seldom
    drafted. The target can still write them: rejection sampling is exact for any q.
    """

    def __init__(self, target: Llama, tokens: tuple[int, ...]):
        """Make this before the target is packed: packed weights have no rows to copy."""
        super().__init__(target)
        self.token_ids = tokens  # of each output
        self.vocabulary = torch.tensor(tokens, device=target.device)  # the same as a tensor, (V')
        rows = target.lm_head.weight[self.vocabulary].detach()  # (V', E)
        # An nn.Linear, so that it can be packed. On the meta device it draws no weights of its own.
        self.linear = nn.Linear(target.config.hidden_size, len(tokens), bias=False, device="meta")
        self.linear.weight = nn.Parameter(rows, requires_grad=False)

    @property
    def weight(self) -> Tensor:
        return self.linear.weight

    def logits(self, features: Tensor) -> Tensor:
        return self.linear(features.to(self.weight.dtype))

    def token(self, output: int) -> int:
        return self.token_ids[output]

    def over_all_tokens(self, q: Tensor) -> Tensor:
        all_tokens = q.new_zeros(self.target.config.vocab_size)
        return all_tokens.index_copy_(0, self.vocabulary, q)


# --- Ablations: without LSA, without CA, without SA; without all three it is EAGLE's drafter ---
#
# After t verified tokens come the newest token r and drafted ones d1, d2. What the layer after SA
# gets of the memory, at each of them:
#
#     at                          r              d1                 d2
#     with CA                     m_0 .. m_t-1   m_0 .. m_t-1       m_0 .. m_t-1
#     without, in training        m_t-1          r's memory         d1's memory
#     without, while drafting     m_t-1          predicted at r     predicted at d1
#
# Without CA each position adds the one memory before it to its own input, and attends to the
# positions before it. The last two rows differ: that is the off-policy problem.
#
# EAGLE's drafter (Li et al. 2024a) is one decoder layer over U e + W h, with e the embedding of a
# token and h the hidden state of the one before it. Without LSA and CA we have SA(e) + W h under
# that layer. So without SA, a linear map U takes its place. (EAGLE's layer has no norm before its
# attention. Here it has one, as all layers have.)


class LastStateDrafter(Drafter):
    """Without LSA. A token's memory is its final hidden state, projected."""

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        del self.layer_self_attention
        # The name stays, though this one is from E to E.
        self.Ekv2E = nn.Linear(target.config.hidden_size, target.config.hidden_size)

    def build_memory(self, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        return self.Ekv2E(hidden.to(self.dtype))

    def features(self, tokens: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        # As `Drafter.features`. But memory needs the target's final states, which kv does not hold.
        # (Training has them already, and calls `build_memory` itself.)
        memory = self.build_memory(kv, self.target.hidden(tokens))
        x = self.cross_attend(self.self_attend(tokens), memory, horizon)
        return self.infer_target_layers(x, kv, horizon)


class OffPolicyDrafter(Drafter):
    """Without CA. In its place stands a causal layer (the same one, called as a decoder layer),
    which at position i reads SA's output plus the memory of the token at i - 1.

    In training that is always a true memory, and no horizon hides it. While drafting, the tokens of
    the draft have none, and the drafter's own prediction stands in for it, `predicted_memory`. It
    was never trained on that: off-policy.
    """

    def cross_attend(self, x: Tensor, memory: Tensor, horizon: Tensor) -> Tensor:
        # The horizon is ignored: that is what makes this off-policy.
        count = x.shape[1]
        # The memory of the token before each. Nothing is before the first: zeros.
        previous = nn.functional.pad(memory[:, :-1], (0, 0, 1, 0))  # (B, T, E)
        mask = causal_mask(count, past=0, device=x.device)
        return self.cross_attention(x + previous, self.rotary[:, :count], mask)

    def memory_update(self, tokens: list[int], cache: KVCache, hidden: Tensor) -> MemoryUpdate:
        """As `Drafter.memory_update`, but cross_kv is the memory itself, (1, T, E). Keys and values
        need SA's output, which `OffPolicyDraftState.step` computes."""
        start = cache.length - len(tokens)
        memory = self.build_memory(cache.by_token(start, cache.length), hidden)
        first_reused = len(cache.kv) - self.N
        reused_kv = cache.kv[first_reused:, :, :, start:cache.length]
        return MemoryUpdate(tokens, memory, reused_kv)

    def predicted_memory(self, features: Tensor) -> Tensor:
        """Return what stands in for the memory of drafted tokens, given their features (T, E).

        A memory is made of keys and values, which a drafted token does not have. So a predicted
        hidden state takes its place: a vector of another kind. That costs much: results/README.md.
        """
        return features.to(self.dtype)


class LastStateOffPolicyDrafter(LastStateDrafter, OffPolicyDrafter):
    """Without both. With a `LinearMap` in SA's place it is EAGLE's drafter.

    From LastStateDrafter: how a memory is made (`build_memory`, and `features`). From
    OffPolicyDrafter: what reads it (`cross_attend`, `memory_update`). Only what stands in for
    the memory of a drafted token is new: a predicted hidden state, projected like a true one.
    """

    def predicted_memory(self, features: Tensor) -> Tensor:
        return self.Ekv2E(features.to(self.dtype))


class LinearMap(nn.Module):
    """Stands in for SA, and does not look at other tokens."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        # `DraftState` makes a cache of these sizes. Nothing is written to it.
        self.self_attn = SimpleNamespace(kv_heads=1, head_dim=1)

    def forward(self, x: Tensor, *_) -> Tensor:
        return self.linear(x)


class OffPolicyDraftState(DraftState):
    """Drafts without CA.

    Here the layers have to run over verified tokens, too, for their keys and values. They do so
    when the next draft begins, together with its root, in one pass, as in EAGLE's code. Until then
    such tokens are `unread`: SA's cache and cross_cache count them already, but their slots are not
    written. (TLI's cache has the target's own.) A prompt of 10 tokens, then a draft of two, of
    which the first is accepted:

                                          length of:   SA   cross   unread   memory_before
        append_verified of the prompt                  10     10      10          11
        step on the root                               11     10       0           1
        step on token 1                                12     10       0           1
        append_verified of the root and token 1        12     12       2           3
        step on the next root                          13     12       0           1

    (The first root is run a second time, which gives the same keys and values. EAGLE's code keeps
    them.)

    The causal layer needs keys and values of drafted tokens, too. They go into cross_cache, after
    those of the text. But cross_cache.length stays where the text ends, as everywhere. So `step`
    hands the layer another KVCache of the same tensor, with the length at which it is to write.
    """

    def __init__(self, drafter: Drafter, capacity: int, sampling: Sampling):
        super().__init__(drafter, capacity, sampling)
        self.unread: list[int] = []  # tokens
        # What these and the next root read: of each the memory of the token before it,
        # (1 + len(unread), E). Before the first token of a text there is none: zeros. Once a draft
        # has begun the root's row is left, for another draft of the same root.
        self.memory_before = torch.zeros_like(drafter.Ekv2E.bias).unsqueeze(0)
        # By node of the draft: what stands in for the memory of an expanded node, (E).
        self.predicted: dict[int, Tensor] = {}

    def append_verified(self, update: MemoryUpdate) -> None:
        """Take note of newly verified tokens, over which `step` will run."""
        self.discard_draft()
        self.unread += update.tokens
        memory = update.cross_kv[0]  # (T, E): see `memory_update`
        self.memory_before = torch.cat([self.memory_before, memory])
        self.append_reused(update)
        self.move_ends(len(update.tokens))

    def step(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Run SA, the causal layer and TLI. With the root SA and the causal layer read the unread
        tokens, too."""
        drafter = self.drafter
        self.expanded += frontier
        tree_mask = self.tree_mask(draft, frontier)  # (F, S)
        position = self.text_length + draft.depth(frontier[0])
        tokens = self.unread + [draft.tokens[node] for node in frontier]  # T
        first = position - len(self.unread)
        if frontier == [0]:
            mask = causal_mask(len(tokens), first, drafter.target.device)  # (T, S)
            memory_before = self.memory_before  # (T, E)
            self.self_cache.length = first
            self.unread = []
            self.memory_before = memory_before[-1:]
        else:  # nothing is unread: T is F
            mask = tree_mask
            predicted = [self.predicted[draft.parents[node]] for node in frontier]
            memory_before = torch.stack(predicted)  # (T, E)
        rope = drafter.rotary[:, first:position + 1]
        x = drafter.self_attention(self.embed(tokens), rope, mask, self.self_cache, 0)
        # These tokens go into the same slots as in SA's cache, so that the same mask fits both.
        causal_cache = KVCache(self.cross_cache.kv)
        causal_cache.length = self.self_cache.length
        x = drafter.cross_attention(x + memory_before, rope, mask, causal_cache, 0)
        x = x[:, -len(frontier):]  # of unread tokens only the keys and values were wanted
        target_rope = drafter.target.rotary[:, position:position + 1]
        x = drafter.run_target_layers(x, target_rope, tree_mask, self.reused_cache)
        self.self_cache.length += len(tokens)
        self.reused_cache.length += len(frontier)
        features = x.squeeze(0)  # (F, E)
        self.predicted.update(zip(frontier, drafter.predicted_memory(features)))
        return features


# --- What drafting over a network needs: coarse distributions, and going on alone ---

Q_TOKENS = 64  # of a distribution that is sent over a network: the rest of it is never drafted


def quantize_probabilities(q: Tensor) -> tuple[Tensor, Tensor]:
    """Turn each q (n, V or V') into its 64 likeliest tokens, int32, and weights, uint8: (n, 64).

    The likeliest has the weight 255, the others in proportion: 320 bytes for each q.
    """
    top = q.topk(min(Q_TOKENS, q.shape[-1]))
    weights = 255 * top.values / top.values[..., :1]
    return top.indices.int(), weights.round().to(torch.uint8)


def dequantize_probabilities(ids: Tensor, weights: Tensor, vocab_size: int) -> Tensor:
    """Return the distributions (n, vocab_size) with these weights. Client and server get the same
    floats, as each is one division of two integers."""
    q = weights.float() / weights.sum(-1, keepdim=True)
    return q.new_zeros(len(q), vocab_size).scatter_(-1, ids.long(), q)


class RemoteDraftState(DraftState):
    """Drafts for a target on a server. Two things differ from `DraftState`.

    q is made coarse before tokens are drawn from it. So the server can be sent the very q that was
    used, in a few bytes. (Any q will do, if tokens are drawn from just this one.)

    While the server is out of reach, no memory comes and nobody would verify a draft. Then `draft`
    returns the root alone, and `RemoteTarget` calls `draft_unverified`, whose tokens stay in SA's
    and TLI's caches as if they were verified. An outage after a text of 10 tokens, in which the
    drafter writes four tokens, twice:

                                            length of the caches:   SA   CA   TLI    unverified
        before                                                      10   10   10         0
        draft_unverified(root, 4)                                   14   10   14         4
        draft_unverified(root, 4)                                   18   10   18         8
        append_verified of 9 tokens: the server is back             19   19   19         0

    Each call caches its root and its tokens but the last, the next root. The 9 are the first root
    and all 8.
    """

    def __init__(self, drafter: Drafter, capacity: int, sampling: Sampling):
        super().__init__(drafter, capacity, sampling)
        self.offline = False
        self.unverified = 0  # tokens of the text that no target has seen

    @property
    def verified(self) -> int:
        """How many tokens of the text have a memory."""
        return self.cross_cache.length

    @property
    def text_length(self) -> int:
        return self.verified + self.unverified

    def append_verified(self, update: MemoryUpdate | None) -> None:
        """Grow the caches. update: None while the server is out of reach."""
        self.offline = update is None
        if update is not None:
            self.unverified = 0  # now they are verified, or others in their place
            super().append_verified(update)

    def draft(self, root: int, tree: TreeConfig) -> Draft:
        if self.offline:
            return Draft(root)
        return super().draft(root, tree)

    def draft_unverified(self, root: int, count: int) -> list[int]:
        """Write `count` tokens after the root, which stay in the caches as text."""
        # super(): our own `draft` drafts nothing while offline.
        draft = super().draft(root, TreeConfig(depth=count))
        self.unverified += len(self.expanded)  # the root, and all drafted tokens but the last
        return draft.tokens[1:]

    def next_distributions(self, draft: Draft, frontier: list[int]) -> Tensor:
        q = super().next_distributions(draft, frontier)
        if self.sampling.temperature == 0:
            return q
        ids, weights = quantize_probabilities(q)
        return dequantize_probabilities(ids, weights, q.shape[-1])


# --- Chains for many conversations at once ---


class BatchDraftState:
    """The drafter's side of several conversations, each a row of the caches. It needs CA.

    Each row has a DraftState, for `append_verified`. Their caches are joined, so that `step` can
    run all rows in one pass.
    """

    def __init__(self, drafter: Drafter, rows: int, capacity: int):
        self.drafter = drafter
        # (Sampling() is never used: `draft_chains` is given one for each row.)
        self.states = [DraftState(drafter, capacity, Sampling()) for _ in range(rows)]
        self.caches = [self.join(name) for name in ("self_cache", "cross_cache", "reused_cache")]
        self.self_cache, self.cross_cache, self.reused_cache = self.caches

    def join(self, name: str) -> RaggedKVCache:
        """Join one cache of all states into one, of which each state's becomes a row."""
        joined = RaggedKVCache(torch.cat([getattr(state, name).kv for state in self.states], 1))
        for state, row in zip(self.states, joined.rows):
            setattr(state, name, row)
        return joined

    def append_verified(self, row: int, tokens: list[int], cache: KVCache, hidden: Tensor) -> None:
        """Grow a row's caches by newly verified tokens, the last ones in its target cache.

        hidden (1, T, E): the target's final states of them.
        """
        update = self.drafter.memory_update(tokens, cache, hidden)
        self.states[row].append_verified(update)

    def draft_chains(self, roots: list[int], K: int, samplings: list[Sampling]) -> list[Draft]:
        """Draft a chain of K tokens after the newest one, the root, of every row.

        Call `append_verified` for every row first: it also discards the row's last draft.
        """
        drafts = [Draft(root) for root in roots]
        for _ in range(K):
            logits = self.step([draft.tokens[-1] for draft in drafts])  # (B, V')
            for draft, row_logits, sampling in zip(drafts, logits, samplings):
                q = draft_distributions(row_logits, sampling)  # (V')
                extend_chain(draft, q, self.drafter.head, sampling)
        return drafts

    def step(self, tokens: list[int]) -> Tensor:
        """Run SA, CA and TLI, as `DraftState.step`, on one more token of every row.

        Returns logits (B, V').
        """
        drafter = self.drafter
        target = drafter.target
        batch = len(tokens)
        ids = torch.tensor(tokens, device=target.device)[:, None]  # (B, 1)
        context = target.config.max_position_embeddings
        new = RaggedPass(self.self_cache, batch, 1, context)
        rope = drafter.rotary[:, new.positions]  # (2, B, 1, 1, D/2)
        x = drafter.self_attention(drafter.embed(ids), rope, new.mask, new, 0)
        # CA reads all of a row's memory, and no unused slots after it, up to the longest row.
        lengths = torch.tensor([row.length for row in self.cross_cache.rows[:batch]])
        memory = self.cross_cache.kv[0, :batch, :, :int(lengths.max())]  # (B, Hkv, S, 2D)
        slots = torch.arange(memory.shape[2])
        cross_mask = (slots < lengths[:, None, None, None]).to(target.device)  # (B, 1, 1, S)
        x = drafter.cross_attention.attend_to(memory, x, rope, cross_mask)
        new = RaggedPass(self.reused_cache, batch, 1, context)
        x = drafter.run_target_layers(x, target.rotary[:, new.positions], new.mask, new)
        for row in self.self_cache.rows[:batch] + self.reused_cache.rows[:batch]:
            row.length += 1
        return drafter.head.logits(x)[:, 0]


# --- Fast for a few tokens ---


def to_bfloat16(drafter: Drafter) -> Drafter:
    """Turn a drafter's weights into bfloat16, if they are on a CPU with instructions for it.

    Drafts need not be exact: a worse one costs time, never text.
    """
    weight = drafter.Ekv2E.weight
    is_plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    if is_plain and can_pack(weight) and torch.cpu._is_avx512_bf16_supported():
        for parameter in drafter.parameters():  # (drafter.bfloat16() would round the angles, too)
            parameter.data = parameter.data.bfloat16()
        if isinstance(drafter.head, LimitedHead):  # which is none of the drafter's modules
            drafter.head.linear.bfloat16()
    return drafter


def pack_together(target: Llama, drafters: list[Drafter]) -> None:
    """`pack` a target and its drafters."""
    pack(target)
    for drafter in drafters:
        pack(drafter)
        if isinstance(drafter.head, LimitedHead):
            drafter.head.linear = pack(drafter.head.linear)


# --- Which drafter, which draft state ---


def new_drafter(target: Llama, config: DrafterConfig) -> Drafter:
    """Make a drafter with random weights, of the kind that the config asks for.

    Raises InputError for sizes that do not fit the target or each other.
    """
    check_sizes(config, target.config)
    has_lsa = config.use_layer_self_attention
    if config.use_cross_attention:
        kind = Drafter if has_lsa else LastStateDrafter
    else:
        kind = OffPolicyDrafter if has_lsa else LastStateOffPolicyDrafter
    drafter = kind(target, config)
    if not config.use_self_attention:
        drafter.self_attention = LinearMap(target.config.hidden_size)
    if config.draft_vocabulary is not None:
        drafter.head = LimitedHead(target, config.draft_vocabulary)
    return drafter


def start_drafting(
    drafter: Drafter, capacity: int, sampling: Sampling = Sampling(), remote: bool = False
) -> DraftState:
    """Return the drafter's side of one conversation. remote: the target is on a server, which needs
    a drafter with CA (speculate.py refuses others)."""
    if remote:
        return RemoteDraftState(drafter, capacity, sampling)
    if not drafter.config.use_cross_attention:
        return OffPolicyDraftState(drafter, capacity, sampling)
    return DraftState(drafter, capacity, sampling)


# --- Checkpoints, in the authors' names and shapes ---


def load_drafter(path: str | Path, target: Llama) -> Drafter:
    """Load a drafter of `target`, on its device and in its dtype, from a folder of config.json and
    model.safetensors.

    Raises InputError for what is missing, damaged, or does not fit the target.
    """
    path = Path(path)
    if not path.is_dir():
        raise InputError(
            f"{path}: no such folder; a drafter's has config.json and model.safetensors"
        )
    config_file = path / "config.json"
    weights_file = path / "model.safetensors"
    stated = read_json(config_file)
    with input_errors(weights_file, SafetensorError):  # a type that PyTorch lacks
        tensors = {name: read() for name, read in read_tensors(weights_file)}
    # What sizes that do not fit may raise: our own checks, PyTorch, a division by no rows.
    kinds = (InputError, RuntimeError, TypeError, ZeroDivisionError)
    with input_errors(config_file, *kinds), torch.device("meta"):
        config = parse_drafter_config(stated, tensors, target.config)
        drafter = new_drafter(target, config)
    load_weights(drafter, iter(tensors.items()), weights_file, target.device, target.dtype)
    drafter.checkpoint_hash = checksum(config_file) + checksum(weights_file)
    return drafter.requires_grad_(False).eval()


def parse_drafter_config(
    stated: dict, tensors: dict[str, Tensor], sizes: Config
) -> DrafterConfig:
    """Return a complete config: what config.json states; else the target's value or, for kv heads
    and MLP widths, what the tensors' shapes say. (The authors' config.json leaves some out.)"""
    values = {
        "num_attention_heads": sizes.num_attention_heads,
        "layer_self_attention_num_attention_heads": sizes.num_attention_heads,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
    }
    for name, kind in DrafterConfig.__annotations__.items():
        value = stated.get(name)
        if value is None:
            continue
        # kind is a string, such as "int": annotations are not evaluated in this file.
        if not is_valid(value, kind, sizes.vocab_size):
            raise InputError(f"{name} is invalid: {value!r:.40}")
        values[name] = tuple(value) if isinstance(value, list) else value
    rows = {name: len(tensor) for name, tensor in tensors.items()}
    for layer in ("self_attention", "cross_attention", "layer_self_attention"):
        heads = values.get(f"{layer}_num_attention_heads", values["num_attention_heads"])
        # 1 where a tensor is missing: `load_weights` says so, unless an ablation lacks the layer.
        q_rows = rows.get(f"{layer}.self_attn.q_proj.weight", 1)
        k_rows = rows.get(f"{layer}.self_attn.k_proj.weight", 1)
        mlp_width = rows.get(f"{layer}.mlp.gate_proj.weight", 1)
        # q_proj has heads * D rows, k_proj kv_heads * D: so kv_heads = heads * k_rows / q_rows.
        values.setdefault(f"{layer}_num_key_value_heads", heads * k_rows // q_rows)
        values.setdefault(f"{layer}_intermediate_size", mlp_width)
    return DrafterConfig(**values)


def is_valid(value: object, kind: str, vocab_size: int) -> bool:
    """Tell whether a field of config.json, annotated with `kind`, may have this value."""
    if kind == "bool":
        return isinstance(value, bool)
    if kind == "int":
        return type(value) is int and value >= 0
    if kind == "float":
        return type(value) in (int, float) and 0 < value < math.inf
    # The draft vocabulary, or nothing: distinct tokens.
    if not isinstance(value, list) or not value:
        return False
    distinct = {token for token in value if type(token) is int and 0 <= token < vocab_size}
    return len(distinct) == len(value)


def save_drafter(drafter: Drafter, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors, each completely or not at all."""
    sizes = drafter.target.config
    config = {
        **asdict(drafter.config),
        # The authors' code reads these three.
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "kv_hidden_size": 2 * sizes.num_key_value_heads * sizes.head_dim,
    }
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        tensors[name] = tensor.to("cpu", dtype).contiguous()
    with (
        atomic_write(path / "config.json") as config_file,
        atomic_write(path / "model.safetensors") as weights_file,
    ):
        config_file.write_text(json.dumps(config))
        save_file(tensors, weights_file, metadata={"format": "pt"})
