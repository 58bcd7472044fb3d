import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
import time
import types
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np
import pytest

from weft.distributed.watchdog import Watchdog
from weft.errors import CheckpointSaveError, StatusPageError
from weft.report.live import RunStatus, status_page
from weft.trainer.run_dir import CONFIG_FILE, update_record


class Trainer:
    """Attributes of a trainer that the page reads."""

    step = 3

    def __init__(self, directory, max_step=40):
        self.config = types.SimpleNamespace(dir=str(directory), max_step=max_step)

    def path(self):
        return "trainer"


def get(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / "a<b"
    directory.mkdir()
    (directory / CONFIG_FILE).write_text("Trainer.Config(note='<&>')\n", encoding="utf-8")
    update_record(str(directory), model={"parameters": 1234, "trained": 1234})
    folder = directory / "summaries" / "train_train"
    folder.mkdir(parents=True)
    lines = [{"step": n, "time": 1e9 + n, "values": {"loss": 7.0 + n}} for n in (1, 2, 3, 4)]
    (folder / "summaries.jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8"
    )
    return directory


@pytest.fixture(autouse=True)
def closed_at_once(monkeypatch):
    """Lets the server look for its end, and accept connections, more often."""
    monkeypatch.setattr("weft.report.live._POLL_SECONDS", 0.01)
    monkeypatch.setattr("weft.report.live._PAUSE_SECONDS", 0.001)


@pytest.fixture
def served(capsys, run_dir):
    """Yields the page of a run that was resumed from step 3, after two steps."""
    watchdog = Watchdog()
    with status_page(0, watchdog) as listener:
        url = re.search(r"status +(http://127\.0\.0\.1:\d+)", capsys.readouterr().err)[1]
        listener.on_start(Trainer(run_dir), 3)
        summaries = {"model": {"accuracy": jnp.array(0.25)}}
        listener.on_step(4, {"loss": jnp.array(2.5), "summaries": summaries}, {})
        listener.on_step(5, {"loss": jnp.array(jnp.nan)}, {})
        listener.on_eval("held_out", 4, {"loss": 2.25, "accuracy": 0.75})
        listener.on_checkpoint(4)
        listener.on_save_failed(5, CheckpointSaveError("the disk is full"))
        watchdog.report("running step 6")
        yield url, listener


def test_json_status_of_run(served, run_dir):
    url, listener = served
    text, kind = get(f"{url}/json")
    status = json.loads(text)
    assert kind == "application/json"
    assert status["step"] == 5 and status["max_step"] == 40 and status["dir"] == str(run_dir)
    assert status["doing"] == "running step 6" and status["seconds_since_progress"] < 60
    assert status["losses"] == {"4": 2.5, "5": "nan"}
    assert status["steps_per_second"] > 0
    assert (status["resumed_from"], status["last_checkpoint"]) == (3, 4)
    assert status["last_failed_save"] == "step 5: the disk is full"
    held_out = {"step": 4, "loss": 2.25, "accuracy": 0.75}
    assert status["last_evaluations"] == {"held_out": held_out}
    assert status["process"] == "0 of 1" and status["seconds_left"] is None
    listener.on_end(5, "SIGTERM")
    assert json.loads(get(f"{url}/json")[0])["ended"] == "SIGTERM"


def test_page_is_the_report_so_far(served):
    url, listener = served
    text, kind = get(url)
    assert kind == "text/html; charset=utf-8" and "setInterval" in text
    for part in (
        "<h1>a&lt;b</h1><p>running",
        "<td>5 of 40",
        "running step 6",
        "<td>1,234",
        "step 3 · train, averaged",  # of the earlier start
        "<td>held_out</td><td>4</td><td>2.250</td><td>0.750",
        "accuracy",
        "step 5: the disk is full",
        "&lt;&amp;&gt;",
    ):
        assert part in text, part
    assert "11" not in re.findall(r"averaged ([\d.]+)<", text)  # step 4 was repeated
    listener.on_end(5, "SIGTERM")
    assert "5 steps, stopped by SIGTERM" in get(url)[0]


def test_page_has_the_time_left_and_few_points(run_dir):
    status = RunStatus(Watchdog())
    status.on_start(Trainer(run_dir, max_step=20_000), None)
    outputs, batch = {"loss": jnp.float32(1.0)}, {"x": np.zeros((4, 2))}
    for step in range(1, 10_001):
        status.on_step(step, outputs, batch)
    assert status.snapshot()["seconds_left"] > 0
    text = status.html()
    assert "remaining" in text and "examples/s" in text and "10,000 of 20,000" in text
    assert len(status._values) <= 1000 and len(text) < 200_000


def test_stacks_of_all_threads(served):
    stop = threading.Event()

    def stuck_in_here():
        stop.wait(30)

    thread = threading.Thread(target=stuck_in_here, name="reader")
    thread.start()
    text, _ = get(f"{served[0]}/stacks")
    stop.set()
    thread.join()
    assert "Thread reader:" in text and "in stuck_in_here" in text


def test_only_loopback_is_served_while_open(served):
    url = served[0]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(f"{url}/secrets")
    port = int(url.rpartition(":")[2])
    addresses = socket.getaddrinfo(socket.gethostname(), port, socket.AF_INET)
    for *_, address in addresses:
        if not address[0].startswith("127."):
            with pytest.raises(OSError, match="refused"):
                socket.create_connection(address, timeout=5)


def test_browser_runs_only_what_the_page_brings(served):
    with urllib.request.urlopen(served[0], timeout=20) as answer:
        headers, text = answer.headers, answer.read().decode()
    assert headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    for tag in ("script", "style"):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(r"<[^>]* (on[a-z]+|style)=", text), (
        "inline code and styles would not count"
    )
    with pytest.raises(urllib.error.HTTPError) as missing:
        get(f"{served[0]}/secrets")
    with missing.value as answer:
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_many_requests_compute_the_page_once(capsys, monkeypatch):
    count = []

    def expensive():
        count.append(1)
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        return "page"

    monkeypatch.setattr("weft.report.live.RunStatus.html", lambda status: expensive())
    with status_page(0, Watchdog()) as listener, ThreadPoolExecutor(4) as pool:
        url = re.search(r"http://127\.0\.0\.1:\d+", capsys.readouterr().err)[0]
        assert {text for text, _ in pool.map(get, [url] * 12)} == {"page"}
        assert len(count) == 1
        listener.on_end(5, "SIGTERM")  # nothing is left to slow down
        get(url)
        assert len(count) == 2


def test_disabled_by_default_and_port_in_use_is_reported():
    with status_page(None, Watchdog()) as listener:
        assert listener is None
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with (
            pytest.raises(StatusPageError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*0 for"),
            status_page(port, Watchdog()),
        ):
            pass


def request(url, text, timeout=20):
    """Returns all that is answered to what a client sends."""
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=timeout) as connection:
        connection.sendall(text.encode())
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()


STRANGE_HOSTS = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "["]
STRANGE_HOSTS += ["localhost.", "a@localhost", "::1", "[::2]", "0.0.0.0", "localhost evil"]
STRANGE_HOSTS += ["localhost:x", "localhost\r\nHost: evil.example", None]


