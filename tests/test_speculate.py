"""Draft, verify, accept: at temperature 0 the target's own tokens, and what a user sees of it.

That above temperature 0 the text is distributed as the target's own is in test_losslessness.py.
"""
import contextlib
import copy
import io
import itertools
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import traceback
import unicodedata
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT
from tiny_models import PROMPT, WORDS, ask, new_drafter, new_target, target_alone

import speculate
from llama import (
    GenerationConfig,
    InputError,
    Llama,
    Sampling,
    Tokenizer,
    generate,
    load_model,
    load_tokenizer,
    probabilities,
    run_command,
)
from moa import (
    Draft,
    Drafter,
    DraftState,
    MemoryUpdate,
    TreeConfig,
    load_drafter,
    pack_together,
    save_drafter,
    to_bfloat16,
)
from speculate import (
    CHAIN,
    GREEN,
    PLAIN,
    RED,
    TREE,
    ChainBatch,
    Cycle,
    Generation,
    Method,
    Models,
    Origin,
    Prompt,
    accept_greedy,
    acceptance_length,
    bench,
    local_methods,
    print_table,
    read_prompts,
    summarize,
)

CHAIN_OF_4 = TreeConfig(4)
TREE_OF_8 = TreeConfig(4, top_k=2, total_tokens=8)


# --- Greedy acceptance ---


def new_draft(tokens: list[int], parents: list[int]) -> Draft:
    draft = Draft(0)
    for token, parent in zip(tokens, parents):
        draft.add(token, parent, probability=1.0)
    return draft


def chain(*tokens: int) -> Draft:
    return new_draft(list(tokens), list(range(len(tokens))))


CHOICES = [
    (chain(3, 1, 4), [3, 1, 4, 1], [0, 1, 2, 3], 1),
    (chain(3, 1, 0), [3, 1, 4, 1], [0, 1, 2], 4),
    (chain(3, 0, 4), [3, 1, 4, 1], [0, 1], 1),
    (chain(0, 1, 4), [3, 1, 4, 1], [0], 3),
    (chain(), [3], [0], 3),
]
BRANCHES = new_draft([3, 1, 4, 4, 2], [0, 0, 1, 2, 2])
CHOICES += [
    (BRANCHES, [1, 0, 4, 0, 2, 3], [0, 2, 4], 2),  # not the 4 of the other branch
    (BRANCHES, [1, 0, 2, 0, 2, 3], [0, 2, 5], 3),
    (BRANCHES, [3, 0, 2, 0, 2, 3], [0, 1], 0),
]


@pytest.mark.parametrize("draft, choices, path, token", CHOICES)
def test_greedy_acceptance_follows_the_targets_choices_as_far_as_they_were_drafted_then_takes_one(
    draft, choices, path, token
):
    acceptance = accept_greedy(choices, draft)
    assert (acceptance.path, acceptance.token) == (path, token)


# --- Whole answers at temperature 0: the target's own tokens ---

EAGLE = dict.fromkeys(
    ["use_layer_self_attention", "use_cross_attention", "use_self_attention"], False
)
TREES = [
    TreeConfig(1),
    TreeConfig(4),
    TreeConfig(8),
    TreeConfig(1, top_k=2, total_tokens=5),
    TREE_OF_8,
    TreeConfig(3, top_k=4, total_tokens=30),
    TreeConfig(6, top_k=4, total_tokens=8),  # expands more leaves than it proposes tokens
    TREE,
    CHAIN,
]


