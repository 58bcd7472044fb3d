"""Checkpoints and parameters that Flax writes and Weft reads, and the other way round."""

import os
import random
import textwrap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.flags import xla_flags
from tests.sockets import free_port
from weft import linen as weft_linen
from weft import serialization as weft_serialization
from weft.training import checkpoints as weft_checkpoints
from weft.training import train_state as weft_train_state

flax = pytest.importorskip("flax")
flax_linen = pytest.importorskip("flax.linen")
flax_checkpoints = pytest.importorskip("flax.training.checkpoints")
flax_train_state = pytest.importorskip("flax.training.train_state")

# Flax warns about its older format, and about Orbax restores without shardings.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Flax Checkpointing will soon:DeprecationWarning", "ignore:Sharding info not provided"
)


def made(linen, train_state, serialization, checkpoints):
    """Returns the same program, written with either library."""

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x, train=False):
            x = linen.Dense(4, kernel_init=linen.with_partitioning(INIT, ("in", "out")))(x)
            x = linen.BatchNorm(use_running_average=not train)(x)
            return linen.Dense(2, param_dtype=jnp.bfloat16)(x)

    class State(train_state.TrainState):
        batch_stats: dict

    def trained(seed, steps=2):
        net, x = Net(), jnp.arange(6.0).reshape(2, 3)
        variables = net.init(jax.random.key(seed), x)
        tx = optax.chain(optax.clip(1.0), optax.adamw(1e-2))
        state = State.create(
            apply_fn=net.apply,
            params=variables["params"],
            tx=tx,
            batch_stats=variables["batch_stats"],
        )

        def loss(params, batch_stats):
            variables = {"params": params, "batch_stats": batch_stats}
            y, changed = net.apply(variables, x, train=True, mutable=["batch_stats"])
            return jnp.sum(y.astype(jnp.float32) ** 2), changed

        @jax.jit
        def step(state):
            grads, changed = jax.grad(loss, has_aux=True)(state.params, state.batch_stats)
            return state.apply_gradients(grads=grads, **changed)

        for _ in range(steps):
            state = step(state)
        return state

    return SimpleNamespace(
        Net=Net,
        trained=trained,
        Partitioned=linen.Partitioned,
        serialization=serialization,
        checkpoints=checkpoints,
    )


INIT = jax.nn.initializers.lecun_normal()
WEFT = made(weft_linen, weft_train_state, weft_serialization, weft_checkpoints)
FLAX = made(flax_linen, flax_train_state, flax.serialization, flax_checkpoints)
DIRECTIONS = pytest.mark.parametrize(
    ("writer", "reader"), [(FLAX, WEFT), (WEFT, FLAX)], ids=["flax to weft", "weft to flax"]
)


@pytest.fixture(params=[False, True], ids=["file", "orbax"])
def use_orbax(request):
    """Sets the format that Flax writes; it reads both in any case."""
    flax.config.update("flax_use_orbax_checkpointing", request.param)
    yield request.param
    flax.config.update("flax_use_orbax_checkpointing", True)


def bits(tree):
    """Returns the leaves by path, with their dtypes and all of their bits."""
    state = jax.tree.leaves_with_path(weft_serialization.to_state_dict(tree))
    return {
        jax.tree_util.keystr(key): (str(np.asarray(x).dtype), np.asarray(x).tobytes())
        for key, x in state
    }


@DIRECTIONS
def test_train_state_transfers_bitwise(tmp_path, writer, reader, use_orbax):
    state = writer.trained(seed=0)
    target = reader.trained(seed=1, steps=0).replace(step=jnp.int32(0))
    written = bits(writer.serialization.to_state_dict(state))
    of = writer.checkpoints
    save = of.save_checkpoint_multiprocess if use_orbax else of.save_checkpoint
    path = save(str(tmp_path), state, int(state.step))
    assert os.path.isdir(path) == use_orbax
    for ckpt_dir in (str(tmp_path), path):
        back = reader.checkpoints.restore_checkpoint(ckpt_dir, target)
        assert type(back) is type(target)
        assert jax.tree.structure(back) == jax.tree.structure(target)
        assert bits(reader.serialization.to_state_dict(back)) == written
    # And it computes the same.
    x = jnp.ones((1, 3))
    outputs = [
        s.apply_fn({"params": s.params, "batch_stats": s.batch_stats}, x) for s in (state, back)
    ]
    np.testing.assert_allclose(*outputs, rtol=1e-5)
    # Without a target, both see the same state dict.
    ours = weft_checkpoints.restore_checkpoint(path, None)
    assert bits(ours) == bits(flax_checkpoints.restore_checkpoint(path, None)) == written


@DIRECTIONS
def test_parameters_are_interchangeable(writer, reader):
    x = jnp.ones((1, 3))
    variables = writer.Net().init(jax.random.key(0), x)
    theirs = reader.Net().init(jax.random.key(1), x)
    data = writer.serialization.to_bytes(variables)
    assert data == reader.serialization.to_bytes(reader.Net().init(jax.random.key(0), x))
    state = writer.serialization.to_state_dict(variables)
    for back in (
        reader.serialization.from_bytes(theirs, data),
        reader.serialization.from_state_dict(theirs, state),
    ):
        assert jax.tree.structure(back) == jax.tree.structure(theirs)
        assert type(back["params"]["Dense_0"]["kernel"]) is reader.Partitioned
        np.testing.assert_array_equal(reader.Net().apply(back, x), writer.Net().apply(variables, x))
    # Plain arrays need no bytes in between.
    plain = jax.tree.map(np.asarray, state["params"])
    plain["Dense_0"]["kernel"] = plain["Dense_0"]["kernel"]["value"]
    unboxed = {"params": plain, "batch_stats": variables["batch_stats"]}
    np.testing.assert_array_equal(reader.Net().apply(unboxed, x), writer.Net().apply(variables, x))