@pytest.mark.parametrize("path", ["/", "/json", "/stacks", "/secrets"])
def test_dns_rebinding_requests_are_rejected(served, path):
    for host in STRANGE_HOSTS:
        header = "" if host is None else f"Host: {host}\r\n"
        answer = request(served[0], f"GET {path} HTTP/1.1\r\n{header}\r\n")
        assert answer.startswith("HTTP/1.0 403 the Host has to be localhost, 127.0.0.1 or [::1]")
        assert "step" not in answer and "Thread" not in answer and "runs" not in answer


def test_loopback_names_are_accepted(served):
    for host in ("localhost", "LocalHost:9", "127.0.0.1:8080", "[::1]:1", "[::1]"):
        answer = request(served[0], f"GET /json HTTP/1.1\r\nHost: {host}\r\n\r\n")
        assert answer.startswith("HTTP/1.0 200") and '"step": 5' in answer


@pytest.mark.long
def test_silent_clients_hold_few_threads_briefly(served, monkeypatch):
    monkeypatch.setattr("weft.report.live._CONNECTION_SECONDS", 1.0)
    url = served[0]
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        stuck = []
        for _ in range(20):
            stuck.append(stack.enter_context(socket.create_connection(address, timeout=20)))
            time.sleep(0.01)  # the server's backlog is short
        slow = stuck[0]
        slow.sendall(b"GET / HTTP/1.1\r\nX: ")
        assert 0 < threading.active_count() - before <= 8
        deadline = time.monotonic() + 20
        for connection in stuck[8:]:
            with contextlib.suppress(ConnectionError):
                assert connection.recv(10) == b""
        while time.monotonic() < deadline:
            try:
                slow.sendall(b"x")  # a byte now and then does not keep it
                time.sleep(0.1)
            except OSError:
                break
        assert time.monotonic() < deadline
        assert json.loads(get(f"{url}/json")[0])["step"] == 5
