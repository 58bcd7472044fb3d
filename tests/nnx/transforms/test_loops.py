import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import (
    CarryStructureError,
    LoopStructureError,
    RoleError,
    SharedObjectError,
    SharedStateWarning,
)
from weft.errors import TransformArgumentError as ArgumentError
from weft.lifting.state_creation import consts_and_carry
from weft.nnx import Carry


class Pair(nnx.Module):
    def __init__(self, w=2.0, n=0.0):
        self.w = nnx.Param(jnp.asarray(w))
        self.n = nnx.BatchStat(jnp.asarray(n))

    def add(self, x):
        self.n[...] += x
        return self


def test_body_must_return_its_objects():
    m = Pair()
    with pytest.raises(
        ArgumentError, match=r"nnx\.while_loop\(clone\): the carry is returned as anoth"
    ):
        nnx.while_loop(lambda m: True, nnx.clone, m)
    with pytest.raises(
        ArgumentError, match=r"nnx\.fori_loop\(<lambda>\): the carry\['x'\] is return"
    ):
        nnx.fori_loop(0, 3, lambda i, c: {"x": c["y"], "y": c["x"]}, {"x": m, "y": Pair()})
    with pytest.raises(
        ArgumentError, match="receives 1 objects in its carry and returns 0; return"
    ):
        nnx.while_loop(lambda m: True, lambda m: None, m)
    assert float(m.n) == 0


def test_only_values_of_variables_change():
    def make(m):
        m.made = m.w
        return m

    def put(c):
        c[1].part = c[0]
        return c

    with pytest.raises(
        LoopStructureError, match=r"nnx\.while_loop\(make\): .* attribute at m\.made"
    ):
        nnx.while_loop(lambda m: True, make, Pair())
    with pytest.raises(LoopStructureError, match=r"nnx\.fori_loop\(<lambda>\): .* at val\.made"):
        nnx.fori_loop(0, 3, lambda i, val: make(val), Pair())
    with pytest.raises(LoopStructureError, match=r"or static value at c\[1\]\.part"):
        nnx.while_loop(lambda c: True, put, (Pair(), nnx.Dict(part=Pair())))


def test_carry_keeps_its_shape_and_dtype():
    def grow(m):
        m.n.set_value(jnp.ones(2))
        return m

    with pytest.raises(
        CarryStructureError, match=r"while_loop: the carry at m\.n is given as float32"
    ):
        nnx.while_loop(lambda m: True, grow, Pair())
    with pytest.raises(CarryStructureError, match=r"the carry at m\.n is given as .* float32\[2\]"):
        nnx.fori_loop(0, jnp.array(3), lambda i, m: grow(m), Pair())


def test_exception_leaves_state_unchanged():
    m = Pair()

    def stop(m):
        m.add(1)
        raise KeyError("stop")

    for loop in (
        lambda: nnx.while_loop(lambda m: True, stop, m),
        lambda: nnx.fori_loop(0, 3, lambda i, m: stop(m), m),
    ):
        with pytest.raises(KeyError, match="stop"):
            loop()
    assert float(m.add(1.0).n) == 1


# Loops inside of a scan that shares parameters.


def add_and_scale(m, x):
    m.add(m.w[...])
    return x * m.w[...]


def by_fori(lower):
    def run(m, x):
        step = lambda i, c: (c[0], add_and_scale(*c))  # noqa: E731
        return nnx.fori_loop(lower, 2, step, (m, x))[1]

    return run


def by_while(m, x):
    step = lambda c: (c[0], add_and_scale(*c[:2]), c[2] + 1)  # noqa: E731
    return nnx.while_loop(lambda c: c[2] < 2, step, (m, x, 0))[1]


def by_scan(m, x):
    step = lambda c: (c[0], add_and_scale(*c))  # noqa: E731
    return nnx.scan(step, in_axes=(nnx.Carry,), out_axes=nnx.Carry, length=2)((m, x))[1]


def by_cond(m, x):
    run = by_fori(0)
    return nnx.cond(x > 0, run, lambda m, x: x, m, x)


def mapped_by_vmap(run):
    def of_both(m, x):
        # Values that are only read are shared by all indices, like the parameters.
        scaled = lambda w, x: nnx.fori_loop(0, 2, lambda i, c: (c[0], c[1] * c[0]), (w, x))[1]  # noqa: E731
        y = nnx.vmap(scaled, in_axes=(None, 0))(m.w, jnp.stack([x, x]))[0]
        run(m, x)
        return y

    return of_both


