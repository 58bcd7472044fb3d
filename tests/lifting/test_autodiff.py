import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lifting.counting import BOXES, Box
from weft.lifting import DIFF, Roles, custom_jvp, custom_vjp, grad, jvp, remat, value_and_grad

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


def test_failure_writes_nothing():
    box = make()
    with pytest.raises(TypeError, match="scalar"):
        grad(BOXES, lambda box, x: loss(box, x) * x, wrt=WRT)(box, jnp.ones(3))
    assert box.arrays["calls"] == 0
    assert box.writes == 0


FIRST_DIFFERENTIABLE = (Roles((("scale", DIFF), (True, None))), DIFF)


def scaled(box, x):
    box.write("calls", box.arrays["calls"] + 1)
    return box.arrays["scale"] * x


def make_box():
    return Box(scale=jnp.float32(2), calls=jnp.int32(0))


def test_backward_function_defines_gradients():
    def forward(box, x):
        return scaled(box, x), (box.arrays["scale"], x)

    def backward(needed, cotangent):
        scale, x = needed
        return [{"scale": 10 * cotangent * x}, 100 * cotangent * scale]

    f = custom_vjp(BOXES, scaled, forward, backward, wrt=FIRST_DIFFERENTIABLE)
    box = make_box()
    assert f(box, 3.0) == 6
    assert box.arrays["calls"] == 1
    ((of_box, rest), of_x) = grad(BOXES, f, wrt=FIRST_DIFFERENTIABLE)(box, 3.0)
    assert (of_box["scale"], rest, of_x) == (30, None, 200)
    assert box.arrays["calls"] == 2


def test_rule_defines_tangent():
    def rule(tangents, box, x):
        of_box, of_x = tangents
        return scaled(box, x), 10 * of_box["scale"] + 100 * of_x

    f = custom_jvp(BOXES, scaled, rule, wrt=FIRST_DIFFERENTIABLE)
    box = make_box()
    assert f(box, 3.0) == 6
    value, tangent = jvp(BOXES, f, wrt=FIRST_DIFFERENTIABLE)(
        (box, 3.0), [{"scale": jnp.float32(1)}, 2.0]
    )
    assert (value, tangent) == (6, 210)
    ((of_box, _), of_x) = grad(BOXES, f, wrt=FIRST_DIFFERENTIABLE)(box, 3.0)
    assert (of_box["scale"], of_x) == (10, 100)
    assert box.arrays["calls"] == 3


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


def test_remat_keeps_values_and_gradients():
    args = jnp.arange(3.0), jnp.ones(3)
    plain = jax.value_and_grad(remat_loss)(*args, lambda f: f)
    with jax.checking_leaks():
        again = jax.value_and_grad(remat_loss)(*args, lambda f: remat(BOXES, f))
    np.testing.assert_allclose(plain[0], again[0])
    np.testing.assert_allclose(plain[1], again[1])


def saved(policy):
    def run(w):
        return remat_loss(w, jnp.ones(3), lambda f: remat(BOXES, f, policy=policy))

    return str(jax.make_jaxpr(jax.grad(run))(jnp.arange(3.0))).count("= sin ")


def test_policy_controls_recomputation():
    everything = saved(jax.checkpoint_policies.everything_saveable)
    nothing = saved(jax.checkpoint_policies.nothing_saveable)
    assert nothing > everything


def policies():
    of = jax.checkpoint_policies
    return [
        of.save_only_these_names("a", "b"),
        of.save_any_names_but_these("a"),
        of.save_from_both_policies(of.dots_saveable, of.save_only_these_names("a")),
        of.save_and_offload_only_these_names(
            names_which_can_be_saved=["a"],
            names_which_can_be_offloaded=["b"],
            offload_src="device",
            offload_dst="pinned_host",
        ),
    ]
