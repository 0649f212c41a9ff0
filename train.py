"""Distillation: a frozen target teaches its drafter (paper, section 3.4 and appendix).

One target pass gives the KV cache, the hidden states and, through the LM head, soft labels. One drafter pass then covers
every position, with no unrolling: a random `horizon` cuts each answer into runs, and a query sees only the memory of
tokens before its run, which is the state it will meet while drafting. The loss of one position is

    0.1 KL(p || q) + 1.0 SmoothL1(h, h'),    p, h the target's distribution and hidden state, q, h' the drafter's.

    python train.py --data ultrachat.jsonl                           # the paper's settings, for one pass over the data
    python train.py --data ultrachat.jsonl --resume                  # goes on after any interruption
    torchrun --nproc-per-node 8 train.py --data ultrachat.jsonl      # the same, on eight GPUs
    python train.py --synthesize 1000 --data own.jsonl               # no data? let the target write it

Shapes: B batch, T tokens, L layers, E hidden, V vocabulary, N reused layers, R horizons.
"""
from __future__ import annotations

import argparse
import bisect
import itertools
import json
import math
import os
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Iterable, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm, trange

from llama import (DTYPES, InputError, Llama, Parser, Tokenizer, add_model_arguments, check_message, choose, default_dtype,
                   is_encodable, load_target, natural, number, one_line, run_command, written_whole)
from moa import Drafter, DrafterConfig, load_drafter, save_drafter

DEPTHS = 8  # of the evaluation
LOSS_CHUNK = 256  # positions whose V-wide distributions exist at once
WARM_START, WARM_START_TOKENS = 128, 50_000  # what --warm-start is fitted to, all in memory at once, twice
FIT_UPDATES, FIT_TOKENS, FIT_RATE = 600, 384, 4e-3  # of LSA in --warm-start


# ---------------------------------------------------------------------------------------------------------------------
# The method: horizons, the target's pass, the losses
# ---------------------------------------------------------------------------------------------------------------------

def run_horizon(answer: Tensor, length: int, phase: int) -> Tensor:
    """The last position whose memory each query may read, (T). answer (T) is True at the assistant's tokens.

    Each answer is cut into runs of `length`, the first one shortened by `phase`; a query sees memory up to the token
    before its run. Outside answers everything is verified: a position sees itself.
    """
    position = torch.arange(len(answer))
    begins = answer & ~F.pad(answer[:-1], (1, 0))
    offset = position - torch.where(begins, position, 0).cummax(0).values  # within its answer
    in_run = torch.minimum((offset + phase) % length, offset)
    return torch.where(answer, position - in_run - 1, position)


def loss_mask(answer: Tensor) -> Tensor:
    """The positions that are trained: the assistant's tokens whose next one is the assistant's too. (T) -> (T) bool.

    Drafting asks at no others: an answer's first token comes from the target's own pass over the prompt.
    """
    return answer & F.pad(answer[1:], (0, 1))