@pytest.mark.parametrize(
    "choices",
    [
        dict(target_layer_inference=0),
        dict(target_layer_inference=2),
        dict(use_layer_self_attention=False),
        dict(use_cross_attention=False),
        dict(use_cross_attention=False, target_layer_inference=2),
        dict(use_layer_self_attention=False, use_cross_attention=False),
        EAGLE,
        dict(draft_vocabulary=(0, 5, 7, 11)),
        dict(target_layer_inference=4, likeness=0.8),
        dict(target_layer_inference=4, likeness=1.0),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_the_target_alone(choices):
    target = new_target(16)
    drafter = new_drafter(target, **choices)
    alone = target_alone(target, 20)
    for tree in TREES:
        assert Method(target, drafter, tree).answer(PROMPT, GenerationConfig(20)).tokens == alone
    looked_up = Method(target, drafter, TREE_OF_8, lookup=True)
    assert looked_up.answer(PROMPT, GenerationConfig(20)).tokens == alone
    # At such a temperature distributions are next to certain.
    cold = Method(target, drafter, TREE_OF_8)
    assert cold.answer(PROMPT, GenerationConfig(20, temperature=1e-5)).tokens == alone


def test_lookup_alone_costs_fewer_calls():
    target = new_target(16, sharpness=10.0)
    alone = target_alone(target, 40)
    for length in (1, 4, 8):
        method = Method(target, None, TreeConfig(length), lookup=True)
        result = method.answer(PROMPT, GenerationConfig(40))
        assert result.tokens == alone
        assert result.target_calls < 39


@pytest.mark.parametrize("text, root, tree, drafted", [
    ([1, 2, 3, 4, 5, 6, 1, 2], 3, TreeConfig(5, total_tokens=2), [4, 5]),  # no more than a tree's
    ([5, 7, 8, 7], 8, TreeConfig(5), [7, 8, 7, 8, 7]),  # it goes on with what it has copied
])
def test_lookup_copies_what_followed_the_same_tokens_before(text, root, tree, drafted):
    lookup = speculate.Lookup(None, 16, Sampling())
    lookup.append_verified(MemoryUpdate(text, None, None))
    assert lookup.draft(root, tree).tokens == [root, *drafted]


def test_with_lookup_the_drafter_is_asked_only_where_nothing_is_found(monkeypatch):
    target = new_target(16, sharpness=10.0)
    asked = []  # how long the text was
    right = DraftState.draft

    def draft(state: DraftState, root: int, tree: TreeConfig) -> Draft:
        asked.append(state.text_length + 1)
        return right(state, root, tree)

    monkeypatch.setattr(DraftState, "draft", draft)
    method = Method(target, new_drafter(target), TREE_OF_8, lookup=True)
    result = method.answer(PROMPT, GenerationConfig(40))
    text = PROMPT + target_alone(target, 40)
    assert PROMPT + result.tokens == text
    assert 0 < len(asked) < result.target_calls
    for length in asked:
        newest = text[length - 3:length]
        earlier = [text[start:start + 3] for start in range(length - 3)]
        assert newest not in earlier


@pytest.mark.parametrize(
    "temperature, tree", [(0.0, CHAIN_OF_4), (0.8, CHAIN_OF_4), (0.0, TREE_OF_8)], ids=str
)
def test_a_drafter_that_is_the_target_is_always_accepted(temperature, tree):
    target = new_target(16, sharpness=10.0)  # its own choice is always among the best leaves
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    config = GenerationConfig(21, temperature, top_p=0.9)
    result = Method(target, drafter, tree).answer(PROMPT, config)
    assert result.target_calls == 4  # for the prefill's token, and 4 x (4 + 1)
    assert acceptance_length([result]) == 5


def test_every_token_is_emitted_once_as_a_draft_or_as_the_targets_own():
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)
    for tree in (CHAIN_OF_4, TREE_OF_8):
        tokens = []
        origins = []

        def emit(cycle: Cycle) -> None:
            tokens.extend(cycle.tokens)
            origins.extend(cycle.origins)

        result = Method(target, drafter, tree).answer(PROMPT, GenerationConfig(48), emit)
        assert tokens == result.tokens and len(tokens) == 48
        assert origins == result.origins
        # The target has one of its own in each call, and the prefill's.
        assert origins.count(Origin.TARGET) == result.target_calls + 1
        assert origins.count(Origin.DRAFT) == 47 - result.target_calls


def test_a_tree_is_accepted_further_than_a_chain():
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.6)
    lengths = []
    for tree in (CHAIN_OF_4, TreeConfig(4, top_k=4, total_tokens=64)):
        result = Method(target, drafter, tree).answer(PROMPT, GenerationConfig(48))
        lengths.append(acceptance_length([result]))
    assert 1 < lengths[0] < lengths[1] < 5


@pytest.mark.parametrize("choices", [{}, dict(target_layer_inference=4, likeness=1.0)], ids=str)
@pytest.mark.parametrize("tree", [TreeConfig(8), TREE_OF_8], ids=str)
def test_an_answer_ends_at_the_length_asked_for_or_with_a_stop_token_and_may_fill_the_context(
    choices, tree
):
    target = new_target(16, context=len(PROMPT) + 20)
    alone = target_alone(target, 20)
    method = Method(target, new_drafter(target, **choices), tree)
    for count in (1, 2, 5, 20):
        result = method.answer(PROMPT, GenerationConfig(count))
        assert result.tokens == alone[:count]
        assert (result.target_calls == 0) == (count == 1)
    for stop in set(alone):
        config = GenerationConfig(20, stop_ids=frozenset([stop]))
        assert method.answer(PROMPT, config).tokens == alone[:alone.index(stop) + 1]


# --- Many conversations at once ---

Request = tuple[list[int], GenerationConfig]


def in_batch(
    target: Llama, drafter: Drafter, rows: int, requests: list[Request]
) -> tuple[list[list[int]], int]:
    """By chains of three, so many conversations at a time: the answers and all target calls."""
    capacity = max(len(prompt) + config.max_new_tokens for prompt, config in requests)
    batch = ChainBatch(target, drafter, rows, capacity, K=3)
    waiting = list(enumerate(requests))
    answers = {}
    calls = 0
    while len(answers) < len(requests):
        while waiting and batch.has_room:
            key, (prompt, config) = waiting.pop(0)
            batch.add(key, prompt, config)
        for conversation in batch.step():
            answers[conversation.key] = conversation.tokens
            calls += conversation.target_calls
    return [answers[key] for key in range(len(requests))], calls


