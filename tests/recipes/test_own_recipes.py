"""Recipes of the user, in files, modules and installed packages, as the command line names them."""

import importlib.metadata
import textwrap

import pytest

from weft.cli import main
from weft.cli.configs import load_config
from weft.config import diff, from_text, to_text
from weft.errors import CommandLineError, RecipeError, UnknownConfigError, UnknownFieldError
from weft.recipes import find_recipe, named_trainer_configs

# Recipes whose base and data have to be named.
TUNING = ("sft", "dpo", "grpo")

MINE = """
from typing import TYPE_CHECKING

from own_layers import Head
from weft import nnx
from weft.config import config_for_class
from weft.trainer import SpmdTrainer

if TYPE_CHECKING:
    from nowhere import Nothing


class Net(nnx.Module):
    def __init__(self, width: int, head: object = None, *, rngs: nnx.Rngs):
        self.head = nnx.Linear(2, width, rngs=rngs)


def recipe(
    width: int = 8,
    rate: float = None,
    shapes: tuple[int, ...] = (1,),
    deep=False,
    steps=30,
    label="a",
    anything=None,
    other: "Nothing" = None,
):
    '''Returns a config of a network.

    Args:
        width: Hidden units,
            per layer.
        rate (float): How fast.

    Returns:
        A config.
    '''
    seen = (width, rate, shapes, deep, steps, label, anything)
    return SpmdTrainer.default_config().set(
        name=repr(seen), dir="runs/own", max_step=steps,
        model=config_for_class(Net).set(width=width, head=Head),
    )


CONFIG = recipe(width=3)
WIDTH = 3


class Mine(SpmdTrainer):
    pass


def needs(width, depth):
    return recipe(width)


def ends():
    recipe()


def fails():
    return recipe().set(widht=3)


def divides():
    return 1 / 0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch, new_process):
    """A current directory with a recipe and its neighbor."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_layers.py").write_text("class Head:\n    pass\n", encoding="utf-8")
    (tmp_path / "own.py").write_text(MINE, encoding="utf-8")
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text), encoding="utf-8")


def test_words_for_the_same_recipe(folder):
    cfg = load_config("own.py:recipe", ["width=3"])
    assert cfg.model.width == 3 and cfg.model.klass.__module__ == "own"
    for word in ("own:recipe", f"{folder}/own.py:recipe", "../" + folder.name + "/own.py:recipe"):
        assert not diff(load_config(word, ["model.width=3", f"name={cfg.name}"]), cfg)
    config = load_config("own.py:CONFIG")
    assert config.model == cfg.model and config is not load_config("own.py:CONFIG")
    assert load_config("own.py:Mine").klass.__qualname__ == "Mine"


def test_text_may_name_what_the_recipe_has_imported_from_its_directory(folder):
    recipe = find_recipe("own.py:recipe")
    cfg = recipe()
    text = to_text(cfg)
    assert "config_for_class(own.Net)" in text and "head=own_layers.Head" in text
    assert recipe.packages() == ("own", "own_layers")
    assert not diff(from_text(text, allow=recipe.packages()), cfg)
    assert load_config("own.py:recipe", ["model.head=own.Net"]).model.head is cfg.model.klass


def test_file_of_a_package_has_its_dotted_name(folder):
    write(folder / "lab" / "pkg" / "__init__.py", "")
    write(folder / "lab" / "pkg" / "sub" / "__init__.py", "from .. import base")
    write(folder / "lab" / "pkg" / "base.py", "class Loss: ...")
    write(
        folder / "lab" / "pkg" / "sub" / "exp.py",
        """
        from ..base import Loss
        from weft.trainer import SpmdTrainer

        def recipe():
            return SpmdTrainer.default_config().set(name=Loss.__module__)
        """,
    )
    for word in ("lab/pkg/sub/exp.py:recipe", "pkg.sub.exp:recipe"):
        recipe = find_recipe(word)
        assert recipe().name == "pkg.base" and recipe.packages() == ("pkg",)


def test_recipes_of_installed_packages(folder, monkeypatch, capsys):
    points = importlib.metadata.EntryPoints(
        importlib.metadata.EntryPoint(name, "own:recipe", "weft.recipes") for name in ("ours", "lm")
    )
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: points.select(group=group)
    )
    monkeypatch.syspath_prepend(folder)
    assert load_config("ours", ["width=3"]).model.width == 3
    assert named_trainer_configs()["lm"].function == "weft.recipes.lm:lm"
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5].split() == ["ours", "from", "own"] and "width=" in lines[-4].split()


