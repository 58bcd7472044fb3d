"""Status page of a run: its report so far, and what it does now.

    /          HTML: the page of the report, which renews itself
    /json      step, rate, losses, evaluations, time left, checkpoint, current activity as JSON
    /stacks    stack traces of all threads

The page's server listens on the loopback interface only; use `ssh -L` from elsewhere. It refuses
requests whose host is not that interface, which prevents DNS rebinding. Connections are few and
short, such that clients cannot exhaust the run's threads.

However many requests come, the page takes less than a fiftieth of a core from the run: there is a
pause between two connections, and what was computed is kept for a multiple of the time that took.
"""

import base64
import collections
import contextlib
import functools
import hashlib
import http.server
import ipaddress
import json
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from weft.distributed.watchdog import Watchdog
from weft.errors import CheckpointSaveError, StatusPageError, WeftError
from weft.report import display, readings
from weft.report.page import run_page
from weft.report.recorder import error_console
from weft.report.rendering import render
from weft.report.results import TRAIN_SUMMARIES, Curves, Results, read_results
from weft.trainer.hooks import Hook, RunningTrainer
from weft.typing import ArrayLike, NestedTensor

_LAST_LOSSES = 100
_RATE_STEPS = 50
_MAX_POINTS = 1000
_MAX_CONNECTIONS = 8
_CONNECTION_SECONDS = 5.0
_POLL_SECONDS = 0.1
_PAUSE_SECONDS = 0.1  # between two connections; one takes a millisecond
_KEPT_FACTOR = 300
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:]+)(:[0-9]{1,5})?")


