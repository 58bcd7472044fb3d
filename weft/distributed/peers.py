"""Connections between the processes of a run, for agreement and for notice of failures.

A JAX collective waits forever for a straggler and cannot name it. Each process therefore also
keeps a TCP connection to process 0, for lines of JSON:

    to process 0      {"at": 7, "request": null}    has reached the 7th point of agreement
                      {"alive": "waiting for input", "next": 12}    from time to time
                      {"bye": null}              ends, normally or with a reason
    from process 0    {"go": 7, "stop": null}    all have arrived; stop if any requests to
                      {"asked": ["signal", "SIGTERM"]}  one requests to stop; arrive soon
                      {"over": "..."}            one is gone or late; no process can continue
                      {"part": "...", "last": false}  a part of some bytes, in base64

The steps of training need no message. Only if a process requests to stop, all name the next step
that they have not begun, and begin none until process 0 has named the step before which they stop:

    to process 0      {"ask": ["signal", "SIGTERM"], "until": null}
    from process 0    {"poll": 1}
    to process 0      {"poll": 1, "next": 12}
    from process 0    {"before": 13, "why": ["signal", "SIGTERM"], "final": true, "asked_by": [0]}

That is the largest of their next steps, which each can still reach. A process whose data ends soon
names the step for which it has none; that one counts if no other stop comes earlier. The thread
that listens answers, so a process whose main thread waits for the devices answers, too.

A process that dies closes its connection; one that is stopped or cut off is silent too long. In
both cases process 0 names it to the others, and they end. A late process that receives this
message prints the stacks of its threads.

Lines may come from another version or a stranger: one that is not a valid message, is too long or
nested too deeply is ignored, and printed text is escaped.

The last messages must arrive. If a socket with unread data is closed, the kernel drops data not yet
delivered, so an ending process keeps reading until the others have closed their side.
"""

import base64
import collections
import contextlib
import copy
import json
import logging
import math
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

from weft.core.tracing import ThreadStack
from weft.distributed.watchdog import dump_stacks, print_error
from weft.errors import ProcessesNotReadyError, ProcessLostError, describe_error
from weft.serialization.untrusted import parse_json, printable

logger = logging.getLogger(__name__)

HEARTBEAT_TIMEOUT_SECONDS = 100
"""Silence after which a process counts as gone; JAX's own default."""

_POLL_SECONDS = 0.1
_ACTIVITY_SECONDS = 1.0
_LATE_LOG_SECONDS = 30.0
MAX_LINE_BYTES = 1 << 16
"""Maximal number of bytes of a line; a longer one is ignored."""

_PART_BYTES = MAX_LINE_BYTES // 2
_MAX_TEXT_LENGTH = 4096  # at most 12 bytes in a line for each character
_MAX_LATE_SHOWN = 8
# From the notice that another process is gone to the end of this one if its main thread is stuck.
_FORCED_EXIT_SECONDS = 10.0
# JAX aborts the others when process 0 is gone, so they end a little before it.
_EARLIER_FACTOR = 0.9
# How long an ending process waits for the others to receive its notice.
_LEAVE_SECONDS = 5.0


class StopRequest(NamedTuple):
    """Reason why a process requests to stop.

    Attributes:
        kind: "error", "signal" or "end"; of several requests, the first kind in this order counts.
        text: the error, the signal's name, or a description of the end.
    """

    kind: str
    text: str


_REQUEST_KINDS = ("error", "signal", "end")


class _Stop(NamedTuple):
    """The step before which all processes stop, and why.

    Attributes:
        is_final: false for the end of some data, before which another stop may come.
    """

    before: int
    request: StopRequest
    is_final: bool


class _Ask(NamedTuple):
    """Request of a process to stop before a certain step; if that is None, as soon as all can."""

    process: int
    request: StopRequest
    before: int | None


