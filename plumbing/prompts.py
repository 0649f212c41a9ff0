"""Prompts: read from a file or from standard input, and fitted into the context."""
from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

from plumbing.errors import InputError, input_errors
from plumbing.records import find_records, read_messages


def read_prompt(text: str | None) -> str:
    """Return the prompt given or, if None, the one piped in. Raises InputError."""
    if text is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("no prompt: give one with --prompt TEXT, or pipe one in")
        with input_errors("the piped prompt is not valid text", UnicodeError):
            text = sys.stdin.read()
        text = text.removesuffix("\n")  # of the line that `echo` writes
    if not text.strip():
        raise InputError("the prompt is empty")
    return text


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


# --- What the context has room for ---


def answer_length(context: int, prompt_length: int, max_new_tokens: int) -> int:
    """Return how many new tokens the context has room for, up to max_new_tokens. Warn if fewer.

    Raises InputError.
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


def newest_turns(
    messages: list[dict], count_tokens: Callable[[list[dict]], int], context: int, room: int
) -> list[dict]:
    """Return the newest of these messages that leave room for an answer of so many tokens. A turn
    is a question and its answer; the last question always stays."""
    newest = messages
    length = count_tokens(newest)
    while len(newest) > 1 and length > context - room:
        newest = newest[2:]
        length = count_tokens(newest)
    left_out = (len(messages) - len(newest)) // 2
    if left_out and length < context:  # else the question alone is too long, and refused
        turns = "turn is" if left_out == 1 else f"{left_out} turns are"
        print(f"the context is full: the oldest {turns} left out", file=sys.stderr)
    return newest
