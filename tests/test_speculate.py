"""Draft, verify, accept: at temperature 0 the target's own tokens, and what a user sees.

test_losslessness.py tests that above temperature 0 the text is distributed as the target's own.
"""
import contextlib
import copy
import io
import itertools
import json
import math
import os
import pty
import re
import select
import shlex
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
from test_remote import CountedOutage, impatient, serving_models  # noqa: F401 (a fixture)
from tiny_models import PROMPT, ask, new_drafter, new_target, target_alone

import speculate
from experiments.bench import CHAIN
from llama import (
    GenerationConfig,
    Llama,
    Sampling,
    Tokenizer,
    generate,
    load_model,
    load_tokenizer,
    probabilities,
)
from moa import (
    Draft,
    Drafter,
    DraftLimits,
    DraftState,
    MemoryUpdate,
    Models,
    load_drafter,
    load_models,
    pack_together,
    to_bfloat16,
)
from netsim import Channel, Link, Network, Outage
from plumbing import terminal
from plumbing.errors import InputError, run_command
from plumbing.hub import SHIPPED_DRAFTERS
from plumbing.messages import MessageServer
from plumbing.terminal import GREEN, PLAIN, RED, draw_cycle
from plumbing.tokenizer import TextStream
from speculate import (
    DRAFT_FLAGS,
    EXAMPLES,
    NETWORK_FLAGS,
    SERVER_FLAGS,
    TREE,
    Generation,
    Lookup,
    OnServer,
    Origin,
    TimedCycle,
    Trace,
    WithDrafts,
    accept_draft,
    accept_greedy,
    acceptance_length,
    answer,
    check_arguments,
    make_parser,
)

CHAIN_OF_4 = DraftLimits(4)
TREE_OF_8 = DraftLimits(4, top_k=2, total_tokens=8)


def draft_and_verify(
    target: Llama,
    drafter: Drafter | None,
    limits: DraftLimits,
    count: int,
    lookup: bool = False,
    **choices,
) -> Generation:
    """Answer PROMPT with `count` tokens. choices: other fields of the GenerationConfig."""
    method = WithDrafts(target, drafter, limits, lookup=lookup)
    return answer(method, PROMPT, GenerationConfig(count, **choices))


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

LIMITS = [
    DraftLimits(1),
    DraftLimits(4),
    DraftLimits(8),
    DraftLimits(1, top_k=2, total_tokens=5),
    TREE_OF_8,
    DraftLimits(3, top_k=4, total_tokens=30),
    DraftLimits(6, top_k=4, total_tokens=8),  # expands more leaves than it proposes tokens
    TREE,
    CHAIN,
]


