"""The server of app/client.py: what netsim's `Server` does, for many clients over sockets.

    python speculate.py --serve 7000

plumbing/messages.py receives requests and sends replies, and has a thread for each client. Here is
what a session does with a request. Beside netsim's two a server knows two more:

    call        the client sends            the server replies
    read        netsim's Read               netsim's Reply
    verify      netsim's Verify             netsim's Reply
    repeat      a session, a number         the session's reply to the request of this number, or {}
    generate    netsim's Read, stop_ids     token: a reply for each, as a plain API

A session's requests are numbered from 1. A client that has missed a reply asks for it again with
"repeat", over a new connection, which is a new session: see `ReconnectingVerifier`.

What could harm the server is checked, and is refused if it is malformed. The worst that clients
can do is to take the server's time and all of its places.
"""
from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from concurrent import futures
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Callable

import torch

from app.exact import ExactVerifier
from app.loading import find_drafter, fingerprints, load_models
from llama import GenerationConfig, Llama, generate
from moa import Draft, Drafter
from netsim import MAX_DRAFT_TOKENS, Q_TOKENS, Read, Verify, make_reply, parse_verify
from plumbing.errors import InputError, run_command
from plumbing.messages import MAX_CLIENTS, Address, MessageServer, Replies, check_int
from speculate import VerifyResult

# --- Sessions ---

MAX_KEPT_REPLIES = 2 * MAX_CLIENTS  # also those of clients that have left: see `Service.keep`


@dataclass
class Service:
    """What all sessions of a server share.

    Each client has a thread of its own, but there is only one worker thread, which does the models'
    passes of all clients in turn: PyTorch keeps a pool of threads for each thread that calls it,
    and several pools would fight for the cores.

        a client's thread                                the worker thread
        receives a request, and calls `parse`
        in `run_in_worker`, submits `make_next`     ->   runs `decide`, `repeat` or `generate` until
        sends the reply                             <-   the function yields its next reply
    """

    model: Llama
    drafter: Drafter
    fingerprints: dict[str, str]
    worker: futures.ThreadPoolExecutor
    # The newest reply of each session, and its request's number. The worker alone uses this.
    kept: dict[str, tuple[int, dict]] = field(default_factory=dict)

    def keep(self, session: str, number: int, reply: dict) -> None:
        """Keep a reply, in case that the client misses it. Only the sessions that replied last have
        theirs kept."""
        self.kept.pop(session, None)  # so that this session becomes the last one in the dict
        self.kept[session] = (number, reply)
        if len(self.kept) > MAX_KEPT_REPLIES:
            del self.kept[next(iter(self.kept))]  # the first one


