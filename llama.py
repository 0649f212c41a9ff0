"""The target: Llama-3 inference from scratch, for one conversation. In the paper it is M_Large.

A decoder layer adds to each token's vector x the outputs of attention and of an MLP:

    attention   y = RMSNorm(x);  q, k, v = projections of y, with q and k rotated by position
                x = x + o_proj(softmax(q k^T / sqrt(D)) v), where no token sees a later one
    MLP         y = RMSNorm(x)
                x = x + down_proj(silu(gate_proj(y)) * up_proj(y))

A token's keys k and values v never change once they are computed, so they are kept: the KV cache.
Thanks to the cache a new token costs one pass over that token alone. A later token sees an earlier
one only through the earlier token's keys and values, and the paper's drafter reads these same keys
and values. moa.py builds the drafter from the same `DecoderLayer`.

    python llama.py --prompt "Why is the sky blue?"     # the default target, fetched on first use

Read as far as the bar, the line that says where the method ends. The code after the bar makes the
method fast and usable: packed weights, checkpoints, the command line.

Shapes: B batch, T new tokens, S tokens in the cache including the new ones, L layers, E hidden
size, H heads, Hkv kv heads, D head size, V vocabulary. Ekv = Hkv * D is the width of one layer's
keys, and of its values.
"""
from __future__ import annotations

import plumbing.start  # first: no traceback for Ctrl-C or a missing package while PyTorch loads

import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from plumbing.devices import DTYPES, choose_dtype
from plumbing.errors import InputError, input_errors, run_command
from plumbing.flags import Parser, add_generation_arguments, add_model_arguments
from plumbing.gguf import read_gguf
from plumbing.hub import resolve_path
from plumbing.huggingface import load_weights, read_hugging_face
from plumbing.kernels import KEY_BLOCK, MIN_ROWS, AttentionLimits, probe_attention, probe_rows
from plumbing.onednn import can_multiply, packed_product, reorder_weight
from plumbing.prompts import answer_length, read_prompt
from plumbing.terminal import report, why_stopped
from plumbing.tokenizer import TextStream, Tokenizer, load_tokenizer

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
    # All defaults below are Llama-3's. They are for models without a checkpoint.
    rms_norm_eps: float = 1e-5
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
        weight = self.weight.to(x.dtype)  # in mixed precision x is bfloat16, the weight is float32
        return F.rms_norm(x, weight.shape, weight, self.eps)