@torch.no_grad()
def target_pass(target: Llama, tokens: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """kv (B, T, L, 2 Ekv), the hidden states that enter the last N layers and the final ones, both (B, T, E)."""
    (batch, count), layers = tokens.shape, len(target.layers)
    cache = target.new_cache(count, batch)  # its length stays 0: each layer writes its own layer from position 0
    entering = target.run_layers(target.embed_tokens(tokens), range(layers - N), cache)
    final = target.norm(target.run_layers(entering, range(layers - N, layers), cache))
    return cache.read(0, count), entering, final


class ForwardKL(torch.autograd.Function):
    """Sum over positions of KL(p || q), p from the target's hidden states and q from the drafter's features.

    The gradient of KL(p || q) in q's logits is q - p, so the gradient in the features is known as soon as the loss is:
    both are made chunk by chunk, and no more than a chunk of the positions x V matrix ever exists. Where head holds the
    draft vocabulary only, p and q are the distributions over it.
    """

    @staticmethod
    def forward(ctx, features: Tensor, hidden: Tensor, head: Tensor) -> Tensor:  # (R, n, E), (n, E), (V, E)
        loss, gradient = features.new_zeros(()), torch.empty_like(features)
        if torch.is_autocast_enabled(features.device.type):
            head = head.to(torch.get_autocast_dtype(features.device.type))
        for a in range(0, hidden.shape[0], LOSS_CHUNK):
            chunk = slice(a, a + LOSS_CHUNK)
            log_p = torch.log_softmax(F.linear(hidden[chunk].to(head.dtype), head).float(), dim=-1)  # (c, V)
            p = log_p.exp()
            for r in range(len(features)):
                log_q = torch.log_softmax(F.linear(features[r, chunk].to(head.dtype), head).float(), dim=-1)
                loss += (p * (log_p - log_q)).sum()
                if ctx.needs_input_grad[0]:
                    gradient[r, chunk] = (log_q.exp() - p).to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return ctx.saved_tensors[0] * grad_output, None, None


def hidden_loss(predicted: Tensor, true: Tensor) -> Tensor:
    """Smooth L1, mean over E, summed over positions. (R, n, E), (n, E)."""
    return F.smooth_l1_loss(predicted.float(), true.float().expand_as(predicted), reduction="none").mean(-1).sum()


@dataclass
class Passes:
    """What target and drafter made of the same sequences."""

    guesses: Tensor  # (R, B, T, E), CA's output
    features: Tensor  # (R, B, T, E), after the reused layers; for N = 0 the same
    entering: Tensor | None  # (B, T, E), what the guesses should be where N > 0
    final: Tensor  # (B, T, E), what the features should be


def both_passes(drafter: Drafter, tokens: Tensor, horizons: Tensor, frozen: tuple[Tensor, Tensor] | None = None) -> Passes:
    """tokens (B, T), horizons (R, B, T). The target's pass, the memory and SA are paid for once, CA R times.

    frozen: for --freeze-lsa alone, what LSA and target made of these tokens before, pooled (B, T, 2 Ekv) and final (B, T, E).
    """
    if frozen is None:
        kv, entering, final = target_pass(drafter.target, tokens, drafter.N)
        pooled = drafter.pool(kv, final)
    else:
        kv, (pooled, final), entering = None, frozen, None
    return Passes(*drafter(tokens, drafter.Ekv2E(pooled), kv, horizons), entering, final)


@dataclass
class Sequence:
    tokens: Tensor  # (T)
    answer: Tensor  # (T), True at the assistant's tokens
    frozen: tuple[Tensor, Tensor] | None = None  # see `frozen_states`: (T, 2 Ekv) and (T, E), bfloat16


def losses(drafter: Drafter, passes: Passes, answer: Tensor, kl_weight: float, feature_weight: float) -> Tensor:
    """Loss, its KL part and its hidden-state part (3), each summed over the queries in answer (B, T) of all horizons."""
    ask = torch.stack([loss_mask(row) for row in answer])  # (B, T)
    features, final = passes.features[:, ask].float(), passes.final[ask]  # (R, n, E), (n, E)
    kl = ForwardKL.apply(features, final, drafter.head.weight)
    hidden = hidden_loss(features, final)
    if drafter.N > 0:  # half for CA's output, which should enter the last N layers, half for what comes out of them
        hidden = (hidden + hidden_loss(passes.guesses[:, ask], passes.entering[ask])) / 2
    return torch.stack([kl_weight * kl + feature_weight * hidden, kl.detach(), hidden.detach()])


def distillation_loss(drafter: Drafter, tokens: Tensor, answer: Tensor, horizons: Tensor, kl_weight: float,
                      feature_weight: float, frozen: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`losses` of some sequences: tokens, answer (B, T), horizons (R, B, T)."""
    return losses(drafter, both_passes(drafter, tokens, horizons, frozen), answer, kl_weight, feature_weight)


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------

def train(drafter: Drafter, optimizer: Optimizer, scaler, data: Conversations, order: Order, held_out: list[Sequence],
          start: int, epoch_updates: int, worker: Worker, args) -> None:
    """Updates `start` to args.updates, logged, evaluated and saved on the way; an epoch has `epoch_updates`.

    data and order are of the section on data below, optimizer and worker of the one on optimisation.
    """
    out, parameters = Path(args.out), list(drafter.parameters())

    def log(**record) -> None:
        numbers = {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in record.items()}
        with open(out / "log.jsonl", "a") as file:
            file.write(json.dumps(numbers) + "\n")

    bar = tqdm(range(start, args.updates), initial=start, total=args.updates, unit=" updates", disable=worker.rank > 0)
    for update in bar:
        began = time.perf_counter()
        batch = draw_batch(data, order, args.batch_size)
        rate = learning_rate(update, args, epoch_updates)
        loss, kl, hidden = train_batch(drafter, batch, update, args, worker, scaler)
        for part in optimizer.parts:
            scaler.unscale_(part)
        norm = torch.nn.utils.clip_grad_norm_(parameters, args.clip or math.inf).item()
        if math.isfinite(norm):
            optimizer.step(rate, scaler)
        elif scaler.is_enabled() and scaler.get_scale() > 1e-4:  # float16 overflowed: the next update has half the scale
            scaler.update()
        else:
            raise InputError(f"update {update + 1}: the gradient is not finite; try a lower --lr, or another --dtype")
        drafter.zero_grad()
        if worker.rank > 0:
            continue
        speed = sum(len(s.tokens) for s in batch) / (time.perf_counter() - began)
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:.0f} tokens/s")
        done, last = update + 1, update + 1 == args.updates
        log(update=done, loss=loss, kl=kl, hidden=hidden, lr=rate, grad_norm=norm, tokens_per_second=speed)
        if done % args.eval_every == 0 or last:
            figures = evaluate(drafter, held_out, args)
            log(update=done, skipped_lines=len(data.skipped), **figures)
            depths = " ".join(f"{rate:.2f}" for rate in figures["depth_accuracy"])
            tqdm.write(f"update {done}: held-out loss {figures['held_out_loss']:.3f}, right at depth 1..{DEPTHS} {depths}, "
                       f"acceptance length {figures['implied_acceptance_length']:.2f}", file=sys.stderr)
        if done % args.save_every == 0 or last:
            save_drafter(drafter, out)  # first: a run whose last checkpoint exists has nothing left to do
            save_checkpoint(out / "checkpoint.pt", drafter, optimizer, scaler, data, order, done, args)


def train_batch(drafter: Drafter, batch: list[Sequence], update: int, args, worker: Worker,
                scaler: torch.amp.GradScaler) -> tuple[float, float, float]:
    """Accumulate the gradient of one global batch; returns loss, KL and hidden-state loss per query.

    Every process draws the same batch and the same horizons and takes its share: the sum does not depend on how many
    processes there are.
    """
    device = drafter.target.device
    draws = np.random.default_rng((args.seed, update))
    lengths = draws.integers(args.run_length[0], args.run_length[1] + 1, (len(batch), args.horizons))
    phases = draws.integers(0, lengths)
    horizons = [torch.stack([run_horizon(s.answer, int(n), int(k)) for n, k in zip(lengths[i], phases[i])])
                for i, s in enumerate(batch)]  # each (R, T)
    total = args.horizons * sum(int(loss_mask(s.answer).sum()) for s in batch)
    share = sorted(range(len(batch))[worker.rank::worker.count], key=lambda i: len(batch[i].tokens))  # little padding
    sums = scaler.scale(torch.zeros(3, device=device))  # or, in a process without a share, it could not unscale
    for a in range(0, len(share), args.micro_batch_size):
        part = share[a:a + args.micro_batch_size]
        tokens, answer = pad([batch[i] for i in part], device)
        horizon = torch.nn.utils.rnn.pad_sequence([horizons[i].T for i in part], batch_first=True)  # (B, T, R)
        with torch.autocast(device.type, DTYPES[args.dtype], enabled=args.dtype != "float32"):
            frozen = frozen_states(drafter, [batch[i] for i in part]) if args.freeze_lsa else None
            parts = distillation_loss(drafter, tokens, answer, horizon.permute(2, 0, 1).to(device), args.kl_weight,
                                      args.feature_weight, frozen)
        scaler.scale(parts[0] / total).backward()
        sums += parts.detach()
    learning = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    for parameter in learning:
        if parameter.grad is None:  # this process had no share of a small batch
            parameter.grad = torch.zeros_like(parameter)
    worker.add_up([p.grad for p in learning] + [sums])
    return tuple((sums / total).tolist())


def first_choice(drafter: Drafter, features: Tensor) -> Tensor:
    """The token that the drafter thinks likeliest, (n, E) -> (n)."""
    choice = drafter.logits(features).argmax(-1)
    return choice if drafter.vocabulary is None else drafter.vocabulary[choice]


@torch.no_grad()
def evaluate(drafter: Drafter, held_out: list[Sequence], args) -> dict:
    """Losses and, per draft depth 1..8, how often the drafter's first choice is the target's, if it was so before.

    Text is the data's, so at a depth both have read the same tokens. With a_d the share at depth d, the expected number of
    new tokens a cycle is 1 + a_1 + a_1 a_2 + ... : the acceptance length this implies. It is optimistic: a run begins
    anywhere here, a cycle mostly behind a token that the drafter got wrong, where guessing is harder. Without CA only depth
    1 is measured: what comes deeper would be scored on true memories that drafting does not have.
    """
    device = drafter.target.device
    sums, count = torch.zeros(3), 0
    reached, right = torch.zeros(DEPTHS), torch.zeros(DEPTHS)
    for index, sequence in enumerate(held_out):
        tokens, answer = pad([sequence], device)
        horizon, ask = run_horizon(sequence.answer, DEPTHS, index % DEPTHS), loss_mask(answer[0])  # (T)
        with torch.autocast(device.type, DTYPES[args.dtype], enabled=args.dtype != "float32"):
            passes = both_passes(drafter, tokens, horizon.to(device)[None, None])
            sums += losses(drafter, passes, answer, args.kl_weight, args.feature_weight).cpu()
            chunks = zip(passes.features[0, 0, ask].split(LOSS_CHUNK), passes.final[0, ask].split(LOSS_CHUNK))
            agree = torch.cat([first_choice(drafter, guess) == drafter.target.lm_head(true).argmax(-1)
                               for guess, true in chunks]).tolist()
        count += len(agree)
        alive = False
        for depth, is_right in zip((torch.arange(len(ask)) - horizon)[ask.cpu()].tolist(), agree):  # 1 at a run's first query
            alive = alive or depth == 1
            reached[depth - 1] += alive
            alive = alive and is_right
            right[depth - 1] += alive
    rates = (right / reached.clamp(min=1)).tolist()[:DEPTHS if drafter.config.use_cross_attention else 1]
    loss, kl, hidden = (sums / max(1, count)).tolist()
    return {"held_out_loss": loss, "held_out_kl": kl, "held_out_hidden": hidden, "depth_accuracy": rates,
            "implied_acceptance_length": 1 + float(np.cumprod(rates).sum())}


# ---------------------------------------------------------------------------------------------------------------------
# Data: one JSON object a line, four formats, read by offset so that a file of any size can be shuffled
# ---------------------------------------------------------------------------------------------------------------------

def read_messages(line: str) -> list[dict]:
    """The conversation in a line of UltraChat (either form), ShareGPT or Alpaca. Raises ValueError, saying why not."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if "messages" in record:
        messages = record["messages"]
    elif "data" in record:
        if not isinstance(record["data"], list):
            raise ValueError("data is not a list")
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(record["data"])]
    elif "conversations" in record:
        roles = {"human": "user", "gpt": "assistant", "user": "user", "assistant": "assistant", "system": "system"}
        try:
            messages = [{"role": roles[turn["from"]], "content": turn["value"]} for turn in record["conversations"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"a turn without a known speaker and a value: {error}") from None
    elif "instruction" in record and "output" in record:
        question = "\n\n".join(str(part) for part in (record["instruction"], record.get("input")) if part)
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": record["output"]}]
    else:
        raise ValueError("none of messages, data, conversations, instruction + output")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("messages is not a list of objects")
    for message in messages:
        check_message(message)
    return messages


def encode_conversation(tokenizer: Tokenizer, messages: list[dict], seq_len: int) -> Sequence:
    """Chat template applied, cut at seq_len. Raises ValueError where nothing is left to learn from."""
    ids, answer = [], []
    for piece, is_answer in tokenizer.turns(messages):
        ids += piece
        answer += [is_answer] * len(piece)
    sequence = Sequence(torch.tensor(ids[:seq_len]), torch.tensor(answer[:seq_len], dtype=torch.bool))
    if not loss_mask(sequence.answer).any():
        raise ValueError(f"no answer within the first {seq_len} tokens")
    return sequence


class Conversations:
    """Random access to the conversations of some .jsonl files, of which only the lines' offsets are in memory.

    Lines that cannot be used are named on stderr: at once where there is no conversation with an answer, in its turn where
    the answer begins beyond seq_len.

    keep: and what has been read of them, with what `frozen_states` adds to it: 2 Ekv + E numbers of 2 bytes a token.
    """

    def __init__(self, paths: list[str], tokenizer: Tokenizer, seq_len: int, verbose: bool = True, keep: bool = False):
        self.paths, self.tokenizer, self.seq_len, self.verbose, self.keep = paths, tokenizer, seq_len, verbose, keep
        self.kept: dict[int, Sequence] = {}
        self.skipped: set[int] = set()  # lines that cannot be used
        self.blank: set[int] = set()
        self.offsets, self.first = [], [0]  # of each file; the index of its first line
        for path in paths:
            try:
                if os.path.exists(path) and not os.path.isfile(path):
                    raise InputError(f"{path}: not a regular file, whose lines could be read in any order; store it first")
                with open(path, "rb") as file:
                    lines = enumerate(file, len(self))
                    lengths = np.fromiter((self.scan(index, line) for index, line in lines), dtype=np.int64)
            except OSError as error:
                raise InputError(f"{path}: cannot be read: {error.strerror}") from None
            self.offsets.append(np.concatenate([np.zeros(1, np.int64), lengths.cumsum()]))
            self.first.append(self.first[-1] + len(lengths))
        self.sizes = [int(offsets[-1]) for offsets in self.offsets]  # bytes, now: a file may grow
        if self.skipped and verbose:
            print(f"skipped {len(self.skipped)} of {len(self)} lines", file=sys.stderr)

    def __len__(self) -> int:
        return self.first[-1]

    def get(self, index: int) -> Sequence | None:
        """One conversation; None for a line that cannot be used."""
        if index in self.skipped or index in self.blank or index in self.kept:
            return self.kept.get(index)
        which, number = self.place(index)
        start, end = self.offsets[which][number:number + 2]
        with open(self.paths[which], "rb") as file:
            file.seek(start)
            line = file.read(end - start)
        try:
            sequence = encode_conversation(self.tokenizer, read_messages(line.decode("utf-8-sig")), self.seq_len)
            if self.keep:
                self.kept[index] = sequence
            return sequence
        except ValueError as error:
            self.skip(index, error)
            return None

    def scan(self, index: int, line: bytes) -> int:
        """The length of a line in bytes, once it is known whether it holds a conversation."""
        if not line.strip():
            self.blank.add(index)
            return len(line)
        try:
            if not any(message["role"] == "assistant" for message in read_messages(line.decode("utf-8-sig"))):
                raise ValueError("no answer")
        except ValueError as error:  # InputError and UnicodeDecodeError are ValueErrors too
            self.skip(index, error)
        return len(line)

    def skip(self, index: int, why: ValueError) -> None:
        self.skipped.add(index)
        if self.verbose:
            which, number = self.place(index)
            tqdm.write(f"skipped {self.paths[which]}, line {number + 1}: {why}", file=sys.stderr)

    def place(self, index: int) -> tuple[int, int]:
        """Which file a line is in, and which it is there, both from 0."""
        which = bisect.bisect_right(self.first, index) - 1
        return which, index - self.first[which]


class Order:
    """An endless shuffled walk over some indices, a new permutation each epoch. Its state is two numbers."""

    def __init__(self, indices: np.ndarray, seed: int, epoch: int = 0, position: int = 0):
        self.indices, self.seed, self.epoch, self.position = indices, seed, epoch, position
        self.permutation = self.permute()

    def permute(self) -> np.ndarray:
        return np.random.default_rng((self.seed, self.epoch)).permutation(self.indices)

    def __next__(self) -> int:
        if self.position == len(self.indices):
            self.epoch, self.position = self.epoch + 1, 0
            self.permutation = self.permute()
        self.position += 1
        return int(self.permutation[self.position - 1])


def draw_batch(data: Conversations, order: Order, size: int) -> list[Sequence]:
    """The next `size` usable conversations. Raises InputError when a whole epoch has none."""
    batch, misses = [], 0
    while len(batch) < size:
        sequence = data.get(next(order))
        if sequence is not None:
            batch.append(sequence)
        misses = 0 if sequence is not None else misses + 1
        if misses > len(order.indices):
            raise InputError(f"{', '.join(data.paths)}: no usable conversation; see train.py for the formats it reads")
    return batch


def split(data: Conversations, seed: int) -> tuple[np.ndarray, list[Sequence]]:
    """Shuffled indices to train on, and conversations to evaluate on: one in ten, at most 64. Raises InputError."""
    if len(data) == 0:
        raise InputError(f"{', '.join(data.paths)}: empty")
    shuffled = np.random.default_rng(seed).permutation(len(data))
    count = min(64, max(1, len(data) // 10))
    held_out, training = shuffled[:count], shuffled[count:]
    if all(data.get(int(i)) is None for i in training):  # the little that can be used was to be held out
        training = held_out
    usable = draw_batch(data, Order(training, seed), 1)  # raises if nothing is
    return training, [s for s in (data.get(int(i)) for i in held_out) if s is not None] or usable


def pad(sequences: list[Sequence], device) -> tuple[Tensor, Tensor]:
    """tokens and answer (B, T), padded on the right, where no causal query looks."""
    tokens = torch.nn.utils.rnn.pad_sequence([s.tokens for s in sequences], batch_first=True)
    answer = torch.nn.utils.rnn.pad_sequence([s.answer for s in sequences], batch_first=True)
    return tokens.to(device), answer.to(device)


# ---------------------------------------------------------------------------------------------------------------------
# Optimisation
# ---------------------------------------------------------------------------------------------------------------------

def learning_rate(update: int, args, epoch_updates: int) -> float:
    """`paper`: 50 updates up to 20 times the rate, linearly down to the rate over the first epoch, constant after.
    `cosine`: warm-up to the rate, then half a cosine down to 0 at the last update."""
    warm = min(1.0, (update + 1) / args.warmup)
    if args.schedule == "paper":
        decay = min(1.0, max(0, update - args.warmup) / max(1, epoch_updates - args.warmup))
        return args.lr * warm * (20 - 19 * decay)
    return args.lr * warm * (1 + math.cos(math.pi * min(1.0, update / args.updates))) / 2


class Optimizer:
    """AdamW, or Muon (Jordan et al. 2024) for the matrices and AdamW for the rest; one interface for both."""

    def __init__(self, parameters: Iterable[nn.Parameter], kind: str):
        learning = [p for p in parameters if p.requires_grad]
        matrices = [p for p in learning if p.ndim == 2 and kind == "muon"]
        rest = [p for p in learning if p.ndim != 2 or kind == "adamw"]
        self.parts = [torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0)]
        if matrices:
            self.parts.append(torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))

    def step(self, rate: float, scaler: torch.amp.GradScaler) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate
            scaler.step(part)
        scaler.update()

    def state_dict(self) -> list[dict]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict]) -> None:
        for part, state in zip(self.parts, states):
            part.load_state_dict(state)


