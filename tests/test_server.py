"""The server: who gets a place, what a client may send, and whole command lines."""
import contextlib
import json
import math
import os
import pty
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from command_line import command, refused
from conftest import ROOT
from test_chat import READING, OnTerminal, on_terminal, run_forked
from test_client import channel_to
from test_messages import LIMIT, frame, serving, soon, wait_for
from test_remote import (  # noqa: F401 (fixtures)
    CONFIG,
    impatient,
    models,
    new_session,
    over,
    serving_models,
    watch,
)
from tiny_models import PROMPT, ask, new_drafter, new_target, target_alone

from app import client
from app.answers import TimedCycle, answer
from app.loading import load_model
from app.server import MAX_KEPT_REPLIES, TargetSession, announce_on_terminal
from llama import GenerationConfig, Llama, generate
from netsim import make_read
from plumbing import messages
from plumbing.errors import InputError
from plumbing.flags import address
from plumbing.messages import MALFORMED, MessageServer, receive_message, send_message
from plumbing.tokenizer import Tokenizer, load_tokenizer

# --- Who gets a place, and who loses it ---


def connect(server: MessageServer) -> socket.socket:
    """A connection that has been greeted."""
    sock = socket.create_connection(server.server_address, timeout=30)
    receive_message(sock, LIMIT, soon())
    return sock


@pytest.mark.parametrize("part", [b"", b"MoAs"])
def test_a_client_that_sends_nothing_more_is_disconnected(models, part, monkeypatch, capsys):
    monkeypatch.setattr(messages, "IDLE_SECONDS", 0.1)
    with serving_models(*models) as server:
        sock = connect(server)
        with sock:
            sock.sendall(part)
            assert sock.recv(1) == b""
    assert capsys.readouterr().err == "127.0.0.1: timed out\n"


def send_read(sock: socket.socket, text: list[int], count: int = 24, **changes) -> None:
    """Ask for the token after a text, and do not wait for it."""
    request = vars(make_read(text, GenerationConfig(count), seed=0))
    send_message(sock, {"call": "read", **request, **changes})


def test_one_client_too_many_is_refused_in_one_line_until_another_leaves(models):
    target, drafter = models
    with serving_models(*models) as server, contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(messages.MAX_CLIENTS):
            sockets.append(stack.enter_context(connect(server)))
        with pytest.raises(InputError, match="refused: .* already has 8 clients") as error:
            answer(over(channel_to(server), drafter), PROMPT, CONFIG)
        assert "\n" not in str(error.value)
        for sock in sockets[1:]:  # the server goes on serving the clients that it has
            send_read(sock, PROMPT)
            receive_message(sock, LIMIT, soon())
        sockets[0].close()
        wait_for(lambda: len(server.connections) < 8)
        result = answer(over(channel_to(server), drafter), PROMPT, CONFIG)
    assert result.tokens == target_alone(target, 24)


def test_a_client_that_was_disconnected_while_it_was_idle_reconnects(models, monkeypatch):
    monkeypatch.setattr(messages, "IDLE_SECONDS", 0.3)
    target, drafter = models
    pauses = []

    def emit(cycle: TimedCycle) -> None:
        if len(pauses) < 3:
            pauses.append(cycle)
            time.sleep(0.5)

    with serving_models(*models) as server:
        result = watch(over(channel_to(server), drafter), PROMPT, CONFIG, emit)
    assert result.tokens == target_alone(target, 24)
    assert result.unverified == 0 and result.network["round_trips"] >= 1 + result.target_calls + 3


# --- Hostile messages ---

TEXT = torch.tensor(PROMPT, dtype=torch.int32)
READ = {
    "call": "read",
    "tokens": TEXT,
    "max_new_tokens": 3,
    "temperature": 0.8,
    "top_p": 1.0,
    "seed": 0,
}
GENERATE = READ | {"call": "generate", "stop_ids": []}
VERIFY = {  # a small tree
    "call": "verify",
    "tokens": [3, 1, 2, 1],
    "parents": [0, 1, 0],
    "ids": torch.arange(16, dtype=torch.int32).expand(2, 16).contiguous(),  # of two parents
    "weights": torch.full((2, 16), 9, dtype=torch.uint8),
}
REPEAT = {"call": "repeat", "session": "", "number": 1}
IDS = VERIFY["ids"]
WEIGHTS = VERIFY["weights"]


def each(name: str, *values: object) -> list[dict]:
    """Changes of a request: each of these values in this place."""
    return [{name: value} for value in values]


