"""The drafter: a Mixture of Attentions (Zimmer et al., ICLR 2025, arXiv 2410.03804, section 3). In the paper, M_Small.

    LSA  Layer Self-Attention, over the L layers of one verified token's keys and values in the target's cache. Its mean
         over layers, projected to E, is that token's `memory`: a look at the target's whole state, not its last layer.
    SA   Self-Attention, causal, over the embeddings of prompt and draft: a drafted token sees the drafts before it.
    CA   Cross-Attention, from SA's output to the memory of verified tokens. Drafted tokens have none; in training a
         `horizon` for each query sets the same limit.
    TLI  Target Layer Inference: CA's output predicts the hidden state that enters the target's last N layers (N = 0:
         the output of the final norm); they run on it, and the frozen LM head makes it a distribution.

`Drafter.forward` covers all positions in one pass, under given horizons; `DraftState` does the same step by step.
Shapes: as in llama.py, and N reused layers, K draft length, R horizons.
"""
import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from llama import (CAUSAL, DecoderLayer, FusedLinear, InputError, KVCache, Llama, Sampling, atomic_write, can_pack,
                   causal_step, gumbel_topk, input_errors, load_weights, probabilities, read_json, read_tensors,
                   rotary_table, sample, sample_next)

MIN_PROBABILITY = 1e-30  # of a proposed token: below, what rejection sampling leaves of q is rounding error
Q_TOKENS = 64  # of a q that is sent over a network
PROMPT_CHUNK = 256  # of a long prompt, so many tokens at a time
LSA_TOKENS = 64  # of them at a time in LSA on a CPU: their L rows each fit its cache

