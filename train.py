"""Training: a frozen target teaches its drafter (paper, section 3.4 and appendix).

The target reads a conversation in one pass. The drafter learns to predict the target's final hidden
states h, and its distributions p of each next token. With its predictions h' and q, the loss of one
position is

    0.1 KL(p || q) + 1.0 SmoothL1(h, h')

Why both? How many drafted tokens are accepted depends on p and q alone, and KL compares these. But
Smooth L1 says of each of the E numbers in h' how it should change, which a comparison of
distributions says only indirectly, and it keeps h' in the space that the frozen LM head reads.
(With our toy target, greedy chains were 2% shorter without Smooth L1, and sampled ones 5%, in two
trainings, too few to be sure: experiments/comparing.md.)

EAGLE's drafter is trained on the target's true hidden states, but drafts from its own guesses of
the newest ones. The paper calls that *off-policy*: the policy is the drafter itself. Here CA
reads no guesses, only the memory of verified tokens, so training can show it the very memory that
it will have while drafting: *on-policy*. The first section shows how.

Then come the drafter's pass over all positions and the loss of a conversation, which complete the
method; batches, updates and the loop; drafters that reuse target layers (N > 0); and a list of what
differs from the paper.

    python train.py --data ultrachat.jsonl              # the paper's hyperparameters, but one epoch
    drafter = Drafter(target, default_config(target))   # or, in a notebook, the loop below
    for losses in train(drafter, conversations, TrainConfig(updates=1000)): ...

Shapes: B sequences, T tokens, L layers of the target, 2 Ekv numbers for a token's keys and values
in a layer, E hidden size, V tokens in the vocabulary, N reused layers, n trained positions. In the
code, h is `final` and h' is `features`.
"""
from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Iterable, Iterator, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from llama import KVCache, Llama, causal_mask
from moa import LSA_TOKENS, Drafter, run_target_layers

# --- Horizons: training as drafting ---
#
# A *query* is a position at which the drafter runs: the drafter reads the tokens up to there, and
# drafts the next token. When a drafting cycle begins, the newest token has no memory yet, and the
# tokens drafted after it get none during the cycle. All queries of a cycle therefore see the same
# memory: that of the tokens before the newest one.
#
# Training imitates this without drafting anything. Each answer is cut into *mock cycles*: the
# queries of such a piece see memory up to the token before the piece, and no further. The last
# token whose memory a query may see is the query's *horizon*. With mock cycles of four tokens,
# after a prompt of four:
#
#     query at   reads tokens   and the memory of   drafts token   at depth
#        4         0 .. 4           0 .. 3               5            1     a mock cycle begins
#        5         0 .. 5           0 .. 3               6            2
#        6         0 .. 6           0 .. 3               7            3
#        7         0 .. 7           0 .. 3               8            4     its last query
#        8         0 .. 8           0 .. 7               9            1     the next one begins
#
# In the first mock cycle, token 4 stands in for the newest token, and tokens 5 to 7 stand in for
# drafted ones. The horizon is where the memory column ends: at 3, then at 7. The depth is the place
# of a drafted token in its draft, counted from 1.
#
# While drafting, tokens 5 to 7 would be the drafter's own. So training is on-policy in the memory,
# but teacher-forced in the tokens, in the paper as here. If the target wrote the text, greedily,
# this difference hardly matters: right drafts are the tokens of the text, and what follows a wrong
# draft is discarded. Text by other authors, such as UltraChat's, continues in ways that the target
# never would. On such text, part of the training is on contexts that drafting never produces.
#
# All mock cycles of a conversation have the same length, which is drawn from 5 to 15 each time the
# conversation is used. If an answer's first mock cycle always had its full length, the answer's
# second query would always be at depth 2, its third at depth 3, and so on. The first one is
# therefore shortened by a number of tokens, the *phase*, which is drawn from 0 to length - 1:
#
#     phase 0     4 5 6 7 | 8 9 10 11 | ..
#     phase 1     4 5 6 | 7 8 9 10 | ..
#     phase 2     4 5 | 6 7 8 9 | ..
#     phase 3     4 | 5 6 7 8 | ..
#
# Over time every position is trained at every depth that it can have in a draft.
#
# Others had parts of this before. GLIDE (Du et al. 2024, arXiv 2402.02082) attends to the target's
# KV cache from the last verification, and is trained under a mask of blocks, all of one length.
# HASS (Zhang et al. 2024, arXiv 2408.15766) trains EAGLE's drafter on its own guesses, which takes
# several passes.


