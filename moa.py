"""The drafter: a Mixture of Attentions (Zimmer et al., ICLR 2025, arXiv 2410.03804, section 3).

M_Small guesses the next tokens of a frozen target from three attentions, each an ordinary Llama layer:

    LSA  Layer Self-Attention, over the L layers of one verified token's keys and values in the target's cache. Its mean
         over layers, projected to E, is that token's `memory`: a look at the target's whole state, not its last layer.
    SA   Self-Attention, causal, over the embeddings of prompt and draft: a drafted token sees the drafts before it.
    CA   Cross-Attention, SA's output asking the memory of verified tokens. Drafted tokens have none yet. In training a
         `horizon` for each query sets the same limit, so that one pass over a sequence trains on-policy.
    TLI  Target Layer Inference: CA's output stands for the hidden state that enters the target's last N layers (for
         N = 0: that leaves the final norm); those run on it, with the target's own keys and values of verified tokens,
         and the frozen LM head makes it a distribution.

`Drafter.forward` covers all positions at once, under given horizons; `Drafting` does the same step by step with caches.

Shapes: B batch, T tokens, L layers, E hidden, H heads, D head size, V vocabulary, N reused layers, K draft length;
Ekv = Hkv * D is the width of one layer's keys.
"""
import json
import math
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from llama import (SIZES, DecoderLayer, FixedCache, InputError, KVCache, Linear, Llama, can_pack, captured, causal_mask, fill,
                   fixed_append, fixed_mask, fixed_rope, one_line, pad, pad_ancestors, probabilities, race, read_json,
                   read_tensors, rotary_table, written_whole)

