"""Prompts from files, which the benchmark answers and from which synthesis takes questions."""
from __future__ import annotations

from pathlib import Path
from typing import Iterator, NamedTuple

from plumbing.errors import InputError, input_errors
from plumbing.records import find_records, parse_record, read_messages, read_turn


class Prompt(NamedTuple):
    category: str
    turns: list[str]  # the user's messages, in order


def read_prompt_file(path: str | Path) -> list[Prompt]:
    """Read the prompts of a file: {"prompt": text}, Spec-Bench's {"category", "turns"}, or what the
    user says in conversations. Raise InputError if the file or a record is unusable."""
    form = 'expected {"prompt": text}, {"category": name, "turns": [...]} or {"messages": [...]}'
    prompts = []
    for record in find_records(path):
        with input_errors(f"{path}, {record.place}: {form}", InputError):
            prompts.append(parse_prompt(parse_record(record.text)))
    if not prompts:
        raise InputError(f"{path}: no prompts")
    return prompts


def parse_prompt(record: dict) -> Prompt:
    """Return the prompt in a record. Raise InputError if the prompt is unusable."""
    messages = read_any_messages(record)
    if "system" in [message["role"] for message in messages]:
        raise InputError("system messages are not supported in prompts")
    turns = user_turns(messages)
    if not turns or not all(turn.strip() for turn in turns):
        raise InputError("the prompt is empty")
    category = str(record.get("category") or "other")
    if category == "overall":
        raise InputError("the category 'overall' is reserved for the rows of all prompts")
    return Prompt(category, turns)


def read_first_questions(path: str | Path) -> Iterator[str]:
    """Yield the user's first question in each record of a file of conversations or prompts. Leave
    out unusable records. Raise InputError if the file cannot be read."""
    for record in find_records(path):
        try:
            turns = user_turns(read_any_messages(parse_record(record.text)))
        except InputError:
            continue
        if turns and turns[0].strip():
            yield turns[0]


def read_any_messages(record: dict) -> list[dict]:
    """Return the messages of a record of prompts or of a conversation. Raise InputError if it is
    unusable."""
    match record:
        case {"prompt": question}:  # its messages, if it has any, begin with the prompt
            return [read_turn({"role": "user", "content": question})]
        case {"turns": list(questions)}:
            return [read_turn({"role": "user", "content": question}) for question in questions]
    return read_messages(record)


def user_turns(messages: list[dict]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]