def test_other_orbax_trees_are_read(tmp_path):
    tree = {
        "masked": optax.masked(optax.adam(0.1), {"x": True, "y": False}).init(
            {"x": jnp.ones(1), "y": jnp.ones(2)}
        ),
        "key": jax.random.key(1),
        "frozen": flax.core.freeze({"q": np.float16([1, 2])}),
        "mixed": [1, (2.5, "text", True), {}, None],
    }
    flax_checkpoints.save_checkpoint(str(tmp_path), tree, 1)
    target = {**tree, "frozen": {"q": np.zeros(2, np.float16)}}
    back = weft_checkpoints.restore_checkpoint(tmp_path, target)
    assert back["mixed"] == tree["mixed"]
    assert jax.tree.structure(back) == jax.tree.structure(target)
    assert back.pop("key") == tree.pop("key")
    assert bits(back) == bits(flax.serialization.to_state_dict(tree))


@pytest.mark.parametrize("kwargs", [{}, {"keep": 3}, {"keep": 2, "keep_every_n_steps": 4}])
def test_same_checkpoints_are_kept(tmp_path, kwargs, use_orbax):
    chance = random.Random(0)
    steps = [(chance.randrange(40), chance.random() < 0.2) for _ in range(15)]
    left = {}
    for name, lib in (("flax", flax_checkpoints), ("weft", weft_checkpoints)):
        ckpt_dir, left[name] = str(tmp_path / name), []
        for step, overwrite in steps:
            newest = max(lib.available_steps(ckpt_dir), default=-1)
            if use_orbax and step <= newest:
                overwrite = True  # where Flax writes with Orbax, it takes older steps silently
            try:
                lib.save_checkpoint(ckpt_dir, {"a": step}, step, overwrite=overwrite, **kwargs)
                left[name].append(lib.available_steps(ckpt_dir))
            except Exception as error:
                left[name].append(type(error).__name__)
            assert lib.latest_checkpoint(ckpt_dir).endswith(
                f"checkpoint_{max(lib.available_steps(ckpt_dir))}"
            )
    assert left["weft"] == left["flax"]


def test_directory_may_hold_both_formats(tmp_path):
    ckpt_dir = str(tmp_path)
    for step, lib in enumerate([flax_checkpoints, weft_checkpoints, flax_checkpoints] * 2):
        lib.save_checkpoint(ckpt_dir, {"step": step}, step, keep=3)
        for other in (flax_checkpoints, weft_checkpoints):
            assert other.restore_checkpoint(ckpt_dir, {"step": -1}) == {"step": step}
    assert weft_checkpoints.available_steps(ckpt_dir) == [3, 4, 5]
    assert sorted(os.listdir(ckpt_dir)) == ["checkpoint_3", "checkpoint_4", "checkpoint_5"]


def test_names_sort_equally():
    chance = random.Random(0)
    pieces = ["a", "b", "-", "+", ".", "_", "1", "2", "10", "3", "e", "1e3", "2.5", "E2", "-7"]
    for _ in range(500):
        names = ["".join(chance.choices(pieces, k=4)) for _ in range(4)]
        for signed in (True, False):
            want = flax_checkpoints.natural_sort(names, signed)
            assert weft_checkpoints.natural_sort(names, signed) == want, names


PROGRAM = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("127.0.0.1:" + sys.argv[2], 2, int(sys.argv[3]))
import flax
import numpy as np
from flax.training import checkpoints
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import NamedSharding, PartitionSpec

mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
whole = np.arange(32, dtype=np.float32).reshape(8, 4)
w = jax.make_array_from_callback(
    (8, 4), NamedSharding(mesh, PartitionSpec("x")), lambda i: whole[i])
tree = {"a": {"w": w}, "l": [w.astype("bfloat16"), 3]}
for step, orbax in enumerate((False, True)):
    flax.config.update("flax_use_orbax_checkpointing", orbax)
    manager = GlobalAsyncCheckpointManager()
    checkpoints.save_checkpoint_multiprocess(sys.argv[1], tree, step, keep=2, gda_manager=manager)
    manager.wait_until_finished()
sync_global_devices("end")
"""


@pytest.mark.long
def test_arrays_of_two_flax_processes(python_server, tmp_path):
    program = ["-c", textwrap.dedent(PROGRAM), tmp_path, free_port()]
    env = {"XLA_FLAGS": xla_flags(2)}
    processes = [python_server.start(*program, i, env=env) for i in (0, 1)]
    outputs = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), outputs

    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(None, "x"))
    whole = np.arange(32, dtype=np.float32).reshape(8, 4)
    target = {
        "a": {"w": jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)},
        "l": [jax.device_put(jnp.zeros((8, 4), jnp.bfloat16), sharding), 0],
    }
    assert (tmp_path / "checkpoint_0_gda").is_dir() and (tmp_path / "checkpoint_1").is_dir()
    for step in (0, 1):
        back = weft_checkpoints.restore_checkpoint(tmp_path, target, step=step)
        assert bits(back) == bits({"a": {"w": whole}, "l": [whole.astype(jnp.bfloat16), 3]})
        assert back["a"]["w"].sharding == back["l"][0].sharding == sharding
    for lib in (flax_checkpoints, weft_checkpoints):
        with pytest.raises(Exception, match="arget") as raised:
            manager = {"gda_manager": object()} if lib is flax_checkpoints else {}
            lib.restore_checkpoint(str(tmp_path), None, step=0, **manager)
        assert type(raised.value).__name__ == "MPARestoreTargetRequiredError"