@pytest.mark.parametrize(
    "choices",
    [
        dict(target_layer_inference=0),
        dict(target_layer_inference=2),
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
    for limits in LIMITS:
        assert draft_and_verify(target, drafter, limits, 20).tokens == alone
    assert draft_and_verify(target, drafter, TREE_OF_8, 20, lookup=True).tokens == alone
    # At such a temperature distributions are next to certain.
    assert draft_and_verify(target, drafter, TREE_OF_8, 20, temperature=1e-5).tokens == alone


def test_lookup_alone_costs_fewer_calls():
    target = new_target(16, sharpness=10.0)
    alone = target_alone(target, 40)
    for length in (1, 4, 8):
        result = draft_and_verify(target, None, DraftLimits(length), 40, lookup=True)
        assert result.tokens == alone
        assert result.target_calls < 39


@pytest.mark.parametrize("text, root, limits, drafted", [
    ([1, 2, 3, 4, 5, 6, 1, 2], 3, DraftLimits(5, total_tokens=2), [4, 5]),  # no more than a tree's
    ([5, 7, 8, 7], 8, DraftLimits(5), [7, 8, 7, 8, 7]),  # it goes on with what it has copied
])
def test_lookup_copies_what_followed_the_same_tokens_before(text, root, limits, drafted):
    lookup = Lookup(None, 16, Sampling())
    lookup.append_verified(MemoryUpdate(text, None, None))
    assert lookup.draft(root, limits).tokens == [root, *drafted]


def test_with_lookup_the_drafter_is_asked_only_where_nothing_is_found(monkeypatch):
    target = new_target(16, sharpness=10.0)
    asked = []  # how long the text was
    right = DraftState.draft

    def draft(state: DraftState, root: int, limits: DraftLimits) -> Draft:
        asked.append(state.text_length + 1)
        return right(state, root, limits)

    monkeypatch.setattr(DraftState, "draft", draft)
    result = draft_and_verify(target, new_drafter(target), TREE_OF_8, 40, lookup=True)
    text = PROMPT + target_alone(target, 40)
    assert PROMPT + result.tokens == text
    assert 0 < len(asked) < result.target_calls
    for length in asked:
        newest = text[length - 3:length]
        earlier = [text[start:start + 3] for start in range(length - 3)]
        assert newest not in earlier


@pytest.mark.parametrize(
    "temperature, limits", [(0.0, CHAIN_OF_4), (0.8, CHAIN_OF_4), (0.0, TREE_OF_8)], ids=str
)
def test_a_drafter_that_is_the_target_is_always_accepted(temperature, limits):
    target = new_target(16, sharpness=10.0)  # its own choice is always among the best leaves
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    result = draft_and_verify(target, drafter, limits, 21, temperature=temperature, top_p=0.9)
    assert result.target_calls == 4  # for the prefill's token, and 4 x (4 + 1)
    assert acceptance_length([result]) == 5


def test_every_token_is_emitted_once_as_a_draft_or_as_the_targets_own():
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)
    for limits in (CHAIN_OF_4, TREE_OF_8):
        tokens = []
        origins = []

        def emit(cycle: TimedCycle) -> None:
            tokens.extend(cycle.tokens)
            origins.extend(cycle.origins)

        method = WithDrafts(target, drafter, limits)
        result = answer(method, PROMPT, GenerationConfig(48), emit)
        assert tokens == result.tokens and len(tokens) == 48
        assert origins == result.origins
        # The target has one of its own in each call, and the prefill's.
        assert origins.count(Origin.TARGET) == result.target_calls + 1
        assert origins.count(Origin.DRAFT) == 47 - result.target_calls


def test_a_tree_is_accepted_further_than_a_chain():
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.6)
    lengths = []
    for limits in (CHAIN_OF_4, DraftLimits(4, top_k=4, total_tokens=64)):
        lengths.append(acceptance_length([draft_and_verify(target, drafter, limits, 48)]))
    assert 1 < lengths[0] < lengths[1] < 5


@pytest.mark.parametrize("choices", [{}, dict(target_layer_inference=4, likeness=1.0)], ids=str)
@pytest.mark.parametrize("limits", [DraftLimits(8), TREE_OF_8], ids=str)
def test_an_answer_ends_at_the_length_asked_for_or_with_a_stop_token_and_may_fill_the_context(
    choices, limits
):
    target = new_target(16, context=len(PROMPT) + 20)
    drafter = new_drafter(target, **choices)
    alone = target_alone(target, 20)
    for count in (1, 2, 5, 20):
        result = draft_and_verify(target, drafter, limits, count)
        assert result.tokens == alone[:count]
        assert (result.target_calls == 0) == (count == 1)
    for stop in set(alone):
        result = draft_and_verify(target, drafter, limits, 20, stop_ids=frozenset([stop]))
        assert result.tokens == alone[:alone.index(stop) + 1]


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
    """The default models, packed as speculate.py packs them."""
    target = copy.deepcopy(smollm2[0])
    drafter = to_bfloat16(load_drafter(SHIPPED_DRAFTERS["smollm2"], target))
    pack_together(target, [drafter])
    return target, drafter


