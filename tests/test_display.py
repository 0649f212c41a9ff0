"""Claims about what --trace shows of every cycle."""
import json
import re
import unicodedata
from collections import Counter
from typing import NamedTuple

import pytest
import torch
from command_line import Screen, command
from tiny_models import PROMPT, ask, new_drafter, new_target, target_alone

from app.answers import TimedCycle, WithDrafts
from app.display import Trace
from app.exact import DetailedResult
from app.loading import load_model
from llama import GenerationConfig, Sampling, probabilities
from moa import Draft, DraftLimits
from plumbing.terminal import GREEN, PLAIN, RED, draw_cycle
from plumbing.tokenizer import TextStream, load_tokenizer

SAMPLED = ["--temperature", "1.2", "--top-p", "0.95"]
TRACES = {
    "chain": ["--draft-length", "5", "--top-p", "0.5"],  # which has no effect on greedy text
    "wide tree": ["--draft-depth", "5", "--draft-top-k", "4", "--draft-tokens", "24"],
    "sampled chain": ["--draft-length", "4", *SAMPLED],
    "sampled tree": ["--draft-depth", "3", "--draft-top-k", "3", "--draft-tokens", "9", *SAMPLED],
    "lookup": ["--lookup", *SAMPLED],
}


class Traced(NamedTuple):
    """An answer as --trace --json prints it, and as --trace draws it."""

    sampled: bool
    prompt: dict
    cycles: list[dict]
    generation: dict
    text: str


@pytest.fixture(scope="module")
def tiny(checkpoint):
    folder = checkpoint[1]
    return load_model(folder), load_tokenizer(folder)


@pytest.fixture(scope="module", params=TRACES)
def traced(request, checkpoint) -> Traced:
    flags = [*checkpoint, "--prompt", "Why?", "--max-new-tokens", 24, "--trace", "--json"]
    flags += TRACES[request.param]
    done = command(*flags)
    assert done.status == 0 and done.err == ""
    prompt, *cycles, generation = [json.loads(line) for line in done.out.splitlines()]
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        for cycle in cycles:
            drawn += draw_cycle(cycle)
    return Traced("--temperature" in flags, prompt, cycles, generation, "\n".join(drawn))


def accepted_tokens(cycle: dict) -> list[int]:
    """Return what a traced cycle would add to the text if no stop token cut it short."""
    path = [draft["token"] for draft in cycle["drafts"] if draft["accepted"]]
    return path + [cycle["token"]]


def test_a_trace_as_json_has_the_prompt_an_object_for_each_cycle_and_the_generations(traced, tiny):
    assert traced.prompt == {"prompt": "Why?", "tokens": tiny[1].chat(ask("Why?"))}
    tokens = []
    for number, cycle in enumerate(traced.cycles, 1):
        assert {"cycle", "drafts", "token", "draft_seconds", "verify_seconds"} < set(cycle)
        assert cycle["cycle"] == number and not cycle["offline"]
        assert cycle["tokens"] == accepted_tokens(cycle)
        tokens += cycle["tokens"]
        for i, draft in enumerate(cycle["drafts"]):
            keys = {"token", "text", "label", "parent", "q", "p", "accepted", "verdict"}
            assert keys == set(draft)
            assert -1 <= draft["parent"] < i
    generation = traced.generation
    assert tokens == generation["tokens"] and len(tokens) == 24
    assert len(traced.cycles) == generation["target_calls"] + 1
    for name in ("draft_seconds", "verify_seconds"):
        total = sum(cycle[name] for cycle in traced.cycles[1:])
        assert total == pytest.approx(generation[name])