def rotary_table(
    length: int, head_dim: int, theta: float, device, factors: tuple[float, ...] | None = None
) -> Tensor:
    """Return the cosines and signed sines that `rotate` needs for every position: (2, length, D).

    Rotary position embedding (Su et al. 2021): a pair of coordinates is a point in a plane, and is
    rotated by an angle proportional to its token's position. The product of a query and a key
    therefore depends on their positions only through the distance. Pair i has the frequency
    theta^(-2i / D). `factors` divide the frequencies, as in Llama-3.1, for long contexts.
    """
    exponents = torch.arange(0, head_dim, 2, device=device) / head_dim  # (D/2)
    frequencies = theta**-exponents
    if factors is not None:
        frequencies = frequencies / torch.tensor(factors, device=device)
    angles = torch.outer(torch.arange(length, device=device), frequencies)  # (length, D/2)
    cos = angles.cos()
    sin = angles.sin()
    return torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_{i+D/2}) by the angle of its position and frequency.

    x (..., T, D), rope (2, T, D). Su et al. pair neighbors, x_2i and x_{2i+1}. In Hugging Face's
    checkpoints the rows of q_proj and k_proj are reordered, so that pairs are half a head apart.

    A rotation by the angle a maps the pair (x, y) to (x cos a - y sin a, y cos a + x sin a). Each
    coordinate is multiplied by the cosine, and its partner by the sine. `sin` is negated in its
    first D/2 coordinates.
    """
    cos, sin = rope  # (T, D)
    x32 = x.float()
    partners = x32.roll(x.shape[-1] // 2, dims=-1)  # the partner of each coordinate
    return (x32 * cos + partners * sin).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023): several query heads share a kv head.

    Projecting and attending are separate methods, for two reasons. New keys and values are first
    written to a cache, and `forward` attends to everything the cache holds. Also, in the drafter's
    cross-attention (CA, in moa.py) the queries come from one sequence, and the keys and values from
    a different one.
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
        """Project x (B, T, E) to rotated keys and to values (B, Hkv, T, 2D).

        A token's key and value lie side by side, because the drafter reads both as one vector.
        """
        keys = rotate(self.split_heads(self.k_proj(x)), rope)  # (B, Hkv, T, D)
        values = self.split_heads(self.v_proj(x))  # (B, Hkv, T, D)
        return torch.cat([keys, values], dim=-1)

    def queries_keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Project the same x (B, T, E) to queries (B, H, T, D), and to keys and values
        (B, Hkv, T, 2D).

        `PackedAttention` (below the bar) overrides this method: it computes all three as one
        product, which is faster than three narrow ones.
        """
        return self.queries(x, rope), self.keys_values(x, rope)

    def forward(self, q: Tensor, kv: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend with queries q (B, H, T, D) to keys and values kv (B, Hkv, S, 2D) -> (B, T, E).

        mask (T, S) or (B, 1, T, S) is True where a query may attend. Without a mask every query
        attends to all keys.
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


class KeysValues(Protocol):
    """What a decoder layer needs of a cache. `KVCache` is one."""

    def append(self, layer: int, kv: Tensor) -> Tensor:
        """Take a layer's new keys and values (B, Hkv, T, 2D). Return those that the new tokens may
        attend to, old and new ones (B, Hkv, S, 2D)."""


class DecoderLayer(nn.Module):
    """A pre-norm Llama layer. The target is a stack of L such layers, and the drafter's LSA, SA and
    CA are built from the same layer."""

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
        cache: KeysValues | None = None,
        layer: int = 0,
    ) -> Tensor:
        """Run self-attention, then the MLP: x (B, T, E) -> (B, T, E).

        Without a mask every token sees all tokens. With a cache, x holds the new tokens only: their
        keys and values are appended to the cache's layer number `layer`, and they attend to
        everything that layer then holds.
        """
        q, kv = self.self_attn.queries_keys_values(self.input_layernorm(x), rope)
        if cache is not None:
            kv = cache.append(layer, kv)  # (B, Hkv, S, 2D)
        return self.feed_forward(x + self.self_attn(q, kv, mask))

    def keys_values(self, x: Tensor, rope: Tensor) -> Tensor:
        """Return only the keys and values (B, Hkv, T, 2D) of x (B, T, E), which a cache holds."""
        return self.self_attn.keys_values(self.input_layernorm(x), rope)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Run the second half of the layer, the MLP: x (B, T, E) -> (B, T, E)."""
        return x + self.mlp(self.post_attention_layernorm(x))


class KVCache:
    """The keys and values of all tokens so far, in every layer, so that no token is read twice.

    kv (L, B, Hkv, capacity, 2D). Each index along `capacity` is a *slot*; the first `length` slots
    are in use. In a text a token's slot is its position. In a draft, two alternatives share a
    position and have a slot each. B is 1 while generating. In training B is the size of the batch,
    whose sequences are padded to one length.

    In one pass all layers write to the same slots. `append` therefore leaves `length` as it is, and
    the code that runs the layers advances it once, after the last layer:

        for i, layer in enumerate(layers):
            x = layer(x, rope, mask, cache, i)  # calls cache.append(i, ...)
        cache.length += x.shape[1]
    """

    def __init__(self, kv: Tensor):
        self.kv = kv
        self.length = 0

    def append(self, layer: int, kv: Tensor) -> Tensor:
        """Write a layer's new keys and values (B, Hkv, T, 2D) to the slots from `length` on. Return
        the layer's old and new keys and values (B, Hkv, S, 2D). Raises ValueError if the cache is
        full."""
        end = self.length + kv.shape[2]
        if end > self.kv.shape[3]:
            raise ValueError(f"the cache has {self.kv.shape[3]} slots, too few for {end} tokens")
        self.kv[layer, :, :, self.length:end] = kv
        return self.kv[layer, :, :, :end]

    def by_token(self, start: int, end: int) -> Tensor:
        """Return the keys and values of the tokens in slots `start` to `end` (exclusive), token by
        token, as the drafter reads them: (B, T, L, 2 Ekv).

        The 2 Ekv numbers are in the order of the authors' code: key of head 0, value of head 0, key
        of head 1, and so on.
        """
        kv = self.kv[:, :, :, start:end]  # (L, B, Hkv, T, 2D)
        kv = kv.permute(1, 3, 0, 2, 4)  # (B, T, L, Hkv, 2D)
        return kv.flatten(3)

    def keep_path(self, start: int, path: list[int]) -> None:
        """Keep the tokens in slots start + i for i in `path`, packed together from `start` on. All
        other drafted tokens are dropped.

        After 10 tokens of text the path [0, 2, 5] keeps the tokens in slots 10, 12 and 15, and
        moves them to slots 10, 11 and 12. The keys need no new rotation: they were rotated by
        position, not by slot, and the three tokens had the positions 10, 11 and 12 from the
        beginning.
        """
        kept = [start + i for i in path]  # the slots to keep
        end = start + len(path)
        self.kv[:, :, :, start:end] = self.kv[:, :, :, kept]  # the right side is a copy
        self.length = end


def causal_mask(count: int, past: int, device) -> Tensor | None:
    """Return a mask (T, past + T) for T = `count` new tokens after the `past` tokens in the cache:
    each new token sees itself and all before it.

    Return None for a single new token, which sees everything. (PyTorch's `is_causal` would not do:
    it aligns the triangle top-left, ignoring `past`, so the first new token would see only the
    first token of the text.)
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
        # nn.Embedding(V, E) is the same, but takes a second on the meta device of `load_model`.
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
        self.requires_grad_(False)  # the target is frozen: only the drafter is trained
        table = rotary_table(
            length=config.max_position_embeddings,
            head_dim=config.head_dim,
            theta=config.rope_theta,
            device="cpu",  # not the meta device of `load_model`: the table is in no checkpoint
            factors=config.rope_factors,
        )
        self.register_buffer("rotary", table, persistent=False)  # (2, context, D)

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

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        """Return an empty cache with `capacity` slots, for `batch` sequences."""
        config = self.config
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
        """Return hidden states (B, T, E) after the final norm. They are the input of the LM head.

        tokens (B, T) follow the tokens in the cache, one after the other. If they branch, as a
        draft may, give both their positions (T) and a mask (T, S), True where a token sees a slot.
        If positions and mask differ between the rows of a batch, give (B, 1, T) and (B, 1, T, S).
        """
        assert (positions is None) == (mask is None), "give both positions and a mask, or neither"
        count = tokens.shape[1]
        past = cache.length if cache is not None else 0
        if positions is None:
            positions = torch.arange(past, past + count, device=self.device)
            mask = causal_mask(count, past, self.device)
        rope = self.rotary[:, positions]  # (2, T, D)
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
    """How the tokens of one answer are drawn. Target and drafter share one Sampling, and therefore
    one random generator. (A target on a server has a Sampling of its own.)"""

    temperature: float = 0.0  # 0: greedy, always the likeliest token
    top_p: float = 1.0
    generator: torch.Generator | None = None  # not needed at temperature 0: nothing is drawn


