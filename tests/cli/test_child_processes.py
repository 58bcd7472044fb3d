"""What the processes that a command starts import, in a directory with a stranger's modules."""

from tests.weft_process import finish, weft_processes

# Imported by every process of Weft, by Python's multiprocessing, or by Grain's workers.
PLANTED = ("jax", "rich", "weft", "multiprocessing", "pickle", "grain", "absl", "sitecustomize")

RECIPE = """
import os

import grain
from helper import NUMBERS

from weft.input.grain import prefetch_dataset
from weft.recipes.lm import lm_tiny


def recipe(num_workers: int = 0):
    if "JAX_NUM_PROCESSES" in os.environ:  # one that `weft launch local` has started
        raise ValueError(f"the launched process has {len(NUMBERS)} numbers")
    if os.readlink("/proc/self/fd/1").endswith("output.txt"):  # that `weft sweep` has started
        raise ValueError(f"the run of a sweep has {len(NUMBERS)} numbers")
    options = grain.MultiprocessingOptions(num_workers=num_workers)
    numbers = iter(prefetch_dataset(NUMBERS, multiprocessing_options=options))
    print([int(next(numbers)) for _ in range(2)])
    numbers.close()
    return lm_tiny()
"""


HELPER = """
import grain

NUMBERS = grain.MapDataset.range(2)
"""


def write_recipe(folder):
    folder.mkdir(exist_ok=True)
    (folder / "own.py").write_text(RECIPE, encoding="utf-8")
    (folder / "helper.py").write_text(HELPER, encoding="utf-8")


def test_workers_and_launched_processes_import_nothing_from_there(python_server, tmp_path):
    write_recipe(tmp_path / "own")
    strange = tmp_path / "strange"
    strange.mkdir()
    for name in PLANTED:
        text = f"open({str(tmp_path / name)!r} + '.ran', 'w').close()\nraise SystemExit(3)\n"
        (strange / f"{name}.py").write_text(text, encoding="utf-8")
    command = tmp_path / "bin" / "weft"  # as pip installs it: only its own folder is imported from
    command.parent.mkdir()
    command.write_text("import sys; from weft.cli import main; sys.exit(main())", encoding="utf-8")
    with weft_processes(python_server, strange, command=[command]) as start:
        shown = start("config", "show", "../own/own.py:recipe", "num_workers=1")
        launched = start("launch", "local", "-n", "1", "../own/own.py:recipe", "dir=run")
        words = ["--over", "num_workers=0", "--dir", "sweep", "../own/own.py:recipe"]
        swept = start("sweep", *words)
        assert finish(shown).startswith("[0, 1]\n")
        assert "ValueError: the launched process has 2 numbers" in finish(launched, 2)
        assert "ValueError: the run of a sweep has 2 numbers" in finish(swept, 1)
    assert not list(tmp_path.glob("*.ran"))


def test_a_module_of_the_current_directory_is_a_recipe_where_it_is_named(python_server, tmp_path):
    write_recipe(tmp_path)
    with weft_processes(python_server, tmp_path) as start:
        launched = start("launch", "local", "-n", "1", "own:recipe", "dir=run")
        assert "ValueError: the launched process has 2 numbers" in finish(launched, 2)
