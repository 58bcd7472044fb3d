"""Progress of a run: listeners for its events, and a status page.

    /          HTML: step, rate, losses, checkpoint, evaluations, current activity
    /json      the same as JSON
    /stacks    stack traces of all threads

The page's server listens on the loopback interface only; use `ssh -L` from elsewhere. It refuses
requests whose host is not that interface, which prevents DNS rebinding. Connections are few and
short, such that clients cannot exhaust the run's threads.
"""

import collections
import contextlib
import html
import http.server
import ipaddress
import json
import logging
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from weft.distributed.watchdog import Watchdog
from weft.errors import CheckpointSaveError, StatusPageError
from weft.typing import ArrayLike, NestedTensor

if TYPE_CHECKING:
    from weft.trainer.train_step import TrainerState


EARLY_STOPPING = "early stopping"
INPUT_ENDED = "input ended"
MAX_STEP = "max_step"


def has_ended(reason: str) -> bool:
    """Returns whether a run with this `on_end` reason is complete, rather than asked to stop.

    >>> has_ended("max_step"), has_ended("SIGTERM")
    (True, False)
    """
    return reason in (MAX_STEP, INPUT_ENDED, EARLY_STOPPING)


class RunningTrainer(Protocol):
    """Trainer as its listeners see it."""

    @property
    def config(self) -> Any: ...

    @property
    def step(self) -> int: ...

    @property
    def trainer_state(self) -> "TrainerState": ...

    @property
    def trainer_state_specs(self) -> "TrainerState": ...

    def path(self) -> str: ...


class RunListener:
    """Listener for a trainer's progress that does nothing. Subclass it for displays and reports.

    Values in `outputs` and `summaries` are arrays on devices; reading one waits for its step.
    """

    def on_start(self, trainer: RunningTrainer, resumed_from: int | None) -> None:
        """Handles the start; `resumed_from` is the step of a restored checkpoint, or None."""

    def on_step(self, step: int, outputs: dict[str, Any], batch: NestedTensor) -> None:
        """Handles a dispatched step.

        Args:
            step: counts from 1.
            outputs: "loss" and "summaries" of the step.
            batch: the input of the step.
        """

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        """Handles the summaries of an evaler."""

    def on_checkpoint(self, step: int) -> None:
        """Handles a state that was passed to the checkpointer."""

    def on_save_failed(self, step: int, error: CheckpointSaveError) -> None:
        """Handles a save that failed for lack of disk space; training continues.

        `step` is the last step of the run; the error names the step, the cause and existing
        checkpoints.
        """

    def on_end(self, step: int, reason: str) -> None:
        """Handles the end of the run, even if it was asked to stop before `on_start`.

        The reason is "max_step", "input ended", "early stopping", or the name of the signal that
        asked to stop; see `has_ended`.
        """


logger = logging.getLogger(__name__)

_LAST_LOSSES = 100
_RATE_STEPS = 50
_SHOWN_LOSSES = 10
_MAX_CONNECTIONS = 8
_CONNECTION_SECONDS = 5.0
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:[0-9]{1,5})?")
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:48em;margin:2em auto;padding:0 1em}"
    "th{text-align:left;font-weight:normal;color:#666;padding-right:2em;vertical-align:top}"
    "td{font-variant-numeric:tabular-nums}pre{overflow-x:auto}"
)


class RunStatus(RunListener):
    """Listener that records the status of a run for other threads and forwards all events."""

    def __init__(self, watchdog: Watchdog, listener: RunListener):
        self._watchdog = watchdog
        self._listener = listener
        self._started = time.time()
        self._facts: dict[str, Any] = {"step": 0, "resumed_from": None, "last_checkpoint": None}
        self._losses: collections.deque[tuple[int, Any]] = collections.deque(maxlen=_LAST_LOSSES)
        self._moments: collections.deque[float] = collections.deque(maxlen=_RATE_STEPS)
        self._evals: dict[str, Any] = {}

    def on_start(self, trainer: RunningTrainer, resumed_from: int | None) -> None:
        self._facts |= {
            "name": trainer.path(),
            "dir": trainer.config.dir,
            "step": trainer.step,
            "max_step": trainer.config.max_step,
            "resumed_from": resumed_from,
            "last_checkpoint": resumed_from,
        }
        self._listener.on_start(trainer, resumed_from)

    def on_step(self, step: int, outputs: dict[str, Any], batch: NestedTensor) -> None:
        self._facts["step"] = step
        self._losses.append((step, outputs["loss"]))
        self._moments.append(time.monotonic())
        self._listener.on_step(step, outputs, batch)

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        self._evals[name] = step
        self._listener.on_eval(name, step, summaries)

    def on_checkpoint(self, step: int) -> None:
        self._facts["last_checkpoint"] = step
        self._listener.on_checkpoint(step)

    def on_end(self, step: int, reason: str) -> None:
        self._facts["ended"] = reason
        self._listener.on_end(step, reason)

    def on_save_failed(self, step: int, error: CheckpointSaveError) -> None:
        self._facts["last_failed_save"] = f"step {step}: {error}"
        self._listener.on_save_failed(step, error)

    def snapshot(self) -> dict[str, Any]:
        """Returns the status as JSON values, without waiting for unfinished steps."""
        # Arrays of unfinished steps would block the reader.
        done = [(step, loss) for step, loss in list(self._losses) if loss.is_ready()]
        moments = list(self._moments)
        rate = None
        if len(moments) > 1 and moments[-1] > moments[0]:
            rate = round((len(moments) - 1) / (moments[-1] - moments[0]), 3)
        max_step = self._facts.get("max_step")
        return {
            **self._facts,
            "max_step": max_step if max_step != float("inf") else None,
            "doing": self._watchdog.doing,
            "seconds_since_progress": round(self._watchdog.silent_seconds, 1),
            "seconds_running": round(time.time() - self._started, 1),
            "steps_per_second": rate,
            "losses": {str(step): _number(loss) for step, loss in done},
            "last_evaluations": dict(self._evals),
            "process": f"{jax.process_index()} of {jax.process_count()}",
            "pid": os.getpid(),
        }


