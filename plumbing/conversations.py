"""Conversations to train on: found in files, tokenized, shuffled, and partly held out.

A first pass over the files finds the records that can be trained on: those with an answer within
seq_len tokens. An epoch is one pass over these. To know where the first answer begins, what comes
before it is tokenized; this takes about a second for 2,000 records. The text of a data set may not
fit in RAM, so only the place of each record is kept. When the tokens of a record are needed, it is
read from its file again. (While a file that is one JSON array is read, the whole file is in RAM.)

`Conversations` finds and reads the records. `Stream` shuffles them, again in each epoch, and can go
on from any position.
"""
from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from plumbing.errors import InputError, input_errors
from plumbing.processes import rank, say
from plumbing.records import UnusableRecord, find_records, parse_record, usable_messages
from plumbing.tokenizer import Tokenizer

# The first conversations that are drawn stay in RAM as tokens. With 2,048 tokens each they take 0.4
# GB. If none were kept, a GPU that trains on a target as small as the default one would wait for
# the tokenizer.
MAX_KEPT = 20_000
MAX_RANKED = 5000  # `frequent_tokens` reads no more: more would hardly change the ranking
EXAMPLE = (
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'
)


class TokenizedConversation(NamedTuple):
    tokens: Tensor  # (T)
    answer: Tensor  # (T), True at what the assistant wrote, its stop tokens included


class Conversations:
    """The conversations in some files that can be trained on, each once, as tokens, cut after
    seq_len tokens.

    Prints how many records were skipped, and why. Raises InputError for a file that cannot be read,
    or if no record is usable.
    """

    def __init__(self, paths: list[str | Path], tokenizer: Tokenizer, seq_len: int):
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.places: list[tuple] = []  # of each: file, offset of its first byte, length in bytes
        self.kept: dict[int, TokenizedConversation] = {}  # by index
        seen = set()
        skipped = Counter()  # by reason
        examples = {}
        for path in paths:
            records = tqdm(  # a line that counts them, if they take more than three seconds
                find_records(path), "reading", leave=False, delay=3, disable=rank() > 0
            )
            for record in records:
                try:
                    key = hash(str(self.read(record.text)))
                    if key in seen:  # else one might be held out, and the other trained on
                        raise UnusableRecord("equal to an earlier one")
                except UnusableRecord as error:
                    examples.setdefault(error.reason, f"{path}, {record.place}: {error}")
                    skipped[error.reason] += 1
                    continue
                seen.add(key)
                self.places.append((path, record.offset, len(record.text)))
        say(f"{len(self)} conversations, {skipped.total()} records skipped")
        for reason, count in skipped.items():
            say(f"  {count} like {examples[reason]}")
        if not self.places:
            names = " ".join(map(str, paths))
            example = f"{names}: no usable conversation; one line of a file is {EXAMPLE}"
            raise InputError("; ".join([example, *skipped]))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> TokenizedConversation:
        """Return a conversation. Raises InputError if its file has changed."""
        if index in self.kept:
            return self.kept[index]
        path, offset, length = self.places[index]
        with open(path, "rb") as file:
            file.seek(offset)
            text = file.read(length)
        with input_errors(f"{path} has changed since it was first read", InputError):
            messages = self.read(text)
        tokens = []
        answer = []
        for piece, is_answer in self.tokenizer.turns(messages):
            tokens += piece
            answer += [is_answer] * len(piece)
        conversation = TokenizedConversation(
            torch.tensor(tokens[:self.seq_len]), torch.tensor(answer[:self.seq_len])
        )
        if len(self.kept) < MAX_KEPT:
            self.kept[index] = conversation
        return conversation

    def read(self, text: bytes) -> list[dict]:
        """Return the messages of a record. Raises UnusableRecord, also if no answer begins within
        seq_len."""
        messages = usable_messages(parse_record(text))
        try:
            opening, _ = next(self.tokenizer.turns(messages))
        except InputError as error:
            raise UnusableRecord(str(error)) from None
        # Two tokens of an answer are needed: the first predicts the second (see `loss_mask` of
        # train.py). An answer has two, since its stop token is one.
        if len(opening) + 2 > self.seq_len:
            raise UnusableRecord(f"no answer within --seq-len {self.seq_len} tokens")
        return messages


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


@dataclass
class Stream:
    """An endless stream of conversations, shuffled again in each epoch.

    The order of an epoch depends only on the seed and on the number of the epoch, so `position` is
    all that a checkpoint needs. The position belongs to the stream: each iterator goes on where the
    last one stopped.
    """

    data: Conversations
    indices: np.ndarray
    seed: int
    position: int = 0  # how many conversations have been drawn

    def __iter__(self) -> Iterator[TokenizedConversation]:
        while True:
            epoch, first = divmod(self.position, len(self.indices))
            order = np.random.default_rng((self.seed, epoch)).permutation(self.indices)
            for index in order[first:]:
                self.position += 1
                yield self.data[index]

    def batches_per_epoch(self, batch_size: int) -> int:
        """Return how many batches it takes to draw each conversation once."""
        return math.ceil(len(self.indices) / batch_size)


def hold_out(
    data: Conversations, seed: int
) -> tuple[np.ndarray, list[TokenizedConversation]]:
    """Return shuffled indices to train on, and conversations to evaluate on: a tenth of all, but at
    most 64."""
    order = np.random.default_rng(seed).permutation(len(data))
    count = min(64, len(order) // 10)
    if not count:
        # This is no error: it is reasonable to try things on a handful of conversations.
        say("fewer than ten conversations: evaluations use one that is also trained on")
        return order, [data[order[0]]]
    return order[count:], [data[index] for index in order[:count]]


def frequent_tokens(
    data: Conversations, indices: np.ndarray, vocab_size: int, count: int
) -> tuple[int, ...]:
    """Return the `count` tokens that answers use most, sorted by id. Stop tokens are always among
    the result: they count as the most frequent ones."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for index in indices[:MAX_RANKED]:
        tokens, answer = data[index]
        counts += tokens[answer].bincount(minlength=vocab_size)
    counts[list(data.tokenizer.stop_ids)] = counts.max() + 1
    order = counts.argsort(descending=True, stable=True)  # stable: the same on every machine
    return tuple(sorted(order[:count].tolist()))
