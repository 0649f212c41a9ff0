"""The terminal: what a person sees there beside an answer's text, and what they type in a chat.

The sections follow one answer. While its prompt is read, progress is shown. When the answer has
ended, its statistics are printed. With --trace every cycle is drawn. The last section reads the
questions of a chat. All of them work with texts, numbers and dicts: nothing here knows a model.
"""
from __future__ import annotations

import json
import os
import select
import sys
from threading import Timer
from typing import Collection, Iterator

from tqdm import tqdm

GREEN = "\033[32m"
YELLOW = "\033[33m"
RED = "\033[31m"
PLAIN = "\033[0m"


def paint(text: str, color: str) -> str:
    """Put text in a color, if stdout is a terminal and NO_COLOR is not set (no-color.org)."""
    if not color or not text or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return color + text + PLAIN


# --- While a prompt is read ---

LONG_PROMPT = 256  # tokens: a prompt of this length or more has a progress bar
PATIENCE = 1.0  # seconds to wait for a server in silence


class PromptBar:
    """A bar while a prompt of `length` tokens is read on this machine, if the prompt is long."""

    def __init__(self, length: int):
        self.bar = tqdm(
            total=length,
            desc="reading the prompt",
            unit=" tokens",
            leave=False,
            disable=length < LONG_PROMPT,
        )

    def update(self, tokens: int) -> None:
        """Show that so many more tokens have been read, or as many as were left."""
        self.bar.update(min(tokens, self.bar.total - self.bar.n))

    def close(self) -> None:
        self.bar.close()


class WaitingNote:
    """A line of text while a server reads a prompt, if that takes longer than PATIENCE. A server
    does not say how far it has read."""

    def __init__(self):
        note = "connecting, and waiting for the server to read the prompt ..."
        self.timer = Timer(PATIENCE, print, [note], {"file": sys.stderr})
        self.timer.start()

    def close(self) -> None:
        self.timer.cancel()


# --- The statistics of an answer ---


def why_stopped(tokens: list[int], stop_ids: Collection[int], max_new_tokens: int) -> str:
    """Return why an answer ended. Call only for answers that ended by themselves."""
    if tokens[-1] in stop_ids:
        return "stop token"
    # An answer without a stop token has `max_new_tokens`, or as many as the context had room for.
    return "context" if len(tokens) < max_new_tokens else "max-new-tokens"


def draw_statistics(statistics: dict) -> str:
    """Draw what a reader wants to know of an answer's statistics as a line. (--json has all.)"""
    parts = [f"{statistics['new_tokens']} tokens"]
    if statistics["stopped"] != "stop token":
        parts[0] += f" ({statistics['stopped']})"
    parts.append(f"{statistics['tokens_per_second']:.3g} tokens per second")
    parts.append(f"acceptance length {statistics['acceptance_length']:.3g}")
    if "bytes_up" in statistics:
        parts.append(f"{statistics['bytes_up']} bytes up, {statistics['bytes_down']} down")
    return ", ".join(parts)


# --- A traced cycle ---
#
# `Trace` of app/display.py makes a *record* of each cycle. --trace draws the record, in
# `draw_cycle`, and --trace --json prints it. A record is a dict with these keys:
#
#     cycle             the number of the cycle, from 1
#     root              the text of the root, the token that the draft follows
#     drafts            a dict for each drafted token, as below
#     token             the target's own token; offline, the drafter's last token
#     text              the text of `token`; offline, of all tokens of the cycle
#     tokens            the new tokens of the answer
#     offline           whether the server was out of reach, and the drafter wrote the tokens alone
#     draft_seconds     how long drafting took
#     verify_seconds    how long verification took
#     link              only with a server: the state of the connection, and the cycle's traffic
#
# Here is a dict of `drafts`, and part of a drawing:
#
#     {"token": 2, "text": " in", "parent": -1, "q": 0.75, "p": 0.6, "accepted": true,
#      "verdict": "accepted"}
#
#     " lies"
#     ├ " in"                      q 0.75  p 0.60  accepted
#     │ └ " the"                   q 0.80  p 0.40  rejected
#     └ " within"                  q 0.08  p 0.11  not tried
#
# `parent` is an index of `drafts`, or -1 for the root. q and p are the probabilities of the token
# after its parent, by the drafter and by the target. A server does not send p, which is then None.
# The values of `verdict` are those of the function `verdict` of app/display.py.


