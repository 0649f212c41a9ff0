"""Messages: what is sent arrives, what is malformed is refused. Servers: who may connect."""
import contextlib
import json
import random
import socket
import struct
import threading
import time
import tracemalloc

import pytest
import torch

from plumbing import messages
from plumbing.errors import InputError
from plumbing.messages import (
    HEADER,
    MAGIC,
    VERSION,
    MessageServer,
    ProtocolError,
    Refused,
    receive_message,
    refuse_malformed,
    send_message,
)

LIMIT = 1 << 20  # bytes of a message


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


# --- Messages ---

@pytest.fixture
def ends():
    """The two ends of a real connection."""
    near, far = socket.socketpair()
    with near, far:
        yield near, far


def raw(text: bytes, data: bytes = b"", magic: bytes = MAGIC, version: int = VERSION) -> bytes:
    return HEADER.pack(magic, version, len(text), len(data)) + text + data


def one_tensor(entry: object) -> bytes:
    """A message of four tensor bytes that are described as this."""
    text = json.dumps({"x": entry}).encode()
    return raw(b"{}", struct.pack("<Q", len(text)) + text + bytes(4))


def described(dtype: str, length: object, end: int) -> bytes:
    return one_tensor({"dtype": dtype, "shape": [length], "data_offsets": [0, end]})


def frame(fields: dict) -> bytes:
    """The bytes of a message."""
    near, far = socket.socketpair()
    with near, far:
        return far.recv(send_message(near, fields))


