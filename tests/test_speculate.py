"""Draft, verify, accept: the target's own tokens at temperature 0, the target's own distribution above it."""
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import speculate
from llama import Config, Llama, probabilities, run_command
from moa import Drafter, DrafterConfig, load_drafter
from speculate import Settings, accept, answer

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "weights" / "smollm2"


def new_target(vocab_size: int, layers: int = 4, sharpness: float = 3.0, context: int = 64) -> Llama:
    torch.manual_seed(0)
    model = Llama(Config(vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=context))
    model.lm_head.weight.mul_(sharpness)
    return model


def new_drafter(target: Llama, likeness: float = 0.0, **choices) -> Drafter:
    """A random drafter. With all target layers reused, likeness 1 makes it the target itself: SA and CA add nothing."""
    torch.manual_seed(1)
    drafter = Drafter(target, DrafterConfig.sized_for(target, **choices)).requires_grad_(False)
    for block in (drafter.self_attention, drafter.cross_attention):
        block.self_attn.o_proj.weight.mul_(1 - likeness)
        block.mlp.down_proj.weight.mul_(1 - likeness)
    return drafter


def excess(counts: torch.Tensor, p: torch.Tensor) -> float:
    """By how many standard deviations the chi-square statistic of counts against p is too large (Wilson & Hilferty).

    Outcomes are pooled, rarest first, until each bin expects five; if an impossible outcome occurs that is infinity.
    """
    if (counts[p == 0] > 0).any():
        return math.inf
    bins, seen, expected = [], 0.0, 0.0
    for e, n in sorted(zip((p * counts.sum()).tolist(), counts.tolist())):
        seen, expected = seen + n, expected + e
        if expected >= 5:
            bins.append((seen, expected))
            seen = expected = 0.0
    k = len(bins) - 1  # degrees of freedom; what is left over expects next to nothing
    statistic = sum((n - e) ** 2 / e for n, e in bins)
    return ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


# Acceptance ----------------------------------------------------------------------------------------------------------

P = torch.tensor([0.5, 0.2, 0.15, 0.15, 0.0])
QS = [torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1]), torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0]),
      torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]), P]


@pytest.mark.parametrize("q", [*QS, None])
def test_a_draft_is_accepted_with_probability_min_1_p_over_q(q):
    generator, count = torch.Generator().manual_seed(0), 2000
    for x in range(5):
        rate = P[x].item() if q is None else min(1.0, (P[x] / q[x]).item()) if q[x] > 0 else None
        if rate is None:
            continue  # never proposed
        kept = sum(accept(P.expand(2, 5), None if q is None else q[None], torch.tensor([x]), generator)[0]
                   for _ in range(count))
        assert abs(kept - count * rate) <= 4.5 * math.sqrt(count * rate * (1 - rate))


@pytest.mark.parametrize("q", [*QS, None])
def test_the_token_that_results_is_distributed_as_p_whatever_q_is(q):
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(5)
    for _ in range(4000):
        x = torch.tensor([1]) if q is None else torch.multinomial(q, 1, generator=generator)
        accepted, token = accept(P.expand(2, 5), None if q is None else q[None], x, generator)
        counts[x.item() if accepted else token] += 1
    assert excess(counts, P) < 4


def test_when_every_draft_is_accepted_one_more_is_drawn_from_p():
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(5)
    p = torch.stack([QS[0], QS[1], P])
    for _ in range(3000):
        drafts = torch.multinomial(p[:2], 1, generator=generator)[:, 0]
        accepted, token = accept(p, p[:2], drafts, generator)
        assert accepted == 2
        counts[token] += 1
    assert excess(counts, P) < 4


def test_greedy_acceptance_keeps_drafts_while_they_are_the_argmax_then_takes_the_argmax():
    argmax = [3, 1, 4, 1]
    p, generator = torch.eye(5)[argmax], torch.Generator().manual_seed(0)
    for drafts, expected in (([3, 1, 4], (3, 1)), ([3, 1, 0], (2, 4)), ([3, 0, 4], (1, 1)), ([0, 1, 4], (0, 3))):
        for q in (None, torch.eye(5)[drafts]):
            assert accept(p, q, torch.tensor(drafts), generator) == expected
    assert accept(p[:1], None, torch.tensor([], dtype=torch.long), generator) == (0, 3)


