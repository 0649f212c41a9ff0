"""Prompts: read from a file or from standard input, and fitted into the context."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from plumbing.errors import InputError, input_errors
from plumbing.records import (
    UnusableRecord,
    find_records,
    parse_record,
    read_messages,
    read_turn,
)


def read_prompt(text: str | None) -> str:
    """Return the prompt given or, if it is None, the one piped in. Raises InputError."""
    if text is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("no prompt: give one with --prompt TEXT, or pipe one in")
        with input_errors("the piped prompt is not valid text", UnicodeError):
            text = sys.stdin.read()
        text = text.removesuffix("\n")  # `echo` ends its line with it
    if not text.strip():
        raise InputError("the prompt is empty")
    return text


class Prompt(NamedTuple):
    category: str
    turns: list[str]  # what the user says, one after the other


def read_prompt_file(path: str | Path) -> list[Prompt]:
    """Read the prompts of a file: {"prompt": text}, Spec-Bench's {"category", "turns"}, or what the
    user says in conversations. Raises InputError."""
    form = 'expected {"prompt": text}, {"category": name, "turns": [...]} or {"messages": [...]}'
    prompts = []
    for record in find_records(path):
        with input_errors(f"{path}, {record.place}: {form}", InputError):
            prompts.append(parse_prompt(parse_record(record.text)))
    if not prompts:
        raise InputError(f"{path}: no prompts")
    return prompts


def parse_prompt(record: dict) -> Prompt:
    """Return the prompt in a record. Raises InputError."""
    if "prompt" in record:  # perhaps beside a conversation that begins with it
        messages = [read_turn({"role": "user", "content": record["prompt"]})]
    else:
        messages, _ = read_messages(record)
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
    """Yield what the user asks first in each record of a file of conversations or prompts, without
    the records that are unusable. Raises InputError if the file cannot be read."""
    for record in find_records(path):
        try:
            messages, _ = read_messages(parse_record(record.text))
        except UnusableRecord:
            continue
        turns = user_turns(messages)
        if turns and turns[0].strip():
            yield turns[0]


def user_turns(messages: list[dict]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "user"]


# --- What the context has room for ---


def answer_length(context: int, prompt_length: int, max_new_tokens: int) -> int:
    """Return how many new tokens the context has room for, up to max_new_tokens. Warn if it has
    room for fewer. All three arguments are in tokens.

    Raises InputError if there is room for none.
    """
    room = context - prompt_length
    if room < 1:
        raise InputError(
            f"the prompt has {prompt_length} tokens and the context is {context}: shorten it"
        )
    if room < max_new_tokens:
        warning = f"the context leaves room for {room} new tokens, not {max_new_tokens}"
        print(warning, file=sys.stderr)
    return min(room, max_new_tokens)


def newest_exchanges(
    messages: list[dict], count_tokens: Callable[[list[dict]], int], context: int, room: int
) -> list[dict]:
    """Return the newest messages of a chat that leave `room` tokens of the context for an answer.
    Print how many are left out.

    The messages are question, answer, question, answer, ..., question, without a system message. So
    two at a time are left out: a question and its answer. The last question always stays.
    """
    newest = messages
    length = count_tokens(newest)
    while len(newest) > 1 and length > context - room:
        newest = newest[2:]
        length = count_tokens(newest)
    left_out = (len(messages) - len(newest)) // 2
    # If the last question alone is too long, it is refused later. Then this is no news.
    if left_out and length < context:
        what = "question and its answer"
        if left_out > 1:
            what = f"{left_out} questions and their answers"
        print(f"the context is full: the oldest {what} are left out", file=sys.stderr)
    return newest