WRONG_TEXTS = [
    *each("call", "stop", [], None),
    *each("tokens", None, PROMPT, TEXT.long(), TEXT[None], TEXT[:0], TEXT - 1),
    *each("tokens", TEXT + 12, TEXT.repeat(16)),  # the target has 16 tokens, its context 64
    *each("max_new_tokens", None, 0, 2.0, 61),  # 61: with the prompt one too many
    *each("temperature", -1, math.nan, 101, "warm", "0.8", None),
    *each("top_p", 0, 1.1, math.nan),
    *each("seed", 2**70, "0", None),
    *each("more", 1),
]
WRONG_DRAFTS = [
    *each("tokens", None, 3, [], [3, 1, 2, 16], [3, 1, 2, -1], [3, 1, 2, 1.0], [3, 1, 2, True]),
    *each("tokens", [3, 1, 2], [16, 1, 2, 1], TEXT),
    {"tokens": [1] * 66, "parents": [0] * 65},
    *each("parents", None, [0, 1], [-1, 1, 0], [0, 1.0, 0]),
    *each("parents", [0, 2, 0], [0, 3, 0], [0, 0, 0]),  # itself, a later one, fewer than have a q
    *each("ids", None, [1], IDS[:1], IDS[:, :15], IDS + 1),
    *each("weights", None, WEIGHTS.int(), WEIGHTS[:, :15]),
    *each("weights", WEIGHTS * torch.tensor([[1], [0]], dtype=torch.uint8)),
    *each("more", 1),
]


def reply_to(session: TargetSession, right: dict, changes: dict) -> list[dict]:
    """All replies to such a request."""
    return list(session.parse(right | changes))


@pytest.mark.parametrize("right, wrong", [
    *((READ, wrong) for wrong in WRONG_TEXTS),
    *((GENERATE, wrong) for wrong in each("stop_ids", None, [[]]) + [{"max_new_tokens": 61}]),
    *((REPEAT, wrong) for wrong in each("number", None, "1", TEXT)),
    *((VERIFY, wrong) for wrong in WRONG_DRAFTS)], ids=lambda value: str(value)[:40])
def test_a_malformed_request_is_refused_and_a_right_one_after_it_is_answered(models, right, wrong):
    with ThreadPoolExecutor(1) as worker:
        session = new_session(*models, worker)()
        if right is VERIFY:
            with pytest.raises(ValueError, match="drafts must follow a text"):
                reply_to(session, VERIFY, {})
            reply_to(session, READ, {})
        with pytest.raises(MALFORMED):
            session.parse(right | wrong)
        replies = reply_to(session, right, {})
        if right is REPEAT:
            assert replies == [{}]
        else:
            assert 0 <= replies[0]["token"] < 16
            assert len(replies) == (3 if right is GENERATE else 1)


def test_a_draft_beyond_the_context_is_refused(models):
    with ThreadPoolExecutor(1) as worker:
        session = new_session(*models, worker)()
        reply_to(session, READ, {"temperature": 0})
        too_deep = {"tokens": [1] * 65, "parents": list(range(64))}
        with pytest.raises(ValueError, match="number of positions 69: .* from 0 to 64"):
            reply_to(session, VERIFY, too_deep)


ODD = [
    None, -1, 0, 1, 3, 10**9, 2**70, 10**400, "0", [], {}, 1.5, math.nan, math.inf, True, [-1],
    [[]], "\ud800",
]
SHAPES = [(0,), (1,), (3,), (2, 16), (2, 16), (70,), (), (2**40, 0)]


def random_request(generator: random.Random) -> dict:
    """A request that is nearly right."""
    fields = dict(generator.choice([READ, VERIFY, VERIFY, GENERATE, REPEAT]))
    if generator.random() < 0.5 and "temperature" in fields:
        fields["temperature"] = 0
    for name in generator.sample(sorted(fields), generator.choice([0, 1, 1, 3])):
        fields[name] = generator.choice(ODD)
        if generator.random() < 0.3:
            end = generator.choice([2, 16, 17])
            dtype = generator.choice([torch.int32, torch.uint8, torch.half])
            fields[name] = torch.randint(-1, end, generator.choice(SHAPES)).to(dtype)
    return fields


def random_message(number: int, whole: bytes, generator: random.Random) -> bytes:
    """A message that is cut short, one with some bytes replaced, or three requests that are nearly
    right after at most two that are."""
    start = generator.randrange(len(whole))
    kind = number % 8
    if kind < 5:
        if number % 2 == 0:
            return whole[:start]
        end = start + generator.randrange(9)
        return whole[:start] + generator.randbytes(generator.randrange(9)) + whole[end:]
    message = whole * (kind - 5)
    for _ in range(3):
        message += frame(random_request(generator))
    return message