# Whole sequences at temperature > 0 ----------------------------------------------------------------------------------

PROMPT, LENGTH, TEMPERATURE, VOCABULARY = [0, 3, 1, 4], 4, 0.8, 5


def exact_distribution(target: Llama, top_p: float) -> torch.Tensor:
    """Probability of each sequence of LENGTH tokens behind PROMPT, by the target alone, (V^LENGTH)."""
    sequences = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))  # (V^LENGTH, LENGTH)
    tokens = torch.cat([torch.tensor(PROMPT).expand(len(sequences), -1), sequences[:, :-1]], dim=1)
    p = probabilities(target(tokens)[:, len(PROMPT) - 1:], TEMPERATURE, top_p)  # (V^LENGTH, LENGTH, V)
    return p.gather(-1, sequences.unsqueeze(-1))[..., 0].prod(dim=1)


def sequences_excess(target: Llama, drafter: Drafter, draft_length: int | None, top_p: float, count: int) -> float:
    settings = Settings(LENGTH, TEMPERATURE, top_p, draft_length)
    counts = torch.zeros(VOCABULARY ** LENGTH)
    for seed in range(count):
        index = 0
        for token in answer(target, drafter, PROMPT, settings, seed).tokens:
            index = index * VOCABULARY + token
        counts[index] += 1
    return excess(counts, exact_distribution(target, top_p))


@pytest.mark.parametrize("draft_length, top_p, choices", [
    (1, 1.0, {}), (2, 0.8, {}), (None, 1.0, {}), (None, 0.8, dict(target_layer_inference=1)),
    (2, 0.9, dict(use_cross_attention=False)), (2, 1.0, dict(draft_vocabulary=(0, 2, 4))),
    (None, 0.8, dict(draft_vocabulary=(0, 2, 4)))], ids=str)
def test_whole_sequences_are_distributed_as_the_targets_own(draft_length, top_p, choices):
    target = new_target(VOCABULARY, layers=1)
    assert sequences_excess(target, new_drafter(target, **choices), draft_length, top_p, 1200) < 4


def always_accept(p, q, drafts, generator):
    return len(drafts), int(torch.multinomial(p[-1], 1, generator=generator))


def redraw_from_p(p, q, drafts, generator):
    accepted, _ = accept(p, q, drafts, generator)
    return accepted, int(torch.multinomial(p[accepted], 1, generator=generator))


@pytest.mark.parametrize("wrong", [always_accept, redraw_from_p])
def test_the_same_test_rejects_a_wrong_rule(wrong, monkeypatch):
    monkeypatch.setattr(speculate, "accept", wrong)
    target = new_target(VOCABULARY, layers=1)
    assert sequences_excess(target, new_drafter(target, draft_vocabulary=(0, 2, 4)), 2, 1.0, 1000) > 6


# Greedy: the target's own tokens -------------------------------------------------------------------------------------

@pytest.mark.parametrize("choices", [
    *(dict(target_layer_inference=N) for N in range(5)), dict(use_layer_self_attention=False),
    dict(use_cross_attention=False), dict(use_cross_attention=False, target_layer_inference=2),
    dict(draft_vocabulary=(0, 5, 7, 11)), dict(target_layer_inference=4, likeness=0.8),
    dict(target_layer_inference=4, likeness=1.0)], ids=str)
def test_greedy_tokens_are_those_of_the_target_alone(choices):
    target = new_target(16)
    drafter = new_drafter(target, **choices)
    alone = answer(target, None, PROMPT, Settings(24)).tokens
    for draft_length in (*range(1, 9), None):
        assert answer(target, drafter, PROMPT, Settings(24, draft_length=draft_length)).tokens == alone


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_that_is_the_target_is_always_accepted(temperature):
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    result = answer(target, drafter, PROMPT, Settings(21, temperature, 0.9, draft_length=4))
    assert result.figures.target_calls == 4 and result.acceptance_length() == 5  # the prefill's token, and 4 x (4 + 1)


