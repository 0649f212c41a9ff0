"""Training: a frozen target teaches its drafter (paper, section 3.4 and appendix).

The target reads a conversation in one pass. The drafter learns to predict the target's final hidden
states h, and its distributions p of each next token. The drafter is shown only what it can also see
while drafting: the tokens so far, and the memory of verified tokens. With its predictions h' and q,
the loss of one position is

    0.1 KL(p || q) + 1.0 SmoothL1(h, h')

With N > 0, half of the Smooth L1 loss is on CA's output instead (see `distill`).

First, the file shows how one pass lets every position of an answer see exactly the memory that this
position would see while drafting: the memory up to its *horizon*. The losses and one update follow.
Read as far as the bar, the line that says where the method ends. After the bar comes an ordinary
training script.

    python train.py --data ultrachat.jsonl             # the paper's settings, one epoch
    python train.py --out runs/drafter --resume        # go on after any interruption
    torchrun --nproc-per-node 4 train.py --data FILE   # on four GPUs (untested)

Shapes: B sequences, T tokens, L layers of the target, 2 Ekv numbers for a token's keys and values
in a layer, E hidden size, V tokens in the vocabulary, V' tokens that may be drafted, N reused
layers, n trained positions. In code, h is `final` and h' is `predicted`.
"""
from __future__ import annotations

import plumbing.start  # first: no traceback for Ctrl-C or a missing package while PyTorch loads

import argparse
import itertools
import json
import math
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from llama import Llama, causal_mask, load_target
from moa import Drafter, default_config, new_drafter, save_drafter
from plumbing.conversations import (
    Conversations,
    Stream,
    TokenizedConversation,
    check_files,
    frequent_tokens,
    hold_out,
)
from plumbing.devices import DTYPES, choose_training_dtype
from plumbing.errors import InputError, run_command
from plumbing.flags import Parser, add_model_arguments, number, path, positive_int
from plumbing.hub import resolve_path
from plumbing.journal import (
    Journal,
    end_stopped_run,
    find_run,
    fingerprint_files,
    fingerprint_model,
    read_log,
    read_settings,
)
from plumbing.processes import (
    all_reduce,
    join_processes,
    leave_processes,
    progress_bar,
    rank,
    say,
    true_in_any,
    world_size,
)
from plumbing.signals import StopSignals


@dataclass(frozen=True)
class TrainConfig:
    """How to train. Defaults are the paper's, as far as the paper or its code states them. The
    differences from the authors' code are listed in experiments/README.md."""

    updates: int | None = None  # None: one pass over the data
    batch_size: int = 32  # sequences in an update
    micro_batch_size: int = 1  # sequences read at once: larger is faster, but takes more memory
    seq_len: int = 2048  # longer sequences are cut to this many tokens
    run_length: tuple[int, int] = (5, 15)  # the shortest and the longest run, see the next section
    kl_weight: float = 0.1  # the weight of KL(p || q)
    feature_weight: float = 1.0  # the weight of SmoothL1(h, h')
    lr: float = 3e-5  # the schedule "paper" peaks at 20 times this
    schedule: str = "paper"  # or "cosine"; see `learning_rate`
    warmup: int = 50  # updates
    optimizer: str = "adamw"  # or "muon"
    dtype: str = "float32"  # or "bfloat16"; see `mixed_precision`
    seed: int = 0
    eval_every: int = 200  # updates
    save_every: int = 50  # updates


