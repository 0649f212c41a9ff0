"""What a person sees in the terminal beside an answer's text, and what they type in a chat.

app/chat.py and app/display.py call these functions, with texts, numbers and dicts: nothing here
knows a model. The sections follow one answer: a line says that the target is being loaded, or the
prompt read, the text is printed, perhaps in colors, with --trace every cycle is drawn, and the
statistics come last. The last section reads the questions of a chat.
"""
from __future__ import annotations

import json
import os
import select
import sys
from contextlib import contextmanager, suppress
from typing import Collection, Iterator

# --- While a model is loaded, and a prompt is read ---


@contextmanager
def waiting_line(text: str) -> Iterator[None]:
    """Show a line on stderr, if that is a terminal, until the block ends."""
    if not sys.stderr.isatty():
        yield
        return
    print(text, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)  # erases the line


# --- Text and colors ---

GREEN = "\033[32m"
YELLOW = "\033[33m"
RED = "\033[31m"
PLAIN = "\033[0m"

# Each control character of ASCII has a picture in Unicode: that of "\x1b" (escape) is "␛". The
# control characters from 128 on have none. A line break and a tab do no harm.
PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= {127: "␡"} | dict.fromkeys(range(128, 160), "\ufffd")


def printable(text: str) -> str:
    """Return a model's text as it may be sent to stdout.

    A terminal obeys control characters: "\\x1b[2J" would clear the screen, and others may even type
    on the user's behalf. On a terminal their pictures are shown instead. A file or a pipe gets the
    text as it is.
    """
    return text.translate(PICTURES) if sys.stdout.isatty() else text


