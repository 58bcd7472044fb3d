"""What a shell is offered for a line."""

import subprocess

import pytest

from tests.weft_process import WEFT


@pytest.fixture
def offered(tmp_path, python_server):
    """Returns a function from a line to the words that could end it, as a shell asks for them."""
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/config.txt").touch()
    (tmp_path / "mine.py").write_text("raise SystemExit('it has run')", encoding="utf-8")

    def words(line):
        answer = tmp_path / "answer"
        asked = {
            "_ARGCOMPLETE": "1",
            "_ARGCOMPLETE_IFS": "\n",
            "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
            "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
            "COMP_LINE": line,
            "COMP_POINT": str(len(line)),
        }
        with python_server.start(*WEFT[1:], cwd=tmp_path, env=asked) as process:
            process.communicate()
        return answer.read_text(encoding="utf-8").split("\n")

    return words


def test_words_of_a_line(offered):
    assert offered("weft tr") == ["train"]
    assert "lm-tiny" in offered("weft train l")
    assert offered("weft train m") == ["mine.py"]
    assert offered("weft train lm lea") == ["learning_rate=", "learner."]
    assert "model.decoder." in offered("weft train lm model.d")
    assert offered("weft train mine.py:recipe model.d") == [""], "a file is not run"
    assert offered("weft report ru") == ["runs/"]
    assert offered("weft report runs/f") == ["runs/first"]
    assert offered("weft train lm dir=runs/f") == ["dir=runs/first"]
    assert offered("weft sweep lm --me") == ["--metric"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts(shell, capsys):
    from weft.cli import main

    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "_ARGCOMPLETE" in script and "weft" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, encoding="utf-8", check=True)
