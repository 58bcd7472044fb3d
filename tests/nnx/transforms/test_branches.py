import jax
import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import (
    BranchObjectsError,
    BranchStructureError,
    CapturedObjectError,
    SharedObjectError,
    TraceContextError,
    TransformArgumentError,
)

MODES = pytest.mark.parametrize("mode", [{}, {"graph_updates": False}, {"graph": False}], ids=str)


class Pair(nnx.Module):
    def __init__(self, w=2.0, n=0.0):
        self.w = nnx.Param(jnp.asarray(w))
        self.n = nnx.BatchStat(jnp.asarray(n))


def up(m):
    m.n[...] += 1
    return m.w * 2


def down(m):
    m.n[...] -= 10
    return m.w * 3


@MODES
def test_the_branch_that_is_taken_writes(mode):
    m = Pair()
    taken = [float(nnx.cond(p, up, down, m, **mode)) for p in (True, jnp.array(False), 1)]
    assert (taken, float(m.n)) == ([4.0, 6.0, 4.0], -8.0)
    taken = [float(nnx.switch(i, [up, down], m, **mode)) for i in (0, 7, -2, jnp.array(1))]
    assert (taken, float(m.n)) == ([4.0, 6.0, 4.0, 6.0], -26.0)


@MODES
def test_a_branch_may_leave_alone_what_another_writes(mode):
    m, rngs = Pair(), nnx.Rngs(0)
    draw = lambda m, rngs: m.n.set_value(rngs.noise.uniform())  # noqa: E731
    for taken, count in ((False, 0), (True, 1)):
        nnx.cond(taken, draw, lambda m, rngs: None, m, rngs, **mode)
        assert int(rngs.default.count[...]) == count
    assert float(m.n) == nnx.Rngs(0).noise.uniform()


def test_changes_that_are_alike_are_seen():
    m, other = nnx.Dict(part=Pair()), Pair()

    def branch(value):
        def change(m, other):
            m.part = other
            m.made = [nnx.Param(value)]
            m.kind = "new"
            return m, other.w

        return change

    out, w = nnx.cond(False, branch(1.0), branch(2.0), m, other)
    assert out is m and w is other.w and m.part is other
    assert (float(m.made[0]), m.kind) == (2.0, "new")


def put(name, value):
    return lambda m: setattr(m, name, value)


def kind(value):
    return put("kind", value)


def swap(m):
    m.w, m.n = m.n, m.w