class TargetSession:
    """The server's side of one client: a `Session` of plumbing/messages.py."""

    def __init__(self, service: Service):
        self.service = service
        self.name = secrets.token_hex(8)  # no other client can guess it
        self.greeting = {**service.fingerprints, "session": self.name}
        self.number = 0  # of the newest request
        self.verifier: ExactVerifier | None = None  # of the text that was read last

    def parse(self, fields: dict) -> Replies:
        """Check a request. Return its replies."""
        self.number += 1
        call = fields.pop("call")
        # The functions called here are generators: they do nothing until asked for a reply.
        if call == "read":
            request = check_read(fields, self.service.model)
            replies = self.decide(partial(self.read, request))
        elif call == "verify":
            draft = self.check_verify(fields)
            replies = self.decide(partial(self.verifier.verify, draft))
        elif call == "repeat":
            number = fields["number"]
            check_int(number, 1, 2**63, "number")
            replies = self.repeat(str(fields["session"]), number)
        elif call == "generate":
            stop_ids = frozenset(fields.pop("stop_ids"))
            request = check_read(fields, self.service.model)
            config = replace(request.config, stop_ids=stop_ids)
            replies = self.generate(request.tokens.tolist(), config)
        else:
            raise ValueError(f"unknown call {call!r:.40}")
        return self.run_in_worker(replies)

    def read(self, request: Read) -> VerifyResult:
        """Begin a text."""
        model = self.service.model
        sampling = request.config.new_sampling(model.device)
        self.verifier = ExactVerifier(model, self.service.drafter, request.slots, sampling)
        return self.verifier.prefill(request.tokens.tolist())

    def decide(self, compute: Callable[[], VerifyResult]) -> Replies:
        """Reply with a verdict, which is kept before it is sent."""
        reply = vars(make_reply(compute()))
        self.service.keep(self.name, self.number, reply)
        yield reply

    def repeat(self, session: str, number: int) -> Replies:
        """Reply as another session has to the request of this number, or with {}. (Like all work,
        this waits for the worker, and so for the end of a pass of that session.)"""
        newest, reply = self.service.kept.get(session, (0, {}))
        yield reply if newest == number else {}

    def generate(self, tokens: list[int], config: GenerationConfig) -> Replies:
        """Write with the target alone, as a plain API does. Yield a reply for each token."""
        for token in generate(self.service.model, tokens, config):
            yield {"token": token}

    def run_in_worker(self, replies: Replies) -> Replies:
        """Let the worker compute each reply when it is asked for."""
        submit = self.service.worker.submit
        while (reply := submit(self.make_next, replies).result()) is not None:
            yield reply

    @torch.inference_mode()
    def make_next(self, replies: Replies) -> dict | None:
        try:
            return next(replies, None)
        except FloatingPointError as error:
            raise InputError(f"{error}: the server needs --dtype bfloat16 or float32")

    def check_verify(self, fields: dict) -> Draft:
        """Check a draft, and return it. It must fit the model, the context and the cache."""
        if self.verifier is None:
            raise ValueError("drafts must follow a text")
        request = Verify(**fields)
        sizes = self.service.model.config
        check_int(len(request.tokens), 1, 1 + MAX_DRAFT_TOKENS, "number of tokens")
        for token in request.tokens:
            check_int(token, 0, sizes.vocab_size - 1, "token")
        for i, parent in enumerate(request.parents):
            check_int(parent, 0, i, "parent")  # the root, or a token before this one
        if self.verifier.sampling.temperature == 0 or not request.parents:
            request.ids = None  # q is not needed
        else:
            check_weights(request, sizes.vocab_size)
        draft = parse_verify(request, self.service.model)
        cache = self.verifier.cache
        positions = cache.length + max(map(len, draft.paths))
        slots = cache.length + len(draft.tokens)
        check_int(positions, 0, sizes.max_position_embeddings, "number of positions")
        check_int(slots, 0, cache.kv.shape[3], "number of slots in the cache")
        return draft


# What a client has sent is checked. If it is malformed, one of the exceptions is raised that
# `refuse_malformed` of plumbing/messages.py catches.


def check_read(fields: dict, model: Llama) -> Read:
    """Check a text and its settings. Text and answer must fit the context."""
    request = Read(**fields)
    tokens = request.tokens
    if tokens.dtype != torch.int32 or tokens.dim() != 1:
        raise ValueError("expected an int32 vector")
    if tokens.min() < 0 or tokens.max() >= model.config.vocab_size:
        raise ValueError("a token is not in the vocabulary")
    left = model.config.max_position_embeddings - len(tokens)
    check_int(request.max_new_tokens, 1, left, "max_new_tokens")
    if not (0 <= request.temperature <= 100 and 0 < request.top_p <= 1):  # NaN neither
        raise ValueError("invalid temperature or top_p")
    request.config.new_sampling("cpu")  # fails with an invalid seed
    return request


def check_weights(request: Verify, vocab_size: int) -> None:
    """Check the weights of q: of a distribution for each parent, none of which is 0 throughout."""
    weights = request.weights
    shape = (len(set(request.parents)), min(Q_TOKENS, vocab_size))
    if not weights.shape == request.ids.shape == shape or weights.dtype != torch.uint8:
        raise ValueError("q does not fit the drafts")
    if not weights.any(dim=-1).all():
        raise ValueError("a q is 0")


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
