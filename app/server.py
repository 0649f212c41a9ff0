"""The server of app/client.py: sessions of clients over sockets, around netsim's `Server`.

    python speculate.py --serve 7000

plumbing/messages.py receives requests and sends replies, and has a thread for each client. Here is
what a session does with a request. Beyond netsim's two calls a server has two more:

    call        the client sends              the server replies
    read        + number, known               the update without that of the first `known` tokens
    verify      + number
    repeat      a session, a number           the reply to that request, or nothing
    generate    a text, stop_ids              token: a reply for each, as a plain API

A client that has missed a reply asks for it again with "repeat", over a new connection: see
`ReconnectingVerifier`. `known` says how many tokens it has the update of.

Whatever a client sends is checked, and is refused if it is malformed. The worst that a client can
do is to keep the server busy.
"""
from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections import OrderedDict
from concurrent import futures
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Callable

import torch

from app.answers import after_each_pass
from app.exact import ExactVerifier
from app.loading import find_drafter, fingerprints, load_models
from llama import GenerationConfig, Llama, Sampling, generate
from moa import CacheUpdate, Draft, Drafter
from netsim import (
    MAX_DRAFT_TOKENS,
    Q_TOKENS,
    Message,
    Server,
    Tensors,
    dequantize_probabilities,
    make_reply,
    parse_read,
    parse_verify,
)
from plumbing.errors import InputError, run_command
from plumbing.messages import (
    MAX_CLIENTS,
    Address,
    HasLeft,
    MessageServer,
    Replies,
    check_ids,
    check_int,
)
from speculate import VerifyResult

# --- Sessions ---

MAX_KEPT_REPLIES = 2 * MAX_CLIENTS  # also those of clients that have left: see `Service.keep`
MAX_NUMBER = 1 << 53  # of a request


@dataclass
class Service:
    """What all sessions of a server share.

    Each client has a thread of its own, but there is only one worker thread, which does the models'
    passes of all clients in turn: PyTorch keeps a pool of threads for each thread that calls it,
    and several pools would fight for the cores.

        a client's thread                                the worker thread
        receives a request, and calls `parse`
        in `run_in_worker`, submits `make_next`     ->   runs `decide`, `repeat` or `generate` until
        and checks that the client is still there        the function yields its next reply
        sends the reply                             <-
    """

    model: Llama
    drafter: Drafter
    fingerprints: dict[str, str]
    worker: futures.ThreadPoolExecutor
    # The newest reply of each session: its number, and the message. The worker alone uses this.
    kept: OrderedDict[str, tuple[int, Message]] = field(default_factory=OrderedDict)

    def keep(self, session: str, number: int, reply: Message) -> None:
        """Keep a reply, in case that the client misses it. Only the sessions that replied last have
        theirs kept."""
        self.kept[session] = (number, reply)
        self.kept.move_to_end(session)
        if len(self.kept) > MAX_KEPT_REPLIES:
            self.kept.popitem(last=False)

    def find(self, session: str, number: int) -> Message | None:
        """Return the reply of a session to the request of this number, or None."""
        newest, reply = self.kept.get(session, (0, None))
        return reply if newest == number else None