LEAST = 1e-30  # probability of a proposed token: a lesser one is lost to rounding when `accept` takes likelier ones out of q
COARSE_TOKENS = 64  # of a q that is sent: see to_coarse
PROMPT_CHUNK = 256  # LSA works on T x L rows: a long prompt is remembered this many tokens at a time


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
    use_cross_attention: bool = True  # without: the drafter reads its own guesses, as EAGLE does
    draft_vocabulary: tuple[int, ...] | None = None  # ids the drafter may propose; None: all

    @classmethod
    def sized_for(cls, target: Llama, **choices) -> "DrafterConfig":
        """The paper's proportions: for Llama-3-8B as in its table, for another target as near to that as heads divide."""
        c = target.config
        heads, lsa_kv_heads, kv_width = c.num_attention_heads, c.num_key_value_heads, 2 * c.num_key_value_heads * c.head_dim
        lsa_heads = next((n for n in range(heads, 0, -1) if n % lsa_kv_heads == 0 and kv_width // n % 2 == 0), heads)
        kv_heads = next(n for n in range(max(1, heads // 8), 0, -1) if heads % n == 0)
        sizes = dict(
            num_attention_heads=heads,
            layer_self_attention_num_attention_heads=lsa_heads,
            layer_self_attention_num_key_value_heads=lsa_kv_heads,
            layer_self_attention_intermediate_size=3 * kv_width // 2,
            self_attention_num_key_value_heads=kv_heads,
            self_attention_intermediate_size=3 * c.hidden_size // 2,
            cross_attention_num_key_value_heads=kv_heads,
            cross_attention_intermediate_size=3 * c.hidden_size // 2,
            rms_norm_eps=c.rms_norm_eps, rope_theta=c.rope_theta)
        return cls(**{**sizes, **choices})


@dataclass
class Memory:
    """What the target's side tells the drafter of T newly verified tokens: of their memories, what CA makes of them."""

    tokens: list[int]
    cross_kv: Tensor | None = None  # CA's keys and values of their memories, (1, Hkv, T, 2D); without CA the memories (1, T, E)
    reused_kv: Tensor | None = None  # the target's own in its last N layers, (N, 1, Hkv, T, 2D): a view, read it at once


@dataclass(frozen=True)
class Shape:
    """How large a draft may grow. A chain is a tree of breadth 1.

    A token is proposed if the drafter gives its whole path a probability of at least `token_threshold`; above temperature
    0 as many are drawn as would pass. A level is the last one if the paths that would be expanded next have probabilities
    that add up to less than `level_threshold`. speculate.py sets both so that a draft ends where more of it would not pay.
    """

    depth: int
    breadth: int = 1  # leaves that are expanded together
    nodes: int = 8  # tokens of a tree, if it is not a chain
    token_threshold: float = 0.0
    level_threshold: float = 0.0
    coarse: bool = False  # drawn from a q of 64 tokens in 8 bits each, which can be sent: `to_coarse`

    def room(self, drafted: int, temperature: float) -> int:
        """How many tokens the next level may have. At temperature 0 a whole tree's: `draft` keeps the best in the end."""
        if self.breadth == 1:
            return 1
        return self.nodes if temperature == 0 else min(-(-self.nodes // self.depth), self.nodes - drafted)


@dataclass
class Draft:
    """What the drafter proposes to follow `token`, the newest the target has said: a tree, parents before children."""

    token: int
    tokens: list[int]  # K
    parents: list[int]  # the index in tokens that each follows, -1 for `token`; siblings in the order they were drawn
    q: Tensor | None = None  # what each parent's children were drawn from, parents in order, (F, V); None: not drawn

    def depths(self) -> list[int]:
        """Of `token`, which is 0, and of every draft: K + 1."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent + 1] + 1)
        return depths

    def is_chain(self) -> bool:
        return self.parents == chain_parents(len(self.parents))

    def behind(self, tokens: list[int]) -> "Draft":
        """What is left of it once these tokens have turned out to follow `token`: the tree behind them, if they are in it."""
        path = walk(self.parents, self.tokens, tokens)
        if len(path) < len(tokens):
            return Draft(tokens[-1], [], [])
        index = {path[-1] if path else -1: -1}  # of a node among those that are left
        for node, parent in enumerate(self.parents):
            if parent in index:
                index[node] = len(index) - 1
        left = list(index)[1:]
        families = [row for row, parent in enumerate(sorted(set(self.parents))) if parent in index]
        return Draft(([self.token] + tokens)[-1], [self.tokens[node] for node in left],
                     [index[self.parents[node]] for node in left], None if self.q is None else self.q[families])

    def first_path(self) -> list[int]:
        """Tokens of the path that the drafter itself would take: at temperature 0 likeliest first, else as drawn."""
        path, node = [], -1
        while node in self.parents:
            node = self.parents.index(node)
            path.append(self.tokens[node])
        return path


def chain_parents(count: int) -> list[int]:
    """Of a chain: each token follows the one before it, the first follows the root, -1."""
    return list(range(-1, count - 1))


def walk(parents: list[int], nodes: list[int], tokens: list[int]) -> list[int]:
    """Follow these tokens down a tree, as far as it has them: the indices of the nodes on the way."""
    path, child = [], {(parent, node): i for i, (parent, node) in enumerate(zip(parents, nodes))}
    for token in tokens:
        i = child.get((path[-1] if path else -1, token))
        if i is None:
            break
        path.append(i)
    return path


def ancestor_mask(parents: list[int]) -> Tensor:
    """(n, n) bool: each node sees itself and its ancestors. Parents come before children; a root's is -1."""
    rows: list[list[bool]] = []
    for i, parent in enumerate(parents):
        rows.append(list(rows[parent]) if parent >= 0 else [False] * len(parents))
        rows[i][i] = True
    return torch.tensor(rows)


class Drafter(nn.Module):
    """M_Small. Trainable: LSA, the projection, SA, CA. The rest belongs to the target and is frozen."""

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__()
        c, t = config, target.config
        if not 0 <= c.target_layer_inference <= t.num_hidden_layers:
            raise InputError(f"target_layer_inference is {c.target_layer_inference}, but the target has "
                             f"{t.num_hidden_layers} layers")
        self.config = config
        self.N = c.target_layer_inference
        kv_width, width = 2 * t.num_key_value_heads * t.head_dim, t.hidden_size  # 2 Ekv, E
        head_dim, lsa_head_dim = width // c.num_attention_heads, kv_width // c.layer_self_attention_num_attention_heads
        for name, heads, kv_heads, size in (
                ("SA", c.num_attention_heads, c.self_attention_num_key_value_heads, head_dim),
                ("CA", c.num_attention_heads, c.cross_attention_num_key_value_heads, head_dim),
                ("LSA", c.layer_self_attention_num_attention_heads, c.layer_self_attention_num_key_value_heads, lsa_head_dim)):
            if kv_heads < 1 or heads % kv_heads or size < 2 or size % 2:
                raise InputError(f"{name} cannot have {heads} heads of size {size} over {kv_heads} kv heads: the size must "
                                 "be even and the heads a multiple of the kv heads")
        self.self_attention = DecoderLayer(width, c.self_attention_intermediate_size, c.num_attention_heads,
                                           c.self_attention_num_key_value_heads, head_dim, c.rms_norm_eps)
        self.cross_attention = DecoderLayer(width, c.cross_attention_intermediate_size, c.num_attention_heads,
                                            c.cross_attention_num_key_value_heads, head_dim, c.rms_norm_eps)
        if c.use_layer_self_attention:
            self.layer_self_attention = DecoderLayer(
                kv_width, c.layer_self_attention_intermediate_size, c.layer_self_attention_num_attention_heads,
                c.layer_self_attention_num_key_value_heads, lsa_head_dim, c.rms_norm_eps)
        self.Ekv2E = nn.Linear(kv_width if c.use_layer_self_attention else width, width)

        self.captured_step = self.captured_cross_kv = None  # see `capture`

        # The target and, of its LM head, the rows in use: in a tuple, or they would become ours to train and save.
        head, vocabulary, device = target.lm_head, None, target.device
        if c.draft_vocabulary is not None:
            vocabulary = torch.tensor(c.draft_vocabulary, device=device)
            head = Linear(width, len(vocabulary))
            head.weight = nn.Parameter(target.lm_head.weight[vocabulary], requires_grad=False)
        self._frozen = target, head
        self.register_buffer("vocabulary", vocabulary, persistent=False)

        # Derived, never saved: rotary tables (LSA's positions are the layers).
        table = rotary_table(t.max_position_embeddings, head_dim, c.rope_theta, device)
        self.register_buffer("rotary", table, persistent=False)
        if c.use_layer_self_attention:
            table = rotary_table(t.num_hidden_layers, lsa_head_dim, c.rope_theta, device)
            self.register_buffer("layer_rotary", table, persistent=False)

    @property
    def target(self) -> Llama:
        return self._frozen[0]

    @property
    def head(self) -> Linear:
        """The target's LM head, (V, E), or its rows that may be drafted."""
        return self._frozen[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.Ekv2E.weight.dtype

    def logits(self, features: Tensor) -> Tensor:
        """Frozen LM head, (..., E) -> (..., V), or one logit for each token of the draft vocabulary."""
        return self.head(features.to(self.head.dtype))

    def token(self, choice: int) -> int:
        """The id of a token by its place in the draft vocabulary."""
        return choice if self.vocabulary is None else self.config.draft_vocabulary[choice]

    def spread(self, q: Tensor) -> Tensor:
        """From probabilities over the draft vocabulary to ones over all tokens, (..., V)."""
        if self.vocabulary is None:
            return q
        return q.new_zeros(*q.shape[:-1], self.target.config.vocab_size).index_copy_(-1, self.vocabulary, q)

    def lighten(self) -> "Drafter":
        """In bfloat16 instead of float32, where the CPU multiplies in it. The target stays as it is.

        A guess need not be exact; q only has to be what drafts are drawn from. After a pass of the target has swept the
        CPU's cache, half the bytes come back in half the time, and a small drafter's then stay for the steps that follow.
        """
        if can_pack(self.Ekv2E.weight) and self.dtype == torch.float32 and torch.cpu._is_avx512_bf16_supported():
            for weight in (*self.parameters(), *(() if self.vocabulary is None else self.head.parameters())):
                weight.data = weight.data.bfloat16()
            if self.config.use_layer_self_attention:  # SA's and CA's tables stay exact: theirs are positions of long texts
                self.layer_rotary = self.layer_rotary.bfloat16()
        return self

    def pack(self) -> "Drafter":
        """As `Llama.pack`. A drafter is made before its target is packed, while rows of the LM head can still be read."""
        if can_pack(self.Ekv2E.weight):
            self.self_attention.pack()
            if self.config.use_cross_attention:
                self.cross_attention.pack_cross()
            else:
                self.cross_attention.pack()
            if self.config.use_layer_self_attention:
                self.layer_self_attention.pack()
            if self.vocabulary is not None:
                self.head.pack()
        return self

    def capture(self) -> "Drafter":
        """As `Llama.capture`: SA and CA of a step, and `cross_kv`. Not the N reused layers, and without CA nothing."""
        if self.config.use_cross_attention:
            self.captured_step = captured(self.fixed_step, self.target.device)
            self.captured_cross_kv = captured(self.cross_kv, self.target.device)
        return self

    def fixed_step(self, tokens: Tensor, ancestors: Tensor, counts: Tensor, self_slot: Tensor, cross_slot: Tensor) -> Tensor:
        """What `Drafting.replay` captures: tokens (1, T), ancestors (T, 64) -> (1, T, E).

        counts (3): where the ancestors' positions start, how many SA's cache has in use, and how many CA's.
        """
        start, written, verified = counts
        size, rope = self_slot.shape[2], fixed_rope(self.rotary, start, ancestors)
        x = self.target.embed_tokens(tokens).to(self.dtype)
        x = self.self_attention(x, rope, fixed_mask(start, ancestors, size), partial(fixed_append, self_slot, written))
        known = torch.arange(size, device=x.device) < verified
        return self.cross_attention.attend(x, cross_slot, rope, known.expand(x.shape[1], -1))

    def memory(self, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """LSA, mean, projection: kv (B, T, L, 2 Ekv) -> (B, T, E). Without LSA: a projection of hidden (B, T, E)."""
        return self.Ekv2E(self.pool(kv, hidden))

    def pool(self, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """What is projected: LSA's mean over layers (B, T, 2 Ekv), or hidden."""
        if not self.config.use_layer_self_attention:
            return hidden.to(self.dtype)
        x = kv.to(self.dtype).flatten(0, 1)  # (B T, L, 2 Ekv): each token's layers are a sequence of their own
        return self.layer_self_attention(x, self.layer_rotary).mean(dim=1).unflatten(0, kv.shape[:2])

    # The training forward ---------------------------------------------------------------------------------------

    def features(self, tokens: Tensor, kv: Tensor, horizon: Tensor, hidden: Tensor | None = None) -> Tensor:
        """What the LM head is applied to, at every position in one pass, (B, T, E).

        tokens (B, T); kv (B, T, L, 2 Ekv) as in the target's cache; horizon (B, T): the last position whose memory
        query i may read, -1 for none; hidden (B, T, E), the target's final hidden states, which are needed without LSA only
        and then made anew if they are not given.
        """
        if hidden is None and not self.config.use_layer_self_attention:
            with torch.no_grad():
                hidden = self.target.hidden(tokens)
        return self(tokens, self.memory(kv, hidden), kv, horizon[None])[1][0]

    def forward(self, tokens: Tensor, memory: Tensor, kv: Tensor | None, horizons: Tensor) -> tuple[Tensor, Tensor]:
        """CA's guesses and the features, what the LM head is applied to: both (R, B, T, E). SA is paid for once.

        tokens (B, T), memory (B, T, E); horizons (R, B, T) and, needed for N > 0 only, kv as in `features`.
        """
        x = self.self_attend(tokens)
        guesses = [self.cross_attend(x, memory, horizon) for horizon in horizons]
        features = [self.infer_target_layers(guess, kv, horizon) for guess, horizon in zip(guesses, horizons)]
        return torch.stack(guesses), torch.stack(features)

    def self_attend(self, tokens: Tensor) -> Tensor:
        """SA: (B, T) -> (B, T, E)."""
        x, count = self.target.embed_tokens(tokens).to(self.dtype), tokens.shape[1]
        return self.self_attention(x, self.rotary[:, :count], causal_mask(count, count, x.device))

    def cross_attend(self, x: Tensor, memory: Tensor, horizon: Tensor) -> Tensor:
        """CA: SA's output x (B, T, E) asks memory (B, T, E) up to horizon (B, T) -> guessed hidden states (B, T, E).

        Without CA the horizon has no effect: each position is given the true memory of the one before it, which is the
        off-policy training that CA was invented to replace.
        """
        count = x.shape[1]
        rope = self.rotary[:, :count]
        if not self.config.use_cross_attention:
            previous = torch.cat([torch.zeros_like(memory[:, :1]), memory[:, :-1]], dim=1)
            return self.cross_attention(x + previous, rope, causal_mask(count, count, x.device))
        position = torch.arange(count, device=x.device)
        mask = (position <= horizon.unsqueeze(-1)).unsqueeze(1)  # (B, 1, T, T)
        return self.cross_attention.attend(x, self.cross_attention.keys_values(memory, rope), rope, mask)

    def infer_target_layers(self, x: Tensor, kv: Tensor, horizon: Tensor) -> Tensor:
        """TLI: the target's last N layers and final norm on guessed states x (B, T, E).

        Query i attends to the target's own keys and values up to its horizon and to the drafter's after it, which is
        what the caches hold at that moment of drafting.
        """
        if self.N == 0:
            return x
        count, target = x.shape[1], self.target
        rope, position = target.rope(0, count), torch.arange(count, device=x.device)
        known = position <= horizon.unsqueeze(-1)  # (B, T, T)
        guessed = ~known & (position <= position.unsqueeze(-1))  # (B, T, T)
        mask = torch.cat([known, guessed], dim=-1).unsqueeze(1)  # (B, 1, T, 2T)
        heads = target.config.num_key_value_heads
        for i in range(len(target.layers) - self.N, len(target.layers)):
            theirs = kv[:, :, i].unflatten(-1, (heads, -1)).transpose(1, 2).to(x.dtype)  # (B, Hkv, T, 2D)
            ours = target.layers[i].keys_values(x, rope)
            x = target.layers[i].attend(x, torch.cat([theirs, ours], dim=2), rope, mask)
        return target.norm(x)

    # The target's side of a cycle -------------------------------------------------------------------------------

    def remember(self, tokens: list[int], cache: KVCache, start: int, hidden: Tensor) -> Memory:
        """Memory of newly verified tokens, which lie in the target's cache from position `start` on.

        hidden (1, T or more, E) begins with their final hidden states, which only a drafter without LSA reads.
        """
        states, end = [], start + len(tokens)
        for a in range(start, end, PROMPT_CHUNK):
            b = min(a + PROMPT_CHUNK, end)
            parts = cache.read(a, b), hidden[:, a - start:b - start], self.rotary[:, a:b]
            if self.captured_cross_kv and b - a <= SIZES[-1]:
                states.append(self.captured_cross_kv(*map(pad, parts)).narrow(-2, 0, b - a))
            else:
                states.append(self.cross_kv(*parts))
        first = len(self.target.layers) - self.N
        return Memory(tokens, torch.cat(states, dim=-2), cache.kv[first:, :, :, start:end])

    def cross_kv(self, kv: Tensor, hidden: Tensor, rope: Tensor) -> Tensor:
        """As in Memory, of tokens with these keys and values (1, T, L, 2 Ekv), hidden states (1, T, E), angles (2, T, D)."""
        memory = self.memory(kv, hidden)
        return self.cross_attention.keys_values(memory, rope) if self.config.use_cross_attention else memory

    def start(self, capacity: int) -> "Drafting":
        """A drafter's side of one conversation of at most `capacity` tokens."""
        return (Drafting if self.config.use_cross_attention else OffPolicyDrafting)(self, capacity)


def to_coarse(q: Tensor) -> tuple[Tensor, Tensor]:
    """Each q (F, V) as its 64 likeliest ids, int32, and their weights, uint8, of which the largest is 255; both (F, 64)."""
    likely, ids = q.topk(min(COARSE_TOKENS, q.shape[-1]))
    return ids.int(), (255 * likely / likely[..., :1]).round().to(torch.uint8)


def from_coarse(ids: Tensor, counts: Tensor, vocab_size: int) -> Tensor:
    """The distribution (F, V) that has these counts: the same floats wherever it is made."""
    q = counts.float() / counts.sum(-1, keepdim=True)
    return q.new_zeros(*q.shape[:-1], vocab_size).scatter_(-1, ids.long(), q)


def children(q: Tensor, leaf_values: list[float], room: int, threshold: float, temperature: float,
             generator: torch.Generator | None) -> list[tuple[int, int, float]]:
    """Up to `room` children of a level's leaves as (leaf, choice, value), by leaf and in order. q (leaves, V).

    A child's value is its probability times its leaf's (EAGLE-2). At temperature 0 a leaf proposes its likeliest
    tokens. Above it as many are drawn from q instead, without replacement: in the order in which they finish a race.
    """
    likely, choice = q.topk(min(room, q.shape[-1]))  # (leaves, room)
    drawn = likely
    if temperature > 0:
        choice = race(q, generator).topk(choice.shape[1]).indices
        drawn = q.gather(-1, choice)
    # All that is read back of a level, at once: a device is waited for as often as it is asked. Ids are exact as floats.
    likely, choice, drawn = torch.stack([likely, choice.to(q), drawn]).tolist()  # each leaves x room
    best = sorted((-p * leaf_values[leaf], leaf, rank) for leaf, row in enumerate(likely) for rank, p in enumerate(row)
                  if p > LEAST and p * leaf_values[leaf] >= threshold)[:room]
    return [(leaf, int(choice[leaf][rank]), drawn[leaf][rank] * leaf_values[leaf])
            for _, leaf, rank in sorted(best, key=lambda child: child[1:])]


class Drafting:
    """The state of one conversation, in three caches:

        self_cache    SA: verified tokens except those in `unread`, then drafts, of which the accepted stay
        cross_cache   CA: memories of verified tokens and nothing else (without CA: see OffPolicyDrafting)
        reused_cache  TLI: the target's own keys and values of verified tokens, then the drafter's of drafts, which go
    """

    def __init__(self, drafter: Drafter, capacity: int):
        c, target = drafter.config, drafter.target
        head_dim, device = target.config.hidden_size // c.num_attention_heads, target.device
        self.drafter = drafter
        kind = FixedCache if drafter.captured_step else KVCache
        self.self_cache = kind(1, 1, c.self_attention_num_key_value_heads, capacity, head_dim, device, drafter.dtype)
        self.cross_cache = kind(1, 1, c.cross_attention_num_key_value_heads, capacity, head_dim, device, drafter.dtype)
        self.reused_cache = KVCache(drafter.N, 1, target.config.num_key_value_heads, capacity, target.config.head_dim,
                                    device, target.embed_tokens.weight.dtype)
        self.verified = 0  # tokens that have a memory
        self.unread: list[int] = []  # verified tokens that SA has not read yet
        self.expanded: list[int] = []  # tokens in the caches behind the verified: the target's newest, then drafts of drafts
        self.expanded_parents: list[int] = []  # of each, the index in `expanded` of the token before it, -1 for the first
        self.assumed = 0  # how many of these count as verified, see `assume`: 0 unless the target is a remote one

    def observe(self, memory: Memory) -> None:
        """Take in newly verified tokens. Costs time in these alone: SA's work on accepted drafts is kept."""
        path = walk(self.expanded_parents, self.expanded, memory.tokens)
        self.self_cache.keep(self.self_cache.length - len(self.expanded), path)
        self.unread += memory.tokens[len(path):]
        self.expanded, self.expanded_parents, self.assumed = [], [], 0
        self.append_states(memory.cross_kv)
        self.reused_cache.truncate(self.verified)
        for layer, kv in enumerate(memory.reused_kv):
            self.reused_cache.append(layer, kv)
        self.reused_cache.advance(len(memory.tokens))
        self.verified += len(memory.tokens)

    def assume(self, tokens: list[int]) -> None:
        """Go on behind these tokens as if they were verified; CA reads no more than the memory that has come.

        tokens: the one that was drafted from, then drafts on a path behind it. Costs nothing for those that were expanded.
        """
        path = walk(self.expanded_parents, self.expanded, self.expanded[:self.assumed] + tokens)
        unexpanded = tokens[len(path) - self.assumed:]
        self.keep(path)
        self.expanded, self.expanded_parents = [self.expanded[i] for i in path], chain_parents(len(path))
        for token in unexpanded:
            self.step([token], [len(self.expanded) - 1])
        self.assumed = len(self.expanded)

    def keep(self, path: list[int]) -> None:
        """Of what is in the caches behind the verified tokens, keep this path."""
        self.self_cache.keep(self.self_cache.length - len(self.expanded), path)
        if self.drafter.N > 0:
            self.reused_cache.keep(self.verified, path)

    def append_states(self, states: Tensor) -> None:
        self.cross_cache.append(0, states)
        self.cross_cache.advance(states.shape[2])

    def draft(self, token: int, shape: Shape, temperature: float = 0.0, top_p: float = 1.0,
              generator: torch.Generator | None = None) -> Draft:
        """A draft to follow `token`, grown level by level: EAGLE-2's dynamic tree (Li et al. 2024).

        A node's value is the product of the drafter's probabilities on its path. The best leaves of a level are expanded
        together, and at temperature 0 the best nodes overall are kept. Above it a token once drawn is always proposed, or
        its q would not be the distribution it came from: a level's size is settled before it is drawn.
        """
        tokens, parents, values, qs = [token], [-1], [1.0], []  # node 0 is `token`
        leaves, row = [0], {-1: len(self.expanded) - 1}  # row: a node's index in self.expanded, once it is there
        for _ in range(shape.depth):
            features = self.step([tokens[i] for i in leaves], [row[parents[i]] for i in leaves])  # (leaves, E)
            row.update({leaf: len(self.expanded) - len(leaves) + i for i, leaf in enumerate(leaves)})
            q = probabilities(self.drafter.logits(features), temperature or 1.0, top_p if temperature > 0 else 1.0)
            if shape.coarse and temperature > 0:
                q = from_coarse(*to_coarse(q), q.shape[-1])
            room = shape.room(len(tokens) - 1, temperature)
            leaf_values = [values[i] for i in leaves]
            level = children(q, leaf_values, room, shape.token_threshold, temperature, generator) if room else []
            if not level:
                break
            if temperature > 0:
                qs.append(q[sorted({leaf for leaf, _, _ in level})])
            start = len(tokens)
            for leaf, choice, value in level:
                tokens.append(self.drafter.token(choice))
                parents.append(leaves[leaf])
                values.append(value)
            leaves = sorted(sorted(range(start, len(tokens)), key=lambda i: -values[i])[:shape.breadth])
            if sum(values[i] for i in leaves) < shape.level_threshold:
                break
        kept = range(1, len(tokens))
        if temperature == 0 and shape.breadth > 1:
            kept = sorted(sorted(kept, key=lambda i: -values[i])[:shape.nodes])  # never a node without its parent
        index = {0: -1, **{node: i for i, node in enumerate(kept)}}
        q = self.drafter.spread(torch.cat(qs)) if temperature > 0 and qs else None
        return Draft(token, [tokens[i] for i in kept], [index[parents[i]] for i in kept], q)

    def step(self, tokens: list[int], parents: list[int]) -> Tensor:
        """SA, CA and TLI on the tokens of one level, all at the same position: features (T, E).

        parents index self.expanded; behind the last verified token it is -1. What SA reads, and what of it a token sees:

            verified, in the cache | verified, unread until now | assumed | drafted before | this level
            all                    | all                        | all     | its ancestors  | itself
        """
        drafter, cache = self.drafter, self.self_cache
        unread, self.unread = self.unread, []
        assert not unread or len(tokens) == 1  # verified tokens are read by a cycle's first step, which is of one token
        self.expanded += tokens
        self.expanded_parents += parents
        prefix = self.verified + self.assumed
        ancestors = ancestor_mask([max(i - self.assumed, -1) for i in self.expanded_parents[self.assumed:]])[-len(tokens):]
        tree_mask = None if ancestors.all() else F.pad(ancestors, (prefix, 0), value=True).to(cache.kv.device)
        position = prefix + int(ancestors[0].sum()) - 1  # of all these tokens: what they all see + their depth
        rows = torch.tensor([unread + tokens], device=cache.kv.device)  # (1, unread + T)
        if isinstance(cache, FixedCache) and max(rows.shape[1], ancestors.shape[1]) <= SIZES[-1]:
            start = cache.length if unread else prefix
            x = self.replay(rows, ancestor_mask(chain_parents(rows.shape[1])) if unread else ancestors, start)[:, -len(tokens):]
        else:
            rope = drafter.rotary[:, position - len(unread):position + 1]
            x = drafter.target.embed_tokens(rows).to(drafter.dtype)
            self_mask = causal_mask(len(unread) + 1, position + 1, x.device) if unread else tree_mask
            x = drafter.self_attention(x, rope, self_mask, partial(cache.append, 0))  # (1, unread + T, E)
            x = self.cross_attend(x, rope, self_mask, parents)  # (1, T, E)
        cache.advance(rows.shape[1])
        return self.infer_target_layers(x, position, tree_mask)[0]

    def replay(self, rows: Tensor, ancestors: Tensor, start: int) -> Tensor:
        """SA and CA by a captured step, (1, T) -> (1, T, E). ancestors (T, W): what each sees of the W from `start` on."""
        counts = torch.tensor([start, self.self_cache.length, self.verified], device=rows.device)
        return self.drafter.captured_step(pad(rows), pad_ancestors(ancestors, rows.device), counts,
                                          *self.self_cache.slots, *self.cross_cache.slots)[:, :rows.shape[1]]

    def cross_attend(self, x: Tensor, rope: Tensor, mask: Tensor | str | None, parents: list[int]) -> Tensor:
        """CA of the newest tokens, (1, T, E)."""
        kv = self.cross_cache.kv[0, :, :, :self.verified]  # (1, Hkv, S, 2D)
        return self.drafter.cross_attention.attend(x[:, -len(parents):], kv, rope[:, -1:])

    def infer_target_layers(self, x: Tensor, position: int, mask: Tensor | None) -> Tensor:
        if self.drafter.N == 0:
            return x
        target, cache = self.drafter.target, self.reused_cache
        first, rope = len(target.layers) - self.drafter.N, target.rope(position, position + 1)
        x = x.to(target.norm.weight.dtype)
        for n in range(self.drafter.N):
            x = target.layers[first + n](x, rope, mask, partial(cache.append, n))
        cache.advance(x.shape[1])
        return target.norm(x)


class OffPolicyDrafting(Drafting):
    """Drafting without CA: a causal layer over SA's output plus the memory of the token before.

    A drafted token has no memory; what its parent's features would give stands in. Accepted tokens are read again once their
    true memories are there, as EAGLE does. LSA's memory cannot be had from features: with LSA they stand in themselves,
    which training has not seen, so that this ablation makes CA look better than it is.
    """

    def __init__(self, drafter: Drafter, capacity: int):
        super().__init__(drafter, capacity)
        self.previous = torch.zeros(1, 1, drafter.target.config.hidden_size, dtype=drafter.dtype,
                                    device=self.self_cache.kv.device)  # (1, unread + 1, E), what the next tokens read
        self.substitutes: list[Tensor] = []  # for the memory of each token in drafted, (1, 1, E)

    def observe(self, memory: Memory) -> None:
        self.self_cache.truncate(self.self_cache.length - len(self.expanded))
        self.cross_cache.truncate(self.self_cache.length)
        self.expanded, self.expanded_parents, self.substitutes = [], [], []
        super().observe(memory)

    def keep(self, path: list[int]) -> None:
        super().keep(path)
        self.cross_cache.keep(self.cross_cache.length - len(self.expanded), path)
        self.substitutes = [self.substitutes[i] for i in path]

    def append_states(self, states: Tensor) -> None:
        self.previous = torch.cat([self.previous, states], dim=1)

    def cross_attend(self, x: Tensor, rope: Tensor, mask: Tensor | str | None, parents: list[int]) -> Tensor:
        if parents == [-1]:
            previous, self.previous = self.previous, self.previous[:, -1:]
        else:
            previous = torch.cat([self.substitutes[i] for i in parents], dim=1)
        x = self.drafter.cross_attention(x + previous, rope, mask, partial(self.cross_cache.append, 0))
        self.cross_cache.advance(x.shape[1])
        return x[:, -len(parents):]

    def infer_target_layers(self, x: Tensor, position: int, mask: Tensor | None) -> Tensor:
        features = super().infer_target_layers(x, position, mask)
        states = features.to(self.drafter.dtype)
        if not self.drafter.config.use_layer_self_attention:
            states = self.drafter.Ekv2E(states)
        self.substitutes += states.split(1, dim=1)
        return features


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints, in the authors' names and shapes
# ---------------------------------------------------------------------------------------------------------------------

def load_drafter(path: str | Path, target: Llama) -> Drafter:
    """The drafter of `target` from a folder with config.json and model.safetensors, on the target's device and dtype.

    Sizes that the config leaves out are read off the tensors. Raises InputError for anything missing or unfitting.
    """
    path = Path(path)
    if not path.is_dir():
        raise InputError(f"{path}: no such drafter; give a folder with config.json and model.safetensors")
    stated = read_config(path / "config.json")
    tensors = {name: read() for name, read in read_tensors(path / "model.safetensors")}
    t = target.config
    heads = stated.get("num_attention_heads", t.num_attention_heads)
    lsa_heads = stated.get("layer_self_attention_num_attention_heads", t.num_attention_heads)
    kv_width = 2 * t.num_key_value_heads * t.head_dim  # 2 Ekv
    for name, count, width in (("num_attention_heads", heads, t.hidden_size),
                               ("layer_self_attention_num_attention_heads", lsa_heads, kv_width)):
        if not 0 < count <= width:
            raise InputError(f"{path}: {name} is {count}, which does not fit the target's width of {width}")
    head_dims = {"self_attention": t.hidden_size // heads, "cross_attention": t.hidden_size // heads,
                 "layer_self_attention": kv_width // lsa_heads}
    sizes = {}
    for block, head_dim in head_dims.items():
        key, gate = tensors.get(f"{block}.self_attn.k_proj.weight"), tensors.get(f"{block}.mlp.gate_proj.weight")
        sizes[f"{block}_num_key_value_heads"] = 1 if key is None else max(1, len(key) // head_dim)
        sizes[f"{block}_intermediate_size"] = 1 if gate is None else len(gate)
    if "draft_vocabulary" in stated:
        ids = stated["draft_vocabulary"] = tuple(stated["draft_vocabulary"])
        if not all(type(i) is int and 0 <= i < t.vocab_size for i in ids) or not 0 < len(ids) == len(set(ids)):
            raise InputError(f"{path}: draft_vocabulary is not a list of distinct ids below the target's {t.vocab_size}")
    config = DrafterConfig(**{
        "num_attention_heads": heads, "layer_self_attention_num_attention_heads": lsa_heads, **sizes,
        "rms_norm_eps": t.rms_norm_eps, "rope_theta": t.rope_theta, **stated})
    try:
        with torch.device("meta"):
            drafter = Drafter(target, config)
    except (InputError, RuntimeError) as error:  # RuntimeError: for sizes beyond all bounds
        raise InputError(f"{path}: {one_line(error)}") from None
    weight = target.embed_tokens.weight
    fill(drafter, iter(tensors.items()), path, weight.device, weight.dtype)
    if not all(parameter.isfinite().all() for parameter in drafter.parameters()):
        raise InputError(f"{path}: some of its weights are no numbers, so that it would draft nothing")
    return drafter.requires_grad_(False).eval()


def read_config(path: Path) -> dict:
    """What a drafter's config.json states of DrafterConfig. Raises InputError for values that make no sense."""
    raw, stated = read_json(path), {}
    for field in fields(DrafterConfig):
        value = raw.get(field.name)
        if value is None:
            continue
        kind = {int: int, float: (int, float), bool: bool}.get(field.type, list)
        if not isinstance(value, kind) or (field.type is int and value < 0) or (
                field.type is float and not 0 < value < math.inf):
            raise InputError(f"{path}: {field.name} cannot be {str(value)[:40]!r}")
        stated[field.name] = value
    return stated


def save_drafter(drafter: Drafter, path: str | Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json and model.safetensors; whoever reads meanwhile finds the old files or the new ones, whole."""
    path, t = Path(path), drafter.target.config
    path.mkdir(parents=True, exist_ok=True)
    config = {**asdict(drafter.config), "hidden_size": t.hidden_size, "vocab_size": t.vocab_size,
              "kv_hidden_size": 2 * t.num_key_value_heads * t.head_dim}
    tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in drafter.named_parameters()}
    with written_whole(path / "config.json") as stated, written_whole(path / "model.safetensors") as weights:
        stated.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        save_file(tensors, weights, metadata={"format": "pt"})
