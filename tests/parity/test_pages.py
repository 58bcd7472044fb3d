"""Pages for users of other libraries: their program, Weft's, and one that compares both.

Each is a file of the page, as a reader would save it.
"""

import importlib.util
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pages import ROOT, WEFT, files, run_in_order

pytestmark = pytest.mark.usefixtures("one_device")

DOCS = ROOT / "docs"
LIBRARIES = {
    "equinox": "equinox",
    "flax": "flax",
    "flax-nnx": "flax",
    "haiku": "haiku",
    "keras": "keras",
    "pytorch": "torch",
}
# Errors and origins name these pages relative to the root; the others write to tmp_path.
NAMED = ("flax-nnx", "pytorch")
AXLEARN = DOCS / "moving-from-axlearn.md"
# The losses of the page's program after some steps, with AXLearn of 2024-02, which needs an earlier
# JAX: without dropout, from weights as below.
LOSSES_OF_AXLEARN = {0: 2.36263, 1: 2.17952, 2: 1.83180, 9: 0.59528, 29: 0.28650, 71: 0.02605}


# NumPy 2 and JAX 0.12 warn of how Keras does it.
reads_variables_of_keras = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning",
    "ignore:Explicitly requested dtype int64:UserWarning",
)


def skip_without(module):
    if importlib.util.find_spec(module) is None:
        pytest.skip("torch's CPU build is there for Python 3.11")


@pytest.fixture
def of_keras(tmp_path, monkeypatch):
    """Where Keras writes its settings, and the backend that it needs no other package for."""
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    monkeypatch.setenv("KERAS_BACKEND", "jax")


# Layers of Equinox, Haiku and Keras add axes silently.
@pytest.mark.rank_promotion("allow")
@reads_variables_of_keras
@pytest.mark.long
@pytest.mark.usefixtures("of_keras")
@pytest.mark.parametrize("library", LIBRARIES)
def test_programs_of_a_page_agree(library, tmp_path, monkeypatch):
    """Runs all programs of a page, or those of Weft if the library is not installed."""
    page = DOCS / f"moving-from-{library}.md"
    _, ours, comparison = files(page)
    assert (ours, comparison) == (WEFT, "compare.py")
    monkeypatch.chdir(ROOT if library in NAMED else tmp_path)
    installed = importlib.util.find_spec(LIBRARIES[library]) is not None
    for said, printed in run_in_order(page, monkeypatch, with_files=installed):
        assert printed == said


@pytest.mark.parametrize("library", LIBRARIES)
def test_comparison_imports_programs_that_print_only_if_they_are_run(library):
    programs = files(DOCS / f"moving-from-{library}.md")
    comparison = programs.pop("compare.py").block.text
    for name, program in programs.items():
        assert f"import {name.removesuffix('.py')}\n" in comparison
        imported, _, run = program.block.text.partition('\nif __name__ == "__main__":\n')
        assert "print(" not in imported
        assert all(line.startswith("    ") for line in run.splitlines())


@pytest.mark.parametrize("page", ["moving-from-flax.md", "moving-from-flax-nnx.md"])
def test_programs_of_flax_and_weft_differ_in_imports_alone(page):
    programs = files(DOCS / page)
    theirs, ours = programs["with_flax.py"].block.text, programs[WEFT].block.text
    assert lines_in_any_order(theirs.replace("from flax", "from weft")) == lines_in_any_order(ours)