INNER = {
    "fori": by_fori(0),
    "fori of unknown length": by_fori(jnp.int32(0)),
    "while": by_while,
    "scan": by_scan,
    "cond": by_cond,
}
BETWEEN = {
    "nothing": lambda run: run,
    "jit": nnx.jit,
    "remat": nnx.remat,
    "vmap": mapped_by_vmap,
    "switch": lambda run: lambda m, x: nnx.switch(0, [run, by_cond], m, x),
}


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("inner", INNER)
def test_unchanged_state_may_be_shared_in_outer_loops(inner, between):
    run = BETWEEN[between](INNER[inner])
    axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
    outer = nnx.scan(
        lambda x, m: run(m, x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, length=2
    )
    m = Pair()
    assert float(outer(jnp.float32(1), m)) == 16
    assert (float(m.w), float(m.n)) == (2, 8)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("loop", [by_scan, by_while, by_fori(0), by_cond])
def test_body_in_loops_is_traced_once(loop, depth):
    traces = []

    class Noted(Pair):
        def add(self, x):
            traces.append(1)
            return super().add(x)

    def nested(m, x, depth=depth):
        if depth == 1:
            return loop(m, x)
        step = lambda x, m: nested(m, x, depth - 1)  # noqa: E731
        axes = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
        return nnx.scan(step, in_axes=(nnx.Carry, axes), out_axes=nnx.Carry, length=2)(x, m)

    jax.eval_shape(lambda x: nested(Noted(), x), jnp.float32(1))
    assert len(traces) == 1


TREES = pytest.mark.parametrize("mode", [{"graph_updates": False}, {"graph": False}], ids=str)


@TREES
@pytest.mark.parametrize("loop", ["while_loop", "fori_loop", "scan"])
def test_replacing_a_variable_of_the_carry_without_graph_updates_fails(loop, mode):
    def replace(m):
        m.n = nnx.BatchStat(m.n[...] + 1)
        return m

    m, n = Pair(jnp.ones(2), jnp.zeros(2)), 2
    loops = {
        "while_loop": lambda: nnx.while_loop(lambda m: m.n[0] < 3, replace, m, **mode),
        "fori_loop": lambda: nnx.fori_loop(0, n, lambda i, m: replace(m), m, **mode),
        "scan": lambda: nnx.scan(replace, in_axes=Carry, out_axes=Carry, length=n, **mode)(m),
    }
    with pytest.raises(LoopStructureError, match=r"the body replaces the variable at \w+\.n"):
        loops[loop]()
    assert m.n[...].tolist() == [0, 0]


class Attributes(nnx.Module):
    def __init__(self):
        self.n = nnx.BatchStat(jnp.zeros(2))
        self.array = jnp.zeros(2)
        self.mode = "first"


def change_array(m):
    m.array = m.array + 1


def change_static(m):
    m.mode = "second"


def add_attribute(m):
    m.added = nnx.BatchStat(m.n[...])


def remove_attribute(m):
    del m.mode


@TREES
@pytest.mark.parametrize("loop", ["while_loop", "fori_loop", "fori_loop of arrays", "scan"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_static, r"changes a reference or static value at \w+\.mode"),
        (add_attribute, r"makes an attribute at \w+\.added"),
        (remove_attribute, r"removes the attribute at \w+\.mode"),
    ],
)
def test_changing_attributes_without_graph_updates_fails(loop, change, message, mode):
    def body(m):
        change(m)
        m.n[...] += 1
        return m

    m = Attributes()
    loops = {
        "while_loop": lambda: nnx.while_loop(lambda m: m.n[0] < 2, body, m, **mode),
        "fori_loop": lambda: nnx.fori_loop(0, 2, lambda i, m: body(m), m, **mode),
        "fori_loop of arrays": lambda: nnx.fori_loop(
            jnp.int32(0), jnp.int32(2), lambda i, m: body(m), m, **mode
        ),
        "scan": lambda: nnx.scan(body, in_axes=Carry, out_axes=Carry, length=2, **mode)(m),
    }
    with pytest.raises(LoopStructureError, match=f"the body {message}"):
        loops[loop]()
    assert m.n[...].tolist() == [0, 0] and m.mode == "first"


# Attributes created in the body.


def make_variable(m, i):
    if not hasattr(m, "count"):
        m.count = nnx.Variable(jnp.zeros(()))
    m.count[...] += i + 1


def make_in_part(m, i):
    if not hasattr(m.part, "count"):
        m.part.count = nnx.Variable(m.w[...] + i)
    m.part.count[...] *= 2


def make_with_alias(m, i):
    if not hasattr(m, "a"):
        m.z = nnx.BatchStat(jnp.zeros(()))
        m.a = m.part.alias = m.z
    assert m.a is m.z and m.part.alias is m.a
    m.a[...] += i


def make_module(m, i):
    if not hasattr(m, "new"):
        m.new = [nnx.clone(m.part), {"b": Pair(n=3.0)}]
    m.new[0].add(m.new[1]["b"].n[...] + i)


def make_from_key(m, i):
    if not hasattr(m, "noise"):
        m.noise = nnx.Variable(m.rngs.noise.uniform())
    m.noise[...] += m.rngs.noise.uniform()


def make_after_drawing(m, i):
    x = m.rngs.noise.uniform()
    make_variable(m, i)
    m.count[...] += x


def make_stream(m, i):
    if not hasattr(m, "own"):
        m.own = nnx.Rngs(m.rngs.params())
    m.n[...] += m.own.dropout.uniform() + i


def make_in_jit(m, i):
    nnx.jit(make_from_key)(m, i)


