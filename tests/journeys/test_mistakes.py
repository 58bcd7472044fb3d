"""What a person sees after a mistake on the command line: a message, exit code 2, no directory."""

import os
import sys

import pytest

from weft.cli import main

FILES = {
    "mine.py": """
from weft.recipes.lm import lm_tiny

def recipe(width: int = 8):
    return lm_tiny()

def forgets():
    cfg = lm_tiny()

class Model: ...
""",
    "broken.py": "import weft\nscale = 1 / 0\n",
}
MISTAKES = {
    "trian lm": "unknown command 'trian'. Did you mean 'train'?",
    "train lm_tiny": "unknown recipe 'lm_tiny'. Did you mean 'lm-tiny'?",
    "train lm-tiny seed": "Write it as weft train lm-tiny path.to.field=value.",
    "train lm-tiny --max_step=3": "--max_step=3: leave out the dashes.",
    "train lm-tiny max_step=3.5": "trainer.max_step=3.5 is not a number of steps; expected an int",
    "train lm-tiny lerning_rate=1": "Did you mean 'learning_rate'?",
    "train lm-tiny learning_rate=fast": "learning_rate=fast: expected float, but got 'fast'.",
    "train lm-tiny batch_size=0": "global_batch_size=0 is not a number of rows; expected",
    "train digits batch_size=-8": "global_batch_size=-8 is not a number of rows; expected",
    "train lm-tiny hidden_dim=64": "There is model.decoder.transformer.layer.feed_forward.",
    "train mine.py": "name the function of the file that makes the config, such as mine.py:recipe.",
    "train mine.py:recpie": "defines no 'recpie'. Did you mean 'recipe'?",
    "train mine.py:recipe widht=3": "an argument of mine.py:recipe nor a field of its config.",
    "train mine.py:recipe width=wide": "width=wide: expected int, but got 'wide'.",
    "train mine.py:forgets": "mine.py:forgets returned None; expected a trainer's config",
    "train mine.py:Model": "mine.py:Model is the class Model; expected a trainer's config",
    "train broken.py:recipe": "line 2, in <module>\n    scale = 1 / 0",
    "train other.py:recipe": "there is no file",
    "train nowhere.module:recipe": "there is no module 'nowhere.module'. Name a file",
    "report nothing": "'nothing' is not the directory of a run",
    "export nothing --to weights": "'nothing' is not a directory",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lab")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    yield folder
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(("words", "message"), MISTAKES.items())
def test_mistakes_on_the_command_line(folder, monkeypatch, capsys, words, message):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err
    assert {*os.listdir()} - {"__pycache__"} == {*FILES}