class _Poll:
    """One search of process 0 for the step before which all stop.

    Attributes:
        next_steps: the steps that processes begin next, of those that have answered.
    """

    def __init__(self, number: int):
        self.number = number
        self.asks: list[_Ask] = []
        self.next_steps: dict[int, int] = {}

    def stop(self) -> _Stop | None:
        """Returns the stop; None if a process has begun a step for which another has no data."""
        furthest_step = max(self.next_steps.values())
        ends = [ask.before for ask in self.asks if ask.before is not None]
        is_final = len(ends) < len(self.asks)
        before = furthest_step if is_final else min(ends)
        if before < furthest_step:
            return None
        requests: list[StopRequest] = []
        for ask in self.asks:
            if ask.before is None or ask.before == before:
                requests.append(ask.request)
        return _Stop(before, _most_urgent(requests), is_final)


def _most_urgent(requests: Iterable[StopRequest]) -> StopRequest:
    return min(requests, key=lambda request: _REQUEST_KINDS.index(request.kind))


class Peers:
    """Connections to the other processes; created by `weft.distributed.rendezvous.rendezvous`.

    Args:
        connections: in process 0 those to all others, in the others the one to process 0.
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
        end_seconds: float = _FORCED_EXIT_SECONDS,
    ):
        self._id = process_id
        self._connections = dict(connections)
        self._names = dict(names)
        self._heartbeat_timeout = heartbeat_timeout_seconds
        self._end_seconds = end_seconds
        self._changed = threading.Condition(threading.RLock())
        self._sending = threading.Lock()
        self._point = 0
        self._released_point = 0
        self._agreed_request: StopRequest | None = None
        self._pending_request: StopRequest | None = None
        self._failure: ProcessLostError | ProcessesNotReadyError | None = None
        self._has_left = False
        self._open = set(self._connections)  # those whose side is not closed
        self._next_step = 1  # the first that this process has not begun
        self._slowest_step = 1  # the smallest of all, some seconds ago
        self._is_held = False  # it begins no step until a stop is decided
        self._is_asking = False  # its own request is under way
        self._decided_stop: _Stop | None = None
        self._parts = (
            bytearray()
        )  # of bytes from process 0, until all have come
        self._received = collections.deque[bytes]()
        self.doing = "starting"
        heard = time.monotonic()
        self._heard = dict.fromkeys(self._connections, heard)
        # In process 0 only: the point that each process has reached.
        self._reached_points = dict.fromkeys((0, *self._connections), 0)
        self._requests: dict[int, StopRequest] = {}
        self._activities = dict.fromkeys(self._connections, "starting")
        self._lost: set[int] = set()
        self._poll = _Poll(0)
        self._next_steps = dict.fromkeys((0, *self._connections), 1)
        self._slowest_since = heard
        self._first_arrival: float | None = None
        self._time_limit: float | None = None
        self._late_logged_at = 0.0
        for connection in self._connections.values():
            connection.settimeout(heartbeat_timeout_seconds)
            # A line need not wait for the acknowledgment of the previous one.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(
            target=self._listen, name="weft-peers", daemon=True
        ).start()

    # The interface for the run.

    @property
    def requested(self) -> StopRequest | None:
        """The request of some process; all should reach the next point soon."""
        return self._pending_request

    def agree(
        self,
        request: Callable[[], StopRequest | None] | None,
        *,
        within_seconds: float | None = None,
        starts_run: bool = False,
        alive: Callable[[], None] = lambda: None,
    ) -> StopRequest | None:
        """Waits until all processes have reached this point; returns the request to stop, or None.

        Args:
            request: returns this process's request to stop, or None; polled while waiting. None at
                a point where processes only wait; requests then count for the next one.
            within_seconds: how long the first process waits for the last; None for no limit.
            starts_run: whether what was decided about steps of an earlier run no longer counts.
            alive: called repeatedly while waiting.

        Raises:
            ProcessesNotReadyError: if some did not arrive in time.
            ProcessLostError: if one is gone.
        """
        self._point += 1
        sent_request = None if request is None else _clip_request(request())
        arrival = {
            "at": self._point,
            "within": within_seconds,
            "waits": request is None,
            "starts": starts_run,
        }
        self._send_to_coordinator(arrival | {"request": sent_request})
        while True:
            # Read first: process 0 may have let all continue before it left.
            coordinator_left = self._id != 0 and 0 in self._lost
            with self._changed:
                if self._released_point < self._point and self._failure is None:
                    self._changed.wait(_POLL_SECONDS)
                self.check()
                if self._released_point >= self._point:
                    return None if request is None else self._agreed_request
            if coordinator_left:
                self._on_lost(0, "has ended before the others")
            alive()
            if request is not None and sent_request is None:
                sent_request = _clip_request(request())
                if sent_request is not None:
                    self._send_to_coordinator(
                        arrival | {"request": sent_request}
                    )

    @property
    def next_step(self) -> int:
        """The first step of training that this process has not begun."""
        return self._next_step

    @property
    def is_ahead(self) -> bool:
        """True if another process has not begun the last step of this one, as far as is known."""
        return self._slowest_step < self._next_step

    @property
    def stops_soon(self) -> bool:
        """True if all stop before one of the next steps, which may not be decided yet."""
        return self._is_held or self._decided_stop is not None

    def request_stop(
        self, request: StopRequest, *, before: int | None = None
    ) -> None:
        """Requests a stop before the next step that all can reach, or before a certain one.

        It does not wait, but `begin_step` does until the stop is decided. Again, it does nothing
        if such a stop is decided or requested.

        Args:
            before: a step that no process can have begun, for the end of this process's data.
        """
        with self._changed:
            stop = self._decided_stop
            is_decided = stop is not None and (
                stop.is_final or (before is not None and stop.before <= before)
            )
            if self._is_asking or is_decided:
                return
            self._is_asking = self._is_held = True
        self._send_to_coordinator(
            {"ask": _clip_request(request), "until": before}
        )

    def begin_step(
        self,
        request: Callable[[], StopRequest | None],
        alive: Callable[[], None] = lambda: None,
    ) -> StopRequest | None:
        """Begins a step of training, or returns why all processes stop before it.

        Unless a process requests to stop, it sends no message and waits for nobody.

        Args:
            request: returns this process's request to stop, or None; polled while waiting.
            alive: called repeatedly while waiting.

        Raises:
            ProcessesNotReadyError: if a process was late at a point of agreement.
            ProcessLostError: if one is gone.
        """
        while True:
            own_request = request()
            if own_request is not None:
                self.request_stop(own_request)
            with self._changed:
                self.check()
                stop = self._decided_stop
                if stop is not None and stop.before == self._next_step:
                    return stop.request
                if not self._is_held:
                    self._next_step += 1
                    return None
                self._changed.wait(_POLL_SECONDS)
            alive()

    def from_first(
        self, data: bytes, alive: Callable[[], None] = lambda: None
    ) -> bytes:
        """Returns the bytes that process 0 has passed, in all processes.

        Raises ProcessLostError or ProcessesNotReadyError if a process is gone or late.
        """
        if self._id == 0:
            for start in range(0, max(len(data), 1), _PART_BYTES):
                part = base64.b64encode(
                    data[start : start + _PART_BYTES]
                ).decode()
                self._broadcast(
                    {"part": part, "last": start + _PART_BYTES >= len(data)}
                )
            return data
        while True:
            with self._changed:
                if not self._received and self._failure is None:
                    self._changed.wait(_POLL_SECONDS)
                self.check()
                if self._received:
                    return self._received.popleft()
            if 0 in self._lost:
                self._on_lost(0, "has ended before the others")
            alive()

    @property
    def _stops_on_error(self) -> bool:
        """True if all have agreed to fail, so that the end of one is expected."""
        stop = self._decided_stop
        if stop is not None and stop.request.kind == "error":
            return True
        request = self._agreed_request
        return request is not None and request.kind == "error"

    def check(self) -> None:
        """Raises ProcessLostError if a process is gone, ProcessesNotReadyError if it was late."""
        if self._failure is not None:
            raise copy.copy(self._failure)

    def raise_cause(
        self, error: BaseException, patience_seconds: float = 2.0
    ) -> None:
        """Raises the loss of another process as the cause of an error, once it is noticed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stops_on_error or self._failure is not None,
                patience_seconds,
            )
        if self._failure is not None:
            raise copy.copy(self._failure) from error

    def leave(
        self,
        why: str | None = None,
        *,
        patience_seconds: float = _LEAVE_SECONDS,
    ) -> None:
        """Announces the end of this process, with its error, and waits until the others know.

        If another process is lost, this one is ended within seconds, also after it has left.
        """
        if self._has_left:
            return
        self._has_left = True
        for index, connection in self._connections.items():
            self._send(
                [connection], {"bye": None if why is None else _clip_text(why)}
            )
            self._shut_down_write(index)
        with self._changed:
            self._changed.wait_for(
                lambda: not self._open - self._lost, patience_seconds
            )
            if not self._open:
                self._close()

    # The thread.

    @property
    def _is_ending(self) -> bool:
        return self._has_left or self._failure is not None

    def _listen(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for index, connection in self._connections.items():
                    selector.register(connection, selectors.EVENT_READ, index)
                self._read_messages(selector)
        except (
            Exception
        ) as error:  # without this thread no end of a process would be noticed
            text = f"the connection to other processes failed: {describe_error(error)}"
            self._fail(text, late=False)
        if self._has_left:
            self._close()

    def _read_messages(self, selector: selectors.BaseSelector) -> None:
        """Reads until this process ends and the others have closed their side."""
        incomplete_lines = dict.fromkeys(self._connections, b"")
        heartbeat_seconds = self._heartbeat_timeout / 4
        pause = min(heartbeat_seconds, _ACTIVITY_SECONDS)
        last_heartbeat, sent_state = 0.0, None
        previous_time = time.monotonic()
        while self._open or not self._is_ending:
            for key, _ in selector.select(pause):
                lines = self._read(key.data, incomplete_lines)
                for line in lines or ():
                    if not self._is_ending:
                        self._on_line(key.data, line)
                if lines is None:
                    selector.unregister(key.fileobj)
                    self._on_closed(key.data)
            current_time = time.monotonic()
            away_seconds = current_time - previous_time - pause
            previous_time = current_time
            if self._is_ending:
                continue
            if away_seconds > heartbeat_seconds:
                self._forgive(away_seconds, current_time)
            # Sent soon if the state has changed, since the process may freeze.
            state = {
                "alive": _clip_text(self.doing),
                "next": self._next_step,
                "slowest": self._slowest_step,
            }
            due_seconds = heartbeat_seconds
            if state != sent_state:
                due_seconds = min(_ACTIVITY_SECONDS, heartbeat_seconds)
            if current_time - last_heartbeat >= due_seconds:
                last_heartbeat, sent_state = current_time, state
                self._send(self._connections.values(), state)
            self._check_timeouts(current_time)

    def _forgive(self, away_seconds: float, current_time: float) -> None:
        """Moves deadlines after this process was stopped; the others need not have been silent."""
        with self._changed:
            for index, heard_at in self._heard.items():
                self._heard[index] = min(heard_at + away_seconds, current_time)
            if self._first_arrival is not None:
                self._first_arrival = min(
                    self._first_arrival + away_seconds, current_time
                )

    def _read(
        self, index: int, incomplete_lines: dict[int, bytes]
    ) -> list[bytes] | None:
        """Returns the lines that have come from a process; None at the end."""
        try:
            data = self._connections[index].recv(MAX_LINE_BYTES)
        except OSError:
            data = b""
        if not data:
            return None
        self._heard[index] = time.monotonic()
        *lines, incomplete_line = (incomplete_lines[index] + data).split(b"\n")
        # One byte more than allowed is enough to know that it is too long.
        incomplete_lines[index] = incomplete_line[: MAX_LINE_BYTES + 1]
        return lines

    def _on_closed(self, index: int) -> None:
        if self._id == 0 or self._has_left:
            self._shut_down_write(index)
        if index not in self._lost:  # it did not send "bye"
            self._on_lost(index, "has ended without notice, killed or crashed")
        with self._changed:
            self._open.discard(index)
            self._changed.notify_all()

    def _on_line(self, index: int, line: bytes) -> None:
        message = decode_message(line)
        if not message:
            logger.warning(
                "%s sent an invalid message; it is ignored", self._names[index]
            )
        elif "bye" in message:
            with self._changed:
                self._lost.add(index)
                self._changed.notify_all()
            # If process 0 has failed, it waits a little until the others have ended.
            if self._id == 0 or message["bye"] is None:
                self._shut_down_write(index)
            if message["bye"] is not None and not self._stops_on_error:
                self._on_lost(index, f"has failed: {message['bye']}")
        elif self._id == 0:
            self._activities[index] = message.get(
                "alive", self._activities[index]
            )
            self._next_steps[index] = message.get(
                "next", self._next_steps[index]
            )
            if "at" in message:
                self._on_arrival(index, message)
            if "ask" in message:
                self._on_ask(index, message)
            if "poll" in message:
                self._on_answer(index, message)
        elif "slowest" in message:
            self._slowest_step = message["slowest"]
        elif "go" in message:
            with self._changed:
                if "stop" in message:
                    self._agreed_request = _to_stop_request(message["stop"])
                    self._pending_request = None
                if message.get("starts"):
                    self._forget_stop()
                self._released_point = message["go"]
                self._changed.notify_all()
        elif "poll" in message:
            with self._changed:
                self._is_held = True
                answer = {"poll": message["poll"], "next": self._next_step}
            self._send_to_coordinator(answer)
        elif "before" in message:
            request = _to_stop_request(message.get("why"))
            if request is not None:
                is_final = message.get("final", True)
                stop = _Stop(message["before"], request, is_final)
                self._on_decided(stop, message.get("asked_by", ()))
        elif "part" in message:
            self._on_part(message["part"], is_last=message.get("last", True))
        elif "asked" in message:
            self._pending_request = _to_stop_request(message["asked"])
        elif "over" in message:
            late, missing = (
                message.get("late", False),
                message.get("missing", ()),
            )
            self._fail(message["over"], late=late, missing=missing)

    def _on_decided(self, stop: _Stop, asked_by: Collection[int]) -> None:
        with self._changed:
            self._decided_stop = stop
            # Else its request came too late for this decision, and another one follows.
            if not self._is_asking or self._id in asked_by:
                self._is_held = self._is_asking = False
            self._changed.notify_all()

    def _forget_stop(self) -> None:
        self._decided_stop = None
        self._is_held = self._is_asking = False

    def _on_part(self, part: str, *, is_last: bool) -> None:
        self._parts += base64.b64decode(part)
        if is_last:
            with self._changed:
                self._received.append(bytes(self._parts))
                self._parts.clear()
                self._changed.notify_all()

    def _check_timeouts(self, current_time: float) -> None:
        for index, heard_at in self._heard.items():
            silent_seconds = current_time - heard_at
            if (
                index not in self._lost
                and silent_seconds > self._heartbeat_timeout
            ):
                self._on_lost(
                    index, f"has sent nothing for {silent_seconds:.0f} s"
                )
        if self._id == 0:
            self._log_slow_step(current_time)
        missing: list[int] = []
        with self._changed:
            if self._id != 0 or self._first_arrival is None:
                return
            waited_seconds = current_time - self._first_arrival
            furthest_point = max(self._reached_points.values())
            for index, point in self._reached_points.items():
                if point < furthest_point:
                    missing.append(index)
        if not missing:
            return
        for index in missing:
            if index in self._lost:
                self._on_lost(index, "has ended before the others")
                return
        if self._time_limit is not None and waited_seconds > self._time_limit:
            text = (
                f"not ready within {self._time_limit:g} s: {self._describe_missing(missing)}. "
                "All others were waiting. If it is not frozen, its log has the stacks of its "
                "threads."
            )
            self._fail(text, late=True, missing=missing)
        else:
            self._log_late(missing, waited_seconds, current_time)

    def _log_slow_step(self, current_time: float) -> None:
        """Logs which processes have not begun a step that others have, if that takes long."""
        next_steps = self._next_steps | {0: self._next_step}
        slowest_step = min(next_steps.values())
        if slowest_step != self._slowest_step:
            self._slowest_step = slowest_step
            self._slowest_since = current_time
        if slowest_step == max(next_steps.values()):
            return
        slowest: list[int] = []
        for index, step in next_steps.items():
            if step == slowest_step and index not in self._lost:
                slowest.append(index)
        waited_seconds = current_time - self._slowest_since
        self._log_late(slowest, waited_seconds, current_time)

    def _log_late(
        self, late: list[int], waited_seconds: float, current_time: float
    ) -> None:
        since_last = current_time - self._late_logged_at
        if late and min(waited_seconds, since_last) > _LATE_LOG_SECONDS:
            self._late_logged_at = current_time
            logger.warning(
                "after %.0f s still waiting for %s",
                waited_seconds,
                self._describe_missing(late),
            )

    def _describe_missing(self, missing: list[int]) -> str:
        # A time limit that another process has sent may end while process 0 itself is late.
        names = {0: "process 0"} | self._names
        activities = self._activities | {0: self.doing}
        descriptions = [
            f"{names[index]}, which is {activities[index]}" for index in missing
        ]
        return join_first(descriptions, _MAX_LATE_SHOWN, "; ")

    # Process 0, which coordinates all.

    def _send_to_coordinator(self, message: dict[str, Any]) -> None:
        if self._id == 0:
            if "at" in message:
                self._on_arrival(0, message)
            else:
                self._on_ask(0, message)
        else:
            self._send(
                [self._connections[0]],
                {"alive": _clip_text(self.doing)},
                message,
            )

    def _on_arrival(self, index: int, message: dict[str, Any]) -> None:
        point = message["at"]
        with self._changed:
            # A request that comes after all have continued counts for the next point.
            is_new = point > self._released_point
            if is_new:
                self._reached_points[index] = point
                self._time_limit = message.get("within")
                if self._first_arrival is None:
                    self._first_arrival = time.monotonic()
            request = _to_stop_request(message.get("request"))
            if request is not None:
                self._requests[index] = self._pending_request = request
                self._broadcast({"asked": request})
            if is_new and min(self._reached_points.values()) == point:
                self._release(
                    point,
                    with_requests=not message.get("waits"),
                    starts_run=message.get("starts", False),
                )

    def _release(
        self, point: int, *, with_requests: bool, starts_run: bool
    ) -> None:
        """Lets all processes continue after a point; `with_requests` if they agree there."""
        go: dict[str, Any] = {"go": point, "starts": starts_run}
        if starts_run:
            self._poll = _Poll(self._poll.number + 1)
            self._forget_stop()
        if with_requests:
            self._agreed_request = None
            if self._requests:
                self._agreed_request = _most_urgent(self._requests.values())
            self._requests, self._pending_request = {}, None
            go["stop"] = self._agreed_request
        self._first_arrival = None
        self._broadcast(go)
        self._released_point = point
        self._changed.notify_all()

    def _on_ask(self, index: int, message: dict[str, Any]) -> None:
        """Asks all processes for their next steps, unless that is under way."""
        request = _to_stop_request(message["ask"])
        if request is None:
            return
        with self._changed:
            if not self._poll.asks:
                self._poll = _Poll(self._poll.number + 1)
                self._is_held = True
                self._poll.next_steps[0] = self._next_step
                self._broadcast({"poll": self._poll.number})
            self._poll.asks.append(_Ask(index, request, message.get("until")))
            self._decide_stop()

    def _on_answer(self, index: int, message: dict[str, Any]) -> None:
        with self._changed:
            if message["poll"] == self._poll.number and "next" in message:
                self._poll.next_steps[index] = message["next"]
                self._decide_stop()

    def _decide_stop(self) -> None:
        """Tells all processes before which step they stop, once it is known where all are."""
        poll = self._poll
        unknown = {0, *self._connections} - self._lost - poll.next_steps.keys()
        if unknown or not poll.asks:
            return
        stop = poll.stop()
        earlier = self._decided_stop
        if stop is None:
            self._fail(
                "the data of one process has ended, and others have begun a later step. Give all "
                "processes batches until the same step, or compute steps on all of them.",
                late=False,
            )
            return
        if earlier is not None and earlier.before <= stop.before:
            # Some may have stopped there already, for the earlier reason.
            stop = earlier._replace(is_final=earlier.is_final or stop.is_final)
        asked_by = sorted({ask.process for ask in poll.asks})
        self._poll = _Poll(poll.number)
        self._broadcast(
            {
                "before": stop.before,
                "why": stop.request,
                "final": stop.is_final,
                "asked_by": asked_by,
            }
        )
        self._on_decided(stop, asked_by)

    def _broadcast(self, message: dict[str, Any]) -> None:
        connections: list[socket.socket] = []
        for index, connection in self._connections.items():
            if index not in self._lost:
                connections.append(connection)
        self._send(connections, message)

    def _send(
        self, connections: Iterable[socket.socket], *messages: dict[str, Any]
    ) -> None:
        with self._sending:
            for connection in connections:
                send_messages(connection, *messages)

    def _shut_down_write(self, index: int) -> None:
        with contextlib.suppress(OSError):
            self._connections[index].shutdown(socket.SHUT_WR)

    def _close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    # Ends.

    def _on_lost(self, index: int, event: str) -> None:
        self._lost.add(index)
        text = f"{self._names[index]} {event.rstrip('.')}. This process cannot continue without it."
        self._fail(text, late=False)

    def _fail(
        self, text: str, *, late: bool, missing: Collection[int] = ()
    ) -> None:
        """Ends this process: by an error in its main thread, or by force after a while.

        Process 0 notifies the others first. The force is needed even after the error, since at exit
        JAX waits for all processes.
        """
        if self._id == 0 and not self._is_ending:
            self._broadcast(
                {"over": text, "late": late, "missing": list(missing)}
            )
        with self._changed:
            if self._is_ending:
                return
            seconds = self._end_seconds
            if self._id != 0:
                seconds *= _EARLIER_FACTOR
            timer = threading.Timer(seconds, self._force_exit, args=(text,))
            timer.daemon = True
            timer.start()
            if self._id in missing:  # before the main thread continues
                print_error(dump_stacks())
            error_type = ProcessesNotReadyError if late else ProcessLostError
            self._failure = error_type(text)
            self._changed.notify_all()
        logger.error("%s", text)

    def _force_exit(self, text: str) -> None:
        print_error(f"weft: {text}")
        os._exit(1)


def send_messages(
    connection: socket.socket, *messages: Mapping[str, Any]
) -> None:
    """Sends messages as lines of JSON; the loss of the connection is noticed when reading."""
    lines = "".join(f"{json.dumps(message)}\n" for message in messages)
    with contextlib.suppress(OSError):
        connection.sendall(lines.encode())


def decode_message(line: bytes) -> dict[str, Any]:
    """Returns the message in a line, with its texts made printable; {} if it is invalid.

    >>> decode_message(b'{"at": 3}'), decode_message(b"GET / HTTP/1.1")
    ({'at': 3}, {})
    >>> decode_message(b'{"at": "now"}')
    {}
    """
    if len(line) > MAX_LINE_BYTES:
        return {}
    try:
        message = parse_json(line)
    except ValueError:
        return {}
    if not isinstance(message, dict):
        return {}
    escaped: dict[str, Any] = {}
    for name, value in message.items():
        if name not in _FIELDS or not _FIELDS[name](value):
            return {}
        escaped[name] = _escape_text(value)
    return escaped


def _escape_text(value: object) -> object:
    """Returns texts without control characters, with all lines after the first indented."""
    if isinstance(value, list):
        return [_escape_text(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"\n(?!    )", "\n    ", printable(value))
    return value


_BASE64 = re.compile(
    r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_stop_request(value: object) -> bool:
    if isinstance(value, list) and len(value) == 2:
        return value[0] in _REQUEST_KINDS and _is_text(value[1])
    return value is None


def _is_time_limit(value: object) -> bool:
    if isinstance(value, bool):
        return False
    return value is None or (
        isinstance(value, int | float) and 0 <= value < math.inf
    )


# The fields of messages, including those of the rendezvous.
_FIELDS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(
        (
            "at",
            "go",
            "process",
            "of",
            "pid",
            "next",
            "slowest",
            "poll",
            "before",
        ),
        _is_count,
    ),
    **dict.fromkeys(
        ("alive", "over", "host", "refused", "differs", "welcome"), _is_text
    ),
    **dict.fromkeys(("challenge", "proof", "versions"), _is_text),
    **dict.fromkeys(
        ("request", "stop", "asked", "ask", "why"), _is_stop_request
    ),
    "until": lambda value: value is None or _is_count(value),
    **dict.fromkeys(
        ("waits", "late", "last", "starts", "final"),
        lambda value: isinstance(value, bool),
    ),
    "part": lambda value: (
        isinstance(value, str) and bool(_BASE64.fullmatch(value))
    ),
    "bye": lambda value: value is None or _is_text(value),
    "within": _is_time_limit,
    **dict.fromkeys(
        ("missing", "asked_by"),
        lambda value: isinstance(value, list) and all(map(_is_count, value)),
    ),
}


def join_first(texts: Sequence[str], limit: int, separator: str) -> str:
    """Joins the first texts and counts the others.

    >>> join_first(["a", "b", "c"], 2, ", ")
    'a, b and 1 more'
    """
    more = len(texts) - limit
    shown = separator.join(texts[:limit])
    return f"{shown} and {more} more" if more > 0 else shown


def _clip_text(text: str) -> str:
    """Returns the text, shortened to its start and end if it does not fit into a line."""
    half = _MAX_TEXT_LENGTH // 2
    return (
        text
        if len(text) <= _MAX_TEXT_LENGTH
        else f"{text[:half]} … {text[-half:]}"
    )


def _clip_request(request: StopRequest | None) -> StopRequest | None:
    return request and StopRequest(request.kind, _clip_text(request.text))


def _to_stop_request(value: Sequence[str] | None) -> StopRequest | None:
    return None if value is None else StopRequest(*value)


_PEERS = ThreadStack[Peers]()


@contextlib.contextmanager
def use_peers(peers: Peers) -> Iterator[Peers]:
    """Makes connections available to the runs of this thread, and closes them after the block."""
    with _PEERS.push(peers):
        try:
            yield peers
        except BaseException as error:
            peers.leave(describe_error(error))
            raise
        peers.leave()


def current_peers() -> Peers | None:
    """Returns the connections of this thread; None without any."""
    return _PEERS.top
