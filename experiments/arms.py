"""The drafters that are compared, the *arms*: what each reads, how it is trained, how it drafts.

    full                        the paper's with N = 0 (and the differences in `new_drafter_of`)

`full`, but for one thing:

    full-unmasked               trained with mock cycles of one token, that is, without the mask
    full-one-run                a whole answer is one mock cycle
    full-kl-1                   KL has weight 1 in place of 0.1
    full-hass-loss              HASS's loss on the target's ten likeliest tokens is added
    full-larger                 wider MLPs, larger by the parameters of one target layer: a control
                                for `n-1`
    full-three-layers           a third layer in place of wider MLPs: a second control
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
    last-layer-one-layer, glide-one-layer       these memories, and SA has no MLP
    kl-only                     no Smooth L1

With reused layers, N > 0:

    n-1, n-2, n-4               the paper's
    n-1-scaled                  N = 1, and CA's output is multiplied by the size of the states that
                                enter the last layer over that of the final ones
                                (`scale_of_states`); the loss compares it in that unit
    n-1-scaled-output           CA's output alone is scaled, not its loss
    n-1-scaled-loss             the loss alone is scaled
    n-1-scaled-no-ca-loss       CA's output is scaled, and has no loss of its own
    n-1-no-ca-loss              nothing is scaled, and CA's output has no loss of its own
    n-1-new                     a new layer, which is trained, in the place of the reused one, and
                                CA's output has no loss of its own: a third control
    n-1-new-scaled              the same, but CA's output is scaled and has its loss, as in
                                `n-1-scaled`, for which it is the control

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
    eagle-3                     EAGLE-3's (Li et al. 2025): reads the states of three layers,
                                predicts no state of the target's, and is trained for seven steps on
                                its own outputs

An `Arm` says how a drafter is made, trained and used. Drafters of two families differ in what they
read of the newest tokens, which the target has not verified yet:

    paper_family.py     the memory of verified tokens only: `horizon` of train.py says which these
                        are
    autoregressive.py   one vector for each token before. Of a token that is not verified this is
                        the drafter's own output, so they run step by step, in training too.
"""
from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.answers import Cycles, count_slots, timed_cycles
from app.exact import ExactVerifier
from experiments.autoregressive import (
    AutoregressiveDrafter,
    AutoregressiveState,
    Eagle3Drafter,
    EagleDrafter,
    EagleTwoLayersDrafter,
    NoMemoryDrafter,
    NoMemoryTwoAttentionsDrafter,
    OneLayerDrafter,
)
from experiments.paper_family import (
    GlideDrafter,
    GlideOneLayerDrafter,
    LastInputDrafter,
    LastLayerDrafter,
    LastLayerLsaDrafter,
    LastLayerOneLayerDrafter,
    LastStateDrafter,
    NewLayerDrafter,
    PaperDrafter,
    PaperOneLayerDrafter,
    ScaledDrafter,
    ScaledNewLayerDrafter,
    ThreeLayersDrafter,
)
from experiments.reading import StateReader, StateVerifier
from llama import GenerationConfig, Llama
from moa import Drafter, DrafterConfig, DraftLimits, default_config
from speculate import TreeSampler


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
    "n-1-no-ca-loss": Arm(tli=1, ca_loss="none"),
    "n-1-new": Arm(NewLayerDrafter, tli=1, extra_layers=1, ca_loss="none"),
    "n-1-new-scaled": Arm(ScaledNewLayerDrafter, tli=1, extra_layers=1, ca_loss="scaled"),
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
    "kl-only": Arm(feature_weight=0.0),
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
        if isinstance(self.drafter, StateReader):
            verifier = StateVerifier(self.target, self.drafter, capacity, sampling)
        else:
            verifier = ExactVerifier(self.target, self.drafter, capacity, sampling)
        if isinstance(self.drafter, AutoregressiveDrafter):
            state = AutoregressiveState(self.drafter, capacity, sampling)
        else:
            state = TreeSampler(self.drafter, capacity, sampling)
        return timed_cycles(verifier, state, prompt, config, self.limits)
