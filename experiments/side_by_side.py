"""How arms are trained side by side: the target reads a batch once, and all learn from that pass.

The losses are those of train.py, and HASS's. What differs from arm to arm is in its `Arm`.

Shapes: as in moa.py and train.py; n trained positions, and V' tokens that are drafted.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Callable, Collection, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Subset
from tqdm import tqdm

from app.evaluation import mixed_precision, pad_for_gpu
from app.training import Optimizers, RunConfig, scheduled_rate
from experiments.arms import Arm
from experiments.autoregressive import unroll
from experiments.paper_family import moa_features
from experiments.reading import Reading, read
from llama import Llama
from moa import Drafter
from plumbing.errors import InputError
from plumbing.journal import Journal
from train import (
    MAX_GRADIENT_NORM,
    Example,
    collate,
    count_trained,
    draw_batches,
    draw_examples,
    loss_mask,
    smooth_l1_loss,
)

LIKELIEST = 10  # tokens in HASS's loss
LOSSES_EVERY = 50  # updates


@dataclass
class Entrant:
    """An arm in training."""

    name: str
    arm: Arm
    target: Llama  # what it drafts for (`n-1-new` has another model in the place of drafter.target)
    drafter: Drafter
    rate: float  # the peak of its learning rate
    optimizer: Optimizers
    state_scale: float = 1.0  # the unit in which its loss compares CA's output, with N > 0


# --- Losses ---


class Lesson(NamedTuple):
    """What all entrants learn from in a batch."""

    reading: Reading
    trained: Tensor  # (B, T), True at n positions: `loss_mask` of train.py
    log_p: Tensor  # the target's distributions there, over the V' tokens that are drafted, (n, V')


@torch.no_grad()
def make_lesson(target: Llama, lm_head: nn.Module, batch: Example) -> Lesson:
    """Let the target read a batch. lm_head: the drafters', which is the same for all."""
    trained = loss_mask(batch.answer)
    reading = read(target, batch.tokens)
    logits = F.linear(reading.final[trained], lm_head.weight)
    return Lesson(reading, trained, logits.log_softmax(-1, dtype=torch.float32))


def loss_of(entrant: Entrant, lesson: Lesson, horizon: Tensor, noise: Tensor) -> Tensor:
    """Return the loss of an arm, summed over trained positions.

    horizon (B, T): see train.py. noise (B, T, E): from -1/2 to 1/2.
    """
    if entrant.arm.is_autoregressive:
        return loss_of_steps(entrant, lesson, noise)
    drafter = entrant.drafter
    reading, trained, log_p = lesson
    [(ca_output, features)] = moa_features(drafter, reading, [horizon])
    smooth_l1 = smooth_l1_loss(features[trained], reading.final[trained])
    if drafter.N > 0 and entrant.arm.ca_loss != "none":
        entering = reading.states[-1 - drafter.N]  # the states that enter the last N layers
        scale = entrant.state_scale
        ca_loss = smooth_l1_loss(ca_output[trained] / scale, entering[trained] / scale)
        smooth_l1 = (smooth_l1 + ca_loss) / 2  # half each, as in train.py
    log_q = log_distributions(features[trained], drafter)
    return weighted_loss(entrant.arm, log_p, log_q, smooth_l1)


def loss_of_steps(entrant: Entrant, lesson: Lesson, noise: Tensor) -> Tensor:
    """Return the loss of an autoregressive arm: a weighted mean over its steps."""
    arm = entrant.arm
    drafter = entrant.drafter
    reading, trained, log_p = lesson
    loss = 0.0
    weights = 0.0
    outputs = unroll(drafter, reading, arm.steps, arm.noise * noise, arm.detached)
    for step, a in enumerate(outputs):
        # Query i is in a draft whose root is token i - step, which must be in an answer, too.
        with_root = trained & F.pad(trained, (step, 0))[:, :trained.shape[1]]
        features = drafter.feature(a)[with_root]
        log_q = log_distributions(features, drafter)
        smooth_l1 = smooth_l1_loss(features, reading.final[with_root])
        weight = arm.step_weight**step
        loss = loss + weight * weighted_loss(arm, log_p[with_root[trained]], log_q, smooth_l1)
        weights += weight
    return loss / weights


def weighted_loss(arm: Arm, log_p: Tensor, log_q: Tensor, smooth_l1: Tensor) -> Tensor:
    """Return the weighted sum of an arm's losses. log_p, log_q (n, V')"""
    loss = arm.kl_weight * kl_divergence(log_p, log_q) + arm.feature_weight * smooth_l1
    if arm.likeliest_weight > 0:
        loss = loss + arm.likeliest_weight * cross_entropy_of_likeliest(log_p, log_q)
    return loss