def test_hundreds_of_malformed_frames_leave_the_server_serving(capsys):
    target = new_target(16, layers=1)
    drafter = new_drafter(target)
    generator = random.Random(0)
    whole = frame(READ)
    with serving_models(target, drafter) as server:
        for number in range(500):
            sock = socket.create_connection(server.server_address, timeout=30)
            with sock, contextlib.suppress(OSError):
                sock.sendall(random_message(number, whole, generator))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
        wait_for(lambda: not server.connections)
        result = answer(over(channel_to(server), drafter), PROMPT, CONFIG)
        assert result.tokens == target_alone(target, 24)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 200
    assert all(line.startswith("127.0.0.1: ") for line in lines)


def test_the_newest_reply_of_a_session_is_kept_for_a_while_and_for_nobody_else(models):
    with ThreadPoolExecutor(1) as worker:
        sessions = []
        connect = new_session(*models, worker)
        for _ in range(MAX_KEPT_REPLIES + 1):
            sessions.append(connect())
            [reply] = reply_to(sessions[-1], READ, {})

        def repeated(session: str, number: int) -> dict:
            [reply] = reply_to(sessions[-1], REPEAT, {"session": session, "number": number})
            return reply

        newest = sessions[-1].name
        assert repeated(newest, 1) is reply
        for session, number in ((newest, 2), ("", 1), (sessions[0].name, 1)):
            assert repeated(session, number) == {}
        reply_to(sessions[1], VERIFY, {})
        assert repeated(sessions[1].name, 1) == {} != repeated(sessions[1].name, 2)


# --- Whole command lines, in processes of their own ---


class Processes(NamedTuple):
    """All are started at once, because most of their time is that of imports. Those on a terminal
    are forks of this process. Their servers are not."""

    piped: subprocess.Popen  # its prompt comes from a pipe; on a CPU, it is the default target's
    server: subprocess.Popen  # until Ctrl-C
    alone: OnTerminal  # without drafts, from a server of its own, for minutes
    chat: OnTerminal  # over a slow link: its answers take a minute


def start(*arguments: str, **streams) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "speculate.py", *arguments],
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=obey_ctrl_c,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **streams,
    )


def obey_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's & ignores it


def fork_on_terminal(*arguments: str) -> OnTerminal:
    process_id, terminal = pty.fork()
    if process_id == 0:
        run_forked(["speculate.py", *arguments])
    return OnTerminal(process_id, terminal)


@pytest.fixture(scope="module")
def tiny(checkpoint) -> tuple[Llama, Tokenizer]:
    """The target of these command lines, and its tokenizer."""
    folder = checkpoint[1]
    return load_model(folder), load_tokenizer(folder)


@pytest.fixture(scope="module")
def processes(checkpoint):
    default = ["--remote", "--latency", "21ms", "--max-new-tokens", "12", "--device", "cpu"]
    slow = ["--remote", "--max-new-tokens", "1700", *checkpoint]
    api = ["--no-speculation", "--bandwidth", "5kbit"]
    started = Processes(
        piped=start(*default, stdin=subprocess.PIPE),
        server=start("--serve", "0", *checkpoint),
        alone=fork_on_terminal("--prompt", "Why?", *api, *slow),
        chat=fork_on_terminal("--trace", "--latency", "30ms", *slow),
    )
    started.piped.stdin.write("Say hi.\n")
    started.piped.stdin.close()
    yield started
    for process in (started.piped, started.server):
        process.kill()
        with process:
            pass  # closes its pipes and waits for its end
    for process in (started.alone, started.chat):
        process.end()


def is_running(pid: str) -> bool:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return "State:\tZ" not in status  # a zombie has ended
    return False


def own_processes(client: OnTerminal) -> list[str]:
    """The processes that a client has started: its server."""
    number = client.process_id
    children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
    assert children and all(map(is_running, children))
    return children


def test_ctrl_c_on_a_terminal_ends_an_answer_and_the_end_of_the_chat_its_server(processes):
    chat = processes.chat
    chat.read_until("Ask something.*> ")
    servers = []
    for question in (b"one\n", b"two\n"):
        chat.type(question)
        chat.read_until("cycle 2: ")
        servers.append(own_processes(chat))
        chat.type(b"\x03")
        chat.read_until(r"tokens \(interrupted\), .* bytes up.*> ")
    assert servers[0] == servers[1]
    chat.type(b"\x04")
    assert chat.wait() == 0
    wait_for(lambda: not any(map(is_running, servers[0])))


def test_a_server_of_our_own_may_be_a_plain_api_and_ends_even_if_its_client_is_killed(
        processes, tiny):
    alone = processes.alone
    seen = alone.read_until(READING + ".{20}")  # the answer has begun
    target, tokenizer = tiny
    prompt = tokenizer.chat(ask("Why?"))
    whole = tokenizer.decode(list(generate(target, prompt, GenerationConfig(60))))
    assert seen.rpartition("\033[K")[2][:20] == on_terminal(whole)[:20]
    its_server = own_processes(alone)
    os.kill(alone.process_id, signal.SIGKILL)
    assert alone.wait() == -signal.SIGKILL
    wait_for(lambda: not any(map(is_running, its_server)))


