"""Messages over a socket, and a server that gives each of its clients a session.

A message is a header, then fields as a JSON object, then tensors in the safetensors format:

    "MoAs" | version | size of fields | size of tensors | fields | tensors
       4   |    1    |        4       |        8        |        |            bytes

Where there is no answer, the field "refused" says why.

`MessageServer` accepts clients. Each has a `ClientHandler`, in a thread of its own, and a session
that knows what to do. `session.greeting`, a dict, has the fields of the first message to the
client, and `session.answer(fields, tensors)` returns the replies to a request. It must check the
request before it returns, not when a reply is asked for: only the call is in `refuse_malformed`.

Nothing is encrypted, and nobody has to prove who they are. So a server only listens to its own
machine. To connect from elsewhere, go through SSH, which does both.
"""
from __future__ import annotations

import json
import math
import re
import socket
import socketserver
import struct
import sys
import threading
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Callable, Iterator, NamedTuple

import safetensors.torch
from torch import Tensor

from plumbing.errors import InputError

Address = tuple[str, int]  # host and port
Tensors = dict[str, Tensor]  # by name


# --- Messages ---

HEADER = struct.Struct("!4sBIQ")  # "!": big-endian, as is usual in networks, and no padding
MAGIC = b"MoAs"  # to notice at once a peer that speaks another protocol
VERSION = 5  # of this format: a peer with another one would misread our messages
MAX_FIELDS = 1 << 16  # bytes: the longest fields, a draft of 64 tokens, have less than a thousand
MAX_PIECE = 1 << 16  # bytes in one call: memory grows with what comes, not with what is announced
SEND_SECONDS = 10.0  # for a piece: a stalled peer must not hold us


class ProtocolError(OSError):
    """The peer broke the rules."""


@contextmanager
def refuse_malformed(what: str) -> Iterator[None]:
    """Reading something malformed raises one of many exceptions. In here all of them become a
    ProtocolError."""
    wrong = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)
    try:
        yield
    except (*wrong, safetensors.SafetensorError) as error:
        raise ProtocolError(f"malformed {what}: {error!r:.200}")


class Message(NamedTuple):
    """A message that has been received."""

    fields: dict
    tensors: Tensors
    size: int  # bytes, with the header


def send_message(sock: socket.socket, fields: dict, tensors: Tensors) -> int:
    """Send a message. Returns its size in bytes.

    Raises OSError, for example TimeoutError if the peer does not take a piece in SEND_SECONDS.
    """
    text = json.dumps(fields, separators=(",", ":")).encode()
    data = safetensors.torch.save(tensors) if tensors else b""
    message = HEADER.pack(MAGIC, VERSION, len(text), len(data)) + text + data
    sock.settimeout(SEND_SECONDS)
    for first in range(0, len(message), MAX_PIECE):  # the timeout is for each of them
        sock.sendall(message[first:first + MAX_PIECE])
    return len(message)


def receive_message(sock: socket.socket, limit: int, deadline: float) -> Message:
    """Receive the next message.

    Raises OSError: ConnectionError if the peer leaves, ProtocolError if it refuses or the message
    is malformed or longer than `limit` bytes, TimeoutError at the moment `deadline`.
    """
    header = receive_bytes(sock, HEADER.size, deadline)
    magic, version, text_size, data_size = HEADER.unpack(header)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError("malformed message: wrong magic bytes or version")
    size = HEADER.size + text_size + data_size
    if text_size > MAX_FIELDS or size > limit:
        raise ProtocolError(f"a message of {size} bytes is too long")
    text = receive_bytes(sock, text_size, deadline)
    data = receive_bytes(sock, data_size, deadline)
    with refuse_malformed("message"):
        fields = {**json.loads(text)}  # a TypeError unless it is an object
        tensors = safetensors.torch.load(data) if data else {}
    if "refused" in fields:
        raise ProtocolError(f"refused: {fields['refused']!r:.300}")
    return Message(fields, tensors, size)


