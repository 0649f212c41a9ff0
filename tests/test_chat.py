"""Claims about chats, and about what a user sees of a network and after Ctrl-C."""
import contextlib
import itertools
import json
import math
import os
import pty
import re
import select
import signal
import sys
import time
import traceback
from typing import NamedTuple

import pytest
import torch
from command_line import Done, Typed, command
from test_remote import CountedOutage, impatient, serving_models  # noqa: F401 (a fixture)
from tiny_models import ask

from app import speculate_command
from app.answers import Generation, OnServer, Origin
from app.chat import Terminal
from app.client import Channel, Outage
from app.loading import Models, load_model, load_models
from app.speculate_command import OWN_SERVER, describe_place
from llama import GenerationConfig, Llama, generate
from moa import DraftLimits
from netsim import Link
from plumbing import terminal
from plumbing.messages import MessageServer
from plumbing.terminal import PICTURES, draw_cycle
from plumbing.tokenizer import TextStream, Tokenizer, load_tokenizer

CHAIN = DraftLimits(depth=6, min_confidence=0.2)


@pytest.fixture(scope="module")
def tiny(checkpoint) -> tuple[Llama, Tokenizer]:
    folder = checkpoint[1]
    return load_model(folder), load_tokenizer(folder)


def answer_alone(tiny: tuple[Llama, Tokenizer], messages: list[dict], count: int) -> list[int]:
    target, tokenizer = tiny
    return list(generate(target, tokenizer.chat(messages), GenerationConfig(count)))


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


def test_a_chat_says_what_answers_and_prints_its_answers_and_what_each_cost(
    chat, tiny, checkpoint
):
    done = chat(["one", "two"], "--max-new-tokens", 10)
    one, two = conversation(tiny, ["one", "two"], 10)
    assert done.status == 0
    assert done.out == tiny[1].decode(one) + "\n" + tiny[1].decode(two) + "\n"
    assert done.err.count("> ") == 3  # where stdout is no terminal
    assert f"The target is {checkpoint[1]}, on this machine.\n" in done.err
    assert done.err.count("10 tokens (stopped at --max-new-tokens 10)") == 2


@pytest.mark.parametrize("lines", [[], ["exit"], ["quit", "one"]], ids=str)
def test_a_chat_ends_at_exit_or_quit_too(chat, lines):
    done = chat(lines)
    assert done.status == 0 and done.out == ""
    assert "tokens per second" not in done.err


def test_a_chat_whose_context_is_full_goes_on_without_its_oldest_turns(chat, tiny):
    long = "a" * 1000  # a token each, of 2048
    done = chat([long, long, "b"], "--max-new-tokens", 10, "--json")
    assert done.status == 0
    assert done.err.count("the context is full: the oldest questions are left out\n") == 1
    answers = [json.loads(line)["tokens"] for line in done.out.splitlines()]
    assert answers[0] == answers[1] == answer_alone(tiny, ask(long), 10)
    _, after_one = conversation(tiny, [long, "b"], 10)
    assert answers[2] == after_one


def test_a_full_context_drops_another_turn_rather_than_cut_the_answer(chat):
    done = chat(["a" * 1000, "a" * 940], "--max-new-tokens", 40, "--json")
    assert "the context is full: the oldest questions are left out\n" in done.err
    answers = [json.loads(line) for line in done.out.splitlines()]
    assert [answer["new_tokens"] for answer in answers] == [40, 40]


def test_a_question_that_is_too_long_is_refused_and_the_chat_goes_on(chat, tiny):
    done = chat(["one", "a" * 2100, "two"], "--max-new-tokens", 10, "--json")
    assert done.status == 0
    assert len(re.findall("^.*error: .*shorten it$", done.err, re.MULTILINE)) == 1
    assert "the context is full" not in done.err  # nothing was left out for it
    answers = [json.loads(line)["tokens"] for line in done.out.splitlines()]
    assert answers == conversation(tiny, ["one", "two"], 10)


def test_the_greeting_says_where_the_target_is_and_what_is_simulated():
    assert describe_place(("host", 7), None) == "on the server at host:7"
    own = "in a server process of its own on this machine"
    assert describe_place(OWN_SERVER, None) == own
    simulated = f"{own}, behind a simulated link of 21 ms each way"
    assert describe_place(OWN_SERVER, Link(0.021)) == simulated