@pytest.mark.parametrize("number", [0, 2, 4, 6])
@torch.inference_mode()
def test_with_the_shipped_drafter_every_token_is_the_default_targets_own_choice(
    smollm2, packed, number
):
    model, tokenizer = smollm2
    prompt = tokenizer.chat(ask(QUESTIONS[number]))
    config = GenerationConfig(16, stop_ids=frozenset(tokenizer.stop_ids))
    kinds = [TREE, CHAIN] if number in (0, 6) else [TREE]  # a chain takes as long again
    for limits in kinds:
        tokens = answer(WithDrafts(*packed, limits), prompt, config).tokens
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
    """A standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


class Typed(io.StringIO):
    """A standard input that is a terminal, at which these lines are typed one by one."""

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
        patch.setattr(terminal, "more_is_pasted", lambda: False)  # it asks a real terminal
        try:
            run_command(speculate.main)
        except SystemExit as end:
            status = end.code
    out.flush()
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
    """This also holds for the default model and a piped prompt: one whole command line."""
    model, tokenizer = smollm2
    flags = ["--max-new-tokens", "10", "--temperature", "1", "--seed", "3", "--json"]
    whole = [sys.executable, ROOT / "speculate.py", "--device", "cpu", "--dtype", "float32", *flags]
    question = "Tell me a story."
    done = subprocess.run(whole, input=question + "\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    method = WithDrafts(*packed, TREE)
    config = GenerationConfig(10, temperature=1.0, seed=3, stop_ids=frozenset(tokenizer.stop_ids))
    prompt = tokenizer.chat(ask(question))
    other = answer(method, prompt, replace(config, seed=4))
    here = answer(method, prompt, config)
    assert (here.tokens, here.target_calls) == (there["tokens"], there["target_calls"])
    assert here.target_calls < 9
    assert other.tokens != here.tokens


def test_every_method_drafts_the_same_on_every_run_also_on_a_busy_machine(busy):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)

    def run() -> list:
        results = []
        for temperature, limits, lookup in itertools.product(
            (0.0, 0.8), (CHAIN, TREE), (False, True)
        ):
            result = draft_and_verify(
                target, drafter, limits, 30, lookup, temperature=temperature, seed=1
            )
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
        ["--draft-depth", 4, "--draft-top-k", 2, "--draft-tokens", 6],
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
            "prompt_tokens",
            "prompt_seconds",
            "draft_seconds",
            "verify_seconds",
            "stopped",
            "seed",
        }
        assert result["tokens"] == alone["tokens"] and result["text"] == alone["text"]
        assert result["acceptance_length"] == 23 / result["target_calls"] > 1


def test_a_generation_accounts_for_its_time_and_says_why_it_ended(checkpoint):
    flags = [*checkpoint, "--prompt", "Why?", "--seed", 7, "--json"]
    result = json.loads(command(*flags, "--max-new-tokens", 40).out)
    parts = sum(result[name] for name in ("prompt_seconds", "draft_seconds", "verify_seconds"))
    assert 0.7 * result["seconds"] < parts < result["seconds"]
    assert result["prompt_tokens"] == 23 and result["seed"] == 7
    assert result["stopped"] == "max-new-tokens"
    full = json.loads(command(*flags, "--max-new-tokens", 40, "--prompt", "a" * 2000).out)
    assert full["stopped"] == "context" and full["prompt_tokens"] + full["new_tokens"] == 2048


def test_reading_a_long_prompt_is_shown_and_a_short_one_is_not(checkpoint):
    for flags in ([], ["--no-speculation"]):
        flags = [*checkpoint, "--max-new-tokens", 4, "--json", *flags]
        assert command(*flags, "--prompt", "Why?").err == ""
        assert "reading the prompt: " in command(*flags, "--prompt", "word " * 150).err


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_that_are_nan_end_in_an_error_also_when_only_a_draft_has_them(temperature):
    logits = torch.zeros(2, 16)
    logits[1, 3] = math.nan
    sampling = GenerationConfig(temperature=temperature).new_sampling("cpu")
    with pytest.raises(InputError, match="bfloat16"):
        accept_draft(logits, chain(1), sampling)
    target = new_target(16)
    target.lm_head.weight.fill_(math.inf)
    with pytest.raises(InputError, match="bfloat16"):
        draft_and_verify(target, new_drafter(target), TREE, 4, temperature=temperature)


def test_an_answer_ends_with_a_newline_and_no_blank_line_comes_before_the_statistics(
    checkpoint, tiny
):
    done = command(*checkpoint, "--prompt", "Why?", "--max-new-tokens", 5)
    assert done.out == tiny[1].decode(answer_alone(tiny, ask("Why?"), 5)) + "\n"
    assert done.err.startswith("new tokens 5, ")


def test_the_commands_at_the_end_of_help_are_accepted():
    commands = re.findall(r"^ *python speculate\.py(.*?)(?:  #.*)?$", EXAMPLES, re.MULTILINE)
    assert len(commands) > 5 and command("--help").out.endswith(EXAMPLES + "\n")
    parser = make_parser()
    for arguments in commands:
        check_arguments(parser, parser.parse_args(shlex.split(arguments)))


def test_the_flags_that_are_refused_together_are_those_of_a_group_of_help():
    groups = {}
    for group in make_parser()._action_groups:
        groups[group.title] = {action.dest for action in group._group_actions}
    assert set(DRAFT_FLAGS) == groups["drafts"] - {"drafter", "no_speculation"}
    assert set(NETWORK_FLAGS) == groups["the target on a server"] - {"remote"}
    assert SERVER_FLAGS == groups["model"] - {"seed"} | {"serve", "drafter"}


def test_the_toy_target_comes_with_a_drafter_that_is_accepted_and_changes_no_token(toy):
    target, tokenizer = toy
    config = GenerationConfig(48, stop_ids=frozenset(tokenizer.stop_ids))
    new_tokens = 0
    target_calls = 0
    for signature in ("def close(self):", "def read(self, size=-1):", "def __repr__(self):"):
        question = ["--prompt", signature, "--max-new-tokens", 48, "--dtype", "float32", "--json"]
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
            assert {"token", "text", "parent", "q", "p", "accepted", "verdict"} == set(draft)
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
OWN = re.compile(r"  the target's own: (\".+\")")


def rows_of_json(cycle: dict, parent: int = -1, depth: int = 1) -> list[tuple]:
    """Return the drafts in the order drawn: after each token, those that follow it in the tree."""
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
    """Return each cycle with the lines that draw it."""
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


def test_a_trace_says_what_became_of_each_draft(traced):
    seen = Counter()
    for cycle, lines in parts_of(traced):
        verdicts = Counter(match[5] for match in matches(ROW, lines))
        drafts = cycle["drafts"]
        path = [-1] + [i for i, draft in enumerate(drafts) if draft["accepted"]]
        expected = Counter()
        for i, draft in enumerate(drafts):
            accepted_sibling = []
            for j in path:
                if j >= 0 and drafts[j]["parent"] == draft["parent"]:
                    accepted_sibling.append(j)
            if draft["parent"] not in path:
                expected["not reached"] += 1
            elif i in path:
                expected["accepted"] += 1
            elif traced.sampled and accepted_sibling and accepted_sibling[0] < i:
                expected["not tried"] += 1
            else:
                expected["rejected"] += 1
        assert verdicts == expected
        seen += verdicts
    assert seen["accepted"]


def test_a_trace_ends_each_cycle_with_the_targets_own_token(traced):
    for cycle, lines in parts_of(traced):
        text = json.dumps(cycle["text"] or "<end>", ensure_ascii=False)
        assert [match[1] for match in matches(OWN, lines)] == [text], "\n".join(lines)


def columns(line: str) -> int:
    """Return how many columns a line takes on a terminal."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in line)
    return len(line) + wide


