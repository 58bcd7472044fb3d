import jax
import jax.numpy as jnp
import numpy as np

from tests.lifting.counting import BOXES, Box
from weft.lifting import remat


def body(box, x):
    y = jnp.sin(box.arrays["w"] * jnp.sin(x))
    box.write("y", y)
    return y.sum()


def loss(w, x, lift):
    box = Box(w=w)
    return lift(body)(box, x) + box.arrays["y"].sum()


def test_values_and_gradients_are_those_without():
    args = jnp.arange(3.0), jnp.ones(3)
    plain = jax.value_and_grad(loss)(*args, lambda f: f)
    with jax.checking_leaks():
        again = jax.value_and_grad(loss)(*args, lambda f: remat(BOXES, f))
    np.testing.assert_allclose(plain[0], again[0])
    np.testing.assert_allclose(plain[1], again[1])


def saved(policy):
    def run(w):
        return loss(w, jnp.ones(3), lambda f: remat(BOXES, f, policy=policy))

    return str(jax.make_jaxpr(jax.grad(run))(jnp.arange(3.0))).count("= sin ")


def test_the_policy_says_what_is_computed_again():
    everything = saved(jax.checkpoint_policies.everything_saveable)
    nothing = saved(jax.checkpoint_policies.nothing_saveable)
    assert nothing > everything
