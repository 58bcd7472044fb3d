"""Connections between the processes of a run, for agreement and for notice of failures.

A JAX collective waits forever for a late process and cannot name it. Each process therefore also
keeps a TCP connection to process 0, for lines of JSON:

    to process 0      {"at": 7, "wish": null}    has reached the 7th point of agreement
                      {"alive": "waiting for input"}    from time to time
                      {"bye": null}              ends, normally or with a reason
    from process 0    {"go": 7, "stop": null}    all have arrived; stop if any wishes to
                      {"asked": ["signal", "SIGTERM"]}  one wishes to stop, arrive soon
                      {"over": "..."}            one is gone or late; no process can continue

A process that dies closes its connection; one that is stopped or cut off is silent too long. In
both cases process 0 names it to the others, and they end. A late process that receives this
message prints the stacks of its threads.

Lines may come from another version or a stranger: one that is not a valid message, is too long or
nested too deeply is ignored, and printed text is escaped.

The last messages must arrive. If a socket with unread data is closed, the kernel drops data not yet
delivered, so an ending process keeps reading until the others have closed their side.
"""

import contextlib
import json
import logging
import math
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from weft.errors import ProcessesNotReadyError, ProcessLostError
from weft.serialization.foreign import parse_json, printable
from weft.trainer.stacks import print_error, stacks_of_all_threads

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_SECONDS = 100
"""Silence after which a process counts as gone; JAX's own default."""

_POLL_SECONDS = 0.1
_TELL_SECONDS = 1.0
_LATE_SECONDS = 30.0
LONGEST_LINE = 1 << 16
"""Maximal number of bytes of a line; a longer one is ignored."""

_LONGEST_TEXT = 4096  # at most 12 bytes in a line for each character
_SHOWN_LATE = 8
# From the notice that another process is gone to the end of this one if its main thread is stuck.
_END_SECONDS = 10.0
# JAX aborts the others when process 0 is gone, so they end a little before it.
_SOONER = 0.9
# How long an ending process waits for the others to receive its notice.
_HEARD_SECONDS = 5.0


class Wish(NamedTuple):
    """Reason why a process wishes to stop.

    Attributes:
        kind: "error", "signal" or "end"; of several wishes, the first kind in this order counts.
        text: the error, the signal's name, or a description of the end.
    """

    kind: str
    text: str


_KINDS = ("error", "signal", "end")


