"""Training as a program: with a log, checkpoints, evaluations, and what makes it faster.

train.py has the method, and a plain loop. `train_drafter`, which its command line calls, draws the
same batches and uses the same functions for each update. Around the updates it adds:

    a journal           log and checkpoints, so that --resume goes on after any interruption
    evaluations         on conversations that are held out (app/evaluation.py)
    mixed precision     products in bfloat16, weights in float32
    several processes   each computes the gradients of a share of the batch (plumbing/processes.py)
    Muon, a cosine      another optimizer, and another schedule of the learning rate
"""
from __future__ import annotations

import itertools
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Iterable

import torch
from torch import nn
from torch.utils.data import Subset
from tqdm import tqdm

from app.evaluation import check_context, draw_scores, evaluate, mixed_precision, pad_for_gpu
from app.loading import load_target, new_drafter, save_drafter
from llama import Llama
from moa import Drafter, default_config
from plumbing.conversations import (
    Conversations,
    TokenizedConversation,
    check_files,
    frequent_tokens,
    hold_out,
)
from plumbing.devices import DTYPES
from plumbing.errors import InputError
from plumbing.files import fingerprint_files, fingerprint_model
from plumbing.hub import resolve_path
from plumbing.journal import Journal, end_stopped_run, find_run, lock_folder, read_log
from plumbing.processes import all_reduce, rank, say, true_in_any, world_size
from plumbing.signals import StopSignals
from train import (
    Losses,
    TrainConfig,
    apply_gradients,
    compute_gradients,
    count_trained,
    draw_batches,
    draw_examples,
    learning_rate,
    new_optimizer,
)


@dataclass(frozen=True)
class RunConfig(TrainConfig):
    """How a training is run: the chapter's settings, and these."""

    updates: int | None = None  # None: one pass over the data
    # Longer conversations are cut to this many tokens. None: to 2048, or to the target's context.
    seq_len: int | None = 2048
    schedule: str = "paper"  # or "cosine"; see `scheduled_rate`
    optimizer: str = "adamw"  # or "muon"; see `choose_optimizer`
    dtype: str = "float32"  # or "bfloat16"; see `mixed_precision`
    eval_every: int = 200  # updates
    save_every: int = 50  # updates


@dataclass(frozen=True)
class DrafterSizes:
    """The sizes of a drafter that can be chosen, named as the flags of train.py. None: the size
    that `default_config` of moa.py gives."""

    tli: int = 0  # N, the number of target layers that the drafter reuses
    lsa_heads: int | None = None
    lsa_mlp: int | None = None
    mlp: int | None = None  # the width of the MLPs of SA and CA
    kv_heads: int | None = None  # the kv heads of SA and CA
    draft_vocabulary: int | None = None  # how many tokens the drafter may draft


# Settings that may change when a training is resumed. They say where files lie, when something is
# written, and how many conversations are read at once (which affects only the rounding of sums).
MAY_DIFFER = {"model", "data", "eval_every", "save_every", "micro_batch_size"}
FEW_UPDATES = 200  # a drafter that has had fewer predicts hardly anything

# --- A whole training ---


