import jax
import jax.numpy as jnp

from tests.lifting.counting import BOXES, Box
from weft.lifting import DIFF, Roles, custom_jvp, custom_vjp, grad, jvp

WRT = (Roles((("scale", DIFF), (True, None))), DIFF)


def scaled(box, x):
    box.write("calls", box.arrays["calls"] + 1)
    return box.arrays["scale"] * x


def make_box():
    return Box(scale=jnp.float32(2), calls=jnp.int32(0))


def test_the_backward_function_gives_the_gradients():
    def forward(box, x):
        return scaled(box, x), (box.arrays["scale"], x)

    def backward(needed, cotangent):
        scale, x = needed
        return [{"scale": 10 * cotangent * x}, 100 * cotangent * scale]

    f = custom_vjp(BOXES, scaled, forward, backward, wrt=WRT)
    box = make_box()
    assert f(box, 3.0) == 6
    assert box.arrays["calls"] == 1
    ((of_box, rest), of_x) = grad(BOXES, f, wrt=WRT)(box, 3.0)
    assert (of_box["scale"], rest, of_x) == (30, None, 200)
    assert box.arrays["calls"] == 2


def test_the_rule_gives_the_tangent():
    def rule(tangents, box, x):
        of_box, of_x = tangents
        return scaled(box, x), 10 * of_box["scale"] + 100 * of_x

    f = custom_jvp(BOXES, scaled, rule, wrt=WRT)
    box = make_box()
    assert f(box, 3.0) == 6
    value, tangent = jvp(BOXES, f, wrt=WRT)((box, 3.0), [{"scale": jnp.float32(1)}, 2.0])
    assert (value, tangent) == (6, 210)
    ((of_box, _), of_x) = grad(BOXES, f, wrt=WRT)(box, 3.0)
    assert (of_box["scale"], of_x) == (10, 100)
    assert box.arrays["calls"] == 3


def test_rules_cross_other_transformations():
    f = custom_vjp(
        BOXES,
        lambda x: x,
        lambda x: (x, None),
        lambda _, cotangent: [-cotangent],
        wrt=(DIFF,),
    )
    assert jax.jit(jax.vmap(jax.grad(f)))(jnp.ones(3)).tolist() == [-1, -1, -1]