def test_a_trace_says_that_what_was_drafted_after_a_stop_token_was_not_reached():
    target = new_target(16, sharpness=10.0)
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)  # the target itself
    stop = target_alone(target, 5)[2]  # the second of four drafted tokens
    trace = Trace(load_tokenizer("toy"), Sampling(), as_json=True)
    records = []
    config = GenerationConfig(20, stop_ids=frozenset([stop]))
    method = WithDrafts(target, drafter, CHAIN_OF_4)
    answer(method, PROMPT, config, lambda cycle: records.append(trace.record(cycle)))
    last = records[-1]
    assert last["tokens"][-1] == stop
    assert [draft["accepted"] for draft in last["drafts"]] == [True, True, False, False]
    verdicts = [draft["verdict"] for draft in last["drafts"]]
    assert verdicts == ["accepted", "accepted", "not reached", "not reached"]


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


def test_a_trace_of_the_default_target_fits_80_columns_too(smollm2, packed, capsys):
    tokenizer = smollm2[1]
    limits = DraftLimits(12, top_k=3, total_tokens=24)
    method = WithDrafts(*packed, limits)
    prompt = tokenizer.chat(ask("请用一句话介绍北京。"))
    config = GenerationConfig(8, temperature=1.5)
    answer(method, prompt, config, Trace(tokenizer, config.new_sampling("cpu"), as_json=False).emit)
    lines = capsys.readouterr().out.splitlines()
    assert len(matches(ROW, lines)) >= 24
    for line in lines:
        assert columns(line) <= 80


