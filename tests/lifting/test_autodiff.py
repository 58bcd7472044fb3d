import jax
import jax.numpy as jnp
import pytest

from tests.lifting.counting import BOXES, Box
from weft.lifting import DIFF, Roles, custom_vjp, grad, remat

WRT = (Roles((("w", DIFF), (True, None))), None)


def loss(box, x):
    box.write("calls", box.arrays["calls"] + 1)
    return (box.arrays["w"] * x).sum() ** 2


def make():
    return Box(w=jnp.arange(3.0), calls=jnp.int32(0))


def test_failure_writes_nothing():
    box = make()
    with pytest.raises(TypeError, match="scalar"):
        grad(BOXES, lambda box, x: loss(box, x) * x, wrt=WRT)(box, jnp.ones(3))
    assert box.arrays["calls"] == 0
    assert box.writes == 0


def test_rules_compose_with_transformations():
    f = custom_vjp(
        BOXES,
        lambda x: x,
        lambda x: (x, None),
        lambda _, cotangent: [-cotangent],
        wrt=(DIFF,),
    )
    assert jax.jit(jax.vmap(jax.grad(f)))(jnp.ones(3)).tolist() == [-1, -1, -1]


def body(box, x):
    y = jnp.sin(box.arrays["w"] * jnp.sin(x))
    box.write("y", y)
    return y.sum()


def remat_loss(w, x, lift):
    box = Box(w=w)
    return lift(body)(box, x) + box.arrays["y"].sum()


def saved(policy):
    def run(w):
        return remat_loss(w, jnp.ones(3), lambda f: remat(BOXES, f, policy=policy))

    return str(jax.make_jaxpr(jax.grad(run))(jnp.arange(3.0))).count("= sin ")


def test_policy_controls_recomputation():
    everything = saved(jax.checkpoint_policies.everything_saveable)
    nothing = saved(jax.checkpoint_policies.nothing_saveable)
    assert nothing > everything
