"""Training: a frozen target teaches its drafter (paper, section 3.4 and appendix).

The target reads a conversation in one pass. That gives its KV cache, its final hidden states h and,
through the LM head, its distributions p of each next token. The drafter learns to predict h and p
from what it has while drafting: the text, and the memory of verified tokens only. With its
predictions h' and q, the loss of one position is

    0.1 KL(p || q) + 1.0 SmoothL1(h, h')

KL makes q like p, and that is what acceptance needs: a drafted token is rejected with probability
sum max(p - q, 0), which is at most sqrt(KL / 2) (Pinsker's inequality). Smooth L1 gives a whole
vector to learn from at each position. (With N > 0 there are two Smooth L1 terms, as in the authors'
code: half of the weight is on h', half on the state that CA predicts for the entry of the reused
layers.)

The file shows how one pass lets every position of an answer see just the memory that it would see
in drafting (up to its *horizon*), then the losses, one update, and the loop. Read as far as the
bar, "The method ends here".

    python train.py --data ultrachat.jsonl              # the paper's, but once over the data
    python train.py --data ultrachat.jsonl --resume     # goes on after any interruption
    python train.py --data own.jsonl --synthesize 1000  # no data at hand? let the target write it

Names: h is `final`, h' is `predicted`. The weight of Smooth L1 is --feature-weight. args is the
command line (`parse_arguments`, at the end); docstrings say which of its flags a function itself
reads. args.epoch_updates is no flag: the number of updates in one pass over the data.

Above the bar a few helpers from below it are called. On a CPU, in one process, in float32 and with
the paper's losses they change nothing but the use of RAM: `chunked_kl` is `kl_divergence`,
`padded_length` the length, `share_of_process` all examples; `autocast` and `sum_over_processes` do
nothing.

Shapes: B sequences, T tokens, L layers of the target, 2 Ekv numbers for a token's keys and values
in a layer, E hidden size, V tokens (V' of them may be drafted), N reused layers, R ways to cut the
answers into runs (--horizons), n trained positions.
"""
from __future__ import annotations

# What the method uses:
import itertools
import math
from functools import partial
from typing import Callable, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama import InputError, Llama, causal_mask
from moa import Drafter

# What only the code below the bar uses:
import argparse
import ast
import html
import json
import os
import random
import re
import signal
import sys
import sysconfig
import textwrap
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Iterable, Iterator

import tokenizers
import torch.distributed as dist
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint as recompute
from tqdm import tqdm

from llama import (
    DTYPES,
    Batch,
    Config,
    GenerationConfig,
    Parser,
    Request,
    Sampling,
    Tokenizer,
    add_model_arguments,
    atomic_write,
    check_message,
    checksum,
    input_errors,
    load_target,
    load_tokenizer,
    number,
    pack,
    positive_int,
    run_command,
    settle_device,
)
from moa import (
    TreeConfig,
    default_config,
    load_drafter,
    new_drafter,
    pack_together,
    save_drafter,
    start_drafting,
)
from speculate import LocalTarget

CLIP = 1.0  # the gradient's norm, at most


# --- Horizons: training as drafting ---
#
# A query is the drafter at one position: it reads the tokens up to there, and drafts the next one.
# When a cycle of drafting begins, the newest token has no memory yet, and the tokens drafted after
# it get none. So all queries of a cycle see the same memory, that of the tokens before it. Training
# imitates this without drafting anything. Each answer is cut into runs, and a run stands for a
# cycle: its queries see memory up to the token before the run, and no further. This limit is a
# query's horizon. With runs of four tokens after a prompt of four:
#
#     query at   reads tokens   and the memory of   drafts token   at depth
#        4         0 .. 4           0 .. 3               5            1     4 plays the newest token
#        5         0 .. 5           0 .. 3               6            2     5 plays a drafted one
#        6         0 .. 6           0 .. 3               7            3
#        7         0 .. 7           0 .. 3               8            4     the run's last query
#        8         0 .. 8           0 .. 7               9            1     the next run
#
# The horizon is the end of the memory column: 3 in the first run, 7 in the second. The depth is
# that of the token in a draft, counted from the run's first token.
#
# While drafting, tokens 5 to 7 would be the drafter's. If the text is the target's own, and greedy,
# that hardly matters: as long as they are right they are those of the text, and what follows a
# wrong one is thrown away. (Text that somebody else wrote, like UltraChat's, also trains the
# drafter after tokens that the target would hardly write.)
#
# The length of the runs is drawn for each pass over a conversation, from 5 to 15. If an answer's
# first run always had its full length, its second query would always be at depth 2, its third at
# depth 3, and so on. So the first run is made shorter by a number of tokens, the phase, which is
# drawn as well, from 0 to length - 1 (an addition of ours):
#
#     phase 0     4 5 6 7 | 8 9 10 11 | ..
#     phase 1     4 5 6 | 7 8 9 10 | ..
#     phase 2     4 5 | 6 7 8 9 | ..
#     phase 3     4 | 5 6 7 8 | ..
#
# Over time every position is trained at every depth that it can have in a draft.


class Sequence(NamedTuple):
    """A conversation to train on."""

    tokens: Tensor  # (T)
    answer: Tensor  # (T), True at what the assistant wrote, its stop tokens included


def run_horizon(answer: Tensor, length: int, phase: int) -> Tensor:
    """Return the horizon of each query, (T). answer: as in Sequence.

    Runs have `length` tokens, the first of an answer has `phase` fewer. An answer that begins at
    position 4, with length 4 and phase 1, has the runs 4 5 6 | 7 8 9 10 | 11 .. and the horizons
    3, 6, 10.
    """
    horizons = []
    next_run = None  # where the next run begins; None outside an answer
    for position, in_answer in enumerate(answer.tolist()):
        if not in_answer:
            next_run = None
            horizons.append(position)  # of no effect: outside answers nothing is trained
            continue
        if next_run is None:  # the answer's first run
            run_begins = position
            next_run = run_begins + length - phase
        elif position == next_run:
            run_begins = position
            next_run = run_begins + length
        horizons.append(run_begins - 1)  # the token before the run
    return torch.tensor(horizons)


class Example(NamedTuple):
    """A sequence, and its horizons in one update: of each query, under each of R cuts into runs.

    After `collate` it is a batch, with the dimension B before these.
    """

    tokens: Tensor  # (T)
    answer: Tensor  # (T)
    horizons: Tensor  # (T, R)


def draw_examples(batch: list[Sequence], update: int, args) -> list[Example]:
    """Cut the answers of a batch into runs, each in R ways.

    The paper's way is R = 1, the default. More are ours: the target's pass, the expensive part,
    serves all of them. The draws depend on the seed and on `update` alone, so that --resume repeats
    them. args: seed, run_length, horizons.
    """
    draws = np.random.default_rng((args.seed, update))
    shortest, longest = args.run_length
    lengths = draws.integers(shortest, longest, (len(batch), args.horizons), endpoint=True)
    phases = draws.integers(0, lengths)  # (B, R), as `lengths`: each below its length
    examples = []
    for row, sequence in enumerate(batch):
        drawn = []
        for length, phase in zip(lengths[row], phases[row]):
            drawn.append(run_horizon(sequence.answer, int(length), int(phase)))
        horizons = torch.stack(drawn, dim=-1)  # (T, R)
        examples.append(Example(sequence.tokens, sequence.answer, horizons))
    return examples


# --- Losses ---


def loss_mask(answer: Tensor) -> Tensor:
    """Find the positions that are trained, (..., T): i predicts i + 1, and both are in an answer.

    (So an answer's first token is not predicted: the prompt's pass of the target chooses it.)
    """
    followed = F.pad(answer[..., 1:], (0, 1))  # False at the end
    return answer & followed


class TargetStates(NamedTuple):
    """What the target makes of a text."""

    kv: Tensor  # its KV cache, (B, T, L, 2 Ekv)
    entering: Tensor | None  # the hidden states that enter its last N layers, (B, T, E), if N > 0
    final: Tensor  # those after its final norm, (B, T, E)