@dataclass(frozen=True)
class GenerationConfig:
    """The settings of one answer. `new_sampling` turns them into a Sampling, seeded.

    A target alone gives the same answer to the same prompt and config every time. With a drafter
    random numbers are drawn in a different order. Above temperature 0 the answer is therefore a
    different one, but it comes from the same distribution.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()

    def new_sampling(self, device) -> Sampling:
        """Return a Sampling whose random generator starts at the seed."""
        temperature = self.temperature
        if temperature < 1e-6:
            temperature = 0.0  # greedy: logits divided by 1e-40, say, would overflow
        generator = torch.Generator(device).manual_seed(self.seed)
        return Sampling(temperature, self.top_p, generator)


def probabilities(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """Return the distribution that tokens are drawn from: logits (..., V) -> float32 (..., V).

    The temperature must be above 0. With top_p below 1 (nucleus sampling, Holtzman et al. 2020)
    only the likeliest tokens are kept: the fewest that together reach top_p.
    """
    p = torch.softmax(logits.float() / temperature, dim=-1)
    if top_p < 1:
        p = p.masked_fill(p < nucleus_threshold(p, top_p), 0.0)
        p = p / p.sum(-1, keepdim=True)
    return p


def nucleus_threshold(p: Tensor, top_p: float) -> Tensor:
    """Return the probability (..., 1) of the least likely token in the nucleus of p (..., V).

    Order the tokens from the likeliest down. A token is in the nucleus if the tokens before it sum
    to less than top_p. For p = (0.5, 0.3, 0.1, 0.1) and top_p = 0.7 these sums are 0, 0.5, 0.8 and
    0.9: the first two tokens are in the nucleus, and the threshold is 0.3.

    (Tokens exactly as likely as the last one are also in the nucleus. Otherwise the order in which
    a sort puts equal numbers would decide, and in bfloat16 many probabilities are equal.)
    """
    # Sorting all of V would do, but usually a few tokens are enough, and they are found much
    # faster: try the 64 likeliest, then 1024, then all V.
    for count in (64, 1024, p.shape[-1]):
        descending = p.topk(min(count, p.shape[-1])).values  # (..., count)
        sums = descending.cumsum(-1)  # up to and including each token
        if (sums[..., -1] >= top_p).all():
            break
    # The last token of the nucleus is the first whose sum reaches top_p. Its index is therefore the
    # number of sums that are below top_p.
    last = (sums[..., :-1] < top_p).sum(-1, keepdim=True)
    return descending.gather(-1, last)


def sample(p: Tensor, generator: torch.Generator | None) -> int:
    """Draw a token from p (V). Without a generator PyTorch's global one is used."""
    possible = p.nonzero().squeeze(-1)  # after top-p only a few of V, which makes drawing faster
    choice = torch.multinomial(p[possible], 1, generator=generator)
    return int(possible[choice])


