"""Conversations to train on: found in files, tokenized, and partly held out.

app/training.py makes a `Conversations` from some files. It keeps the records that can be trained
on: those with an answer within seq_len tokens. An epoch is one pass over these. (To know where the
first answer begins, what comes before it is tokenized; this takes about a second for 2,000
records.) `hold_out` sets some conversations aside for evaluations.

All text is kept in RAM. A conversation is tokenized when it is first drawn, so that a training
begins soon, and from then on its tokens are kept instead.
"""
from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset
from tqdm import tqdm

from plumbing.errors import InputError
from plumbing.processes import rank, say
from plumbing.records import find_records, parse_record, usable_messages
from plumbing.tokenizer import Tokenizer

MAX_RANKED = 5000  # `frequent_tokens` reads no more: more would hardly change the ranking
EXAMPLE = (
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}'
)


class TokenizedConversation(NamedTuple):
    tokens: Tensor  # (T), int32, which takes half the RAM of PyTorch's usual int64
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
        self.conversations: list[bytes | TokenizedConversation] = []  # a record, then its tokens
        seen = set()
        skipped = defaultdict(list)  # by reason: where the records are
        for path in paths:
            records = find_records(path)
            for record in tqdm(records, "reading", leave=False, delay=3, disable=rank() > 0):
                try:
                    key = hash(str(self.read(record.text)))
                    if key in seen:  # else one might be held out, and the other trained on
                        raise InputError("equal to an earlier one")
                    seen.add(key)
                    self.conversations.append(record.text)
                except InputError as error:
                    skipped[str(error)].append(f"{path}, {record.place}")
        say(f"{len(self)} conversations, {sum(map(len, skipped.values()))} records skipped")
        for reason, places in skipped.items():
            say(f"  {len(places)} like {places[0]}: {reason}")
        if not self.conversations:
            names = " ".join(map(str, paths))
            complaint = f"{names}: no usable conversation; one line of a file is {EXAMPLE}"
            raise InputError("; ".join([complaint, *skipped]))

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> TokenizedConversation:
        if isinstance(self.conversations[index], bytes):
            self.conversations[index] = self.tokenize(self.conversations[index])
        return self.conversations[index]

    def tokenize(self, text: bytes) -> TokenizedConversation:
        tokens = []
        answer = []
        for piece, is_answer in self.tokenizer.turns(self.read(text)):
            tokens += piece
            answer += [is_answer] * len(piece)
        return TokenizedConversation(
            torch.tensor(tokens[:self.seq_len], dtype=torch.int32),
            torch.tensor(answer[:self.seq_len]),
        )

    def read(self, text: bytes) -> list[dict]:
        """Return the messages of a record. Raises InputError if they cannot be trained on."""
        messages = usable_messages(parse_record(text))
        opening, _ = next(self.tokenizer.turns(messages))
        # Two tokens of an answer are needed: the first predicts the second (see `loss_mask` of
        # train.py). An answer has two, since its stop token is one.
        if len(opening) + 2 > self.seq_len:
            raise InputError(f"no answer within --seq-len {self.seq_len} tokens")
        return messages


def hold_out(data: Conversations, seed: int) -> tuple[Subset, list[TokenizedConversation]]:
    """Split conversations, by chance: into those to train on, which are tokenized when they are
    drawn, and those to evaluate on, which are a tenth of all, but at most 64."""
    order = np.random.default_rng(seed).permutation(len(data)).tolist()
    count = min(64, len(order) // 10)
    if not count:
        # This is no error: it is reasonable to try things on a handful of conversations.
        say("fewer than ten conversations: evaluations use one that is also trained on")
        return Subset(data, order), [data[order[0]]]
    return Subset(data, order[count:]), [data[index] for index in order[:count]]


def frequent_tokens(training: Subset, vocab_size: int, count: int) -> tuple[int, ...]:
    """Return the `count` tokens that answers use most, sorted by id: what --draft-vocabulary
    drafts. Stop tokens are always among them: they count as the most frequent ones."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for tokens, answer in itertools.islice(training, MAX_RANKED):
        counts += tokens[answer].bincount(minlength=vocab_size)
    counts[list(training.dataset.tokenizer.stop_ids)] = counts.max() + 1
    order = counts.argsort(descending=True, stable=True)  # stable: the same on every machine
    return tuple(sorted(order[:count].tolist()))


def check_files(paths: list[Path]) -> None:
    """Check that files exist, and are not empty. Otherwise raise InputError, which says how to get
    conversations."""
    for path in paths:
        if path.is_file() and not path.stat().st_size:
            raise InputError(f"{path} is empty; one line of a file is {EXAMPLE}")
        if not path.is_file():
            raise InputError(
                f"{path}: no such file. To fetch UltraChat: pip install datasets && python -c "
                "\"from datasets import load_dataset as load; "
                "load('HuggingFaceH4/ultrachat_200k', split='train_sft')"
                ".to_json('ultrachat.jsonl')\". Or let the target write one: "
                "python -m experiments.synthesize 1000 --out FILE"
            )