def test_import_lines_turn_the_program_of_axlearn_into_that_of_weft():
    text = AXLEARN.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `from (axlearn\S+) import .*?` \| `from (\S+) import", text, re.MULTILINE
    )
    programs = files(AXLEARN)
    theirs, ours = programs["with_axlearn.py"].block.text, programs[WEFT].block.text
    for of_axlearn, of_weft in rows:
        theirs = theirs.replace(f"from {of_axlearn} import", f"from {of_weft} import")
    assert "axlearn" not in theirs
    assert lines_in_any_order(theirs) == lines_in_any_order(ours)


def lines_in_any_order(program):
    """Returns the lines of a program, whose imports are sorted by their names."""
    return sorted(filter(None, program.splitlines()))


@pytest.mark.long
def test_program_has_the_losses_of_axlearn(tmp_path):
    path = tmp_path / WEFT
    path.write_text(files(AXLEARN)[WEFT].block.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("with_weft", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    cfg = module.Net.default_config().set(name="net", hidden_dim=64)
    cfg.dropout.rate = 0.0
    layer = cfg.instantiate(parent=None)
    params = layer.initialize_parameters_recursively(jax.random.key(0))
    rng = np.random.default_rng(0)
    for name in ("hidden", "out"):
        weight = rng.normal(size=params[name]["weight"].shape).astype(np.float32) / 8
        params[name]["weight"] = jnp.asarray(weight)
    _, losses = module.train(layer, params)
    for step, loss in LOSSES_OF_AXLEARN.items():
        np.testing.assert_allclose(losses[step], loss, rtol=1e-2)


def defaults(function):
    return {name: p.default for name, p in inspect.signature(function).parameters.items()}


def test_defaults_of_equinox_are_as_the_page_says():
    import equinox as eqx

    assert defaults(eqx.nn.LayerNorm)["eps"] == defaults(eqx.nn.GroupNorm)["eps"] == 1e-5
    assert defaults(eqx.nn.BatchNorm)["mode"] == "legacy"
    assert defaults(eqx.nn.BatchNorm)["eps"] == 1e-5
    assert defaults(eqx.nn.Conv2d)["padding"] == (0, 0)
    assert not defaults(eqx.nn.MultiheadAttention)["use_query_bias"]
    linear = eqx.nn.Linear(100, 200, key=jax.random.key(0))
    assert 0.095 < linear.weight.max() <= 0.1
    assert 0.095 < linear.bias.max() <= 0.1
    table = eqx.nn.Embedding(100, 20, key=jax.random.key(0)).weight
    np.testing.assert_allclose(table.std(), 1, rtol=0.05)


def test_defaults_of_haiku_are_as_the_page_says():
    import haiku as hk

    assert defaults(hk.LayerNorm)["eps"] == defaults(hk.GroupNorm)["eps"] == 1e-5
    assert defaults(hk.RMSNorm)["eps"] == defaults(hk.BatchNorm)["eps"] == 1e-5
    assert defaults(hk.Conv2D)["padding"] == "SAME"
    network = hk.transform(lambda x: hk.Linear(200)(x))
    weights = network.init(jax.random.key(0), jnp.ones((1, 100)))["linear"]["w"]
    np.testing.assert_allclose(weights.std(), 0.088, rtol=0.05)
    assert abs(weights).max() <= 0.2
    network = hk.transform(lambda x: hk.Embed(100, 20)(x))
    table = network.init(jax.random.key(0), jnp.ones(1, int))["embed"]["embeddings"]
    np.testing.assert_allclose(table.std(), 0.88, rtol=0.05)


@reads_variables_of_keras
@pytest.mark.usefixtures("of_keras")
def test_defaults_of_keras_are_as_the_page_says():
    from keras import layers, optimizers

    norms = layers.BatchNormalization, layers.LayerNormalization, layers.GroupNormalization
    assert [defaults(norm)["epsilon"] for norm in norms] == [1e-3] * 3
    assert defaults(layers.BatchNormalization)["momentum"] == 0.99
    assert defaults(layers.Conv2D)["padding"] == "valid"
    assert defaults(layers.MaxPooling2D)["strides"] is None
    assert defaults(layers.Dense)["kernel_initializer"] == "glorot_uniform"
    assert defaults(layers.Conv2D)["kernel_initializer"] == "glorot_uniform"
    table = layers.Embedding(100, 20)
    table.build(None)
    assert 0.045 < abs(np.asarray(table.get_weights())).max() <= 0.05
    assert defaults(optimizers.Adam)["epsilon"] == defaults(optimizers.RMSprop)["epsilon"] == 1e-7
    assert defaults(optimizers.Adam)["learning_rate"] == 1e-3
    assert defaults(optimizers.AdamW)["weight_decay"] == 0.004


def test_defaults_of_torch_are_as_the_page_says():
    skip_without("torch")
    import torch

    norms = torch.nn.BatchNorm2d, torch.nn.LayerNorm, torch.nn.GroupNorm
    assert [defaults(norm)["eps"] for norm in norms] == [1e-5] * 3
    assert defaults(torch.nn.BatchNorm2d)["momentum"] == 0.1
    assert defaults(torch.nn.Conv2d)["padding"] == 0
    assert defaults(torch.optim.AdamW)["weight_decay"] == 0.01
    linear = torch.nn.Linear(100, 200)
    assert 0.095 < linear.weight.max() <= 0.1
    assert 0.095 < linear.bias.max() <= 0.1


def test_defaults_of_weft_are_as_the_pages_say():
    import optax

    from weft import nnx

    norms = nnx.BatchNorm, nnx.LayerNorm, nnx.GroupNorm, nnx.RMSNorm
    assert [defaults(norm)["epsilon"] for norm in norms] == [1e-5, 1e-6, 1e-6, 1e-6]
    assert defaults(nnx.BatchNorm)["momentum"] == 0.99
    assert defaults(nnx.Conv)["padding"] == "SAME"
    assert nnx.max_pool(jnp.ones((1, 4, 4, 1)), (2, 2)).shape == (1, 3, 3, 1)
    assert defaults(optax.adam)["eps"] == defaults(optax.rmsprop)["eps"] == 1e-8
    assert defaults(optax.adamw)["weight_decay"] == 1e-4
    kernel = nnx.Linear(100, 200, rngs=nnx.Rngs(0)).kernel
    np.testing.assert_allclose(kernel.std(), 0.1, rtol=0.05)
    table = nnx.Embed(100, 20, rngs=nnx.Rngs(0)).embedding
    np.testing.assert_allclose(table.std(), 20**-0.5, rtol=0.05)


def test_every_page_for_users_of_a_library_is_compared():
    pages = {page.stem.removeprefix("moving-from-") for page in DOCS.glob("moving-from-*.md")}
    assert pages == {*LIBRARIES, "axlearn"}