def test_a_trace_on_a_terminal_colors_what_is_accepted_and_what_is_not(checkpoint, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    flags = [*checkpoint, "--prompt", "Why?", "--max-new-tokens", 40, "--trace", *SAMPLED]
    out = command(*flags, stdout=Terminal).out
    for line in out.splitlines():
        for verdict, color in (("accepted", GREEN), ("rejected", RED)):
            if line.endswith(verdict + PLAIN):
                assert line.endswith(color + verdict + PLAIN)
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
    """Return the target's answers. Each has all questions and answers before it as its context."""
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


def test_a_chat_says_what_answers_prints_its_answers_and_ends_with_a_summary(
    chat, tiny, checkpoint
):
    done = chat(["one", "two"], "--max-new-tokens", 10)
    one, two = conversation(tiny, ["one", "two"], 10)
    assert done.status == 0
    assert done.out == tiny[1].decode(one) + "\n" + tiny[1].decode(two) + "\n"
    assert done.err.count("> ") == 3  # where stdout is no terminal
    assert f"The target is {checkpoint[1]}, on this machine.\n" in done.err
    summary = done.err.splitlines()[-1]
    assert re.fullmatch(
        r"2 answers, 20 tokens, [\d.e+]+ tokens per second, acceptance length [\d.]+", summary
    )
    assert done.err.count("new tokens 10") == 2


@pytest.mark.parametrize("lines", [[], ["exit"], ["quit", "one"]], ids=str)
def test_a_chat_ends_at_exit_or_quit_too_and_without_a_question_has_no_summary(chat, lines):
    done = chat(lines)
    assert done.status == 0 and done.out == ""
    assert "tokens per second" not in done.err


def test_a_chat_whose_context_is_full_goes_on_without_its_oldest_turns(chat, tiny):
    long = "a" * 1000  # a token each, of 2048
    done = chat([long, long, "b"], "--max-new-tokens", 10, "--json")
    assert done.status == 0
    assert done.err.count("the context is full") == 1
    assert "the context is full: the oldest question and its answer are left out\n" in done.err
    answers = [json.loads(line)["tokens"] for line in done.out.splitlines()]
    assert answers[0] == answers[1] == answer_alone(tiny, ask(long), 10)
    _, after_one = conversation(tiny, [long, "b"], 10)
    assert answers[2] == after_one


def test_a_full_context_drops_another_turn_rather_than_cut_the_answer(chat):
    done = chat(["a" * 1000, "a" * 880], "--max-new-tokens", 100, "--json")
    assert "the context is full: the oldest question and its answer are left out\n" in done.err
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["new_tokens"] for answer in answers] == [100, 100]