@pytest.mark.parametrize(
    ("words", "seen"),
    [
        ([], (8, None, (1,), False, 30, "a", None)),
        (["rate=1", "shapes=2,3", "deep=yes"], (8, 1.0, (2, 3), True, 30, "a", None)),
        (["steps=1e2", "label=7", "anything=7"], (8, None, (1,), False, 100, "7", 7)),
        (["rate=None", "anything=x y"], (8, None, (1,), False, 30, "a", "x y")),
    ],
)
def test_arguments_have_the_types_of_annotations_and_defaults(words, seen, folder):
    assert load_config("own.py:recipe", words).name == repr(seen)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["width=x"], r"width=x: expected int, but got 'x'\. It is 8 by default\."),
        (["deep=3.5"], r"deep=3.5: expected bool, but got '3.5'\. It is False"),
        (["rate=fast"], r"expected float \| None, but got 'fast'"),
        (["widht=3"], r"'widht' is neither an argument of own\.py:recipe nor .* mean 'width'\?"),
        (["head=3"], r"unknown field 'head' .* There is model\.head\."),
        (["max=3"], r"unknown field 'max' .* Did you mean 'max_step'"),
    ],
)
def test_invalid_argument(words, message, folder):
    with pytest.raises((CommandLineError, UnknownFieldError), match=message):
        load_config("own.py:recipe", words)


def test_short_name_that_no_recipe_declares_lists_paths(folder):
    for name, path in {
        "learning_rate": "learner.optimizer.inner.learning_rate",
        "batch_size": "input.source.global_batch_size",
        "steps": "max_step",
    }.items():
        with pytest.raises(UnknownFieldError, match=f"There is {path}"):
            write(folder / "plain.py", "import weft.recipes.lm\nCONFIG = weft.recipes.lm.lm()")
            load_config("plain.py:CONFIG", [f"{name}=1"])


FAILURES = {
    "own.py:recpe": r"own\.py defines no 'recpe'\. Did you mean 'recipe'\?",
    "own.py:needs": r"width and depth of the function must be given: add width=VALUE depth=VALUE",
    "own.py:ends": r"returned None; expected .*SpmdTrainer\.Config\. Does .* lack `return cfg`\?",
    "own.py:Net": r"is the class Net; expected a trainer's config",
    "own.py:WIDTH": r"own\.py:WIDTH is an object of type int; expected a trainer's config",
    "own.py:divides": r'divides failed:\n  File ".*own\.py", line \d+, in divides\n    return 1 / 0'
    r"\n(.*\^.*\n)?ZeroDivisionError: division by zero$",
    "own.py": r"name the function .* such as own\.py:recipe\.",
    "owm.py:recipe": r"there is no file .*owm\.py\. Did you mean 'own\.py'",
    "owm:recipe": r"there is no module 'owm'\. Name a file",
    "own.sub:recipe": r"there is no file .*own/sub\.py",
    "imports.py:f": r'cannot be imported:\n  File ".*imports\.py", line 2, in <module>\n'
    r"    import nothing_at_all\n(.*\^.*\n)?ModuleNotFoundError: No module named 'nothing_at_all'$",
    "syntax.py:f": r"cannot be imported:\n.*syntax\.py\", line 1\n.*\n.*\nSyntaxError: '\('",
    "exits.py:f": r"SystemExit: 3\nPut what a program runs under `if __name__",
    "random.py:f": r"is already the name of .*random\.py\. Rename the file",
    "my-model.py:f": r"cannot import a module named 'my-model'\. Rename",
}


@pytest.mark.parametrize("word", FAILURES)
def test_failing_recipe(word, folder):
    write(folder / "imports.py", "#\nimport nothing_at_all")
    write(folder / "syntax.py", "x = (")
    write(folder / "exits.py", "raise SystemExit(3)")
    for name in ("random.py", "my-model.py"):
        write(folder / name, "")
    with pytest.raises(RecipeError, match=FAILURES[word]):
        load_config(word)


def test_errors_of_weft_in_a_recipe_keep_their_class_and_show_the_line(folder, capsys):
    with pytest.raises(UnknownFieldError, match=r"in fails\n .*set\(widht=3\)(.|\n)*'widht'"):
        load_config("own.py:fails")
    assert main(["tabulate", "own.py:fails"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("weft: own.py:fails failed:\n  File") and "weft/" not in error


def test_unknown_recipe_suggests_the_nearest():
    with pytest.raises(UnknownConfigError, match=r"unknown recipe 'lm-tinny'\. .*'lm-tiny'"):
        find_recipe("lm-tinny")


def test_description_lists_arguments(folder, capsys):
    assert main(["recipes", "own.py:recipe"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "own.py:recipe: Returns a config of a network."
    assert lines[1].split(maxsplit=2) == ["width=8", "int", "Hidden units, per layer."]
    assert lines[2].split(maxsplit=4)[-1] == "How fast."
    assert "weft config show own.py:recipe" in lines[-1]
    for name in ("learning_rate", "batch_size", "steps"):
        assert main(["recipes", "lm-tiny"]) == 0
        assert f"  {name}=" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in named_trainer_configs() if name not in TUNING])
def test_weft_recipes_take_the_short_names(name):
    cfg = load_config(name, ["learning_rate=0.5", "batch_size=24", "steps=77"])
    assert cfg.learner.optimizer.inner.learning_rate.peak_lr == 0.5
    assert cfg.max_step == 77
    assert cfg.input.source.global_batch_size == 24
