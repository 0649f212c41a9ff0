"""Drafters of the paper's family: SA reads the tokens, CA a memory of verified ones. They differ in
what the memory is made of, and in what comes after CA. arms.py says which arm is which.

Shapes: as in moa.py and train.py.
"""
from __future__ import annotations

from dataclasses import replace
from typing import Iterable, Iterator

import torch
from torch import Tensor, nn

from experiments.reading import Reading, StateReader, read
from llama import DecoderLayer, Llama, rotary_table
from moa import (
    LSA_TOKENS,
    CacheUpdate,
    CrossAttentionLayer,
    Drafter,
    DrafterConfig,
    kv_hidden_size,
)
from train import cross_attend, reuse_target_layers, self_attend


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
        pieces = reading.kv.split(LSA_TOKENS, dim=1)
        memory = drafter.build_memory(pieces)  # (B, T, E), or GLIDE's (B, T, 2 Ekv)
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
        inner = each_of_two * kv_width // width  # of LSA's MLP, as in the paper
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
    """The paper's with N = 1, but CA's output is scaled up, as what it has to predict is large."""

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        self.cross_attention = new_layer(self, ScaledCrossAttention)
        self.cross_attention.scale = scale_of_states(target)


def scale_of_states(target: Llama) -> float:
    """Return the root mean square of the states that enter the target's last layer, divided by that
    of the final states: over random tokens, to one digit (10 with the toy). The first token is left
    out, since its states are far larger in many models."""
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


class ScaledNewLayerDrafter(ScaledDrafter, NewLayerDrafter):
    """The same with CA's output scaled, as `ScaledDrafter` does with a reused layer."""


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


class LastStateDrafter(StateReader):
    """The memory of a token is a projection of the target's final hidden state there."""

    def __init__(self, target: Llama, config: DrafterConfig):
        super().__init__(target, config)
        del self.layer_self_attention
        width = target.config.hidden_size
        self.Ekv2E = nn.Linear(width, width)  # with the name and the bias of the paper's

    def read_modules(self, target: Llama) -> list[nn.Module]:
        return [target.norm]

    def states_of(self, reading: Reading) -> Tensor:
        return reading.final

    def condense(self, states: Tensor) -> Tensor:
        return self.Ekv2E(states.to(self.dtype))

    def update_of(self, tokens: list[int], memory: Tensor, end: int) -> CacheUpdate:
        """Return CA's keys and values of the tokens' memory."""
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