def test_a_question_that_is_too_long_is_refused_and_the_chat_goes_on(chat, tiny):
    done = chat(["one", "a" * 2100, "two"], "--max-new-tokens", 10, "--json")
    assert done.status == 0
    assert len(re.findall("^.*error: .*shorten it$", done.err, re.MULTILINE)) == 1
    assert "the context is full" not in done.err  # nothing was left out for it
    answers = [json.loads(line)["tokens"] for line in done.out.splitlines()]
    assert answers == conversation(tiny, ["one", "two"], 10)


# --- Over a network: what a user sees ---


@pytest.fixture(scope="module")
def models(checkpoint) -> Models:
    return load_models(checkpoint[1], checkpoint[3], "cpu", torch.float32)


def terminal_over(
    networks: list[Network], server: MessageServer, models: Models, *flags: str
) -> speculate.Terminal:
    """Return a Terminal that answers each prompt over the next of these networks (--remote)."""
    connections = iter(networks)

    def new_channel(prompt: list[int]) -> Channel:
        return Channel(server.server_address, next(connections))

    args = make_parser().parse_args(["--remote", "--max-new-tokens", "48", *flags])
    method = OnServer(new_channel, models.drafter, CHAIN)
    config = GenerationConfig(args.max_new_tokens, args.temperature)
    return speculate.Terminal(args, models, method, config)


LOST = "[the link is lost: what follows is the drafter's own text, unverified]"
BACK = "[the link is back: the target goes on]"


def link_lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if "link" in line]


@pytest.mark.parametrize("first, until, lines", [
    (10, 30, [LOST, BACK]),
    (math.inf, math.inf, []),
])
def test_one_line_says_when_the_link_is_lost_and_one_when_it_is_back(
    models, impatient, capsys, first, until, lines
):
    with serving_models(models.target, models.drafter) as server:
        client = terminal_over([CountedOutage(first, until)], server, models)
        generation = client.respond(ask("Hi"))
    out, err = capsys.readouterr()
    assert link_lines(err) == lines
    assert out == models.tokenizer.decode(generation.tokens) + "\n"
    last = f"{generation.unverified} of 48 tokens are the drafter's own, unverified"
    lost = err.splitlines()[-1]
    assert (lost.startswith("the server was lost (") and lost.endswith(last)) == (lines != [])


def test_an_outage_that_only_delays_is_told_too(models, capsys):
    network = Network(Link(), outage=Outage(after=10, seconds=0.3))
    with serving_models(models.target, models.drafter) as server:
        generation = terminal_over([network], server, models, "--json").respond(ask("Hi"))
    out, err = capsys.readouterr()
    assert json.loads(out)["disconnected"] is True and generation.unverified == 0
    assert err == "the network was down for a while; all tokens are the target's\n"