# --- Horizons: training as drafting ---
#
# A *query* is a position at which the drafter runs: the drafter reads the tokens up to there, and
# drafts the next token. When a drafting cycle begins, the newest token has no memory yet, and the
# tokens drafted after it get none during the cycle. All queries of a cycle therefore see the same
# memory: that of the tokens before the newest one.
#
# Training imitates this without drafting anything. Each answer is cut into *runs*, and a run stands
# for a cycle: its queries see memory up to the token before the run, and no further. (A run is a
# piece of an answer. The training as a whole is called a *training run*.) The last token whose
# memory a query may see is the query's horizon. With runs of four after a prompt of four:
#
#     query at   reads tokens   and the memory of   drafts token   at depth
#        4         0 .. 4           0 .. 3               5            1     the first run begins
#        5         0 .. 5           0 .. 3               6            2
#        6         0 .. 6           0 .. 3               7            3
#        7         0 .. 7           0 .. 3               8            4     the run's last query
#        8         0 .. 8           0 .. 7               9            1     the next run begins
#
# In the first run, token 4 stands in for the newest token, and tokens 5 to 7 stand in for drafted
# ones. The horizon is where the memory column ends: at 3 in the first run, at 7 in the second. The
# depth is the place of a drafted token in its draft, counted from 1.
#
# While drafting, tokens 5 to 7 would be the drafter's own. If the target wrote the text, greedily,
# this difference hardly matters: right drafts are the tokens of the text, and what follows a wrong
# draft is discarded. Text by other authors, such as UltraChat's, continues in ways that the target
# never would. On such text, part of the training is on contexts that drafting never produces.
#
# All runs of a conversation have the same length, which is drawn from 5 to 15 each time the
# conversation is used. If the first run of an answer always had its full length, the answer's
# second query would always be at depth 2, its third at depth 3, and so on. The first run is
# therefore shortened by a number of tokens, the *phase*, which is drawn from 0 to length - 1. (The
# phase is an addition of ours.)
#
#     phase 0     4 5 6 7 | 8 9 10 11 | ..
#     phase 1     4 5 6 | 7 8 9 10 | ..
#     phase 2     4 5 | 6 7 8 9 | ..
#     phase 3     4 | 5 6 7 8 | ..
#
# Over time every position is trained at every depth that it can have in a draft.


def run_horizon(answer: Tensor, length: int, phase: int) -> Tensor:
    """Return the horizon of each query, (T). answer (T) is True at what the assistant wrote.

    A run has `length` tokens, with two exceptions: the first run of an answer has `phase` tokens
    fewer, and the last run ends where the answer ends. With length 4 and phase 1, an answer that
    begins at position 4 has the runs 4 5 6 | 7 8 9 10 | 11 .. with the horizons 3, 6 and 10.
    """
    horizons = []
    begin = None  # where the answer begins; None outside answers
    for position, in_answer in enumerate(answer.tolist()):
        if not in_answer:
            begin = None
            horizons.append(position)  # has no effect: nothing is trained outside answers
            continue
        if begin is None:
            begin = position
        # The position's place in its run, from 0. A shortened first run begins at place `phase`.
        place = (position - begin + phase) % length
        horizons.append(max(begin, position - place) - 1)  # the token before the run
    return torch.tensor(horizons)


class Example(NamedTuple):
    """A conversation, with its horizons for one update, as tensors of shape (T). `collate` stacks
    several examples into a micro-batch, which has the same fields in shape (B, T)."""

    tokens: Tensor
    answer: Tensor  # True at what the assistant wrote, its stop tokens included
    horizon: Tensor


def draw_examples(
    batch: list[TokenizedConversation], update: int, config: TrainConfig
) -> list[Example]:
    """Cut the answers of a batch into runs.

    What is drawn depends only on the seed and on `update`. A resumed training run therefore draws
    the same.
    """
    draws = np.random.default_rng((config.seed, update))
    shortest, longest = config.run_length
    lengths = draws.integers(shortest, longest, len(batch), endpoint=True)  # (B)
    phases = draws.integers(0, lengths)  # (B), each below its length
    examples = []
    for (tokens, answer), length, phase in zip(batch, lengths.tolist(), phases.tolist()):
        examples.append(Example(tokens, answer, run_horizon(answer, length, phase)))
    return examples


# --- Losses ---


def loss_mask(answer: Tensor) -> Tensor:
    """Return which positions are trained, (..., T): position i predicts token i + 1, and is trained
    if both are in an answer.

    (The first token of an answer is not predicted, because the target chooses it when it reads the
    prompt.)
    """
    followed = F.pad(answer[..., 1:], (0, 1))  # False at the end
    return answer & followed


class TargetStates(NamedTuple):
    """What the target computes from a text."""

    kv: Tensor  # the KV cache, (B, T, L, 2 Ekv)
    entering: Tensor | None  # the hidden states that enter the last N layers, (B, T, E), if N > 0
    final: Tensor  # h: the hidden states after the final norm, (B, T, E)


