"""The commands of the pages: those of console blocks are run in order, in a new directory.

So that this takes seconds, a training ends after two steps, and in place of the recipe `lm` a
smaller one is trained into its directory. Comments of a page, which its readers do not see, precede
the block that they are about:

    <!-- not run: it needs a cluster -->            its commands are only parsed
    <!-- before: weft train lm-tiny dir=runs/a -->   what has been run before
    <!-- file: my_model.py -->                       the block is the content of this file

The files that readers have are there: `my_model.py` of `docs/any-model.md`, texts in a file and in
folders, and a tokenizer.

Commands within a sentence are parsed, and the recipe and the fields that they name have to exist.
"""

import re
import shlex
import shutil
import sys
from typing import NamedTuple

import pytest

from tests.docs.test_docs import DOCS, PAGES, named
from tests.own_texts import write_own_texts
from tests.pages import blocks
from tests.weft_process import finish, weft_processes
from weft.cli import main
from weft.cli.arguments import parse_arguments
from weft.cli.configs import load_config
from weft.recipes import named_trainer_configs

pytestmark = pytest.mark.usefixtures("one_device")

SMALLER = {"lm": "lm-tiny", "lm-nnx": "lm-tiny"}
STEPS = "max_step=2"
# Of what a reader replaces: RECIPE, runs/…
PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|…|\bN\b")


class Command(NamedTuple):
    """A command of a console block, and the error that the page shows below it."""

    words: list[str]
    error: str | None


class ConsoleBlock(NamedTuple):
    """A console block with commands of Weft."""

    before: list[Command]
    commands: list[Command]
    is_run: bool


def comments_before(page, block):
    """Returns the comments in the lines before a block, by their names."""
    lines = page.read_text(encoding="utf-8").splitlines()[: block.line - 1]
    comments = []
    while lines and (match := re.fullmatch(r"<!-- (not run|before|file): (.*) -->", lines.pop())):
        comments.insert(0, (match[1], match[2]))
    return comments


def commands_of(text):
    """Returns the commands of Weft in a console block."""
    commands = []
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        words = shlex.split(line.partition(" > ")[0], comments=True)
        if words[0] == "weft":
            error = output.strip() if output.startswith("weft: ") else None
            commands.append(Command(words[1:], error))
    return commands


def console_blocks(page):
    found = []
    for block in blocks(page):
        comments = comments_before(page, block)
        commands = commands_of(block.text) if block.language == "console" else []
        if commands:
            before = [commands_of(f"$ {text}")[0] for name, text in comments if name == "before"]
            is_run = not any(name == "not run" for name, _ in comments)
            found.append(ConsoleBlock(before, commands, is_run))
    return found


def files_of(page):
    """Returns the texts of the files that a page says to write, by name."""
    files = {}
    for block in blocks(page):
        for name, text in comments_before(page, block):
            if name == "file":
                files[text] = block.text
    return files


def shortened(words):
    """Returns the words of a command that takes a few steps, or of an export of such a step."""
    words = list(words)
    if "--step" in words:
        words[words.index("--step") + 1] = "2"
    if words[0] == "lr-find":
        words[words.index("--steps") + 1] = "20"
    if words[0] not in ("train", "launch"):
        return words
    words = [re.sub(r"(start_trace_steps)=.*", r"\1=[1]", word) for word in words]
    start = 1 if words[0] == "train" else 4  # `launch local -n 2`
    if len(words) <= start or "=" in words[start]:
        words.insert(start, "lm")
    recipe = words[start]
    if words[:2] == ["launch", "local"]:
        words[3] = "1"  # tests/launch/test_training.py starts two, of a recipe in a file
    if recipe in SMALLER:
        words[start] = SMALLER[recipe]
        if not any(word.startswith("dir=") for word in words):
            words.append(f"dir=runs/{recipe}")
    return [*(word for word in words if not word.startswith("max_step=")), STEPS]


@pytest.fixture(scope="module")
def files_of_readers(tmp_path_factory):
    """Returns a folder with the files that readers have."""
    pytest.importorskip("tokenizers", reason="needs the extra text")
    folder = tmp_path_factory.mktemp("reader")
    write_own_texts(folder)
    for name in ("code", "texts"):
        (folder / name).mkdir()
        for number in range(4):
            lines = [f"def f{number}(x): return x + {i}" for i in range(60)]
            (folder / name / f"f{number}.py").write_text("\n".join(lines), encoding="utf-8")
    for name, text in files_of(DOCS / "any-model.md").items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def run_command(monkeypatch, tmp_path, capfd, python_server):
    """Returns a function that runs a command in a new directory, and returns what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    paths = sys.path[:]

    def run(words, code=0):
        if words[0] == "check":  # which needs a process that sees all devices
            with weft_processes(python_server, XDG_CONFIG_HOME=f"{tmp_path}/settings") as start:
                return finish(start(*words), code)
        ended_with = main(words)
        output = capfd.readouterr()
        assert ended_with == code, output.err
        return output.err if code else output.out

    yield run
    sys.path[:] = paths
    for name in [*sys.modules]:
        path = getattr(sys.modules[name], "__file__", None)
        if path is not None and path.startswith(str(tmp_path)):
            del sys.modules[name]


@named([page for page in PAGES if console_blocks(page)])
def test_commands_parse(page):
    for block in console_blocks(page):
        for command in block.commands:
            assert parse_arguments(command.words).command


@pytest.mark.long
@named([page for page in PAGES if any(block.is_run for block in console_blocks(page))])
def test_commands_run(page, tmp_path, files_of_readers, run_command):
    shutil.copytree(files_of_readers, tmp_path, dirs_exist_ok=True)
    for name, text in files_of(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for block in console_blocks(page):
        if not block.is_run:
            continue
        for command in [*block.before, *block.commands]:
            words = shortened(command.words)
            if command.error is not None:
                assert command.error in run_command(words, code=2)
            else:
                differs = words[:2] == ["config", "diff"]
                run_command(words, code=1 if differs else 0)


def commands_in_sentences(page):
    """Returns the words of the commands in the sentences of a page that name what they are for."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    commands = []
    for line in re.findall(r"`weft ([^`]*)`", text):
        words = shlex.split(line)
        operands = [word for word in words[1:] if not word.startswith("-")]
        is_whole = bool({*operands} - {"show", "diff", "local", "slurm", "k8s"})
        if is_whole and "--help" not in words and not PLACEHOLDER.search(line):
            commands.append(words)
    return commands


@named([page for page in PAGES if commands_in_sentences(page)])
def test_commands_in_sentences_name_what_exists(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for words in commands_in_sentences(page):
        if words[0] == "export" and "--to" not in words:
            words = [*words, "--to", "model.safetensors"]
        arguments = parse_arguments(words)
        overrides = getattr(arguments, "recipe_and_overrides", None) or []
        if overrides and overrides[0] in named_trainer_configs():
            assert load_config(overrides[0], overrides[1:])


def test_comments_say_why_a_block_is_not_run():
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for reason in re.findall(r"<!-- not run:(.*)-->", text):
        assert len(reason.split()) > 2