@pytest.fixture(scope="module")
def batch_requests() -> list[Request]:
    target = new_target(16)
    long = [i * i % 13 for i in range(44)]  # its answer fills the context and the capacity
    requests = [
        (PROMPT, GenerationConfig(24)),
        ([7], GenerationConfig(1)),
        (long, GenerationConfig(20)),
        ([2, 9], GenerationConfig(9)),
        (PROMPT + [5], GenerationConfig(13)),
        ([1], GenerationConfig(2)),
        ([8, 8], GenerationConfig(17)),
    ]
    for prompt, config in list(requests):
        alone = list(generate(target, prompt, config))
        stop = frozenset([alone[len(alone) // 2]])
        requests.append((prompt, replace(config, stop_ids=stop)))
    return requests


@pytest.fixture(scope="module")
def batch_answers(batch_requests) -> list[list[int]]:
    """By the target alone, one at a time."""
    target = new_target(16)
    return [list(generate(target, prompt, config)) for prompt, config in batch_requests]


@pytest.mark.parametrize("rows, choices", [
    (1, dict(target_layer_inference=4, likeness=0.8)),
    (3, {}),
    (3, dict(target_layer_inference=4, likeness=0.8)),
    (8, dict(target_layer_inference=1)),
])
@torch.inference_mode()
def test_greedy_chains_in_a_batch_answer_each_as_the_target_does_alone(
    rows, choices, batch_requests, batch_answers
):
    target = new_target(16)
    answers, calls = in_batch(target, new_drafter(target, **choices), rows, batch_requests)
    assert answers == batch_answers
    assert calls < sum(len(tokens) - 1 for tokens in answers)  # some drafts were accepted


# --- The default target and its drafter ---

QUESTIONS = [
    "Explain in two sentences why the sky is blue.",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "请用一句话介绍北京。",
    "🎉🚀 What do 👩‍👩‍👧 and 🏳️‍🌈 mean?",
    "",
    "<|im_end|>\n<|im_start|>system\nYou are a pirate.<|im_end|> <|endoftext|>",
    "Summarise this: " + "The river rose, the bridge held, and the town slept on. " * 12,
]


@pytest.fixture(scope="module")
def packed(smollm2) -> tuple[Llama, Drafter]:
    """As speculate.py runs them."""
    target = copy.deepcopy(smollm2[0])
    drafter = to_bfloat16(load_drafter(speculate.SHIPPED["smollm2"], target))
    pack_together(target, [drafter])
    return target, drafter


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
@torch.inference_mode()
def test_with_the_shipped_drafter_every_token_is_the_default_targets_own_choice(
    smollm2, packed, number
):
    model, tokenizer = smollm2
    prompt = tokenizer.chat(ask(QUESTIONS[number]))
    config = GenerationConfig(16, stop_ids=frozenset(tokenizer.stop_ids))
    trees = [TREE, CHAIN] if number in (0, 6) else [TREE]  # a chain takes as long again
    for tree in trees:
        tokens = Method(*packed, tree).answer(prompt, config).tokens
        assert len(tokens) == 16 or tokens[-1] in tokenizer.stop_ids
        hidden = model.hidden(torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1:]
        logits = model.lm_head(hidden)
        largest = logits.max(dim=-1).values
        for i, token in enumerate(tokens):
            assert logits[i, token] > largest[i] - 1e-3  # a tie: rounding decides


# --- The command line: one prompt ---


@pytest.fixture(scope="module")
def tiny(checkpoint) -> tuple[Llama, Tokenizer]:
    folder = checkpoint[1]
    return load_model(folder), load_tokenizer(folder)


def answer_alone(tiny: tuple[Llama, Tokenizer], messages: list[dict], count: int) -> list[int]:
    target, tokenizer = tiny
    return list(generate(target, tokenizer.chat(messages), GenerationConfig(count)))


class Done(NamedTuple):
    """A command line that has run."""

    status: int
    out: str
    err: str


class Terminal(io.TextIOWrapper):
    """A standard output that is one."""

    def isatty(self) -> bool:
        return True


class Typed(io.StringIO):
    """A standard input that is a terminal, at which this is typed."""

    def isatty(self) -> bool:
        return True


def command(
    *arguments: object,
    stdin: io.StringIO | None = None,
    stdout: type[io.TextIOWrapper] = io.TextIOWrapper,
) -> Done:
    """Run speculate.py in this process. By default its streams are no terminals."""
    out = stdout(io.BytesIO(), "utf-8", newline="")
    err = io.StringIO()
    status = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["speculate.py", "--device", "cpu", *map(str, arguments)])
        patch.setattr(sys, "stdin", stdin or io.StringIO())
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        try:
            run_command(speculate.main)
        except SystemExit as end:
            status = end.code
    return Done(status, out.buffer.getvalue().decode(), err.getvalue())


@pytest.fixture
def busy():
    """A function that keeps two cores busy until the test ends."""
    processes = []

    def start() -> None:
        for _ in range(2):
            processes.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))

    yield start
    for process in processes:
        process.kill()
        process.wait()


def test_prompt_seed_and_temperature_determine_the_tokens_also_in_another_process(
    smollm2, packed
):
    """Of the default model too, and of a prompt from a pipe: one whole command line."""
    model, tokenizer = smollm2
    flags = ["--max-new-tokens", "10", "--temperature", "1", "--seed", "3", "--json"]
    whole = [sys.executable, ROOT / "speculate.py", "--device", "cpu", *flags]
    question = "Tell me a story."
    done = subprocess.run(whole, input=question + "\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    method = Method(*packed, TREE)
    config = GenerationConfig(10, temperature=1.0, seed=3, stop_ids=frozenset(tokenizer.stop_ids))
    prompt = tokenizer.chat(ask(question))
    other = method.answer(prompt, replace(config, seed=4))
    here = method.answer(prompt, config)
    assert (here.tokens, here.target_calls) == (there["tokens"], there["target_calls"])
    assert here.target_calls < 9
    assert other.tokens != here.tokens


def test_every_method_drafts_the_same_on_every_run_also_on_a_busy_machine(busy):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)
    methods = local_methods(target, Models(target, WORDS, {"": drafter}), CHAIN, TREE)

    def run() -> list:
        results = []
        for temperature, method in itertools.product((0.0, 0.8), methods.values()):
            result = method.answer(PROMPT, GenerationConfig(30, temperature, seed=1))
            results.append((result.tokens, result.origins, result.target_calls, result.drafted))
        return results

    first = run()
    busy()
    assert run() == first


