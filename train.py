"""Training: a frozen target teaches its drafter (paper, section 3.4 and appendix).

The target reads a conversation in one pass. The drafter learns to predict the target's final hidden
states h, and its distributions p of each next token. With its predictions h' and q, the loss of one
position is

    0.1 KL(p || q) + 1.0 SmoothL1(h, h')

Why both? How many drafted tokens are accepted depends on p and q alone, and KL compares these. But
Smooth L1 says of each of the E numbers in h' how it should change, which a comparison of
distributions says only indirectly, and it keeps h' in the space that the frozen LM head reads.

Drafters before this one had two faults. *Partial observability*: they read the target's last hidden
state, although what the target does next depends on its whole KV cache, which LSA reads here. And
they were trained *off-policy*: on the target's true states, where they later read their own
guesses. This drafter is trained *on-policy* (the policy is the drafter itself): it sees in training
the same kind of input that it will see when it follows its own drafts. (Here this holds for the
memory. The tokens are still the text's.)

The chapter first shows how one pass lets every position of an answer see exactly the memory that
this position would see while drafting. Losses, one update and the loop follow. The last section is
for drafters that reuse target layers (N > 0).

    python train.py --data ultrachat.jsonl                  # the paper's settings, one epoch
    drafter = Drafter(target, default_config(target))       # or, in a notebook, the loop below
    for losses in train(drafter, conversations, TrainConfig()): ...

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
# While drafting, tokens 5 to 7 would be the drafter's own. If the target wrote the text, greedily,
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
# Over time every position is trained at every depth that it can have in a draft. The authors' code
# cuts where the position in the conversation is a multiple of the length, which shortens the first
# piece, too. It differs in one more way: the first query of a piece also sees its own memory, a
# state that never occurs while drafting.


def cycle_horizon(answer: Tensor, length: int, phase: int) -> Tensor:
    """Return the horizon of each query, (T). answer (T) is True at what the assistant wrote.

    A mock cycle has `length` tokens, with two exceptions: the first one of an answer has `phase`
    tokens fewer, and the last one ends where the answer ends. With length 4 and phase 1, an answer
    that begins at position 4 has the mock cycles 4 5 6 | 7 8 9 10 | 11 .. with the horizons 3, 6
    and 10.
    """
    horizons = []
    begin = 0  # where the next answer begins, or the present one
    for position, in_answer in enumerate(answer.tolist()):
        if not in_answer:
            begin = position + 1
            horizons.append(position)  # has no effect: nothing is trained outside answers
            continue
        if position == begin or (position - begin + phase) % length == 0:
            cycle_begin = position
        horizons.append(cycle_begin - 1)
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
    memory = drafter.build_memory(kv.split(LSA_TOKENS, dim=1))  # (B, T, E)
    sa_output = self_attend(drafter, tokens)  # (B, T, E)
    ca_output = cross_attend(drafter, sa_output, memory, horizon)  # (B, T, E)
    if drafter.N == 0:
        return ca_output, ca_output
    return ca_output, reuse_target_layers(drafter, ca_output, kv, horizon)  # the last section


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
    # With horizon -1 a query reads nothing: PyTorch's attention then returns zeros, and the
    # residual connection passes on SA's output alone.
    return drafter.cross_attention.attend_to(memory_kv, sa_output, rope, within.unsqueeze(1))


# --- Losses ---


def loss_mask(answer: Tensor) -> Tensor:
    """Return which positions are trained, (..., T): position i predicts token i + 1, and is trained
    if both are in an answer.

    (The first token of an answer is not predicted, because the target chooses it when it reads the
    prompt.)
    """
    followed = F.pad(answer[..., 1:], (0, 1))  # False at the end
    return answer & followed


def kl_divergence(features: Tensor, final: Tensor, head: Tensor) -> Tensor:
    """Return KL(p || q), summed over n positions.

    p follows from the target's final hidden states (n, E), and q from those that the drafter
    predicts (n, E), through the weight of the LM head (V, E).

    When tokens are sampled at temperature 1 without top-p, KL bounds how often a drafted token is
    rejected. A rejection has probability sum max(p - q, 0), which is at most sqrt(KL / 2) by
    Pinsker's inequality.

    This is the forward KL: where p is large, q must not be small. The paper's table of
    hyperparameters says reverse KL, KL(q || p), but the authors' code computes the forward one.
    """
    # The softmax is in float32: in bfloat16, rounding errors would swamp a sum over V tokens.
    log_p = F.linear(final, head).log_softmax(-1, dtype=torch.float32)  # (n, V)
    log_q = F.linear(features, head).log_softmax(-1, dtype=torch.float32)  # (n, V)
    return (log_p.exp() * (log_p - log_q)).sum()


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


def smooth_l1_loss(predicted: Tensor, actual: Tensor) -> Tensor:
    """Return Smooth L1 between hidden states (n, E), mean over E, summed over n positions."""
    loss = F.smooth_l1_loss(predicted.float(), actual.float(), reduction="none")  # (n, E)
    return loss.mean(-1).sum()


# --- Batches ---


@dataclass(frozen=True)
class TrainConfig:
    """How to train. Defaults are the paper's, as far as the paper or its code states them.
    experiments/README.md lists the differences from the authors' code."""

    updates: int = 186_000  # almost thirty times through the paper's data
    batch_size: int = 32  # conversations in an update
    micro_batch_size: int = 1  # conversations read at once: larger is faster, but takes more memory
    run_length: tuple[int, int] = (5, 15)  # tokens of the shortest and of the longest mock cycle
    kl_weight: float = 0.1  # the weight of KL(p || q)
    feature_weight: float = 1.0  # the weight of SmoothL1(h, h')
    lr: float = 3e-5  # the learning rate, in the end: it peaks at 20 times this
    warmup: int = 50  # updates
    seed: int = 0