def sample_next(logits: Tensor, sampling: Sampling) -> int:
    """Choose the next token from logits (V): the likeliest at temperature 0, otherwise a draw.

    Raises InputError if a logit is NaN or +infinity.
    """
    check_logits(logits)
    if sampling.temperature == 0:
        return int(logits.float().argmax())  # on CPUs argmax is ten times slower in bfloat16
    return sample(probabilities(logits, sampling.temperature, sampling.top_p), sampling.generator)


def check_logits(logits: Tensor) -> None:
    """Raise InputError if a logit is NaN or +infinity, as with some models in float16."""
    if not torch.isfinite(logits.max()):  # the maximum is NaN if any logit is
        raise InputError("the target's logits are NaN or infinite: use --dtype bfloat16 or float32")


PIECE = 512  # tokens of a prompt that are read in one pass
OnPiece = Callable[[int], None]  # a function of the number of prompt tokens that have been read


def read_in_pieces(
    model: Llama, tokens: list[int], cache: KVCache, on_piece: OnPiece | None = None
) -> Tensor:
    """Read a prompt into the cache, piece by piece. Return the last token's hidden state (E).

    In a single pass a prompt of T tokens would need a mask of T x T. In pieces memory is linear in
    T. `on_piece` is called after each piece, and may raise an exception to stop.
    """
    for piece in torch.tensor([tokens], device=model.device).split(PIECE, dim=1):
        hidden = model.hidden(piece, cache)  # (1, T, E)
        if on_piece is not None:
            on_piece(cache.length)
    return hidden[0, -1]


@torch.inference_mode()
def generate(
    model: Llama, prompt: list[int], config: GenerationConfig, on_piece: OnPiece | None = None
) -> Iterator[int]:
    """Generate with the target alone, token by token, up to and including a stop token.

    At temperature 0 speculative decoding must give these same tokens. Above temperature 0 it must
    give tokens of the same distribution. Prompt and answer must fit the model's context.
    """
    sampling = config.new_sampling(model.device)
    cache = model.new_cache(len(prompt) + config.max_new_tokens)
    hidden = read_in_pieces(model, prompt, cache, on_piece)  # (E)
    for count in range(1, config.max_new_tokens + 1):
        token = sample_next(model.lm_head(hidden), sampling)
        yield token
        if token in config.stop_ids or count == config.max_new_tokens:
            return
        token_ids = torch.tensor([[token]], device=model.device)  # (1, 1)
        hidden = model.hidden(token_ids, cache)[0, -1]  # (E)


# --- The method ends here: what follows makes it fast and practical ---