def log_distributions(features: Tensor, drafter: Drafter) -> Tensor:
    """Return the drafter's distributions over the V' tokens that are drafted, log q (n, V')."""
    logits = F.linear(features, drafter.lm_head.weight)
    return logits.log_softmax(-1, dtype=torch.float32)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return KL(p || q), summed over positions, as `kl_divergence` of train.py does. (There p is
    computed from hidden states. Here log_p (n, V') is computed once, for all arms.)"""
    return (log_p.exp() * (log_p - log_q)).sum()


def cross_entropy_of_likeliest(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return HASS's loss, summed over positions: the terms of the cross-entropy of p and q that are
    of the target's likeliest tokens."""
    log_p, tokens = log_p.topk(min(LIKELIEST, log_p.shape[-1]), dim=-1)
    return -(log_p.exp() * log_q.gather(-1, tokens)).sum()


# --- Training ---

Scores = dict[str, dict[str, dict]]  # by arm, by kind of drafts: tokens and passes of each prompt


def train_side_by_side(
    entrants: list[Entrant],
    training: Subset,
    config: RunConfig,
    journal: Journal,
    stages: Collection[int],
    score: Callable[[list[Entrant]], Scores],
) -> None:
    """Train all entrants up to config.updates, and log their scores at each stage."""
    batches = islice(draw_batches(len(training), config), journal.done, None)
    sums = {entrant.name: 0.0 for entrant in entrants}
    summed = 0  # updates. After an interruption the sums begin anew.
    rest = range(journal.done, config.updates)
    for update in tqdm(rest, "updates", initial=journal.done, total=config.updates):
        batch = [training[index] for index in next(batches)]
        for name, loss in make_update(entrants, batch, update, config).items():
            sums[name] += loss
        summed += 1
        done = update + 1
        if done % LOSSES_EVERY == 0:
            means = {name: float(total) / summed for name, total in sums.items()}
            journal.log(done, {"losses": means})
            sums = dict.fromkeys(sums, 0.0)
            summed = 0
        if done in stages:
            for name, scores in score(entrants).items():
                journal.log(done, {"arm": name} | scores)
        if done % config.save_every == 0 or done == config.updates:
            journal.save(done)


def make_update(
    entrants: list[Entrant], batch: list, update: int, config: RunConfig
) -> dict[str, Tensor]:
    """Make one update of every entrant. Returns their losses, means over trained positions."""
    target = entrants[0].target
    lm_head = entrants[0].drafter.lm_head
    device = target.device
    # Arms differ in how long their mock cycles are, and so in what a position sees. The sort is
    # stable: their examples are the same conversations, in the same order.
    examples_of = {}
    for entrant in entrants:
        lengths = entrant.arm.run_length
        if lengths not in examples_of:
            examples = draw_examples(batch, update, replace(config, run_length=lengths))
            examples = [pad_for_gpu(example, device) for example in examples]
            examples_of[lengths] = sorted(examples, key=lambda example: len(example.tokens))
        entrant.drafter.zero_grad()
    total = count_trained(examples_of[entrants[0].arm.run_length])
    losses = {entrant.name: torch.zeros((), device=device) for entrant in entrants}
    for first in range(0, len(batch), config.micro_batch_size):
        micro_batch = {}
        for lengths, examples in examples_of.items():
            micro_batch[lengths] = collate(examples[first:first + config.micro_batch_size], device)
        with mixed_precision(device, config.dtype):
            lesson = make_lesson(target, lm_head, micro_batch[entrants[0].arm.run_length])
            noise = draw_noise(lesson.reading.final, config.seed, update, first)
            for entrant in entrants:
                horizon = micro_batch[entrant.arm.run_length].horizon
                loss = loss_of(entrant, lesson, horizon, noise) / total
                loss.backward()
                losses[entrant.name] += loss.detach()
    for entrant in entrants:
        parameters = entrant.drafter.trained_parameters().values()
        norm = nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        if not torch.isfinite(norm):
            raise InputError(f"update {update}: the gradients of {entrant.name} are not finite")
        for group in entrant.optimizer.param_groups:
            group["lr"] = scheduled_rate(update, replace(config, lr=entrant.rate), 1)
        entrant.optimizer.step()
    return losses


def draw_noise(like: Tensor, seed: int, update: int, first: int) -> Tensor:
    """Draw numbers from -1/2 to 1/2: the same ones after a training was resumed."""
    place = (seed << 48) + (update << 16) + first
    generator = torch.Generator(like.device).manual_seed(place)
    return torch.rand(like.shape, generator=generator, device=like.device) - 0.5
