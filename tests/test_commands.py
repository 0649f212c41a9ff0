"""Claims about the command lines of speculate.py and llama.py: one prompt, and bad input."""
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from command_line import Screen, command, refused
from conftest import ROOT, case_name
from tiny_models import ask

from app.answers import WithDrafts, answer
from app.loading import load_model, load_models
from app.speculate_command import (
    DRAFT_FLAGS,
    EXAMPLES,
    NETWORK_FLAGS,
    SERVER_FLAGS,
    TREE,
    check_arguments,
    make_parser,
)
from llama import GenerationConfig, generate
from plumbing.terminal import GREEN, PICTURES, PLAIN
from plumbing.tokenizer import load_tokenizer

HI = ["--prompt", "Hi"]
KEYS = {
    "text", "tokens", "new_tokens", "seconds", "tokens_per_second", "target_calls",
    "acceptance_length", "prompt_tokens", "prompt_seconds", "draft_seconds", "verify_seconds",
    "stopped", "seed", "device", "dtype",
}


@pytest.fixture(scope="module")
def tiny(checkpoint):
    folder = checkpoint[1]
    return load_model(folder), load_tokenizer(folder)


def answer_alone(tiny, text: str, count: int, **choices) -> list[int]:
    target, tokenizer = tiny
    config = GenerationConfig(count, **choices)
    return list(generate(target, tokenizer.chat(ask(text)), config))


# --- One prompt ---


class Processes(NamedTuple):
    """Whole command lines. All are started at once, because most of their time is that of imports.
    """

    seeded: subprocess.Popen  # speculate.py, with a seed
    no_stderr: subprocess.Popen  # llama.py, also with one
    no_reader: subprocess.Popen  # llama.py