def cycle_horizon(answer: Tensor, length: int, phase: int) -> Tensor:
    """Return the horizon of each query, (T). answer (T) is True at what the assistant wrote.

    With length 4 and phase 1, an answer that begins at position 4 has the mock cycles 4 5 6 |
    7 8 9 10 | 11 .. with the horizons 3, 6 and 10. (The last one ends where the answer ends.)
    """
    horizons = []
    horizon = -1  # if the text begins with an answer, that is: no memory
    left = length - phase  # queries that are left in the mock cycle
    for position, in_answer in enumerate(answer.tolist()):
        if in_answer:
            if left == 0:  # the next mock cycle begins
                horizon = position - 1
                left = length
            left -= 1
        else:  # not trained, but an answer may begin at the next position
            horizon = position
            left = length - phase
        horizons.append(horizon)
    return torch.tensor(horizons)


# --- The drafter over all positions at once ---
#
# Drafting runs the drafter on a few new tokens, with caches (see `DraftState` in moa.py). Training
# runs the same layers over a whole text, in which a mask takes the place of the caches:
#
#               drafting, new tokens only                      training, all positions
#     LSA       cache_update, once for every verified token    build_memory
#     SA        append_verified (keys and values only), step   self_attend
#     CA        step                                           cross_attend
#     N > 0     step                                           reuse_target_layers


