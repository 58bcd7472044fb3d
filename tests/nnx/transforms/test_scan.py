import jax
import jax.numpy as jnp
import numpy as np
import pytest

from weft import nnx
from weft.errors import (
    AxisSizeError,
    CapturedObjectError,
    CarryStructureError,
    LoopStructureError,
    RoleError,
    TraceContextError,
    TransformArgumentError,
)

XS = jnp.arange(3.0)
Carry = nnx.Carry
MODES = pytest.mark.parametrize("mode", [{}, {"graph_updates": False}, {"graph": False}], ids=str)


class Pair(nnx.Module):
    def __init__(self, w=2.0, n=0.0):
        self.w = nnx.Param(jnp.asarray(w))
        self.n = nnx.BatchStat(jnp.asarray(n))

    def add(self, x):
        self.n[...] += x
        return self


@MODES
def test_a_module_is_carried_from_step_to_step(mode):
    m = Pair()
    out, ys = nnx.scan(lambda m, x: (m.add(x), m.n * 1), **mode)(m, XS)
    assert out is m
    assert ys.tolist() == [0.0, 1.0, 3.0] and float(m.n) == 3


@MODES
def test_layers_are_applied_one_after_another(mode):
    layers = Pair(jnp.arange(1.0, 4.0), jnp.zeros(3))

    def f(x, layer):
        layer.n[...] = x
        return x * layer.w

    y = nnx.scan(f, in_axes=(Carry, 0), out_axes=Carry, **mode)(jnp.ones(()), layers)
    assert float(y) == 6
    assert layers.n[...].tolist() == [1.0, 1.0, 2.0]


def test_the_carry_stands_anywhere_and_more_than_once():
    f = nnx.scan(
        lambda x, a, m: (x * a, a + 1, m.add(a)),
        in_axes=(1, Carry, Carry),
        out_axes=(1, Carry, Carry),
    )
    m = Pair()
    y, a, out = f(jnp.ones((2, 3)), jnp.zeros(()), m)
    assert y.tolist() == [[0.0, 1.0, 2.0]] * 2
    assert float(a) == 3 and out is m and float(m.n) == 3


def test_a_part_of_an_object_is_carried_and_another_scanned():
    m = Pair(XS, 0.0)
    axes = nnx.StateAxes({nnx.Param: 0, ...: Carry})
    f = lambda x, m: x + m.add(m.w[...]).n  # noqa: E731
    y = nnx.scan(f, in_axes=(Carry, axes), out_axes=Carry)(jnp.zeros(()), m)
    assert float(m.n) == 3 and float(y) == 0 + 1 + 3


def test_no_carry_options_and_empty_loops():
    assert nnx.scan(lambda x, y: x * y, in_axes=(0, None), out_axes=0)(XS, 2.0).tolist() == [
        0,
        2,
        4,
    ]
    backwards = nnx.scan(lambda c, x: (c + x, c), reverse=True, unroll=2)(jnp.zeros(()), XS)
    assert backwards[1].tolist() == [3.0, 2.0, 0.0]
    m = Pair()
    nnx.scan(lambda m, x: (m.add(x), None))(m, jnp.zeros(0))
    assert float(m.n) == 0


def test_what_each_step_makes_is_stacked():
    layers = Pair(XS, XS)

    def f(c, layer):
        layer.seen = nnx.Cache(c)
        layer.kind = "seen"
        return c + layer.w, Pair(c)

    _, made = nnx.scan(f)(jnp.zeros(()), layers)
    assert layers.seen[...].tolist() == made.w[...].tolist() == [0.0, 0.0, 1.0]
    assert layers.kind == "seen"


def test_streams_advance_as_in_a_python_loop():
    rngs, other = nnx.Rngs(0), nnx.Rngs(0)
    draw = lambda rngs, x: (rngs, x + jax.random.normal(rngs.noise()))  # noqa: E731
    _, ys = nnx.scan(draw)(rngs, XS)
    np.testing.assert_allclose(ys, [draw(other, x)[1] for x in XS], rtol=1e-6)
    assert int(rngs.default.count[...]) == 3


def test_each_carry_has_a_counterpart():
    message = r"scan: in_axes=\(Carry, 0\) has 1 Carry and out_axes=0 has 0; each Carry of one"
    with pytest.raises(TransformArgumentError, match=message):
        nnx.scan(lambda c, x: x, out_axes=0)
    with pytest.raises(TransformArgumentError, match=r"has 0 Carry and .* has 1"):
        nnx.scan(lambda c, x: x, in_axes=(0, 0))
    with pytest.raises(
        TransformArgumentError, match=r"in_axes=\(\{'a': .*Carry.*\}, 0\) has a Carry in"
    ):
        nnx.scan(lambda c, x: x, in_axes=({"a": Carry}, 0))


def test_the_body_returns_what_out_axes_speak_of():
    with pytest.raises(TransformArgumentError, match="the body returns NoneType, but by out_axes"):
        nnx.scan(lambda c, x: None)(0.0, XS)
    with pytest.raises(RoleError, match=r"out_axes=\(CARRY, 0\) has a tuple of 2 entries"):
        nnx.scan(lambda c, x: (c, x, x))(0.0, XS)
    with pytest.raises(RoleError, match=r"shared by all iterations .* at the result"):
        nnx.scan(lambda c, x: (c, x), out_axes=(Carry, None))(jnp.zeros(()), XS)


