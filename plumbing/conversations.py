"""Conversations to train on: found in files, tokenized, shuffled, and partly held out.

The text of a data set may not fit in RAM. A first pass over the files therefore notes only where
each usable record lies: its file, the offset of its first byte, and its length in bytes (a `Span`).
When the tokens of a record are needed, these bytes are read from the file again. (The first pass
over a file that is one JSON array does hold the whole file in RAM.)

`Conversations` finds and reads the records. `Stream` shuffles them, again in each epoch, and can go
on from any position.
"""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plumbing.errors import InputError
from plumbing.processes import say
from plumbing.records import UnusableRecord, find_records, parse_record, usable_messages
from plumbing.tokenizer import Tokenizer

# The first conversations that are read stay in RAM as tokens. With 2,048 tokens each they take 0.4
# GB. If none were kept, a GPU that trains on a target as small as the default one would wait for
# the tokenizer.
MAX_KEPT = 20_000
MAX_NAMED = 5  # this many skipped records are named one by one; further ones are only counted
MAX_RANKED = 5000  # `frequent_tokens` reads no more: more would hardly change the ranking
EXAMPLE = (
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'
)
NO_ANSWER = "--data: no answer within --seq-len tokens; use a larger --seq-len"


class TokenizedConversation(NamedTuple):
    tokens: Tensor  # (T)
    answer: Tensor  # (T), True at what the assistant wrote, its stop tokens included

    @property
    def is_usable(self) -> bool:
        """Return whether there is anything to train on: two tokens in a row that belong to an
        answer. (The first of these predicts the second; see `loss_mask` of train.py.)"""
        return bool((self.answer[1:] & self.answer[:-1]).any())


class Span(NamedTuple):
    """Where a record lies."""

    path: str | Path
    offset: int  # where in the file the record begins, in bytes
    length: int  # how long the record is, in bytes


class Conversations:
    """The conversations in some files, as tokens, each cut after seq_len tokens.

    Raises InputError for a file that cannot be read, or if no record is usable.
    """

    def __init__(self, paths: list[str | Path], tokenizer: Tokenizer, seq_len: int):
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.spans = index_records(paths)
        self.kept: dict[int, TokenizedConversation] = {}  # by index

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> TokenizedConversation:
        """Return a conversation, even if seq_len leaves nothing to train on in it."""
        if index in self.kept:
            return self.kept[index]
        conversation = self.read(index)
        if len(self.kept) < MAX_KEPT:
            self.kept[index] = conversation
        return conversation

    def read(self, index: int) -> TokenizedConversation:
        """Read a conversation from its file, and tokenize it."""
        path, offset, length = self.spans[index]
        with open(path, "rb") as file:
            file.seek(offset)
            text = file.read(length)
        messages, _ = usable_messages(parse_record(text))
        tokens = []
        answer = []
        for piece, is_answer in self.tokenizer.turns(messages):
            tokens += piece
            answer += [is_answer] * len(piece)
        return TokenizedConversation(
            torch.tensor(tokens[:self.seq_len]), torch.tensor(answer[:self.seq_len])
        )

    def read_usable(self, indices: Iterable[int]) -> Iterator[TokenizedConversation]:
        """Yield the usable conversations among those at these indices."""
        for index in indices:
            conversation = self[index]
            if conversation.is_usable:
                yield conversation


def check_files(paths: list[Path]) -> None:
    """Check that files exist. Otherwise raise InputError, which says how to get conversations."""
    for path in paths:
        if not path.exists():
            raise InputError(
                f"{path}: no such file. To fetch UltraChat: pip install datasets && python -c "
                "\"from datasets import load_dataset as load; "
                "load('HuggingFaceH4/ultrachat_200k', split='train_sft')"
                ".to_json('ultrachat.jsonl')\". Or let the target write one: "
                "python -m experiments.synthesize 1000 --out FILE"
            )


def index_records(paths: list[str | Path]) -> list[Span]:
    """Return where each usable record lies. Print how many records were skipped or cut, and why.

    Raises InputError for a file that cannot be read, or if no record is usable.
    """
    spans = []
    skipped = 0
    counts = Counter()
    for path in paths:
        for place, offset, text in find_records(path):
            try:
                _, cuts = usable_messages(parse_record(text))
            except UnusableRecord as error:
                skipped += 1
                if skipped <= MAX_NAMED:
                    say(f"skipped {path}, {place}: {error}")
                counts[f"skipped: {error.reason}"] += 1
            else:
                counts.update(cuts)
                spans.append(Span(path, offset, len(text)))
    say(f"{len(spans)} conversations, {skipped} records skipped")
    for reason, count in counts.items():
        say(f"  {count} {reason}")
    if not spans:
        names = " ".join(map(str, paths))
        raise InputError(f"{names}: no usable conversation; one line of a file is {EXAMPLE}")
    return spans


@dataclass
class Stream:
    """An endless stream of conversations, shuffled again in each epoch.

    The order of an epoch depends only on the seed and on the number of the epoch, so `position` is
    all that a checkpoint needs. The position belongs to the stream: each iterator goes on where the
    last one stopped. At least one index must be usable, which `hold_out` ensures.
    """

    data: Conversations
    indices: np.ndarray
    seed: int
    position: int = 0  # grows by one with each conversation drawn, usable or not

    def __iter__(self) -> Iterator[TokenizedConversation]:
        while True:
            epoch, first = divmod(self.position, len(self.indices))
            order = np.random.default_rng((self.seed, epoch)).permutation(self.indices)
            for index in order[first:]:
                self.position += 1
                yield from self.data.read_usable([index])

    def batches_per_epoch(self, batch_size: int) -> int:
        """Return how many batches it takes to draw each conversation once."""
        return math.ceil(len(self.indices) / batch_size)


def hold_out(
    data: Conversations, seed: int
) -> tuple[np.ndarray, list[TokenizedConversation]]:
    """Return shuffled indices to train on, and conversations to evaluate on: a tenth of all, but at
    most 64.

    Raises InputError if there is nothing to train on.
    """
    order = np.random.default_rng(seed).permutation(len(data))
    count = min(64, len(order) // 10)
    training = order[count:]
    usable = next(data.read_usable(training), None)
    if usable is None:
        raise InputError(NO_ANSWER)
    held_out = list(data.read_usable(order[:count]))
    if not held_out:
        # This is no error: it is reasonable to try things on a handful of conversations.
        say("nothing to hold out (fewer than ten conversations, or none that fits): evaluations "
            "use a conversation that is also trained on")
        held_out = [usable]
    return training, held_out


def frequent_tokens(
    data: Conversations, indices: np.ndarray, vocab_size: int, count: int
) -> tuple[int, ...]:
    """Return the `count` tokens that answers use most, sorted by id. Stop tokens are always among
    the result: they count as the most frequent ones."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for tokens, answer in data.read_usable(indices[:MAX_RANKED]):
        counts += tokens[answer].bincount(minlength=vocab_size)
    counts[list(data.tokenizer.stop_ids)] = counts.max() + 1
    order = counts.argsort(descending=True, stable=True)  # stable: the same on every machine
    return tuple(sorted(order[:count].tolist()))
