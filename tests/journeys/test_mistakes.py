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
    "train digits --steps 3": "--steps: leave out the dashes. A field of the config, or an "
    "argument of the recipe, is set by steps=3.",
    "train lm-tiny --allw mine": "unknown option --allw. Did you mean '--allow'?",
    "train digits learning_rate=-1": "peak_lr=-1 is negative: each step would increase the loss.",
    "train digits learner.optimizer.inner.learning_rate=-0.5": "learning_rate=-0.5 is negative",
    "train digits dir=C:\\runs\\x": "dir='C:\\\\runs\\\\x' is a path as Windows has",
    "train digits dir=runs\\x": "is a path as Windows has them.",
    "train C:\\work\\my.py:recipe": "is a path as Windows has them. On this",
    "report C:/runs/x": "is a path as Windows has them.",
    "lr-find digits --steps 10": "10 steps are too few for rates from 1e-06 to 1: the loss of "
    "a batch varies more than it falls from one to the next. Expected 20 steps or more.",
    "lr-find digits --steps 20 --min 1e-9": "Expected 27 steps or more.",
    "lr-find digits --min 2": "a sweep from min_rate=2 to max_rate=1; expected 0 < min",
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
