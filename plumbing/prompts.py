"""Prompts: given or piped in, and fitted into the context."""
from __future__ import annotations

import sys
from typing import Callable

from plumbing.errors import InputError, input_errors


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