def test_a_traced_p_is_the_targets_probability_of_a_draft(traced, tiny):
    target, tokenizer = tiny
    temperature = 1.2 if traced.sampled else 1.0
    top_p = 0.95 if traced.sampled else 1.0
    text = tokenizer.chat(ask("Why?"))
    for cycle in traced.cycles:
        paths = {-1: []}
        for i, draft in enumerate(cycle["drafts"]):
            before = paths[draft["parent"]]
            paths[i] = before + [draft["token"]]
            logits = target(torch.tensor([text + before]))[0, -1]
            p = probabilities(logits, temperature, top_p)[draft["token"]]
            assert draft["p"] == pytest.approx(float(p), abs=1e-4)
        text += accepted_tokens(cycle)


def test_a_traced_text_is_what_the_token_adds_to_the_answer_and_its_path(traced, tiny):
    """Of a character of several tokens, the last one adds all."""
    answer = []
    for cycle in traced.cycles:
        paths = {-1: []}
        for i, draft in enumerate(cycle["drafts"]):
            paths[i] = paths[draft["parent"]] + [draft["token"]]
            stream = TextStream(tiny[1])
            added = [stream.add(token) for token in answer + paths[i]]
            assert draft["text"] == added[-1]
            assert draft["label"] or draft["text"]  # one of both is there to be shown
        answer += cycle["tokens"]


CYCLE = re.compile(
    r"cycle \d+: (?:(\d+) drafted(?: in a chain)?, (\d+) accepted|"
    r"(?:the prompt, )?nothing drafted); "
    r"draft [\d.]+ ms, verification [\d.]+ ms"
)
ROW = re.compile(r'([ │]*)[└├] (".*"|<control>|\S+) +q (\d\.\d\d)  p (\d\.\d\d)  (.*)')
OWN = re.compile(r"  the target's own: (\".*\"|<control>|\S+)")


def drawn(of: dict) -> str:
    """Return how the token of a cycle or of a draft is drawn."""
    return of["label"] or json.dumps(of["text"], ensure_ascii=False)


def rows_of_json(cycle: dict, parent: int = -1, depth: int = 1) -> list[tuple]:
    """Return the drafts in the order drawn: after each token, those that follow it in the tree."""
    rows = []
    parents = [draft["parent"] for draft in cycle["drafts"]]
    is_chain = parents == list(range(-1, len(parents) - 1))
    below = depth if is_chain else depth + 1  # a chain goes straight down
    for i, draft in enumerate(cycle["drafts"]):
        if draft["parent"] == parent:
            rows.append((depth, drawn(draft), f"{draft['q']:.2f}", f"{draft['p']:.2f}"))
            rows += rows_of_json(cycle, i, below)
    return rows


def matches(pattern: re.Pattern, lines: list[str]) -> list[re.Match]:
    found = [pattern.fullmatch(line) for line in lines]
    return [match for match in found if match]


def verdicts_of_json(cycle: dict, sampled: bool) -> Counter:
    """Return how often each verdict is due, by the rules of acceptance."""
    due = Counter()
    drafts = cycle["drafts"]
    path = [-1] + [i for i, draft in enumerate(drafts) if draft["accepted"]]
    for i, draft in enumerate(drafts):
        siblings = [j for j in path[1:] if drafts[j]["parent"] == draft["parent"]]
        if draft["parent"] not in path:
            due["not reached"] += 1
        elif i in path:
            due["accepted"] += 1
        elif sampled and siblings and siblings[0] < i:
            due["not tried"] += 1
        else:
            due["rejected"] += 1
    return due