@dataclass
class Worker:
    """One of `count` processes of a data-parallel run: it computes every count-th sequence of a batch."""

    rank: int
    count: int

    @classmethod
    def join(cls, device: str) -> "Worker":
        if not dist.is_torchelastic_launched():  # by torchrun
            return cls(0, 1)
        if device.startswith("mps"):
            raise InputError("torchrun: processes cannot add up what is on an mps device; use --device cpu, or one process")
        dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
        return cls(dist.get_rank(), dist.get_world_size())

    def add_up(self, tensors: list[Tensor]) -> None:
        """Replace tensors by their sums over all processes, as one message."""
        if self.count == 1:
            return
        flat = torch.cat([t.flatten() for t in tensors])
        dist.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            tensor.copy_(part.view_as(tensor))

    def take_the_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by those of process 0."""
        for tensor in tensors if self.count > 1 else ():
            dist.broadcast(tensor.detach(), src=0)


@torch.no_grad()
def frozen_states(drafter: Drafter, sequences: list[Sequence]) -> tuple[Tensor, Tensor]:
    """What a frozen LSA and the target make of these sequences, padded: pooled (B, T, 2 Ekv) and final states (B, T, E).

    Computed the first time a sequence comes, then kept with it.
    """
    device = drafter.target.device
    for sequence in sequences:
        if sequence.frozen is None:
            kv, _, final = target_pass(drafter.target, sequence.tokens[None].to(device), 0)
            sequence.frozen = drafter.pool(kv)[0].bfloat16().cpu(), final[0].bfloat16().cpu()
    pooled, final = zip(*(sequence.frozen for sequence in sequences))
    return tuple(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device, drafter.dtype) for rows in (pooled, final))


# ---------------------------------------------------------------------------------------------------------------------
# A start near the goal (ours, not the paper's). Initialised at random a drafter spends its first hundreds of updates
# growing to the scale of hidden states, its LSA tells little more than the mean over layers does, and its CA averages
# hundreds of memories of nothing. A few conversations are enough to do better: LSA is trained on its own, which is cheap,
# the rest has closed forms.
# ---------------------------------------------------------------------------------------------------------------------

def ridge(x: Tensor, y: Tensor) -> Tensor:
    """The W (out, in) that minimises |x W' - y|^2, damped. x (n, in), y (n, out)."""
    gram = x.T @ x
    return torch.linalg.solve(gram + 0.1 * torch.diag(gram.diagonal()), x.T @ y).T


