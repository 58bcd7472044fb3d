"""Lines between processes: ignored if they are not messages, from any sender."""

import contextlib
import json
import selectors
import socket
from typing import Any

import hypothesis.strategies as st

from tests.fuzz.readers import ODD, any_of, damaged_json, read, source_of
from tests.sockets import connected
from weft.distributed import rendezvous
from weft.distributed.peers import MAX_LINE_BYTES, Peers, decode_message

MESSAGES: list[dict[str, Any]] = [
    {"at": 1, "within": 5.0, "waits": False, "request": ["signal", "SIGTERM"]},
    {"alive": "waiting for input"},
    {"bye": None},
    {"bye": "ValueError: x"},
    {"go": 1, "stop": ["end", "input ended"]},
    {"asked": ["error", "x"]},
    {"over": "process 1 is gone", "late": True, "missing": [1, 2]},
    {"process": 1, "of": 3, "token": "secret", "host": "h", "pid": 7},
    {"refused": "no"},
    {"welcome": "process 0 of 2"},
]
_LINES = [json.dumps(message).encode() for message in MESSAGES]
_CRAFTED = [
    b"[" * 1_500,
    b'{"at":' * 10_000,
    b"9" * 5_000,
    b"x" * (MAX_LINE_BYTES + 1),
    b"",
    b"\xff",
]
_CRAFTED += [b'{"alive": "\\ud800\\u001b[2J\\n\\u202e"}', b'{"at": 1e999}', b'{"at": NaN}']
_CRAFTED += [json.dumps({key: odd}).encode() for m in MESSAGES for key in m for odd in ODD]
_LINE = any_of(_LINES, _CRAFTED) | damaged_json(MESSAGES)
# The receiving process; None for one without connections yet.
CASES = st.tuples(st.sampled_from([0, 1, None]), st.lists(_LINE, min_size=1, max_size=4))
SHORT = 100


class _Heard(Peers):
    """Keeps errors of the thread that reads."""

    def _fail(self, text: str, **kwargs: Any) -> None:
        if "to other processes failed" in text:
            self.failure = text
        super()._fail(text, **kwargs)

    def _force_exit(self, text: str) -> None:
        pass


def check(case: tuple[int | None, list[bytes]]) -> None:
    process, lines = case
    for line in lines:
        _, message = read(lambda line=line: decode_message(line), ())
        assert len(line) <= MAX_LINE_BYTES or not message
        for value in message.values():
            _check_shown(value)
    if process is None:
        _check_hello(b"\n".join(lines) + b"\n")
    else:
        _check_companions(process, b"".join(line + b"\n" for line in lines))


def _check_shown(value: Any) -> None:
    if isinstance(value, list):
        for inner in value:
            _check_shown(inner)
    if isinstance(value, str):
        assert all(c.isprintable() for c in value.replace("\n    ", "")), repr(value)
        value.encode()


def _check_companions(process: int, data: bytes) -> None:
    here, there = connected()
    heard = _Heard(process, {1 - process: here}, {1 - process: "other"}, end_seconds=1e6)
    with there:
        there.sendall(data)
        there.shutdown(socket.SHUT_WR)
        with heard._changed:
            heard._changed.wait_for(lambda: not heard._open, timeout=10)
        heard.leave(patience_seconds=0)
    assert not heard._open, "the lines were not read to their end"
    assert not hasattr(heard, "failure"), heard.failure


def _check_hello(data: bytes) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        selectors.DefaultSelector() as selector,
        contextlib.closing(rendezvous._Acceptor(server, 3, "secret", selector)) as reception,
        socket.create_connection(server.getsockname()) as stranger,
    ):
        reception.take(server)
        stranger.sendall(data[:4_000])
        stranger.shutdown(socket.SHUT_WR)
        for _ in range(8):
            for key, _ in selector.select(0.001):
                if key.fileobj is not server:
                    reception.take(key.fileobj)
        assert len(reception.names) == 1 or b"secret" in data


def source(case: tuple[int | None, list[bytes]]) -> str:
    return source_of("fuzz_lines", case)