class Example(NamedTuple):
    """A conversation, with its horizons for one update, as tensors of shape (T). `collate` stacks
    several examples into a micro-batch, which has the same fields in shape (B, T)."""

    tokens: Tensor
    answer: Tensor  # True at what the assistant wrote, its stop tokens included
    horizon: Tensor


Conversation = tuple[Tensor, Tensor]  # tokens and answer, as in `Example`


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


def collate(examples: list[Example], device: torch.device) -> Example:
    """Pad examples to one length, and stack them into a micro-batch. The padding is on the right,
    where no causal query looks. It is in no answer, so it is not trained."""
    longest = max(len(example.tokens) for example in examples)

    def stack(tensors: list[Tensor]) -> Tensor:
        padded = [F.pad(tensor, (0, longest - len(tensor))) for tensor in tensors]  # zeros or False
        return torch.stack(padded).to(device)  # (B, T)

    return Example(
        tokens=stack([example.tokens for example in examples]),
        answer=stack([example.answer for example in examples]),
        horizon=stack([example.horizon for example in examples]),
    )


# --- Target and drafter, compared ---


class TargetStates(NamedTuple):
    """What the target computes from a text."""

    kv: Tensor  # the KV cache, (B, T, L, 2 Ekv)
    final: Tensor  # h: the hidden states after the final norm, (B, T, E)
    entering: Tensor | None  # the states that enter the last N layers, (B, T, E), if N > 0


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
    return TargetStates(cache.by_token(0, count), target.norm(x), entering)


class Losses(NamedTuple):
    """Losses, each summed over trained positions, or their means: scalar tensors."""

    loss: Tensor  # the weighted sum of the other two
    kl: Tensor
    smooth_l1: Tensor


class Distillation(NamedTuple):
    """The losses of a micro-batch, and the hidden states at its n trained positions."""

    losses: Losses
    features: Tensor  # h', (n, E)
    final: Tensor  # h, (n, E)


def distill(drafter: Drafter, micro_batch: Example, config: TrainConfig) -> Distillation:
    """Run the target and the drafter once over a micro-batch, and compare their results."""
    tokens, answer, horizon = micro_batch
    trained = loss_mask(answer)  # True at n positions
    states = target_pass(drafter.target, tokens, drafter.N)
    ca_output, features = drafter_pass(drafter, tokens, states.kv, horizon)  # (B, T, E) each
    features = features[trained].float()  # (n, E)
    final = states.final[trained].float()  # (n, E)
    kl = kl_in_pieces(features, final, drafter.lm_head.weight)
    smooth_l1 = smooth_l1_loss(features, final)
    if drafter.N > 0:
        ca_loss = smooth_l1_loss(ca_output[trained], states.entering[trained])
        smooth_l1 = (smooth_l1 + ca_loss) / 2  # the last section
    loss = config.kl_weight * kl + config.feature_weight * smooth_l1
    return Distillation(Losses(loss, kl, smooth_l1), features, final)