DIFFERENT = {
    "array": (put("x", jnp.ones(())), r"m\.x is absent after one branch, and present after an"),
    "static": (kind("a"), r"m\.kind is absent after one branch, and present after"),
    "deleted": (lambda m: delattr(m, "w"), r"m\.w is present after one branch, and absent after"),
    "replaced": (
        lambda m: setattr(m, "w", nnx.Param(1.0)),
        r"m\.w is an existing object after one branch, and a new object after another",
    ),
    "swapped": (swap, r"m\.n is one object after one branch, and a different one after another"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_changes_that_differ_are_shown_with_their_place(name):
    change, message = DIFFERENT[name]
    m = Pair()
    with pytest.raises(BranchObjectsError, match=r"nnx\.cond: " + message) as error:
        nnx.cond(True, change, lambda m: None, m)
    assert isinstance(error.value, TypeError)
    with pytest.raises(BranchObjectsError, match=r"nnx\.switch: m\.\w+ is "):
        nnx.switch(0, [lambda m: None, lambda m: None, change], m)
    assert nnx.graphdef(m) == nnx.graphdef(Pair())
    nnx.cond(True, change, lambda m: None, m, graph_updates=False)  # only values come back


def make_count(m):
    m.count = nnx.BatchStat(jnp.zeros(()))
    m.count[...] += m.w[...]


def make_noise(m):
    m.part.noise = nnx.Variable(m.rngs.noise.uniform())


def make_aliases(m):
    m.z = nnx.Variable(jnp.ones(()))
    m.a = m.part.alias = m.z
    m.a[...] *= 5


def make_module(m):
    m.new = nnx.List([Pair(n=3.0), nnx.Rngs(7)])
    m.new[0].n[...] += 1
    m.new[1].default()


MADE = {
    "": lambda m: (),
    "count": lambda m: (float(m.count),),
    "noise": lambda m: (float(m.part.noise),),
    "aliases": lambda m: (float(m.z), m.a is m.z, m.part.alias is m.z),
    "module": lambda m: (float(m.new[0].n), int(m.new[1].default.count[...])),
}
NOISE = float(nnx.Rngs(0).noise.uniform())
BRANCHES = {"": lambda m: None, "count": make_count, "noise": make_noise}
BRANCHES |= {"aliases": make_aliases, "module": make_module}
INITIAL = {"": (), "count": (0,), "noise": (NOISE,), "aliases": (1, True, True), "module": (3, 0)}
TAKEN = {"": (), "count": (2,), "noise": (NOISE,), "aliases": (5, True, True), "module": (4, 1)}


def model():
    m = Pair()
    m.part, m.rngs = Pair(), nnx.Rngs(0)
    return m


def jitted(f, m):
    nnx.jit(f)(m)


def nested(f, m):
    nnx.cond(True, f, lambda m: None, m)


@pytest.mark.parametrize("around", [lambda f, m: f(m), jitted, nested])
@pytest.mark.parametrize("taken", BRANCHES)
def test_what_only_some_branches_make_is_made_for_all(taken, around):
    m, index = model(), [*BRANCHES].index(taken)
    around(lambda m: nnx.switch(index, [*BRANCHES.values()], m), m)
    for name, found in MADE.items():
        assert found(m) == (TAKEN if name == taken else INITIAL)[name]
    assert int(m.rngs.default.count[...]) == (taken == "noise")
    assert (float(m.w), float(m.n)) == (2, 0)


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("inside", [jitted, nested])
@pytest.mark.parametrize("around", [lambda f, m: f(m), jitted, nested])
def test_what_a_branch_that_is_not_taken_makes_inside_of_others(name, around, inside):
    branch = BRANCHES[name]
    m = model()
    around(lambda m: nnx.cond(False, lambda m: inside(branch, m), lambda m: None, m), m)
    assert MADE[name](m) == INITIAL[name]


def test_two_branches_make_one_attribute_each_with_its_own_value():
    def make(value):
        def branch(m):
            m.made = nnx.Variable(jnp.float32(value))
            m.made[...] += 1

        return branch

    for i in range(3):
        m = Pair()
        nnx.switch(i, [make(1), make(5), lambda m: None], m)
        assert float(m.made) == (2, 6, 1)[i]


def test_what_branches_make_at_one_place_is_alike():
    m, param, stat = Pair(), nnx.Param, nnx.BatchStat
    make = lambda kind: lambda m: setattr(m, "made", kind(1.0))  # noqa: E731
    with pytest.raises(BranchObjectsError, match=r"m\.made is Param after one .* BatchStat after"):
        nnx.cond(True, make(stat), make(param), m)
    with pytest.raises(BranchObjectsError, match=r"m\.w is absent after one branch, and present"):
        nnx.cond(True, make(stat), lambda m: delattr(m, "w"), m)
    with pytest.raises(BranchStructureError, match=r"m\.made is float32\[2\] in true_fun, and flo"):
        nnx.cond(
            True,
            lambda m: setattr(m, "made", stat(jnp.ones(2))),
            lambda m: setattr(m, "made", stat(jnp.ones(()))),
            m,
        )
    with pytest.raises(BranchObjectsError, match=r"m\.made is absent after one branch, and pre"):
        nnx.cond(True, lambda m: setattr(m, "made", stat(1.0, names=["a"])), lambda m: None, m)
    with pytest.raises(
        BranchStructureError, match=r"m\.made is float32\[\] in true_fun, and float"
    ):
        f = lambda m: (setattr(m, "made", stat(jnp.ones(2))), m.made.set_value(jnp.ones(())))[:0]  # noqa: E731
        nnx.cond(True, f, lambda m: (), m)
    with pytest.raises(BranchObjectsError, match=r"m\.items\[0\] is absent after one"):
        m.items = []
        nnx.cond(True, lambda m: m.items.append(param(1.0)), lambda m: None, m)


def test_results_that_differ_are_shown():
    m = Pair()
    with pytest.raises(BranchObjectsError, match=r"m\.kind is 'b' after one branch, and 'a' after"):
        nnx.cond(True, kind("a"), kind("b"), m)
    with pytest.raises(
        BranchObjectsError, match=r"the result is one object after one branch, and a diff"
    ):
        nnx.cond(True, lambda m: m.w, lambda m: m.n, m)
    with pytest.raises(
        BranchObjectsError, match=r"the result is Pair after .*, and Dict after another"
    ):
        nnx.cond(True, lambda: nnx.Dict(), lambda: Pair())
    with pytest.raises(
        BranchStructureError, match=r"true_fun returns another structure than false_f"
    ):
        nnx.cond(True, lambda m: (m.w * 1, Pair()), lambda m: m.w * 1, m)
    with pytest.raises(
        BranchStructureError, match=r"the result\['y'\] is float32\[2\] in branch 1, and"
    ):
        nnx.switch(0, [lambda: {"y": 1.0}, lambda: {"y": jnp.ones(2)}])
    with pytest.raises(
        BranchStructureError, match=r"the result\.w is float32\[\] in true_fun, and flo"
    ):
        nnx.cond(True, lambda: Pair(), lambda: Pair(w=jnp.ones(2)))
    with pytest.raises(
        BranchStructureError, match=r"m\.n is float32\[2\] in true_fun, and float32\[\]"
    ):
        nnx.cond(True, lambda m: m.n.set_value(jnp.ones(2)), lambda m: None, m)
    with pytest.raises(
        BranchStructureError, match=r"m\.n\['a'\] is there after true_fun, and not aft|m\.n"
    ):
        nnx.cond(True, lambda m: m.n.set_value({"a": 1.0}), lambda m: None, m)


def test_what_is_captured_is_read_and_not_changed_or_returned():
    m = Pair()
    for value in (2.0, 5.0):
        m.w[...] = value
        assert float(nnx.cond(True, lambda x: x * m.w, lambda x: x, 3.0)) == 3 * value
    with pytest.raises(TraceContextError, match=r"nnx\.cond\(<lambda>\)"):
        nnx.cond(True, lambda: up(m), lambda: down(m))
    with pytest.raises(CapturedObjectError, match=r"nnx\.cond\(<lambda>\): the result is a Pair"):
        nnx.cond(True, lambda: m, lambda: m)


def test_operands_may_be_shared_only_in_graphs():
    m = Pair()
    nnx.cond(True, lambda a, b: (up(a), up(b)), lambda a, b: (0.0, 0.0), m, m)
    assert float(m.n) == 2
    with pytest.raises(SharedObjectError, match=r"nnx\.cond\(<lambda>\).* is at a and at b\[0\]"):
        nnx.cond(True, lambda a, b: 1, lambda a, b: 1, m, [m], graph=False)


def test_what_cannot_choose_is_refused():
    m = Pair()
    with pytest.raises(TransformArgumentError, match="switch: there are no branches"):
        nnx.switch(0, [], m)
    with pytest.raises(TypeError, match="must be scalar"):
        nnx.cond(jnp.array([True, False]), up, down, m)
    with pytest.raises(TypeError, match="must be an integer"):
        nnx.switch(1.0, [up, down], m)


def test_an_exception_leaves_everything_as_it_was():
    m = Pair()

    def stop(m):
        m.n[...] += 1
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        nnx.cond(True, up, stop, m)
    assert float(m.n) == 0


def test_gradients_and_nesting():
    m = Pair()

    def inner(m):
        return nnx.cond(m.n[...] > 0.5, up, down, m)

    f = nnx.jit(nnx.value_and_grad(lambda m, p: nnx.cond(p, inner, up, m)))
    with jax.checking_leaks():
        value, grads = f(m, True)
    assert (float(value), float(grads.w[...]), float(m.n)) == (6.0, 3.0, -10.0)
