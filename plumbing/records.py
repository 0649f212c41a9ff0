"""Records: the JSON objects in a file of conversations or prompts, and the messages in a record.

Six forms of records are read, from files with one JSON object per line or from files that are one
JSON array of objects. Four forms are training data:

    {"messages": [{"role": "user", "content": "Hi"}, ...]}              UltraChat 200k, and others
    {"data": ["Hi", "Hello!", ...]}                                     UltraChat, the original
    {"conversations": [{"from": "human", "value": "Hi"}, ...]}          ShareGPT
    {"instruction": "Translate", "input": "Hi", "output": "Hallo"}      Alpaca

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

OTHER_FORMATS = {  # the first bytes of a file; what it is, and what to do with it
    b"PAR1": "Parquet: convert it with pandas (read_parquet, then to_json with lines=True)",
    b"\x1f\x8b": "gzip: unpack it with gunzip",
    b"BZh": "bzip2: unpack it with bunzip2",
    b"\xfd7zXZ": "xz: unpack it with unxz",
    b"\x28\xb5\x2f\xfd": "zstd: unpack it with unzstd",
    b"PK\x03\x04": "a zip archive: unpack it with unzip",
    b"\xff\xfe": "UTF-16: convert it with iconv -f UTF-16 -t UTF-8",
}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some programs begin a UTF-8 file with it


class Record(NamedTuple):
    """The text of one JSON object of a file, not parsed yet."""

    place: str  # "line 3" or "record 3", for messages to the user
    offset: int  # where in the file the record begins, in bytes
    text: bytes


def find_records(path: str | Path) -> Iterator[Record]:
    """Yield the records of a file, one per line or all in one JSON array. Raises InputError."""
    if Path(path).is_dir():
        raise InputError(f"{path} is a folder: name the files in it, as in {path}/*.jsonl")
    with input_errors(f"{path}: cannot be read", OSError), open(path, "rb") as file:
        begin = file.peek()
        for magic, what in OTHER_FORMATS.items():
            if begin.startswith(magic):
                raise InputError(f"{path} is not JSON but {what}")
        if b"\0" in begin:
            raise InputError(f"{path} is a binary file, not JSON")
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


def check_message(message: dict) -> None:
    """Check that this is a message of a chat. Otherwise raise InputError."""
    role = message.get("role")
    content = message.get("content")
    if role not in ROLES or not isinstance(content, str):
        raise InputError(
            f"a message needs a role ({', '.join(ROLES)}) and text as content, "
            f"not {message!r:.100}"
        )
    with input_errors("the text is not valid UTF-8", UnicodeError):
        content.encode()  # JSON and the command line may hold half a surrogate pair


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
TOOL_ROLES = ("tool", "function", "tool_call", "function_call", "observation")


class UnusableRecord(InputError):
    """A record that holds no usable conversation.

    Records with the same fault have the same `reason`, so that they can be counted. The message
    adds a detail of this record.
    """

    def __init__(self, reason: str, detail: object = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def parse_record(text: bytes) -> dict:
    """Return a record's JSON object. Raises UnusableRecord."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnusableRecord("not valid JSON", error) from None
    if not isinstance(record, dict):
        raise UnusableRecord("not a JSON object")
    return record


def read_messages(record: dict) -> tuple[list[dict], bool]:
    """Return the messages of a record, and whether they end before a turn that uses a tool.

    Each model has a format of its own for tool calls and for their results. A conversation is
    therefore read only up to its first tool call. Raises UnusableRecord.
    """
    messages = []
    for turn in find_turns(record):
        if isinstance(turn, str):  # a turn without a role: user and assistant alternate
            turn = {"role": next_role(messages), "content": turn}
        if not isinstance(turn, dict):
            raise UnusableRecord("an unusable turn", f"{turn!r:.60}")
        if uses_tool(turn):
            return messages, True
        messages.append(read_turn(turn))
    return messages, False


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


def uses_tool(turn: dict) -> bool:
    """Return whether a turn calls a tool or is what a tool returned."""
    role = turn.get("role", turn.get("from"))
    return bool(turn.get("tool_calls") or turn.get("function_call") or role in TOOL_ROLES)


def read_turn(turn: dict) -> dict:
    """Return a turn as a message. Raises UnusableRecord."""
    match turn:
        case {"role": str(role), "content": content} | {"from": str(role), "value": content}:
            if isinstance(content, list):
                content = join_parts(content)
            elif content is None:
                content = ""
            message = {"role": ROLE_NAMES.get(role, role), "content": content}
        case _:
            raise UnusableRecord("an unusable turn", f"no role or no content in {turn!r:.60}")
    try:
        check_message(message)
    except InputError as error:
        raise UnusableRecord("an unusable turn", error) from None
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


def usable_messages(record: dict) -> tuple[list[dict], list[str]]:
    """Return the messages of a record to train on, and descriptions of what was cut.

    Answers before the first question are left out. The conversation ends before the first turn that
    uses a tool or is empty. (A system message may be empty.) Raises UnusableRecord if the record
    cannot be read, or if no answer is left.
    """
    messages, ends_early = read_messages(record)  # early: at a turn that uses a tool
    kept = []
    cuts = []
    has_question = False
    for message in messages:
        role = message["role"]
        if role != "system" and not message["content"].strip():
            ends_early = True
            break
        if role == "user":
            has_question = True
        if role == "assistant" and not has_question:
            cuts.append("answers left out because no question comes before them")
        else:
            kept.append(message)
    if ends_early:
        cuts.append("conversations cut at a turn that is empty or uses a tool")
    if "assistant" not in [message["role"] for message in kept]:
        raise UnusableRecord("no answer")
    return kept, cuts
