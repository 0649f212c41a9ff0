"""Distillation: a frozen target teaches its drafter (paper, section 3.4 and appendix).

One target pass gives the KV cache, the hidden states and, through the LM head, soft labels. One drafter pass then
covers every position, with no unrolling: a random `horizon` cuts each answer into runs, and a query sees only memory of
tokens before its run, which is the state it will meet while drafting. The loss of one position is

    0.1 KL(p || q) + 1.0 SmoothL1(h, h'),    p, h the target's distribution and hidden state, q, h' the drafter's;

with N > 0 half of the second term is for the state that enters the reused layers.

    python train.py --data ultrachat.jsonl              # the paper's recipe, for one pass over the data
    python train.py --data ultrachat.jsonl --resume     # goes on after any interruption
    python train.py --synthesize 1000 --data own.jsonl  # no data? let the target write it

Shapes: B batch, T tokens, L layers, E hidden, V vocabulary, N reused layers, R horizons, n trained positions.
"""
from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from llama import (DTYPES, Batch, GenerationConfig, InputError, Llama, Parser, Tokenizer, add_model_arguments,
                   atomic_write, check_message, input_errors, load_target, number, positive_int, run_command)
from moa import Drafter, DrafterConfig, load_drafter, save_drafter

DEPTHS = 8  # of the evaluation
CLIP = 1.0  # the gradient norm
LOSS_CHUNK = 256  # positions whose V-wide distributions exist at once


# --- The method: horizons, losses, one update, evaluation ---
def run_horizon(answer: Tensor, length: int, phase: int) -> Tensor:
    """The last position whose memory each query may read, (T). answer (T) is True at the assistant's tokens.

    Each answer is cut into runs of `length`, the first one shortened by `phase`; a query sees memory up to the token
    before its run. Outside answers a position sees itself, as if all were verified.
    """
    position = torch.arange(len(answer))
    offset = position - 1 - torch.where(answer, -1, position).cummax(0).values  # from its answer's first token
    in_run = torch.minimum((offset + phase) % length, offset)
    return torch.where(answer, position - in_run - 1, position)

def loss_mask(answer: Tensor) -> Tensor:
    """The positions that are trained, (..., T): position i predicts i + 1, and both must lie in the answer."""
    return answer & F.pad(answer[..., 1:], (0, 1))

@torch.no_grad()
def target_pass(target: Llama, tokens: Tensor, N: int) -> tuple[Tensor, Tensor, Tensor]:
    """kv (B, T, L, 2 Ekv), the hidden states that enter the last N layers and the final ones, both (B, T, E)."""
    (batch, count), layers = tokens.shape, len(target.layers)
    cache = target.new_cache(count, batch)  # its length stays 0: both halves of the layers start at position 0
    entering = target.run_layers(target.embed_tokens(tokens), range(layers - N), cache)
    final = target.norm(target.run_layers(entering, range(layers - N, layers), cache))
    return cache.kv.permute(1, 3, 0, 2, 4).flatten(3), entering, final

class ForwardKL(torch.autograd.Function):
    """Sum over positions of KL(p || q), p from the target's hidden states and q from the drafter's features.

    Its gradient in q's logits, q - p, is known as soon as the loss is: both are computed chunk by chunk, and the whole
    positions x V matrix never exists. With a draft vocabulary p and q are over its tokens.
    """

    @staticmethod
    def forward(ctx, features: Tensor, hidden: Tensor, head: Tensor) -> Tensor:  # (R, n, E), (n, E), (V, E)
        loss, gradient = features.new_zeros(()), torch.empty_like(features)
        for a in range(0, hidden.shape[0], LOSS_CHUNK):
            chunk = slice(a, a + LOSS_CHUNK)
            log_p = F.linear(hidden[chunk], head).log_softmax(-1, torch.float32)  # (c, V)
            p = log_p.exp()
            for r in range(len(features)):
                log_q = F.linear(features[r, chunk], head).log_softmax(-1, torch.float32)
                loss += (p * (log_p - log_q)).sum()
                if ctx.needs_input_grad[0]:
                    gradient[r, chunk] = (log_q.exp() - p) @ head
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx, grad_output: Tensor):
        return ctx.saved_tensors[0] * grad_output, None, None