# --- Over a network ---


@pytest.fixture(scope="module")
def models(checkpoint) -> Models:
    return load_models(checkpoint[1], checkpoint[3], "cpu", torch.float32)


def terminal_over(
    outages: list[Outage],
    server: MessageServer,
    models: Models,
    latency: float = 0.0,
    count: int = 48,
    temperature: float = 0.0,
    **views: bool,
) -> Terminal:
    """Return a terminal that answers each prompt over a network with the next of these outages.
    views: fields of Terminal."""
    waiting = iter(outages)

    def new_channel(prompt: list[int]) -> Channel:
        return Channel(server.server_address, Link(latency), outage=next(waiting))

    method = OnServer(new_channel, models.drafter, CHAIN)
    return Terminal(models, method, GenerationConfig(count, temperature), **views)


def recorded(client: Terminal, monkeypatch) -> list[Generation]:
    """Return a list to which the terminal's answers will be added."""
    answers = []
    report = client.report

    def record(text: str, generation: Generation, interrupted: bool) -> None:
        answers.append(generation)
        report(text, generation, interrupted)

    monkeypatch.setattr(client, "report", record)
    return answers


@pytest.mark.parametrize("first, until", [(10, 30), (math.inf, math.inf)])
def test_a_line_says_that_the_server_was_lost_and_how_much_is_unverified(
    models, impatient, capsys, monkeypatch, first, until
):
    with serving_models(models.target, models.drafter) as server:
        client = terminal_over([CountedOutage(first, until=until)], server, models)
        answers = recorded(client, monkeypatch)
        text = client.respond(ask("Hi"))
    (generation,) = answers
    out, err = capsys.readouterr()
    assert text == models.tokenizer.decode(generation.tokens)
    assert out == text + "\n"
    assert re.search(r"\d+ bytes up, \d+ down\n", err)
    last = f"{generation.unverified} of 48 tokens are the drafter's own, unverified"
    line = err.splitlines()[-1]
    lost = line.startswith("the server stopped answering (") and line.endswith(last)
    assert lost == (first == 10) == (generation.unverified > 0)


def test_an_outage_that_only_delays_is_in_the_json(models, capsys):
    with serving_models(models.target, models.drafter) as server:
        outage = Outage(after=10, seconds=0.3)
        terminal_over([outage], server, models, as_json=True).respond(ask("Hi"))
    result = json.loads(capsys.readouterr().out)
    assert result["disconnected"] is True and result["unverified_tokens"] == 0


def test_show_colors_what_was_written_without_the_target_on_a_terminal(
    models, impatient, capsys, monkeypatch
):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with serving_models(models.target, models.drafter) as server:
        outage = CountedOutage(10, until=30)
        client = terminal_over([outage], server, models, show=True)
        answers = recorded(client, monkeypatch)
        client.respond(ask("Hi"))
    (generation,) = answers
    out = capsys.readouterr().out
    stream = TextStream(models.tokenizer)
    unverified = ""
    for token, origin in zip(generation.tokens, generation.origins):
        text = stream.add(token)
        unverified += text if origin == Origin.UNVERIFIED else ""
    yellow = "".join(re.findall("\033\\[33m(.*?)\033\\[0m", out, re.DOTALL))
    assert yellow == unverified.translate(PICTURES) != ""
    plain = re.sub("\033\\[[0-9]+m", "", out)
    assert plain == models.tokenizer.decode(generation.tokens).translate(PICTURES) + "\n"


def test_a_trace_has_the_link_with_its_bytes_and_all_tokens_also_those_written_offline(
    models, impatient, capsys
):
    with serving_models(models.target, models.drafter) as server:
        outage = CountedOutage(10, until=30)
        terminal_over([outage], server, models, trace=True, as_json=True).respond(ask("Hi"))
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
    with serving_models(models.target, models.drafter) as server:
        views = {"trace": True, "as_json": True}
        terminal_over([Outage()], server, models, temperature=1.0, **views).respond(ask("Hi"))
    _, *cycles, _ = map(json.loads, capsys.readouterr().out.splitlines())
    drafts = sum([cycle["drafts"] for cycle in cycles], [])
    assert {draft["p"] for draft in drafts} == {None}
    verdicts = {draft["verdict"] for draft in drafts}
    assert {"accepted", "rejected"} <= verdicts <= {"accepted", "rejected", "not reached"}