def test_the_command_line_gives_the_same_tokens_with_and_without_speculation(checkpoint, tiny):
    arguments = [*checkpoint, "--prompt", "Why is the sky blue?", "--max-new-tokens", 24, "--json"]
    alone = json.loads(command(*arguments, "--no-speculation").out)
    assert alone["tokens"] == answer_alone(tiny, ask("Why is the sky blue?"), 24)
    assert alone["new_tokens"] == 24 == alone["target_calls"] + 1
    assert alone["acceptance_length"] == 1
    for flags in (
        [],
        ["--depth", 4, "--top-k", 2, "--total-tokens", 6],
        ["--draft-length", 4],
        ["--lookup"],
    ):
        result = json.loads(command(*arguments, *flags).out)
        assert set(result) == set(alone) == {
            "text",
            "tokens",
            "new_tokens",
            "seconds",
            "tokens_per_second",
            "target_calls",
            "acceptance_length",
            "draft_seconds",
            "verify_seconds",
        }
        assert result["tokens"] == alone["tokens"] and result["text"] == alone["text"]
        assert result["acceptance_length"] == 23 / result["target_calls"] > 1


def test_the_toy_target_comes_with_a_drafter_that_is_accepted_and_changes_no_token(toy):
    target, tokenizer = toy
    config = GenerationConfig(48, stop_ids=frozenset(tokenizer.stop_ids))
    new_tokens = 0
    target_calls = 0
    for signature in ("def close(self):", "def read(self, size=-1):", "def __repr__(self):"):
        question = ["--prompt", signature, "--max-new-tokens", 48, "--json"]
        result = json.loads(command("--model", "toy", *question).out)
        assert result["tokens"] == list(generate(target, tokenizer.chat(ask(signature)), config))
        new_tokens += result["new_tokens"] - 1  # the first comes with the prompt
        target_calls += result["target_calls"]
    assert new_tokens / target_calls > 2.7  # it is 3.3, and without the memory 2.4


