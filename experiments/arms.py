"""The drafters that are compared, the *arms*: what each reads, how it is trained, how it drafts.

    full                        the paper's with N = 0 (and the differences in `new_drafter_of`)

`full`, but for one thing:

    full-unmasked               trained with mock cycles of one token, that is, without the mask
    full-one-run                a whole answer is one mock cycle
    full-kl-1                   KL has weight 1 in place of 0.1
    full-hass-loss              HASS's loss on the target's ten likeliest tokens is added
    n-1, n-2, n-4               it reuses the target's last N layers
    n-1-scaled                  N = 1, and CA's output is as many times larger as the state that
                                enters the last layer is; the loss compares it in that unit
    n-1-scaled-output           CA's output alone is scaled, not its loss
    n-1-scaled-loss             the loss alone is scaled
    n-1-scaled-no-ca-loss       CA's output is scaled, and has no loss of its own
    n-1-new                     a new layer, which is trained, in the place of the reused one: a
                                control for `n-1`
    full-larger                 wider MLPs, larger by the parameters of one target layer: another
    full-three-layers           a third layer in place of wider MLPs: a third control
    full-one-layer              SA has no MLP: SA and CA are then one layer, GLIDE's shape
    last-layer                  no LSA: the memory is a projection of the key and value of the
                                target's last layer
    last-layer-lsa              LSA gets the last layer in the place of every layer
    last-state                  no LSA: the memory is a projection of the target's last hidden
                                state, as in the paper's ablation
    last-input                  no LSA: the memory is a projection of what the target's last layer
                                makes its keys and values of
    glide                       CA attends to the keys and values of the target's last layer as
                                they are (Du et al. 2024)
    last-layer-one-layer, glide-one-layer       these memories in one layer, as `full-one-layer`
    kl-only, smooth-l1-only     one of the two losses

Drafters without CA, of the same size:

    no-memory                   SA and a plain layer, which see tokens only: a control
    no-memory-one-layer         SA alone
    no-memory-two-attentions    `no-memory` without SA's MLP: the control for `full-one-layer`
    eagle                       EAGLE's (Li et al. 2024a): reads the target's last hidden state of
                                the token before each, or its own prediction of that state
    eagle-two-layers            EAGLE's with a second layer, as many as the paper's SA and CA
    eagle-two-layers-on-policy  `eagle-two-layers`, trained for three steps on its own predictions,
                                as HASS does
    hass, hass-two-layers       EAGLE's in one layer and in two, as HASS trains it (Zhang et al.
                                2024): in three such steps, and with its loss
    eagle-3, eagle-3-two-layers EAGLE-3's (Li et al. 2025): reads the states of three layers,
                                predicts no state of the target's, and is trained for seven steps on
                                its own outputs

An `Arm` says how a drafter is made, trained and used. Drafters of two families differ in what they
read of the newest tokens, which the target has not verified yet:

    the paper's        the memory of verified tokens only: `horizon` says which these are
    autoregressive     one vector for each token before. Of a token that is not verified this is
                       the drafter's own output, so they run step by step, in training too.

Shapes: as in moa.py and train.py, and R states of the target that a drafter reads of a token.
"""
from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Iterable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.answers import Cycles, count_slots, timed_cycles
from app.exact import DetailedResult, ExactVerifier
from experiments.copies import NoDrafter
from llama import (
    Attention,
    DecoderLayer,
    GenerationConfig,
    KVCache,
    Llama,
    MLP,
    RMSNorm,
    Sampling,
    causal_mask,
    rotary_table,
)
from moa import (
    LSA_TOKENS,
    CacheUpdate,
    CrossAttentionLayer,
    Draft,
    Drafter,
    DrafterConfig,
    DraftLimits,
    default_config,
    empty_cache,
    kv_hidden_size,
)
from speculate import TreeSampler
from train import cross_attend, reuse_target_layers, self_attend

# --- What the target shows of a text ---


class Reading(NamedTuple):
    """What the target computes in a pass over tokens (B, T)."""

    tokens: Tensor  # (B, T)
    kv: Tensor  # its cache by token, (B, T, L, 2 Ekv)
    states: list[Tensor]  # the states that enter each layer, and the last one's output, (B, T, E)
    final: Tensor  # its final hidden states, (B, T, E)


