"""Frames of errors raised through Weft: the user's, and calls of layers."""

import pathlib
import traceback

import jax
import jax.numpy as jnp
import pytest

import weft
from weft import linen as nn
from weft import nnx
from weft.core import apply, init, lift
from weft.hierarchy.layers.linear import Linear
from weft.hierarchy.module import functional

WEFT = str(pathlib.Path(weft.__file__).parent)
HERE = pathlib.Path(__file__).name
X = jnp.ones((2, 3))


class Model(nnx.Module):
    def __init__(self):
        self.w, self.layer = nnx.Param(jnp.ones(3)), nnx.Linear(3, 3, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return fail(self.w)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return fail(nn.Dense(3)(x))


def fail(x):
    raise KeyError("mine")


def step(model, x=X):
    return model(x)


def ruled(model):
    f = nnx.custom_vjp(step)
    f.defvjp(lambda m: (f(m), None), lambda r, g: (None,))
    return nnx.grad(f)(model)


def scoped(scope, x):
    return lift.remat(lambda scope, x: fail(x))(scope, x)


CALLS = {
    "nnx.jit": lambda: nnx.jit(step)(Model()),
    "nnx.jit, known": lambda: [
        nnx.jit(lambda m, x: m.w.sum() if x.ndim else fail(x))(Model(), y)
        for y in (X, jnp.ones(()))
    ],
    "value_and_grad in jit": lambda: nnx.jit(lambda m: nnx.value_and_grad(step)(m))(Model()),
    "nested": lambda: nnx.jit(nnx.remat(nnx.vmap(step, in_axes=(None, 0))))(Model(), X),
    "scan": lambda: nnx.scan(lambda c, x: fail(c))(0.0, X),
    "while_loop": lambda: nnx.while_loop(fail, lambda x: x, 1.0),
    "cond": lambda: nnx.cond(True, step, step, Model()),
    "custom_vjp": lambda: ruled(Model()),
    "vjp": lambda: nnx.vjp(step, Model()),
    "linen init": lambda: Block().init(jax.random.key(0), X),
    "linen jit": lambda: nn.jit(Block)().init_with_output(jax.random.key(0), X),
    "linen scan": lambda: nn.scan(
        nn.remat(Block), variable_axes={"params": 0}, length=2, split_rngs={"params": True}
    )().init(jax.random.key(0), X),
    "core": lambda: init(scoped)(jax.random.key(0), X),
}


def frames(run, error=KeyError):
    with pytest.raises(error) as raised:
        run()
    return traceback.extract_tb(raised.value.__traceback__)


@pytest.mark.parametrize("run", CALLS.values(), ids=CALLS)
def test_error_of_the_user_shows_the_frames_of_the_user(run):
    found = frames(run)
    assert [f.name for f in found if f.filename.startswith(WEFT)] == []
    assert found[-1].name == "fail" and {HERE} == {pathlib.Path(f.filename).name for f in found}
    for frame in found:
        assert frame.line and not frame.line.startswith(("finally", "raise error"))


@pytest.mark.parametrize("run", CALLS.values(), ids=CALLS)
def test_all_frames_are_kept_without_filtering(run):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        found = frames(run)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    assert len([f for f in found if f.filename.startswith(WEFT)]) >= 2


def test_error_in_a_layer_shows_its_call():
    class Wrong(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    variables = Wrong().init(jax.random.key(0), X)
    found = frames(lambda: Wrong().apply(variables, jnp.ones((2, 4))), Exception)
    inside = [f for f in found if f.filename.startswith(WEFT)]
    assert [f.name for f in inside] == ["__call__"] and inside[0].filename.endswith("linear.py")
    found = frames(lambda: nnx.jit(lambda m: m.layer(jnp.ones((2, 4))))(Model()), Exception)
    inside = [f for f in found if f.filename.startswith(WEFT)]
    assert [f.name for f in inside] == ["__call__"] and inside[0].filename.endswith("linear.py")


def test_error_of_weft_ends_at_the_users_line():
    found = frames(lambda: apply(lambda scope: scope.param("w"))({}), Exception)
    assert pathlib.Path(found[-1].filename).name == HERE
    layer = (
        Linear.default_config().set(name="l", input_dim=3, output_dim=3).instantiate(parent=None)
    )
    found = frames(
        lambda: functional(layer, prng_key=None, state={}, inputs=(X,), is_training=False),
        Exception,
    )
    assert [f.name for f in found if f.filename.startswith(WEFT)] in ([], ["forward"])