def draw_cycle(record: dict) -> Iterator[str]:
    """Draw a cycle for a person, line by line. A draft of the default size fits 80 columns."""
    drafts = record["drafts"]
    accepted = sum(node["accepted"] for node in drafts)
    times = f"draft {1e3 * record['draft_seconds']:.1f} ms"
    times += f", verification {1e3 * record['verify_seconds']:.1f} ms"
    yield f"cycle {record['cycle']}: {len(drafts)} drafted, {accepted} accepted; {times}"
    if "link" in record:
        link = record["link"]
        traffic = f"{link['bytes_up']} bytes up, {link['bytes_down']} down"
        yield f"  link: {link['state']}, {traffic}, {1e3 * link['network_seconds']:.0f} ms"
    if drafts:
        # A chain goes straight down, however long it is: an indent for each level would not fit.
        is_chain = all(node["parent"] == i - 1 for i, node in enumerate(drafts))
        yield f"  {quote(record['root'])}"
        yield from draw_branch(drafts, parent=-1, indent="  ", is_chain=is_chain)
    if record["offline"]:
        yield paint("  offline: the drafter alone wrote, unverified,", YELLOW)
        yield paint(f"  {json.dumps(record['text'], ensure_ascii=False)}", YELLOW)
    elif len(record["tokens"]) > accepted:  # else an accepted stop token ended the answer
        yield f"  the target's own: {quote(record['text'])}"


def draw_branch(drafts: list[dict], parent: int, indent: str, is_chain: bool) -> Iterator[str]:
    """Draw the drafted tokens that follow a parent, and below each token those that follow it."""
    children = [i for i, node in enumerate(drafts) if node["parent"] == parent]
    for i in children:
        node = drafts[i]
        last = i == children[-1]
        label = f"{indent}{'└' if last else '├'} {quote(node['text'])}"
        numbers = f"q {node['q']:.2f}"
        if node["p"] is not None:
            numbers += f"  p {node['p']:.2f}"
        color = {"accepted": GREEN, "rejected": RED}.get(node["verdict"], "")
        yield f"{label:<32} {numbers}  {paint(node['verdict'], color)}"
        below = indent
        if not is_chain:
            below += "  " if last else "│ "
        yield from draw_branch(drafts, i, below, is_chain)


def quote(text: str) -> str:
    """Put a token's text in quotes, cut to what a line has room for. An empty text is shown as
    "<end>": control tokens, such as the one that ends an answer, decode to an empty text."""
    shown = text if len(text) <= 16 else text[:15] + "…"
    return json.dumps(shown or "<end>", ensure_ascii=False)


# --- A chat ---

PASTE_SECONDS = 0.05  # a line that follows this soon after the line before it was pasted, not typed


def read_questions() -> Iterator[str]:
    """Yield the questions of a chat, until one is "exit" or "quit" or the input ends. Ctrl-C drops
    a question that is being typed."""
    try:
        import readline  # noqa: F401 (lets a terminal edit lines and recall them)
    except ImportError:
        pass
    ended = False
    while not ended:
        lines = []
        try:
            lines.append(read_line())
            while more_is_pasted():
                lines.append(read_line())
        except EOFError:
            ended = True
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        except UnicodeError as error:
            print(f"error: that line is not valid text: {error}", file=sys.stderr)
            continue
        question = "\n".join(lines)
        if question.strip() in ("exit", "quit"):
            return
        if question.strip():
            yield question
    print(file=sys.stderr)


def read_line() -> str:
    """Read a line. The prompt "> " must not mix with the answers on stdout: if stdout is not a
    terminal, the prompt goes to stderr."""
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()


def more_is_pasted() -> bool:
    """Return whether one more line is there already. All lines of a pasted text are one
    question."""
    try:
        ready, _, _ = select.select([sys.stdin], [], [], PASTE_SECONDS)
    except OSError:  # Windows cannot tell, so every line is a question there
        return False
    return bool(ready)