def test_show_colors_what_was_written_without_the_target_on_a_terminal(
    models, impatient, capsys, monkeypatch
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with serving_models(models.target, models.drafter) as server:
        client = terminal_over([CountedOutage(10, 30)], server, models, "--show")
        generation = client.respond(ask("Hi"))
    out = capsys.readouterr().out
    stream = TextStream(models.tokenizer)
    unverified = ""
    for token, origin in zip(generation.tokens, generation.origins):
        text = stream.add(token)
        unverified += text if origin == Origin.UNVERIFIED else ""
    assert "".join(re.findall("\033\\[33m(.*?)\033\\[0m", out, re.DOTALL)) == unverified != ""
    plain = re.sub("\033\\[[0-9]+m", "", out)
    assert plain == models.tokenizer.decode(generation.tokens) + "\n"


@pytest.mark.parametrize("latency, count, said", [
    # It takes eight ways to the first token.
    (0.1, "1", "connecting, and waiting for the server to read the prompt ...\n"),
    (0.02, "48", ""),
])
def test_a_link_that_takes_long_to_the_first_token_says_that_it_is_connecting(
    models, capsys, monkeypatch, latency, count, said
):
    monkeypatch.setattr(terminal, "PATIENCE", 0.5)
    with serving_models(models.target, models.drafter) as server:
        network = Network(Link(latency))
        client = terminal_over([network], server, models, "--json", "--max-new-tokens", count)
        generation = client.respond(ask("Hi"))
    out, err = capsys.readouterr()
    assert generation.seconds > 0.5
    assert err == said
    assert json.loads(out)["new_tokens"] == int(count)


def test_a_trace_has_the_link_with_its_bytes_and_all_tokens_also_those_written_offline(
    models, impatient, capsys
):
    with serving_models(models.target, models.drafter) as server:
        client = terminal_over([CountedOutage(10, 30)], server, models, "--trace", "--json")
        client.respond(ask("Hi"))
    _, *cycles, generation = map(json.loads, capsys.readouterr().out.splitlines())
    assert sum([cycle["tokens"] for cycle in cycles], []) == generation["tokens"]
    states = [cycle["link"]["state"] for cycle in cycles]
    assert [state for state, _ in itertools.groupby(states)] == [
        "connected", "offline", "reconnected", "connected"]
    assert states.count("reconnected") == 1
    offline = [cycle for cycle in cycles if cycle["offline"]]
    assert len(offline) == states.count("offline")
    assert sum(len(cycle["tokens"]) for cycle in offline) == generation["unverified_tokens"] > 0
    for name in ("bytes_up", "bytes_down"):
        assert sum(cycle["link"][name] for cycle in cycles) == generation[name]
    for cycle in cycles:
        drawn = "\n".join(draw_cycle(cycle))
        link = cycle["link"]
        traffic = f"{link['bytes_up']} bytes up, {link['bytes_down']} down, "
        assert f"  link: {link['state']}, {traffic}" in drawn
        assert ("offline: the drafter alone wrote" in drawn) == cycle["offline"]


def test_a_trace_with_a_server_has_q_and_verdicts_but_no_p(models, capsys):
    flags = "--trace", "--json", "--temperature", "1"
    with serving_models(models.target, models.drafter) as server:
        terminal_over([Network(Link())], server, models, *flags).respond(ask("Hi"))
    _, *cycles, _ = map(json.loads, capsys.readouterr().out.splitlines())
    drafts = sum([cycle["drafts"] for cycle in cycles], [])
    assert {draft["p"] for draft in drafts} == {None}
    verdicts = {draft["verdict"] for draft in drafts}
    assert {"accepted", "rejected"} <= verdicts <= {"accepted", "rejected", "not reached"}


def test_a_chat_goes_on_after_an_outage_and_after_a_server_that_is_not_there(
    models, impatient, capsys, monkeypatch
):
    networks = [
        CountedOutage(10, 30),
        Network(Link(), outage=Outage(after=0)),  # for both attempts to connect
        CountedOutage(20),
        Network(Link()),
    ]
    networks[1].outage.begin_if_due(0, 0.0)
    monkeypatch.setattr(sys, "stdin", Typed("one\ntwo\n\nthree\nfour\n"))
    monkeypatch.setattr(terminal, "more_is_pasted", lambda: False)
    with serving_models(models.target, models.drafter) as server:
        chat = terminal_over(networks, server, models)
        chat.chat("")
    one, three, four = chat.answers
    assert one.outage and three.outage and not four.outage
    conversation = ask("one")
    for generation, question in ((one, "three"), (three, "four")):
        text = models.tokenizer.decode(generation.tokens)
        conversation += [{"role": "assistant", "content": text}, *ask(question)]
    assert four.prompt == models.tokenizer.chat(conversation)
    assert four.tokens == list(generate(models.target, four.prompt, GenerationConfig(48)))
    err = capsys.readouterr().err
    assert link_lines(err) == [LOST, BACK, LOST]
    complaint = "error: no first token from the server: the network is down"
    assert err.splitlines().count(complaint) == 1
    assert "3 answers, 144 tokens" in err


# --- On a pseudo-terminal ---


class OnTerminal(NamedTuple):
    """speculate.py in a process of its own."""

    process_id: int
    terminal: int  # our end of the pseudo-terminal

    def type(self, text: bytes) -> None:
        os.write(self.terminal, text)

    def read_until(self, pattern: str) -> str:
        """Return what is printed until the pattern matches."""
        text = ""
        deadline = time.monotonic() + 60
        while not re.search(pattern, text, re.DOTALL):
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self.terminal], [], [], left)
            assert ready, text
            text += os.read(self.terminal, 1 << 16).decode(errors="replace")
        return text

    def wait(self) -> int:
        """Wait for the process to end. Return its exit status."""
        with contextlib.suppress(OSError):  # raised when the other end is closed
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
    """Run speculate.py in this fork, and end the fork. Never return."""
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
    chat.read_until("stopped interrupted.*left out of the conversation\r\n> $")
    whole = tiny[1].decode(answer_alone(tiny, ask("one"), 200))
    assert seen[:45] == "one\r\n" + whole.replace("\n", "\r\n")[:40]
    chat.type(b"\x03")  # where there is no answer to end
    chat.read_until("> $")
    chat.type(b"two\n")
    chat.read_until(r"two\r\n.{40}")
    chat.type(b"\x03")
    chat.read_until("stopped interrupted.*left out of the conversation\r\n> $")
    chat.type(b"\x04")
    assert "2 answers" in chat.read_until(r"acceptance length [\d.]+\r\n")
    assert chat.wait() == 0