class TargetSession(Server):
    """The server's side of one client: a `Session` of plumbing/messages.py."""

    def __init__(self, service: Service, has_left: HasLeft):
        super().__init__(service.model, service.drafter)
        self.service = service
        self.has_left = has_left
        self.name = secrets.token_hex(8)  # no other client can guess it

    @property
    def greeting(self) -> dict:
        return {**self.service.fingerprints, "session": self.name}

    def new_verifier(self, capacity: int, sampling: Sampling) -> ExactVerifier:
        return ExactVerifier(self.model, self.drafter, capacity, sampling)

    def parse(self, fields: dict, tensors: Tensors) -> Callable[[], Replies]:
        """Check a request. Return a function that makes its replies."""
        call = fields["call"]
        # The functions called here are generators: they do nothing until asked for a reply.
        if call == "verify":
            number = check_int(fields["number"], 1, MAX_NUMBER, "number")
            draft = self.check_verify(fields, tensors)
            replies = self.decide(number, partial(self.verify, draft))
        elif call == "read":
            number = check_int(fields["number"], 1, MAX_NUMBER, "number")
            tokens, config = check_read(fields, tensors, self.model)
            known = check_int(fields.get("known", 0), 0, len(tokens) - 1, "known")
            replies = self.decide(number, partial(self.read, tokens, config), known)
        elif call == "repeat":
            replies = self.repeat(str(fields["session"]), fields["missed"])
        elif call == "generate":
            tokens, config = check_read(fields, tensors, self.model)
            stop_ids = frozenset(fields["stop_ids"])
            replies = self.generate(tokens, replace(config, stop_ids=stop_ids))
        else:
            raise ValueError(f"unknown call {call!r:.40}")
        return partial(self.run_in_worker, replies)

    def decide(
        self, number: int, compute: Callable[[], VerifyResult], known: int = 0
    ) -> Replies:
        """Reply with a verdict, which is kept before it is sent."""
        reply = make_reply(without_known(compute(), known))
        self.service.keep(self.name, number, reply)
        yield reply

    def repeat(self, session: str, number: int) -> Replies:
        """Reply as another session has. (Like all work, this waits for the worker, and so for the
        end of a pass of that session.)"""
        yield self.service.find(session, number) or ({}, {})

    def generate(self, tokens: list[int], config: GenerationConfig) -> Replies:
        """Write with the target alone, as a plain API does. Yield a reply for each token."""
        for token in generate(self.model, tokens, config):
            yield {"token": token}, {}

    def run_in_worker(self, replies: Replies) -> Replies:
        """Let the worker compute each reply when it is asked for. Raise ConnectionError as soon as
        the client has left."""
        while True:
            task = self.service.worker.submit(self.make_next, replies)
            while not futures.wait([task], timeout=0.1).done:
                self.stop_if_client_left()
            reply = task.result()
            if reply is None:
                return
            yield reply

    @torch.inference_mode()
    def make_next(self, replies: Replies) -> Message | None:
        self.stop_if_client_left()  # it may have left while the worker served others
        with after_each_pass(self.model, self.stop_if_client_left):
            try:
                return next(replies, None)
            except FloatingPointError as error:
                raise InputError(f"{error}: the server needs --dtype bfloat16 or float32")

    def stop_if_client_left(self) -> None:
        """Raise ConnectionError if the client has left, so that no more work is done for it."""
        if self.has_left():
            raise ConnectionError("the client has left")

    def check_verify(self, fields: dict, tensors: Tensors) -> Draft:
        """Check a draft, and return it. The draft must fit the model, the text and the context."""
        if self.verifier is None:
            raise ValueError("drafts must follow a text")
        sizes = self.model.config
        tokens = fields["drafts"]
        check_int(len(tokens), 0, MAX_DRAFT_TOKENS, "number of drafted tokens")
        for i, (token, parent) in enumerate(zip(tokens, fields["parents"], strict=True)):
            check_int(token, 0, sizes.vocab_size - 1)
            check_int(parent, 0, i)  # the root, or a token before this one
        if self.verifier.sampling.temperature == 0 or not tokens:
            draft = parse_verify(fields, {}, self.root, self.model)  # without q
        else:
            check_probabilities(fields, tensors, self.model)
            draft = parse_verify(fields, tensors, self.root, self.model)
        cache = self.verifier.cache
        positions = cache.length + max(map(len, draft.paths))
        slots = cache.length + len(draft.tokens)
        check_int(positions, 0, sizes.max_position_embeddings, "number of positions")
        check_int(slots, 0, cache.kv.shape[3], "number of slots in the cache")
        return draft


def without_known(result: VerifyResult, known: int) -> VerifyResult:
    """Return a result whose update lacks the first `known` tokens."""
    update = result.update
    left = CacheUpdate(
        update.tokens[known:], update.ca_kv[..., known:, :], update.tli_kv[..., known:, :]
    )
    return replace(result, update=left)


# The next functions check what a client has sent. If it is malformed, they raise one of the
# exceptions that `refuse_malformed` of plumbing/messages.py catches.


