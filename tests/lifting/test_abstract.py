import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify as jax_checkify

from tests.lifting.counting import BOXES, Box
from weft.lifting import checkify, eval_shape


def test_shapes_instead_of_arrays():
    box = Box(x=jnp.ones((3, 2)))

    def f(box, y):
        box.write("z", box.arrays["x"] @ y)
        return y.sum()

    shape = eval_shape(BOXES, f)(box, jax.ShapeDtypeStruct((2, 4), jnp.float32))
    assert (shape.shape, shape.dtype) == ((), jnp.float32)
    assert box.arrays["z"] == jax.ShapeDtypeStruct((3, 4), jnp.float32)


def test_failed_checks_come_back():
    def f(box, x):
        jax_checkify.check(x > 0, "x is {x}", x=x)
        box.write("x", x)
        return x + 1

    box = Box(x=jnp.float32(0))
    error, value = checkify(BOXES, f)(box, jnp.float32(1))
    error.throw()
    assert (value, box.arrays["x"]) == (2, 1)
    error, _ = checkify(BOXES, f)(box, jnp.float32(-1))
    with pytest.raises(jax_checkify.JaxRuntimeError, match=r"x is -1"):
        error.throw()