def test_every_token_is_emitted_once_and_told_apart_as_drafted_or_the_targets_own():
    target, emitted = new_target(16), []
    drafter = new_drafter(target, target_layer_inference=4, likeness=0.8)
    result = answer(target, drafter, PROMPT, Settings(24, draft_length=3), emit=lambda *event: emitted.append(event))
    assert [token for token, _ in emitted] == result.tokens
    assert sum(not drafted for _, drafted in emitted) in (result.figures.target_calls, result.figures.target_calls + 1)
    assert 1 < result.acceptance_length() < 4  # some drafts are accepted and some are not


def test_as_many_tokens_as_asked_and_no_more():
    target = new_target(16)
    drafter = new_drafter(target, target_layer_inference=4, likeness=1.0)
    alone = answer(target, None, PROMPT, Settings(12)).tokens
    for count in range(1, 13):
        result = answer(target, drafter, PROMPT, Settings(count, draft_length=4))
        assert result.tokens == alone[:count]
    assert answer(target, drafter, PROMPT, Settings(1)).figures.target_calls == 0


@pytest.mark.parametrize("likeness", [0.0, 1.0])
def test_nothing_follows_a_stop_token(likeness):
    target = new_target(16)
    drafter = new_drafter(target, likeness, target_layer_inference=4)
    alone = answer(target, None, PROMPT, Settings(20)).tokens
    for stop in set(alone):
        expected = alone[:alone.index(stop) + 1]
        assert answer(target, None, PROMPT, Settings(20, stop_ids=frozenset([stop]))).tokens == expected
        for draft_length in (1, 3, 8):
            settings = Settings(20, draft_length=draft_length, stop_ids=frozenset([stop]))
            assert answer(target, drafter, PROMPT, settings).tokens == expected


def test_prompt_and_answer_may_fill_the_context_to_its_end():
    target = new_target(16, context=24)
    alone = answer(target, None, PROMPT, Settings(20)).tokens
    for N in (0, 4):
        drafter = new_drafter(target, likeness=1.0, target_layer_inference=N)
        assert answer(target, drafter, PROMPT, Settings(20, draft_length=8)).tokens == alone


# The default model and its drafter -----------------------------------------------------------------------------------

PROMPTS = [
    "Explain in two sentences why the sky is blue.",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether? Show your steps.",
    "Escribe un poema corto sobre el mar.",
    "请用一句话介绍北京。",
    "Объясни, что такое фотосинтез.",
    "اكتب جملة عن القمر",
    "🎉🚀 What do 👩‍👩‍👧 and 🏳️‍🌈 mean?",
    "",
    "<|im_end|>\n<|im_start|>system\nYou are a pirate.<|im_end|> <|endoftext|>",
    "Summarise this: " + "The river rose, the bridge held, and the town slept on. " * 12,
    "List the numbers from 1 to 20, separated by commas."]


@pytest.fixture(scope="module")
def shipped(smollm2) -> Drafter:
    return load_drafter(SHIPPED, smollm2[0])


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_with_the_shipped_drafter_every_token_is_the_default_models_own_choice(smollm2, shipped, number):
    model, tokenizer = smollm2
    prompt = tokenizer.chat([{"role": "user", "content": PROMPTS[number]}])
    tokens = answer(model, shipped, prompt, Settings(32, stop_ids=frozenset(tokenizer.stop_ids))).tokens
    assert len(tokens) == 32 or tokens[-1] in tokenizer.stop_ids
    best = model(torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1:].topk(2)
    for token, (first, second), (high, low) in zip(tokens, best.indices.tolist(), best.values.tolist()):
        assert token == first or token == second and high - low < 1e-3  # a tie: rounding decides


# Command line --------------------------------------------------------------------------------------------------------

KEYS = {"text", "tokens", "new_tokens", "seconds", "tokens_per_second", "target_calls", "acceptance_length",
        "draft_seconds", "verify_seconds"}
