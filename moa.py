"""The drafter: a Mixture of Attentions (Zimmer et al., ICLR 2025, arXiv 2410.03804, section 3). In the paper, M_Small.

It drafts the next tokens of a frozen target by three attentions, each an ordinary Llama layer, and the target's own:

    LSA  Layer Self-Attention, over the L layers of one verified token's keys and values in the target's cache. Its mean
         over layers, projected to E, is that token's `memory`: a look at the target's whole state, not its last layer.
    SA   Self-Attention, causal, over the embeddings of prompt and draft: a drafted token sees the drafts before it.
    CA   Cross-Attention, from SA's output to the memory of verified tokens. Drafted tokens have none. In training a
         `horizon` for each query sets the same limit, so that one pass over a sequence trains on-policy.
    TLI  Target Layer Inference: CA's output predicts the hidden state that enters the target's last N layers (N = 0:
         the output of the final norm); they run on it, and the frozen LM head makes it a distribution.

`Drafter.features` covers all positions in one pass, under given horizons; `DraftState` does the same step by step.
Shapes: B batch, T tokens, L layers, E hidden, H heads, D head size, V vocabulary, N reused layers, K draft length,
R horizons; Ekv = Hkv * D is the width of one layer's keys.
"""
import json
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from llama import (DecoderLayer, FusedLinear, InputError, KVCache, Llama, Sampling, atomic_write, can_pack, causal_step,
                   gumbel_topk, input_errors, load_weights, probabilities, read_json, read_tensors,
                   rotary_table, sample, sample_next, sha256)

MIN_PROBABILITY = 1e-30  # of a proposed token: with less, what rejection sampling leaves of q is rounding error
Q_TOKENS = 64  # of a q that is sent over a network: see quantize_probabilities
PROMPT_CHUNK = 256  # LSA works on T x L rows: the memory of a long prompt is built this many tokens at a time

