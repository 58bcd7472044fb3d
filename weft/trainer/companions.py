"""The other processes of a run: a line to each, to agree on what comes next and to learn of an end.

A collective of JAX waits without end for a process that is late, and cannot say which one that is.
So beside them each process keeps one TCP connection to process 0, for lines of JSON:

    to process 0      {"at": 7, "wish": null}    came to the 7th point of agreement
                      {"alive": "waiting for input"}    from time to time
                      {"bye": null}              ends as it should, or why not
    from process 0    {"go": 7, "stop": null}    all have come; stop if any of them wished to
                      {"asked": ["signal", "SIGTERM"]}  one of them wishes to, come soon
                      {"over": "..."}            one is gone or late; nobody can go on

A process that dies closes its connection, whatever killed it. One that is stopped or cut off is
silent for too long. In both cases the others are told its name, and end. One that is late, but
hears of it, prints where its threads are.
"""

import contextlib
import faulthandler
import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from weft.errors import ProcessesNotReadyError, ProcessLostError

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_SECONDS = 100
"""After how long a silent process counts as gone; JAX's own default."""

_POLL_SECONDS = 0.1
_TELL_SECONDS = 1.0
_LATE_SECONDS = 30.0
_LONGEST_LINE = 1 << 16
# From the word that another process is gone to the end of this one, if its main thread is stuck.
_END_SECONDS = 10.0


class Wish(NamedTuple):
    """Why a process wishes to stop.

    Attributes:
        kind: "error", "signal" or "end"; where several wish to stop, the first kind counts.
        text: what is wrong, the signal's name, or what has ended.
    """

    kind: str
    text: str


_KINDS = ("error", "signal", "end")