@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and choices of a drafter, named as in the authors' config.json."""

    num_attention_heads: int
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
    use_layer_self_attention: bool = True  # without: the target's last hidden state is projected
    use_cross_attention: bool = True  # without: the drafter reads its own predictions, as EAGLE does
    draft_vocabulary: tuple[int, ...] | None = None  # ids that may be drafted; None: all

    @classmethod
    def sized_for(cls, target: Llama, **choices) -> "DrafterConfig":
        """The paper's proportions: its own sizes for Llama-3-8B, for another target as near as its heads divide."""
        c = target.config
        heads, lsa_kv_heads = c.num_attention_heads, c.num_key_value_heads
        width, inner = 2 * lsa_kv_heads * c.head_dim, 3 * c.hidden_size // 2  # of LSA, of SA and CA
        lsa_heads = next((n for n in range(heads, 0, -1) if n % lsa_kv_heads == 0 and width // n % 2 == 0), heads)
        kv_heads = next(n for n in range(max(1, heads // 8), 0, -1) if heads % n == 0)
        return replace(cls(heads, lsa_heads, lsa_kv_heads, 3 * width // 2, kv_heads, inner, kv_heads, inner,
                           c.rms_norm_eps, c.rope_theta), **choices)

@dataclass
class Memory:
    """What the target's side sends the drafter for T newly verified tokens: their memories, as CA's keys and values."""

    tokens: list[int]
    places: list[int]  # their positions
    cross_kv: Tensor  # (1, Hkv, T, 2D); without CA the memories themselves, (1, T, E)
    reused_kv: Tensor  # the target's in its last N layers, (N, 1, Hkv, T, 2D)
    rows: list[int] | None = None  # in a batch: whose each token is

class Drafter(nn.Module):
    """Trainable: LSA, the projection, SA, CA. The rest belongs to the target and is frozen."""

    def __init__(self, target: Llama, config: DrafterConfig):
        """Raises InputError for sizes that do not fit the target or each other."""
        super().__init__()
        self.config, self.N, self.checkpoint_hash = config, config.target_layer_inference, ""
        c, t, E = config, target.config, target.config.hidden_size
        if self.N > t.num_hidden_layers:
            raise InputError(f"target_layer_inference {self.N} of {t.num_hidden_layers} layers")
        buffer = partial(self.register_buffer, persistent=False)

        def layer(name: str, width: int, heads: int) -> DecoderLayer:
            head_dim, kv_heads = width // max(1, heads), getattr(c, f"{name}_num_key_value_heads")
            if min(heads, kv_heads) < 1 or heads % kv_heads or head_dim < 2 or head_dim % 2:
                raise InputError(f"{name}: num_attention_heads {heads} of {head_dim}, num_key_value_heads {kv_heads}")
            inner = getattr(c, f"{name}_intermediate_size")
            return DecoderLayer(width, inner, heads, kv_heads, head_dim, c.rms_norm_eps)

        heads, width = c.num_attention_heads, E
        self.self_attention = layer("self_attention", E, heads)
        self.cross_attention = layer("cross_attention", E, heads)
        buffer("rotary", rotary_table(t.max_position_embeddings, E // heads, c.rope_theta, target.device))
        if c.use_layer_self_attention:  # its positions are layers
            heads, width = c.layer_self_attention_num_attention_heads, 2 * t.num_key_value_heads * t.head_dim
            self.layer_self_attention = layer("layer_self_attention", width, heads)
            buffer("layer_rotary", rotary_table(t.num_hidden_layers, width // heads, c.rope_theta, target.device))
        self.Ekv2E = nn.Linear(width, E)
        self._target = (target,)  # a tuple, or its weights would be ours to train and save
        self.head, self.ids = target.head, c.draft_vocabulary or range(t.vocab_size)  # ids: by their place in q
        buffer("vocabulary", None)
        if c.draft_vocabulary is not None:
            self.vocabulary = torch.tensor(self.ids, device=target.device)
            rows = nn.Linear(E, len(self.ids), bias=False)
            rows.weight = nn.Parameter(target.lm_head.weight[self.vocabulary], requires_grad=False)
            self.head = FusedLinear(rows)

    target = property(lambda self: self._target[0])
    head_weight = property(lambda self: self.head.layers[0].weight)  # (V, E), or rows of the draft vocabulary
    dtype = property(lambda self: self.Ekv2E.weight.dtype)

    def layer_self_attend(self, kv: Tensor) -> Tensor:
        """LSA and the mean over layers: kv (B, T, L, 2 Ekv) -> (B, T, 2 Ekv)."""
        x = kv.to(self.dtype).flatten(0, 1)  # (B T, L, 2 Ekv): a token's layers are a sequence
        return self.layer_self_attention(x, self.layer_rotary).mean(dim=1).unflatten(0, kv.shape[:2])

    def memory(self, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """(B, T, E), of kv (B, T, L, 2 Ekv) or, without LSA, of final hidden states (B, T, E)."""
        if not self.config.use_layer_self_attention:
            return self.Ekv2E(hidden.to(self.dtype))
        pieces = kv.split(LSA_TOKENS if kv.device.type == "cpu" else kv.shape[1], dim=1)
        return self.Ekv2E(torch.cat([self.layer_self_attend(piece) for piece in pieces], dim=1))

    def self_attend(self, tokens: Tensor) -> Tensor:
        """SA: (B, T) -> (B, T, E)."""
        x, T = self.target.embed_tokens(tokens).to(self.dtype), tokens.shape[1]
        return self.self_attention(x, self.rotary[:, :T], CAUSAL)

    def cross_attend(self, x: Tensor, memory: Tensor, horizon: Tensor) -> Tensor:
        """CA: from SA's output x (B, T, E) to memory (B, T, E) up to horizon (B, T) -> predicted hidden states, as x.
        Without CA each position reads the true memory of the one before: off-policy training."""
        T = x.shape[1]
        rope = self.rotary[:, :T]
        if not self.config.use_cross_attention:
            previous = F.pad(memory[:, :-1], (0, 0, 1, 0))
            return self.cross_attention(x + previous, rope, CAUSAL)
        mask = (torch.arange(T, device=x.device) <= horizon.unsqueeze(-1)).unsqueeze(1)  # (B, 1, T, T)
        return self.cross_attention.attend(x, self.cross_attention.keys_values(memory, rope), rope, mask)

    def infer_target_layers(self, x: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        """TLI: the target's last N layers and final norm on predicted states x (B, T, E). Query i attends to the
        target's own keys and values up to its horizon, to the drafter's after it: what both caches hold in drafting."""
        if self.N == 0:
            return x
        T, target = x.shape[1], self.target
        rope = target.rotary[:, :T]
        known = torch.arange(T, device=x.device) <= horizon.unsqueeze(-1)  # (B, T, T)
        mask = torch.cat([known, (~known).tril()], dim=-1).unsqueeze(1)  # (B, 1, T, 2T)
        for i, layer in list(enumerate(target.layers))[-self.N:]:
            theirs = kv[:, :, i].unflatten(-1, (target.config.num_key_value_heads, -1)).transpose(1, 2).to(x.dtype)
            ours = layer.keys_values(x, rope)  # (B, Hkv, T, 2D), as theirs
            x = layer.attend(x, torch.cat([theirs, ours], dim=2), rope, mask)
        return target.norm(x)

    def features(self, tokens: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        """What the LM head is applied to, at every position in one pass, (B, T, E). tokens (B, T); kv (B, T, L, 2 Ekv)
        from the target's cache; horizon (B, T): the last position whose memory query i may read, -1 for none."""
        hidden = None if self.config.use_layer_self_attention else self.target.hidden(tokens)
        return self(tokens, self.memory(kv, hidden), kv, horizon[None])[1][0]

    def forward(self, tokens: Tensor, memory: Tensor, kv: Tensor, horizons: Tensor) -> tuple[Tensor, Tensor]:
        """CA's predictions and the features, both (R, B, T, E), for horizons (R, B, T), by one pass of SA."""
        x = self.self_attend(tokens)
        predicted = [self.cross_attend(x, memory, horizon) for horizon in horizons]
        features = [self.infer_target_layers(p, kv, horizon) for p, horizon in zip(predicted, horizons)]
        return torch.stack(predicted), torch.stack(features)

    def logits(self, features: Tensor) -> Tensor:
        """Frozen LM head: (..., E) -> (..., V), V of the draft vocabulary if there is one."""
        return self.head(features.to(self.target.dtype if self.vocabulary is None else self.dtype))

    def scatter_to_vocabulary(self, q: Tensor | None) -> Tensor | None:
        """From probabilities over the draft vocabulary to ones over all, (..., V)."""
        if self.vocabulary is None or q is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.target.config.vocab_size).index_copy_(-1, self.vocabulary, q)

    def build_memory(self, tokens: list[int], cache: KVCache, places: list[int], hidden: Tensor,
                     rows: list[int] | None = None) -> Memory:
        """Memory of newly verified tokens, at these places (of these rows) in the target's cache. hidden (1, T, E)"""
        index, pieces = rows or [0] * len(places), []
        for a in range(0, len(places), PROMPT_CHUNK):
            piece = slice(a, a + PROMPT_CHUNK)
            kv = cache.kv[:, index[piece], :, places[piece]]  # (T, L, Hkv, 2D): indexed dimensions come first
            pieces.append(self.memory(kv.flatten(2)[None], hidden[:, piece]))
        memory = torch.cat(pieces, dim=1)
        if self.config.use_cross_attention:
            memory = self.cross_attention.keys_values(memory, self.rotary[:, places])
        reused_kv = cache.kv[len(cache.kv) - self.N:, index, :, places].permute(1, 2, 0, 3).unsqueeze(1)
        return Memory(tokens, places, memory, reused_kv, rows)

    def to_bfloat16(self) -> "Drafter":
        """In bfloat16 where the CPU multiplies in it: drafts need not be exact."""
        if can_pack(self.Ekv2E.weight) and self.dtype == torch.float32 and torch.cpu._is_avx512_bf16_supported():
            for weight in (*self.parameters(), *(() if self.vocabulary is None else [self.head_weight])):
                weight.data = weight.data.bfloat16()
        return self

    def pack(self) -> "Drafter":
        """As `Llama.pack`. The target is packed after the drafter is made, which copies rows of the LM head."""
        if can_pack(self.Ekv2E.weight):
            ca = self.cross_attention.self_attn
            self.self_attention.pack()
            self.cross_attention.pack(*((ca.q, ca.kv) if self.config.use_cross_attention else ()))
            if self.config.use_layer_self_attention:
                self.layer_self_attention.pack()
            if self.vocabulary is not None:
                self.head.pack()
        return self


# --- Drafts ---
@dataclass(frozen=True)
class TreeConfig:
    """How large a draft may grow: EAGLE-2's limits, and two of ours that end it where the drafter is unsure."""

    depth: int
    top_k: int = 1  # leaves that are expanded together; 1: a chain
    total_tokens: int = 64  # of a tree
    min_confidence: float = 0.0  # end where the probabilities of the leaves to expand add up to less
    min_probability: float = 0.0  # of the path to a token, for a tree to propose it

@dataclass
class Draft:
    """What is proposed to follow `token`, the target's newest: a tree, parents before children."""

    token: int
    tokens: list[int]  # K
    parents: list[int]  # the index in tokens that each follows, -1 for `token`; siblings in the order drawn
    q: Tensor | None = None  # what each parent's children were drawn from, in order, (parents, V); None: not drawn

    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token): the index of that token after that parent."""
        return {(parent, token): i for i, (parent, token) in enumerate(zip(self.parents, self.tokens))}

def chain_parents(count: int) -> list[int]:
    return list(range(-1, count - 1))

def ancestor_mask(parents: list[int]) -> Tensor:
    """(n, n) bool: each node sees itself and its ancestors. Parents come before children; a root's is -1."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask

def quantize_probabilities(q: Tensor) -> tuple[Tensor, Tensor]:
    """Each q (n, V) as its 64 likeliest ids, int32, and their weights, uint8, the largest 255; both (n, 64)."""
    likely, ids = q.topk(min(Q_TOKENS, q.shape[-1]))
    return ids.int(), (255 * likely / likely[..., :1]).round().to(torch.uint8)

def dequantize_probabilities(ids: Tensor, weights: Tensor, vocab_size: int) -> Tensor:
    """The distribution (n, V) that has these weights: the same floats wherever it is computed."""
    q = weights.float() / weights.sum(-1, keepdim=True)
    return q.new_zeros(*q.shape[:-1], vocab_size).scatter_(-1, ids.long(), q)

@dataclass(eq=False)
class Node:
    """A token while its draft is made."""

    token: int
    parent: "Node | None"  # None: the last verified token
    value: float = 1.0  # the product of the drafter's probabilities on the path to it
    q: Tensor | None = None  # what it was drawn from, over the draft vocabulary (V)

def parent_indices(nodes: list[Node]) -> list[int]:
    """Where in the list each node's parent is; -1: nowhere."""
    index = {node: i for i, node in enumerate(nodes)}
    return [index.get(node.parent, -1) for node in nodes]

def highest(nodes: list[Node], count: int) -> list[Node]:
    best = set(sorted(nodes, key=lambda node: -node.value)[:count])
    return [node for node in nodes if node in best]  # in their order

class DraftState:
    """The drafter's side of one conversation: caches, and the draft being made."""

    def __init__(self, drafter: Drafter, capacity: int, sampling: Sampling = Sampling(), quantize: bool = False,
                 rows: int = 1):
        """capacity: in tokens, with drafts. quantize: draw from a q that can be sent over a network."""
        self.drafter, self.sampling, self.quantize = drafter, sampling, quantize
        self.drafted: list[Node] = []  # in the caches after verified tokens: unverified, the newest, expanded drafts
        self.unverified = 0  # tokens, written without the target

        def new_cache(layers: int, kv_heads: int, head_dim: int, model: Drafter | Llama) -> KVCache:
            shape = layers, rows, kv_heads, capacity, 2 * head_dim
            return KVCache(torch.zeros(shape, device=drafter.target.device, dtype=model.dtype), [0] * rows)

        t, sa, ca = drafter.target.config, drafter.self_attention.self_attn, drafter.cross_attention.self_attn
        self.self_cache = new_cache(1, sa.kv_heads, sa.head_dim, drafter)  # SA: of all tokens
        self.cross_cache = new_cache(1, ca.kv_heads, ca.head_dim, drafter)  # CA: of memories, that is verified tokens
        self.reused_cache = new_cache(drafter.N, t.num_key_value_heads, t.head_dim, drafter.target)  # TLI: of all

    verified = property(lambda self: list(self.cross_cache.lengths))  # how many tokens of each row have a memory

    def truncate(self, unverified: int) -> None:
        """Forget drafts, and all but so many unverified tokens."""
        self.drafted, self.unverified = self.drafted[:unverified], unverified
        for cache in (self.self_cache, self.reused_cache):
            cache.lengths = [length + unverified for length in self.verified]

    def append_verified(self, memory: Memory) -> None:
        """Grow the caches by newly verified tokens. No layer runs for them: SA's keys and values need none. (They come
        with queries: the weights are packed so.)"""
        self.truncate(0)
        sa, rope = self.drafter.self_attention, self.drafter.rotary[:, memory.places]
        self_kv = sa.self_attn.queries_keys_values(sa.input_layernorm(self.embed(memory.tokens)), rope)[1]
        index = memory.rows or [0] * len(memory.tokens), memory.places
        self.self_cache.extend(self_kv[None], *index)
        self.cross_cache.extend(memory.cross_kv[None], *index)
        self.reused_cache.extend(memory.reused_kv, *index)

    def embed(self, tokens: list[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self.drafter.target.device)
        return self.drafter.target.embed_tokens(ids).to(self.drafter.dtype)  # (1, T, E)

    def draft(self, token: int, tree: TreeConfig) -> Draft:
        self.truncate(self.unverified)
        root, q = Node(token, self.drafted[-1] if self.drafted else None), None
        nodes = self.draft_chain(root, tree) if tree.top_k == 1 else self.draft_tree(root, tree)
        if nodes and self.sampling.temperature > 0:
            drawn_from = {node.parent: node.q for node in nodes}  # siblings share theirs
            q = self.drafter.scatter_to_vocabulary(torch.stack([*drawn_from.values()]))
        return Draft(token, [node.token for node in nodes], parent_indices(nodes), q)

    def draft_chain(self, root: Node, tree: TreeConfig) -> list[Node]:
        """Algorithm 1 of the paper: K tokens, each from q after all before it."""
        chain, greedy = [root], self.sampling.temperature == 0
        while len(chain) <= tree.depth and chain[-1].value >= tree.min_confidence:
            q = self.next_distributions(chain[-1:])[0]  # (V)
            choice = int(q.argmax() if greedy else sample(q, self.sampling.generator))
            chain.append(Node(self.drafter.ids[choice], chain[-1], chain[-1].value * float(q[choice]), q))
        return chain[1:]

    def draft_unverified(self, token: int, count: int) -> list[int]:
        """A chain that stays although no target will see it: the next goes on after it, on the same memories."""
        tokens = self.draft(token, TreeConfig(count)).tokens
        self.unverified = len(self.drafted)
        return tokens

    def next_distributions(self, nodes: list[Node]) -> Tensor:
        """q after each node of a level, (T, V), over the draft vocabulary."""
        s, logits = self.sampling, self.drafter.logits(self.step(nodes))
        if s.temperature == 0:
            return logits.float().softmax(-1)
        q = probabilities(logits, s.temperature, s.top_p)
        return dequantize_probabilities(*quantize_probabilities(q), q.shape[-1]) if self.quantize else q

    def step(self, nodes: list[Node]) -> Tensor:
        """SA, CA and TLI on the nodes of one level: features (T, E)."""
        self.drafted += nodes
        drafts, prefix = self.drafted[self.unverified:], self.verified[0] + self.unverified
        ancestors = ancestor_mask(parent_indices(drafts))[-len(nodes):]  # (T, drafts)
        position = prefix + int(ancestors[0].sum()) - 1  # of all these nodes
        rope, target_rope = (m.rotary[:, position:position + 1] for m in (self.drafter, self.drafter.target))
        mask = None if ancestors.all() else F.pad(ancestors, (prefix, 0), value=True).to(rope.device)  # (T, S)
        return self.run(self.embed([node.token for node in nodes]), (rope, mask), (target_rope, mask))[0]

    def run(self, x: Tensor, own: tuple[Tensor, Tensor | None], reused: tuple[Tensor, Tensor | None]) -> Tensor:
        """Features of embeddings x (B, T, E). own, reused: angles and mask for our layers and the target's."""
        target, N = self.drafter.target, self.drafter.N
        x = self.drafter.self_attention(x, *own, partial(self.self_cache.append, 0))
        x = self.cross_attend(x, *own)
        if N > 0:
            x = x.to(target.dtype)
            for n, layer in enumerate(target.layers[-N:]):
                x = layer(x, *reused, partial(self.reused_cache.append, n))
            x = target.norm(x)
        for cache in (self.self_cache, self.reused_cache):
            cache.lengths = [length + x.shape[1] for length in cache.lengths]
        return x

    def cross_attend(self, x: Tensor, rope: Tensor, mask: Tensor | None) -> Tensor:
        """Every query of a cycle sees the same memory, all of it: what the last verified token of its row would."""
        cache = KVCache(self.cross_cache.kv, [length - 1 for length in self.verified])
        _, mask = causal_step(cache, 1, self.drafter.rotary)
        return self.drafter.cross_attention.attend(x, cache.kv[0, :len(x), :, :cache.length + 1], rope, mask)

    def draft_tree(self, root: Node, tree: TreeConfig) -> list[Node]:
        """EAGLE-2's dynamic tree (Li et al. 2024), level by level: the leaves of the highest value are expanded and, at
        temperature 0, the nodes of the highest value kept, never one without its parent. Nodes that are drawn must all
        be proposed: each level then has its share of them."""
        nodes, leaves, total, greedy = [], [root], tree.total_tokens, self.sampling.temperature == 0
        for level in range(tree.depth):
            room = total if greedy else -(-(total - len(nodes)) // (tree.depth - level))  # rounded up
            values = [leaf.value for leaf in leaves]
            if not leaves or room == 0 or sum(values) < tree.min_confidence:
                break
            q = self.next_distributions(leaves)  # (leaves, V)
            children = [Node(self.drafter.ids[choice], leaves[leaf], value, q[leaf]) for leaf, choice, value in
                        expand_leaves(q, values, room, tree.min_probability, self.sampling)]
            nodes += children
            leaves = highest(children, tree.top_k)
        return highest(nodes, total) if greedy else nodes

def expand_leaves(q: Tensor, values: list[float], room: int, min_probability: float,
                  sampling: Sampling) -> list[tuple[int, int, float]]:
    """Up to `room` children of a level's leaves as (leaf, choice, value), by leaf and in order. q (leaves, V).
    A leaf's likeliest choices say how many it has. At temperature 0 these are its children; above it as many are drawn
    without replacement: a number that did depend on the draw would change its distribution."""
    likely, choices = q.topk(min(room, q.shape[-1]))  # (leaves, room)
    if sampling.temperature > 0:
        choices = gumbel_topk(q, choices.shape[1], sampling.generator)
    likely, choices, drawn = torch.stack([likely, choices.to(q), q.gather(-1, choices)]).tolist()  # one GPU sync
    likeliest = sorted((-p * values[leaf], leaf) for leaf, row in enumerate(likely) for p in row)[:room]
    parents = [leaf for value, leaf in likeliest if -value >= max(min_probability, MIN_PROBABILITY)]
    return [(leaf, int(choice), p * value) for leaf, value in enumerate(values)
            for choice, p in zip(choices[leaf][:parents.count(leaf)], drawn[leaf])]

class OffPolicyDraftState(DraftState):
    """An ablation, without CA: a causal layer over SA's output plus the memory of the token before, as in EAGLE. Where
    that is a draft, its features stand in, projected or (with LSA, unseen in training) as they are. cross_cache holds
    the layer's keys and values of verified tokens, which it counts, then of drafts."""

    def __init__(self, drafter: Drafter, *arguments):
        super().__init__(drafter, *arguments)
        self.memories = torch.zeros_like(drafter.Ekv2E.bias)[None]  # the last verified token's, then those of drafted

    def append_verified(self, memory: Memory) -> None:
        self.truncate(0)
        T, sa, ca = len(memory.tokens), self.drafter.self_attention, self.drafter.cross_attention
        rope, mask = causal_step(self.self_cache, T, self.drafter.rotary)
        x = sa(self.embed(memory.tokens), rope, mask, partial(self.self_cache.append, 0))
        previous, self.memories = torch.cat([self.memories[:1], memory.cross_kv[0]]).split([T, 1])  # (T, E), (1, E)
        _, kv = ca.self_attn.queries_keys_values(ca.input_layernorm(x + previous), rope)
        super().append_verified(replace(memory, cross_kv=kv))

    def step(self, nodes: list[Node]) -> Tensor:
        features = super().step(nodes)  # (T, E)
        states, lsa = features.to(self.drafter.dtype), self.drafter.config.use_layer_self_attention
        earlier = self.memories[:1 + len(self.drafted) - len(nodes)]
        self.memories = torch.cat([earlier, states if lsa else self.drafter.Ekv2E(states)])
        return features

    def cross_attend(self, x: Tensor, rope: Tensor, mask: Tensor | None) -> Tensor:
        previous = self.memories[[1 + parent for parent in parent_indices(self.drafted)[-x.shape[1]:]]]  # (T, E)
        cache = KVCache(self.cross_cache.kv, self.self_cache.lengths)
        return self.drafter.cross_attention(x + previous, rope, mask, partial(cache.append, 0))

class BatchDraftState(DraftState):
    """Chains for several conversations at once, each a row of the caches. Needs CA."""

    def draft_rows(self, newest: list[int], K: int, samplings: list[Sampling]) -> list[Draft]:
        """A chain of K tokens after the newest of every row."""
        drafter, steps, tokens, drafts = self.drafter, [], [newest], []
        for _ in range(K):
            own = causal_step(self.self_cache, 1, drafter.rotary)
            reused = causal_step(self.reused_cache, 1, drafter.target.rotary)
            features = self.run(self.embed(tokens[-1]).transpose(0, 1), own, reused)  # (B, 1, E)
            steps.append(drafter.logits(features[:, 0]))  # (B, V)
            tokens.append([drafter.ids[choice] for choice in sample_next(steps[-1], samplings)])
        for s, logits, (token, *drafted) in zip(samplings, torch.stack(steps, dim=1), zip(*tokens)):
            q = probabilities(logits, s.temperature, s.top_p) if s.temperature > 0 else None  # (K, V), as sample_next
            drafts.append(Draft(token, drafted, chain_parents(K), drafter.scatter_to_vocabulary(q)))
        return drafts

def start_drafting(drafter: Drafter, *arguments) -> DraftState:
    """A drafter's side of one conversation; arguments as of DraftState."""
    return (DraftState if drafter.config.use_cross_attention else OffPolicyDraftState)(drafter, *arguments)


# --- Checkpoints, in the authors' names and shapes ---
def load_drafter(path: str | Path, target: Llama) -> Drafter:
    """A drafter of `target`, on its device and dtype, from a folder with config.json and model.safetensors. Sizes that
    the config leaves out are read off the tensors. Raises InputError for what is missing or does not fit."""
    path, t = Path(path), target.config
    tensors = {name: read() for name, read in read_tensors(path / "model.safetensors")}
    config, heads = read_json(path / "config.json"), t.num_attention_heads
    values = {"num_attention_heads": heads, "layer_self_attention_num_attention_heads": heads,
              "rms_norm_eps": t.rms_norm_eps, "rope_theta": t.rope_theta}
    with input_errors(path / "config.json", InputError, RuntimeError, TypeError, ZeroDivisionError):
        for name, kind in DrafterConfig.__annotations__.items():
            if (value := config.get(name)) is not None:
                if not is_valid(value, kind, t.vocab_size):
                    raise InputError(f"{name} is invalid: {value!r:.40}")
                values[name] = tuple(value) if isinstance(value, list) else value
        for block in ("self_attention", "cross_attention", "layer_self_attention"):
            q, k, gate = (len(tensors.get(f"{block}.{name}_proj.weight", "-"))
                          for name in ("self_attn.q", "self_attn.k", "mlp.gate"))
            heads = values.get(f"{block}_num_attention_heads", values["num_attention_heads"])
            values.setdefault(f"{block}_num_key_value_heads", heads * k // q)
            values.setdefault(f"{block}_intermediate_size", gate)
        with torch.device("meta"):
            drafter = Drafter(target, DrafterConfig(**values))
    load_weights(drafter, iter(tensors.items()), path, target.device, target.dtype)
    files = path / "config.json", path / "model.safetensors"
    drafter.checkpoint_hash = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    return drafter.requires_grad_(False).eval()

def is_valid(value: object, kind: type, vocab_size: int) -> bool:
    if kind in (bool, int):
        return type(value) is kind and value >= 0
    if kind is float:
        return type(value) in (int, float) and 0 < value < float("inf")
    ids = {i for i in value if type(i) is int and 0 <= i < vocab_size} if isinstance(value, list) else ()
    return 0 < len(ids) == len(value)

def save_drafter(drafter: Drafter, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors, each completely or not at all."""
    t = drafter.target.config
    config = {name: value for name, value in asdict(drafter.config).items() if value is not None}
    config |= dict(hidden_size=t.hidden_size, vocab_size=t.vocab_size,
                   kv_hidden_size=2 * t.num_key_value_heads * t.head_dim)
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in drafter.named_parameters()}
    with atomic_write(path / "config.json") as stated, atomic_write(path / "model.safetensors") as weights:
        stated.write_text(json.dumps(config))
        save_file(tensors, weights, metadata={"format": "pt"})