def make_in_branch(m, i):
    nnx.cond(i > 0, make_variable, lambda m, i: None, m, i)


def make_in_gradient(m, i):
    def loss(m):
        make_variable(m, i)
        return m.w[...] * m.count[...]

    m.w[...] -= nnx.grad(loss)(m).w[...]


MAKERS = [make_variable, make_in_part, make_with_alias, make_module, make_from_key]
MAKERS += [make_after_drawing, make_stream, make_in_jit, make_in_branch, make_in_gradient]


def fori(step, m, n):
    nnx.fori_loop(0, n, lambda i, m: (step(m, i), m)[1], m)


def fori_of_arrays(step, m, n):
    nnx.fori_loop(jnp.int32(0), jnp.int32(n), lambda i, m: (step(m, i), m)[1], m)


def while_(step, m, n):
    def body(c):
        step(c["m"], c["i"])
        return {"m": c["m"], "i": c["i"] + 1}

    nnx.while_loop(lambda c: c["i"] < n, body, {"i": jnp.int32(0), "m": m})


def scan(step, m, n):
    nnx.scan(lambda m, i: (m, step(m, i)))(m, jnp.arange(n))


LOOPS = [fori, fori_of_arrays, while_, scan]


EACH = [(fori, make) for make in MAKERS]
EACH += [(LOOPS[1:][i % 3], make) for i, make in enumerate(MAKERS)]


def put(name, value):
    return lambda m: setattr(m, name, value(m))


@TREES
@pytest.mark.parametrize("axis", [None, 0])
def test_shared_or_sliced_state_drops_changes_of_attributes(axis, mode):
    def scanned(change):
        def body(x, m):
            change(m)
            return x + m.n[...].sum()

        loop = nnx.scan(body, in_axes=(Carry, axis), out_axes=Carry, length=2, **mode)
        return loop(0.0, m)

    m = Attributes()
    with pytest.warns(SharedStateWarning, match=r"replaces the array at m\.array, .*nnx\.Carry"):
        assert scanned(change_array) == 0 and m.array.tolist() == Attributes().array.tolist()
    with pytest.warns(SharedStateWarning, match=r"at m\.mode, .* dropped; .*graph_updates=True"):
        assert scanned(change_static) == 0 and m.mode == "first"
    with pytest.warns(SharedStateWarning, match=r"replaces the variable at m\.n, .* Write the var"):
        n = m.n
        replaced = scanned(lambda m: setattr(m, "n", nnx.BatchStat(m.n + 1)))
        assert replaced == (4 if axis is None else 2)
    assert m.n is n and m.n[...].tolist() == [0, 0]


class Steps(nnx.Module):
    def __init__(self):
        self.n = nnx.BatchStat(jnp.zeros(()))
        self.w = nnx.Param(jnp.ones((5,)))


def counting(traces):
    def body(c, m):
        traces.append(1)
        m.n[...] += m.w[0]
        return c + m.n[...]

    return body


@TREES
@pytest.mark.parametrize("depth", [1, 2])
def test_only_changed_shared_variables_are_carried(depth, mode):
    traces, m = [], Steps()
    loop = counting(traces)
    for _ in range(depth):
        loop = nnx.scan(loop, in_axes=(Carry, None), out_axes=Carry, length=3, **mode)
    times = 3**depth
    assert loop(0.0, m) == times * (times + 1) / 2 and m.n[...] == times
    assert len(traces) <= depth + 1
    assert loop(0.0, m) == 0.5 * times * (3 * times + 1) and m.n[...] == 2 * times
    assert len(traces) <= depth + 1
    graphdef, state = nnx.split(m)
    pure = jax.make_jaxpr(lambda state: loop(0.0, nnx.merge(graphdef, state)))(state)
    scans = [eqn for eqn in pure.eqns if eqn.primitive.name == "scan"]
    assert [consts_and_carry(eqn.params)[1] for eqn in scans] == [2]


@TREES
def test_explicitly_shared_state_is_read_only(mode):
    m, traces = Steps(), []
    axes = nnx.StateAxes({nnx.BatchStat: None, ...: None})
    loop = nnx.scan(counting(traces), in_axes=(Carry, axes), out_axes=Carry, length=3, **mode)
    with pytest.raises(
        RoleError, match=r"scan: the body returns or changes what is shared .* m\.n"
    ):
        loop(0.0, m)
    assert m.n[...] == 0


def test_sharing_and_cycles_are_carried():
    m = Pair()
    m.me = m
    carry = {"a": m, "b": (m, m.n)}

    def body(c):
        assert c["a"] is c["b"][0] and c["a"].me is c["a"] and c["b"][1] is c["a"].n
        c["b"][1][...] += 1
        return c

    out = nnx.while_loop(lambda c: c["a"].n[...] < 3, body, carry)
    assert out["a"] is m and out["b"][0] is m and out["b"][1] is m.n and float(m.n) == 3
    with pytest.raises(
        SharedObjectError, match=r"while_loop\(body\).* at c\['a'\] and at c\['a'\]\.me"
    ):
        nnx.while_loop(lambda c: True, body, carry, graph=False)