# --- One update ---


def count_trained(examples: list[Example]) -> int:
    """Return how many positions of these examples are trained."""
    return sum(int(loss_mask(example.answer).sum()) for example in examples)


def compute_gradients(
    drafter: Drafter, examples: list[Example], total: int, config: TrainConfig
) -> Tensor:
    """Compute the gradients of the examples' losses. Returns the sums of these `Losses`, (3).

    Micro-batches are read one after the other. The loss of each is divided by `total`, the number
    of trained positions in the whole batch, so that all gradients add up to that of the mean.
    """
    for parameter in drafter.trained_parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    sums = torch.zeros(3, device=drafter.device)
    # Conversations of similar lengths are read together, so that little padding is needed.
    examples = sorted(examples, key=lambda example: len(example.tokens))
    for first in range(0, len(examples), config.micro_batch_size):
        micro_batch = collate(examples[first:first + config.micro_batch_size], drafter.device)
        losses = distill(drafter, micro_batch, config).losses
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


def train_step(
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    batch: list[Conversation],
    update: int,
    lr: float,
    config: TrainConfig,
) -> Losses:
    """Make one update, whose loss is the mean over all trained positions of the batch. Returns the
    means."""
    examples = draw_examples(batch, update, config)
    total = count_trained(examples)
    sums = compute_gradients(drafter, examples, total, config)  # (3)
    apply_gradients(drafter, optimizer, lr)
    return Losses(*(sums / total))


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
# The paper trains on UltraChat, without a system prompt, in float16 mixed precision. This is the
# same loop in float32, on one device. app/training.py calls the same functions, and adds a log,
# checkpoints, evaluations, mixed precision and several processes.
#
# A new drafter has the random weights that PyTorch gives its modules, and norms of weight 1. (The
# authors also draw the weights of norms, from N(0, std) with a small std. A layer then begins close
# to the identity, because what it adds to x is small.)


def draw_batches(
    conversations: list[Conversation], config: TrainConfig
) -> Iterator[list[Conversation]]:
    """Yield batches without end. Each epoch goes through the conversations in an order of its own.
    Its last batch may be smaller."""
    for epoch in itertools.count():
        order = np.random.default_rng((config.seed, epoch)).permutation(len(conversations))
        for first in range(0, len(order), config.batch_size):
            yield [conversations[i] for i in order[first:first + config.batch_size]]


def train(
    drafter: Drafter, conversations: list[Conversation], config: TrainConfig
) -> Iterator[Losses]:
    """Train a drafter, as the paper does. Yields the losses of each update.

    conversations: pairs of tokens (T) and answer (T), see `Example`; in each, at least two tokens
    in a row belong to an answer. Raises FloatingPointError if a gradient is not finite.
    """
    optimizer = new_optimizer(drafter.trained_parameters().values())
    epoch_updates = math.ceil(len(conversations) / config.batch_size)
    batches = draw_batches(conversations, config)
    for update in range(config.updates):
        lr = learning_rate(update, config, epoch_updates)
        yield train_step(drafter, optimizer, next(batches), update, lr, config)


# --- Training with reused target layers: N > 0 ---
#
# CA's output then enters the last N layers of the target. What query 6, with horizon 3, sees in
# each of these layers:
#
#     position                                    0 1 2 3 4 5 6 7
#     the target's own keys and values            + + + + . . . .
#     those that the layer makes of CA's output   . . . . + + + .
#
# In a draft, tokens 0 to 3 are verified, and the cache holds the target's own keys and values for
# them. Tokens 4 to 6 are the newest one and two drafted ones: their keys and values are the
# drafter's. One pass must serve every query, so a layer is given both kinds for every position, 2T
# in all, and each row of the mask is one such picture, its two lines joined. This is exactly what
# drafting computes: positions 4 and 5 share query 6's horizon, so their keys and values are those
# of a draft that begins at 4. (The authors' code approximates: it feeds the layers the true state
# at verified positions, and the predicted one elsewhere.)
#
# CA's output now predicts a state, too: the one that enters these layers in the target
# (`TargetStates.entering`). Its Smooth L1 loss and that of the final states count half each, as in
# the authors' code.


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


if __name__ == "__main__":  # the command line imports this file as a module, like everybody else
    from app.train_command import main
    main()