class Companions:
    """Lines to the other processes; made by `weft.trainer.meeting.meet`.

    Args:
        process_id: which process this is.
        connections: by process: to all others in process 0, to process 0 in the others.
        names: what to call each process, in process 0.
        heartbeat_timeout_seconds: after how long a silent process counts as gone.
        end_seconds: how long after one is gone this process may still run.
    """

    def __init__(
        self,
        process_id: int,
        connections: Mapping[int, socket.socket],
        names: Mapping[int, str],
        *,
        heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
        end_seconds: float = _END_SECONDS,
    ):
        self._id = process_id
        self._connections = dict(connections)
        self._names = dict(names)
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._end_seconds = end_seconds
        self._changed = threading.Condition(threading.RLock())
        self._sending = threading.Lock()
        self._point = 0
        self._went = 0
        self._stop: Wish | None = None
        self._asked: Wish | None = None
        self._over: str | None = None
        self._late: str | None = None
        self._left = False
        self.doing = "starting"
        heard = time.monotonic()
        self._heard = dict.fromkeys(self._connections, heard)
        # Of process 0 only: where each is.
        self._at = dict.fromkeys((0, *self._connections), 0)
        self._wishes: dict[int, Wish] = {}
        self._activities = dict.fromkeys((0, *self._connections), "starting")
        self._gone: set[int] = set()
        self._first_came: float | None = None
        self._within: float | None = None
        self._said_late = 0.0
        for connection in self._connections.values():
            connection.settimeout(heartbeat_timeout_seconds)
        threading.Thread(target=self._listen, name="weft-companions", daemon=True).start()

    # What the run calls.

    @property
    def asked(self) -> Wish | None:
        """What some process wishes; all are to come to the next point soon."""
        return self._asked

    def agree(
        self,
        wish: Callable[[], Wish | None],
        *,
        within_seconds: float | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> Wish | None:
        """Waits until all processes have come to this point, which each must come to.

        Args:
            wish: gives what this process wishes, None to go on; looked at while it waits.
            within_seconds: how long the first to come waits for the last; None for no limit.
            alive: called again and again while waiting.

        Returns:
            The wish on which all stop, or None if all go on.

        Raises:
            ProcessesNotReadyError: if some did not come in time.
            ProcessLostError: if one is gone.
        """
        self._point += 1
        told = wish()
        self._tell_first({"at": self._point, "wish": told, "within": within_seconds})
        while True:
            with self._changed:
                if self._went < self._point and self._over is None:
                    self._changed.wait(_POLL_SECONDS)
                self.check()
                if self._went >= self._point:
                    self._asked = None
                    return self._stop
            alive()
            if told is None and (told := wish()) is not None:
                self._tell_first({"at": self._point, "wish": told, "within": within_seconds})

    @property
    def _agreed_on_error(self) -> bool:
        """Whether all have agreed to fail: then their ends are no news."""
        return self._stop is not None and self._stop.kind == "error"

    def check(self) -> None:
        """Raises if another process is gone or was too late.

        Raises:
            ProcessesNotReadyError: if some did not come in time.
            ProcessLostError: if one is gone.
        """
        if self._late is not None:
            raise ProcessesNotReadyError(self._late)
        if self._over is not None:
            raise ProcessLostError(self._over)

    def explain(self, error: BaseException, patience_seconds: float = 2.0) -> None:
        """Raises what is behind an error, if that is the end of another process.

        Args:
            error: such as a collective raises when its other side is gone.
            patience_seconds: how long the news may take.
        """
        deadline = time.monotonic() + patience_seconds
        with self._changed:
            while not self._agreed_on_error and self._over is None and time.monotonic() < deadline:
                self._changed.wait(_POLL_SECONDS)
        try:
            self.check()
        except (ProcessLostError, ProcessesNotReadyError) as reason:
            raise reason from error

    def leave(self, why: str | None = None) -> None:
        """Says that this process ends, and closes its lines.

        Args:
            why: what went wrong; None if it ends as it should.
        """
        if self._left:
            return
        self._left = True
        for connection in self._connections.values():
            self._send(connection, {"bye": why})
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    # The thread.

    def _listen(self) -> None:
        buffers = dict.fromkeys(self._connections, b"")
        pulse, beat, told = self._heartbeat_timeout / 4, 0.0, None
        with selectors.DefaultSelector() as selector:
            for index, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, index)
            while selector.get_map() and self._over is None and not self._left:
                for key, _ in selector.select(min(pulse, 1.0)):
                    index = key.data
                    lines = self._read(index, buffers)
                    if lines is None:
                        selector.unregister(key.fileobj)
                        if index not in self._gone:  # it did not say goodbye
                            self._on_gone(index, "has ended without a word, killed or crashed")
                    for line in lines or ():
                        self._on_line(index, line)
                now = time.monotonic()
                # Soon where it has something new to say: it may be frozen in the middle of that.
                due = _TELL_SECONDS if self.doing != told else pulse
                if now - beat >= min(due, pulse) and not self._left:
                    beat, told = now, self.doing
                    for connection in self._connections.values():
                        self._send(connection, {"alive": told})
                self._look_at_clocks(now)
        for connection in self._connections.values():
            connection.close()

    def _read(self, index: int, buffers: dict[int, bytes]) -> list[bytes] | None:
        """The lines that have come from a process; None at the end."""
        try:
            data = self._connections[index].recv(_LONGEST_LINE)
        except OSError:
            data = b""
        if not data:
            return None
        self._heard[index] = time.monotonic()
        *lines, buffers[index] = (buffers[index] + data).split(b"\n")
        return lines if len(buffers[index]) <= _LONGEST_LINE else None

    def _on_line(self, index: int, line: bytes) -> None:
        message = parse(line)
        if "bye" in message:
            self._gone.add(index)
            if message["bye"] is not None and not self._agreed_on_error:
                self._on_gone(index, f"has failed: {message['bye']}")
        elif self._id == 0:
            self._activities[index] = str(message.get("alive", self._activities[index]))
            if "at" in message:
                self._came(index, message)
        elif "go" in message:
            with self._changed:
                self._stop = _wish(message["stop"])
                self._went = message["go"]
                self._changed.notify_all()
        elif "asked" in message:
            self._asked = _wish(message["asked"])
        elif "over" in message:
            self._end(message["over"], late=message["late"], missing=message.get("missing", ()))

    def _look_at_clocks(self, now: float) -> None:
        for index, heard in self._heard.items():
            if index not in self._gone and now - heard > self._heartbeat_timeout:
                self._on_gone(index, f"has not been heard of for {now - heard:.0f} s")
        with self._changed:
            if self._id or self._first_came is None:
                return
            waited = now - self._first_came
            missing = [i for i, at in self._at.items() if at < max(self._at.values())]
        ended = [i for i in missing if i in self._gone]
        if ended:
            self._on_gone(ended[0], "has ended before the others")
        elif missing and self._within is not None and waited > self._within:
            text = (
                f"not ready within {self._within:g} s: {self._described(missing)}. All others were "
                "waiting. If it is not frozen, its log has the stacks of its threads."
            )
            self._broadcast({"over": text, "late": True, "missing": missing})
            self._end(text, late=True, missing=missing)
        elif missing and waited > _LATE_SECONDS and now - self._said_late > _LATE_SECONDS:
            self._said_late = now
            logger.warning("waiting since %.0f s for %s", waited, self._described(missing))

    def _described(self, missing: list[int]) -> str:
        return "; ".join(f"{self._names[i]}, which is {self._activities[i]}" for i in missing)

    # Process 0, at which all come together.

    def _tell_first(self, message: dict[str, Any]) -> None:
        if self._id == 0:
            self._activities[0] = self.doing
            self._came(0, message)
        else:
            self._send(self._connections[0], {"alive": self.doing})
            self._send(self._connections[0], message)

    def _came(self, index: int, message: dict[str, Any]) -> None:
        with self._changed:
            # A wish may come when all have gone on already; it is then for the next point.
            is_new = message["at"] > self._went
            if is_new:
                self._at[index] = message["at"]
                self._within = message["within"]
                if self._first_came is None:
                    self._first_came = time.monotonic()
            wish = _wish(message["wish"])
            if wish is not None:
                self._wishes[index] = wish
                self._asked = wish
                self._broadcast({"asked": wish})
            if is_new and min(self._at.values()) == message["at"]:
                stop = min(self._wishes.values(), key=lambda w: _KINDS.index(w.kind), default=None)
                self._wishes.clear()
                self._first_came = None
                self._broadcast({"go": message["at"], "stop": stop})
                self._stop, self._went = stop, message["at"]
                self._changed.notify_all()

    def _broadcast(self, message: dict[str, Any]) -> None:
        for index, connection in self._connections.items():
            if index not in self._gone:
                self._send(connection, message)

    def _send(self, connection: socket.socket, message: dict[str, Any]) -> None:
        # Whoever is not there any more is noticed by the thread that reads.
        with self._sending, contextlib.suppress(OSError):
            connection.sendall(line_of(message))

    # Ends.

    def _on_gone(self, index: int, how: str) -> None:
        self._gone.add(index)
        if self._left:
            return
        text = f"{self._names[index]} {how.rstrip('.')}. This process cannot go on without it."
        if self._id == 0:
            self._broadcast({"over": text, "late": False})
        self._end(text, late=False)

    def _end(self, text: str, *, late: bool, missing: Collection[int] = ()) -> None:
        """Has this process end: by an error where its main thread looks, and at last by force.

        By force also if the error was raised: at the exit of a program JAX waits for all processes.
        """
        with self._changed:
            if self._over is not None or self._left:
                return
            timer = threading.Timer(self._end_seconds, self._end_by_force, args=(text,))
            timer.daemon = True
            timer.start()
            if self._id in missing and sys.__stderr__ is not None:  # before the main thread goes on
                faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
            self._over, self._late = text, text if late else None
            self._changed.notify_all()
        logger.error("%s", text)

    def _end_by_force(self, text: str) -> None:
        print(f"weft: {text}", file=sys.__stderr__, flush=True)
        os._exit(1)


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as a line."""
    return json.dumps(message).encode() + b"\n"


def parse(line: bytes) -> dict[str, Any]:
    """The message of a line; an empty one if it is none.

    Args:
        line: as it came.

    >>> parse(b'{"at": 3}'), parse(b"GET / HTTP/1.1")
    ({'at': 3}, {})
    """
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _wish(value: Any) -> Wish | None:
    return None if value is None else Wish(*value)


class _Present(threading.local):
    def __init__(self) -> None:
        self.stack: list[Companions] = []


_PRESENT = _Present()


@contextlib.contextmanager
def in_company(companions: Companions) -> Iterator[Companions]:
    """Lets the runs of this thread find the lines that are open; says goodbye at the end."""
    _PRESENT.stack.append(companions)
    try:
        yield companions
    except BaseException as error:
        companions.leave(f"{type(error).__name__}: {error}")
        raise
    else:
        companions.leave()
    finally:
        _PRESENT.stack.pop()


def current_companions() -> Companions | None:
    """The lines that were opened in this thread, None if there are none."""
    return _PRESENT.stack[-1] if _PRESENT.stack else None