def hidden_loss(predicted: Tensor, true: Tensor) -> Tensor:
    """Smooth L1, mean over E, summed over positions. (R, n, E), (n, E)."""
    return F.smooth_l1_loss(predicted.float(), true.float().expand_as(predicted), reduction="none").mean(-1).sum()

def distill(drafter: Drafter, tokens: Tensor, answer: Tensor, horizons: Tensor, args) -> tuple[Tensor, Tensor, Tensor]:
    """From tokens and answer (B, T) and horizons (R, B, T) to features (R, n, E), the target's final states (n, E) and
    (loss, its KL, its hidden-state part), summed over trained positions and horizons."""
    kv, entering, final = target_pass(drafter.target, tokens, drafter.N)
    memory = drafter.memory(kv, final)  # (B, T, E)
    predicted, features = drafter(tokens, memory, kv, horizons)  # (R, B, T, E)
    trained = loss_mask(answer)
    features, final = features[:, trained].float(), final[trained].float()  # (R, n, E), (n, E)
    kl, hidden = ForwardKL.apply(features, final, drafter.head_weight), hidden_loss(features, final)
    if drafter.N > 0:  # half for CA's output, which should enter the last N layers, half for what comes out of them
        hidden = (hidden + hidden_loss(predicted[:, trained], entering[trained])) / 2
    loss = args.kl_weight * kl + args.feature_weight * hidden
    if args.memory_weight > 0:  # ours, not the paper's: a token's memory, too, is to predict its final hidden state
        memory = memory[trained].float()[None]  # (1, n, E)
        memory_kl = ForwardKL.apply(memory, final, drafter.head_weight)
        memory_loss = args.kl_weight * memory_kl + args.feature_weight * hidden_loss(memory, final)
        loss = loss + args.memory_weight * len(horizons) * memory_loss  # once for each horizon, like the rest
    return features, final, torch.stack([loss, kl.detach(), hidden.detach()])

def compute_gradients(drafter: Drafter, batch: list[Sequence], update: int, args) -> tuple[float, float, float]:
    """Set the gradient of one global batch; returns its losses per query. Every process draws the same batch and
    horizons and takes its share: the sum is the same however many there are."""
    device, (rank, world_size) = drafter.target.device, rank_and_world_size()
    draws = np.random.default_rng((args.seed, update))
    lengths = draws.integers(*args.run_length, (len(batch), args.horizons), endpoint=True)
    phases = draws.integers(0, lengths)
    rows = [(*s, torch.stack([run_horizon(s.answer, *run) for run in zip(*runs)], dim=-1))
            for s, *runs in zip(batch, lengths, phases)]  # (T), (T), (T, R)
    share = sorted(rows[rank::world_size], key=lambda row: len(row[0]))  # little padding
    total = args.horizons * sum(int(loss_mask(s.answer).sum()) for s in batch)
    sums = torch.zeros(3, device=device)
    for p in drafter.parameters():
        p.grad = torch.zeros_like(p)  # even where a small batch leaves this process no share
    for a in range(0, len(share), args.micro_batch_size):
        fields = zip(*share[a:a + args.micro_batch_size])  # padded on the right, where no causal query looks
        tokens, answer, horizons = (nn.utils.rnn.pad_sequence(field, batch_first=True).to(device) for field in fields)
        with torch.autocast(device.type, DTYPES[args.dtype], enabled=args.dtype != "float32"):
            parts = distill(drafter, tokens, answer, horizons.permute(2, 0, 1), args)[2]
        (parts[0] / total).backward()
        sums += parts.detach()
    if world_size > 1:
        for tensor in (*(p.grad for p in drafter.parameters()), sums):
            dist.all_reduce(tensor)
    return tuple((sums / total).tolist())

