"""Records: the JSON objects in a file of conversations or prompts, and the messages in a record.

Six forms of records are read, from files with one JSON object per line or from files that are one
JSON array of objects. Four forms are training data:

    {"messages": [{"role": "user", "content": "Hi"}, ...]}              UltraChat 200k, and others
    {"data": ["Hi", "Hello!", ...]}                                     UltraChat, the original
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}          ShareGPT
    {"instruction": "Translate", "input": "Hi", "output": "Hallo"}      Alpaca

Beside them, {"system": "Be brief."} is a first message, and {"history": [["Hi", "Hello!"], ...]}
are earlier turns. A record with more that belongs to the conversation, such as images, is refused.
Two forms are prompts, which have no answers:

    {"prompt": "Hi"}
    {"category": "maths", "turns": ["Hi", ...]}                         Spec-Bench

A turn is what one speaker says at once. Every form of a turn becomes a message:
{"role": "user", "content": "Hi"}.
"""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Iterator, NamedTuple

from plumbing.errors import InputError, input_errors

# --- Files: the records in them ---

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some programs begin a UTF-8 file with it


class Record(NamedTuple):
    """The text of one JSON object of a file, not parsed yet."""

    place: str  # "line 3" or "record 3", for messages to the user
    offset: int  # where in the file the record begins, in bytes
    text: bytes


def find_records(path: str | Path) -> Iterator[Record]:
    """Yield the records of a file, one per line or all in one JSON array. Raises InputError."""
    with input_errors(f"{path}: cannot be read", OSError), open(path, "rb") as file:
        begin = file.peek()
        if b"\0" in begin:  # as in every compressed or columnar file, and in UTF-16
            raise InputError(f"{path} is not JSON in UTF-8: unpack it or convert it")
        if begin.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
            # `json` counts characters, but offsets are bytes. In latin-1 the two agree, because
            # every byte is one character. Encoding the text again, in `array_records`, restores the
            # bytes of a record.
            yield from array_records(path, file.read().decode("latin-1"))
        else:
            for count, line in enumerate(file, 1):
                if line.strip():
                    yield Record(f"line {count}", file.tell() - len(line), line)


def array_records(path: str | Path, text: str) -> Iterator[Record]:
    """Yield the elements of a JSON array. `text` is the file, decoded as latin-1.

    A comma that is missing or doubled does no harm. Raises InputError for other damage.
    """
    decode = json.JSONDecoder().raw_decode
    between = re.compile(r"[,\s]*")  # what may stand between two elements
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


# --- Messages: what the parts of a conversation become ---

ROLES = ("system", "user", "assistant")


class UnusableRecord(InputError):
    """A record that holds no usable conversation.

    Records with the same fault have the same `reason`, so that they can be counted. The message
    adds a detail of this record.
    """

    def __init__(self, reason: str, detail: object = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def check_message(message: dict) -> None:
    """Check that this is a message of a chat. Otherwise raise UnusableRecord."""
    role = message.get("role")
    content = message.get("content")
    if role not in ROLES or not isinstance(content, str):
        wanted = f"a message needs a role ({', '.join(ROLES)}) and text as content"
        raise UnusableRecord("an unusable turn", f"{wanted}, not {message!r:.100}")
    try:
        content.encode()  # JSON and the command line may hold half a surrogate pair
    except UnicodeError as error:
        raise UnusableRecord("an unusable turn", f"not valid UTF-8: {error}") from None


def next_role(messages: list[dict]) -> str:
    """Return the role of the next speaker, assuming that user and assistant alternate."""
    return "assistant" if len(messages) % 2 else "user"


# --- Records: their conversations as messages ---

ROLE_NAMES = {  # the names that ShareGPT gives to roles
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
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
    """Return a record's JSON object. Raises UnusableRecord."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableRecord("not valid JSON", error) from None
    if not isinstance(record, dict):
        raise UnusableRecord("not a JSON object")
    return record


def read_messages(record: dict) -> list[dict]:
    """Return the messages of a record. Raises UnusableRecord."""
    refuse_unread(record)
    messages = []
    for turn in [*read_history(record), *find_turns(record)]:
        if isinstance(turn, str):  # a turn without a role: user and assistant alternate
            turn = {"role": next_role(messages), "content": turn}
        messages.append(read_turn(turn))
    system = record.get("system") or record.get("system_prompt")
    if system:
        if messages and messages[0]["role"] == "system":
            raise UnusableRecord("a system message beside a conversation that has one")
        messages.insert(0, read_turn({"role": "system", "content": system}))
    return messages


def refuse_unread(value: dict) -> None:
    """Raise UnusableRecord if a record or a turn holds more of a conversation than is read here,
    such as images. (Each model has a format of its own for tool calls and for their results.)"""
    for key in UNREAD_KEYS:
        if value.get(key):
            raise UnusableRecord(f"{key} cannot be read")


def read_history(record: dict) -> list:
    """Return the turns before those of the record itself. Raises UnusableRecord."""
    turns = []
    history = record.get("history") or []
    for exchange in history if isinstance(history, list) else [history]:
        if not isinstance(exchange, list) or len(exchange) != 2:
            raise UnusableRecord("an unusable history", f"{exchange!r:.60}")
        turns += exchange
    return turns


def find_turns(record: dict) -> list:
    """Return the turns of a record of any form, as the record has them. Raises UnusableRecord."""
    match record:
        case {"messages": list(turns)} | {"conversations": list(turns)} | {"data": list(turns)}:
            return turns
        case {"instruction": str(question), "output": answer}:
            more = record.get("input") or ""
            if not isinstance(more, str):
                raise UnusableRecord("an input that is not text", f"{more!r:.60}")
            return [f"{question}\n\n{more}" if more else question, answer]
        case {"turns": list(questions)}:
            return [{"role": "user", "content": question} for question in questions]
        case {"prompt": question}:
            return [{"role": "user", "content": question}]
    raise UnusableRecord(
        "none of messages, data, conversations, instruction with output, turns, and prompt"
    )


def read_turn(turn: dict) -> dict:
    """Return a turn as a message. Raises UnusableRecord."""
    match turn:
        case {"role": str(role), "content": content} | {"from": str(role), "value": content}:
            if isinstance(content, list):
                content = join_parts(content)
        case _:
            raise UnusableRecord("an unusable turn", f"no role or no content in {turn!r:.60}")
    refuse_unread(turn)
    message = {"role": ROLE_NAMES.get(role, role), "content": content}
    check_message(message)
    return message


def join_parts(parts: list) -> str:
    """Return the text of a turn's content that comes in parts, as [{"type": "text", "text": "Hi"},
    ...]. Raises UnusableRecord for a part that is not text, such as an image."""
    texts = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case _:
                raise UnusableRecord("an unusable turn", f"a part that is not text: {part!r:.60}")
    return "".join(texts)


def usable_messages(record: dict) -> list[dict]:
    """Return the messages of a record to train on. Raises UnusableRecord if the record cannot be
    read, has an empty turn (a system message may be empty), or has no answer. (What begins a
    conversation answers nothing.)"""
    messages = read_messages(record)
    for message in messages:
        if message["role"] != "system" and not message["content"].strip():
            raise UnusableRecord("an empty turn")
    if "assistant" not in [message["role"] for message in messages[1:]]:
        raise UnusableRecord("no answer")
    return messages
