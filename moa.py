"""The drafter: a Mixture of Attentions (Zimmer et al., ICLR 2025, arXiv 2410.03804, section 3).

The drafter, M_Small in the paper, reads the target's KV cache and drafts the next tokens. It has
four parts, which the next section writes as formulas:

    LSA  Layer Self-Attention reads the keys and values of one token in all layers of the target's
         cache, and condenses them into one vector, the token's *memory*. (EAGLE, EAGLE-2 and Medusa
         see the last layer only.)
    SA   Self-Attention, causal, reads the embeddings of the text and of the draft, so that a
         drafted token sees the drafted tokens before it.
    CA   Cross-Attention takes its queries from SA's output, and its keys and values from the memory
         of all verified tokens.
    TLI  Target Layer Inference runs the target's last N layers on CA's output. With N = 0 there are
         none, and CA's output itself predicts the target's final hidden state.

`Drafter` has these layers, and runs them over all positions in one pass, for training. `DraftState`
runs them step by step, with caches, and makes chains and trees of drafted tokens. This file has no
command: train.py trains a drafter, and speculate.py drafts with it. Read as far as the bar, the
line that says where the method ends.
"""
from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from llama import (
    Config,
    DecoderLayer,
    KeysValues,
    KVCache,
    Llama,
    Sampling,
    causal_mask,
    load_target,
    pack,
    probabilities,
    rotary_table,
    sample,
)
from plumbing.errors import InputError, input_errors
from plumbing.files import atomic_write, checksum, read_json
from plumbing.hub import SHIPPED_DRAFTERS, is_hub_id, resolve_path
from plumbing.huggingface import load_weights, read_tensors
from plumbing.onednn import has_fast_bfloat16
from plumbing.tokenizer import Tokenizer

LSA_TOKENS = 64  # tokens that LSA reads at once, to bound the memory for its activations


# --- The method in formulas ---
#
# Number the tokens 0, 1, 2, ... A token is *verified* once the target has read and kept it. The
# *text* is the verified tokens, 0 to t - 1. Token t, the *root*, follows the text. The root is the
# newest token, which the target has chosen but not yet read. The tokens after the root are drafted.
# e_j is the embedding of token j, and [k_jl v_jl] are its key and value in the target's layer l:
#
#     z_j1, ..., z_jL = LSA([k_j1 v_j1], ..., [k_jL v_jL])    for all j < t
#     m_j = W mean(z_j1, ..., z_jL) + b                       the memory of token j
#     s_i = the last output of SA(e_0, ..., e_i)
#     g_i = CA(query s_i; keys and values from m_0, ..., m_{t-1})
#     h'_i = g_i if N = 0, else norm(the target's last N layers on g_i)
#     q_i = softmax(LM head h'_i)                             the distribution of token i + 1
#
# LSA lets the vector of each layer take what it needs from the other layers. The results are
# averaged, unweighted; W maps the average to the hidden size. LSA reads keys as the cache holds
# them, that is, rotated by their position. With several kv heads, [k v] is the key and value of
# head 0, then the key and value of head 1, and so on.
#
# h'_i predicts the target's final hidden state at token i, from which the target's own LM head
# computes the distribution of the next token. With N > 0, CA's output predicts the state that
# enters the last N layers instead: a large N gives better drafts at a higher cost. In these layers
# a verified token has the target's own keys and values, from the cache. The root and the drafted
# tokens have keys and values that the layers compute from CA's output.
#
# Only verified tokens have a memory. Training must therefore hide from each position the memory
# that it would not have while drafting: the memory of all tokens after the position's *horizon*
# (see train.py). The paper calls this on-policy training, and its mask "T-step bounded".
#
# Shapes: those of llama.py, plus N reused target layers, K drafted tokens, F nodes on the frontier
# of a draft (see `DraftLimits`), V' tokens that may be drafted (all V, except with a `LimitedHead`,
# below the bar). LSA, SA, CA and the target's layers each have their own H, Hkv and D.


# --- The four layers, and training's pass over all positions ---


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's sizes and choices. Fields that the authors' config.json also has are named as in
    that file."""

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
    draft_vocabulary: tuple[int, ...] | None = None  # the only tokens to draft; None: all tokens


class CrossAttentionLayer(DecoderLayer):
    """A decoder layer whose queries come from one sequence, and whose keys and values come from a
    different one, the memory.

    Call `keys_values(memory, rope)` once, then `attend_to` with any queries. The attention module
    is named `self_attn`, as in the authors' checkpoints. One norm, `input_layernorm`, serves both
    sequences. (The inherited `forward` computes self-attention. Only the ablation without CA calls
    `forward`.)
    """

    def attend_to(self, kv: Tensor, x: Tensor, rope: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run the layer on queries from x (B, T, E) over kv (B, Hkv, S, 2D) -> (B, T, E)."""
        q = self.self_attn.queries(self.input_layernorm(x), rope)
        return self.feed_forward(x + self.self_attn(q, kv, mask))