def receive_bytes(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Receive the next `size` bytes. Raises OSError: TimeoutError at the moment `deadline`,
    ConnectionError if the peer closes the connection before."""
    received = bytearray()
    while len(received) < size:
        left = deadline - monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        piece = sock.recv(min(size - len(received), MAX_PIECE))
        if not piece:
            raise ConnectionError("the peer closed the connection")
        received += piece
    return bytes(received)


# --- The server ---

MAX_REQUEST = 1 << 20  # bytes: a prompt of 131,072 tokens takes half of it
MAX_CLIENTS = 8  # each of them has a KV cache of the target
IDLE_SECONDS = 300.0  # then a client without a request loses its place
SPARE_SECONDS = 1.0  # then it loses its place to a new client, if all are taken


class MessageServer(socketserver.ThreadingTCPServer):
    """Gives a thread and a session to every client."""

    allow_reuse_address = True  # a restarted server need not wait until its old port is free
    request_queue_size = 128  # not yet accepted: a burst of connections must not be refused

    def __init__(self, address: Address, new_session: Callable):
        """Begin to listen. new_session(has_left) makes a client's session. Raises OSError if it
        cannot listen at the address, InputError if other machines could connect."""
        host, port = address
        if not re.fullmatch(r"localhost|127\.[0-9.]+|::1", host):
            raise InputError(
                f"cannot serve at {host}: only this machine may connect, so serve at localhost. "
                f"To connect from elsewhere: ssh -L {port}:localhost:{port} server"
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.new_session = new_session
        self.places = threading.Semaphore(MAX_CLIENTS)
        # The moment since when each client is idle. Infinity: it is busy.
        self.clients: dict[socket.socket, float] = {}
        super().__init__(address, ClientHandler)

    def take_place(self) -> bool:
        """Take a place for a new client. If all are taken, wait for one. If none becomes free, give
        up the client that has been idle longest: it may have vanished, and if not, it reconnects.
        Returns False if all are busy."""
        if self.places.acquire(timeout=SPARE_SECONDS):
            return True
        for sock, since in sorted(self.clients.items(), key=lambda client: client[1]):
            if monotonic() > since + SPARE_SECONDS:
                disconnect(sock)
                return self.places.acquire(timeout=1.0)  # its thread is about to end
        return False

    def process_request(self, request: socket.socket, client_address: Address) -> None:
        """socketserver calls this for a new connection, whose socket it calls a request, before it
        starts the thread. (So server_close knows of it, even if that is called first.)"""
        self.clients[request] = math.inf
        super().process_request(request, client_address)

    def server_close(self) -> None:
        """Disconnect all clients, and wait for their threads to end."""
        for sock in list(self.clients):
            disconnect(sock)
        super().server_close()


def disconnect(sock: socket.socket) -> None:
    """End a connection. The thread that uses it notices, and cleans up."""
    with suppress(OSError):  # it has ended already
        sock.shutdown(socket.SHUT_RDWR)


class ClientHandler(socketserver.StreamRequestHandler):
    """The server's end of a connection to one client. self.connection is its socket."""

    server: MessageServer
    disable_nagle_algorithm = True  # send small messages at once, without waiting for more bytes

    def handle(self) -> None:
        """Serve the client until it leaves. If it breaks a rule, disconnect it, with a line on
        stderr."""
        try:
            if self.server.take_place():
                self.serve()
            else:
                reason = f"all of the server's {MAX_CLIENTS} clients are busy"
                send_message(self.connection, {"refused": reason}, {})
        except ConnectionError:
            pass  # the client has left
        except OSError as error:
            print(f"{self.client_address[0]}: {error}", file=sys.stderr)
        finally:
            del self.server.clients[self.connection]

    def serve(self) -> None:
        """Answer one request after the other, until an OSError ends it, at the latest when the
        client leaves. Then its place is free."""
        clients = self.server.clients
        try:
            session = self.server.new_session(self.has_left)
            send_message(self.connection, session.greeting, {})
            while True:
                clients[self.connection] = monotonic()
                deadline = monotonic() + IDLE_SECONDS
                request = receive_message(self.connection, MAX_REQUEST, deadline)
                clients[self.connection] = math.inf
                self.answer(session, request)
        finally:
            self.server.places.release()

    def answer(self, session, request: Message) -> None:
        """Send the replies to a request, each with the seconds of work on it."""
        since = monotonic()
        with refuse_malformed("request"):
            replies = session.answer(request.fields, request.tensors)
        try:
            for fields, tensors in replies:
                now = monotonic()
                send_message(self.connection, {**fields, "elapsed": now - since}, tensors)
                since = now
        except InputError as error:  # from a model whose logits are NaN, say
            send_message(self.connection, {"refused": str(error)}, {})

    def has_left(self) -> bool:
        """Tell whether the client has closed its end of the connection."""
        self.connection.settimeout(0)  # do not wait
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:  # nothing has come: it waits for our reply
            return False
        except OSError:  # the connection is broken, or we have closed it
            return True