def test_the_command_line_gives_the_same_tokens_with_the_target_on_a_server_that_ctrl_c_ends(
        processes, tiny, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "MIN_TIMEOUT", 0.2)
    target, tokenizer = tiny
    alone = list(generate(target, tokenizer.chat(ask("Why?")), CONFIG))
    server = processes.server
    address = server.stdout.readline().strip()
    question = [*checkpoint, "--prompt", "Why?", "--max-new-tokens", "24", "--remote", address]
    for more in (["--network", "4g"], ["--network", "wan", "--no-speculation"]):
        done = command(*question, "--json", *more)
        result = json.loads(done.out)
        assert done.status == 0 and result["tokens"] == alone
        assert result["disconnected"] is False and result["unverified_tokens"] == 0
        for name in ("bytes_up", "bytes_down", "round_trips", "network_seconds"):
            assert result[name] > 0
    lost = command(*question, "--disconnect-after", "9")
    assert lost.status == 0 and " of 24 tokens are the drafter's own, unverified\n" in lost.err
    assert "24 tokens (stopped at --max-new-tokens 24), " in lost.err
    flags = ["--no-speculation", "--disconnect-after", "9", "--timeout", "1s", "--json"]
    cut = command(*question, *flags)
    arrived = json.loads(cut.out)
    assert cut.status == 2 and arrived["stopped"] == "server lost"
    assert 9 <= len(arrived["tokens"]) < 24 and alone[:len(arrived["tokens"])] == arrived["tokens"]
    other = shutil.copytree(checkpoint[1], tmp_path / "other")
    with open(other / "config.json", "a") as file:
        file.write(" ")  # of the same sizes, but not the same files
    for more in ([], ["--no-speculation"]):
        done = command(*question, "--model", other, *more)
        refused(done, "the server has another target; start both sides with the same")
    host, port = address.split(":")
    done = command("--serve", port, "--model", "nowhere")  # noticed before loading
    refused(done, f"cannot serve at localhost:{port}: ")
    with contextlib.ExitStack() as stack:
        _, busy = [
            stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(2)
        ]
        receive_message(busy, LIMIT, soon())
        send_read(busy, PROMPT, count=2000, call="generate", stop_ids=[])
        receive_message(busy, LIMIT, soon())  # the first token of many
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 130
    advice = f"connect with: python speculate.py --remote {address}"
    assert server.stderr.read() == f"{advice} (and this side's --model and --drafter)\n"


def test_the_prompt_may_come_from_a_pipe_and_the_target_from_a_server_of_our_own(
        processes, smollm2, ready_smollm2):
    _, tokenizer = smollm2
    model, _ = ready_smollm2
    out = processes.piped.stdout.read()
    err = processes.piped.stderr.read()
    prompt = tokenizer.chat(ask("Say hi."))
    config = GenerationConfig(12, stop_ids=frozenset(tokenizer.stop_ids))
    assert processes.piped.wait(30) == 0, err
    assert out == tokenizer.decode(list(generate(model, prompt, config))) + "\n"
    assert "bytes up" in err and "unverified" not in err


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_address_that_a_server_prints_is_one_that_remote_takes(host, capsys):
    announce_on_terminal((host, 7000))
    out, err = capsys.readouterr()
    assert address(out.strip()) == (host, 7000)
    assert f"--remote {out.strip()} " in err


REMOTE = ["--prompt", "Hi", "--remote"]


@pytest.mark.parametrize("arguments, complaint", [
    ([*REMOTE, "--latency", "21"], "a duration like"),
    ([*REMOTE, "--latency", "-3ms"], "a duration like"),
    ([*REMOTE, "--network", "3g"], "--network"),
    ([*REMOTE, "http://localhost:7000"], "HOST:PORT"),
    (["--serve", "0.0.0.0:7000"], "ssh -L 7000:localhost:7000 server"),
    ([*REMOTE, "a..b:7000"], "no first token from the server: a..b:7000: malformed address"),
    ([*REMOTE, "127.0.0.1:9"], "no server listens at 127.0.0.1:9; start one"),
    ([*REMOTE, "[::1]:9"], "no first token from the server: "),
    ([*REMOTE, "127.0.0.1:9", "--no-speculation"], "no server listens at 127.0.0.1:9; start one"),
], ids=str)
def test_a_network_that_is_not_there_is_refused(arguments, complaint, checkpoint, impatient):
    refused(command(*checkpoint, *arguments), complaint)
