"""Conversations to train on, as tokens: found in files, shuffled, and some of them held out.

`Conversations` finds the usable records of some files without holding them all in RAM: a first
pass notes where each one lies (file, offset, length), and a record is read again when its turn
comes. (Only a file that is one JSON array is in RAM during the first pass, for a moment twice.)
`Stream` shuffles them, again in each epoch, and can go on from any place.
"""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plumbing.errors import InputError
from plumbing.processes import say
from plumbing.records import find_records, read_messages, usable_part
from plumbing.tokenizer import Tokenizer

# The first conversations that are read stay in RAM as tokens, so many of them: 0.4 GB at most if
# they have 2,048 tokens each. With a target as small as the default one, a GPU trains on a text
# faster than a tokenizer reads it again.
MAX_KEPT = 20_000
MAX_NAMED = 5  # skipped records; the rest are counted
EXAMPLE = (
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'
)
NO_FILE = (
    "no such file. To fetch UltraChat: pip install datasets && python -c \"from datasets import "
    "load_dataset as load; load('HuggingFaceH4/ultrachat_200k', split='train_sft')"
    ".to_json('ultrachat.jsonl')\". Or let the target write one: "
    "python -m experiments.synthesize 1000 --out FILE"
)
NO_ANSWER = "--data: no answer within --seq-len tokens; raise it"


class Sequence(NamedTuple):
    """A conversation as tokens."""

    tokens: Tensor  # (T)
    answer: Tensor  # (T), True at what the assistant wrote, its stop tokens included


class Conversations:
    """The conversations in some files, without the records that `index_records` skips.

    is_usable: tells from an `answer`, as in Sequence, whether there is anything to train on.
    Raises InputError for a file that cannot be read, or if none has a usable conversation.
    """

    def __init__(
        self,
        paths: list[str | Path],
        tokenizer: Tokenizer,
        seq_len: int,
        is_usable: Callable[[Tensor], bool],
    ):
        self.tokenizer = tokenizer
        self.seq_len = seq_len
        self.is_usable = is_usable
        self.places = index_records(paths)
        self.kept: dict[int, Sequence | None] = {}  # by index

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Sequence | None:
        """Return a conversation, cut at seq_len. None where nothing usable is left."""
        if index in self.kept:
            return self.kept[index]
        sequence = self.read(index)
        if len(self.kept) < MAX_KEPT:
            self.kept[index] = sequence
        return sequence

    def read(self, index: int) -> Sequence | None:
        """Read a conversation from its file again, now for its tokens."""
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
        return Sequence(tokens, answer) if self.is_usable(answer) else None

    def read_usable(self, indices: Iterable[int]) -> Iterator[Sequence]:
        """Yield those of them that have something to train on."""
        for index in indices:
            sequence = self[index]
            if sequence is not None:
                yield sequence


def index_records(paths: list[str | Path]) -> list[tuple[str | Path, int, int]]:
    """Return where each usable record lies: its file, its offset, and its length in bytes. Say how
    many records were skipped or cut, and why.

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
        names = " ".join(map(str, paths))
        raise InputError(f"{names}: no usable conversation; one line of a file is {EXAMPLE}")
    return places


@dataclass
class Stream:
    """Conversations without end, shuffled again in each epoch.

    Iterating goes on from `position`, whoever iterated before. The order of an epoch depends only
    on the seed and the number of the epoch. So it can be made again, and all that a checkpoint
    needs is `position`.
    """

    data: Conversations
    indices: np.ndarray
    seed: int
    position: int = 0  # grows by one with each conversation that is drawn

    def __iter__(self) -> Iterator[Sequence]:
        """Yield what is usable (`hold_out` has checked that something is)."""
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
    order = np.random.default_rng(seed).permutation(len(data))
    count = min(64, len(order) // 10)
    training = order[count:]
    usable = next(data.read_usable(training), None)
    if usable is None:
        raise InputError(NO_ANSWER)
    held_out = list(data.read_usable(order[:count]))
    if not held_out:
        # No error: it is reasonable to try things on a handful of conversations.
        say("nothing to hold out (fewer than ten conversations, or none that fits): evaluated on "
            "one that is trained on")
        held_out = [usable]
    return training, held_out


def frequent_tokens(
    data: Conversations, indices: np.ndarray, vocab_size: int, count: int
) -> tuple[int, ...]:
    """Return the `count` tokens that answers use most, sorted by id. Stop tokens count as the most
    frequent ones."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for tokens, answer in data.read_usable(indices[:5000]):  # these are enough
        counts += tokens[answer].bincount(minlength=vocab_size)
    counts[list(data.tokenizer.stop_ids)] = counts.max() + 1
    order = counts.argsort(descending=True, stable=True)  # the same on every machine
    return tuple(sorted(order[:count].tolist()))