class Fit(NamedTuple):
    """A conversation to fit to: what the target makes of it, and where the drafter learns from it."""

    tokens: Tensor  # (1, T)
    ask: Tensor  # (T) bool
    horizon: Tensor  # (1, T)
    kv: Tensor  # (1, T, L, 2 Ekv)
    aim: Tensor  # (1, T, E), the hidden states to guess
    final: Tensor  # (1, T, E), the final ones


@torch.no_grad()
def warm_start(drafter: Drafter, sequences: list[Sequence], dtype: torch.dtype) -> None:
    """Fit a new drafter, in place: memories to their tokens' final hidden states, CA's heads to the newest memories, CA's
    MLP to what the guess then lacks."""
    fits: list[Fit] = []
    totals = itertools.accumulate(len(sequence.tokens) for sequence in sequences)
    for i, sequence in enumerate([s for s, total in zip(sequences, totals) if total <= WARM_START_TOKENS] or sequences[:1]):
        tokens, answer = pad([sequence], drafter.target.device)
        kv, entering, final = target_pass(drafter.target, tokens, drafter.N)
        horizon = run_horizon(sequence.answer, 8, i % 8)[None].to(tokens.device)
        aim = entering if drafter.N else final
        fits.append(Fit(tokens, loss_mask(answer[0]), horizon, kv, aim.float(), final.float()))
    fit_memory(drafter, fits, dtype)
    look_at_the_newest(drafter, fits)
    fit_mlp(drafter, fits)


