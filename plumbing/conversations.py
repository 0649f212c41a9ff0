"""Files of conversations and of prompts: as they are published, and as a program reads them.

Four forms of training data are read alike, one JSON object a line, or one JSON array in a file:

    {"messages": [{"role": "user", "content": "Hi"}, ...]}              UltraChat 200k, and others
    {"data": ["Hi", "Hello!", ...]}                                     UltraChat, the original
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}          ShareGPT
    {"instruction": "Translate", "input": "Hi", "output": "Hallo"}      Alpaca

`Conversations` finds the usable records of some files without holding them all in RAM: a first
pass notes where each one lies (file, offset, length), and a record is read again when its turn
comes. (Only a file that is one JSON array is in RAM during the first pass, for a moment twice.)
`Stream` shuffles them, again in each epoch, and can go on from any place.
"""
from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor

from plumbing.errors import InputError, input_errors
from plumbing.processes import say
from plumbing.tokenizer import Tokenizer, check_message

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


# --- Conversations to train on ---


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


# --- Files: the records in them ---

NOT_JSON = {  # how a file begins: what it is, and a command that converts it
    b"PAR1": (
        "Parquet",
        "python -c \"import pandas; pandas.read_parquet('{0}').to_json('{0}.jsonl', "
        "orient='records', lines=True)\"",
    ),
    b"ARROW1": (
        "Arrow",
        "python -c \"import pandas; pandas.read_feather('{0}').to_json('{0}.jsonl', "
        "orient='records', lines=True)\"",
    ),
    b"\xff\xff\xff\xff": (
        "an Arrow stream",
        "python -c \"import datasets; datasets.Dataset.from_file('{0}').to_json('{0}.jsonl')\"",
    ),
    b"\x1f\x8b": ("gzip", "gunzip {}"),
    b"BZh": ("bzip2", "bunzip2 {}"),
    b"\xfd7zXZ": ("xz", "unxz {}"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd {}"),
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
        if b"\0" in begin:
            raise InputError(f"{path} is a binary file, not JSON")
        if begin.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
            # latin-1 makes one character of each byte, so an index into the text is one into the
            # bytes. JSON's own characters are ASCII, and what strings hold does not matter here.
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


# --- Records: the conversations in them ---

ROLE_NAMES = {  # ShareGPT's
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
TOOL_ROLES = ("tool", "function", "tool_call", "function_call", "observation")


def read_messages(text: bytes) -> list[dict]:
    """Read a record as a conversation: one of the four forms, or a prompt, which has no answers.

    Raises ValueError (InputError is a kind of it). Its message begins with the reason, up to a
    colon: `index_records` counts reasons.
    """
    with input_errors("not valid JSON", ValueError, RecursionError):
        record = json.loads(text)
    match record:
        case {"messages": list(turns)} | {"conversations": list(turns)} | {"data": list(turns)}:
            pass
        case {"instruction": str(question), "output": answer}:
            more = record.get("input") or ""
            if not isinstance(more, str):
                raise ValueError(f"an input that is not text: {more!r:.60}")
            turns = [f"{question}\n\n{more}" if more else question, answer]
        case {"turns": list(questions)}:
            turns = [{"role": "user", "content": question} for question in questions]
        case {"prompt": question}:
            turns = [{"role": "user", "content": question}]
        case _:
            raise ValueError("neither messages, data or conversations nor instruction and output")
    messages = []
    for turn in turns:
        if isinstance(turn, str):  # without a role: user and assistant take turns
            turn = {"role": next_role(messages), "content": turn}
        with input_errors("an unusable turn", ValueError, LookupError, TypeError, AttributeError):
            if uses_tool(turn):
                messages.append({"role": next_role(messages), "content": ""})
                break  # here `usable_part` cuts it
            role = turn.get("role", turn.get("from"))
            content = turn["value"] if "value" in turn else turn["content"]
            message = {"role": ROLE_NAMES.get(role, role), "content": text_of(content)}
            check_message(message)
        messages.append(message)
    return messages


def uses_tool(turn: dict) -> bool:
    """Tell whether a turn calls a tool or is what it returned. Each model has its own format for
    these, so a conversation is read only up to there."""
    role = turn.get("role", turn.get("from"))
    return bool(turn.get("tool_calls") or turn.get("function_call") or role in TOOL_ROLES)


def text_of(content: str | list | None) -> str:
    """Return a turn's content, which may be in parts: [{"type": "text", "text": "Hi"}, ...]. Raises
    ValueError for a part that is no text, such as an image."""
    if not isinstance(content, list):
        return "" if content is None else content  # (`check_message` refuses what is no text)
    texts = []
    for part in content:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise ValueError(f"a part that is not text: {part!r:.60}")
    return "".join(texts)


def next_role(messages: list[dict]) -> str:
    """Return whose turn it is after some messages, if user and assistant take turns."""
    return "assistant" if len(messages) % 2 else "user"


def usable_part(messages: list[dict]) -> tuple[list[dict], list[str]]:
    """Return a conversation from its first question up to its first turn that is empty or uses a
    tool, and what was cut.

    Raises ValueError if what is left has no answer.
    """
    kept = []
    cuts = []
    asked = False
    for message in messages:
        role = message["role"]
        if role != "system" and not message["content"].strip():
            cuts.append("cut at a turn that is empty or uses a tool")
            break
        asked = asked or role == "user"
        if role == "assistant" and not asked:
            cuts.append("answers before any question left out")
        else:
            kept.append(message)
    if "assistant" not in [message["role"] for message in kept]:
        raise ValueError("no answer")
    return kept, cuts


# --- Prompts, and the questions of conversations ---


class Prompt(NamedTuple):
    category: str
    turns: list[str]  # what the user says, one after the other


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read the prompts of a file: {"prompt": text}, Spec-Bench's {"category", "turns"}, or what the
    user says in conversations. Raises InputError."""
    form = 'expected {"prompt": text}, {"category": name, "turns": [...]} or {"messages": [...]}'
    prompts = []
    for record in find_records(path):
        wrong = f"{path}, {record.place}: {form}"
        with input_errors(wrong, ValueError, TypeError, RecursionError):
            prompts.append(parse_prompt(record.text))
    if not prompts:
        raise InputError(f"{path}: no prompts")
    return prompts


def parse_prompt(text: bytes) -> Prompt:
    record = json.loads(text)
    messages = read_messages(text)
    if "prompt" in record:  # perhaps beside an answer to it
        messages = read_messages(json.dumps({"prompt": record["prompt"]}).encode())
    if "system" in [message["role"] for message in messages]:
        raise ValueError("system messages are not supported in prompts")
    turns = [message["content"] for message in messages if message["role"] == "user"]
    if not turns or not all(turn.strip() for turn in turns):
        raise ValueError("the prompt is empty")
    category = str(record.get("category") or "other")
    if category == "overall":
        raise ValueError("the category 'overall' is reserved for the rows of all prompts")
    return Prompt(category, turns)


def read_first_questions(path: str | Path) -> Iterator[str]:
    """Read what the user asks first in each record of a file of conversations or prompts. Raises
    InputError."""
    for record in find_records(path):
        with suppress(ValueError):
            messages = read_messages(record.text)
            first = next((m["content"] for m in messages if m["role"] == "user"), "")
            if first.strip():
                yield first
