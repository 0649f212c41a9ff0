"""What a person sees of an answer as it comes: its text, perhaps in colors, or every cycle.

A display gets each cycle by `emit`, and `end` when the answer has ended. plumbing/terminal.py draws
what `Trace` records.
"""
from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from app.answers import Origin, TimedCycle
from llama import Sampling, probabilities
from plumbing import terminal
from plumbing.tokenizer import TextStream, Tokenizer

# The colors of tokens with --show.
COLORS = {Origin.TARGET: "", Origin.DRAFT: terminal.GREEN, Origin.UNVERIFIED: terminal.YELLOW}


class Display(Protocol):
    """Shows an answer. The next three classes are displays."""

    def emit(self, cycle: TimedCycle) -> None:
        """Show a cycle, as soon as it is complete."""

    def end(self, text: str) -> None:
        """Show the rest. text: the whole answer."""


class Silent:
    """Shows nothing: with --json only the result counts."""

    def emit(self, cycle: TimedCycle) -> None:
        pass

    def end(self, text: str) -> None:
        pass


@dataclass
class Printer:
    """Prints an answer as it comes, and says when the server is lost and when it is back."""

    stream: TextStream
    show: bool  # print tokens in colors
    offline: bool = False

    def emit(self, cycle: TimedCycle) -> None:
        if cycle.is_offline != self.offline:
            self.offline = cycle.is_offline
            note = "the link is back: the target goes on"
            if self.offline:
                note = "the link is lost: what follows is the drafter's own text, unverified"
            print(f"\n[{note}]", file=sys.stderr)
        for token, origin in zip(cycle.tokens, cycle.origins):
            text = self.stream.add(token)
            text = terminal.printable(text)
            print(terminal.paint(text, COLORS[origin]) if self.show else text, end="", flush=True)

    def end(self, text: str) -> None:
        print(terminal.printable(self.stream.pending_text()), flush=True)


@dataclass
class Trace:
    """Shows every cycle: what was drafted, and which drafted tokens were kept. The section *A
    traced cycle* of plumbing/terminal.py specifies a cycle's record, and has an example."""

    tokenizer: Tokenizer
    sampling: Sampling  # only its temperature and top_p are used
    as_json: bool
    cycles: int = 0
    newest: str = ""  # the text of the answer's newest token

    def __post_init__(self):
        self.stream = TextStream(self.tokenizer)  # of the answer so far

    def emit(self, cycle: TimedCycle) -> None:
        self.cycles += 1
        record = self.record(cycle)
        for token in cycle.tokens:
            self.newest = self.stream.add(token)
        lines = [json.dumps(record)] if self.as_json else terminal.draw_cycle(record)
        print(*lines, sep="\n", flush=True)

    def end(self, text: str) -> None:
        if not self.as_json:
            print(f"\n{terminal.printable(text)}", flush=True)

    def record(self, cycle: TimedCycle) -> dict:
        """Return the record of a cycle."""
        result = cycle.result
        texts = self.texts_after_answer([*result.accepted, result.token])
        record = {
            "cycle": self.cycles,
            "root": self.newest,
            "drafts": self.drafted_nodes(cycle),
            "token": result.token,
            "text": "".join(texts) if cycle.is_offline else texts[-1],
            "control": result.token in self.tokenizer.control_ids.values(),
            "tokens": cycle.tokens,
            "offline": cycle.is_offline,
            "draft_seconds": cycle.draft_seconds,
            "verify_seconds": cycle.verify_seconds,
        }
        if cycle.traffic is not None:
            record["link"] = {"state": result.link, **vars(cycle.traffic)}
        return record

    def texts_after_answer(self, tokens: list[int]) -> list[str]:
        """Return what each token would add to the text of the answer so far: "" if a token ends
        inside a character, and the whole character with the token that completes it."""
        stream = TextStream(self.tokenizer)
        stream.before = list(self.stream.before)
        stream.pending = list(self.stream.pending)
        return [stream.add(token) for token in tokens]

    def drafted_nodes(self, cycle: TimedCycle) -> list[dict]:
        """Return the drafted tokens as the record lists them."""
        draft = cycle.result.draft
        path = cycle.path
        p = None  # the target's distribution after each node, (1 + K, V)
        if cycle.result.logits is not None:
            p = target_distributions(cycle.result.logits, self.sampling)
        nodes = []
        for i, token in enumerate(draft.tokens[1:], start=1):
            parent = draft.parents[i]
            tokens = [draft.tokens[node] for node in draft.paths[i][1:]]
            node = {
                "token": token,
                "text": self.texts_after_answer(tokens)[-1],
                "control": token in self.tokenizer.control_ids.values(),
                "parent": parent - 1,  # node 1 has index 0 in this list
                "q": draft.probabilities[i],
                "p": None if p is None else float(p[parent, token]),
                "accepted": i in path,
                "verdict": verdict(cycle, path, i),
            }
            nodes.append(node)
        return nodes


def target_distributions(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return p for comparison with q: logits (..., V) -> (..., V). At temperature 0 both are the
    distributions at temperature 1, as in `Drafter.distributions`."""
    if sampling.temperature == 0:
        return probabilities(logits, 1.0)
    return probabilities(logits, sampling.temperature, sampling.top_p)


def verdict(cycle: TimedCycle, path: list[int], node: int) -> str:
    """Say what became of a drafted token. path: the nodes that are in the answer, `cycle.path`."""
    draft = cycle.result.draft
    if node in path:
        return "accepted"
    parent = draft.parents[node]
    ended_at_parent = draft.depth(parent) == len(cycle.tokens)  # for example by a stop token
    if parent not in path or ended_at_parent:
        return "not reached"
    if parent == path[-1] and draft.tokens[node] == cycle.result.token:
        return "left out"  # a server had no room for the token (see `ExactVerifier`)
    accepted = set(path) & set(draft.children(parent))
    if draft.q and accepted and node > min(accepted):
        return "not tried"  # drawn siblings are tried in order, and one before it was accepted
    return "rejected"