class Companions:
    """Connections to the other processes; created by `weft.trainer.meeting.meet`.

    Args:
        process_id: index of this process.
        connections: in process 0 those to all others, in the others the one to process 0.
        names: names of the processes in messages.
        heartbeat_timeout_seconds: silence after which a process counts as gone.
        end_seconds: time that this process may still run after another is gone.
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
        self._open = set(self._connections)  # those whose side is not closed
        self.doing = "starting"
        heard = time.monotonic()
        self._heard = dict.fromkeys(self._connections, heard)
        # In process 0 only: the point that each process has reached.
        self._at = dict.fromkeys((0, *self._connections), 0)
        self._wishes: dict[int, Wish] = {}
        self._activities = dict.fromkeys(self._connections, "starting")
        self._gone: set[int] = set()
        self._first_came: float | None = None
        self._within: float | None = None
        self._said_late = 0.0
        for connection in self._connections.values():
            connection.settimeout(heartbeat_timeout_seconds)
            # A line need not wait for the acknowledgment of the previous one.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._listen, name="weft-companions", daemon=True).start()

    # The interface for the run.

    @property
    def asked(self) -> Wish | None:
        """The wish of some process; all should reach the next point soon."""
        return self._asked

    def agree(
        self,
        wish: Callable[[], Wish | None] | None,
        *,
        within_seconds: float | None = None,
        alive: Callable[[], None] = lambda: None,
    ) -> Wish | None:
        """Waits until all processes have reached this point; returns the wish to stop, or None.

        Args:
            wish: returns this process's wish to stop, or None; polled while waiting. None at a
                point where processes only wait; wishes then count for the next one.
            within_seconds: how long the first process waits for the last; None for no limit.
            alive: called repeatedly while waiting.

        Raises:
            ProcessesNotReadyError: if some did not arrive in time.
            ProcessLostError: if one is gone.
        """
        self._point += 1
        told = None if wish is None else _shortened(wish())
        at = {"at": self._point, "within": within_seconds, "waits": wish is None}
        self._tell_first(at | {"wish": told})
        while True:
            # Read first: process 0 may have let all continue before it left.
            first_left = self._id != 0 and 0 in self._gone
            with self._changed:
                if self._went < self._point and self._over is None:
                    self._changed.wait(_POLL_SECONDS)
                self.check()
                if self._went >= self._point:
                    return None if wish is None else self._stop
            if first_left:
                self._on_gone(0, "has ended before the others")
            alive()
            if wish is not None and told is None and (told := _shortened(wish())) is not None:
                self._tell_first(at | {"wish": told})

    @property
    def _agreed_on_error(self) -> bool:
        """True if all have agreed to fail, so that the end of one is expected."""
        return self._stop is not None and self._stop.kind == "error"

    def check(self) -> None:
        """Raises ProcessLostError if a process is gone, ProcessesNotReadyError if it was late."""
        if self._late is not None:
            raise ProcessesNotReadyError(self._late)
        if self._over is not None:
            raise ProcessLostError(self._over)

    def explain(self, error: BaseException, patience_seconds: float = 2.0) -> None:
        """Raises the loss of another process as the reason of an error, once it is noticed."""
        deadline = time.monotonic() + patience_seconds
        with self._changed:
            while not self._agreed_on_error and self._over is None and time.monotonic() < deadline:
                self._changed.wait(_POLL_SECONDS)
        try:
            self.check()
        except (ProcessLostError, ProcessesNotReadyError) as reason:
            raise reason from error

    def leave(self, why: str | None = None, *, patience_seconds: float = _HEARD_SECONDS) -> None:
        """Announces the end of this process, with its error, and waits until the others know.

        If another process is lost, this one is ended within seconds, also after it has left.
        """
        if self._left:
            return
        self._left = True
        for index, connection in self._connections.items():
            self._send(connection, {"bye": None if why is None else _clipped(why)})
            self._say_no_more(index)
        deadline = time.monotonic() + patience_seconds
        with self._changed:
            while self._open - self._gone and time.monotonic() < deadline:
                self._changed.wait(_POLL_SECONDS)
            if not self._open:
                self._close()

    # The thread.

    @property
    def _ends(self) -> bool:
        return self._left or self._over is not None

    def _listen(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for index, connection in self._connections.items():
                    selector.register(connection, selectors.EVENT_READ, index)
                self._converse(selector)
        except Exception as error:  # without this thread no end of a process would be noticed
            text = f"the connection to other processes failed: {type(error).__name__}: {error}"
            self._end(text, late=False)
        if self._left:
            self._close()

    def _converse(self, selector: selectors.BaseSelector) -> None:
        """Reads until this process ends and the others have closed their side."""
        buffers = dict.fromkeys(self._connections, b"")
        pulse, beat, told = self._heartbeat_timeout / 4, 0.0, None
        pause, looked = min(pulse, 1.0), time.monotonic()
        while self._open or not self._ends:
            for key, _ in selector.select(pause):
                lines = self._read(key.data, buffers)
                for line in lines or ():
                    if not self._ends:
                        self._on_line(key.data, line)
                if lines is None:
                    selector.unregister(key.fileobj)
                    self._on_closed(key.data)
            now = time.monotonic()
            away, looked = now - looked - pause, now
            if self._ends:
                continue
            if away > pulse:
                self._pass_over(away, now)
            # Sent soon if the activity has changed, since the process may freeze during it.
            due = _TELL_SECONDS if self.doing != told else pulse
            if now - beat >= min(due, pulse):
                beat, told = now, self.doing
                for connection in self._connections.values():
                    self._send(connection, {"alive": _clipped(told)})
            self._look_at_clocks(now)

    def _read(self, index: int, buffers: dict[int, bytes]) -> list[bytes] | None:
        """Returns the lines that have come from a process; None at the end."""
        try:
            data = self._connections[index].recv(LONGEST_LINE)
        except OSError:
            data = b""
        if not data:
            return None
        self._heard[index] = time.monotonic()
        *lines, rest = (buffers[index] + data).split(b"\n")
        buffers[index] = rest[: LONGEST_LINE + 1]  # enough to know that it is too long
        return lines

    def _on_closed(self, index: int) -> None:
        if self._id == 0 or self._left:
            self._say_no_more(index)
        if index not in self._gone:  # it did not send "bye"
            self._on_gone(index, "has ended without notice, killed or crashed")
        with self._changed:
            self._open.discard(index)
            self._changed.notify_all()

    def _pass_over(self, away: float, now: float) -> None:
        """Excludes the time for which this process was stopped from the silence of the others."""
        with self._changed:
            self._heard = {i: min(heard + away, now) for i, heard in self._heard.items()}
            if self._first_came is not None:
                self._first_came = min(self._first_came + away, now)

    def _on_line(self, index: int, line: bytes) -> None:
        message = parse(line)
        if not message:
            logger.warning("%s sent an invalid message; it is ignored", self._names[index])
        elif "bye" in message:
            self._gone.add(index)
            # If process 0 has failed, it waits a little until the others have ended.
            if self._id == 0 or message["bye"] is None:
                self._say_no_more(index)
            if message["bye"] is not None and not self._agreed_on_error:
                self._on_gone(index, f"has failed: {message['bye']}")
        elif self._id == 0:
            self._activities[index] = message.get("alive", self._activities[index])
            if "at" in message:
                self._came(index, message)
        elif "go" in message:
            with self._changed:
                if "stop" in message:
                    self._stop, self._asked = _wish(message["stop"]), None
                self._went = message["go"]
                self._changed.notify_all()
        elif "asked" in message:
            self._asked = _wish(message["asked"])
        elif "over" in message:
            self._end(
                message["over"], late=message.get("late", False), missing=message.get("missing", ())
            )

    def _look_at_clocks(self, now: float) -> None:
        for index, heard in self._heard.items():
            if index not in self._gone and now - heard > self._heartbeat_timeout:
                self._on_gone(index, f"has sent nothing for {now - heard:.0f} s")
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
            logger.warning("after %.0f s still waiting for %s", waited, self._described(missing))

    def _described(self, missing: list[int]) -> str:
        doing = self._activities | {0: self.doing}
        shown = [f"{self._names[i]}, which is {doing[i]}" for i in missing[:_SHOWN_LATE]]
        more = len(missing) - len(shown)
        return "; ".join([*shown, f"and {more} more"] if more else shown)

    # Process 0, which coordinates all.

    def _tell_first(self, message: dict[str, Any]) -> None:
        if self._id == 0:
            self._came(0, message)
        else:
            self._send(self._connections[0], {"alive": _clipped(self.doing)}, message)

    def _came(self, index: int, message: dict[str, Any]) -> None:
        with self._changed:
            # A wish that comes after all have continued counts for the next point.
            is_new = message["at"] > self._went
            if is_new:
                self._at[index] = message["at"]
                self._within = message.get("within")
                if self._first_came is None:
                    self._first_came = time.monotonic()
            wish = _wish(message.get("wish"))
            if wish is not None:
                self._wishes[index] = wish
                self._asked = wish
                self._broadcast({"asked": wish})
            if is_new and min(self._at.values()) == message["at"]:
                go: dict[str, Any] = {"go": message["at"]}
                if not message.get("waits"):
                    wishes = self._wishes.values()
                    self._stop = min(wishes, key=lambda w: _KINDS.index(w.kind), default=None)
                    self._wishes, self._asked = {}, None
                    go["stop"] = self._stop
                self._first_came = None
                self._broadcast(go)
                self._went = message["at"]
                self._changed.notify_all()

    def _broadcast(self, message: dict[str, Any]) -> None:
        for index, connection in self._connections.items():
            if index not in self._gone:
                self._send(connection, message)

    def _send(self, connection: socket.socket, *messages: dict[str, Any]) -> None:
        # The reading thread notices processes that are gone.
        with self._sending, contextlib.suppress(OSError):
            connection.sendall(b"".join(map(line_of, messages)))

    def _say_no_more(self, index: int) -> None:
        with contextlib.suppress(OSError):
            self._connections[index].shutdown(socket.SHUT_WR)

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    # Ends.

    def _on_gone(self, index: int, how: str) -> None:
        self._gone.add(index)
        if self._ends:
            return
        text = f"{self._names[index]} {how.rstrip('.')}. This process cannot continue without it."
        if self._id == 0:
            self._broadcast({"over": text, "late": False})
        self._end(text, late=False)

    def _end(self, text: str, *, late: bool, missing: Collection[int] = ()) -> None:
        """Ends this process: by an error in its main thread, or by force after a while.

        The force is needed even after the error, since at exit JAX waits for all processes.
        """
        with self._changed:
            if self._over is not None or self._left:
                return
            seconds = self._end_seconds * (_SOONER if self._id else 1)
            timer = threading.Timer(seconds, self._end_by_force, args=(text,))
            timer.daemon = True
            timer.start()
            if self._id in missing:  # before the main thread continues
                print_error(stacks_of_all_threads())
            self._over, self._late = text, text if late else None
            self._changed.notify_all()
        logger.error("%s", text)

    def _end_by_force(self, text: str) -> None:
        print_error(f"weft: {text}")
        os._exit(1)


def line_of(message: Mapping[str, Any]) -> bytes:
    """Returns a message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def parse(line: bytes) -> dict[str, Any]:
    """Returns the message in a line, with its texts made printable; {} if it is invalid.

    >>> parse(b'{"at": 3}'), parse(b"GET / HTTP/1.1"), parse(b'{"at": "now"}')
    ({'at': 3}, {}, {})
    """
    if len(line) > LONGEST_LINE:
        return {}
    try:
        message = parse_json(line)
    except ValueError:
        return {}
    if not isinstance(message, dict):
        return {}
    if not all(name in _FIELDS and _FIELDS[name](value) for name, value in message.items()):
        return {}
    return {name: _shown(value) for name, value in message.items()}