# --- Packed weights: modules that are fast for a few tokens ---
#
# Most of a pass over one token is spent reading the weights, so verifying a few drafted tokens
# should cost no more. However, for 2 to 16 rows (tokens) nn.Linear on a CPU takes two to three
# times as long as for one. oneDNN (in PyTorch: mkldnn) can store a weight in blocks, in the order
# in which its kernel reads them. With such a weight up to six rows cost no more than one (measured
# on an AMD EPYC), and more rows cost less than with nn.Linear. One wide product is also faster than
# several narrow ones of the same input, even on a GPU. For these reasons `pack` replaces the
# modules of a finished model by the packed modules below.
#
# On a CPU a `PackedLlama` is also exact in all our tests: a token's result is bit-identical in a
# pass over that token alone and in a pass over a whole draft. plumbing/kernels.py explains why this
# takes some care, and finds out how many rows, queries and masked keys have to be added to a pass.


def pack(module: nn.Module) -> nn.Module:
    """Pack a module, and return the module to use in its place. A `Llama` or a `Drafter` is packed
    in place, and the same object is returned. A packed module cannot be trained, saved or moved.
    If `can_pack` is False the module stays as it is, and for a Llama on a CPU a line on stderr says
    that its passes are not exact.

    Packing a Llama has one more effect. On a CPU the object's class becomes `PackedLlama`, whose
    passes are exact. Changing the class is unusual, but a drafter may already hold this object, and
    its weights and buffers can stay where they are. On a GPU cuDNN's attention is turned off, for
    the whole process: it plans again for each new shape, which takes tens of milliseconds
    (experiments/results/smollm2/gpu.json), and while generating every pass has a new shape, because
    the cache grows.
    """
    weight = next(module.parameters(), None)
    if weight is None:
        return module
    on_cpu = weight.device.type == "cpu"
    if not can_pack(weight):
        if isinstance(module, Llama) and on_cpu:
            warn_inexact()
        return module
    if isinstance(module, Attention):
        return PackedAttention(module)
    if isinstance(module, MLP):
        return PackedMLP(module)
    if isinstance(module, RMSNorm) and on_cpu:
        return PackedRMSNorm(module)
    if isinstance(module, nn.Linear) and module.bias is None and on_cpu:
        return PackedLinear(module)
    for name, part in module.named_children():
        setattr(module, name, pack(part))
    if isinstance(module, Llama) and on_cpu:
        module.__class__ = PackedLlama
        module.find_limits()
    elif isinstance(module, Llama):
        torch.backends.cuda.enable_cudnn_sdp(False)
    return module


def can_pack(weight: Tensor) -> bool:
    """Return whether packing helps: on NVIDIA's GPUs, and on a CPU if oneDNN can multiply weights
    of this dtype."""
    if weight.device.type == "cuda":
        return True
    return weight.device.type == "cpu" and can_multiply(weight.dtype)


def warn_inexact() -> None:
    print("no exact kernels were found on this CPU: texts may differ", file=sys.stderr)