@torch.no_grad()
def evaluate(drafter: Drafter, held_out: list[Sequence], args) -> dict:
    """Losses and, per draft depth 1..8, how often the drafter's first choice is the target's, if it was so before.

    With a_d that share at depth d, a cycle would bring 1 + a_1 + a_1 a_2 + ... tokens: the acceptance length implied,
    an optimistic one: a run begins anywhere here, a cycle mostly after a token that the drafter got wrong. Without CA
    only depth 1 is measured: deeper ones would be scored on true memories, which drafting lacks.
    """
    target, sums, count = drafter.target, torch.zeros(3), 0
    outcomes = [[] for _ in range(DEPTHS)]
    for i, s in enumerate(held_out):
        horizon, trained = run_horizon(s.answer, DEPTHS, i % DEPTHS), loss_mask(s.answer)  # (T)
        batch = (row[None].to(target.device) for row in (*s, horizon[None]))
        with torch.autocast(target.device.type, DTYPES[args.dtype], enabled=args.dtype != "float32"):
            features, final, parts = distill(drafter, *batch, args)
            choice = torch.cat([drafter.logits(x).argmax(-1) for x in features[0].split(LOSS_CHUNK)])
            truth = torch.cat([target.head(x).argmax(-1) for x in final.split(LOSS_CHUNK)])
        choice = choice if drafter.vocabulary is None else drafter.vocabulary[choice]
        depths = (torch.arange(len(trained)) - horizon)[trained]  # 1 at a run's first query
        for depth, agrees in zip(depths.tolist(), (choice == truth).tolist()):
            if depth == 1 or alive:
                outcomes[depth - 1].append(agrees)
                alive = agrees
        sums, count = sums + parts.cpu(), count + len(truth)
    loss, kl, hidden = (sums / count).tolist()
    rates = [sum(o) / max(1, len(o)) for o in outcomes][:DEPTHS if drafter.config.use_cross_attention else 1]
    return {"held_out_loss": loss, "held_out_kl": kl, "held_out_hidden": hidden, "depth_accuracy": rates,
            "implied_acceptance_length": 1 + np.cumprod(rates).sum()}


# --- The loop ---
def train(drafter: Drafter, optimizers: list, stream: Iterator[tuple[Sequence, int]], held_out: list[Sequence],
          update: int, epoch_updates: int, args) -> None:
    """From `update` to args.updates, logged, evaluated and saved on the way; `stream` is the data from there on."""
    out, rank = Path(args.out), rank_and_world_size()[0]
    bar = tqdm(range(update, args.updates), initial=update, total=args.updates, unit=" updates", disable=rank > 0)
    for update in bar:
        began = time.perf_counter()
        batch, positions = zip(*itertools.islice(stream, args.batch_size))
        loss, kl, hidden = compute_gradients(drafter, batch, update, args)
        norm = nn.utils.clip_grad_norm_(drafter.parameters(), CLIP).item()
        if not math.isfinite(norm):
            raise InputError(f"update {update + 1}: the gradient is not finite; try a lower --lr")
        lr = learning_rate(update, args, epoch_updates)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        if rank > 0:
            continue
        done, last = update + 1, update + 1 == args.updates
        speed = sum(len(s.tokens) for s in batch) / (time.perf_counter() - began)
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:.0f} tokens/s")
        records = [dict(loss=loss, kl=kl, hidden=hidden, lr=lr, grad_norm=norm, tokens_per_second=speed)]
        if done % args.eval_every == 0 or last:
            records.append(scores := evaluate(drafter, held_out, args))
            tqdm.write(f"update {done}: held-out KL {scores['held_out_kl']:.3f}, implied acceptance length "
                       f"{scores['implied_acceptance_length']:.2f}", file=sys.stderr)
        with open(out / "log.jsonl", "a") as log:
            log.writelines(json.dumps({"update": done} | record) + "\n" for record in records)
        if done % args.save_every == 0 or last:
            save_drafter(drafter, out)  # first: a run whose last checkpoint exists has nothing left to do
            save_checkpoint(out / "checkpoint.pt", drafter, optimizers, done, positions[-1], args)

def learning_rate(update: int, args, epoch_updates: int) -> float:
    """`paper`: 50 updates up to 20 times the rate, linearly down to the rate over the first epoch, constant after.
    `cosine`: warm-up to the rate, then half a cosine down to 0 at the last update."""
    warm = min(1.0, (update + 1) / args.warmup)
    if args.schedule == "paper":
        return args.lr * warm * float(np.interp(update, [args.warmup, max(epoch_updates, args.warmup + 1)], [20, 1]))
    return args.lr * warm * (1 + math.cos(math.pi * update / args.updates)) / 2

def make_optimizers(drafter: Drafter, kind: str) -> list[torch.optim.Optimizer]:
    """AdamW, or Muon (Jordan et al. 2024) for the matrices and AdamW for the rest."""
    matrices = [p for p in drafter.parameters() if p.ndim == 2 and kind == "muon"]
    rest = [p for p in drafter.parameters() if p.ndim != 2 or kind == "adamw"]
    muon = [torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")] if matrices else []
    return [*muon, torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=0.0)]

def rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


# --- Data: one JSON object a line, four formats, read by offset so that a file of any size can be shuffled ---
class Sequence(NamedTuple):
    tokens: Tensor  # (T)
    answer: Tensor  # (T), True at the assistant's tokens

def read_messages(line: bytes) -> list[dict]:
    """The conversation in a line of UltraChat (either form), ShareGPT or Alpaca. Raises ValueError, saying why not."""
    match record := json.loads(line):
        case {"messages": list(messages)}:
            pass
        case {"data": list(texts)}:
            messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        case {"conversations": list(turns)}:
            roles = {"human": "user", "gpt": "assistant"}
            turns = [turn if isinstance(turn, dict) else {} for turn in turns]
            messages = [{"role": roles.get(t.get("from"), t.get("from")), "content": t.get("value")} for t in turns]
        case {"instruction": str(instruction), "output": output}:
            question = "\n\n".join(filter(None, (instruction, str(record.get("input") or ""))))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": output}]
        case _:
            raise ValueError("expected a list in messages, data or conversations, or instruction and output")
    for message in messages:
        check_message(message if isinstance(message, dict) else {})
    return messages

class Conversations:
    """The conversations with an answer in some .jsonl files. Other lines are named on stderr. Raises InputError for a
    file that cannot be read, or if there are none."""

    def __init__(self, paths: list[str], tokenizer: Tokenizer, seq_len: int):
        self.paths, self.tokenizer, self.seq_len, places, skipped = paths, tokenizer, seq_len, [], 0
        for file_number, path in enumerate(paths):
            with input_errors(f"{path}: cannot be read", OSError), open(path, "rb") as file:
                for line_number, line in enumerate(file, 1):
                    try:
                        if line.strip():
                            if "assistant" not in [m["role"] for m in read_messages(line)]:
                                raise ValueError("no answer")
                            places.append((file_number, file.tell() - len(line), len(line)))
                    except (ValueError, TypeError, RecursionError) as error:
                        skipped += 1
                        print(f"skipped {path}, line {line_number}: {error}", file=sys.stderr)
        print(f"{len(places)} conversations, {skipped} lines skipped", file=sys.stderr)
        if not places:
            raise InputError(f"{', '.join(paths)}: no usable conversation (UltraChat, ShareGPT, Alpaca)")
        self.places = np.array(places)  # file, offset and length of each usable line

    def __getitem__(self, index: int) -> Sequence | None:
        """One conversation, cut at seq_len; None where nothing is left to train on."""
        file_number, offset, length = self.places[index]
        with open(self.paths[file_number], "rb") as file:
            file.seek(offset)
            turns = self.tokenizer.turns(read_messages(file.read(length)))
        pairs = [(i, is_answer) for piece, is_answer in turns for i in piece][:self.seq_len]
        sequence = Sequence(*map(torch.tensor, zip(*pairs)))
        return sequence if loss_mask(sequence.answer).any() else None

def shuffled(data: Conversations, indices: np.ndarray, seed: int, position: int = 0) -> Iterator[tuple[Sequence, int]]:
    """Usable conversations without end, shuffled again each epoch, each with the position after it, to start from.
    Raises InputError when a whole epoch has none."""
    unusable = 0
    while unusable < len(indices):
        epoch, first = divmod(position, len(indices))
        for index in np.random.default_rng((seed, epoch)).permutation(indices)[first:]:
            position, unusable = position + 1, unusable + 1
            if (sequence := data[index]) is not None:
                unusable = 0
                yield sequence, position
    raise InputError(f"--data: no answer within {data.seq_len} tokens; raise --seq-len")