def start(script: str, *flags: str, before: tuple[str, ...] = ()) -> subprocess.Popen:
    whole = [*before, sys.executable, ROOT / script, "--device", "cpu", *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(whole, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture(scope="module")
def processes(checkpoint):
    seeded = ["--dtype", "float32", "--temperature", "1", "--seed", "3", "--json"]
    closed = ("sh", "-c", '"$@" 2>&-', "sh")
    tiny_model = checkpoint[:2]
    started = Processes(
        start("speculate.py", "--model", "toy", *seeded, "--max-new-tokens", "24"),
        start("llama.py", *tiny_model, *seeded, "--max-new-tokens", "8", before=closed),
        start("llama.py", *tiny_model, *HI),
    )
    started.no_reader.stdout.close()
    yield started
    for process in started:
        process.kill()
        with process:
            pass  # closes its pipes and waits for its end


def test_prompt_seed_and_temperature_determine_the_tokens_also_in_another_process(processes, toy):
    """This also holds for a piped prompt: one whole command line. (With the default model there is
    one in test_server.py.)"""
    tokenizer = toy[1]
    question = "Tell me a story."
    out, err = processes.seeded.communicate(question + "\n")
    assert processes.seeded.returncode == 0, err
    there = json.loads(out)
    models = load_models("toy", None, "cpu", torch.float32)
    method = WithDrafts(models.target, models.drafter, TREE)
    config = GenerationConfig(24, temperature=1.0, seed=3, stop_ids=frozenset(tokenizer.stop_ids))
    prompt = tokenizer.chat(ask(question))
    other = answer(method, prompt, replace(config, seed=4))
    here = answer(method, prompt, config)
    assert (here.tokens, here.target_calls) == (there["tokens"], there["target_calls"])
    assert here.target_calls < 23
    assert other.tokens != here.tokens


def test_the_command_lines_give_the_same_tokens_with_and_without_drafts(checkpoint, tiny):
    question = ["--prompt", "Why is the sky blue?", "--max-new-tokens", 24, "--json"]
    alone = json.loads(command(*checkpoint, *question, "--no-speculation").out)
    assert alone["tokens"] == answer_alone(tiny, "Why is the sky blue?", 24)
    assert alone["new_tokens"] == 24 == alone["target_calls"] + 1
    assert alone["acceptance_length"] == 1
    target_flags = [*checkpoint[:2], *checkpoint[4:]]  # without a drafter
    result = json.loads(command(*target_flags, *question, script="llama.py").out)
    assert set(result) == set(alone) == KEYS
    assert result["tokens"] == alone["tokens"]
    for flags in (
        [],
        ["--draft-depth", 4, "--draft-top-k", 2, "--draft-tokens", 6],
        ["--draft-length", 4],
        ["--lookup"],
    ):
        result = json.loads(command(*checkpoint, *question, *flags).out)
        assert set(result) == KEYS
        assert result["tokens"] == alone["tokens"] and result["text"] == alone["text"]
        assert result["acceptance_length"] == 23 / result["target_calls"] > 1


def test_a_generation_accounts_for_its_time_and_says_why_it_ended(checkpoint):
    flags = [*checkpoint, "--prompt", "Why?", "--seed", 7, "--json"]
    result = json.loads(command(*flags, "--max-new-tokens", 40).out)
    parts = sum(result[name] for name in ("prompt_seconds", "draft_seconds", "verify_seconds"))
    assert 0.7 * result["seconds"] < parts < result["seconds"]
    assert result["prompt_tokens"] == 23 and result["seed"] == 7
    assert result["device"] == "cpu" and result["dtype"] in ("float32", "bfloat16")
    assert result["stopped"] == "max-new-tokens"
    full = json.loads(command(*flags, "--max-new-tokens", 40, "--prompt", "a" * 2000).out)
    assert full["stopped"] == "context" and full["prompt_tokens"] + full["new_tokens"] == 2048


def test_the_text_goes_to_stdout_and_what_a_reader_wants_to_know_to_stderr(checkpoint, tiny):
    done = command(*checkpoint, "--prompt", "Why?", "--max-new-tokens", 5)
    assert done.out == tiny[1].decode(answer_alone(tiny, "Why?", 5)) + "\n"
    line = (
        r"5 tokens \(stopped at --max-new-tokens 5\), [\d.e+]+ tokens per second, "
        r"acceptance length [\d.]+\n"
    )
    assert re.fullmatch(line, done.err)


def test_an_answer_of_one_token_has_no_acceptance_length_since_nothing_was_drafted(checkpoint):
    flags = [*checkpoint, "--prompt", "Why?", "--max-new-tokens", 1, "--trace"]
    done = command(*flags)
    assert re.fullmatch(
        r"1 token \(stopped at --max-new-tokens 1\), [\d.e+]+ tokens per second\n", done.err
    )
    assert done.out.startswith("cycle 1: the prompt, nothing drafted; ")


def test_show_says_that_a_pipe_gets_no_colors(checkpoint):
    shown = command(*checkpoint, "--prompt", "Why?", "--max-new-tokens", 5, "--show")
    assert shown.err.startswith("--show: no colors, since the text does not go to a terminal\n")


def test_a_piped_prompt_with_json_gives_one_object_even_with_stderr_closed(processes, tiny):
    expected = answer_alone(tiny, "Hi!", 8, temperature=1.0, seed=3)
    out, _ = processes.no_stderr.communicate("Hi!\n")  # as `echo` ends a line
    assert processes.no_stderr.returncode == 0
    result = json.loads(out)
    assert result["tokens"] == expected
    assert result["text"] == tiny[1].decode(expected)


def test_text_is_written_in_the_encoding_of_stdout(chat_model):
    flags = ["--model", chat_model, "--dtype", "float32", *HI, "--max-new-tokens", 9]
    flags += ["--temperature", 100]
    model = load_model(chat_model)
    tokenizer = load_tokenizer(chat_model)
    config = GenerationConfig(9, temperature=100.0)
    text = tokenizer.decode(list(generate(model, tokenizer.chat(ask("Hi")), config)))
    assert not text.isascii()

    class Ascii(io.TextIOWrapper):
        def __init__(self, buffer, encoding: str, newline: str):
            super().__init__(buffer, "ascii", newline=newline)

    out = command(*flags, script="llama.py", stdout=Ascii).out
    assert out == f"{text}\n".encode("ascii", "replace").decode()


def test_a_reader_of_stdout_who_leaves_ends_the_answer_without_a_message(processes):
    assert processes.no_reader.stderr.read() == ""
    assert processes.no_reader.wait(30) == 1


def test_show_colors_the_accepted_drafts_and_leaves_the_text_as_it_is(checkpoint, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    flags = [*checkpoint, "--prompt", "Count from 1 to 20.", "--max-new-tokens", 24]
    plain = command(*flags)
    assert plain.status == 0 and plain.err.startswith("24 tokens")
    assert command(*flags, "--show").out == plain.out
    colored = command(*flags, "--show", stdout=Screen).out
    assert GREEN in colored
    seen = plain.out.translate(PICTURES)  # nothing that a terminal would obey
    assert colored.replace(GREEN, "").replace(PLAIN, "") == seen != plain.out
    monkeypatch.setenv("NO_COLOR", "1")
    assert command(*flags, "--show", stdout=Screen).out == seen


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


# --- Flags ---


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


def test_help_shows_the_defaults():
    text = " ".join(command("--help", script="llama.py").out.split())
    defaults = {
        "--max-new-tokens": "256",
        "--temperature": "0.0",
        "--top-p": "1.0",
        "--seed": "0",
        "--model": "smollm2",
    }
    for flag, default in defaults.items():
        assert re.search(rf"{flag} [A-Z_]+ [^()]*\(default: {default}\)", text)


# --- Bad input ends in one line and status 2 ---


@pytest.mark.parametrize("arguments, complaint", [
    (["--prompt", ""], "the prompt is empty"),
    (["Why is the sky blue?"], "unexpected argument 'Why is the sky blue?'"),
    (["--promt", "Hi"], "unexpected argument '--promt'"),
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
    (["--serve", "99999"], "expected PORT or HOST:PORT"),
    ([*HI, "--show", "--no-speculation"], "--show is not for --no-speculation"),
    ([*HI, "--lookup", "--no-speculation"], "--lookup is not for --no-speculation"),
    ([*HI, "--trace", "--no-speculation"], "--trace is not for --no-speculation"),
    ([*HI, "--draft-length", "4", "--draft-depth", "6"], "--draft-depth is a size of a tree"),
    ([*HI, "--device", "gpu"], "a device is cpu, cuda or mps"),
    ([*HI, "--model", "toy", "--drafter", "no/such/folder"], "no/such/folder"),
    ([*HI, "--model", "weights/toy/drafter"], "is a drafter, not a target"),
    (["--model", "toy", "--prompt", "word " * 5000], "shorten"),
], ids=case_name)
def test_a_wrong_command_line_is_refused(arguments, complaint, monkeypatch):
    monkeypatch.chdir(ROOT)
    refused(command(*arguments), complaint)


@pytest.mark.parametrize("flags, culprit", [
    (["--temperature", "-1"], "error: --temperature: expected a number from 0 to 100, not '-1'"),
    (["--temperature", "nan"], "--temperature"),
    (["--top-p", "0"], "--top-p"),
    (["--max-new-tokens", "0"], "--max-new-tokens: expected a whole number, at least 1, not '0'"),
    (["--seed", "x"], "--seed: expected a whole number from 0 to"),
    (["--device", "abacus"], "abacus"),
    (["--device", "cuda:99"], "cuda:9"),
    (["--model", "two\nlines"], "two lines: no such file or folder, and no such model"),
], ids=case_name)
def test_a_bad_value_is_refused(flags, culprit):
    refused(command(*HI, *flags, script="llama.py"), culprit)