@torch.no_grad()
def read(target: Llama, tokens: Tensor) -> Reading:
    """Run the target over tokens (B, T). As `target_pass` of train.py, but all states are kept."""
    count = tokens.shape[1]
    rope = target.rotary[:, :count]
    mask = causal_mask(count, past=0, device=tokens.device)
    cache = target.new_cache(count, len(tokens))
    states = [target.embed_tokens(tokens)]
    for i, layer in enumerate(target.layers):
        states.append(layer(states[-1], rope, mask, cache, i))
    return Reading(tokens, cache.by_token(0, count), states, target.norm(states[-1]))


# --- The paper's family ---


def new_layer(drafter: Drafter, kind: type[DecoderLayer] = DecoderLayer) -> DecoderLayer:
    """Return a layer of SA's sizes."""
    config = drafter.config
    return kind(
        width=drafter.target.config.hidden_size,
        inner=config.self_attention_intermediate_size,
        heads=config.num_attention_heads,
        kv_heads=config.self_attention_num_key_value_heads,
        head_dim=drafter.head_dim,
        eps=config.rms_norm_eps,
    )


def moa_features(drafter: Drafter, reading: Reading, horizons: Iterable[Tensor]) -> Iterator:
    """Run a drafter of the paper's family over a text, once for each horizon (B, T). Yields CA's
    output and the predicted final states, (B, T, E) each, as `drafter_pass` of train.py does. What
    the horizon does not change is computed once."""
    if isinstance(drafter, LastStateDrafter):
        memory = drafter.condense(drafter.states_of(reading))
    else:
        memory = drafter.build_memory(reading.kv.split(LSA_TOKENS, dim=1))  # (B, T, E)
    sa_output = self_attend(drafter, reading.tokens)  # (B, T, E)
    for horizon in horizons:
        ca_output = cross_attend(drafter, sa_output, memory, horizon)
        if drafter.N == 0:
            yield ca_output, ca_output
        else:
            yield ca_output, reuse_target_layers(drafter, ca_output, reading.kv, horizon)