def receive_from(data: bytes) -> OSError | None:
    """What receive_message raises for these bytes and a close after them: one line, or nothing."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(data)
        near.close()
        try:
            receive_message(far, LIMIT, soon())
        except (ProtocolError, ConnectionError) as error:
            assert str(error) and "\n" not in str(error)
            return error
    return None


EXAMPLE = {
    "accepted": 3,
    "note": "Grüße",
    "kv": torch.arange(24, dtype=torch.int8).view(2, 3, 4),
    "scale": torch.tensor([0.5, 2], dtype=torch.half),
}


@pytest.mark.parametrize("shape", [(), (5, 3), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.half,
                                   torch.float32], ids=str)
def test_a_message_arrives_as_it_was_sent(ends, dtype, shape):
    fields = {"accepted": 3, "note": "Grüße"}
    some = {"a": torch.tensor([True]), "x": (torch.rand(shape) * 9).to(dtype)}
    for tensors in (some, {}):
        size = send_message(ends[0], fields | tensors | {"q": None})
        message, received_size = receive_message(ends[1], size, soon())
        assert received_size == size
        for name, tensor in tensors.items():
            received = message.pop(name)
            assert received.dtype == tensor.dtype and received.equal(tensor)
        assert message == fields


def test_a_message_that_is_too_long_is_refused(ends):
    size = send_message(ends[0], EXAMPLE)
    with pytest.raises(ProtocolError, match="too long"):
        receive_message(ends[1], size - 1, soon())


def test_a_refusal_is_received_as_an_error_that_says_why(ends):
    send_message(ends[0], {"refused": "full"})
    with pytest.raises(Refused, match="^refused: 'full'$"):
        receive_message(ends[1], LIMIT, soon())


def test_every_truncation_is_noticed():
    whole = frame(EXAMPLE)
    assert receive_from(whole) is None
    for length in range(len(whole)):
        assert isinstance(receive_from(whole[:length]), ConnectionError)


def test_random_frames_and_frames_with_flipped_bits_raise_a_protocol_error_and_nothing_else():
    generator = random.Random(0)
    whole = frame(EXAMPLE)
    received = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            position = generator.randrange(len(whole) - 28)  # not in the tensors' 28 bytes
            damaged[position] ^= 1 << generator.randrange(8)
        if receive_from(damaged) is None:  # a name or a number may have become a different one
            received += 1
        noise = generator.randbytes(generator.randint(1, 200))
        assert receive_from(noise) is not None
        assert receive_from(raw(noise)) is not None
        assert receive_from(raw(b"{}", noise)) is not None
    assert received < 667


@pytest.mark.parametrize("message", [
    raw(b"{}", magic=b"HTTP"),
    raw(b"{}", version=VERSION - 1),
    raw(b""),
    raw(b"{"),
    raw(b"[]"),
    raw(b"3"),
    raw(b"null"),
    raw(b"\xff\xfe"),
    raw(b"[" * 60000),
    raw(b'{"x": ' * 5000),
    raw(b"1" * 60000),
    raw(b"{}", b"\xff" * 9),
    raw(b"{}", bytes(8)),
    one_tensor(None),
    one_tensor("I8"),
    one_tensor({}),
    one_tensor({"dtype": "I8"}),
    described("I8", 3, 4),
    described("F4", 8, 4),
    described("I8", -4, 4),
    described("I8", 4.0, 4),
    described("I8", 2**40, 2**40),
    described("I8", 10**30, 4)], ids=lambda message: repr(message[HEADER.size:80]))
def test_a_malformed_message_is_refused_in_one_line(message):
    assert "malformed message" in str(receive_from(message))


@pytest.mark.parametrize("error", [
    MemoryError(),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("can't allocate memory: you tried to allocate 8 bytes")], ids=repr)
def test_a_lack_of_memory_is_no_malformed_message(error):
    with pytest.raises(type(error)) as raised:
        with refuse_malformed("message"):
            raise error
    assert raised.value is error


@pytest.mark.parametrize("text_size, data_size, complaint", [
    (2**17, 0, "too long"),
    (2, 2**28 + 1, "too long"),
    (2, 2**27, "closed")])
def test_a_length_that_is_announced_takes_no_memory(ends, text_size, data_size, complaint):
    ends[0].sendall(HEADER.pack(MAGIC, VERSION, text_size, data_size) + b"{}" + bytes(1000))
    ends[0].close()
    tracemalloc.start()
    with pytest.raises(OSError, match=complaint):
        receive_message(ends[1], 1 << 28, soon())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 19


@pytest.mark.parametrize("seconds", [0.3, -0.1])  # in the past, although there is something to read
def test_a_peer_that_sends_too_little_is_held_to_the_deadline(ends, seconds):
    timers = []
    for i in range(4):
        timers.append(threading.Timer(0.1 * i, ends[0].sendall, [MAGIC[i:i + 1]]))
    for timer in timers:
        timer.start()
    with pytest.raises(TimeoutError, match="timed out"):
        receive_message(ends[1], LIMIT, soon(seconds))
    for timer in timers:
        timer.join()


def test_a_peer_that_takes_too_little_is_held_to_the_time_to_send(ends, monkeypatch):
    monkeypatch.setattr(messages, "SEND_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        send_message(ends[1], {"x": torch.zeros(1 << 22)})


# --- A server ---

class Session:
    """Answers {"work": [seconds, ...], "x": ...} with as many replies, each after so long and with
    the same x."""

    greeting = {"drafter": "test"}

    def parse(self, fields):
        return self.replies(fields["work"], fields["x"])

    def replies(self, work, x):
        for seconds in work:
            time.sleep(seconds)
            yield {"x": x}


def wait_for(condition) -> None:
    deadline = soon(30)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@contextlib.contextmanager
def serving(new_session=Session, host: str = "localhost"):
    """A server in threads of this process; afterwards none of them is left."""
    before = threading.active_count()
    with MessageServer((host, 0)) as server:
        server.new_session = new_session
        server.server_activate()
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
    assert threading.active_count() == before
    assert not server.connections


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_a_server_listens_at_any_loopback_address(host):
    with serving(host=host) as server:
        with socket.create_connection(server.server_address[:2]) as sock:
            greeting, _ = receive_message(sock, LIMIT, soon())
    assert greeting == Session.greeting


@pytest.mark.parametrize("host", [
    "0.0.0.0", "::", "10.0.0.1", "server.example", "127.0.0.1.example"])
def test_a_server_that_other_machines_could_reach_is_refused_in_one_line_that_shows_ssh(host):
    with pytest.raises(InputError, match=f"cannot serve at {host}: ") as error:
        MessageServer((host, 7000))
    assert "ssh -L 7000:localhost:7000 server" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_port_that_is_taken_is_noticed_at_once_and_nobody_can_connect_before_the_server_serves():
    with serving() as server:
        with pytest.raises(InputError, match="cannot serve at localhost:[0-9]+: .*in use"):
            MessageServer(("localhost", server.server_address[1]))
    with MessageServer(("localhost", 0)) as loading:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(loading.server_address)


@pytest.mark.parametrize("message, reason", [
    (raw(b"", magic=b"HTTP"), "wrong magic bytes or version"),
    (HEADER.pack(MAGIC, VERSION, 2, LIMIT), "too long"),
    (frame({}), "malformed request: KeyError")], ids=lambda value: str(value)[:20])
def test_a_client_that_breaks_a_rule_is_told_why_and_disconnected(message, reason, capsys):
    with serving() as server, socket.create_connection(server.server_address) as sock:
        receive_message(sock, LIMIT, soon())
        sock.sendall(message)
        with pytest.raises(Refused, match=reason):
            receive_message(sock, LIMIT, soon())
        assert sock.recv(1) == b""
    err = capsys.readouterr().err
    assert err.startswith("127.0.0.1: ") and reason in err
