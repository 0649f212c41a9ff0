"""A Llama from scratch: inference for one conversation.

Speculative decoding takes two models. The large one, whose text is wanted, is the *target* (M_Large
in the paper). The small one, the *drafter*, guesses what the target will write. This chapter is the
target. Its drafter will read the target's KV cache, which makes the cache the part to watch.

A decoder layer adds to each token's vector x the outputs of attention and of an MLP:

    attention   y = RMSNorm(x);  q, k, v = projections of y, with q and k rotated by position
                x = x + o_proj(softmax(q k^T / sqrt(D)) v), where no token sees a later one
    MLP         y = RMSNorm(x)
                x = x + down_proj(silu(gate_proj(y)) * up_proj(y))

A token's keys k and values v never change once they are computed, so they are kept: the KV cache.
Thanks to the cache a new token costs one pass over that token alone. A later token sees an earlier
one only through the earlier token's keys and values, and the paper's drafter reads these same keys
and values. moa.py builds the drafter from the same `DecoderLayer`.

    python llama.py --prompt "Why is the sky blue?"    # the default target, fetched on first use
    model = load_llama(folder)                         # or, in a notebook, one of your own:
    for token in generate(model, prompt, GenerationConfig()): ...                 # token ids

moa.py is the next of five chapters. The folder app/ makes programs of them.

Shapes: B batch, T new tokens, S tokens in the cache including the new ones, L layers, E hidden
size, H heads, Hkv kv heads, D head size, V vocabulary. Ekv = Hkv * D is the width of one layer's
keys, and of its values.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Iterator

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

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
    # The defaults are Llama-3's. (`load_llama` has those of Hugging Face, for files that omit one.)
    rms_norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_factors: tuple[float, ...] | None = None  # D/2 divisors of frequencies (Llama-3.1)
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
        (B, Hkv, T, 2D), as self-attention does."""
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
        cache: KVCache | None = None,
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
        # (On the meta device nn.Embedding(V, E) would import PyTorch's compiler, which takes 2 s.)
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
            device="cpu",  # not the meta device of `load_llama`: the table is in no checkpoint
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
    only the likeliest tokens are kept: the fewest that together reach top_p, and any that are as
    likely as the last of these.
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
    # Sorting all of V would do. But usually the likeliest few tokens are enough, and are found much
    # faster.
    for count in (64, 1024, p.shape[-1]):
        descending = p.topk(min(count, p.shape[-1])).values  # (..., count)
        sums = descending.cumsum(-1)  # up to and including each token
        if (sums[..., -1] >= top_p).all():
            break
    # The last token of the nucleus is the first whose sum reaches top_p. Its index is therefore the
    # number of sums that are below top_p. (The last sum is left out: should rounding keep all sums
    # below top_p, every token is in the nucleus.)
    last = (sums[..., :-1] < top_p).sum(-1, keepdim=True)
    return descending.gather(-1, last)


def sample(p: Tensor, generator: torch.Generator | None) -> int:
    """Draw a token from p (V). Without a generator PyTorch's global one is used."""
    possible = p.nonzero().squeeze(-1)  # after top-p only a few of V, which makes drawing faster
    drawn = torch.multinomial(p[possible], 1, generator=generator)
    return int(possible[drawn])


def sample_next(logits: Tensor, sampling: Sampling) -> int:
    """Choose the next token from logits (V): the likeliest at temperature 0, otherwise a draw.

    Raises FloatingPointError if the largest logit is not finite.
    """
    check_logits(logits)
    if sampling.temperature == 0:
        return int(likeliest(logits))
    return sample(probabilities(logits, sampling.temperature, sampling.top_p), sampling.generator)


def likeliest(logits: Tensor) -> Tensor:
    """Return the tokens (...) with the largest logits (..., V). The target alone and the target
    with drafts both choose here, so that equal logits are decided in the same way."""
    return logits.float().argmax(-1)  # on CPUs argmax is slower in bfloat16


def check_logits(logits: Tensor) -> None:
    """Raise FloatingPointError if the largest logit is not finite: with some models in float16
    logits are NaN or infinite."""
    if not torch.isfinite(logits.max()):  # the maximum is NaN if any logit is
        raise FloatingPointError("the target's logits are NaN or infinite")


PIECE = 512  # tokens of a prompt that are read in one pass


def read_prompt(model: Llama, tokens: list[int], cache: KVCache) -> Tensor:
    """Read a prompt into the cache, piece by piece. Return the last token's hidden state (E).

    In a single pass a prompt of T tokens would need a mask of T x T. In pieces memory is linear in
    T.
    """
    for piece in torch.tensor([tokens], device=model.device).split(PIECE, dim=1):
        hidden = model.hidden(piece, cache)  # (1, T, E)
    return hidden[0, -1]


@torch.inference_mode()
def generate(model: Llama, prompt: list[int], config: GenerationConfig) -> Iterator[int]:
    """Generate with the target alone, token by token, up to and including a stop token.

    At temperature 0 speculative decoding must give these same tokens. Above temperature 0 it must
    give tokens of the same distribution. Prompt and answer must fit the model's context.
    """
    sampling = config.new_sampling(model.device)
    cache = model.new_cache(len(prompt) + config.max_new_tokens)
    hidden = read_prompt(model, prompt, cache)  # (E)
    for count in range(1, config.max_new_tokens + 1):
        token = sample_next(model.lm_head(hidden), sampling)
        yield token
        if token in config.stop_ids or count == config.max_new_tokens:
            return
        token_ids = torch.tensor([[token]], device=model.device)  # (1, 1)
        hidden = model.hidden(token_ids, cache)[0, -1]  # (E)


# --- Loading a checkpoint ---


def load_llama(folder: str | Path, device="cpu", dtype=torch.float32) -> Llama:
    """Load a Llama from a folder as Hugging Face's `save_pretrained` writes it: config.json and one
    or more files model*.safetensors.

    Raises ValueError for another architecture, or for RoPE that is scaled (Llama-3.1 and later).
    `load_model` of app/loading.py reads these too, and other formats, and checks what it reads.
    """
    config_file = Path(folder, "config.json")
    stated = {k: v for k, v in json.loads(config_file.read_text()).items() if v is not None}
    # Newer files state theta among the settings of RoPE.
    rope = stated.get("rope_parameters") or stated.get("rope_scaling") or {}
    variant = (
        stated["model_type"],
        stated.get("hidden_act", "silu"),
        rope.get("rope_type", rope.get("type", "default")),
    )
    if variant != ("llama", "silu", "default"):
        raise ValueError(f"{config_file}: expected ('llama', 'silu', 'default'), not {variant}")
    heads = stated["num_attention_heads"]
    sizes = {  # what Hugging Face takes for sizes that are left out
        "num_key_value_heads": heads,
        "head_dim": stated["hidden_size"] // heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
    }
    sizes |= stated | rope
    names = [field.name for field in fields(Config)]
    config = Config(**{name: sizes[name] for name in names if name in sizes})
    with torch.device("meta"):  # shapes without data: the weights come from the files
        model = Llama(config)
    weights = {}
    for file in Path(folder).glob("model*.safetensors"):  # one, or several shards
        for name, tensor in load_file(file).items():
            weights[name.removeprefix("model.")] = tensor.to(device, dtype)
    if config.tie_word_embeddings:  # the LM head uses the embeddings, and has no weights of its own
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    return model.to(device)  # moves the rotary table; the weights are there already


if __name__ == "__main__":  # the command line is in app/, and imports this file as `llama`
    from app.llama_command import main
    main()