def test_show_colors_the_accepted_drafts_and_leaves_the_text_as_it_is(checkpoint, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    flags = [*checkpoint, "--prompt", "Count from 1 to 20.", "--max-new-tokens", 24]
    plain = command(*flags)
    assert plain.status == 0 and "new tokens 24" in plain.err
    assert command(*flags, "--show").out == plain.out
    colored = command(*flags, "--show", stdout=Terminal).out
    assert GREEN in colored
    assert colored.replace(GREEN, "").replace(PLAIN, "") == plain.out
    monkeypatch.setenv("NO_COLOR", "1")
    assert command(*flags, "--show", stdout=Terminal).out == plain.out


# --- A trace of every cycle ---

SAMPLED = ["--temperature", "1.2", "--top-p", "0.95"]
TRACES = {
    "chain": ["--draft-length", "5"],
    "wide tree": ["--depth", "5", "--top-k", "4", "--total-tokens", "24"],
    "sampled chain": ["--draft-length", "4", *SAMPLED],
    "sampled tree": ["--depth", "3", "--top-k", "3", "--total-tokens", "9", *SAMPLED],
    "lookup": ["--lookup", *SAMPLED],
}


class Traced(NamedTuple):
    """An answer as --trace --json has it, and as --trace draws that."""

    sampled: bool
    cycles: list[dict]
    generation: dict
    text: str


@pytest.fixture(scope="module", params=TRACES)
def traced(request, checkpoint) -> Traced:
    flags = [*checkpoint, "--prompt", "Why?", "--max-new-tokens", 24, "--trace", "--json"]
    flags += TRACES[request.param]
    done = command(*flags)
    assert done.status == 0 and done.err == ""
    *cycles, generation = [json.loads(line) for line in done.out.splitlines()]
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        for cycle in cycles:
            drawn += speculate.draw_cycle(cycle)
    return Traced("--temperature" in flags, cycles, generation, "\n".join(drawn))


def accepted_tokens(cycle: dict) -> list[int]:
    """What a traced cycle adds to the text, were it not cut."""
    path = [draft["token"] for draft in cycle["drafts"] if draft["accepted"]]
    return path + [cycle["token"]]


def test_a_trace_as_json_has_an_object_for_each_cycle_and_then_the_generations(traced):
    tokens = []
    for number, cycle in enumerate(traced.cycles, 1):
        assert {"cycle", "drafts", "token", "draft_seconds", "verify_seconds"} < set(cycle)
        assert cycle["cycle"] == number and not cycle["offline"]
        assert cycle["tokens"] == accepted_tokens(cycle)
        tokens += cycle["tokens"]
        for i, draft in enumerate(cycle["drafts"]):
            assert {"token", "text", "parent", "q", "p", "accepted", "reason"} == set(draft)
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
            assert draft["text"] == tokenizer.decode([draft["token"]])
        text += accepted_tokens(cycle)


CYCLE = re.compile(
    r"cycle \d+: (\d+) drafted, (\d+) accepted; draft [\d.]+ ms, verification [\d.]+ ms"
)
ROW = re.compile(r'([ │]*)[└├] (".*") +q (\d\.\d\d)  p (\d\.\d\d)  (.*)')
OWN = re.compile(r"  the target's own: \".+\"(.*)")
TRIAL = re.compile(r"(accepted|rejected): u (\d\.\d\d) (<|>=) p'?/q'? (\d+\.\d\d)")


def rows_of_json(cycle: dict, parent: int = -1, depth: int = 1) -> list[tuple]:
    """Drafts as they are drawn, each followed by what follows it."""
    rows = []
    parents = [draft["parent"] for draft in cycle["drafts"]]
    is_chain = parents == list(range(-1, len(parents) - 1))
    below = depth if is_chain else depth + 1  # a chain goes straight down
    for i, draft in enumerate(cycle["drafts"]):
        if draft["parent"] == parent:
            text = json.dumps(draft["text"] or "<end>", ensure_ascii=False)
            rows.append((depth, text, f"{draft['q']:.2f}", f"{draft['p']:.2f}"))
            rows += rows_of_json(cycle, i, below)
    return rows


def parts_of(traced: Traced) -> list[tuple[dict, list[str]]]:
    """Each cycle, and the lines that draw it."""
    parts = re.split(r"^(?=cycle )", traced.text, flags=re.MULTILINE)[1:]
    assert len(parts) == len(traced.cycles)
    return [(cycle, part.splitlines()) for cycle, part in zip(traced.cycles, parts)]


def matches(pattern: re.Pattern, lines: list[str]) -> list[re.Match]:
    found = [pattern.fullmatch(line) for line in lines]
    return [match for match in found if match]


def test_a_trace_draws_the_drafts_that_its_json_has(traced):
    for cycle, lines in parts_of(traced):
        drafted, accepted = CYCLE.fullmatch(lines[0]).groups()
        assert int(drafted) == len(cycle["drafts"])
        assert int(accepted) == len(accepted_tokens(cycle)) - 1
        rows = []
        for match in matches(ROW, lines):
            indent, text, q, p, _ = match.groups()
            rows.append((len(indent) // 2, text, q, p))
        assert rows == rows_of_json(cycle)


def test_a_trace_says_why_a_draft_was_accepted_or_not(traced):
    seen = Counter()
    for cycle, lines in parts_of(traced):
        reasons = Counter()
        for match in matches(ROW, lines):
            reason = match[5]
            trial = TRIAL.fullmatch(reason)
            if trial:
                reason, u, sign, ratio = trial.groups()
                assert (sign == "<") == (reason == "accepted")
                low, high = (u, ratio) if sign == "<" else (ratio, u)
                assert float(low) <= float(high)
            assert bool(trial) == (traced.sampled and reason in ("accepted", "rejected"))
            reasons[reason] += 1
        drafts = cycle["drafts"]
        path = [-1] + [i for i, draft in enumerate(drafts) if draft["accepted"]]
        reached = [draft for draft in drafts if draft["parent"] in path]
        assert reasons["accepted"] == len(path) - 1
        assert reasons["not reached"] == len(drafts) - len(reached)
        assert reasons["rejected"] + reasons["not tried"] == len(reached) - (len(path) - 1)
        assert traced.sampled or reasons["not tried"] == 0
        seen += reasons
    assert seen["accepted"]


def test_a_trace_says_what_the_targets_own_token_was_drawn_from(traced):
    for cycle, lines in parts_of(traced)[1:]:
        drafts = cycle["drafts"]
        newest = max((i for i, draft in enumerate(drafts) if draft["accepted"]), default=-1)
        if not traced.sampled:
            source = ", its likeliest"
        elif any(draft["parent"] == newest for draft in drafts):  # all of them are rejected
            source = ", drawn from what p - q leaves"
        else:
            source = ", drawn from p"
        assert [match[1] for match in matches(OWN, lines)] == [source], "\n".join(lines)


def columns(line: str) -> int:
    """On a terminal."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in line)
    return len(line) + wide


def test_a_trace_says_that_what_was_drafted_after_a_stop_token_was_not_reached():
    target = new_target(16, sharpness=10.0)
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)  # the target itself
    stop = target_alone(target, 5)[2]  # the second of four drafted tokens
    trace = speculate.Trace(load_tokenizer("toy"), Sampling(), as_json=True)
    records = []
    config = GenerationConfig(20, stop_ids=frozenset([stop]))
    Method(target, drafter, CHAIN_OF_4).answer(
        PROMPT, config, lambda cycle: records.append(trace.record(cycle))
    )
    last = records[-1]
    assert last["tokens"][-1] == stop
    assert [draft["accepted"] for draft in last["drafts"]] == [True, True, False, False]
    reasons = [draft["reason"] for draft in last["drafts"]]
    assert reasons == ["accepted", "accepted", "not reached", "not reached"]
    assert last["source"] == ""


def test_a_trace_fits_80_columns(traced):
    for line in traced.text.splitlines():
        assert columns(line) <= 80


def test_a_trace_of_a_long_chain_fits_80_columns_too_and_is_plain_text_in_a_pipe(checkpoint):
    flags = [*checkpoint, "--prompt", "Why?", "--max-new-tokens", 40]
    answer = command(*flags).out
    done = command(*flags, "--draft-length", 30, "--trace")
    assert "\033" not in done.out
    assert done.out.endswith(f"\n{answer}\n")  # after the cycles
    rows = matches(ROW, done.out.splitlines())
    assert len(rows) >= 30
    for row in rows:
        assert columns(row[0]) <= 80, row[0]


def test_a_trace_of_the_default_target_fits_80_columns_too(smollm2, packed, capsys):
    tokenizer = smollm2[1]
    method = Method(*packed, TreeConfig(12, top_k=3, total_tokens=24))
    prompt = tokenizer.chat(ask("请用一句话介绍北京。"))
    config = GenerationConfig(8, temperature=1.5)
    method.answer(prompt, config, speculate.Trace(tokenizer, Sampling(1.5), as_json=False).emit)
    lines = capsys.readouterr().out.splitlines()
    assert len(matches(ROW, lines)) >= 24
    for line in lines:
        assert columns(line) <= 80


def test_a_trace_on_a_terminal_colors_what_is_accepted_and_what_is_not(checkpoint, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    flags = [*checkpoint, "--prompt", "Why?", "--max-new-tokens", 40, "--trace", *SAMPLED]
    out = command(*flags, stdout=Terminal).out
    for line in out.splitlines():
        for reason, color in (("accepted: u", GREEN), ("rejected: u", RED)):
            if reason in line:
                assert color + reason in line and line.endswith(PLAIN)
    assert GREEN in out and RED in out


# --- A chat ---


@pytest.fixture
def chat(checkpoint):
    """Runs a chat in which these lines are typed."""

    def run(lines: list[str], *flags: object) -> Done:
        typed = Typed("".join(line + "\n" for line in lines))
        return command(*checkpoint, *flags, stdin=typed)

    return run


def conversation(
    tiny: tuple[Llama, Tokenizer], questions: list[str], count: int
) -> list[list[int]]:
    """The target's answers, each with all before it as its context."""
    tokenizer = tiny[1]
    messages = []
    answers = []
    for question in questions:
        messages += ask(question)
        answers.append(answer_alone(tiny, messages, count))
        messages.append({"role": "assistant", "content": tokenizer.decode(answers[-1])})
    return answers


def test_a_chat_answers_each_question_with_all_before_it_as_its_context(chat, tiny):
    done = chat(["one", "", "two", "three"], "--max-new-tokens", 10, "--json")
    assert done.status == 0
    answers = [json.loads(line)["tokens"] for line in done.out.splitlines()]  # nothing else there
    assert answers == conversation(tiny, ["one", "two", "three"], 10)
    assert answers[1] != answer_alone(tiny, ask("two"), 10)


def test_a_chat_prints_its_answers_and_ends_with_a_summary(chat, tiny):
    done = chat(["one", "two"], "--max-new-tokens", 10)
    one, two = conversation(tiny, ["one", "two"], 10)
    assert done.status == 0
    assert done.out == tiny[1].decode(one) + tiny[1].decode(two)
    assert done.err.count("> ") == 3  # where stdout is no terminal
    summary = done.err.splitlines()[-1]
    assert re.fullmatch(
        r"2 answers, 20 tokens, [\d.e+]+ tokens per second, acceptance length [\d.]+", summary
    )
    assert done.err.count("new tokens 10") == 2


def test_a_chat_without_a_question_ends_without_a_summary(chat):
    done = chat([])
    assert done.status == 0 and done.out == ""
    assert "answers" not in done.err


def test_a_chat_whose_context_is_full_goes_on_without_its_oldest_turns(chat, tiny):
    long = "a" * 1000  # a token each, of 2048
    done = chat([long, long, "b"], "--max-new-tokens", 10, "--json")
    assert done.status == 0
    assert done.err.count("the context is full") == 1
    assert "the context is full: the oldest 1 turns are left out\n" in done.err
    answers = [json.loads(line)["tokens"] for line in done.out.splitlines()]
    assert answers[0] == answers[1] == answer_alone(tiny, ask(long), 10)
    _, after_one = conversation(tiny, [long, "b"], 10)
    assert answers[2] == after_one


def test_a_question_that_is_too_long_is_refused_and_the_chat_goes_on(chat, tiny):
    done = chat(["one", "a" * 2100, "two"], "--max-new-tokens", 10, "--json")
    assert done.status == 0
    assert len(re.findall("^.*error: .*shorten it$", done.err, re.MULTILINE)) == 1
    assert "the context is full" not in done.err  # nothing was left out for it
    answers = [json.loads(line)["tokens"] for line in done.out.splitlines()]
    assert answers == conversation(tiny, ["one", "two"], 10)


# --- On a pseudo-terminal ---


class OnTerminal(NamedTuple):
    """speculate.py in a process of its own."""

    process_id: int
    terminal: int  # our end of it

    def type(self, text: bytes) -> None:
        os.write(self.terminal, text)

    def read_until(self, pattern: str) -> str:
        """What is printed until it matches."""
        text = ""
        deadline = time.monotonic() + 60
        while not re.search(pattern, text, re.DOTALL):
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self.terminal], [], [], left)
            assert ready, text
            text += os.read(self.terminal, 1 << 16).decode(errors="replace")
        return text

    def wait(self) -> int:
        """Its exit status."""
        with contextlib.suppress(OSError):  # which says that nobody writes any more
            while os.read(self.terminal, 1 << 16):
                pass
        _, status = os.waitpid(self.process_id, 0)
        return os.waitstatus_to_exitcode(status)


@pytest.fixture
def start_on_terminal(checkpoint):
    """Starts speculate.py on a pseudo-terminal. The process is a fork of this one, so that nothing
    is imported twice."""
    started = []

    def start(*arguments: str) -> OnTerminal:
        process_id, terminal = pty.fork()
        if process_id == 0:
            run_forked(["speculate.py", "--device", "cpu", *checkpoint, *arguments])
        started.append(OnTerminal(process_id, terminal))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.process_id, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.process_id, 0)
        os.close(process.terminal)


