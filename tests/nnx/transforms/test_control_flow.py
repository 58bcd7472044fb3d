import jax.numpy as jnp
import pytest

from weft import nnx
from weft.errors import (
    AxisSizeError,
    BranchObjectsError,
    BranchStructureError,
    CapturedObjectError,
    CarryStructureError,
    LoopStructureError,
    RoleError,
    SharedObjectError,
    SharedStateWarning,
    TraceContextError,
    TransformArgumentError,
)

XS = jnp.arange(3.0)
Carry = nnx.Carry


class Pair(nnx.Module):
    def __init__(self, w=2.0, n=0.0):
        self.w = nnx.Param(jnp.asarray(w))
        self.n = nnx.BatchStat(jnp.asarray(n))

    def add(self, x):
        self.n[...] += x
        return self


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


def test_result_must_match_out_axes():
    with pytest.raises(TransformArgumentError, match="the body returns NoneType, but by out_axes"):
        nnx.scan(lambda c, x: None)(0.0, XS)
    with pytest.raises(RoleError, match=r"out_axes=\(CARRY, 0\) has a tuple of 2 entries"):
        nnx.scan(lambda c, x: (c, x, x))(0.0, XS)
    with pytest.raises(RoleError, match=r"shared by all iterations .* at the result"):
        nnx.scan(lambda c, x: (c, x), out_axes=(Carry, None))(jnp.zeros(()), XS)


def test_carried_object_is_returned_as_itself():
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


def test_carry_keeps_its_shape_and_dtype():
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


def test_carried_or_shared_object_keeps_its_attributes():
    with pytest.raises(
        LoopStructureError, match=r"makes an attribute at m\.made; .* before the loop"
    ):
        nnx.scan(lambda m, x: (setattr(m, "made", m.w), (m, x))[1])(Pair(), XS)
    with pytest.raises(LoopStructureError, match=r"removes the attribute at m\.w"):
        nnx.scan(lambda m, x: (delattr(m, "w"), (m, x))[1])(Pair(), XS)
    kind = nnx.Dict(kind="old", part=Pair())
    with pytest.raises(LoopStructureError, match=r"changes a reference or static value at m\.kind"):
        nnx.scan(wrong(kind="new"))(kind, XS)
    with pytest.raises(LoopStructureError, match=r"a reference or static value at shared\.part"):
        f = lambda c, shared: (wrong(part=nnx.Dict())(shared, c), c)[1]  # noqa: E731
        nnx.scan(f, in_axes=(Carry, None), out_axes=Carry, length=2)(
            kind.part, nnx.Dict(part=Pair())
        )
    assert kind.kind == "old"


def test_changes_of_shared_state_are_dropped_with_a_warning():
    m = Pair(XS)
    f = lambda c, m: c + m.add(1.0).n * m.w  # noqa: E731
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    with pytest.warns(
        SharedStateWarning,
        match=r"scan\(<lambda>\): the body changes m\.n, which .*{BatchStat: nnx.Carry, ",
    ) as given:
        total = nnx.scan(f, in_axes=(Carry, axes), out_axes=Carry)(jnp.zeros(()), m)
    assert float(total) == 3 and float(m.n) == 0
    assert len(given) == 1 and given[0].filename == __file__


def test_the_role_that_the_warning_names_keeps_the_change():
    m = Pair(XS)
    f = lambda c, m: c + m.add(1.0).n * m.w  # noqa: E731
    axes = nnx.StateAxes({nnx.BatchStat: Carry, nnx.Param: 0})
    total = nnx.scan(f, in_axes=(Carry, axes), out_axes=Carry)(jnp.zeros(()), m)
    assert float(total) == 0 * 1 + 1 * 2 + 2 * 3 and float(m.n) == 3


def test_changes_of_state_that_axes_share_without_graph_updates_are_refused():
    m = Pair(XS)
    f = lambda c, m: m.add(c).w * c  # noqa: E731
    axes = nnx.StateAxes({nnx.Param: 0, ...: None})
    with pytest.raises(
        RoleError, match=r"scan: .* shared by all iterations .*, at m\.n; have it carried"
    ):
        nnx.scan(f, in_axes=(Carry, axes), out_axes=Carry, graph_updates=False)(jnp.zeros(()), m)
    assert float(m.n) == 0


def test_captured_state_is_rejected():
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


def test_exception_in_a_scan_changes_nothing():
    m = Pair()

    def f(m, x):
        m.add(x)
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        nnx.scan(f)(m, XS)
    assert float(m.add(1.0).n) == 1


class BranchPair(nnx.Module):
    def __init__(self, w=2.0, n=0.0):
        self.w = nnx.Param(jnp.asarray(w))
        self.n = nnx.BatchStat(jnp.asarray(n))


def up(m):
    m.n[...] += 1
    return m.w * 2


def down(m):
    m.n[...] -= 10
    return m.w * 3


def put(name, value):
    return lambda m: setattr(m, name, value)


def kind(value):
    return put("kind", value)


