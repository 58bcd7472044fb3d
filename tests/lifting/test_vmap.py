import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lifting.counting import BOXES, Box
from weft.errors import AxisSizeError, ForkError, RoleError
from weft.lifting import FORK, Roles, vmap


@pytest.fixture(autouse=True)
def no_leaks():
    with jax.checking_leaks():
        yield


def test_each_group_has_its_own_axis():
    weights, offset = jnp.arange(6.0).reshape(2, 3), jnp.float32(10)
    box = Box(w=weights, b=offset, total=jnp.zeros((2,)))
    roles = Roles((("w", 1), ("total", None), (True, None)))
    box.arrays["total"] = jnp.float32(0)

    def fn(box, x):
        return box.arrays["w"].sum() * x + box.arrays["b"]

    out = vmap(BOXES, fn, in_axes=(roles, 0))(box, jnp.array([1.0, 2.0, 3.0]))
    np.testing.assert_allclose(out, weights.sum(0) * np.array([1, 2, 3]) + 10)


def test_what_is_written_comes_back_along_its_axis():
    box = Box(w=jnp.arange(6.0).reshape(2, 3))

    def fn(box):
        box.write("w", box.arrays["w"] + 1)

    vmap(BOXES, fn, in_axes=(1,))(box)
    np.testing.assert_array_equal(box.arrays["w"], np.arange(6.0).reshape(2, 3) + 1)
    assert box.writes == 1


def test_what_is_created_goes_to_the_first_group_that_matches():
    box = Box(w=jnp.arange(3.0))

    def fn(box):
        box.write("new", box.arrays["w"] * 2)

    vmap(BOXES, fn, in_axes=(Roles((("w", 0), (True, 0))),))(box)
    np.testing.assert_array_equal(box.arrays["new"], [0, 2, 4])


def test_keys_are_forked():
    box = Box(key=jax.random.key(0))
    drawn = vmap(
        BOXES,
        lambda box: jax.random.uniform(box.arrays["key"]),
        in_axes=(Roles((("key", FORK),)),),
        axis_size=4,
    )(box)
    expected = jax.vmap(jax.random.uniform)(jax.random.split(jax.random.key(0), 4))
    np.testing.assert_array_equal(drawn, expected)


def test_axis_name_is_there_for_collectives():
    out = vmap(BOXES, lambda x: x / jax.lax.psum(x, "i"), axis_name="i")(jnp.array([1.0, 3.0]))
    np.testing.assert_allclose(out, [0.25, 0.75])


def test_returned_carriers_have_the_axis_of_out_axes():
    made = vmap(BOXES, lambda x: Box(x=x), out_axes=1)(jnp.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(made.arrays["x"], np.arange(6.0).reshape(2, 3).T)
    roles = Roles((("x", 1),))
    made = vmap(BOXES, lambda x: Box(x=x), out_axes=roles)(jnp.arange(6.0).reshape(2, 3))
    assert made.arrays["x"].shape == (3, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: vmap(BOXES, lambda x, y: x)(jnp.ones(2), jnp.ones(3)),
            AxisSizeError,
            r"vmap: the mapped axes have different sizes \(input 0: 2, input 1: 3\)",
        ),
        (
            lambda: vmap(BOXES, lambda x: x, in_axes=2)(jnp.ones((2, 2))),
            AxisSizeError,
            r"vmap: input 0 of shape \(2, 2\) has no axis 2",
        ),
        (
            lambda: vmap(BOXES, lambda x: x, in_axes=None)(jnp.ones(2)),
            AxisSizeError,
            "the size is unknown",
        ),
        (
            lambda: vmap(BOXES, lambda b: 0, in_axes=(Roles((("w", FORK),)),), axis_size=2)(
                Box(w=jnp.ones(2))
            ),
            ForkError,
            "w is not a PRNG key",
        ),
    ],
)
def test_bad_axes(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_role_that_vmap_does_not_have():
    from weft.lifting import CARRY

    with pytest.raises(RoleError, match="vmap has no role CARRY; expected an axis, None, FORK"):
        vmap(BOXES, lambda x: x, in_axes=CARRY)(jnp.ones(2))