def test_a_text_pasted_as_several_lines_is_one_question_and_a_cut_answer_is_no_context(
    start_on_terminal, tiny
):
    chat = start_on_terminal("--max-new-tokens", "1000")
    chat.read_until("Ask something.*> $")
    chat.type(b"never mind\n")
    chat.read_until(r"mind\r\n.{40}")
    chat.type(b"\x03")
    chat.read_until("left out of the conversation\r\n> $")
    chat.type(b"one\ntwo\n\nthree\n")
    seen = chat.read_until(r"three\r\n.{40}")
    chat.type(b"\x03")
    whole = tiny[1].decode(answer_alone(tiny, ask("one\ntwo\n\nthree"), 100))
    answer_seen = seen.partition("three\r\n")[2]
    assert answer_seen[:30] == whole.replace("\n", "\r\n")[:30]
    chat.read_until("left out of the conversation\r\n> $")
    chat.type(b"\x04")
    assert chat.wait() == 0


def test_ctrl_c_ends_a_single_answer_with_what_it_cost_and_status_130(start_on_terminal):
    process = start_on_terminal("--prompt", "Why?", "--max-new-tokens", "1500")
    process.read_until(".{40}")
    process.type(b"\x03")
    process.read_until("new tokens .* stopped interrupted, seed 0\r\n$")
    assert process.wait() == 130


# --- Bad input ---

HI = ["--prompt", "Hi"]


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--prompt", ""], "the prompt is empty"),
        ([*HI, "--draft-length", "0"], "--draft-length"),
        ([*HI, "--draft-depth", "65"], "--draft-depth"),
        ([*HI, "--draft-tokens", "0"], "--draft-tokens"),
        ([*HI, "--draft-top-k", "1"], "--draft-top-k"),
        ([*HI, "--draft-top-k", "1000000"], "--draft-top-k"),
        ([*HI, "--seed", "-1"], "--seed"),
        ([*HI, "--latency", "21ms"], "needs --remote"),
        ([*HI, "--timeout", "0s", "--remote"], "from 1ms"),
        ([*HI, "--disconnect-for", "1s", "--remote"], "needs --disconnect-after"),
        (["--serve", "0", "--remote"], "--remote is for the client"),
        (["--serve", "127.0.0.1:0", "--top-p", "0.5"], "--top-p is for the client"),
        (["--serve", "x"], "expected"),
        ([*HI, "--show", "--trace"], "--show has no effect with --trace"),
        ([*HI, "--show", "--no-speculation"], "--show is not for --no-speculation"),
        ([*HI, "--lookup", "--no-speculation"], "--lookup is not for --no-speculation"),
        ([*HI, "--trace", "--no-speculation"], "--trace is not for --no-speculation"),
        ([*HI, "--draft-length", "4", "--draft-depth", "6"], "--draft-depth is a size of a tree"),
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