def shows_colors() -> bool:
    """Return whether stdout is a terminal, and NO_COLOR is not set (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def paint(text: str, color: str) -> str:
    """Put text in a color, if stdout shows colors."""
    if not color or not text or not shows_colors():
        return text
    return color + text + PLAIN


# --- A traced cycle ---
#
# `Trace` of app/display.py makes a *record* of each cycle. --trace draws the record, in
# `draw_cycle`, and --trace --json prints it. A record is a dict with these keys:
#
#     cycle             the number of the cycle, from 1
#     root              the text of the root, the token that the draft follows
#     root_label        the root's label, see below
#     drafts            a dict for each drafted token, as below
#     token             the target's own token; offline, the drafter's last token
#     text              the text of `token`; offline, of all tokens of the cycle
#     label             "", unless `token` has no text: "<control>" of a control token, such as the
#                       one that ends an answer, or the bytes of a part of a character
#     tokens            the new tokens of the answer
#     offline           whether the server was out of reach, and the drafter wrote the tokens alone
#     draft_seconds     how long drafting took
#     verify_seconds    how long verification took
#     link              only with a server: the state of the connection, and the cycle's traffic
#
# Here is a dict of `drafts`, and part of a drawing:
#
#     {"token": 2, "text": " in", "label": "", "parent": -1, "q": 0.75, "p": 0.6,
#      "accepted": true, "verdict": "accepted"}
#
#     " lies"
#     ├ " in"                      q 0.75  p 0.60  accepted
#     │ └ " the"                   q 0.80  p 0.40  rejected
#     └ " within"                  q 0.08  p 0.11  not tried
#
# `parent` is an index of `drafts`, or -1 for the root. q and p are the probabilities of the token
# after its parent, by the drafter and by the target. A server does not send p, which is then None.
# A token that ends inside a character of several bytes has the text "" and a label like \xf0\x9f,
# and the token that completes the character has all of it. The values of `verdict` are those of the
# function `find_verdicts` of app/display.py.


def draw_cycle(record: dict) -> Iterator[str]:
    """Draw a cycle for a person, line by line. A draft of the default size fits 80 columns."""
    drafts = record["drafts"]
    accepted = sum(node["accepted"] for node in drafts)
    # A chain goes straight down, however long it is: an indent for each level would not fit.
    is_chain = all(node["parent"] == i - 1 for i, node in enumerate(drafts))
    shape = " in a chain" if is_chain and len(drafts) > 1 else ""
    done = f"{len(drafts)} drafted{shape}, {accepted} accepted"
    if not drafts:
        done = "nothing drafted"
    if record["cycle"] == 1:
        done = "the prompt, nothing drafted"
    yield (
        f"cycle {record['cycle']}: {done}; "
        f"draft {1e3 * record['draft_seconds']:.1f} ms, "
        f"verification {1e3 * record['verify_seconds']:.1f} ms"
    )
    if "link" in record:
        link = record["link"]
        yield (
            f"  link: {link['state']}, {link['bytes_up']} bytes up, {link['bytes_down']} down, "
            f"{1e3 * link['network_seconds']:.0f} ms"
        )
    if drafts:
        yield f"  {quote(record['root'], record['root_label'])}"
        yield from draw_branch(drafts, parent=-1, indent="  ", is_chain=is_chain)
    if record["offline"]:
        yield paint("  offline: the drafter alone wrote, unverified,", YELLOW)
        yield paint(f"  {printable(json.dumps(record['text'], ensure_ascii=False))}", YELLOW)
    elif len(record["tokens"]) > accepted:  # else an accepted stop token ended the answer
        yield f"  the target's own: {quote(record['text'], record['label'])}"


def draw_branch(drafts: list[dict], parent: int, indent: str, is_chain: bool) -> Iterator[str]:
    """Draw the drafted tokens that follow a parent, and below each token those that follow it."""
    children = [i for i, node in enumerate(drafts) if node["parent"] == parent]
    for i in children:
        node = drafts[i]
        last = i == children[-1]
        label = f"{indent}{'└' if last else '├'} {quote(node['text'], node['label'])}"
        numbers = f"q {node['q']:.2f}"
        if node["p"] is not None:
            numbers += f"  p {node['p']:.2f}"
        color = {"accepted": GREEN, "rejected": RED}.get(node["verdict"], "")
        yield f"{label:<32} {numbers}  {paint(node['verdict'], color)}"
        below = indent
        if not is_chain:
            below += "  " if last else "│ "
        yield from draw_branch(drafts, i, below, is_chain)


def quote(text: str, label: str = "") -> str:
    """Put a token's text in quotes, cut to what a line has room for. A token without a text is
    shown by its label."""
    if label:
        return label
    shown = text if len(text) <= 16 else text[:15] + "…"
    return printable(json.dumps(shown, ensure_ascii=False))


# --- The statistics of an answer ---


def why_stopped(tokens: list[int], stop_ids: Collection[int], max_new_tokens: int) -> str:
    """Return why an answer ended. Call only for answers that ended by themselves."""
    if tokens[-1] in stop_ids:
        return "stop token"
    # An answer without a stop token has `max_new_tokens`, or as many as the context had room for.
    return "context" if len(tokens) < max_new_tokens else "max-new-tokens"


def draw_statistics(statistics: dict) -> str:
    """Draw what a reader wants to know of an answer's statistics as a line. (--json has all.)"""
    count = statistics["new_tokens"]
    stopped = statistics["stopped"]
    if stopped == "max-new-tokens":
        stopped = f"stopped at --max-new-tokens {count}"
    if stopped == "context":
        stopped = "stopped at the end of the context"
    line = (
        f"{count} {'token' if count == 1 else 'tokens'} ({stopped}), "
        f"{statistics['tokens_per_second']:.3g} tokens per second"
    )
    if statistics["target_calls"]:  # else the first token, which nobody drafts, ended the answer
        line += f", acceptance length {statistics['acceptance_length']:.3g}"
    if "bytes_up" in statistics:
        line += f", {statistics['bytes_up']} bytes up, {statistics['bytes_down']} down"
    return line


# --- The questions of a chat ---

PASTE_SECONDS = 0.05  # a line that follows this soon after the line before it was pasted, not typed


def read_questions() -> Iterator[str]:
    """Yield the questions of a chat, until one is "exit" or "quit" or the input ends. Ctrl-C drops
    a question that is being typed."""
    with suppress(ImportError):
        import readline  # noqa: F401 (lets a terminal edit lines and recall them)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are not valid text become "\ufffd"
    while True:
        try:
            question = read_question()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        if question.strip() in ("exit", "quit"):
            return
        if question.strip():
            yield question


def read_question() -> str:
    """Read a line, or all lines of a text that is pasted at once. Raises EOFError at the end of the
    input."""
    lines = [read_line()]
    with suppress(EOFError):  # what was pasted before the end is a question, too
        while more_is_pasted():
            lines.append(read_line())
    return "\n".join(lines)


def read_line() -> str:
    """Read a line. The prompt "> " must not mix with the answers on stdout: if stdout is not a
    terminal, the prompt goes to stderr."""
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()


def more_is_pasted() -> bool:
    """Return whether one more line is there already."""
    ready, _, _ = select.select([sys.stdin], [], [], PASTE_SECONDS)
    return bool(ready)