@torch.no_grad()
def target_pass(target: Llama, tokens: Tensor, N: int) -> TargetStates:
    """Run the target over tokens (B, T): as `Llama.hidden`, but keep what enters the last N."""
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

    p follows from the target's final hidden states (n, E), q from those that the drafter predicts
    (n, E), through the weight of the LM head, head (V', E). With a draft vocabulary, V' < V, p too
    is scaled to sum to 1 over it.
    """
    # In float32: summed over V tokens in bfloat16, a KL would be mostly rounding.
    log_p = F.linear(final, head).log_softmax(-1, dtype=torch.float32)  # (n, V')
    log_q = F.linear(predicted, head).log_softmax(-1, dtype=torch.float32)  # (n, V')
    return (log_p.exp() * (log_p - log_q)).sum()


def smooth_l1_loss(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Return Smooth L1, mean over E, summed over n positions. Both are (n, E)."""
    loss = F.smooth_l1_loss(predicted.float(), wanted.float(), reduction="none")  # (n, E)
    return loss.mean(-1).sum()


class Distillation(NamedTuple):
    """The losses of some examples, and what they compare. A loss is a sum over trained positions,
    and a mean over the R cuts."""

    loss: Tensor
    parts: Tensor  # (3), without gradients: the loss, its KL, its Smooth L1, as in `Losses`
    predicted: Tensor  # h', the drafter's under the last cut, (n, E)
    final: Tensor  # h, the target's, (n, E)


def distill(drafter: Drafter, examples: Example, args) -> Distillation:
    """Run the target once over a batch of examples, and the drafter under each of R cuts (the paper
    has one). args: the weights of the losses."""
    tokens = examples.tokens  # (B, T)
    trained = loss_mask(examples.answer)  # (B, T), True at n positions
    states = target_pass(drafter.target, tokens, drafter.N)
    final = states.final[trained].float()  # (n, E)
    # Memory and SA do not depend on the horizons, and run once.
    memory = drafter.build_memory(states.kv, states.final)  # (B, T, E); only --no-lsa reads `final`
    x = drafter.self_attend(tokens)  # (B, T, E)
    kl = 0.0
    smooth_l1 = 0.0
    cuts = examples.horizons.unbind(-1)  # R of (B, T)
    for horizon in cuts:
        ca_output = drafter.cross_attend(x, memory, horizon)  # (B, T, E)
        tli_output = drafter.infer_target_layers(ca_output, states.kv, horizon)  # the same if N = 0
        predicted = tli_output[trained].float()  # (n, E)
        # The same as kl_divergence(predicted, final, head), a few positions at a time:
        kl = kl + chunked_kl(predicted, final, drafter.head.weight) / len(cuts)
        error = smooth_l1_loss(predicted, final)
        if drafter.N > 0:  # CA's output predicts the state that enters the reused layers
            error_entering = smooth_l1_loss(ca_output[trained], states.entering[trained])
            error = (error + error_entering) / 2
        smooth_l1 = smooth_l1 + error / len(cuts)
    loss = args.kl_weight * kl + args.feature_weight * smooth_l1
    if args.memory_weight > 0:  # 0 in the paper, and by default: see below the bar
        loss = loss + memory_loss(drafter, memory[trained], final, args)
    parts = torch.stack([loss, kl, smooth_l1]).detach()
    return Distillation(loss, parts, predicted, final)


# --- One update ---


def pad(tensors: list[Tensor], device) -> Tensor:
    """Stack tensors (T, ...) of several lengths: (B, T, ...). Zeros are added on the right, where
    no causal query looks. In an `answer` they are False, so that nothing is trained there."""
    longest = max(len(tensor) for tensor in tensors)
    # (On a CPU that is the length. On a GPU it is rounded up: see below the bar.)
    shape = (len(tensors), padded_length(longest, device), *tensors[0].shape[1:])
    padded = tensors[0].new_zeros(shape)
    for row, tensor in zip(padded, tensors):
        row[:len(tensor)] = tensor
    return padded.to(device)


def collate(examples: list[Example], device) -> Example:
    """Pad examples to one length, and stack them."""
    return Example(
        tokens=pad([example.tokens for example in examples], device),
        answer=pad([example.answer for example in examples], device),
        horizons=pad([example.horizons for example in examples], device),
    )


class Losses(NamedTuple):
    """The losses of one update: means over trained positions and cuts."""

    loss: float
    kl: float
    smooth_l1: float


def compute_gradients(drafter: Drafter, batch: list[Sequence], update: int, args) -> Losses:
    """Compute the gradients of one update. Its loss is one mean, over all trained positions of the
    batch. args: micro_batch_size, dtype, and those of `draw_examples` and `distill`.

    The batch is read a few sequences at a time. Each piece of the loss is divided by the same
    total, so that the gradients of all pieces add up to that of one mean.
    """
    device = drafter.target.device
    total = sum(int(loss_mask(sequence.answer).sum()) for sequence in batch)
    examples = share_of_process(draw_examples(batch, update, args))  # all, without torchrun
    examples.sort(key=lambda example: len(example.tokens))  # so that little is padded
    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)  # (never None: see torchrun, below the bar)
    sums = torch.zeros(3, device=device)
    for first in range(0, len(examples), args.micro_batch_size):
        piece = collate(examples[first:first + args.micro_batch_size], device)
        with autocast(device, args):  # multiplies in --dtype
            result = distill(drafter, piece, args)
        (result.loss / total).backward()
        sums += result.parts
    sum_over_processes(drafter, sums)  # nothing, without torchrun
    return Losses(*(sums / total).tolist())


# --- The loop ---