@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and choices of a drafter. Names, where they have one, are those of the authors' config.json."""

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
    use_layer_self_attention: bool = True  # without: the memory is a projection of the target's last hidden state
    use_cross_attention: bool = True  # without: the drafter reads its own predictions, as EAGLE does
    draft_vocabulary: tuple[int, ...] | None = None  # ids the drafter may propose; None: all

    @classmethod
    def sized_for(cls, target: Llama, **choices) -> "DrafterConfig":
        """The paper's proportions: for Llama-3-8B as in its table, for another target as near as its heads divide."""
        c = target.config
        heads, lsa_kv_heads = c.num_attention_heads, c.num_key_value_heads
        kv_width, inner = 2 * c.num_key_value_heads * c.head_dim, 3 * c.hidden_size // 2
        lsa_heads = next((n for n in range(heads, 0, -1) if n % lsa_kv_heads == 0 and kv_width // n % 2 == 0), heads)
        kv_heads = next(n for n in range(max(1, heads // 8), 0, -1) if heads % n == 0)
        sizes = cls(heads, lsa_heads, lsa_kv_heads, 3 * kv_width // 2, kv_heads, inner, kv_heads, inner,
                    c.rms_norm_eps, c.rope_theta)
        return replace(sizes, **choices)

@dataclass
class Memory:
    """What the target's side sends the drafter for T newly verified tokens."""

    tokens: list[int]
    places: list[int]  # their positions
    cross_kv: Tensor  # CA's keys and values of their memories, (1, Hkv, T, 2D); without CA the memories, (1, T, E)
    reused_kv: Tensor  # the target's own in its last N layers, (N, 1, Hkv, T, 2D)
    rows: list[int] | None = None  # in a batch: whose each token is

class Drafter(nn.Module):
    """M_Small. Trainable: LSA, the projection, SA, CA. The rest belongs to the target and is frozen."""

    def __init__(self, target: Llama, config: DrafterConfig):
        """Raises InputError for sizes that do not fit the target or each other."""
        super().__init__()
        c, t = config, target.config
        if not 0 <= c.target_layer_inference <= t.num_hidden_layers:
            raise InputError(f"target_layer_inference {c.target_layer_inference} of {t.num_hidden_layers} layers")
        self.config, self.N = config, c.target_layer_inference
        kv_width, width = 2 * t.num_key_value_heads * t.head_dim, t.hidden_size  # 2 Ekv, E

        def layer(name: str, width: int, heads: int) -> DecoderLayer:
            head_dim, kv_heads = width // heads, getattr(c, f"{name}_num_key_value_heads")
            if kv_heads < 1 or heads % kv_heads or head_dim < 2 or head_dim % 2:
                raise InputError(f"{name}: num_attention_heads {heads} of {head_dim}, num_key_value_heads {kv_heads}")
            inner = getattr(c, f"{name}_intermediate_size")
            return DecoderLayer(width, inner, heads, kv_heads, head_dim, c.rms_norm_eps)

        self.self_attention = layer("self_attention", width, c.num_attention_heads)
        self.cross_attention = layer("cross_attention", width, c.num_attention_heads)
        if c.use_layer_self_attention:
            lsa_heads = c.layer_self_attention_num_attention_heads
            self.layer_self_attention = layer("layer_self_attention", kv_width, lsa_heads)
        self.Ekv2E = nn.Linear(kv_width if c.use_layer_self_attention else width, width)
        self.checkpoint_hash = ""  # of the files that it was loaded from
        # The target and, of its LM head, the rows in use: in a tuple, or they would become ours to train and save.
        head, vocabulary = target.head, None
        if c.draft_vocabulary is not None:
            vocabulary = torch.tensor(c.draft_vocabulary, device=target.device)
            rows = nn.Linear(width, len(vocabulary), bias=False)
            rows.weight = nn.Parameter(target.lm_head.weight[vocabulary], requires_grad=False)
            head = FusedLinear(rows)
        self._frozen = target, head
        self.register_buffer("vocabulary", vocabulary, persistent=False)
        lsa_head_dim = kv_width // c.layer_self_attention_num_attention_heads
        for name, length, size in (("rotary", t.max_position_embeddings, width // c.num_attention_heads),
                                   ("layer_rotary", t.num_hidden_layers, lsa_head_dim)):  # LSA's positions are layers
            self.register_buffer(name, rotary_table(length, size, c.rope_theta, target.device), persistent=False)

    @property
    def target(self) -> Llama:
        return self._frozen[0]

    @property
    def head_weight(self) -> Tensor:
        """The target's LM head, (V, E), or its rows that may be drafted."""
        return self._frozen[1].layers[0].weight

    @property
    def dtype(self) -> torch.dtype:
        return self.Ekv2E.weight.dtype

    # The four parts of the method ---------------------------------------------------------------------------------
    def layer_self_attend(self, kv: Tensor) -> Tensor:
        """LSA, then the mean over layers: kv (B, T, L, 2 Ekv) -> (B, T, 2 Ekv)."""
        x = kv.to(self.dtype).flatten(0, 1)  # (B T, L, 2 Ekv): each token's layers are a sequence of their own
        return self.layer_self_attention(x, self.layer_rotary).mean(dim=1).unflatten(0, kv.shape[:2])

    def memory(self, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """(B, T, E) of kv (B, T, L, 2 Ekv). Without LSA: of the target's final hidden states (B, T, E)."""
        return self.Ekv2E(self.layer_self_attend(kv) if self.config.use_layer_self_attention else hidden.to(self.dtype))

    def self_attend(self, tokens: Tensor) -> Tensor:
        """SA: (B, T) -> (B, T, E)."""
        x = self.target.embed_tokens(tokens).to(self.dtype)
        return self.self_attention(x, *causal_step(None, tokens.shape[1], self.rotary))

    def cross_attend(self, x: Tensor, memory: Tensor, horizon: Tensor) -> Tensor:
        """CA: from SA's output x (B, T, E) to memory (B, T, E) up to horizon (B, T) -> predicted hidden states, as x.
        Without CA each position reads the true memory of the one before: the off-policy training that CA replaces."""
        count = x.shape[1]
        rope = self.rotary[:, :count]
        if not self.config.use_cross_attention:
            previous = F.pad(memory[:, :-1], (0, 0, 1, 0))
            return self.cross_attention(x + previous, *causal_step(None, count, self.rotary))
        mask = (torch.arange(count, device=x.device) <= horizon.unsqueeze(-1)).unsqueeze(1)  # (B, 1, T, T)
        return self.cross_attention.attend(x, self.cross_attention.keys_values(memory, rope), rope, mask)

    def infer_target_layers(self, x: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        """TLI: the target's last N layers and final norm on predicted states x (B, T, E). Query i attends to the
        target's own keys and values up to its horizon, to the drafter's after it: what both caches hold in drafting."""
        if self.N == 0:
            return x
        count, target = x.shape[1], self.target
        rope, position = target.rotary[:, :count], torch.arange(count, device=x.device)
        known = position <= horizon.unsqueeze(-1)  # (B, T, T)
        predicted = ~known & (position <= position.unsqueeze(-1))  # (B, T, T)
        mask = torch.cat([known, predicted], dim=-1).unsqueeze(1)  # (B, 1, T, 2T)
        for i in range(len(target.layers) - self.N, len(target.layers)):
            theirs = kv[:, :, i].unflatten(-1, (target.config.num_key_value_heads, -1)).transpose(1, 2).to(x.dtype)
            ours = target.layers[i].keys_values(x, rope)  # (B, Hkv, T, 2D), as theirs
            x = target.layers[i].attend(x, torch.cat([theirs, ours], dim=2), rope, mask)
        return target.norm(x)

    # The training forward, and the target's side of a cycle -------------------------------------------------------
    def features(self, tokens: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        """What the LM head is applied to, at every position in one pass, (B, T, E). tokens (B, T); kv (B, T, L, 2 Ekv)
        as in the target's cache; horizon (B, T): the last position whose memory query i may read, -1 for none."""
        hidden = None if self.config.use_layer_self_attention else self.target.hidden(tokens)
        return self(tokens, self.memory(kv, hidden), kv, horizon[None])[1][0]

    def forward(self, tokens: Tensor, memory: Tensor, kv: Tensor, horizons: Tensor) -> tuple[Tensor, Tensor]:
        """CA's predictions and the features, both (R, B, T, E), for horizons (R, B, T). SA is paid for once."""
        x = self.self_attend(tokens)
        predicted = [self.cross_attend(x, memory, horizon) for horizon in horizons]
        features = [self.infer_target_layers(p, kv, horizon) for p, horizon in zip(predicted, horizons)]
        return torch.stack(predicted), torch.stack(features)

    def logits(self, features: Tensor) -> Tensor:
        """Frozen LM head: (..., E) -> (..., V), or one logit for each token of the draft vocabulary."""
        return self._frozen[1](features.to(self.target.dtype if self.vocabulary is None else self.dtype))

    def build_memory(self, tokens: list[int], cache: KVCache, places: list[int], hidden: Tensor,
                     rows: list[int] | None = None) -> Memory:
        """Memory of newly verified tokens, which lie in the target's cache at these places (of these rows). hidden
        (1, T, E): their final hidden states, which only a drafter without LSA reads."""
        kv = cache.kv[:, rows or [0] * len(places), :, places]  # (T, L, Hkv, 2D): indexed dimensions come first
        memory = torch.cat([self.memory(piece.flatten(2)[None], states) for piece, states in
                            zip(kv.split(PROMPT_CHUNK), hidden.split(PROMPT_CHUNK, dim=1))], dim=1)  # (1, T, E)
        if self.config.use_cross_attention:
            memory = self.cross_attention.keys_values(memory, self.rotary[:, places])
        reused_kv = kv[:, len(self.target.layers) - self.N:].permute(1, 2, 0, 3).unsqueeze(1)
        return Memory(tokens, places, memory, reused_kv, rows)

    def scatter_to_vocabulary(self, q: Tensor) -> Tensor:
        """From probabilities over the draft vocabulary to ones over all tokens, (..., V)."""
        if self.vocabulary is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.target.config.vocab_size).index_copy_(-1, self.vocabulary, q)

    # Fast on a CPU ------------------------------------------------------------------------------------------------
    def to_bfloat16(self) -> "Drafter":
        """In bfloat16 where the CPU multiplies in it: drafts need not be exact, q only has to be what made them."""
        if can_pack(self.Ekv2E.weight) and self.dtype == torch.float32 and torch.cpu._is_avx512_bf16_supported():
            for weight in (*self.parameters(), *(() if self.vocabulary is None else [self.head_weight])):
                weight.data = weight.data.bfloat16()
        return self

    def pack(self) -> "Drafter":
        """As `Llama.pack`. Make the drafter before packing its target, as it copies rows of the LM head's weight."""
        if can_pack(self.Ekv2E.weight):
            self.self_attention.pack()
            attention = self.cross_attention.self_attn
            self.cross_attention.pack(*((attention.q, attention.kv) if self.config.use_cross_attention else ()))
            if self.config.use_layer_self_attention:
                self.layer_self_attention.pack()
            if self.vocabulary is not None:
                self._frozen[1].pack()
        return self


# --- Drafts ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TreeConfig:
    """How large a draft may grow, in EAGLE-2's words. It ends where the drafter is no longer confident."""

    depth: int
    top_k: int = 1  # leaves that are expanded together; 1: a chain
    total_tokens: int = 64  # of a tree
    min_confidence: float = 0.0  # stop when the probabilities of the leaves to expand next add up to less
    min_probability: float = 0.0  # of the whole path to a token, for a tree to propose it

@dataclass
class Draft:
    """What the drafter proposes to follow `token`, the target's newest: a tree, parents before children."""

    token: int
    tokens: list[int]  # K
    parents: list[int]  # the index in tokens that each follows, -1 for `token`; siblings in the order they were drawn
    q: Tensor | None = None  # what each parent's children were drawn from, parents in order, (parents, V); None: greedy

    def children(self) -> dict[tuple[int, int], int]:
        """(parent, token): the index of that token after that parent."""
        return {(parent, token): i for i, (parent, token) in enumerate(zip(self.parents, self.tokens))}

def chain_parents(count: int) -> list[int]:
    """Of a chain: each token follows the one before it, the first follows the root, -1."""
    return list(range(-1, count - 1))

def ancestor_mask(parents: list[int]) -> Tensor:
    """(n, n) bool: each node sees itself and its ancestors. Parents come before children; a root's is -1."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
    return mask

def quantize_probabilities(q: Tensor) -> tuple[Tensor, Tensor]:
    """Each q (n, V) as its 64 likeliest ids, int32, and their weights, uint8, the largest of them 255; both (n, 64)."""
    likely, ids = q.topk(min(Q_TOKENS, q.shape[-1]))
    return ids.int(), (255 * likely / likely[..., :1]).round().to(torch.uint8)

def dequantize_probabilities(ids: Tensor, weights: Tensor, vocab_size: int) -> Tensor:
    """The distribution (n, V) that has these weights: the same floats wherever it is computed."""
    q = weights.float() / weights.sum(-1, keepdim=True)
    return q.new_zeros(*q.shape[:-1], vocab_size).scatter_(-1, ids.long(), q)

def expand_leaves(q: Tensor, values: list[float], room: int, min_probability: float,
                  sampling: Sampling) -> list[tuple[int, int, float]]:
    """Up to `room` children of a level's leaves as (leaf, choice, value), by leaf and in order. q (leaves, V).

    A child's value is its probability times its leaf's (EAGLE-2). At temperature 0 a leaf proposes its likeliest; above
    it as many are drawn without replacement, and all that is drawn is proposed, or q would not be its distribution."""
    likely, choice = q.topk(min(room, q.shape[-1]))  # (leaves, room)
    drawn = likely
    if sampling.temperature > 0:
        choice = gumbel_topk(q, choice.shape[1], sampling.generator)
        drawn = q.gather(-1, choice)
    likely, choice, drawn = torch.stack([likely, choice.to(q), drawn]).tolist()  # one GPU sync
    least = max(min_probability, MIN_PROBABILITY)
    best = sorted((-p * values[leaf], leaf, rank) for leaf, row in enumerate(likely) for rank, p in enumerate(row)
                  if p * values[leaf] >= least)[:room]
    return [(leaf, int(choice[leaf][rank]), drawn[leaf][rank] * values[leaf])
            for _, leaf, rank in sorted(best, key=lambda child: child[1:])]


# --- Drafting, step by step ------------------------------------------------------------------------------------------
class DraftState:
    """The drafter's side of one conversation. What its three caches hold, position by position:

        self_cache    SA: verified tokens, then tokens written without the target, then drafts
        cross_cache   CA: memories of verified tokens and nothing else (without CA: see OffPolicyDraftState)
        reused_cache  TLI: the target's own keys and values of verified tokens, then the drafter's
    """

    def __init__(self, drafter: Drafter, capacity: int, sampling: Sampling = Sampling(), quantize: bool = False,
                 rows: int = 1):
        """capacity: in tokens, drafts included. quantize: draw from a q that can be sent over a network."""
        c, t = drafter.config, drafter.target.config
        self.drafter, self.sampling, self.quantize = drafter, sampling, quantize
        self.vocabulary = c.draft_vocabulary or range(t.vocab_size)  # ids by their place in q

        def new_cache(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCache:
            kv = torch.zeros(layers, rows, kv_heads, capacity, 2 * head_dim, device=drafter.target.device, dtype=dtype)
            return KVCache(kv, [0] * rows)

        head_dim = t.hidden_size // c.num_attention_heads
        self.self_cache = new_cache(1, c.self_attention_num_key_value_heads, head_dim, drafter.dtype)
        self.cross_cache = new_cache(1, c.cross_attention_num_key_value_heads, head_dim, drafter.dtype)
        self.reused_cache = new_cache(drafter.N, t.num_key_value_heads, t.head_dim, drafter.target.dtype)
        self.verified = [0] * rows  # of each row: tokens that have a memory
        self.unverified = 0  # tokens after them, written without the target (in one conversation)
        self.parents: list[int] = []  # of each drafted token in the caches, in order: the one it follows there, or -1

    def append_verified(self, memory: Memory) -> None:
        """Grow the caches by newly verified tokens; drafts and unverified tokens go."""
        self.truncate(0)
        index = memory.rows or [0] * len(memory.tokens), memory.places
        self.read_verified(self.embed(memory.tokens), memory, index)
        self.reused_cache.extend(memory.reused_kv, *index)
        self.verified, self.unverified = list(self.reused_cache.lengths), 0

    def read_verified(self, x: Tensor, memory: Memory, index: tuple[list[int], list[int]]) -> None:
        """SA's and CA's keys and values of verified tokens with embeddings x (1, T, E). No layer runs for them."""
        sa, rope = self.drafter.self_attention, self.drafter.rotary[:, memory.places]
        self.self_cache.extend(sa.self_attn.queries_keys_values(sa.input_layernorm(x), rope)[1][None], *index)
        self.cross_cache.extend(memory.cross_kv[None], *index)

    def truncate(self, unverified: int) -> None:
        """Forget drafts, and all but so many unverified tokens."""
        self.parents = []
        for cache in (self.self_cache, self.reused_cache):
            cache.lengths = [length + unverified for length in self.verified]

    def embed(self, tokens: list[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self.drafter.target.device)
        return self.drafter.target.embed_tokens(ids).to(self.drafter.dtype)  # (1, T, E)

    def step(self, tokens: list[int], parents: list[int]) -> Tensor:
        """SA, CA and TLI on the tokens of one level of a draft: features (T, E). parents are as in self.parents."""
        self.parents += parents
        ancestors = ancestor_mask(self.parents)[-len(tokens):]  # (T, drafted)
        prefix, x = self.verified[0] + self.unverified, self.embed(tokens)
        mask = None if ancestors.all() else F.pad(ancestors, (prefix, 0), value=True).to(x.device)  # (T, S)
        position = prefix + int(ancestors[0].sum()) - 1  # of all these tokens
        rope = self.drafter.rotary[:, position:position + 1]
        x = self.drafter.self_attention(x, rope, mask, partial(self.self_cache.append, 0))
        self.self_cache.lengths = [self.self_cache.length + len(tokens)]
        x = self.infer_target_layers(self.cross_attend(x, rope, mask, parents),
                                     self.drafter.target.rotary[:, position:position + 1], mask)
        self.reused_cache.lengths = [self.reused_cache.length + len(tokens)]
        return x[0]

    def cross_attend(self, x: Tensor, rope: Tensor, mask: Tensor | None, parents: list[int]) -> Tensor:
        """CA, (1, T, E): every query of a cycle sees the same memory, all there is."""
        return self.drafter.cross_attention.attend(x, self.cross_cache.kv[0, :, :, :self.verified[0]], rope)

    def infer_target_layers(self, x: Tensor, rope: Tensor, mask: Tensor | None) -> Tensor:
        target, N = self.drafter.target, self.drafter.N
        if N == 0:
            return x
        x = x.to(target.dtype)
        for n, layer in enumerate(target.layers[-N:]):
            x = layer(x, rope, mask, partial(self.reused_cache.append, n))
        return target.norm(x)

    def next_distributions(self, tokens: list[int], parents: list[int]) -> Tensor:
        """q after each token of a level, (T, V), over the draft vocabulary. At temperature 0 it only ranks."""
        s, logits = self.sampling, self.drafter.logits(self.step(tokens, parents))
        if s.temperature == 0:
            return torch.softmax(logits.float(), dim=-1)
        q = probabilities(logits, s.temperature, s.top_p)
        return dequantize_probabilities(*quantize_probabilities(q), q.shape[-1]) if self.quantize else q

    def draft(self, token: int, tree: TreeConfig) -> Draft:
        return self.draft_chain(token, tree) if tree.top_k == 1 else self.draft_tree(token, tree)

    def draft_chain(self, token: int, tree: TreeConfig) -> Draft:
        """Algorithm 1 of the paper: K tokens, each from q after all before it."""
        tokens, qs, confidence, greedy = [], [], 1.0, self.sampling.temperature == 0
        while len(tokens) < tree.depth and confidence >= tree.min_confidence:
            q = self.next_distributions([(tokens or [token])[-1]], [len(tokens) - 1])[0]  # (V)
            choice = int(q.argmax() if greedy else sample(q, self.sampling.generator))
            tokens.append(self.vocabulary[choice])
            qs.append(q)
            confidence *= float(q[choice])
        q = None if greedy or not qs else self.drafter.scatter_to_vocabulary(torch.stack(qs))  # (K, V)
        return Draft(token, tokens, chain_parents(len(tokens)), q)

    def draft_unverified(self, token: int, count: int) -> list[int]:
        """A chain that stays although no target will see it: the next one goes on after it, on the same memories."""
        self.truncate(self.unverified)
        tokens = self.draft_chain(token, TreeConfig(count)).tokens
        self.unverified, self.parents = self.unverified + count, []
        return tokens

    def draft_tree(self, token: int, tree: TreeConfig) -> Draft:
        """EAGLE-2's dynamic tree (Li et al. 2024), grown level by level. A node's value is the product of the drafter's
        probabilities on its path. A level's best leaves are expanded; at temperature 0 the best nodes are kept."""
        tokens, parents, values, qs = [token], [-1], [1.0], []  # node 0 is `token`
        leaves, row, greedy = [0], {-1: -1}, self.sampling.temperature == 0  # row: a node's place in the caches
        for _ in range(tree.depth):
            left = tree.total_tokens + 1 - len(tokens)
            room = tree.total_tokens if greedy else min(-(-tree.total_tokens // tree.depth), left)
            if room == 0:
                break
            row.update(zip(leaves, range(len(self.parents), len(self.parents) + len(leaves))))
            q = self.next_distributions([tokens[i] for i in leaves], [row[parents[i]] for i in leaves])  # (leaves, V)
            level = expand_leaves(q, [values[i] for i in leaves], room, tree.min_probability, self.sampling)
            if not level:
                break
            qs.append(q[sorted({leaf for leaf, _, _ in level})])
            start = len(tokens)
            for leaf, choice, value in level:
                tokens.append(self.vocabulary[choice])
                parents.append(leaves[leaf])
                values.append(value)
            leaves = sorted(sorted(range(start, len(tokens)), key=lambda i: -values[i])[:tree.top_k])
            if sum(values[i] for i in leaves) < tree.min_confidence:
                break
        kept = range(1, len(tokens))
        if greedy:
            kept = sorted(sorted(kept, key=lambda i: -values[i])[:tree.total_tokens])  # never a node without its parent
        index = {0: -1, **{node: i for i, node in enumerate(kept)}}
        q = None if greedy or not qs else self.drafter.scatter_to_vocabulary(torch.cat(qs))  # (parents, V)
        return Draft(token, [tokens[i] for i in kept], [index[parents[i]] for i in kept], q)

class OffPolicyDraftState(DraftState):
    """Drafting without CA: a causal layer over SA's output plus the memory of the token before, as in EAGLE. Where that
    is a draft, its features stand in, projected or (with LSA, unseen in training) as they are."""

    def __init__(self, drafter: Drafter, *arguments):
        super().__init__(drafter, *arguments)
        self.predicted: list[Tensor] = []  # a memory (1, 1, E) for each drafted token in the caches
        self.last_verified = self.last = torch.zeros_like(drafter.Ekv2E.bias)[None, None]  # of the token before them

    def read_verified(self, x: Tensor, memory: Memory, index: tuple[list[int], list[int]]) -> None:
        rope, mask = causal_step(self.self_cache, x.shape[1], self.drafter.rotary)
        x = self.drafter.self_attention(x, rope, mask, partial(self.self_cache.append, 0))
        previous = torch.cat([self.last_verified, memory.cross_kv[:, :-1]], dim=1)  # (1, T, E)
        self.drafter.cross_attention(x + previous, rope, mask, partial(self.cross_cache.append, 0))
        self.self_cache.lengths = [self.self_cache.length + x.shape[1]]
        self.cross_cache.lengths = [self.cross_cache.length + x.shape[1]]
        self.last_verified = self.last = memory.cross_kv[:, -1:]

    def draft_unverified(self, token: int, count: int) -> list[int]:
        tokens = super().draft_unverified(token, count)
        self.last, self.predicted = self.predicted[-1], []
        return tokens

    def truncate(self, unverified: int) -> None:
        super().truncate(unverified)
        self.cross_cache.lengths = list(self.self_cache.lengths)
        self.predicted = []

    def cross_attend(self, x: Tensor, rope: Tensor, mask: Tensor | None, parents: list[int]) -> Tensor:
        previous = torch.cat([self.predicted[i] if i >= 0 else self.last for i in parents], dim=1)
        x = self.drafter.cross_attention(x + previous, rope, mask, partial(self.cross_cache.append, 0))
        self.cross_cache.lengths = [self.cross_cache.length + x.shape[1]]
        return x

    def infer_target_layers(self, x: Tensor, rope: Tensor, mask: Tensor | None) -> Tensor:
        features = super().infer_target_layers(x, rope, mask)
        states = features.to(self.drafter.dtype)
        lsa = self.drafter.config.use_layer_self_attention
        self.predicted += (states if lsa else self.drafter.Ekv2E(states)).split(1, dim=1)
        return features

class BatchDraftState(DraftState):
    """Chains for several conversations at once, each a row of the caches. Needs CA."""

    def truncate(self, unverified: int) -> None:
        for cache in (self.self_cache, self.reused_cache):
            cache.lengths = list(self.cross_cache.lengths)

    def draft_rows(self, newest: list[int], K: int, samplings: list[Sampling]) -> list[Draft]:
        """A chain of K tokens after the newest of every row."""
        tokens, logits = [newest], []
        for _ in range(K):
            logits.append(self.drafter.logits(self.step_rows(tokens[-1])))  # (B, V)
            tokens.append([self.vocabulary[choice] for choice in sample_next(logits[-1], samplings)])
        drafts = []
        for row, s in enumerate(samplings):
            q = None
            if s.temperature > 0:  # what sample_next drew from
                q = probabilities(torch.stack([step[row] for step in logits]), s.temperature, s.top_p)  # (K, V)
                q = self.drafter.scatter_to_vocabulary(q)
            drafts.append(Draft(newest[row], [step[row] for step in tokens[1:]], chain_parents(K), q))
        return drafts

    def step_rows(self, tokens: list[int]) -> Tensor:
        """SA, CA and TLI on one more token of every row: features (B, E)."""
        drafter, cross = self.drafter, self.cross_cache
        x = self.embed(tokens).transpose(0, 1)  # (B, 1, E)
        rope, mask = causal_step(self.self_cache, 1, drafter.rotary)
        x = drafter.self_attention(x, rope, mask, partial(self.self_cache.append, 0))
        _, mask = causal_step(KVCache(cross.kv, [n - 1 for n in cross.lengths]), 1, drafter.rotary)  # all memory
        x = drafter.cross_attention.attend(x, cross.kv[0, :len(tokens), :, :cross.length], rope, mask)
        x = self.infer_target_layers(x, *causal_step(self.reused_cache, 1, drafter.target.rotary))
        for cache in (self.self_cache, self.reused_cache):
            cache.lengths = [length + 1 for length in cache.lengths]
        return x[:, 0]

def start_drafting(drafter: Drafter, *arguments) -> DraftState:
    """A drafter's side of one conversation; arguments as of DraftState."""
    return (DraftState if drafter.config.use_cross_attention else OffPolicyDraftState)(drafter, *arguments)


# --- Checkpoints, in the authors' names and shapes -------------------------------------------------------------------
def load_drafter(path: str | Path, target: Llama) -> Drafter:
    """The drafter of `target` from a folder with config.json and model.safetensors, on the target's device and dtype.
    Sizes that the config leaves out are read off the tensors. Raises InputError for what is missing or does not fit."""
    path, t = Path(path), target.config
    tensors = {name: read() for name, read in read_tensors(path / "model.safetensors")}
    config = read_json(path / "config.json")
    stated = {name: config[name] for name in DrafterConfig.__dataclass_fields__ if config.get(name) is not None}
    for name, value in stated.items():
        least = 0 if name == "target_layer_inference" else 1
        valid = isinstance(value, bool) if name.startswith("use_") else type(value) is int and value >= least
        if name in ("rms_norm_eps", "rope_theta"):
            valid = type(value) in (int, float) and 0 < value < math.inf
        if name == "draft_vocabulary":  # distinct ids
            ids = {i for i in value if type(i) is int and 0 <= i < t.vocab_size} if isinstance(value, list) else {}
            valid, stated[name] = 0 < len(ids) == len(value), tuple(sorted(ids))
        if not valid:
            raise InputError(f"{path / 'config.json'}: {name} is invalid: {value!r:.40}")
    with input_errors(path / "config.json", InputError, RuntimeError, TypeError):
        heads = stated.get("num_attention_heads", t.num_attention_heads)
        lsa_heads = stated.get("layer_self_attention_num_attention_heads", t.num_attention_heads)
        values = {"num_attention_heads": heads, "layer_self_attention_num_attention_heads": lsa_heads,
                  "rms_norm_eps": t.rms_norm_eps, "rope_theta": t.rope_theta}
        for block, head_dim in (("self_attention", t.hidden_size // heads), ("cross_attention", t.hidden_size // heads),
                                ("layer_self_attention", 2 * t.num_key_value_heads * t.head_dim // lsa_heads)):
            key, gate = (tensors.get(f"{block}.{name}_proj.weight") for name in ("self_attn.k", "mlp.gate"))
            values[f"{block}_num_key_value_heads"] = 1 if key is None else len(key) // max(1, head_dim)
            values[f"{block}_intermediate_size"] = 1 if gate is None else len(gate)
        with torch.device("meta"):
            drafter = Drafter(target, DrafterConfig(**{**values, **stated}))
    load_weights(drafter, iter(tensors.items()), path, target.device, target.embed_tokens.weight.dtype)
    drafter.checkpoint_hash = sha256(path / "config.json", path / "model.safetensors")
    return drafter.requires_grad_(False).eval()

def save_drafter(drafter: Drafter, path: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors; a reader meanwhile finds the old files or the new ones, complete."""
    t, config = drafter.target.config, asdict(drafter.config)
    config |= dict(hidden_size=t.hidden_size, vocab_size=t.vocab_size,
                   kv_hidden_size=2 * t.num_key_value_heads * t.head_dim)
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in drafter.named_parameters()}
    with atomic_write(path / "config.json") as stated, atomic_write(path / "model.safetensors") as weights:
        stated.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        save_file(tensors, weights, metadata={"format": "pt"})
