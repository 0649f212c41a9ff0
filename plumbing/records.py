"""Records: JSON objects from files of conversations become lists of messages.

plumbing/conversations.py reads training data with this module, and experiments/ its prompts. A file
has one JSON object per line, or is one JSON array of objects, in four forms:

    {"messages": [{"role": "user", "content": "Hi"}, ...]}              UltraChat 200k, and others
    {"data": ["Hi", "Hello!", ...]}                                     UltraChat, the original
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}          ShareGPT
    {"instruction": "Translate", "input": "Hi", "output": "Hallo"}      Alpaca

Beside them, {"system": "Be brief."} is a first message, and {"history": [["Hi", "Hello!"], ...]}
are earlier turns. A record with more that belongs to the conversation, such as images, is refused.

A turn is what one speaker says at once. Every form of a turn becomes a message:
{"role": "user", "content": "Hi"}.

A record that cannot be used is an InputError. Records with the same fault have the same message, so
that they can be counted.
"""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Iterator, NamedTuple

from plumbing.errors import InputError, input_errors


# --- From a record to its messages ---

UNREAD_KEYS = (  # of a record or a turn; without them the conversation would be a different one
    "tools",
    "functions",
    "tool_calls",
    "function_call",
    "documents",
    "images",
    "videos",
    "audios",
    "reasoning_content",
    "reasoning",
    "thinking",
    "chat_template_kwargs",
)


def parse_record(text: bytes) -> dict:
    """Return a record's JSON object. Raises InputError."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("not valid JSON") from None
    if not isinstance(record, dict):
        raise InputError("not a JSON object")
    return record


def usable_messages(record: dict) -> list[dict]:
    """Return the messages of a record to train on. Raises InputError if the record cannot be
    read, has an empty turn (a system message may be empty), or has no answer. (What begins a
    conversation answers nothing.)"""
    messages = read_messages(record)
    for message in messages:
        if message["role"] != "system" and not message["content"].strip():
            raise InputError("an empty turn")
    if "assistant" not in [message["role"] for message in messages[1:]]:
        raise InputError("no answer")
    return messages


def read_messages(record: dict) -> list[dict]:
    """Return the messages of a record. Raises InputError."""
    refuse_unread(record)
    messages = []
    for turn in [*read_history(record), *find_turns(record)]:
        if isinstance(turn, str):  # a turn without a role: user and assistant alternate
            turn = {"role": next_role(messages), "content": turn}
        messages.append(read_turn(turn))
    system = record.get("system") or record.get("system_prompt")
    if system:
        if messages and messages[0]["role"] == "system":
            raise InputError("a system message beside a conversation that has one")
        messages.insert(0, read_turn({"role": "system", "content": system}))
    return messages


def refuse_unread(value: dict) -> None:
    """Raise InputError if a record or a turn holds more of a conversation than is read here,
    such as images. (Each model has a format of its own for tool calls and for their results.)"""
    for key in UNREAD_KEYS:
        if value.get(key):
            raise InputError(f"{key} cannot be read")


def read_history(record: dict) -> list:
    """Return the turns before those of the record itself. Raises InputError."""
    turns = []
    history = record.get("history") or []
    if not isinstance(history, list):
        raise InputError("history is not a list of pairs")
    for exchange in history:
        match exchange:
            case [question, answer]:
                turns += [question, answer]
            case _:
                raise InputError("history is not a list of pairs")
    return turns


def find_turns(record: dict) -> list:
    """Return the turns of a record of any form, as the record has them. Raises InputError."""
    match record:
        case {"messages": list(turns)} | {"conversations": list(turns)} | {"data": list(turns)}:
            return turns
        case {"instruction": str(question), "input": str(more), "output": answer} if more:
            return [f"{question}\n\n{more}", answer]
        case {"instruction": str(question), "output": answer} if not record.get("input"):
            return [question, answer]
    raise InputError("none of messages, data, conversations, and instruction with output")


# --- From a turn to a message ---

UNUSABLE_TURN = "a turn has no role (system, user, assistant) with text as content"
ROLES = {  # by the names that data sets give them
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}


def next_role(messages: list[dict]) -> str:
    """Return the role of the next speaker, assuming that user and assistant alternate."""
    return "assistant" if len(messages) % 2 else "user"


def read_turn(turn: dict) -> dict:
    """Return a turn as a message. Raises InputError."""
    match turn:
        case {"role": str(role), "content": content} | {"from": str(role), "value": content}:
            refuse_unread(turn)
            message = {"role": ROLES.get(role, role), "content": content}
            check_message(message)
            return message
    raise InputError(UNUSABLE_TURN)


def check_message(message: dict) -> None:
    """Raise InputError unless this is a message of a chat."""
    match message:
        case {"role": "system" | "user" | "assistant", "content": str(content)}:
            try:
                content.encode()  # JSON and the command line may hold half a surrogate pair
            except UnicodeError:
                raise InputError("a turn is not valid UTF-8") from None
        case _:
            raise InputError(UNUSABLE_TURN)


# --- From a file to its records ---


class Record(NamedTuple):
    """The text of one JSON object of a file, not parsed yet."""

    place: str  # "line 3" or "record 3", for messages to the user
    text: bytes


def find_records(path: str | Path) -> Iterator[Record]:
    """Yield the records of a file, one per line or all in one JSON array. Raises InputError."""
    if not Path(path).exists():
        raise InputError(f"{path}: no such file")
    with input_errors(f"{path} cannot be read", OSError), open(path, "rb") as file:
        byte_order_mark = rb"\xef\xbb\xbf"  # some programs begin a UTF-8 file with it
        if re.match(rb"(%b)?\s*\[" % byte_order_mark, file.peek()):
            with input_errors(f"{path}: not a JSON array", ValueError, RecursionError):
                records = json.load(file)
            for count, record in enumerate(records, 1):
                yield Record(f"record {count}", json.dumps(record).encode())
        else:
            for count, line in enumerate(file, 1):
                if line.strip():
                    yield Record(f"line {count}", line)