def fit_memory(drafter: Drafter, fits: list[Fit], dtype: torch.dtype) -> None:
    """The projection, then LSA with it, learn to tell tokens' final hidden states from their keys and values."""
    final = torch.cat([f.final[0] for f in fits])  # (n, E)
    if drafter.config.use_layer_self_attention:
        rows = torch.cat([f.kv[0, ::8].flatten(0, 1) for f in fits]).float()  # (m, 2 Ekv)
        rows = rows * rows.square().mean(-1, keepdim=True).rsqrt()
        drafter.layer_self_attention.input_layernorm.weight.copy_(rows.square().mean(0).rsqrt())  # unit scale
    pooled = torch.cat([drafter.pool(f.kv, f.final)[0] for f in fits])  # (n, 2 Ekv or E)
    solution = ridge(F.pad(pooled, (0, 1), value=1.0), final)  # the last column is the bias
    drafter.Ekv2E.weight.copy_(solution[:, :-1])
    drafter.Ekv2E.bias.copy_(solution[:, -1])
    if drafter.config.use_layer_self_attention:
        train_memory(drafter, torch.cat([f.kv[0] for f in fits]), final, dtype)


@torch.enable_grad()
def train_memory(drafter: Drafter, kv: Tensor, final: Tensor, dtype: torch.dtype) -> None:
    """LSA and the projection learn to tell tokens' final hidden states (n, E) from their keys and values (n, L, 2 Ekv).

    The last layers say most about what comes next, but in the mean over layers they weigh no more than the first. LSA has
    to carry them over into it, and the whole drafter's loss teaches that slowly.
    """
    optimizer = Optimizer([*drafter.layer_self_attention.parameters(), *drafter.Ekv2E.parameters()], "muon")
    scaler, scale = torch.amp.GradScaler(enabled=False), final.var()
    bar = trange(FIT_UPDATES, desc="warm start", unit=" updates")
    for update in bar:
        some = torch.randint(len(kv), (FIT_TOKENS,), device=kv.device)
        with torch.autocast(kv.device.type, dtype, enabled=dtype == torch.bfloat16):  # float16 would lose LSA's gradients
            memory, true = drafter.memory(kv[None, some]), final[some]
            kl = ForwardKL.apply(memory.float(), true, drafter.head.weight) / FIT_TOKENS
        lacking = F.mse_loss(memory[0].float(), true) / scale
        (lacking + 0.3 * kl).backward()
        bar.set_postfix_str(f"{1 - lacking.item():.2f} of the variance told")
        optimizer.step(FIT_RATE * min(1, (update + 1) / 20) * (1 - update / FIT_UPDATES), scaler)
        drafter.zero_grad()


