"""Messages over a socket, and a server that gives each of its clients a session.

A message is a dict of named values. Its tensors are sent in the safetensors format, and everything
else, without what is None, as a JSON object, after a header:

    "MoAs" | version | size of the JSON | size of the tensors | JSON | tensors
       4   |    1    |        4         |          8          |      |            bytes

A server that cannot give what was asked for, or that received a malformed message, sends the field
"refused" instead, which says why.

Each client of the server has a thread and a session of its own. This file knows nothing of models:
it receives a request, and the session says what to reply. Nothing is encrypted, and no client is
authenticated. Therefore the server only accepts connections from its own machine. To connect from
elsewhere, go through SSH, which encrypts and authenticates.
"""
from __future__ import annotations

import json
import socket
import socketserver
import struct
import sys
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Callable, Iterator, Protocol

import safetensors.torch
from torch import Tensor

from plumbing.errors import InputError, explain, input_errors, is_out_of_memory

Address = tuple[str, int]  # host and port
Replies = Iterator[dict]

# --- Messages ---

HEADER = struct.Struct("!4sBIQ")  # "!": big-endian, as is usual in networks, and no padding
MAGIC = b"MoAs"  # shows at once if the peer speaks a different protocol
VERSION = 7  # of this format: a peer that uses a different version would misread our messages
MAX_JSON = 1 << 16  # bytes: a draft of 64 tokens takes less than a thousand
MAX_PIECE = 1 << 16  # bytes to receive at once: a false size cannot make us allocate much memory
SEND_SECONDS = 60.0  # for a message: a peer that does not receive must not block us for longer


class ProtocolError(OSError):
    """What the peer sent is malformed or too long."""


class Refused(OSError):
    """The peer understood us, and says why it cannot give what was asked for."""


# What reading a malformed message may raise. The list is broad, because the peer may send any JSON
# and any tensors, and the code that reads them would need a check before each of its steps.
MALFORMED = (
    LookupError,  # a field is missing
    TypeError,  # a field has a different type, such as null for a list, or is one too many
    ValueError,  # the bytes are not JSON, or a value fails one of our own checks
    ArithmeticError,  # an int is too large for a float
    RuntimeError,  # JSON is nested too deeply, or a tensor has a different shape
    AttributeError,  # a field is not a tensor
    safetensors.SafetensorError,  # the bytes are not tensors
)


@contextmanager
def refuse_malformed(what: str) -> Iterator[None]:
    """Turn each exception in MALFORMED into a ProtocolError, except for lack of memory.

    Use this only around code that reads data from outside. Elsewhere the same exceptions are bugs.
    """
    try:
        yield
    except MALFORMED as error:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            raise
        raise ProtocolError(f"malformed {what}: {error!r:.200}")


def send_message(sock: socket.socket, fields: dict) -> int:
    """Send a message. Return its size in bytes. Raise OSError, for example TimeoutError if the peer
    does not take it in SEND_SECONDS."""
    tensors = {}
    others = {}
    for name, value in fields.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        elif value is not None:
            others[name] = value
    text = json.dumps(others, separators=(",", ":")).encode()
    data = safetensors.torch.save(tensors) if tensors else b""
    message = HEADER.pack(MAGIC, VERSION, len(text), len(data)) + text + data
    sock.settimeout(SEND_SECONDS)
    sock.sendall(message)
    return len(message)


def receive_message(sock: socket.socket, limit: int, deadline: float) -> tuple[dict, int]:
    """Receive the next message. Return it, and its size in bytes.

    Raise OSError: ConnectionError if the peer leaves, ProtocolError if the message is malformed or
    longer than `limit` bytes, Refused if it is a refusal, TimeoutError at the moment `deadline`.
    """
    header = receive_bytes(sock, HEADER.size, deadline)
    magic, version, text_size, data_size = HEADER.unpack(header)
    if magic != MAGIC or version != VERSION:
        raise ProtocolError("malformed message: wrong magic bytes or version")
    size = HEADER.size + text_size + data_size
    if text_size > MAX_JSON or size > limit:
        raise ProtocolError(f"a message of {size} bytes is too long")
    text = receive_bytes(sock, text_size, deadline)
    data = receive_bytes(sock, data_size, deadline)
    with refuse_malformed("message"):
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError("the JSON is not an object")
        if data:
            fields |= safetensors.torch.load(data)
    if "refused" in fields:
        raise Refused(f"refused: {fields['refused']!r:.300}")
    return fields, size


def receive_bytes(sock: socket.socket, size: int, deadline: float) -> bytes:
    """Receive the next `size` bytes. Raise OSError: TimeoutError at the moment `deadline`,
    ConnectionError if the peer closes the connection too early."""
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