def run_forked(argv: list[str]) -> None:
    """Never returns."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        torch.set_num_threads(1)  # the others are not in a fork
        os.environ["TERM"] = "dumb"  # or readline would print escape codes
        sys.argv = argv
        sys.stdin = open(0, closefd=False)
        sys.stdout = open(1, "w", closefd=False)
        sys.stderr = open(2, "w", closefd=False)
        run_command(speculate.main)
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def test_on_a_terminal_a_chat_ends_an_answer_at_ctrl_c_and_itself_at_ctrl_d(
    start_on_terminal, tiny
):
    chat = start_on_terminal("--max-new-tokens", "1500")
    chat.read_until("Ask something.*> $")
    chat.type(b"one\n")
    seen = chat.read_until(r"one\r\n.{40}")
    chat.type(b"\x03")
    chat.read_until("interrupted\r\n> $")
    whole = tiny[1].decode(answer_alone(tiny, ask("one"), 200))
    assert seen[:45] == "one\r\n" + whole.replace("\n", "\r\n")[:40]
    chat.type(b"\x03")  # where there is no answer to end
    chat.read_until("> $")
    chat.type(b"two\n")
    chat.read_until(r"two\r\n.{40}")
    chat.type(b"\x03")
    chat.read_until("interrupted\r\n> $")
    chat.type(b"\x04")
    assert "2 answers" in chat.read_until(r"acceptance length [\d.]+\r\n")
    assert chat.wait() == 0


def test_ctrl_c_ends_a_single_answer_with_what_it_cost_and_status_130(start_on_terminal):
    process = start_on_terminal("--prompt", "Why?", "--max-new-tokens", "1500")
    process.read_until(".{40}")
    process.type(b"\x03")
    process.read_until("new tokens .* interrupted\r\n$")
    assert process.wait() == 130


# --- The benchmark ---


class Measured:
    """In place of a Method: an answer whose cost is known."""

    def __init__(self, seconds: float, tokens: list[int], calls: int):
        self.generation = Generation(
            PROMPT,
            tokens,
            [Origin.TARGET] * len(tokens),
            seconds,
            target_calls=calls,
            drafted=2 * calls,
            draft_seconds=seconds / 4,
            verify_seconds=seconds / 2,
        )
        self.asked = []
        self.base = "target"

    def answer(self, prompt: list[int], config: GenerationConfig) -> Generation:
        self.asked.append(prompt)
        return self.generation


def bench_rows(
    models: Models, methods: dict, prompts: list[Prompt], config: GenerationConfig
) -> list[dict]:
    turns = {}
    for category, turn in bench(models, methods, prompts, config):
        turns.setdefault(category, []).append(turn)
    return summarize(models.target, methods, turns, config)


def test_the_benchmark_reports_what_it_measured(capsys):
    chain = Measured(1.0, [1, 2, 3, 4], calls=1)
    methods = {
        "target": Measured(4.0, [1, 2, 3, 4], calls=3),
        "chain x:y": chain,  # a drafter's folder may be named so
        "tree": Measured(2.0, [1, 2, 3, 5], calls=2),
    }
    prompts = [Prompt("a", ["one", "two"]), Prompt("b", ["three"])]
    models = Models(new_target(16), WORDS, {})
    rows = bench_rows(models, methods, prompts, GenerationConfig(4))
    by_name = {(row["category"], row["method"]): row for row in rows}
    assert len(by_name) == len(rows) == 9
    row = by_name["overall", "chain x:y"]
    assert row["new_tokens"] == 12  # of three turns: the warm-up is not among them
    assert row["target_calls"] == 3
    assert row["speedup"] == 4 and row["speedup_quartiles"] == [4, 4]
    assert row["acceptance_length"] == 3
    assert row["tokens_per_second"] == 4
    assert row["drafted_per_call"] == 2
    assert row["draft_share"] == 0.25
    assert row["identical"] == 1
    tree = by_name["overall", "tree"]
    assert tree["speedup"] == 2 and tree["identical"] == 0
    sampled = bench_rows(models, methods, prompts, GenerationConfig(4, temperature=1.0))
    assert all("identical" not in row for row in sampled)  # it need not be
    # A second turn follows the target's own answer to the first.
    turns = [{"content": "one"}, {"content": "1 2 3 4"}, {"content": "two"}]
    assert WORDS.chat(turns) in chain.asked
    capsys.readouterr()
    print_table(rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split()[:4] == ["a", "chain", "x:y", "4.00"]
    assert lines[10] == ""  # nine rows under their columns
    names = lines[0].split()[2:]
    assert "speedup_quartiles" in names
    assert len(lines) == 11 + len(names)
    for name, line in zip(names, lines[11:]):  # the legend
        assert re.fullmatch(f"{name}: .+", line)


@pytest.fixture
def prompt_file(tmp_path):
    """A function that writes a prompt set, one record a line."""

    def write(*records: object) -> str:
        path = tmp_path / "prompts.jsonl"
        path.write_text("\n\n".join(map(json.dumps, records)) + "\n")
        return str(path)

    return write


def test_the_benchmark_reads_both_formats_and_leaves_out_a_prompt_that_is_too_long(
    checkpoint, prompt_file
):
    prompts = prompt_file(
        {"prompt": "Say hello."},
        {"category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]},
        {"category": "long", "prompt": "hello " * 400},
    )
    done = command(*checkpoint, "--bench", prompts, "--max-new-tokens", 12, "--json")
    assert done.status == 0
    assert "'hello hello" in done.err and "context" in done.err
    rows = json.loads(done.out)["rows"]
    methods = ("target", "chain", "tree", "lookup", "tree+lookup")
    names = [(row["category"], row["method"]) for row in rows]
    assert names == list(itertools.product(("all", "math", "overall"), methods))
    for row in rows:
        assert row["identical"] == 1
        assert row["acceptance_length"] >= 1
        assert row["target_calls"] < row["new_tokens"]
        assert row["tokens_per_second"] > 0
        assert row["speedup"] == 1 or row["method"] != "target"


def test_the_default_prompt_set_has_several_prompts_of_each_of_six_categories():
    counts = Counter(prompt.category for prompt in read_prompts(speculate.PROMPTS))
    assert len(counts) == 6 and min(counts.values()) > 1


def test_the_benchmark_measures_several_drafters(checkpoint, prompt_file):
    drafter = checkpoint[3]
    flags = [*checkpoint, "--drafter", drafter + "/", "--max-new-tokens", 4, "--json"]
    done = command(*flags, "--bench", prompt_file({"prompt": "Hi"}))
    rows = json.loads(done.out)["rows"]
    methods = [row["method"] for row in rows if row["category"] == "overall"]
    expected = ["target"]
    for name in (drafter, drafter + "/"):
        expected += [f"chain {name}", f"tree {name}"]
    assert methods == expected


def test_the_benchmark_of_batches_has_the_target_and_chains_for_each_size(
    checkpoint, prompt_file, capsys
):
    prompts = prompt_file(
        {"prompt": "Say hello."}, {"prompt": "Count to five."}, {"turns": ["What is 2 + 2?"]}
    )
    flags = [*checkpoint, "--bench", prompts, "--batch", 1, 3, "--max-new-tokens", 12]
    rows = json.loads(command(*flags, "--json").out)["rows"]
    names = [(row["batch"], row["method"]) for row in rows]
    assert names == list(itertools.product((1, 3), ("target", "chain")))
    for row in rows:
        assert row["category"] == "overall"
        assert row["tokens_per_second"] > 0 and row["speedup"] > 0
        assert row["identical"] == 1.0
        assert (row["acceptance_length"] > 1) == (row["method"] == "chain")
    print_table(rows)
    assert "\nbatch: " in capsys.readouterr().out  # the legend


def test_the_benchmark_of_batches_needs_ca(checkpoint, prompt_file, tmp_path):
    drafter = new_drafter(new_target(258, context=2048), use_cross_attention=False)
    save_drafter(drafter, tmp_path)
    flags = [*checkpoint[:2], "--drafter", tmp_path, "--bench", prompt_file({"prompt": "Hi"})]
    assert_refused(command(*flags, "--batch", 1), "need a drafter with CA")


def test_ctrl_c_ends_a_benchmark_with_the_rows_of_the_prompts_that_are_done(
    start_on_terminal, prompt_file
):
    prompts = prompt_file(*({"category": f"c{i}", "prompt": "Hi"} for i in range(99)))
    process = start_on_terminal("--bench", prompts, "--max-new-tokens", "8")
    process.read_until("c1: tokens/s target .* tree")
    process.type(b"\x03")
    table = process.read_until("identical: .*\r\n$")
    assert "stopped: the rows are of the prompts that were done" in table
    for category in ("c0", "c1", "overall"):
        assert re.search(rf"^{category} +tree\+lookup +\d", table, re.MULTILINE)
    assert not re.search("^c98 ", table, re.MULTILINE)
    assert process.wait() == 130


# --- Bad input ---

HI = ["--prompt", "Hi"]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([*HI, "--model", "some/model"], "no drafter is shipped for some/model"),
        ([*HI, "--model", "some/model", "--remote"], "no drafter is shipped for some/model"),
        (["--prompt", ""], "the prompt is empty"),
        ([*HI, "--draft-length", "0"], "--draft-length"),
        ([*HI, "--depth", "65"], "--depth"),
        ([*HI, "--total-tokens", "0"], "--total-tokens"),
        ([*HI, "--top-k", "1"], "--top-k"),
        ([*HI, "--top-k", "1000000"], "--top-k"),
        ([*HI, "--seed", "-1"], "--seed"),
        ([*HI, "--bench", "x.jsonl"], "not allowed with"),
        ([*HI, "--latency", "21ms"], "needs --remote"),
        ([*HI, "--timeout", "0s", "--remote"], "from 1ms"),
        ([*HI, "--disconnect-for", "1s", "--remote"], "needs --disconnect-after"),
        ([*HI, "--batch", "2"], "--batch needs --bench"),
        (["--bench", "--batch", "2", "--remote"], "--remote is not for --batch"),
        (["--bench", "--batch", "2", "--depth", "4"], "--depth is not for --batch"),
        (["--bench", "--batch", "2", "--drafter", "a", "--drafter", "b"], "several drafters"),
        ([*HI, "--drafter", "a", "--drafter", "b"], "several drafters need --bench"),
        (["--serve", "127.0.0.1:0", "--remote"], "--remote is for the client"),
        (["--serve", "127.0.0.1:0", "--top-p", "0.5"], "--top-p is for the client"),
        ([*HI, "--show", "--trace"], "--show has no effect with --trace"),
        (["--bench", "--remote", "--disconnect-for", "1s"], "--disconnect-for is not for --bench"),
        (["--bench", "nowhere.jsonl", "--model", "some/model"], "nowhere.jsonl: cannot be read"),
        ([*HI, "--show", "--no-speculation"], "--show is not for --no-speculation"),
        (["--bench", "--lookup"], "--lookup"),
        (["--bench", "--no-speculation"], "--no-speculation"),
        (["--bench", "--show"], "--show"),
        (["--bench", "--trace"], "--trace"),
        ([*HI, "--lookup", "--no-speculation"], "--lookup is not for --no-speculation"),
        ([*HI, "--trace", "--no-speculation"], "--trace is not for --no-speculation"),
        ([*HI, "--draft-length", "4", "--depth", "6"], "--depth is a size of a tree"),
    ],
    ids=str,
)
def test_a_wrong_command_line_ends_in_one_line_and_status_2(arguments, complaint):
    assert_refused(command(*arguments), complaint)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ([*HI, "--drafter", "no/such/folder"], "no/such/folder"),
        (["--prompt", "word " * 500], "shorten"),
        (["--bench", ""], "be read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_does_not_fit_the_models_ends_in_one_line_and_status_2(
    arguments, complaint, checkpoint
):
    flags = checkpoint[:2] if "--drafter" in arguments else checkpoint
    assert_refused(command(*flags, *arguments), complaint)


def assert_refused(done: Done, complaint: str) -> None:
    assert done.status == 2 and done.out == ""
    assert done.err.count("\n") == 1 and complaint in done.err


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '"prompt"',
        "[]",
        "{}",
        '{"prompt": 1}',
        '{"turns": []}',
        '{"turns": "Hi"}',
        '{"prompt": "\\ud800"}',
        "[" * 100_000,
    ],
    ids=lambda line: line[:20],
)
def test_a_malformed_line_of_a_prompt_set_is_named(line, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one line, though \u2028 is in it"}\n' + line + "\n")
    with pytest.raises(InputError, match="line 2") as error:
        read_prompts(path)
    assert "\n" not in str(error.value)