def drafter_pass(
    drafter: Drafter, tokens: Tensor, kv: Tensor, horizon: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the whole drafter over all positions. Returns CA's output and the predicted final hidden
    states, which the LM head is applied to, both (B, T, E). They are the same if N = 0.

    tokens (B, T); kv (B, T, L, 2 Ekv) from the target's cache, see `KVCache.by_token`; horizon
    (B, T): the last position whose memory a query may read, -1 for none.
    """
    # Why in pieces? Each token is a sequence to LSA, so without them its batch would be B T tokens,
    # and some of PyTorch's CUDA kernels take no more than 65,535. Pieces also save memory, but only
    # in evaluations: in training, the backward pass needs the activations of all pieces.
    memory = drafter.build_memory(kv.split(LSA_TOKENS, dim=1))  # (B, T, E)
    sa_output = self_attend(drafter, tokens)  # (B, T, E)
    ca_output = cross_attend(drafter, sa_output, memory, horizon)  # (B, T, E)
    if drafter.N == 0:
        return ca_output, ca_output
    return ca_output, reuse_target_layers(drafter, ca_output, kv, horizon)  # see N > 0, below


def self_attend(drafter: Drafter, tokens: Tensor) -> Tensor:
    """Run SA over all positions: tokens (B, T) -> (B, T, E)."""
    count = tokens.shape[1]
    mask = causal_mask(count, past=0, device=tokens.device)
    return drafter.self_attention(drafter.embed(tokens), drafter.rotary[:, :count], mask)


def cross_attend(drafter: Drafter, sa_output: Tensor, memory: Tensor, horizon: Tensor) -> Tensor:
    """Run CA over all positions, from SA's output (B, T, E) to the memory (B, T, E).

    Query i reads the memory of positions 0 to horizon[b, i], and none if the horizon is -1.
    Returns CA's output (B, T, E).
    """
    count = memory.shape[1]
    rope = drafter.rotary[:, :count]
    positions = torch.arange(count, device=memory.device)
    within = positions <= horizon.unsqueeze(-1)  # (B, T, T): query i, memory j
    memory_kv = drafter.cross_attention.keys_values(memory, rope)  # (B, Hkv, T, 2D)
    # With horizon -1 a query reads nothing: PyTorch's attention then returns zeros (not NaN), and
    # the residual connection passes on SA's output alone.
    return drafter.cross_attention.attend_to(memory_kv, sa_output, rope, within.unsqueeze(1))


# --- The loss ---
#
# `distill` is the whole method: it runs the target and the drafter once each over a conversation,
# and compares what they compute. Read it for a single conversation (B = 1) and with N = 0. Its
# parts follow. After them come pieces, batches and micro-batches, which save memory and time, but
# leave the loss what it is.


class Example(NamedTuple):
    """A conversation to train on, as tensors of shape (T). `distill` takes a batch of several, with
    the same fields in shape (B, T)."""

    tokens: Tensor
    answer: Tensor  # True at what the assistant wrote, its stop tokens included
    horizon: Tensor  # from `cycle_horizon`


class Losses(NamedTuple):
    """Losses, each summed over trained positions, or their means: scalar tensors."""

    loss: Tensor  # the weighted sum of the other two
    kl: Tensor
    smooth_l1: Tensor


def distill(
    drafter: Drafter, batch: Example, config: TrainConfig
) -> tuple[Losses, Tensor, Tensor]:
    """Return the losses of a batch, summed over its n trained positions, and the hidden states that
    were compared there: h' and h, (n, E) each."""
    tokens, answer, horizon = batch  # (B, T) each
    trained = loss_mask(answer)  # (B, T), True at n positions

    # The target's cache is what the drafter reads, its final hidden states are what it learns.
    kv, final, entering = target_pass(drafter.target, tokens, drafter.N)
    ca_output, features = drafter_pass(drafter, tokens, kv, horizon)  # (B, T, E) each

    features = features[trained].float()  # h', (n, E)
    final = final[trained].float()  # h, (n, E)
    kl = kl_in_pieces(features, final, drafter.lm_head.weight)  # `kl_divergence`, in less memory
    smooth_l1 = smooth_l1_loss(features, final)
    if drafter.N > 0:  # CA's output predicts a state, too: see N > 0, below
        ca_loss = smooth_l1_loss(ca_output[trained], entering[trained])
        smooth_l1 = (smooth_l1 + ca_loss) / 2
    loss = config.kl_weight * kl + config.feature_weight * smooth_l1  # weights 0.1 and 1.0
    return Losses(loss, kl, smooth_l1), features, final


def loss_mask(answer: Tensor) -> Tensor:
    """Return which positions are trained, (..., T): position i predicts token i + 1, and is trained
    if both are in an answer.

    (The first token of an answer is not predicted, because the target chooses it when it reads the
    prompt.)
    """
    followed = F.pad(answer[..., 1:], (0, 1))  # False at the end
    return answer & followed


@torch.no_grad()
def target_pass(target: Llama, tokens: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run the target over tokens (B, T). Returns its cache by token (B, T, L, 2 Ekv), its final
    hidden states (B, T, E) and, if N > 0, the states that enter its last N layers (B, T, E).

    `Llama.hidden` has the same loop, but does not return the states between layers. (The target
    must not be packed for inference, as app/packed.py does.)
    """
    batch, count = tokens.shape
    first_reused = len(target.layers) - N
    rope = target.rotary[:, :count]
    mask = causal_mask(count, past=0, device=tokens.device)
    cache = target.new_cache(count, batch)  # its length stays 0: no later pass continues it
    x = target.embed_tokens(tokens)
    entering = None
    for i, layer in enumerate(target.layers):
        if i == first_reused:
            entering = x
        x = layer(x, rope, mask, cache, i)
    return cache.by_token(0, count), target.norm(x), entering


def kl_divergence(features: Tensor, final: Tensor, head: Tensor) -> Tensor:
    """Return KL(p || q), summed over n positions: where p is large, q must not be small.

    p follows from the target's final hidden states (n, E), and q from those that the drafter
    predicts (n, E), through the weight of the LM head (V, E).

    When tokens are sampled at temperature 1 without top-p, KL bounds how often a drafted token is
    rejected, if it is the first to be tried at its place. Its rejection has the probability
    sum max(p - q, 0), which is at most sqrt(KL / 2) by Pinsker's inequality. (A drafter that drafts
    only some tokens, app/vocabulary.py, has an LM head of fewer rows. Then p and q here are
    distributions over these tokens only, and KL bounds nothing.)
    """
    # The softmax is in float32: in bfloat16, rounding errors would swamp a sum over V tokens.
    log_p = F.linear(final, head).log_softmax(-1, dtype=torch.float32)  # (n, V)
    log_q = F.linear(features, head).log_softmax(-1, dtype=torch.float32)  # (n, V)
    return (log_p.exp() * (log_p - log_q)).sum()


def smooth_l1_loss(predicted: Tensor, actual: Tensor) -> Tensor:
    """Return Smooth L1 between hidden states (n, E), mean over E, summed over n positions."""
    loss = F.smooth_l1_loss(predicted.float(), actual.float(), reduction="none")  # (n, E)
    return loss.mean(-1).sum()


# --- Less memory: the KL in pieces ---

MAX_LOGITS_AT_ONCE = 2**25  # 128 MiB, plus a few temporaries of that size


def kl_in_pieces(features: Tensor, final: Tensor, head: Tensor) -> Tensor:
    """Return `kl_divergence`, computed for a few positions at a time to save memory.

    A distribution has V numbers (128,256 for Llama-3), and autograd would keep several
    distributions per position for the backward pass. `checkpoint` keeps no distribution: the
    backward pass computes each piece again.
    """
    rows = max(1, MAX_LOGITS_AT_ONCE // len(head))
    total = features.new_zeros(())
    for piece in zip(features.split(rows), final.split(rows)):
        kl = checkpoint(
            kl_divergence, *piece, head, use_reentrant=False, preserve_rng_state=False
        )
        total = total + kl
    return total


# --- Batches ---


@dataclass(frozen=True)
class TrainConfig:
    """How to train. Defaults are the paper's hyperparameters, as far as the paper or its authors'
    code states them. The end of this file lists what differs."""

    updates: int = 186_000  # almost thirty times through the paper's data
    batch_size: int = 32  # conversations in an update
    micro_batch_size: int = 1  # conversations read at once: larger is faster, but takes more memory
    run_length: tuple[int, int] = (5, 15)  # tokens of the shortest and of the longest mock cycle
    kl_weight: float = 0.1  # the weight of KL(p || q)
    feature_weight: float = 1.0  # the weight of SmoothL1(h, h')
    lr: float = 3e-5  # the learning rate, in the end: it peaks at 20 times this
    warmup: int = 50  # updates
    seed: int = 0


Conversation = tuple[Tensor, Tensor]  # tokens and answer, as in `Example`


def draw_batches(count: int, config: TrainConfig) -> Iterator[list[int]]:
    """Yield batches without end, as the numbers of conversations. Each epoch goes through all
    `count` of them in an order of its own. Its last batch may be smaller."""
    for epoch in itertools.count():
        # Without the 1, epoch 0 and update 0 would share their random numbers (`draw_examples`).
        draws = np.random.default_rng((config.seed, epoch, 1))
        order = draws.permutation(count).tolist()
        for first in range(0, count, config.batch_size):
            yield order[first:first + config.batch_size]


def draw_examples(batch: list[Conversation], update: int, config: TrainConfig) -> list[Example]:
    """Cut the answers of a batch into mock cycles. What is drawn depends only on the seed and on
    `update`."""
    draws = np.random.default_rng((config.seed, update))
    shortest, longest = config.run_length
    lengths = draws.integers(shortest, longest, len(batch), endpoint=True)  # (B)
    phases = draws.integers(0, lengths)  # (B), each below its length
    examples = []
    for (tokens, answer), length, phase in zip(batch, lengths.tolist(), phases.tolist()):
        examples.append(Example(tokens, answer, cycle_horizon(answer, length, phase)))
    return examples


def count_trained(examples: list[Example]) -> int:
    """Return how many positions of these examples are trained."""
    return sum(int(loss_mask(example.answer).sum()) for example in examples)


def collate(examples: list[Example], device: torch.device) -> Example:
    """Pad examples to one length, and stack them into a batch for `distill`. The padding is on the
    right, where no causal query looks. It is in no answer, so it is not trained."""
    tokens = pad_sequence([example.tokens for example in examples], batch_first=True)  # (B, T)
    answer = pad_sequence([example.answer for example in examples], batch_first=True)
    horizon = pad_sequence([example.horizon for example in examples], batch_first=True)
    return Example(tokens.to(device), answer.to(device), horizon.to(device))


# --- One update ---
#
# The loss of an update is the mean over all trained positions of its batch. A whole batch may not
# fit into memory, so it is read in *micro-batches*, one after the other, whose gradients add up.
# `train`, further down, has the whole update in four lines: `draw_examples`, `count_trained`,
# `compute_gradients`, which runs `distill`, and `apply_gradients`.


def compute_gradients(
    drafter: Drafter, examples: list[Example], total: int, config: TrainConfig
) -> Tensor:
    """Compute the gradients of the examples' losses. Returns the sums of these `Losses`, (3).

    The loss of each micro-batch is divided by `total`, the number of trained positions in the whole
    batch, so that all gradients add up to that of the mean.
    """
    # `zero_grad` would leave no gradients at all. Of several processes (app/training.py) one may
    # get no examples, and then has zeros to add to the gradients of the others.
    for parameter in drafter.trained_parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    sums = torch.zeros(3, device=drafter.device)
    # Conversations of similar lengths are read together, so that little padding is needed.
    examples = sorted(examples, key=lambda example: len(example.tokens))
    for first in range(0, len(examples), config.micro_batch_size):
        micro_batch = collate(examples[first:first + config.micro_batch_size], drafter.device)
        losses, _, _ = distill(drafter, micro_batch, config)
        (losses.loss / total).backward()
        sums += torch.stack(losses).detach()
    return sums


def new_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Return the paper's optimizer. `apply_gradients` sets its learning rate."""
    return torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0.0)