def test_a_carried_object_is_returned_as_itself():
    with pytest.raises(
        TransformArgumentError, match=r"scan\(<lambda>\): the carry is returned as ano"
    ):
        nnx.scan(lambda m, x: (nnx.clone(m), x))(Pair(), XS)
    with pytest.raises(
        TransformArgumentError, match="receives 1 objects in its carry and returns 0"
    ):
        nnx.scan(lambda d, x: ({"m": 1.0}, x))({"m": Pair()}, XS)
    pair = [Pair(), Pair()]
    with pytest.raises(TransformArgumentError, match=r"the carry\[0\] is returned as another Pair"):
        nnx.scan(lambda p, x: (p[::-1], x))(pair, XS)


def wrong(**values):
    def f(m, x):
        for name, value in values.items():
            setattr(m, name, value) if name not in ("w", "n") else m.n.set_value(value)
        return m, x

    return f


def test_a_carry_keeps_its_shape_and_dtype():
    with pytest.raises(
        CarryStructureError, match=r"carry at m\.n is given as float32\[\] and .*\[2\]"
    ):
        nnx.scan(wrong(n=jnp.ones(2)))(Pair(), XS)
    with pytest.raises(CarryStructureError, match=r"carry at d\['m'\]\.n is given as .* bool\[\]"):
        nnx.scan(lambda d, x: (wrong(n=jnp.array(True))(d["m"], x) and d, x))(
            {"m": Pair(n=jnp.float32(0))}, XS
        )
    with pytest.raises(
        CarryStructureError, match=r"the carry at c\['a'\] is given as float32\[2\]"
    ):
        nnx.scan(lambda c, x: ({"a": c["a"][:1]}, x))({"a": jnp.ones(2)}, XS)


def test_a_carried_or_shared_object_keeps_its_attributes():
    with pytest.raises(
        LoopStructureError, match=r"makes an attribute at m\.made; .* before the loop"
    ):
        nnx.scan(wrong(made=nnx.Param))(Pair(), XS)
    with pytest.raises(LoopStructureError, match=r"removes the attribute at m\.w"):
        nnx.scan(lambda m, x: (delattr(m, "w"), (m, x))[1])(Pair(), XS)
    kind = nnx.Dict(kind="old", part=Pair())
    with pytest.raises(LoopStructureError, match=r"changes a reference or static value at m\.kind"):
        nnx.scan(wrong(kind="new"))(kind, XS)
    with pytest.raises(LoopStructureError, match=r"a reference or static value at shared\.part"):
        f = lambda c, shared: (wrong(part=Pair())(shared, c), c)[1]  # noqa: E731
        nnx.scan(f, in_axes=(Carry, None), out_axes=Carry, length=2)(
            kind.part, nnx.Dict(part=Pair())
        )
    assert kind.kind == "old"


def test_what_is_shared_is_not_written():
    m = Pair(XS)
    f = lambda c, m: m.add(c).w * c  # noqa: E731
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    with pytest.raises(
        RoleError, match=r"scan: .* shared by all iterations .*, at m\.n; have it carried"
    ):
        nnx.scan(f, in_axes=(Carry, axes), out_axes=Carry)(jnp.zeros(()), m)
    assert float(m.n) == 0


def test_what_is_captured_stays_outside():
    m = Pair()
    with pytest.raises(CapturedObjectError, match=r"the result\[1\] is a Pair"):
        nnx.scan(lambda c, x: (c, m))(0.0, XS)
    with pytest.raises(TraceContextError, match="BatchStat"):
        nnx.scan(lambda c, x: (c, m.add(x).n * 1))(0.0, XS)
    ys = nnx.scan(lambda c, x: (c, x * m.w))(0.0, XS)[1]
    assert ys.tolist() == [0.0, 2.0, 4.0]


def test_lengths():
    with pytest.raises(AxisSizeError, match="scan: no input is mapped, so the size is unknown"):
        nnx.scan(lambda c: c, in_axes=Carry, out_axes=Carry)(0.0)
    with pytest.raises(AxisSizeError, match=r"the size given: 4, x: 3"):
        nnx.scan(lambda c, x: (c, x), length=4)(0.0, XS)
    with pytest.raises(AxisSizeError, match=r"scan: .*\(m\.n: 2, m\.w: 3\)"):
        nnx.scan(lambda c, m: (c, c))(0.0, Pair(jnp.ones(3), jnp.ones(2)))


def test_an_exception_leaves_everything_as_it_was():
    m = Pair()

    def f(m, x):
        m.add(x)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        nnx.scan(f)(m, XS)
    assert float(m.add(1.0).n) == 1


def test_gradients_go_through():
    layers = Pair(jnp.arange(1.0, 4.0), jnp.zeros(3))

    def loss(layers, x):
        f = nnx.remat(lambda x, layer: jnp.sin(layer.add(x).w * x))
        return nnx.scan(f, in_axes=(Carry, 0), out_axes=Carry)(x, layers)

    def by_hand(w, x):
        for i in range(3):
            x = jnp.sin(w[i] * x)
        return x

    grads = nnx.grad(loss)(layers, jnp.float32(0.5))
    np.testing.assert_allclose(grads.w[...], jax.grad(by_hand)(layers.w[...], 0.5), rtol=1e-5)
    assert float(layers.n[0]) == 0.5
