"""Pickles and checkpoints of one program, written on Flax and read on Weft, and back."""

import pytest

from tests.python import run_python

PROGRAM = """
import pathlib, pickle, sys
import flax, flax.linen as nn, jax, jax.numpy as jnp, numpy as np, optax
import orbax.checkpoint as ocp
from flax import nnx, serialization
from flax.training import checkpoints, train_state

class Net(nn.Module):
    width: int = 2
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(nn.BatchNorm(use_running_average=True)(x))

class Object(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(3, 2, rngs=rngs), "static", nnx.Dropout(0.5, rngs=rngs)])
        self.scale = nnx.Dict(by=nnx.Param(jnp.full(2, 2.0), tag="x"))
        self.count, self.sizes, self.nothing = nnx.data(3), nnx.static((1, 2)), None

    def __call__(self, x):
        return self.layers[2](self.layers[0](self.norm(x))) * self.scale.by

x, net, model = jnp.ones((4, 3)), Net(), Object(nnx.Rngs(0, dropout=1))
variables = net.init(jax.random.key(0), x)
state = train_state.TrainState.create(
    apply_fn=net.apply, params=variables["params"], tx=optax.sgd(0.1, momentum=0.9))
state = state.apply_gradients(grads=state.params)
parts = nnx.state(model, nnx.Not(nnx.RngState))
objects = {
    "frozen": flax.core.freeze(variables), "train state": state.replace(tx=None), "net": net,
    "box": nn.Partitioned(jnp.ones(2), ("a",)), "names": nn.LogicallyPartitioned(x, ("a", "b")),
    "parts": parts, "model": model, "metric": nnx.MultiMetric(loss=nnx.metrics.Average("loss")),
    "rngs": nnx.Rngs(0, noise=2), "axes": nnx.StateAxes({nnx.Param: 0}), "filter": nnx.Not("a"),
}

def same(a, b):
    shapes = [jax.tree.structure(jax.tree.map(np.shape, tree)) for tree in (a, b)]
    assert shapes[0] == shapes[1]
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = map(jax.random.key_data, (one, other))
        np.testing.assert_array_equal(one, other)

def write(to):
    (to / "objects").write_bytes(pickle.dumps(objects))
    (to / "bytes").write_bytes(serialization.to_bytes(state))
    checkpoints.save_checkpoint(str(to / "checkpoints"), state, step=1)
    with ocp.StandardCheckpointer() as saver:
        saver.save(to / "linen", {"params": state.params, "opt_state": state.opt_state})
        saver.save(to / "nnx", parts)

def read(at, with_objects):
    zeros = jax.tree.map(jnp.zeros_like, state)
    same(serialization.from_bytes(zeros, (at / "bytes").read_bytes()), state)
    same(checkpoints.restore_checkpoint(str(at / "checkpoints"), zeros), state)
    with ocp.StandardCheckpointer() as saver:
        like = {"params": zeros.params, "opt_state": zeros.opt_state}
        restored = saver.restore(at / "linen", like)
        same(restored, {"params": state.params, "opt_state": state.opt_state})
        same(saver.restore(at / "nnx", jax.tree.map(jnp.zeros_like, parts)), parts)
    if with_objects:
        found = pickle.loads((at / "objects").read_bytes())
        for name in ("frozen", "box", "names", "parts", "metric", "rngs"):
            assert type(found[name]) is type(objects[name])
            same(found[name], objects[name])
        assert found["box"].names == ("a",) and found["names"].names == ("a", "b")
        same(found["train state"].apply_fn({**variables, "params": state.params}, x),
             net.apply({**variables, "params": state.params}, x))
        same(found["net"].init(jax.random.key(0), x), variables)
        same(found["model"](x), model(x))
        same(found["model"], model)
        assert found["model"].scale.by.get_metadata() == model.scale.by.get_metadata()
        assert found["filter"] == objects["filter"]
        assert list(found["axes"].items()) == list(objects["axes"].items())

action, *places = sys.argv[1], *map(pathlib.Path, sys.argv[2:])
if action == "write":
    write(*places)
elif action == "read checkpoints":
    read(*places, with_objects=False)
else:
    write(places[1])
    read(places[0], with_objects=True)
"""


@pytest.mark.long
@pytest.mark.rank_promotion("allow")  # Orbax and Flax add axes
def test_pickles_and_checkpoints_load(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    of_flax, of_weft = tmp_path / "of_flax", tmp_path / "of_weft"
    of_flax.mkdir()
    of_weft.mkdir()
    run_python(program, "write", of_flax, as_flax=False)
    run_python(program, "write and read all", of_flax, of_weft, as_flax=True)
    # Pickles of Weft name its classes; Weft loads them, with or without weft.as_flax.
    run_python(program, "read checkpoints", of_weft, as_flax=False)
