import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from weft.hierarchy.base_layer import FactorizationSpec, ParameterSpec
from weft.trainer.optimizer_base import OptParam
from weft.trainer.optimizer_factored import scale_by_factored_rms

RNG = np.random.default_rng(0)


def param(shape, *axes):
    return OptParam(jnp.zeros(shape), FactorizationSpec(axes) if axes else None)


def run(tx, param, grads):
    state = tx.init({"w": param})
    for grad in grads:
        updates, state = tx.update({"w": jnp.asarray(grad)}, state, {"w": param})
    return updates["w"], state


@pytest.mark.parametrize("axes", [("row", "col"), ("col", "row")])
def test_factors_agree_with_optax(axes):
    grads = RNG.normal(size=(3, 128, 256)).astype(np.float32)
    ours, state = run(
        scale_by_factored_rms(lambda t: 1 - (t + 1.0) ** -0.8), param((128, 256), *axes), grads
    )
    theirs = optax.scale_by_factored_rms(decay_rate=0.8, epsilon=1e-30)
    optax_state = theirs.init(grads[0])
    for grad in grads:
        expected, optax_state = theirs.update(grad, optax_state, grad)
    np.testing.assert_allclose(ours, expected, rtol=2e-4)
    assert sorted([state.v_row["w"].shape, state.v_col["w"].shape]) == [(128,), (256,)]
    assert state.v["w"].shape == (1,)


def test_moments_without_factors():
    grads = RNG.normal(size=(2, 5)).astype(np.float32)
    updates, state = run(scale_by_factored_rms(0.9, eps=0.5), param((5,)), grads)
    v = 0.9 * 0.1 * (grads[0] ** 2 + 0.5) + 0.1 * (grads[1] ** 2 + 0.5)
    np.testing.assert_allclose(state.v["w"], v, rtol=1e-5)
    np.testing.assert_allclose(updates, grads[1] / np.sqrt(v), rtol=1e-5)
    assert state.v_row["w"].shape == state.v_col["w"].shape == (1,)


def test_other_axes_are_factored_one_by_one():
    grad = RNG.normal(size=(2, 3, 4)).astype(np.float32)
    stacked, state = run(scale_by_factored_rms(0.9), param((2, 3, 4), None, "row", "col"), [grad])
    assert (state.v_row["w"].shape, state.v_col["w"].shape) == ((2, 4), (2, 3))
    for i in range(2):
        alone, _ = run(scale_by_factored_rms(0.9), param((3, 4), "row", "col"), [grad[i]])
        np.testing.assert_allclose(stacked[i], alone, rtol=1e-5)


def test_one_named_axis_is_not_enough():
    _, state = run(scale_by_factored_rms(0.9), param((3, 4), "row", None), [np.ones((3, 4))])
    assert state.v["w"].shape == (3, 4)


def test_factors_lose_the_axis_that_they_are_means_over():
    specs = {
        "w": ParameterSpec(
            shape=(2, 3, 4),
            dtype=jnp.bfloat16,
            mesh_axes=("stage", "data", "model"),
            factorization=FactorizationSpec((None, "row", "col")),
        ),
        "b": ParameterSpec(shape=(4,), dtype=jnp.float32, mesh_axes=("model",)),
    }
    state = scale_by_factored_rms(0.9).partition(specs)
    assert (state.v_row["w"].shape, state.v_row["w"].mesh_axes) == ((2, 4), ("stage", "model"))
    assert (state.v_col["w"].shape, state.v_col["w"].mesh_axes) == ((2, 3), ("stage", "data"))
    assert (state.v["w"].shape, tuple(state.v["b"].mesh_axes)) == ((1,), ("model",))
    assert {spec.dtype for spec in jax.tree.leaves(state.v)} == {jnp.float32}
    whole = scale_by_factored_rms(0.9, factored=False).partition(specs)
    assert (whole.v["w"].shape, whole.v_row["w"].shape) == ((2, 3, 4), (1,))
