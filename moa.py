"""The drafter: a Mixture of Attentions (Zimmer et al., ICLR 2025, arXiv 2410.03804, section 3).

The drafter, M_Small in the paper, reads the target's KV cache and drafts the next tokens. It has
four parts, which the next section writes as formulas:

    LSA  Layer Self-Attention reads the keys and values of one token in all layers of the target's
         cache, and condenses them into one vector, the token's *memory*. Drafters such as EAGLE and
         Medusa see only the last layer's output, although everything that the target will do next
         depends on the whole cache. The paper calls that *partial observability*.
    SA   Self-Attention, causal, reads the embeddings of the text and of the draft, so that a
         drafted token sees the drafted tokens before it.
    CA   Cross-Attention takes its queries from SA's output, and its keys and values from the memory
         of all verified tokens. These are never guesses of the drafter's own, so training can show
         it the very memory that it will have while drafting (*on-policy*: see train.py).
    TLI  Target Layer Inference runs the target's last N layers on CA's output. With N = 0 there are
         none, and CA's output itself predicts the target's final hidden state, as in the shipped
         drafters. The last section is about N > 0.

`Drafter` has these layers. `DraftState` runs them for one conversation, with caches, and drafts a
chain of tokens: there the method is complete. Trees follow, which let a token have alternatives.
speculate.py lets the target check what is drafted.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, NamedTuple

import torch
from torch import Tensor, nn

from llama import (
    Config, DecoderLayer, KVCache, Llama, Sampling, probabilities, rotary_table, sample
)

# --- The method in formulas ---
#
# Number the tokens 0, 1, 2, ... A token is *verified* once the target has read and kept it: its
# keys and values are then in the target's cache. The *text* is the verified tokens, 0 to t - 1.
# Token t, the *root*, is the newest one: the target has chosen it, but not read it yet. The tokens
# after the root are drafted. e_j is the embedding of token j, and [k_jl v_jl] are its key and value
# in the target's layer l. What follows token i, for i >= t, is predicted by
#
#                                                                               in the code
#     z_j1, ..., z_jL = LSA([k_j1 v_j1], ..., [k_jL v_jL])   for all j < t      z
#     m_j = W mean(z_j1, ..., z_jL) + b                                         memory
#     s_i = the last output of SA(e_0, ..., e_i)                                sa_output
#     g_i = CA(query s_i; keys and values from m_0, ..., m_{t-1})               ca_output
#     h'_i = g_i, or with N > 0 see the last section                            hidden
#     q_i = softmax(LM head h'_i / temperature), cut to top-p                   q
#
# LSA lets the vector of each layer take what it needs from the other layers. The results are
# averaged; W maps the average to the hidden size. LSA reads keys as the cache holds them, rotated
# by position; CA rotates its own. With several kv heads, [k v] is the key and value of head 0, then
# the key and value of head 1, and so on. (Root and draft have none yet, only embeddings.)
#
# h'_i predicts the target's final hidden state at token i. The target's own LM head makes of it
# q_i, the drafter's distribution of token i + 1. (At temperature 0: the plain softmax.)
#
# Shapes: those of llama.py, plus N reused target layers, K drafted tokens, F tokens that are run
# through the drafter at once. LSA, SA, CA and the target each have their own H, Hkv and D.

# --- The layers ---


@dataclass(frozen=True)
class DrafterConfig:
    """A drafter's sizes, named as in the authors' config.json. (`default_config`: the paper's.)"""

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


def kv_hidden_size(sizes: Config) -> int:
    """Return 2 Ekv, the size of a token's key and value together in one layer of the target."""
    return 2 * sizes.num_key_value_heads * sizes.head_dim


class CrossAttentionLayer(DecoderLayer):
    """A decoder layer whose queries come from one sequence, and whose keys and values come from a
    different one, the memory.

    Call `keys_values(memory, rope)` once, then `attend_to` with any queries (not `forward`). The
    names are the authors': the attention is `self_attn`, and one norm serves both sequences.
    """

    def attend_to(self, kv: Tensor, x: Tensor, rope: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run the layer on queries from x (B, T, E) over kv (B, Hkv, S, 2D) -> (B, T, E)."""
        q = self.self_attn.queries(self.input_layernorm(x), rope)
        return self.feed_forward(x + self.self_attn(q, kv, mask))


LSA_TOKENS = 64  # tokens that LSA reads at once, each a sequence of L vectors: to save memory
TRAINED = ("layer_self_attention", "Ekv2E", "self_attention", "cross_attention")


class Drafter(nn.Module):
    """The drafter's layers, named as in the authors' checkpoints. Those in TRAINED are trained and
    saved. The target, with its embeddings and LM head, is frozen."""

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__()
        self.target = target
        self.lm_head = target.lm_head  # app/vocabulary.py has one of fewer rows, for speed
        self.config = config
        sizes = target.config
        kv_width = kv_hidden_size(sizes)  # 2 Ekv, the width of LSA
        layer_heads = config.layer_self_attention_num_attention_heads
        layer_head_dim = kv_width // layer_heads
        self.head_dim = sizes.hidden_size // config.num_attention_heads  # of SA and CA
        self.layer_self_attention = DecoderLayer(
            width=kv_width,
            inner=config.layer_self_attention_intermediate_size,
            heads=layer_heads,
            kv_heads=config.layer_self_attention_num_key_value_heads,
            head_dim=layer_head_dim,
            eps=config.rms_norm_eps,
        )
        self.Ekv2E = nn.Linear(kv_width, sizes.hidden_size)  # W and b
        self.self_attention = DecoderLayer(
            width=sizes.hidden_size,
            inner=config.self_attention_intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.self_attention_num_key_value_heads,
            head_dim=self.head_dim,
            eps=config.rms_norm_eps,
        )
        self.cross_attention = CrossAttentionLayer(
            width=sizes.hidden_size,
            inner=config.cross_attention_intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.cross_attention_num_key_value_heads,
            head_dim=self.head_dim,
            eps=config.rms_norm_eps,
        )
        # LSA's sequence is the L layers of one token. RoPE applies here as well, as in the authors'
        # code: the number of a layer is its position.
        theta = config.rope_theta
        layers = rotary_table(sizes.num_hidden_layers, layer_head_dim, theta, target.device)
        table = rotary_table(sizes.max_position_embeddings, self.head_dim, theta, target.device)
        self.register_buffer("layer_rotary", layers, persistent=False)  # (2, L, D)
        self.register_buffer("rotary", table, persistent=False)  # (2, context, D)

    @property
    def N(self) -> int:
        return self.config.target_layer_inference

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        return self.Ekv2E.weight.dtype  # the drafter's, which may differ from the target's

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained and saved, by name."""
        parameters = dict(self.named_parameters())
        return {name: p for name, p in parameters.items() if name.startswith(TRAINED)}

    def layer_self_attend(self, kv: Tensor) -> Tensor:
        """Run LSA and take its mean over layers: kv (B, T, L, 2 Ekv) -> (B, T, 2 Ekv)."""
        batch, count, layers = kv.shape[:3]
        # Each token is a sequence of its own, of L layers, so the tokens form one batch.
        x = kv.reshape(batch * count, layers, -1).to(self.dtype)  # (B T, L, 2 Ekv)
        z = self.layer_self_attention(x, self.layer_rotary)  # no mask: each layer sees all layers
        return z.mean(dim=1).unflatten(0, (batch, count))

    def build_memory(self, pieces: Iterable[Tensor]) -> Tensor:
        """Return the memory of tokens (B, T, E), given their keys and values in the target's cache:
        pieces of a few tokens, (B, LSA_TOKENS or fewer, L, 2 Ekv) each. LSA never looks across
        tokens, so it can read them a piece at a time."""
        means = [self.layer_self_attend(kv) for kv in pieces]
        return self.Ekv2E(torch.cat(means, dim=1))

    def embed(self, tokens: Tensor) -> Tensor:
        """Look up the target's embeddings of tokens (B, T): (B, T, E)."""
        return self.target.embed_tokens(tokens).to(self.dtype)

    def distributions(self, hidden: Tensor, sampling: Sampling) -> Tensor:
        """Return q, from which drafted tokens are chosen: hidden (..., E) -> (..., V)."""
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        if sampling.temperature == 0:  # nothing is drawn, but trees rank paths by probability
            return probabilities(logits, 1.0)
        return probabilities(logits, sampling.temperature, sampling.top_p)

    def cache_update(self, tokens: list[int], cache: KVCache) -> CacheUpdate:
        """Return the keys and values of newly verified tokens for the drafter's caches. The tokens
        must be the last ones in the target's cache, which LSA reads here."""
        end = cache.length
        start = end - len(tokens)
        firsts = range(start, end, LSA_TOKENS)
        pieces = (cache.by_token(first, min(first + LSA_TOKENS, end)) for first in firsts)
        memory = self.build_memory(pieces)  # (1, T, E)
        ca_kv = self.cross_attention.keys_values(memory, self.rotary[:, start:end])
        first_reused = len(cache.kv) - self.N  # of the L layers
        return CacheUpdate(tokens, ca_kv, cache.kv[first_reused:, :, :, start:end])


@dataclass
class CacheUpdate:
    """The keys and values by which the drafter's caches grow when T tokens have been verified. (CA
    reads only keys and values, so these are computed from the memory at once.)"""

    tokens: list[int]
    ca_kv: Tensor  # CA's, computed from the memory, (1, Hkv, T, 2D)
    tli_kv: Tensor  # the target's own, in its last N layers, (N, 1, Hkv, T, 2D): a view


# --- Drafting, with caches ---


class Draft:
    """The root, and drafted tokens that may follow it: a chain or, more generally, a tree.

    The tokens are numbered in the order in which they are added, and a *node* is such a number.
    Node 0 is the root. Node i has the token tokens[i], and follows node parents[i]. In a chain that
    is node i - 1. In a tree two tokens may follow the same one:

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
        return self.parents == list(range(-1, len(self.parents) - 1))

    def children(self, parent: int) -> list[int]:
        """Return the nodes that follow `parent`, in the order in which they were added (drawn)."""
        return [node for node, other in enumerate(self.parents) if other == parent]

    def child(self, parent: int, token: int) -> int | None:
        """Return the node of this token after `parent`, or None if it was not drafted there."""
        for node in self.children(parent):
            if self.tokens[node] == token:
                return node
        return None

    def path_of(self, tokens: list[int]) -> list[int]:
        """Return the nodes of a path of tokens from the root. Raises ValueError without one."""
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


@dataclass(frozen=True)
class DraftLimits:
    """The limits of a draft. The first three are EAGLE-2's. The other two save the cost of unlikely
    tokens, as in Kangaroo (Liu et al. 2024) and others."""

    depth: int  # levels below the root, at most; for a chain, K drafted tokens
    top_k: int = 1  # nodes that a level of a tree expands, at most; with 1 the draft is a chain
    total_tokens: int = 64  # drafted tokens of a tree, at most; does not limit a chain
    min_confidence: float = 0.0  # stop if the probabilities of the newest paths sum to less
    min_probability: float = 0.0  # a tree ignores paths below this probability


class DraftState:
    """The drafter's side of one conversation: three caches, and the draft that is being made.

    To draft is to `step` on the newest node, to choose a token after it from q, and to repeat. A
    node is *expanded* when the drafter has run on it: it then has keys and values, too. The nodes
    to expand next are the *frontier*: in a chain the newest node, in a tree several of one level.

        keys and values         of verified tokens        of expanded nodes of the draft
        self_cache  SA          its own                   its own
        ca_cache    CA          made from the memory      none: they have no memory
        tli_cache   N layers    the target's own          computed from CA's output

    For example, with a text of 10 tokens and a chain of three, of which the target accepts two:

                                        length of the caches:   SA   CA   TLI
        before the draft                                        10   10   10
        step on the root; token 1 is chosen                     11   10   11
        step on token 1; token 2 is chosen                      12   10   12
        step on token 2; token 3 is chosen                      13   10   13
        discard_draft                                           10   10   10
        append_verified of the root and tokens 1 and 2          13   13   13

    Accepted tokens leave the caches with the rest of the draft and are appended again, because they
    have a memory, and the target's own keys and values, only now.
    """

    def __init__(self, drafter: Drafter, capacity: int, sampling: Sampling):
        """capacity: the slots of each cache, one for each token of the text and one for each
        expanded node of a draft: at most 1 + (depth - 1) * top_k."""
        config = drafter.config
        target = drafter.target
        self.drafter = drafter
        self.sampling = sampling
        self.self_cache = empty_cache(
            drafter, 1, config.self_attention_num_key_value_heads, capacity, drafter.head_dim
        )
        self.ca_cache = empty_cache(
            drafter, 1, config.cross_attention_num_key_value_heads, capacity, drafter.head_dim
        )
        self.tli_cache = empty_cache(
            target, drafter.N, target.config.num_key_value_heads, capacity, target.config.head_dim
        )
        self.expanded: list[int] = []  # the nodes in SA's and TLI's caches, in their order

    @property
    def text_length(self) -> int:
        """Return how many tokens the text has, that is, how many are verified."""
        return self.ca_cache.length

    def append_verified(self, update: CacheUpdate) -> None:
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
        self.ca_cache.append(0, update.ca_kv)
        for i in range(self.drafter.N):
            self.tli_cache.append(i, update.tli_kv[i])
        for cache in (self.self_cache, self.ca_cache, self.tli_cache):
            cache.length += count

    def discard_draft(self) -> None:
        """Shorten the caches to the text."""
        self.expanded = []
        self.self_cache.length = self.text_length
        self.tli_cache.length = self.text_length

    def step(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Expand the frontier: run SA, CA and TLI on it. Returns predicted hidden states (F, E)."""
        drafter = self.drafter
        self.expanded += frontier  # before the mask is made: each node sees itself as well
        mask = self.frontier_mask(draft, frontier)  # (F, S)
        # Nodes of one level have the same position, so one angle serves them all: (2, 1, D).
        position = self.text_length + draft.depth(frontier[0])
        rope = drafter.rotary[:, position:position + 1]
        embeddings = self.embed([draft.tokens[node] for node in frontier])  # (1, F, E)
        sa_output = drafter.self_attention(embeddings, rope, mask, self.self_cache, 0)
        # CA needs no mask: every node sees the memory of all verified tokens, and nothing else.
        memory_kv = self.ca_cache.kv[0, :, :, :self.ca_cache.length]  # (1, Hkv, t, 2D)
        ca_output = drafter.cross_attention.attend_to(memory_kv, sa_output, rope)  # (1, F, E)
        hidden = ca_output
        if drafter.N > 0:
            target_rope = drafter.target.rotary[:, position:position + 1]
            hidden = run_target_layers(drafter, ca_output, target_rope, mask, self.tli_cache)
        self.self_cache.length += len(frontier)
        self.tli_cache.length += len(frontier)
        return hidden.squeeze(0)

    def embed(self, tokens: list[int]) -> Tensor:
        """Look up embeddings: (1, T, E)."""
        return self.drafter.embed(torch.tensor([tokens], device=self.drafter.device))

    def next_distributions(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Return the q from which the children of each node of the frontier are chosen, (F, V)."""
        return self.drafter.distributions(self.step(draft, frontier), self.sampling)

    def draft_chain(self, root: int, limits: DraftLimits) -> Draft:
        """Draft up to K tokens, each chosen from q after the tokens before it (algorithm 1).

        A chain may stop early, but only before a token is drawn. To drop a drawn token would
        change the distribution of the text, as speculate.py shows with numbers.
        """
        draft = Draft(root)
        for last in range(limits.depth):  # the last node so far: a chain's nodes are 0, 1, 2, ...
            if not worth_expanding(draft, [last], limits):
                break
            q = self.next_distributions(draft, [last]).squeeze(0)  # (V)
            if self.sampling.temperature == 0:
                token = int(q.argmax())
            else:
                token = sample(q, self.sampling.generator)
                draft.q[last] = q
            draft.add(token, parent=last, probability=float(q[token]))
        return draft

    def draft(self, root: int, limits: DraftLimits) -> Draft:
        """Draft a chain or, at temperature 0, a tree. (Sampled trees: see speculate.py.)"""
        self.discard_draft()  # an earlier draft, if nothing was verified since
        if limits.top_k == 1:
            return self.draft_chain(root, limits)
        return draft_tree(self, root, limits)

    def frontier_mask(self, draft: Draft, frontier: list[int]) -> Tensor | None:
        """Return which tokens in the caches each node of the frontier sees, (F, S), or None if all
        see all of them, as in a chain: attention is faster without a mask."""
        if draft.is_chain:
            return None  # at once: this runs for every drafted token
        mask = draft_mask(draft, frontier, self.expanded, self.text_length)
        return None if mask.all() else mask.to(self.drafter.device)


def empty_cache(
    owner: Drafter | Llama, layers: int, kv_heads: int, capacity: int, head_dim: int
) -> KVCache:
    """Return an empty cache in the owner's dtype."""
    shape = (layers, 1, kv_heads, capacity, 2 * head_dim)
    return KVCache(torch.zeros(shape, dtype=owner.dtype, device=owner.device))


def worth_expanding(draft: Draft, frontier: list[int], limits: DraftLimits) -> bool:
    """Return whether to expand the newest nodes, that is, whether the probabilities of their paths
    sum to at least `min_confidence`."""
    if not frontier:  # the previous level added nothing
        return False
    confidence = sum(draft.path_probabilities[node] for node in frontier)
    return confidence >= limits.min_confidence


# --- Greedy trees ---
#
# In a tree several tokens may follow the same token. It grows level by level. A token that may be
# added is named by two numbers: its parent's place in the frontier, a row of q, and its column.


def draft_tree(state: DraftState, root: int, limits: DraftLimits) -> Draft:
    """Draft a dynamic tree at temperature 0, after EAGLE-2 (Li et al. 2024b). Tokens compete by the
    probabilities of their paths. A path's probability is the product of q along it, from the root
    on. At each level:

    1. Run the drafter on the frontier.
    2. Of all tokens that may follow the frontier, add the `total_tokens` likeliest, but none below
       `min_probability`. (At the end, no more than `total_tokens` are kept.)
    3. The `top_k` likeliest of the added tokens are the next frontier.

    At the end, keep the `total_tokens` likeliest of all levels. In this example, depth is 2, top_k
    is 2 and total_tokens is 4:

        level 1     after the root:  a 0.60           b 0.30           c 0.05    d 0.03
        level 2     after a and b:   ae 0.60 * 0.7    bg 0.30 * 0.8
                                     af 0.60 * 0.2    bh 0.30 * 0.1
        kept        a 0.60    ae 0.42    b 0.30    bg 0.24

    The frontier of level 2 is a and b, which have rows 0 and 1 of q. The parent of every kept token
    is kept as well: its path is at least as likely. (EAGLE-2 adds `top_k` tokens after each node.
    Here all nodes of a frontier compete.)
    """
    if state.sampling.temperature > 0:
        raise ValueError("above temperature 0 the tokens of a tree have to be drawn")
    draft = Draft(root)
    frontier = [0]
    for _ in range(limits.depth):
        if not worth_expanding(draft, frontier, limits):
            break
        q = state.next_distributions(draft, frontier)  # (F, V)
        candidates = likeliest_candidates(
            draft, frontier, q, limits.total_tokens, limits.min_probability
        )
        children = add_candidates(draft, frontier, candidates)
        frontier = likeliest_paths(draft, children, limits.top_k)
    drafted = list(range(1, len(draft.tokens)))  # all nodes but the root
    return keep_nodes(draft, [0] + likeliest_paths(draft, drafted, limits.total_tokens))


class Candidate(NamedTuple):
    """A token to add to a tree, after a node of its frontier."""

    row: int  # the node is frontier[row], and its distribution is q[row]
    token: int
    probability: float  # q[row, token]


def likeliest_candidates(
    draft: Draft, frontier: list[int], q: Tensor, count: int, min_probability: float
) -> list[Candidate]:
    """Of all tokens after the frontier, return the `count` whose paths are likeliest, or fewer
    if only so many paths reach `min_probability`. q (F, V)"""
    # A sampled tree draws as many tokens as are found here, each from what is left of q. If all
    # found have 1e-30, something is always left. (And top-p gives many tokens probability 0.)
    least = max(min_probability, 1e-30)
    top = q.topk(min(count, q.shape[-1]))  # of one node's tokens, at most `count` are returned
    top_probabilities = top.values.tolist()  # F lists
    top_tokens = top.indices.tolist()
    likely = []  # pairs of a path's probability and the candidate at its end
    for row, node in enumerate(frontier):
        for probability, token in zip(top_probabilities[row], top_tokens[row]):
            path_probability = draft.path_probabilities[node] * probability
            if path_probability >= least:
                likely.append((path_probability, Candidate(row, token, probability)))
    likely.sort(key=lambda pair: -pair[0])
    return [candidate for _, candidate in likely[:count]]


def add_candidates(draft: Draft, frontier: list[int], candidates: list[Candidate]) -> list[int]:
    """Add tokens after their nodes of the frontier. Returns the new nodes."""
    return [draft.add(token, frontier[row], probability) for row, token, probability in candidates]


def likeliest_paths(draft: Draft, nodes: list[int], count: int) -> list[int]:
    """Return the `count` of these nodes whose paths are likeliest. Nodes are in ascending order,
    and sorting is stable, so a parent comes before a child of probability 1."""
    best = sorted(nodes, key=lambda node: -draft.path_probabilities[node])[:count]
    return sorted(best)


def draft_mask(draft: Draft, nodes: list[int], cached: list[int], text_length: int) -> Tensor:
    """Return which slots of a cache each of `nodes` may see, as a mask of shape (len(nodes),
    text_length + len(cached)). A node sees the whole text, its ancestors and itself. It does not
    see its siblings, which are alternatives to it.

    cached: the nodes whose keys and values lie in the cache after the text, in this order.
    """
    rows = []
    for node in nodes:
        rows.append([other in draft.paths[node] for other in cached])
    text = torch.ones(len(nodes), text_length, dtype=torch.bool)
    return torch.cat([text, torch.tensor(rows)], dim=1)


def keep_nodes(draft: Draft, kept: list[int]) -> Draft:
    """Return the draft of these nodes only, in this order: the root first, and each parent before
    its children. For temperature 0 only: a token that was drawn must be proposed."""
    smaller = Draft(draft.tokens[0])
    new_node = {0: 0}  # from the number of a kept node to its number in the smaller draft
    for node in kept[1:]:
        parent = new_node[draft.parents[node]]
        new_node[node] = smaller.add(draft.tokens[node], parent, draft.probabilities[node])
    return smaller


# --- Target Layer Inference: N > 0 ---
#
# CA's output g_i then predicts not the target's final hidden state, but the state that enters its
# last N layers, which finish the work: a larger N gives better drafts at a higher cost.
#
#     h'_i = norm(the target's last N layers on g_i)    in each of which query i attends to
#
#         tokens 0 to t - 1    the target's own keys and values, as its cache holds them
#         tokens t to i        keys and values that the layer computes from g_t, ..., g_i
#
# (In a tree: its ancestors from the root on, and itself.) That is what `tli_cache` holds:
# `append_verified` copies the first, each `step` adds the second, and `discard_draft` drops these.


def run_target_layers(
    drafter: Drafter, ca_output: Tensor, rope: Tensor, mask: Tensor | None, cache: KVCache
) -> Tensor:
    """Run the target's last N layers and its final norm on CA's output (B, T, E). Returns predicted
    final hidden states (B, T, E). `cache` numbers the N layers from 0."""
    x = ca_output.to(drafter.target.dtype)
    for i, layer in enumerate(drafter.target.layers[-drafter.N:]):
        x = layer(x, rope, mask, cache, i)
    return drafter.target.norm(x)


# --- Sizes of a new drafter ---


def default_config(target: Llama) -> DrafterConfig:
    """Return the paper's sizes for Llama-3-8B. For other targets the proportions are the same, as
    closely as the numbers of heads allow. For Llama-3-8B, 0.26 billion parameters in all:

        layer      width    heads    kv heads    MLP
        LSA         2048       32           8    3072
        SA, CA      4096       32           4    6144
    """
    sizes = target.config
    heads = sizes.num_attention_heads
    kv_heads = math.gcd(heads, max(1, heads // 8))  # about one for eight heads; must divide heads
    kv_width = kv_hidden_size(sizes)  # LSA's width
    # RoPE needs an even head size. As long as the target's number of heads makes LSA's odd, take
    # fewer. (With as many heads as kv heads the size is 2 D. They need not fill the width.)
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