def _source_of(template: str) -> str:
    """Returns the name of an inline script or style for a content policy: its digest."""
    digest = hashlib.sha256(render(template).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


@functools.cache
def _headers() -> dict[str, str]:
    """Returns the headers by which a browser runs only what the page itself brings."""
    policy = {
        "default-src": "'none'",
        "script-src": _source_of("renew.js"),
        "style-src": _source_of("style.css"),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return {
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "; ".join(map(" ".join, policy.items())),
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


class _Kept:
    """Text of a function, kept for a multiple of the processor time that it took."""

    def __init__(self, function: Callable[[], str]):
        self._function = function
        self._lock = threading.Lock()
        self._text, self._end_time = "", -math.inf

    def __call__(self, *, fresh: bool = False) -> str:
        with self._lock:
            if fresh or time.monotonic() >= self._end_time:
                start = time.thread_time()
                self._text = self._function()
                processor_seconds = time.thread_time() - start
                self._end_time = (
                    time.monotonic() + _KEPT_FACTOR * processor_seconds
                )
            return self._text


class RunStatus(Hook):
    """Hook that records the status of a run for other threads."""

    def __init__(self, watchdog: Watchdog):
        self._watchdog = watchdog
        self._started = time.time()
        self._facts: dict[str, Any] = {
            "step": 0,
            "resumed_from": None,
            "last_checkpoint": None,
        }
        self._step_times: collections.deque[float] = collections.deque(
            maxlen=_RATE_STEPS
        )
        self._losses: collections.deque[tuple[int, Any]] = collections.deque(
            maxlen=_LAST_LOSSES
        )
        self._values: list[tuple[int, Mapping[str, Any]]] = []
        self._every_n_steps = 1
        self._evals: dict[str, list[tuple[int, dict[str, float]]]] = {}
        self._meter = readings.Meter(math.inf)
        self._reading: readings.Reading | None = None
        self._results = Results("a run that starts")

    def on_start(
        self, trainer: RunningTrainer, resumed_from: int | None
    ) -> None:
        directory, max_step = trainer.config.dir, trainer.config.max_step
        self._facts |= {
            "name": trainer.path(),
            "dir": directory,
            "step": trainer.step,
            "max_step": max_step,
            "resumed_from": resumed_from,
            "last_checkpoint": resumed_from,
        }
        self._meter = readings.Meter(max_step)
        self._results = Results(Path(directory).absolute().name)
        # Another machine than the first process's may not see the directory.
        with contextlib.suppress(OSError, WeftError):
            self._results = read_results(directory)

    def on_step(
        self, step: int, outputs: dict[str, Any], batch: NestedTensor
    ) -> None:
        self._facts["step"] = step
        self._losses.append((step, outputs["loss"]))
        self._step_times.append(time.monotonic())
        self._reading = (
            self._meter.on_step(step, outputs, batch) or self._reading
        )
        if step % self._every_n_steps == 0:
            metrics = readings.outermost_scalars(outputs.get("summaries", {}))
            self._values.append((step, {**metrics, "loss": outputs["loss"]}))
        # However long the run is, the page has 500 to 1,000 points, evenly spaced.
        if len(self._values) > _MAX_POINTS:
            self._values = self._values[::2]
            self._every_n_steps *= 2

    def on_eval(self, name: str, step: int, summaries: dict[str, Any]) -> None:
        scalars = readings.outermost_scalars(summaries)
        values = {metric: float(value) for metric, value in scalars.items()}
        self._evals.setdefault(name, []).append((step, values))

    def on_checkpoint(self, step: int) -> None:
        self._facts["last_checkpoint"] = step

    def on_end(self, step: int, reason: str) -> None:
        self._facts["ended"] = reason

    def on_save_failed(self, step: int, error: CheckpointSaveError) -> None:
        self._facts["last_failed_save"] = f"step {step}: {error}"

    @property
    def has_ended(self) -> bool:
        """True once the run is over, and its processor free."""
        return "ended" in self._facts

    def snapshot(self) -> dict[str, Any]:
        """Returns the status as JSON values, without waiting for unfinished steps."""
        losses: dict[str, float | str] = {}
        for step, loss in list(self._losses):
            if loss.is_ready():  # another one would block the reader
                losses[str(step)] = _json_number(float(loss))
        last_evaluations: dict[str, dict[str, float | str]] = {}
        for name, evaluations in list(self._evals.items()):
            step, values = evaluations[-1]
            entry: dict[str, float | str] = {"step": step}
            for metric, value in values.items():
                entry[metric] = _json_number(value)
            last_evaluations[name] = entry
        max_step = self._facts.get("max_step")
        if max_step == math.inf:
            max_step = None
        seconds_left = self._reading and self._reading.seconds_left
        if seconds_left is not None:
            seconds_left = round(seconds_left, 1)
        return {
            **self._facts,
            "max_step": max_step,
            "doing": self._watchdog.doing,
            "seconds_since_progress": round(self._watchdog.silent_seconds, 1),
            "seconds_running": round(time.time() - self._started, 1),
            "seconds_left": seconds_left,
            "steps_per_second": self._steps_per_second(),
            "losses": losses,
            "last_evaluations": last_evaluations,
            "process": f"{jax.process_index()} of {jax.process_count()}",
            "pid": os.getpid(),
        }

    def _steps_per_second(self) -> float | None:
        step_times = list(self._step_times)
        if len(step_times) < 2 or step_times[-1] == step_times[0]:
            return None
        return round(
            (len(step_times) - 1) / (step_times[-1] - step_times[0]), 3
        )

    def html(self) -> str:
        """Returns the page of the run so far."""
        run = self._so_far()
        return render("status.html", title=run.name, run=run_page(run))

    def _so_far(self) -> Results:
        """Returns the results of earlier starts and of this one."""
        earlier = self._results
        resumed_from = self._facts["resumed_from"] or 0
        curves: dict[str, Curves] = {}
        for reporter, earlier_curves in earlier.curves.items():
            curves[reporter] = {}
            for path, points in earlier_curves.items():
                # Steps after the checkpoint that it resumed from are repeated.
                curves[reporter][path] = [
                    point for point in points if point[0] <= resumed_from
                ]
        train_curves = curves.setdefault(TRAIN_SUMMARIES, {})
        for step, values in list(self._values):
            if values["loss"].is_ready():
                _add_points(train_curves, step, values, prefix="model/")
        for evaler, evaluations in list(self._evals.items()):
            eval_curves = curves.setdefault(evaler, {})
            for step, values in list(evaluations):
                _add_points(eval_curves, step, values)
        record = dict(earlier.record)
        if self.has_ended:
            record["end"] = {
                "step": self._facts["step"],
                "reason": self._facts["ended"],
            }
        return Results(
            earlier.name,
            record,
            curves,
            config=earlier.config,
            live=self._live_facts(),
        )

    def _live_facts(self) -> dict[str, str]:
        status, reading = self.snapshot(), self._reading
        facts = {"step": f"{status['step']:,}", "now": status["doing"]}
        if status["max_step"]:
            facts["step"] += f" of {status['max_step']:,}"
        facts["elapsed"] = display.duration_text(status["seconds_running"])
        if status["seconds_left"] is not None:
            facts["remaining"] = display.duration_text(status["seconds_left"])
        if reading is not None and reading.per_second is not None:
            facts["speed"] = f"{reading.per_second:,.0f} {reading.unit}/s"
        elif status["steps_per_second"] is not None:
            facts["speed"] = f"{status['steps_per_second']:,.3g} steps/s"
        facts["last progress"] = (
            f"{status['seconds_since_progress']:,.0f} s ago"
        )
        for name in ("last_checkpoint", "last_failed_save"):
            if status.get(name) is not None:
                facts[name.replace("_", " ")] = str(status[name])
        facts["process"] = f"{status['process']}, pid {status['pid']}"
        return facts


def _add_points(
    curves: Curves, step: int, values: Mapping[str, ArrayLike], prefix: str = ""
) -> None:
    """Adds the values of a step to curves, under the paths that summaries in files have."""
    for name, value in values.items():
        path = name if name == "loss" else f"{prefix}{name}"
        curves.setdefault(path, []).append((step, float(value)))


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no NaN


def stacks() -> str:
    """Returns the stacks of all threads of this process as text."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts: list[str] = []
    for ident, frame in sys._current_frames().items():
        stack = "".join(traceback.format_stack(frame))
        texts.append(f"Thread {names.get(ident, ident)}:\n{stack}")
    return "\n".join(texts)


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
        return (
            name.lower() == "localhost"
            or ipaddress.ip_address(name).is_loopback
        )
    except ValueError:
        return False


class _Server(http.server.ThreadingHTTPServer):
    """Server for a few clients at a time, each for a short time."""

    daemon_threads = True
    request_queue_size = (
        64  # those that wait for the pause between two connections
    )

    def __init__(
        self, port: int, handler: type[http.server.BaseHTTPRequestHandler]
    ):
        self._lock = threading.Lock()
        self._start_times: dict[socket.socket, float] = {}
        super().__init__(("127.0.0.1", port), handler)

    def process_request(self, request: Any, client_address: object) -> None:
        time.sleep(_PAUSE_SECONDS)
        with self._lock:
            accepts = len(self._start_times) < _MAX_CONNECTIONS
            if accepts:
                self._start_times[request] = time.monotonic()
        if accepts:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._start_times.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Ends connections that take too long; called ten times a second."""
        oldest_start = time.monotonic() - _CONNECTION_SECONDS
        with self._lock:
            for request, start_time in self._start_times.items():
                if start_time < oldest_start:
                    with contextlib.suppress(OSError):  # already ending
                        request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores errors, such as a client that has disconnected."""


@contextlib.contextmanager
def status_page(
    port: int | None, watchdog: Watchdog
) -> Iterator[RunStatus | None]:
    """Serves the page while open, and yields the listener that it needs.

    Port 0 is any free port; with several processes, each uses the next one. None serves no page.
    Raises a StatusPageError if the server cannot listen on the port.
    """
    if port is None:
        yield None
        return
    status = RunStatus(watchdog)
    answers = {
        "/": (_Kept(status.html), "text/html; charset=utf-8"),
        "/json": (
            _Kept(lambda: json.dumps(status.snapshot(), indent=2)),
            "application/json",
        ),
        "/stacks": (_Kept(stacks), "text/plain; charset=utf-8"),
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hosts = self.headers.get_all("Host", [])
            if len(hosts) != 1 or not is_loopback_host(hosts[0].strip()):
                self.send_error(
                    403, "the Host has to be localhost, 127.0.0.1 or [::1]"
                )
            elif self.path in answers:
                text, kind = answers[self.path]
                self._answer(text(fresh=status.has_ended), kind)
            else:
                self.send_error(404, "the paths are /, /json and /stacks")

        def _answer(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def end_headers(self) -> None:
            for name, value in _headers().items():
                self.send_header(name, value)
            super().end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Keeps requests out of the run's log."""

    port_of_process = port + jax.process_index() if port else 0
    try:
        server = _Server(port_of_process, Handler)
    except OSError as error:
        raise StatusPageError(
            f"status_port={port}: cannot listen on 127.0.0.1:{port_of_process}: {error}. "
            "Choose another port, or 0 for any free one."
        ) from error
    thread = threading.Thread(
        target=server.serve_forever,
        args=[_POLL_SECONDS],
        name="weft-status-page",
        daemon=True,
    )
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}/"
    error_console().print(f"status     {url}", soft_wrap=True)
    try:
        yield status
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