class PackedLinear(nn.Module):
    """Linear layers of the same input as one product, with their outputs side by side."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.weight = torch.cat([layer.weight for layer in layers]).detach()  # (out, in)
        self.min_rows = 1  # inputs with fewer rows are padded; `PackedLlama.find_limits` raises it
        if self.weight.device.type == "cpu":
            self.weight = reorder_weight(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        if not self.weight.is_mkldnn:
            return F.linear(x, self.weight)
        return packed_product(x, self.weight, self.min_rows)


class PackedRMSNorm(nn.Module):
    """RMSNorm in four operations. On a CPU F.rms_norm consists of more.

    x / sqrt(mean(x^2) + eps) = sqrt(size) x / sqrt(|x|^2 + size eps), and hypot(a, b) is
    sqrt(a^2 + b^2) in one operation. All four operations are in float32, with a cast before the
    first and after the last.
    """

    def __init__(self, norm: RMSNorm):
        super().__init__()
        size = len(norm.weight)
        self.scale = norm.weight.detach().float() * math.sqrt(size)
        self.floor = torch.tensor(math.sqrt(size * norm.eps))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide * self.scale / torch.hypot(length, self.floor)).type_as(x)


class PackedAttention(Attention):
    """Attention that computes queries, keys and values as one product."""

    def __init__(self, attention: Attention):
        nn.Module.__init__(self)  # Attention's own would create projections that are not packed
        self.heads = attention.heads
        self.kv_heads = attention.kv_heads
        self.head_dim = attention.head_dim
        self.qkv_proj = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o_proj = pack(attention.o_proj)

    def queries_keys_values(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.split_heads(self.qkv_proj(x))  # (B, H + 2 Hkv, T, D)
        qk, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(qk, rope).split([self.heads, self.kv_heads], dim=1)
        return q, torch.cat([k, v], dim=-1)

    def queries(self, x: Tensor, rope: Tensor) -> Tensor:
        # Only CA asks for queries alone. The keys and values computed with them are thrown away.
        # For a single layer this costs less than holding q_proj a second time.
        q, _ = self.queries_keys_values(x, rope)
        return q

    def keys_values(self, x: Tensor, rope: Tensor) -> Tensor:
        _, kv = self.queries_keys_values(x, rope)
        return kv

    def forward(self, q: Tensor, kv: Tensor, mask: Tensor | None = None) -> Tensor:
        # With a mask enable_gqa copies keys and values for every query head. Instead, stack the
        # queries of the heads that share a kv head: with 4 heads, 2 kv heads and T tokens, 2 T rows
        # attend to the first kv head, and 2 T rows to the second.
        k, v = kv.chunk(2, dim=-1)
        group = self.heads // self.kv_heads
        tokens = q.shape[2]
        rows = q.reshape(len(q), self.kv_heads, group * tokens, self.head_dim)
        if mask is not None and mask.dtype == torch.bool:  # one row for each token
            mask = torch.cat([mask] * group, dim=-2)  # (group T, S)
        elif mask is not None:
            # A mask of numbers comes from `AttentionLimits.attention_mask`. It has one row for each
            # of `rows`, followed by rows for padding.
            padding = mask.shape[-2] - group * tokens
            rows = F.pad(rows, (0, 0, 0, padding))
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
        out = out[:, :, :group * tokens].reshape(q.shape)  # (B, H, T, D), without the padding
        return self.o_proj(out.transpose(1, 2).flatten(2))


class PackedMLP(nn.Module):
    """An MLP that computes the gate and up projections as one product."""

    def __init__(self, mlp: MLP):
        super().__init__()
        self.gate_up_proj = PackedLinear(mlp.gate_proj, mlp.up_proj)
        self.down_proj = pack(mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class PackedLlama(Llama):
    """A packed Llama on a CPU. With a cache from its own `new_cache`, a pass over up to
    `limits.most_tokens` tokens is exact. The pieces of a prompt are longer, but a prompt is always
    cut into pieces at the same places, so the results repeat."""

    def find_limits(self) -> None:
        """Find out what exact passes need on this CPU: `limits`, None if no pass can be exact, and
        the `min_rows` of each `PackedLinear`."""
        config = self.config
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.limits = probe_attention(config.head_dim, self.group, self.dtype)
        for part in self.modules():
            if isinstance(part, PackedLinear):
                min_rows = probe_rows(*part.weight.shape, part.weight.dtype)
                if min_rows is None:
                    self.limits = None
                else:
                    part.min_rows = min_rows
        if self.limits is None:
            warn_inexact()

    def new_cache(self, capacity: int, batch: int = 1) -> KVCache:
        capacity += -capacity % KEY_BLOCK  # leaves room for masked keys
        cache = super().new_cache(capacity, batch)
        if self.limits is None:
            return cache
        return AlignedKVCache(cache.kv, self.limits)

    def hidden(
        self,
        tokens: Tensor,
        cache: KVCache | None = None,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        if not isinstance(cache, AlignedKVCache):
            return super().hidden(tokens, cache, positions, mask)
        assert (positions is None) == (mask is None), "give both positions and a mask, or neither"
        count = tokens.shape[1]
        end = cache.length + count
        if positions is None:
            slots = torch.arange(end)
            positions = slots[cache.length:]
            mask = positions.unsqueeze(1) >= slots  # needed even for a single token
        # Every product needs at least MIN_ROWS rows. Padding the tokens once here saves most of the
        # padding in the products.
        padding = max(MIN_ROWS - count, 0)
        tokens = F.pad(tokens, (0, padding))
        positions = F.pad(positions, (0, padding))
        mask = F.pad(mask, (0, 0, 0, padding), value=True)
        mask = self.limits.attention_mask(mask, self.group, self.dtype)
        cache.new_tokens = count  # the cache does not store the padding
        hidden = super().hidden(tokens, cache, positions, mask)
        cache.length = end  # the length does not count the padding
        return hidden[:, :count]


class AlignedKVCache(KVCache):
    """A cache whose `append` also returns some unused slots, so that the number of keys is one that
    the limits allow. `PackedLlama.hidden` masks the unused slots."""

    def __init__(self, kv: Tensor, limits: AttentionLimits):
        super().__init__(kv)
        self.limits = limits
        self.new_tokens = 0  # the tokens of the current pass, without padding

    def append(self, layer: int, kv: Tensor) -> Tensor:
        end = super().append(layer, kv[:, :, :self.new_tokens]).shape[2]
        return self.kv[layer, :, :, :self.limits.padded(end)]


# --- Loading ---


def load_model(
    path: str | Path, device="cpu", dtype=torch.float32, last: int | None = None
) -> Llama:
    """Load a frozen Llama from a Hugging Face folder, a .gguf file, a hub id, "smollm2" or "toy".

    With `last`, load only this many last layers, and put None in place of the others. (A client
    runs only these layers, in `run_target_layers` of moa.py.) Raises InputError.
    """
    path = resolve_path(path)
    read_checkpoint = read_gguf if path.suffix == ".gguf" else read_hugging_face
    sizes, read_tensors = read_checkpoint(path)
    config = Config(**sizes)
    first = 0 if last is None else config.num_hidden_layers - last
    skipped = tuple(f"layers.{i}." for i in range(first))
    with input_errors(path, RuntimeError, TypeError):  # PyTorch raises either for impossible sizes
        with torch.device("meta"):
            model = Llama(config)
        for i in range(first):
            model.layers[i] = None
        load_weights(model, read_tensors(skipped), path, device, dtype)
        model.tie_weights()  # again, to the embeddings that were loaded
    return model.to(device)  # moves the rotary table; the weights are there already


def load_target(
    path: str | Path, device: str, dtype: torch.dtype, last: int | None = None
) -> tuple[Llama, Tokenizer]:
    """Load a model (or only its `last` layers) and its tokenizer. Raises InputError."""
    path = resolve_path(path)
    model = load_model(path, device, dtype, last)
    tokenizer = load_tokenizer(path)
    ids = tokenizer.chat([{"role": "user", "content": ""}]) + list(tokenizer.stop_ids)
    size = model.config.vocab_size
    if max(ids) >= size:
        raise InputError(f"{path}: the tokenizer has tokens beyond the model's {size} embeddings")
    return model, tokenizer


# --- Command line ---


def main() -> None:
    parser = Parser(
        description="Generate with the target alone.",
        examples='  python llama.py --prompt "Why is the sky blue?"\n'
        "  echo Hi | python llama.py --model toy --temperature 0.7",
    )
    parser.add_argument("--prompt", help="default: what is piped into standard input")
    add_model_arguments(parser.add_argument_group("model"))
    add_generation_arguments(parser.add_argument_group("answer"))
    args = parser.parse_args()
    question = read_prompt(args.prompt)
    dtype = DTYPES[choose_dtype(args.device, args.dtype)]
    model, tokenizer = load_target(args.model, args.device, dtype)
    model = pack(model)
    prompt = tokenizer.chat([{"role": "user", "content": question}])
    context = model.config.max_position_embeddings
    count = answer_length(context, len(prompt), args.max_new_tokens)
    stop_ids = frozenset(tokenizer.stop_ids)
    config = GenerationConfig(count, args.temperature, args.top_p, args.seed, stop_ids)
    start = time.perf_counter()
    tokens = []
    stream = TextStream(tokenizer)
    for token in generate(model, prompt, config):
        if not tokens:
            prompt_read = time.perf_counter()
        tokens.append(token)
        if not args.json:
            print(stream.add(token), end="", flush=True)
    end = time.perf_counter()
    if not args.json:
        print(stream.pending_text())
    statistics = {  # with the names that speculate.py uses, so that the two can be compared
        "seconds": end - start,
        "tokens_per_second": len(tokens) / (end - start),
        "target_calls": len(tokens) - 1,  # the pass over the prompt is not counted
        "acceptance_length": 1.0 if len(tokens) > 1 else 0.0,  # new tokens per call
        "prompt_tokens": len(prompt),
        "prompt_seconds": prompt_read - start,
        "draft_seconds": 0.0,
        "verify_seconds": end - prompt_read,
        "stopped": why_stopped(tokens, stop_ids, args.max_new_tokens),
        "seed": args.seed,
    }
    report(tokenizer.decode(tokens), tokens, statistics, args.json)


if __name__ == "__main__":
    run_command(main)