def learning_rate(update: int, args) -> float:
    """Return the learning rate of an update, counted from 0. Both schedules rise at first, for
    --warmup updates. args: schedule, lr, warmup, updates, epoch_updates.

    "paper", as in the authors' code: up to 20 times --lr, then on a straight line to --lr, which is
    reached at the end of the first epoch and kept. (In a short epoch it rises for half of it.)

    "cosine": along half a cosine from --lr, here the highest rate, down to 0, times the rise.
    """
    if args.schedule == "cosine":
        warm = min(1.0, (update + 1) / args.warmup)  # rises to 1
        return warm * args.lr * (1 + math.cos(math.pi * update / args.updates)) / 2
    warmup = min(args.warmup, max(1, args.epoch_updates // 2))
    if update < warmup:
        return args.lr * 20 * (update + 1) / warmup
    if update >= args.epoch_updates:
        return args.lr
    way_down = (update - warmup) / (args.epoch_updates - warmup)  # from 0 to 1
    return args.lr * (20 - 19 * way_down)


def make_optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    """Return AdamW, as in the paper; or Muon (Jordan et al. 2024) for matrices and AdamW for the
    rest. (Muon steps along the orthogonal matrix nearest to a matrix's momentum, so that it learns
    in all directions at the same rate.) `apply_gradients` sets their learning rates."""
    adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.0)
    if kind == "adamw":
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


def take_step(
    drafter: Drafter,
    optimizers: list[torch.optim.Optimizer],
    batch: list[Sequence],
    update: int,
    args,
) -> dict:
    """Do one update: gradients, clipped, then a step of the optimizers. Returns what to log."""
    losses = compute_gradients(drafter, batch, update, args)
    norm = nn.utils.clip_grad_norm_(drafter.parameters(), CLIP).item()
    if not math.isfinite(norm):
        raise InputError(
            f"update {update + 1}: the gradient is not finite; begin again with a lower --lr, in "
            "another --out"
        )
    lr = learning_rate(update, args)
    apply_gradients(optimizers, lr)
    return losses._asdict() | {"lr": lr, "grad_norm": norm}


def train(
    drafter: Drafter,
    optimizers: list[torch.optim.Optimizer],
    stream: Stream,
    journal: Journal,
    args,
) -> None:
    """Train up to args.updates. Raises InputError if a gradient is not finite.

    stream: shuffled sequences without end, which go on at stream.position.
    journal: logs, evaluates and saves. journal.done: updates that an earlier run has done
    (--resume).
    """
    sequences = iter(stream)
    for update in range(journal.done, args.updates):
        batch = list(itertools.islice(sequences, args.batch_size))
        measured = take_step(drafter, optimizers, batch, update, args)
        tokens = sum(len(sequence.tokens) for sequence in batch)
        journal.record(update + 1, measured, tokens, stream.position)


# --- The method ends here: what follows makes it fast and practical ---
#
# Each part can be read by itself:
#
#     Less RAM ...                 the KL in pieces; mixed precision; a loss on memories
#     Several processes            torchrun
#     Evaluation                   in one pass, or by really drafting
#     Data, and its files          conversations from files of several forms, shuffled
#     A training run               `Journal`: the log, checkpoints, Ctrl-C
#     What a run prints            evaluations, and what it will cost
#     Synthesis                    the target writes its own conversations
#     A toy target                 from Python's own library
#     The curves of runs           an SVG file
#     Command line, the tasks      flags; what each task does; `main`


# --- Less RAM, mixed precision, and a loss on memories ---

LOGITS = 2**25  # of q that exist at once: 128 MiB


def chunked_kl(predicted: Tensor, final: Tensor, head: Tensor) -> Tensor:
    """Return `kl_divergence` of the same arguments, a few positions at a time.

    A distribution has V numbers (Llama-3: 128 256), and autograd would keep several of them for
    each position until the backward pass. `recompute` keeps none: the backward pass computes each
    piece again.
    """
    count = max(1, LOGITS // len(head))  # positions
    total = predicted.new_zeros(())
    for piece, wanted in zip(predicted.split(count), final.split(count)):
        kl = recompute(
            kl_divergence, piece, wanted, head, use_reentrant=False, preserve_rng_state=False
        )
        total = total + kl
    return total


def padded_length(longest: int, device) -> int:
    """Return how long to make the sequences of a batch: on a GPU a multiple of 64. There PyTorch
    plans its attention anew for each shape that it has not seen before, for tens of milliseconds,
    so there should be few. (Without this an H100 trained at less than half of its speed:
    results/smollm2/gpu_h100.json.)"""
    if torch.device(device).type == "cpu":
        return longest
    return math.ceil(longest / 64) * 64


def autocast(device: torch.device, args) -> torch.autocast:
    """Multiply in --dtype. (The drafter's weights stay in float32. In bfloat16 an update, which is
    much smaller than a weight, would mostly be rounded away.)"""
    return torch.autocast(device.type, DTYPES[args.dtype], enabled=args.dtype != "float32")


def memory_loss(drafter: Drafter, memory: Tensor, final: Tensor, args) -> Tensor:
    """Return the loss of memories (n, E), read as if they were predictions of h: --memory-weight.

    LSA learns slowly from the drafter's loss alone, which reaches it through CA: see
    weights/README.md.
    """
    memory = memory.float()
    kl = chunked_kl(memory, final, drafter.head.weight)
    loss = args.kl_weight * kl + args.feature_weight * smooth_l1_loss(memory, final)
    return args.memory_weight * loss


# --- Several processes, under torchrun ---
#
# Every process draws the same batch and computes the gradients of its share. Then all sum them up:
# so the sum is the same, up to rounding, however many processes there are. With two processes and a
# batch of five, process 0 has sequences 0, 2 and 4, process 1 has 1 and 3.
#
# `all_reduce` is a meeting: it returns when all processes have called it. So all must make the same
# calls in the same order, also one that has nothing to add, or they wait for each other forever.
# That is why gradients are zeros and never None, and why a `Journal` asks all processes at every
# update whether to stop.


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def join_processes(args) -> None:
    """Give this process a GPU of its own, if there are any, and connect it to the others."""
    backend = "gloo"
    if args.device.startswith("cuda"):
        backend = "nccl"
        args.device = f"cuda:{dist.get_node_local_rank()}"
        settle_device(args)  # a plain error if there are fewer GPUs than processes
        torch.cuda.set_device(args.device)
    # While process 0 evaluates, the others wait: longer than the ten minutes that are usual.
    dist.init_process_group(backend, timeout=timedelta(hours=2))


def all_reduce(tensor: Tensor) -> None:
    """Replace a tensor by its sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def share_of_process(examples: list[Example]) -> list[Example]:
    """Return the examples that this process is to read."""
    return examples[rank()::world_size()]


def sum_over_processes(drafter: Drafter, sums: Tensor) -> None:
    """Replace the drafter's gradients, and `sums`, by their sums over all processes."""
    for parameter in drafter.parameters():
        all_reduce(parameter.grad)
    all_reduce(sums)


# --- Evaluation ---

DEPTHS = 8  # tokens of a draft, or of a run, that are scored


@torch.no_grad()
def evaluate(drafter: Drafter, sequences: list[Sequence], args) -> dict:
    """Return losses, and `depth_scores` of runs of 8 tokens: one cut of each answer, all positions
    in one pass, as in training.

    Without CA only depth 1 is scored. Deeper queries would read true memories, which drafting does
    not have: see `evaluate_drafting`.
    """
    device = drafter.target.device
    sums = torch.zeros(3, device=device)
    count = 0
    runs = []
    for i, (tokens, answer) in enumerate(tqdm(sequences, desc="evaluation", leave=False)):
        phase = i % DEPTHS  # in turn, so that runs begin anywhere in an answer
        horizon = run_horizon(answer, DEPTHS, phase)  # (T)
        example = Example(tokens, answer, horizon[:, None])
        with autocast(device, args):
            result = distill(drafter, collate([example], device), args)
            drafts = []  # n
            choices = []  # n
            count_at_once = max(1, LOGITS // drafter.target.config.vocab_size)
            for predicted in result.predicted.split(count_at_once):
                drafts += drafter.head.logits(predicted).argmax(-1).tolist()
            for final in result.final.split(count_at_once):
                choices += drafter.target.lm_head(final).argmax(-1).tolist()
        sums += result.parts
        count += len(choices)
        depths = (torch.arange(len(tokens)) - horizon)[loss_mask(answer)].tolist()  # n
        for depth, draft, choice in zip(depths, drafts, choices):
            if depth == 1:  # positions come in order: here a run begins
                runs.append([])
            runs[-1].append(drafter.head.token(draft) == choice)
    loss, kl, smooth_l1 = (sums / count).tolist()
    losses = {"held_out_loss": loss, "held_out_kl": kl, "held_out_smooth_l1": smooth_l1}
    return losses | depth_scores(runs, DEPTHS if drafter.config.use_cross_attention else 1)


def depth_scores(runs: list[list[bool]], max_depth: int) -> dict:
    """Return how often a token drafted at each depth is the target's first choice, if all before it
    in its run were: run[d] says whether the token drafted at depth d + 1 is right. The list ends
    before the first depth that no run reaches in this way.

    With a_d that share at depth d, a cycle brings 1 + a_1 + a_1 a_2 + ... tokens: the acceptance
    length implied. It is optimistic: these runs begin anywhere, but a cycle mostly begins after a
    token that the drafter got wrong. And where the text is not what the target would choose, a
    draft counts as right if it is the target's choice, but the run goes on with the text's token.
    (`evaluate_drafting` goes on with the drafted one.)
    """
    accuracies = []
    for depth in range(max_depth):
        outcomes = [run[depth] for run in runs if len(run) > depth and all(run[:depth])]
        if not outcomes:
            break
        accuracies.append(sum(outcomes) / len(outcomes))
    length = 1 + np.cumprod(accuracies).sum()
    return {"depth_accuracy": accuracies, "implied_acceptance_length": length}


@torch.no_grad()
def evaluate_drafting(drafter: Drafter, sequences: list[Sequence]) -> dict:
    """Return `depth_scores` of real drafting: a greedy chain from every eighth trained position.

    The target verifies the chain, and then the text goes on as it stands. Any kind of drafter can
    be compared: one without CA reads its own predictions here. Raises InputError.
    """
    runs = []
    for sequence in tqdm(sequences, desc="drafting", leave=False):
        tokens = sequence.tokens.tolist()
        target = LocalTarget(drafter.target, drafter, len(tokens), Sampling())
        state = start_drafting(drafter, len(tokens))
        trained = loss_mask(sequence.answer)[:-DEPTHS]  # before the last few: a chain must fit
        starts = trained.nonzero()[::DEPTHS, 0].tolist()
        for read, start in itertools.pairwise([0, *starts]):
            state.append_verified(target.prefill(tokens[read:start]).memory)
            draft = state.draft(tokens[start], TreeConfig(depth=DEPTHS))
            accepted = target.verify(draft).accepted
            runs.append([True] * len(accepted) + [False])  # (no ninth depth is scored)
            target.cache.length = start  # without root and draft: the text may go on otherwise
    if not runs:
        raise InputError("--by-drafting: no answer is long enough to draft in")
    return depth_scores(runs, DEPTHS)


# --- Data: published conversations, shuffled without holding all of them in RAM ---
#
# A first pass over the files notes where each usable record lies (file, offset, length). Training
# reads a record again when its turn comes. (A file that is one JSON array is in RAM during the
# first pass, for a moment twice. One with a record a line never is.)

NO_ANSWER = "--data: no answer within --seq-len tokens; raise it"
# But the first so many conversations that are read stay in RAM, as tokens: 0.4 GB at most if they
# have 2 048 tokens each. With a target as small as the default, a GPU trains on a text faster than
# a tokenizer reads it again.
MAX_KEPT = 20_000
MAX_NAMED = 5  # skipped records; the rest are counted


class Conversations:
    """The conversations in some files, without what `index_records` skips.

    Raises InputError for a file that cannot be read, or if none has a usable conversation.
    """

    def __init__(self, paths: list[str], tokenizer: Tokenizer, seq_len: int):
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.places = index_records(paths)
        self.kept: dict[int, Sequence | None] = {}  # by index

    def __getitem__(self, index: int) -> Sequence | None:
        """Return one conversation, cut at seq_len. None where nothing is left to train on."""
        if index in self.kept:
            return self.kept[index]
        sequence = self.read(index)
        if len(self.kept) < MAX_KEPT:
            self.kept[index] = sequence
        return sequence

    def read(self, index: int) -> Sequence | None:
        """Read it from its file again, now for its tokens."""
        path, offset, length = self.places[index]
        with open(path, "rb") as file:
            file.seek(offset)
            messages, _ = usable_part(read_messages(file.read(length)))
        tokens = []
        answer = []
        for piece, is_answer in self.tokenizer.turns(messages):
            tokens += piece
            answer += [is_answer] * len(piece)
        tokens = torch.tensor(tokens[:self.seq_len])
        answer = torch.tensor(answer[:self.seq_len])
        return Sequence(tokens, answer) if loss_mask(answer).any() else None

    def read_usable(self, indices: Iterable[int]) -> Iterator[Sequence]:
        """Yield those of them that leave something to train on."""
        for index in indices:
            sequence = self[index]
            if sequence is not None:
                yield sequence


def index_records(paths: list[str]) -> list[tuple[str, int, int]]:
    """Return where each usable record lies: its file, offset and length in bytes. Tell how many
    were skipped or cut, and why.

    Raises InputError for a file that cannot be read, or if no record is usable.
    """
    places = []
    skipped = 0
    counts = Counter()
    for path in paths:
        for place, offset, text in find_records(path):
            try:
                _, cuts = usable_part(read_messages(text))
                counts.update(cuts)
                places.append((path, offset, len(text)))
            except ValueError as error:
                skipped += 1
                if skipped <= MAX_NAMED:
                    say(f"skipped {path}, {place}: {error}")
                reason, _, _ = str(error).partition(": ")
                counts[f"skipped: {reason}"] += 1
    say(f"{len(places)} conversations, {skipped} records skipped")
    for reason, count in counts.items():
        say(f"  {count} {reason}")
    if not places:
        names = " ".join(paths)
        raise InputError(f"{names}: no usable conversation (UltraChat, ShareGPT, Alpaca)")
    return places


@dataclass
class Stream:
    """Conversations without end, shuffled again each epoch.

    Iterating goes on from `position`, whoever iterated before. The order of an epoch depends on the
    seed and the epoch's number only, so it can be made again, and a checkpoint needs this one
    number.
    """

    data: Conversations
    indices: np.ndarray
    seed: int
    position: int = 0  # moves with what has been drawn

    def __iter__(self) -> Iterator[Sequence]:
        """Yield what there is to train on: `hold_out` has seen that there is something."""
        while True:
            epoch, first = divmod(self.position, len(self.indices))
            order = np.random.default_rng((self.seed, epoch)).permutation(self.indices)
            for index in order[first:]:
                sequence = self.data[index]
                self.position += 1
                if sequence is not None:
                    yield sequence


def hold_out(data: Conversations, seed: int) -> tuple[np.ndarray, list[Sequence]]:
    """Return shuffled indices to train on, and conversations to evaluate on: a tenth, at most 64.

    Raises InputError if there is nothing to train on.
    """
    order = np.random.default_rng(seed).permutation(len(data.places))
    count = min(64, len(order) // 10)
    training = order[count:]
    usable = next(data.read_usable(training), None)
    if usable is None:
        raise InputError(NO_ANSWER)
    held_out = list(data.read_usable(order[:count]))
    if not held_out:
        # No error: to try things on a handful of conversations is reasonable.
        say("nothing to hold out (fewer than ten conversations, or none that fits): evaluated on "
            "one that is trained on")
        held_out = [usable]
    return training, held_out


def frequent_tokens(
    data: Conversations, indices: np.ndarray, vocab_size: int, count: int
) -> tuple[int, ...]:
    """Return the `count` tokens that answers use most, sorted by id. Stop tokens count as the most
    frequent."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for tokens, answer in data.read_usable(indices[:5000]):  # enough to count tokens in
        counts += tokens[answer].bincount(minlength=vocab_size)
    counts[list(data.tokenizer.stop_ids)] = counts.max() + 1
    order = counts.argsort(descending=True, stable=True)  # the same on every machine
    return tuple(sorted(order[:count].tolist()))


# --- The files of data: records, and the conversations in them ---

NO_FILE = (
    "no such file. To fetch UltraChat: pip install datasets && python -c \"from datasets import "
    "load_dataset as load; load('HuggingFaceH4/ultrachat_200k', split='train_sft')"
    ".to_json('ultrachat.jsonl')\". Or let the target write one: add --synthesize 1000"
)
NOT_JSON = {  # how a file begins, what it is, how to convert it
    b"PAR1": (
        "Parquet",
        "python -c \"import pandas; pandas.read_parquet('{0}').to_json('{0}.jsonl', "
        "orient='records', lines=True)\"",
    ),
    b"\x1f\x8b": ("gzip", "gunzip {}"),
    b"PK\x03\x04": ("a zip archive", "unzip {}"),
    (b"\xff\xfe", b"\xfe\xff"): ("UTF-16", "iconv -f UTF-16 -t UTF-8 {0} > {0}.utf8"),
}


class Record(NamedTuple):
    """One JSON document of a file."""

    place: str  # "line 3"
    offset: int  # in bytes
    text: bytes


def find_records(path: str | Path) -> Iterator[Record]:
    """Find the records of a file, one a line or all in one JSON array. Raises InputError."""
    if Path(path).is_dir():
        raise InputError(f"{path} is a folder: name the files in it, as in {path}/*.jsonl")
    with input_errors(f"{path}: cannot be read", OSError), open(path, "rb") as file:
        begin = file.peek()
        for magic, (kind, command) in NOT_JSON.items():
            if begin.startswith(magic):
                raise InputError(f"{path} is {kind}, not JSON; try: {command.format(path)}")
        if begin.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            # latin-1 makes one character of each byte, so that an index of the text is one of the
            # bytes. JSON's own characters are ASCII, and what stands inside strings does not
            # matter here.
            yield from array_records(path, file.read().decode("latin-1"))
        else:
            for count, line in enumerate(file, 1):
                if line.strip():
                    yield Record(f"line {count}", file.tell() - len(line), line)


def array_records(path: str | Path, text: str) -> Iterator[Record]:
    """Find the elements of a JSON array, one after the other. Raises InputError."""
    decode = json.JSONDecoder().raw_decode
    between = re.compile(r"[,\s]*")
    index = between.match(text, text.index("[") + 1).end()
    count = 0
    while not text.startswith("]", index):
        count += 1
        broken = f"{path}: the JSON array is damaged or cut short at its record {count}"
        with input_errors(broken, ValueError, RecursionError):
            _, end = decode(text, index)
        yield Record(f"record {count}", index, text[index:end].encode("latin-1"))
        index = between.match(text, end).end()
    if text[index + 1:].strip():
        raise InputError(f"{path}: text after the JSON array; use one file for each array")


ROLE_NAMES = {  # ShareGPT's
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}


def read_messages(text: bytes) -> list[dict]:
    """Read a record of UltraChat (either form), ShareGPT or Alpaca as a conversation.

    Raises ValueError (of which InputError is a kind). Its message begins with the reason, up to a
    colon: `index_records` counts reasons.
    """
    with input_errors("not valid JSON", ValueError, RecursionError):
        record = json.loads(text)
    match record:
        case {"messages": list(turns)} | {"conversations": list(turns)} | {"data": list(turns)}:
            pass
        case {"instruction": str(question), "output": answer}:
            if record.get("input"):
                question += f"\n\n{record['input']}"
            turns = [question, answer]
        case _:
            raise ValueError("neither messages, data or conversations nor instruction and output")
    messages = []
    for turn in turns:
        if isinstance(turn, str):  # without a role: user and assistant take turns
            turn = {"role": next_role(messages), "content": turn}
        with input_errors("an unusable turn", InputError, TypeError, AttributeError):
            role = turn.get("role", turn.get("from"))
            content = turn.get("content", turn.get("value"))
            message = {"role": ROLE_NAMES.get(role, role), "content": content}
            check_message(message)
        messages.append(message)
    return messages


def next_role(messages: list[dict]) -> str:
    return "assistant" if len(messages) % 2 else "user"


def usable_part(messages: list[dict]) -> tuple[list[dict], list[str]]:
    """Return a conversation from its first question to its first empty turn, and what was cut.

    Raises ValueError if nothing is left that has an answer.
    """
    kept = []
    cuts = []
    asked = False
    for message in messages:
        role = message["role"]
        if role != "system" and not message["content"].strip():
            cuts.append("cut at an empty turn")
            break
        asked = asked or role == "user"
        if role == "assistant" and not asked:
            cuts.append("answers before any question left out")
        else:
            kept.append(message)
    if "assistant" not in [message["role"] for message in kept]:
        raise ValueError("no answer")
    return kept, cuts


# --- A training run: its log and its checkpoints ---


# Flags that may differ when a run is resumed. All others would make it another run.
MAY_DIFFER = {
    "out", "pretrain", "resume", "json", "eval_every", "save_every",  # bookkeeping
    "device", "micro_batch_size",  # the same sums, rounded differently
}


@dataclass
class Journal:
    """The bookkeeping of a training run, in args.out: a progress bar; a line of log each update; an
    evaluation every --eval-every updates; every --save-every the model, and a checkpoint from which
    --resume goes on; and Ctrl-C, after which it saves and stops. Under torchrun only process 0
    writes.

    Use it in a `with`, and call `record` after each update: it logs, evaluates, saves, and stops,
    in this order. `done` and `position` say where to begin. A run with --save-every 50 that is
    killed in update 71, and resumed:

        log.jsonl        updates 1 to 70
        checkpoint.pt    of update 50: weights, optimizers, the stream's position, the log's length
        --resume         cuts the log back to update 50, and goes on with update 51

    Updates 51 to 70 are done again, with the same batches and horizons: these depend on the seed,
    the stream's position, and the update's number only.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    evaluate: Callable[[], dict]  # what to log
    save_model: Callable[[], None]  # as other programs read it
    args: argparse.Namespace
    may_differ: set[str] = frozenset()  # flags that may, in a resumed run, besides MAY_DIFFER
    done: int = 0  # updates
    position: int = 0  # where the stream of conversations stood then
    interrupted: bool = False

    def __post_init__(self):
        """Begin a run or, with args.resume, go on with one. Raises InputError."""
        self.log_path = Path(self.args.out, "log.jsonl")
        self.checkpoint_path = Path(self.args.out, "checkpoint.pt")
        if self.args.resume:
            self.load()
        elif rank() == 0:
            with atomic_write(self.log_path) as part:
                part.touch()
            self.save()  # so that a run that is killed early can be resumed, too
        self.progress = tqdm(
            initial=self.done, total=self.args.updates, unit=" updates", disable=rank() > 0
        )
        self.began = time.perf_counter()  # the update under way

    def record(self, done: int, measured: dict, tokens: int, position: int = 0) -> None:
        """Record an update of `tokens` tokens, and what was measured. position: of the stream,
        after it.

        Raises KeyboardInterrupt after Ctrl-C.
        """
        self.done = done
        self.position = position
        is_last = done == self.args.updates
        if rank() == 0:
            # A GPU may still be at work on the update: .item() returns after that.
            torch.zeros((), device=self.args.device).item()
            speed = tokens / (time.perf_counter() - self.began)
            self.progress.update()
            self.progress.set_postfix_str(f"loss {measured['loss']:.3f}, {speed:.0f} tokens/s")
            self.log(measured | {"tokens_per_second": speed})
            if done % self.args.eval_every == 0 or is_last:
                scores = self.evaluate()
                self.log(scores)
                show(scores, done)
        # Every process asks, at every update: so all stop at the same one.
        stop = torch.tensor(float(self.interrupted), device=self.args.device)
        all_reduce(stop)
        interrupted = bool(stop) and not is_last  # after the last one there is nothing to stop
        if rank() == 0 and (done % self.args.save_every == 0 or is_last or interrupted):
            self.save_model()  # before the checkpoint, which says that it is there
            self.save()
        if interrupted:
            self.progress.close()  # which would overwrite the line
            say(f"saved at {done}; go on with --resume")
            if dist.is_initialized():
                dist.barrier()  # until process 0 has saved
            raise KeyboardInterrupt
        self.began = time.perf_counter()

    def __enter__(self) -> None:
        self.previous_handler = signal.signal(signal.SIGINT, self.interrupt)

    def __exit__(self, *_) -> None:
        self.progress.close()
        signal.signal(signal.SIGINT, self.previous_handler)

    def interrupt(self, *_) -> None:
        """Let the update under way end: Ctrl-C calls this. A second one ends the process."""
        self.interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # (os.write is safe at any moment.)
        os.write(2, b"\nstopping after this update, or evaluation (Ctrl-C again: at once)\n")

    def log(self, record: dict) -> None:
        with open(self.log_path, "a") as file:
            file.write(json.dumps({"update": self.done} | record) + "\n")

    def save(self) -> None:
        """Write all that --resume needs to one file, completely or not at all."""
        state = {
            "update": self.done,
            "position": self.position,
            "log_bytes": self.log_path.stat().st_size,
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "arguments": vars(self.args),
        }
        with atomic_write(self.checkpoint_path) as part:
            torch.save(state, part)

    def load(self) -> None:
        """Go back to the checkpoint. Raises InputError if it is damaged, or of other arguments or
        data."""
        args = self.args
        path = self.checkpoint_path
        with input_errors(f"{path}: not a readable checkpoint", Exception):  # of many kinds
            state = torch.load(path, map_location="cpu")
            weights = state["model"]
            log_bytes = state["log_bytes"]
            made_with = state["arguments"]
        for name, value in made_with.items():
            now = getattr(args, name, None)
            if name not in MAY_DIFFER | self.may_differ and now != value:
                flag = "--" + name.replace("_", "-")
                raise InputError(
                    f"{path} was made with {flag} {value}, not {now}; resume with that or choose "
                    "another folder"
                )
        with input_errors(f"{path}: does not fit {args.pretrain or args.model}", RuntimeError):
            self.model.load_state_dict(weights)
        for optimizer, saved in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(saved)
        if rank() == 0:
            with open(self.log_path, "ab") as file:
                # What came after is done again. (min: a log that was lost is not filled with
                # zeros.)
                file.truncate(min(file.tell(), log_bytes))
        self.done = state["update"]
        self.position = state["position"]


def read_log(folder: str | Path) -> list[dict]:
    """Read what a run has logged."""
    lines = Path(folder, "log.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# --- What a run prints ---


def say(message: str) -> None:
    """Print to stderr, once for all processes, above any progress bar."""
    if rank() == 0:
        tqdm.write(message, file=sys.stderr)


def show(scores: dict, update: int) -> None:
    """Print an evaluation for a person."""
    lines = [f"update {update}: held-out loss {scores['held_out_loss']:.3f}"]
    if "depth_accuracy" in scores:  # of a drafter
        lines.append(
            f"  KL {scores['held_out_kl']:.3f}, implied acceptance length "
            f"{scores['implied_acceptance_length']:.2f}, and how often drafts are right, by depth:"
        )
        for depth, accuracy in enumerate(scores["depth_accuracy"], 1):
            lines.append(f"  {depth}  {accuracy:4.0%}  {'█' * round(40 * accuracy)}")
    say("\n".join(lines))


def announce_cost(drafter: Drafter, held_out: list[Sequence], args) -> None:
    """Print how long an update takes here, and the whole run. It is estimated from one micro-batch
    for each process, by its tokens. (The gradients are overwritten by the first update.)"""
    count = min(args.batch_size, args.micro_batch_size * world_size())
    batch = list(itertools.islice(itertools.cycle(held_out), count))
    compute_gradients(drafter, batch, 0, args)  # the first pass is slow
    began = time.perf_counter()
    compute_gradients(drafter, batch, 0, args)
    seconds_a_token = (time.perf_counter() - began) / sum(len(one.tokens) for one in batch)
    mean_tokens = np.mean([len(one.tokens) for one in held_out])  # of a sequence
    seconds = seconds_a_token * mean_tokens * args.batch_size  # an update
    total = timedelta(seconds=round(seconds * args.updates))
    say(f"an update takes about {seconds:.2g} s here, {args.updates} updates {total} (h:min:s)")
    if total > timedelta(days=1):
        say("that is more than a day: README.md, Train a drafter, has a recipe for an hour or two")


# --- Synthesis: training data from the target alone (the idea of Magpie, Xu et al. 2024) ---
#
# A conversation is a list of messages, of which the batch writes one turn at a time: a `Request`,
# whose `key` is that list. Each turn reads the text so far again.

TEMPERATURES = {  # of a turn, drawn from these
    "user": (1.0,),
    "assistant": (0.0, 0.0, 0.6, 1.0),  # half greedy, as drafters are mostly used
}
TOP_P = 0.95
NEXT_TURN = 0.3  # the probability that a conversation goes on after an answer
MIN_ROOM = 32  # tokens that must be left for a turn
BEGIN = b'{"synthetic": true, "messages": '  # of each line: no other file is written to
MAX_BARREN = 500  # conversations without an answer, in a row, after which --synthesize gives up


@torch.inference_mode()
def converse(
    target: Llama,
    tokenizer: Tokenizer,
    openings: Iterator[list[dict]],
    wanted: int,
    seed: int,
    args,
) -> Iterator[list[dict]]:
    """Let the target talk to itself: up to `wanted` conversations, each yielded when it ends. The
    last message may be cut short.

    openings: the messages that they begin with, a question or none. Raises InputError.
    """
    # A conversation is in one of three places: `openings` (not begun), `waiting` (between two
    # turns), or a row of the batch (a turn is being written). When it ends it is yielded or, if it
    # has no answer, dropped.
    draws = random.Random(seed)
    batch = Batch(target, args.batch_size, args.seq_len)  # a row holds one turn, under way
    waiting = []  # conversations whose next turn is to be written
    barren = 0  # how many in a row had no answer
    while True:
        # 1. Begin as many conversations as fit in the batch, and as are still wanted.
        under_way = len(batch.requests) + len(waiting)
        waiting += itertools.islice(openings, min(wanted, args.batch_size) - under_way)
        # 2. Begin the next turn of each that waits. On a GPU, where one pass reads all their
        # prompts, wait until there are some: until an eighth of the rows is free.
        free = args.batch_size - len(batch.requests)
        if free >= args.batch_size / 8 or target.device.type == "cpu":
            batch.add_all([next_turn(tokenizer, one, draws, args.seq_len) for one in waiting])
            waiting = []
        if not batch.requests:
            return
        # 3. Run one pass. Where it ends a turn, the conversation goes on, or ends.
        for request in batch.step():
            messages = request.key
            if append_turn(tokenizer, request, draws):
                waiting.append(messages)
            elif len(messages) >= 2:  # it has an answer
                barren = 0
                wanted -= 1
                yield messages
            else:
                barren += 1
                if barren == MAX_BARREN and args.questions is None:  # questions come to an end
                    raise InputError(
                        f"{barren} conversations in a row had no answer: raise --seq-len above "
                        f"{args.seq_len}, or the target does not end its turns"
                    )


def next_turn(
    tokenizer: Tokenizer, messages: list[dict], draws: random.Random, seq_len: int
) -> tuple[list[dict], list[int], GenerationConfig]:
    """Return a conversation's next turn, which is to be written, as `Batch.add_all` takes it."""
    role = next_role(messages)
    ids = tokenizer.chat(messages, add_generation_prompt=False)
    prompt = (ids + tokenizer.opening(role))[:seq_len - 1]  # room for one token, at least
    room = seq_len - len(prompt)
    temperature = draws.choice(TEMPERATURES[role])
    seed = draws.getrandbits(63)
    stop_ids = frozenset(tokenizer.stop_ids)
    return messages, prompt, GenerationConfig(room, temperature, TOP_P, seed, stop_ids)


def append_turn(tokenizer: Tokenizer, request: Request, draws: random.Random) -> bool:
    """Append the turn that was written to its conversation, `request.key`, if it is of use: an
    answer may be cut short, but no question. Return whether another turn follows."""
    messages = request.key
    role = next_role(messages)
    text = tokenizer.decode(request.tokens).strip()
    is_full = request.config.max_new_tokens == 1  # `next_turn` may have cut the prompt
    may_go_on = request.tokens[-1] in tokenizer.stop_ids and request.left >= MIN_ROOM
    if not text or is_full:
        return False
    if role == "user" and not may_go_on:  # cut short, or no room for its answer
        return False
    messages.append({"role": role, "content": text})
    return may_go_on and (role == "user" or draws.random() < NEXT_TURN)


def read_questions(path: str | Path) -> Iterator[str]:
    """Read what the user asks first in each conversation of a file. Raises InputError."""
    for record in find_records(path):
        with suppress(ValueError):
            messages = read_messages(record.text)
            first = next((m["content"] for m in messages if m["role"] == "user"), "")
            if first.strip():
                yield first


def synthesize(args) -> None:
    """Write conversations to a file, each when it ends, until it has args.synthesize or all
    questions are answered. Raises InputError."""
    if args.questions:
        questions = dict.fromkeys(read_questions(args.questions))  # each once
        if not questions:
            raise InputError(f"{args.questions}: no conversation with a question")
    target, tokenizer = load_models(args)
    path = Path(args.data[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab+") as file:
        file.seek(0)
        content = file.read()
        # It must begin as ours do. (This way round, because an empty file, or one whose first line
        # was cut short, is ours too.)
        if not BEGIN.startswith(content[:len(BEGIN)]):
            raise InputError(f"{path}: was not written by --synthesize; choose another --data")
        # An earlier run may have been killed while it wrote its last line: cut that off.
        file.truncate(content.rfind(b"\n") + 1)
        written = content.count(b"\n")
        total = args.synthesize
        wanted = max(0, total - written)
        # What conversations begin with: a question that has no answer yet, or nothing.
        openings = ([] for _ in itertools.count())
        if args.questions:
            answered = set(read_questions(path))
            openings = ([{"role": "user", "content": q}] for q in questions if q not in answered)
        # A seed that depends on what is there already, or the same conversations would come again.
        # (Shifted, so that it differs from any seed that a user is likely to give.)
        seed = args.seed + (written << 32)
        conversations = converse(pack(target), tokenizer, openings, wanted, seed, args)
        for messages in tqdm(conversations, initial=written, total=total, unit=" conversations"):
            file.write(BEGIN + json.dumps(messages, ensure_ascii=False).encode() + b"}\n")
            file.flush()
            written += 1
    if written < total:
        missing = f"{written} of {total}: there are no more questions, or they had no answer"
        if not written:
            raise InputError(f"{missing}: run again, or raise --seq-len")
        say(missing)
    if args.json:
        print(json.dumps({"conversations": written}))


# --- A toy target, from nothing but the Python that runs it ---
#
# A small Llama that writes functions in the style of Python's own library. With a real target a
# drafter takes days to train, with this one minutes: so drafters can be compared.

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
FUNCTION_CHARACTERS = 1500  # longer functions, which would not fit in a window, are left out
HELD_OUT_FUNCTIONS = 200
CONTROLS = ["<|im_start|>", "<|im_end|>"]  # of ChatML: ids 0 and 1, which ends a turn
WINDOW = 512  # tokens of a training example


def library_functions() -> dict[str, str]:
    """Return the functions and methods of Python's standard library, {signature: source}.

    One for each signature, so that a question has one answer.
    """
    library = Path(sysconfig.get_path("stdlib"))
    functions = {}
    for path in sorted(library.rglob("*.py")):
        if NOT_LIBRARY.intersection(path.relative_to(library).parts):
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.split("\n")  # as `ast` counts them (splitlines() also splits at form feeds)
        for node in find_functions(ast.parse(text)):
            source = textwrap.dedent("\n".join(lines[node.lineno - 1:node.end_lineno]))
            if len(source) <= FUNCTION_CHARACTERS:
                functions[f"def {node.name}({ast.unparse(node.args)}):"] = source
    return functions


def find_functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    """Yield a module's functions, and the methods of all classes in it. (Not functions inside a
    function, which depend on it, or directly inside an `if`, of which there may be two.)"""
    for owner in ast.walk(module):
        if isinstance(owner, (ast.Module, ast.ClassDef)):
            for node in owner.body:
                if isinstance(node, ast.FunctionDef):
                    yield node


def write_functions(folder: Path, args) -> None:
    """Write functions.jsonl, held_out.jsonl, and a tokenizer that is trained on the former.

    --data and --questions read such lines, and so does `speculate.py --bench`.
    """
    functions = list(library_functions().items())
    random.Random(args.seed).shuffle(functions)
    lines = []
    for signature, source in functions:
        lines.append(json.dumps({"prompt": signature, "data": [signature, source]}) + "\n")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "held_out.jsonl").write_text("".join(lines[:HELD_OUT_FUNCTIONS]))
    (folder / "functions.jsonl").write_text("".join(lines[HELD_OUT_FUNCTIONS:]))
    sources = [source for _, source in functions[HELD_OUT_FUNCTIONS:]]
    tokenizer = tokenizers.ByteLevelBPETokenizer()  # as GPT-2's (Radford et al. 2019)
    tokenizer.train_from_iterator(sources, args.vocabulary, special_tokens=CONTROLS)
    tokenizer.save(str(folder / "tokenizer.json"))


def read_windows(path: Path, tokenizer: Tokenizer) -> Tensor:
    """Join a file's conversations into one text. Return the windows that begin at each token of it,
    (windows, WINDOW + 1), a view."""
    ids = []
    for record in find_records(path):
        messages = read_messages(record.text)
        ids += tokenizer.chat(messages, add_generation_prompt=False)[:WINDOW]
    return torch.tensor(ids).unfold(0, WINDOW + 1, 1)


def next_token_loss(model: Llama, windows: Tensor, args) -> Tensor:
    """Return the mean cross-entropy of each next token. windows (B, WINDOW + 1)."""
    windows = windows.to(model.device)
    with autocast(model.device, args):
        logits = model(windows[:, :-1])  # (B, WINDOW, V)
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def evaluate_target(model: Llama, held_out: Tensor, args) -> dict:
    losses = [next_token_loss(model, window, args).item() for window in held_out.split(1)]
    return {"held_out_loss": sum(losses) / len(losses)}


def make_target(vocab_size: int, args) -> Llama:
    """Return a model with random weights, in the sizes that the command line asks for."""
    kv_heads = args.width // 64  # two heads of 32 share one
    config = Config(
        vocab_size=vocab_size,
        hidden_size=args.width,
        intermediate_size=8 * args.width // 3,  # three matrices: as large as two of 4 * width
        num_hidden_layers=args.layers,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        rope_theta=10000.0,
        max_position_embeddings=2 * WINDOW,
        tie_word_embeddings=True,
    )
    torch.manual_seed(args.seed)
    model = Llama(config)
    nn.init.normal_(model.embed_tokens.weight, std=0.02)  # it is the LM head as well
    return model.to(args.device).requires_grad_(True)


def save_target(folder: Path, model: Llama) -> None:
    """Write a Hugging Face directory, as `load_model` reads it, in bfloat16."""
    config = {"model_type": "llama", "eos_token_id": 1, **asdict(model.config)}
    weights = {f"model.{name}": p.bfloat16() for name, p in model.named_parameters()}
    with atomic_write(folder / "config.json") as part:
        part.write_text(json.dumps(config))
    with atomic_write(folder / "model.safetensors") as part:
        save_file(weights, part)


def pretrain(args) -> None:
    """Make a toy target in the folder args.out, or go on with one. Raises InputError."""
    folder = Path(args.out)
    if not args.resume:
        write_functions(folder, args)
    tokenizer = load_tokenizer(folder)
    training = read_windows(folder / "functions.jsonl", tokenizer)
    held_out = read_windows(folder / "held_out.jsonl", tokenizer)[::WINDOW]
    model = make_target(tokenizer.backend.get_vocab_size(), args)
    # Muon for the layers' matrices. For embeddings AdamW, as is usual beside Muon.
    optimizers = make_optimizers(model.layers, "muon")
    optimizers += make_optimizers(nn.ModuleList([model.embed_tokens, model.norm]), "adamw")
    score = partial(evaluate_target, model, held_out, args)
    save = partial(save_target, folder, model)
    journal = Journal(model, optimizers, score, save, args)
    with journal:
        for update in range(journal.done, args.updates):
            # Windows are drawn, not shuffled: there is one for each token of the text.
            draws = np.random.default_rng((args.seed, update))
            windows = training[draws.integers(len(training), size=4)]  # (4, WINDOW + 1)
            loss = next_token_loss(model, windows, args)
            if not loss.isfinite():
                raise InputError(
                    f"update {update + 1}: the loss is not finite; begin again with another "
                    "--seed, in another folder"
                )
            loss.backward()
            # From 0 up to 6e-3 in the first fiftieth, then on a straight line down to 0.
            share = (update + 1) / (args.updates + 1)
            lr = np.interp(share, [0, 0.02, 1], [0, 6e-3, 0])
            apply_gradients(optimizers, float(lr))
            model.zero_grad()
            journal.record(update + 1, {"loss": loss.item()}, windows.numel())


# --- The curves of runs, as one SVG file ---
#
# SVG counts x to the right and y downwards, in units of its viewBox. In a path, M moves, and h and
# v draw lines of a length to the right and down. A panel is drawn around its own origin, and `g`
# moves it to its place.

COLORS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
MAX_POINTS = 200  # of a curve: more are averaged
UPDATE_PANELS = {
    "loss": "training loss",
    "held_out_kl": "held-out KL",
    "implied_acceptance_length": "implied acceptance length",
}
Curve = list[tuple[float, float]]


def plot(folders: list[str]) -> None:
    """Draw the logs of runs into curves.svg. Raises InputError."""
    logs = []
    for folder in folders:
        with input_errors(f"{folder}: no run with a log", OSError, ValueError):
            logs.append(read_log(folder))
    panels = []
    for name, title in UPDATE_PANELS.items():
        panels.append(draw_panel(title, "updates", [update_curve(log, name) for log in logs]))
    curves = [depth_curve(log) for log in logs]
    panels.append(draw_panel("accuracy, last evaluation", "depth of the draft", curves))
    save_panels(Path("curves.svg"), panels, folders)
    say("see curves.svg")


def save_panels(path: Path, panels: list[str], names: list[str]) -> None:
    """Write one or two rows of panels, with the names of their curves below, as an SVG file."""
    drawing = ""
    for i, panel in enumerate(panels):
        x = 60 + 400 * (i % 2)  # left or right
        y = 40 + 290 * (i // 2)  # upper or lower row
        drawing += f'<g transform="translate({x} {y})">{panel}</g>\n'
    y += 280  # below the last row
    for name, color in zip(names, itertools.cycle(COLORS)):
        drawing += f"""
            <path d="M60 {y - 4}h24" stroke="{color}" stroke-width="2"/>
            <text x="92" y="{y}">{html.escape(name)}</text>
        """
        y += 20
    size = f'viewBox="0 0 820 {y + 10}"'
    style = 'font-family="sans-serif" font-size="12"'
    with atomic_write(path) as part:
        part.write_text(f"""<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>
            <rect width="100%" height="100%" fill="white"/>
            {drawing}
        </svg>""")


def update_curve(log: list[dict], name: str) -> Curve:
    """Return (update, value), averaged over a few updates where they are many."""
    points = [(record["update"], record[name]) for record in log if name in record]
    width = len(points) // MAX_POINTS + 1
    firsts = range(0, len(points), width)
    return [tuple(np.mean(points[first:first + width], axis=0)) for first in firsts]


def depth_curve(log: list[dict]) -> Curve:
    """Return (depth, accuracy) of the last evaluation."""
    accuracies = []
    for record in log:
        accuracies = record.get("depth_accuracy", accuracies)
    return list(enumerate(accuracies, 1))


def axis_end(values: list[float]) -> float:
    """Return a round number, at or a little above all of them: 0.22 for 0.218, 9 for 8.9."""
    highest = max(values, default=1) or 1e-9
    unit = 10 ** math.floor(math.log10(highest)) / 5
    return unit * math.ceil(highest / unit)


def draw_panel(title: str, x_label: str, curves: list[Curve]) -> str:
    """Draw one diagram, 300 wide and 200 high, with a curve for each run. Both axes begin at 0."""
    points = list(itertools.chain(*curves))
    right = axis_end([x for x, _ in points])
    top = axis_end([y for _, y in points])
    panel = f"""
        <text y="-14" font-weight="bold">{title}</text>
        <text x="150" y="234" text-anchor="middle">{x_label}</text>
        <path d="M0 0v200h300" stroke="black" fill="none"/>
    """
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = 300 * share
        y = 200 - 200 * share
        panel += f"""
            <path d="M{x} 200v5" stroke="black"/>
            <text x="{x}" y="218" text-anchor="middle">{right * share:.4g}</text>
            <path d="M0 {y}h300" stroke="#ddd"/>
            <text x="-6" y="{y + 4}" text-anchor="end">{top * share:.4g}</text>
        """
    for curve, color in zip(curves, itertools.cycle(COLORS)):
        places = [f"{300 * x / right:.1f},{200 - 200 * y / top:.1f}" for x, y in curve]
        line = " ".join(places[:1] + places)  # a single point, too, is seen: as a dot
        style = f'fill="none" stroke="{color}" stroke-width="2" stroke-linecap="round"'
        panel += f'<polyline points="{line}" {style}/>\n'
    return panel


# --- Command line ---
#
# One script, five tasks, each a function of args:
#
#     no flag         run_training     train a drafter on --data, into --out
#     --pretrain      pretrain         make a toy target
#     --evaluate      run_evaluation   score a drafter
#     --synthesize    synthesize       let the target write --data
#     --plot          plot             draw the logs of runs
#
# The first two write into a folder and can be resumed: `begin_or_resume` calls them.

TOY_SIZES = ["layers", "width", "vocabulary"]
# The flags that have an effect with --pretrain: any other is refused.
USED_BY_PRETRAIN = [
    *TOY_SIZES, "pretrain", "updates", "device", "dtype", "seed",
    "resume", "json", "eval_every", "save_every",
]


def parse_arguments() -> argparse.Namespace:
    parser = Parser(description="Distil a target into a Mixture-of-Attentions drafter.")
    add = parser.add_argument
    count = partial(add, type=positive_int)
    add("--data", nargs="+", metavar="FILE", help="conversations, as JSON lines or a JSON array")
    add("--out", default="runs/drafter", help="the drafter's folder (default: %(default)s)")
    add_model_arguments(parser)
    add_training_arguments(parser)
    add_drafter_arguments(parser)
    count("--eval-every", default=200, help="updates (default: %(default)s)")
    count("--save-every", default=50, help="updates (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the checkpoint in --out or --pretrain")
    add("--json", action="store_true", help="end with the log's last record, or a count, on stdout")
    task = parser.add_mutually_exclusive_group().add_argument
    task("--evaluate", metavar="DIR", help="only score the drafter in DIR on --data, as JSON")
    task("--synthesize", type=positive_int, metavar="COUNT",
         help="only let the target write so many conversations into --data")
    task("--pretrain", metavar="DIR", help="only make a toy target in DIR: see weights/README.md")
    task("--plot", nargs="+", metavar="DIR", help="only draw the curves of runs: curves.svg")
    add("--by-drafting", action="store_true",
        help="with --evaluate: really draft, instead of one pass over the text")
    add("--questions", metavar="FILE", help="with --synthesize: answer this file's questions")
    count("--layers", default=8, help="of the toy target (default: %(default)s)")
    count("--width", default=128, help="its width (default: %(default)s)")
    # At least all bytes and two control tokens.
    add("--vocabulary", type=number(int, 258), default=2048,
        help="its tokens (default: %(default)s)")
    args = parser.parse_args()
    check_arguments(parser, args)
    if args.pretrain:
        args.out = args.pretrain
        args.updates = args.updates or 2000
    return args


def add_training_arguments(parser: Parser) -> None:
    """Add batches, the learning rate, the loss and its horizons. Defaults are the paper's, as far
    as it or its code states them."""
    add = parser.add_argument
    count = partial(add, type=positive_int)
    factor = partial(add, type=number(float, 0))
    count("--updates",
        help="default: conversations / --batch-size, one pass over them; 2000 with --pretrain")
    count("--batch-size", default=32,
        help="sequences an update, or conversations written at once (default: %(default)s)")
    count("--micro-batch-size", default=1, help="sequences at once (default: %(default)s)")
    add("--seq-len", type=number(int, 16), default=2048, help="tokens (default: %(default)s)")
    factor("--lr", default=3e-5,
        help="--schedule paper peaks at 20 times it (default: %(default)s)")
    add("--schedule", choices=("paper", "cosine"), default="paper",
        help="of the learning rate; paper: its authors' code's (default: %(default)s)")
    count("--warmup", default=50, help="updates (default: %(default)s)")
    add("--optimizer", choices=("adamw", "muon"), default="adamw",
        help="muon: for matrices, with adamw for the rest (default: %(default)s)")
    factor("--kl-weight", default=0.1, help="of KL(p || q) (default: %(default)s)")
    factor("--feature-weight", default=1.0,
        help="of Smooth L1 on hidden states (default: %(default)s)")
    factor("--memory-weight", default=0.0, help="of the same loss on memories; not the paper's")
    count("--run-length", nargs=2, default=[5, 15], metavar=("LOW", "HIGH"),
        help="tokens a run (default: 5 15)")
    count("--horizons", default=1, metavar="R",
        help="cuts into runs for each pass of the target (default: %(default)s)")


def add_drafter_arguments(parser: Parser) -> None:
    add = parser.add_argument
    count = partial(add, type=positive_int)
    add("--tli", type=number(int, 0), default=0, metavar="N", help="target layers to reuse")
    add("--no-lsa", action="store_true", help="ablation: memory from the last hidden state")
    add("--no-ca", action="store_true", help="ablation: the drafter reads its own predictions")
    add("--no-sa", action="store_true", help="with both of these it is EAGLE's drafter")
    count("--lsa-heads", help="default: the target's")
    count("--lsa-mlp", help="LSA's MLP width")
    count("--mlp", help="SA's and CA's MLP width")
    count("--kv-heads", help="SA's and CA's kv heads")
    count("--draft-vocabulary", metavar="COUNT", help="draft only the most frequent tokens")


def check_arguments(parser: Parser, args: argparse.Namespace) -> None:
    """Refuse what is missing, and flags that have no effect on the task, where that is easily
    overlooked."""
    if not args.evaluate:
        parser.refuse(args, ["by_drafting"], "needs --evaluate")
    if not args.synthesize:
        parser.refuse(args, ["questions"], "needs --synthesize")
    if args.pretrain:
        others = [name for name in vars(args) if name not in USED_BY_PRETRAIN]
        parser.refuse(args, others, "has no effect with --pretrain")
    else:
        parser.refuse(args, TOY_SIZES, "needs --pretrain")
    if not (args.data or args.pretrain or args.plot):
        parser.error("--data FILE is missing")
    if args.synthesize and len(args.data) > 1:
        parser.error("--synthesize writes one file: --data FILE")
    if (args.synthesize or args.evaluate or args.pretrain) and dist.is_torchelastic_launched():
        parser.error("torchrun is for the training of drafters only")
    if args.run_length != sorted(args.run_length):
        parser.error("--run-length LOW HIGH: the shortest comes first")
    if args.width % 64 != 0:
        parser.error("--width must be a multiple of 64: two heads of 32 share a kv head")
    if args.dtype == "float16" and not (args.synthesize or args.evaluate or args.plot):
        parser.error("--dtype float16 cannot be trained in; try bfloat16")


# --- The tasks that train or evaluate ---
#
# What a flag leaves open is set in args at three places, each before anything reads it:
#
#     parse_arguments     out and updates, of a toy target
#     begin_or_resume     resume, device, dtype: what depends on the folder and the machine
#     run_training        data, epoch_updates, updates: what depends on the data
#
# The checkpoint holds args, and --resume compares.


def load_models(args) -> tuple[Llama, Tokenizer]:
    """Load the target and its tokenizer. First see whether the files are there: that takes less
    time. Raises InputError."""
    if not args.synthesize:  # which writes it
        for path in args.data:
            if not Path(path).exists():
                raise InputError(f"{path}: {NO_FILE}")
    target, tokenizer = load_target(args)
    context = target.config.max_position_embeddings
    if padded_length(args.seq_len, args.device) > context:
        raise InputError(f"--seq-len {args.seq_len}: the target's context is {context}")
    return target, tokenizer


def make_drafter(target: Llama, data: Conversations, training: np.ndarray, args) -> Drafter:
    """Make a drafter of random weights, in the sizes asked for. Raises InputError."""
    choices = {
        "target_layer_inference": args.tli,
        "use_layer_self_attention": not args.no_lsa,
        "use_cross_attention": not args.no_ca,
        "use_self_attention": not args.no_sa,
        "layer_self_attention_num_attention_heads": args.lsa_heads,
        "layer_self_attention_intermediate_size": args.lsa_mlp,
        "self_attention_intermediate_size": args.mlp,
        "cross_attention_intermediate_size": args.mlp,
        "self_attention_num_key_value_heads": args.kv_heads,
        "cross_attention_num_key_value_heads": args.kv_heads,
    }
    if args.draft_vocabulary:
        vocab_size = target.config.vocab_size
        chosen = frequent_tokens(data, training, vocab_size, args.draft_vocabulary)
        choices["draft_vocabulary"] = chosen
    choices = {name: choice for name, choice in choices.items() if choice is not None}
    torch.manual_seed(args.seed)  # under torchrun: the same weights in every process
    drafter = new_drafter(target, replace(default_config(target), **choices))
    return drafter.to(target.device)


def run_training(args) -> None:
    """Prepare target, data and drafter, then run the loop. Raises InputError."""
    target, tokenizer = load_models(args)
    data = Conversations(args.data, tokenizer, args.seq_len)
    training, held_out = hold_out(data, args.seed)
    # A resumed run may be made longer, by an explicit --updates, on which the paper's schedule does
    # not depend. (Without the flag it is one epoch: probably forgotten.)
    may_differ = {"updates"} if args.updates and args.schedule == "paper" else set()
    args.epoch_updates = math.ceil(len(training) / args.batch_size)
    args.updates = args.updates or args.epoch_updates
    # No longer paths (which `data` knows). So --resume refuses a file that was changed, and takes
    # one that was moved.
    args.data = [f"{Path(path).name} ({checksum(path)[:16]})" for path in args.data]
    drafter = make_drafter(target, data, training, args)
    optimizers = make_optimizers(drafter, args.optimizer)
    announce_cost(drafter, held_out, args)
    score = partial(evaluate, drafter, held_out, args)
    save = partial(save_drafter, drafter, Path(args.out))
    journal = Journal(drafter, optimizers, score, save, args, may_differ)
    stream = Stream(data, training, args.seed, journal.position)
    with journal:
        train(drafter, optimizers, stream, journal, args)
    say(
        f"the drafter is in {args.out}: "
        f"python speculate.py --model {args.model} --drafter {args.out}"
    )


def begin_or_resume(args) -> None:
    """Train a drafter or, with --pretrain, a toy target. Raises InputError."""
    out = Path(args.out)
    has_checkpoint = (out / "checkpoint.pt").exists()
    has_model = any(out.glob("*.safetensors"))  # perhaps in shards
    if has_checkpoint and not args.resume:
        raise InputError(f"{out} holds work: --resume goes on, else choose another folder")
    if has_model and not has_checkpoint:
        raise InputError(f"{out} holds work but no checkpoint: choose another folder")
    args.resume = has_checkpoint  # where nothing is there, a run begins
    if dist.is_torchelastic_launched():
        join_processes(args)  # args.device: a GPU of its own for each
    settle_device(args)  # args.dtype
    if args.pretrain:
        pretrain(args)
    else:
        run_training(args)
    if args.json and rank() == 0:
        log = read_log(out)
        # (Empty if the log of a finished run was deleted.)
        print(json.dumps(log[-1] if log else {}))
    if dist.is_initialized():
        dist.barrier()  # until process 0 has saved
        # End gloo's threads before Python frees tensors that they may still hold: or they crash.
        dist.destroy_process_group()


def run_evaluation(args) -> None:
    """Print the scores of a finished drafter. Raises InputError."""
    target, tokenizer = load_models(args)
    drafter = load_drafter(args.evaluate, target)
    data = Conversations(args.data, tokenizer, args.seq_len)
    sequences = list(data.read_usable(range(len(data.places))))
    if not sequences:
        raise InputError(NO_ANSWER)
    if args.by_drafting:
        pack_together(target, [drafter])
        scores = evaluate_drafting(drafter, sequences)
    else:
        scores = evaluate(drafter, sequences, args)
    print(json.dumps(scores))


def main() -> None:
    args = parse_arguments()
    if args.plot:
        plot(args.plot)
    elif args.synthesize:
        synthesize(args)
    elif args.evaluate:
        run_evaluation(args)
    else:
        begin_or_resume(args)


if __name__ == "__main__":
    run_command(main)
