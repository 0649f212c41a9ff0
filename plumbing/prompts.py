"""Prompts of a command line (app/): given or piped in, and fitted into the model's context."""
from __future__ import annotations

import sys

from plumbing.errors import InputError, input_errors


def given_or_piped(text: str | None) -> str:
    """Return the prompt `text` or, if it is None, the prompt that is piped in. Raises InputError if
    there is no prompt, or if it is empty or not valid text."""
    if text is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("no prompt: give one with --prompt TEXT, or pipe one in")
        with input_errors("the piped prompt is not valid text", UnicodeError):
            text = sys.stdin.read()
        text = text.removesuffix("\n")  # the line break that `echo` adds
    if not text.strip():
        raise InputError("the prompt is empty")
    try:
        text.encode()  # a command line may hold bytes that are no text
    except UnicodeError:
        raise InputError("the prompt is not valid UTF-8") from None
    return text


def answer_length(context: int, prompt_length: int, max_new_tokens: int) -> int:
    """Return how many new tokens the context has room for, at most max_new_tokens, and print a
    warning if there is room for fewer. All arguments are in tokens.

    Raises InputError if there is no room for a new token.
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