def train_drafter(
    model: str,
    data: list[str | Path],
    out: Path,
    config: RunConfig,
    sizes: DrafterSizes = DrafterSizes(),
    *,
    device: str = "cpu",
    resume: bool = False,
) -> None:
    """Train a drafter for a model on files of conversations, into the folder `out`.

    Raises InputError, SystemExit after a signal to stop, and KeyboardInterrupt after a second
    Ctrl-C.
    """
    data = [Path(file) for file in data]
    resumes = find_run(out, resume)
    check_files(data)  # before the model is loaded, which takes longer
    target, tokenizer = load_target(model, device, DTYPES[config.dtype])
    if config.seq_len is None:
        context = target.config.max_position_embeddings
        config = replace(config, seq_len=min(RunConfig.seq_len, context))
    check_context(config.seq_len, target)
    training, held_out = hold_out(Conversations(data, tokenizer, config.seq_len), config.seed)
    epoch_updates = math.ceil(len(training) / config.batch_size)
    config = replace(config, updates=config.updates or epoch_updates)
    if config.updates < FEW_UPDATES:
        say(f"{config.updates} updates: a drafter needs hundreds; for little data --batch-size 1 "
            "--updates 400 (recipes: weights/README.md)")

    drafter = make_drafter(target, training, sizes, config.seed)
    parameters = drafter.trained_parameters()
    optimizer = choose_optimizer(parameters.values(), config.optimizer)
    save_model = partial(save_drafter, drafter, out, target_name=model)
    settings = asdict(config) | asdict(sizes) | {  # plain values, which --resume compares
        "model": str(model),
        "model_checksum": fingerprint_model(resolve_path(model)),
        "data": [str(file) for file in data],
        "data_checksum": fingerprint_files(data),
    }
    journal = Journal(out, parameters, optimizer, save_model, settings)
    with lock_folder(out):
        if resumes:
            # The paper's schedule does not depend on `updates`. A training with this schedule can
            # therefore be made longer.
            longer = {"updates"} if config.schedule == "paper" else set()
            journal.resume(config.updates, MAY_DIFFER | longer)
        else:
            journal.begin()
        try:
            run_updates(drafter, optimizer, training, held_out, journal, config)
        except KeyboardInterrupt:
            say(f"stopped at once; what is saved is update {journal.done}: --resume goes on there")
            raise
    say_worth(out, model)


def say_worth(out: Path, model: str) -> None:
    """Say where a drafter is, what it is worth by its last evaluation, and what to do next."""
    say(f"the drafter is in {out}: python speculate.py --model {model} --drafter {out}")
    log = read_log(out)  # empty, if it was deleted
    if log and "implied_acceptance_length" in log[-1]:
        length = log[-1]["implied_acceptance_length"]
        told = f"with its drafts a pass of the target yields about {length:.2f} tokens, without 1"
        if length < 1.5:
            say(f"{told}: probably slower than the target alone. Next: more text, or more updates "
                "(recipes: weights/README.md)")
        else:
            say(f"{told}. Next: python -m experiments.bench --model {model} --drafter {out}")


