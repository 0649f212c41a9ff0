"""Records: the JSON documents in a file, and the conversation in each.

Four forms of training data are read alike, one JSON object a line, or one JSON array in a file:

    {"messages": [{"role": "user", "content": "Hi"}, ...]}              UltraChat 200k, and others
    {"data": ["Hi", "Hello!", ...]}                                     UltraChat, the original
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}          ShareGPT
    {"instruction": "Translate", "input": "Hi", "output": "Hallo"}      Alpaca

and two of prompts, which have no answers:

    {"prompt": "Hi"}
    {"category": "maths", "turns": ["Hi", ...]}                         Spec-Bench
"""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Iterator, NamedTuple

from plumbing.errors import InputError, input_errors
from plumbing.tokenizer import check_message

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