def split(data: Conversations, seed: int) -> tuple[np.ndarray, list[Sequence]]:
    """Shuffled indices to train on, and conversations to evaluate on: one in ten, at most 64. Raises InputError."""
    order = np.random.default_rng(seed).permutation(len(data.places))
    held_out, training = np.split(order, [min(64, len(order) // 10)])
    return training, list(filter(None, map(data.__getitem__, held_out))) or [next(shuffled(data, training, seed))[0]]

def frequent_tokens(data: Conversations, indices: np.ndarray, count: int, vocab_size: int) -> tuple[int, ...]:
    """The tokens that answers use most, and always the stop tokens, in order of their ids."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for s in filter(None, map(data.__getitem__, indices[:5000])):
        counts += torch.bincount(s.tokens[s.answer], minlength=vocab_size)
    counts[list(data.tokenizer.stop_ids)] = counts.max() + 1
    return tuple(sorted(counts.topk(min(count, vocab_size)).indices.tolist()))


# --- Checkpoints ---
def save_checkpoint(path: Path, drafter: Drafter, optimizers: list, update: int, position: int, args) -> None:
    """All that is needed to go on as if nothing had happened, written completely or not at all."""
    state = {"update": update, "position": position, "log_bytes": path.with_name("log.jsonl").stat().st_size,
             "drafter": drafter.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers],
             "arguments": vars(args)}
    with atomic_write(path) as part:
        torch.save(state, part)

def load_checkpoint(path: Path, drafter: Drafter, optimizers: list, args) -> tuple[int, int]:
    """Restores drafter, optimizers and log; returns update and position. Raises InputError for a damaged checkpoint, or
    one of other arguments or data."""
    with input_errors(f"{path}: not a readable checkpoint", Exception):  # torch raises many kinds
        state = torch.load(path, map_location="cpu")
        made_with, log_bytes = state["arguments"], state["log_bytes"]
    free = {"out", "resume", "eval_every", "save_every", "device", "micro_batch_size", "json"}
    free |= {"updates"} if args.schedule == "paper" else set()  # a cosine ends with them
    for name, value in made_with.items():
        if name not in free and (now := getattr(args, name, None)) != value:
            raise InputError(f"{path} was made with --{name.replace('_', '-')} {value}, not {now}; resume with that or "
                             "choose another --out")
    drafter.load_state_dict(state["drafter"])
    for optimizer, saved in zip(optimizers, state["optimizers"]):
        optimizer.load_state_dict(saved)
    with open(path.with_name("log.jsonl"), "ab") as log:
        log.truncate(min(log.tell(), log_bytes))  # what came after is done again
    return state["update"], state["position"]


# --- Synthesis: training data from the target alone (the idea of Magpie, Xu et al. 2024) ---
ANSWER_TEMPERATURES = (0.0, 0.0, 0.6, 1.0)  # half of the answers greedy, as most use of a drafter is
QUESTION_TEMPERATURE, TOP_P = 1.0, 0.95
NEXT_TURN = 0.3  # the probability that a conversation goes on after an answer
MIN_ROOM = 32  # tokens that must be left for a turn
MAX_BARREN = 500  # conversations without an answer, in a row, after which --synthesize gives up

def converse(target: Llama, tokenizer: Tokenizer, openings: Iterator[list[dict]], count: int, seed: int,
             args) -> Iterator[tuple[list[dict], int]]:
    """Up to `count` conversations of the target with itself, as they end: the messages, the last perhaps cut short, and
    the tokens of all answers so far. openings: what each begins with, a question or nothing. Raises InputError."""
    draws, stop_ids = random.Random(seed), frozenset(tokenizer.stop_ids)
    going_on, running, barren, answer_tokens = [], 0, 0, 0

    def take() -> tuple[list[dict], list[int], GenerationConfig] | None:
        """The next turn to write, as Batch.run wants it."""
        nonlocal running
        messages = going_on.pop() if going_on else next(openings, None) if running < count else None
        if messages is None:
            return None
        running += 1
        role = ("user", "assistant")[len(messages) % 2]
        prompt = (tokenizer.chat(messages, False) + tokenizer.opening(role))[:args.seq_len - 1]
        temperature = QUESTION_TEMPERATURE if role == "user" else draws.choice(ANSWER_TEMPERATURES)
        config = GenerationConfig(args.seq_len - len(prompt), temperature, TOP_P, draws.getrandbits(63), stop_ids)
        return messages, prompt, config

    for turn in Batch(target, args.batch_size, args.seq_len).run(take):
        messages, text, running = turn.key, tokenizer.decode(turn.tokens).strip(), running - 1
        role, stopped = ("user", "assistant")[len(messages) % 2], turn.tokens[-1] in stop_ids
        has_room = turn.config.max_new_tokens - len(turn.tokens) >= MIN_ROOM
        whole = turn.config.max_new_tokens > 1  # else the question was cut
        if text and (role == "assistant" and whole or stopped and has_room):
            messages.append({"role": role, "content": text})
            answer_tokens += len(turn.tokens) * (role == "assistant")
            if stopped and has_room and (role == "user" or draws.random() < NEXT_TURN):
                going_on.append(messages)
                continue
        barren = 0 if len(messages) >= 2 else barren + 1
        if not barren:
            count -= 1
            yield messages, answer_tokens
        if barren == MAX_BARREN:
            raise InputError(f"{barren} conversations in a row had no answer; raise --seq-len above {args.seq_len}")

def read_questions(path: str | Path) -> Iterator[str]:
    """What the user asks first in each conversation of a file. Raises InputError."""
    with input_errors(f"{path}: cannot be read", OSError), open(path, "rb") as file:
        for line in file:
            with suppress(ValueError, TypeError, RecursionError, StopIteration):
                yield next(m["content"] for m in read_messages(line) if m["role"] == "user" and m["content"])

@torch.inference_mode()
def synthesize(target: Llama, tokenizer: Tokenizer, args) -> int:
    """Write conversations to a file, each when it ends, until it has args.synthesize or all questions are answered. How
    many it then has. Raises InputError."""
    path, questions = Path(args.data[0]), iter(lambda: None, 0)  # without end: the target asks itself
    if args.questions and not (questions := dict.fromkeys(read_questions(args.questions))):
        raise InputError(f"{args.questions}: no conversation with a question")
    if not tokenizer.stop_ids:
        raise InputError(f"{args.model}: names no stop token, so that no turn would end")
    with input_errors(f"{path}: cannot be written", OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "ab+")
        file.seek(0)
        text = file.read()
        if text[:13] != b'{"messages": '[:len(text)]:
            raise InputError(f"{path}: holds no conversations; choose another --data")
        size = file.truncate(text.rfind(b"\n") + 1)  # what an interrupted run left of a line goes
    answered = set(read_questions(path)) if args.questions else set()
    openings = ([{"role": "user", "content": q}] if q else [] for q in questions if q not in answered)
    written, start = text.count(b"\n"), time.perf_counter()
    seed = args.seed + (size << 32)  # not that of what is written already
    with file, tqdm(total=args.synthesize, initial=written, unit=" conversations") as bar:
        for messages, tokens in converse(target, tokenizer, openings, args.synthesize - written, seed, args):
            file.write((json.dumps({"messages": messages}, ensure_ascii=False) + "\n").encode())
            file.flush()
            written += 1
            bar.update()
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):.0f} answer tokens/s")
    return written


# --- Command line ---
def parse_arguments() -> argparse.Namespace:
    parser = Parser(description="Distil a target into a Mixture-of-Attentions drafter.")
    add = parser.add_argument
    count = partial(add, type=positive_int)
    add("--data", nargs="+", required=True, metavar="FILE", help="conversations, one JSON object a line")
    add("--out", default="runs/drafter", help="folder for drafter, checkpoint and log (default: %(default)s)")
    add_model_arguments(parser)
    count("--updates", help="default: one pass over the data")
    count("--batch-size", default=32, help="sequences an update (default: %(default)s)")
    count("--micro-batch-size", default=1, help="sequences at once; memory (default: %(default)s)")
    add("--seq-len", type=number(int, 16), default=2048)
    add("--lr", type=number(float, 0), default=3e-5, help="rate; the paper's schedule peaks at 20 times it")
    add("--schedule", choices=("paper", "cosine"), default="paper")
    count("--warmup", default=50, help="updates (default: %(default)s)")
    add("--optimizer", choices=("adamw", "muon"), default="adamw")
    add("--kl-weight", type=number(float, 0), default=0.1)
    add("--feature-weight", type=number(float, 0), default=1.0)
    add("--memory-weight", type=number(float, 0), default=0.0, help="of the same loss on memories; not the paper's")
    count("--run-length", nargs=2, default=[5, 15], metavar=("LOW", "HIGH"), help="tokens a run (default: 5 15)")
    count("--horizons", default=1, metavar="R", help="horizons for each target pass")
    add("--tli", type=number(int, 0), default=0, metavar="N", help="target layers that the drafter reuses")
    add("--no-lsa", action="store_true", help="ablation: memory from the last hidden state")
    add("--no-ca", action="store_true", help="ablation: the drafter reads its own predictions")
    count("--lsa-heads", help="default: the target's")
    count("--lsa-mlp", help="LSA's MLP width")
    count("--mlp", help="SA's and CA's MLP width")
    count("--kv-heads", help="SA's and CA's kv heads")
    count("--draft-vocabulary", metavar="COUNT", help="draft only the COUNT most frequent tokens")
    count("--eval-every", default=200, help="updates (default: %(default)s)")
    count("--save-every", default=50, help="updates between checkpoints (default: %(default)s)")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--evaluate", metavar="DIR", help="only print how a finished drafter does on --data, as JSON")
    count("--synthesize", metavar="COUNT", help="write COUNT conversations to --data instead")
    add("--questions", metavar="FILE", help="let --synthesize answer this file's questions, not its own")
    add("--json", action="store_true", help="end with the log's last record on stdout")
    args = parser.parse_args()
    args.run_length.sort()
    if args.dtype == "float16":
        parser.error("--dtype float16 cannot be trained in; try bfloat16")
    return args

def new_drafter(target: Llama, data: Conversations, indices: np.ndarray, args) -> Drafter:
    """Fresh weights, in the sizes that the command line asks for."""
    torch.manual_seed(args.seed)
    count = args.draft_vocabulary
    choices = {"layer_self_attention_num_attention_heads": args.lsa_heads,
               "layer_self_attention_intermediate_size": args.lsa_mlp,
               "draft_vocabulary": count and frequent_tokens(data, indices, count, target.config.vocab_size),
               "target_layer_inference": args.tli, "use_layer_self_attention": not args.no_lsa,
               "use_cross_attention": not args.no_ca}
    for layer in "self_attention", "cross_attention":
        choices |= {f"{layer}_intermediate_size": args.mlp, f"{layer}_num_key_value_heads": args.kv_heads}
    config = DrafterConfig.sized_for(target, **{name: v for name, v in choices.items() if v is not None})
    return Drafter(target, config).to(target.device)

def join_processes(args) -> None:
    """Under torchrun: a device for this process, and a way to the others."""
    if args.synthesize:
        raise InputError("--synthesize runs without torchrun")
    if args.device.startswith("cuda"):
        args.device = f"cuda:{dist.get_node_local_rank()}"
        torch.cuda.set_device(args.device)
    dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")

def main() -> None:
    args = parse_arguments()
    out = Path(args.out)
    checkpoint = out / "checkpoint.pt"
    resuming = args.resume and checkpoint.exists()
    fresh = not (resuming or args.synthesize or args.evaluate)
    if fresh and (checkpoint.exists() or (out / "model.safetensors").exists()):
        raise InputError(f"{out} holds work: --resume goes on from a checkpoint, else choose another --out")
    if dist.is_torchelastic_launched():
        join_processes(args)
    target, tokenizer = load_target(args)
    if args.seq_len > target.config.max_position_embeddings:
        raise InputError(f"--seq-len {args.seq_len}: the target's context is {target.config.max_position_embeddings}")
    if args.synthesize:
        written = synthesize(target.pack(), tokenizer, args)
        return print(json.dumps({"conversations": written})) if args.json else None
    data = Conversations(args.data, tokenizer, args.seq_len)
    if args.evaluate:
        indices = np.arange(len(data.places))
        sequences = list(filter(None, map(data.__getitem__, indices))) or next(shuffled(data, indices, 0))
        return print(json.dumps(evaluate(load_drafter(args.evaluate, target), sequences, args)))
    args.data = f"{' '.join(args.data)} (checksum {data.places.sum()})"  # --resume sees a change
    training, held_out = split(data, args.seed)
    epoch_updates = math.ceil(len(training) / args.batch_size)
    args.updates = args.updates or epoch_updates
    drafter = new_drafter(target, data, training, args)
    optimizers = make_optimizers(drafter, args.optimizer)
    rank, update, position = rank_and_world_size()[0], 0, 0
    if resuming:
        update, position = load_checkpoint(checkpoint, drafter, optimizers, args)
    elif rank == 0:
        with atomic_write(out / "log.jsonl") as log:
            log.touch()
        save_checkpoint(checkpoint, drafter, optimizers, 0, 0, args)
    stream = shuffled(data, training, args.seed, position)
    train(drafter, optimizers, stream, held_out, update, epoch_updates, args)
    if rank == 0 and args.json:
        print((out / "log.jsonl").read_text().splitlines()[-1])
    if dist.is_initialized():
        dist.barrier()  # until process 0 has saved, and gloo's threads have let go of our tensors
        dist.destroy_process_group()

if __name__ == "__main__":
    run_command(main)