def _number(x: ArrayLike) -> float | str:
    value = float(np.asarray(x))
    return value if np.isfinite(value) else str(value)  # JSON has no NaN


def stacks() -> str:
    """Returns the stacks of all threads of this process as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def status_html(status: dict[str, Any]) -> str:
    """Returns a `RunStatus.snapshot` as an HTML page."""
    shown = {name.replace("_", " "): value for name, value in status.items() if name != "losses"}
    if status["max_step"] is not None:
        shown["step"] = f"{status['step']:,} of {status['max_step']:,}"
        del shown["max step"]
    shown["last losses"] = "<br>".join(
        f"{int(step):,}: {loss:.4f}" if isinstance(loss, float) else f"{int(step):,}: {loss}"
        for step, loss in list(status["losses"].items())[: -_SHOWN_LOSSES - 1 : -1]
    )
    rows = "".join(
        f"<tr><th>{html.escape(name)}<td>{value if name == 'last losses' else _text(value)}"
        for name, value in shown.items()
        if value not in (None, {}, "")
    )
    title = html.escape(f"Run {status.get('dir', '')}")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="refresh" content="5"><style>{_STYLE}</style><h1>{title}</h1>'
        f'<table>{rows}</table><p><a href="/json">JSON</a> · <a href="/stacks">stacks</a>'
    )


def _text(value: object) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{name}: {inner}" for name, inner in value.items())
    return html.escape(str(value))


def is_loopback_host(host: str) -> bool:
    """Returns whether the host of a request is the loopback interface, at any port.

    >>> is_loopback_host("localhost:8080"), is_loopback_host("127.0.0.1.evil.example")
    (True, False)
    """
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match[1].strip("[]")
    try:
        return name.lower() == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class _Server(http.server.ThreadingHTTPServer):
    """Server for a few clients at a time, each for a short time."""

    daemon_threads = True

    def __init__(self, port: int, handler: type[http.server.BaseHTTPRequestHandler]):
        self._lock = threading.Lock()
        self._since: dict[socket.socket, float] = {}
        super().__init__(("127.0.0.1", port), handler)

    def process_request(self, request: Any, client_address: object) -> None:
        with self._lock:
            accepts = len(self._since) < _MAX_CONNECTIONS
            if accepts:
                self._since[request] = time.monotonic()
        if accepts:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends connections that take too long; called twice a second."""
        now = time.monotonic()
        with self._lock:
            for request, since in self._since.items():
                if now - since > _CONNECTION_SECONDS:
                    with contextlib.suppress(OSError):  # already ending
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores errors, such as a client that has disconnected."""


@contextlib.contextmanager
def status_page(
    port: int | None, watchdog: Watchdog, listener: RunListener
) -> Iterator[RunListener]:
    """Serves the page while open, and yields the listener for the run.

    Port 0 is any free port, None serves no page; with several processes, each uses the next port.
    Raises a StatusPageError if the server cannot listen on the port.
    """
    if port is None:
        yield listener
        return
    status = RunStatus(watchdog, listener)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or not is_loopback_host(hosts[0].strip()):
                self.send_error(403, "the Host has to be localhost, 127.0.0.1 or [::1]")
            elif self.path == "/json":
                self._answer(json.dumps(status.snapshot(), indent=2), "application/json")
            elif self.path == "/stacks":
                self._answer(stacks(), "text/plain; charset=utf-8")
            elif self.path == "/":
                self._answer(status_html(status.snapshot()), "text/html; charset=utf-8")
            else:
                self.send_error(404, "the paths are /, /json and /stacks")

        def _answer(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Keeps requests out of the run's log."""

    own = port + jax.process_index() if port else 0
    try:
        server = _Server(own, Handler)
    except OSError as error:
        raise StatusPageError(
            f"status_port={port}: cannot listen on 127.0.0.1:{own}: {error}. Choose another port, "
            "or 0 for any free one."
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="weft-status-page", daemon=True)
    thread.start()
    logger.warning("the status of this run: http://127.0.0.1:%d/", server.server_address[1])
    try:
        yield status
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
