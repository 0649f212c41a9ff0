"""What a person sees of an answer as it comes: its text, perhaps in colors, or every cycle.

A display gets each cycle by `emit`, and `end` when the answer has ended. plumbing/terminal.py draws
what `Trace` records.
"""
from __future__ import annotations

import json

from app.answers import Origin, TimedCycle
from llama import Sampling, probabilities
from plumbing.terminal import GREEN, YELLOW, draw_cycle, paint, printable
from plumbing.tokenizer import TextStream, Tokenizer

# The colors of tokens with --show.
COLORS = {Origin.TARGET: "", Origin.DRAFT: GREEN, Origin.UNVERIFIED: YELLOW}


class Display:
    """Shows nothing, as with --json. The other two displays show an answer."""

    def emit(self, cycle: TimedCycle) -> None:
        """Show a cycle, as soon as it is complete."""

    def end(self, text: str) -> None:
        """Show the rest. text: the whole answer."""


class Printer(Display):
    """Prints an answer as it comes."""

    def __init__(self, tokenizer: Tokenizer, show: bool):
        """show: print tokens in colors."""
        self.stream = TextStream(tokenizer)
        self.show = show

    def emit(self, cycle: TimedCycle) -> None:
        for token, origin in zip(cycle.tokens, cycle.origins):
            text = printable(self.stream.add(token))
            print(paint(text, COLORS[origin]) if self.show else text, end="", flush=True)

    def end(self, text: str) -> None:
        print(printable(self.stream.pending_text()), flush=True)


class Trace(Display):
    """Shows every cycle: what was drafted, and which drafted tokens were kept. The section *A
    traced cycle* of plumbing/terminal.py specifies a cycle's record, and has an example."""

    def __init__(self, tokenizer: Tokenizer, sampling: Sampling, as_json: bool):
        """sampling: only its temperature and top_p are used."""
        # A greedy draft has the q of temperature 1 (see `Drafter.distributions`), and so its p.
        self.sampling = sampling if sampling.temperature > 0 else Sampling(1.0)
        self.as_json = as_json
        self.tokenizer = tokenizer
        self.control_ids = set(tokenizer.control_ids.values())
        self.stream = TextStream(tokenizer)  # of the answer so far
        self.newest = ""  # the text of the answer's newest token
        self.newest_label = ""
        self.cycles = 0

    def emit(self, cycle: TimedCycle) -> None:
        self.cycles += 1
        record = self.record(cycle)
        for token in cycle.tokens:
            self.newest = self.stream.add(token)
            self.newest_label = self.label(token, self.newest)
        lines = [json.dumps(record)] if self.as_json else draw_cycle(record)
        print(*lines, sep="\n", flush=True)

    def end(self, text: str) -> None:
        if not self.as_json:
            print(f"\n{printable(text)}", flush=True)

    def record(self, cycle: TimedCycle) -> dict:
        """Return the record of a cycle."""
        result = cycle.result
        tokens = [*result.accepted, result.token]
        if cycle.is_offline:
            tokens = cycle.tokens  # those after a stop token are not in the answer
        texts = self.texts_after_answer(tokens)
        record = {
            "cycle": self.cycles,
            "root": self.newest,
            "root_label": self.newest_label,
            "drafts": self.drafted_nodes(cycle),
            "token": tokens[-1],
            "text": "".join(texts) if cycle.is_offline else texts[-1],
            "label": self.label(tokens[-1], texts[-1]),
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

    def label(self, token: int, text: str) -> str:
        """Return what to show of a token without a text, else ""."""
        if token in self.control_ids:
            return "<control>"
        return "" if text else self.tokenizer.escaped_bytes(token)

    def drafted_nodes(self, cycle: TimedCycle) -> list[dict]:
        """Return the drafted tokens as the record lists them."""
        draft = cycle.result.draft
        verdicts = find_verdicts(cycle)
        p = None  # the target's distribution after each node, (1 + K, V)
        if cycle.result.logits is not None:
            p = probabilities(
                cycle.result.logits, self.sampling.temperature, self.sampling.top_p
            )
        nodes = []
        for i, token in enumerate(draft.tokens[1:], start=1):
            parent = draft.parents[i]
            tokens = [draft.tokens[node] for node in draft.paths[i][1:]]
            text = self.texts_after_answer(tokens)[-1]
            node = {
                "token": token,
                "text": text,
                "label": self.label(token, text),
                "parent": parent - 1,  # node 1 has index 0 in this list
                "q": draft.probabilities[i],
                "p": None if p is None else float(p[parent, token]),
                "accepted": verdicts[i] == "accepted",
                "verdict": verdicts[i],
            }
            nodes.append(node)
        return nodes


def find_verdicts(cycle: TimedCycle) -> list[str]:
    """Say of each node of a cycle's draft what became of it."""
    draft = cycle.result.draft
    path = draft.path_of(cycle.tokens[:cycle.origins.count(Origin.DRAFT)])  # in the answer
    verdicts = []
    for node, parent in enumerate(draft.parents):
        accepted = set(path).intersection(draft.children(parent))  # one node, or none
        verdict = "rejected"
        if node in path:
            verdict = "accepted"
        elif parent not in path or draft.depth(parent) == len(cycle.tokens):
            verdict = "not reached"  # or the answer ends at the parent, for example by a stop token
        elif not accepted and draft.tokens[node] == cycle.result.token:
            verdict = "left out"  # a server had no room for the token (see `ExactVerifier`)
        elif draft.q and accepted and node > min(accepted):
            verdict = "not tried"  # drawn siblings are tried in order, and one before was accepted
        verdicts.append(verdict)
    return verdicts
