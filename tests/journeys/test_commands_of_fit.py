"""After `weft.fit`, a person uses the commands on its runs, without the program."""

import importlib
import sys

import numpy as np
import pytest

import weft
from weft import hierarchy, nnx
from weft.cli import main
from weft.serialization import load_safetensors

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_device")]

X = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
DATA = (X, (X.sum(axis=1) > 0).astype(np.int32))
NETS = """\
from weft import linen as nn


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(self.width)(x)))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns the results of three runs by the name of their directories."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "nets.py").write_text(NETS, encoding="utf-8")
    rngs = nnx.Rngs(0)
    layers = hierarchy.Linear.default_config().set(input_dim=4, output_dim=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CONFIG_HOME", str(folder / "settings"))
        patch.syspath_prepend(str(folder))
        patch.setitem(sys.modules, "nets", nets := importlib.import_module("nets"))
        models = {
            "nnx": nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)),
            "linen": nets.Net(8),
            "hierarchy": layers,
        }
        results = {}
        for name, model in models.items():
            results[name] = weft.fit(
                model,
                DATA,
                "cross_entropy",
                epochs=2,
                validation=DATA,
                metrics="accuracy",
                dir=name,
                progress=False,
            )
        yield results


@pytest.fixture
def command(runs, capsys):
    """Returns a function that runs a command, and returns its output, or its error."""

    def run(*words, code=0):
        assert main(list(words)) == code
        output = capsys.readouterr()
        return output.err if code else output.out

    return run


@pytest.mark.parametrize("name", ["nnx", "linen", "hierarchy"])
def test_parameters_are_exported_under_the_names_of_the_model(name, runs, command):
    assert command("export", name, "--to", f"{name}.safetensors").startswith(f"{name}.safetensors")
    exported = load_safetensors(f"{name}.safetensors")
    assert exported.keys() == runs[name].last.variables.keys()
    for collection, values in runs[name].last.variables.items():
        np.testing.assert_equal(exported[collection], values)


def test_configs_are_shown_and_compared(command):
    text = command("config", "show", "nnx")
    assert "arrays=unreadable('48 rows of x float32[4], y int32[], digest " in text
    assert "learning_rate=0.001" in text
    changes = command("config", "diff", "nnx", "hierarchy", code=1)
    assert changes == ""  # an exit code of 1 means that they differ
    assert "12" in command("inspect", "nnx")


@pytest.mark.parametrize("name", ["linen", "hierarchy"])
def test_model_that_a_text_names_is_tabulated_and_checked(name, command):
    assert "FLOPs for the loss of an example" in command("tabulate", name)
    if name == "hierarchy":
        assert "fits: all sizes divide evenly" in command("check", name)


ONLY_IN_THE_PROGRAM = (
    "is a value that only the program had that wrote this text. Set it in a program"
)
NEEDS = {
    "tabulate nnx": ("model.layer", "weft inspect lists the parameters of a run."),
    "check nnx": ("model.layer", "model.layer=config_for_function(my_module.function)()"),
    "export nnx --to folder": ("model.layer", "A file needs no model: --to model.safetensors"),
    "train linen": ("input.arrays", "arrays=config_for_function(my_module.function)()"),
    "lr-find hierarchy": ("input.arrays", ONLY_IN_THE_PROGRAM),
}


@pytest.mark.parametrize("words", NEEDS)
def test_command_that_needs_the_program_says_what_and_how_to_give_it(words, command):
    field, advice = NEEDS[words]
    error = command(*words.split(), code=2)
    assert f"{field}: unreadable('" in error
    assert ONLY_IN_THE_PROGRAM in error and advice in error


def test_run_without_a_tokenizer_has_nothing_to_sample(command):
    assert "reads no text: its input has no tokenizer" in command("sample", "nnx", code=2)