@torch.no_grad()
def target_pass(target: Llama, tokens: Tensor, N: int) -> TargetStates:
    """Run the target over tokens (B, T), and keep the hidden states that enter its last N layers.

    `Llama.hidden` has the same loop, but returns none of these states. The cache's length stays 0,
    because no later pass continues the cache.
    """
    batch, count = tokens.shape
    first_reused = len(target.layers) - N
    rope = target.rotary[:, :count]
    mask = causal_mask(count, past=0, device=tokens.device)
    cache = target.new_cache(count, batch)
    x = target.embed_tokens(tokens)
    entering = None
    for i, layer in enumerate(target.layers):
        if i == first_reused:
            entering = x
        x = layer(x, rope, mask, cache, i)
    return TargetStates(cache.by_token(0, count), entering, target.norm(x))


def kl_divergence(predicted: Tensor, final: Tensor, head: Tensor) -> Tensor:
    """Return KL(p || q), summed over n positions.

    p follows from the target's final hidden states (n, E), and q from those that the drafter
    predicts (n, E), through the weight of the LM head (V', E). If the drafter may draft only some
    of the V tokens, then V' < V, and p is also scaled to sum to 1 over these V' tokens.

    When tokens are sampled at temperature 1 without top-p, KL bounds how often a drafted token is
    rejected. A rejection has probability sum max(p - q, 0), which is at most sqrt(KL / 2) by
    Pinsker's inequality. If V' < V, the target's probability of all tokens that may not be drafted
    adds to this bound.
    """
    # The softmax is in float32: in bfloat16, rounding errors would swamp a sum over V tokens.
    log_p = F.linear(final, head).log_softmax(-1, dtype=torch.float32)  # (n, V')
    log_q = F.linear(predicted, head).log_softmax(-1, dtype=torch.float32)  # (n, V')
    return (log_p.exp() * (log_p - log_q)).sum()


MAX_LOGITS_AT_ONCE = 2**25  # 128 MiB, plus a few temporaries of that size


def kl_in_pieces(predicted: Tensor, final: Tensor, head: Tensor) -> Tensor:
    """Return `kl_divergence`, computed for a few positions at a time to save memory.

    A distribution has V numbers (128,256 for Llama-3), and autograd would keep several
    distributions per position for the backward pass. `checkpoint` keeps no distribution: the
    backward pass computes each piece again.
    """
    rows = max(1, MAX_LOGITS_AT_ONCE // len(head))
    total = predicted.new_zeros(())
    for piece in zip(predicted.split(rows), final.split(rows)):
        kl = checkpoint(
            kl_divergence, *piece, head, use_reentrant=False, preserve_rng_state=False
        )
        total = total + kl
    return total


def smooth_l1_loss(predicted: Tensor, actual: Tensor) -> Tensor:
    """Return Smooth L1 between hidden states (n, E), mean over E, summed over n positions."""
    loss = F.smooth_l1_loss(predicted.float(), actual.float(), reduction="none")  # (n, E)
    return loss.mean(-1).sum()


class Losses(NamedTuple):
    """Losses, each summed over trained positions: scalar tensors."""

    loss: Tensor  # the weighted sum of the other two
    kl: Tensor
    smooth_l1: Tensor


class Distillation(NamedTuple):
    """The losses of a micro-batch, and the hidden states at its n trained positions."""

    losses: Losses
    predicted: Tensor  # h', (n, E)
    final: Tensor  # h, (n, E)


def distill(drafter: Drafter, micro_batch: Example, config: TrainConfig) -> Distillation:
    """Run the target and the drafter once over a micro-batch, and compare their results."""
    tokens, answer, horizon = micro_batch
    trained = loss_mask(answer)  # True at n positions
    states = target_pass(drafter.target, tokens, drafter.N)
    ca_output, predicted = drafter(tokens, states.kv, horizon)  # (B, T, E) each; equal if N = 0
    predicted = predicted[trained].float()  # (n, E)
    final = states.final[trained].float()  # (n, E)
    kl = kl_in_pieces(predicted, final, drafter.head.linear.weight)
    smooth_l1 = smooth_l1_loss(predicted, final)
    if drafter.N > 0:
        # CA's output then predicts the states that enter the reused layers. As in the authors'
        # code, its Smooth L1 loss and that of the final states count half each.
        ca_smooth_l1 = smooth_l1_loss(ca_output[trained], states.entering[trained])
        smooth_l1 = (smooth_l1 + ca_smooth_l1) / 2
    loss = config.kl_weight * kl + config.feature_weight * smooth_l1
    return Distillation(Losses(loss, kl, smooth_l1), predicted, final)


# --- One update ---

LENGTH_STEP = 64  # on a GPU, sequences are padded to a multiple of this


def collate(examples: list[Example], device: torch.device) -> Example:
    """Pad examples to one length, and stack them into a micro-batch. The padding is on the right,
    where no causal query looks. It is in no answer, so it is not trained."""
    longest = max(len(example.tokens) for example in examples)
    if device.type != "cpu":
        # On a GPU PyTorch plans its attention for each new shape, which takes tens of milliseconds.
        # There should therefore be few shapes. (Without this padding, an H100 trained at less than
        # half of its speed.)
        longest = math.ceil(longest / LENGTH_STEP) * LENGTH_STEP

    def stack(tensors: list[Tensor]) -> Tensor:
        padded = [F.pad(tensor, (0, longest - len(tensor))) for tensor in tensors]  # zeros or False
        return torch.stack(padded).to(device)  # (B, T)

    return Example(
        tokens=stack([example.tokens for example in examples]),
        answer=stack([example.answer for example in examples]),
        horizon=stack([example.horizon for example in examples]),
    )


def mixed_precision(device: torch.device, dtype: str) -> torch.autocast:
    """Return a context in which matrix products are computed in `dtype`. With --dtype bfloat16, the
    frozen target was loaded in bfloat16, but the drafter's weights stay in float32: an update is
    much smaller than a weight, and would usually be rounded away."""
    product_type = DTYPES[dtype]
    return torch.autocast(device.type, product_type, enabled=product_type != torch.float32)


def accumulate_gradients(
    drafter: Drafter, examples: list[Example], total: int, config: TrainConfig
) -> Tensor:
    """Compute the gradients of the examples' losses. Returns the sums of these `Losses`, (3).

    Micro-batches are read one after the other. The loss of each is divided by `total`, the number
    of trained positions in the whole batch, so that all gradients add up to that of the mean.
    """
    sums = torch.zeros(3, device=drafter.device)
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)  # not None, even if there are no examples
    # Sequences of similar lengths are read together, so that little padding is needed.
    examples = sorted(examples, key=lambda example: len(example.tokens))
    for first in range(0, len(examples), config.micro_batch_size):
        micro_batch = collate(examples[first:first + config.micro_batch_size], drafter.device)
        with mixed_precision(drafter.device, config.dtype):
            losses = distill(drafter, micro_batch, config).losses
        (losses.loss / total).backward()
        sums += torch.stack(losses).detach()
    return sums


