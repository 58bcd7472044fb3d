"""What an editor with pyright shows of configs: it is asked as editors ask it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """\
from weft.hierarchy import BaseLayer, Linear
from weft.trainer import SpmdTrainer

class Layer(BaseLayer):
    class Config(BaseLayer.Config):
        width: int = 8
        '''Number of channels.'''

cfg = Layer.default_config().set()
Linear.default_config().clone(inp)
print(cfg.width)
cfg.set(width=4)
print(SpmdTrainer.default_config().max_step)
"""


class LanguageServer:
    def __init__(self):
        command = [str(Path(sys.executable).with_name("pyright-langserver")), "--stdio"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT)
        self._num_requests = 0

    def __enter__(self):
        folder = {"uri": ROOT.as_uri(), "name": "weft"}
        params = {"processId": None, "capabilities": {}, "workspaceFolders": [folder]}
        self.request("initialize", params)
        self.notify("initialized", {})
        return self

    def __exit__(self, *exception: object):
        self._process.terminate()
        self._process.communicate()

    def _write(self, message: dict[str, Any]):
        content = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self._process.stdin
        self._process.stdin.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        length = 0
        while header := self._process.stdout.readline().strip():
            name, _, value = header.partition(b":")
            if name == b"Content-Length":
                length = int(value)
        assert length, "the server has ended"
        return json.loads(self._process.stdout.read(length))

    def notify(self, method: str, params: dict[str, Any]):
        self._write({"method": method, "params": params})

    def request(self, method: str, params: dict[str, Any]) -> Any:
        self._num_requests += 1
        self._write({"id": self._num_requests, "method": method, "params": params})
        while True:
            message = self._read()
            if "method" not in message and message.get("id") == self._num_requests:
                return message["result"]
            if "method" in message and "id" in message:  # the server asks for settings
                items = message.get("params", {}).get("items", [])
                self._write({"id": message["id"], "result": [None for _ in items]})


@pytest.fixture(scope="module")
def ask():
    """Yields a function of a method and of the text after which the cursor is."""
    document = {"uri": (ROOT / "tests/typing/program.py").as_uri()}

    def ask(method: str, text: str) -> Any:
        start = PROGRAM[: PROGRAM.index(text) + len(text)].splitlines()
        position = {"line": len(start) - 1, "character": len(start[-1])}
        return server.request(method, {"textDocument": document, "position": position})

    with LanguageServer() as server:
        opened = {**document, "languageId": "python", "version": 1, "text": PROGRAM}
        server.notify("textDocument/didOpen", {"textDocument": opened})
        yield ask


def completed_arguments(answer: dict[str, Any]) -> set[str]:
    return {item["label"] for item in answer["items"] if item["label"].endswith("=")}


def test_set_and_clone_complete_names_of_fields(ask):
    names = completed_arguments(ask("textDocument/completion", ".set("))
    assert {"width=", "name=", "dtype="} <= names
    names = completed_arguments(ask("textDocument/completion", ".clone(inp"))
    assert "input_dim=" in names and "bias=" not in names


def test_set_shows_types_and_defaults(ask):
    (signature,) = ask("textDocument/signatureHelp", "cfg.set(")["signatures"]
    assert "width: int = 8" in signature["label"]


def test_a_field_shows_its_text(ask):
    text = ask("textDocument/hover", "cfg.wi")["contents"]["value"]
    assert "width: int" in text
    assert "Number of channels." in text
    text = ask("textDocument/hover", ".max_st")["contents"]["value"]
    assert "number of steps" in text.lower()