def check_int(value: object, low: int, high: int, what: str) -> None:
    """Raise ValueError unless the value is an int within [low, high]. `what` names it."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"invalid {what} {value!r:.40}: expected an int from {low} to {high}")


# --- The server ---

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # where only this machine can connect
MAX_REQUEST = 1 << 20  # bytes: twice what a prompt of 131,072 tokens takes
MAX_CLIENTS = 8  # each client has a KV cache of the target
IDLE_SECONDS = 300.0  # a client without a request for so long may have vanished: it loses its place


class Session(Protocol):
    """What a server needs to know to serve one client."""

    greeting: dict  # the first message to the client

    def parse(self, fields: dict) -> Replies:
        """Check a request. Return its replies, each of which is made when it is asked for. Raise an
        exception in MALFORMED if the request is malformed."""



class MessageServer(socketserver.ThreadingTCPServer):
    """Gives a thread and a session to every client. The methods after `serve` replace methods of
    socketserver, where the socket of a connection is called `request`."""

    allow_reuse_address = True  # a restarted server need not wait until its old port is free

    def __init__(self, address: Address):
        """Reserve an address. Raise InputError if it is taken, or if other machines could connect.

        Nobody can connect before `serve`. A server can thus find out that its port is taken before
        it loads a model, and refuses connections while it loads.
        """
        host, port = address
        if host not in LOOPBACK:
            raise InputError(
                f"cannot serve at {host}: only this machine may connect, so serve at localhost. "
                f"To connect from elsewhere: ssh -L {port}:localhost:{port} server"
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.connections: set[socket.socket] = set()
        self.complaint = f"cannot serve at {host}:{port}"
        super().__init__(address, ClientHandler, bind_and_activate=False)
        with input_errors(self.complaint, OSError):
            self.server_bind()

    def serve(
        self, new_session: Callable[[], Session], announce: Callable[[Address], None]
    ) -> None:
        """Serve until `shutdown`. `announce` is called with the address as soon as clients can
        connect."""
        self.new_session = new_session
        with input_errors(self.complaint, OSError):
            self.server_activate()  # begins to listen
        announce(self.server_address[:2])  # host and port: an IPv6 address has two more numbers
        self.serve_forever()

    def process_request(self, request: socket.socket, client_address: Address) -> None:
        """Start the thread of a new connection."""
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: socket.socket) -> None:
        """Close a connection. Its thread calls this when it ends."""
        self.connections.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        """Disconnect all clients, and wait until their threads have noticed and ended."""
        for sock in list(self.connections):
            with suppress(OSError):  # this client has left already
                sock.shutdown(socket.SHUT_RDWR)
        super().server_close()


class ClientHandler(socketserver.StreamRequestHandler):
    """The server's end of a connection to one client. self.connection is its socket."""

    server: MessageServer
    disable_nagle_algorithm = True  # send small messages at once, without waiting for more bytes

    def handle(self) -> None:
        """Serve the client until it leaves. If the client breaks a rule, tell it so, disconnect it,
        and print a line on stderr."""
        try:
            if len(self.server.connections) > MAX_CLIENTS:
                self.refuse(f"the server already has {MAX_CLIENTS} clients; try again later")
            else:
                self.serve()
        except ConnectionError:
            pass  # the client has left
        except OSError as error:
            print(f"{self.client_address[0]}: {explain(error)}", file=sys.stderr)

    def serve(self) -> None:
        """Answer one request after the other until an OSError occurs, which happens at the latest
        when the client leaves."""
        session = self.server.new_session()
        send_message(self.connection, session.greeting)
        while True:
            deadline = monotonic() + IDLE_SECONDS
            try:
                request, _ = receive_message(self.connection, MAX_REQUEST, deadline)
                self.answer(session, request)
            except ProtocolError as error:
                self.refuse(str(error))
                raise

    def answer(self, session: Session, request: dict) -> None:
        """Send the replies to a request. Each reply has a field "elapsed": the seconds since the
        request arrived or, for a later reply to the same request, since the previous reply was
        ready. If the session serves other clients in this time, that counts as well."""
        since = monotonic()
        with refuse_malformed("request"):
            replies = session.parse(request)
        try:
            for reply in replies:
                now = monotonic()
                send_message(self.connection, {**reply, "elapsed": now - since})
                since = now
        except InputError as error:  # a model whose logits are NaN, say
            self.refuse(str(error))

    def refuse(self, reason: str) -> None:
        send_message(self.connection, {"refused": reason})