def swap(m):
    m.w, m.n = m.n, m.w


DIFFERENT = {
    "static": (kind("a"), r"m\.kind is absent after one branch, and present after"),
    "deleted": (lambda m: delattr(m, "w"), r"m\.w is present after one branch, and absent after"),
    "replaced": (
        lambda m: setattr(m, "w", nnx.Param(1.0)),
        r"m\.w is an existing object after one branch, and a new object after another",
    ),
    "swapped": (swap, r"m\.n is one object after one branch, and a different one after another"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_differing_changes_are_shown_with_path(name):
    change, message = DIFFERENT[name]
    m = BranchPair()
    with pytest.raises(BranchObjectsError, match=r"nnx\.cond: " + message) as error:
        nnx.cond(True, change, lambda m: None, m)
    assert isinstance(error.value, TypeError)
    with pytest.raises(BranchObjectsError, match=r"nnx\.switch: m\.\w+ is "):
        nnx.switch(0, [lambda m: None, lambda m: None, change], m)
    assert nnx.graphdef(m) == nnx.graphdef(BranchPair())
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
    m.new = nnx.List([BranchPair(n=3.0), nnx.Rngs(7)])
    m.new[0].n[...] += 1
    m.new[1].default()


BRANCHES = {"": lambda m: None, "count": make_count, "noise": make_noise}
BRANCHES |= {"aliases": make_aliases, "module": make_module}


def test_results_that_differ_are_shown():
    m = BranchPair()
    with pytest.raises(BranchObjectsError, match=r"m\.kind is 'b' after one branch, and 'a' after"):
        nnx.cond(True, kind("a"), kind("b"), m)
    with pytest.raises(
        BranchObjectsError, match=r"the result is one object after one branch, and a diff"
    ):
        nnx.cond(True, lambda m: m.w, lambda m: m.n, m)
    with pytest.raises(
        BranchObjectsError, match=r"the result is BranchPair after .*, and Dict after another"
    ):
        nnx.cond(True, lambda: nnx.Dict(), lambda: BranchPair())
    with pytest.raises(
        BranchStructureError, match=r"true_fun returns another structure than false_f"
    ):
        nnx.cond(True, lambda m: (m.w * 1, BranchPair()), lambda m: m.w * 1, m)
    with pytest.raises(
        BranchStructureError, match=r"the result\['y'\] is float32\[2\] in branch 1, and"
    ):
        nnx.switch(0, [lambda: {"y": 1.0}, lambda: {"y": jnp.ones(2)}])
    with pytest.raises(
        BranchStructureError, match=r"the result\.w is float32\[\] in true_fun, and flo"
    ):
        nnx.cond(True, lambda: BranchPair(), lambda: BranchPair(w=jnp.ones(2)))
    with pytest.raises(
        BranchStructureError, match=r"m\.n is float32\[2\] in true_fun, and float32\[\]"
    ):
        nnx.cond(True, lambda m: m.n.set_value(jnp.ones(2)), lambda m: None, m)
    with pytest.raises(
        BranchStructureError, match=r"m\.n\['a'\] is there after true_fun, and not aft|m\.n"
    ):
        nnx.cond(True, lambda m: m.n.set_value({"a": 1.0}), lambda m: None, m)


def test_captured_state_is_read_only_in_branches():
    m = BranchPair()
    for value in (2.0, 5.0):
        m.w[...] = value
        assert float(nnx.cond(True, lambda x: x * m.w, lambda x: x, 3.0)) == 3 * value
    with pytest.raises(TraceContextError, match=r"nnx\.cond\(<lambda>\)"):
        nnx.cond(True, lambda: up(m), lambda: down(m))
    with pytest.raises(
        CapturedObjectError, match=r"nnx\.cond\(<lambda>\): the result is a BranchPair"
    ):
        nnx.cond(True, lambda: m, lambda: m)


def test_operands_may_be_shared_only_in_graphs():
    m = BranchPair()
    nnx.cond(True, lambda a, b: (up(a), up(b)), lambda a, b: (0.0, 0.0), m, m)
    assert float(m.n) == 2
    with pytest.raises(
        SharedObjectError, match=r"nnx\.cond\(<lambda>\).* is at a\.n and at b\[0\]\.n"
    ):
        nnx.cond(True, lambda a, b: 1, lambda a, b: 1, m, [m], graph=False)


def test_invalid_index_is_rejected():
    m = BranchPair()
    with pytest.raises(TransformArgumentError, match="switch: there are no branches"):
        nnx.switch(0, [], m)
    with pytest.raises(TypeError, match="must be scalar"):
        nnx.cond(jnp.array([True, False]), up, down, m)
    with pytest.raises(TypeError, match="must be an integer"):
        nnx.switch(1.0, [up, down], m)


def test_exception_in_a_branch_changes_nothing():
    m = BranchPair()

    def stop(m):
        m.n[...] += 1
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        nnx.cond(True, up, stop, m)
    assert float(m.n) == 0
