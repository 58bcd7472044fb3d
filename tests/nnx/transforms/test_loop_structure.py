"""Structure that the body of a loop makes in every iteration: attributes, items, static values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lifting.counting import TICKS, Tick
from tests.nnx.transforms.test_loops import fori, python, scan, while_
from weft import nnx
from weft.errors import CarryStructureError, LoopStructureError
from weft.nnx import Carry


class Part(nnx.Module):
    def __init__(self, w, name="part"):
        self.w, self.b, self.name = nnx.Param(w), jnp.ones(2) * w, name


class Model(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.float32(2.0))
        self.total = nnx.Variable(jnp.float32(0.0))
        self.rngs = nnx.Rngs(0)
        self.items, self.table = nnx.List([]), nnx.Dict()


def variable(m, i):
    m.cache = nnx.BatchStat(m.w[...] * (i + 1))
    m.total[...] += m.cache[...]


def written_variable(m, i):
    m.cache = nnx.BatchStat(m.w[...] * i)
    m.cache[...] += 1


def replaced_twice(m, i):
    m.cache = nnx.BatchStat(m.w[...])
    m.cache = nnx.BatchStat(m.cache[...] + i)


def aliases(m, i):
    m.a = nnx.Variable(jnp.float32(i))
    m.items[:] = [m.a]
    m.items[0][...] += 1
    m.total[...] += m.a[...]


def module(m, i):
    m.part = Part(m.w[...] + i)
    m.part.b += 1
    m.total[...] += m.part.b.sum() * m.part.w[...]


def static(m, i):
    m.calls, m.mode, m.shape = 1, "train", (2, 3)
    m.total[...] += m.calls


def static_module(m, i):
    m.part = nnx.Dict(name="a", size=3)


def array(m, i):
    m.x = m.w[...] * i
    m.total[...] += m.x


def array_if_missing(m, i):
    if not hasattr(m, "x"):
        m.x = jnp.zeros(2)
    m.x = m.x + i + 1


def array_made_in_steps(m, i):
    if not hasattr(m, "x"):
        m.x = jnp.zeros(2)
        m.x = m.x.at[0].set(m.w[...])
    m.total[...] += m.x.sum()


def variable_made_in_steps(m, i):
    if not hasattr(m, "x"):
        m.x = nnx.Variable(jnp.zeros(2))
        m.x[...] += m.w[...]
    m.total[...] += m.x[...].sum()


def tuple_of_arrays(m, i):
    m.pair = (m.w[...] * i, nnx.Variable(m.w[...]), "name")
    m.total[...] += m.pair[0] + m.pair[1][...]


def item_if_missing(m, i):
    if not m.items:
        m.items.append(nnx.Variable(jnp.float32(0)))
        m.items.append(jnp.float32(1))
    m.items[0][...] += i
    m.items[1] = m.items[1] * 2


def item_of_dict(m, i):
    m.table["b"] = jnp.float32(i)
    m.table["a"] = nnx.Variable(m.w[...] + i)
    m.table.setdefault("n", nnx.Variable(jnp.float32(0)))[...] += i


def key(m, i):
    m.noise = nnx.Variable(m.rngs.uniform())
    m.total[...] += m.rngs.uniform()


def key_of_array(m, i):
    m.noise = m.rngs.uniform()
    m.total[...] += m.noise


def key_after_layer(m, i):
    m.layer = nnx.Linear(1, 2, rngs=m.rngs)
    m.total[...] += m.layer(jnp.ones(1)).sum()


def in_jit(m, i):
    nnx.jit(array_if_missing)(m, i)
    nnx.jit(module)(m, i)


def in_scan(m, i):
    nnx.scan(lambda m, j: (m, module(m, i + j)))(m, jnp.arange(2))


def in_gradient(m, i):
    def loss(m):
        variable(m, i)
        array_if_missing(m, i)
        return m.w[...] * m.x.sum()

    m.total[...] += nnx.grad(loss)(m).w[...]


def sown_sum(m, i):
    m.sow(nnx.Intermediate, "h", i + m.w[...], lambda a, b: a + b, lambda: 0.0)


MAKERS = [variable, written_variable, replaced_twice, aliases, module, static, static_module]
MAKERS += [array, array_if_missing, array_made_in_steps, variable_made_in_steps, tuple_of_arrays]
MAKERS += [item_if_missing, item_of_dict, key, key_of_array, key_after_layer, in_jit, in_scan]
MAKERS += [in_gradient, sown_sum]


def assert_equal(m, expected):
    graphdefs, states = zip(*(nnx.split(x) for x in (m, expected)), strict=True)
    assert graphdefs[0] == graphdefs[1]
    for x, y in zip(*map(jax.tree.leaves, states), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=1e-5)


EACH = [(fori, make) for make in MAKERS]
EACH += [((scan, while_)[i % 2], make) for i, make in enumerate(MAKERS)]


@pytest.mark.parametrize(("loop", "make"), EACH)
def test_body_creating_structure_matches_python_loop(loop, make):
    m, expected = Model(), Model()
    for n in (3, 2):  # the second loop finds the structure
        loop(make, m, n)
        python(make, expected, n)
        assert_equal(m, expected)


SOME = [variable, aliases, module, static, array_if_missing, item_of_dict, key, sown_sum]


NESTED = [(fori, scan), (scan, while_), (while_, fori)]


@pytest.mark.parametrize(("loops", "make"), [(NESTED[i % 3], make) for i, make in enumerate(SOME)])
def test_inner_loop_creates_structure(loops, make):
    def nested(m, outer, inner):
        outer(lambda m, i: inner(make, m, 2), m, 2)

    m, expected = Model(), Model()
    for _ in range(2):
        nested(m, *loops)
        nested(expected, python, python)
        assert_equal(m, expected)


def jitted(make, m):
    nnx.jit(lambda m: fori(make, m, 3))(m)


def in_loss(make, m):
    def loss(m):
        scan(make, m, 3)
        return m.total[...] ** 2

    m.w[...] -= nnx.grad(loss)(m).w[...]


def mapped(make, m):
    def body(x, m):
        fori(make, m, 3)
        return m.total[...] * x

    m.total[...] += nnx.vmap(body, in_axes=(0, None))(jnp.arange(2.0), nnx.clone(m)).sum()


def own(make, m):
    models = nnx.vmap(lambda w: nnx.Dict(w=nnx.Param(w), total=nnx.Variable(w)))(jnp.arange(2.0))
    nnx.vmap(lambda m: while_(make, m, 3))(models)
    m.total[...] += models.total[...].sum()


AROUND = {"jit": jitted, "grad": in_loss, "vmap": own}


@pytest.mark.parametrize("make", [variable, module, array, array_if_missing, static])
@pytest.mark.parametrize("around", AROUND)
def test_transformation_around_the_loop(around, make):
    m, expected = Model(), Model()
    for _ in range(2):
        AROUND[around](make, m)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("fori", "scan", "while_"):
            patch.setitem(globals(), name, python)
        for _ in range(2):
            AROUND[around](make, expected)
    assert_equal(m, expected)


@pytest.mark.parametrize("loop", [fori, while_, scan])
@pytest.mark.parametrize("outer", [python, fori, scan])
def test_empty_loop_structure_has_first_iteration_values(loop, outer):
    def make(m, i):
        variable(m, i)
        array_if_missing(m, i)
        static(m, i)
        m.items[:] = [m.cache]

    m = Model()
    outer(lambda m, i: loop(make, m, 0), m, 2)
    assert float(m.cache) == 2 and m.x.tolist() == [0, 0] and m.items[0] is m.cache
    assert (m.calls, m.mode, m.shape, float(m.total)) == (1, "train", (2, 3), 0)


def test_loop_in_untaken_branch_keeps_initial_values():
    def branch(m):
        scan(variable, m, 2)
        fori(array_if_missing, m, 2)
        fori(module, m, 2)

    for taken in (False, True):
        m, expected = Model(), Model()
        nnx.cond(taken, branch, lambda m: None, m)
        branch(expected)
        if taken:
            assert_equal(m, expected)
        else:
            assert nnx.graphdef(m) == nnx.graphdef(expected)
            assert (float(m.cache), m.x.tolist(), m.part.b.tolist()) == (2, [0, 0], [2, 2])
            assert float(m.total) == 0


@pytest.mark.parametrize("of_branch", [array, array_if_missing])
@pytest.mark.parametrize("is_in_gradient", [False, True])
def test_branch_in_body_creates_arrays(of_branch, is_in_gradient):
    def call_branch(x, m, i):
        nnx.cond(i > 0, of_branch, lambda m, i: None, m, i)
        return x

    def make(m, i):
        (nnx.grad(call_branch) if is_in_gradient else call_branch)(1.0, m, i)

    def expected(m, i):
        if i > 0:
            of_branch(m, i)

    m, by_hand = Model(), Model()
    for n in (3, 2):
        fori(make, m, n)
        python(expected, by_hand, n)
        assert_equal(m, by_hand)
    m = Model()
    fori(make, m, 1)
    assert not m.x.any() and float(m.total) == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("make", [variable, static, array, item_of_dict])
def test_traces_grow_linearly_with_the_depth(make, depth):
    traces = []

    def nested(m, depth):
        def step(m, i):
            if depth > 1:
                return nested(m, depth - 1)
            traces.append(1)
            make(m, 0)

        fori(step, m, 2)

    m = Model()
    nested(m, depth)
    assert len(traces) == depth + 1
    traces.clear()
    nested(m, depth)
    assert len(traces) == 1


def test_variable_replaced_in_body_is_new():
    m = Model()
    m.cache = before = nnx.BatchStat(jnp.float32(7.0))
    fori(variable, m, 0)
    assert m.cache is before and float(before) == 7
    m.alias = nnx.Dict(other=before)
    del m.alias  # referred to from outside only
    fori(variable, m, 2)
    assert m.cache is not before and (float(m.cache), float(before)) == (4, 7)


@pytest.mark.parametrize(("before", "after"), [("none", "part"), ("part", "none")])
def test_slices_replace_static_values_by_objects(before, after):
    values = {"none": lambda w: "none", "part": lambda w: nnx.Dict(w=nnx.Param(w))}
    m = nnx.Dict(x=nnx.Param(jnp.arange(3.0)), child=values[before](jnp.ones(3)))

    @nnx.scan(in_axes=0, out_axes=0)
    def replace(m):
        m.child = values[after](m.x + 1)
        return 2 * m.x

    assert replace(m).tolist() == [0, 2, 4]
    assert m.child == "none" if after == "none" else m.child.w.tolist() == [1, 2, 3]


def count(m, i):
    m.calls = getattr(m, "calls", 0) + 1


def alternate(m, i):
    m.mode = "b" if getattr(m, "mode", "b") == "a" else "a"


def append(m, i):
    m.items.append(nnx.Variable(m.w[...]))


def put(m, i):
    m.table[len(m.table)] = jnp.zeros(2)


def accumulate(m, i):
    m.cache = nnx.Variable(getattr(m, "cache", 0.0) + m.w[...])


def accumulate_array(m, i):
    m.x = getattr(m, "x", 0.0) + m.w[...]


def count_after_first(m, i):
    if hasattr(m, "x"):
        m.x[...] += 1
    else:
        m.x = nnx.Variable(jnp.float32(5))


def existing(m, i):
    m.name = "new"


def alias_of_existing(m, i):
    m.old = m.w


def swap(m, i):
    m.w, m.total = m.total, m.w


def keep_previous(m, i):
    m.previous, m.cache = getattr(m, "cache", m.total), nnx.Variable(m.w[...])


def other_kind(m, i):
    m.cache = nnx.Param(1.0) if hasattr(m, "cache") else nnx.BatchStat(1.0)


def removed(m, i):
    if hasattr(m, "x"):
        del m.x
    else:
        m.x = jnp.zeros(2)


REFUSED = {
    count: r"changes 1 to 2 at \S+\.calls after the first .*same after each iter.*keep",
    alternate: r"changes 'a' to 'b' at \S+\.mode",
    append: r"makes an attribute at \S+\.items\[1\] after the first .*one entry per iter",
    put: r"makes an attribute at \S+\.table\[1\] after the first",
    accumulate: r"first iteration makes \S+\.cache, and later ones compute it .*create it before",
    accumulate_array: r"first iteration makes \S+\.x, and later ones compute it",
    count_after_first: r"first iteration makes \S+\.x, and later ones compute it",
    existing: r"changes a reference or static value at \S+\.name",
    alias_of_existing: r"makes an attribute at \S+\.old",
    swap: r"replaces the variable at \S+\.total",
    keep_previous: r"makes an attribute at \S+\.previous",
    other_kind: r"replaces the variable at \S+\.cache after the first iteration",
    removed: r"removes the attribute at \S+\.x after the first iteration",
}


@pytest.mark.parametrize("loop", [fori, while_])
@pytest.mark.parametrize("change", REFUSED)
def test_structure_that_differs_between_iterations_is_refused(change, loop):
    m = Model()
    m.name = "old"
    before = nnx.graphdef(m)
    with pytest.raises(LoopStructureError, match=REFUSED[change]):
        loop(change, m, 3)
    assert nnx.graphdef(m) == before


def test_sowing_a_tuple_in_a_loop_fails():
    def body(m, i):
        m.sow(nnx.Intermediate, "h", m.w[...] * i)

    with pytest.raises(CarryStructureError, match=r"m\.h\[1\] is returned and was not given"):
        fori(body, Model(), 3)


def test_shared_objects_gain_equal_attributes():
    def body(x, m):
        m.mode = "train"
        if not hasattr(m, "x"):
            m.x = m.w[...] * 2
        return x + m.x

    m = Model()
    assert float(nnx.scan(body, in_axes=(Carry, None), out_axes=Carry, length=3)(0.0, m)) == 12
    assert m.mode == "train" and float(m.x) == 4


def directly(f, m, x):
    return f(m, x)


def in_jit(f, m, x):
    return nnx.jit(f)(m, x)


def in_remat(f, m, x):
    return nnx.remat(f)(m, x)


def in_cond(f, m, x):
    return nnx.cond(True, f, lambda m, x: x, m, x)


def in_grad(f, m, x):
    return nnx.grad(lambda x, m: f(m, x))(x, m)


def in_vmap(f, m, x):
    return nnx.vmap(lambda x: f(nnx.Dict(), x))(x[None])[0]


@pytest.mark.parametrize(
    ("loop", "around"),
    [
        (scan, directly),
        (scan, in_jit),
        (scan, in_remat),
        (scan, in_grad),
        (while_, directly),
        (while_, in_cond),
        (fori, in_vmap),
    ],
)
def test_parts_made_in_each_iteration_are_traced_once_more_for_each_loop(loop, around):
    """Each loop makes an object, in which the next one makes attributes."""

    def nested(depth, loop, around, traces):
        def run(m, x):
            def step(m, i):
                if "n" not in m:
                    m.n = nnx.Variable(x * 0 + i)
                m.n[...] += 1 + x
                if depth == 1:
                    traces.append(1)
                else:
                    inner = nested(depth - 1, loop, around, traces)
                    m.n[...] += around(inner, nnx.Dict(), m.n[...] / 8)

            loop(step, m, 2)
            return m.n[...]

        return run

    for depth in (1, 3):
        traces = []
        found = nested(depth, loop, around, traces)(nnx.Dict(), jnp.float32(1.0))
        assert len(traces) == depth + 1
        expected = nested(depth, python, around, [])(nnx.Dict(), jnp.float32(1.0))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def made_before(inner, m):
    m.part = nnx.Dict()
    return inner(m.part)


def made_after(inner, m):
    part = nnx.Dict()
    y = inner(part)
    m.part = part
    return y


def first_value(inner, m):
    y = inner(nnx.Dict())
    if "first" not in m:
        m.first = nnx.Variable(y)
    m.first[...] *= 2
    return y + m.first[...]


def first_gradient(inner, m):
    if "first" not in m:
        m.first = nnx.Variable(jax.grad(lambda x: inner(nnx.Dict(), x))(m.n[...]))
    m.first[...] *= 2
    return m.first[...]


@pytest.mark.parametrize("use", [made_before, made_after, first_value, first_gradient])
@pytest.mark.parametrize("loop", [scan, fori])
def test_initial_values_from_parts_made_in_each_iteration(loop, use):
    def run(loop, m):
        def inner(m, x):
            def step(m, i):
                if "k" not in m:
                    m.k = nnx.Variable(x)
                m.k[...] += i * x * x

            loop(step, m, 3)
            return m.k[...]

        def step(m, i):
            m.n[...] += 1
            m.total[...] += use(lambda part, x=m.n[...]: inner(part, x), m)

        m.n, m.total = nnx.Variable(jnp.float32(0)), nnx.Variable(jnp.float32(0))
        loop(step, m, 2)
        return m

    assert_equal(run(loop, nnx.Dict()), run(python, nnx.Dict()))


def part_and_first_value(loop, depth, x):
    m = nnx.Dict(x=nnx.Variable(x))

    def step(m, i):
        if "n" not in m:
            m.n = nnx.Variable(m.x[...] / 2)
        m.n[...] += i + m.x[...]
        if depth > 1:
            y = part_and_first_value(loop, depth - 1, m.n[...] / 8)
            if "first" not in m:
                m.first = nnx.Variable(y)
            m.n[...] += m.first[...]

    loop(step, m, 2)
    return m.n[...]


@pytest.mark.parametrize("loop", [scan, while_])
def test_functions_that_share_traces_have_the_needed_initial_values(loop):
    for depth in (1, 3):
        found, expected = (part_and_first_value(f, depth, jnp.float32(1.0)) for f in (loop, python))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


tick = Tick()


@pytest.mark.parametrize("use", [made_before, made_after, first_value])
def test_loops_with_closures_of_arrays_share_their_traces(use):
    """In each loop, initial values need the results of the next one."""

    def nested(m, x, depth):
        def step(m, i):
            if "n" not in m:
                m.n = nnx.Variable(x / 2)
            m.n[...] += i + x
            if depth == 1:
                tick()
            else:
                z = m.n[...] / 8
                m.n[...] += use(lambda part: nested(part, z, depth - 1), m)

        scan(step, m, 2)
        return m.n[...]

    for depth in (2, 4):
        TICKS.clear()
        nested(nnx.Dict(), jnp.float32(1.0), depth)
        assert len(TICKS) <= 2 * depth


def test_container_of_another_class_is_refused():
    class Pair(NamedTuple):
        first: object

    def body(_, m):
        m.x = Pair(*m.x)
        return m

    with pytest.raises(LoopStructureError, match=r"at m\.x"):
        nnx.fori_loop(0, 2, body, nnx.Dict(x=nnx.data((nnx.Param(jnp.ones(2)),))))