def check_read(
    fields: dict, tensors: Tensors, model: Llama
) -> tuple[list[int], GenerationConfig]:
    """Check a text and its GenerationConfig, and return them. Text and answer must fit the
    context."""
    context = model.config.max_position_embeddings
    tokens = check_ids(tensors["tokens"], model.config.vocab_size)
    length = check_int(len(tokens), 1, context - 1, "length of the text")
    check_int(fields["max_new_tokens"], 1, context - length, "max_new_tokens")
    check_int(fields["seed"], 0, 2**63 - 1, "seed")
    check_number(fields["temperature"], 0, 100, "temperature")
    check_number(fields["top_p"], 1e-6, 1, "top_p")
    return parse_read(fields, tensors)


def check_number(value: object, low: float, high: float, what: str) -> None:
    """Raise ValueError unless the value is an int or a float within [low, high]."""
    if type(value) not in (int, float) or not low <= value <= high:
        raise ValueError(f"invalid {what} {value!r:.40}: expected a number from {low} to {high}")


def check_probabilities(fields: dict, tensors: Tensors, model: Llama) -> None:
    """Check the distributions of a draft. There must be one for each parent, from which its
    children can have been drawn."""
    vocab_size = model.config.vocab_size
    parents = sorted(set(fields["parents"]))
    ids = tensors["ids"]
    weights = tensors["weights"]
    shape = (len(parents), min(Q_TOKENS, vocab_size))
    check_ids(ids.flatten(), vocab_size)
    if ids.shape != shape or weights.shape != shape or weights.dtype != torch.uint8:
        raise ValueError("q does not fit the drafts")
    q = dequantize_probabilities(ids, weights, vocab_size)  # NaN where all weights are 0
    rows = [parents.index(parent) for parent in fields["parents"]]
    if not (q[rows, fields["drafts"]] > 0).all():
        raise ValueError("q does not fit the drafts: one cannot have been drawn from it")


# --- Serving ---


def serve(
    address: Address,
    model: str,
    drafter: str | Path | None,
    device: str,
    dtype: torch.dtype,
    announce: Callable[[Address], None],
) -> None:
    """Load models, and serve without end. `announce` is called with the address once clients can
    connect. Raise InputError if the server cannot listen there, before anything is loaded."""
    with futures.ThreadPoolExecutor(1) as worker, MessageServer(address) as server:
        models = load_models(model, drafter, device, dtype)
        checksums = fingerprints(model, find_drafter(model, drafter))
        service = Service(models.target, models.drafter, checksums, worker)
        server.serve(partial(TargetSession, service), announce)


def announce_on_terminal(address: Address) -> None:
    """Tell where the server listens, and how to connect."""
    host, port = address
    if ":" in host:  # an IPv6 address
        host = f"[{host}]"
    print(f"{host}:{port}", flush=True)  # for scripts
    command = f"python speculate.py --remote {host}:{port}"
    print(f"connect with: {command} (and this side's --model and --drafter)", file=sys.stderr)


def start_server(
    model: str, drafter: str | Path | None, device: str, dtype: torch.dtype
) -> Address:
    """Reduce this process to a quarter of its threads, and start a server in a new process, which
    loads the models. Return the server's address. Raise InputError if the server does not start.

    More threads would hardly speed a drafter up, and the server needs the cores.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // 4))
    context = get_context("spawn")
    pipe, server_pipe = context.Pipe()  # the two ends: the server will send its address
    process_args = (server_pipe, model, drafter, device, dtype)
    # Ctrl-C in a terminal reaches both processes, but is meant for this one.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server inherits this
    context.Process(target=serve_until_parent_ends, args=process_args, daemon=True).start()
    signal.signal(signal.SIGINT, on_interrupt)
    server_pipe.close()
    try:
        return pipe.recv()
    except EOFError:
        raise InputError("the server did not start: see above")


def serve_until_parent_ends(pipe: Connection, *what_to_load) -> None:
    """Load models and serve until the parent process ends, however it ends. Send the server's
    address through the pipe. what_to_load: as in `serve`."""

    def end_with_parent() -> None:
        parent_process().join()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    run_command(partial(serve, ("localhost", 0), *what_to_load, pipe.send))
