"""The drafter: a Mixture of Attentions (Zimmer et al., ICLR 2025, arXiv 2410.03804, section 3).

M_Small guesses the next tokens of a frozen target from three attentions, each an ordinary Llama layer:

    LSA  Layer Self-Attention, over the L layers of one verified token's keys and values in the target's cache. Its mean
         over layers, projected to E, is that token's `memory`: a look at the target's whole state, not its last layer.
    SA   Self-Attention, causal, over the embeddings of prompt and draft: a drafted token sees the drafts before it.
    CA   Cross-Attention, SA's output asking the memory of verified tokens. While drafting nothing is asked of tokens that
         have no memory yet; in training a `horizon` bounds each query alike, so one pass trains on-policy.
    TLI  Target Layer Inference: CA's output stands for the hidden state that enters the target's last N layers (for
         N = 0: that leaves the final norm); those run on it, and the frozen LM head makes it a distribution.

`Drafter.features` is the forward over all positions at once, under one horizon (train.py runs its parts under several);
`Drafting` does the same step by step with caches.

Shapes: B batch, T tokens, L layers, E hidden, H heads, D head size, V vocabulary, N reused layers, K draft length;
Ekv = Hkv * D is the width of one layer's keys.
"""
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from llama import (DecoderLayer, InputError, KVCache, Linear, Llama, can_pack, causal_mask, fill, probabilities, read_json, read_tensors,
                   rotary_table, sample)

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
        """The paper's proportions for a target: Hkv and MLP for Llama-3-8B come out as in its table."""
        c = target.config
        sizes = dict(
            num_attention_heads=c.num_attention_heads,
            layer_self_attention_num_attention_heads=c.num_attention_heads,
            layer_self_attention_num_key_value_heads=c.num_key_value_heads,
            layer_self_attention_intermediate_size=3 * c.num_key_value_heads * c.head_dim,
            self_attention_num_key_value_heads=max(1, c.num_attention_heads // 8),
            self_attention_intermediate_size=3 * c.hidden_size // 2,
            cross_attention_num_key_value_heads=max(1, c.num_attention_heads // 8),
            cross_attention_intermediate_size=3 * c.hidden_size // 2,
            rms_norm_eps=c.rms_norm_eps, rope_theta=c.rope_theta)
        return cls(**{**sizes, **choices})


@dataclass
class Memory:
    """What the target's side tells the drafter of T newly verified tokens."""

    tokens: list[int]
    cross_kv: Tensor  # CA's keys and values of their memories, (1, Hkv, T, 2D); without CA the memories (1, T, E)
    reused_kv: Tensor  # the target's own in its last N layers, (N, 1, Hkv, T, 2D): a view of its cache, read it at once


@dataclass
class Draft:
    """What the drafter proposes to follow `token`, the newest the target has said."""

    token: int
    tokens: list[int]  # K
    q: Tensor | None = None  # the distribution each was drawn from, (K, V); None where drafting was greedy


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
            if heads % kv_heads or size < 2 or size % 2:
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

        # The target and, of its LM head, the rows in use: in a tuple, or they would become ours to train and save.
        head, vocabulary, device = target.lm_head, None, target.embed_tokens.weight.device
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
        return self.head(features.to(self.target.norm.weight.dtype))

    def pack(self) -> "Drafter":
        """As `Llama.pack`."""
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

    def memory(self, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """LSA, mean, projection: kv (B, T, L, 2 Ekv) -> (B, T, E). Without LSA: a projection of hidden (B, T, E)."""
        if not self.config.use_layer_self_attention:
            return self.Ekv2E(hidden.to(self.dtype))
        x = kv.to(self.dtype).flatten(0, 1)  # (B T, L, 2 Ekv): each token's layers are a sequence of their own
        x = self.layer_self_attention(x, self.layer_rotary).mean(dim=1)  # (B T, 2 Ekv)
        return self.Ekv2E(x).unflatten(0, kv.shape[:2])

    # The training forward ---------------------------------------------------------------------------------------

    def features(self, tokens: Tensor, kv: Tensor, horizon: Tensor, hidden: Tensor | None = None) -> Tensor:
        """What the LM head is applied to, at every position in one pass, (B, T, E).

        tokens (B, T); kv (B, T, L, 2 Ekv) as in the target's cache; horizon (B, T): the last position whose memory
        query i may read, -1 for none; hidden (B, T, E), the target's final hidden states, needed without LSA only.
        """
        guess = self.guess(self.self_attend(tokens), self.memory(kv, hidden), horizon)
        return self.infer_target_layers(guess, kv, horizon)

    def self_attend(self, tokens: Tensor) -> Tensor:
        """SA: (B, T) -> (B, T, E)."""
        x, count = self.target.embed_tokens(tokens).to(self.dtype), tokens.shape[1]
        return self.self_attention(x, self.rotary[:, :count], causal_mask(count, count, x.device))

    def guess(self, x: Tensor, memory: Tensor, horizon: Tensor) -> Tensor:
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
            memory = self.memory(cache.read(a, b), hidden[:, a - start:b - start])
            states.append(self.cross_attention.keys_values(memory, self.rotary[:, a:b])
                          if self.config.use_cross_attention else memory)
        first = len(self.target.layers) - self.N
        return Memory(tokens, torch.cat(states, dim=-2), cache.kv[first:, :, :, start:end])

    def start(self, capacity: int) -> "Drafting":
        """A drafter's side of one conversation of at most `capacity` tokens."""
        return (Drafting if self.config.use_cross_attention else OffPolicyDrafting)(self, capacity)


class Drafting:
    """The state of one conversation: SA's cache over all tokens, CA's over memories, the N reused layers' over both.

    Verified tokens come first in each cache; what is drafted behind them is cut off when the next memory arrives.
    """

    def __init__(self, drafter: Drafter, capacity: int):
        c, target = drafter.config, drafter.target
        head_dim, device = target.config.hidden_size // c.num_attention_heads, target.embed_tokens.weight.device
        self.drafter = drafter
        self.self_cache = KVCache(1, 1, c.self_attention_num_key_value_heads, capacity, head_dim, device, drafter.dtype)
        self.cross_cache = KVCache(1, 1, c.cross_attention_num_key_value_heads, capacity, head_dim, device, drafter.dtype)
        self.reused_cache = KVCache(drafter.N, 1, target.config.num_key_value_heads, capacity, target.config.head_dim,
                                    device, target.embed_tokens.weight.dtype)
        self.verified = 0  # tokens that have a memory
        self.drafted: list[int] = []  # tokens in SA's cache behind the verified ones
        self.pending: list[int] = []  # verified tokens that SA has not read yet

    def observe(self, memory: Memory) -> None:
        """Take in newly verified tokens. Costs time in these alone: SA's work on accepted drafts is kept."""
        kept = 0
        while kept < min(len(self.drafted), len(memory.tokens)) and self.drafted[kept] == memory.tokens[kept]:
            kept += 1
        self.self_cache.truncate(self.self_cache.length - len(self.drafted) + kept)
        self.pending += memory.tokens[kept:]
        self.drafted = []
        self.append_states(memory.cross_kv)
        self.reused_cache.truncate(self.verified)
        for n, kv in enumerate(memory.reused_kv):
            self.reused_cache.append(n, kv)
        self.reused_cache.advance(len(memory.tokens))
        self.verified += len(memory.tokens)

    def append_states(self, states: Tensor) -> None:
        self.cross_cache.append(0, states)
        self.cross_cache.advance(states.shape[2])

    def draft(self, token: int, length: int, threshold: float = 0.0, temperature: float = 0.0, top_p: float = 1.0,
              generator: torch.Generator | None = None) -> Draft:
        """Up to `length` tokens to follow `token`, ending early once the product of confidences is under `threshold`.

        Whether to go on is decided before the next token is drawn: a token once drawn is always proposed. To drop it
        for its low probability would change the distribution it came from, and q would no longer be that one.
        """
        tokens, qs, confidence = [], [], 1.0
        while len(tokens) < length and confidence >= threshold:
            features = self.step(tokens[-1] if tokens else token)  # (E)
            logits, vocabulary = self.drafter.logits(features), self.drafter.vocabulary  # (V) or the draft vocabulary
            if temperature > 0:
                q = probabilities(logits, temperature, top_p)
                choice = sample(q, generator)
                if vocabulary is not None:
                    q = q.new_zeros(self.drafter.target.config.vocab_size).scatter_(0, vocabulary, q)
                qs.append(q)
            else:
                choice = logits.argmax()
            confidence *= torch.softmax(logits.float(), dim=-1)[choice].item()
            tokens.append((choice if vocabulary is None else vocabulary[choice]).item())
        return Draft(token, tokens, torch.stack(qs) if qs else None)

    def step(self, token: int) -> Tensor:
        """Features (E) at `token`, which follows all tokens drafted so far."""
        x = self.self_attend(self.pending + [token])
        self.pending = []
        self.drafted.append(token)
        return self.infer_target_layers(self.guess(x[:, -1:]))[0, 0]

    def self_attend(self, tokens: list[int]) -> Tensor:
        drafter, cache = self.drafter, self.self_cache
        end = cache.length + len(tokens)
        x = drafter.target.embed_tokens(torch.tensor([tokens], device=cache.kv.device)).to(drafter.dtype)
        x = drafter.self_attention(x, drafter.rotary[:, cache.length:end], causal_mask(len(tokens), end, x.device),
                                   lambda kv: cache.append(0, kv))  # (1, T, E)
        cache.advance(len(tokens))
        return x

    def guess(self, x: Tensor) -> Tensor:
        """CA of the newest token, (1, 1, E)."""
        position = self.self_cache.length - 1
        kv = self.cross_cache.kv[0, :, :, :self.verified]  # (1, Hkv, S, 2D)
        return self.drafter.cross_attention.attend(x, kv, self.drafter.rotary[:, position:position + 1])

    def infer_target_layers(self, x: Tensor) -> Tensor:
        if self.drafter.N == 0:
            return x
        target, cache = self.drafter.target, self.reused_cache
        first, rope = len(target.layers) - self.drafter.N, target.rope(cache.length, cache.length + 1)
        for n in range(self.drafter.N):
            x = target.layers[first + n](x, rope, append=lambda kv: cache.append(n, kv))
        cache.advance(1)
        return target.norm(x)


class OffPolicyDrafting(Drafting):
    """Drafting without CA: a causal layer over SA's output plus the memory of the token before.

    A drafted token has no memory; its predecessor's guessed hidden state stands in. Accepted tokens are read again once
    their true memories are there, as EAGLE does.
    """

    def __init__(self, drafter: Drafter, capacity: int):
        super().__init__(drafter, capacity)
        self.previous = torch.zeros(1, 1, drafter.target.config.hidden_size, dtype=drafter.dtype,
                                    device=self.self_cache.kv.device)  # (1, T, E), what the next tokens read
        self.before_draft = self.previous  # (1, 1, E), what the first drafted token read

    def observe(self, memory: Memory) -> None:
        self.self_cache.truncate(self.self_cache.length - len(self.drafted))
        self.cross_cache.truncate(self.self_cache.length)
        if self.drafted:
            self.previous = self.before_draft
        self.drafted = []
        super().observe(memory)

    def append_states(self, states: Tensor) -> None:
        self.previous = torch.cat([self.previous, states], dim=1)

    def step(self, token: int) -> Tensor:
        if not self.drafted:
            self.before_draft = self.previous[:, -1:]
        start = self.self_cache.length
        x = self.self_attend(self.pending + [token]) + self.previous
        self.pending = []
        self.drafted.append(token)
        end = self.self_cache.length
        guess = self.drafter.cross_attention(x, self.drafter.rotary[:, start:end], causal_mask(end - start, end, x.device),
                                             lambda kv: self.cross_cache.append(0, kv))
        self.cross_cache.advance(end - start)
        self.previous = guess[:, -1:]
        return self.infer_target_layers(self.previous)[0, 0]


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
    tensors = dict(read_tensors(path / "model.safetensors"))
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
    with torch.device("meta"):
        drafter = Drafter(target, config)
    weight = target.embed_tokens.weight
    fill(drafter, iter(tensors.items()), path, weight.device, weight.dtype)
    return drafter.requires_grad_(False).eval()


def read_config(path: Path) -> dict:
    """What a drafter's config.json states of DrafterConfig. Raises InputError for values that make no sense."""
    raw, stated = read_json(path), {}
    for field in fields(DrafterConfig):
        value = raw.get(field.name)
        if value is None:
            continue
        kind = {int: int, float: (int, float), bool: bool}.get(field.type, list)
        if not isinstance(value, kind) or (field.type in (int, float) and value < 0):
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
    (path / "config.json.part").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_file(tensors, path / "model.safetensors.part", metadata={"format": "pt"})
    os.replace(path / "model.safetensors.part", path / "model.safetensors")
    os.replace(path / "config.json.part", path / "config.json")