MAX_GRADIENT_NORM = 1.0  # longer gradients are scaled down to this norm


def apply_gradients(drafter: Drafter, optimizer: torch.optim.Optimizer, lr: float) -> float:
    """Move the weights against their gradients, at a learning rate. Returns the gradients' norm.

    Raises FloatingPointError, before any weight has changed, if a gradient is not finite.
    """
    parameters = drafter.trained_parameters().values()
    norm = nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM).item()
    if not math.isfinite(norm):
        raise FloatingPointError("the gradient is not finite: try a lower learning rate")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return norm


def learning_rate(update: int, config: TrainConfig, epoch_updates: int) -> float:
    """Return the learning rate of an update, counted from 0. An epoch has `epoch_updates`.

    As in the authors' code:

        the first `warmup` updates             rises on a straight line to 20 lr
        up to the end of the first epoch       falls on a straight line to lr
        after that                             lr

    If an epoch is shorter than two warm-ups, the rise takes the first half of the epoch instead.
    """
    warmup = min(config.warmup, max(1, epoch_updates // 2))
    if update < warmup:
        return config.lr * 20 * (update + 1) / warmup
    if update < epoch_updates:
        return config.lr * (20 - 19 * ((update - warmup) / (epoch_updates - warmup)))
    return config.lr


# --- The loop ---
#
# In float32, on one device. app/training.py calls the same functions on the same batches, and adds
# a log, checkpoints, evaluations, mixed precision and several processes.


def train(
    drafter: Drafter, conversations: list[Conversation], config: TrainConfig
) -> Iterator[Losses]:
    """Train a drafter. Yields the losses of each update, as means over its trained positions.

    conversations: pairs of tokens (T) and answer (T), see `Example`; in each, at least two tokens
    in a row belong to an answer. Raises FloatingPointError if a gradient is not finite.
    """
    if not conversations:
        raise ValueError("no conversations to train on")
    optimizer = new_optimizer(drafter.trained_parameters().values())
    epoch_updates = math.ceil(len(conversations) / config.batch_size)
    batches = draw_batches(len(conversations), config)
    for update in range(config.updates):
        batch = [conversations[i] for i in next(batches)]
        examples = draw_examples(batch, update, config)
        total = count_trained(examples)
        sums = compute_gradients(drafter, examples, total, config)  # (3)
        apply_gradients(drafter, optimizer, learning_rate(update, config, epoch_updates))
        yield Losses(*(sums / total))


# --- Training with reused target layers: N > 0 ---
#
# CA's output then enters the last N layers of the target. What query 6, with horizon 3, sees in
# each of these layers:
#
#     position                                    0 1 2 3 4 5 6 7 8
#     the target's own keys and values            + + + + . . . . .
#     those that the layer makes of CA's output   . . . . + + + . .
#
# In a draft, tokens 0 to 3 are verified, and the cache holds the target's own keys and values for
# them. Tokens 4 to 6 are the newest one and two drafted ones: their keys and values are the
# drafter's. But to query 8, whose horizon is 7, tokens 4 to 6 are verified, too. One pass serves
# both queries, so a layer is given both kinds for every position, 2T in all, and the mask says
# which of them a query sees. A row of it is such a picture, with its two lines joined:
#
#     query 6     + + + + . . . . . | . . . . + + + . .
#     query 8     + + + + + + + + . | . . . . . . . . +
#
# This is exactly what drafting computes: positions 4 and 5 share query 6's horizon, so their keys
# and values are those of a draft that begins at 4.
#
# CA's output now predicts a state, too: the one that enters these layers in the target. Its Smooth
# L1 loss and that of the final states count half each, as in the authors' code. (That state may be
# far larger than the final one: 10 times with our toy target, 60 times with a larger one. CA's
# output then takes long to grow, and its loss outweighs the others. With the larger target a short
# training failed, until both were scaled: experiments/results/README.md.)


def reuse_target_layers(
    drafter: Drafter, ca_output: Tensor, kv: Tensor, horizon: Tensor
) -> Tensor:
    """Run the target's last N layers over all positions, on CA's output (B, T, E). Returns
    predicted final hidden states (B, T, E). kv and horizon: see `drafter_pass`."""
    target = drafter.target
    count = ca_output.shape[1]
    positions = torch.arange(count, device=ca_output.device)
    within = positions <= horizon.unsqueeze(-1)  # (B, T, T): query i, position j
    after = ~within & (positions <= positions.unsqueeze(-1))  # (B, T, T)
    mask = torch.cat([within, after], dim=-1).unsqueeze(1)  # (B, 1, T, 2T)
    first_reused = len(target.layers) - drafter.N
    reused = kv[:, :, first_reused:].unflatten(-1, (target.config.num_key_value_heads, -1))
    known = KnownKeysValues(reused.permute(2, 0, 3, 1, 4))  # (N, B, Hkv, T, 2D)
    return run_target_layers(drafter, ca_output, target.rotary[:, :count], mask, known)


class KnownKeysValues(KVCache):
    """A cache that holds the target's own keys and values of all positions from the beginning.
    `append` returns them, followed by those that a layer has just made, and stores nothing."""

    def append(self, layer: int, kv: Tensor) -> Tensor:
        return torch.cat([self.kv[layer].to(kv.dtype), kv], dim=2)  # (B, Hkv, 2T, 2D)


# --- What differs from the paper and its authors' code ---
#
#                       paper                 authors' code               here
#     mock cycle        5 to 15 tokens        6 to 14                     5 to 15
#     where it is cut   -                     at multiples of its length  after a random phase
#     its first query   sees earlier memory   sees its own memory, too    sees earlier memory
#     KL                reverse, KL(q || p)   forward, KL(p || q)         forward
#     mean of the loss  over answers' tokens  in each conversation first  over a batch's positions
#     learning rate     3e-5                  as in `learning_rate`       as in the code
#     new norms         -                     from N(0, std)              1
#     precision         float16, mixed        bfloat16, mixed             float32
#     N > 0             -                     approximated                exact
#
# A dash means that the paper does not say. The authors count positions from the beginning of the
# conversation, so that their cuts shorten an answer's first mock cycle, too. No query sees its own
# memory while drafting. The paper names the reverse KL in its table of hyperparameters ("reserve KL
# loss"). With a small std in its norms, a layer begins close to the identity, because what it adds
# to x is small. For N > 0 the authors' code has one state at each position, either the target's own
# or the drafter's. But a position is verified for some queries and drafted for others, and for one
# of these kinds its state is the wrong one. experiments/differences.md has the rest.


if __name__ == "__main__":  # the command line is in app/, and imports this file as `train`
    from app.train_command import main
    main()