def compute_gradients(
    drafter: Drafter, batch: list[TokenizedConversation], update: int, config: TrainConfig
) -> list[float]:
    """Compute the gradients of one update, whose loss is the mean over all trained positions of the
    batch. Returns the means of all three `Losses`, in their order.

    Several processes each take a share of the batch (see plumbing/processes.py).
    """
    total = sum(int(loss_mask(sequence.answer).sum()) for sequence in batch)
    examples = draw_examples(batch, update, config)
    share = examples[rank()::world_size()]  # perhaps none; a single process takes all examples
    sums = accumulate_gradients(drafter, share, total, config)  # (3)
    for parameter in drafter.parameters():
        all_reduce(parameter.grad)  # sums up over the processes
    all_reduce(sums)
    return (sums / total).tolist()


# --- The learning rate, and the step ---


def learning_rate(update: int, config: TrainConfig, epoch_updates: int) -> float:
    """Return the learning rate of an update, counted from 0. An epoch has `epoch_updates`.

    The schedule "paper", as in the authors' code:

        the first `warmup` updates             rises on a straight line to 20 lr
        up to the end of the first epoch       falls on a straight line to lr
        after that                             lr

    If an epoch is shorter than two warm-ups, the rise takes the first half of the epoch instead.

    The schedule "cosine":

        up to the last update          lr (1 + cos(pi update / updates)) / 2: from lr to 0
        the first `warmup` updates     the same, times a factor that rises to 1 on a straight line
    """
    if config.schedule == "cosine":
        rise = min(1.0, (update + 1) / config.warmup)
        return rise * config.lr * (1 + math.cos(math.pi * update / config.updates)) / 2
    warmup = min(config.warmup, max(1, epoch_updates // 2))
    if update < warmup:
        return config.lr * 20 * (update + 1) / warmup
    if update < epoch_updates:
        return config.lr * (20 - 19 * ((update - warmup) / (epoch_updates - warmup)))
    return config.lr


def make_optimizers(model: nn.Module, name: str) -> list[torch.optim.Optimizer]:
    """Return AdamW, as in the paper, or Muon (Jordan et al. 2024) for matrices and AdamW for the
    rest. Muon steps along the orthogonal matrix that is nearest to a matrix's momentum, so that it
    learns in all directions at the same rate. `apply_gradients` sets the learning rates."""
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.0)
    if name == "adamw":
        return [adamw(model.parameters())]
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    # Muon's steps are scaled to be as large as AdamW's, so that one learning rate serves both.
    muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw(vectors)]