class Drafter(nn.Module):
    """The drafter's layers. LSA, the projection, SA and CA are trained. All other layers are the
    target's, and frozen.

    The modules `layer_self_attention`, `self_attention` and `cross_attention` are named as in the
    authors' checkpoints. Each of the methods `layer_self_attend`, `self_attend` and `cross_attend`
    runs one of these modules over whole sequences.
    """

    checkpoint_hash = ""  # set by `load_drafter`: a client and its server compare theirs

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__()
        self.config = config
        # Not a submodule: the target's weights are neither trained nor saved with the drafter.
        self.__dict__["target"] = target
        sizes = target.config
        hidden_size = sizes.hidden_size
        heads = config.num_attention_heads
        self.head_dim = hidden_size // heads  # of SA and CA
        kv_width = kv_hidden_size(sizes)  # 2 Ekv, the width of LSA
        layer_heads = config.layer_self_attention_num_attention_heads
        layer_head_dim = kv_width // layer_heads
        self.layer_self_attention = DecoderLayer(
            width=kv_width,
            inner=config.layer_self_attention_intermediate_size,
            heads=layer_heads,
            kv_heads=config.layer_self_attention_num_key_value_heads,
            head_dim=layer_head_dim,
            eps=config.rms_norm_eps,
        )
        self.Ekv2E = nn.Linear(kv_width, hidden_size)  # the authors' name for the projection
        self.self_attention = DecoderLayer(
            width=hidden_size,
            inner=config.self_attention_intermediate_size,
            heads=heads,
            kv_heads=config.self_attention_num_key_value_heads,
            head_dim=self.head_dim,
            eps=config.rms_norm_eps,
        )
        self.cross_attention = CrossAttentionLayer(
            width=hidden_size,
            inner=config.cross_attention_intermediate_size,
            heads=heads,
            kv_heads=config.cross_attention_num_key_value_heads,
            head_dim=self.head_dim,
            eps=config.rms_norm_eps,
        )
        # LSA's sequence is the L layers of one token. RoPE applies here as well, as in the authors'
        # code: the number of a layer is its position.
        layer_rotary = rotary_table(
            sizes.num_hidden_layers, layer_head_dim, config.rope_theta, target.device
        )
        rotary = rotary_table(
            sizes.max_position_embeddings, self.head_dim, config.rope_theta, target.device
        )
        self.register_buffer("layer_rotary", layer_rotary, persistent=False)  # (2, L, D)
        self.register_buffer("rotary", rotary, persistent=False)  # (2, context, D)
        # A `DraftHead`, which is no Module: its weights are neither trained nor saved.
        self.head = new_head(target, config.draft_vocabulary)

    @property
    def N(self) -> int:
        return self.config.target_layer_inference

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.Ekv2E.weight.dtype  # `pack` leaves the projection as it is: it has a bias

    def forward(self, tokens: Tensor, kv: Tensor, horizon: Tensor) -> tuple[Tensor, Tensor]:
        """Run the whole drafter over all positions, as training does. Returns CA's output and the
        predicted final hidden states, both (B, T, E). They are the same if N = 0.

        tokens (B, T); kv (B, T, L, 2 Ekv) from the target's cache; horizon (B, T): the last
        position whose memory a query may read, -1 for none.
        """
        ca_output = self.mix_attentions(tokens, kv, horizon)  # LSA, SA, CA
        if self.N == 0:
            return ca_output, ca_output
        return ca_output, self.reuse_target_layers(ca_output, kv, horizon)  # TLI

    def features(self, tokens: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        """Return only the predicted final hidden states of `forward`, the *features* (B, T, E)."""
        _, hidden = self(tokens, kv, horizon)
        return hidden

    def mix_attentions(self, tokens: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        """Run LSA, SA and CA over all positions. Returns CA's output (B, T, E)."""
        memory = self.build_memory(kv)  # (B, T, E)
        x = self.self_attend(tokens)  # (B, T, E)
        return self.cross_attend(x, memory, horizon)

    def build_memory(self, kv: Tensor) -> Tensor:
        """Return the memory of tokens (B, T, E), given their keys and values in the target's cache,
        kv (B, T, L, 2 Ekv)."""
        # LSA never looks across tokens, so a few tokens can be read at a time.
        means = [self.layer_self_attend(piece) for piece in kv.split(LSA_TOKENS, dim=1)]
        return self.Ekv2E(torch.cat(means, dim=1))

    def layer_self_attend(self, kv: Tensor) -> Tensor:
        """Run LSA and take its mean over layers: kv (B, T, L, 2 Ekv) -> (B, T, 2 Ekv)."""
        batch, count, layers = kv.shape[:3]
        # Each token is a sequence of its own, of L layers, so the tokens form one batch.
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

        Query i reads the memory of positions 0 to horizon[b, i], and none if the horizon is -1.
        Returns CA's output (B, T, E).
        """
        count = x.shape[1]
        rope = self.rotary[:, :count]
        positions = torch.arange(count, device=x.device)
        within = positions <= horizon.unsqueeze(-1)  # (B, T, T): query i, memory j
        kv = self.cross_attention.keys_values(memory, rope)  # (B, Hkv, T, 2D)
        # With horizon -1 a query reads nothing: PyTorch's attention then returns zeros, and the
        # residual connection passes on SA's output alone.
        return self.cross_attention.attend_to(kv, x, rope, within.unsqueeze(1))

    def reuse_target_layers(self, x: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        """Run TLI over all positions, as training does: CA's output x (B, T, E) -> (B, T, E).

        What query 6, with horizon 3, reads in each of the N layers:

            position                         0 1 2 3 4 5 6 7
            the target's keys and values     + + + + . . . .
            those computed from x            . . . . + + + .

        In a draft, tokens 0 to 3 are verified: the cache holds the target's keys and values for
        them. Tokens 4 to 6 have keys and values computed from x. One pass must serve every query,
        so each layer is given both kinds for every position, 2T in all, and each row of the mask is
        one such picture, its two lines joined. (Positions 4 and 5 share query 6's horizon, so their
        keys and values are exactly those of a draft that begins at 4.)
        """
        count = x.shape[1]
        positions = torch.arange(count, device=x.device)
        within = positions <= horizon.unsqueeze(-1)  # (B, T, T): query i, position j
        after = ~within & (positions <= positions.unsqueeze(-1))  # (B, T, T)
        mask = torch.cat([within, after], dim=-1).unsqueeze(1)  # (B, 1, T, 2T)
        kv_heads = self.target.config.num_key_value_heads
        first_reused = kv.shape[2] - self.N  # of the L layers
        reused = kv[:, :, first_reused:].unflatten(-1, (kv_heads, -1))  # (B, T, N, Hkv, 2D)
        known = KnownKeysValues(reused.permute(2, 0, 3, 1, 4))  # (N, B, Hkv, T, 2D)
        return self.run_target_layers(x, self.target.rotary[:, :count], mask, known)

    def run_target_layers(
        self, x: Tensor, rope: Tensor, mask: Tensor | None, cache: KeysValues
    ) -> Tensor:
        """Run the target's last N layers and its final norm: x (B, T, E) -> (B, T, E). With N = 0
        return x as it is.

        In training x has all positions. In drafting x has only the nodes of the frontier (see
        `DraftLimits`). `cache` numbers the N layers from 0. It supplies each layer with the
        target's own keys and values of verified tokens, followed by those that the layer computes
        from x.
        """
        if self.N == 0:
            return x
        x = x.to(self.target.dtype)
        for i, layer in enumerate(self.target.layers[-self.N:]):
            x = layer(x, rope, mask, cache, i)
        return self.target.norm(x)

    def memory_update(self, tokens: list[int], cache: KVCache) -> MemoryUpdate:
        """Return the keys and values of newly verified tokens for the drafter's caches. The tokens
        must be the last ones in the target's cache. LSA runs here, on the target's side, because
        LSA reads that cache."""
        kv = cache.by_token(cache.length - len(tokens), cache.length)  # (1, T, L, 2 Ekv)
        return self.update_from_memory(tokens, self.build_memory(kv), cache)

    def update_from_memory(
        self, tokens: list[int], memory: Tensor, cache: KVCache
    ) -> MemoryUpdate:
        """Return the same as `memory_update`, given the memory of the tokens (1, T, E). (Ablations
        compute the memory in other ways.)"""
        start = cache.length - len(tokens)
        rope = self.rotary[:, start:cache.length]
        cross_kv = self.cross_attention.keys_values(memory, rope)  # (1, Hkv, T, 2D)
        first_reused = len(cache.kv) - self.N  # of the L layers
        reused_kv = cache.kv[first_reused:, :, :, start:cache.length]  # (N, 1, Hkv, T, 2D)
        return MemoryUpdate(tokens, cross_kv, reused_kv)

    def new_state(self, capacity: int, sampling: Sampling = Sampling()) -> DraftState:
        """Return the drafter's side of a new conversation. capacity: see `DraftState`."""
        return DraftState(self, capacity, sampling)


class KnownKeysValues:
    """Takes the place of a KVCache in training. `append` returns the target's keys and values,
    which are known from the beginning, followed by the new ones, which a layer has just computed
    from x. Nothing is stored."""

    def __init__(self, kv: Tensor):
        self.kv = kv  # the target's, (N, B, Hkv, T, 2D)

    def append(self, layer: int, kv: Tensor) -> Tensor:
        return torch.cat([self.kv[layer].to(kv.dtype), kv], dim=2)  # (B, Hkv, 2T, 2D)


# --- Drafts ---


class Draft:
    """A tree of tokens: the root, and drafted tokens that may follow it. A chain is the simplest
    tree.

    The tokens are numbered in the order in which they are added, and a *node* is such a number.
    Node 0 is the root. Node i has the token tokens[i], and follows node parents[i], whose number is
    smaller:

        node   token        parent   path
         0     " lies"        -1     0
         1     " in"           0     0 1
         2     " within"       0     0 2
         3     " the"          1     0 1 3
    """

    def __init__(self, root: int):
        # Each list has one entry for each node: 1 + K when the draft is complete.
        self.tokens = [root]
        self.parents = [-1]
        self.paths = [[0]]  # the nodes from the root to each node, both included
        self.probabilities = [1.0]  # the drafter's probability of each token after its parent
        self.path_probabilities = [1.0]  # the product of the probabilities along each path
        # For each parent, the distribution (V) that its children were drawn from. Rejection
        # sampling needs it. Empty at temperature 0, where nothing is drawn.
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
        """Return whether each node follows the node before it."""
        return self.parents == list(range(-1, len(self.parents) - 1))

    def children(self, parent: int) -> list[int]:
        """Return the nodes that follow `parent` in the order in which they were added. Drawn tokens
        are added in the order drawn."""
        return [node for node, other in enumerate(self.parents) if other == parent]

    def child(self, parent: int, token: int) -> int | None:
        """Return the node of this token after `parent`, or None if it was not drafted there."""
        for node in self.children(parent):
            if self.tokens[node] == token:
                return node
        return None

    def path_of(self, tokens: list[int]) -> list[int]:
        """Return the path from the root along these tokens: node 0, then a node for each token.
        Raises ValueError if one of these tokens was not drafted there."""
        path = [0]
        for token in tokens:
            child = self.child(path[-1], token)
            if child is None:
                raise ValueError(f"token {token!r:.20} was not drafted there")
            path.append(child)
        return path

    def depth(self, node: int) -> int:
        """Return how many levels a node is below the root."""
        return len(self.paths[node]) - 1

    def mask(self, nodes: list[int], cached: list[int], text_length: int) -> Tensor:
        """Return which slots of a cache each of `nodes` may see, as a mask of shape (len(nodes),
        text_length + len(cached)). A node sees the whole text, its ancestors in the draft, and
        itself. It does not see its siblings, which are alternatives to it.

        cached: the nodes whose keys and values lie in the cache after the text, in this order.
        """
        rows = []
        for node in nodes:
            rows.append([other in self.paths[node] for other in cached])
        text = torch.ones(len(nodes), text_length, dtype=torch.bool)
        return torch.cat([text, torch.tensor(rows)], dim=1)

    def keep(self, kept: list[int]) -> Draft:
        """Return the draft of these nodes only, in this order: the root first, and each parent
        before its children.

        For temperature 0 only: where tokens are drawn, every drawn token must be proposed, in the
        order drawn (see `sample_tree`).
        """
        smaller = Draft(self.tokens[0])
        new_node = {0: 0}  # from the number of a kept node to its number in the smaller draft
        for node in kept[1:]:
            parent = new_node[self.parents[node]]
            new_node[node] = smaller.add(self.tokens[node], parent, self.probabilities[node])
        return smaller

    def likeliest_first(self) -> Draft:
        """Return the same draft with its nodes in the order of their paths' probabilities. (A path
        is at least as likely as its extensions, so parents come first.) For temperature 0 only."""
        nodes = range(len(self.tokens))
        return self.keep(sorted(nodes, key=lambda node: -self.path_probabilities[node]))


@dataclass(frozen=True)
class DraftLimits:
    """The limits of a draft, which grows level by level.

    To *expand* a node is to run the drafter on it and to add tokens after it. The nodes that are
    expanded next are the *frontier*. The first three limits are EAGLE-2's. The other two are ours:
    a token that the drafter itself finds unlikely is hardly worth its cost.
    """

    depth: int  # levels below the root, at most; for a chain, K drafted tokens
    top_k: int = 1  # nodes on a frontier, at most; with 1 the draft is a chain
    total_tokens: int = 64  # drafted tokens of a tree, at most; does not limit a chain
    min_confidence: float = 0.0  # stop if the probabilities of a frontier's paths sum to less
    min_probability: float = 0.0  # a tree ignores paths below this probability


# --- What the target returns ---
#
# `VerifyResult` and `Verifier` are defined here because speculate.py and netsim.py share them.


@dataclass
class MemoryUpdate:
    """The keys and values by which the drafter's caches grow when T tokens have been verified.

    The memory itself is not among them. CA reads only keys and values computed from the memory, so
    these are computed at once and passed on in its place. `cross_kv` and `reused_kv` are None where
    no drafter needs them.
    """

    tokens: list[int]
    cross_kv: Tensor | None  # CA's, computed from the memory, (1, Hkv, T, 2D)
    reused_kv: Tensor | None  # the target's own, in its last N layers, (N, 1, Hkv, T, 2D)


@dataclass
class VerifyResult:
    """The result of one pass of the target over a prompt or a draft. (After a prompt nothing is
    accepted, because nothing was drafted.)"""

    accepted: list[int]  # the drafted tokens that the target keeps
    token: int  # the target's own token, which comes after the accepted ones
    # The update for all tokens that the pass verified: the prompt, or the root and the accepted
    # tokens. None if no drafter's caches are to grow.
    memory: MemoryUpdate | None
    draft: Draft  # the draft that was verified: a verifier may leave out unlikely tokens
    logits: Tensor | None = None  # the target's, after each node, (1 + K, V), if they are known


class Verifier(Protocol):
    """The target's side of one conversation, on this machine or on a server."""

    def prefill(self, prompt: list[int]) -> VerifyResult:
        """Read a prompt, and choose the token after it."""

    def verify(self, draft: Draft) -> VerifyResult:
        """Decide which tokens of a draft to keep."""


# --- Drafting: the same layers, step by step ---


class DraftHead:
    """The target's LM head, frozen: from features to logits.

    An *output* is an index into these logits. Here the outputs are all tokens, by their numbers.
    `LimitedHead`, below the bar, has fewer outputs than there are tokens. For its sake, `token` and
    `over_all_tokens` translate from outputs to tokens.
    """

    def __init__(self, linear: nn.Module):
        self.linear = linear  # its weight: (V', E)

    def logits(self, features: Tensor) -> Tensor:
        """Map features (..., E) to logits (..., V')."""
        return self.linear(features.to(self.linear.weight.dtype))

    def token(self, output: int) -> int:
        """Return the token that an output stands for."""
        return output

    def over_all_tokens(self, q: Tensor) -> Tensor:
        """Turn a distribution over outputs, q (V'), into one over all tokens (V)."""
        return q


def draft_distributions(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return q, from which drafted tokens are chosen: logits (..., V') -> (..., V')."""
    if sampling.temperature == 0:
        # Nothing is drawn, but trees rank paths by probability, and limits are compared with it.
        return probabilities(logits, 1.0)
    return probabilities(logits, sampling.temperature, sampling.top_p)


def extend_chain(draft: Draft, q: Tensor, head: DraftHead, sampling: Sampling) -> None:
    """Add to a chain a token that is chosen from q (V'): the likeliest, or a draw."""
    last = len(draft.tokens) - 1
    if sampling.temperature == 0:
        output = int(q.argmax())
    else:
        output = sample(q, sampling.generator)
        draft.q[last] = head.over_all_tokens(q)
    draft.add(head.token(output), parent=last, probability=float(q[output]))


class DraftState:
    """The drafter's side of one conversation: three caches, and the draft that is being made.

        keys and values            of verified tokens        of expanded nodes of the draft
        self_cache     SA          its own                   its own
        cross_cache    CA          made from the memory      none: they have no memory
        reused_cache   N layers    the target's own          computed from CA's output

    After `append_verified` all three caches have the length of the text. While drafting,
    `self_cache` and `reused_cache` grow by the same nodes in the same order, which is the order of
    `expanded`, so one mask serves both. For example, with a text of 10 tokens and a chain of three,
    of which the target accepts two:

                                        length of the caches:   SA   CA   TLI
        before the draft                                        10   10   10
        step on the root, which drafts token 1                  11   10   11
        step on token 1, which drafts token 2                   12   10   12
        step on token 2, which drafts token 3                   13   10   13
        discard_draft                                           10   10   10
        append_verified of the root and tokens 1 and 2          13   13   13

    Accepted tokens leave the caches with the rest of the draft and are appended again, because they
    have a memory, and the target's own keys and values, only now.

    Where each layer runs:

               training, all positions    drafting, new tokens only
        LSA    build_memory               memory_update, once for every verified token
        SA     self_attend                append_verified (keys and values only), step
        CA     cross_attend               step
        TLI    reuse_target_layers        step
    """

    def __init__(self, drafter: Drafter, capacity: int, sampling: Sampling):
        """capacity: the slots of each cache, one for each token of the text and one for each
        expanded node of a draft. A tree has at most 1 + (depth - 1) * top_k expanded nodes."""
        config = drafter.config
        self.drafter = drafter
        self.sampling = sampling
        target = drafter.target
        head_dim = drafter.head_dim
        self_heads = config.self_attention_num_key_value_heads
        cross_heads = config.cross_attention_num_key_value_heads
        target_heads = target.config.num_key_value_heads
        self.self_cache = empty_cache(drafter, (1, 1, self_heads, capacity, 2 * head_dim))
        self.cross_cache = empty_cache(drafter, (1, 1, cross_heads, capacity, 2 * head_dim))
        self.reused_cache = empty_cache(
            target, (drafter.N, 1, target_heads, capacity, 2 * target.config.head_dim)
        )
        self.expanded: list[int] = []  # the nodes that are in the caches, in the caches' order

    @property
    def text_length(self) -> int:
        """Return how many tokens the text has, that is, how many are verified."""
        return self.cross_cache.length

    def append_verified(self, update: MemoryUpdate) -> None:
        """Grow the caches by newly verified tokens, in place of the draft.

        No attention runs here. SA is one layer on embeddings, so its keys and values are
        projections of the embeddings. SA's output is only CA's query, and verified tokens do not
        query.
        """
        self.discard_draft()
        count = len(update.tokens)
        rope = self.drafter.rotary[:, self.text_length:self.text_length + count]
        x = self.embed(update.tokens)  # (1, T, E)
        self.self_cache.append(0, self.drafter.self_attention.keys_values(x, rope))
        self.cross_cache.append(0, update.cross_kv)
        for i in range(self.drafter.N):
            self.reused_cache.append(i, update.reused_kv[i])
        for cache in (self.self_cache, self.cross_cache, self.reused_cache):
            cache.length += count

    def discard_draft(self) -> None:
        """Shorten the caches to the text."""
        self.expanded = []
        self.self_cache.length = self.text_length
        self.reused_cache.length = self.text_length

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        """Draft a chain or a tree of tokens that may follow the root."""
        self.discard_draft()  # an earlier draft, if nothing was verified since
        if limits.top_k == 1:
            return self.draft_chain(root, limits)
        if self.sampling.temperature == 0:
            return self.draft_tree(root, limits)
        return self.sample_tree(root, limits)

    def draft_chain(self, root: int, limits: DraftLimits) -> Draft:
        """Draft up to K tokens, each chosen from q after the tokens before it (algorithm 1).

        A chain may stop early if this is decided before its next token is drawn. Say that " in" was
        drawn after " lies" with q = 0.1. Because " in" is unlikely, the chain may stop there.
        However, " in" itself must be proposed: dropping it would change the distribution of the
        generated text, as `sample_tree` shows with numbers.
        """
        draft = Draft(root)
        for last in range(limits.depth):  # the last node so far: a chain's nodes are 0, 1, 2, ...
            if not worth_expanding(draft, [last], limits):
                break
            q = self.next_distributions(draft, [last]).squeeze(0)  # (V')
            extend_chain(draft, q, self.drafter.head, self.sampling)
        return draft

    def next_distributions(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Return the q from which the children of each node of the frontier are chosen, (F, V')."""
        logits = self.drafter.head.logits(self.step(draft, frontier))
        return draft_distributions(logits, self.sampling)

    def step(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Run SA, CA and TLI on the frontier, whose nodes are all on one level. Returns features
        (F, E)."""
        drafter = self.drafter
        self.expanded += frontier  # before the mask is made: each node sees itself as well
        mask = self.tree_mask(draft, frontier)  # (F, S)
        # Nodes of one level have the same position, so one angle serves them all: (2, 1, D).
        position = self.text_length + draft.depth(frontier[0])
        rope = drafter.rotary[:, position:position + 1]
        target_rope = drafter.target.rotary[:, position:position + 1]
        x = self.embed([draft.tokens[node] for node in frontier])  # (1, F, E), as each x below
        x = drafter.self_attention(x, rope, mask, self.self_cache, 0)
        # CA needs no mask: every node sees the memory of all verified tokens, and nothing else.
        memory_kv = self.cross_cache.kv[0, :, :, :self.cross_cache.length]  # (1, Hkv, t, 2D)
        x = drafter.cross_attention.attend_to(memory_kv, x, rope)
        x = drafter.run_target_layers(x, target_rope, mask, self.reused_cache)
        self.self_cache.length += len(frontier)
        self.reused_cache.length += len(frontier)
        return x.squeeze(0)

    def tree_mask(self, draft: Draft, frontier: list[int]) -> Tensor | None:
        """Return which tokens in the caches each node of the frontier sees, (F, S). Return None if
        every node sees all these tokens, as in a chain: attention is faster without a mask."""
        if draft.is_chain:
            return None
        mask = draft.mask(frontier, self.expanded, self.text_length)
        return None if mask.all() else mask.to(self.drafter.device)

    def embed(self, tokens: list[int]) -> Tensor:
        """Look up embeddings of tokens: (1, T, E)."""
        return self.drafter.embed(torch.tensor([tokens], device=self.drafter.device))

    # Trees, in which several drafted tokens may follow the same token.

    def draft_tree(self, root: int, limits: DraftLimits) -> Draft:
        """Draft a dynamic tree at temperature 0, after EAGLE-2 (Li et al. 2024b).

        Tokens compete by the probabilities of their paths. A path's probability is the product of q
        along it, from the root on. At each level:

        1. Run the drafter on the frontier.
        2. Of all tokens that may follow the frontier, add the `total_tokens` likeliest, but none
           below `min_probability`. (At the end, no more than `total_tokens` are kept.)
        3. The `top_k` likeliest of the added tokens are the next frontier.

        At the end, keep the `total_tokens` likeliest of all levels. In this example, depth is 2,
        top_k is 2 and total_tokens is 4. Tokens e and f follow a (0.60 times 0.7 and 0.2), and g
        and h follow b (0.30 times 0.8 and 0.1):

            level 1, after the root     a 0.60   b 0.30   c 0.05   d 0.03    next frontier: a, b
            level 2, after a and b      e 0.42   g 0.24   f 0.12   h 0.03
            kept                        a 0.60   e 0.42   b 0.30   g 0.24

        The parent of every kept token is kept as well: its path is at least as likely, and if both
        paths are equally likely, the parent comes first. (EAGLE-2 adds `top_k` tokens after each
        node. Here all nodes of a frontier compete.)
        """
        draft = Draft(root)
        frontier = [0]
        for _ in range(limits.depth):
            if not worth_expanding(draft, frontier, limits):
                break
            q = self.next_distributions(draft, frontier)  # (F, V')
            likeliest = likeliest_choices(
                draft, frontier, q, limits.total_tokens, limits.min_probability
            )
            children = self.add_choices(draft, frontier, likeliest)
            frontier = likeliest_paths(draft, children, limits.top_k)
        drafted = list(range(1, len(draft.tokens)))  # all nodes but the root
        return draft.keep([0] + likeliest_paths(draft, drafted, limits.total_tokens))

    def sample_tree(self, root: int, limits: DraftLimits) -> Draft:
        """Draft a tree of tokens that are drawn from q, for temperatures above 0.

        `rejection_sample_tree` of speculate.py compares the target's p with the q that a token was
        drawn from. Every token that is drawn must therefore be proposed: dropping one afterwards
        would change the distribution of the generated text. Say p = q = (0.6, 0.4) for tokens a and
        b. One token is drawn, and b is always dropped, because b is unlikely. Whenever b is
        dropped, the target draws a token itself. The text therefore continues with a with
        probability 0.6 + 0.4 * 0.6 = 0.84 instead of 0.6.

        For the same reason, how many tokens are drawn after a node must be fixed before any of them
        is drawn. The number may depend on q and on earlier levels. At each level:

        1. Divide the tokens that are left by the levels that are left, rounded up: the `share`.
        2. Find the `share` likeliest tokens after the frontier, and count those after each node.
        3. After each node, draw as many tokens as were counted from the node's q, without
           replacement. They need not be the likeliest ones.
        4. The drawn tokens with the `top_k` likeliest paths are the next frontier. The other tokens
           are not expanded, but they are also proposed.

        (This method is ours: a budget that follows likely paths, as in EAGLE-2, for children drawn
        without replacement, as in Jeon et al. 2024. EAGLE-2 itself proposes the likeliest tokens at
        any temperature. That method is also exact, because a token that is certain to be proposed
        is accepted with probability p. The two methods were not compared.)
        """
        draft = Draft(root)
        frontier = [0]
        for level in range(limits.depth):
            left = limits.total_tokens - (len(draft.tokens) - 1)
            share = math.ceil(left / (limits.depth - level))
            if share == 0 or not worth_expanding(draft, frontier, limits):
                break
            q = self.next_distributions(draft, frontier)  # (F, V')
            likeliest = likeliest_choices(draft, frontier, q, share, limits.min_probability)
            # How many children each row's node gets is fixed before any of them is drawn.
            counts = Counter(choice.row for choice in likeliest)
            drawn = draw_choices(counts, q, self.sampling.generator)
            children = self.add_choices(draft, frontier, drawn)
            for row in counts:
                draft.q[frontier[row]] = self.drafter.head.over_all_tokens(q[row])  # (V)
            frontier = likeliest_paths(draft, children, limits.top_k)
        return draft

    def add_choices(self, draft: Draft, frontier: list[int], choices: list[Choice]) -> list[int]:
        """Add the chosen tokens after their nodes of the frontier. Returns the new nodes."""
        children = []
        for choice in choices:
            token = self.drafter.head.token(choice.output)
            children.append(draft.add(token, frontier[choice.row], choice.probability))
        return children


def empty_cache(owner: Drafter | Llama, shape: tuple[int, ...]) -> KVCache:
    """Return an empty cache in the owner's dtype: its shape is (L, B, Hkv, capacity, 2D). (Not
    `Llama.new_cache`, whose cache is for all layers of the target.)"""
    return KVCache(torch.zeros(shape, dtype=owner.dtype, device=owner.device))


def worth_expanding(draft: Draft, frontier: list[int], limits: DraftLimits) -> bool:
    """Return whether to expand the frontier, that is, whether the probabilities of its paths sum to
    at least `min_confidence`."""
    if not frontier:  # the previous level added nothing
        return False
    confidence = sum(draft.path_probabilities[node] for node in frontier)
    return confidence >= limits.min_confidence


class Choice(NamedTuple):
    """A token to add to a tree, after a node of its frontier."""

    row: int  # the node is frontier[row], and its distribution is q[row]
    output: int  # the token, as an output of the drafter's head (see `DraftHead`)
    probability: float  # q[row, output]


def likeliest_choices(
    draft: Draft, frontier: list[int], q: Tensor, count: int, min_probability: float
) -> list[Choice]:
    """Of all tokens after the frontier, return the `count` whose paths are likeliest, or fewer
    if only so many paths reach `min_probability`. q (F, V')"""
    # A drawn token must keep a probability above 0 while rejection sampling computes with what is
    # left of q. float32 ends near 1e-38, so 1e-30 leaves a margin. (This limit also excludes the
    # many tokens to which top-p gives probability 0.)
    least = max(min_probability, 1e-30)
    top = q.topk(min(count, q.shape[-1]))  # of one node's tokens, at most `count` are returned
    top_probabilities = top.values.tolist()  # F lists
    top_outputs = top.indices.tolist()
    likely = []  # pairs of a path's probability and the choice at its end
    for row, node in enumerate(frontier):
        for probability, output in zip(top_probabilities[row], top_outputs[row]):
            path_probability = draft.path_probabilities[node] * probability
            if path_probability >= least:
                likely.append((path_probability, Choice(row, output, probability)))
    likely.sort(key=lambda pair: -pair[0])
    return [choice for _, choice in likely[:count]]


def likeliest_paths(draft: Draft, nodes: list[int], count: int) -> list[int]:
    """Of these nodes, return the `count` whose paths are likeliest. The nodes that are given and
    those that are returned are in ascending order.

    Sorting is stable, so the smaller of two equally likely nodes comes first: a parent comes before
    a child of probability 1.
    """
    best = sorted(nodes, key=lambda node: -draft.path_probabilities[node])[:count]
    return sorted(best)


def draw_choices(counts: Counter[int], q: Tensor, generator: torch.Generator) -> list[Choice]:
    """Draw counts[row] tokens from each q[row] without replacement. q (F, V')"""
    most = max(counts.values(), default=0)
    # One call draws `most` tokens for each row, in order. A row that needs fewer uses the first.
    drawn = gumbel_topk(q, most, generator)  # (F, most)
    drawn_probabilities = q.gather(-1, drawn).tolist()
    choices = []
    for row, outputs in enumerate(drawn.tolist()):
        for rank in range(counts[row]):  # a Counter gives 0 for a row that it lacks
            choices.append(Choice(row, outputs[rank], drawn_probabilities[row][rank]))
    return choices


def gumbel_topk(p: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Draw k tokens from each p (..., V') without replacement. Returns them in order (..., k).

    With e_x ~ Exp(1), e_x / p_x is the time until a random clock of rate p_x rings. If each token
    has such a clock, x rings first with probability p_x, and the order in which the clocks ring is
    that of draws without replacement. The first to ring has the largest p_x / e_x. (This is the
    Gumbel top-k trick of Kool et al. 2019: log(p_x / e_x) is log p_x plus Gumbel noise.)
    """
    e = torch.empty_like(p).exponential_(generator=generator)
    # Some devices draw 0. Where p = 0, this would make 0 / 0 = NaN, which topk ranks first.
    e = e.clamp(min=torch.finfo(p.dtype).tiny)
    return (p / e).topk(k).indices


# --- The method ends here: what follows makes it practical ---
#
# Default sizes, and a head for fewer tokens; drafting for a server; packed weights and bfloat16;
# loading and saving.


# --- Sizes, and a head for fewer tokens ---


def kv_hidden_size(sizes: Config) -> int:
    """Return 2 Ekv, the size of a token's key and value together in one layer of the target."""
    return 2 * sizes.num_key_value_heads * sizes.head_dim


def default_config(target: Llama) -> DrafterConfig:
    """Return the paper's sizes for Llama-3-8B. For other targets the proportions are the same, as
    closely as the numbers of heads allow. For Llama-3-8B, about 0.25 billion parameters in all:

        layer      width    heads    kv heads    MLP
        LSA         2048       32           8    3072
        SA, CA      4096       32           4    6144
    """
    sizes = target.config
    heads = sizes.num_attention_heads
    kv_heads = math.gcd(heads, max(1, heads // 8))  # about one for eight heads; must divide heads
    kv_width = kv_hidden_size(sizes)  # LSA's width
    # LSA has the target's number of heads, which need not divide kv_width. (With SmolLM2 it has 9
    # heads of size 42, which together use 378 of 384 dimensions.) However, RoPE needs an even head
    # size. While the size is odd, take fewer heads. With as many heads as kv heads, the size is
    # 2 D, which is even.
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


def new_drafter(target: Llama, config: DrafterConfig, kind: type[Drafter] = Drafter) -> Drafter:
    """Make a drafter with random weights. Its target must not be packed yet.

    kind: `Drafter`, or a variant. Raises InputError for sizes that do not fit the target or
    each other.
    """
    check_sizes(config, target.config)
    return kind(target, config)


def check_sizes(config: DrafterConfig, sizes: Config) -> None:
    """Raise InputError if a drafter's sizes do not fit each other, or a target of these sizes."""
    if config.target_layer_inference > sizes.num_hidden_layers:
        raise InputError(
            f"target_layer_inference {config.target_layer_inference}: the target has only "
            f"{sizes.num_hidden_layers} layers (train.py: --tli)"
        )
    if max(config.draft_vocabulary or [0]) >= sizes.vocab_size:
        raise InputError(f"draft_vocabulary has tokens beyond the target's {sizes.vocab_size}")
    layer_heads = config.layer_self_attention_num_attention_heads
    layers = [
        ("self_attention", sizes.hidden_size, config.num_attention_heads),
        ("cross_attention", sizes.hidden_size, config.num_attention_heads),
        ("layer_self_attention", kv_hidden_size(sizes), layer_heads),
    ]
    for layer, width, heads in layers:
        kv_heads = getattr(config, f"{layer}_num_key_value_heads")
        head_dim = width // max(1, heads)
        divides = heads >= 1 and kv_heads >= 1 and heads % kv_heads == 0
        if not divides or head_dim < 2 or head_dim % 2 != 0:
            raise InputError(
                f"{layer}: num_attention_heads {heads} of size {head_dim} with num_key_value_heads "
                f"{kv_heads}: kv heads must divide the heads, whose size must be even, for RoPE "
                "(train.py: --lsa-heads, --kv-heads)"
            )


class LimitedHead(DraftHead):
    """The LM head for some tokens only, V' of V. This is an addition of ours, not the paper's.

    For a small target, most of a draft's cost is the LM head, and rare tokens are seldom drafted.
    The target can still write them: rejection sampling is exact for any q.
    """

    def __init__(self, target: Llama, tokens: tuple[int, ...]):
        self.tokens = tokens  # the token of each output
        self.token_ids = torch.tensor(tokens, device=target.device)  # the same, (V')
        weight = target.lm_head.weight[self.token_ids]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight = nn.Parameter(weight, requires_grad=False)
        super().__init__(linear)
        self.vocab_size = target.config.vocab_size

    def token(self, output: int) -> int:
        return self.tokens[output]

    def over_all_tokens(self, q: Tensor) -> Tensor:
        return q.new_zeros(self.vocab_size).index_copy_(0, self.token_ids, q)


def new_head(target: Llama, draft_vocabulary: tuple[int, ...] | None) -> DraftHead:
    """Return a head for the tokens of a draft vocabulary, or for all tokens if there is none."""
    if draft_vocabulary is None:
        return DraftHead(target.lm_head)
    return LimitedHead(target, draft_vocabulary)


# --- Drafting for a server: quantized distributions, and drafting on alone in an outage ---

Q_TOKENS = 64  # q is cut to its 64 likeliest tokens, so that it can be sent in a few bytes


def quantize_probabilities(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 64 likeliest outputs of each q (n, V or V'), int32 (n, 64), and their weights,
    uint8 (n, 64).

    The likeliest has the weight 255, and the others are in proportion to their probabilities. One q
    takes 320 bytes.
    """
    top = q.topk(min(Q_TOKENS, q.shape[-1]))
    weights = 255 * top.values / top.values[..., :1]
    return top.indices.int(), weights.round().to(torch.uint8)


def dequantize_probabilities(ids: Tensor, weights: Tensor, vocab_size: int) -> Tensor:
    """Return the distributions (n, vocab_size) with these weights. Client and server get the same
    floats, because each float is one division of two integers."""
    q = weights.float() / weights.sum(-1, keepdim=True)
    return q.new_zeros(len(q), vocab_size).scatter_(-1, ids.long(), q)


class RemoteDraftState(DraftState):
    """Drafts for a target on a server. It differs from `DraftState` in two ways.

    First, q is quantized before tokens are drawn from it, so that exactly this q can be sent in a
    few bytes. (Any q will do, as long as all tokens are drawn from it.)

    Second, the drafter can go on alone. While the server is out of reach, no memory arrives, and no
    draft can be verified. `draft` then returns the root alone, and `RemoteVerifier` of netsim.py
    calls `draft_unverified`, whose tokens stay in SA's and TLI's caches as if they were verified:
    they count as text. An example: in an outage after a text of 10 tokens, the drafter writes four
    tokens, twice.

                                             tokens in the caches:   SA   CA   TLI   unverified
        before                                                       10   10   10        0
        draft_unverified(root, 4)                                    14   10   14        4
        draft_unverified(root, 4)                                    18   10   18        8
        append_verified of 9 tokens: the server is back              19   19   19        0

    Each call caches its root and the first three of its four tokens. The fourth token is the next
    root. The 9 verified tokens are the first root and the 8 tokens written offline, which the
    server has now read as part of the text. The server did not choose these 8 tokens, so an
    answer's statistics still count them as unverified.
    """

    def __init__(self, drafter: Drafter, capacity: int, sampling: Sampling):
        super().__init__(drafter, capacity, sampling)
        self.offline = False
        self.unverified = 0  # tokens in SA's and TLI's caches that count as text, without a memory

    @property
    def verified(self) -> int:
        """Return how many tokens have a memory."""
        return self.cross_cache.length

    @property
    def text_length(self) -> int:
        return self.verified + self.unverified

    def append_verified(self, update: MemoryUpdate | None) -> None:
        """Grow the caches. update: None while the server is out of reach."""
        self.offline = update is None
        if update is not None:
            self.unverified = 0  # the update appends these tokens again, now with a memory
            super().append_verified(update)

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        if self.offline:
            return Draft(root)
        return super().draft(root, limits)

    def draft_unverified(self, root: int, count: int) -> list[int]:
        """Return `count` tokens drafted after the root. The caches keep the root and all of these
        tokens but the last as text."""
        # super(): while offline, our own `draft` drafts nothing.
        draft = super().draft(root, DraftLimits(depth=count))
        self.unverified += len(self.expanded)
        return draft.tokens[1:]

    def next_distributions(self, draft: Draft, frontier: list[int]) -> Tensor:
        q = super().next_distributions(draft, frontier)
        if self.sampling.temperature == 0:
            return q
        ids, weights = quantize_probabilities(q)
        return dequantize_probabilities(ids, weights, q.shape[-1])


# --- Fast for a few tokens ---


def to_bfloat16(drafter: Drafter) -> Drafter:
    """Convert a drafter's float32 weights to bfloat16 on a CPU that has instructions for it.

    Drafts need not be exact: a worse draft costs time, but never changes the text.
    """
    if drafter.device.type == "cpu" and drafter.dtype == torch.float32 and has_fast_bfloat16():
        # (Not drafter.bfloat16(), which would also round the angles of the rotary tables.)
        for parameter in drafter.parameters():
            parameter.data = parameter.data.bfloat16()
        if isinstance(drafter.head, LimitedHead):  # the plain head is the target's own
            drafter.head.linear.bfloat16()
    return drafter


def pack_together(target: Llama, drafters: list[Drafter]) -> None:
    """Pack a target and its drafters, with `pack` of llama.py."""
    pack(target)
    for drafter in drafters:
        pack(drafter)
        if isinstance(drafter.head, LimitedHead):
            drafter.head.linear = pack(drafter.head.linear)
        else:
            drafter.head.linear = target.lm_head  # which is packed by now


# --- Checkpoints, in the authors' names and shapes ---


class Models(NamedTuple):
    target: Llama
    tokenizer: Tokenizer
    drafter: Drafter | None  # None: the target alone


def load_models(
    model: str, drafter: str | Path | None, device: str, dtype: torch.dtype, remote: bool = False
) -> Models:
    """Load a target, its tokenizer and a drafter, packed. The drafter has the target's dtype,
    unless `to_bfloat16` converts it.

    drafter: its folder; None: the one that is shipped for this model. remote: whether the target is
    on a server. To draft, a client needs only the target's embeddings, LM head and last N layers,
    so only these are loaded. Raises InputError.
    """
    folder = drafter or SHIPPED_DRAFTERS.get(model)
    if folder is None:
        if not is_hub_id(model):  # a hub id is not looked up, which would download the model
            resolve_path(model)  # raises its own InputError for a mistyped path
        raise InputError(
            f"no drafter is shipped for {model}: train one (python train.py --model {model} "
            "--data FILE) and name it with --drafter"
        )
    last = None  # all layers
    if remote:
        last = read_drafter_config(Path(folder)).get("target_layer_inference", 0)
    target, tokenizer = load_target(model, device, dtype, last)
    loaded = to_bfloat16(load_drafter(folder, target))
    pack_together(target, [loaded])
    return Models(target, tokenizer, loaded)


def read_drafter_config(path: Path) -> dict:
    """Return the fields of the config.json in a drafter's folder. Raises InputError."""
    for name in ("config.json", "model.safetensors"):
        if not (path / name).exists():
            message = f"{path}: no drafter is there ({name} is missing)"
            for file in [*path.glob("*/config.json"), *path.glob("*/*/config.json")]:
                if b"kv_hidden_size" in file.read_bytes():  # only a drafter's config has this field
                    message += f"; one is in {file.parent}"
            raise InputError(message)
    stated = read_json(path / "config.json")
    for field in fields(DrafterConfig):
        value = stated.get(field.name)
        if value is not None and not is_valid_field(field.name, value):
            raise InputError(f"{path / 'config.json'}: {field.name} is invalid: {value!r:.40}")
    return stated


def is_valid_field(name: str, value: object) -> bool:
    """Return whether a field of a drafter's config.json may have this value."""
    if name in ("rms_norm_eps", "rope_theta"):
        return type(value) in (int, float) and 0 < value < math.inf
    if name == "draft_vocabulary":  # a list of distinct tokens
        if not isinstance(value, list) or not value:
            return False
        distinct = {token for token in value if type(token) is int and token >= 0}
        return len(distinct) == len(value)
    return type(value) is int and value >= 0  # all other fields are counts


def load_drafter(path: str | Path, target: Llama, kind: type[Drafter] = Drafter) -> Drafter:
    """Load a drafter of `target`, on its device and in its dtype, from a folder of config.json and
    model.safetensors.

    kind: `Drafter`, or the variant that is saved there. Raises InputError if a file is missing or
    damaged, or does not fit the target.
    """
    path = Path(path)
    config_file = path / "config.json"
    weights_file = path / "model.safetensors"
    stated = read_drafter_config(path)
    check_target(stated, target.config, path)
    for part in ("layer_self_attention", "cross_attention", "self_attention"):
        if kind is Drafter and stated.get(f"use_{part}", True) is not True:
            raise InputError(
                f"{path}: a drafter without {part}; only python -m experiments.ablations uses it"
            )
    tensors = dict(read_tensors([weights_file]))
    # Sizes that do not fit can cause these exceptions: in our own checks, in PyTorch, and in a
    # division by the number of rows of an empty tensor.
    kinds = (InputError, RuntimeError, TypeError, ZeroDivisionError)
    with input_errors(config_file, *kinds), torch.device("meta"):
        config = parse_drafter_config(stated, tensors, target.config)
        drafter = new_drafter(target, config, kind)
    load_weights(drafter, iter(tensors.items()), weights_file, target.device, target.dtype)
    drafter.checkpoint_hash = checksum(config_file) + checksum(weights_file)
    return drafter.requires_grad_(False).eval()


def parse_drafter_config(
    stated: dict, tensors: dict[str, Tensor], sizes: Config
) -> DrafterConfig:
    """Return a complete config. What config.json does not state is taken from the target or, for kv
    heads and MLP widths, from the tensors' shapes. (The authors' config.json leaves some fields
    out.)"""
    values = {
        "num_attention_heads": sizes.num_attention_heads,
        "layer_self_attention_num_attention_heads": sizes.num_attention_heads,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": sizes.rope_theta,
    }
    for field in fields(DrafterConfig):
        value = stated.get(field.name)
        if value is not None:
            values[field.name] = tuple(value) if isinstance(value, list) else value
    rows = {name: len(tensor) for name, tensor in tensors.items()}
    for layer in ("self_attention", "cross_attention", "layer_self_attention"):
        heads = values.get(f"{layer}_num_attention_heads", values["num_attention_heads"])
        # A missing tensor counts as one row. `load_weights` reports it later, unless a variant
        # lacks the layer.
        q_rows = rows.get(f"{layer}.self_attn.q_proj.weight", 1)
        k_rows = rows.get(f"{layer}.self_attn.k_proj.weight", 1)
        mlp_width = rows.get(f"{layer}.mlp.gate_proj.weight", 1)
        # q_proj has heads * D rows and k_proj kv_heads * D, so kv_heads = heads * k_rows / q_rows.
        values.setdefault(f"{layer}_num_key_value_heads", heads * k_rows // q_rows)
        values.setdefault(f"{layer}_intermediate_size", mlp_width)
    return DrafterConfig(**values)


def save_drafter(
    drafter: Drafter, path: Path, dtype: torch.dtype = torch.bfloat16, target_name: str = ""
) -> None:
    """Write config.json and model.safetensors into a folder, each completely or not at all.

    dtype: of the saved weights. target_name: the target, as named with --model.
    """
    config = asdict(drafter.config) | describe_target(drafter.target.config)
    config["target_model"] = target_name
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        tensors[name] = tensor.to("cpu", dtype).contiguous()
    with (
        atomic_write(path / "config.json") as config_file,
        atomic_write(path / "model.safetensors") as weights_file,
    ):
        config_file.write_text(json.dumps(config))
        save_file(tensors, weights_file, metadata={"format": "pt"})


def describe_target(sizes: Config) -> dict[str, int]:
    """Return what a drafter's config.json states about its target. The authors' code reads the
    first three fields."""
    return {
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "kv_hidden_size": kv_hidden_size(sizes),
        "target_num_hidden_layers": sizes.num_hidden_layers,
    }


def check_target(stated: dict, sizes: Config, path: Path) -> None:
    """Raise InputError if a drafter's config.json states that its target has different sizes."""
    for size, ours in describe_target(sizes).items():
        theirs = stated.get(size, ours)
        if theirs != ours:
            name = stated.get("target_model") or "MODEL"
            raise InputError(
                f"{path}: this drafter belongs to another model, whose {size} is {theirs!r:.40}, "
                f"not {ours}: add --model {name}"
            )