def test_a_trace_draws_what_its_json_has_and_says_what_became_of_each_draft(traced):
    parts = re.split(r"^(?=cycle )", traced.text, flags=re.MULTILINE)[1:]
    assert len(parts) == len(traced.cycles)
    seen = Counter()
    for cycle, part in zip(traced.cycles, parts):
        lines = part.splitlines()
        drafted, accepted = CYCLE.fullmatch(lines[0]).groups()
        assert int(drafted or 0) == len(cycle["drafts"])
        assert int(accepted or 0) == len(accepted_tokens(cycle)) - 1
        rows = []
        verdicts = Counter()
        for match in matches(ROW, lines):
            indent, text, q, p, verdict = match.groups()
            rows.append((len(indent) // 2, text, q, p))
            verdicts[verdict] += 1
        assert rows == rows_of_json(cycle)
        assert verdicts == verdicts_of_json(cycle, traced.sampled)
        seen += verdicts
        assert [match[1] for match in matches(OWN, lines)] == [drawn(cycle)], part
    assert seen["accepted"]


def test_what_was_drafted_after_a_stop_token_was_not_reached():
    target = new_target(16, sharpness=10.0)
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)  # the target itself
    stop = target_alone(target, 5)[2]  # the second of four drafted tokens
    trace = Trace(load_tokenizer("toy"), Sampling(), as_json=True)
    config = GenerationConfig(20, stop_ids=frozenset([stop]))
    method = WithDrafts(target, drafter, DraftLimits(4))
    *_, last = [trace.record(cycle) for cycle in method.cycles(PROMPT, config)]
    assert last["tokens"][-1] == stop
    verdicts = [draft["verdict"] for draft in last["drafts"]]
    assert verdicts == ["accepted", "accepted", "not reached", "not reached"]


def test_what_was_written_offline_after_a_stop_token_is_not_shown():
    tokenizer = load_tokenizer("toy")
    stop, = tokenizer.stop_ids
    shown, hidden = tokenizer.encode("a b")[:2]
    result = DetailedResult([shown, stop], hidden, None, Draft(shown), link="offline")
    cycle = TimedCycle(result, [shown, stop], draft_seconds=0.0, verify_seconds=0.0)
    record = Trace(tokenizer, Sampling(), as_json=True).record(cycle)
    assert record["text"] == tokenizer.decode([shown])
    assert record["token"] == stop and record["label"] == "<control>"


# --- On a screen ---


def columns(line: str) -> int:
    """Return how many columns a line takes on a terminal."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in line)
    return len(line) + wide


def test_a_trace_fits_80_columns(traced):
    for line in traced.text.splitlines():
        assert columns(line) <= 80


def test_a_trace_of_a_long_chain_fits_80_columns_too_and_is_plain_text_in_a_pipe(checkpoint):
    flags = [*checkpoint, "--prompt", "Why?", "--max-new-tokens", 40]
    answer = command(*flags).out
    done = command(*flags, "--draft-length", 30, "--trace")
    assert "\033" not in done.out
    assert done.out.endswith(f"\n{answer}")  # after the cycles
    rows = matches(ROW, done.out.splitlines())
    assert len(rows) >= 30
    for row in rows:
        assert columns(row[0]) <= 80, row[0]


def test_a_trace_of_the_default_target_fits_80_columns_too(smollm2, packed_smollm2, capsys):
    tokenizer = smollm2[1]
    limits = DraftLimits(12, top_k=3, total_tokens=24)
    config = GenerationConfig(8, temperature=1.5)
    trace = Trace(tokenizer, config.new_sampling("cpu"), as_json=False)
    prompt = tokenizer.chat(ask("请用一句话介绍北京。"))
    for cycle in WithDrafts(*packed_smollm2, limits).cycles(prompt, config):
        trace.emit(cycle)
    lines = capsys.readouterr().out.splitlines()
    assert len(matches(ROW, lines)) >= 24
    for line in lines:
        assert columns(line) <= 80


def test_a_trace_on_a_terminal_colors_what_is_accepted_and_what_is_not(checkpoint, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    flags = [*checkpoint, "--prompt", "Why?", "--max-new-tokens", 40, "--trace", *SAMPLED]
    out = command(*flags, stdout=Screen).out
    for line in out.splitlines():
        for verdict, color in (("accepted", GREEN), ("rejected", RED)):
            if line.endswith(verdict + PLAIN):
                assert line.endswith(color + verdict + PLAIN)
    assert GREEN in out and RED in out