def test_a_chat_goes_on_after_an_outage_and_after_a_server_that_is_not_there(
    models, impatient, capsys, monkeypatch
):
    absent = Outage(after=0)  # for both attempts to connect
    absent.begin_if_due(0, 0.0)
    outages = [CountedOutage(10, until=30), absent, CountedOutage(20), Outage()]
    monkeypatch.setattr(sys, "stdin", Typed("one\ntwo\n\nthree\nfour\n"))
    monkeypatch.setattr(terminal, "more_is_pasted", lambda: False)
    with serving_models(models.target, models.drafter) as server:
        chat = terminal_over(outages, server, models)
        answers = recorded(chat, monkeypatch)
        chat.chat("")
    one, three, four = answers
    assert one.outage and three.outage and not four.outage
    conversation = ask("one")
    for generation, question in ((one, "three"), (three, "four")):
        text = models.tokenizer.decode(generation.tokens)
        conversation += [{"role": "assistant", "content": text}, *ask(question)]
    assert four.prompt == models.tokenizer.chat(conversation)
    assert four.tokens == list(generate(models.target, four.prompt, GenerationConfig(48)))
    err = capsys.readouterr().err
    assert err.count("the server stopped answering (") == 2
    complaint = "error: no first token from the server: the network is down"
    assert err.splitlines().count(complaint) == 1


# --- On a pseudo-terminal: Ctrl-C ---


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

    def end(self) -> None:
        """Kill the process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process_id, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.process_id, 0)
        os.close(self.terminal)


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
        process.end()


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
        speculate_command.main()
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


def on_terminal(text: str) -> str:
    return text.translate(PICTURES).replace("\n", "\r\n")


READING = r"reading the prompt, \d+ tokens \.\.\.\r\033\[K"
LEFT_OUT = r"tokens \(interrupted\).*left out of the conversation\r\n> $"


def test_a_chat_ends_an_answer_at_ctrl_c_and_itself_at_ctrl_d(start_on_terminal, tiny):
    chat = start_on_terminal("--max-new-tokens", "1500")
    chat.read_until("Ask something.*> $")
    chat.type(b"one\n")
    seen = chat.read_until(READING + ".{40}")
    chat.type(b"\x03")
    chat.read_until(LEFT_OUT)
    whole = tiny[1].decode(answer_alone(tiny, ask("one"), 200))
    assert seen.partition("\033[K")[2][:40] == on_terminal(whole)[:40]
    chat.type(b"\x03")  # where there is no answer to end
    chat.read_until("> $")
    chat.type(b"two\n")
    chat.read_until(READING + ".{40}")
    chat.type(b"\x03")
    chat.read_until(LEFT_OUT)
    chat.type(b"\x04")
    assert chat.wait() == 0


def test_a_text_pasted_as_several_lines_is_one_question_and_a_cut_answer_is_no_context(
    start_on_terminal, tiny
):
    chat = start_on_terminal("--max-new-tokens", "1000")
    chat.read_until("Ask something.*> $")
    chat.type(b"never mind\n")
    chat.read_until(READING + ".{40}")
    chat.type(b"\x03")
    chat.read_until(LEFT_OUT)
    chat.type(b"one\ntwo\n\nthree\n")
    seen = chat.read_until(READING + ".{40}")
    chat.type(b"\x03")
    whole = tiny[1].decode(answer_alone(tiny, ask("one\ntwo\n\nthree"), 100))
    answer_seen = seen.partition("\033[K")[2]
    assert answer_seen[:30] == on_terminal(whole)[:30]
    chat.read_until(LEFT_OUT)
    chat.type(b"\x04")
    assert chat.wait() == 0


def test_ctrl_c_ends_a_single_answer_with_what_it_cost_and_status_130(start_on_terminal):
    process = start_on_terminal("--prompt", "Why?", "--max-new-tokens", "1500")
    process.read_until(READING + ".{40}")
    process.type(b"\x03")
    process.read_until(r"tokens \(interrupted\), .* acceptance length [\d.]+\r\n$")
    assert process.wait() == 130