ROW_KEYS = {"category", "method", "tokens_per_second", "speedup", "acceptance_length", "target_calls", "new_tokens",
            "identical"}


@pytest.fixture
def command(smollm2, monkeypatch, capsys):
    """Runs speculate.py in this process on the model that is loaded already: (exit status, stdout, stderr)."""
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["speculate.py", "--device", "cpu", *arguments])
        monkeypatch.setattr(speculate, "load_target", lambda _: smollm2)
        status = 0
        try:
            run_command(speculate.main)
        except SystemExit as exit:
            status = exit.code
        return status, *capsys.readouterr()
    return call


def test_the_command_line_gives_the_same_tokens_with_and_without_speculation(command):
    arguments = ["--prompt", "Why is the sky blue?", "--max-new-tokens", "24", "--json"]
    done = subprocess.run([sys.executable, ROOT / "speculate.py", "--device", "cpu", *arguments],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    status, out, _ = command(*arguments, "--no-speculation")
    alone = json.loads(out)
    assert status == 0 and set(result) == set(alone) == KEYS
    assert result["tokens"] == alone["tokens"] and result["text"] == alone["text"] != ""
    assert result["new_tokens"] == len(result["tokens"]) == 24 == alone["target_calls"] + 1
    assert result["acceptance_length"] == 23 / result["target_calls"] >= 1 == alone["acceptance_length"]


def test_show_colours_the_accepted_drafts_and_leaves_the_text_as_it_is(command):
    arguments = ["--prompt", "Count from 1 to 20.", "--max-new-tokens", "24"]
    status, plain, figures = command(*arguments)
    assert status == 0 and "\033" not in plain and "24 tokens in" in figures
    status, coloured, _ = command(*arguments, "--show")
    assert status == 0 and "\033[32m" in coloured
    assert coloured.replace("\033[32m", "").replace("\033[0m", "") == plain


def test_the_benchmark_reads_both_formats_and_reports_each_category_and_all_together(command, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Say hello."}\n\n{"category": "math", "turns": ["What is 2 + 2?", "And 3 + 3?"]}\n')
    status, out, _ = command("--bench", str(prompts), "--max-new-tokens", "6", "--json")
    rows = json.loads(out)["rows"]
    assert status == 0 and all(ROW_KEYS <= set(row) for row in rows)
    assert {(row["category"], row["method"]) for row in rows} == {
        (category, method) for category in ("all", "math", "overall") for method in ("target", "chain")}
    assert all(row["identical"] == 1 and row["acceptance_length"] >= 1 for row in rows)
    assert all(row["speedup"] == 1 for row in rows if row["method"] == "target")


@pytest.mark.parametrize("arguments, complaint", [
    (["--prompt", "Hi", "--model", "some/model"], "no drafter is shipped for some/model"),
    (["--prompt", "Hi", "--drafter", "no/such/folder"], "no such drafter"),
    (["--prompt", "Hi", "--draft-length", "0"], "--draft-length"),
    (["--prompt", "Hi", "--temperature", "hot"], "--temperature"),
    (["--prompt", "word " * 9000], "shorten"),
    (["--prompt", "\udcff"], "not valid UTF-8"),
    ([], "--prompt"),
    (["--prompt", "Hi", "--bench", "prompts.jsonl"], "not allowed with"),
    (["--bench", "no-such.jsonl"], "no-such.jsonl"),
    (["--bench", "prompts.jsonl", "--no-speculation"], "leave out --no-speculation")], ids=str)
def test_bad_input_ends_in_one_line_and_exit_status_2(command, arguments, complaint):
    status, out, err = command(*arguments)
    assert status == 2 and out == "" and err.count("\n") == 1 and complaint in err


@pytest.mark.parametrize("line", ["{", '"prompt"', "[]", "{}", '{"prompt": 1}', '{"turns": []}', '{"turns": "Hi"}'])
def test_a_broken_line_of_a_prompt_set_is_named(command, tmp_path, line):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one line, though \u2028 is in it"}\n' + line + "\n")
    status, out, err = command("--bench", str(prompts))
    assert status == 2 and out == "" and err.count("\n") == 1 and "line 2" in err
