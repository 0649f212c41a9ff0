"""Scores of a drafter on held-out conversations: losses, and how often its drafts are right.

Training calls `evaluate` every --eval-every updates, and python -m experiments.evaluate scores a
finished drafter with it. A last section has what both need on a GPU and in bfloat16.
"""
from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from llama import Llama, Sampling
from moa import Drafter
from plumbing.conversations import TokenizedConversation
from plumbing.devices import DTYPES
from plumbing.errors import InputError
from train import (
    MAX_LOGITS_AT_ONCE,
    Example,
    TrainConfig,
    collate,
    cycle_horizon,
    distill,
    loss_mask,
)

EVALUATION_CYCLE = 8  # tokens of a mock cycle here, and so the greatest depth that is scored


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    sequences: list[TokenizedConversation],
    config: TrainConfig,
    dtype: str = "float32",
) -> dict:
    """Return the held-out losses and `depth_scores`. dtype: of products, see `mixed_precision`.

    As in training, each answer is cut into mock cycles, and one pass over a conversation scores all
    of its positions. Mock cycles have EVALUATION_CYCLE tokens here, except for the first and the
    last of an answer. Each position is scored at one depth only, its depth in its mock cycle.
    """
    sums = torch.zeros(3, device=drafter.device)
    cycles = []
    for i, (tokens, answer) in enumerate(tqdm(sequences, desc="evaluation", leave=False)):
        phase = i % EVALUATION_CYCLE  # each phase in turn, so that cycles begin anywhere
        horizon = cycle_horizon(answer, EVALUATION_CYCLE, phase)  # (T)
        example = pad_for_gpu(Example(tokens, answer, horizon), drafter.device)
        with mixed_precision(drafter.device, dtype):
            batch = collate([example], drafter.device)
            losses, features, final = distill(drafter, batch, config)
            right = first_choices_match(drafter, features, final)  # n of them
        sums += torch.stack(losses)
        depths = (torch.arange(len(tokens)) - horizon)[loss_mask(answer)]  # (n)
        for depth, is_right in zip(depths.tolist(), right):
            if depth == 1:  # a mock cycle begins
                cycles.append([])
            cycles[-1].append(is_right)
    loss, kl, smooth_l1 = (sums / sum(map(len, cycles))).tolist()
    scores = {"held_out_loss": loss, "held_out_kl": kl, "held_out_smooth_l1": smooth_l1}
    return scores | depth_scores(cycles)


def first_choices_match(drafter: Drafter, features: Tensor, final: Tensor) -> list[bool]:
    """Return for each position whether drafter and target choose the same token, given the hidden
    states that the drafter predicts (n, E), and the target's own (n, E)."""
    matches = []
    rows = max(1, MAX_LOGITS_AT_ONCE // drafter.target.config.vocab_size)
    for predicted, actual in zip(features.split(rows), final.split(rows)):
        drafts = drafter.distributions(predicted, Sampling()).argmax(-1)
        choices = drafter.target.lm_head(actual.to(drafter.target.dtype)).argmax(-1)
        matches += (drafts == choices).tolist()
    return matches


def depth_scores(cycles: list[list[bool]]) -> dict:
    """Return the "depth_accuracy" of some cycles, and the "implied_acceptance_length".

    cycle[d - 1] says whether the drafted token at depth d is the target's first choice. The
    accuracy at depth d is the share of right tokens at this depth, among the cycles that reach this
    depth and whose first d - 1 tokens are right. The list ends where no such cycle is left. With
    these two cycles

        True True False
        True False

    the accuracies are 2/2, 1/2 and 0/1.

    If the accuracies are a_1, a_2, ..., a cycle yields 1 + a_1 + a_1 a_2 + ... tokens: the implied
    acceptance length. This length is optimistic: mock cycles begin anywhere, but a real one usually
    begins after a token that the drafter got wrong. The length is also inexact where the text is
    not what the target would choose: a draft counts as right if it is the target's choice, but the
    cycle goes on with the text's token.
    """
    accuracies = []
    for depth in range(EVALUATION_CYCLE):
        outcomes = [cycle[depth] for cycle in cycles if len(cycle) > depth and all(cycle[:depth])]
        if not outcomes:
            break
        accuracies.append(sum(outcomes) / len(outcomes))
    length = 1 + np.cumprod(accuracies).sum()
    return {"depth_accuracy": accuracies, "implied_acceptance_length": length}


def draw_scores(scores: dict) -> str:
    """Draw the scores of `evaluate` as a line."""
    accuracies = " ".join(f"{accuracy:.0%}" for accuracy in scores["depth_accuracy"])
    return (
        f"held-out loss {scores['held_out_loss']:.3f}, right drafts by depth {accuracies}, "
        f"implied acceptance length {scores['implied_acceptance_length']:.2f}"
    )


# --- The chapter's passes on a GPU, and in bfloat16 ---

LENGTH_STEP = 64  # on a GPU, conversations are padded to a multiple of this


def check_context(seq_len: int, target: Llama) -> None:
    """Raise InputError if conversations of seq_len tokens, padded, exceed the target's context."""
    context = target.config.max_position_embeddings
    if target.device.type != "cpu":
        context = context // LENGTH_STEP * LENGTH_STEP
    if seq_len > context:
        raise InputError(f"--seq-len {seq_len}: the target's context is {context}")


def pad_for_gpu(example: Example, device: torch.device) -> Example:
    """Return the example with padding, unless the device is a CPU.

    On a GPU PyTorch plans its attention for each new shape, which takes tens of milliseconds. There
    should therefore be few shapes. (Without this padding, an H100 trained at less than half of its
    speed.) The padding is in no answer, so it is not trained.
    """
    if device.type == "cpu":
        return example
    padding = -len(example.tokens) % LENGTH_STEP
    return Example(*[F.pad(field, (0, padding)) for field in example])  # zeros or False


def mixed_precision(device: torch.device, dtype: str) -> torch.autocast:
    """Return a context in which matrix products are computed in `dtype`. With --dtype bfloat16, the
    frozen target was loaded in bfloat16, but the drafter's weights stay in float32: an update is
    much smaller than a weight, and would usually be rounded away."""
    product_type = DTYPES[dtype]
    return torch.autocast(device.type, product_type, enabled=product_type != torch.float32)