def _shown(value: Any) -> Any:
    """Returns texts without control characters, with all lines after the first indented."""
    if isinstance(value, list):
        return [_shown(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"\n(?!    )", "\n    ", printable(value))
    return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_wish(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and value[0] in _KINDS
        and isinstance(value[1], str)
    )


def _or_none(is_one: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_one(value)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


# The fields of messages, including those of the rendezvous.
_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **{"at": _is_count, "within": _or_none(_is_seconds), "waits": _is_bool},
    **{"wish": _or_none(_is_wish), "stop": _or_none(_is_wish), "asked": _or_none(_is_wish)},
    **{"alive": _is_text, "bye": _or_none(_is_text), "go": _is_count},
    **{"over": _is_text, "late": _is_bool, "missing": _is_counts},
    **{"process": _is_count, "of": _is_count, "token": _is_text, "host": _is_text},
    **{"pid": _is_count, "refused": _is_text, "welcome": _is_text},
}


def _clipped(text: str) -> str:
    """Returns the text, shortened to its start and end if it does not fit into a line."""
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]} … {text[-half:]}"


def _shortened(wish: Wish | None) -> Wish | None:
    return wish and Wish(wish.kind, _clipped(wish.text))


def _wish(value: Any) -> Wish | None:
    return None if value is None else Wish(*value)


class _Present(threading.local):
    def __init__(self) -> None:
        self.stack: list[Companions] = []


_PRESENT = _Present()


@contextlib.contextmanager
def in_company(companions: Companions) -> Iterator[Companions]:
    """Makes connections available to the runs of this thread, and closes them after the block."""
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
    """Returns the connections of this thread; None without any."""
    return _PRESENT.stack[-1] if _PRESENT.stack else None
