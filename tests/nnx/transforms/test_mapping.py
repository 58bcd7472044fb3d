"""

Axes that come and go in metadata alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from weft import nnx
from weft.errors import (
    AxisSizeError,
    InconsistentAliasError,
    PartitionNameError,
    TransformArgumentError,
)
from weft.errors import VariableAxisError as AxisError

P = PartitionSpec
MESH = Mesh(jax.devices()[:1], ("d",))
XS = jnp.arange(3.0)


class Pair(nnx.Module):
    def __init__(self, w=2.0, n=0.0):
        self.w = nnx.Param(jnp.asarray(w))
        self.n = nnx.BatchStat(jnp.asarray(n))


def stacked():
    return Pair(jnp.arange(6.0).reshape(3, 2), jnp.zeros(3))


def differs(m, x):
    m.n[...] = x


@pytest.mark.parametrize("mode", [{}, {"graph_updates": False}, {"graph": False}], ids=str)
def test_differing_shared_variable_is_named(mode):
    m = nnx.Dict(part=[Pair()])
    shared = lambda m, x: differs(m.part[0], x)  # noqa: E731
    with pytest.raises(
        AxisError, match=r"vmap: m\.part\[0\]\.n is declared to be the same for all"
    ):
        nnx.vmap(shared, in_axes=(None, 0), **mode)(m, XS)
    assert float(m.part[0].n) == 0
    with pytest.raises(
        AxisError, match=r"vmap: the result\[0\] is declared to be the same for all"
    ):
        nnx.vmap(lambda x: (x, x), out_axes=(None, 0), **mode)(XS)
    with pytest.raises(AxisError, match=r"vmap: the result\['m'\]\.n is declared to be the same"):
        nnx.vmap(lambda x: {"m": Pair(1.0, x)}, out_axes=None, **mode)(XS)


def test_differing_parts_are_named():
    m = nnx.Dict(tree=nnx.Variable({"a": jnp.ones(()), "b": jnp.ones(())}))

    def f(m, x):
        m.tree.set_value({"a": jnp.ones(()), "b": x})

    with pytest.raises(AxisError, match=r"vmap: m\.tree\['b'\] is declared"):
        nnx.vmap(f, in_axes=(None, 0))(m, XS)


def test_axis_size_mismatch_is_shown_with_paths():
    m = Pair(jnp.ones(3), jnp.ones(2))
    with pytest.raises(AxisSizeError, match=r"sizes \(m\.n: 2, m\.w: 3, x\['k'\]: 4\)"):
        nnx.vmap(lambda m, x: None)(m, {"k": jnp.ones(4)})
    with pytest.raises(AxisSizeError, match=r"vmap: m\.n of shape \(2,\) has no axis 1; give it"):
        nnx.vmap(lambda m: None, in_axes=1)(m)
    with pytest.raises(AxisSizeError, match="vmap: no input is mapped, so the size is unknown"):
        nnx.vmap(lambda m: None, in_axes=None)(m)
    with pytest.raises(AxisSizeError, match=r"the size given: 2, m: 3"):
        nnx.vmap(lambda m: None, axis_size=2)(jnp.ones(3))


def test_exception_leaves_state_unchanged():
    m = stacked()
    before = nnx.clone(m)

    def f(m):
        m.w[...] += 1
        m.made = nnx.Cache(1.0)
        m.n.set_metadata(note="changed")
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        nnx.vmap(f)(m)
    assert nnx.graphdef(m) == nnx.graphdef(before)
    np.testing.assert_array_equal(m.w[...], before.w[...])
    assert nnx.vmap(lambda m: m.w.sum())(m).shape == (3,)


def test_no_leaks():
    with jax.checking_leaks():
        m = stacked()
        nnx.vmap(nnx.vmap(lambda m: differs(m, 1.0), in_axes=None, axis_size=2))(m)
    assert m.n[...].tolist() == [1.0, 1.0, 1.0]


def test_pmap_runs_on_devices():
    m = Pair(jnp.ones((1, 2)), jnp.zeros(1))

    def f(m, kind, x):
        m.n[...] += jax.lax.psum(x, "d")
        return m.w * x if kind == "times" else m.w

    mapped = nnx.pmap(f, axis_name="d", static_broadcasted_argnums=1)
    assert mapped(m, "times", jnp.full(1, 3.0)).tolist() == [[3.0, 3.0]]
    assert m.n[...].tolist() == [3.0]
    with pytest.raises(AxisSizeError):
        nnx.pmap(lambda x: x)(jnp.ones(1 + jax.device_count()))
    with pytest.raises(InconsistentAliasError, match=r"nnx\.pmap\(<lambda>\): the same BatchStat"):
        nnx.pmap(lambda a, b: None, in_axes=(0, None))(m, m)


def test_shard_map_runs_on_the_parts():
    m = Pair(jnp.arange(4.0), 0.0)
    specs = nnx.StateSharding({nnx.Param: P("d"), ...: P()})

    @nnx.shard_map(mesh=MESH, in_specs=(specs, P("d")), out_specs=(specs, P("d")))
    def f(m, x):
        m.n[...] += 1
        m.w[...] *= 2
        return m, m.w * x

    out, y = f(m, jnp.ones(4))
    assert out is m and y.tolist() == m.w[...].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert float(m.n) == 1


def test_loop_roles_are_rejected():
    with pytest.raises(TransformArgumentError, match="in_axes has a Carry, which only loops"):
        nnx.vmap(lambda m: None, in_axes=(nnx.Carry,))


def param(*shape: int, names: tuple[str | None, ...]) -> nnx.Param:
    return nnx.Param(jnp.ones(shape), out_sharding=names, eager_sharding=False)


@pytest.mark.parametrize("graph", [True, False])
def test_function_under_vmap_names_the_axis(graph: bool):
    seen = []

    def f(w: nnx.Param) -> nnx.Param:
        seen.append(w.out_sharding)
        return param(4, names=("out",))

    w = param(3, 2, names=("layers", "in"))
    named = nnx.transform_metadata(f, partition="layers", graph=graph)
    made = nnx.vmap(named, graph=graph)(w)
    assert seen == [("in",)]
    assert w.out_sharding == ("layers", "in") and made.out_sharding == ("layers", "out")
    assert made.shape == (3, 4)


def test_function_under_plain_jax():
    @jax.vmap
    @nnx.transform_metadata(partition="layers")
    def create(x: jax.Array) -> nnx.Param:
        return nnx.Param(x, out_sharding=("in",), eager_sharding=False)

    assert create(jnp.ones((3, 2))).out_sharding == ("layers", "in")


def test_axes_of_arguments_and_results():
    def f(shared: nnx.Param, own: nnx.Param) -> nnx.Param:
        assert (shared.out_sharding, own.out_sharding) == (("a",), ("b",))
        return param(2, names=("c",))

    named = nnx.transform_metadata(f, in_axes=(None, 1), out_axes=1, partition="n")
    mapped = nnx.vmap(named, in_axes=(None, 1), out_axes=1)
    made = mapped(param(4, names=("a",)), param(5, 3, names=("b", "n")))
    assert made.out_sharding == ("c", "n") and made.shape == (2, 3)


def test_axis_name_must_match():
    w = param(3, names=("layers",))
    with pytest.raises(PartitionNameError, match="layers"):
        jax.vmap(nnx.transform_metadata(lambda w: w[...], partition="heads"))(w)


@pytest.mark.parametrize("nested", [False, True])
def test_axis_errors_name_the_variable(nested):
    model = nnx.Dict(layers=[nnx.Dict(w=param(3, names=("layers",)))])

    @nnx.vmap(in_axes=0, transform_metadata={nnx.PARTITION_NAME: "heads"})
    def f(model):
        return model.layers[0].w[...]

    with pytest.raises(PartitionNameError) as caught:
        (nnx.jit(lambda model: f(model)) if nested else f)(model)
    assert caught.value.path == "model.layers[0].w"