class PaperDrafter(Drafter):
    """The paper's drafter, in which LSA is far smaller than SA.

    With Llama-3-8B LSA is a quarter as large as SA, since a layer's keys and values, 2 Ekv numbers,
    are half as wide as E. With the toy they are as wide as E. LSA would take parameters there which
    the arms without it spend on wider MLPs. So it has half as many heads, half as wide, and an MLP
    a quarter as wide as SA's: again a quarter.
    """

    mlps = 2  # of SA and CA

    def __init__(self, target: Llama, config: DrafterConfig):
        width = target.config.hidden_size
        kv_width = kv_hidden_size(target.config)
        # If SA and CA share one MLP, it is twice as wide as each of two would be.
        each_of_two = config.cross_attention_intermediate_size * self.mlps // 2
        inner = each_of_two * kv_width // width  # as in the paper
        if kv_width >= width:
            inner = max(1, each_of_two // 4)
        config = replace(config, layer_self_attention_intermediate_size=inner)
        super().__init__(target, config)
        if kv_width >= width:
            self.shrink_lsa(target)

    def shrink_lsa(self, target: Llama) -> None:
        config = self.config
        kv_width = kv_hidden_size(target.config)
        heads = config.layer_self_attention_num_attention_heads
        head_dim = max(1, kv_width // heads // 4) * 2  # RoPE needs an even one
        self.layer_self_attention = DecoderLayer(
            width=kv_width,
            inner=config.layer_self_attention_intermediate_size,
            heads=max(1, heads // 2),
            kv_heads=max(1, config.layer_self_attention_num_key_value_heads // 2),
            head_dim=head_dim,
            eps=config.rms_norm_eps,
        )
        layers = target.config.num_hidden_layers
        self.layer_rotary = rotary_table(layers, head_dim, config.rope_theta, target.device)


class ScaledCrossAttention(CrossAttentionLayer):
    """Puts out `scale` times what a layer computes."""

    scale = 1.0

    def attend_to(self, kv: Tensor, x: Tensor, rope: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.scale * super().attend_to(kv, x, rope, mask)


class ScaledDrafter(PaperDrafter):
    """The paper's for N > 0, where CA's output has to grow large in training: here it begins large.
    """

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        self.cross_attention = new_layer(self, ScaledCrossAttention)
        self.cross_attention.scale = scale_of_states(target)


def scale_of_states(target: Llama) -> float:
    """Return how many times as large as the final states those are that enter the target's last
    layer: by their root mean squares over random tokens, to one digit (10 with the toy). The first
    token is left out, since its states are far larger in many models."""
    generator = torch.Generator(target.device).manual_seed(0)
    with torch.device(target.device):  # whatever device a drafter is being made on
        tokens = torch.randint(target.config.vocab_size, (1, 64), generator=generator)
        reading = read(target, tokens)
    entering = reading.states[-2][:, 1:].square().mean()
    final = reading.final[:, 1:].square().mean()
    ratio = float((entering / final).sqrt())
    return float(f"{ratio:.0e}")


class NewLayerDrafter(PaperDrafter):
    """The paper's with N = 1, but what it runs on CA's output is not the target's last layer. It is
    a new one of that shape, which is trained. Like the target's, it attends to the target's own
    keys and values of verified tokens. CA's output need not be a state of the target's."""

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        sizes = target.config
        self.last_layer = DecoderLayer(
            width=sizes.hidden_size,
            inner=sizes.intermediate_size,
            heads=sizes.num_attention_heads,
            kv_heads=sizes.num_key_value_heads,
            head_dim=sizes.head_dim,
            eps=sizes.rms_norm_eps,
        )
        self.target = WithLastLayer(target, self.last_layer)  # what the drafter runs on CA's output

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        parameters = super().trained_parameters()
        for name, parameter in self.last_layer.named_parameters():
            parameters[f"last_layer.{name}"] = parameter
        return parameters


class WithLastLayer(Llama):
    """A model that shares everything with a target but its last layer."""

    def __init__(self, target: Llama, layer: DecoderLayer):
        with torch.device("meta"):
            super().__init__(target.config)
        for name, module in target.named_children():
            setattr(self, name, module)
        self.layers = nn.ModuleList([*target.layers[:-1], layer])
        self.rotary = target.rotary

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[-1].input_layernorm.weight.dtype  # the target's may differ


class TwoCrossAttentions(nn.Module):
    """Two layers after each other, which attend to the same memory. The kv heads of the second
    follow those of the first."""

    def __init__(self, first: CrossAttentionLayer, second: CrossAttentionLayer):
        super().__init__()
        self.first = first
        self.second = second

    def keys_values(self, memory: Tensor, rope: Tensor) -> Tensor:
        kvs = [layer.keys_values(memory, rope) for layer in (self.first, self.second)]
        return torch.cat(kvs, dim=1)  # (B, 2 Hkv, T, 2D)

    def attend_to(self, kv: Tensor, x: Tensor, rope: Tensor, mask: Tensor | None = None) -> Tensor:
        first_kv, second_kv = kv.chunk(2, dim=1)
        x = self.first.attend_to(first_kv, x, rope, mask)
        return self.second.attend_to(second_kv, x, rope, mask)


class ThreeLayersDrafter(PaperDrafter):
    """The paper's with CA twice."""

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        first = new_layer(self, CrossAttentionLayer)
        self.cross_attention = TwoCrossAttentions(first, new_layer(self, CrossAttentionLayer))
        kv_heads = config.cross_attention_num_key_value_heads
        self.config = replace(config, cross_attention_num_key_value_heads=2 * kv_heads)  # in caches


class LastLayerDrafter(Drafter):
    """The memory of a token is a projection of its key and value in the target's last layer."""

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        del self.layer_self_attention

    def build_memory(self, pieces: Iterable[Tensor]) -> Tensor:
        last = [kv[:, :, -1] for kv in pieces]
        return self.Ekv2E(torch.cat(last, dim=1).to(self.dtype))


class LastLayerLsaDrafter(PaperDrafter):
    """The paper's drafter, to which every layer of the target looks like its last. It has the
    parameters of `full`, LSA's included, so that what differs is what the other layers tell."""

    def build_memory(self, pieces: Iterable[Tensor]) -> Tensor:
        last_only = []
        for kv in pieces:
            last = kv[:, :, -1:]  # (B, T, 1, 2 Ekv)
            last_only.append(last.expand_as(kv))
        return super().build_memory(last_only)


class LastStateDrafter(Drafter):
    """The memory of a token is a projection of the target's final hidden state there."""

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        del self.layer_self_attention
        width = target.config.hidden_size
        self.Ekv2E = nn.Linear(width, width)  # with the name and the bias of the paper's

    def read_modules(self, target: Llama) -> list[nn.Module]:
        """Return the modules of the target whose outputs are read."""
        return [target.norm]

    def states_of(self, reading: Reading) -> Tensor:
        """Return what is read of each token, (B, T, E)."""
        return reading.final

    def condense(self, states: Tensor) -> Tensor:
        """Make the memory of each token of what is read of it, (B, T, E) both."""
        return self.Ekv2E(states.to(self.dtype))

    def update_of(self, tokens: list[int], memory: Tensor, end: int) -> CacheUpdate:
        """Return CA's keys and values of T tokens that have been verified. memory: (1, T, E).
        end: the position after the last of them."""
        rope = self.rotary[:, end - len(tokens):end]
        ca_kv = self.cross_attention.keys_values(memory, rope)
        return CacheUpdate(tokens, ca_kv, ca_kv.new_empty(0))


class LastInputDrafter(LastStateDrafter):
    """The memory of a token is a projection of what the target's last layer makes its key and value
    of: the state that enters that layer, after its norm."""

    def read_modules(self, target: Llama) -> list[nn.Module]:
        return [target.layers[-1].input_layernorm]

    def states_of(self, reading: Reading) -> Tensor:
        return self.target.layers[-1].input_layernorm(reading.states[-2])


class DirectCrossAttention(CrossAttentionLayer):
    """Attends to keys and values that are handed to it."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        del self.self_attn.k_proj, self.self_attn.v_proj

    def keys_values(self, kv: Tensor, rope: Tensor) -> Tensor:
        """Sort kv (B, T, 2 Ekv), whose keys are after RoPE, by head -> (B, Hkv, T, 2D)."""
        return kv.unflatten(-1, (-1, 2 * self.self_attn.head_dim)).transpose(1, 2)


class GlideDrafter(Drafter):
    """The paper's drafter with GLIDE's reading: CA attends to the target's own keys and values,
    those of its last layer, with as many kv heads. (GLIDE itself has both attentions and one MLP in
    one layer, and in training blocks of five tokens where the paper has mock cycles.)"""

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        del self.layer_self_attention, self.Ekv2E
        self.cross_attention = DirectCrossAttention(
            width=target.config.hidden_size,
            inner=config.cross_attention_intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.cross_attention_num_key_value_heads,
            head_dim=self.head_dim,
            eps=config.rms_norm_eps,
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.cross_attention.input_layernorm.weight.dtype

    def build_memory(self, pieces: Iterable[Tensor]) -> Tensor:
        last = [kv[:, :, -1] for kv in pieces]
        return torch.cat(last, dim=1).to(self.dtype)  # (B, T, 2 Ekv)


class AttentionAlone(DecoderLayer):
    """A decoder layer without an MLP."""

    def __init__(self, **sizes):
        super().__init__(**sizes)
        del self.post_attention_layernorm, self.mlp

    def feed_forward(self, x: Tensor) -> Tensor:
        return x


class InOneLayer:
    """Put before a class of the paper's family, this takes SA's MLP away. SA and CA together are
    then one layer, as GLIDE's: self-attention, cross-attention, MLP. (EAGLE's has one attention.)
    """

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        self.self_attention = new_layer(self, AttentionAlone)


class PaperOneLayerDrafter(InOneLayer, PaperDrafter):
    """The paper's, in one layer."""

    mlps = 1


class LastLayerOneLayerDrafter(InOneLayer, LastLayerDrafter):
    """A memory of the target's last layer, in one layer."""


class GlideOneLayerDrafter(InOneLayer, GlideDrafter):
    """GLIDE's reading in GLIDE's shape."""


# --- The autoregressive family ---
#
# Number the tokens as in moa.py, with the root t as the newest one. Let v_j be the vector that is
# read of token j. Then the drafter computes a_i, which predicts token i + 1, from
#
#     the embeddings e_0, ..., e_i, and of each token the vector of the one before it:
#         v_j for a verified token j          made of the target's states
#         a_j for the root and drafted ones   what the drafter has just computed there
#
# A draft takes as many steps as it has tokens. `unroll` takes these steps for all positions of a
# text at once. In step s every query i is in a draft whose root is i - s. Its own token and those
# before it, back to the root, belong to that draft. What they computed in steps s, s - 1, ..., 0 is
# what query i attends to; before the root it attends to verified tokens. Here query 6 in step 2:
#
#     position    0 1 2 3 4 5 6
#     step 0      + + + + + . .      verified tokens 0 to 3, and the root 4
#     step 1      . . . . . + .
#     step 2      . . . . . . +
#
# (This is EAGLE-3's "training-time test". Their code calls position i + s what is i here.)


class AutoregressiveDrafter(Drafter):
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
        """Return the R modules of the target whose outputs are read."""
        return []

    def states_of(self, reading: Reading) -> Tensor:
        """Return the R states that are read of each token, side by side, (B, T, R E)."""
        batch, count = reading.tokens.shape
        return reading.final.new_zeros(batch, count, 0)

    def condense(self, states: Tensor) -> Tensor:
        """Make the vector v of each token of its states (B, T, R E) -> (B, T, E)."""
        return states.to(self.dtype)

    def update_of(self, tokens: list[int], vectors: Tensor, end: int) -> CacheUpdate:
        """Return the vectors of T tokens that have been verified, in the place of CA's keys and
        values. vectors: (1, T, E). end: the position after the last of them."""
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
    """EAGLE's: one decoder layer over U e + W v, where v is the target's final hidden state. As in
    EAGLE's code, that layer has no norm before its attention.

    EAGLE keeps U and W in one matrix. Here they are two, since Muon moves a matrix equally far in
    all directions: v is some ten times as large as e, so nearly all of these would be W's.
    """

    reads_states = 1

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        width = target.config.hidden_size
        self.join_embedding = nn.Linear(width, width, bias=False)  # U
        self.join_vector = nn.Linear(width, width, bias=False)  # W
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


class Eagle3TwoLayersDrafter(WithSecondLayer, Eagle3Drafter):
    """EAGLE-3's, with as many layers of attention as the paper's SA and CA."""


# --- The autoregressive family while drafting ---


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
        self.waiting: list[int] = []  # U tokens that are verified, but not in the cache yet
        # Of the tokens before those that wait and before the root: (1, U + 1, E).
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


class StateVerifier(ExactVerifier):
    """A verifier for drafters that read states of the target's."""

    def __init__(self, model: Llama, drafter: Drafter, capacity: int, sampling: Sampling):
        super().__init__(model, NoDrafter(), capacity, sampling)
        self.reader = drafter

    def prefill(self, prompt: list[int]) -> DetailedResult:
        with self.outputs() as outputs:
            result = super().prefill(prompt)
        return self.with_vectors(result, prompt, outputs, list(range(len(prompt))))

    def verify(self, draft: Draft) -> DetailedResult:
        with self.outputs() as outputs:
            result = super().verify(draft)
        path = result.draft.path_of(result.accepted)
        return self.with_vectors(result, [draft.tokens[0], *result.accepted], outputs, path)

    @contextmanager
    def outputs(self) -> Iterator[list[list[Tensor]]]:
        """Collect what the read modules put out (1, T, E), a list for each, within this block. (A
        prompt may take several passes, and a pass may be padded on the right.)"""
        modules = self.reader.read_modules(self.model)
        outputs = [[] for _ in modules]
        handles = []
        for module, kept in zip(modules, outputs):
            handles.append(module.register_forward_hook(partial(keep_output, kept)))
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()

    def with_vectors(
        self, result: DetailedResult, tokens: list[int], outputs: list, path: list[int]
    ) -> DetailedResult:
        """Return the result with what the drafter makes of verified tokens' states. path: their
        places in passes."""
        states = [torch.cat(kept, dim=1)[:, path] for kept in outputs]
        nothing = torch.zeros(1, len(tokens), 0, device=self.model.device)  # some read no states
        vectors = self.reader.condense(torch.cat([nothing, *states], dim=-1))
        update = self.reader.update_of(tokens, vectors, end=self.cache.length)
        return replace(result, update=update)


def keep_output(kept: list[Tensor], _module: nn.Module, _inputs: tuple, output: Tensor) -> None:
    kept.append(output)


# --- The arms ---


@dataclass(frozen=True)
class Arm:
    """How a drafter is made and trained. By default as in the paper, with N = 0."""

    kind: type[Drafter] = PaperDrafter
    tli: int = 0  # N
    extra_layers: int = 0  # of the target's: it has as many parameters more than the other arms
    run_length: tuple[int, int] = (5, 15)  # of mock cycles, see train.py
    kl_weight: float = 0.1
    feature_weight: float = 1.0
    likeliest_weight: float = 0.0  # of HASS's loss on the ten likeliest tokens
    # With N > 0, how CA's output is compared with the state that enters the last N layers: "plain",
    # "scaled" (in the unit of `scale_of_states`), or not at all, "none".
    ca_loss: str = "plain"
    # Of the autoregressive family alone:
    steps: int = 1  # of `unroll`, in training
    step_weight: float = 0.8  # of the loss of each step over the step before, as in EAGLE-3's code
    detached: bool = False  # no gradient flows through the vectors of the step before
    noise: float = 0.0  # on the vectors of verified tokens, uniform, from -noise / 2 to noise / 2

    @property
    def is_autoregressive(self) -> bool:
        return issubclass(self.kind, AutoregressiveDrafter)


ON_POLICY = Arm(noise=0.2, steps=3, step_weight=1.0, detached=True)  # as in HASS's code

ARMS = {
    "full": Arm(),
    "full-unmasked": Arm(run_length=(1, 1)),
    "full-one-run": Arm(run_length=(100_000, 100_000)),
    "full-kl-1": Arm(kl_weight=1.0),
    "full-hass-loss": Arm(likeliest_weight=1.0),
    "n-1": Arm(tli=1),
    "n-2": Arm(tli=2),
    "n-4": Arm(tli=4),
    "n-1-scaled": Arm(ScaledDrafter, tli=1, ca_loss="scaled"),
    "n-1-scaled-output": Arm(ScaledDrafter, tli=1),
    "n-1-scaled-loss": Arm(tli=1, ca_loss="scaled"),
    "n-1-scaled-no-ca-loss": Arm(ScaledDrafter, tli=1, ca_loss="none"),
    "n-1-new": Arm(NewLayerDrafter, tli=1, extra_layers=1, ca_loss="none"),
    "full-larger": Arm(extra_layers=1),
    "full-three-layers": Arm(ThreeLayersDrafter, extra_layers=1),
    "full-one-layer": Arm(PaperOneLayerDrafter),
    "last-layer": Arm(LastLayerDrafter),
    "last-layer-lsa": Arm(LastLayerLsaDrafter),
    "last-state": Arm(LastStateDrafter),
    "last-input": Arm(LastInputDrafter),
    "last-layer-one-layer": Arm(LastLayerOneLayerDrafter),
    "glide": Arm(GlideDrafter),
    "glide-one-layer": Arm(GlideOneLayerDrafter),
    "no-memory": Arm(NoMemoryDrafter),
    "no-memory-one-layer": Arm(OneLayerDrafter),
    "no-memory-two-attentions": Arm(NoMemoryTwoAttentionsDrafter),
    "eagle": Arm(EagleDrafter, noise=0.2),
    "eagle-two-layers": Arm(EagleTwoLayersDrafter, noise=0.2),
    "eagle-two-layers-on-policy": replace(ON_POLICY, kind=EagleTwoLayersDrafter),
    "hass": replace(ON_POLICY, kind=EagleDrafter, likeliest_weight=1.0),
    "hass-two-layers": replace(ON_POLICY, kind=EagleTwoLayersDrafter, likeliest_weight=1.0),
    "eagle-3": Arm(Eagle3Drafter, feature_weight=0.0, steps=7),
    "eagle-3-two-layers": Arm(Eagle3TwoLayersDrafter, feature_weight=0.0, steps=7),
    "kl-only": Arm(feature_weight=0.0),
    "smooth-l1-only": Arm(kl_weight=0.0),
}


def new_drafter_of(
    arm: Arm, target: Llama, width: int | None, vocabulary: Tensor | None, seed: int
) -> Drafter:
    """Return a drafter with random weights, as large as the paper's with its default sizes, and the
    arm's extra layers.

    SA and CA of all arms have as many kv heads as the target, as EAGLE's and GLIDE's layers have by
    themselves (the paper's have half as many), and MLPs as wide as the size allows.

    width: of the MLPs of the paper's drafter that sets the size (None: its default).
    vocabulary (V'): the only tokens to draft.
    """
    config = default_config(target)
    if width is not None:
        config = with_mlps(config, width)
    with torch.device("meta"):
        wanted = count_parameters(Drafter(target, config))
    wanted += arm.extra_layers * sum(p.numel() for p in target.layers[-1].parameters())
    kv_heads = target.config.num_key_value_heads
    config = replace(
        config,
        target_layer_inference=arm.tli,
        self_attention_num_key_value_heads=kv_heads,
        cross_attention_num_key_value_heads=kv_heads,
    )
    with torch.device("meta"):
        # The size grows along a line with the width of the MLPs: two widths give this line.
        narrow = count_parameters(arm.kind(target, with_mlps(config, 24)))
        wide = count_parameters(arm.kind(target, with_mlps(config, 48)))
    inner = 24 + round(24 * (wanted - narrow) / (wide - narrow))
    torch.manual_seed(seed)
    drafter = arm.kind(target, with_mlps(config, max(1, inner))).to(target.device)
    if vocabulary is not None:
        drafter.lm_head = LimitedHead(target, vocabulary)
    return drafter


def with_mlps(config: DrafterConfig, width: int) -> DrafterConfig:
    return replace(
        config,
        layer_self_attention_intermediate_size=width,
        self_attention_intermediate_size=width,
        cross_attention_intermediate_size=width,
    )


def count_parameters(drafter: Drafter) -> int:
    return sum(parameter.numel() for parameter in drafter.trained_parameters().values())


class LimitedHead(nn.Module):
    """An LM head that gives all tokens but V' of them the logit minus infinity."""

    def __init__(self, target: Llama, vocabulary: Tensor):
        super().__init__()
        self.vocab_size = target.config.vocab_size
        self.register_buffer("vocabulary", vocabulary)  # (V')
        rows = target.lm_head.weight[vocabulary]
        self.weight = nn.Parameter(rows, requires_grad=False)  # (V', E)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.spread(F.linear(hidden, self.weight))

    def spread(self, logits: Tensor) -> Tensor:
        """Return logits of all tokens, given those of V'."""
        everywhere = logits.new_full((*logits.shape[:-1], self.vocab_size), -math.inf)
        return everywhere.index_copy_(-1, self.vocabulary, logits)


class SharpHead(nn.Module):
    """An LM head whose distributions at temperature 1 are those of another at `temperature`."""

    def __init__(self, head: nn.Module, temperature: float):
        super().__init__()
        self.head = head
        self.weight = head.weight
        self.temperature = temperature

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(hidden) / self.temperature


@contextmanager
def sharpened(drafter: Drafter, temperature: float) -> Iterator[None]:
    """Give a drafter the q of a temperature within this block: greedy trees then rank their paths
    by it."""
    head = drafter.lm_head
    drafter.lm_head = SharpHead(head, temperature)
    try:
        yield
    finally:
        drafter.lm_head = head


@dataclass
class WithArm:
    """A way to answer prompts, as `WithDrafts` of app/answers.py, with any of these drafters."""

    target: Llama
    drafter: Drafter
    limits: DraftLimits

    def cycles(self, prompt: list[int], config: GenerationConfig) -> Cycles:
        sampling = config.new_sampling(self.target.device)
        capacity = count_slots(prompt, config, self.limits)
        if isinstance(self.drafter, AutoregressiveDrafter | LastStateDrafter):
            verifier = StateVerifier(self.target, self.drafter, capacity, sampling)
        else:
            verifier = ExactVerifier(self.target, self.drafter, capacity, sampling)
        if isinstance(self.drafter, AutoregressiveDrafter):
            state = AutoregressiveState(self.drafter, capacity, sampling)
        else:
            state = TreeSampler(self.drafter, capacity, sampling)
        return timed_cycles(verifier, state, prompt, config, self.limits)
