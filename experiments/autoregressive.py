"""Drafters that read one vector for the token before each, as EAGLE's does. So they run step by
step, in training too.

Number the tokens as in moa.py, with the root t as the newest one. Let v_j be the vector that is
read of token j. Then the drafter computes a_i, which predicts token i + 1, from

    the embeddings e_0, ..., e_i, and of each token the vector of the one before it:
        v_j for a verified token j          made of the target's states
        a_j for the root and drafted ones   what the drafter has just computed there

A draft takes as many steps as it has tokens. `unroll` takes these steps for all positions of a
text at once. In step s every query i is in a draft whose root is i - s. Its own token and those
before it, back to the root, belong to that draft. What they computed in steps s, s - 1, ..., 0 is
what query i attends to; before the root it attends to verified tokens. Here query 6 in step 2:

    position    0 1 2 3 4 5 6
    step 0      + + + + + . .      verified tokens 0 to 3, and the root 4
    step 1      . . . . . + .
    step 2      . . . . . . +

(This is EAGLE-3's "training-time test". Their code calls position i + s what is i here.)

Shapes: as in moa.py and train.py, and R states of the target that a drafter reads of a token.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.paper_family import InOneLayer, new_layer
from experiments.reading import Reading, StateReader
from llama import MLP, Attention, KVCache, Llama, RMSNorm, Sampling, causal_mask
from moa import CacheUpdate, Draft, DrafterConfig, empty_cache
from speculate import TreeSampler


class AutoregressiveDrafter(StateReader):
    """A drafter that reads one vector for the token before each."""

    reads_states = 0  # R
    layer_count = 1

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        del self.layer_self_attention, self.Ekv2E, self.cross_attention

    @property
    def dtype(self) -> torch.dtype:
        return next(self.self_attention.parameters()).dtype

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        frozen = ("target.", "lm_head.")
        parameters = dict(self.named_parameters())
        return {name: p for name, p in parameters.items() if not name.startswith(frozen)}

    def read_modules(self, target: Llama) -> list[nn.Module]:
        return []

    def states_of(self, reading: Reading) -> Tensor:
        batch, count = reading.tokens.shape
        return reading.final.new_zeros(batch, count, 0)

    def condense(self, states: Tensor) -> Tensor:
        return states.to(self.dtype)

    def update_of(self, tokens: list[int], vectors: Tensor, end: int) -> CacheUpdate:
        """Return the vectors themselves, in the place of CA's keys and values."""
        return CacheUpdate(tokens, vectors, vectors.new_empty(0))

    def run(
        self, embeddings: Tensor, before: Tensor, rope: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        """Run the layers on embeddings (B, T, E) and on the vectors of the tokens before (B, T, E).
        Returns a (B, T, E)."""
        raise NotImplementedError

    def feature(self, a: Tensor) -> Tensor:
        """Return what the LM head is applied to."""
        return a


class StepsCache(KVCache):
    """Keys and values of all positions, of each step so far: `append` returns those of step 0, then
    those of step 1, and so on."""

    def __init__(self, layers: int):
        self.steps = [[] for _ in range(layers)]

    def append(self, layer: int, kv: Tensor) -> Tensor:
        self.steps[layer].append(kv)
        return torch.cat(self.steps[layer], dim=2)


def steps_mask(count: int, step: int, device: torch.device) -> Tensor:
    """Return what each query sees in a step, (T, (step + 1) T): see the picture above."""
    query = torch.arange(count, device=device).unsqueeze(1)
    key = torch.arange(count, device=device)
    blocks = [key <= query - step]
    for earlier in range(1, step + 1):
        blocks.append(key == query - step + earlier)
    return torch.cat(blocks, dim=1)


def unroll(
    drafter: AutoregressiveDrafter,
    reading: Reading,
    steps: int,
    noise: Tensor | None = None,
    detached: bool = False,
) -> list[Tensor]:
    """Return a (B, T, E) of each step: in step s that of query i in a draft with root i - s. (Where
    i < s there is no such draft, and the numbers mean nothing.)

    noise (B, T, E): added to the vectors of verified tokens. detached: whether each step takes the
    vectors of the step before as given, so that no gradient flows back through them.
    """
    count = reading.tokens.shape[1]
    embeddings = drafter.embed(reading.tokens)
    vectors = drafter.condense(drafter.states_of(reading))
    if noise is not None:
        vectors = vectors + noise
    rope = drafter.rotary[:, :count]
    cache = StepsCache(drafter.layer_count)
    outputs = []
    for step in range(steps):
        mask = steps_mask(count, step, reading.tokens.device)
        a = drafter.run(embeddings, shift(vectors), rope, mask, cache)
        outputs.append(a)
        vectors = a.detach() if detached else a
    return outputs


def shift(vectors: Tensor) -> Tensor:
    """Return the vector of the token before each, and zeros at the first (B, T, E)."""
    return F.pad(vectors[:, :-1], (0, 0, 1, 0))


class WithSecondLayer:
    """Put before a class of drafters with one layer, this adds a second, plain one."""

    layer_count = 2

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        self.second = new_layer(self)

    def run(
        self, embeddings: Tensor, before: Tensor, rope: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        x = super().run(embeddings, before, rope, mask, cache)
        return self.second(x, rope, mask, cache, 1)


class OneLayerDrafter(AutoregressiveDrafter):
    """SA, which sees tokens and nothing else."""

    def condense(self, states: Tensor) -> Tensor:
        batch, count, _ = states.shape
        return torch.zeros(batch, count, 1, dtype=self.dtype, device=self.device)  # not used

    def run(
        self, embeddings: Tensor, before: Tensor, rope: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        return self.self_attention(embeddings, rope, mask, cache, 0)


class NoMemoryDrafter(WithSecondLayer, OneLayerDrafter):
    """SA and a plain layer, which see tokens and nothing else."""


class NoMemoryTwoAttentionsDrafter(InOneLayer, NoMemoryDrafter):
    """The same without SA's MLP: two attentions and one MLP, as the paper's drafter in one layer.
    """


class EagleDrafter(AutoregressiveDrafter):
    """EAGLE's: one decoder layer over M e + N v, where v is the target's final hidden state. As in
    EAGLE's code, that layer has no norm before its attention.

    EAGLE keeps M and N in one matrix. Here they are two, since Muon moves a matrix equally far in
    all directions. As v is some ten times as large as e, most of a step would go to N.
    """

    reads_states = 1

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        width = target.config.hidden_size
        self.join_embedding = nn.Linear(width, width, bias=False)  # M
        self.join_vector = nn.Linear(width, width, bias=False)  # N
        self.self_attention.input_layernorm = nn.Identity()

    def read_modules(self, target: Llama) -> list[nn.Module]:
        return [target.norm]

    def states_of(self, reading: Reading) -> Tensor:
        return reading.final

    def run(
        self, embeddings: Tensor, before: Tensor, rope: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        x = self.join_embedding(embeddings) + self.join_vector(before.to(embeddings.dtype))
        return self.self_attention(x, rope, mask, cache, 0)


class EagleTwoLayersDrafter(WithSecondLayer, EagleDrafter):
    """EAGLE's, with as many layers of attention as the paper's SA and CA."""


class WideLayer(nn.Module):
    """EAGLE-3's decoder layer: its attention reads embeddings and vectors side by side, 2 E wide,
    and what it finds is added to the vectors."""

    def __init__(
        self, width: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(width, eps)
        self.hidden_norm = RMSNorm(width, eps)
        self.self_attn = Attention(2 * width, heads, kv_heads, head_dim)
        self.self_attn.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, inner)

    def forward(
        self, embeddings: Tensor, before: Tensor, rope: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        pair = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(before)], dim=-1)
        q, kv = self.self_attn.queries_keys_values(pair, rope)
        x = before + self.self_attn(q, cache.append(0, kv), mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Drafter(AutoregressiveDrafter):
    """EAGLE-3's: v condenses the outputs of a low, a middle and a high layer of the target, and the
    LM head follows a norm of the drafter's own. (The head itself is the target's, as in all arms.
    EAGLE-3 trains one.)

    The three outputs are normalized first. EAGLE-3's code does not do this, EAGLE 3.1 does.
    Their root mean square is 10 to 22 with the toy and 3 to 21 with SmolLM2. Since v begins the sum
    to which attention and MLP add, without the norm these two were hardly heard at first.
    """

    reads_states = 3

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        width = target.config.hidden_size
        self.join = nn.Linear(3 * width, width, bias=False)
        self.self_attention = WideLayer(
            width,
            config.self_attention_intermediate_size,
            config.num_attention_heads,
            config.self_attention_num_key_value_heads,
            self.head_dim,
            config.rms_norm_eps,
        )
        self.norm = RMSNorm(width, config.rms_norm_eps)

    def chosen_layers(self, target: Llama) -> list[int]:
        """Return the numbers of the three layers whose outputs are read: of 32 layers those that
        EAGLE-3's code takes, 1, 15 and 28, and of fewer in proportion."""
        count = target.config.num_hidden_layers
        low = max(1, round(count / 16))
        high = count - max(1, round(3 * count / 32))
        return [low - 1, count // 2 - 1, high - 1]

    def read_modules(self, target: Llama) -> list[nn.Module]:
        return [target.layers[i] for i in self.chosen_layers(target)]

    def states_of(self, reading: Reading) -> Tensor:
        chosen = self.chosen_layers(self.target)
        return torch.cat([reading.states[i + 1] for i in chosen], dim=-1)

    def condense(self, states: Tensor) -> Tensor:
        each = states.to(self.dtype).unflatten(-1, (self.reads_states, -1))  # (B, T, 3, E)
        each = F.rms_norm(each, each.shape[-1:], eps=self.config.rms_norm_eps)
        return self.join(each.flatten(-2))

    def run(
        self, embeddings: Tensor, before: Tensor, rope: Tensor, mask: Tensor | None, cache: KVCache
    ) -> Tensor:
        return self.self_attention(embeddings, before, rope, mask, cache)

    def feature(self, a: Tensor) -> Tensor:
        return self.norm(a)


# --- While drafting ---


class AutoregressiveState(TreeSampler):
    """Drafts of the autoregressive family, with one cache, of the layers that it runs.

    Verified tokens have to pass through the layers, with the true vectors of the tokens before
    them. As in EAGLE's code they wait for the next root, and pass together with it.
    """

    def __init__(self, drafter: AutoregressiveDrafter, capacity: int, sampling: Sampling):
        super().__init__(drafter, capacity, sampling)
        kv_heads = drafter.config.self_attention_num_key_value_heads
        layers = drafter.layer_count
        self.self_cache = empty_cache(drafter, layers, kv_heads, capacity, drafter.head_dim)
        self.verified = 0  # tokens
        self.waiting: list[int] = []  # W tokens that are verified, but not in the cache yet
        # Of the tokens before those that wait and before the root: (1, W + 1, E).
        self.true_vectors: Tensor | None = None
        self.vectors: dict[int, Tensor] = {}  # by expanded node of the draft, (E)

    @property
    def text_length(self) -> int:
        return self.verified

    def append_verified(self, update: CacheUpdate) -> None:
        """Let newly verified tokens wait. update.ca_kv has their vectors (1, T, E)."""
        self.discard_draft()
        vectors = update.ca_kv
        if self.true_vectors is None:
            self.true_vectors = torch.zeros_like(vectors[:, :1])  # before the first token
        self.true_vectors = torch.cat([self.true_vectors, vectors], dim=1)
        self.waiting += update.tokens
        self.verified += len(update.tokens)

    def discard_draft(self) -> None:
        self.expanded = []
        self.vectors = {}
        self.self_cache.length = self.verified - len(self.waiting)

    def step(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Run the layers on the frontier. Returns what the LM head is applied to (F, E)."""
        self.expanded += frontier
        if frontier == [0]:
            a = self.run_with_waiting(draft.tokens[0])
        else:
            a = self.run_on_drafted(draft, frontier)
        self.vectors.update(zip(frontier, a[0]))
        return self.drafter.feature(a[0])

    def run_with_waiting(self, root: int) -> Tensor:
        """Run the layers on the tokens that wait, and on the root -> the root's a (1, 1, E)."""
        past = self.self_cache.length
        tokens = [*self.waiting, root]
        rope = self.drafter.rotary[:, past:past + len(tokens)]
        mask = causal_mask(len(tokens), past, device=self.drafter.device)
        a = self.drafter.run(self.embed(tokens), self.true_vectors, rope, mask, self.self_cache)
        self.self_cache.length += len(tokens)
        self.waiting = []
        self.true_vectors = self.true_vectors[:, -1:]
        return a[:, -1:]

    def run_on_drafted(self, draft: Draft, frontier: list[int]) -> Tensor:
        """Run the layers on drafted tokens of one level -> a (1, F, E)."""
        mask = self.frontier_mask(draft, frontier)  # (F, S)
        position = self.text_length + draft.depth(frontier[0])
        rope = self.drafter.rotary[:, position:position + 1]
        parents = [self.vectors[draft.parents[node]] for node in frontier]
        before = torch.stack(parents).unsqueeze(0)  # (1, F, E)
        embeddings = self.embed([draft.tokens[node] for node in frontier])
        a = self.drafter.run(embeddings, before, rope, mask, self.self_cache)
        self.self_cache.length += len(frontier)
        return a