def look_at_the_newest(drafter: Drafter, fits: list[Fit]) -> None:
    """Give CA's queries and keys each a component that all share, on the fastest third of the rotary pairs: their product
    falls with the distance between query and memory."""
    ca = drafter.cross_attention
    query = torch.cat([ca.input_layernorm(drafter.self_attend(f.tokens))[0] for f in fits]).mean(0)  # (E)
    key = torch.cat([ca.input_layernorm(drafter.memory(f.kv, f.final))[0] for f in fits]).mean(0)  # (E)
    head_dim = ca.self_attn.head_dim
    pairs = (torch.arange(head_dim, device=query.device) < head_dim // 6).float()
    for projection, shared in ((ca.self_attn.q_proj, query), (ca.self_attn.k_proj, key)):
        heads = len(projection.weight) // head_dim
        projection.weight.add_(torch.outer(2 * pairs.repeat(heads), shared / shared.square().sum()))


def fit_mlp(drafter: Drafter, fits: list[Fit]) -> None:
    """CA's down_proj, to what the guess lacks without it."""
    ca, inner, lacking = drafter.cross_attention, [], []
    ca.mlp.down_proj.weight.zero_()  # so that CA gives what its MLP adds to
    for f in fits:
        stream = drafter.cross_attend(drafter.self_attend(f.tokens), drafter.memory(f.kv, f.final), f.horizon)[0, f.ask]
        gate, up = ca.mlp.gate_up(ca.post_attention_layernorm(stream))
        inner.append(F.silu(gate) * up)
        lacking.append(f.aim[0, f.ask] - stream)
    ca.mlp.down_proj.weight.copy_(ridge(torch.cat(inner), torch.cat(lacking)))


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------

FREE_TO_CHANGE = {"out", "resume", "eval_every", "save_every", "device", "micro_batch_size", "json"}


def save_checkpoint(path: Path, drafter: Drafter, optimizer: Optimizer, scaler, data: Conversations, order: Order,
                    update: int, args) -> None:
    """All that is needed to go on as if nothing had happened, written whole or not at all."""
    state = {"update": update, "epoch": order.epoch, "position": order.position, "drafter": drafter.state_dict(),
             "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict(), "arguments": vars(args),
             "data_bytes": data.sizes, "config": asdict(drafter.config)}
    with written_whole(path) as part:
        torch.save(state, part)


def load_checkpoint(path: Path, data: Conversations, args) -> dict:
    """Raises InputError if it is damaged, or was made by other arguments or from other data."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what the damage happens to cause
        raise InputError(f"{path}: not a readable checkpoint: {one_line(error)}") from None
    if not isinstance(state, dict) or not {"arguments", "data_bytes", "config"} <= state.keys():
        raise InputError(f"{path}: not a checkpoint of this script")
    if state["data_bytes"] != data.sizes:
        raise InputError(f"{', '.join(args.data)}: changed since {path} was made; restore the data or choose another --out")
    for name, value in state["arguments"].items():
        now = getattr(args, name, None)
        free = name in FREE_TO_CHANGE or name == "updates" and args.schedule == "paper"  # a cosine ends with the updates
        if value != now and not free:
            raise InputError(f"{path} was made with --{name.replace('_', '-')} {value}, not {now}; "
                             "resume with the same arguments or choose another --out")
    return state


def cut_log(path: Path, start: int) -> None:
    """Of the log keep the first `start` updates: what comes after is done again. Makes its folder. Raises InputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {path.parent} cannot be a folder: {error.strerror}") from None
    lines = path.read_text().splitlines() if path.exists() else []
    with written_whole(path) as part:
        part.write_text("".join(f"{line}\n" for line in lines if update_of(line) <= start))


def update_of(line: str) -> float:
    """Which update a line of the log is about; inf for what an interrupted run may have left of one."""
    try:
        update = json.loads(line)["update"]
    except (ValueError, LookupError, TypeError):
        return math.inf
    return update if isinstance(update, int) else math.inf


# ---------------------------------------------------------------------------------------------------------------------
# Synthesis: training data from the target alone
# ---------------------------------------------------------------------------------------------------------------------

ANSWER_TEMPERATURES = (0.0, 0.0, 0.6, 1.0)  # half of the answers greedy, as most use of a drafter is
QUESTION_TEMPERATURE, TOP_P = 1.0, 0.95
BARREN = 500  # conversations without an answer, in a row, after which --synthesize gives up
NEXT_TURN = 0.3  # the chance that a conversation goes on after an answer


class Dialogue:
    """One conversation that the target writes with itself: a queue of given ids, then the model's own, turn by turn."""

    def __init__(self, tokenizer: Tokenizer, seed: int, question: str | None):
        self.tokenizer, self.random = tokenizer, random.Random(seed)
        self.messages, self.body, self.done = [], [], False
        if question is None:
            self.open_turn("user", tokenizer.chat([], add_generation_prompt=False) + tokenizer.opening("user"))
        else:
            self.messages.append({"role": "user", "content": question})
            self.open_turn("assistant", tokenizer.chat(self.messages))

    def open_turn(self, role: str, given: list[int]) -> None:
        self.role, self.given = role, given
        self.temperature = self.random.choice(ANSWER_TEMPERATURES) if role == "assistant" else QUESTION_TEMPERATURE

    def accept(self, token: int) -> None:
        """Take in the model's next token; at the end of a turn, queue what opens the next or finish."""
        if token not in self.tokenizer.stop_ids:
            self.body.append(token)
            return
        self.close_turn()
        if self.role == "assistant" and self.random.random() > NEXT_TURN:
            self.done = True
            return
        role = "assistant" if self.role == "user" else "user"
        self.open_turn(role, self.tokenizer.ending()[1:] + self.tokenizer.opening(role))

    def close_turn(self) -> None:
        text = self.tokenizer.decode(self.body).strip()
        if text:
            self.messages.append({"role": self.role, "content": text})
        else:
            self.done = True
        self.body = []


@torch.inference_mode()
def synthesize_batch(target: Llama, tokenizer: Tokenizer, seeds: list[int], questions: list[str | None],
                     seq_len: int) -> list[list[dict]]:
    """One conversation a seed, all in step: each row is fed its given ids or its own last choice."""
    device = target.device
    generator = torch.Generator(device).manual_seed(seeds[0])
    rows = everyone = [Dialogue(tokenizer, seed, question) for seed, question in zip(seeds, questions)]
    cache = target.new_cache(seq_len, len(rows))
    tokens = [row.given.pop(0) for row in rows]
    for _ in range(seq_len - 1):
        logits = target(torch.tensor(tokens, device=device)[:, None], cache)[:, -1]  # (B, V)
        drawn = torch.empty(len(rows), dtype=torch.long, device=device)
        for temperature in sorted({row.temperature for row in rows}):
            those = [i for i, row in enumerate(rows) if row.temperature == temperature]
            drawn[those] = choose(logits[those], temperature, TOP_P, generator)
        for i, (row, token) in enumerate(zip(rows, drawn.tolist())):
            if row.given:
                token = row.given.pop(0)
            elif not row.done:
                row.accept(token)
            tokens[i] = token
        going = [i for i, row in enumerate(rows) if not row.done]
        if not going:
            break
        if len(going) <= len(rows) // 2:  # drop finished rows
            cache.kv, rows, tokens = cache.kv[:, going], [rows[i] for i in going], [tokens[i] for i in going]
    for row in rows:
        if not row.done and row.role == "assistant":
            row.close_turn()  # cut at seq_len
    return [row.messages for row in everyone]


def read_questions(path: str | Path) -> list[str]:
    """What the user asks first in each conversation of a file. Raises InputError."""
    questions = []
    try:
        with open(path, "rb") as file:
            for line in file:
                turns = [m.get("content") for m in messages_in(line) if m.get("role") == "user"]
                questions += [text for text in turns[:1] if isinstance(text, str) and text and is_encodable(text)]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    if not questions:
        raise InputError(f"{path}: no conversation with a question; see train.py for the formats it reads")
    return questions


def messages_in(line: bytes) -> list[dict]:
    """The conversation in a line, empty if there is none."""
    try:
        return read_messages(line.decode("utf-8-sig"))
    except ValueError:
        return []


def mend(path: Path) -> tuple[int, int]:
    """How many conversations a file holds, and bytes, once what an interrupted run left of a line is gone. Raises InputError
    if it is a file of another kind."""
    text = path.read_bytes() if path.exists() else b""
    *lines, tail = text.split(b"\n")
    if lines and not messages_in(lines[0]) or tail[:1] not in (b"", b"{"):
        raise InputError(f"{path}: holds something other than conversations; choose another --data")
    with open(path, "ab") as file:
        if messages_in(tail):
            file.write(b"\n")
            return len(lines) + 1, len(text)
        file.truncate(len(text) - len(tail))
    return len(lines), len(text)


def synthesize(target: Llama, tokenizer: Tokenizer, args) -> int:
    """Write args.synthesize conversations to a file; one that has some already is continued. How many it then has.

    Raises InputError.
    """
    if not tokenizer.stop_ids:
        raise InputError(f"{args.model}: names no stop token, so that no turn would end")
    path, start, barren = Path(args.data[0]), 0, 0
    questions = list(dict.fromkeys(read_questions(args.questions))) if args.questions else [None]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        written, seed = mend(path)  # bytes: beyond all seeds used so far
        if written and args.questions and (last := read_questions(path)[-1]) in questions:
            start = questions.index(last) + 1  # not `written`: a question may have been left without an answer
        file = open(path, "a", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    remaining = itertools.islice(itertools.cycle(questions), start, None)
    with file, tqdm(total=args.synthesize, initial=written, unit=" conversations") as bar:
        while written < args.synthesize:
            count = min(args.batch_size, args.synthesize - written)
            seeds = [(args.seed * 10**9 + seed + i) % 2**63 for i in range(count)]
            seed += count
            asked = list(itertools.islice(remaining, count))
            made = [m for m in synthesize_batch(target, tokenizer, seeds, asked, args.seq_len) if len(m) >= 2]
            for messages in made:
                file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
                written += 1
                bar.update()
            file.flush()
            barren = 0 if made else barren + count
            if barren >= BARREN:
                raise InputError(f"{barren} conversations in a row came to no answer; raise --seq-len above {args.seq_len}")
    return written


# ---------------------------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------------------------

def parse() -> argparse.Namespace:
    parser = Parser(description="Distil a target into a Mixture-of-Attentions drafter.")
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE", help="conversations, one JSON object a line")
    parser.add_argument("--out", default="runs/drafter", help="folder for drafter, checkpoint and log (default: %(default)s)")
    add_model_arguments(parser)
    parser.add_argument("--init", metavar="DIR", help="start from this drafter's weights and sizes")
    parser.add_argument("--warm-start", action="store_true", help="start from LSA and CA fitted to a few conversations")
    parser.add_argument("--updates", type=natural, help="default: one pass over the data")
    parser.add_argument("--batch-size", type=natural, default=32, help="sequences an update (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=natural, default=1, help="sequences at once; memory (default: %(default)s)")
    parser.add_argument("--seq-len", type=number(int, 16, what="a whole number from 16 up"), default=2048)
    parser.add_argument("--lr", type=number(float, 0), default=3e-5, help="rate; the paper's schedule peaks at 20 times it")
    parser.add_argument("--schedule", choices=("paper", "cosine"), default="paper")
    parser.add_argument("--warmup", type=natural, default=50, help="updates (default: %(default)s)")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--clip", type=number(float, 0), default=1.0, help="gradient norm, 0: none (default: %(default)s)")
    parser.add_argument("--kl-weight", type=number(float, 0), default=0.1)
    parser.add_argument("--feature-weight", type=number(float, 0), default=1.0)
    parser.add_argument("--run-length", nargs=2, type=natural, default=[5, 15], metavar=("LOW", "HIGH"),
                        help="runs are of U[LOW, HIGH] tokens (default: 5 15)")
    parser.add_argument("--horizons", type=natural, default=1, metavar="R", help="horizons for each target pass")
    parser.add_argument("--tli", type=number(int, 0), default=0, metavar="N", help="target layers that the drafter reuses")
    parser.add_argument("--no-lsa", action="store_true", help="ablation: memory from the last hidden state")
    parser.add_argument("--no-ca", action="store_true", help="ablation: the drafter reads its own guesses")
    parser.add_argument("--freeze-lsa", action="store_true",
                        help="train the rest, and keep LSA's outputs from one epoch to the next (2 kB a token of smollm2)")
    parser.add_argument("--lsa-heads", type=natural, help="default: the target's")
    parser.add_argument("--lsa-mlp", type=natural, help="LSA's MLP width")
    parser.add_argument("--mlp", type=natural, help="SA's and CA's MLP width")
    parser.add_argument("--kv-heads", type=natural, help="SA's and CA's kv heads")
    parser.add_argument("--draft-vocabulary", type=natural, metavar="COUNT", help="draft only the COUNT most frequent tokens")
    parser.add_argument("--eval-every", type=natural, default=200, help="updates (default: %(default)s)")
    parser.add_argument("--save-every", type=natural, default=50, help="updates between checkpoints (default: %(default)s)")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--synthesize", type=natural, metavar="COUNT", help="write COUNT conversations to --data instead")
    parser.add_argument("--questions", metavar="FILE", help="let --synthesize answer this file's questions, not its own")
    parser.add_argument("--json", action="store_true", help="end with the last record of the log, a JSON object, on stdout")
    return parser.parse_args()


def frequent_tokens(data: Conversations, indices: np.ndarray, count: int, vocab_size: int) -> tuple[int, ...]:
    """The tokens that answers use most, and always the stop tokens, in order of their ids."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for index in indices[:5000]:
        sequence = data.get(int(index))
        if sequence is not None:
            counts += torch.bincount(sequence.tokens[sequence.answer], minlength=vocab_size)[:vocab_size]
    counts[[token for token in data.tokenizer.stop_ids if token < len(counts)]] = counts.max() + 1
    return tuple(sorted(counts.topk(min(count, len(counts))).indices.tolist()))


def new_drafter(target: Llama, data: Conversations, indices: np.ndarray, args) -> Drafter:
    if args.init:
        drafter = load_drafter(args.init, target).requires_grad_(True)
        if args.freeze_lsa and (drafter.N > 0 or not drafter.config.use_layer_self_attention):
            raise InputError(f"{args.init}: --freeze-lsa needs a drafter with LSA and without reused layers")
        for parameter in drafter.parameters():  # not .float(): the LM head's rows belong to the target
            parameter.data = parameter.data.float()
        return drafter
    choices = {
        "layer_self_attention_num_attention_heads": args.lsa_heads, "layer_self_attention_intermediate_size": args.lsa_mlp,
        "self_attention_intermediate_size": args.mlp, "cross_attention_intermediate_size": args.mlp,
        "self_attention_num_key_value_heads": args.kv_heads, "cross_attention_num_key_value_heads": args.kv_heads,
        "draft_vocabulary": args.draft_vocabulary and frequent_tokens(
            data, indices, args.draft_vocabulary, target.config.vocab_size)}
    config = DrafterConfig.sized_for(
        target, target_layer_inference=args.tli, use_layer_self_attention=not args.no_lsa,
        use_cross_attention=not args.no_ca, **{name: value for name, value in choices.items() if value is not None})
    torch.manual_seed(args.seed)
    return Drafter(target, config).to(target.device)


def check(args: argparse.Namespace) -> None:
    """Raises InputError for arguments that contradict each other."""
    if args.run_length[0] > args.run_length[1]:
        raise InputError(f"--run-length {args.run_length[0]} {args.run_length[1]}: the low end comes first")
    if args.questions and not args.synthesize:
        raise InputError("--questions says what --synthesize COUNT answers; add it")
    if args.synthesize:
        if len(args.data) > 1:
            raise InputError("--synthesize writes one file; name one --data")
        if dist.is_torchelastic_launched():
            raise InputError("--synthesize is for one process; run it without torchrun")
        return
    sizes = ("tli", "no_lsa", "no_ca", "lsa_heads", "lsa_mlp", "mlp", "kv_heads", "draft_vocabulary", "warm_start")
    ignored = [f"--{name.replace('_', '-')}" for name in sizes if getattr(args, name)]
    if args.init and ignored:
        raise InputError(f"--init takes sizes and start from its drafter; leave out {', '.join(ignored)}")
    if args.freeze_lsa and not args.init:
        raise InputError("--freeze-lsa goes on from a drafter whose LSA has learnt: name it with --init")
    if args.warm_start and args.no_ca:
        raise InputError("--warm-start fits a drafter with CA; leave out --no-ca")


def check_out(out: Path, resume: bool) -> bool:
    """Whether there is a checkpoint to go on from. Raises InputError if there is work that would be overwritten."""
    checkpoint, drafter = (os.path.exists(out / name) for name in ("checkpoint.pt", "model.safetensors"))
    if not resume and checkpoint:
        raise InputError(f"{out} holds a checkpoint: add --resume to go on, or choose another --out")
    if not resume and drafter:
        raise InputError(f"{out} holds a drafter, which would be overwritten: choose another --out")
    if resume and not checkpoint and drafter:
        raise InputError(f"{out}/checkpoint.pt is gone, and with it what a run needs to go on; choose another --out")
    return checkpoint  # --resume without one: the run was killed before its first


def main() -> None:
    args = parse()
    check(args)
    if args.device.startswith("cuda") and dist.is_torchelastic_launched():
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        try:
            torch.cuda.set_device(args.device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"{args.device} cannot be used here: {one_line(error)}; one process for each GPU") from None
    args.dtype = args.dtype or default_dtype(args.device)
    out = Path(args.out)
    resuming = not args.synthesize and check_out(out, args.resume)
    target, tokenizer = load_target(args)
    if args.seq_len > target.config.max_position_embeddings:
        raise InputError(f"--seq-len {args.seq_len} is beyond the target's context of {target.config.max_position_embeddings}")
    if args.synthesize:
        written = synthesize(target, tokenizer, args)
        if args.json:
            print(json.dumps({"conversations": written}))
        return
    worker = Worker.join(args.device)
    data = Conversations(args.data, tokenizer, args.seq_len, verbose=worker.rank == 0, keep=args.freeze_lsa)
    training, held_out = split(data, args.seed)
    epoch_updates = math.ceil(len(training) / args.batch_size)
    args.updates = args.updates or epoch_updates
    state = load_checkpoint(out / "checkpoint.pt", data, args) if resuming else None
    if state:
        drafter, start = Drafter(target, DrafterConfig(**state["config"])).to(target.device), state["update"]
        drafter.load_state_dict(state["drafter"])
    else:
        drafter, start = new_drafter(target, data, training, args), 0
    if worker.rank == 0:
        cut_log(out / "log.jsonl", start)
        if args.resume and not state:
            print(f"{out} holds no checkpoint yet: starting at the beginning", file=sys.stderr)
    if not state:
        if args.warm_start and worker.rank == 0:
            warm_start(drafter, draw_batch(data, Order(training, args.seed), WARM_START), DTYPES[args.dtype])
        worker.take_the_first(drafter.parameters())
    if args.freeze_lsa:
        drafter.layer_self_attention.requires_grad_(False)
    optimizer, order = Optimizer(drafter.parameters(), args.optimizer), Order(training, args.seed)
    scaler = torch.amp.GradScaler(args.device.split(":")[0], enabled=args.dtype == "float16")
    if state:
        optimizer.load_state_dict(state["optimizer"])
        scaler.load_state_dict(state["scaler"])
        order = Order(training, args.seed, state["epoch"], state["position"])
    elif worker.rank == 0:
        save_checkpoint(out / "checkpoint.pt", drafter, optimizer, scaler, data, order, 0, args)

    train(drafter, optimizer, scaler, data, order, held_out, start, epoch_updates, worker, args)
    if worker.rank == 0 and args.json:
        print(next(reversed((out / "log.jsonl").read_text().splitlines()), "{}"))
    if worker.count > 1:
        dist.barrier()  # until process 0 has saved, and gloo's threads have let go of our tensors: to do so at exit would abort
        dist.destroy_process_group()


if __name__ == "__main__":
    run_command(main)
