import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lifting.counting import BOXES, Box
from weft.lifting import DIFF, Roles, grad, value_and_grad

WRT = (Roles((("w", DIFF), (True, None))), None)


def loss(box, x):
    box.write("calls", box.arrays["calls"] + 1)
    return (box.arrays["w"] * x).sum() ** 2


def make():
    return Box(w=jnp.arange(3.0), calls=jnp.int32(0))


def test_gradients_of_a_group_of_state():
    box, x = make(), jnp.ones(3)
    with jax.checking_leaks():
        value, grads = value_and_grad(BOXES, loss, wrt=WRT)(box, x)
    assert value == 9
    np.testing.assert_allclose(grads[0][0]["w"], 6 * np.ones(3))
    assert grads[0][1] is None
    assert grads[1] is None
    assert box.arrays["calls"] == 1


def test_gradients_of_arguments_and_aux():
    grads, aux = grad(BOXES, lambda box, x: (loss(box, x), x + 1), wrt=(None, DIFF), has_aux=True)(
        make(), jnp.ones(3)
    )
    np.testing.assert_allclose(grads[1], 6 * np.arange(3.0))
    np.testing.assert_allclose(aux, 2 * np.ones(3))
    assert grads[0] == (None,)


def test_a_failure_writes_nothing():
    box = make()
    with pytest.raises(TypeError, match="scalar"):
        grad(BOXES, lambda box, x: loss(box, x) * x, wrt=WRT)(box, jnp.ones(3))
    assert box.arrays["calls"] == 0
    assert box.writes == 0