def apply_gradients(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Move the weights against their gradients, at a learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()


MAX_GRADIENT_NORM = 1.0  # longer gradients are scaled down to this norm


def train_step(
    drafter: Drafter,
    optimizers: list[torch.optim.Optimizer],
    batch: list[TokenizedConversation],
    update: int,
    lr: float,
    config: TrainConfig,
) -> dict[str, float]:
    """Make one update, at a learning rate. Returns its losses, learning rate and gradient norm, for
    the log.

    Raises InputError if a gradient is not finite.
    """
    means = compute_gradients(drafter, batch, update, config)
    norm = nn.utils.clip_grad_norm_(drafter.parameters(), MAX_GRADIENT_NORM).item()
    if not math.isfinite(norm):
        raise InputError(
            f"update {update + 1}: the gradient is not finite; begin again with a lower --lr and a "
            "different --out"
        )
    apply_gradients(optimizers, lr)
    return dict(zip(Losses._fields, means)) | {"lr": lr, "grad_norm": norm}


# --- The method ends here: what follows makes it a program ---
#
# In order: the loop, which logs, evaluates and saves; evaluation; a whole training run; the command
# line.


# --- The loop ---


def train(
    drafter: Drafter,
    optimizers: list[torch.optim.Optimizer],
    stream: Stream,
    held_out: list[TokenizedConversation],
    journal: Journal,
    config: TrainConfig,
    max_depth: int,
) -> None:
    """Train up to config.updates. A training run that was interrupted has done the first
    journal.done updates.

    held_out, max_depth: for `evaluate`. Raises InputError if a gradient is not finite, and
    SystemExit after Ctrl-C or SIGTERM.
    """
    conversations = iter(stream)
    epoch_updates = stream.batches_per_epoch(config.batch_size)
    with (
        StopSignals("stopping after this update, or evaluation") as signals,
        progress_bar(journal.done, config.updates) as progress,
    ):
        for update in range(journal.done, config.updates):
            began = perf_counter()
            batch = list(itertools.islice(conversations, config.batch_size))
            lr = learning_rate(update, config, epoch_updates)
            measured = train_step(drafter, optimizers, batch, update, lr, config)
            tokens = sum(len(conversation.tokens) for conversation in batch)
            speed = tokens / (perf_counter() - began)

            done = update + 1
            is_last = done == config.updates
            journal.log(done, measured | {"tokens_per_second": speed})
            progress.set_postfix_str(f"loss {measured['loss']:.3f}, {speed:.0f} tokens/s")
            progress.update()
            if rank() == 0 and (is_last or done % config.eval_every == 0):
                scores = evaluate(drafter, held_out, config, max_depth)
                journal.log(done, scores)
                say(draw_scores(scores, done))
            # All processes have to stop at the same update, whichever received the signal.
            stops = true_in_any(bool(signals.received))
            if stops or is_last or done % config.save_every == 0:
                journal.save(done, stream.position)
            if stops:
                break
    if journal.done < config.updates:
        end_stopped_run(journal.done, signals)


# --- Evaluation ---

EVALUATION_RUN = 8  # the length of runs in evaluations, and so the greatest depth that is scored


@torch.no_grad()
def evaluate(
    drafter: Drafter,
    sequences: list[TokenizedConversation],
    config: TrainConfig,
    max_depth: int = EVALUATION_RUN,
) -> dict:
    """Return the held-out losses, and `depth_scores` up to max_depth.

    As in training, each answer is cut into runs, and one pass over a conversation scores all of its
    positions. Runs have EVALUATION_RUN tokens here, except for the first and the last of an answer.
    Each position is scored at one depth only, its depth in its run.
    """
    sums = torch.zeros(3, device=drafter.device)
    runs = []
    for i, (tokens, answer) in enumerate(tqdm(sequences, desc="evaluation", leave=False)):
        phase = i % EVALUATION_RUN  # each phase in turn, so that runs begin anywhere in an answer
        horizon = run_horizon(answer, EVALUATION_RUN, phase)  # (T)
        micro_batch = collate([Example(tokens, answer, horizon)], drafter.device)
        with mixed_precision(drafter.device, config.dtype):
            result = distill(drafter, micro_batch, config)
            right = first_choices_match(drafter, result)  # (n)
        sums += torch.stack(result.losses)
        depth = (torch.arange(len(tokens)) - horizon)[loss_mask(answer)]  # (n)
        begins = depth == 1  # at the first position of a run, and at no other
        for is_first, is_right in zip(begins.tolist(), right):
            if is_first:
                runs.append([])
            runs[-1].append(is_right)
    count = sum(len(run) for run in runs)
    loss, kl, smooth_l1 = (sums / count).tolist()
    losses = {"held_out_loss": loss, "held_out_kl": kl, "held_out_smooth_l1": smooth_l1}
    return losses | depth_scores(runs, max_depth)


def first_choices_match(drafter: Drafter, result: Distillation) -> list[bool]:
    """Return for each trained position whether drafter and target choose the same token."""
    matches = []
    rows = max(1, MAX_LOGITS_AT_ONCE // drafter.target.config.vocab_size)
    for predicted, final in zip(result.predicted.split(rows), result.final.split(rows)):
        drafts = drafter.head.logits(predicted).argmax(-1).tolist()
        choices = drafter.target.lm_head(final).argmax(-1).tolist()
        for draft, choice in zip(drafts, choices):
            matches.append(drafter.head.token(draft) == choice)
    return matches


def depth_scores(runs: list[list[bool]], max_depth: int) -> dict:
    """Return the "depth_accuracy" of some runs, and the "implied_acceptance_length".

    run[d - 1] says whether the drafted token at depth d is the target's first choice. The accuracy
    at depth d is the share of right tokens at this depth, among the runs that reach this depth and
    whose first d - 1 tokens are right. The list ends where no such run is left. With these two runs

        True True False
        True False

    the accuracies are 2/2, 1/2 and 0/1.

    If the accuracies are a_1, a_2, ..., a cycle yields 1 + a_1 + a_1 a_2 + ... tokens: the implied
    acceptance length. This length is optimistic: runs begin anywhere, but a cycle usually begins
    after a token that the drafter got wrong. The length is also inexact where the text is not what
    the target would choose: a draft counts as right if it is the target's choice, but the run goes
    on with the text's token.
    """
    accuracies = []
    for depth in range(max_depth):
        outcomes = [run[depth] for run in runs if len(run) > depth and all(run[:depth])]
        if not outcomes:
            break
        accuracies.append(sum(outcomes) / len(outcomes))
    length = 1 + np.cumprod(accuracies).sum()
    return {"depth_accuracy": accuracies, "implied_acceptance_length": length}


def draw_scores(scores: dict, update: int) -> str:
    """Draw the scores of `evaluate` as text, with a bar for the accuracy at each depth."""
    lines = [
        f"update {update}: held-out loss {scores['held_out_loss']:.3f}",
        f"  KL {scores['held_out_kl']:.3f}, implied acceptance length "
        f"{scores['implied_acceptance_length']:.2f}, and how often drafts are right, by depth:",
    ]
    for depth, accuracy in enumerate(scores["depth_accuracy"], 1):
        lines.append(f"  {depth}  {accuracy:4.0%}  {'█' * round(40 * accuracy)}")
    return "\n".join(lines)


# --- A whole training run ---

# Settings that may change when a training run is resumed. They say where files lie, when something
# is written, and how many sequences are read at once (which affects only the rounding of sums).
MAY_DIFFER = {"model", "data", "eval_every", "save_every", "micro_batch_size"}


@dataclass(frozen=True)
class DrafterSizes:
    """The sizes of a drafter that can be chosen. None: the size that `moa.default_config` gives."""

    tli: int = 0  # N, the number of target layers that the drafter reuses
    lsa_heads: int | None = None
    lsa_mlp: int | None = None
    mlp: int | None = None  # the width of the MLPs of SA and CA
    kv_heads: int | None = None  # the kv heads of SA and CA
    draft_vocabulary: int | None = None  # how many tokens the drafter may draft


def train_drafter(
    model: str,
    data: list[str | Path],
    out: str | Path,
    config: TrainConfig,
    sizes: DrafterSizes = DrafterSizes(),
    *,
    device: str = "cpu",
    resume: bool = False,
    kind: type[Drafter] = Drafter,
    max_depth: int = EVALUATION_RUN,
) -> None:
    """Train a drafter for a model on files of conversations, into the folder `out`.

    kind: Drafter, or a variant. max_depth: evaluations score drafts up to this depth. (Both are for
    experiments/ablations.py. A variant that reads its own predictions while drafting can be scored
    at depth 1 only, in one pass over a text.) Raises InputError, and SystemExit after Ctrl-C or
    SIGTERM.
    """
    data = [Path(file) for file in data]
    out = Path(out)
    resumes = find_run(out, resume)
    check_files(data)  # before the model is loaded, which takes longer
    target, tokenizer = load_target(model, device, DTYPES[config.dtype])
    # `collate` pads to a multiple of LENGTH_STEP, which must still fit.
    context = target.config.max_position_embeddings // LENGTH_STEP * LENGTH_STEP
    if config.seq_len > context:
        raise InputError(f"--seq-len {config.seq_len}: the target's context is {context}")
    conversations = Conversations(data, tokenizer, config.seq_len)
    training, held_out = hold_out(conversations, config.seed)
    stream = Stream(conversations, training, config.seed)
    config = replace(config, updates=config.updates or stream.batches_per_epoch(config.batch_size))
    drafter = make_drafter(target, conversations, training, sizes, config.seed, kind)
    optimizers = make_optimizers(drafter, config.optimizer)
    journal = Journal(
        out,
        drafter,
        optimizers,
        save_model=partial(save_drafter, drafter, out, target_name=model),
        settings=describe_training(model, data, config, sizes, kind),
    )
    if resumes:
        # The paper's schedule does not depend on `updates`. A training run with this schedule can
        # therefore be made longer.
        longer = {"updates"} if config.schedule == "paper" else set()
        journal.resume(config.updates, MAY_DIFFER | longer)
        stream.position = journal.position
    else:
        journal.begin()
    train(drafter, optimizers, stream, held_out, journal, config, max_depth)
    say(f"the drafter is in {out}: python speculate.py --model {model} --drafter {out}")


def describe_training(
    model: str, data: list[Path], config: TrainConfig, sizes: DrafterSizes, kind: type[Drafter]
) -> dict:
    """Return all settings of a training run, as plain values. --resume compares them with the saved
    settings."""
    return asdict(config) | asdict(sizes) | {
        "kind": kind.__name__,
        "model": str(model),
        "model_checksum": fingerprint_model(resolve_path(model)),
        "data": [str(file) for file in data],
        "data_checksum": fingerprint_files(data),
    }


def make_drafter(
    target: Llama,
    data: Conversations,
    training: np.ndarray,
    sizes: DrafterSizes,
    seed: int,
    kind: type[Drafter],
) -> Drafter:
    """Make a drafter with random weights, in the sizes that were chosen. Raises InputError."""
    choices = {
        "target_layer_inference": sizes.tli,
        "layer_self_attention_num_attention_heads": sizes.lsa_heads,
        "layer_self_attention_intermediate_size": sizes.lsa_mlp,
        "self_attention_intermediate_size": sizes.mlp,
        "cross_attention_intermediate_size": sizes.mlp,
        "self_attention_num_key_value_heads": sizes.kv_heads,
        "cross_attention_num_key_value_heads": sizes.kv_heads,
    }
    count = sizes.draft_vocabulary
    if count is not None:
        vocab_size = target.config.vocab_size
        if count > vocab_size:
            raise InputError(f"--draft-vocabulary {count}: the model has {vocab_size} tokens")
        choices["draft_vocabulary"] = frequent_tokens(data, training, vocab_size, count)
    choices = {name: choice for name, choice in choices.items() if choice is not None}
    torch.manual_seed(seed)  # under torchrun: the same weights in every process
    drafter = new_drafter(target, replace(default_config(target), **choices), kind)
    return drafter.to(target.device)


# --- Command line ---

EXAMPLES = """\
  python train.py --data ultrachat.jsonl --out runs/drafter
  python train.py --out runs/drafter --resume
  python speculate.py --drafter runs/drafter --prompt "Why is the sky blue?"
"""


def parse_arguments() -> argparse.Namespace:
    """Return the command line. With --resume, a flag that is not given has its saved value."""
    parser = Parser(
        description="Distill a target into a Mixture-of-Attentions drafter.", examples=EXAMPLES
    )
    add = parser.add_argument
    add("--data", nargs="+", metavar="FILE", type=path,
        help="conversations, as JSON lines or a JSON array")
    add("--out", default="runs/drafter", type=path,
        help="the drafter's folder (default: %(default)s)")
    add("--resume", action="store_true",
        help="go on with the training run in --out; flags not given keep their values")
    add("--json", action="store_true", help="end with the log's last record on stdout")
    add_model_arguments(parser)
    add_drafter_arguments(parser)
    add_training_arguments(parser)
    args = parser.parse_args()
    if args.resume:
        saved = read_settings(args.out)
        parser.set_defaults(**{name: saved[name] for name in saved if hasattr(args, name)})
        args = parser.parse_args()  # again, now with the saved values as defaults
    if not args.data:
        no_run = f": {args.out} holds no run to resume" if args.resume else ""
        parser.error(f"--data FILE is missing{no_run}")
    shortest, longest = args.run_length
    if shortest > longest:
        parser.error("--run-length LOW HIGH: the shortest comes first")
    if args.dtype == "float16":
        parser.error("--dtype float16 cannot be trained in; try bfloat16")
    return args


def add_training_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("training").add_argument
    count = partial(add, type=positive_int)
    factor = partial(add, type=number(float, 0))
    count("--updates", help="default: one pass over the data")
    count("--batch-size", default=TrainConfig.batch_size,
          help="sequences in an update (default: %(default)s)")
    count("--micro-batch-size", default=TrainConfig.micro_batch_size,
          help="sequences read at once (default: %(default)s)")
    add("--seq-len", type=number(int, 16), default=TrainConfig.seq_len,
        help="tokens (default: %(default)s)")
    factor("--lr", default=TrainConfig.lr,
           help="--schedule paper peaks at 20 times this (default: %(default)s)")
    add("--schedule", choices=("paper", "cosine"), default=TrainConfig.schedule,
        help="the learning rate's; paper: as in its authors' code (default: %(default)s)")
    count("--warmup", default=TrainConfig.warmup, help="updates (default: %(default)s)")
    add("--optimizer", choices=("adamw", "muon"), default=TrainConfig.optimizer,
        help="muon: for matrices, with adamw for the rest (default: %(default)s)")
    factor("--kl-weight", default=TrainConfig.kl_weight,
           help="the weight of KL(p || q) (default: %(default)s)")
    factor("--feature-weight", default=TrainConfig.feature_weight,
           help="the weight of Smooth L1 on hidden states (default: %(default)s)")
    count("--run-length", nargs=2, metavar=("LOW", "HIGH"), default=TrainConfig.run_length,
          help="tokens of a run (default: {} {})".format(*TrainConfig.run_length))
    count("--eval-every", default=TrainConfig.eval_every, help="updates (default: %(default)s)")
    count("--save-every", default=TrainConfig.save_every, help="updates (default: %(default)s)")


def add_drafter_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("the drafter (sizes default to the paper's proportions)")
    count = partial(add.add_argument, type=positive_int)
    add.add_argument("--tli", type=number(int, 0), default=0, metavar="N",
                     help="target layers to reuse (default: %(default)s)")
    count("--lsa-heads", help="heads of LSA")
    count("--lsa-mlp", help="width of LSA's MLP")
    count("--mlp", help="width of SA's and CA's MLPs")
    count("--kv-heads", help="kv heads of SA and CA")
    count("--draft-vocabulary", metavar="COUNT", help="draft only the most frequent tokens")


def fields_from(args: argparse.Namespace, settings: type[TrainConfig | DrafterSizes]) -> dict:
    """Return the arguments that have the names of a dataclass's fields, by name."""
    return {field.name: getattr(args, field.name) for field in fields(settings)}


def main() -> None:
    args = parse_arguments()
    args.run_length = tuple(args.run_length)  # argparse makes a list
    device = join_processes(args.device)
    args.dtype = choose_training_dtype(device, args.dtype)
    config = TrainConfig(**fields_from(args, TrainConfig))
    sizes = DrafterSizes(**fields_from(args, DrafterSizes))
    train_drafter(
        args.model, args.data, args.out, config, sizes, device=device, resume=args.resume
    )
    if args.json and rank() == 0:
        log = read_log(args.out)  # empty, if a finished training run's log was deleted
        print(json.dumps(log[-1] if log else {}))
    leave_processes()


if __name__ == "__main__":
    run_command(main)