def make_drafter(
    target: Llama, training: Subset, sizes: DrafterSizes, seed: int
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
    choices = {name: choice for name, choice in choices.items() if choice is not None}
    count = sizes.draft_vocabulary
    vocabulary = None
    if count is not None:
        vocab_size = target.config.vocab_size
        if count > vocab_size:
            raise InputError(f"--draft-vocabulary {count}: the model has {vocab_size} tokens")
        vocabulary = frequent_tokens(training, vocab_size, count)
    torch.manual_seed(seed)  # under torchrun: the same weights in every process
    config = replace(default_config(target), **choices)
    return new_drafter(target, config, vocabulary).to(target.device)


# --- The updates ---


def run_updates(
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    training: Subset,
    held_out: list[TokenizedConversation],
    journal: Journal,
    config: RunConfig,
) -> None:
    """Train up to config.updates. A training that was interrupted has done the first journal.done
    updates.

    held_out: for `evaluate`. Raises InputError if a gradient is not finite, SystemExit after a
    signal to stop, and KeyboardInterrupt after a second Ctrl-C.
    """
    epoch_updates = math.ceil(len(training) / config.batch_size)
    batches = draw_batches(len(training), config)
    batches = itertools.islice(batches, journal.done, config.updates)
    with (
        StopSignals("stopping after this update, or evaluation") as signals,
        tqdm(
            desc="updates", initial=journal.done, total=config.updates, disable=rank() > 0
        ) as progress,
    ):
        for update, indices in enumerate(batches, journal.done):
            began = perf_counter()
            batch = [training[index] for index in indices]
            lr = scheduled_rate(update, config, epoch_updates)
            measured = make_update(drafter, optimizer, batch, update, lr, config)
            seconds = perf_counter() - began
            speed = sum(len(conversation.tokens) for conversation in batch) / seconds

            done = update + 1
            is_last = done == config.updates
            journal.log(done, measured | {"tokens_per_second": speed})
            progress.update()
            progress.set_postfix_str(f"loss {measured['loss']:.3f}, {speed:.0f} tokens/s")
            signals.message = f"stopping after this update (takes {seconds:.1f}s), or evaluation"
            if rank() == 0 and (is_last or done % config.eval_every == 0):
                scores = evaluate(drafter, held_out, config, config.dtype)
                journal.log(done, scores)
                say(f"update {done}: {draw_scores(scores)}")
            # All processes have to stop at the same update, whichever received the signal.
            stops = true_in_any(bool(signals.received), drafter.device)
            if stops or is_last or done % config.save_every == 0:
                journal.save(done)
            if stops:
                break
    if journal.done < config.updates:
        end_stopped_run(journal.done, signals)


def make_update(
    drafter: Drafter,
    optimizer: torch.optim.Optimizer,
    batch: list[TokenizedConversation],
    update: int,
    lr: float,
    config: RunConfig,
) -> dict[str, float]:
    """Make one update, as the loop of train.py does, but in mixed precision and with several
    processes. Returns its losses, learning rate and gradient norm, for the log. Raises InputError
    if a gradient is not finite."""
    examples = draw_examples(batch, update, config)
    total = count_trained(examples)
    share = examples[rank()::world_size()]  # perhaps none; a single process takes all examples
    share = [pad_for_gpu(example, drafter.device) for example in share]
    with mixed_precision(drafter.device, config.dtype):
        sums = compute_gradients(drafter, share, total, config)  # (3)
    for parameter in drafter.trained_parameters().values():
        all_reduce(parameter.grad)  # sums up over the processes
    all_reduce(sums)
    try:
        norm = apply_gradients(drafter, optimizer, lr)
    except FloatingPointError:
        raise InputError(
            f"update {update + 1}: the gradient is not finite; begin again with a lower --lr and a "
            "different --out"
        ) from None
    means = (sums / total).tolist()
    return dict(zip(Losses._fields, means)) | {"lr": lr, "grad_norm": norm}


# --- Another schedule, another optimizer ---


def scheduled_rate(update: int, config: RunConfig, epoch_updates: int) -> float:
    """Return the learning rate of an update, counted from 0, in the paper's schedule
    (`learning_rate` of train.py) or in the schedule "cosine":

        up to the last update          lr (1 + cos(pi update / updates)) / 2: from lr to 0
        the first `warmup` updates     the same, times a factor that rises to 1 on a straight line
    """
    if config.schedule == "paper":
        return learning_rate(update, config, epoch_updates)
    rise = min(1.0, (update + 1) / config.warmup)
    return rise * config.lr * (1 + math.cos(math.pi * update / config.updates)) / 2


class Optimizers:
    """Several optimizers, each of some parameters, in the place of one: what is used of a
    `torch.optim.Optimizer` here, it has."""

    def __init__(self, *optimizers: torch.optim.Optimizer | Optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict]:
        return list(itertools.chain(*[optimizer.param_groups for optimizer in self.optimizers]))

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> list:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def choose_optimizer(
    parameters: Iterable[nn.Parameter], name: str
) -> torch.optim.Optimizer | Optimizers:
    """Return AdamW, as in the paper, or Muon (Jordan et al. 2024) for matrices and AdamW for the
    rest. Muon steps along the orthogonal matrix that is nearest to a matrix's momentum, so that it
    learns in all directions at the same rate."""
    parameters = list(parameters)
    if name == "adamw":
        return new_optimizer(parameters)
    matrices = [p for p in parameters if p.ndim == 2]
    vectors = [p for p in parameters if p.ndim == 1]
    # Muon's steps are scaled to be as large as AdamW's, so that one learning rate serves both.
    muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return Optimizers(muon, new_optimizer(vectors))
