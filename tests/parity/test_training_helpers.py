"""Learning rates, arguments of Orbax and file functions, as in Flax."""

import math

import flax.io
import flax.training.lr_schedule
import flax.training.orbax_utils
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import weft.io
from weft.errors import AlreadyExistsError, MissingExtraError
from weft.training import lr_schedule, orbax_utils
from weft.training.train_state import TrainState


@pytest.mark.parametrize("warmup_length", [0.0, 2.0])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("create_constant_learning_rate_schedule", ()),
        ("create_stepped_learning_rate_schedule", ([[3, 0.1], [5, 0.01]],)),
        ("create_stepped_learning_rate_schedule", ([],)),
        ("create_cosine_learning_rate_schedule", (7,)),
    ],
)
def test_learning_rates(name, args, warmup_length):
    theirs, ours = (
        getattr(module, name)(0.1, 10, *args, warmup_length=warmup_length)
        for module in (flax.training.lr_schedule, lr_schedule)
    )
    for step in (0, 1, 5, 19, 20, 29, 30, 31, 49, 50, 69, 70, 100):
        assert math.isclose(float(ours(step)), float(theirs(step)), rel_tol=1e-5, abs_tol=1e-7)
    assert jnp.allclose(jax.jit(ours)(jnp.array(35)), theirs(35), rtol=1e-5)


def leaves():
    mesh = jax.make_mesh((jax.device_count(),), ("a",), axis_types=(AxisType.Auto,))
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("a",), ()))
    x = jnp.ones(jax.device_count())
    tree = {"x": x, "numpy": np.ones(2), "int": 1, "text": "a", "none": None}
    return mesh, {**tree, "split": jax.device_put(x, split), "whole": jax.device_put(x, whole)}


def test_arguments_of_orbax():
    mesh, tree = leaves()
    theirs = flax.training.orbax_utils
    for leaf in tree.values():
        assert orbax_utils.is_multi_device_array(leaf) == theirs.is_multi_device_array(leaf)
    assert orbax_utils.save_args_from_target(tree) == theirs.save_args_from_target(tree)
    for part in (tree, {"int": 1, "numpy": np.ones(2)}):
        assert orbax_utils.restore_args_from_target(part) == theirs.restore_args_from_target(part)
    split = {name: tree[name] for name in ("split", "whole", "numpy")}
    ours = orbax_utils.restore_args_from_target(split, mesh)
    with pytest.warns(DeprecationWarning, match="`mesh`"):
        assert ours == theirs.restore_args_from_target(split, mesh)
    args = orbax_utils.restore_args_from_target({"x": tree["x"]}, mesh)["x"]  # Flax raises
    assert args.sharding == NamedSharding(mesh, PartitionSpec())


def test_transformations_of_orbax():
    theirs = flax.training.orbax_utils
    tree = {"a": {"b": None, "c": {}}, "d": [None, 1], "e": 2}
    ours = orbax_utils.maybe_construct_transformations(tree, None)
    assert ours == theirs.maybe_construct_transformations(tree, None)
    assert orbax_utils.maybe_construct_transformations(tree, {"x": 1}) == {"x": 1}


def test_a_train_state_with_orbax(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params = {"w": jnp.arange(3.0)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))
    with ocp.PyTreeCheckpointer() as checkpointer:
        save_args = orbax_utils.save_args_from_target(state)
        checkpointer.save(tmp_path / "state", state, save_args=save_args)
        restore_args = orbax_utils.restore_args_from_target(state)
        target = jax.tree.map(jnp.zeros_like, state)
        found = checkpointer.restore(tmp_path / "state", item=target, restore_args=restore_args)
    assert found.params["w"].tolist() == [0, 1, 2]


def files(io):
    """Returns the results of file functions, by the errors' names where they raise."""
    found = []

    def call(f, *args, **kwargs):
        try:
            found.append(f(*args, **kwargs))
        except Exception as error:
            found.append(type(error).__name__)

    call(io.makedirs, "a/b")
    call(io.makedirs, "a/b")
    with io.GFile("a/x", "w") as file:
        file.write("text")
    for f in (io.exists, io.isdir, io.getsize, io.listdir, io.remove, io.rmtree):
        call(f, "missing")
    for f in (io.exists, io.isdir):
        call(f, "a")
    call(io.getsize, "a/x")
    found.append(sorted(io.listdir("a")))
    found.append(sorted(io.glob("a/*")))
    for f in (io.copy, io.rename):
        call(f, "missing", "new")
        call(f, "a/x", "a/y")
        call(f, "a/x", "a/y", overwrite=True)
        call(f, "a/y", "a/x", overwrite=True)
    call(io.remove, "a/x")
    call(io.rmtree, "a")
    call(io.exists, "a")
    return found


def test_files(tmp_path, monkeypatch):
    results = []
    for io in (flax.io, weft.io):
        directory = tmp_path / io.__name__
        directory.mkdir()
        monkeypatch.chdir(directory)
        results.append(files(io))
    assert results[0] == results[1]
    (directory / "there").touch()
    with pytest.raises(AlreadyExistsError, match="there"):
        weft.io.copy("there", "there")


def test_files_of_tensorflow():
    error = pytest.raises(MissingExtraError, match=r"BackendMode.TF needs the package tensorflow")
    with weft.io.override_mode(weft.io.BackendMode.TF), error:
        weft.io.exists("gs://bucket")
    assert weft.io.io_mode is weft.io.BackendMode.DEFAULT
