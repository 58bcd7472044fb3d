import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from weft import nnx
from weft.errors import RoleError, RoleKindError, StateFilterError, TransformArgumentError


class Pair(nnx.Module):
    def __init__(self, w=2.0, n=0.0):
        self.w = nnx.Param(jnp.asarray(w))
        self.n = nnx.BatchStat(jnp.asarray(n))


def test_first_matching_filter_wins():
    axes = nnx.StateAxes({nnx.PathContains("w"): 0, nnx.Param: 1})
    assert axes.map_prefix(("w",), nnx.Param(1.0)) == 0
    assert axes.map_prefix(("v",), nnx.Param(1.0)) == 1
    assert nnx.DiffState(0, nnx.Param).map_prefix(("w",), nnx.Param(1.0))
    with pytest.raises(StateFilterError, match=r"no filter of StateAxes.* the BatchStat at \("):
        axes.map_prefix(("s", 0), nnx.BatchStat(1.0))


def test_symbols_in_prefixes():
    pair = Pair(jnp.ones((2, 3)), jnp.ones(3))
    axes = nnx.StateAxes({nnx.Param: 1, ...: 0})
    f = lambda tree, x: tree["m"][0].w.sum() * x + tree["m"][0].n  # noqa: E731
    mapped = nnx.vmap(f, in_axes=({"m": (axes,)}, None))
    assert mapped({"m": (pair,)}, 2.0).tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("graph", [True, False])
def test_object_with_axes_in_place_of_variables_is_a_prefix(graph):
    pair = Pair(jnp.ones((2, 3)), jnp.ones(3))
    prefix = nnx.prefix(pair, {nnx.Param: 1, nnx.BatchStat: 0}, graph=graph)
    mapped = nnx.vmap(lambda m: m.w.sum() + m.n, in_axes=(prefix,), graph=graph)
    assert mapped(pair).tolist() == [3.0, 3.0, 3.0]


def test_symbols_work_in_each_mode():
    axes = nnx.StateAxes({nnx.Param: 1, ...: None})
    for mode in ({"graph_updates": False}, {"graph": False}):
        pair = Pair(jnp.ones((2, 3)))
        mapped = nnx.vmap(lambda m: m.w.sum(), in_axes=axes, **mode)
        assert mapped(pair).tolist() == [2.0, 2.0, 2.0]
        grads = nnx.grad(lambda m: m.n**2, argnums=nnx.DiffState(0, nnx.BatchStat), **mode)(pair)
        assert list(grads) == ["n"]


def test_invalid_axis_is_rejected():
    for wrong, shown in ((0.5, "0.5, a float"), ("x", "'x', a str")):
        with pytest.raises(TransformArgumentError, match=f"in_axes has {shown}, where an axis is"):
            nnx.vmap(lambda m: None, in_axes=wrong)
        with pytest.raises(TransformArgumentError, match=f"out_axes has {shown}, where an axis is"):
            nnx.vmap(lambda m: None, out_axes=({"a": wrong},))
        with pytest.raises(TransformArgumentError, match=f"in_axes has {shown}, where"):
            nnx.scan(lambda m: None, in_axes=(nnx.Carry, nnx.StateAxes({...: wrong})))
    with pytest.raises(
        TransformArgumentError, match="in_axes has a Carry, which only loops support"
    ):
        nnx.vmap(lambda m: None, in_axes=nnx.StateAxes({...: nnx.Carry}))
    with pytest.raises(
        TransformArgumentError, match="a Param is given where an axis or a sharding"
    ):
        nnx.vmap(lambda m: None, in_axes=(nnx.Param(0),))
    with pytest.raises(RoleError, match=r"in_axes gives StateAxes\(\{\.\.\.: 0\}\) to a ArrayImpl"):
        nnx.vmap(lambda x: x, in_axes=nnx.StateAxes({...: 0}))(jnp.ones(3))


def test_mismatched_prefix_is_shown():
    pair = Pair(jnp.ones(3), jnp.ones(3))
    with pytest.raises(RoleError, match=r"in_axes=\(0, 0\) has 2 entries, and the call has 1 arg"):
        nnx.vmap(lambda m: None, in_axes=(0, 0))(pair)
    with pytest.raises(RoleError, match=r"out_axes=\(0, 0, 0\) has a tuple of 3 entries at"):
        nnx.vmap(lambda m: (m.w * 1, 2.0), out_axes=(0, 0, 0))(pair)


