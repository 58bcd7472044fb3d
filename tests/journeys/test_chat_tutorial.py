"""The tutorial from conversations to a model that answers: its cells, in order, in one process."""

import io
import re
import shlex
import sys
import types

import pytest

from tests.pages import ROOT, blocks
from weft.cli import main

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

PAGE = ROOT / "docs/tutorials/chat_model.md"


def run_commands(text, monkeypatch):
    """Runs the lines of a bash block: commands of Weft, maybe after a text that they read."""
    for line in text.replace("\\\n", "").splitlines():
        # The output is for the whole test, not for the terminal of a reader.
        line = line.partition("| grep ")[0]
        typed, _, command = line.rpartition(" | ")
        if typed:
            words = shlex.split(typed)
            assert words[0] == "printf"
            monkeypatch.setattr(sys, "stdin", io.StringIO(words[1].replace("\\n", "\n")))
        words = [word for word in shlex.split(command) if not word.startswith("2>")]
        assert words[0] == "weft"
        assert main(words[1:]) == 0


def test_conversations_become_a_chat_and_preferences_a_better_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tokenizers", reason="needs the extra text")
    monkeypatch.chdir(tmp_path)
    page = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", page)
    chats = []
    for block in blocks(PAGE):
        if block.language == "python":
            exec(compile("\n" * block.line + block.text, str(PAGE), "exec"), vars(page))
        elif block.language == "bash":
            capsys.readouterr()
            run_commands(block.text, monkeypatch)
            output = capsys.readouterr()
            if "weft chat" in block.text:
                chats.append(output.out)
            elif "weft train sft" in block.text:
                assert "weft chat runs/sft-chat\n" in output.out + output.err

    # The number alone is what the preferences ask for, to questions that they do not have.
    before, after = page.before, page.after
    assert before["right sum"] >= 85
    assert after["right sum"] >= 85
    assert after["number alone"] >= before["number alone"] + 25
    assert after["characters"] < 0.6 * before["characters"]
    assert re.fullmatch(r"(3 plus 4 is )?7\.\nYou are welcome\.\n", chats[0]), chats
    assert chats[1].startswith("7.\n"), chats