def test_pairs_and_lists_of_filters():
    pair = Pair(jnp.ones((2, 3)), jnp.ones(3))
    axes = nnx.StateAxes([((nnx.BatchStat, "tag"), 0), (nnx.Not(nnx.BatchStat), 1)])
    mapped = nnx.vmap(lambda m, x: m.w.sum() + m.n + x, in_axes=[axes, None])
    assert mapped(pair, 1.0).tolist() == [4.0, 4.0, 4.0]


def test_catch_all_filter_must_be_last():
    with pytest.raises(StateFilterError, match="put it last"):
        nnx.StateAxes({...: None, nnx.Param: 0})


class Parts(nnx.Module):
    """Parameters at two depths, a count, and static attributes."""

    def __init__(self):
        self.w, self.count = nnx.Param(jnp.ones((4, 2))), nnx.BatchStat(jnp.ones(()))
        self.inner, self.k = nnx.Dict(v=nnx.Param(jnp.ones((4, 3)))), 3


@pytest.mark.parametrize("has_variables", [False, True])
def test_state_of_axes_or_layouts_is_one_filter_for_each_value(has_variables):
    def state(of_parameters, of_others):
        def role(path, x):
            of = of_parameters if isinstance(x, nnx.Param) else of_others
            return nnx.Variable(of) if has_variables else of

        return nnx.map_state(role, nnx.state(Parts()))

    axes = nnx.StateAxes(state(0, None))
    total = lambda m: m.w.sum() + m.inner.v.sum() + m.count  # noqa: E731
    assert sorted(axes.axes, key=str) == [0, None]
    assert nnx.vmap(total, in_axes=(axes,))(Parts()).tolist() == [6, 6, 6, 6]
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
    split, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())
    parts = Parts()

    @nnx.jit(in_shardings=(nnx.StateSharding(state(split, whole)),))
    def double(parts):
        parts.inner.v[...] *= 2

    double(parts)
    assert parts.inner.v[...].sharding.is_equivalent_to(split, 2)
    specs = nnx.StateSharding(state(P("d"), P()))
    auto = jax.make_mesh((4,), ("d",), (AxisType.Auto,), devices=jax.devices()[:4])
    mapped = nnx.shard_map(lambda m: total(m)[None], mesh=auto, in_specs=(specs,), out_specs=P("d"))
    assert mapped(Parts()).tolist() == [6, 6, 6, 6]


def test_missing_state_path_is_named():
    axes = nnx.StateAxes(nnx.State({"w": 0}))
    with pytest.raises(StateFilterError, match=r"has no filter for m\.count, a BatchStat"):
        nnx.vmap(lambda m: m.w, in_axes=(axes,))(Parts())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: nnx.vmap(abs, in_axes=nnx.StateSharding({...: 0}))(x), "has a StateSharding"),
        (lambda x: nnx.vmap(abs, out_axes=nnx.StateSharding({...: 0}))(x), "use nnx.StateAxes"),
        (lambda x: nnx.vmap(abs, in_axes=nnx.Carry)(x), "in_axes has a Carry"),
        (lambda x: nnx.jit(abs, in_shardings=nnx.StateAxes({...: None}))(x), "has a StateAxes"),
        (lambda x: nnx.jit(abs, out_shardings=nnx.StateAxes({...: None}))(x), "nnx.StateSharding"),
    ],
)
def test_roles_of_another_kind_are_refused(call, message):
    with pytest.raises(RoleKindError, match=message) as caught:
        call(jnp.ones(2))
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: nnx.jit(abs, in_shardings=nnx.StateSharding({...: None}))(x),
        lambda x: nnx.jit(lambda t: t["x"], in_shardings=(nnx.StateSharding({...: None}),))(
            {"x": x, "m": nnx.Param(x)}
        ),
        lambda x: nnx.scan(lambda c, x: (c, x), out_axes=(nnx.Carry, nnx.StateAxes({...: 0})))(
            0.0, x
        ),
    ],
    ids=["argument", "part of an argument", "result"],
)
def test_roles_of_state_for_values_without_state_are_refused(call):
    with pytest.raises(RoleError, match="which carries no state; give it an axis, a sharding or"):
        call(jnp.ones(2))
